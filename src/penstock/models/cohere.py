"""Command R and Aya (Cohere), Command R7B and A (Cohere 2): attention and MLP side by side on one layer norm.

Heads turn by neighbouring pairs of columns. Cohere 2 has windows in most layers; those that see all positions do not turn.
Sources: Command A, arXiv 2504.00698; modeling_cohere.py and modeling_cohere2.py of transformers; src/models/command-r.cpp and
cohere2.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import falcon
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture
from penstock.models.exaone4 import with_still_layers
from penstock.models.gemma import local_layers_of_gguf, local_layers_of_period
from penstock.models.hf_config import JsonFile, with_windows
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile

_PERIOD = 4
"""Cohere 2: every so many layers one sees all positions, unless a file says otherwise."""
_ONLY = {
    "hidden_act": "silu",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    usual = {"logit_scale": 0.0625, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    return {**usual, **values, "rms_norm_eps": values.get("layer_norm_eps", 1e-5)}


def _values2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return _values({"rope_theta": 10_000.0, "sliding_window": 4096, **values})


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    for key, value in _ONLY.items():
        config.only(key, value)
    return _with(spec, config.positive("logit_scale"))


def _of_hf2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    usual = local_layers_of_period(spec, config.get("sliding_window_pattern", int) or _PERIOD)
    return with_still_layers(with_windows(config, _of_hf(config, spec), config.require("sliding_window", int), usual))


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    return _with(spec, file.require(f"{file.require('general.architecture', str)}.logit_scale", float))


def _of_gguf2(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.require("cohere2.attention.sliding_window", int)
    return with_still_layers(_of_gguf(file, spec).with_windows(window, local_layers_of_gguf(file, spec, _PERIOD)))


def _with(spec: ModelSpec, logit_scale: float) -> ModelSpec:
    spec = replace(spec, norm="layer", logit_scale=logit_scale)
    return spec.with_layers(lambda _, layer: replace(layer, has_attn_norm=False))


COHERE = Architecture(
    describe=falcon.describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_layer={**HF_LAYER, "input_layernorm.weight": "mlp_norm"},
    gguf_layer={**GGUF_LAYER, "attn_norm.weight": "mlp_norm"},
    is_interleaved_in_hf=True,
    is_interleaved_in_gguf=True,
)
COHERE2 = replace(COHERE, of_hf=_of_hf2, of_gguf=_of_gguf2, hf_values=_values2)
