"""Traces of requests: which are traced, and the spans that a collector gets once they have ended.

The caller decides by the flag of its `traceparent`, else `--trace-sample` does. At most `MAX_PER_S` requests a second are
traced, whoever asks, so that no client can make the server trace more.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from starlette.types import Scope

from penstock.clock import Clock
from penstock.config import ServerConfig
from penstock.obs.explain.explanation import END_WORDS, Explanation
from penstock.obs.spans import Span, Value, spans_of
from penstock.obs.trace_context import TraceContext, new_context, new_trace_id, read_context
from penstock.serve.http.checks import values_of
from penstock.serve.http.entries import Backlog, Entry, Part
from penstock.types.errors import ConfigError

_log = logging.getLogger(__name__)

MAX_PER_S = 100
"""Requests that are traced in a second, and at once after a while without."""
MAX_CHOICES = 8
"""Choices of a request with spans of their own."""
URL_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PAUSE_S = 0.5
_CLOSE_TIMEOUT_S = 3.0
EXPORTED, LOST, LIMITED = "exported", "lost", "limited"
"""The ends of a request that was to be traced: the collector has its spans; it did not take them, or too many waited for it;
more than `MAX_PER_S` were to be traced."""

Traces = Sequence[tuple[TraceContext, Sequence[Span], int]]


class Sender(Protocol):
    def send(self, traces: Traces) -> bool: ...

    def close(self) -> None: ...


def collector_of(config: ServerConfig) -> str | None:
    """Return the URL of the collector, or None without one. Raises `ConfigError`, also if the packages are not installed."""
    url = config.otlp_endpoint or os.environ.get(URL_VARIABLE) or None
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"The collector {url!r} is no URL of http or https.", remedy="Write it as http://127.0.0.1:4318.")
    try:
        import penstock.obs.otlp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Traces for {url} need a package that is not installed: {error.name}.",
            remedy="Install Penstock with the extra otel: pip install '.[otel]'.",
        ) from None
    return url


def make_tracer(config: ServerConfig, clock: Clock) -> Tracer | None:
    """Return a tracer if a collector is named. Raises `ConfigError`."""
    url = collector_of(config)
    if url is None:
        return None
    from penstock.obs.otlp import SpanSender

    return Tracer(lambda: SpanSender(url), share=config.trace_sample, clock=clock)


class Tracer:
    def __init__(self, make_sender: Callable[[], Sender], *, share: float, clock: Clock) -> None:
        """`share`: of the requests without a caller's context that are traced."""
        self._sender, self._least_id, self._clock = make_sender(), round((1 - share) * 2**64), clock
        self._room, self._looked_ns = float(MAX_PER_S), clock.now_ns()
        self._counts: Counter[str] = Counter({EXPORTED: 0, LOST: 0, LIMITED: 0})
        self._backlog = Backlog("traces", self._send, pause_s=_PAUSE_S)

    # For the event loop.

    def begin(self, scope: Scope) -> TraceContext:
        """Return the context of a request that has found its model."""
        caller = read_context(values_of(scope, b"traceparent"), values_of(scope, b"tracestate"))
        if caller is not None:
            return caller.child(is_sampled=caller.is_sampled and self._has_room())
        trace_id = new_trace_id()
        # By the id, so that all servers that a trace reaches would decide alike.
        return new_context(is_sampled=int(trace_id[16:], 16) >= self._least_id and self._has_room(), trace_id=trace_id)

    def _has_room(self) -> bool:
        now_ns = self._clock.now_ns()
        self._room = min(float(MAX_PER_S), self._room + (now_ns - self._looked_ns) * MAX_PER_S / 1e9)
        self._looked_ns = now_ns
        if self._room < 1:
            self._counts[LIMITED] += 1
            return False
        self._room -= 1
        return True

    def add(self, entry: Entry) -> None:
        """Take a request that has ended. Returns at once."""
        if entry.trace is not None and entry.trace.is_sampled:
            self._backlog.add(entry)

    def counts(self) -> dict[str, int]:
        """Return how many requests were to be traced, by what became of them. Thread-safe."""
        return {**self._counts, LOST: self._counts[LOST] + self._backlog.num_dropped}

    def close(self) -> None:
        """Send what is left, for at most `_CLOSE_TIMEOUT_S`."""
        self._backlog.close(_CLOSE_TIMEOUT_S)
        self._sender.close()

    # For the thread.

    def _send(self, entries: Sequence[Entry]) -> None:
        try:
            traces = [
                (entry.trace, spans_of_entry(entry), entry.ended_unix_ns - entry.ended_ns) for entry in entries if entry.trace
            ]
            is_sent = bool(traces) and self._sender.send(traces)
        except Exception:
            _log.exception("traces of requests could not be sent")
            is_sent = False
        self._counts[EXPORTED if is_sent else LOST] += len(entries)


