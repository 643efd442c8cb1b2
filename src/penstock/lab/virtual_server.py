"""A server in virtual time: the real admission control, scheduler, KV manager, core and stepper, with a modelled executor."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.admission.ask import Ask
from penstock.admission.door import Admission, AdmissionLimits
from penstock.clock import Clock
from penstock.engine.core import EngineCore
from penstock.engine.inbox import Inbox
from penstock.engine.ports import Executor, NullObserver, RequestJournal
from penstock.engine.stepper import Report, Stepper
from penstock.engine.transfers import Transfers
from penstock.lab.acceptance import Acceptance, MarkedGuesser
from penstock.lab.agenda import NEVER_NS
from penstock.lab.cost_model import CostModel
from penstock.lab.machine import Seat
from penstock.lab.simulated_executor import ModelledTimes, SimulatedExecutor
from penstock.sched.policies.base import Policies
from penstock.sched.scheduler import Scheduler
from penstock.types.events import Abort, Add, Command, TokenEvent
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import Request
from penstock.types.stats import EngineLoad, RequestStats, StepStats

MAX_SAMPLES = 2048
MAX_GUESSES = 64
"""Most guesses of all rows in a step, as for a model with a vocabulary of 128 Ki tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a simulated server, which makes new policies at each start."""

    capacity: Capacity
    make_policies: Callable[[], Policies]
    cost: CostModel = field(default_factory=CostModel)
    limits: AdmissionLimits | None = None
    enable_prefix_caching: bool = True
    isolates_tenants: bool = False
    slo_itl_ns: int | None = None
    request_timeout_ns: int | None = None
    """Limit of a request's whole time. The next two limit its wait and its first token."""
    queue_timeout_ns: int | None = None
    first_token_timeout_ns: int | None = None
    depth: int = 1
    acceptance: Acceptance | None = None
    """Which guesses are right. None turns guessing off."""

    @property
    def may_guess(self) -> bool:
        """Whether a server with these settings guesses tokens."""
        policies, has_state = self.make_policies(), self.capacity.has_state or self.capacity.num_state_blocks
        return policies.guesser.is_on and policies.gate.is_continuous and self.depth == 1 and not has_state


class Timeline:
    """A server's running and waiting requests and KV blocks over time: exact means, and for plots samples as steps are planned.

    At `MAX_SAMPLES`, every other sample is dropped and the sampling interval doubles.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.at_ns, self.num_running, self.num_waiting, self.num_held = (array("q") for _ in range(4))
        self._interval_ns = 50_000_000
        self._next_ns = 0
        self._since_ns = self._last_running = self._last_waiting = self._last_held = 0
        self._sums = [0, 0, 0]
        self.max_held = 0

    def add_waiting(self, now_ns: int) -> None:
        """Count one more waiting request until the next `note`. Not sampled: an idle server's next step takes it at once."""
        self._pass(now_ns)
        self._last_waiting += 1

    def note(self, now_ns: int, num_running: int, num_waiting: int, num_held: int) -> None:
        self._pass(now_ns)
        self._last_running, self._last_waiting, self._last_held = num_running, num_waiting, num_held
        if num_held > self.max_held:
            self.max_held = num_held
        if now_ns >= self._next_ns:
            self._sample(now_ns)

    def _pass(self, now_ns: int) -> None:
        if (span_ns := now_ns - self._since_ns) > 0:
            sums = self._sums
            sums[0] += self._last_running * span_ns
            sums[1] += self._last_waiting * span_ns
            sums[2] += self._last_held * span_ns
            self._since_ns = now_ns

    def means(self, until_ns: int) -> tuple[float, float, float]:
        """Return time averages up to `until_ns`: running requests, waiting requests, share of blocks that requests hold."""
        self.note(until_ns, self._last_running, self._last_waiting, self._last_held)
        running, waiting, held = (total / max(1, until_ns) for total in self._sums)
        return running, waiting, held / self.num_blocks

    def _sample(self, now_ns: int) -> None:
        columns = (self.at_ns, self.num_running, self.num_waiting, self.num_held)
        if len(self.at_ns) == MAX_SAMPLES:
            for column in columns:
                column[:] = column[::2]
            self._interval_ns *= 2
        for column, value in zip(columns, (now_ns, self._last_running, self._last_waiting, self._last_held), strict=True):
            column.append(value)
        self._next_ns = now_ns + self._interval_ns


class Player:
    """Driver of an engine in virtual time. The owner of the clock calls `act` at `next_ns`.

    At equal times, a step ends first, then commands are read, then the next step is planned. If a ticket has no `ready_ns`, the
    step waits for a shared machine, and `wait_until` sets its end later.
    """

    def __init__(
        self, core: EngineCore, executor: Executor, clock: Clock, *, report: Report, transfers: Transfers | None = None
    ) -> None:
        self.next_ns = NEVER_NS
        self.on_woken: Callable[[], None] = lambda: None
        """Called when a command sets `next_ns`."""
        self.is_computing = False
        self.begun: StepPlan | None = None
        self._core = core
        self._clock = clock
        self._inbox = Inbox(clock)
        self._stepper = Stepper(core, executor, clock, report=report, transfers=transfers, poll_aborts=self._inbox.poll_aborts)

    def put(self, command: Command) -> None:
        self._inbox.put(command)
        if not self.is_computing:
            self.next_ns = self._clock.now_ns()
            self.on_woken()

    def wait_until(self, ready_ns: int) -> None:
        self.next_ns = ready_ns
        self.on_woken()

    def act(self) -> bool:
        """Finish the step that ends now and return False, or plan the next step and return True."""
        stepper = self._stepper
        self.begun = None
        if self.is_computing:
            stepper.finish()
            self.is_computing = False
            self.next_ns = self._clock.now_ns()
            return False
        self.begun = stepper.begin(self._inbox.poll())
        if stepper.must_finish(self.begun):
            self.is_computing = True
            self.next_ns = NEVER_NS if stepper.ready_ns is None else stepper.ready_ns
        elif self.begun is None:
            now_ns = self._clock.now_ns()
            wakeup_ns = self._core.next_wakeup_ns(now_ns)
            self.next_ns = NEVER_NS if wakeup_ns is None else max(now_ns, wakeup_ns)
            if wakeup_ns is None and self._core.has_work:
                raise RuntimeError(f"{self._core.num_waiting} requests wait, nothing runs, and nothing will wake the core")
        return True


