"""Models of other servers in routes: each fault has its answer, nothing is said twice, and the key stays secret."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import ssl
import subprocess
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import httpx2
import pytest

from penstock.config.keys import ApiKey
from penstock.config.routing import Routing
from penstock.config.sources import read_config_file
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.off_loop import INLINE_MAX_BODY
from penstock.deploy.routes import Route
from penstock.routes.prices import Bill, Price
from penstock.serve import breaker, upstream_stream
from penstock.serve.course import Course
from penstock.serve.http.checks import Sender
from penstock.serve.own_requests import OwnRequests
from penstock.testing import HashExecutor
from penstock.types.errors import ConfigError
from penstock.types.request import Owner
from penstock.types.tenant_limits import TenantLimits
from support.deployments import deployment_of
from support.server.far import DONE, END, Script, answers, event, hang_up, serving, silence, streams, whole
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, LiveServer, make_client, make_runtime, until

KEY = "sk-very-secret-0123456789"
FAR_FIRST = Route(name="auto", models=("far", "near"))
NEAR_FIRST = Route(name="auto", models=("near", "far"))
BODY = {"model": "auto", "messages": [{"role": "user", "content": "What is red?"}], "max_tokens": 4, "temperature": 0}
CHAT = "/v1/chat/completions"
USAGE = b"data: " + json.dumps(json.loads(END[6:]) | {"choices": [], "usage": whole()["usage"]}).encode() + b"\n\n"


def far(url: str, **fields: object) -> UpstreamConfig:
    return UpstreamConfig(name="far", url=url, model="large-7b", key=KEY, **fields)


@asynccontextmanager
async def clients(near, *scripts: Script, route: Route = FAR_FIRST, tls=None, config=None, **fields: object):
    """A client of a server with a route between `near` and a server with these scripts, and that server."""
    async with serving(*scripts, tls=tls) as server:
        upstream = far(server.url, **fields)
        async with make_client(near, routes=[route], upstreams=[upstream], **(config or {})) as client:
            yield client, server
            for one in client.app.state.parts.upstreams.values():
                assert await one.drain(0)
                await one.close()


@pytest.fixture
def near():
    made = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("near",), aliases=())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch):
    """The key is in no line of the log."""
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    root, handler = logging.getLogger(), Lines()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield
    root.removeHandler(handler)
    root.setLevel(before)
    assert KEY not in "\n".join(lines)


async def test_the_body_goes_there_with_the_key_and_its_models_name(near) -> None:
    async with clients(near, answers(200, whole())) as (client, server):
        answer = await client.post(CHAT, json=BODY | {"top_p": 0.5})
        assert (answer.status_code, answer.json()["choices"]) == (200, whole()["choices"])
        assert answer.headers["x-route"] == "auto; model=far"
        [asked] = server.asked
        assert asked.path == "/v1/chat/completions"
        assert asked.body == BODY | {"model": "large-7b", "top_p": 0.5}
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        told = (await client.get("/metrics")).text
        assert 'penstock_upstream_requests_total{result="ok",upstream="far"} 1.0' in told
        assert 'penstock_upstream_tokens_total{kind="completion",upstream="far"} 2.0' in told
        assert KEY not in told


async def test_what_is_the_same_as_absent_does_not_go_there(near) -> None:
    async with clients(near, answers(200, whole())) as (client, server):
        answer = await client.post(CHAT, json=BODY | {"max_tokens": -1, "colour": None, "user": None})
        assert answer.status_code == 200
        assert server.asked[0].body.keys() == BODY.keys() - {"max_tokens"}


@pytest.mark.parametrize("last", [END + DONE, END], ids=["done", "closed"])
@pytest.mark.parametrize("size", [1, 20, 100_000])
async def test_a_stream_comes_as_it_is(near, last: bytes, size: int) -> None:
    sent = b": first\n\n" + event("far") + b": waits\r\n\r\n" + event(" away") + last
    pieces = [sent[begin : begin + size] for begin in range(0, len(sent), size)]
    async with clients(near, streams(*pieces)) as (client, _server):
        answer = await client.post(CHAT, json=BODY | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.content == event("far") + b": waits\n\n" + event(" away") + END + DONE


FAULTS = {
    "500": answers(500, {"error": {"message": f"the key {KEY} broke something"}}),
    "503": answers(503, {}),
    "401": answers(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
    "404": answers(404, {"error": {"message": "no such model"}}),
    "moved": answers(301, {}, Location="http://localhost:1/"),
    "429": answers(429, {"error": {"message": "slow down"}}, Retry_After="7"),
    "not JSON": answers(200, b"<html>"),
    "not an answer": answers(200, {"hello": 1}),
    "hangs up": hang_up,
    "not HTTP": lambda writer: asyncio.sleep(0, writer.write(b"GARBAGE\r\n\r\n")),
    "cut": answers(200, whole(), Content_Length="5000"),
}
FAULTS_OF_STREAMS = {
    "no stream": answers(200, whole()),
    "ends at once": streams(),
    "cut at once": streams(event("far")[:20], ends=False),
    "garbage": streams(b"data: {far\n\n"),
    "no choices": streams(b'data: {"hello": 1}\n\n'),
    "error": streams(b'data: {"error": {"message": "overloaded"}}\n\n'),
    "endless": streams(b"data: " + b"x" * (1 << 20) + b"yy"),
}


@pytest.mark.parametrize(
    ("fault", "stream"), [*((name, False) for name in FAULTS), *((name, True) for name in [*FAULTS, *FAULTS_OF_STREAMS])]
)
async def test_after_a_fault_the_next_model_answers(near, fault: str, stream: bool) -> None:
    script = (FAULTS | FAULTS_OF_STREAMS)[fault]
    async with clients(near, script) as (client, server):
        answer = await client.post(CHAT, json=BODY | {"stream": stream})
        alone = await client.post(CHAT, json=BODY | {"stream": stream, "model": "near"})
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near; after=far")
        assert texts(answer) == texts(alone)
        assert 1 <= len(server.asked) <= 2
        assert KEY not in answer.text


def texts(answer) -> str:
    return "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', answer.text))


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("500", 502, "far answered with status 500: the key *** broke something"),
        ("503", 503, "far is unavailable"),
        ("401", 502, "far refuses this server's key"),
        ("404", 502, "far answered with status 404: no such model"),
        ("429", 429, "far is busy"),
        ("not JSON", 502, "it sent data that is not a JSON object"),
        ("not an answer", 502, "its answer has no choices"),
        ("hangs up", 502, "the connection broke"),
        ("cut", 502, "the connection broke"),
    ],
)
async def test_without_a_next_model_the_fault_is_named(fault: str, status: int, says: str) -> None:
    near = make_runtime(GatedExecutor(), served_names=("near",), aliases=(), max_queue=1)
    near.leave()  # it is not there
    async with clients(near, FAULTS[fault], route=NEAR_FIRST, config={"load_timeout_s": 0.01}) as (client, _server):
        answer = await client.post(CHAT, json=BODY)
    near.close()
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
    assert KEY not in answer.text
    if fault == "429":
        assert answer.headers["retry-after"] == "7"


async def test_what_is_wrong_with_the_request_is_told_and_nobody_else_is_asked(near) -> None:
    wrong = answers(400, {"error": {"message": f"temperature is too hot for {KEY}"}})
    async with clients(near, wrong) as (client, server):
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "far refuses the request: temperature is too hot for ***",
        )
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (streams(event("far"), event(" away")[:30], ends=False), "the connection broke"),
        (streams(event("far"), b"data: nonsense\n\n"), "it sent data that is not a JSON object"),
        (streams(event("far"), b'data: {"error": {"message": "out of memory"}}\n\n'), "with an error: out of memory"),
        (streams(event("far")), "closed the connection before the end"),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error_and_nothing_is_said_twice(near, script: Script, says: str) -> None:
    async with clients(near, script) as (client, server):
        before = near.uses.num_uses
        answer = await client.post(CHAT, json=BODY | {"stream": True})
        assert answer.content.startswith(event("far"))
        error = json.loads(answer.text.removeprefix(event("far").decode()).removeprefix("data: "))["error"]
        assert (error["code"], says in error["message"]) == ("upstream_failed", True), error
        assert near.uses.num_uses == before
        assert len(server.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_server_is_given_up(near, stream: bool) -> None:
    async with clients(near, silence, max_silence_s=0.05, max_answer_s=0.05) as (client, server):
        answer = await client.post(CHAT, json=BODY | {"stream": stream})
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near; after=far")
        assert len(server.asked) == 1, "it may be at work: it is not asked again"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"\n"),
        (b"HTTP/1.1 400 No\r\nContent-Length: 9999\r\n\r\n", b"\n"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    ],
)
async def test_bytes_now_and_then_are_no_answer(near, head: bytes, drop: bytes, stream: bool) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(drop)
            await writer.drain()
            await asyncio.sleep(0.01)

    async with clients(near, drip, max_silence_s=0.2, max_answer_s=0.2) as (client, server):
        answer = await asyncio.wait_for(client.post(CHAT, json=BODY | {"stream": stream}), 30)
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near; after=far")
        assert len(server.asked) == 1


async def test_a_deadline_holds_there_too(near) -> None:
    async with clients(near, silence) as (client, _server):
        answer = await client.post(CHAT, json=BODY, headers={"X-Deadline-Ms": "50"})
        assert (answer.status_code, "far did not answer within the time" in answer.text) == (408, True)


async def test_a_stream_that_goes_silent_ends_at_the_deadline_or_when_it_is_given_up(near) -> None:
    for headers, fields, says in (({"X-Deadline-Ms": "1000"}, {}, "deadline"), ({}, {"max_silence_s": 0.3}, "was silent for")):
        bill = Bill({"far": Price(10.0, 30.0), "near": Price(1.0, 2.0)})
        script, route = streams(event("far"), event("!"), pause=asyncio.Event()), replace(FAR_FIRST, bill=bill)
        async with clients(near, script, route=route, **fields) as (client, _server):
            answer = await client.post(CHAT, json=BODY | {"stream": True}, headers=headers)
        assert answer.content.startswith(event("far") + b'data: {"error":'), answer.text
        assert says in answer.text
        assert (list(bill.paid), bill.full) == (["far"], 0), "it is paid for in vain"


async def test_nobody_listens(near) -> None:
    async with clients(near, silence) as (client, server):
        server.listener.close()
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near; after=far")
        assert not server.asked


async def test_a_certificate_that_nobody_signed_is_not_trusted(near, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, paper = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(  # noqa: ASYNC221  # nothing else runs
        [*command, "-subj", "/CN=localhost", "-keyout", key, "-out", paper], check=True, capture_output=True
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(paper, key)
    async with clients(near, answers(200, whole()), tls=tls) as (client, server):
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near; after=far")
        assert not server.asked
    assert "its certificate is not trusted" in caplog.text


async def test_a_passing_fault_is_tried_once_more(near) -> None:
    async with clients(near, answers(503, {}), answers(200, whole())) as (client, server):
        answer = await client.post(CHAT, json=BODY)
        assert (answer.headers["x-route"], len(server.asked)) == ("auto; model=far", 2)


async def test_a_server_that_fails_is_left_alone_and_then_probed(near, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "REST_NS", 10**17)
    async with clients(near, *[answers(500, {})] * 5, answers(200, whole())) as (client, server):
        for _ in range(12):
            answer = await client.post(CHAT, json=BODY)
            assert answer.headers["x-route"] == "auto; model=near; after=far"
        assert len(server.asked) == 5
        assert 'penstock_upstream_resting{upstream="far"} 1.0' in (await client.get("/metrics")).text
        monkeypatch.setattr(breaker, "REST_NS", 0)
        [upstream] = client.app.state.parts.upstreams.values()
        upstream._breaker._open_until_ns = 0  # the rest is over
        for _ in range(2):
            answer = await client.post(CHAT, json=BODY)
            assert answer.headers["x-route"] == "auto; model=far"
        assert 'penstock_upstream_resting{upstream="far"} 0.0' in (await client.get("/metrics")).text


async def test_keys_limits_hold_there_too(near, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "the-key-of-a"\nrequests_per_minute = 2\n')
    async with clients(near, answers(200, whole()), config={"api_keys_file": str(keys)}) as (client, server):
        found = [await client.post(CHAT, json=BODY, headers={"Authorization": "Bearer the-key-of-a"}) for _ in range(3)]
        assert [one.status_code for one in found] == [200, 200, 429]
        assert "2 requests per minute" in found[2].text
        assert len(server.asked) == 2
        metrics = (await client.get("/metrics", headers={"Authorization": "Bearer the-key-of-a"})).text
        assert 'upstream_requests_total{result="refused",upstream="far"} 1.0' in metrics


async def test_tenants_limits_of_the_server_hold_there_too(near, tmp_path: Path) -> None:
    async with clients(near, answers(200, whole()), tenant_limits=TenantLimits(tokens_per_minute=300)) as (client, server):
        found = [await client.post(CHAT, json=BODY | {"max_tokens": 300}, headers={"X-Tenant": name}) for name in "aab"]
        assert [one.status_code for one in found] == [200, 429, 200]
        assert "300 tokens per minute" in found[1].text
        assert len(server.asked) == 2


async def test_calls_that_a_tenants_limit_refuses_there_get_times_apart(near) -> None:
    async with clients(near, answers(200, whole()), tenant_limits=TenantLimits(tokens_per_minute=300)) as (client, _server):
        found = [await client.post(CHAT, json=BODY | {"max_tokens": 300, "seed": number}) for number in range(3)]
    assert [one.status_code for one in found] == [200, 429, 429]
    first_s, second_s = [int(one.headers["retry-after"]) for one in found[1:]]
    assert second_s > first_s + 30


async def test_a_stream_costs_its_key_tokens_whether_the_server_counts_them_or_not(near, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "the-key-of-a"\ntokens_per_minute = 300\n')
    script = streams(*[event("far")] * 200, END + DONE)
    async with clients(near, script, config={"api_keys_file": str(keys)}) as (client, server):
        body = BODY | {"stream": True, "max_tokens": 200}
        found = [await client.post(CHAT, json=body, headers={"Authorization": "Bearer the-key-of-a"}) for _ in range(3)]
        assert [one.status_code for one in found] == [200, 429, 429]
        assert "300 tokens per minute" in found[2].text
        assert len(server.asked) == 1


async def test_what_failed_costs_its_key_nothing(near, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "the-key-of-a"\ntokens_per_minute = 300\n')
    async with clients(near, answers(400, {}), config={"api_keys_file": str(keys)}) as (client, server):
        for _ in range(5):
            body = BODY | {"max_tokens": 200}
            answer = await client.post(CHAT, json=body, headers={"Authorization": "Bearer the-key-of-a"})
            assert answer.status_code == 400, answer.text
        assert len(server.asked) == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_an_answer_that_nobody_waits_for_costs_its_key_tokens(near, tmp_path: Path, stream: bool, leaves: bool) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "the-key-of-a"\ntokens_per_minute = 300\n')
    headers = {"Authorization": "Bearer the-key-of-a", "X-Deadline-Ms": "1000"}
    body = BODY | {"stream": stream, "max_tokens": 100, "messages": [{"role": "user", "content": "a" * 800}]}
    async with clients(near, silence, config={"api_keys_file": str(keys)}) as (client, server):
        patience = {"X-Deadline-Ms": "60000" if leaves else "1000"}
        first = asyncio.create_task(client.post(CHAT, json=body, headers=headers | patience))
        await until(lambda: server.asked)
        if leaves:
            first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        [upstream] = client.app.state.parts.upstreams.values()
        await until(lambda: not upstream._num_open)
        second = await client.post(CHAT, json=body, headers=headers)
        assert (second.status_code, len(server.asked)) == (429, 1)
        assert "300 tokens per minute" in second.text


async def test_a_request_that_was_never_sent_costs_its_key_nothing(near, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(httpx2.AsyncClient, "send", lambda *_, **__: asyncio.Event().wait())  # it still connects
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "the-key-of-a"\ntokens_per_minute = 300\n')
    headers = {"Authorization": "Bearer the-key-of-a", "X-Deadline-Ms": "100"}
    async with clients(near, silence, config={"api_keys_file": str(keys)}) as (client, _):
        for _ in range(2):
            answer = await client.post(CHAT, json=BODY | {"max_tokens": 200}, headers=headers)
            assert answer.status_code == 408, answer.text


async def test_cookies_of_one_request_are_not_sent_with_the_next(near) -> None:
    async with clients(near, answers(200, whole(), Set_Cookie="session=first; Path=/")) as (client, server):
        for _ in range(2):
            await client.post(CHAT, json=BODY)
        assert "cookie" not in server.asked[1].headers


async def test_connections_are_used_again_also_after_streams(near) -> None:
    async with clients(near, streams(event("far"), END + DONE)) as (client, server):
        for _ in range(3):
            assert (await client.post(CHAT, json=BODY | {"stream": True})).content.endswith(DONE)
        assert server.num_connections == 1


async def test_comments_alone_are_silence(near) -> None:
    async with clients(near, streams(*[b": ping\n\n"] * 50, pause=asyncio.Event()), max_silence_s=0.1) as (client, _):
        answer = await client.post(CHAT, json=BODY | {"stream": True})
        assert answer.headers["x-route"] == "auto; model=near; after=far"


async def test_a_silent_stream_is_kept_alive(near, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_stream, "KEEPALIVE_S", 0.01)
    pause = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, pause.set)
    async with clients(near, streams(event("far"), END + DONE, pause=pause)) as (client, _):
        answer = await client.post(CHAT, json=BODY | {"stream": True})
        assert answer.text.count(": keepalive\n\n") > 1
        assert answer.content.replace(b": keepalive\n\n", b"") == event("far") + END + DONE


async def test_the_limit_of_the_first_token_is_not_one_of_whole_answers(near) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await answers(200, whole())(writer)

    async with clients(near, slow) as (client, _):
        answer = await client.post(CHAT, json=BODY, headers={"X-First-Token-Timeout-Ms": "50"})
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=far")


async def test_a_server_that_ends_waits_for_what_is_open_and_takes_no_more(near) -> None:
    pause = asyncio.Event()
    async with clients(near, streams(event("far"), END + DONE, pause=pause)) as (client, server):
        first = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": True}))
        await until(lambda: server.asked)
        [upstream] = client.app.state.parts.upstreams.values()
        ending = asyncio.create_task(upstream.drain(10))
        await asyncio.sleep(0)
        assert (await client.post(CHAT, json=BODY)).headers["x-route"] == "auto; model=near; after=far"
        assert not ending.done()
        pause.set()
        assert (await first).content == event("far") + END + DONE
        assert await ending


async def test_a_server_that_ends_refuses_requests_for_others_before_its_parts_have_stopped(near) -> None:
    may_stop = threading.Event()

    async def stop() -> None:
        await asyncio.to_thread(may_stop.wait, 20)

    async with serving(answers(200, whole())) as server:
        more = {"routes": [FAR_FIRST], "upstreams": [far(server.url)]}
        with LiveServer(near, more=more) as here, httpx.Client(base_url=here.url) as client:
            here.server._app.state.parts.lifetime.stops.append(stop)
            here.server.request_shutdown()
            await until(lambda: here.server._ending)
            refused = await asyncio.to_thread(client.post, CHAT, json=BODY)
            may_stop.set()
        assert (refused.status_code, server.asked) == (503, [])


async def test_an_answer_that_is_paid_for_arrives_though_the_server_ends(near) -> None:
    """Also a large one, which a thread parses unless the threads take no more work."""
    pause = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        await pause.wait()
        await answers(200, whole("far " * INLINE_MAX_BODY))(writer)

    async with clients(near, late) as (client, server):
        asked = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: server.asked)
        next(iter(client.app.state.parts.upstreams.values()))._off_loop.close()
        pause.set()
        answer = await asked
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=far"), answer.text
        assert 'penstock_upstream_requests_total{result="ok",upstream="far"} 1.0' in (await client.get("/metrics")).text


async def test_at_most_so_many_requests_go_there_at_once(near) -> None:
    pause = asyncio.Event()
    async with clients(near, streams(event("far"), END + DONE, pause=pause), max_concurrent=1) as (client, server):
        first = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": True}))
        await until(lambda: server.asked)
        second = await client.post(CHAT, json=BODY)
        assert second.headers["x-route"] == "auto; model=near; after=far"
        pause.set()
        assert (await first).content == event("far") + END + DONE
        third = await client.post(CHAT, json=BODY | {"stream": True})
        assert third.headers["x-route"] == "auto; model=far", "its place is free again"


async def test_a_client_that_leaves_ends_the_request_there(near) -> None:
    async def goes_on_until_it_is_left(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with clients(near, goes_on_until_it_is_left) as (client, server):
        asked = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: server.asked)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not server.connections)
        assert 'upstream_requests_total{result="failed"' not in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("fields", "headers", "text"),
    [
        ({"never_matching": (re.compile("(?i)geheim|s\u00e9cret"),)}, {}, "this is S\u00c9CRET"),
        ({}, {"X-Local-Only": "true"}, "hello"),
        ({"never_keys": ("hr",)}, {"Authorization": "Bearer the-key-of-hr"}, "hello"),
    ],
)
async def test_what_must_stay_here_stays_here(near, tmp_path: Path, fields: dict, headers: dict, text: str) -> None:
    keys = {}
    if "never_keys" in fields:
        (tmp_path / "keys.toml").write_text('[[keys]]\nname = "hr"\nkey = "the-key-of-hr"\n')
        keys = {"api_keys_file": str(tmp_path / "keys.toml")}
    body = {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "hello"}], "max_tokens": 2}
    async with serving(answers(200, whole())) as server:
        upstream = far(server.url, **fields)
        async with make_client(near, routes=[FAR_FIRST], upstreams=[upstream], load_timeout_s=0.01, **keys) as client:
            answer = await client.post(CHAT, json=body | {"model": "auto"}, headers=headers)
            assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near")
            near.leave()
            answer = await client.post(CHAT, json=body | {"model": "auto"}, headers=headers)
            assert answer.status_code == 503, "it fails rather than leaves"
        assert not server.asked


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"SECRET": {}}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "S\u00c9CRET"})}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "SEC"}, {"type": "text", "text": "RET"}]}]},
        {"messages": [{"role": "user", "content": "hi"}], "seed": 4111111111},
    ],
)
async def test_secrets_are_found_wherever_they_stand(near, body: dict) -> None:
    async with clients(near, answers(200, whole()), never_matching=(re.compile("S[E\u00c9]CRET|4111111111"),)) as (
        client,
        server,
    ):
        await client.post(CHAT, json=body | {"model": "auto", "max_tokens": 2})
        assert not server.asked


async def test_token_ids_are_of_this_servers_models(near) -> None:
    async with clients(near, answers(200, whole())) as (client, server):
        answer = await client.post("/v1/completions", json={"model": "auto", "prompt": [65, 66], "max_tokens": 2})
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near")
        assert not server.asked


async def test_any_header_that_says_so_keeps_a_request_here(near) -> None:
    async with clients(near, answers(200, whole())) as (client, server):
        headers = [("X-Local-Only", "false"), ("X-Local-Only", "true")]
        assert (await client.post(CHAT, json=BODY, headers=headers)).headers["x-route"] == "auto; model=near"
        assert not server.asked


def test_a_key_that_the_server_does_not_have_protects_nobody(near) -> None:
    with pytest.raises(ConfigError, match="names the API key 'hr', which the server does not have"):
        make_client(near, routes=[FAR_FIRST], upstreams=[far("http://localhost:1/v1", never_keys=("hr",))])


async def test_apis_that_are_not_openais_are_answered_here(near) -> None:
    async with clients(near, answers(200, whole())) as (client, server):
        answer = await client.post("/v1/messages", json=BODY)
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=near")
        assert not server.asked


async def test_paths_without_v1_are_answered_there_too(near) -> None:
    text = whole() | {"object": "text_completion"}
    text["choices"] = [{"index": 0, "text": "far away", "finish_reason": "stop", "stop_reason": None, "logprobs": None}]
    async with clients(near, answers(200, whole()), answers(200, text)) as (client, server):
        for path, body in ((CHAT, BODY), ("/v1/completions", {"model": "auto", "prompt": "hi", "max_tokens": 4})):
            answer = await client.post(path.removeprefix("/v1"), json=body)
            assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=far")
            assert server.asked[-1].path == path


async def test_a_key_that_allows_the_route_allows_its_upstream(near, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    lines = [f'[[keys]]\nname = "{name}"\nkey = "the-key-of-{name}"\nmodels = ["{name}"]\n' for name in ("auto", "far", "near")]
    keys.write_text("\n".join(lines))
    async with clients(near, answers(200, whole()), config={"api_keys_file": str(keys)}) as (client, _server):
        for name, model in (("auto", "far"), ("far", "far"), ("near", "near")):
            answer = await client.post(CHAT, json=BODY, headers={"Authorization": f"Bearer the-key-of-{name}"})
            assert answer.headers["x-route"] == f"auto; model={model}"
            listed = await client.get("/v1/models", headers={"Authorization": f"Bearer the-key-of-{name}"})
            assert KEY not in listed.text


TABLES = """
[[routes]]
name = "auto"
fallback = ["near", "far"]
[[upstreams]]
name = "far"
url = "https://api.example.com/v1"
key_env = "FAR_KEY"
"""


def test_upstreams_stand_in_the_file_and_their_keys_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", KEY)
    path = tmp_path / "penstock.toml"
    path.write_text(TABLES + 'model = "big"\nmax_silence_s = 5\nnever_keys = ["hr"]\nnever_matching = ["IBAN"]\n')
    [upstream] = read_config_file(path).routing.upstreams
    assert (upstream.url, upstream.model, upstream.key, upstream.max_silence_s) == ("https://api.example.com/v1", "big", KEY, 5)
    assert (upstream.never_keys, upstream.never_matching) == (("hr",), (re.compile("IBAN"),))
    assert KEY not in repr(read_config_file(path))


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("https://", "ftp://", "is not the address of a server"),
        ("https://", "https://me:pw@", "is not the address of a server"),
        ("https://", "https://:pw@", "is not the address of a server"),
        ("example.com", "example.com:99999", "is not the address of a server"),
        ("api.example.com", "[::1", "is not the address of a server"),
        ("api.example.com", "a..b", "is not the address of a server"),
        ('"FAR_KEY"', '"BLANK_KEY"', "has blanks or signs that no key has"),
        ('key_env = "FAR_KEY"', 'key_env = "NO_KEY"', "the environment variable NO_KEY has no key"),
        ('key_env = "FAR_KEY"', 'key = "x"', "unknown key 'key'"),
        ('key_env = "FAR_KEY"', "max_silence_s = 0", "max_silence_s is not a number"),
        ('key_env = "FAR_KEY"', "max_concurrent = 1.5", "max_concurrent is not a whole number"),
        ('key_env = "FAR_KEY"', 'never_matching = ["("]', "is not a regular expression"),
        ('key_env = "FAR_KEY"', 'never_keys = "hr"', "never_keys is not a list of texts"),
        ("[[upstreams]]", "[upstreams]", "upstreams are tables"),
    ],
)
def test_wrong_tables_are_refused(old: str, new: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", KEY)
    monkeypatch.setenv("BLANK_KEY", KEY + " ")
    path = tmp_path / "penstock.toml"
    path.write_text(TABLES.replace(old, new))
    with pytest.raises(ConfigError, match=cause):
        read_config_file(path)


@pytest.mark.parametrize(
    ("routes", "name", "cause"),
    [
        ([FAR_FIRST], "near", "An upstream is called 'near'"),
        ([FAR_FIRST], "auto", "An upstream is called 'auto'"),
        ([], "far", "The upstream far is in no route"),
        ([Route(name="auto", models=("far",))], "far", "needs a model of this server"),
    ],
)
def test_an_upstream_that_no_route_can_use_is_refused(near, routes: list[Route], name: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        deployment_of(near, routes=routes, upstreams=[UpstreamConfig(name=name, url="http://x/v1", model="m")])
    assert Routing() == Routing(routes=(), upstreams=())


async def test_lines_of_batches_leave_half_of_the_places_to_others_and_wait_for_theirs(near) -> None:
    may_answer = asyncio.Event()

    async def later(writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await answers(200, whole())(writer)

    async with clients(near, later, max_concurrent=2) as (client, server):
        own = OwnRequests(lambda _name: Sender(is_admin=True))
        own.app = client.app
        num_elsewhere = 0

        @contextmanager
        def elsewhere():
            nonlocal num_elsewhere
            num_elsewhere += 1
            yield
            num_elsewhere -= 1

        def ask(name: str):
            course = Course(is_background=True, elsewhere=elsewhere)
            return own.ask(Owner(), CHAT, json.dumps(BODY).encode(), name, asyncio.Event(), course)

        first = asyncio.create_task(ask("one"))
        await until(lambda: len(server.asked) == 1)
        second = asyncio.create_task(ask("two"))
        other = asyncio.create_task(client.post(CHAT, json=BODY | {"max_tokens": 5}))
        await until(lambda: len(server.asked) == 2)
        assert (server.asked[1].body["max_tokens"], num_elsewhere) == (5, 2)
        may_answer.set()
        for answered in await asyncio.gather(first, second):
            assert answered is not None
            assert (answered.status, json.loads(answered.body)["choices"]) == (200, whole()["choices"])
        assert ((await other).status_code, len(server.asked), num_elsewhere) == (200, 3, 0)


async def test_the_limits_of_a_key_do_not_apply_to_lines_of_batches(near) -> None:
    key = ApiKey(name="alice", digest=b"", limits=TenantLimits(requests_per_minute=1))
    async with clients(near, answers(200, whole()), tenant_limits=TenantLimits(tokens_per_minute=1)) as (client, server):
        own = OwnRequests(lambda _name: Sender(key=key))
        own.app = client.app
        for nth in (1, 2, 3):
            course = Course(is_background=True)
            answered = await own.ask(Owner(), CHAT, json.dumps(BODY).encode(), str(nth), asyncio.Event(), course)
            assert answered is not None
            assert (answered.status, len(server.asked)) == (200, nth), "the other model has answered"


@pytest.mark.parametrize(
    ("script", "stream", "tokens"),
    [
        (answers(200, whole()), False, (5, 2)),
        (streams(event("far"), event(" away"), END + DONE), True, (29, 3)),  # guessed
        (streams(event("far"), END, USAGE, DONE), True, (5, 2)),
    ],
    ids=["whole", "without usage", "with usage"],
)
async def test_an_answer_from_elsewhere_has_its_price(near, script: Script, stream: bool, tokens: tuple[int, int]) -> None:
    bill = Bill({"far": Price(10.0, 30.0), "near": Price(1.0, 2.0)})
    async with clients(near, script, route=replace(FAR_FIRST, bill=bill)) as (client, _server):
        await client.post(CHAT, json=BODY | {"stream": stream})
        assert bill.paid == pytest.approx({"far": bill.prices["far"].of(*tokens)})
        assert bill.full == pytest.approx(bill.paid["far"])


async def test_a_guess_counts_each_text_once(near) -> None:
    bill = Bill({"far": Price(10.0, 0.0), "near": Price(1.0, 2.0)})
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "b" * 1600})}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "c" * 1600}, {"type": "text", "text": "d" * 1600}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "red"},
    ]
    async with clients(near, streams(event("far"), END + DONE), route=replace(FAR_FIRST, bill=bill)) as (client, _server):
        await client.post(CHAT, json=BODY | {"messages": messages, "stream": True})
        assert bill.prices["far"].of(1200, 0) < bill.paid["far"] < bill.prices["far"].of(1400, 0)


async def test_a_stream_that_breaks_is_paid_for_in_vain(near) -> None:
    bill = Bill({"far": Price(10.0, 30.0), "near": Price(1.0, 2.0)})
    async with clients(near, streams(event("far"), ends=False), route=replace(FAR_FIRST, bill=bill)) as (client, _server):
        await client.post(CHAT, json=BODY | {"stream": True})
        assert bill.paid == pytest.approx({"far": bill.prices["far"].of(29, 1)})  # guessed
        assert bill.full == 0


async def test_a_fault_elsewhere_costs_nothing_and_the_next_answer_its_own(near) -> None:
    bill = Bill({"far": Price(10.0, 30.0), "near": Price(1.0, 2.0)})
    async with clients(near, hang_up, route=replace(FAR_FIRST, bill=bill)) as (client, _server):
        answer = await client.post(CHAT, json=BODY)
        usage = answer.json()["usage"]
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        assert bill.paid == pytest.approx({"near": bill.prices["near"].of(*tokens)})
        assert bill.full == pytest.approx(bill.prices["far"].of(*tokens))
        assert answer.headers["x-route"].startswith("auto; model=near; after=far; cost=0.0")
