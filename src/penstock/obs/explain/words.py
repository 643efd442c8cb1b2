"""The explanation of a request as a few sentences for people. Called by whoever shows one; knows only the numbers in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.obs.explain.explanation import INTAKE, ORDER, STEP, Explanation
from penstock.obs.explain.life import Phase
from penstock.obs.explain.steps import Gap
from penstock.types.counted import counted
from penstock.types.request import FinishReason
from penstock.types.stats import PreemptReason, PrefixEnd, WaitReason

_WAITS = {
    INTAKE: "before it was queued",
    STEP: "for the next step",
    ORDER: "because others went first",
    WaitReason.ROWS.value: "for a free row",
    WaitReason.TOKENS.value: "for its share of the tokens of a step",
    WaitReason.MEMORY.value: "for memory",
    WaitReason.GATE.value: "for its batch",
    WaitReason.LOADING.value: "for its prefix to be loaded",
    WaitReason.PREFIX.value: "for a prefix that another request computes",
}
_ENDS = {FinishReason.ABORT: "It was cancelled", FinishReason.ERROR: "It failed", FinishReason.REJECTED: "It was refused"}
_PAUSES = {
    PreemptReason.MEMORY: "as others needed its memory",
    PreemptReason.ORDER: "for a request of a higher class",
}
_LEAST_SHARE = 0.1
"""Of a wait, to be named."""
_NOTABLE_SHARE = 0.25
"""Of the time between tokens, in steps with prompts, to be named."""
_NOTABLE_GAP = 3
"""A gap is told if it is so many times the mean."""


def summary(told: Explanation) -> str:
    """Plain English, one line."""
    return " ".join(_sentences(told))


def _sentences(told: Explanation) -> Iterator[str]:
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
    yield from _pauses(told)
    if told.longest_gap is not None and _is_notable(told, told.longest_gap):
        yield f"The longest gap between two tokens was {duration(told.longest_gap.gap_ns)}: {gap_cause(told.longest_gap)}."
    if told.finish_reason in _ENDS:
        yield f"{_ENDS[told.finish_reason]}{f' ({told.reject_reason})' if told.reject_reason else ''}."


def waits(reason: str) -> str:
    """`for memory`, and the like."""
    return _WAITS.get(reason, f"for {reason}")


def _parts(parts_ns: Mapping[str, int]) -> str:
    total_ns = sum(parts_ns.values())
    named = [(part_ns, name) for name, part_ns in parts_ns.items() if part_ns >= _LEAST_SHARE * total_ns]
    if total_ns < 1_000_000 or not named:
        return ""
    if len(named) == 1:
        return f" {waits(named[0][1])}"
    return ", of it " + _listed([f"{duration(part_ns)} {waits(name)}" for part_ns, name in sorted(named, reverse=True)])


def _line(told: Explanation) -> str:
    """Who stood before it, if it waited at all."""
    if told.queue_ns < 1_000_000 or not (told.num_before or told.num_passed_by):
        return ""
    before = f"{told.num_before} waited already when it came" if told.num_before else ""
    passed = f"{told.num_passed_by} that came later went first" if told.num_passed_by else ""
    return f" {'; '.join(filter(None, (before, passed)))}."


def _prompt(told: Explanation) -> str:
    were = "was" if told.num_hit_tokens == 1 else "were"
    cached = f"; {told.num_hit_tokens:,} {were} in the cache" if told.num_hit_tokens else ""
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
            ago = "" if told.evicted_ago_ns is None else f" {duration(told.evicted_ago_ns)} before"
            why = f"what follows was evicted{ago}"
        case PrefixEnd.DIFFERS:
            why = f"token {stop.position} is another than in the cache"
        case PrefixEnd.SALT:
            why = "it is cached under another salt"
        case PrefixEnd.UNSEEN:
            why = "what follows was never seen" if stop.position else "its beginning was never seen"
    return f" ({why})"


def _tokens(told: Explanation) -> str:
    mean = told.decode_ns / max(1, told.num_decode_steps)
    each = f", {duration(mean)} each, in batches of {told.mean_batch:.0f}" if told.num_decode_steps else ""
    if told.decode_with_prompts_ns > _NOTABLE_SHARE * told.decode_ns:
        each += f"; {duration(told.decode_with_prompts_ns)} of it in steps that computed prompts of others, too"
    so_far = "" if told.phase is Phase.ENDED else " so far"
    return f"{_count(told.num_generated_tokens, 'token')}{so_far} in {duration(told.decode_ns)} after the first{each}."


def _pauses(told: Explanation) -> Iterator[str]:
    for pause in told.pauses[:3]:
        waited = "and came back after" if pause.is_over else "and has waited since, for"
        lost = f", {_count(pause.num_lost_tokens, 'token')} to be computed again" if pause.is_over else ""
        kept = " (what it had computed may come back from disk)" if pause.is_swap else ""
        text = f"After {duration(pause.began_ns)} it lost its place {_PAUSES[pause.reason]}{kept}, {waited} "
        yield f"{text}{duration(pause.waited_ns)}{lost}."
    if len(told.pauses) > 3:
        yield f"That happened {len(told.pauses)} times in all."


def _is_notable(told: Explanation, gap: Gap) -> bool:
    return gap.gap_ns * max(1, told.num_decode_steps) > _NOTABLE_GAP * told.decode_ns


def gap_cause(gap: Gap) -> str:
    """What the server was doing meanwhile."""
    step = gap.step
    if gap.is_preemption:
        return "it had lost its place meanwhile"
    if step is None:
        return "unknown"
    if gap.gap_ns > 2 * step.duration_ns:
        return f"the step itself took {duration(step.duration_ns)}, the rest passed outside of steps"
    if step.largest is None:
        return f"a step of {_count(step.num_rows, 'request')}, none with a prompt"
    of = f" of {_count(step.largest.num_prompt_tokens, 'token')}" if step.largest.num_prompt_tokens else ""
    others = f", one of {step.num_prefills} prompts" if step.num_prefills > 1 else ""
    return f"the step computed {_count(step.largest.num_tokens, 'token')} of another request's prompt{of}{others}"


def duration(num_ns: float) -> str:
    """`12 ms`, `1.2 s`, `250 s`."""
    seconds = num_ns / 1e9
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _count(number: int, noun: str) -> str:
    return counted(number, noun, spec=",")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
