"""Explains why a request took as long as it did, in numbers and in sentences, from what the journal recorded.

arrival               queued           began               first token                       end
   | route, model --- intake -- | for rows, ... ---- | prefill -------- | decode, pauses among it ---- |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from penstock.obs.explain.lives import Counts, Gap, Life, Pause, Phase, Span, Turn
from penstock.obs.waits import REASONS, WaitMark
from penstock.types.errors import counted
from penstock.types.request import FinishReason, Request
from penstock.types.stats import PreemptReason, PrefixEnd, WaitReason

ROUTE = "route"
"""Waiting for its route to choose a model, including an answer another model began."""
PIPELINE = "pipeline"
"""Waiting for its pipeline to look up its question."""
MODEL = "model"
"""Waiting for its model to be loaded."""
GRAMMAR = "grammar"
"""Waiting for its grammar to be compiled."""
PROMPT = "prompt"
"""Waiting for its prompt to be built and tokenised. Counted as INTAKE afterwards."""
INTAKE = "intake"
"""Waiting to be queued: for tokenisation and the end of the running step."""
ORDER = "order"
"""Waiting past its turn in order of arrival."""
BACKGROUND = "background"
"""A background request: waiting for what other requests leave."""
STEP = "step"
"""Waiting for the next step only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPause:
    """One preemption of a request, as an explanation shows it."""

    began_ns: int
    """Time from the request's arrival."""
    reason: PreemptReason
    is_swap: bool
    """The KV was moved to a tier below the pool."""
    num_lost_tokens: int
    """Tokens whose KV was lost."""
    waited_ns: int
    """Time until the request ran again, or until now."""
    waited_for_ns: Mapping[str, int]
    is_over: bool


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that a cluster chose for a request, and what was known then."""

    replica: str
    num_held_tokens: int
    """Tokens of the prompt in the replica's cache."""
    num_tokens_ahead: int
    """Tokens that the replica had yet to compute for others."""
    fewest_tokens_ahead: int
    """The same for the replica with the least work."""
    before: tuple[str, ...] = ()
    """Earlier replicas: they were lost, refused the request, or computed only its prompt."""
    move_ns: int = 0
    """Time from the previous replica's part of the answer until the first step here. 0 if that replica is gone."""
    num_fetched_tokens: int = 0
    """Tokens of the prompt whose KV came from another replica's cache."""
    fetch_ns: int = 0
    """How long that took."""


@dataclass(slots=True, kw_only=True)
class Explanation(Counts):
    """How one request's time was spent, as of an instant, in integer nanoseconds. Treat as frozen."""

    request_id: str
    """Id of the request, or of the call that it represents."""
    phase: Phase
    finish_reason: FinishReason | None
    reject_reason: str
    arrival_ns: int
    total_ns: int
    """From arrival to the end, or to now."""
    queue_ns: int
    """From arrival to its first step."""
    prefill_ns: int
    """From its first step to its first token."""
    decode_ns: int
    """From its first token to the end, including preemptions."""
    waited_for_ns: Mapping[str, int]
    """`queue_ns` by what it waited for, without zeros."""
    waits_for: str
    """The queue's reason to wait now; empty if this request does not wait."""
    num_passed_by: int
    """Later requests that ran first."""
    num_prompt_tokens: int
    num_generated_tokens: int
    evicted_ago_ns: int | None
    """Time from the eviction of the next block it needed to its first step."""
    num_decode_steps: int
    decode_with_prompts_ns: int
    """The part of `decode_ns` in steps that computed others' prompts, including those in which the request had no row."""
    num_steps_with_prompts: int
    """How many of `num_decode_steps` computed others' prompts."""
    other_models_ns: int
    """The part of its steps in which another model used the machine."""
    mean_batch: float
    """Mean number of requests in its steps."""
    max_batch: int
    longest_gap: Gap | None
    pauses: Sequence[ExplainedPause]
    route: Route | None = None
    """None unless a cluster computed it."""

    @property
    def num_steps(self) -> int:
        return self.num_prefill_steps + self.num_resume_steps + self.num_decode_steps


_COUNTS = tuple(one.name for one in fields(Counts))


