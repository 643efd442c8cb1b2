"""Phi 3 and 4 (Microsoft): Llama whose q, k and v are one matrix, and gate and up another; heads may turn in part.

Sources: Phi-3, arXiv 2404.14219; Phi-4, arXiv 2412.08905; modeling_phi3.py of transformers; src/models/phi3.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile

_QKV, _GATE_AND_UP = Parts(("q", "k", "v")), Parts(("gate", "up"))


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Old files call longrope `su` or `yarn`."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.get(key)
        if isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type")) == "yarn":
            values = {**values, key: {**scaling, "rope_type": "longrope"}}
    return {"rms_norm_eps": 1e-5, **values}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    return _with_window(spec, config.get("sliding_window", int))


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """The converter writes 0 for no window."""
    return _with_window(spec, file.get("phi3.attention.sliding_window", int))


def _with_window(spec: ModelSpec, window: int | None) -> ModelSpec:
    return spec.with_attention(lambda _, attention: replace(attention, window=window or 0))


PHI3 = Architecture(
    describe=llama.describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_layer={**HF_LAYER, "self_attn.qkv_proj.weight": _QKV, "mlp.gate_up_proj.weight": _GATE_AND_UP},
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": _QKV, "ffn_up.weight": _GATE_AND_UP},
    has_partial_rope=True,
)
