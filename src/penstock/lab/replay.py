"""The replay: brings what a recording tells to a real core again, at the same instants, and compares the plans. Called by tests
and by `penstock profile`.

This is the first rung of the simulation's ladder of proofs. Arrivals, cancels and the begins and ends of steps are the
recording's; every decision is made anew. The words of prompts are not known: equal blocks get equal tokens, others their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from penstock.clock import Clock, VirtualClock
from penstock.engine.core import EngineCore
from penstock.engine.stepper import Stepper
from penstock.lab.recording import (
    Arrival,
    Aside,
    BlockId,
    Departure,
    Lost,
    Recording,
    RecordingError,
    Restart,
    Row,
    Seen,
    StepDone,
)
from penstock.obs.recording import NOBODY
from penstock.sched.policies.base import Policies
from penstock.sched.scheduler import Scheduler
from penstock.types.adapter import BASE, AdapterOutlook, AdapterRef, AdapterState, NoAdapters, PackedAdapter
from penstock.types.errors import counted
from penstock.types.events import Add, Command, Stop, TokenEvent
from penstock.types.plan import AdmitRow, Capacity, PaddingId, StepPlan, Ticket, scored_positions
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult, StepTiming, TokenLogprobs
from penstock.types.sampling import Matcher, SamplingParams

STOP_TOKEN_ID = 0
UNKNOWN_TOKEN_ID = (1 << 31) - 1
"""Any token of an answer that had not ended, or of nobody."""
NO_LOGPROBS = TokenLogprobs(UNKNOWN_TOKEN_ID, 0.0, 1, ())


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay."""

    num_steps: int
    """Steps of the recording that were planned again."""
    num_equal: int
    """Plans with the same rows, in the same order, from the first step on."""
    difference: str
    """The first step that differs, in words; empty if all are equal."""


def replay(recording: Recording, make_policies: Callable[[], Policies]) -> Replayed:
    """Plan the steps of a recording again, until one differs.

    Raises RecordingError for a recording that contradicts itself, and for one that can't be replayed: its begin or some reports
    are lost, the engine was made anew, it has beam searches (what they chose is not recorded), a tier below the KV pool (its
    times are not), or adapters whose times in memory it does not tell.
    """
    path, executor = recording.paths[-1], None
    try:
        story = _read(recording)
        executor = _RecordedExecutor(recording.header.capacity, recording.header.depth, story)
        return _plan_again(recording, make_policies, story, executor)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error.message}", remedy=error.remedy) from None
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What can't happen in a server makes the scheduler fail in ways of its own.
        num_steps = 0 if executor is None else executor.num_equal
        detail = f"{path} contradicts itself after {counted(num_steps, 'step')} ({type(error).__name__}: {str(error)[:200]})."
        raise RecordingError(detail, remedy="The file is damaged: record again.") from error


def _plan_again(
    recording: Recording, make_policies: Callable[[], Policies], story: _Story, executor: _RecordedExecutor
) -> Replayed:
    header, clock = recording.header, VirtualClock()
    adapters = _RecordedAdapters(clock, story.seen)
    scheduler = Scheduler(
        header.capacity,
        make_policies(),
        enable_prefix_caching=header.has_prefix_caching,
        most_step_ns=executor.most_step_ns,
        adapters=adapters,
        max_adapters=max(1, header.max_adapters),
    )
    core = _Core(scheduler, adapters, executor)

    def commands() -> list[Command]:
        """Those that are due."""
        due: list[Command] = []
        while story.script and story.script[0][0] <= clock.now_ns():
            due.append(story.script.popleft()[1])
        return due

    def tell(events: Sequence[TokenEvent], now_ns: int) -> None:
        del events
        core.apply(story.told.pop(now_ns, ()), now_ns)

    def collect(ticket: Ticket) -> StepResult:
        assert ticket.ready_ns is not None, "told by the recording"
        clock.advance_to(max(clock.now_ns(), ticket.ready_ns))  # a plan that differs may be late
        return executor.collect(ticket)

    # What comes at the end of a step is a cancel; all else was obeyed when a turn began.
    stepper = Stepper(core, executor, clock, tell=tell, poll_aborts=commands, collect=collect)
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
    seen: Mapping[int, deque[Seen]]
    """Adapter -> how it was found, in the order of time."""


