"""Why a request took as long as it did, in numbers, worked out from what is known of its life. Called by the journal when
somebody asks; changes nothing.

    arrival        queued           began                  first token                          end
       | intake ----- | for rows, ... ---- | prefill ----------- | decode, pauses among it ------- |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.obs.explain.life import Life, Pause, Phase
from penstock.obs.explain.steps import Gap, Span
from penstock.obs.explain.waits import REASONS, Turn, WaitMark
from penstock.types.request import FinishReason, Request
from penstock.types.stats import PreemptReason, PrefixStop, WaitReason

INTAKE = "intake"
"""Waiting before it was queued: its prompt was tokenised, and the step that ran came to its end."""
ORDER = "order"
"""Waiting after it had been its turn in order of arrival."""
STEP = "step"
"""Waiting for nothing but the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseTold:
    """A preemption."""

    began_ns: int
    """From arrival."""
    reason: PreemptReason
    is_swap: bool
    """Its tokens were kept below the pool, to come back from there."""
    num_lost_tokens: int
    """With KV, less what was found again."""
    waited_ns: int
    """Until it ran again, or until now."""
    waited_for_ns: Mapping[str, int]
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One request at a moment. Times are integer nanoseconds."""

    request_id: str
    phase: Phase
    finish_reason: FinishReason | None
    reject_reason: str
    arrival_ns: int
    total_ns: int
    """From arrival to the end, or to now."""
    queue_ns: int
    """Before its first step."""
    prefill_ns: int
    """From its first step to its first token."""
    decode_ns: int
    """From its first token on, pauses included."""
    waited_for_ns: Mapping[str, int]
    """By what it waited for, before its first step; the sum is `queue_ns`. What is 0 is not there."""
    waits_for: str
    """What the queue lacks now, while it waits."""
    num_before: int
    """Requests that had come earlier and waited when it was queued, without the other beams of its search."""
    num_passed_by: int
    """Requests that came later and ran first."""
    num_prompt_tokens: int
    num_generated_tokens: int
    num_hit_tokens: int
    """Of its prompt, from the prefix cache, when it first ran."""
    stop: PrefixStop | None
    """Why no more; None while it waits, and if nobody keeps the history."""
    evicted_ago_ns: int | None
    """How long before its first step the block was evicted that it would have needed."""
    num_prefill_steps: int
    """Before its first token."""
    num_prefill_tokens: int
    """Computed in them, those that were lost in a pause and computed again included."""
    num_resume_steps: int
    """Between a pause and the next token."""
    num_resume_tokens: int
    """Computed in them."""
    num_decode_steps: int
    decode_with_prompts_ns: int
    """Of `decode_ns`, in steps that computed prompts of others, too."""
    mean_batch: float
    """Requests in its steps, itself included."""
    max_batch: int
    longest_gap: Gap | None
    """Between two of its tokens."""
    pauses: Sequence[PauseTold]


def explain(life: Life, now: WaitMark, turn: Turn, decodes: Span, waits_for: WaitReason) -> Explanation:
    """`now`: of the moment that is asked about; `turn`: its place in order of arrival; `decodes`: all of its decodes."""
    end = life.left or now
    began_ns = life.began.at_ns if life.began else end.at_ns
    first_token_ns = life.end.first_token_ns if life.end else life.first_token_ns
    decode_from_ns = first_token_ns if first_token_ns is not None else end.at_ns
    steps = Span()
    steps.add(life.prefills)
    steps.add(decodes)
    num_generated = life.end.num_generated_tokens if life.end else life.num_first_tokens + decodes.num_steps
    stop = life.stop
    is_waiting = life.phase in (Phase.WAITING, Phase.PAUSED)
    return Explanation(
        request_id=life.request_id,
        phase=life.phase,
        finish_reason=life.end.finish_reason if life.end else None,
        reject_reason=life.end.reject_reason if life.end else "",
        arrival_ns=life.arrival_ns,
        total_ns=end.at_ns - life.arrival_ns,
        queue_ns=began_ns - life.arrival_ns,
        prefill_ns=max(0, decode_from_ns - began_ns),
        decode_ns=max(0, end.at_ns - decode_from_ns),
        waited_for_ns=_waited_for(life, life.began or end, turn),
        waits_for=(waits_for.value or STEP) if is_waiting else "",
        num_before=life.num_before,
        num_passed_by=turn.num_passed_by,
        num_prompt_tokens=life.num_prompt_tokens,
        num_generated_tokens=num_generated,
        num_hit_tokens=life.num_hit_tokens,
        stop=stop,
        evicted_ago_ns=None if stop is None or stop.evicted_ns is None else max(0, began_ns - stop.evicted_ns),
        num_prefill_steps=life.num_prefill_steps,
        num_prefill_tokens=life.num_prefill_tokens,
        num_resume_steps=life.num_resume_steps,
        num_resume_tokens=life.num_resume_tokens,
        num_decode_steps=decodes.num_steps,
        decode_with_prompts_ns=decodes.prompts_ns,
        mean_batch=steps.num_rows / steps.num_steps if steps.num_steps else 0.0,
        max_batch=steps.max_rows,
        longest_gap=decodes.longest,
        pauses=[_pause(pause, life.arrival_ns, end) for pause in life.pauses],
    )


def explain_intake(request: Request, now_ns: int) -> Explanation:
    """Of a request that is on its way to the queue."""
    life = Life(request.request_id, request.tenant, request.arrival_ns, request.num_prompt_tokens)
    return explain(life, WaitMark(now_ns, (0,) * len(REASONS)), Turn(), Span(), WaitReason.NOTHING)


def _waited_for(life: Life, until: WaitMark, turn: Turn) -> dict[str, int]:
    """From arrival to its first step; the parts are disjoint and leave no gap."""
    if life.queued is None:
        return _some({INTAKE: until.at_ns - life.arrival_ns})
    due, why_later = until, ORDER
    if life.aside is not None:  # those who pass it from then on do so for that reason
        due, why_later = life.aside, life.aside_for.value
    if turn.due is not None and turn.due.at_ns < due.at_ns:
        due, why_later = turn.due if turn.due.at_ns > life.queued.at_ns else life.queued, ORDER
    waited = _told(due.since(life.queued))
    waited[why_later] = waited.get(why_later, 0) + until.at_ns - due.at_ns
    return _some({INTAKE: life.queued.at_ns - life.arrival_ns} | waited)


def _told(by_reason_ns: Sequence[int]) -> dict[str, int]:
    names = [reason.value or STEP for reason in REASONS]
    return _some(dict(zip(names, by_reason_ns, strict=False)))


def _some(parts_ns: dict[str, int]) -> dict[str, int]:
    return {name: part_ns for name, part_ns in parts_ns.items() if part_ns > 0}


def _pause(pause: Pause, arrival_ns: int, end: WaitMark) -> PauseTold:
    until = pause.ended or end
    return PauseTold(
        began_ns=pause.began.at_ns - arrival_ns,
        reason=pause.reason,
        is_swap=pause.is_swap,
        num_lost_tokens=max(0, pause.num_computed_tokens - pause.num_found_tokens),
        waited_ns=until.at_ns - pause.began.at_ns,
        waited_for_ns=_told(until.since(pause.began)),
        is_over=pause.ended is not None,
    )
