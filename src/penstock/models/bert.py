"""Encoders: BERT and its kin, GTE, ModernBERT, EuroBERT and NeoBERT.

Sources: modeling_NAME.py of transformers; arXiv 1810.04805 (BERT), 1907.11692 (RoBERTa), 1911.02116 (XLM-RoBERTa), 2105.00572
(its XL), 2003.10555 (ELECTRA), 1910.01108 (DistilBERT), 2402.01613 (Nomic-BERT), 2502.07972 (its experts, as in vLLM's
bert_with_rope.py and llama.cpp's bert.cpp), 2004.09297 (MPNet), 2412.13663 (ModernBERT), 2407.19669 (GTE, also its makers'
modeling.py), 2310.19923 (Jina BERT 2, as in llama.cpp's jina-bert-v2.cpp), 2409.10173 (Jina 3), 2503.05500 (EuroBERT),
2502.19587 (NeoBERT, also its makers' model.py) and 2108.12409 (ALiBi).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models import checks, llama, rope
from penstock.models.architectures import (
    GATE_AND_UP,
    GGUF_LAYER,
    GGUF_TOP,
    HF_LAYER,
    OLD_KEYS,
    QKV,
    QKV_BIAS,
    Architecture,
    Head,
    HeadLayer,
    Made,
    Parts,
    Run,
    with_biases,
    with_defaults,
)
from penstock.models.decoder import Decoder
from penstock.models.gguf_file import GgufFile, matrix_shape
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.layers import (
    GGUF_EXPERTS,
    local_layers_of_gguf,
    read_gguf_experts,
    rope_base,
    with_both_sides,
    with_experts,
    with_gated_mlps,
    with_gpt_layers,
    with_local_base,
    with_windows,
)
from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, ExpertsMlp, ModelSpec, Pooling, Rotation

_log = logging.getLogger(__name__)


def describe(spec: ModelSpec, *, has_positions: bool = True, has_down_bias: bool = False) -> Program:
    build = Decoder(spec)
    x = build.add_types(build.embed())
    x = build.norm(build.add_positions(x) if has_positions else x, "embed_norm", "x")
    if spec.embed_size:
        x = build.linear(x, "embed_project", "projected", spec.hidden_size, bias="embed_project_bias")
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


def bert_values(values: Mapping[str, Any], renamed: Mapping[str, str] = {}, **defaults: Any) -> dict[str, Any]:
    found = with_defaults(values, {**_DEFAULTS, **defaults}, renamed)
    return {**found, "rms_norm_eps": found["layer_norm_eps"], "tie_word_embeddings": False}


def _values_after_padding(values: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return config.json with defaults. RoBERTa does not use the position embeddings up to the padding id: subtract these."""
    found = bert_values(values, pad_token_id=1, **defaults)
    if type(found["max_position_embeddings"]) is int and type(found["pad_token_id"]) is int:
        found["max_position_embeddings"] -= found["pad_token_id"] + 1
    return found


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return with_bert(spec, read_activation(config, "hidden_act", "gelu"))


def with_bert(spec: ModelSpec, activation: Activation) -> ModelSpec:
    spec = with_gpt_layers(with_gated_mlps(spec, activation, has_bias=True), activation)
    return _with_biased_attention(spec)


def _with_rotary_bert(spec: ModelSpec, activation: Activation, num_types: int) -> ModelSpec:
    """Return the spec with BERT's layers, biases and token types, but keep its rotary positions."""
    turn = spec.attentions[0].rotation
    found = replace(with_bert(spec, activation), num_types=num_types)
    return found.with_attention_fields(rotation=turn)


def _with_biased_attention(spec: ModelSpec) -> ModelSpec:
    return spec.with_attention_fields(rotation=None, mask="all", has_qkv_bias=True, has_o_bias=True)


def of_bert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return replace(_of_hf(config, spec), num_types=_read_num_types(config))


def _read_num_types(config: JsonFile) -> int:
    num_types = config.require("type_vocab_size", int)
    if not 0 < num_types <= _MAX_TYPES:
        raise config.error(f"type_vocab_size is {num_types}")
    return num_types


