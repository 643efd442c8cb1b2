"""Responses that outlive the server: with a folder of jobs they are there after a restart, and what ran goes on."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.jobs.store import Store
from penstock.serve.own_requests import Answered, OwnRequests
from penstock.serve.responses import durable, store
from penstock.serve.responses.store import MemoryStore
from penstock.testing import HashExecutor
from penstock.types.errors import ConfigError
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, LiveServer, fixed_sources, make_runtime, wait_until
from support.server.responses import ASK, PATH

MANY = 1500
"""Tokens of an answer that takes longer than the end of a server."""


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(port=0, jobs_dir=str(tmp_path / "jobs"))


def serving(config: ServerConfig, executor=None, *, now_s: int = 1_700_000_000, **model_fields):
    sources = replace(fixed_sources(), unix_time_s=lambda: now_s)
    runtime = make_runtime(executor or HashExecutor(CAPACITY, model=PRINTABLE_MODEL), sources=sources, **model_fields)
    return LiveServer(runtime, config)


def post(server: LiveServer, **body) -> httpx.Response:
    return httpx.post(server.url + PATH, json=ASK | body)


def get(server: LiveServer, response_id: str) -> dict:
    return httpx.get(f"{server.url}{PATH}/{response_id}").json()


def ended(server: LiveServer, response_id: str) -> dict:
    wait_until(lambda: get(server, response_id)["status"] not in ("queued", "in_progress"))
    return get(server, response_id)


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
        assert httpx.get(f"{server.url}/v1/requests/{begun['id']}").status_code == 200
    server.runtime.close()


def test_a_response_is_asked_again_with_a_conversation_that_was_deleted(config: ServerConfig) -> None:
    executor, then = GatedExecutor(), {"role": "user", "content": "and then?"}
    with serving(replace(config, shutdown_timeout_s=0.0), executor) as server:
        executor.allow(100)
        first, second = (post(server, input=text).json() for text in ("one", "two"))
        asked = [{"type": "item_reference", "id": second["output"][0]["id"]}, then]
        begun = post(server, input=asked, previous_response_id=first["id"], background=True, max_output_tokens=MANY).json()
        for one in (first, second):
            assert httpx.delete(f"{server.url}{PATH}/{one['id']}").status_code == 200
        server.server.request_shutdown()
        executor.open()
    server.runtime.close()
    with serving(config) as server:
        found = ended(server, begun["id"])
        assert (found["status"], found["error"]) == ("incomplete", None)
        items = [{"role": "user", "content": "one"}, *first["output"], *second["output"], then]
        expected = post(server, input=items, store=False, max_output_tokens=MANY).json()
        assert found["output"][0]["content"] == expected["output"][0]["content"]
    server.runtime.close()
    assert b'"and then?"' in records(config)[begun["id"]]
    assert b'"one"' not in records(config)[begun["id"]], "what came before is kept only until the end"


def stopped_with(config: ServerConfig, num: int) -> list[str]:
    """Return the ids of responses that run in the background when their server ends."""
    executor = GatedExecutor()
    with serving(replace(config, shutdown_timeout_s=0.0), executor) as server:
        ids = [post(server, background=True, max_output_tokens=MANY).json()["id"] for _ in range(num)]
        server.server.request_shutdown()
        executor.open()
    server.runtime.close()
    return ids


def test_what_is_asked_again_was_created_when_it_was_first_asked(config: ServerConfig) -> None:
    [response_id] = stopped_with(config, 1)
    with serving(config, now_s=1_700_000_060) as server:
        found = ended(server, response_id)
        assert (found["status"], found["created_at"]) == ("incomplete", 1_700_000_000)
    server.runtime.close()


def test_headers_about_urgency_still_apply_and_the_deadline_goes_on(config: ServerConfig, monkeypatch) -> None:
    headers = {"X-Deadline-Ms": "100000", "X-Queue-Timeout-Ms": "50000", "X-First-Token-Timeout-Ms": "60000"}
    headers |= {"X-SLO-TTFT-Ms": "2000", "X-SLO-ITL-Ms": "30", "X-Priority": "-3"}
    requests, has_begun, update = [], threading.Event(), MemoryStore.update

    def serve(now_s: int, executor=None) -> LiveServer:
        server = serving(replace(config, shutdown_timeout_s=0.0), executor, now_s=now_s, is_priority_scheduled=True)
        submit = server.runtime.engine.submit
        monkeypatch.setattr(server.runtime.engine, "submit", lambda *added: requests.extend(added) or submit(*added))
        return server

    monkeypatch.setattr(MemoryStore, "update", lambda store, kept: has_begun.set() or update(store, kept))
    for now_s in (1000, 1040, 1080):
        gate = GatedExecutor()
        with serve(now_s, gate) as server:
            if now_s == 1000:
                body = ASK | {"background": True, "max_output_tokens": MANY}
                response_id = httpx.post(server.url + PATH, json=body, headers=headers).json()["id"]
            gate.allow()
            assert has_begun.wait(60)
            server.server.request_shutdown()
            gate.open()
        server.runtime.close()
        has_begun.clear()
        request = requests.pop()
        limits_ns = (request.deadline_ns, request.queue_deadline_ns, request.first_token_deadline_ns)
        assert [(at_ns - request.arrival_ns) // 10**9 for at_ns in limits_ns] == [1100 - now_s, 50, 60]
        assert (request.slo_itl_ns, request.priority) == (30 * 10**6, -3)
        slo = server.runtime.metrics.slo
        assert slo["ttft_asked", True] + slo["ttft_asked", False] == 1
    with serve(1100) as server:
        assert ended(server, response_id)["status"] == "failed"
        assert not requests
    server.runtime.close()


def test_records_without_headers_are_read(config: ServerConfig) -> None:
    [response_id] = stopped_with(config, 1)
    record = json.loads(records(config)[response_id])
    with sqlite3.connect(f"{config.jobs_dir}/jobs.db") as base:
        base.execute("UPDATE responses SET record = ?", (json.dumps(record[:6]).encode(),))
    base.close()
    with serving(config) as server:
        assert ended(server, response_id)["status"] == "incomplete"
    server.runtime.close()


def test_a_record_that_was_cut_is_told(config: ServerConfig) -> None:
    with serving(config) as server:
        post(server)
    server.runtime.close()
    with sqlite3.connect(f"{config.jobs_dir}/jobs.db") as base:
        base.execute("UPDATE responses SET record = substr(record, 1, 9)")
    base.close()
    told = pytest.raises(ConfigError, match=r"jobs\.db has a record .* damaged or a newer version")
    with closing(Store(Path(str(config.jobs_dir)), max_bytes=1000)) as folder, told:
        durable.ResponseDisk(folder).read()


def test_as_many_as_may_run_go_on(config: ServerConfig, monkeypatch) -> None:
    monkeypatch.setattr(store, "MAX_RUNNING", 6)
    ids = stopped_with(config, 3)
    with serving(config) as server:
        assert [ended(server, one)["status"] for one in ids] == ["incomplete"] * 3
    server.runtime.close()


def test_what_waits_to_be_asked_again_can_be_deleted_and_cancelled(config: ServerConfig, monkeypatch) -> None:
    ids, num_asked, ask = stopped_with(config, 3), [0], OwnRequests.ask

    async def refuse(*_args) -> Answered:
        num_asked[0] += 1
        return Answered(503, 0.01, b"")

    monkeypatch.setattr(OwnRequests, "ask", refuse)
    monkeypatch.setattr(durable, "GATHERED_S", 3600.0)
    with serving(config) as server:
        wait_until(lambda: num_asked[0] > 10)
        assert httpx.delete(f"{server.url}{PATH}/{ids[0]}").json()["deleted"]
        assert httpx.post(f"{server.url}{PATH}/{ids[1]}/cancel").json()["status"] == "cancelled"
        assert b'"status":"cancelled"' in records(config)[ids[1]], "it is on the disk by then"
        monkeypatch.setattr(OwnRequests, "ask", ask)
        assert ended(server, ids[2])["status"] == "incomplete"  # the others would have run by now
        assert httpx.get(f"{server.url}{PATH}/{ids[0]}").status_code == 404
        assert get(server, ids[1])["status"] == "cancelled"
    server.runtime.close()


def test_a_deletion_is_on_the_disk_when_it_is_answered(config: ServerConfig, monkeypatch) -> None:
    with serving(config) as server:
        kept, gone = post(server).json()["id"], post(server).json()["id"]
        monkeypatch.setattr(durable, "GATHERED_S", 3600.0)
        assert httpx.delete(f"{server.url}{PATH}/{gone}").status_code == 200
        assert records(config).keys() == {kept}
    server.runtime.close()


def test_a_server_that_keeps_none_deletes_what_was_kept(config: ServerConfig) -> None:
    with serving(config) as server:
        kept = post(server).json()["id"]
    server.runtime.close()
    stopped_with(config, 1)
    assert kept in records(config)
    with serving(replace(config, response_store_bytes=0)) as server:
        wait_until(lambda: not records(config))
    server.runtime.close()


def records(config: ServerConfig) -> dict[str, bytes]:
    with sqlite3.connect(f"{config.jobs_dir}/jobs.db") as base:
        found = dict(base.execute("SELECT id, record FROM responses"))
    base.close()
    return found


def test_the_time_of_the_last_use_outlives_a_restart(config: ServerConfig) -> None:
    with serving(config) as server:
        used, unused = post(server).json()["id"], post(server, input="and you?").json()["id"]
    server.runtime.close()
    set_back(config, used, 90)
    set_back(config, unused, 90)
    with serving(replace(config, response_ttl_s=100.0)) as server:
        assert get(server, used)["id"] == used
    server.runtime.close()
    with sqlite3.connect(f"{config.jobs_dir}/jobs.db") as base:
        found = dict(base.execute("SELECT id, used_s FROM responses"))
    base.close()
    assert found[used] - found[unused] >= 90
    set_back(config, unused, 20)
    with serving(replace(config, response_ttl_s=100.0)) as server:
        assert get(server, used)["id"] == used
        assert "--response-ttl" in get(server, unused)["error"]["message"]
    server.runtime.close()


def set_back(config: ServerConfig, response_id: str, seconds: int) -> None:
    """Let the last use of a response be longer ago."""
    with sqlite3.connect(f"{config.jobs_dir}/jobs.db") as base:
        base.execute("UPDATE responses SET used_s = used_s - ? WHERE id = ?", (seconds, response_id))
    base.close()


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
        assert "Status 404: The model 'toy'" in found["error"]["message"]
    runtime.close()


def test_a_response_that_can_not_be_kept_is_refused(config: ServerConfig, monkeypatch) -> None:
    def fails(self, *_args) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    has_ended, update = threading.Event(), MemoryStore.update

    def note(self, kept) -> None:
        update(self, kept)
        if not kept.is_running:
            has_ended.set()

    def fails_late(self, *_args) -> None:
        assert has_ended.wait(60)
        fails(self)

    with serving(config) as server:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "update", note)
            patch.setattr(Store, "write_responses", fails_late)
            refused = post(server, background=True, max_output_tokens=1)
            assert refused.status_code == 503, "also if it has ended by then"
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
        for others in ({}, {"Idempotency-Key": ""}):
            plain = [httpx.post(server.url + PATH, json=ASK | {"temperature": 1}, headers=others).json()["id"] for _ in "ab"]
            assert len({first, *plain}) == 3
    server.runtime.close()
    with serving(config) as server:
        assert ask(temperature=1) == first
        assert httpx.post(server.url + PATH, json=ASK, headers=headers | {"X-Tenant": "b"}).json()["id"] != first
    server.runtime.close()
