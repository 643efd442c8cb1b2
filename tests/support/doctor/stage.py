"""A server in virtual time, with clients that make it ill or leave it well, and the pages that it then shows.

Everything but the executor is real: scheduler, admission, journal, metrics, the JSON of explanations and the text of metrics.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.admission.ask import Ask
from penstock.cli.doctor import predictor_of
from penstock.clock import Clock, VirtualClock
from penstock.config.components import config_from
from penstock.deploy.forecast import simulation_of
from penstock.engine.ports import NullObserver, Observer, RequestJournal
from penstock.engine.transfers import Transfers
from penstock.kv.tiers import Tier
from penstock.lab.agenda import NEVER_NS, Agenda
from penstock.lab.cost_model import CostModel
from penstock.lab.doctor import Diagnosis, diagnose
from penstock.lab.evidence import Evidence, Scrape, visits_of
from penstock.lab.simulated_executor import EOS_TOKEN_ID
from penstock.lab.virtual_server import VirtualServer
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.obs.prometheus import expose
from penstock.obs.recording import Recorder
from penstock.obs.signals import Signals
from penstock.serve.ops.requests import choice_of
from penstock.serve.ops.status import capacity_of
from penstock.testing import HashExecutor, make_core, make_request
from penstock.testing.driver import Driver
from penstock.types.errors import Rejected
from penstock.types.events import Add, Command, TokenEvent
from penstock.types.plan import Capacity
from penstock.types.request import NO_WAITS, Request, WaitTimes
from penstock.types.stats import PlanNews, RequestStats, StepStats
from support.fake_adapters import FakeAdapters, make_adapter
from support.memory_store import MemoryStore

MODEL, SECOND_NS = "model", 1_000_000_000
MAX_LISTED = 100
"""Ended requests that `/v1/requests` lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A client's request, and what comes of it."""

    at_s: float
    prompt: int | tuple[int, ...] = 100
    """Its tokens, or the number of tokens that no other prompt begins with."""
    answer: int = 50
    """Tokens after which the model ends the answer."""
    max_tokens: int | None = None
    """As the client sends it; None: as many as the answer has."""
    tenant: str = ""
    background: bool = False
    waits: WaitTimes = NO_WAITS
    """Waits before it reaches the engine, which follow `at_s`."""
    returns_after_s: float | None = None
    """How long a client that is refused waits before it comes back. None: it does not."""


def poisson(seconds: float, per_s: float, seed: int = 1, **fields: Any) -> list[Visitor]:
    rng, at_s, visitors = random.Random(seed), 0.0, list[Visitor]()
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        drawn = {name: rng.randint(*value) if isinstance(value, list) else value for name, value in fields.items()}
        visitors.append(Visitor(at_s=at_s, **drawn))
    return visitors


class Watch(NullObserver):
    """Passes the core's reports to those that a real server has."""

    def __init__(self, journal: Journal, metrics: Metrics, signals: Signals, recorder: Recorder | None) -> None:
        self._journals: list[RequestJournal] = [journal] if recorder is None else [journal, recorder]
        self._all: list[Observer] = [*self._journals, metrics, signals]

    def on_queued(self, request: Request, now_ns: int) -> None:
        for journal in self._journals:
            journal.on_queued(request, now_ns)

    def on_news(self, news: PlanNews) -> None:
        for journal in self._journals:
            journal.on_news(news)

    def on_step(self, stats: StepStats) -> None:
        for observer in self._all:
            observer.on_step(stats)

    def on_finish(self, stats: RequestStats) -> None:
        for observer in self._all:
            observer.on_finish(stats)


