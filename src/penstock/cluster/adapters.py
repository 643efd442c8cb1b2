"""The front's LoRA adapters.

The front reads each adapter once, to check it and get its hash and size. Replicas compute with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backends.native import footprint
from penstock.deploy.adapters import Adapters
from penstock.deploy.blueprint import Blueprint
from penstock.deploy.build import connect_adapters
from penstock.models.adapter import AdapterFactors
from penstock.models.weights import LoadedModel

BYTES_PER_VALUE = 2
"""Replicas pack adapters as bf16 or float16."""
RANKS_TOGETHER = 8
"""The native backend pads ranks to about a multiple of this."""


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """Stands for a packed adapter in the front's registry, which needs only the size."""

    num_pages: int
    """Estimate of the KV blocks that the adapter takes at a replica."""
    num_bytes: int = 1


def connect_at_front(adapters: Adapters, blueprint: Blueprint, model: LoadedModel) -> None:
    """Let the registry read adapters of this model. It keeps only their hashes and sizes."""
    block_bytes = footprint.block_bytes(model.spec, blueprint.compute.kv_dtype, blueprint.compute.block_size)

    def size_of(factors: AdapterFactors) -> AdapterSize:
        num_values = 0
        for a, b in factors.by_weight.values():
            num_values += (a.shape[1] + len(b)) * -(-len(a) // RANKS_TOGETHER) * RANKS_TOGETHER
        return AdapterSize(-(-BYTES_PER_VALUE * num_values // block_bytes))

    connect_adapters(adapters, blueprint, model, size_of)
