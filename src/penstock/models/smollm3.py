"""SmolLM3: Llama with layers whose queries and keys are not rotated, every fourth one.

Sources: NoPE, arXiv 2501.18795; modeling_smollm3.py of transformers; src/models/smollm3.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import llama
from penstock.models.architectures import Architecture
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile

_INTERVAL = 4


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"rope_theta": 2e6, "tie_word_embeddings": True, **values}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("use_sliding_window", False)
    spec = llama.of_hf(config, spec)
    if (told := config.get("no_rope_layers", list)) is not None:
        if len(told) != spec.num_layers or not all(value in (0, 1) for value in told):
            raise config.error(f"no_rope_layers has not 0 or 1 for each of {spec.num_layers} layers")
        return _with_rotations(spec, told)
    return _with_rotations(spec, _every(spec, config.get("no_rope_layer_interval", int) or _INTERVAL))


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """The file has no key for it."""
    return _with_rotations(llama.of_gguf(file, spec), _every(spec, _INTERVAL))


def _every(spec: ModelSpec, interval: int) -> list[int]:
    return [(layer + 1) % interval for layer in range(spec.num_layers)]


def _with_rotations(spec: ModelSpec, has_rotation: Sequence[int]) -> ModelSpec:
    """The same without the rotation of layers that have a 0, as `no_rope_layers` says it."""
    return spec.with_attention(lambda layer, attention: attention if has_rotation[layer] else replace(attention, rotation=None))


SMOLLM3 = Architecture(describe=llama.describe, of_hf=_of_hf, of_gguf=_of_gguf, hf_values=_values, is_interleaved_in_gguf=True)