def explain(life: Life, now: WaitMark, turn: Turn, decodes: Span, waits_for: WaitReason) -> Explanation:
    """Explain a request as of `now`. `decodes` has the totals of all steps in which it decoded."""
    end = life.left or now
    began_ns = life.began.at_ns if life.began else end.at_ns
    first_token_ns = life.first_token_ns
    if life.end and not life.search_id:  # beams decode long before their first token is sent
        first_token_ns = life.end.first_token_ns
    decode_from_ns = first_token_ns if first_token_ns is not None else end.at_ns
    steps = Span()
    steps.add(life.prefills)
    steps.add(decodes)
    num_told = life.num_first_tokens + decodes.num_steps + life.num_forced_tokens + life.num_accepted
    num_generated = life.end.num_generated_tokens if life.end else num_told
    stop = life.stop
    is_waiting = life.phase in (Phase.WAITING, Phase.PAUSED)
    return Explanation(
        **{name: getattr(life, name) for name in _COUNTS},
        request_id=life.call_id or life.request_id,
        phase=life.phase,
        finish_reason=life.end.finish_reason if life.end else None,
        reject_reason=life.end.reject_reason if life.end else "",
        arrival_ns=life.arrival_ns,
        total_ns=end.at_ns - life.arrival_ns,
        queue_ns=began_ns - life.arrival_ns,
        prefill_ns=max(0, decode_from_ns - began_ns),
        decode_ns=max(0, end.at_ns - decode_from_ns),
        waited_for_ns=_waited_for(life, life.began or end, turn),
        waits_for=(BACKGROUND if life.is_background else waits_for.value or STEP) if is_waiting else "",
        num_passed_by=turn.num_passed_by,
        num_prompt_tokens=life.num_prompt_tokens,
        num_generated_tokens=num_generated,
        evicted_ago_ns=None if stop is None or stop.evicted_ns is None else max(0, began_ns - stop.evicted_ns),
        num_decode_steps=decodes.num_steps,
        decode_with_prompts_ns=decodes.prompts_ns,
        num_steps_with_prompts=decodes.num_prompt_steps,
        other_models_ns=steps.waited_ns,
        mean_batch=steps.num_rows / steps.num_steps if steps.num_steps else 0.0,
        max_batch=steps.max_rows,
        longest_gap=decodes.longest,
        pauses=[_pause(life, pause, end) for pause in life.pauses],
    )


_SUMS = (
    "num_decode_steps",
    "num_forced_tokens",
    "num_guesses",
    "num_accepted",
    "decode_with_prompts_ns",
    "num_steps_with_prompts",
    "other_models_ns",
    "num_sat_out_steps",
    "sat_out_ns",
    "rested_ns",
)
"""Counts of steps and tokens to which both replicas of an answer contribute."""


def continued(first: Explanation, last: Explanation) -> Explanation:
    """Explain a request that got its first token at one replica, and ended or runs at another. Both know its arrival."""
    assert last.route is not None, "a cluster computed it"
    ran_ns = first.queue_ns + first.prefill_ns
    num_rows = first.mean_batch * first.num_steps + last.mean_batch * last.num_steps
    return replace(
        last,
        queue_ns=first.queue_ns,
        prefill_ns=first.prefill_ns,
        decode_ns=max(0, last.total_ns - ran_ns),
        waited_for_ns=first.waited_for_ns,
        num_before=first.num_before,
        num_passed_by=first.num_passed_by,
        num_hit_tokens=first.num_hit_tokens,
        stop=first.stop,
        evicted_ago_ns=first.evicted_ago_ns,
        first_step=first.first_step,
        num_prefill_steps=first.num_prefill_steps,
        num_prefill_tokens=first.num_prefill_tokens,
        num_resume_steps=first.num_resume_steps + last.num_prefill_steps + last.num_resume_steps,
        num_resume_tokens=first.num_resume_tokens + last.num_prefill_tokens + last.num_resume_tokens,
        mean_batch=num_rows / max(1, first.num_steps + last.num_steps),
        max_batch=max(first.max_batch, last.max_batch),
        longest_gap=max(filter(None, (first.longest_gap, last.longest_gap)), key=lambda gap: gap.gap_ns, default=None),
        **{name: getattr(first, name) + getattr(last, name) for name in _SUMS},
        pauses=[*first.pauses, *last.pauses],
        route=replace(last.route, move_ns=max(0, last.queue_ns - ran_ns)),
    )


