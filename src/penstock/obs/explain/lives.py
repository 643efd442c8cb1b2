"""The journal's data: the history of each request (`Life`), the recent steps, and the queue's waiting time by reason.

A decoding request is in every step until it pauses or ends, so the numbers of its first and last step are enough. All
waiting requests wait for the resource that the first of them lacks, so a request's waiting time is the total of `Waits`
when it was admitted, less the total when it was queued.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.obs.waits import WaitMark
from penstock.types.request import NO_WAITS, WaitTimes
from penstock.types.stats import PreemptReason, PrefixStop, RequestStats, WaitReason

MAX_STEPS = 2048
"""Steps remembered in full. The older half is summed up when there are more."""
MAX_TURNS = 4096
"""Arrivals and admissions remembered. If more requests pass one, only the last part of its wait is blamed on them."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The largest prompt chunk of a step."""

    num_tokens: int
    num_prompt_tokens: int
    """Length of the whole prompt; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """A step's duration and prompts, which delay other requests' tokens."""

    duration_ns: int
    num_rows: int
    num_prefill_tokens: int = 0
    num_prefills: int = 0
    largest: Prefilled | None = None
    waited_ns: int = 0
    """Time in which another model used the machine."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two tokens of one request, and its cause."""

    gap_ns: int
    step: StepNote | None
    """The step that computed the later token."""
    is_preemption: bool = False
    has_sat_out: bool = False
    """The request sat out steps in between because of its grammar masks."""


@dataclass(slots=True)
class Span:
    """Totals over the steps of one request."""

    num_steps: int = 0
    num_rows: int = 0
    max_rows: int = 0
    prompts_ns: int = 0
    """Time of steps that computed others' prompts, including those in which the request had no row."""
    num_prompt_steps: int = 0
    """How many of `num_steps` computed others' prompts."""
    waited_ns: int = 0
    """Time in which another model used the machine."""
    longest: Gap | None = None

    def add(self, other: Span) -> None:
        self.num_steps += other.num_steps
        self.num_rows += other.num_rows
        self.max_rows = max(self.max_rows, other.max_rows)
        self.prompts_ns += other.prompts_ns
        self.num_prompt_steps += other.num_prompt_steps
        self.waited_ns += other.waited_ns
        self.note_gap(other.longest)

    def note_gap(self, gap: Gap | None) -> None:
        if gap is not None and (self.longest is None or gap.gap_ns > self.longest.gap_ns):
            self.longest = gap


class StepLog:
    """The recent steps, by step number."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the oldest step remembered."""
        self._notes: list[StepNote] = []
        self._gaps_ns: list[int] = []
        """From the end of the previous step to the end of each one."""
        self.last_ended_ns = 0

    @property
    def next(self) -> int:
        """Number that the next step will get."""
        return self.first + len(self._notes)

    @property
    def is_full(self) -> bool:
        return len(self._notes) >= MAX_STEPS

    def append(self, note: StepNote, ended_ns: int) -> None:
        self._notes.append(note)
        self._gaps_ns.append(ended_ns - self.last_ended_ns)
        self.last_ended_ns = ended_ns

    def forget_before(self, number: int) -> None:
        del self._notes[: number - self.first], self._gaps_ns[: number - self.first]
        self.first = number

    def span(self, start: int, stop: int) -> Span:
        """Return the totals of steps with numbers in [start, stop), as far as they are remembered."""
        part = slice(max(start, self.first) - self.first, stop - self.first)
        notes, gaps_ns = self._notes[part], self._gaps_ns[part]
        if not notes:
            return Span()
        rows = [note.num_rows for note in notes]
        beside_ns = [gap_ns for gap_ns, note in zip(gaps_ns, notes, strict=True) if note.num_prefills]
        longest_ns = max(gaps_ns)
        longest = Gap(longest_ns, notes[gaps_ns.index(longest_ns)])
        waited_ns = sum([note.waited_ns for note in notes])
        return Span(len(rows), sum(rows), max(rows), sum(beside_ns), len(beside_ns), waited_ns, longest)


@dataclass(frozen=True, slots=True)
class Turn:
    """How a request's admission compares with the order of arrival."""

    num_passed_by: int = 0
    """Later requests that were admitted first."""
    due: WaitMark | None = None
    """When the request would have been admitted in order of arrival, if others passed it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A waiting request's place in the order of arrival."""

    key: tuple[int, int]
    """Instant of arrival, and a number that breaks ties."""
    num_admitted: int
    num_before: int
    """Waiting requests that had arrived earlier."""
    num_came_before: int
    """All requests ever queued that had arrived earlier, except those that left without running."""


