"""What the steps of late were: owns one entry per step, of which spans are summed up. Filled and read by the explanations'
journal; never knows who ran in a step.

A request that decodes is in every step from its first token to its end, so two numbers of steps say all about it: how many it
was in, with how many others, and which of them took longest. Nothing is done per request and step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

MAX_STEPS = 8192
"""Steps that are remembered at most; the older half goes when there are more."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The largest piece of a prompt in a step."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    """Of its request; 0 if that is not known."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """What a step did, in so far as it makes others wait."""

    duration_ns: int
    num_rows: int
    num_prefill_tokens: int = 0
    num_prefills: int = 0
    largest: Prefilled | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of one request."""

    gap_ns: int
    step: StepNote | None
    """In which the later one was computed."""
    is_preemption: bool = False
    """The request had lost its place meanwhile."""


@dataclass(slots=True)
class Span:
    """Several steps, summed up."""

    num_steps: int = 0
    num_rows: int = 0
    """Sum over the steps."""
    max_rows: int = 0
    prompts_ns: int = 0
    """Time until the ends of those steps that computed prompts, too."""
    longest: Gap | None = None

    def add(self, other: Span) -> None:
        self.num_steps += other.num_steps
        self.num_rows += other.num_rows
        self.max_rows = max(self.max_rows, other.max_rows)
        self.prompts_ns += other.prompts_ns
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
        self._rows = array("i")
        self._prefill_tokens = array("i")
        self._prefills = array("i")
        self._largest_tokens = array("i")
        self._largest_prompt_tokens = array("i")
        self._largest_ids: list[str | None] = []
        """Of the largest pieces of prompts; None in steps without."""
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
        return Span(len(rows), sum(rows), max(rows), sum(self._prompt_gaps_ns[first:last]), Gap(longest_ns, note))

    @property
    def _columns(self) -> tuple[array[int], ...]:
        times = (self._gaps_ns, self._prompt_gaps_ns, self._durations_ns)
        counts = (self._rows, self._prefill_tokens, self._prefills)
        return (*times, *counts, self._largest_tokens, self._largest_prompt_tokens)

    def _note(self, idx: int) -> StepNote:
        request_id = self._largest_ids[idx]
        largest = None
        if request_id is not None:
            largest = Prefilled(request_id, self._largest_tokens[idx], self._largest_prompt_tokens[idx])
        return StepNote(self._durations_ns[idx], self._rows[idx], self._prefill_tokens[idx], self._prefills[idx], largest)
