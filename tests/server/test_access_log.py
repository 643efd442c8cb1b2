"""One line for each request, at its end, that tells who asked what and how it went, and that no client can forge."""

import asyncio
import json
import queue
import threading

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.serve.app import create_app
from penstock.serve.http import access_log
from penstock.serve.http.access_log import AccessLog, json_line, text_line
from penstock.serve.http.checks import Entry
from support.deployments import deployment_of
from support.server.harness import GatedExecutor, make_runtime, make_text_runtime, running, until, wait_until
from support.server.waits import set_waits

CHAT = "/v1/chat/completions"
ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture
def lines(monkeypatch):
    """The queue of the lines that are written to standard output."""
    written = queue.Queue()
    monkeypatch.setattr(access_log, "_to_stdout", lambda text: [written.put(line) for line in text.splitlines()])
    return written


def config(**fields):
    return ServerConfig(port=0, access_log="json", shutdown_timeout_s=0.0, **fields)


def told(lines):
    return json.loads(lines.get(timeout=20))


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_told_with_its_times_and_tokens(lines, stream):
    with running(config=config()) as server:
        answer = httpx.post(server.url + CHAT, json=ASK | {"stream": stream}, headers={"X-Request-Id": "mine"})
        line = told(lines)
    assert line.pop("client").startswith("127.0.0.1:")
    assert line.pop("time").endswith("+00:00")
    duration_s, ttft_s = line.pop("duration_s"), line.pop("ttft_s")
    assert 0 < ttft_s <= duration_s < 20
    assert line.pop("prompt_tokens") > 5
    assert line == {
        "key": None,
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "bytes": len(answer.content),
        "completion_tokens": 3,
        "model": "toy",
        "request_id": "mine",
        "client_left": False,
    }


def test_keys_are_told_by_name_and_never_as_they_are(lines):
    with running(config=config(api_keys=("secret-key",))) as server:
        httpx.get(server.url + "/version?api_key=secret-key", headers={"Authorization": "Bearer secret-key"})
        good = lines.get(timeout=20)
        httpx.get(server.url + "/version", headers={"Authorization": "Bearer wrong-key"})
        bad = lines.get(timeout=20)
    assert json.loads(good)["key"].startswith("key-")
    assert (json.loads(good)["path"], json.loads(good)["status"]) == ("/version", 200)
    assert (json.loads(bad)["key"], json.loads(bad)["status"]) == (None, 401)
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
            assert (line["method"], line["path"], line["status"], line["client_left"]) == (method, path, status, False)
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
        assert (line["status"], line["method"], line["path"]) == (status, method, path)


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
        assert (await asyncio.to_thread(told, lines))["status"] == 408
    assert lines.empty()


ENTRY = Entry(client="127.0.0.1:1", method="GET", path="/a", ended_unix_s=0.0)
HOSTILE = '\n2026 "\x1b[2J\x7f\x9b\u2028\ud800'


@pytest.mark.parametrize("write", [text_line, json_line])
@pytest.mark.parametrize("field", ["path", "model", "method", "request_id"])
def test_no_client_begins_a_line_or_moves_a_terminals_cursor(write, field):
    setattr(entry := Entry(client="c", method="GET", path="/a"), field, HOSTILE * 1000)
    line = write(entry)
    assert line.endswith("\n")
    assert all(" " <= char <= "~" for char in line[:-1])
    if field in ("path", "model") and write is json_line:
        assert json.loads(line)[field].startswith(HOSTILE[:6])


def test_a_line_of_text_has_everything_or_a_dash():
    assert text_line(ENTRY) == (
        '1970-01-01T00:00:00.000+00:00 127.0.0.1:1 - "GET /a" - bytes=0 duration_s=- ttft_s=- prompt_tokens=- '
        "completion_tokens=- model=- request_id=-\n"
    )
    entry = Entry(client="[::1]:2", method="POST", path="/b", key="alice", status=200, num_bytes=7, duration_s=0.5, ttft_s=0.25)
    entry.model, entry.request_id, entry.client_left, entry.count_tokens = "toy", "id1", True, lambda: (3, 4)
    assert text_line(entry) == (
        '1970-01-01T00:00:00.000+00:00 [::1]:2 alice "POST /b" 200 bytes=7 duration_s=0.500000 ttft_s=0.250000 prompt_tokens=3 '
        'completion_tokens=4 model="toy" request_id="id1" client_left\n'
    )


def test_a_reader_that_is_too_slow_holds_up_nobody_and_what_is_lost_is_counted(monkeypatch, caplog):
    monkeypatch.setattr(access_log, "MAX_QUEUED", 3)
    is_called, is_free, written = threading.Event(), threading.Event(), []

    def write(text):
        is_called.set()
        is_free.wait(20)
        written.append(text)

    log = AccessLog(as_json=True, write=write)
    log.add(Entry(client="c", method="GET", path="/first"))
    assert is_called.wait(20)
    for _ in range(5):
        log.add(Entry(client="c", method="GET", path="/a"))
    is_free.set()
    log.close()
    assert "".join(written).count("\n") == 4
    assert "too slow or gone: 2" in caplog.text


def test_a_reader_that_is_gone_ends_the_log_and_not_the_server(caplog):
    def write(text):
        raise BrokenPipeError("nobody reads")

    log = AccessLog(as_json=False, write=write)
    log.add(Entry(client="c", method="GET", path="/a"))
    wait_until(lambda: log._is_broken)
    log.add(Entry(client="c", method="GET", path="/a"))
    log.close()
    assert "the access log ends" in caplog.text
    assert "too slow or gone: 2" in caplog.text


def test_without_the_setting_no_layer_and_no_thread_are_made():
    runtime = make_runtime()
    try:
        app = create_app(runtime_deployment(runtime), ServerConfig())
        assert len(app.user_middleware) == 1
        assert not [thread for thread in threading.enumerate() if thread.name == "access-log"]
    finally:
        runtime.close()


def runtime_deployment(runtime):

    return deployment_of(runtime)