class Turns:
    """Counts arrivals and admissions, to tell which requests were passed by later ones.

    Requests may be queued in another order than they arrived, since long prompts take longer to tokenise. For example:

        arrived    a  b  c  d       admitted   a  d  b  c
        In order of arrival, c's turn was the third admission, which was b's. From then on c waited because of the order.
    """

    def __init__(self) -> None:
        self._num_tickets = 0
        self._num_admitted = 0
        self._waiting: list[tuple[int, int]] = []
        """Keys of waiting requests, ascending."""
        self._came: list[tuple[int, int]] = []
        """Keys of all requests that were queued, ascending, without those that left and without the oldest."""
        self._num_forgotten = 0
        """Keys dropped from the front of `_came`."""
        self._admitted: deque[WaitMark] = deque(maxlen=MAX_TURNS)

    def come(self, arrival_ns: int) -> Ticket:
        """Count a request that enters the queue."""
        key = (arrival_ns, self._num_tickets)
        self._num_tickets += 1
        ticket = Ticket(key, self._num_admitted, bisect_left(self._waiting, key), self._num_came_before(key))
        insort(self._waiting, key)
        insort(self._came, key)
        if len(self._came) > MAX_TURNS:
            self._forget(MAX_TURNS // 2)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Stop counting a request that leaves the queue without having run."""
        _discard(self._came, ticket.key)
        self._stop_waiting(ticket)

    def admit(self, ticket: Ticket, now: WaitMark) -> Turn:
        """Count a request's first admission. Return how it compares with the order of arrival."""
        turn = self.turn_of(ticket)
        self._num_admitted += 1
        self._admitted.append(now)
        self._stop_waiting(ticket)
        return turn

    def turn_of(self, ticket: Ticket) -> Turn:
        """Return which later requests have passed a waiting request so far."""
        num_earlier = ticket.num_before + self._num_came_before(ticket.key) - ticket.num_came_before
        num_earlier_admitted = num_earlier - bisect_left(self._waiting, ticket.key)
        num_passed_by = self._num_admitted - ticket.num_admitted - num_earlier_admitted
        if num_passed_by <= 0:
            return Turn()
        return Turn(num_passed_by, self._admitted[-min(num_passed_by, len(self._admitted))])

    def _num_came_before(self, key: tuple[int, int]) -> int:
        return self._num_forgotten + bisect_left(self._came, key)

    def _stop_waiting(self, ticket: Ticket) -> None:
        _discard(self._waiting, ticket.key)
        if not self._waiting:
            self._admitted.clear()
            self._forget(len(self._came))

    def _forget(self, count: int) -> None:
        del self._came[:count]
        self._num_forgotten += count


def _discard(keys: list[tuple[int, int]], key: tuple[int, int]) -> None:
    idx = bisect_left(keys, key)
    if idx < len(keys) and keys[idx] == key:
        del keys[idx]


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    """Preempted, and waiting to be admitted again."""
    ENDED = "ended"


@dataclass(slots=True)
class Pause:
    """One preemption of a request, and its way back."""

    reason: PreemptReason
    began: WaitMark
    num_computed_tokens: int
    """Tokens whose KV was given up."""
    is_swap: bool
    """The KV was moved to a tier below the pool."""
    num_found_tokens: int = 0
    """Tokens that were still in the prefix cache when the request was admitted again."""
    ended: WaitMark | None = None
    """When the request was admitted again."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """The part of a request's history that its explanation repeats."""

    num_before: int = 0
    """Waiting requests that had arrived earlier when it was queued, without other beams of its search."""
    num_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache when it first ran."""
    stop: PrefixStop | None = None
    """Why the prefix cache had no more. None while it waits, or if no history is kept."""
    num_prefill_steps: int = 0
    """Prefill steps before its first token."""
    num_prefill_tokens: int = 0
    """Tokens computed in those steps, including repeated ones."""
    num_resume_steps: int = 0
    """Prefill steps after preemptions."""
    num_resume_tokens: int = 0
    num_forced_tokens: int = 0
    """Tokens that its grammar forced without a step."""
    num_guesses: int = 0
    num_accepted: int = 0
    """Guesses that the model agreed with, which gave tokens without a step of their own."""
    num_sat_out_steps: int = 0
    """Steps that it sat out because of its grammar masks."""
    sat_out_ns: int = 0
    """Time that passed in steps that it sat out."""
    rested_ns: int = 0
    """Time of background steps that left it out. For a background request: of any steps."""
    first_step: int | None = None
    """The engine's number of the first step that computed its prompt."""
    last_step: int | None = None
    """Number of the last step before its end."""


@dataclass(slots=True)
class Life(Counts):
    """Everything recorded about one request from its arrival to its end."""

    request_id: str
    arrival_ns: int
    num_prompt_tokens: int
    search_id: str = ""
    """Id of its beam search, or empty."""
    waits: WaitTimes = NO_WAITS
    is_background: bool = False
    call_id: str = ""
    """Id of the call that this request represents, or empty."""
    ticket: Ticket | None = None
    """None if it was never queued."""
    queued: WaitMark | None = None
    phase: Phase = Phase.WAITING
    began: WaitMark | None = None
    """When it was first admitted."""
    turn: Turn = field(default_factory=Turn)
    aside: WaitMark | None = None
    """When others were first allowed to pass it, before its first step."""
    aside_for: WaitReason = WaitReason.NOTHING
    num_target_tokens: int = 0
    """Tokens to compute before it samples."""
    decodes_from: int = 0
    """The first decode step that is not yet in `decodes`."""
    prefills: Span = field(default_factory=Span)
    decodes: Span = field(default_factory=Span)
    num_first_tokens: int = 0
    """Tokens sampled by prefills: one at first, and one after each preemption."""
    last_token_ns: int | None = None
    """Time of the last token before it was preempted or sat out. None while it decodes."""
    first_token_ns: int | None = None
    pauses: list[Pause] = field(default_factory=list)
    end: RequestStats | None = None
    left: WaitMark | None = None
    """When it ended. Has totals only if the request was waiting then."""
