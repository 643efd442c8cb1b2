"""One stepper, three drivers: the engine, the test driver and the simulation make the same plans of the same workload."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.inbox import Inbox
from penstock.engine.output import OutputStage
from penstock.engine.ports import Executor
from penstock.engine.thread import Engine
from penstock.engine.transfers import Transfers
from penstock.kv.tiers import Tier
from penstock.lab.agenda import NEVER_NS
from penstock.lab.cost_model import CostModel
from penstock.lab.simulated_executor import EOS_TOKEN_ID, ModelledTimes, SimulatedExecutor
from penstock.lab.simulation import Simulation
from penstock.lab.virtual_server import Player
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing.builders import make_core, make_request
from penstock.testing.driver import STEP_NS, Driver, LateWorker
from penstock.testing.hash_executor import HashExecutor
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import FinishReason
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams
from support.engine.thread import Numbers
from support.hash_matcher import HashMatcher
from support.memory_store import MemoryStore

CAPACITY = Capacity(num_blocks=17, block_size=4, max_rows=4, max_step_tokens=24, max_model_len=60)
Script = Sequence[tuple[int, Command]]


def script_of(*, with_grammars: bool) -> Script:
    """Sessions that come back after a pause, some with a grammar; requests come while steps run.

    Some clients go away: while they wait, while their step runs, or too late.
    """
    script: list[tuple[int, Command]] = []
    for idx in range(24):
        name, round_no = f"r{idx}", idx // 8
        prompt = [idx % 8 + 1] * (9 + 4 * round_no)
        follows = with_grammars and idx % 3 == 0
        at_ns = idx * 1_300_000 + round_no * 40 * STEP_NS
        sampling = SamplingParams(max_tokens=3 + idx * 5 % 12, temperature=0.0, follows_grammar=follows)
        matcher = HashMatcher(HashExecutor(CAPACITY).model.vocab_size) if follows else None
        request = make_request(name, prompt, sampling=sampling, arrival_ns=at_ns, matcher=matcher)
        script.append((at_ns, Add(request)))
        if idx % 5 == 4:
            script.append((at_ns + (idx % 4) * 2_100_000, Abort(name)))
    return script


class House:
    """A core, an executor whose steps take `STEP_NS`, and perhaps a tier below the pool, all made anew for each driver."""

    def __init__(self, depth: int, *, with_tier: bool) -> None:
        self.clock = VirtualClock()
        tier = Tier(60) if with_tier else None
        policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
        self.core = make_core(CAPACITY, policies, tier=tier)
        self.executor = Timed(depth)
        self.worker = LateWorker(promptness=0.6, seed=3) if with_tier else None
        self.carrier: Transfers | None = None

    def transfers(self, blocks: Executor) -> Transfers | None:
        if self.worker is not None:
            kv, store = self.core.scheduler.kv, MemoryStore(60)
            self.carrier = Transfers(kv, blocks, store, clock=self.clock, worker=self.worker)
        return self.carrier

    def after_turn(self, *, is_idle: bool) -> None:
        if self.worker is not None:
            self.worker.turn()
            if is_idle:
                self.worker.run(self.worker.num_jobs)


class Timed(HashExecutor):
    """Says when its steps will be done: one after another, `STEP_NS` each. Remembers the plans."""

    def __init__(self, depth: int) -> None:
        super().__init__(CAPACITY, depth=depth, seed=1)
        self.plans: list[StepPlan] = []
        self.when_collected: Callable[[int], None] = lambda ready_ns: None
        self._ready_ns = 0

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        self._ready_ns = max(plan.now_ns, self._ready_ns) + STEP_NS
        return Ticket(super().submit(plan).step_id, self._ready_ns)

    def collect(self, ticket: Ticket) -> StepResult:
        assert ticket.ready_ns is not None
        self.when_collected(ticket.ready_ns)
        return super().collect(ticket)


def wake(core: EngineCore, clock: VirtualClock, coming: deque[tuple[int, Command]]) -> None:
    """Let the clock jump to when there is something to do."""
    times_ns = [at_ns for at_ns, _ in list(coming)[:1]]
    if (wakeup_ns := core.next_wakeup_ns(clock.now_ns())) is not None:
        times_ns.append(wakeup_ns)
    if times_ns:
        clock.advance_to(max(clock.now_ns(), min(times_ns)))


def by_engine(house: House, script: Script) -> list[StepPlan]:
    """The object that serves, turned by hand; commands go in through its face."""
    engine = Engine(
        house.core,
        house.executor,
        OutputStage(lambda _shown: Numbers()),
        clock=house.clock,
        sink=lambda chunks: None,
        make_transfers=lambda blocks, wake: house.transfers(blocks),
    )
    coming = deque(sorted(script, key=lambda item: item[0]))

    def bring() -> None:
        while coming and coming[0][0] <= house.clock.now_ns():
            match coming.popleft()[1]:
                case Add(request):
                    engine.submit(request)
                case Abort(request_id, detail):
                    engine.abort(request_id, detail)

    def when_collected(ready_ns: int) -> None:
        house.clock.advance_to(ready_ns)
        bring()

    house.executor.when_collected = when_collected
    while coming or house.core.has_work:
        bring()
        is_busy = engine.turn()
        house.after_turn(is_idle=not is_busy)
        if not is_busy:
            wake(house.core, house.clock, coming)
    while engine.turn():
        pass
    return house.executor.plans


def by_driver(house: House, script: Script) -> list[StepPlan]:
    coming, inbox = deque(sorted(script, key=lambda item: item[0])), Inbox(house.clock)

    def poll(take: Callable[[], list[Command]]) -> list[Command]:
        while coming and coming[0][0] <= house.clock.now_ns():
            inbox.put(coming.popleft()[1])
        return take()

    driver = Driver(
        house.core,
        house.executor,
        house.clock,
        transfers=house.transfers(house.executor),
        poll_aborts=lambda: poll(inbox.poll_aborts),
    )
    while coming or house.core.has_work or driver.stepper.has_flights:
        driver.turn(*poll(inbox.poll))
        house.after_turn(is_idle=driver.was_idle)
        if driver.was_idle:
            wake(house.core, house.clock, coming)
    return driver.plans


def by_simulation(house: House, script: Script) -> list[StepPlan]:
    coming = deque(sorted(script, key=lambda item: item[0]))
    transfers = house.transfers(house.executor)
    player = Player(house.core, house.executor, house.clock, report=lambda *_: None, transfers=transfers)
    while True:
        at_ns = min(player.next_ns, coming[0][0] if coming else NEVER_NS)
        if at_ns == NEVER_NS:
            return house.executor.plans
        house.clock.advance_to(at_ns)
        if coming and coming[0][0] <= at_ns:
            player.put(coming.popleft()[1])
            continue
        if player.act():
            house.after_turn(is_idle=player.begun is None and not player.is_computing)


@pytest.mark.parametrize("with_tier", [False, True])
@pytest.mark.parametrize("with_grammars", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_all_drivers_make_the_same_plans(depth: int, with_grammars: bool, with_tier: bool) -> None:
    traces: list[list[StepPlan]] = []
    for drive in (by_engine, by_driver, by_simulation):
        house = House(depth, with_tier=with_tier)
        traces.append(drive(house, script_of(with_grammars=with_grammars)))
        assert not house.core.has_work
        house.core.check()
        if house.carrier is not None:
            assert house.carrier.stats.num_loaded_blocks > 0
    assert len(traces[0]) > 60
    assert traces[0] == traces[1]
    assert traces[0] == traces[2]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_makes_the_plans_that_the_simulation_foretells(depth: int) -> None:
    """Over the simulated executor, with the durations of a cost model, memory for a sixth, and clients that go away."""
    jobs = [
        Job(
            arrival_ns=idx * STEP_NS,
            num_prompt_tokens=20 + idx,
            num_output_tokens=5 + 3 * idx % 30,
            prompt_token_ids=(2 + idx,) * (20 + idx),
            cancelled_ns=idx * STEP_NS + 30_000_000 if idx % 4 == 3 else None,
        )
        for idx in range(12)
    ]
    capacity = Capacity(num_blocks=25, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=90)
    foretold: list[StepPlan] = []
    simulation = Simulation(
        capacity=capacity, make_policies=make_policies, max_tokens=40, depth=depth, enable_prefix_caching=False
    )
    ended = simulation.run(Workload(name="jobs", jobs=jobs), on_plan=foretold.append).ended
    assert {stats.finish_reason for stats in ended} == {FinishReason.STOP, FinishReason.ABORT}

    house = House(depth, with_tier=False)
    house.core = make_core(capacity, make_policies(), enable_prefix_caching=False)
    lens = {str(idx): job.num_output_tokens for idx, job in enumerate(jobs)}
    house.executor = TimedSimulated(capacity, lens, depth=depth)
    script: list[tuple[int, Command]] = []
    for idx, job in enumerate(jobs):
        arrives = {"arrival_ns": job.arrival_ns, "max_tokens": 40, "stop_token_ids": (EOS_TOKEN_ID,)}
        script.append((job.arrival_ns, Add(make_request(str(idx), job.prompt_token_ids, **arrives))))
    script += [(job.cancelled_ns, Abort(str(idx))) for idx, job in enumerate(jobs) if job.cancelled_ns is not None]
    assert by_engine(house, script) == foretold


class TimedSimulated(SimulatedExecutor):
    """Tells when a step is collected. Remembers the plans."""

    def __init__(self, capacity: Capacity, output_lens: dict[str, int], *, depth: int) -> None:
        super().__init__(capacity, ModelledTimes(CostModel()), output_lens, depth=depth)
        self.plans: list[StepPlan] = []
        self.when_collected: Callable[[int], None] = lambda ready_ns: None

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        assert ticket.ready_ns is not None
        self.when_collected(ticket.ready_ns)
        return super().collect(ticket)
