"""BERT and RoBERTa: encoders, whose tokens see each other both ways, with learned positions and norms behind the halves of a
layer.

Sources: BERT, arXiv 1810.04805; RoBERTa, arXiv 1907.11692; XLM-RoBERTa, arXiv 1911.02116; modeling_bert.py, modeling_roberta.py
and modeling_xlm_roberta.py of transformers. RoBERTa has positions that begin behind that of its padding. XLM-RoBERTa is RoBERTa
with another vocabulary. A text with a padding token in it is computed as with any other token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.models.architectures import Architecture, Head, HeadLayer
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.program import Program
from penstock.types.model_spec import ModelSpec


def describe(spec: ModelSpec) -> Program:
    """The program of one step."""
    build = Decoder(spec)
    x = build.norm(build.add_positions(build.add_types(build.embed())), "embed_norm", "x")
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, x)
        x, attended = build.gather_after_last(layer, x, attended)
        x = build.norm(build.add_output(layer, x, attended), f"{at}.post_attn_norm", "x")
        x = build.norm(build.add_mlp(layer, x, x), f"{at}.post_mlp_norm", "x")
    return build.finish(x)


_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def _with_defaults(values: Mapping[str, Any], **own: Any) -> Mapping[str, Any]:
    """`tie_word_embeddings` is of a head that is not computed."""
    found = {**_DEFAULTS, **own, **{key: value for key, value in values.items() if value is not None}}
    return {**found, "rms_norm_eps": found["layer_norm_eps"], "tie_word_embeddings": False}


def _bert_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return _with_defaults(values, vocab_size=30522)


def _roberta_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """As BERT's, but for the positions: their table has rows for the padding and those before it, too."""
    found = dict(_with_defaults(values, vocab_size=50265, pad_token_id=1))
    if type(found["max_position_embeddings"]) is int and type(found["pad_token_id"]) is int:
        found["max_position_embeddings"] -= found["pad_token_id"] + 1
    return found


def _of_bert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    num_types = config.require("type_vocab_size", int)
    if not 0 < num_types <= _MAX_TYPES:
        raise config.error(f"type_vocab_size is {num_types}")
    spec = replace(spec, norm="layer", has_norm_bias=True, num_types=num_types)
    spec = spec.with_plain_mlps(read_activation(config, "hidden_act", "gelu"))
    return spec.with_attention(
        lambda _, attention: replace(attention, rotation=None, mask="all", has_qkv_bias=True, has_o_bias=True)
    )


_MAX_TYPES = 16


def _of_roberta(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    padding = config.require("pad_token_id", int)
    if not 0 <= padding < _MAX_TYPES:
        raise config.error(f"pad_token_id is {padding}")
    return replace(_of_bert(config, spec), first_position=padding + 1)


def _name(name: str) -> str:
    """Models with a head have `bert.` or `roberta.` before the names of the others. Files of the first releases call a norm's
    weight and bias gamma and beta."""
    bare = name.removeprefix("bert.").removeprefix("roberta.")
    return bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def bert_head(hf_class: str, _: JsonFile) -> Head | None:
    """The head of a class of BERT."""
    if hf_class.endswith("ForSequenceClassification"):
        return Head("first", (HeadLayer("pooler.dense", activation="tanh"), HeadLayer("classifier", is_last=True)))
    if hf_class.endswith("ForTokenClassification"):
        return Head("each", (HeadLayer("classifier", is_last=True),))
    return None


def _roberta_head(hf_class: str, config: JsonFile) -> Head | None:
    if hf_class.endswith("ForSequenceClassification"):
        layers = (HeadLayer("classifier.dense", activation="tanh"), HeadLayer("classifier.out_proj", is_last=True))
        return Head("first", layers)
    return bert_head(hf_class, config)


_LAYER = {
    "attention.self.query.weight": "q",
    "attention.self.query.bias": "q_bias",
    "attention.self.key.weight": "k",
    "attention.self.key.bias": "k_bias",
    "attention.self.value.weight": "v",
    "attention.self.value.bias": "v_bias",
    "attention.output.dense.weight": "o",
    "attention.output.dense.bias": "o_bias",
    "attention.output.LayerNorm.weight": "post_attn_norm",
    "attention.output.LayerNorm.bias": "post_attn_norm_bias",
    "intermediate.dense.weight": "up",
    "intermediate.dense.bias": "up_bias",
    "output.dense.weight": "down",
    "output.dense.bias": "down_bias",
    "output.LayerNorm.weight": "post_mlp_norm",
    "output.LayerNorm.bias": "post_mlp_norm_bias",
}
BERT = Architecture(
    describe=describe,
    is_encoder=True,
    of_hf=_of_bert,
    hf_values=_bert_values,
    hf_name=_name,
    hf_top={
        "embeddings.word_embeddings.weight": "embed",
        "embeddings.position_embeddings.weight": "positions",
        "embeddings.token_type_embeddings.weight": "types",
        "embeddings.LayerNorm.weight": "embed_norm",
        "embeddings.LayerNorm.bias": "embed_norm_bias",
    },
    hf_layers="encoder.layer.",
    hf_layer=_LAYER,
    hf_head=bert_head,
    hf_unread=("embeddings.position_ids", "cls.", "pooler."),
)
ROBERTA = replace(
    BERT, of_hf=_of_roberta, hf_values=_roberta_values, hf_head=_roberta_head, hf_unread=(*BERT.hf_unread, "lm_head.")
)
