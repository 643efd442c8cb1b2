"""Streams that wait: headers and first bytes come when the request was admitted, keepalives while there is nothing to say."""

from __future__ import annotations

import asyncio
import itertools
import re
import selectors
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import openai
import pytest
from starlette.requests import Request as HttpRequest

from penstock.calls.call import Terms
from penstock.clock import VirtualClock
from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.obs.metrics import Metrics
from penstock.serve.errors import ApiError
from penstock.serve.streams import ChoiceRecord, EventStream, Writer
from penstock.testing import make_request
from penstock.types.request import FinishReason, Owner
from support.server.harness import GatedExecutor, LiveServer, running, until
from support.server.waits import set_waits

HI = [{"role": "user", "content": "hi"}]
FEW = {"temperature": 0, "max_tokens": 4}
OPENAI = (b": keepalive\n\n", b": keepalive\n\n")
OLLAMA = (b'"content":""},"done":false}\n', b'"response":"","done":false}\n')
RESPONSES = (b"event: response.created\n", b"event: response.in_progress\n")
STREAMS: dict[str, tuple[str, dict[str, Any], tuple[bytes, bytes]]] = {
    "completions": ("/v1/completions", {"prompt": "hi", **FEW}, OPENAI),
    "chat": ("/v1/chat/completions", {"messages": HI, **FEW}, OPENAI),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "temperature": 0, "store": False}, RESPONSES),
    "messages": ("/v1/messages", {"model": "toy", "messages": HI, **FEW}, (b"event: message_start\n", b"event: ping\n")),
    "ollama chat": ("/api/chat", {"model": "toy", "messages": HI, "options": {"num_predict": 4}}, OLLAMA[:1] * 2),
    "ollama generate": ("/api/generate", {"model": "toy", "prompt": "hi", "options": {"num_predict": 4}}, OLLAMA[1:] * 2),
    "llama.cpp": ("/completion", {"prompt": "hi", "n_predict": 4}, OPENAI),
    "cohere": ("/v2/chat", {"model": "toy", "messages": HI, **FEW}, (b"event: message-start\n", OPENAI[1])),
    "tgi": ("/generate_stream", {"inputs": "hi", "parameters": {"max_new_tokens": 4}}, OPENAI),
}
"""Path, question, and what the first bytes and a keepalive contain."""
ERRORS = {
    "completions": b'data: {"error":{',
    "chat": b'data: {"error":{',
    "responses": b"event: response.failed\n",
    "messages": b'event: error\ndata: {"type":"error","error":{"type":"timeout_error"',
    "ollama chat": b'{"error":"',
    "ollama generate": b'{"error":"',
    "llama.cpp": b'data: {"error":{"code":408,',
    "cohere": b'"finish_reason":"ERROR"',
    "tgi": b'data:{"error":"',
}


@pytest.mark.parametrize("name", STREAMS)
async def test_headers_and_first_bytes_wait_for_no_step(gated: LiveServer, gate: GatedExecutor, name: str) -> None:
    path, question, (first, _) = STREAMS[name]
    async with (
        httpx.AsyncClient(base_url=gated.url, timeout=20) as client,
        client.stream("POST", path, json=question | {"stream": True}) as response,
    ):
        assert response.status_code == 200
        pieces = response.aiter_raw()
        assert first in await anext(pieces)
        gate.open()
        rest = b"".join([piece async for piece in pieces])
    assert ERRORS[name] not in rest
    assert (b'"done":true' if path.startswith("/api/") else b"data:") in rest


