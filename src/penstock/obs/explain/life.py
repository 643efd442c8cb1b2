"""The life of one request as the journal writes it down: a record with one writer. Turned into words by `explain`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.obs.explain.steps import Span
from penstock.obs.explain.waits import Ticket, Turn, WaitMark
from penstock.types.stats import PreemptReason, PrefixStop, RequestStats, WaitReason


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
    """Of them, those that were still in the prefix cache."""
    ended: WaitMark | None = None
    """When it ran again."""


@dataclass(slots=True)
class Life:
    request_id: str
    tenant: str
    arrival_ns: int
    num_prompt_tokens: int
    search_id: str = ""
    """Of the beam search that it belongs to, if it does."""
    ticket: Ticket | None = None
    """None: it never was queued."""
    num_before: int = 0
    """Who waited when it was queued and had come earlier, without the other beams of its search."""
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
    last_token_ns: int | None = None
    """Before its last preemption."""
    first_token_ns: int | None = None
    pauses: list[Pause] = field(default_factory=list)
    end: RequestStats | None = None
    left: WaitMark | None = None
    """When it ended; without totals if it ran, as it waited for nothing then."""
