"""One line for each request, at its end, that tells who asked what and how it went, and that no client can forge."""

import asyncio
import json
import logging
import queue
import re
import threading

import httpx
import pytest

from penstock.cli.serve import JsonFormatter, TextFormatter
from penstock.config import ServerConfig
from penstock.config.routes import VerifierConfig
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.routes import Route
from penstock.obs.explain.explanation import explain_arrival
from penstock.obs.explain.lives import Life
from penstock.routes.prices import Bill, Cost, Price
from penstock.serve.app import create_app
from penstock.serve.http import entries, request_log
from penstock.serve.http.entries import Entry, TokenCounts
from penstock.serve.http.request_log import RequestLog, fields_of, line_of
from penstock.testing import HashExecutor
from support.deployments import deployment_of
from support.failing_executor import FailingExecutor
from support.server import far
from support.server.harness import CAPACITY, GatedExecutor, make_runtime, make_text_runtime, running, until
from support.server.waits import set_waits

CHAT = "/v1/chat/completions"
ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self.written: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.written.put(self.format(record))


@pytest.fixture
def lines():
    """The queue of the lines about requests, as the log with `--log-format json` has them."""
    handler, logger = Lines(), logging.getLogger(request_log.__name__)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.written
    logger.removeHandler(handler)
    logger.setLevel(before)


def config(**fields):
    return ServerConfig(port=0, shutdown_timeout_s=0.0, **{"log_requests": 1.0, **fields})


