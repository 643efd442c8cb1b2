"""BERT, RoBERTa, DistilBERT and Nomic-BERT: encoders with norms behind the halves of a layer.

- RoBERTa's positions begin after that of its padding. XLM-RoBERTa is RoBERTa with another vocabulary. A padding token within a
  text is computed as any other token.
- DistilBERT has no token types.
- Nomic-BERT has rotary positions, gated MLPs, and no biases but those of norms.

Sources: arXiv 1810.04805, 1907.11692, 1911.02116, 1910.01108 and 2402.01613; transformers' modeling_bert.py,
modeling_roberta.py, modeling_xlm_roberta.py, modeling_distilbert.py and modeling_nomic_bert.py, whose names Nomic's first
files do not have yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Head, HeadLayer, Parts, with_biases
from penstock.models.decoder import Decoder
from penstock.models.gguf_tensors import matrix_shape
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.layers import with_gated_mlps
from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec, *, has_positions: bool = True, has_down_bias: bool = False) -> Program:
    """Return the program of one step.

    `has_positions`: positions are learned embeddings. `has_down_bias`: the last projection of an MLP has a bias, though the
    others have none.
    """
    build = Decoder(spec)
    x = build.add_types(build.embed())
    x = build.norm(build.add_positions(x) if has_positions else x, "embed_norm", "x")
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, x)
        x, attended = build.gather_after_last(layer, x, attended)
        x = build.norm(build.add_output(layer, x, attended), f"{at}.post_attn_norm", "x")
        x = build.norm(build.add_mlp(layer, x, x, has_down_bias=has_down_bias), f"{at}.post_mlp_norm", "x")
    return build.finish(x)


_MAX_TYPES = 16
_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def values_with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with transformers' defaults. `tie_word_embeddings` is about a head that is not computed."""
    found = {**_DEFAULTS, **{key: value for key, value in values.items() if value is not None}}
    return {**found, "rms_norm_eps": found["layer_norm_eps"], "tie_word_embeddings": False}


def values_after_padding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model whose table of positions also has rows for the padding and for what is before it."""
    found = values_with_defaults(values)
    padding = found.setdefault("pad_token_id", 1)
    if type(found["max_position_embeddings"]) is int and type(padding) is int:
        found["max_position_embeddings"] -= padding + 1
    return found


def of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a BERT without types, whose positions begin at the first row."""
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    return _with_bert(spec, read_activation(config, "hidden_act", "gelu"))


def _with_bert(spec: ModelSpec, activation: Activation) -> ModelSpec:
    """Everything has a bias."""
    spec = replace(spec, norm="layer", has_norm_bias=True).with_plain_mlps(activation)
    return with_biased_attention(spec.with_layers(lambda _, layer: replace(layer, mlp=replace(layer.mlp, has_bias=True))))


def with_biased_attention(spec: ModelSpec) -> ModelSpec:
    """Return the spec whose tokens see each other both ways, without rotations and with biases on all projections."""
    return spec.with_attention(
        lambda _, attention: replace(attention, rotation=None, mask="all", has_qkv_bias=True, has_o_bias=True)
    )


def _of_bert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return replace(of_hf(config, spec), num_types=read_num_types(config))


def read_num_types(config: JsonFile) -> int:
    """Return `type_vocab_size`. Raises ModelError if it is out of range."""
    num_types = config.require("type_vocab_size", int)
    if not 0 < num_types <= _MAX_TYPES:
        raise config.error(f"type_vocab_size is {num_types}")
    return num_types


