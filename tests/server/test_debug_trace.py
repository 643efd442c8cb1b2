"""`GET /debug/trace` shows the steps and requests of some seconds, as Perfetto reads them, to admins alone."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from penstock.obs.explain.window import Window
from support.cluster import cluster
from support.server.completions import URL as COMPLETIONS
from support.server.harness import CAPACITY, GatedExecutor, make_client, make_runtime, running, until

URL = "/debug/trace"


@pytest.fixture
def gate():
    return GatedExecutor(CAPACITY)


async def test_steps_and_requests_are_shown_also_those_that_ran_before(gate):
    with running(gate) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            ask = {"prompt": "a secret word", "max_tokens": 6, "ignore_eos": True}
            early = asyncio.create_task(client.post(COMPLETIONS, json=ask, headers={"X-Request-Id": "early"}))
            gate.allow(2)
            await until(lambda: server.runtime.engine.load().num_running == 1)
            watch = asyncio.create_task(client.get(URL, params={"seconds": "1.5"}))
            await until(lambda: server.runtime.journal._window is not None)
            late = asyncio.create_task(client.post(COMPLETIONS, json=ask, headers={"X-Request-Id": "late"}))
            gate.open()
            assert (await early).status_code == (await late).status_code == 200
            answer = await watch
    assert answer.status_code == 200
    events = answer.json()["traceEvents"]
    begun = [event["id"] for event in events if event["name"] == "request" and event["ph"] == "b"]
    assert [name.partition("/")[0] for name in begun] == ["early", "late"]
    ends = [event["args"] for event in events if event["name"] == "request" and event["ph"] == "e"]
    assert [(one["reason"], one["output"]) for one in ends] == [("length", 6)] * 2
    steps = [event["args"]["step"] for event in events if event.get("tid") == 1 and event["ph"] == "X"]
    assert steps == [*range(steps[0], steps[0] + len(steps))]
    assert len(steps) >= 6
    phases = Counter((event["name"], event["ph"]) for event in events if event.get("cat") == "request")
    assert phases["decodes", "b"] == phases["decodes", "e"] == 2
    assert phases["waits", "b"] == phases["waits", "e"] >= 1
    assert "secret" not in answer.text


@pytest.mark.parametrize("seconds", ["0", "61", "-1", "nan", "inf", "five", ""])
async def test_other_durations_are_refused(client, seconds):
    answer = await client.get(URL, params={"seconds": seconds})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")


async def test_one_at_a_time_and_a_client_that_leaves_ends_it():
    with running() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            first = asyncio.create_task(client.get(URL, params={"seconds": "60"}))
            await until(lambda: server.runtime.journal._window is not None)
            second = await client.get(URL, params={"seconds": "0.01"})
            assert (second.status_code, second.json()["error"]["code"]) == (409, "trace_running")
            first.cancel()
            await until(lambda: server.runtime.journal._window is None)
            third = await client.get(URL, params={"seconds": "0.01"})
            assert third.status_code == 200


async def test_a_server_that_ends_sends_the_steps_so_far():
    with running() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            watch = asyncio.create_task(client.get(URL, params={"seconds": "60"}))
            await until(lambda: server.runtime.journal._window is not None)
            assert (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4})).status_code == 200
            server.server.request_shutdown()
            answer = await watch
    assert answer.status_code == 200
    assert any(event["name"] == "request" for event in answer.json()["traceEvents"])


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("user", 403), ("admin", 200)])
async def test_it_is_for_admins(runtime, key, status):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with make_client(runtime, api_keys=("user",), admin_api_keys=("admin",)) as client:
        assert (await client.get(URL, params={"seconds": "0.01"}, headers=headers)).status_code == status


async def test_where_nothing_is_remembered_it_is_said():
    runtime = make_runtime(max_explained=0)
    try:
        async with make_client(runtime) as client:
            answer = await client.get(URL, params={"seconds": "0.01"})
            assert (answer.status_code, "--explained-requests is 0" in answer.text) == (400, True)
    finally:
        runtime.close()


def test_the_steps_of_a_cluster_are_elsewhere():
    with cluster() as made:
        answer = httpx.get(made.server.url + URL, params={"seconds": "0.01"})
        assert (answer.status_code, "runs on replicas" in answer.text) == (400, True)


def test_its_size_is_bounded():
    window = Window(0, (), max_rows=3 * 20)
    for _ in range(5):
        window._note(lambda: iter([{"name": "x"}]), num_rows=12)
    assert window.is_cut
    assert sum(event["name"] == "x" for event in window.events("toy")) == 3
