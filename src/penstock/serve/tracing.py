"""Sends the traces of ended requests to an OpenTelemetry collector.

The span of a request contains spans for its queue (with its waits for a route, a pipeline and a model), its prefill, and its
decode (with preemptions). Waits known only as a sum, such as those for memory, are attributes. Attributes are the fields of
the explanation (`GET /v1/requests/{id}`), prefixed with `penstock.`, and OpenTelemetry's attributes for generative AI.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.types import Scope

from penstock.clock import Clock
from penstock.config import ServerConfig
from penstock.config.upstreams import is_address
from penstock.obs.explain.explanation import END_WORDS, Explanation
from penstock.obs.trace_context import Span, TraceContext, Value, new_span_id, new_trace_id, read_context
from penstock.serve.course import course_of
from penstock.serve.http.checks import values_of
from penstock.serve.http.entries import Backlog, Entry
from penstock.serve.ops.requests import choice_of
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # with OpenTelemetry, which few servers need
    from penstock.obs.otlp import SpanSender

_log = logging.getLogger(__name__)

MAX_PER_S = 100
"""Most requests that are traced in a second."""
MAX_CHOICES = 8
"""Choices with spans of their own."""
_PAUSE_S = 0.5
EXPORTED, LOST, LIMITED = "exported", "lost", "limited"
"""The ends of a request that was to be traced. LOST: the collector did not take it. LIMITED: it was beyond `MAX_PER_S`."""

_PHASES = {
    "queue": ("waited",),
    "prefill": ("prefix", "prefill", "route"),
    "decode": ("decode", "batch", "longest_gap", "resume", "sat_out"),
}
"""The fields of an explanation by the span that has them."""


def sender_of(config: ServerConfig) -> SpanSender | None:
    """Return a connection to the collector, or None. Raises `ConfigError` if the one in the config can't be used.

    An unusable OTEL_EXPORTER_OTLP_ENDPOINT is only logged, because the variable may be meant for other programs.
    """
    if config.otlp_endpoint:
        return _connect(config.otlp_endpoint)
    url = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    try:
        return _connect(url) if url else None
    except ConfigError as error:
        _log.warning("no traces are sent: %s", error)
        return None


def _connect(url: str) -> SpanSender:
    if not is_address(url):
        cause = "The address of the trace collector must be a server's URL without a password or query."
        raise ConfigError(cause, remedy="Write it as http://127.0.0.1:4318. Put a key into OTEL_EXPORTER_OTLP_HEADERS.")
    try:
        from penstock.obs.otlp import SpanSender
    except ImportError as error:
        cause = f"Traces for {url} need a package that is not installed: {error.name}."
        raise ConfigError(cause, remedy="Install Penstock with the extra otel: pip install '.[otel]'.") from None
    return SpanSender(url)


class Tracer:
    def __init__(self, sender: SpanSender, *, share: float, clock: Clock) -> None:
        self._sender, self._least_id, self._clock = sender, round((1 - share) * 2**64), clock
        self._second, self._num_left, self._num_taken = -1, 0, 0
        self._counts: Counter[str] = Counter({EXPORTED: 0, LOST: 0, LIMITED: 0})
        self._backlog = Backlog("traces", self._send, pause_s=_PAUSE_S)

    # For the event loop.

    def begin(self, scope: Scope) -> TraceContext:
        """Return the trace context of a request whose model is known.

        The caller's sampled flag decides whether it is traced or, without a caller's trace, `share`. Lines of batches are left
        out: they would use up what is traced in a second, and are not explained.
        """
        caller = read_context(values_of(scope, b"traceparent"), values_of(scope, b"tracestate"))
        if caller is not None:
            return caller.child(is_sampled=caller.is_sampled and self._has_room())
        trace_id = new_trace_id()
        is_chosen = int(trace_id[16:], 16) >= self._least_id and not course_of(scope).is_background
        is_sampled = is_chosen and self._has_room()
        return TraceContext(trace_id, new_span_id(), is_sampled)

    def _has_room(self) -> bool:
        second = self._clock.now_ns() // 10**9
        if second != self._second:
            self._second, self._num_left = second, MAX_PER_S
        self._num_left -= 1
        self._counts[LIMITED] += self._num_left < 0
        return self._num_left >= 0

    def add(self, entry: Entry) -> None:
        """Take a request that has ended."""
        if entry.trace is not None and entry.trace.is_sampled:
            self._num_taken += 1
            self._backlog.add(entry)

    def counts(self) -> dict[str, int]:
        """Return how many requests were to be traced, by their end. Thread-safe."""
        return {**self._counts, LOST: self._counts[LOST] + self._backlog.num_dropped}

    def close(self) -> None:
        self._backlog.close()
        self._sender.close()
        if num_lost := self._num_taken - self._counts[EXPORTED]:
            _log.warning("traces that were not delivered to the collector: %d", num_lost)

    # For the thread.

    def _send(self, entries: Sequence[Entry]) -> None:
        traces = []
        for entry in entries:
            try:
                if entry.trace is not None:
                    traces.append((entry.trace, spans_of(entry), entry.ended_unix_ns - entry.ended_ns))
            except Exception:
                _log.exception("a request could not be traced")
        try:
            num_sent = len(traces) if traces and self._sender.send(traces) else 0
        except Exception:
            _log.exception("traces of requests could not be sent")
            num_sent = 0
        self._counts[EXPORTED] += num_sent
        self._counts[LOST] += len(entries) - num_sent


def spans_of(entry: Entry) -> list[Span]:
    assert entry.trace is not None
    told = entry.explanations()
    root = Span(
        name=f"{entry.operation} {entry.model}",
        began_ns=entry.began_ns,
        ended_ns=entry.ended_ns,
        parent_id=entry.trace.parent_id,
        span_id=entry.trace.span_id,
        kind="server",
        attributes=_attributes(entry, told),
        has_failed=entry.status is None or entry.status >= 500 or bool(entry.error),
    )
    spans = [root]
    for index, choice in enumerate(told[:MAX_CHOICES]):
        spans += _spans_of_choice(choice, index, root.span_id)
    queue = spans[1] if told else root
    for span in entry.spans:
        is_queued = span.kind != "client" and span.ended_ns <= queue.ended_ns  # a judge reads the answer after it
        span.parent_id = (queue if is_queued else root).span_id
    spans += entry.spans
    root.ended_ns = max([span.ended_ns for span in spans])  # the engine ends the request of a client that left a little later
    return spans


def _spans_of_choice(told: Explanation, index: int, root_id: str) -> list[Span]:
    """Return the spans of a choice, of which the queue is the first."""
    fields = choice_of(told, index)
    at_ns, found = told.arrival_ns, list[Span]()
    ends_ns = (told.queue_ns, told.queue_ns + told.prefill_ns, told.total_ns)
    has_begun = (True, told.num_prefill_steps, told.num_generated_tokens)
    for (name, keys), end_ns, has in zip(_PHASES.items(), ends_ns, has_begun, strict=True):
        span = Span(name=name, began_ns=at_ns, ended_ns=told.arrival_ns + end_ns, parent_id=root_id)
        span.attributes = dict(_flat("", {"choice": index, **{key: fields.get(key) for key in keys}}))
        found += [span] if has else []
        at_ns = span.ended_ns
    phases = found[:]
    for pause, about in zip(told.pauses, fields["preemptions"], strict=True):
        at_ns = told.arrival_ns + pause.began_ns
        around = next((span for span in reversed(phases) if span.began_ns <= at_ns), found[0])
        span = Span(name="preempted", began_ns=at_ns, ended_ns=at_ns + pause.waited_ns, parent_id=around.span_id)
        span.attributes = dict(_flat(".preemption", about))
        found.append(span)
    return found


def _flat(name: str, value: object) -> Iterator[tuple[str, Value]]:
    """Yield the numbers and texts in a field, under the path that leads there."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    elif isinstance(value, str | int | float):
        yield f"penstock{name}", value


def _attributes(entry: Entry, told: Sequence[Explanation]) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.operation.name": entry.operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": entry.model or "",
        "http.request.method": entry.method,
        "url.path": entry.path,
        "penstock.request_id": entry.request_id,
        "penstock.client_left": entry.client_left,
    }
    if entry.status is not None:
        found["http.response.status_code"] = entry.status
    if entry.status is None or entry.status >= 400 or entry.error:
        found["error.type"] = entry.error or str(entry.status or "unanswered")
    if entry.count_tokens is not None:
        counts = entry.count_tokens()
        found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"] = counts.num_prompt, counts.num_generated
        found["gen_ai.usage.cache_read.input_tokens"] = counts.num_cached
    if entry.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = round(entry.ttft_s, 6)
    if entry.route:
        found["penstock.routed"] = entry.route
    if told:
        reasons = [END_WORDS[choice.finish_reason] for choice in told if choice.finish_reason is not None]
        found["gen_ai.response.finish_reasons"] = tuple(reasons)
        found["penstock.choices"] = len(told)
        if steps := [step for choice in told for step in (choice.first_step, choice.last_step) if step is not None]:
            found["penstock.step.first"], found["penstock.step.last"] = min(steps), max(steps)
    return found
