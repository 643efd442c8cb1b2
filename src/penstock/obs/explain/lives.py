"""The notes that the journal keeps: the life of each request, the recent steps, and how long the queue lacked what. Filled
and read by `Journal`; worked out in numbers by `explain`.

A request that decodes is in every step from its first token to its end, so two numbers of steps say all about it: how many it
was in, with how many others, and which of them took longest. Nothing is done per request and step, but where requests sit out.

All requests that wait in a step wait for what the first of them lacks, so time is added once per step and not once per
request: a request remembers the totals as it came, and the difference when it runs is what it waited for. How much of that is
due to the order, which let others pass, follows from counting alone:

    came       a  b  c  d       admitted   a  d  b  c
    turn of c in order of arrival: the third admission, which was b's. From there on c waited because of the order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from struct import Struct

from penstock.types.stats import PreemptReason, PrefixStop, RequestStats, WaitReason

MAX_STEPS = 8192
"""Steps that are remembered at most; the older half goes when there are more."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The largest piece of a prompt in a step."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    """Tokens in its request's prompt; 0 if that is not known."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """The work of a step, in so far as it makes others wait."""

    duration_ns: int
    num_rows: int
    num_prefill_tokens: int = 0
    num_prefills: int = 0
    largest: Prefilled | None = None
    waited_ns: int = 0
    """The part in which the machine was another model's."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of one request."""

    gap_ns: int
    step: StepNote | None
    """In which the later one was computed."""
    is_preemption: bool = False
    """The request had lost its place meanwhile."""
    has_sat_out: bool = False
    """The request had no row in steps between, for its masks."""


@dataclass(slots=True)
class Span:
    """Several steps, summed up."""

    num_steps: int = 0
    num_rows: int = 0
    """Sum over the steps."""
    max_rows: int = 0
    prompts_ns: int = 0
    """Time until the ends of those steps that computed prompts, too."""
    waited_ns: int = 0
    """Time in which the machine was another model's."""
    longest: Gap | None = None

    def add(self, other: Span) -> None:
        self.num_steps += other.num_steps
        self.num_rows += other.num_rows
        self.max_rows = max(self.max_rows, other.max_rows)
        self.prompts_ns += other.prompts_ns
        self.waited_ns += other.waited_ns
        self.note_gap(other.longest)

    def note_gap(self, gap: Gap | None) -> None:
        if gap is not None and (self.longest is None or gap.gap_ns > self.longest.gap_ns):
            self.longest = gap


