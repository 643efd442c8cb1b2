"""Adapters (LoRA) as requests, plans and executors name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types.errors import RejectReason

BASE = 0
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"  # file names in an adapter's folder, as in PEFT


@dataclass(frozen=True, slots=True)
class MergedAdapter:
    """An adapter that becomes part of a model's weights."""

    path: str
    weight: float = 1.0  # factor of its change


@dataclass(slots=True, weakref_slot=True, eq=False)
class AdapterRef:
    """An adapter that requests name, one object per adapter. Adapters without references are evicted from memory first."""

    number: int  # greater than `BASE`, and never reused in this process
    fingerprint: bytes = b""
    """16-byte hash of the files, for the keys of cached prefixes. Empty until the source has read the adapter once."""


class PackedAdapter(Protocol):
    """An adapter in the layout that kernels read. All executors of the same model and settings can share it."""

    @property
    def num_pages(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """An adapter that the executor writes into blocks before the next step, after block copies."""

    number: int
    packed: PackedAdapter
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterState:
    packed: PackedAdapter | None = None
    """The content in host memory. It stays there while anyone holds this object."""
    failure: str = ""  # why the adapter can't be loaded, for the user
    reason: RejectReason = RejectReason.INVALID  # UNAVAILABLE if the failure is not the user's fault


@dataclass(frozen=True, slots=True)
class AdapterOutlook:
    """The expected cost of an adapter to a request."""

    num_pages: int = 0  # KV blocks; 0 if the adapter was never loaded
    likely_pages: int = 0  # `num_pages`, or the mean over loaded adapters
    load_ns: int = 0  # expected time until it is in memory, including queued loads


class AdapterSource(Protocol):
    """Loads adapters into host memory, which holds a limited number. Any thread may call."""

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        """Start loading an adapter, unless it is loaded or queued. Urgent loads go before all others."""
        ...

    def state(self, number: int) -> AdapterState:
        """Return the adapter's load state, and mark it as most recently used."""
        ...

    def outlook(self, number: int) -> AdapterOutlook: ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a load has ended. Replaces the previous listener."""
        ...


class NoAdapters:
    @property
    def max_adapter_rank(self) -> int:
        return 0

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        """Raise ValueError: this executor computes no adapters, as its `max_adapter_rank` of 0 says."""
        del packed, block_ids
        raise ValueError(f"adapter {number} is to be placed in an executor that computes none")

    def drop_adapter(self, number: int) -> None:
        """Do nothing: no adapter was placed."""
