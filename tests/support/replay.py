"""A replay of recordings: brings what a recording has to a real core again, at the same instants, and compares the plans.

Arrivals, cancels and the begins and ends of steps are the recording's; every decision is made anew. The words of prompts are
not known: equal blocks get equal tokens, others their own. Recordings with beam searches, grammars, adapters, guesses or tiers
can't be replayed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from penstock.clock import VirtualClock
from penstock.engine.stepper import Stepper
from penstock.lab.recording import Arrival, BlockId, Departure, Recording, RecordingError, Row, StepDone
from penstock.obs.recording import NOBODY
from penstock.sched.policies.base import Policies
from penstock.testing import make_core
from penstock.types.adapter import NoAdapters
from penstock.types.events import Add, Command, Stop, TokenEvent
from penstock.types.plan import Capacity, PaddingId, StepPlan, Ticket
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult, StepTiming
from penstock.types.sampling import SamplingParams

STOP_TOKEN_ID = 0
UNKNOWN_TOKEN_ID = (1 << 31) - 1
"""Any token of an answer that had not ended, or of nobody."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay."""

    num_steps: int
    """Steps of the recording."""
    num_equal: int
    """Plans with the same rows, in the same order, from the first step on."""
    difference: str
    """The first step that differs, in words; empty if all are equal."""


def replay(recording: Recording, make_policies: Callable[[], Policies], *, enable_prefix_caching: bool = True) -> Replayed:
    """Plan the steps of a recording again, until one differs."""
    header, clock = recording.header, VirtualClock()
    story = _read(recording)
    executor = _RecordedExecutor(header.capacity, header.depth, story)
    core = make_core(header.capacity, make_policies(), enable_prefix_caching=enable_prefix_caching)

    def commands() -> list[Command]:
        """Those that are due."""
        due: list[Command] = []
        while story.script and story.script[0][0] <= clock.now_ns():
            due.append(story.script.popleft()[1])
        return due

    def report(events: Sequence[TokenEvent], now_ns: int) -> None:
        del events
        core.apply(story.told.pop(now_ns, ()), now_ns)

    def collect(ticket: Ticket) -> StepResult:
        assert ticket.ready_ns is not None, "told by the recording"
        clock.advance_to(max(clock.now_ns(), ticket.ready_ns))  # a plan that differs may be late
        return executor.collect(ticket)

    # What comes at the end of a step is a cancel; all else was obeyed when a turn began.
    stepper = Stepper(core, executor, clock, report=report, poll_aborts=commands, collect=collect)
    while executor.has_more and not executor.difference:
        if executor.is_late:
            executor.difference = f"step {story.steps[executor.num_equal].step_id} is not planned at its instant"
            break
        clock.advance_to(max(clock.now_ns(), executor.next_begin_ns() or 0))
        stepper.turn(commands())
    return Replayed(len(story.steps), executor.num_equal, executor.difference)


@dataclass(slots=True)
class _Story:
    """A recording as the replay needs it."""

    steps: list[StepDone]
    script: deque[tuple[int, Command]]
    """Commands, by the instants at which the core obeyed them, in their order."""
    told: dict[int, list[Command]]
    """Ends that followed from a step's tokens or their text, by the end of the step."""
    begins: deque[int]
    """Instants of turns, ascending."""
    outputs: Mapping[str, deque[int]]
    """Tokens of each request that are still to come."""
    failed: Collection[str]
    """Requests that ended with an error."""


def _read(recording: Recording) -> _Story:
    arrivals: dict[int, Arrival] = {}
    departures: dict[int, Departure] = {}
    steps: list[StepDone] = []
    commands: list[tuple[int, Arrival | Departure]] = []
    told: defaultdict[int, list[Command]] = defaultdict(list)
    ends: list[Departure] = []
    """Those since the last step that no token of it explains."""
    begins: set[int] = set()
    contents = _Contents(recording.header.block_size)
    requests: dict[int, Request] = {}
    outputs: dict[str, deque[int]] = {}
    last_ns = -1
    for event in recording.events():
        match event:
            case Arrival() if event.queued_ns is not None and not event.is_repeated:
                arrivals[event.id] = event
                outputs[str(event.id)] = deque()
                requests[event.id] = _request(event, contents)
                commands.append((event.queued_ns, event))
                begins.add(event.queued_ns)
            case Departure() if event.id in arrivals:
                departures[event.id] = event
                outputs[str(event.id)].extend(_output(arrivals[event.id], event, contents))
                if event.at_ns != last_ns:
                    commands.append((event.at_ns, event))
                    ends.append(event)
                else:  # by its text, perhaps; if by a token, it has ended already when it is told to
                    told[last_ns].append(_end(event))
            case StepDone():
                last_ns = event.ended_ns
                steps.append(event)
                begins.add(event.planned_ns)
                begins.update(end.at_ns for end in ends if end.at_ns != last_ns)
                ends.clear()
    begins.update(end.at_ns for end in ends)
    script: deque[tuple[int, Command]] = deque()
    for at_ns, event in commands:
        script.append((at_ns, Add(requests[event.id]) if isinstance(event, Arrival) else _end(event)))
    failed = {str(number) for number, end in departures.items() if end.reason is FinishReason.ERROR}
    return _Story(steps, script, told, deque(sorted(begins)), outputs, failed)