def _read(recording: Recording) -> _Story:
    if recording.header.part:
        raise RecordingError("The first part of the recording is lost, and with it what the KV cache contained.")
    if recording.header.has_tier:
        raise RecordingError("The server had a tier below the KV cache, whose times are not recorded.")
    arrivals: dict[int, Arrival] = {}
    departures: dict[int, Departure] = {}
    steps: list[StepDone] = []
    commands: list[tuple[int, Arrival | Departure]] = []
    told: defaultdict[int, list[Command]] = defaultdict(list)
    ends: list[Departure] = []
    """Those since the last step that no token of it explains."""
    begins: set[int] = set()
    seen: defaultdict[int, deque[Seen]] = defaultdict(deque)
    looks: set[int] = set()
    """Instants since the last step at which an adapter was found otherwise than before, or somebody stood aside for one."""
    contents = _Contents(recording.header.block_size)
    requests: dict[int, Request] = {}
    outputs: dict[str, deque[int]] = {}
    following: dict[int, _RecordedMatcher] = {}
    last_ns = -1
    for event in recording.events():
        match event:
            case Arrival() if event.queued_ns is not None and not event.is_repeated:
                if event.beam_width:
                    raise RecordingError("The recording has beam searches, of which it does not know what they chose.")
                if event.adapter != BASE and not recording.header.max_adapters:
                    raise RecordingError("The recording has adapters, and does not say when they were in memory.")
                arrivals[event.id] = event
                outputs[str(event.id)] = deque()
                if event.has_grammar:
                    following[event.id] = _RecordedMatcher(outputs[str(event.id)])
                requests[event.id] = _request(event, contents, following.get(event.id))
                commands.append((event.queued_ns, event))
                begins.add(event.queued_ns)
            case Departure() if event.id in arrivals:
                departures[event.id] = event
                outputs[str(event.id)].extend(_output(arrivals[event.id], event, contents))
                if event.id in following:
                    following[event.id].note(arrivals[event.id].num_prompt_tokens + event.num_output_tokens)
                if event.at_ns != last_ns:
                    commands.append((event.at_ns, event))
                    ends.append(event)
                else:  # by its text, perhaps; if by a token, it has ended already when it is told to
                    told[last_ns].append(_end(event))
            case StepDone():
                last_ns = event.ended_ns
                steps.append(event)
                if following:
                    for row in event.rows:
                        if row.samples and row.id in following:
                            following[row.id].note(row.context_len + row.query_len)
                begins.add(event.planned_ns)
                begins.update(end.at_ns for end in ends if end.at_ns != last_ns)
                begins.update(looks - {last_ns})
                ends.clear()
                looks.clear()
            case Seen() | Aside():
                if isinstance(event, Seen):
                    seen[event.number].append(event)
                if event.at_ns != last_ns:  # else at the end of a step, when its tokens were told
                    looks.add(event.at_ns)
            case Lost():
                raise RecordingError(f"The recording lacks {event.count} reports.")
            case Restart():
                raise RecordingError("The engine was made anew while it was recorded.")
    begins.update(end.at_ns for end in ends)
    begins.update(looks)
    script: deque[tuple[int, Command]] = deque()
    for at_ns, event in commands:
        script.append((at_ns, Add(requests[event.id]) if isinstance(event, Arrival) else _end(event)))
    return _Story(
        steps=steps,
        script=script,
        told=told,
        begins=deque(sorted(begins)),
        outputs=outputs,
        failed={str(number) for number, end in departures.items() if end.reason is FinishReason.ERROR},
        seen=seen,
    )


def _end(departure: Departure) -> Command:
    """Ends the request for its reason, whatever ended it: on that depends what is kept of it, and learnt."""
    return Stop(str(departure.id), None, departure.reason)


