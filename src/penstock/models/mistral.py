"""Mistral and Ministral: Llama with windows. Mistral has one in all layers or in none, Ministral in those that its file names.

Ministral 3's queries grow with their position, which its rotary parameters say (`models.rope`).
Sources: Mistral 7B, arXiv 2310.06825; modeling_mistral.py, modeling_ministral.py and modeling_ministral3.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.models import llama
from penstock.models.architectures import Architecture
from penstock.models.hf_config import JsonFile, with_windows
from penstock.types.model_spec import ModelSpec


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first Mistral 7B's window is that of a file which does not speak of one, but for Ministral 3; null is none."""
    return values if _is_third(values) else {"sliding_window": 4096, **values}


def _is_third(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") == "ministral3" or values.get("architectures") == ["Ministral3ForCausalLM"]


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if _is_third(config.values):
        config.require("rope_parameters", dict)  # by default they are those of one size
    window = config.get("sliding_window", int) or 0
    return with_windows(config, llama.of_hf(config, spec), window, [True] * spec.num_layers)


MISTRAL = Architecture(
    describe=llama.describe, of_hf=_of_hf, of_gguf=llama.of_gguf, hf_values=_values, is_interleaved_in_gguf=True
)
"""GGUF files of models before Ministral 3 are those of a Llama."""
