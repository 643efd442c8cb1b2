"""ModernBERT: an encoder with rotary positions, gated MLPs, norms before the halves of a layer, and windows in most layers.

Sources: arXiv 2412.13663; modeling_modernbert.py of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import rope
from penstock.models.architectures import GGUF_LAYER, GGUF_TOP, Architecture, Head, HeadLayer, Parts, with_biases
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.layers import local_layers_of_gguf, with_gated_mlps, with_windows
from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, AttentionSpec, ModelSpec, Pooling, Rotation

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec) -> Program:
    """The program of one step. The first layer reads the embeddings, which are normed already."""
    build = Decoder(spec)
    x = build.norm(build.embed(), "embed_norm", "x")
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, build.norm(x, f"{at}.attn_norm") if layer else x)
        x, attended = build.gather_after_last(layer, x, attended)
        build.add_output(layer, x, attended)
        build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"))
    return build.finish(build.norm(x, "norm"))


_FULL, _LOCAL = "full_attention", "sliding_attention"
_DEFAULTS: Mapping[str, Any] = {
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
_MOST_LAYERS = 4096


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the types of layers and a base of rotations for each type, as release 5 of transformers has
    them."""
    found = {**_DEFAULTS, **{key: value for key, value in values.items() if value is not None}}
    every, num_layers = found["global_attn_every_n_layers"], found["num_hidden_layers"]
    if type(every) is int and every > 0 and type(num_layers) is int and 0 < num_layers <= _MOST_LAYERS:
        found.setdefault("layer_types", [_LOCAL if layer % every else _FULL for layer in range(num_layers)])
    given = found.get("rope_parameters") or {}
    if isinstance(given, dict):
        found["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": found[f"{word}_rope_theta"], **(given.get(kind) or {})}
            for kind, word in ((_FULL, "global"), (_LOCAL, "local"))
            if isinstance(given.get(kind) or {}, dict)
        }
    return {**found, "rms_norm_eps": found["norm_eps"], "tie_word_embeddings": False}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.values.get("rope_scaling") is not None:
        raise ModelError(
            f"{config.path}: rope_scaling is set, which is not supported in a ModernBERT.",
            remedy="Write it into rope_parameters, by the types of layers.",
        )
    activation = read_activation(config, "hidden_activation", "gelu")
    spec = _with(spec, activation, has_norm_bias=config.get("norm_bias", bool) or False)
    return with_windows(config, spec, config.require("local_attention", int) // 2 + 1, [False] * spec.num_layers)


def _with(spec: ModelSpec, activation: Activation, *, has_norm_bias: bool) -> ModelSpec:
    spec = replace(with_gated_mlps(spec, activation), norm="layer", has_norm_bias=has_norm_bias)
    return spec.with_attention(lambda _, attention: replace(attention, mask="all"))


_LOCAL_BASE = 10_000.0
"""The base of all published models."""
_PERIOD = 3
"""Every third layer sees all positions, the first one included, unless the file says otherwise."""


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = "modern-bert"
    name = file.get(f"{key}.hidden_activation", str) or "gelu"
    if name not in ("gelu", "silu"):
        raise file.error(f"{key}.hidden_activation is {name[:80]!r}")
    spec = _with(spec, "gelu" if name == "gelu" else "silu", has_norm_bias=False)
    window = file.get(f"{key}.attention.sliding_window", int) or 0
    is_local = local_layers_of_gguf(file, spec, _PERIOD, first=0)
    if not window:
        return spec
    base = file.get(f"{key}.rope.freq_base_swa", float) or _LOCAL_BASE
    if not (math.isfinite(base) and base > 0 and base != 1.0):
        raise file.error(f"{key}.rope.freq_base_swa is {base}")
    turn = Rotation(inv_freq=rope.inverse_frequencies(spec.attentions[0].head_dim, base))

    def local(layer: int, attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, window=window // 2 + 1, rotation=turn) if is_local[layer] else attention

    return spec.with_attention(local)


def _gguf_head(file: GgufFile) -> Head | None:
    if "cls.output.weight" not in file.tensors:
        return None
    kind = file.get("modern-bert.classifier.pooling_type", int, 1)
    if kind not in (1, 2):
        raise file.error(f"modern-bert.classifier.pooling_type is {kind}")
    first = HeadLayer("cls", activation="gelu", has_bias="cls.bias" in file.tensors, norm="cls.norm")
    return Head("mean" if kind == 1 else "first", (first, HeadLayer("cls.output", is_last=True)))


def _head(hf_class: str, config: JsonFile) -> Head | None:
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
    describe=describe,
    is_encoder=True,
    of_hf=_of_hf,
    hf_values=_values,
    hf_name=lambda name: name.removeprefix("model."),
    hf_top={
        "embeddings.tok_embeddings.weight": "embed",
        **with_biases({"embeddings.norm": "embed_norm", "final_norm": "norm"}),
    },
    hf_layers="layers.",
    hf_layer={
        **with_biases({"attn_norm": "attn_norm", "attn.Wo": "o", "mlp_norm": "mlp_norm", "mlp.Wo": "down"}),
        "attn.Wqkv.weight": Parts(("q", "k", "v")),
        "attn.Wqkv.bias": Parts(("q_bias", "k_bias", "v_bias")),
        "mlp.Wi.weight": Parts(("gate", "up")),
        "mlp.Wi.bias": Parts(("gate_bias", "up_bias")),
    },
    hf_head=_head,
    hf_unread=("head.", "decoder."),
    of_gguf=_of_gguf,
    has_local_base_in_gguf=True,
    gguf_top={**GGUF_TOP, "token_embd_norm.weight": "embed_norm"},
    gguf_layer={
        **GGUF_LAYER,
        "attn_qkv.weight": Parts(("q", "k", "v")),
        "ffn_up.weight": Parts(("gate", "up")),
    },
    gguf_head=_gguf_head,
)
