"""Adapters, as requests, plans and executors name them: low-rank changes of a model's matrices that one request has and another
has not. `kv/adapters.py` says where one lies in the KV pool, an `AdapterSource` where its content comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types.errors import RejectReason

BASE = 0
"""The number of no adapter: the model as it is."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""The files of an adapter's folder, as PEFT names them."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class AdapterRef:
    """An adapter that a request asks for. There is one object of each: as long as anybody has it, its source keeps the adapter
    rather than others.
    """

    number: int
    """Greater than `BASE`, and never another adapter's in this process, also after it was unloaded."""
    fingerprint: bytes = b""
    """16 bytes, the hash of its files; cached prefixes of another fingerprint are not its own. The source writes it when the
    adapter has been read for the first time; empty before."""


class PackedAdapter(Protocol):
    """An adapter in the form that an executor's kernels read; another executor of the same model and settings takes it, too."""

    @property
    def num_pages(self) -> int:
        """Blocks of the KV pool that it takes; at least 1."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the host's memory that it takes."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """An adapter that the executor puts into blocks before the next submitted step, after copies of blocks."""

    number: int
    packed: PackedAdapter
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterState:
    """How far an adapter has come. If neither field is set it is not in memory, and may be on its way."""

    packed: PackedAdapter | None = None
    """Its content, in the host's memory, which stays there for as long as anybody has this object."""
    failure: str = ""
    """Why it can't be had, in a sentence for the user: file, tensor, what was found and what was wanted."""
    reason: RejectReason = RejectReason.INVALID
    """The same in a word: UNAVAILABLE if whoever asked is not to blame."""


@dataclass(frozen=True, slots=True)
class AdapterOutlook:
    """The expectations of a request that asks for an adapter."""

    num_pages: int = 0
    """Blocks of the KV pool that it takes; 0: it was never in memory, and nobody knows."""
    likely_pages: int = 0
    """The same; if nobody knows, the mean of those that were loaded."""
    load_ns: int = 0
    """Expected time until it is in memory, by the mean of the loads so far: those before it and its own. 0 if it is there."""


class AdapterSource(Protocol):
    """Brings adapters to the host's memory. That has room for so many: those that were asked for least recently leave it."""

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        """Load it, unless it is there or on its way. Returns at once; for any thread.

        Urgent ones come before all others, also before those that were wanted earlier: somebody's turn has come.
        """
        ...

    def state(self, number: int) -> AdapterState:
        """How far it has come; asking for one that is there makes it the one that was asked for last. For any thread."""
        ...

    def outlook(self, number: int) -> AdapterOutlook:
        """A request is told what to expect of it. Nothing changes by asking. For any thread."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a load has ended, well or not; who listened before is not called any more."""
        ...


class NoAdapters:
    """The part of an executor that computes no adapters."""

    @property
    def max_adapter_rank(self) -> int:
        return 0

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        """Raises ValueError: whoever asks has not read `max_adapter_rank`."""
        del packed, block_ids
        raise ValueError(f"adapter {number} is to be placed in an executor that computes none")

    def drop_adapter(self, number: int) -> None:
        """Nothing is there."""
