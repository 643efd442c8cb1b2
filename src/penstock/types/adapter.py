"""Adapters (LoRA) as requests, plans and executors name them. `kv/adapters.py` places them in the KV pool; an
`AdapterSource` loads their content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types.errors import RejectReason

BASE = 0
"""The adapter number of the plain model."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""File names in an adapter's folder, as in PEFT."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class AdapterRef:
    """An adapter that a request names. One object per adapter: while anyone holds it, the source evicts other adapters
    first."""

    number: int
    """Greater than `BASE`. Never reused in this process, even after the adapter was unloaded."""
    fingerprint: bytes = b""
    """Hash of the files, 16 bytes: part of the key of cached prefixes. Empty until the source has read the adapter once."""


class PackedAdapter(Protocol):
    """An adapter in the layout that an executor's kernels read. Any executor of the same model and settings accepts it."""

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
    """The load state of an adapter. With neither field set it is not in memory, and may be on its way."""

    packed: PackedAdapter | None = None
    """The content in host memory. It stays there while anyone holds this object."""
    failure: str = ""
    """Why it can't be loaded, as a sentence for the user: file, tensor, what was found and what was expected."""
    reason: RejectReason = RejectReason.INVALID
    """UNAVAILABLE if the failure is not the user's fault."""


@dataclass(frozen=True, slots=True)
class AdapterOutlook:
    """The expected cost of an adapter to a request."""

    num_pages: int = 0
    """KV blocks that it occupies; 0 if it was never loaded, so the size is unknown."""
    likely_pages: int = 0
    """`num_pages`, or the mean over loaded adapters where that is unknown."""
    load_ns: int = 0
    """Expected time until it is in memory: the queued loads and its own, at the mean duration. 0 if it is there."""


class AdapterSource(Protocol):
    """Loads adapters into host memory, which holds a limited number: the least recently requested are dropped."""

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        """Start loading, unless it is there or on its way. Returns at once; any thread may call.

        Urgent loads, for requests whose turn has come, go before all others.
        """
        ...

    def state(self, number: int) -> AdapterState:
        """Return the load state, and mark the adapter as most recently used. Any thread may call."""
        ...

    def outlook(self, number: int) -> AdapterOutlook:
        """Return what a request should expect, without side effects. Any thread may call."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a load has ended. Replaces the previous listener."""
        ...


class NoAdapters:
    """Mixin for executors without adapter support."""

    @property
    def max_adapter_rank(self) -> int:
        return 0

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        """Raises ValueError: the caller ignored `max_adapter_rank`."""
        del packed, block_ids
        raise ValueError(f"adapter {number} is to be placed in an executor that computes none")

    def drop_adapter(self, number: int) -> None:
        """Do nothing."""