def spans_of_entry(entry: Entry) -> list[Span]:
    """Return the spans of a request that is traced and has ended: its own, and those of its choices and of its waits."""
    assert entry.trace is not None
    told = entry.explain()
    root = Span(
        name=f"{entry.operation} {entry.model}",
        began_ns=entry.began_ns,
        ended_ns=entry.ended_ns,
        parent_id=entry.trace.parent_id,
        span_id=entry.trace.span_id,
        attributes=_attributes(entry, told),
        is_server=True,
        has_failed=entry.status is None or entry.status >= 500,
    )
    of_choices: list[Span] = []
    for index, choice in enumerate(told[:MAX_CHOICES]):
        of_choice = [*spans_of(choice, root.span_id)]
        if len(told) > 1:
            for span in of_choice:
                span.attributes["penstock.choice"] = index
        of_choices += of_choice
    queue_id = of_choices[0].span_id if of_choices else root.span_id
    return [root, *of_choices, *_spans_of_parts(entry.parts, root.span_id, queue_id)]


def _attributes(entry: Entry, told: Sequence[Explanation]) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.operation.name": entry.operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": entry.model or "",
        "http.request.method": entry.method,
        "url.path": entry.path,
        "penstock.request_id": entry.request_id,
    }
    if entry.status is not None:
        found["http.response.status_code"] = entry.status
    if entry.status is None or entry.status >= 400:
        found["error.type"] = str(entry.status or "unanswered")
    if entry.count_tokens is not None:
        found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"] = entry.count_tokens()
    if entry.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = round(entry.ttft_s, 6)
    if told:
        found["gen_ai.usage.cache_read.input_tokens"] = told[0].num_hit_tokens
        reasons = [END_WORDS[choice.finish_reason] for choice in told if choice.finish_reason is not None]
        found["gen_ai.response.finish_reasons"] = tuple(reasons)
        found["penstock.preemptions"] = sum([len(choice.pauses) for choice in told])
    if len(told) > 1:
        found["gen_ai.request.choice.count"] = len(told)
    if entry.route:
        found["penstock.route"] = entry.route
    if entry.client_left:
        found["penstock.client_left"] = True
    return found


def _spans_of_parts(parts: Sequence[Part], root_id: str, queue_id: str) -> Iterator[Span]:
    for part in parts:
        attributes: dict[str, Value] = {}
        if part.is_elsewhere:
            attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": part.name, "penstock.result": part.result}
            if part.num_prompt_tokens is not None:
                attributes["gen_ai.usage.input_tokens"] = part.num_prompt_tokens
            if part.num_generated_tokens is not None:
                attributes["gen_ai.usage.output_tokens"] = part.num_generated_tokens
        yield Span(
            name=f"upstream {part.name}" if part.is_elsewhere else part.name,
            began_ns=part.began_ns,
            ended_ns=part.ended_ns,
            parent_id=root_id if part.is_elsewhere else queue_id,
            span_id=part.span_id,
            attributes=attributes,
            is_client=part.is_elsewhere,
            has_failed=part.is_elsewhere and part.result == "failed",
        )
