"""The router of a simulation with several servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import overload

from penstock.admission.estimates import Lengths
from penstock.kv.changes import ChangeLog
from penstock.lab.virtual_server import VirtualServer
from penstock.sched.routing.dispatcher import Choice, Dispatcher
from penstock.sched.routing.routers import Router
from penstock.types.events import TokenEvent
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineLoad, RequestStats


class Front:
    """The dispatcher of several simulated servers, which learns loads and caches from their events."""

    def __init__(
        self,
        router: Router,
        block_size: int,
        make: Callable[[int], VirtualServer],
        *,
        has_prefix_caching: bool,
        slo_itl_ns: int | None,
        have_links: bool,
    ) -> None:
        """`make` makes the server of a new replica, given its number. `have_links`: replicas copy KV from each other."""
        self._have_links = have_links
        self.dispatcher = Dispatcher(router, 0, block_size, has_prefix_caching=has_prefix_caching, slo_itl_ns=slo_itl_ns)
        self.servers: list[VirtualServer] = []
        """Servers by replica number. One that has left stays until its number is reused."""
        self.loads = _Loads(self.servers)
        self._make = make
        self._lengths = Lengths()
        self._logs: list[ChangeLog] = []

    def join(self) -> int:
        """Add a replica, and return its number."""
        number, log = self.dispatcher.join(gives=self._have_links), ChangeLog()
        server = self._make(number)
        server.core.scheduler.kv.prefix.index.log = log
        server.on_step_done = self.dispatcher.on_step
        self.servers[number : number + 1] = [server]
        self._logs[number : number + 1] = [log]
        return number

    def choose(self, request: Request, index: int, now_ns: int, but_not: Collection[int] = ()) -> Choice:
        return self.dispatcher.choose(
            request,
            self.dispatcher.names_of(request),
            self.loads,
            index=index,
            now_ns=now_ns,
            num_new_tokens=self._lengths.new_tokens(1, request.sampling.max_tokens),
            but_not=but_not,
        )

    def tell(self, number: int, events: Sequence[TokenEvent], ended: Mapping[str, RequestStats]) -> None:
        """Report a server's events and cache changes to the dispatcher. `ended`: request id -> stats."""
        dispatcher = self.dispatcher
        dispatcher.hear(number, self._logs[number].take())
        for event in events:
            if event.token_ids:
                dispatcher.on_tokens(event.request_id, len(event.token_ids))
            if event.finish_reason is not None:
                dispatcher.on_end(event.request_id)
            if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                stats = ended[event.request_id]
                self._lengths.on_end(stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens)


class _Loads(Sequence[EngineLoad]):
    """The load of each server, read on demand: a router may look at two of a thousand servers."""

    def __init__(self, servers: Sequence[VirtualServer]) -> None:
        self._servers = servers

    def __len__(self) -> int:
        return len(self._servers)

    @overload
    def __getitem__(self, number: int) -> EngineLoad: ...

    @overload
    def __getitem__(self, number: slice) -> list[EngineLoad]: ...

    def __getitem__(self, number: int | slice) -> EngineLoad | list[EngineLoad]:
        if isinstance(number, slice):
            return [server.load() for server in self._servers[number]]
        return self._servers[number].load()