def _of_roberta(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    padding = config.require("pad_token_id", int)
    if not 0 <= padding < _MAX_TYPES:
        raise config.error(f"pad_token_id is {padding}")
    return replace(_of_bert(config, spec), first_position=padding + 1)


def bare_name(name: str) -> str:
    """Return a tensor's name in a model without a head; with a head, `bert.` or the like stands before it.

    Files of the first releases call a norm's weight and bias gamma and beta.
    """
    bare = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("distilbert.")
    return bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _hf_head(scores: tuple[HeadLayer, ...], hf_class: str, _: JsonFile) -> Head | None:
    """Return the head of a class. `scores` are the layers behind the first token's state if it classifies whole texts."""
    if hf_class.endswith("ForSequenceClassification"):
        return Head("first", scores)
    if hf_class.endswith("ForTokenClassification"):
        return Head("each", (HeadLayer("classifier", is_last=True),))
    return None


_bert_head = partial(_hf_head, (HeadLayer("pooler.dense", activation="tanh"), HeadLayer("classifier", is_last=True)))
_distilbert_head = partial(_hf_head, (HeadLayer("pre_classifier", activation="relu"), HeadLayer("classifier", is_last=True)))
roberta_head = partial(
    _hf_head, (HeadLayer("classifier.dense", activation="tanh"), HeadLayer("classifier.out_proj", is_last=True))
)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """The converter leaves out the rows of positions that no text has."""
    return replace(_with_bert(spec, "gelu"), num_types=_num_types_of_gguf(file))


def _num_types_of_gguf(file: GgufFile) -> int:
    """Return the rows of the table of types, 0 without one. Raises ModelError for too many."""
    table = file.tensors.get("token_types.weight")
    num_types = 0 if table is None else matrix_shape(table)[0]
    if num_types > _MAX_TYPES:
        raise file.error(f"token_types.weight has {num_types} rows")
    return num_types


def _gguf_head(file: GgufFile) -> Head | None:
    """Return the head of a RoBERTa. The converter leaves out the first layer of a BERT's head."""
    if "cls.output.weight" not in file.tensors and "cls.weight" not in file.tensors:
        return None
    if "cls.output.weight" not in file.tensors or "cls.weight" not in file.tensors:
        raise ModelError(
            f"{file.path}: the head has one layer of two, cls and cls.output: its scores would be wrong.",
            remedy="Use the Hugging Face directory of the model.",
        )
    return Head("first", (HeadLayer("cls", activation="tanh"), HeadLayer("cls.output", is_last=True)))


_GGUF_TOP = {
    "token_embd.weight": "embed",
    **with_biases({"token_embd_norm": "embed_norm"}),
    "token_types.weight": "types",
}
_GGUF_LAYER = {**GGUF_LAYER, **with_biases({"attn_output_norm": "post_attn_norm", "layer_output_norm": "post_mlp_norm"})}
BERT = Architecture(
    describe=describe,
    is_encoder=True,
    of_hf=_of_bert,
    hf_values=values_with_defaults,
    hf_name=bare_name,
    hf_top={
        "embeddings.word_embeddings.weight": "embed",
        "embeddings.position_embeddings.weight": "positions",
        "embeddings.token_type_embeddings.weight": "types",
        **with_biases({"embeddings.LayerNorm": "embed_norm"}),
    },
    hf_layers="encoder.layer.",
    hf_layer=with_biases(
        {
            "attention.self.query": "q",
            "attention.self.key": "k",
            "attention.self.value": "v",
            "attention.output.dense": "o",
            "attention.output.LayerNorm": "post_attn_norm",
            "intermediate.dense": "up",
            "output.dense": "down",
            "output.LayerNorm": "post_mlp_norm",
        }
    ),
    hf_head=_bert_head,
    hf_unread=("embeddings.position_ids", "cls.", "pooler."),
    of_gguf=_of_gguf,
    gguf_top={**_GGUF_TOP, "position_embd.weight": "positions"},
    gguf_layer=_GGUF_LAYER,
    gguf_head=_gguf_head,
)
ROBERTA = replace(
    BERT,
    of_hf=_of_roberta,
    hf_values=lambda values: values_after_padding({"vocab_size": 50265, **values}),
    hf_head=roberta_head,
    hf_unread=(*BERT.hf_unread, "lm_head."),
)


# DistilBERT

_DISTILBERT_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}


def _distilbert_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The epsilon of the norms is fixed in transformers."""
    found = {"num_hidden_layers": 6, **{_DISTILBERT_KEYS.get(key, key): value for key, value in values.items()}}
    return values_with_defaults({**found, "layer_norm_eps": 1e-12})


DISTILBERT = replace(
    BERT,
    of_hf=of_hf,
    hf_values=_distilbert_values,
    hf_layers="transformer.layer.",
    hf_layer=with_biases(
        {
            "attention.q_lin": "q",
            "attention.k_lin": "k",
            "attention.v_lin": "v",
            "attention.out_lin": "o",
            "sa_layer_norm": "post_attn_norm",
            "ffn.lin1": "up",
            "ffn.lin2": "down",
            "output_layer_norm": "post_mlp_norm",
        }
    ),
    hf_head=_distilbert_head,
    hf_unread=(*BERT.hf_unread, "vocab_"),
)


# Nomic-BERT

_OLD_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
_OLD_SWITCHES = (
    *("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm", "parallel_block", "causal"),
    *("rotary_emb_interleaved", "num_experts", "rotary_emb_scale_base", "rotary_scaling_factor"),
)


def _nomic_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 1000.0}
    found |= {_OLD_KEYS.get(key, key): value for key, value in values.items() if value is not None}
    return values_with_defaults(found)


def _of_nomic(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    for switch in _OLD_SWITCHES:
        config.only(switch, False)
    config.only("activation_function", "swiglu")
    return _with_nomic(spec, read_activation(config, "hidden_act", "silu"), read_num_types(config))


def _with_nomic(spec: ModelSpec, activation: Activation, num_types: int) -> ModelSpec:
    spec = replace(with_gated_mlps(spec, activation), norm="layer", has_norm_bias=True, num_types=num_types)
    return spec.with_attention(lambda _, attention: replace(attention, mask="all"))


def _nomic_name(name: str) -> str:
    bare = name.removeprefix("nomic_bert.").removeprefix("bert.").replace("encoder.layers.", "layers.", 1)
    return bare_name(bare.replace("emb_ln.", "embeddings.LayerNorm.", 1) if bare.startswith("emb_ln.") else bare)


NOMIC_BERT = Architecture(
    describe=partial(describe, has_positions=False),
    is_encoder=True,
    of_hf=_of_nomic,
    hf_values=_nomic_values,
    hf_name=_nomic_name,
    hf_top=BERT.hf_top,
    hf_layers="layers.",
    hf_layer={
        **HF_LAYER,
        **with_biases(
            {
                "post_attention_layernorm": "post_attn_norm",
                "post_mlp_layernorm": "post_mlp_norm",
                "norm1": "post_attn_norm",
                "norm2": "post_mlp_norm",
            }
        ),
        "attn.Wqkv.weight": Parts(("q", "k", "v")),
        "attn.out_proj.weight": "o",
        "mlp.fc11.weight": "up",
        "mlp.fc12.weight": "gate",
        "mlp.fc2.weight": "down",
    },
    hf_head=_bert_head,
    hf_unread=BERT.hf_unread,
    of_gguf=lambda file, spec: _with_nomic(spec, "silu", _num_types_of_gguf(file)),
    gguf_top=_GGUF_TOP,
    gguf_layer={**_GGUF_LAYER, "attn_qkv.weight": Parts(("q", "k", "v"))},
)
