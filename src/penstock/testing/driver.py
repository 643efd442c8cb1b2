"""A synchronous driver for tests: runs an engine core and an executor under a virtual clock until nothing is left to do."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.ports import Executor
from penstock.engine.stepper import Stepper
from penstock.engine.transfers import Transfers
from penstock.types.errors import ExecutorFailure
from penstock.types.events import Command, TokenEvent
from penstock.types.plan import StepPlan, Ticket
from penstock.types.request import FinishReason
from penstock.types.result import StepResult

STEP_NS = 1_000_000


@dataclass(slots=True)
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason


class LateWorker:
    """A `Worker` that queues its jobs, urgent ones first. `run` runs them; `turn` runs each with a probability."""

    def __init__(self, promptness: float = 1.0, seed: int = 0) -> None:
        self._promptness = promptness
        self._random = random.Random(seed)  # noqa: S311  # repeatable on purpose
        self._urgent: deque[Callable[[], None]] = deque()
        self._jobs: deque[Callable[[], None]] = deque()

    def __call__(self, job: Callable[[], None], is_urgent: bool) -> None:
        (self._urgent if is_urgent else self._jobs).append(job)

    @property
    def num_jobs(self) -> int:
        return len(self._urgent) + len(self._jobs)

    def turn(self) -> None:
        while self.num_jobs and self._random.random() < self._promptness:
            self.run()

    def run(self, count: int = 1) -> None:
        """Run the next `count` queued jobs, or as many as there are."""
        for _ in range(min(count, self.num_jobs)):
            (self._urgent or self._jobs).popleft()()


@dataclass(slots=True)
class Driver:
    """Runs one engine core with one executor and a virtual clock. Each step takes `STEP_NS`."""

    core: EngineCore
    executor: Executor
    clock: VirtualClock = field(default_factory=VirtualClock)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    transfers: Transfers | None = None
    worker: LateWorker | None = None
    poll_aborts: Callable[[], Sequence[Command]] = tuple
    """Returns the aborts that arrive while a step runs."""
    was_idle: bool = True
    """The last turn neither began nor finished a step."""
    stepper: Stepper = field(init=False)

    def __post_init__(self) -> None:
        self.stepper = Stepper(
            self.core,
            self.executor,
            self.clock,
            report=lambda events, _: self.record(events),
            transfers=self.transfers,
            poll_aborts=self.poll_aborts,
            collect=self._collect,
        )

    def turn(self, *commands: Command) -> StepPlan | None:
        """Run one turn of the engine's loop, advancing the clock if a step finished. Return the plan that was made.

        Raises AssertionError if an ended request gets an event.
        """
        plan = None
        try:
            plan = self.stepper.begin(commands)
            if self.worker is not None:
                self.worker.turn()
            if plan is not None:
                self.plans.append(plan)
            self.was_idle = plan is None and not self.stepper.has_flights
            if self.stepper.must_finish(plan):
                self.stepper.finish()
        except ExecutorFailure as failure:
            self.was_idle = False
            self.stepper.forget()
            self.record(self.core.fail_all(failure.message, self.clock.now_ns()))
        return plan

    def _collect(self, ticket: Ticket) -> StepResult:
        result = self.executor.collect(ticket)
        self.clock.advance(STEP_NS)
        return result

    def record(self, events: Iterable[TokenEvent]) -> None:
        """Add events to `outcomes`, such as events of commands that a test applied itself."""
        for event in events:
            outcome = self.outcomes.setdefault(event.request_id, Outcome())
            assert not outcome.events or outcome.finish_reason is None, f"{event.request_id!r} was heard of after its end"
            outcome.events.append(event)
            outcome.token_ids += event.token_ids


def run_to_completion(
    core: EngineCore,
    executor: Executor,
    *commands: Command,
    later: Mapping[int, Iterable[Command]] | None = None,
    clock: VirtualClock | None = None,
    transfers: Transfers | None = None,
    worker: LateWorker | None = None,
    after_turn: Callable[[Driver], None] | None = None,
    max_turns: int = 100_000,
) -> dict[str, Outcome]:
    """Apply `commands`, then those of `later` at their turns (from 0), until every request has ended.

    Without a step to run, the worker runs its next job, or the clock jumps to the core's next wake-up. Raises AssertionError
    if requests are left after `max_turns`, or nothing could wake the core.
    """
    driver = Driver(core, executor, clock or VirtualClock(), transfers=transfers, worker=worker)
    script = {turn: list(batch) for turn, batch in (later or {}).items()}
    script[0] = [*commands, *script.get(0, ())]
    for turn in range(max_turns):
        driver.turn(*script.pop(turn, ()))
        if after_turn is not None:
            after_turn(driver)
        if driver.was_idle and not script:
            if not core.has_work:
                return driver.outcomes
            _sleep(driver)
    raise AssertionError(f"{core.num_running} running and {core.num_waiting} waiting after {max_turns} turns")


def _sleep(driver: Driver) -> None:
    if driver.worker is not None and driver.worker.num_jobs:
        driver.worker.run()
        return
    wakeup_ns = driver.core.next_wakeup_ns(driver.clock.now_ns())
    assert wakeup_ns is not None, "requests wait, nothing runs, and nothing will wake the core"
    driver.clock.advance_to(max(wakeup_ns, driver.clock.now_ns()))
