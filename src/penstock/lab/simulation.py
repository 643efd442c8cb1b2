"""The simulation's driver: an open loop of requests through the real core, under a virtual clock. Called by benchmarks;
schedules nothing itself.

At each instant, in this order: a step ends, requests come, the next step is planned. So a plan sees everything that
has happened by then, as in the engine's loop, where what comes during a step is taken up after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.ports import NullObserver
from penstock.lab.cost_model import CostModel
from penstock.lab.job import Job
from penstock.lab.simulated_executor import SimulatedExecutor
from penstock.sched.policies.base import Policies
from penstock.sched.scheduler import Scheduler
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request
from penstock.types.stats import RequestStats


class Recorder(NullObserver):
    """Keeps what is told of each request at its end."""

    def __init__(self) -> None:
        self.ended: dict[str, RequestStats] = {}

    def on_finish(self, stats: RequestStats) -> None:
        self.ended[stats.request_id] = stats


@dataclass(frozen=True, slots=True)
class Outcome:
    """The ends of the jobs."""

    ended: Sequence[RequestStats]
    """In the order of the jobs."""
    duration_ns: int
    """Until the last had ended."""
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A server that can be run any number of times; each run starts anew, so policies are made for each."""

    capacity: Capacity
    make_policies: Callable[[], Policies]
    cost: CostModel = field(default_factory=CostModel)
    max_tokens: int = 2048
    """The limit that clients send."""
    enable_prefix_caching: bool = False
    """For jobs that say what their prompts are."""
    depth: int = 1
    """Depth of the executor. The host takes no time here, so 2 shows only what planning ahead costs."""

    def run(
        self,
        jobs: Sequence[Job],
        *,
        predictions: Mapping[int, int] | None = None,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> Outcome:
        """Serve the jobs until all have ended. A job's request id is its index.

        `predictions`: index -> predicted output length; where it has none, the policies' predictor is asked.
        """
        predicted = predictions or {}
        requests = [
            job.request(str(idx), max_tokens=self.max_tokens, predicted_new_tokens=predicted.get(idx))
            for idx, job in enumerate(jobs)
        ]
        recorder = Recorder()
        scheduler = Scheduler(self.capacity, self.make_policies(), enable_prefix_caching=self.enable_prefix_caching)
        core = EngineCore(scheduler, observer=recorder)
        lens = {str(idx): job.num_output_tokens for idx, job in enumerate(jobs)}
        executor = SimulatedExecutor(self.capacity, self.cost, lens, depth=self.depth)
        driver = _Driver(core, executor, VirtualClock(), on_plan)
        driver.run(sorted(requests, key=lambda request: request.arrival_ns))
        return Outcome([recorder.ended[request.request_id] for request in requests], driver.clock.now_ns(), driver.num_steps)


@dataclass(slots=True)
class _Driver:
    core: EngineCore
    executor: SimulatedExecutor
    clock: VirtualClock
    on_plan: Callable[[StepPlan], None] | None
    num_steps: int = 0
    flights: deque[tuple[StepPlan, Ticket]] = field(default_factory=deque)

    def run(self, requests: Sequence[Request]) -> None:
        """`requests` by arrival. Raises RuntimeError if requests are left and nothing will ever wake the core."""
        next_idx = 0
        while next_idx < len(requests) or self.core.has_work or self.flights:
            now_ns = self.clock.now_ns()
            first_idx = next_idx
            while next_idx < len(requests) and requests[next_idx].arrival_ns <= now_ns:
                next_idx += 1
            self.core.apply([Add(request) for request in requests[first_idx:next_idx]], now_ns)
            if not self._step(now_ns):
                times = [request.arrival_ns for request in requests[next_idx : next_idx + 1]]
                if (wakeup_ns := self.core.next_wakeup_ns(now_ns)) is not None:
                    times.append(wakeup_ns)
                self._sleep(times, now_ns)

    def _step(self, now_ns: int) -> bool:
        """False if there is none in flight and none to begin."""
        plan = self.core.begin(now_ns)
        self.executor.copy_blocks(self.core.take_block_copies())
        if plan is not None:
            if self.on_plan is not None:
                self.on_plan(plan)
            self.flights.append((plan, self.executor.submit(plan)))
        if plan is None or len(self.flights) == self.executor.depth:
            return self._finish()
        return True

    def _finish(self) -> bool:
        if not self.flights:
            return False
        plan, ticket = self.flights.popleft()
        assert ticket.ready_ns is not None, "a simulated step knows when it is done"
        self.clock.advance_to(ticket.ready_ns)
        self.core.finish(plan, self.executor.collect(ticket), ticket.ready_ns)
        self.num_steps += 1
        return True

    def _sleep(self, times_ns: Sequence[int], now_ns: int) -> None:
        if times_ns:
            self.clock.advance_to(max(now_ns, min(times_ns)))
        elif self.core.has_work:
            raise RuntimeError(f"{self.core.num_waiting} requests wait, nothing runs, and nothing will wake the core")