def explain_intake(request: Request, now_ns: int) -> Explanation:
    """Explain a request that is still in the engine's inbox."""
    life = Life(request.request_id, request.arrival_ns, request.num_prompt_tokens)
    life.waits = request.waits
    return explain_arrival(life, now_ns, STEP)


def explain_arrival(life: Life, now_ns: int, waits_for: str) -> Explanation:
    """Explain a request that has not reached the scheduler's queue."""
    told = explain(life, WaitMark(now_ns, (0,) * len(REASONS)), Turn(), Span(), WaitReason.NOTHING)
    return replace(told, waits_for=waits_for)


def _waited_for(life: Life, until: WaitMark, turn: Turn) -> dict[str, int]:
    """Split the time from arrival to the first step by what the request waited for."""
    queued_ns = until.at_ns if life.queued is None else life.queued.at_ns
    waits = life.waits
    before = {ROUTE: waits.route, PIPELINE: waits.pipeline, MODEL: waits.model, GRAMMAR: waits.grammar}
    before[INTAKE] = queued_ns - life.arrival_ns - sum(waits)
    if life.queued is None:
        return _some(before)
    due, why_later = until, ORDER
    if life.aside is not None:  # from then on requests pass it for that reason
        due, why_later = life.aside, life.aside_for.value
    if turn.due is not None and turn.due.at_ns < due.at_ns:
        due = turn.due if turn.due.at_ns > life.queued.at_ns else life.queued
        why_later = ORDER
    waited = _told(life, life.queued, due)
    waited[why_later] = waited.get(why_later, 0) + until.at_ns - due.at_ns
    return _some(before | waited)


def _told(life: Life, since: WaitMark, until: WaitMark) -> dict[str, int]:
    """Split a time in the queue by what the queue lacked. This is not recorded for the background's queue."""
    if life.is_background:
        return _some({BACKGROUND: until.at_ns - since.at_ns})
    names = [reason.value or STEP for reason in REASONS]
    return _some(dict(zip(names, until.since(since), strict=False)))


def _some(parts_ns: dict[str, int]) -> dict[str, int]:
    return {name: part_ns for name, part_ns in parts_ns.items() if part_ns > 0}


def _pause(life: Life, pause: Pause, end: WaitMark) -> ExplainedPause:
    until = pause.ended or end
    return ExplainedPause(
        began_ns=pause.began.at_ns - life.arrival_ns,
        reason=pause.reason,
        is_swap=pause.is_swap,
        num_lost_tokens=max(0, pause.num_computed_tokens - pause.num_found_tokens),
        waited_ns=until.at_ns - pause.began.at_ns,
        waited_for_ns=_told(life, pause.began, until),
        is_over=pause.ended is not None,
    )


_WAITS = {
    ROUTE: "for its route to choose a model",
    PIPELINE: "for its pipeline to look up passages",
    MODEL: "for its model to load",
    GRAMMAR: "for its grammar to be compiled",
    PROMPT: "for its prompt to be tokenised",
    INTAKE: "before it was queued",
    STEP: "for the next step",
    BACKGROUND: "for what other requests leave",
    ORDER: "because later requests went first",
    WaitReason.ROWS.value: "for a free row",
    WaitReason.TOKENS.value: "for room for its prompt in a step",
    WaitReason.MEMORY.value: "for KV cache memory",
    WaitReason.GATE.value: "for its batch to begin",
    WaitReason.LOADING.value: "for its prefix to be read from the KV tier",
    WaitReason.PREFIX.value: "for another request to compute the same prefix",
    WaitReason.ADAPTER.value: "for its adapter to be loaded, or for room for it",
}
END_WORDS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "error",
    FinishReason.REJECTED: "refused",
}
_CUT = "It was cut, because its time limit passed"
_ENDS = {FinishReason.ABORT: "It was cancelled", FinishReason.ERROR: "It failed", FinishReason.REJECTED: "It was refused"}
_PAUSES = {
    PreemptReason.MEMORY: "because others needed its memory",
    PreemptReason.ORDER: "for a request of a higher priority class",
}
_LEAST_SHARE = 0.1
"""Reasons with a smaller share of the wait are not named."""
_NOTABLE_SHARE = 0.25
"""A smaller share of decoding in steps with prompts is not named."""
_LEAST_HELD_NS = 1_000_000
"""A shorter time for which the answer was held back is not named."""
_NOTABLE_GAP = 3
"""The longest gap is named if it is this many times the mean."""


