"""DeBERTa 2 and 3: BERT with disentangled attention, and without other positions.

Sources: transformers' modeling_deberta_v2.py; arXiv 2006.03654 and 2111.09543 (DeBERTa 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import checks
from penstock.models.architectures import Head, HeadLayer, with_biases
from penstock.models.bert import BERT, bare_name, bert_values, describe, head_of_hf, with_bert
from penstock.models.hf_config import JsonFile, read_activation
from penstock.types.model_spec import ModelSpec, RelativeSpec


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    found = bert_values(values, vocab_size=128100, layer_norm_eps=1e-7, type_vocab_size=0, max_relative_positions=-1)
    if type(found["max_relative_positions"]) is int and found["max_relative_positions"] < 1:
        found["max_relative_positions"] = found["max_position_embeddings"]
    return found


def _words(value: object) -> set[str]:
    """Return the words of a list, or of a text with bars between them, in lower case as transformers has them."""
    words = value.split("|") if isinstance(value, str) else value if isinstance(value, list) else ()
    return {str(word).strip().lower() for word in words}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(type_vocab_size=0, conv_kernel_size=0, attention_head_size=spec.attentions[0].head_dim)
    config.only_all(embedding_size=spec.hidden_size, pooler_hidden_size=spec.hidden_size)
    for key, value in {"relative_attention": True, "position_biased_input": False, "share_att_key": True}.items():
        if config.require(key, bool) is not value:
            raise checks.unsupported(config.path, f"{key} is {not value}", f"only {value} is")
    if "layer_norm" not in _words(config.require("norm_rel_ebd", str)):
        raise checks.unsupported(config.path, f"norm_rel_ebd is {config.values['norm_rel_ebd']!r:.80}", "only 'layer_norm' is")
    kinds = config.values.get("pos_att_type")
    if not {"c2p", "p2c"} <= _words(kinds):
        raise checks.unsupported(config.path, f"pos_att_type is {kinds!r:.80}", "only c2p and p2c together are")
    farthest, num_buckets = config.require("max_relative_positions", int), config.get("position_buckets", int) or -1
    relative = RelativeSpec(span=farthest) if num_buckets < 0 else RelativeSpec(span=num_buckets, farthest=farthest)
    if not 4 <= relative.span <= farthest <= 1 << 16:
        raise config.error(f"position_buckets is {num_buckets}, and max_relative_positions is {farthest}")
    spec = with_bert(spec, read_activation(config, "hidden_act", "gelu"))
    return spec.with_attention_fields(relative=relative, scale=(3 * spec.attentions[0].head_dim) ** -0.5)


def _head(hf_class: str, config: JsonFile) -> Head | None:
    if not hf_class.endswith("ForSequenceClassification"):  # nothing reads the pooler
        return head_of_hf((), hf_class, config)
    is_tanh = config.values.get("pooler_hidden_act") == "tanh"
    activation = "tanh" if is_tanh else read_activation(config, "pooler_hidden_act", "gelu")
    return head_of_hf(
        (HeadLayer("pooler.dense", activation=activation), HeadLayer("classifier", is_last=True)), hf_class, config
    )


DEBERTA_V2 = replace(
    BERT,
    describe=partial(describe, has_positions=False),
    of_hf=_of_hf,
    hf_values=_values,
    hf_name=lambda name: bare_name(name.removeprefix("deberta.")),
    hf_top={
        "embeddings.word_embeddings.weight": "embed",
        "encoder.rel_embeddings.weight": "relative",
        **with_biases({"embeddings.LayerNorm": "embed_norm", "encoder.LayerNorm": "relative_norm"}),
    },
    hf_layer={
        **BERT.hf_layer,
        **with_biases({f"attention.self.{name}_proj": short for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}),
    },
    hf_head=_head,
    hf_mlm_head=None,
    hf_unread=(
        *BERT.hf_unread,
        *("embeddings.position_embeddings.", "embeddings.word_embeddings._weight"),
        *("lm_predictions.", "mask_predictions."),
    ),
)