@pytest.mark.parametrize("name", STREAMS)
async def test_running_out_of_time_in_the_queue_is_the_streams_last_event(name: str) -> None:
    path, question, _ = STREAMS[name]
    gate, clock = GatedExecutor(), VirtualClock()
    with running(gate, clock=clock) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=20) as client,
            client.stream(
                "POST", path, json=question | {"stream": True}, headers={"X-First-Token-Timeout-Ms": "5000"}
            ) as response,
        ):
            assert response.status_code == 200
            await until(lambda: server.runtime.engine.load().num_running == 1)
            clock.advance(6_000_000_000)
            gate.open()
            data = await response.aread()
    end = data.index(ERRORS[name])
    assert b"No token was generated within 5000 ms (X-First-Token-Timeout-Ms" in data[end:]
    assert b"\n" not in data[end:].split(b"data: ")[-1].strip(), "nothing comes after it"


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": "x" * 3000}),
        ("/v1/chat/completions", {"messages": [*HI, {"role": "system", "content": "late"}]}),
        ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"regex": "("}}),
    ],
    ids=["tokenizer", "template", "grammar"],
)
async def test_what_is_refused_before_is_a_status(client: httpx.AsyncClient, path: str, question: dict[str, Any]) -> None:
    assert (await client.post(path, json=question | {"stream": True})).status_code == 400


# Keepalives over HTTP


async def kept_alive(name: str) -> bytes:
    """The body of a stream whose steps each wait for a keepalive."""
    path, question, (_, keepalive) = STREAMS[name]
    gate, data, num_seen = GatedExecutor(), b"", 1
    with running(gate) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=20) as client,
            client.stream("POST", path, json=question | {"stream": True}) as response,
        ):
            async for piece in response.aiter_raw():
                data += piece
                num_keepalives = len(re.findall(rb"(?m)^: keepalive$|" + re.escape(keepalive), data))
                if num_keepalives > num_seen:
                    num_seen = num_keepalives
                    gate.allow()
    return data


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_that_says_nothing_is_kept_alive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_waits(monkeypatch, stream_keepalive_s=0.002)
    data = await kept_alive(name)
    assert data.count(STREAMS[name][2][1]) >= 2
    assert ERRORS[name] not in data
    assert b"length" in data or b"max" in data.lower() or b'"stop_type":"limit"' in data, "it was told to its end"


@pytest.mark.parametrize("name", ["completions", "chat", "responses"])
async def test_openais_client_passes_over_keepalives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_waits(monkeypatch, stream_keepalive_s=0.002)
    data, (_, asked, _) = await kept_alive(name), STREAMS[name]
    transport = httpx2.MockTransport(
        lambda _request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    )
    async with openai.AsyncOpenAI(
        base_url="http://toy/v1", api_key="none", http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        if name == "completions":
            pieces = [
                piece.choices[0].text async for piece in await client.completions.create(model="toy", stream=True, **asked)
            ]
        elif name == "chat":
            chunks = await client.chat.completions.create(model="toy", stream=True, **asked)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        else:
            async with client.responses.stream(model="toy", **asked) as events:
                pieces = [event.delta async for event in events if event.type == "response.output_text.delta"]
    assert len("".join(pieces)) == 4


# When keepalives come, in virtual time


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits for nothing: if no event is there, its time is that of the next timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen"
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class Words(Writer):
    """The text alone, with `K` for a keepalive and `.` at the end."""

    def keepalive(self) -> bytes:
        return b"K"

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        del index
        return chunk.text.encode()

    def end(self) -> bytes:
        return b"."

    def fail(self, error: ApiError) -> bytes:
        return error.body()

    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any]:
        raise NotImplementedError


class Client:
    """Takes a stream, and writes down when it was sent what."""

    def __init__(self, *, blocks: tuple[float, float] = (-1, -1), leaves_s: float = 1e9) -> None:
        """`blocks`: from when until when it takes nothing."""
        self.sent: list[tuple[float, str]] = []
        self._blocks = blocks
        self._leaves_s = leaves_s

    async def send(self, message: Any) -> None:
        now_s = asyncio.get_running_loop().time()
        if message["type"] == "http.response.body":
            self.sent.append((round(now_s, 3), message["body"].decode()))
            if self._blocks[0] <= now_s < self._blocks[1]:
                await asyncio.sleep(self._blocks[1] - now_s)

    async def receive(self) -> Any:
        await asyncio.sleep(self._leaves_s - asyncio.get_running_loop().time())
        return {"type": "http.disconnect"}

    @property
    def keepalives_s(self) -> list[float]:
        return [at_s for at_s, body in self.sent[1:] if body == "K"]


