"""Reads the experts in a model's settings and puts them into each layer's spec. The architectures' files call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.models import checks
from penstock.models.architectures import Parts
from penstock.types.errors import ModelError
from penstock.types.model_spec import ExpertsMlp, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile

_MOST_EXPERTS = 1 << 14
"""Far above every published model."""
GGUF_EXPERTS: Mapping[str, str | Parts] = {
    "ffn_gate_inp.weight": "router",
    "ffn_gate_exps.weight": Parts(("expert_gate",)),
    "ffn_up_exps.weight": Parts(("expert_up",)),
    "ffn_down_exps.weight": Parts(("expert_down",)),
}
"""The names of experts in every GGUF file."""


def read_num_experts(config: JsonFile) -> int:
    """Return the number of experts that config.json names. Raises ModelError.

    Releases of transformers write it as `num_experts` or as `num_local_experts`, whichever name a published file has.
    """
    one, other = config.get("num_experts", int), config.get("num_local_experts", int)
    if one is not None and other is not None and one != other:
        raise config.error(f"num_experts is {one}, and num_local_experts is {other}")
    return config.require("num_experts", int) if other is None else other


def experts_of_gguf(file: GgufFile, spec: ModelSpec, *, is_renormalised: bool = True) -> ModelSpec:
    """The spec with the experts that a GGUF file's metadata tell of. Raises ModelError."""
    key = file.require("general.architecture", str)
    for name in ("expert_shared_count", "leading_dense_block_count", "expert_group_count"):
        if file.get(f"{key}.{name}", int):
            setting = f"{key}.{name} is {file.metadata[f'{key}.{name}']}"
            raise checks.unsupported(file.path, setting, "routed experts in every layer are")
    width = file.get(f"{key}.expert_feed_forward_length", int) or file.require(f"{key}.feed_forward_length", int)
    mlp = ExpertsMlp(
        num_experts=file.require(f"{key}.expert_count", int),
        num_experts_per_token=file.require(f"{key}.expert_used_count", int),
        intermediate_size=width,
        is_renormalised=is_renormalised,
    )
    return with_experts(spec, mlp, file.path)


def with_experts(spec: ModelSpec, mlp: ExpertsMlp, path: Path) -> ModelSpec:
    """The spec with these experts in every layer. Raises ModelError for numbers that are no mixture."""
    if not 1 <= mlp.num_experts_per_token <= mlp.num_experts <= _MOST_EXPERTS or mlp.intermediate_size < 1:
        cause = f"{mlp.num_experts_per_token} of {mlp.num_experts} experts of {mlp.intermediate_size} columns are no mixture"
        raise ModelError(f"{path}: {cause}.", remedy=checks.REFETCH)
    return spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))
