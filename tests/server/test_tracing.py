"""Traces as a collector gets them: one for each request, whatever it passes, without texts, and never more than the bound."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter

import httpx
import pytest

from penstock.clock import VirtualClock
from penstock.config import ServerConfig
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.routes import Route
from penstock.serve import tracing
from penstock.serve.course import COURSE_KEY, Course
from penstock.serve.http import entries
from penstock.serve.http.entries import Entry
from penstock.serve.http.request_log import RequestLog
from penstock.serve.tracing import EXPORTED, LIMITED, LOST, MAX_PER_S, Tracer, sender_of
from penstock.testing import HashExecutor
from penstock.types.errors import ConfigError
from support.cluster import cluster
from support.failing_executor import FailingExecutor
from support.server.harness import CAPACITY, LiveServer, make_text_runtime, running, wait_until

pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")
from support.server.collector import Collector, Span, collecting

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
SECRET = "a word that nobody guesses"
ASK = {"model": "toy", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "temperature": 0}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
SERVER, CLIENT = 2, 3


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_PAUSE_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")


@pytest.fixture
def collector():
    with collecting() as collector:
        yield collector


def config(collector: Collector, **fields) -> ServerConfig:
    return ServerConfig(port=0, shutdown_timeout_s=0.0, otlp_endpoint=collector.url, **fields)


def root_of(spans: list[Span]) -> Span:
    [root] = [span for span in spans if span.kind == SERVER]
    return root


def results(server: LiveServer) -> Counter[str]:
    shown = httpx.get(server.url + "/metrics").text
    found = re.findall(r'^penstock_traced_requests_total{result="(\w+)"} (\S+)$', shown, re.MULTILINE)
    return Counter({result: int(float(number)) for result, number in found})


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_one_trace_below_its_callers_span(collector, stream):
    with running(config=config(collector)) as server:
        answer = httpx.post(server.url + CHAT, json=ASK | {"stream": stream}, headers={**SAMPLED, "X-Request-Id": "mine"})
        spans = collector.wait_for(1)
        wait_until(lambda: results(server) == Counter({EXPORTED: 1}))  # counted once the collector has answered
    assert answer.status_code == 200
    root = root_of(spans)
    assert (root.name, root.parent_id) == ("chat toy", SPAN)
    assert {span.trace_id for span in spans} == {TRACE}
    assert {span.state for span in spans} == {"vendor=1"}
    assert [span.name for span in spans if span.parent_id == root.span_id] == ["queue", "prefill", "decode"]
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "toy"
    assert told["gen_ai.usage.input_tokens"] > len(SECRET)
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < 20
    assert (told["http.response.status_code"], told["penstock.request_id"]) == (200, "mine")
    assert all(root.began_ns <= span.began_ns <= span.ended_ns <= root.ended_ns for span in spans)
    assert root.resource["service.name"] == "penstock"


@pytest.mark.parametrize("path", [CHAT, TEXTS, "/v1/messages", "/v1/responses", "/api/chat", "/completion", "/generate"])
def test_each_api_that_generates_continues_the_trace(collector, path):
    messages = {"messages": ASK["messages"]}
    bodies = {
        CHAT: messages | {"max_tokens": 2},
        TEXTS: {"prompt": SECRET, "max_tokens": 2},
        "/v1/messages": messages | {"max_tokens": 2},
        "/v1/responses": {"input": SECRET, "max_output_tokens": 2},
        "/api/chat": messages | {"options": {"num_predict": 2}},
        "/completion": {"prompt": SECRET, "n_predict": 2},
        "/generate": {"inputs": SECRET, "parameters": {"max_new_tokens": 2}},
    }
    body = bodies[path] | ({} if path in ("/completion", "/generate") else {"model": "toy"})
    with running(config=config(collector)) as server:
        assert httpx.post(server.url + path, json=body, headers=SAMPLED).status_code == 200
        spans = collector.wait_for(1)
    assert root_of(spans).trace_id == TRACE
    assert {"queue", "prefill", "decode"} <= {span.name for span in spans}
    assert SECRET.encode() not in b"".join(collector.bodies)


def test_texts_are_traced_too(collector):
    runtime = make_text_runtime()
    try:
        with LiveServer(runtime, config(collector)) as server:
            assert httpx.post(server.url + "/v1/embeddings", json={"input": [SECRET, "b"]}, headers=SAMPLED).status_code == 200
            spans = collector.wait_for(1)
    finally:
        runtime.close()
    assert root_of(spans).name == "embeddings toy"
    assert [span.name for span in spans if span.kind != SERVER] == ["queue", "prefill"]
    assert SECRET.encode() not in b"".join(collector.bodies)


def test_choices_have_spans_each(collector):
    with running(config=config(collector)) as server:
        httpx.post(server.url + CHAT, json=ASK | {"n": 2})
        spans = collector.wait_for(1)
    assert root_of(spans).attributes["penstock.choices"] == 2
    assert Counter(span.attributes.get("penstock.choice") for span in spans) == Counter({None: 1, 0: 3, 1: 3})


def test_who_samples_nothing_is_asked_by_the_callers_flag_alone(collector):
    with running(config=config(collector, trace_sample=0.0)) as server:
        httpx.post(server.url + CHAT, json=ASK)
        httpx.post(server.url + CHAT, json=ASK, headers=UNSAMPLED)
        httpx.post(server.url + CHAT, json=ASK, headers={"traceparent": "00-nonsense"})
        httpx.post(server.url + CHAT, json=ASK, headers=SAMPLED)
        spans = collector.wait_for(1)
        wait_until(lambda: results(server) == Counter({EXPORTED: 1}))
    assert root_of(spans).trace_id == TRACE


def test_a_callers_flag_keeps_a_request_out(collector):
    with running(config=config(collector)) as server:
        httpx.post(server.url + CHAT, json=ASK, headers=UNSAMPLED)
        httpx.post(server.url + CHAT, json=ASK)
        spans = collector.wait_for(1)
    assert root_of(spans).trace_id != TRACE
    assert root_of(spans).parent_id == ""


def test_nobody_without_a_key_or_a_model_is_traced(collector):
    with running(config=config(collector, api_keys=("key",))) as server:
        assert httpx.post(server.url + CHAT, json=ASK, headers=SAMPLED).status_code == 401
        key = {"Authorization": "Bearer key"}
        assert httpx.post(server.url + CHAT, json=ASK | {"model": "nope"}, headers=SAMPLED | key).status_code == 404
        assert httpx.get(server.url + "/health", headers=SAMPLED).status_code == 200
        assert httpx.post(server.url + CHAT, json=ASK, headers=key).status_code == 200
        spans = collector.wait_for(1)
    assert root_of(spans).trace_id != TRACE
    assert b"Bearer" not in b"".join(collector.bodies)


def test_a_refused_request_is_traced_with_its_status(collector):
    with running(config=config(collector)) as server:
        server.runtime.engine.drain()
        assert httpx.post(server.url + CHAT, json=ASK, headers=SAMPLED).status_code == 503
        [root] = collector.wait_for(1)
    assert root.has_failed
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == ("503", 503)


def test_a_stream_that_fails_is_traced_as_failed(collector):
    with running(FailingExecutor(HashExecutor(CAPACITY), fail_at_step=2), config=config(collector)) as server:
        answer = httpx.post(server.url + CHAT, json=ASK | {"stream": True, "max_tokens": 50})
        root = root_of(collector.wait_for(1))
    assert (answer.status_code, root.attributes["http.response.status_code"]) == (200, 200)
    assert (root.has_failed, root.attributes["error.type"]) == (True, "unavailable")


def test_a_chat_through_a_route_an_upstream_and_a_cluster_is_one_trace(collector):
    with cluster(otlp_endpoint=collector.url) as made:
        upstream = UpstreamConfig(name="far", url=f"{made.server.url}/v1", model="toy")
        more = {"upstreams": [upstream], "routes": [Route(name="auto", models=("far", "toy"))]}
        with running(config=config(collector), more=more) as near:
            ask = ASK | {"model": "auto", "stream": True, "stream_options": {"include_usage": True}}
            answer = httpx.post(near.url + CHAT, json=ask, headers=SAMPLED, timeout=60)
            assert answer.status_code == 200, answer.text
            spans = collector.wait_for(2)
    by_id = {span.span_id: span for span in spans}
    assert {(span.trace_id, span.state) for span in spans} == {(TRACE, "vendor=1")}
    [near_root] = [span for span in spans if span.parent_id == SPAN]
    [hop] = [span for span in spans if span.kind == CLIENT]
    [far_root] = [span for span in spans if span.kind == SERVER and span is not near_root]
    assert (by_id[hop.parent_id], by_id[far_root.parent_id]) == (near_root, hop)
    assert hop.name == "upstream far"
    assert (hop.attributes["gen_ai.operation.name"], hop.attributes["gen_ai.request.model"]) == ("chat", "toy")
    assert hop.attributes["penstock.result"] == "ok"
    assert hop.attributes["gen_ai.usage.output_tokens"] == 3
    assert near_root.attributes["penstock.routed"].startswith("auto; model=far")
    [prefill] = [span for span in spans if span.name == "prefill"]
    assert by_id[prefill.parent_id] is far_root
    assert prefill.attributes["penstock.route.replica"] in ("r0", "r1")
    assert "route" in {span.name for span in spans}


def test_an_upstream_that_fails_is_in_the_trace_of_the_answer_that_another_model_gives(collector):
    upstream = UpstreamConfig(name="far", url="http://127.0.0.1:9/v1", model="toy")
    more = {"upstreams": [upstream], "routes": [Route(name="auto", models=("far", "toy"))]}
    with running(config=config(collector), more=more) as near:
        assert httpx.post(near.url + CHAT, json=ASK | {"model": "auto"}, timeout=60).status_code == 200
        spans = collector.wait_for(1)
    [hop] = [span for span in spans if span.kind == CLIENT]
    assert (hop.name, hop.has_failed, hop.attributes["penstock.result"]) == ("upstream far", True, "failed")
    assert (root_of(spans).name, root_of(spans).has_failed) == ("chat toy", False)
    assert {"queue", "prefill", "decode"} <= {span.name for span in spans}


def test_an_upstream_is_told_that_a_request_is_not_traced(collector):
    with running(config=config(collector)) as far:
        upstream = UpstreamConfig(name="far", url=f"{far.url}/v1", model="toy")
        more = {"upstreams": [upstream], "routes": [Route(name="auto", models=("far", "toy"))]}
        with running(config=config(collector, trace_sample=0.0), more=more) as near:
            for headers in ({}, UNSAMPLED):
                assert httpx.post(near.url + CHAT, json=ASK | {"model": "auto"}, headers=headers, timeout=60).status_code == 200
            httpx.post(far.url + CHAT, json=ASK)
            spans = collector.wait_for(1)
    assert root_of(spans).trace_id != TRACE


@pytest.mark.parametrize("is_there", [True, False])
def test_a_collector_that_takes_nothing_costs_its_traces_and_no_answer(collector, is_there, monkeypatch, caplog):
    from penstock.obs import otlp

    monkeypatch.setattr(otlp, "TIMEOUT_S", 1.5)  # so that it tries again, after about a second
    collector.status = 400
    url = collector.url if is_there else "http://127.0.0.1:9"
    with running(config=ServerConfig(port=0, shutdown_timeout_s=0.0, otlp_endpoint=url)) as server:
        for _ in range(3):
            assert httpx.post(server.url + CHAT, json=ASK).status_code == 200
        wait_until(lambda: results(server)[LOST] == 3)
        assert caplog.text.count("takes no traces") == 1
        assert ("code: 400" if is_there else "Connection refused") in caplog.text
        assert "opentelemetry" not in {record.name.partition(".")[0] for record in caplog.records}
        if is_there:
            collector.status = 200
            httpx.post(server.url + CHAT, json=ASK)
            collector.wait_for(1)
            wait_until(lambda: results(server)[EXPORTED] == 1)


# without a server


def test_an_exporter_that_raises_is_a_lost_collector(monkeypatch, caplog):
    from penstock.obs.otlp import OTLPSpanExporter, SpanSender

    def export(exporter, spans):
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    sender = SpanSender("http://127.0.0.1:9")
    assert [sender.send([]), sender.send([])] == [False, False]
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["nobody listens"]
    sender.close()


class Sender:
    def __init__(self) -> None:
        self.num_sent = 0

    def send(self, traces) -> bool:
        self.num_sent += len(traces)
        return True

    def close(self) -> None: ...


def scope(**headers: str) -> dict:
    return {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


def traced(tracer: Tracer, **headers: str) -> bool:
    return tracer.begin(scope(**headers)).is_sampled


def test_no_client_can_have_more_traced_than_the_bound():
    clock = VirtualClock()
    tracer = Tracer(Sender(), share=0.0, clock=clock)
    try:
        assert sum(traced(tracer, **SAMPLED) for _ in range(3 * MAX_PER_S)) == MAX_PER_S
        assert tracer.counts()[LIMITED] == 2 * MAX_PER_S
        clock.advance(3_600_000_000_000)
        assert sum(traced(tracer, **SAMPLED) for _ in range(3 * MAX_PER_S)) == MAX_PER_S, "what was not used is not saved"
    finally:
        tracer.close()


def test_lines_of_batches_leave_the_bound_to_others():
    tracer = Tracer(Sender(), share=1.0, clock=VirtualClock())
    try:
        line = {COURSE_KEY: Course(is_background=True)}
        assert not any(tracer.begin(scope() | line).is_sampled for _ in range(2 * MAX_PER_S))
        assert traced(tracer)
        assert tracer.counts()[LIMITED] == 0
    finally:
        tracer.close()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_those_without_a_caller_is_traced(share):
    clock = VirtualClock()
    tracer = Tracer(Sender(), share=share, clock=clock)
    try:
        number = 0
        for _ in range(2000):
            clock.advance(1_000_000_000)
            number += traced(tracer)
    finally:
        tracer.close()
    assert number == pytest.approx(2000 * share, abs=0 if share in (0, 1) else 150)


def test_what_waits_for_a_slow_collector_is_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(entries, "MAX_QUEUED", 3)
    sender = Sender()
    monkeypatch.setattr(tracing, "_PAUSE_S", 0.2)
    tracer = Tracer(sender, share=1.0, clock=VirtualClock())
    for _ in range(10):
        entry = Entry(client="c", method="POST", path="/a", operation="chat", model="m", status=200)
        entry.trace = tracer.begin(scope())
        tracer.add(entry)
    tracer.close()
    counts = tracer.counts()
    assert counts[LOST] + counts[EXPORTED] == 10
    assert counts[EXPORTED] == sender.num_sent
    assert counts[LOST] >= 6


def test_a_request_that_cannot_be_told_costs_no_other_its_trace(monkeypatch):
    monkeypatch.setattr(tracing, "_PAUSE_S", 0.2)
    sender = Sender()
    tracer = Tracer(sender, share=1.0, clock=VirtualClock())
    for number in range(5):
        explain = (lambda: 1 / 0) if number == 2 else (lambda: ())
        entry = Entry(client="c", method="POST", path="/a", operation="chat", model="m", status=200, explain=explain)
        entry.trace = tracer.begin(scope())
        tracer.add(entry)
    tracer.close()
    assert (tracer.counts()[EXPORTED], tracer.counts()[LOST], sender.num_sent) == (4, 1, 4)


def test_a_request_is_explained_once_for_its_trace_and_its_line_of_the_log():
    both, asked = threading.Barrier(2), []

    def explain():
        asked.append(threading.current_thread().name)
        return ()

    class Watched(Entry):
        def explanations(self):
            both.wait(20)  # the two threads ask at the same time
            return super().explanations()

    log, tracer = RequestLog(1.0, None), Tracer(sender := Sender(), share=1.0, clock=VirtualClock())
    entry = Watched(client="c", method="POST", path="/a", operation="chat", model="m", status=200, explain=explain)
    entry.trace = tracer.begin(scope())
    log.add(entry)
    tracer.add(entry)
    log.close()
    tracer.close()
    assert sender.num_sent == 1
    assert len(asked) == 1


def test_traces_that_are_lost_at_the_end_are_told(monkeypatch, caplog):
    monkeypatch.setattr(entries, "CLOSE_TIMEOUT_S", 0.1)
    asked, may_answer = threading.Event(), threading.Event()

    class Hanging(Sender):
        def send(self, traces) -> bool:
            asked.set()
            return may_answer.wait(20)

    tracer = Tracer(Hanging(), share=1.0, clock=VirtualClock())
    try:
        for _ in range(3):
            entry = Entry(client="c", method="POST", path="/a", operation="chat", model="m", status=200)
            entry.trace = tracer.begin(scope())
            tracer.add(entry)
            assert asked.wait(20)
        tracer.close()
    finally:
        may_answer.set()
    assert "not delivered to the collector: 3" in caplog.text


@pytest.mark.parametrize("url", ["localhost:4318", "http://", "http://h:99999", "http://me:hush@h:4318", "http://h?key=hush"])
def test_an_address_that_is_none_is_refused_and_one_with_a_secret(url, monkeypatch, caplog):
    with pytest.raises(ConfigError, match="a server's URL") as refused:
        sender_of(ServerConfig(otlp_endpoint=url))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    assert sender_of(ServerConfig()) is None, "other programs may understand it"
    assert "no traces are sent" in caplog.text
    assert "hush" not in str(refused.value) + caplog.text


def test_opentelemetrys_own_variable_names_the_collector_too(monkeypatch):
    assert sender_of(ServerConfig()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318")
    assert sender_of(ServerConfig())._url == "http://other:4318"
    assert sender_of(ServerConfig(otlp_endpoint="http://this:4318"))._url == "http://this:4318"


def test_without_the_packages_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "penstock.obs.otlp", None)
    with pytest.raises(ConfigError, match="not installed"):
        sender_of(ServerConfig(otlp_endpoint="http://127.0.0.1:4318"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert sender_of(ServerConfig()) is None


def test_a_server_without_a_collector_imports_nothing_of_it():
    code = "import sys, penstock.serve.server; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
