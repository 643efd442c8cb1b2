"""EXAONE 4 (LG): OLMo 2 with norms of queries and keys per head. Larger ones have windows, and rotate in layers with one alone.

Sources: arXiv 2507.11407; modeling_exaone4.py of transformers; src/models/exaone4.cpp of llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.models import olmo2
from penstock.models.architectures import Architecture
from penstock.models.gemma import local_layers_of_gguf, local_layers_of_period
from penstock.models.hf_config import JsonFile, with_windows
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile

_PERIOD = 4
"""Every so many layers one sees all positions, unless a file says otherwise."""


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """A window that is null is none; transformers takes 4096 if the key is absent."""
    config.only("hidden_act", "silu")
    window = config.get("sliding_window", int) if "sliding_window" in config.values else 4096
    if window is None:
        return spec
    return with_still_layers(with_windows(config, spec, window, _local_layers(config, spec)))


def _local_layers(config: JsonFile, spec: ModelSpec) -> list[bool]:
    """Whether each layer has a window: by a period, or by the letters of one (LLLG), of which L has a window and G has none."""
    if not isinstance(config.values.get("sliding_window_pattern"), str):
        return local_layers_of_period(spec, config.get("sliding_window_pattern", int) or _PERIOD)
    letters = config.require("sliding_window_pattern", str)
    if not letters or set(letters) - set("LG"):
        raise config.error(f"sliding_window_pattern is {letters!r}, not a text of L and G")
    return [letters[layer % len(letters)] == "L" for layer in range(spec.num_layers)]


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.get("exaone4.attention.sliding_window", int)
    return with_still_layers(spec.with_windows(window, local_layers_of_gguf(file, spec, _PERIOD))) if window else spec


def with_still_layers(spec: ModelSpec) -> ModelSpec:
    """The same without rotations in layers that see all positions."""
    return spec.with_attention(lambda _, attention: attention if attention.window else replace(attention, rotation=None))


EXAONE4 = Architecture(
    describe=partial(olmo2.describe, qk_norms="heads"), of_hf=_of_hf, of_gguf=_of_gguf, hf_layer=olmo2.OLMO2.hf_layer
)