class Stage:
    def __init__(
        self,
        visitors: Iterable[Visitor],
        settings: Mapping[str, Any] | None = None,
        *,
        blocks: int = 4000,
        cost: CostModel | None = None,
        until_s: float | None = None,
        client_wait_s: float = 0.0,
        cpu_s: Mapping[str, float] | None = None,
        record: Path | None = None,
    ) -> None:
        """`until_s`: when the pages are read; None: at the end. A real server measures the last two around it."""
        self.settings, self.clock = dict(settings or {}), VirtualClock()
        config = config_from({"max_model_len": 2048, **self.settings})
        self.simulation = simulation_of(config, cost or CostModel(), num_blocks=blocks)
        self._client_wait_s, self._cpu_s = client_wait_s, cpu_s or {}
        self.journal, self.metrics = Journal(10_000), Metrics(MODEL)
        visitors = list(visitors)
        self.metrics.tenants = frozenset(filter(None, (one.tenant for one in visitors)))
        signals = Signals(self.simulation.capacity.max_rows, lambda _: 0.0)
        recorder = None if record is None else self._recorder(record)
        watch = Watch(self.journal, self.metrics, signals, recorder)
        self.server = VirtualServer(self.simulation, self.clock, report=self._report, journal=watch)
        load, now_ns = self.server.load, self.clock.now_ns
        self.metrics.connect(load=load, signals=lambda: signals.read(load(), now_ns()))
        self._agenda, self.ids = Agenda(), list[str]()
        for number, one in enumerate(visitors):
            self._agenda.note(
                round(one.at_s * SECOND_NS) + sum(one.waits), lambda one=one, number=number: self._come(one, number)
            )
        self._run(NEVER_NS - 1 if until_s is None else round(until_s * SECOND_NS))
        if recorder is not None:
            recorder.close()

    def _recorder(self, path: Path) -> Recorder:
        capacity = asdict(self.simulation.capacity)
        del capacity["checks_guesses"]
        about = {"model": MODEL, "machine": {}, "config": "", "settings": self.settings, "capacity": capacity, "depth": 1}
        return Recorder(
            path,
            max_bytes=1 << 28,
            clock=self.clock,
            block_size=self.simulation.capacity.block_size,
            about=about,
            has_tenant_names=True,
        )

    def _come(self, one: Visitor, number: int, *, is_retry: bool = False) -> None:
        now_ns, max_tokens = self.clock.now_ns(), one.max_tokens or one.answer
        prompt = (
            one.prompt
            if isinstance(one.prompt, tuple)
            else tuple(range(10_000 * (number + 1), 10_000 * (number + 1) + one.prompt))
        )
        request = make_request(
            f"r{number}",
            prompt,
            arrival_ns=now_ns - sum(one.waits),
            max_tokens=max_tokens,
            stop_token_ids=(EOS_TOKEN_ID,),
            tenant=one.tenant,
            key=one.tenant,
            background=one.background,
            waits=one.waits,
            slo_itl_ns=self.simulation.slo_itl_ns,
        )
        ask = Ask(num_token_ids=len(prompt), max_new_tokens=max_tokens, tenant=one.tenant, is_retry=is_retry)
        try:
            self.server.submit(request, one.answer, ask)
        except Rejected as rejected:
            self.metrics.count_rejected(str(rejected.reason), one.tenant)
            if one.returns_after_s is not None:
                again_ns = now_ns + round(one.returns_after_s * SECOND_NS)
                self._agenda.note(again_ns, lambda: self._come(one, number, is_retry=True))
        else:
            if not one.background:
                self.ids.append(request.request_id)

    def _report(self, events: list[TokenEvent], now_ns: int) -> None:
        pass

    def _run(self, until_ns: int) -> None:
        player, agenda = self.server.player, self._agenda
        while (next_ns := min(agenda.due_ns, player.next_ns)) < until_ns:
            self.clock.advance_to(next_ns)
            if player.next_ns <= agenda.due_ns:
                self.server.act()
            else:
                agenda.act()
        if until_ns < NEVER_NS - 1:
            self.clock.advance_to(until_ns)

    @property
    def evidence(self) -> Evidence:
        self.metrics.count_client_wait(round(self._client_wait_s * SECOND_NS))
        return evidence_of(
            self.journal,
            self.metrics,
            self.ids,
            self.clock,
            self.simulation.capacity,
            self.settings,
            cpu_ns={state: round(time_s * SECOND_NS) for state, time_s in self._cpu_s.items()},
        )

    def diagnose(self) -> Diagnosis:
        evidence = self.evidence
        return diagnose(evidence, predictor_of(evidence).gain)