class StepLog:
    """Steps by number, counted from 0. Kept as numbers side by side: as objects they take two and a half times the memory, of
    which a server would have the last only after `MAX_STEPS` steps."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the oldest step that is remembered."""
        self._gaps_ns = array("q")
        """From the end of the step before to the end of this one."""
        self._prompt_gaps_ns = array("q")
        """The same; 0 of steps without prompts."""
        self._durations_ns = array("q")
        self._waits_ns = array("q")
        self._rows = array("i")
        self._prefill_tokens = array("i")
        self._prefills = array("i")
        self._largest_tokens = array("i")
        self._largest_prompt_tokens = array("i")
        self._largest_ids: list[str | None] = []
        """Request ids of the largest pieces of prompts; None in steps without."""
        self.last_ended_ns = 0

    @property
    def next(self) -> int:
        """Number of the step that comes next."""
        return self.first + len(self._rows)

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= MAX_STEPS

    def append(self, note: StepNote, ended_ns: int) -> None:
        gap_ns = ended_ns - self.last_ended_ns
        largest = note.largest
        self._gaps_ns.append(gap_ns)
        self._prompt_gaps_ns.append(gap_ns if note.num_prefills else 0)
        self._durations_ns.append(note.duration_ns)
        self._waits_ns.append(note.waited_ns)
        self._rows.append(note.num_rows)
        self._prefill_tokens.append(note.num_prefill_tokens)
        self._prefills.append(note.num_prefills)
        self._largest_tokens.append(largest.num_tokens if largest else 0)
        self._largest_prompt_tokens.append(largest.num_prompt_tokens if largest else 0)
        self._largest_ids.append(largest.request_id if largest else None)
        self.last_ended_ns = ended_ns

    def forget_before(self, number: int) -> None:
        count = number - self.first
        for column in self._columns:
            del column[:count]
        del self._largest_ids[:count]
        self.first = number

    def span(self, start: int, stop: int) -> Span:
        """Steps [start, stop), as far as they are remembered. O(steps), in the interpreter's own loops."""
        first, last = max(start, self.first) - self.first, stop - self.first
        rows = self._rows[first:last]
        if not rows:
            return Span()
        gaps_ns = self._gaps_ns[first:last]
        longest_ns = max(gaps_ns)
        note = self._note(first + gaps_ns.index(longest_ns))
        prompts_ns, waited_ns = sum(self._prompt_gaps_ns[first:last]), sum(self._waits_ns[first:last])
        return Span(len(rows), sum(rows), max(rows), prompts_ns, waited_ns, Gap(longest_ns, note))

    @property
    def _columns(self) -> tuple[array[int], ...]:
        times = (self._gaps_ns, self._prompt_gaps_ns, self._durations_ns, self._waits_ns)
        counts = (self._rows, self._prefill_tokens, self._prefills)
        return (*times, *counts, self._largest_tokens, self._largest_prompt_tokens)

    def _note(self, idx: int) -> StepNote:
        request_id = self._largest_ids[idx]
        largest = None
        if request_id is not None:
            largest = Prefilled(request_id, self._largest_tokens[idx], self._largest_prompt_tokens[idx])
        counts = (self._rows[idx], self._prefill_tokens[idx], self._prefills[idx])
        return StepNote(self._durations_ns[idx], *counts, largest, self._waits_ns[idx])


REASONS = tuple(WaitReason)
_MARK = Struct(f"<{1 + len(REASONS)}q")
"""A mark as it is remembered."""
_INDEX = {reason: idx for idx, reason in enumerate(REASONS)}
MAX_TURNS = 8192
"""Admissions that are remembered; who is passed by more counts the rest as something else."""


@dataclass(frozen=True, slots=True)
class WaitMark:
    """The totals at an instant."""

    at_ns: int
    totals_ns: tuple[int, ...]
    """By reason, in the order of `REASONS`."""

    def since(self, earlier: WaitMark) -> tuple[int, ...]:
        """The time for which each thing was lacking between two instants; none of them is negative."""
        return tuple([max(0, late - early) for late, early in zip(self.totals_ns, earlier.totals_ns, strict=True)])


class WaitClock:
    """Time by what the queue lacked."""

    def __init__(self) -> None:
        self._at_ns = 0
        self._current = _INDEX[WaitReason.NOTHING]
        self._totals_ns = [0] * len(REASONS)

    @property
    def reason(self) -> WaitReason:
        """The thing that is lacking now."""
        return REASONS[self._current]

    def lack(self, reason: WaitReason, now_ns: int) -> None:
        """From now on the queue lacks this, until it is told otherwise."""
        if now_ns > self._at_ns:
            self._totals_ns[self._current] += now_ns - self._at_ns
            self._at_ns = now_ns
        self._current = _INDEX[reason]

    def mark(self, now_ns: int) -> WaitMark:
        totals_ns = list(self._totals_ns)
        totals_ns[self._current] += max(0, now_ns - self._at_ns)
        return WaitMark(now_ns, tuple(totals_ns))


@dataclass(frozen=True, slots=True)
class Turn:
    """How a request's turn compares with the order of arrival."""

    num_passed_by: int = 0
    """So many were admitted while it waited that had come later."""
    due: WaitMark | None = None
    """When it would have been its turn, if it was passed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The notes of `Turns` on one request that waits."""

    key: tuple[int, int]
    """Instant of arrival, and a number that breaks ties."""
    num_admitted: int
    """When it was queued; so are the others."""
    num_before: int
    """Requests that waited and had come earlier."""
    num_came_before: int
    """Requests that were ever queued, had come earlier and did not leave."""