def _of_roberta(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    padding = config.require("pad_token_id", int)
    if not 0 <= padding < _MAX_TYPES:
        raise config.error(f"pad_token_id is {padding}")
    return replace(of_bert(config, spec), first_position=padding + 1)


def bare_name(name: str) -> str:
    """Return a tensor's name without a prefix such as `bert.`, and with `LayerNorm.weight` for `LayerNorm.gamma`."""
    bare = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("distilbert.")
    return bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def head_of_hf(scores: tuple[HeadLayer, ...], hf_class: str, _: JsonFile) -> Head | None:
    if hf_class.endswith("ForSequenceClassification"):
        return Head("first", scores)
    if hf_class.endswith("ForTokenClassification"):
        return Head("each", (HeadLayer("classifier", is_last=True),))
    return None


_bert_head = partial(head_of_hf, (HeadLayer("pooler.dense", activation="tanh"), HeadLayer("classifier", is_last=True)))
_distilbert_head = partial(head_of_hf, (HeadLayer("pre_classifier", activation="relu"), HeadLayer("classifier", is_last=True)))
_roberta_head = partial(
    head_of_hf, (HeadLayer("classifier.dense", activation="tanh"), HeadLayer("classifier.out_proj", is_last=True))
)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    return replace(with_bert(spec, "gelu"), num_types=_num_types_of_gguf(file))


def _num_types_of_gguf(file: GgufFile) -> int:
    table = file.tensors.get("token_types.weight")
    num_types = 0 if table is None else matrix_shape(table)[0]
    if num_types > _MAX_TYPES:
        raise file.error(f"token_types.weight has {num_types} rows")
    return num_types


def _gguf_head(file: GgufFile) -> Head | None:
    """Return the model's head, or None. Raises ModelError if one of its two layers is missing, as in a converted BERT."""
    has_first, has_last = "cls.weight" in file.tensors, "cls.output.weight" in file.tensors
    if has_first != has_last:
        raise ModelError(
            f"{file.path}: the head needs both cls and cls.output, and one of them is missing: its scores would be wrong.",
            remedy="Use the Hugging Face directory of the model.",
        )
    return Head("first", (HeadLayer("cls", activation="tanh"), HeadLayer("cls.output", is_last=True))) if has_first else None


_GGUF_TOP = {
    "token_embd.weight": "embed",
    **with_biases({"token_embd_norm": "embed_norm"}),
    "token_types.weight": "types",
}
_GGUF_LAYER = {**GGUF_LAYER, **with_biases({"attn_output_norm": "post_attn_norm", "layer_output_norm": "post_mlp_norm"})}


def _bert_mlm_head(config: JsonFile) -> Head:
    at = "cls.predictions"
    activation = read_activation(config, "hidden_act", "gelu")
    layer = HeadLayer(f"{at}.transform.dense", activation=activation, norm=f"{at}.transform.LayerNorm")
    return Head("sparse", (layer,), bias=f"{at}.bias")


def _roberta_mlm_head(_: JsonFile) -> Head:
    layer = HeadLayer("lm_head.dense", activation="gelu", norm="lm_head.layer_norm")
    return Head("sparse", (layer,), bias="lm_head.bias")


def _distilbert_mlm_head(config: JsonFile) -> Head:
    activation = read_activation(config, "hidden_act", "gelu")
    layer = HeadLayer("vocab_transform", activation=activation, norm="vocab_layer_norm")
    return Head("sparse", (layer,), bias="vocab_projector.bias")


BERT = Architecture(
    describe=describe,
    is_encoder=True,
    of_hf=of_bert,
    hf_values=bert_values,
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
    hf_mlm_head=_bert_mlm_head,
    hf_unread=("embeddings.position_ids", "cls.", "pooler."),
    of_gguf=_of_gguf,
    gguf_top={**_GGUF_TOP, "position_embd.weight": "positions"},
    gguf_layer=_GGUF_LAYER,
    gguf_head=_gguf_head,
)
ROBERTA = replace(
    BERT,
    of_hf=_of_roberta,
    hf_values=partial(_values_after_padding, vocab_size=50265),
    hf_head=_roberta_head,
    hf_mlm_head=_roberta_mlm_head,
    hf_unread=(*BERT.hf_unread, "lm_head."),
)
XLM_ROBERTA_XL = replace(
    ROBERTA,
    hf_mlm_head=None,
    describe=partial(llama.describe, has_positions=True),
    hf_values=partial(
        _values_after_padding,
        vocab_size=250880,
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=10240,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    ),
    hf_top={**BERT.hf_top, **with_biases({"encoder.LayerNorm": "norm"})},
    hf_layer={**BERT.hf_layer, **with_biases({"attention.self_attn_layer_norm": "attn_norm", "LayerNorm": "mlp_norm"})},
)
"""A pre-norm model of 3.5 billion parameters or more."""


# ELECTRA: BERT, but embeddings may be narrower than the layers.


def _of_electra(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    embed_size = config.require("embedding_size", int)
    if not 0 < embed_size <= spec.hidden_size:
        raise checks.unsupported(config.path, f"embedding_size is {embed_size}", f"1 to hidden_size, {spec.hidden_size}, are")
    return replace(of_bert(config, spec), embed_size=embed_size if embed_size < spec.hidden_size else 0)


ELECTRA = replace(
    BERT,
    hf_mlm_head=None,
    of_hf=_of_electra,
    hf_values=partial(bert_values, embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024),
    hf_name=lambda name: bare_name(name.removeprefix("electra.")),
    hf_top={**BERT.hf_top, **with_biases({"embeddings_project": "embed_project"})},
    hf_head=partial(
        head_of_hf, (HeadLayer("classifier.dense", activation="gelu"), HeadLayer("classifier.out_proj", is_last=True))
    ),
    hf_unread=(*BERT.hf_unread, "generator_", "discriminator_predictions."),
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
    fixed = {key: value for key, value in values.items() if key != "layer_norm_eps"}
    return bert_values(fixed, _DISTILBERT_KEYS, num_hidden_layers=6)


DISTILBERT = replace(
    BERT,
    of_hf=_of_hf,
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
    hf_mlm_head=_distilbert_mlm_head,
    hf_unread=(*BERT.hf_unread, "vocab_"),
)


# Nomic-BERT: RoPE, and gated MLPs without biases; or plain MLPs with biases, with experts in place of some of them.

_OLD_KEYS = {
    **OLD_KEYS,
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
_OLD_SWITCHES = (
    *("prenorm", "use_rms_norm", "parallel_block", "causal"),
    *("rotary_emb_interleaved", "rotary_emb_scale_base", "rotary_scaling_factor"),
)
_OLD_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_EXPERTS: Mapping[str, Any] = {"activation": "gelu", "is_renormalised": False, "has_gate": False}


def _nomic_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return bert_values(values, _OLD_KEYS, vocab_size=30528, max_position_embeddings=2048, rope_theta=1000.0)


def _of_nomic(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(**dict.fromkeys(_OLD_SWITCHES, False))
    kind, num_types = config.get("activation_function", str) or "swiglu", _read_num_types(config)
    if kind not in ("swiglu", "gelu"):
        raise checks.unsupported(config.path, f"activation_function is {kind[:80]!r}", "swiglu and gelu are")
    config.only_all(**dict.fromkeys(_OLD_BIASES, kind == "gelu"))
    if kind == "swiglu":
        config.only("num_experts", False)
        return _with_gated(spec, read_activation(config, "hidden_act", "silu"), num_types=num_types)
    config.only("hidden_act", "gelu")
    spec = _with_rotary_bert(spec, "gelu", num_types)
    every = config.get("moe_every_n_layers", int) or 0
    if every <= 0:
        return spec
    config.only_all(moe_normalize_expert_weights=False, expert_choice_router=False, num_shared_experts=0, ffn_div=1)
    mlp = ExpertsMlp(
        num_experts=config.require("num_experts", int),
        num_experts_per_token=config.require("moe_top_k", int),
        intermediate_size=config.require("intermediate_size", int),
        has_sum_bias=True,
        **_EXPERTS,
    )
    return _with_spaced_experts(spec, mlp, every, config.path)


def _with_spaced_experts(spec: ModelSpec, mlp: ExpertsMlp, every: int, path: Path) -> ModelSpec:
    """Return the spec with experts in layers 1, 1 + `every` and so on. Raises ModelError if `every` is less than 2."""
    if every < 2:
        raise checks.unsupported(path, f"moe_every_n_layers is {every}", "2 or more are")
    return with_experts(spec, mlp, path, dense=[layer for layer in range(spec.num_layers) if layer % every != 1])


def _of_nomic_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the keys of experts. Files lack the bias of their sum: llama.cpp's converter leaves it out."""
    words = "%s: llama.cpp's converter drops the bias of the experts' output, so embeddings differ from the model directory's"
    _log.warning(words, file.path)
    key = file.architecture
    for name in ("expert_shared_count", "expert_group_count", "leading_dense_block_count", "expert_weights_norm"):
        if value := file.metadata.get(f"{key}.{name}"):
            raise checks.unsupported(file.path, f"{key}.{name} is {str(value)[:80]}", "0 is")
    spec = _with_rotary_bert(spec, "gelu", _num_types_of_gguf(file))
    every = file.require(f"{key}.moe_every_n_layers", int)
    return _with_spaced_experts(spec, read_gguf_experts(file, **_EXPERTS), every, file.path)


def _with_gated(spec: ModelSpec, activation: Activation, *, has_norm_bias: bool = True, num_types: int = 0) -> ModelSpec:
    spec = replace(with_gated_mlps(spec, activation), norm="layer", has_norm_bias=has_norm_bias, num_types=num_types)
    return spec.with_attention_fields(mask="all")


def _nomic_name(name: str) -> str:
    bare = name.removeprefix("nomic_bert.").removeprefix("bert.").replace("encoder.layers.", "layers.", 1)
    return bare_name(bare.replace("emb_ln.", "embeddings.LayerNorm.", 1) if bare.startswith("emb_ln.") else bare)


_POST_NORM_LAYER: Mapping[str, str] = {
    **HF_LAYER,
    **with_biases({"post_attention_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_mlp_norm"}),
}
"""Names of a layer's tensors in Nomic-BERT, GTE and Jina 3, as transformers writes them."""
NOMIC_BERT = replace(
    BERT,
    hf_mlm_head=None,
    describe=partial(describe, has_positions=False),
    of_hf=_of_nomic,
    hf_values=_nomic_values,
    hf_name=_nomic_name,
    hf_layers="layers.",
    hf_layer={
        **_POST_NORM_LAYER,
        **with_biases({"norm1": "post_attn_norm", "norm2": "post_mlp_norm"}),
        "attn.Wqkv.weight": QKV,
        "attn.Wqkv.bias": QKV_BIAS,
        **with_biases({"attn.out_proj": "o", "mlp.fc1": "up", "mlp.fc2": "down"}),
        "mlp.fc11.weight": "up",
        "mlp.fc12.weight": "gate",
        "mlp.router.layer.weight": "router",
        "mlp.experts.mlp.w1": "expert_up",
        "mlp.experts.mlp.w2": Parts(("expert_down",), is_transposed=True, is_by_expert=True),
        "mlp.experts.bias": "expert_bias",
    },
    of_gguf=lambda file, spec: _with_gated(spec, "silu", num_types=_num_types_of_gguf(file)),
    gguf_top=_GGUF_TOP,
    gguf_layer={**_GGUF_LAYER, "attn_qkv.weight": QKV},
    gguf_head=lambda _: None,
)
NOMIC_BERT_MOE = replace(
    NOMIC_BERT,
    of_gguf=_of_nomic_moe_gguf,
    gguf_layer={**NOMIC_BERT.gguf_layer, **GGUF_EXPERTS, "attn_qkv.bias": QKV_BIAS},
)
"""The name of GGUF files with experts. Directories have one class for both."""


# GTE (`new` in its makers' files): RoPE, gated MLPs, and biases everywhere except the MLP's gate and up.


def _gte_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with defaults. The makers' `ntk` is a scaling of their own, which `_of_gte` reads."""
    found = bert_values(values, max_position_embeddings=8192, type_vocab_size=1)
    scaling = found.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "ntk":
        found |= {"rope_scaling": None, "ntk": scaling}
    is_old = found.get("model_type") == "new"
    return {"rope_theta": 10_000.0 if is_old else 160_000.0, **found}


def _of_gte(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(position_embedding_type="rope", layer_norm_type="layer_norm", logn_attention_scale=False)
    num_types = config.require("type_vocab_size", int) and _read_num_types(config)
    spec = with_gated_mlps(spec, read_activation(config, "hidden_act", "gelu"), has_bias=False)
    spec = replace(spec, norm="layer", has_norm_bias=True, num_types=num_types)
    turn = spec.attentions[0].rotation
    if (scaling := config.get("ntk", dict)) is not None:
        turn = _stretched(JsonFile(config.path, scaling), config.positive("rope_theta"), spec.attentions[0].head_dim)
    return _with_biased_attention(spec).with_attention_fields(rotation=turn)


def _stretched(scaling: JsonFile, theta: float, head_dim: int) -> Rotation:
    """Return an NTK-scaled rotation: the first pair is slower by factor^(2 / head_dim), the last by the factor."""
    factor = scaling.positive("factor")
    if scaling.values.get("mixed_b") is not None or not 1.0 < factor < 1e6:
        raise scaling.error(f"rope_scaling is {str(scaling.values)[:80]}")
    slower = factor ** (2 / head_dim)
    return Rotation(inv_freq=tuple(freq / slower for freq in rope.inverse_frequencies(head_dim, theta * factor)))


GTE = replace(
    BERT,
    describe=partial(describe, has_positions=False, has_down_bias=True),
    of_hf=_of_gte,
    hf_values=_gte_values,
    hf_name=lambda name: name.removeprefix("gte.").removeprefix("new.").replace("encoder.layer.", "layers.", 1),
    hf_layers="layers.",
    hf_layer={
        **_POST_NORM_LAYER,
        **with_biases({"attn_ln": "post_attn_norm", "mlp_ln": "post_mlp_norm"}),
        **with_biases({f"attention.{part}_proj": part for part in "qkvo"}),
        "attention.qkv_proj.weight": QKV,
        "attention.qkv_proj.bias": QKV_BIAS,
        "mlp.up_gate_proj.weight": Parts(("up", "gate")),
    },
    hf_mlm_head=None,
    hf_unread=(*BERT.hf_unread, "lm_head."),
)


# Jina 3: XLM-RoBERTa with rotation. Its adapters for tasks are in other folders and are not loaded.


def _of_jina_3(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return _with_rotary_bert(spec, read_activation(config, "hidden_act", "gelu"), _read_num_types(config))


JINA_3 = replace(
    ROBERTA,
    describe=partial(describe, has_positions=False),
    of_hf=_of_jina_3,
    hf_values=partial(
        bert_values,
        vocab_size=250002,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=8194,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        rope_theta=20_000.0,
    ),
    hf_layers="layers.",
    hf_layer={**_POST_NORM_LAYER, **with_biases({"mlp.fc1": "up", "mlp.fc2": "down"})},
)


# MPNet has no token types, and all layers share a learned bias for each range of distances.

NUM_BUCKETS = 32
FARTHEST = 128  # tokens from this distance on share one bias for each direction
_PADDING = 1  # fixed in the class, whatever config.json says.


def bucket(distance: int) -> int:
    """Return T5's position bucket of a key `distance` tokens after its query (negative: before). Source: arXiv 1910.10683."""
    half = NUM_BUCKETS // 2
    near, first = half // 2, half * (distance > 0)
    far = abs(distance)
    if far < near:
        return first + far
    # In float32, as transformers has it: at powers of two the last bit decides.
    share = np.log(np.float32(far) / np.float32(near)) / np.float32(math.log(FARTHEST / near))
    return first + min(half - 1, near + int(np.float32(share) * np.float32(half - near)))


def _by_bucket(_: ModelSpec, buckets: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(buckets[[bucket(distance) for distance in range(-FARTHEST, FARTHEST + 1)]].T)


def _mpnet_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"relative_attention_num_buckets": NUM_BUCKETS, **values, "pad_token_id": _PADDING, "type_vocab_size": None}
    return _values_after_padding(found, vocab_size=30527)


def _of_mpnet(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("relative_attention_num_buckets", NUM_BUCKETS)
    spec = replace(_of_hf(config, spec), num_types=0, first_position=_PADDING + 1)
    return spec.with_attention_fields(num_distances=FARTHEST)


MPNET = replace(
    BERT,
    hf_mlm_head=_roberta_mlm_head,
    of_hf=_of_mpnet,
    hf_values=_mpnet_values,
    hf_name=lambda name: bare_name(name.removeprefix("mpnet.")),
    hf_top={**BERT.hf_top, "encoder.relative_attention_bias.weight": "buckets"},
    hf_layer={
        **BERT.hf_layer,
        **with_biases({f"attention.attn.{name}": name for name in "qkvo"}),
        **with_biases({"attention.LayerNorm": "post_attn_norm"}),
    },
    hf_head=_roberta_head,
    hf_unread=(*BERT.hf_unread, "lm_head."),
    made={"distances": Made("buckets", lambda spec: (NUM_BUCKETS, spec.attentions[0].num_heads), _by_bucket)},
)


# Jina BERT 2 has gated MLPs and no positions: scores fall with the distance (ALiBi). Its variant for code is refused.

_JINA_ACTIVATIONS: Mapping[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slope of each of n heads, by which scores fall per token of distance: 2^(-8/n), 2^(-16/n), ...

    If n is not a power of two: the slopes of the power below, then every other slope of the power above.
    """
    below = 1 << (num_heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (head + 1) / below) for head in range(below)]
    return found + [2.0 ** (-8.0 * (2 * head + 1) / (2 * below)) for head in range(num_heads - below)]


def _by_slope(spec: ModelSpec, _: NDArray[np.float32]) -> NDArray[np.float32]:
    attention = spec.attentions[0]
    away = np.abs(np.arange(-attention.num_distances, attention.num_distances + 1))
    return -np.outer(slopes(attention.num_heads), away).astype(np.float32)


def _of_jina(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.require("position_embedding_type", str) != "alibi":
        raise config.error("position_embedding_type is not 'alibi'")
    kind = config.get("feed_forward_type", str) or "original"
    if kind not in _JINA_ACTIVATIONS:
        raise checks.unsupported(config.path, f"feed_forward_type is {kind[:80]!r}", f"{', '.join(_JINA_ACTIVATIONS)} are")
    farthest = max(1, spec.max_model_len - 1)
    if spec.attentions[0].num_heads * (2 * farthest + 1) > 1 << 23:  # published models have 200,000
        raise config.error(f"max_position_embeddings is {spec.max_model_len}: the ALiBi table for it would be too large")
    spec = with_gated_mlps(spec, _JINA_ACTIVATIONS[kind], has_bias=False)
    spec = replace(spec, norm="layer", has_norm_bias=True, num_types=_read_num_types(config))
    return _with_biased_attention(spec).with_attention_fields(num_distances=farthest)


JINA_BERT = replace(
    BERT,
    hf_mlm_head=None,
    describe=partial(describe, has_positions=False, has_down_bias=True),
    of_hf=_of_jina,
    hf_values=partial(bert_values, vocab_size=30528, max_position_embeddings=8192),
    hf_layer={
        **BERT.hf_layer,
        **with_biases({"mlp.wo": "down", "mlp.layernorm": "post_mlp_norm"}),
        "mlp.gated_layers.weight": GATE_AND_UP,
    },
    hf_head=lambda *_: None,
    made={"distances": Made("", None, _by_slope)},
)


# ModernBERT

_FULL, _LOCAL = "full_attention", "sliding_attention"
_MODERNBERT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}


def _modernbert_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = with_defaults(values, _MODERNBERT_DEFAULTS)
    every, num_layers = found["global_attn_every_n_layers"], found["num_hidden_layers"]
    if type(every) is int and every > 0 and type(num_layers) is int and 0 < num_layers <= checks.LIMITS["num_layers"]:
        found.setdefault("layer_types", [_LOCAL if layer % every else _FULL for layer in range(num_layers)])
    given = found.get("rope_parameters") or {}
    if isinstance(given, dict):
        found["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": found[f"{word}_rope_theta"], **(given.get(kind) or {})}
            for kind, word in ((_FULL, "global"), (_LOCAL, "local"))
            if isinstance(given.get(kind) or {}, dict)
        }
    return {**found, "rms_norm_eps": found["norm_eps"], "tie_word_embeddings": False}


def _of_modernbert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.values.get("rope_scaling") is not None:
        raise ModelError(
            f"{config.path}: rope_scaling is set, which is not supported in a ModernBERT.",
            remedy="Write it into rope_parameters, by layer type.",
        )
    activation = read_activation(config, "hidden_activation", "gelu")
    spec = _with_gated(spec, activation, has_norm_bias=config.get("norm_bias", bool) or False)
    return with_windows(config, spec, config.require("local_attention", int) // 2 + 1, [False] * spec.num_layers)


def _of_modernbert_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = "modern-bert"
    name = file.get(f"{key}.hidden_activation", str) or "gelu"
    if name not in ("gelu", "silu"):
        raise file.error(f"{key}.hidden_activation is {name[:80]!r}")
    spec = _with_gated(spec, "gelu" if name == "gelu" else "silu", has_norm_bias=False)
    window = file.get(f"{key}.attention.sliding_window", int) or 0
    is_local = local_layers_of_gguf(file, spec, first=0)
    if not window:
        return spec
    base = rope_base(file, f"{key}.rope.freq_base_swa", _MODERNBERT_DEFAULTS["local_rope_theta"])
    return with_local_base(spec.with_windows(window // 2 + 1, is_local), base)


def _modernbert_gguf_head(file: GgufFile) -> Head | None:
    if "cls.output.weight" not in file.tensors:
        return None
    kind = file.get("modern-bert.classifier.pooling_type", int, 1)
    if kind not in (1, 2):
        raise file.error(f"modern-bert.classifier.pooling_type is {kind}")
    first = HeadLayer("cls", activation="gelu", has_bias="cls.bias" in file.tensors, norm="cls.norm")
    return Head("mean" if kind == 1 else "first", (first, HeadLayer("cls.output", is_last=True)))


def _modernbert_head(hf_class: str, config: JsonFile) -> Head | None:
    pooling: Pooling = "each"
    if hf_class.endswith("ForSequenceClassification"):
        name = config.get("classifier_pooling", str) or "cls"
        if name not in ("cls", "mean"):
            raise config.error(f"classifier_pooling is {name!r}")
        pooling = "first" if name == "cls" else "mean"
    elif not hf_class.endswith("ForTokenClassification"):
        return None
    activation = read_activation(config, "classifier_activation", "gelu")
    has_bias = config.get("classifier_bias", bool) or False
    layers = (
        HeadLayer("head.dense", activation=activation, has_bias=has_bias, norm="head.norm"),
        HeadLayer("classifier", is_last=True),
    )
    return Head(pooling, layers)


MODERNBERT = Architecture(
    describe=partial(llama.describe, has_embed_norm=True, has_first_norm=False),
    is_encoder=True,
    of_hf=_of_modernbert,
    hf_values=_modernbert_values,
    hf_name=lambda name: name.removeprefix("model."),
    hf_top={
        "embeddings.tok_embeddings.weight": "embed",
        **with_biases({"embeddings.norm": "embed_norm", "final_norm": "norm"}),
    },
    hf_layers="layers.",
    hf_layer={
        **with_biases({"attn_norm": "attn_norm", "attn.Wo": "o", "mlp_norm": "mlp_norm", "mlp.Wo": "down"}),
        "attn.Wqkv.weight": QKV,
        "attn.Wqkv.bias": QKV_BIAS,
        "mlp.Wi.weight": GATE_AND_UP,
        "mlp.Wi.bias": Parts(("gate_bias", "up_bias")),
    },
    hf_head=_modernbert_head,
    hf_unread=("head.", "decoder."),
    of_gguf=_of_modernbert_gguf,
    has_local_base_in_gguf=True,
    gguf_top={**GGUF_TOP, "token_embd_norm.weight": "embed_norm"},
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": QKV, "ffn_up.weight": GATE_AND_UP},
    gguf_head=_modernbert_gguf_head,
)


# EuroBERT: Llama with bidirectional attention.


def _eurobert_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with defaults. The first releases call the pooling `clf_pooling`."""
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "classifier_pooling": "late"}
    return with_defaults(values, defaults, {"clf_pooling": "classifier_pooling"})


def _of_eurobert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return with_both_sides(with_gated_mlps(spec, read_activation(config, "hidden_act", "silu")))


def _eurobert_head(hf_class: str, config: JsonFile) -> Head | None:
    last = HeadLayer("classifier", is_last=True)
    if hf_class.endswith("ForTokenClassification"):
        return Head("each", (last,))
    if not hf_class.endswith("ForSequenceClassification"):
        return None
    name = config.require("classifier_pooling", str)
    if name not in ("bos", "mean", "late"):
        raise checks.unsupported(config.path, f"classifier_pooling is {name[:80]!r}", "bos, mean and late are")
    layers = (HeadLayer("dense", activation="gelu"), last)
    return Head("first" if name == "bos" else "mean", layers, is_pooled_last=name == "late")


EUROBERT = Architecture(
    describe=llama.describe,
    is_encoder=True,
    of_hf=_of_eurobert,
    hf_values=_eurobert_values,
    hf_name=lambda name: name.removeprefix("model."),
    hf_top={"embed_tokens.weight": "embed", "norm.weight": "norm"},
    hf_layers="layers.",
    hf_head=_eurobert_head,
    hf_unread=("lm_head.",),
    of_gguf=lambda _, spec: with_both_sides(spec),
)


# NeoBERT: Llama with bidirectional attention, too. Neighbouring columns of a head rotate as a pair.


def _neobert_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with defaults. The MLPs have two thirds of `intermediate_size`, rounded up to a multiple of 8."""
    defaults = {**_DEFAULTS, "num_hidden_layers": 28, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024}
    found = with_defaults(values, defaults, {"norm_eps": "rms_norm_eps", "max_length": "max_position_embeddings"})
    if type(width := found["intermediate_size"]) is int and width > 0:
        found["intermediate_size"] = -(-(2 * width // 3) // 8) * 8
    return {**found, "rope_theta": 10_000.0, "tie_word_embeddings": False}


def _of_neobert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(rope=True, rms_norm=True, ngpt=False, dim_head=spec.attentions[0].head_dim)
    if (kind := config.get("hidden_act", str) or "swiglu").lower() != "swiglu":
        raise checks.unsupported(config.path, f"hidden_act is {kind[:80]!r}", "only 'swiglu' is")
    return with_both_sides(spec)


def _qkv_by_head(spec: ModelSpec) -> Sequence[Sequence[Run]]:
    """Return the rows of q, k and v. Each head has its own three in a row, q and k with rotating pairs side by side."""
    heads, width = range(spec.attentions[0].num_heads), spec.attentions[0].head_dim
    q, k, v = ([(3 * width * head + width * part, width, 1) for head in heads] for part in range(3))
    split = [[(first + odd, width // 2, 2) for first, _, _ in runs for odd in (0, 1)] for runs in (q, k)]
    return [*split, v]


def _neobert_head(hf_class: str, _: JsonFile) -> Head | None:
    layers = (HeadLayer("dense", activation="tanh"), HeadLayer("classifier", is_last=True))
    return Head("first", layers) if hf_class.endswith("ForSequenceClassification") else None


NEOBERT = Architecture(
    describe=llama.describe,
    is_encoder=True,
    of_hf=_of_neobert,
    hf_values=_neobert_values,
    hf_name=lambda name: name.removeprefix("model."),
    hf_top={"encoder.weight": "embed", "layer_norm.weight": "norm"},
    hf_layers="transformer_encoder.",
    hf_layer={
        "attention_norm.weight": "attn_norm",
        "qkv.weight": replace(QKV, runs=_qkv_by_head),
        "wo.weight": "o",
        "ffn_norm.weight": "mlp_norm",
        "ffn.w12.weight": GATE_AND_UP,
        "ffn.w1.weight": "gate",
        "ffn.w2.weight": "up",
        "ffn.w3.weight": "down",
    },
    hf_head=_neobert_head,
    hf_unread=("decoder.",),
)
