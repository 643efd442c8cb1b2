"""Responses that outlive the server: with a folder of jobs they are there after a restart, and what ran goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.jobs.store import Store
from penstock.testing import HashExecutor
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, LiveServer, make_runtime
from support.server.responses import ASK, PATH

MANY = 1500
"""Tokens of an answer that takes longer than the end of a server."""


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(port=0, jobs_dir=str(tmp_path / "jobs"))


def serving(config: ServerConfig, executor=None):
    runtime = make_runtime(executor or HashExecutor(CAPACITY, model=PRINTABLE_MODEL), sources=None)
    return LiveServer(runtime, config)


def post(server: LiveServer, **body) -> httpx.Response:
    return httpx.post(server.url + PATH, json=ASK | body)


def get(server: LiveServer, response_id: str) -> dict:
    return httpx.get(f"{server.url}{PATH}/{response_id}").json()


def ended(server: LiveServer, response_id: str) -> dict:
    for _ in range(600):
        if (found := get(server, response_id))["status"] not in ("queued", "in_progress"):
            return found
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError(found)


def test_a_conversation_goes_on_after_a_restart(config: ServerConfig) -> None:
    with serving(config) as server:
        first = post(server).json()
        gone = post(server, input="forget it").json()
        assert httpx.delete(f"{server.url}{PATH}/{gone['id']}").status_code == 200
        expected = post(server, input="and then?", previous_response_id=first["id"]).json()
    server.runtime.close()
    with serving(config) as server:
        assert get(server, first["id"]) == first
        assert httpx.get(f"{server.url}{PATH}/{gone['id']}").status_code == 404
        again = post(server, input="and then?", previous_response_id=first["id"]).json()
        assert again["output"][0]["content"] == expected["output"][0]["content"]
    server.runtime.close()


def test_a_response_in_the_background_is_asked_again_under_its_id(config: ServerConfig) -> None:
    with serving(config) as server:
        expected = ended(server, post(server, background=True, max_output_tokens=MANY).json()["id"])
    server.runtime.close()
    executor = GatedExecutor()
    with serving(ServerConfig(port=0, jobs_dir=config.jobs_dir, shutdown_timeout_s=0.0), executor) as server:
        begun = post(server, background=True, max_output_tokens=MANY).json()
        assert begun["status"] == "queued"
        executor.allow()
        server.server.request_shutdown()
        executor.open()
    server.runtime.close()
    with serving(config) as server:
        found = ended(server, begun["id"])
        assert (found["id"], found["status"]) == (begun["id"], "incomplete")
        assert found["output"][0]["content"] == expected["output"][0]["content"]
    server.runtime.close()


def test_what_can_not_be_asked_again_says_so(config: ServerConfig) -> None:
    executor = GatedExecutor()
    with serving(ServerConfig(port=0, jobs_dir=config.jobs_dir, shutdown_timeout_s=0.0), executor) as server:
        begun = post(server, background=True, model="toy", max_output_tokens=MANY).json()
        server.server.request_shutdown()
        executor.open()
    server.runtime.close()
    runtime = make_runtime(served_names=("another",), aliases=())
    with LiveServer(runtime, config) as server:
        found = ended(server, begun["id"])
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    runtime.close()


def test_a_response_that_can_not_be_kept_is_refused(config: ServerConfig, monkeypatch) -> None:
    def fails(self, *_args) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with serving(config) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "write_responses", fails)
            refused = post(server, background=True)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert post(server).status_code == 200  # it is in memory, and written later
        assert ended(server, post(server, background=True).json()["id"])["status"] == "incomplete"
    server.runtime.close()


def test_a_request_that_is_sent_again_has_the_same_answer(config: ServerConfig) -> None:
    headers = {"Idempotency-Key": "a"}
    with serving(config) as server:

        def ask(**more) -> str:
            return httpx.post(server.url + PATH, json=ASK | more, headers=headers).json()["id"]

        first = ask(temperature=1)
        assert ask(temperature=1) == first
        assert ask() != first, "another body is another request"
        queued = ask(background=True, max_output_tokens=MANY)
        assert ask(background=True, max_output_tokens=MANY) == queued
        assert httpx.post(server.url + PATH, json=ASK | {"temperature": 1}).json()["id"] != first
    server.runtime.close()
    with serving(config) as server:
        assert ask(temperature=1) == first
        assert httpx.post(server.url + PATH, json=ASK, headers=headers | {"X-Tenant": "b"}).json()["id"] != first
    server.runtime.close()
