"""A synchronous driver: runs a core over an executor under a virtual clock, until nothing is left to do.

Called by tests; the engine's loop and the simulator are its grown-up relatives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.ports import Executor
from penstock.engine.transfers import Transfers
from penstock.testing.memory_store import LateWorker
from penstock.types.errors import ExecutorFailure
from penstock.types.events import Command, TokenEvent
from penstock.types.plan import StepPlan, Ticket
from penstock.types.request import FinishReason

STEP_NS = 1_000_000


@dataclass(slots=True)
class Outcome:
    """All that one request was told."""

    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason


@dataclass(slots=True)
class Submission:
    """A step in flight."""

    plan: StepPlan
    ticket: Ticket
    awaits_masks: bool


@dataclass(slots=True)
class Driver:
    """One core, one executor, one clock; a turn is: apply, begin, submit, and if as many steps are in flight as may be, or none
    could be begun: collect, finish.
    """

    core: EngineCore
    executor: Executor
    clock: VirtualClock = field(default_factory=VirtualClock)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    transfers: Transfers | None = None
    """To the tier below the pool, whose jobs `worker` does while steps run."""
    worker: LateWorker | None = None
    flights: deque[Submission] = field(default_factory=deque)
    was_idle: bool = True
    """The last turn had no step to begin and none to finish."""

    def turn(self, *commands: Command) -> StepPlan | None:
        """One turn; the clock moves on if a step was finished. Returns the plan that was made.

        Raises AssertionError if a request is heard of after its end.
        """
        if self.transfers is not None:
            self.transfers.arrive()
        self._record(self.core.apply(commands, self.clock.now_ns()))
        plan = self.core.begin(self.clock.now_ns())
        if self.transfers is not None:
            self.transfers.depart()
        if self.worker is not None:
            self.worker.turn()
        self.was_idle = plan is None and not self.flights
        try:
            self.executor.copy_blocks(self.core.take_block_copies())
            if plan is not None:
                self.plans.append(plan)
                awaits_masks = self.core.awaits_masks(plan)
                self.flights.append(Submission(plan, self.executor.submit(plan), awaits_masks))
                self._send_masks()
            if self.flights and (plan is None or len(self.flights) == self.executor.depth):
                self._finish()
        except ExecutorFailure as failure:
            self.flights.clear()
            self._record(self.core.fail_all(failure.message, self.clock.now_ns()))
        return plan

    def _finish(self) -> None:
        flight = self.flights.popleft()
        result = self.executor.collect(flight.ticket)
        self.clock.advance(STEP_NS)
        events = self.core.finish(flight.plan, result, self.clock.now_ns())
        events += self.core.follow_grammars(events, self.clock.now_ns())
        self._send_masks()
        self._record(events)

    def _send_masks(self) -> None:
        """To a step that waits for them, once those before it were collected."""
        if len(self.flights) == 1 and self.flights[0].awaits_masks:
            flight = self.flights[0]
            flight.awaits_masks = False
            self.executor.restrict(flight.ticket, self.core.masks(flight.plan))

    def _record(self, events: Iterable[TokenEvent]) -> None:
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
    """Apply `commands`, then those of `later` at their turns (counted from 0), until every request has ended.

    `after_turn` is called after each turn (for checks). If there is no step to run, the worker does its next job, or the
    clock jumps to the core's next wake-up.
    Raises AssertionError if requests are left after `max_turns`, or nothing could ever wake the core.
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