def told(lines):
    return json.loads(lines.get(timeout=20))


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_told_with_its_times_and_tokens(lines, stream):
    with running(config=config()) as server:
        answer = httpx.post(server.url + CHAT, json=ASK | {"stream": stream}, headers={"X-Request-Id": "mine"})
        line = told(lines)
    assert line.pop("client").startswith("127.0.0.1:")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", line.pop("time"))
    duration_ms, ttft_ms = line.pop("duration_ms"), line.pop("ttft_ms")
    assert 0 < ttft_ms <= duration_ms < 20_000
    assert line["queue_ms"] + line["prefill_ms"] <= ttft_ms
    assert 0 <= line.pop("queue_ms") + line.pop("prefill_ms") + line.pop("decode_ms") <= duration_ms
    assert line.pop("prompt_tokens") > 5
    assert set(line.pop("waited_for_ms")) <= {"intake", "step", "order"}
    assert line == {
        "level": "info",
        "logger": request_log.__name__,
        "message": "request",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "bytes": len(answer.content),
        "completion_tokens": 3,
        "cached_tokens": 0,
        "preemptions": 0,
        "model": "toy",
        "request_id": "mine",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_a_route_is_told_with_its_cost(lines, stream):
    other = make_runtime(served_names=("other",), aliases=())
    bill = Bill({"other": Price(1.0, 1.0), "toy": Price(3.0, 3.0)})
    route = Route(name="auto", models=("other", "toy"), bill=bill)
    with running(config=config(), others=[other], more={"routes": [route]}) as server:
        httpx.post(server.url + CHAT, json=ASK | {"model": "auto", "stream": stream})
        line = told(lines)
    other.close()
    num_tokens = line["prompt_tokens"] + line["completion_tokens"]
    assert (line["model"], line["route"]) == (
        "other",
        f"auto; model=other; {Cost(num_tokens / 1e6, 3 * num_tokens / 1e6).words}",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_route_held_back_is_told_with_that_time(lines, stream):
    other = make_runtime(served_names=("other",), aliases=())
    route = Route(
        name="auto", models=("toy", "other"), by=VerifierConfig(weak="toy", strong="other", verifier="toy", least=0.0)
    )
    with running(config=config(), others=[other], more={"routes": [route]}) as server:
        httpx.post(server.url + CHAT, json=ASK | {"model": "auto", "stream": stream})
        line = told(lines)
    other.close()
    assert line["route"].startswith("auto; model=toy; verified=")
    assert line["held_ms"] > 0
    assert line["ttft_ms"] >= sum(line[f"{part}_ms"] for part in ("queue", "prefill", "decode", "held"))


def test_the_cached_tokens_of_all_prompts_are_told(lines):
    with running(config=config()) as server:
        for _ in range(2):
            ask = {"prompt": [[5] * 33, [6] * 33], "n": 2, "max_tokens": 2}
            usage = httpx.post(server.url + "/v1/completions", json=ask).json()["usage"]
            line = told(lines)
            assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
            assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["cached_tokens"] > 33, "of both prompts"


def test_the_summary_of_a_slow_request_names_the_time_for_which_it_was_held_back():
    waited = explain_arrival(Life("r", 0, 3), 10**9, "step")
    summary = fields_of(entry_of(held_ns=80_000_000), [waited], is_slow=True)["summary"]
    assert summary.endswith("Then held back for 80 ms, until it was chosen or checked.")


def test_a_stream_that_fails_says_its_error(lines):
    with running(FailingExecutor(HashExecutor(CAPACITY), fail_at_step=2), config=config()) as server:
        httpx.post(server.url + CHAT, json=ASK | {"stream": True, "max_tokens": 50})
        line = told(lines)
    assert (line["status"], line["error"]) == (200, "unavailable")


async def test_a_stream_that_an_upstream_breaks_says_its_error(lines):
    async with far.serving(far.streams(far.event("far"), ends=False)) as there:
        upstream = UpstreamConfig(name="far", url=there.url, model="m")
        more = {"upstreams": [upstream], "routes": [Route(name="auto", models=("far", "toy"))]}
        with running(config=config(), more=more) as server:
            async with httpx.AsyncClient(base_url=server.url) as client:
                await client.post(CHAT, json=ASK | {"model": "auto", "stream": True})
            line = await asyncio.to_thread(told, lines)
    assert (line["status"], line.get("error")) == (200, "upstream_failed")


@pytest.mark.parametrize(("slow_s", "is_told"), [(100.0, False), (0.0, True)])
def test_slow_requests_are_always_told_and_explained(lines, slow_s, is_told):
    with running(config=config(log_requests=0.0, slow_request_s=slow_s)) as server:
        httpx.post(server.url + CHAT, json=ASK)
    assert lines.empty() is not is_told
    if is_told:
        line = told(lines)
        assert (line["level"], line["slow"]) == ("warning", True)
        assert line["summary"].startswith("Took ")


async def test_a_response_in_the_background_is_told_when_it_has_ended(lines):
    gate = GatedExecutor()
    with running(gate, config=config()) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            body = {"model": "toy", "input": "Hello", "max_output_tokens": 5, "background": True}
            assert (await client.post("/v1/responses", json=body)).json()["status"] == "queued"
            gate.allow(2)
            await until(lambda: server.runtime.engine.load().num_running == 1)
            await client.get("/version")
            assert (await asyncio.to_thread(told, lines))["path"] == "/version"
            gate.open()
            line = await asyncio.to_thread(told, lines)
    assert (line["path"], line["completion_tokens"]) == ("/v1/responses", 5)
    assert 0 < line["decode_ms"] < line["duration_ms"]


def test_a_share_of_the_requests_is_told(lines):
    with running(config=config(log_requests=0.3)) as server, httpx.Client(base_url=server.url) as client:
        for number in range(20):
            client.get("/version", headers={"X-Request-Id": f"r{number}"})
    assert lines.qsize() == 6


def test_scrapes_are_told_only_if_they_fail(lines):
    with running(config=config(api_keys=("secret-key",))) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path, headers={"Authorization": "Bearer secret-key"}).status_code == 200
        client.get("/metrics")
        line = told(lines)
    assert (line["path"], line["status"]) == ("/metrics", 401)
    assert lines.empty()


def test_keys_are_told_by_name_and_never_as_they_are(lines):
    with running(config=config(api_keys=("secret-key",))) as server:
        httpx.get(server.url + "/version?api_key=secret-key", headers={"Authorization": "Bearer secret-key"})
        good = lines.get(timeout=20)
        httpx.get(server.url + "/version", headers={"Authorization": "Bearer wrong-key"})
        bad = lines.get(timeout=20)
    assert json.loads(good)["key"].startswith("key-")
    assert (json.loads(good)["path"], json.loads(good)["status"]) == ("/version", 200)
    assert (json.loads(bad).get("key"), json.loads(bad)["status"]) == (None, 401)
    assert "secret" not in good + bad
    assert "wrong" not in bad


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_told(lines, stream):
    gate = GatedExecutor()
    with running(gate, config=config()) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            ask = asyncio.create_task(client.post(CHAT, json=ASK | {"stream": stream, "max_tokens": 500}))
            if stream:
                gate.allow(2)
            await until(lambda: server.runtime.engine.load().num_running == 1)
            ask.cancel()
        gate.open()
        line = await asyncio.to_thread(told, lines)
    assert line["client_left"]
    assert line["status"] == (200 if stream else 499)
    assert line["completion_tokens"] < 500


def test_errors_are_told(lines):
    with running(config=config(max_body_bytes=1024)) as server:
        for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", CHAT, 400)):
            assert httpx.request(method, server.url + path).status_code == status
            line = told(lines)
            assert (line["method"], line["path"], line["status"]) == (method, path, status)
            assert "client_left" not in line
            assert line["request_id"]
        assert httpx.post(server.url + CHAT, json=ASK | {"user": "u" * 2000}).status_code == 413
        assert told(lines)["status"] == 413


def test_a_head_has_no_bytes(lines):
    with running(config=config()) as server:
        assert httpx.head(server.url + "/version").status_code == 200
        assert told(lines)["bytes"] == 0


def test_texts_are_told_with_their_tokens(lines):
    from support.server.harness import LiveServer

    runtime = make_text_runtime()
    try:
        with LiveServer(runtime, config()) as server:
            answer = httpx.post(server.url + "/v1/embeddings", json={"input": ["a", "bc"]}).json()
            line = told(lines)
    finally:
        runtime.close()
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("toy", answer["usage"]["prompt_tokens"], 0)


@pytest.mark.parametrize(
    ("data", "status", "method", "path"),
    [
        (b"nonsense\r\n\r\n", 400, None, None),
        (b"GET /a?key=secret HTTP/1.1\r\n\r\n", 400, "GET", "/a"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431, "GET", "/a"),
    ],
)
async def test_what_the_connection_refuses_is_told(lines, data, status, method, path):
    with running(config=config()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 %d" % status)
        writer.close()
        line = await asyncio.to_thread(told, lines)
        assert (line["status"], line.get("method"), line.get("path")) == (status, method, path)


async def test_a_body_that_does_not_come_is_told_once_with_the_status_that_was_sent(lines, monkeypatch):
    set_waits(monkeypatch, read_timeout_s=0.05)
    with running(config=config()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()
        line = await asyncio.to_thread(told, lines)
        assert (line["status"], "client_left" in line) == (408, False)
    assert lines.empty()


def entry_of(**fields):
    return Entry(**{"client": "127.0.0.1:1", "method": "GET", "path": "/a", **fields})


def record_of(entry, told=()):
    fields = fields_of(entry, told)
    record = logging.LogRecord("penstock", logging.INFO, "", 0, "%s", (line_of(fields),), None)
    record.fields = fields
    return record


HOSTILE = '\n2026 "\x1b[2J\x7f\x9b\u2028\ud800'


@pytest.mark.parametrize("formatter", [TextFormatter("%(message)s"), JsonFormatter()])
@pytest.mark.parametrize("field", ["path", "model", "method", "request_id", "key"])
def test_no_client_begins_a_line_or_moves_a_terminals_cursor(formatter, field):
    entry = entry_of(key="alice")
    if field != "key":  # keys have names of the operator
        setattr(entry, field, HOSTILE * 1000)
    line = formatter.format(record_of(entry))
    assert all(" " <= char <= "~" for char in line)
    if field in ("path", "model") and isinstance(formatter, JsonFormatter):
        assert json.loads(line)[field].startswith(HOSTILE[:6])


def test_a_line_of_text_leaves_out_what_is_unknown():
    beginning = 'request client="127.0.0.1:1" method="GET" path="/a" bytes=0'
    assert line_of(fields_of(entry_of(), ())) == beginning
    entry = entry_of(key="alice", status=200, num_bytes=7, ttft_s=0.25)
    entry.model, entry.request_id, entry.client_left, entry.count_tokens = "toy", "id1", True, lambda: TokenCounts(3, 2, 4)
    entry.began_ns, entry.ended_ns = 10**9, 10**9 + 500_000_000
    assert line_of(fields_of(entry, ())) == (
        'request client="127.0.0.1:1" key="alice" method="GET" path="/a" status=200 bytes=7 duration_ms=500.0 ttft_ms=250.0 '
        'model="toy" request_id="id1" client_left=true prompt_tokens=3 completion_tokens=4 cached_tokens=2'
    )


def test_a_reader_that_is_too_slow_holds_up_nobody_and_what_is_lost_is_counted(monkeypatch, caplog):
    monkeypatch.setattr(entries, "MAX_QUEUED", 3)
    is_called, is_free = threading.Event(), threading.Event()

    def explain():
        is_called.set()
        is_free.wait(20)
        return ()

    caplog.set_level(logging.INFO)
    log = RequestLog(1.0, None)
    log.add(entry_of(path="/first", explain=explain))
    assert is_called.wait(20)
    for _ in range(5):
        log.add(entry_of())
    is_free.set()
    log.close()
    assert sum(record.getMessage().startswith("request ") for record in caplog.records) == 4
    assert "too slow: 2" in caplog.text


def test_a_request_that_cannot_be_told_ends_neither_the_log_nor_the_server(caplog):
    def explain():
        raise RuntimeError("no journal")

    caplog.set_level(logging.INFO)
    log = RequestLog(1.0, None)
    log.add(entry_of(explain=explain))
    log.add(entry_of(path="/b"))
    log.close()
    assert "could not be logged" in caplog.text
    assert 'path="/b"' in caplog.text


def test_without_the_setting_no_layer_and_no_thread_are_made():
    runtime = make_runtime()
    try:
        app = create_app(deployment_of(runtime), ServerConfig())
        assert len(app.user_middleware) == 1
        assert not {"request-log", "traces"} & {thread.name for thread in threading.enumerate()}
    finally:
        runtime.close()