class VirtualServer(NullObserver):
    def __init__(
        self,
        settings: ServerSettings,
        clock: Clock,
        *,
        report: Report,
        seed: str = "0",
        seat: Seat | None = None,
        journal: RequestJournal | None = None,
    ) -> None:
        """`seat`: access to a machine shared with other models. `journal`: observes the engine, as in a real server."""
        policies, guesses = settings.make_policies(), settings.acceptance is not None and settings.may_guess
        capacity = replace(settings.capacity, checks_guesses=guesses, max_scored=MAX_GUESSES)
        if settings.acceptance is not None and guesses:
            policies = replace(policies, guesser=MarkedGuesser(settings.acceptance))
        self.settings = settings
        self.ended: dict[str, RequestStats] = {}
        self.num_steps = 0
        self.busy_ns = 0
        self.num_guesses = self.num_accepted = 0
        scheduler = Scheduler(
            capacity,
            policies,
            enable_prefix_caching=settings.enable_prefix_caching,
            most_step_ns=(lambda: 0) if seat is None else seat.most_step_ns,
            others_serve=(lambda _: False) if seat is None else seat.others_serve,
        )
        self.core = EngineCore(scheduler, observer=self, journal=journal)
        self.times = ModelledTimes(settings.cost, seed=seed)
        self.timeline = Timeline(scheduler.kv.num_total_blocks)
        self._clock = clock
        self._report = report
        self._output_lens: dict[str, int] = {}
        executor = SimulatedExecutor(capacity, self.times, self._output_lens, depth=settings.depth, seat=seat)
        self.player = Player(self.core, executor, clock, report=self._on_events)
        executor.on_begun = self.player.wait_until
        self.admission: Admission | None = None
        if settings.limits is not None:
            self.admission = Admission(settings.limits, capacity, reads_priority=policies.order.reads_priority)
        self._first_tokens: dict[str, Request] = {}
        self.num_prompt_tokens = 0
        """Tokens of the prompts of all requests in flight."""
        self.on_step_done: Callable[[StepStats], None] = lambda _: None

    @property
    def num_in_flight(self) -> int:
        return len(self._output_lens)

    def submit(self, request: Request, num_output_tokens: int, ask: Ask | None = None) -> None:
        """Accept a request that ends after `num_output_tokens`, and begin it. See `accept`."""
        self.accept(request, num_output_tokens, ask)
        self.begin(request)

    def accept(self, request: Request, num_output_tokens: int, ask: Ask | None = None) -> None:
        """Count a request as in flight; `begin` follows. Raises `Rejected` if admission control refuses it.

        Without `ask`, skip admission control: another server has admitted the request.
        """
        now_ns, admission = self._clock.now_ns(), self.admission
        if admission is not None and ask is not None:
            entering = admission.decide(ask, self.load(), now_ns)
            admission.add_requests(entering, [request], now_ns)
            admission.end_entering(entering)
            self._first_tokens[request.request_id] = request
        self._output_lens[request.request_id] = num_output_tokens
        self.num_prompt_tokens += request.num_prompt_tokens
        self.timeline.add_waiting(now_ns)

    def begin(self, request: Request) -> None:
        self.player.put(Add(request))

    def abort(self, request_id: str) -> None:
        self.player.put(Abort(request_id))

    def act(self) -> None:
        if self.player.act():
            core, timeline = self.core.snapshot, self.timeline
            num_held = timeline.num_blocks - core.num_blocks_free - core.num_blocks_cached
            timeline.note(self._clock.now_ns(), core.num_running, self.num_in_flight - core.num_running, num_held)

    def load(self) -> EngineLoad:
        load = self.core.snapshot
        num_waiting = max(0, self.num_in_flight - load.num_running - load.num_background)
        return load._replace(num_waiting=num_waiting, num_prompt_tokens=self.num_prompt_tokens)

    def on_step(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.busy_ns += stats.ended_ns - stats.started_ns
        for num_guesses, num_accepted in stats.counts.guesses.values():
            self.num_guesses += num_guesses
            self.num_accepted += num_accepted
        if self.admission is not None:
            self.admission.on_step(stats)
        self.on_step_done(stats)

    def on_finish(self, stats: RequestStats) -> None:
        self.ended[stats.request_id] = stats
        del self._output_lens[stats.request_id]
        self.num_prompt_tokens -= stats.num_prompt_tokens
        if self.admission is not None:
            self.admission.on_finish(stats)

    def _on_events(self, events: list[TokenEvent], now_ns: int) -> None:
        waiting = self._first_tokens
        if waiting and self.admission is not None:
            found = [request for event in events if (request := waiting.pop(event.request_id, None)) is not None]
            firsts = [request for request in found if request.first_token_ns is not None]  # others ended without a token
            if firsts:
                self.admission.on_tokens(firsts, ())
        self._report(events, now_ns)
