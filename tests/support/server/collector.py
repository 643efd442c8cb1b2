"""A collector of traces: it takes OTLP over HTTP, as OpenTelemetry's own protobufs read it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from support.server.harness import wait_until


@dataclass
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    """2: server, 3: client, 1: internal."""
    began_ns: int
    ended_ns: int
    has_failed: bool
    state: str
    attributes: dict[str, object]
    resource: dict[str, object]


@dataclass
class Collector:
    url: str = ""
    status: int = 200
    bodies: list[bytes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def wait_for(self, number: int) -> list[Span]:
        """Wait until so many requests have come, and return all spans."""
        wait_until(lambda: sum(span.kind == 2 for span in self.spans) >= number)
        return list(self.spans)


def _value(value) -> object:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _read(data: bytes) -> list[Span]:
    found = []
    for of_resource in ExportTraceServiceRequest.FromString(data).resource_spans:
        resource = {one.key: _value(one.value) for one in of_resource.resource.attributes}
        for span in (span for scope in of_resource.scope_spans for span in scope.spans):
            ids = [name.hex() for name in (span.trace_id, span.span_id, span.parent_span_id)]
            times = (span.start_time_unix_nano, span.end_time_unix_nano)
            attributes = {one.key: _value(one.value) for one in span.attributes}
            failed = span.status.code == span.status.STATUS_CODE_ERROR
            found.append(Span(span.name, *ids, span.kind, *times, failed, span.trace_state, attributes, resource))
    return found


@contextmanager
def collecting():
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            if collector.status == 200:
                collector.bodies.append(data)
                collector.spans += _read(data)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)
