"""The simulation: an open loop of requests through the real core and stepper, under a virtual clock. Called by benchmarks;
schedules nothing itself.

At each instant, in this order: a step ends, requests come, the next step is planned. So a plan sees everything that
has happened by then, as in the engine, where what comes during a step is taken up after it, and aborts before its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.ports import Executor, NullObserver
from penstock.engine.stepper import Stepper
from penstock.engine.thread import Inbox
from penstock.engine.transfers import Transfers
from penstock.lab.cost_model import CostModel
from penstock.lab.simulated_executor import SimulatedExecutor
from penstock.lab.workload import Job
from penstock.sched.policies.base import Policies
from penstock.sched.scheduler import Scheduler
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult
from penstock.types.stats import RequestStats


class Recorder(NullObserver):
    """Keeps the stats of each request that has ended."""

    def __init__(self) -> None:
        self.ended: dict[str, RequestStats] = {}

    def on_finish(self, stats: RequestStats) -> None:
        self.ended[stats.request_id] = stats


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of each job, and what they took together."""

    ended: Sequence[RequestStats]
    """In the order of the jobs."""
    duration_ns: int
    """From instant 0 until the last job had ended."""
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
    """Steps in flight. The host takes no time here, so 2 shows only what planning ahead costs."""

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
        script: list[tuple[int, Command]] = [(request.arrival_ns, Add(request)) for request in requests]
        script += [(job.cancelled_ns, Abort(str(idx))) for idx, job in enumerate(jobs) if job.cancelled_ns is not None]
        player = Player(core, executor, VirtualClock(), script)
        num_steps = 0
        while player.has_more:
            begun, finished = player.turn()
            num_steps += finished is not None
            if begun is not None and on_plan is not None:
                on_plan(begun)
        return Outcome([recorder.ended[request.request_id] for request in requests], player.clock.now_ns(), num_steps)


class Player:
    """Brings commands to a core at their instants, and lets the clock jump to the end of each step.

    The executor's tickets must say when their steps end (`Ticket.ready_ns`).
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: VirtualClock,
        script: Sequence[tuple[int, Command]],
        *,
        transfers: Transfers | None = None,
    ) -> None:
        """`script`: commands with the instants at which they come, in any order."""
        self.clock = clock
        self._core = core
        self._executor = executor
        self._coming = deque(sorted(script, key=lambda item: item[0]))
        self._inbox = Inbox(clock)
        self._stepper = Stepper(
            core,
            executor,
            clock,
            tell=lambda *_: None,
            transfers=transfers,
            poll_aborts=self._poll_aborts,
            collect=self._collect,
        )

    @property
    def has_more(self) -> bool:
        """Whether a command is to come, a request has not ended, or a step is in flight."""
        return bool(self._coming) or self._core.has_work or self._stepper.has_flights

    def turn(self) -> tuple[StepPlan | None, StepPlan | None]:
        """One turn, as `Stepper.turn`; if there was nothing to do, the clock jumps to when there is.

        Raises RuntimeError if requests are left and nothing will ever wake the core.
        """
        self._bring()
        begun, finished = self._stepper.turn(self._inbox.poll())
        if begun is None and finished is None:
            self._sleep()
        return begun, finished

    def _collect(self, ticket: Ticket) -> StepResult:
        assert ticket.ready_ns is not None, "a simulated step knows when it is done"
        self.clock.advance_to(ticket.ready_ns)
        return self._executor.collect(ticket)

    def _poll_aborts(self) -> list[Command]:
        self._bring()
        return self._inbox.poll_aborts()

    def _bring(self) -> None:
        now_ns = self.clock.now_ns()
        while self._coming and self._coming[0][0] <= now_ns:
            self._inbox.put(self._coming.popleft()[1])

    def _sleep(self) -> None:
        now_ns = self.clock.now_ns()
        times_ns = [at_ns for at_ns, _ in list(self._coming)[:1]]
        if (wakeup_ns := self._core.next_wakeup_ns(now_ns)) is not None:
            times_ns.append(wakeup_ns)
        if times_ns:
            self.clock.advance_to(max(now_ns, min(times_ns)))
        elif self._core.has_work:
            raise RuntimeError(f"{self._core.num_waiting} requests wait, nothing runs, and nothing will wake the core")
