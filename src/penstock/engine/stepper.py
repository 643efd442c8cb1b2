"""Plans steps with a core, computes them with an executor, and owns the steps in flight.

A turn begins a step if possible. It also finishes the oldest step if the executor takes no more, or if no step began.
docs/architecture.md, "The step", shows the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.engine.core import EngineCore, Read
from penstock.engine.ports import Executor, NullObserver, TurnObserver
from penstock.engine.transfers import Transfers
from penstock.types.errors import ExecutorFailure
from penstock.types.events import Command, TokenEvent
from penstock.types.plan import StepPlan, Ticket
from penstock.types.result import StepResult

Report = Callable[[list[TokenEvent], int], None]
"""Reports events, and the time at which they were known. May apply commands to the core."""


@dataclass(slots=True)
class StepInFlight:
    plan: StepPlan
    schedule_ns: int
    awaits_masks: bool
    """The executor still needs the masks of rows that follow a grammar."""
    drafting_ns: int | None = None
    ticket: Ticket | None = None
    masks_ns: int = 0
    """Time to make its masks, if that was part of `begin`."""


class Stepper:
    """The steps in flight, oldest first, and the turns that begin and finish them. For one thread."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Clock,
        *,
        report: Report,
        transfers: Transfers | None = None,
        poll_aborts: Callable[[], Sequence[Command]] = tuple,
        collect: Callable[[Ticket], StepResult] | None = None,
        read: Read | None = None,
        turn_observer: TurnObserver | None = None,
    ) -> None:
        """Raises ValueError for an executor whose depth is neither 1 nor 2.

        `poll_aborts` returns the aborts that came while a step ran. `collect` replaces `executor.collect` in simulations with a
        virtual clock.
        """
        if executor.depth not in (1, 2):
            raise ValueError(f"one or two steps can be in flight, not {executor.depth}")
        self._core = core
        self._executor = executor
        self._clock = clock
        self._report = report
        self._transfers = transfers
        self._poll_aborts = poll_aborts
        self._collect = collect or executor.collect
        self._read = read
        self._turn_observer: TurnObserver = turn_observer or NullObserver()
        self._depth = executor.depth
        self._flights: deque[StepInFlight] = deque()
        self._finishing: StepInFlight | None = None
        """The step that is being collected and reported."""
        self._unreported: tuple[list[TokenEvent], int] = [], 0
        """Events that are not yet reported, and when they were known."""
        self._output_ns = 0
        """Time taken to report events since the last `finish`."""

    @property
    def has_flights(self) -> bool:
        return bool(self._flights)

    @property
    def ready_ns(self) -> int | None:
        """Time at which the oldest step in flight will be done, for simulations with a virtual clock."""
        ticket = self._flights[0].ticket if self._flights else None
        return None if ticket is None else ticket.ready_ns

    @property
    def plans(self) -> list[StepPlan]:
        finishing = () if self._finishing is None else (self._finishing,)
        return [flight.plan for flight in (*finishing, *self._flights)]

    def turn(self, commands: Sequence[Command] = ()) -> tuple[StepPlan | None, StepPlan | None]:
        """Begin a step, finish a step, or both. Return (the plan that was begun, the plan that was finished), each or None."""
        begun = self.begin(commands)
        return begun, self.finish() if self.must_finish(begun) else None

    def must_finish(self, begun: StepPlan | None) -> bool:
        """Return whether a turn must also finish the oldest step. `begun`: the step that the turn began, or None."""
        return bool(self._flights) and (begun is None or len(self._flights) == self._depth)

    def begin(self, commands: Sequence[Command] = ()) -> StepPlan | None:
        """Begin the next step: apply commands, plan, and submit. Return the submitted plan, or None."""
        try:
            return self._begin(commands)
        finally:
            self.report_pending()

    def _begin(self, commands: Sequence[Command]) -> StepPlan | None:
        core, transfers = self._core, self._transfers
        if transfers is not None:
            transfers.arrive()
        now_ns, output_ns = self._clock.now_ns(), self._output_ns
        if events := core.apply(commands, now_ns):
            # Reported before planning, so that a request which ends by its text gets no row.
            self._unreported = self._unreported[0] + events, now_ns
            self.report_pending()
        plan = core.begin(now_ns)
        if transfers is not None:
            transfers.depart()
        if plan is None:
            self._prepare_blocks()
            return None
        drafting_ns = core.scheduler.drafting_ns
        schedule_ns = self._clock.now_ns() - now_ns - (self._output_ns - output_ns) - (drafting_ns or 0)
        flight = StepInFlight(plan, schedule_ns, core.matchers.is_in(plan), drafting_ns)
        self._flights.append(flight)
        self._prepare_blocks()
        flight.ticket = self._executor.submit(plan)
        submitted_ns = self._clock.now_ns()
        self._restrict()
        flight.masks_ns = self._clock.now_ns() - submitted_ns
        return plan

    def _prepare_blocks(self) -> None:
        kv, executor = self._core.scheduler.kv, self._executor
        adapters = kv.adapters
        drops, placements = (adapters.take_drops(), adapters.take_placements()) if adapters.num_placements else ((), ())
        for number in drops:
            executor.drop_adapter(number)
        if copies := kv.take_block_copies():
            executor.copy_blocks(copies)
            kv.copies_made()
        for placement in placements:
            executor.place_adapter(placement.number, placement.packed, placement.block_ids)

    def finish(self) -> StepPlan:
        """Wait for the oldest step in flight, and give its result to the core. Return its plan."""
        core, clock = self._core, self._clock
        flight = self._finishing = self._flights.popleft()
        assert flight.ticket is not None, "it was submitted"
        result = self._collect(flight.ticket)
        now_ns = clock.now_ns()
        events = core.apply(self._poll_aborts(), now_ns)
        events += core.finish(flight.plan, result, now_ns, clock, self._read)
        committed_ns = clock.now_ns()
        parts_ns = {"schedule": flight.schedule_ns, "commit": committed_ns - now_ns - core.grammar_ns}
        if flight.drafting_ns is not None:
            parts_ns["draft"] = flight.drafting_ns
        self._unreported = events, now_ns
        if core.matchers or self._awaits_masks:
            try:
                self._restrict()  # before making text, since the device may already wait for masks
            except ExecutorFailure:
                self.report_pending()  # these events are of the step before, which succeeded
                raise
            core.settle_grammars(is_beside=bool(self._flights))
            parts_ns["grammar"] = clock.now_ns() - committed_ns + core.grammar_ns + flight.masks_ns
        if self._flights or not core.matchers:
            self.report_pending()
        parts_ns["output"], self._output_ns = self._output_ns, 0
        self._turn_observer.on_turn(parts_ns)
        self._finishing = None
        return flight.plan

    def report_pending(self) -> None:
        """Report events held back until the next step began. Also called after a turn that failed."""
        (events, now_ns), self._unreported = self._unreported, ([], 0)
        if events:
            began_ns = self._clock.now_ns()
            self._report(events, now_ns)
            self._output_ns += self._clock.now_ns() - began_ns

    def close(self) -> None:
        self._report = lambda _events, _now_ns: None

    def forget(self) -> None:
        """Drop the steps in flight without their results, after the executor failed."""
        self._flights.clear()
        self._finishing = None

    @property
    def _awaits_masks(self) -> bool:
        return len(self._flights) == 1 and self._flights[0].awaits_masks

    def _restrict(self) -> None:
        if self._awaits_masks:
            flight = self._flights[0]
            assert flight.ticket is not None, "it was submitted"
            self._executor.restrict(flight.ticket, self._core.matchers.masks(flight.plan, self._clock))
            flight.awaits_masks = False
