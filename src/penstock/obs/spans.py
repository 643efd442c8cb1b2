"""The spans of a request, made of its explanation once it has ended: a request costs the engine nothing more for them.

A wait with a beginning and an end is a span; one of which only the sum is known, such as that for memory, is an attribute.

    chat toy                                     the request (made by `serve.tracing`)
      queue        [arrival, first step)         its waits for a route, a pipeline and a model are spans in it
      prefill      [first step, first token)
      decode       [first token, end)            its preemptions are spans in it

Names of attributes are OpenTelemetry's for generative AI where it has one, else `penstock.*`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.obs.explain.explanation import Explanation, PauseTold, gap_cause
from penstock.obs.trace_context import new_span_id

Value = str | bool | int | float | tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Span:
    """A span, with times of the server's clock."""

    name: str
    began_ns: int
    ended_ns: int
    parent_id: str
    span_id: str = field(default_factory=new_span_id)
    attributes: dict[str, Value] = field(default_factory=dict)
    is_server: bool = False
    is_client: bool = False
    has_failed: bool = False


def spans_of(told: Explanation, root_id: str) -> Iterator[Span]:
    """Yield the spans of one choice, its queue first."""
    began_ns = told.arrival_ns + told.queue_ns
    first_token_ns = began_ns + told.prefill_ns
    ended_ns = told.arrival_ns + told.total_ns
    yield Span(
        name="queue",
        began_ns=told.arrival_ns,
        ended_ns=began_ns,
        parent_id=root_id,
        attributes={
            "penstock.queue.came_before": told.num_before,
            "penstock.queue.went_first": told.num_passed_by,
            **_waits(told.waited_for_ns),
        },
    )
    prefill = Span(name="prefill", began_ns=began_ns, ended_ns=first_token_ns, parent_id=root_id, attributes=_prefill(told))
    decode = Span(name="decode", began_ns=first_token_ns, ended_ns=ended_ns, parent_id=root_id, attributes=_decode(told))
    if told.num_prefill_steps:
        yield prefill
    if told.num_generated_tokens:
        yield decode
    for pause in told.pauses:
        at_ns = told.arrival_ns + pause.began_ns
        inside = decode if at_ns >= first_token_ns and told.num_generated_tokens else prefill
        if inside is decode or told.num_prefill_steps:
            yield _preempted(pause, at_ns, inside.span_id)


def _waits(parts_ns: Mapping[str, int]) -> dict[str, Value]:
    return {f"penstock.wait.{reason.replace(' ', '_')}_ms": _ms(part_ns) for reason, part_ns in parts_ns.items()}


def _prefill(told: Explanation) -> dict[str, Value]:
    found: dict[str, Value] = {
        "penstock.prefill.steps": told.num_prefill_steps,
        "penstock.prefill.tokens": told.num_prefill_tokens,
        "penstock.cache.hit_tokens": told.num_hit_tokens,
    }
    if told.first_step is not None:
        found["penstock.step.first"] = told.first_step
    if told.stop is not None:
        found["penstock.cache.stopped_at"] = told.stop.position
        found["penstock.cache.stopped_because"] = told.stop.reason.value
    if (route := told.route) is not None:
        found["penstock.replica"] = route.replica
        found["penstock.replica.tokens_ahead"] = route.num_tokens_ahead
        found["penstock.replica.fewest_tokens_ahead"] = route.fewest_tokens_ahead
        if route.num_fetched_tokens:
            found["penstock.replica.fetched_tokens"] = route.num_fetched_tokens
            found["penstock.replica.fetch_ms"] = _ms(route.fetch_ns)
        if route.before:
            found["penstock.replica.moves"] = len(route.before)
            found["penstock.replica.move_ms"] = _ms(route.move_ns)
    return found


def _decode(told: Explanation) -> dict[str, Value]:
    found: dict[str, Value] = {
        "penstock.decode.steps": told.num_decode_steps,
        "penstock.batch.mean": round(told.mean_batch, 2),
        "penstock.batch.max": told.max_batch,
        "penstock.decode.with_prompts_ms": _ms(told.decode_with_prompts_ns),
    }
    if told.last_step is not None:
        found["penstock.step.last"] = told.last_step
    if told.longest_gap is not None:
        found["penstock.longest_gap.ms"] = _ms(told.longest_gap.gap_ns)
        found["penstock.longest_gap.because"] = gap_cause(told.longest_gap)
    more = {
        "penstock.decode.forced_tokens": told.num_forced_tokens,
        "penstock.decode.guessed_tokens": told.num_guesses,
        "penstock.decode.accepted_tokens": told.num_accepted,
        "penstock.decode.sat_out_steps": told.num_sat_out_steps,
        "penstock.resume.steps": told.num_resume_steps,
        "penstock.resume.tokens": told.num_resume_tokens,
    }
    found |= {name: number for name, number in more.items() if number}
    if told.other_models_ns:
        found["penstock.other_models_ms"] = _ms(told.other_models_ns)
    return found


def _preempted(pause: PauseTold, at_ns: int, parent_id: str) -> Span:
    return Span(
        name="preempted",
        began_ns=at_ns,
        ended_ns=at_ns + pause.waited_ns,
        parent_id=parent_id,
        attributes={
            "penstock.preempted.because": pause.reason.value,
            "penstock.preempted.is_swap": pause.is_swap,
            "penstock.preempted.lost_tokens": pause.num_lost_tokens,
            **_waits(pause.waited_for_ns),
        },
    )


def _ms(num_ns: int) -> float:
    return round(num_ns / 1e6, 3)
