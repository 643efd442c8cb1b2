"""Simulates the clients of a workload and one or several servers on a virtual clock.

At each instant a step ends, then requests arrive, then the next step is planned, as in the engine. With prefill replicas, one
of them computes the prompt and the first token. The prompt's KV then moves over its link into the prefix cache of the least
loaded decode replica, which gets a request for the other tokens. KV that does not fit, or is evicted meanwhile, is computed
again.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

from penstock.clock import VirtualClock
from penstock.lab.agenda import NEVER_NS
from penstock.lab.arrivals import num_arrivals
from penstock.lab.front import Front
from penstock.lab.links import Link, copy_kv, fresh_copy, place_kv
from penstock.lab.pacing import Pace
from penstock.lab.records import Record
from penstock.lab.scaling import Crew, Scaled, Scaling
from penstock.lab.simulated_executor import TOKEN_ID
from penstock.lab.traffic import Call, Traffic
from penstock.lab.virtual_server import Player, ServerSettings, Timeline, VirtualServer
from penstock.lab.workload import NS_PER_S, Workload
from penstock.sched.routing.dispatcher import Choice
from penstock.sched.routing.routers import RoundRobin, Router
from penstock.types.errors import ConfigError, PolicyError, Rejected
from penstock.types.events import TokenEvent
from penstock.types.plan import StepPlan
from penstock.types.request import FinishReason, Request
from penstock.types.stats import RequestStats

MOST_IDLE_TURNS = 100_000
"""Turns in a row without a step, after the last event on the agenda, at which a gate counts as closed forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    records: Sequence[Record]
    """One record for each job, in the order of the jobs, as a client would have written it."""
    ended: Sequence[RequestStats]
    """The engine's stats of each request that it accepted, in the order of the jobs."""
    duration_ns: int
    num_steps: int
    busy_ns: int
    """Time of all steps."""
    settings: ServerSettings
    timelines: Mapping[str, Timeline]
    num_outside: int = 0
    outside: Mapping[str, int] = field(default_factory=dict)
    num_guesses: int = 0
    num_accepted: int = 0
    mean_replicas: float
    """Replicas in the mean over the run, prefill replicas included."""
    scaled: Scaled | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(ServerSettings):
    """One or several identical simulated servers and their clients, as settings. Each run starts afresh."""

    num_replicas: int = 1
    """Initial replicas."""
    scaling: Scaling | None = None
    num_prefill_replicas: int = 0
    link: Link | None = None
    """The outgoing link of each prefill replica. Without prefill replicas: the link to copy a prompt's KV to another one."""
    make_router: Callable[[], Router] = RoundRobin
    max_tokens: int | None = 2048
    """`max_tokens` of every request; outputs end earlier with a stop token. None asks for exactly the output's length."""
    max_returns: int = 0
    """How often a refused request is sent again, after the time in `Retry-After`."""
    seed: int = 0
    """Seed of the cost model's noise."""

    def __post_init__(self) -> None:
        if self.scaling is not None:
            if self.num_prefill_replicas:
                raise ConfigError("Prefill replicas don't scale.", remedy="Set one number of replicas, or no prefill replicas.")
            if not self.scaling.least <= self.num_replicas <= self.scaling.most:
                raise ConfigError(f"{self.num_replicas} initial replicas are outside the bounds of the scaling.")
        elif self.num_replicas < 1 or self.num_prefill_replicas < 0:
            raise ConfigError("A simulation needs at least one replica, and the number of prefill replicas can't be negative.")
        if self.num_prefill_replicas and self.link is None:
            raise ConfigError("Prefill replicas need a link to the others.")
        if self.num_prefill_replicas and not self.enable_prefix_caching:
            raise ConfigError(
                "KV that comes from another replica arrives in the prefix cache, which is off.",
                remedy="Leave out --no-prefix-caching.",
            )

    def run(
        self,
        workload: Workload,
        *,
        pace: Pace | None = None,
        predictions: Mapping[int, int] | None = None,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> Outcome:
        """Serve the jobs until all have ended. A job's request id is its index.

        `predictions`: index -> predicted output length; other jobs use the policies' predictor. `on_plan` is called with each
        plan of every replica. Raises RuntimeError if requests wait and no server will ever run them.
        """
        clock = VirtualClock()
        traffic = Traffic(
            workload,
            clock,
            self,
            pace=pace,
            max_tokens=self.max_tokens,
            max_returns=self.max_returns,
            predictions=predictions,
        )
        fleet = _Fleet(self, clock, traffic)
        traffic.begin(fleet)
        play(clock, traffic, fleet.all_servers, fleet.due, on_plan, has_ticks=self.scaling is not None)
        servers, scaled = fleet.all_servers, None if fleet.crew is None else fleet.crew.outcome()
        mean_replicas: float = self.num_replicas + self.num_prefill_replicas
        if scaled is not None:
            mean_replicas = scaled.replica_ns / max(1, clock.now_ns())
        return Outcome(
            records=sorted(traffic.records, key=lambda record: record.index),
            ended=[stats for _, stats in sorted(fleet.ended.items(), key=lambda item: int(item[0]))],
            duration_ns=clock.now_ns(),
            num_steps=sum(server.num_steps for server in servers),
            busy_ns=sum(server.busy_ns for server in servers),
            settings=self,
            timelines={name: server.timeline for name, server in fleet.servers.items()},
            num_outside=sum(server.times.num_outside for server in servers),
            outside=sum((Counter(server.times.outside) for server in servers), Counter[str]()),
            num_guesses=sum(server.num_guesses for server in servers),
            num_accepted=sum(server.num_accepted for server in servers),
            mean_replicas=mean_replicas,
            scaled=scaled,
        )

    def capacity_per_s(self, workload: Workload) -> float:
        """Return the arrivals per second that the servers keep up with: of requests, or of conversations.

        The ramp-up and drain of a saturated run count; `plan.saturated_rate` may leave them out. Raises ConfigError if the
        servers refuse every request.
        """
        jobs = [replace(job, cancelled_after_tokens=None) for job in workload.jobs]
        outcome = self.saturate(replace(workload, jobs=jobs))
        if not outcome.duration_ns:
            raise ConfigError(
                f"The servers refuse every request of this workload ({outcome.records[0].error}).",
                remedy="Cut them with --max-input-tokens and --max-output-tokens, or raise --max-model-len or --blocks.",
            )
        return num_arrivals(workload) / (outcome.duration_ns / NS_PER_S)

    def saturate(self, workload: Workload) -> Outcome:
        """Run a workload with all arrivals at once and no think times, and without deadlines, timeouts and refusals.

        Clients leave only after a number of tokens. All replicas of a scaled group serve from the start.
        """
        jobs = [replace(job, arrival_ns=0, deadline_ns=None, cancelled_ns=None) for job in workload.jobs]
        unlimited = replace(self, limits=None, request_timeout_ns=None, queue_timeout_ns=None, first_token_timeout_ns=None)
        if self.scaling is not None:
            unlimited = replace(unlimited, num_replicas=self.scaling.most, scaling=None)
        return unlimited.run(replace(workload, jobs=jobs))


def play(
    clock: VirtualClock,
    traffic: Traffic,
    servers: Sequence[VirtualServer],
    due: list[tuple[int, int]],
    on_plan: Callable[[StepPlan], None] | None = None,
    *,
    has_ticks: bool = False,
) -> None:
    """Run clients and servers in the order of time. At equal times clients act first, then servers by number.

    `due`: heap of (instant, number of a server), which `note_due` fills. Stale entries are skipped.
    `has_ticks`: one entry of the agenda is the scaling's, which returns every second.
    Raises PolicyError if a gate is called again and again and never opens.
    """
    agenda, num_ticks, num_idle = traffic.agenda, int(has_ticks), 0
    with _without_collector():
        while True:
            while due and servers[due[0][1]].player.next_ns != due[0][0]:
                heappop(due)
            next_ns, number = due[0] if due else (NEVER_NS, 0)
            if agenda.due_ns <= next_ns:
                if agenda.due_ns == NEVER_NS or (next_ns == NEVER_NS and traffic.is_over):
                    return
                clock.advance_to(agenda.due_ns)
                agenda.act()
                continue
            clock.advance_to(next_ns)
            heappop(due)
            servers[number].act()
            player = servers[number].player
            if player.next_ns != NEVER_NS:
                note_due(due, player, number)
            if player.begun is not None or len(agenda) > num_ticks:
                num_idle = 0
            elif (num_idle := num_idle + 1) == MOST_IDLE_TURNS:
                num_idle = 0
                if not any(server.player.is_computing for server in servers):
                    what = f"was called {MOST_IDLE_TURNS:,} times without a step between, while all clients wait"
                    raise PolicyError("gate", servers[number].settings.make_policies().gate, what)
            if on_plan is not None and player.begun is not None:
                on_plan(player.begun)


def note_due(due: list[tuple[int, int]], player: Player, number: int) -> None:
    heappush(due, (player.next_ns, number))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection in the block, for speed: requests, plans and events form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Fleet:
    def __init__(self, simulation: Simulation, clock: VirtualClock, traffic: Traffic) -> None:
        self.ended: dict[str, RequestStats] = {}
        self.all_servers: list[VirtualServer] = []
        """All servers so far, including those that have left."""
        self.servers: dict[str, VirtualServer] = {}
        self.due: list[tuple[int, int]] = []
        """See `play`."""
        self._simulation, self._traffic, self._clock, self._link = simulation, traffic, clock, simulation.link
        kind, count = "replica", simulation.num_replicas
        if simulation.num_prefill_replicas:
            kind, count = "prefill", simulation.num_prefill_replicas
        self._front: Front | None = None
        have_links = simulation.link is not None and kind != "prefill"
        self._moves_answers = have_links and simulation.slo_itl_ns is not None
        self.crew: Crew | None = None
        if count == 1 and simulation.scaling is None:
            self._make(kind, 0)
        else:
            self._front = Front(
                simulation.make_router(),
                simulation.capacity.block_size,
                partial(self._make, kind),
                has_prefix_caching=simulation.enable_prefix_caching,
                slo_itl_ns=simulation.slo_itl_ns,
                have_links=have_links,
            )
            for _ in range(count):
                self._front.join()
            if simulation.scaling is not None:
                limits, max_rows = simulation.limits, simulation.capacity.max_rows
                # The front of a cluster without replicas assumes an idle one, whose rows it fills before its queue.
                max_held = None if limits is None else limits.max_queue + max_rows
                self.crew = Crew(simulation.scaling, self._front, clock, traffic, max_held=max_held)
                count = simulation.scaling.most
        self._names = [f"{kind} {number}" for number in range(count)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._decode_names = [f"decode {number}" for number in range(simulation.num_replicas)] if kind == "prefill" else []
        for number in range(len(self._decode_names)):
            self._make("decode", number)
        self._free_ns = dict.fromkeys(self._names, 0)
        self._places: dict[str, str] = {}
        """Id of a call in flight -> its replica."""
        self._prefilled: dict[str, RequestStats] = {}
        """Id of a call that moved after its first token -> its stats from its first replica."""
        self._moved_away: dict[str, set[str]] = {name: set() for name in self._names}
        """Replica -> ids of calls that moved to another replica, until this one reports their abort."""
        self._moving: set[str] = set()
        """Ids of calls whose KV is on its way from a prefill replica to a decode replica."""
        self._texts_read_ns = 0
        """When the texts of all calls so far are read."""
        self._coming: dict[str, Request] = {}
        """Id of a call whose text becomes tokens, or that waits for KV from another replica -> the request to begin."""

    def _make(self, kind: str, number: int) -> VirtualServer:
        """Make a server. If the name was used before, continue the earlier server's timeline."""
        simulation, name = self._simulation, f"{kind} {number}"
        settings = simulation if kind != "decode" else replace(simulation, limits=None)
        seed = f"{simulation.seed} {len(self.all_servers)}"
        server = VirtualServer(settings, self._clock, report=partial(self._report, name), seed=seed)
        if name in self.servers:
            server.timeline = self.servers[name].timeline
        server.player.on_woken = partial(note_due, self.due, server.player, len(self.all_servers))
        self.all_servers.append(server)
        self.servers[name] = server
        return server

    # Calls: submitted, aborted, routed.

    def submit(self, call: Call) -> None:
        """Begin a call once its text is read, after those before it. Its replica is chosen before, unlike in a real cluster."""
        if self.crew is not None and self.crew.hold(call):
            return
        request, name, choice = call.request, self._names[0], None
        if self._decode_names:  # a prefill replica computes only the first token
            request = fresh_copy(request, sampling=replace(request.sampling, max_tokens=1))
        if self._front is not None:
            draining = () if self.crew is None else self.crew.draining
            choice = self._front.choose(request, call.record.index, self._clock.now_ns(), draining)
            name = self._names[choice.replica]
        try:
            self.servers[name].accept(request, call.job.num_output_tokens, call.ask)
        except Rejected:
            if self._front is not None:
                self._front.dispatcher.on_end(request.request_id)
            raise
        self._places[request.request_id] = name
        if text_ns := self._simulation.cost.prompt_ns(request.num_prompt_tokens):
            self._texts_read_ns = max(self._clock.now_ns(), self._texts_read_ns) + text_ns
            self._note(self._texts_read_ns, request, partial(self._begin, name, request, choice))
        else:
            self._begin(name, request, choice)

    def _begin(self, name: str, request: Request, choice: Choice | None) -> None:
        if choice is None or not self._fetch(request, choice):
            self.servers[name].begin(request)

    def _note(self, at_ns: int, request: Request, begin: Callable[[], None]) -> None:
        """Call `begin` at an instant, unless the request is aborted before."""
        self._coming[request.request_id] = request

        def act() -> None:
            if self._coming.pop(request.request_id, None) is not None:
                begin()

        self._traffic.agenda.note(at_ns, act)

    def abort(self, call: Call) -> None:
        request_id = call.request.request_id
        if self.crew is not None and self.crew.abort(call):
            return
        if request_id not in self._moving:
            server = self.servers[self._places[request_id]]
            if (request := self._coming.pop(request_id, None)) is not None:
                server.begin(request)
            server.abort(request_id)
            return
        self._moving.discard(request_id)
        event = TokenEvent(request_id, (), self._clock.now_ns(), finish_reason=FinishReason.ABORT)
        self._end(event, replace(self._prefilled[request_id], ended_ns=event.at_ns, finish_reason=FinishReason.ABORT))

    # Events of replicas.

    def _report(self, name: str, events: list[TokenEvent], _now_ns: int) -> None:
        if self._moved_away.get(name):
            events = self._without_moved(name, events)
        self._traffic.tell(events)
        ended = self.servers[name].ended
        if self._front is not None and name in self._numbers:
            self._front.tell(self._numbers[name], events, ended)
        for event in events:
            if event.finish_reason is None:
                if self._moves_answers:
                    self._hand_over(name, event.request_id)
                continue
            request_id = event.request_id
            stats = ended.pop(request_id)
            if request_id in self._prefilled:
                self._end(event, _joined(self._prefilled[request_id], stats))
            elif self._decode_names and self._goes_on(event):
                self._prefilled[request_id] = stats
                self._move(name, request_id)
            else:
                self._end(event, stats)

    def _without_moved(self, name: str, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Return the events of calls that are still at this replica. Store the stats of moved calls in `_prefilled`."""
        left, ended = self._moved_away[name], self.servers[name].ended
        for event in events:
            if event.request_id in left and event.finish_reason is not None:
                left.discard(event.request_id)
                self._prefilled[event.request_id] = ended.pop(event.request_id)
        return [event for event in events if self._places.get(event.request_id) == name]

    def _goes_on(self, event: TokenEvent) -> bool:
        call = self._traffic.calls[event.request_id]
        return event.finish_reason is FinishReason.LENGTH and call.request.sampling.max_tokens > 1

    def _end(self, event: TokenEvent, stats: RequestStats) -> None:
        self._places.pop(event.request_id, None)  # the engine can refuse a call before `submit` has noted its replica
        self._prefilled.pop(event.request_id, None)
        self.ended[event.request_id] = stats
        self._traffic.end(event, stats)

    # Copying KV of a prompt from another replica.

    def _fetch(self, request: Request, choice: Choice) -> bool:
        """Begin to copy KV from the chosen source, unless computing it is faster. Return whether the request waits for it."""
        link, source = self._link, choice.source
        if link is None or source is None:
            return False
        giver, taker = self._names[source], self.servers[self._names[choice.replica]]
        num_tokens = choice.num_source_tokens - choice.num_held_tokens
        if 0 < taker.core.scheduler.prefill_ns_per_token * num_tokens < link.busy_ns(num_tokens) + link.latency_ns:
            return False
        self._copy(giver, taker, request, choice.num_source_tokens, num_tokens)
        return True

    def _copy(self, giver: str, taker: VirtualServer, request: Request, num_tokens: int, num_missing: int) -> None:
        """Send the KV of `num_missing` tokens over the link. Then cache the KV of `num_tokens`, and begin the request."""
        link = self._link
        assert link is not None, "replicas have links"
        self._free_ns[giver] = max(self._clock.now_ns(), self._free_ns[giver]) + link.busy_ns(num_missing)

        def begin() -> None:
            copy_kv(self.servers[giver], taker, request, num_tokens)
            taker.begin(request)

        self._note(self._free_ns[giver] + link.latency_ns, request, begin)

    # Moving an answer after its first token.

    def _hand_over(self, name: str, request_id: str) -> None:
        """Move a call to another replica after its first token, if the dispatcher says so."""
        call = self._traffic.calls[request_id]
        if self._front is None or call.gaps_ns or call.request.sampling.max_tokens == 1:
            return
        number = self._front.dispatcher.hand_over(request_id, () if self.crew is None else self.crew.draining)
        if number is not None:
            self.servers[name].abort(request_id)
            self._moved_away[name].add(request_id)
            self._places[request_id] = self._names[number]
            taker, request, num_tokens = self.servers[self._names[number]], self._rest(call), call.request.num_prompt_tokens
            taker.accept(request, call.job.num_output_tokens - 1)
            self._copy(name, taker, request, num_tokens, num_tokens)

    def _move(self, name: str, request_id: str) -> None:
        """Send a prompt's KV from a prefill replica over its link. `_begin_decode` runs when the KV arrives."""
        assert self._link is not None, "a split has a link"
        call = self._traffic.calls[request_id]
        start_ns = max(self._clock.now_ns(), self._free_ns[name])
        self._free_ns[name] = start_ns + self._link.busy_ns(call.request.num_prompt_tokens)
        self._moving.add(request_id)
        self._traffic.agenda.note(self._free_ns[name] + self._link.latency_ns, lambda: self._begin_decode(call))

    def _begin_decode(self, call: Call) -> None:
        request_id = call.request.request_id
        if request_id not in self._moving:
            return  # its client has left
        self._moving.discard(request_id)
        name = min(self._decode_names, key=lambda one: (self.servers[one].num_in_flight, self.servers[one].num_prompt_tokens))
        self._places[request_id] = name
        request = self._rest(call)
        place_kv(self.servers[name], request)
        self.servers[name].submit(request, call.job.num_output_tokens - 1)

    def _rest(self, call: Call) -> Request:
        """Return a request for the tokens after the first, which met the deadlines for the queue and the first token."""
        return fresh_copy(
            call.request,
            prompt_token_ids=(*call.request.prompt_token_ids, TOKEN_ID),
            sampling=replace(call.request.sampling, max_tokens=call.request.sampling.max_tokens - 1),
            arrival_ns=self._clock.now_ns(),
            queue_deadline_ns=None,
            first_token_deadline_ns=None,
        )


def _joined(first: RequestStats, last: RequestStats) -> RequestStats:
    return replace(
        first,
        ended_ns=last.ended_ns,
        num_generated_tokens=first.num_generated_tokens + last.num_generated_tokens,
        num_preemptions=first.num_preemptions + last.num_preemptions,
        finish_reason=last.finish_reason,
        reject_reason=last.reject_reason,
    )
