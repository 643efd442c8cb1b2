"""Adapters of waiting requests: loading, the limit of running adapters, and refusals. Made by `Scheduler`.

While a request's adapter is loaded, later requests may pass it. A request is refused if its adapter can't be loaded, takes
longer than `LOAD_TIMEOUT_NS`, or does not fit. A plan reads an adapter's state once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.kv.manager import KVManager
from penstock.sched.queue import AwaitedAdapter, Queues
from penstock.sched.running import Running
from penstock.types.adapter import AdapterRef, AdapterSource, AdapterState, PackedAdapter
from penstock.types.errors import Rejected, RejectReason, counted
from penstock.types.request import Request

LOAD_TIMEOUT_NS = 10_000_000_000
KEPT_NS = 1_000_000_000
"""How long a row and blocks are reserved for a request that waits for its adapter."""
DEFAULT_MAX_ADAPTERS = 32
ADAPTER_NOT_LOADED = f"The adapter was not loaded within {LOAD_TIMEOUT_NS // 10**9} s. The log may say why."
NO_ADAPTERS = "The server has no adapters. Start it with --lora-modules or --lora-dir."


class Adapters:
    def __init__(
        self, kv: KVManager, running: Running, queues: Queues, source: AdapterSource | None, max_adapters: int
    ) -> None:
        if max_adapters < 1:
            raise ValueError(f"at least one adapter must be able to run, not {max_adapters}")
        self._kv = kv
        self._running = running
        self._queues = queues
        self._source = source
        self._max_adapters = max_adapters
        self.seen: dict[int, AdapterState] = {}
        """Adapter number -> its state, as read during this plan or check."""
        self._wanted: set[int] = set()
        """Adapters whose urgent load was requested during this plan."""

    def listen(self, wake: Callable[[], None]) -> None:
        if self._source is not None:
            self._source.listen(wake)

    def want(self, ref: AdapterRef) -> Rejected | None:
        """Start loading the adapter of a request. Return a refusal if the server has no adapters."""
        if self._source is None:
            return Rejected(RejectReason.INVALID, NO_ADAPTERS)
        if ref.number not in self._kv.adapters.residents:
            self._source.want(ref)
        return None

    def refusal(self, request: Request) -> Rejected | None:
        """Return why the request can never run with its adapter, or None. The adapter's size may be an estimate."""
        ref = request.adapter
        if ref is None or self._source is None:
            return None
        num_pages = self._kv.adapters.num_blocks(ref.number) or self._source.outlook(ref.number).num_pages
        return self._never_fits(request, num_pages)

    def _never_fits(self, request: Request, num_pages: int) -> Rejected | None:
        if not num_pages:
            return None
        num_blocks, num_total = self._running.final_blocks_alone(request), self._kv.num_total_blocks
        if num_pages + num_blocks <= num_total:
            return None
        detail = (
            f"The adapter takes {counted(num_pages, 'block')} of the KV cache and the request may take {num_blocks}, but there "
            f"are {num_total}. Ask for fewer tokens, or give the server more KV cache."
        )
        return Rejected(RejectReason.NEVER_FITS, detail)

    def look_up(self, request: Request, ref: AdapterRef) -> tuple[PackedAdapter | None, bool]:
        """Return a request's adapter if it is loaded and not in the KV pool, and whether the request can't join yet.

        It can't if its adapter is not loaded, which starts an urgent load, or does not fit beside the request.
        """
        packed = None
        if self._source is not None and ref.number not in self._kv.adapters.residents:
            packed = self._look(ref.number).packed
        num_blocks = self._kv.adapters.num_blocks(ref.number, packed)
        if num_blocks:
            return packed, num_blocks + self._running.final_blocks_alone(request) > self._kv.num_total_blocks
        if self._source is not None and ref.number not in self._wanted:
            self._wanted.add(ref.number)
            self._source.want(ref, is_urgent=True)
        return None, True

    def wait(self, ref: AdapterRef, now_ns: int) -> AwaitedAdapter:
        return AwaitedAdapter(ref, now_ns + KEPT_NS, now_ns + LOAD_TIMEOUT_NS)

    def is_full(self, ref: AdapterRef) -> bool:
        """Return whether a request with this adapter would exceed the limit of running adapters."""
        adapters = self._kv.adapters
        return adapters.num_pinned >= self._max_adapters and not adapters.is_pinned(ref.number)

    def are_late(self, now_ns: int) -> bool:
        """Return whether loads take so long that rows and blocks are no longer kept for waiting requests."""
        first = next(self._queues.adapters_aside, None)
        return first is not None and now_ns >= first[1].kept_until_ns

    def refused(self, now_ns: int) -> list[tuple[Request, Rejected]]:
        refused = list(self._to_refuse(now_ns))
        self.forget_seen()
        return refused

    def forget_seen(self) -> None:
        """Note that the plan or check is over: adapters' states may change until the next one."""
        self.seen.clear()
        self._wanted.clear()

    def _look(self, number: int) -> AdapterState:
        state = self.seen.get(number)
        if state is None:
            assert self._source is not None, "no request has an adapter without"
            state = self.seen[number] = self._source.state(number)
        return state

    def _to_refuse(self, now_ns: int) -> Iterator[tuple[Request, Rejected]]:
        for follower, awaited in self._queues.adapters_aside:
            if self._source is None:
                continue
            request, state = follower.request, self._look(awaited.ref.number)
            num_pages = self._kv.adapters.num_blocks(awaited.ref.number, state.packed)
            rejected = self._never_fits(request, num_pages)
            if rejected is not None:
                yield request, rejected
            elif num_pages:
                continue
            elif state.failure:
                yield request, Rejected(state.reason, state.failure)
            elif now_ns >= awaited.until_ns:
                yield request, Rejected(RejectReason.UNAVAILABLE, ADAPTER_NOT_LOADED)

    def wakeup_ns(self, now_ns: int) -> int | None:
        has_refusals = any(self._to_refuse(now_ns))
        self.forget_seen()
        if has_refusals:
            return now_ns
        times = (
            awaited.kept_until_ns if now_ns < awaited.kept_until_ns else awaited.until_ns
            for _, awaited in self._queues.adapters_aside
        )
        return min(times, default=None)
