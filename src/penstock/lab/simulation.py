"""The simulation: the clients of a workload and virtual servers on one virtual clock.

At each instant a step ends, then requests come, then the next step is planned. So a plan sees everything that has happened by
then, as in the engine.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.clock import VirtualClock
from penstock.lab.pacing import Pace
from penstock.lab.records import Record
from penstock.lab.traffic import Agenda, Call, Traffic
from penstock.lab.virtual_server import NEVER_NS, ServerSettings, Timeline, VirtualServer
from penstock.lab.workload import Workload
from penstock.types.events import TokenEvent
from penstock.types.plan import StepPlan
from penstock.types.stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    records: Sequence[Record]
    """One for each job, in the order of the jobs, as a client would have written them."""
    ended: Sequence[RequestStats]
    """The engine's stats of each request that reached it, in the order of the jobs."""
    duration_ns: int
    """From instant 0 until the last job had ended."""
    num_steps: int
    settings: ServerSettings
    """Of the servers."""
    timelines: Mapping[str, Timeline]
    """Name of a server -> how full it was."""
    num_outside: int = 0
    """Steps outside of the range that the cost model was fitted to."""
    outside: Mapping[str, int] = field(default_factory=dict)
    """An exceeded limit -> steps that exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(ServerSettings):
    """One server that can be run any number of times."""

    max_tokens: int | None = 2048
    """The limit that clients send; outputs end by themselves. None: each asks for exactly the tokens of its output."""
    max_returns: int = 0
    """How often a refused client comes back, as Retry-After says."""
    seed: int = 0
    """Of the cost model's noise."""

    def run(
        self,
        workload: Workload,
        *,
        pace: Pace | None = None,
        predictions: Mapping[int, int] | None = None,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> Outcome:
        """Serve the jobs until all have ended. A job's request id is its index.

        `predictions`: index -> predicted output length; the policies' predictor handles the others.
        """
        clock = VirtualClock()
        traffic = Traffic(
            workload, clock, self, pace=pace, max_tokens=self.max_tokens, max_returns=self.max_returns, predictions=predictions
        )
        house = _House(self, clock, traffic, seed=self.seed)
        traffic.begin(house)
        play(clock, traffic.agenda, [house.server], on_plan)
        return outcome_of(traffic, clock, {"server": house.server}, house.server.ended)


class _House:
    """One server that gets every request."""

    def __init__(self, settings: ServerSettings, clock: VirtualClock, traffic: Traffic, *, seed: int) -> None:
        self.server = VirtualServer(settings, clock, tell=self._tell, seed=seed)
        self._traffic = traffic

    def submit(self, call: Call) -> None:
        self.server.submit(call.request, call.job.num_output_tokens, call.ask)

    def abort(self, call: Call) -> None:
        self.server.abort(call.request.request_id)

    def _tell(self, events: list[TokenEvent], now_ns: int) -> None:
        traffic, ended = self._traffic, self.server.ended
        traffic.tell(events, now_ns)
        for event in events:
            if event.finish_reason is not None:
                traffic.end(event, ended[event.request_id])


def play(
    clock: VirtualClock, agenda: Agenda, servers: Sequence[VirtualServer], on_plan: Callable[[StepPlan], None] | None = None
) -> None:
    """Let everything happen in the order of time. Of servers whose turns are due at once the first goes first.

    Raises RuntimeError if requests are left and nothing will ever wake a server.
    """
    with _without_collector():
        while True:
            server = servers[0] if len(servers) == 1 else min(servers, key=lambda one: one.player.next_ns)
            next_ns = server.player.next_ns
            if agenda.due_ns <= next_ns:
                if agenda.due_ns == NEVER_NS:
                    return
                clock.advance_to(agenda.due_ns)
                agenda.act()
                continue
            clock.advance_to(next_ns)
            server.act()
            if on_plan is not None and server.player.begun is not None:
                on_plan(server.player.begun)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Run without the search for cycles: requests, plans and events form none, and there are many."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def outcome_of(
    traffic: Traffic, clock: VirtualClock, servers: Mapping[str, VirtualServer], ended: Mapping[str, RequestStats]
) -> Outcome:
    outside: Counter[str] = Counter()
    for server in servers.values():
        outside.update(server.times.outside)
    return Outcome(
        records=sorted(traffic.records, key=lambda record: record.index),
        ended=[stats for _, stats in sorted(ended.items(), key=lambda item: int(item[0]))],
        duration_ns=clock.now_ns(),
        num_steps=sum(server.num_steps for server in servers.values()),
        settings=next(iter(servers.values())).settings,
        timelines={name: server.timeline for name, server in servers.items()},
        num_outside=sum(server.times.num_outside for server in servers.values()),
        outside=outside,
    )