def summary(told: Explanation, held_ns: int = 0) -> str:
    """Return the explanation as one line of English. `held_ns`: how long the finished answer was held back."""
    return " ".join(_sentences(told, held_ns))


def _sentences(told: Explanation, held_ns: int) -> Iterator[str]:
    if told.phase is Phase.ENDED:
        yield f"Took {duration(told.total_ns)} in all."
    if told.phase is Phase.WAITING:
        yield f"Has waited {duration(told.queue_ns)}{_parts(told.waited_for_ns)}; now {waits(told.waits_for)}.{_line(told)}"
    else:
        yield f"Waited {duration(told.queue_ns)}{_parts(told.waited_for_ns)}.{_line(told)}"
    if told.num_prefill_steps:
        yield _prompt(told)
    if told.num_generated_tokens:
        yield _tokens(told)
    if told.other_models_ns > _LEAST_SHARE * (told.prefill_ns + told.decode_ns):
        yield f"For {duration(told.other_models_ns)} of that, another model used the machine."
    if told.num_sat_out_steps:
        steps = _count(told.num_sat_out_steps, "step")
        yield f"It sat out {steps} ({duration(told.sat_out_ns)}): its grammar masks were slow, and others would have waited."
    yield from _pauses(told)
    if told.longest_gap is not None and _is_notable(told, told.longest_gap):
        yield f"The longest gap between two tokens was {duration(told.longest_gap.gap_ns)}: {gap_cause(told.longest_gap)}."
    if told.route is not None:
        yield _route(told.route, told.num_prompt_tokens)
    if told.finish_reason in _ENDS:
        end = _CUT if told.reject_reason and told.finish_reason is FinishReason.ABORT else _ENDS[told.finish_reason]
        yield f"{end}{f' ({told.reject_reason})' if told.reject_reason else ''}."
    if held_ns >= _LEAST_HELD_NS:
        yield f"Then held back for {duration(held_ns)}, until it was chosen or checked."


def _route(route: Route, num_prompt_tokens: int) -> str:
    moved = "" if not route.before else f", after {_count(len(route.before), 'other replica')}"
    if route.move_ns:
        moved += f" and {duration(route.move_ns)} for the move"
    fetched = ""
    if route.num_fetched_tokens:
        more = _count(route.num_fetched_tokens, "more prompt token")
        fetched = f" {more} came from another replica's cache, in {duration(route.fetch_ns)}."
    return (
        f"Replica {route.replica} computed it{moved}. When chosen, it had {route.num_held_tokens:,} of "
        f"{_count(num_prompt_tokens, 'prompt token')} in its cache, and {_count(route.num_tokens_ahead, 'token')} of other "
        f"requests to compute first; the least busy replica had {route.fewest_tokens_ahead:,}.{fetched}"
    )


def waits(reason: str) -> str:
    """Return a reason to wait as a phrase, such as `for a free row`."""
    return _WAITS.get(reason, f"for {reason}")


def _parts(parts_ns: Mapping[str, int]) -> str:
    total_ns = sum(parts_ns.values())
    named = [(part_ns, name) for name, part_ns in parts_ns.items() if part_ns >= _LEAST_SHARE * total_ns]
    if total_ns < 1_000_000 or not named:
        return ""
    if len(named) == 1:
        return f" {waits(named[0][1])}"
    return ": " + _listed([f"{duration(part_ns)} {waits(name)}" for part_ns, name in sorted(named, reverse=True)])


def _line(told: Explanation) -> str:
    if told.queue_ns < 1_000_000 or not (told.num_before or told.num_passed_by):
        return ""
    before = f"{told.num_before} {_were(told.num_before)} already waiting when it came" if told.num_before else ""
    passed = f"{told.num_passed_by} that came later went first" if told.num_passed_by else ""
    return f" {'; '.join(filter(None, (before, passed)))}."


def _prompt(told: Explanation) -> str:
    cached = f"; {told.num_hit_tokens:,} {_were(told.num_hit_tokens)} in the cache" if told.num_hit_tokens else ""
    why = _why_no_more(told)
    computed = "Computes" if told.phase is Phase.PREFILL else "Computed"
    return (
        f"{computed} its prompt of {_count(told.num_prompt_tokens, 'token')} in "
        f"{duration(told.prefill_ns)}, {_count(told.num_prefill_steps, 'step')}{cached}{why}."
    )


