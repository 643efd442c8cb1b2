"""Sends spans to a collector by OTLP over HTTP. Imported only if one is set.

The SDK only encodes and sends spans: its tracer would create its own ids, but ours were already sent to other servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

import penstock
from penstock.obs.trace_context import Span, TraceContext

_log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Time in which a collector must take a batch."""
_SCOPE = InstrumentationScope("penstock", penstock.__version__)


class _Cause(logging.Handler):
    """Keeps the first message about a batch: OpenTelemetry would log several for each batch that is not accepted."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class SpanSender:
    def __init__(self, url: str) -> None:
        """`url`: the collector's. OpenTelemetry's environment variables set the rest, such as headers."""
        self._url = url
        self._exporter = OTLPSpanExporter(endpoint=url.rstrip("/").removesuffix("/v1/traces") + "/v1/traces", timeout=TIMEOUT_S)
        about = {"service.name": "penstock", "service.version": penstock.__version__}
        self._resource = Resource.create(about).merge(OTELResourceDetector().detect())
        self._is_lost, self._cause = False, _Cause()
        of_exporter = logging.getLogger(OTLPSpanExporter.__module__)
        of_exporter.handlers, of_exporter.propagate = [self._cause], False

    def send(self, traces: Sequence[tuple[TraceContext, Sequence[Span], int]]) -> bool:
        """Return whether the collector has taken the spans of requests.

        `traces`: each one's context, spans, and nanoseconds to add to the server's clock for Unix time.
        """
        made = [one for context, spans, shift_ns in traces for one in self._made(context, spans, shift_ns)]
        self._cause.text, is_sent = "", False
        try:
            is_sent = self._exporter.export(made) is SpanExportResult.SUCCESS
        except OSError as error:  # 1.38 raises it
            self._cause.text = str(error)
        if not is_sent and not self._is_lost:
            _log.warning(
                "the collector at %s takes no traces; what it does not take after a few tries is lost and counted: %s",
                self._url,
                self._cause.text,
            )
        self._is_lost = not is_sent
        return is_sent

    def close(self) -> None:
        self._exporter.shutdown()

    def _made(self, context: TraceContext, spans: Sequence[Span], shift_ns: int) -> Iterator[ReadableSpan]:
        trace_id, flags = int(context.trace_id, 16), TraceFlags(TraceFlags.SAMPLED)
        state = TraceState.from_header([context.state]) if context.state else None

        def place(span_id: str, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), is_remote, flags, state)

        for span in spans:
            yield ReadableSpan(
                span.name,
                context=place(span.span_id),
                parent=place(span.parent_id, is_remote=span.kind == "server") if span.parent_id else None,
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind[span.kind.upper()],
                status=Status(StatusCode.ERROR if span.has_failed else StatusCode.UNSET),
                start_time=span.began_ns + shift_ns,
                end_time=max(span.began_ns, span.ended_ns) + shift_ns,
                instrumentation_scope=_SCOPE,
            )
