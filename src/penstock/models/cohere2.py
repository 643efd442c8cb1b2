"""Command R7B and its like (Cohere 2): attention and MLP side by side on one layer norm, and windows in most layers.

Layers that see all positions do not turn; the others turn by neighbouring pairs of columns.
Sources: Command A, arXiv 2504.00698; modeling_cohere2.py of transformers; src/models/cohere2.cpp of llama.cpp.
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
"""Every so many layers one sees all positions, unless a file says otherwise."""
_ONLY = {
    "hidden_act": "silu",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    usual = {"logit_scale": 0.0625, "sliding_window": 4096, "tie_word_embeddings": True}
    return {**usual, **values, "rms_norm_eps": values.get("layer_norm_eps", 1e-5)}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    for key, value in _ONLY.items():
        config.only(key, value)
    usual = local_layers_of_period(spec, config.get("sliding_window_pattern", int) or _PERIOD)
    spec = with_windows(config, spec, config.require("sliding_window", int), usual)
    return _with(spec, config.positive("logit_scale"))


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.require("cohere2.attention.sliding_window", int)
    spec = spec.with_windows(window, local_layers_of_gguf(file, spec, _PERIOD))
    return _with(spec, file.require("cohere2.logit_scale", float))


def _with(spec: ModelSpec, logit_scale: float) -> ModelSpec:
    spec = with_still_layers(replace(spec, norm="layer", logit_scale=logit_scale))
    return spec.with_layers(lambda _, layer: replace(layer, has_attn_norm=False))


COHERE2 = Architecture(
    describe=falcon.describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_layer={**HF_LAYER, "input_layernorm.weight": "mlp_norm"},
    gguf_layer={**GGUF_LAYER, "attn_norm.weight": "mlp_norm"},
    is_interleaved_in_hf=True,
    is_interleaved_in_gguf=True,
)
