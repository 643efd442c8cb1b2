"""The table from an architecture's name to its description. Called by `build` and the loaders; describes nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "llama": "penstock.models.llama:describe",
        # Without its sliding window, Mistral is Llama; loaders limit `max_model_len` to the window.
        "mistral": "penstock.models.llama:describe",
        # Qwen 2 and 2.5 are Llama with biases on q, k and v, which a spec knows from the weights.
        "qwen2": "penstock.models.llama:describe",
    }
)


def describe(spec: ModelSpec) -> Program:
    """The program of `spec.architecture`. Raises ModelError, which lists the supported ones, for any other."""
    target = DESCRIPTIONS.get(spec.architecture)
    if target is None:
        raise ModelError(
            f"The architecture {spec.architecture!r} is not supported.",
            remedy=f"Supported are: {', '.join(sorted(DESCRIPTIONS))}.",
        )
    module, _, function = target.partition(":")
    return cast("Callable[[ModelSpec], Program]", getattr(import_module(module), function))(spec)