def _end(departure: Departure) -> Command:
    """End the request for the recorded reason, which decides what is cached and what the length predictor learns."""
    return Stop(str(departure.id), None, departure.reason)


def _request(arrival: Arrival, contents: _Contents) -> Request:
    sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, stop_token_ids=(STOP_TOKEN_ID,))
    return Request(
        request_id=str(arrival.id),
        prompt_token_ids=tuple(contents.tokens(arrival.blocks, arrival.num_prompt_tokens)),
        sampling=sampling,
        arrival_ns=arrival.arrival_ns,
        priority=arrival.priority,
        deadline_ns=arrival.deadline_ns,
        tenant=arrival.tenant,
    )


def _output(arrival: Arrival, departure: Departure, contents: _Contents) -> list[int]:
    """Tokens that the request was given."""
    if not departure.num_output_tokens:
        return []
    begin = arrival.num_prompt_tokens % contents.block_size
    output = contents.tokens(departure.blocks, begin + departure.num_output_tokens)[begin:]
    if departure.reason is FinishReason.STOP and not departure.is_by_text:
        output[-1] = STOP_TOKEN_ID
    return output


class _Contents:
    """Tokens of blocks, made up so that equal blocks are equal and others differ where they did.

    Ask for them in the order in which the recording has the blocks.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: dict[int, tuple[int, ...]] = {}
        self._fresh = count(STOP_TOKEN_ID + 1)

    def tokens(self, blocks: Sequence[BlockId], num_tokens: int) -> list[int]:
        if len(blocks) != -(-num_tokens // self.block_size):
            raise RecordingError(f"{num_tokens} tokens are told by {len(blocks)} blocks of {self.block_size}.")
        tokens: list[int] = []
        for block in blocks:
            if block.id not in self._known:
                size = min(self.block_size, num_tokens - len(tokens))
                like = self._known.get(block.like, ())[: block.num_like]
                self._known[block.id] = (*like, *islice(self._fresh, size - len(like)))
            tokens += self._known[block.id]
        return tokens


class _RecordedExecutor(NoAdapters):
    """An `Executor` that computes nothing: steps end when they did, and requests get as many tokens as they got.

    Compares each plan with that of the recording.
    """

    def __init__(self, capacity: Capacity, depth: int, story: _Story) -> None:
        self.capacity, self.depth = capacity, depth
        self.difference = ""
        self.num_equal = 0
        self._story = story
        self._num_begun = 0
        self._flights: deque[StepDone] = deque()
        self._results: dict[int, StepResult] = {}

    @property
    def has_more(self) -> bool:
        """Whether the recording has a step that was not begun, or one is in flight."""
        return self._num_begun < len(self._story.steps) or bool(self._flights)

    @property
    def is_late(self) -> bool:
        """Whether no turn of the recording is left to begin its next step in."""
        return not self._story.begins and not self._flights

    def next_begin_ns(self) -> int | None:
        """When the next turn begins; None if it only finishes the step in flight."""
        begins, flights = self._story.begins, self._flights
        if not begins or (flights and flights[0].ended_ns < begins[0]):
            return None
        return begins.popleft()

    def submit(self, plan: StepPlan) -> Ticket:
        if self._num_begun == len(self._story.steps):
            self.difference = self.difference or f"a step is planned at {plan.now_ns} ns, after the last one of the recording"
            step_end_ns, waited_ns = plan.now_ns, 0
        else:
            step = self._story.steps[self._num_begun]
            step_end_ns, waited_ns = step.ended_ns, step.waited_ns
            self._compare(plan, step)
            self._flights.append(step)
        self._num_begun += 1
        tokens: dict[str, tuple[int, ...]] = {}
        failures: dict[str, str] = {}
        for row in plan.rows:
            if row.samples:
                left = self._story.outputs.get(row.request_id)
                if not left and row.request_id in self._story.failed:
                    failures[row.request_id] = "it failed in the recording"
                    continue
                # Rows of padding, of requests that ended in the step before, and of those that were still running at the end.
                tokens[row.request_id] = (left.popleft() if left else UNKNOWN_TOKEN_ID,)
        timing = StepTiming(plan.now_ns + waited_ns, step_end_ns, waited_ns=waited_ns)
        self._results[plan.step_id] = StepResult(plan.step_id, tokens, timing, failures=failures)
        return Ticket(plan.step_id, step_end_ns)

    def _compare(self, plan: StepPlan, step: StepDone) -> None:
        if self.difference:
            return
        rows = tuple([Row(_number(row.request_id), row.query_len, row.context_len, row.samples) for row in plan.rows])
        if plan.now_ns != step.planned_ns:
            self.difference = f"step {step.step_id} is planned at {plan.now_ns} ns, not at {step.planned_ns}"
        elif rows != step.rows:
            self.difference = f"step {step.step_id} has the rows {rows}, not {step.rows}"
        else:
            self.num_equal += 1

    def collect(self, ticket: Ticket) -> StepResult:
        if self._flights:
            self._flights.popleft()
        return self._results.pop(ticket.step_id)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        """Changes nothing: the tokens are known."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing is stored."""

    @property
    def block_bytes(self) -> int:
        return 1

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        """Nothing is stored."""

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """There is nothing to free."""


def _number(request_id: str) -> int:
    return NOBODY if isinstance(request_id, PaddingId) else int(request_id)