def _request(arrival: Arrival, contents: _Contents, matcher: Matcher | None) -> Request:
    return Request(
        request_id=str(arrival.id),
        prompt_token_ids=tuple(contents.tokens(arrival.blocks, arrival.num_prompt_tokens)),
        sampling=SamplingParams(
            max_tokens=arrival.max_tokens,
            temperature=0.0,
            stop_token_ids=(STOP_TOKEN_ID,),
            prompt_logprobs=0 if arrival.is_scored else None,
            follows_grammar=arrival.has_grammar,
        ),
        arrival_ns=arrival.arrival_ns,
        priority=arrival.priority,
        deadline_ns=arrival.deadline_ns,
        tenant=arrival.tenant,
        arm=arrival.arm,
        conversation=str(arrival.conversation).encode() if arrival.conversation else b"",
        matcher=matcher,
        adapter=None if arrival.adapter == BASE else AdapterRef(arrival.adapter, arrival.adapter_content.to_bytes(16, "big")),
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


class _RecordedMatcher:
    """The grammar of a recorded request: forces as many tokens after each sampled one as its next row computed beside that."""

    def __init__(self, output: deque[int]) -> None:
        """`output`: the tokens that are still to come."""
        self._output = output
        self._ends: deque[int] = deque()
        self._num_forced = 0

    def note(self, num_tokens: int) -> None:
        """The request had so many tokens when it sampled the next time, or ended."""
        self._ends.append(num_tokens)

    def accept(self, token_ids: Sequence[int]) -> None:
        """One that was sampled has left the output already; one that was forced does now."""
        del token_ids
        if self._num_forced:
            self._num_forced -= 1
            if self._output:  # else the file is damaged, and the plans will differ
                self._output.popleft()
        elif self._ends:
            num_tokens = self._ends.popleft() + 1
            self._num_forced = max(0, self._ends[0] - num_tokens) if self._ends else 0

    def forced(self) -> Sequence[int]:
        return tuple(islice(self._output, self._num_forced))

    def mask(self) -> None:
        """The executor needs none: the tokens are known."""


class _Contents:
    """Tokens of blocks, made up so that equal blocks are equal and others differ where they did.

    They have to be asked for in the order in which the blocks were told.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: dict[int, tuple[int, ...]] = {}
        self._fresh = count(STOP_TOKEN_ID + 1)

    def tokens(self, blocks: Sequence[BlockId], num_tokens: int) -> list[int]:
        """Raises RecordingError if they are not told."""
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


@dataclass(frozen=True, slots=True)
class _Pages:
    """An adapter of which nothing is known but its size."""

    num_pages: int
    num_bytes: int = 0


class _RecordedAdapters:
    """An `AdapterSource` that has what it had in the recording, at the same instants."""

    def __init__(self, clock: Clock, seen: Mapping[int, deque[Seen]]) -> None:
        self.is_planning = False
        """A plan is being made: it sees what was found by the plan of this instant, too."""
        self._clock = clock
        self._seen = seen
        self._states: dict[int, AdapterState] = {}

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        """It comes when it came."""

    def state(self, number: int) -> AdapterState:
        coming, now_ns = self._seen.get(number, ()), self._clock.now_ns()
        while coming and (coming[0].at_ns < now_ns or (coming[0].at_ns == now_ns and coming[0].is_planned <= self.is_planning)):
            one = coming.popleft()
            packed = _Pages(one.num_pages) if one.num_pages else None
            self._states[number] = AdapterState(packed, "it could not be had in the recording" if one.has_failed else "")
        return self._states.get(number, AdapterState())

    def outlook(self, number: int) -> AdapterOutlook:
        """Nothing is known beforehand: who was refused for it when it came is no part of the replay."""
        del number
        return AdapterOutlook()

    def listen(self, wake: Callable[[], None]) -> None:
        """Turns come when they came."""


class _Core(EngineCore):
    """A core that says when it makes a plan, and in which those sit out who did."""

    def __init__(self, scheduler: Scheduler, adapters: _RecordedAdapters, executor: _RecordedExecutor) -> None:
        super().__init__(scheduler)
        self._adapters = adapters
        self._executor = executor

    def sitting_out(self) -> Collection[str]:
        return self._executor.sitting_out()

    def begin(self, now_ns: int) -> StepPlan | None:
        self._adapters.is_planning = True
        plan = super().begin(now_ns)
        self._adapters.is_planning = False
        return plan


class _RecordedExecutor(NoAdapters):
    """An `Executor` that computes nothing: steps end when they did, and requests get as many tokens as they got. Compares each
    plan with that of the recording.
    """

    def __init__(self, capacity: Capacity, depth: int, story: _Story) -> None:
        self.capacity, self.depth = capacity, depth
        self.difference = ""
        self.num_equal = 0
        self._story = story
        self._num_begun = 0
        self._flights: deque[StepDone] = deque()
        self._results: dict[int, StepResult] = {}
        self._scored: dict[str, AdmitRow] = {}
        """Rows whose prompts are scored, by request id."""

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

    def most_step_ns(self) -> int:
        """How long the step that comes next was to take at most."""
        steps = self._story.steps
        return steps[self._num_begun].most_ns if self._num_begun < len(steps) else 0

    def sitting_out(self) -> Collection[str]:
        """Requests that had no row in the step that comes next."""
        steps = self._story.steps
        return [str(number) for number in steps[self._num_begun].sat_out] if self._num_begun < len(steps) else ()

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
        self._results[plan.step_id] = StepResult(
            plan.step_id, tokens, timing, prompt_logprobs=self._score(plan), failures=failures
        )
        return Ticket(plan.step_id, step_end_ns)

    def _score(self, plan: StepPlan) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Something for each token of prompts that are scored: plans depend on how many were told, and on nothing of it."""
        for request_id in plan.releases:
            self._scored.pop(request_id, None)
        self._scored |= {admit.request_id: admit for admit in plan.admits if admit.sampling.prompt_logprobs is not None}
        if not self._scored:
            return {}
        rows = [(row, self._scored[row.request_id]) for row in plan.rows if row.request_id in self._scored]
        return {
            row.request_id: (NO_LOGPROBS,)
            * len(scored_positions(row.context_len, row.query_len, admit.num_prompt_tokens, admit.num_scored))
            for row, admit in rows
        }

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

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        """Nothing is stored."""

    def drop_adapter(self, number: int) -> None:
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
