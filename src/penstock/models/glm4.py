"""GLM 4 (Z.ai): a Llama whose heads turn in part, by neighbouring pairs. That of 2025 has norms before and behind both halves.

Sources: ChatGLM, arXiv 2406.12793; modeling_glm.py and modeling_glm4.py of transformers; src/models/glm4.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.models import checks, gemma, llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
from penstock.models.hf_config import JsonFile
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile

_GATE_AND_UP = Parts(("gate", "up"))


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"head_dim": 128, "partial_rotary_factor": 0.5, **values}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    return spec


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Files of GLM 4.1V and of GLM-OCR, which go by the same name, have other rows, or a layer more."""
    if any(file.get_list("glm4.rope.dimension_sections", int)):
        raise checks.unsupported(file.path, "glm4.rope.dimension_sections are there", "a model of text alone is")
    if num_more := file.get("glm4.nextn_predict_layers", int):
        raise checks.unsupported(file.path, f"glm4.nextn_predict_layers is {num_more}", "only 0 is")
    return spec


GLM = Architecture(
    describe=llama.describe,
    of_hf=_of_hf,
    hf_values=_values,
    hf_layer={**HF_LAYER, "mlp.gate_up_proj.weight": _GATE_AND_UP},
    is_interleaved_in_hf=True,
    has_partial_rope=True,
)
"""In GGUF files q, k and v are one tensor, with pairs side by side, which is not read."""
GLM4 = Architecture(
    describe=gemma.describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_layer={
        **HF_LAYER,
        "post_self_attn_layernorm.weight": "post_attn_norm",
        "post_attention_layernorm.weight": "mlp_norm",
        "post_mlp_layernorm.weight": "post_mlp_norm",
        "mlp.gate_up_proj.weight": _GATE_AND_UP,
    },
    gguf_layer={**GGUF_LAYER, "ffn_up.weight": _GATE_AND_UP},
    is_interleaved_in_hf=True,
    is_interleaved_in_gguf=True,
    has_partial_rope=True,
)