def _why_no_more(told: Explanation) -> str:
    stop = told.stop
    if stop is None or stop.reason is PrefixEnd.WHOLE:
        return ""
    match stop.reason:
        case PrefixEnd.OFF:
            why = "the prefix cache is off"
        case PrefixEnd.EVICTED:
            ago = "" if told.evicted_ago_ns is None else f" {duration(told.evicted_ago_ns)} before its first step"
            why = f"the rest was evicted{ago}"
        case PrefixEnd.DIFFERS:
            why = f"token {stop.position} differs from the cache"
        case PrefixEnd.ANSWER:
            why = (
                f"from token {stop.position} on, the history differs from an answer of this conversation: the client sent it "
                "back without its reasoning, or with other text"
            )
        case PrefixEnd.SALT:
            why = "it is cached under another salt or for another adapter"
        case PrefixEnd.UNSEEN:
            why = "the rest was never seen" if stop.position else "its beginning was never seen"
        case PrefixEnd.STATE:
            why = "more is cached, but the model's state was not saved there"
        case PrefixEnd.SCORED:
            why = "it asks for log-probabilities of the prompt, which the cache does not have"
    return f" ({why})"


def _tokens(told: Explanation) -> str:
    so_far = "" if told.phase is Phase.ENDED else " so far"
    if told.num_generated_tokens == 1 and told.decode_ns < 1_000_000:
        return f"1 token{so_far}."
    mean = told.decode_ns / max(1, told.num_decode_steps)
    extra = [f"{told.num_forced_tokens} forced by its grammar"] if told.num_forced_tokens else []
    if told.num_guesses:
        extra.append(f"{told.num_accepted} of {told.num_guesses} guesses right")
    step = f"a step ({', '.join(extra)})" if extra else "each"
    each = f", {duration(mean)} {step}, in batches of {told.mean_batch:.0f}" if told.num_decode_steps else ""
    if told.decode_with_prompts_ns > _NOTABLE_SHARE * told.decode_ns:
        each += f"; {duration(told.decode_with_prompts_ns)} of it in steps with other requests' prompts"
    return f"{_count(told.num_generated_tokens, 'token')}{so_far} in {duration(told.decode_ns)} after the first{each}."


def _pauses(told: Explanation) -> Iterator[str]:
    for pause in told.pauses[:3]:
        waited = "and resumed after" if pause.is_over else "and has waited since, for"
        lost = f", with {_count(pause.num_lost_tokens, 'token')} to compute again" if pause.is_over else ""
        kept = " (its tokens may come back from the KV tier)" if pause.is_swap else ""
        text = f"After {duration(pause.began_ns)} it was preempted {_PAUSES[pause.reason]}{kept}, {waited} "
        yield f"{text}{duration(pause.waited_ns)}{lost}."
    if len(told.pauses) > 3:
        yield f"It was preempted {len(told.pauses)} times in all."


def _is_notable(told: Explanation, gap: Gap) -> bool:
    return gap.gap_ns * max(1, told.num_decode_steps) > _NOTABLE_GAP * told.decode_ns


def gap_cause(gap: Gap) -> str:
    """Return as text what the server did in a gap between two tokens."""
    step = gap.step
    if gap.is_preemption:
        return "it was preempted"
    if gap.has_sat_out:
        return "it sat out steps, because a mask of its grammar was slow"
    if step is None:
        return "unknown"
    if 2 * step.waited_ns > gap.gap_ns:
        return f"another model used the machine for {duration(step.waited_ns)} of it"
    if gap.gap_ns > 2 * step.duration_ns:
        return f"its step took {duration(step.duration_ns)}, the rest passed before, in steps without it or between steps"
    if step.largest is None:
        return f"its step took {duration(step.duration_ns)}, with {_count(step.num_rows, 'request')} and no prompt"
    of = f" of {_count(step.largest.num_prompt_tokens, 'token')}" if step.largest.num_prompt_tokens else ""
    others = f", one of {step.num_prefills} prompts" if step.num_prefills > 1 else ""
    return f"the step computed {_count(step.largest.num_tokens, 'token')} of another request's prompt{of}{others}"


def duration(num_ns: float) -> str:
    """Return a duration as text, such as `12 ms` or `1.2 s`."""
    seconds = num_ns / 1e9
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _count(number: int, noun: str) -> str:
    return counted(number, noun, spec=",")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
