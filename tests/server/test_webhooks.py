"""Webhooks: what ended is told to a URL until it accepts, in a form that OpenAI's client verifies."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import openai
import pytest

from penstock.config import ServerConfig
from penstock.jobs.store import Store
from penstock.serve.app import create_app
from penstock.serve.jobs import webhooks
from penstock.types.errors import ConfigError
from support.deployments import deployment_of
from support.server.harness import LiveServer, make_runtime, until, wait_until
from support.server.responses import ASK, PATH

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 3}}\n'


class Receiver(HTTPServer):
    """Takes events, and answers them with the next of `statuses`, or else 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.received: list[tuple[bytes, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/events"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((body, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "LOOKED_EACH_S", 0.01)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def config(tmp_path: Path, receiver: Receiver) -> ServerConfig:
    return ServerConfig(port=0, jobs_dir=str(tmp_path / "jobs"), webhook_url=receiver.url, webhook_secret=SECRET)


@pytest.fixture
def runtime():
    made = make_runtime()
    yield made
    made.close()


def begin_batch(server: LiveServer, lines: bytes) -> str:
    form = {"files": {"file": ("in.jsonl", lines)}, "data": {"purpose": "batch"}}
    file = httpx.post(f"{server.url}/v1/files", **form).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    return httpx.post(f"{server.url}/v1/batches", json=asked).json()["id"]


def test_openai_s_client_reads_what_ended(runtime, config: ServerConfig, receiver: Receiver) -> None:
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    with LiveServer(runtime, config) as server:
        response_id = httpx.post(server.url + PATH, json=ASK | {"background": True}).json()["id"]
        httpx.post(server.url + PATH, json=ASK).raise_for_status()  # nobody waits for it
        good, bad = begin_batch(server, LINE), begin_batch(server, b"no JSON\n")
        wait_until(lambda: len(receiver.received) == 3)
    events = [client.webhooks.unwrap(body, headers) for body, headers in receiver.received]
    told = {event.data.id: event.type for event in events}
    assert told == {response_id: "response.incomplete", good: "batch.completed", bad: "batch.failed"}
    body, headers = receiver.received[0]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers)


def test_an_event_is_sent_until_it_is_accepted(runtime, config: ServerConfig, receiver: Receiver, monkeypatch) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0)
    receiver.statuses = [500, 302]
    with LiveServer(runtime, config) as server:
        begin_batch(server, LINE)
        wait_until(lambda: len(receiver.received) == 3)
    assert len({body for body, _ in receiver.received}) == 1


def test_an_event_outlives_the_server(config: ServerConfig, receiver: Receiver, monkeypatch) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0)
    receiver.statuses = [503] * 100
    for nth in range(2):
        runtime = make_runtime()
        with LiveServer(runtime, config) as server:
            if nth == 0:
                begin_batch(server, LINE)
            wait_until(lambda seen=nth: len(receiver.received) > seen)
            receiver.statuses = []
        runtime.close()
    assert len({body for body, _ in receiver.received}) == 1


@pytest.mark.parametrize(("status", "method"), [(200, "forget"), (503, "put_off")])
def test_a_full_disk_sends_no_event_twice(
    config: ServerConfig, receiver: Receiver, monkeypatch, status: int, method: str
) -> None:
    store, receiver.statuses, tried = Store(Path(config.jobs_dir), max_bytes=1 << 20, notes_events=True), [status], []
    real = getattr(store, method)

    def fails_thrice(*rest: object) -> None:
        tried.append(rest)
        if len(tried) <= 3:
            raise sqlite3.OperationalError("database or disk is full")
        real(*rest)

    monkeypatch.setattr(store, method, fails_thrice)

    async def deliver() -> None:
        hooks = webhooks.Webhooks(store, config.webhook_url, webhooks.key_of(config.webhook_url, SECRET))
        hooks.start()
        await until(lambda: len(tried) == 4)
        await hooks.close()

    with closing(store):
        store._note([("batch.completed", "batch_1")], int(time.time()))
        asyncio.run(deliver())
    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"webhook_secret": "secret"}, "is not whsec_"),
        ({"webhook_secret": "whsec_AAAA"}, "24 bytes or more"),
        ({"webhook_secret": None}, "is not whsec_"),
        ({"webhook_url": "ftp://a"}, "is not the address of a webhook"),
        ({"jobs_dir": None}, "--webhook-url needs --jobs-dir"),
        ({"jobs_dir": None, "webhook_url": None, "batch_hours": "22-6"}, "--batch-hours needs --jobs-dir"),
    ],
)
def test_what_can_not_work_is_refused_at_the_start(runtime, tmp_path: Path, more, words: str) -> None:
    asked = {"jobs_dir": str(tmp_path / "jobs"), "webhook_url": "https://example.org/hook", "webhook_secret": SECRET} | more
    with pytest.raises(ConfigError, match=words):
        create_app(deployment_of(runtime), ServerConfig(**asked))
