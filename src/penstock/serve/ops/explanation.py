"""The shape of an explanation in JSON. The requests endpoint calls it; it knows no request and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.obs.explain.explanation import Explanation, PauseTold, gap_cause, summary
from penstock.obs.explain.lives import Gap
from penstock.serve.openai.write import FINISH_WORDS
from penstock.types.request import FinishReason

_OTHER_ENDS = {FinishReason.ABORT: "cancelled", FinishReason.ERROR: "error", FinishReason.REJECTED: "refused"}


def explanation(told: Explanation, index: int) -> dict[str, Any]:
    """The explanation of one choice. Times are milliseconds."""
    return {
        "index": index,
        "state": told.phase.value,
        "finish_reason": None if told.finish_reason is None else (FINISH_WORDS | _OTHER_ENDS)[told.finish_reason],
        "summary": summary(told),
        "prompt_tokens": told.num_prompt_tokens,
        "completion_tokens": told.num_generated_tokens,
        "time_ms": {
            "total": _ms(told.total_ns),
            "queue": _ms(told.queue_ns),
            "prefill": _ms(told.prefill_ns),
            "decode": _ms(told.decode_ns),
        },
        "waited": {
            "for_ms": _parts(told.waited_for_ns),
            "now_for": told.waits_for or None,
            "came_before": told.num_before,
            "went_first": told.num_passed_by,
        },
        "prefix": _prefix(told),
        "prefill": {"steps": told.num_prefill_steps, "tokens": told.num_prefill_tokens},
        "resume": {"steps": told.num_resume_steps, "tokens": told.num_resume_tokens},
        "decode": {"steps": told.num_decode_steps, "with_prompts_ms": _ms(told.decode_with_prompts_ns)},
        "batch": {"mean": round(told.mean_batch, 2), "max": told.max_batch},
        "longest_gap": None if told.longest_gap is None else _gap(told.longest_gap),
        "preemptions": [_pause(pause) for pause in told.pauses],
    }


def _prefix(told: Explanation) -> dict[str, Any] | None:
    """The prefix that was found in the cache; None while the choice waits."""
    if told.stop is None:
        return None
    found = {"hit_tokens": told.num_hit_tokens, "stopped_at": told.stop.position, "because": told.stop.reason.value}
    return found if told.evicted_ago_ns is None else {**found, "evicted_ms_before": _ms(told.evicted_ago_ns)}


def _gap(gap: Gap) -> dict[str, Any]:
    """A gap between two tokens. Other requests of its step are told in sizes alone."""
    told: dict[str, Any] = {"ms": _ms(gap.gap_ns), "because": gap_cause(gap)}
    if gap.step is not None:
        told["step"] = {
            "ms": _ms(gap.step.duration_ns),
            "requests": gap.step.num_rows,
            "prompts": gap.step.num_prefills,
            "prompt_tokens": gap.step.num_prefill_tokens,
        }
    return told


def _pause(pause: PauseTold) -> dict[str, Any]:
    return {
        "after_ms": _ms(pause.began_ns),
        "because": pause.reason.value,
        "method": "swap" if pause.is_swap else "recompute",
        "waited_ms": _ms(pause.waited_ns),
        "waited_for_ms": _parts(pause.waited_for_ns),
        "lost_tokens": pause.num_lost_tokens,
        "is_over": pause.is_over,
    }


def _parts(parts_ns: Mapping[str, int]) -> dict[str, float]:
    return {name: _ms(part_ns) for name, part_ns in parts_ns.items()}


def _ms(num_ns: int) -> float:
    return round(num_ns / 1e6, 3)
