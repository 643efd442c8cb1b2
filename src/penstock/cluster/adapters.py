"""The adapters of a front: it reads and checks each of them once, for its hash and its size. Replicas compute with them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backends.native import footprint
from penstock.deploy.adapters import Adapters
from penstock.deploy.blueprint import Blueprint
from penstock.deploy.build import adapter_reader
from penstock.models.adapter import AdapterFactors
from penstock.models.weights import LoadedModel

BYTES_PER_VALUE = 2
"""At a replica: adapters are packed as bf16 or float16."""


@dataclass(frozen=True, slots=True)
class Noted:
    """All that is kept of an adapter here."""

    num_pages: int
    """KV blocks that it takes at a replica, about."""
    num_bytes: int = 1


def connect_adapters(adapters: Adapters, blueprint: Blueprint, model: LoadedModel) -> None:
    """Let the registry read adapters of this model, and keep what a front needs."""
    block_bytes = footprint.block_bytes(model.spec, blueprint.compute.kv_dtype, blueprint.compute.block_size)

    def note(factors: AdapterFactors) -> Noted:
        num_values = sum(a.size + b.size for a, b in factors.by_weight.values())
        return Noted(-(-BYTES_PER_VALUE * num_values // block_bytes))

    read = adapter_reader(blueprint.lora.max_lora_rank, model)
    adapters.connect(read, note, max_bytes=blueprint.adapters.num_bytes)