class LateMarks:
    """The last `MAX_TURNS` marks. As numbers in one array: a tuple and an object each took four times as much, which a server
    had in full only after that many requests."""

    def __init__(self) -> None:
        self._numbers = bytearray()
        """Instant and totals of each mark; once there are enough, a ring."""
        self._num_marks = 0
        """That were ever appended."""

    def append(self, mark: WaitMark) -> None:
        start = self._num_marks % MAX_TURNS * _MARK.size
        self._numbers[start : start + _MARK.size] = _MARK.pack(mark.at_ns, *mark.totals_ns)
        self._num_marks += 1

    def from_last(self, count: int) -> WaitMark:
        """The `count`-th from the last, counted from 1; the oldest that is remembered if that was longer ago."""
        idx = (self._num_marks - min(count, self._num_marks, MAX_TURNS)) % MAX_TURNS
        at_ns, *totals_ns = _MARK.unpack_from(self._numbers, idx * _MARK.size)
        return WaitMark(at_ns, tuple(totals_ns))


class LateKeys:
    """Keys, ascending and each different: an instant, and a number that breaks ties. The lesser are forgotten, not how many
    they were. O(log keys), but for the shift of an array. As numbers side by side they take an eighth of what tuples would.
    """

    def __init__(self) -> None:
        self._instants_ns = array("q")
        self._numbers = array("q")
        self._num_forgotten = 0

    def add(self, key: tuple[int, int]) -> int:
        """The number of keys that are less."""
        idx = self._find(key)
        self._instants_ns.insert(idx, key[0])
        self._numbers.insert(idx, key[1])
        num_less = self._num_forgotten + idx
        if len(self._numbers) > MAX_TURNS:
            self._num_forgotten += MAX_TURNS // 2
            self._remove(0, MAX_TURNS // 2)
        return num_less

    def num_before(self, key: tuple[int, int]) -> int:
        """Keys that are less."""
        return self._num_forgotten + self._find(key)

    def discard(self, key: tuple[int, int]) -> None:
        """Remove a key; one that is not there is ignored."""
        idx = self._find(key)
        if idx < len(self._numbers) and (self._instants_ns[idx], self._numbers[idx]) == key:
            self._remove(idx, idx + 1)

    def _find(self, key: tuple[int, int]) -> int:
        instants_ns = self._instants_ns
        if not instants_ns or instants_ns[-1] < key[0]:  # the newest, as most are when they are added
            return len(instants_ns)
        idx = bisect_left(instants_ns, key[0])
        if instants_ns[idx] != key[0]:
            return idx
        return bisect_left(self._numbers, key[1], idx, bisect_right(instants_ns, key[0], idx))

    def _remove(self, start: int, stop: int) -> None:
        del self._instants_ns[start:stop]
        del self._numbers[start:stop]


class Turns:
    """Counts who was queued, who was admitted and who left, by arrival; that is not the order in which they are queued, as long
    prompts take longer to tokenise. O(log requests), but for the shift of an array.
    """

    def __init__(self) -> None:
        self._num_tickets = 0
        self._num_admitted = 0
        self._waiting: list[tuple[int, int]] = []
        """Keys, ascending."""
        self._came = LateKeys()
        """Times of all requests that were queued and did not leave without having run."""
        self._admitted = LateMarks()

    def come(self, arrival_ns: int) -> Ticket:
        """Somebody is queued."""
        key = (arrival_ns, self._num_tickets)
        self._num_tickets += 1
        num_before = bisect_left(self._waiting, key)
        self._waiting.insert(num_before, key)
        return Ticket(key, self._num_admitted, num_before, self._came.add(key))

    def leave(self, ticket: Ticket) -> None:
        """Without having run."""
        _discard(self._waiting, ticket.key)
        self._came.discard(ticket.key)

    def admit(self, ticket: Ticket, now: WaitMark) -> Turn:
        """For the first time."""
        turn = self.turn_of(ticket)
        _discard(self._waiting, ticket.key)
        self._num_admitted += 1
        self._admitted.append(now)
        return turn

    def turn_of(self, ticket: Ticket) -> Turn:
        """The turn of a request that waits."""
        num_earlier = ticket.num_before + self._came.num_before(ticket.key) - ticket.num_came_before
        num_earlier_admitted = num_earlier - bisect_left(self._waiting, ticket.key)
        num_passed_by = self._num_admitted - ticket.num_admitted - num_earlier_admitted
        if num_passed_by <= 0:
            return Turn()
        return Turn(num_passed_by, self._admitted.from_last(num_passed_by))


def _discard(keys: list[tuple[int, int]], key: tuple[int, int]) -> None:
    idx = bisect_left(keys, key)
    if idx < len(keys) and keys[idx] == key:
        del keys[idx]


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    """Preempted: it lost its place, and waits for another."""
    ENDED = "ended"


@dataclass(slots=True)
class Pause:
    """A preemption and what followed."""

    reason: PreemptReason
    began: WaitMark
    num_computed_tokens: int
    """Tokens with KV that it lost."""
    is_swap: bool
    """They were kept below the pool, to come back from there."""
    num_tokens: int = 0
    """That it had to have again, set when it came back."""
    num_found_tokens: int = 0
    """The tokens among them that were still in the prefix cache."""
    ended: WaitMark | None = None
    """When it ran again."""


@dataclass(slots=True)
class Life:
    request_id: str
    tenant: str
    arrival_ns: int
    num_prompt_tokens: int
    search_id: str = ""
    """Id of the beam search that it belongs to, if it does."""
    model_wait_ns: int = 0
    """The time after its arrival in which its model was loaded."""
    grammar_wait_ns: int = 0
    """The time before it was queued in which its grammar was compiled."""
    call_id: str = ""
    """Id of the call for which it is watched, if others of that are not."""
    ticket: Ticket | None = None
    """None: it never was queued."""
    num_before: int = 0
    """Requests that waited when it was queued and had come earlier, without the other beams of its search."""
    queued: WaitMark | None = None
    phase: Phase = Phase.WAITING
    began: WaitMark | None = None
    """When it first ran."""
    turn: Turn = field(default_factory=Turn)
    aside: WaitMark | None = None
    """When others were let past it, before its first step."""
    aside_for: WaitReason = WaitReason.NOTHING
    num_hit_tokens: int = 0
    stop: PrefixStop | None = None
    num_target_tokens: int = 0
    """That it must have computed before it samples."""
    num_prefill_steps: int = 0
    """Before its first token."""
    num_prefill_tokens: int = 0
    num_resume_steps: int = 0
    """After a pause, until it chose tokens again."""
    num_resume_tokens: int = 0
    decodes_from: int = 0
    """The first step of its present decode phase that is not in `decodes`."""
    prefills: Span = field(default_factory=Span)
    decodes: Span = field(default_factory=Span)
    num_first_tokens: int = 0
    """Tokens that prefills chose: one, and one more for each time it came back."""
    num_forced_tokens: int = 0
    """Tokens that its grammar forced, which no step chose."""
    last_token_ns: int | None = None
    """Before its last preemption, or before it sat out; None while it goes on."""
    num_sat_out: int = 0
    """Steps in which it had no row, as its masks had taken long."""
    sat_out_ns: int = 0
    first_token_ns: int | None = None
    pauses: list[Pause] = field(default_factory=list)
    end: RequestStats | None = None
    left: WaitMark | None = None
    """When it ended; without totals if it ran, as it waited for nothing then."""