def evidence_of(
    journal: Journal,
    metrics: Metrics,
    ids: Sequence[str],
    clock: Clock,
    capacity: Capacity,
    settings: Mapping[str, Any],
    *,
    cpu_ns: Mapping[str, int] | None = None,
) -> Evidence:
    """Return what `penstock doctor` would read of a server that began at 0."""
    now_ns, told = clock.now_ns(), journal.explain_all(ids, clock.now_ns)
    ended = sorted((one for one in told if one.finish_reason is not None), key=lambda one: one.arrival_ns + one.total_ns)
    listed = [*(one for one in told if one.finish_reason is None), *ended[-MAX_LISTED:]]
    explained = [{"model": MODEL, "age_ms": (now_ns - one.arrival_ns) / 1e6, "choices": [choice_of(one, 0)]} for one in listed]
    return Evidence.of(
        visits_of(explained, MODEL, 600),
        Scrape(expose(Metrics(MODEL)).decode(), MODEL),
        Scrape(expose(metrics, cpu_ns=cpu_ns).decode(), MODEL),
        now_ns / SECOND_NS,
        settings=settings,
        capacity=capacity_of(capacity),
    )


class Workshop:
    """The hash executor, with what the simulated one lacks: adapters, and a tier below the KV cache. Steps take 1 ms."""

    def __init__(
        self,
        visitors: Iterable[Visitor],
        *,
        read_s: float,
        adapters_of: Callable[[int], int] | None = None,
        tier_slots: int = 0,
        blocks: int = 200,
    ) -> None:
        """`read_s`: time of a read from the disk. `adapters_of`: number of a visitor -> that of its adapter."""
        self.capacity = Capacity(num_blocks=blocks + 1, block_size=4, max_rows=8, max_step_tokens=64, max_model_len=256)
        self.clock, self._free_ns = VirtualClock(), 0
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        """Reads and writes of the disk, with the instants at which they are done."""
        self._read_ns = round(read_s * SECOND_NS)
        self.journal, self.metrics, self.ids = Journal(10_000), Metrics(MODEL), list[str]()
        tier = Tier(tier_slots) if tier_slots else None
        adapters = None if adapters_of is None else FakeAdapters(worker=self._work, max_in_memory=2, load_ns=self._read_ns)
        core = make_core(
            self.capacity, observer=self.metrics, journal=self.journal, tier=tier, adapters=adapters, max_adapters=4
        )
        executor = HashExecutor(self.capacity)
        transfers = None
        if tier is not None:
            store = MemoryStore(tier_slots)
            transfers = Transfers(core.scheduler.kv, executor, store, clock=self.clock, worker=self._work)
        self.driver = Driver(core, executor, self.clock, transfers=transfers)
        coming = deque(sorted(enumerate(visitors), key=lambda item: item[1].at_s))
        while coming or core.has_work:
            commands: list[Command] = []
            while coming and round(coming[0][1].at_s * SECOND_NS) <= self.clock.now_ns():
                number, one = coming.popleft()
                adapter = None if adapters_of is None else make_adapter(adapters_of(number))
                request = make_request(
                    f"r{number}", one.prompt, arrival_ns=self.clock.now_ns(), max_tokens=one.answer, adapter=adapter
                )
                self.ids.append(request.request_id)
                commands.append(Add(request))
            self.driver.turn(*commands)
            self._read()
            if self.driver.was_idle:
                times_ns = [self._jobs[0][0]] if self._jobs else []
                times_ns += [round(coming[0][1].at_s * SECOND_NS)] if coming else []
                if (wakeup_ns := core.next_wakeup_ns(self.clock.now_ns())) is not None:
                    times_ns.append(wakeup_ns)
                self.clock.advance_to(max(self.clock.now_ns(), min(times_ns, default=0)))

    def _work(self, job: Callable[[], None], is_urgent: bool) -> None:
        del is_urgent
        self._free_ns = max(self._free_ns, self.clock.now_ns()) + self._read_ns
        self._jobs.append((self._free_ns, job))

    def _read(self) -> None:
        while self._jobs and self._jobs[0][0] <= self.clock.now_ns():
            self._jobs.popleft()[1]()

    @property
    def evidence(self) -> Evidence:
        return evidence_of(self.journal, self.metrics, self.ids, self.clock, self.capacity, {})

    def diagnose(self) -> Diagnosis:
        evidence = self.evidence
        return diagnose(evidence, predictor_of(evidence).gain)


def slowed(cost: CostModel, factor: float) -> CostModel:
    return replace(
        cost,
        step_ns=cost.step_ns * factor,
        decode_row_ns=cost.decode_row_ns * factor,
        prefill_token_ns=cost.prefill_token_ns * factor,
    )