class SilentEngine:
    def submit(self, *requests: object) -> None: ...

    def abort(self, request_id: str, detail: str) -> None: ...


TERMS = Terms(
    request_id="r",
    owner=Owner(key="", tenant=""),
    arrival_ns=0,
    queued_ns=0,
    deadline_ns=None,
    queue_deadline_ns=None,
    first_token_deadline_ns=None,
    slo_ttft_ns=None,
    slo_itl_ns=None,
    is_retry=False,
    priority=0,
    cache_salt=b"",
)


class LoopClock:
    def now_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)


def streamed(texts: dict[float, str], client: Client, metrics: Metrics | None = None) -> list[tuple[float, str]]:
    """The pieces that a client was sent, with their times, of a call that says these texts at these times and then ends."""

    async def stream() -> None:
        bridge, request = Bridge(), make_request("r", prompt=(1,))
        bridge.attach(SilentEngine())
        loop, last_s = asyncio.get_running_loop(), max(texts)
        with bridge.open([request]) as chunks:
            call: Any = SimpleNamespace(
                stream=chunks, next_chunks=chunks.next_chunks, index_of={"r": 0}, terms=TERMS, close=chunks.close, chosen=None,
                requests=[request], firsts=[request], num_choices=1, num_prompt_tokens=0, answer=None,
                running=SimpleNamespace(metrics=metrics or Metrics("m"), clock=LoopClock(), tokenizer=None),
            )  # fmt: skip
            for at_s, text in texts.items():
                finish = FinishReason.STOP if at_s == last_s else None
                loop.call_at(at_s, bridge.deliver, [OutputChunk("r", text, (), (), 0, finish_reason=finish)])
            http = HttpRequest({"type": "http"}, client.receive)
            await EventStream(http, call, Words(call))(http.scope, client.receive, client.send)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(stream())
    return client.sent


def test_a_stream_is_kept_alive_until_its_first_token() -> None:
    assert streamed({35: "a", 36: ""}, Client()) == [(0, "K"), (10, "K"), (20, "K"), (30, "K"), (35, "a"), (36, ".")]


def test_one_that_speaks_all_the_time_has_no_keepalives() -> None:
    client = Client()
    streamed(dict.fromkeys(range(1, 100), "a"), client)
    assert not client.keepalives_s


@pytest.mark.parametrize("texts", [{1: "a", 95: "b"}, {1: "a", **dict.fromkeys(range(2, 95), ""), 95: "b"}])
def test_a_silence_in_the_middle_is_never_longer_than_twenty_seconds(texts: dict[float, str]) -> None:
    """Also if tokens come of which nothing is told, such as those of a reasoning that is left out."""
    sent = streamed(texts, Client())
    gaps_s = [after - before for (before, _), (after, _) in itertools.pairwise(sent)]
    assert max(gaps_s) <= 20
    assert len(sent) < 13


def test_a_client_that_takes_nothing_is_owed_no_keepalives() -> None:
    client, metrics = Client(blocks=(5, 100)), Metrics("m")
    streamed({6: "a", 107: "b"}, client, metrics)
    assert client.sent == [(0, "K"), (6, "a"), (107, "b.")]
    assert metrics.client_wait_ns == 94_000_000_000
    client, metrics = Client(blocks=(5, 100)), Metrics("m")
    seen: list[int] = []
    metrics.count_client_wait = lambda wait_ns: seen.append(wait_ns)
    streamed({6: "a", 107: "b"}, client, metrics)
    assert max(seen) == 10_000_000_000, "it is counted while it lasts"
    assert sum(seen) == 94_000_000_000
    client = Client(blocks=(10, 100))
    streamed({107: "b"}, client)
    assert client.sent == [(0, "K"), (10, "K"), (107, "b.")], "those of 90 s are one"


def test_a_client_that_leaves_ends_it() -> None:
    assert streamed({500: "a"}, Client(leaves_s=15)) == [(0, "K"), (10, "K"), (15, "")]
