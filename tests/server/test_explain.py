"""`GET /v1/requests/{id}`: while it waits, while it runs, after its end; and for nobody else."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from penstock import fast_json
from penstock.clock import VirtualClock
from penstock.config import ServerConfig
from penstock.serve import answering
from support.server.errors import check
from support.server.harness import CAPACITY, GatedExecutor, make_client, make_runtime, running, until

COMPLETIONS = "/v1/completions"
ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
PROMPT = "once upon a time there was a penstock"


async def test_an_ended_request_is_explained_by_either_id(client):
    answer = await client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 9})
    by_header = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
    by_answer = (await client.get(f"/v1/requests/{answer.json()['id']}")).json()
    ages_s = [told.pop("age_ms") // 1000 for told in (by_header, by_answer)]
    assert ages_s[0] <= ages_s[1]
    # The server's wall clock stands still in tests, and its age goes on.
    assert [told.pop("created") for told in (by_header, by_answer)] == [1_700_000_000 - age_s for age_s in ages_s]
    assert by_header == by_answer
    assert by_header["id"] == answer.headers["x-request-id"]
    assert by_header["model"] == answer.json()["model"]
    [choice] = by_header["choices"]
    assert (choice["state"], choice["finish_reason"]) == ("ended", "length")
    assert (choice["prompt_tokens"], choice["completion_tokens"]) == (len(PROMPT), 9)
    assert choice["prefix"] == {"hit_tokens": 0, "stopped_at": 0, "because": "never seen"}
    assert choice["prefill"] == {"steps": 1, "tokens": len(PROMPT)}
    assert (choice["decode"], choice["batch"]) == (
        {"steps": 8, **dict.fromkeys(("forced_tokens", "guessed_tokens", "accepted_tokens", "with_prompts_steps"), 0)}
        | {"with_prompts_ms": 0, "rested_ms": 0},
        {"mean": 1.0, "max": 1},
    )
    parts = choice["time_ms"]
    assert parts["queue"] + parts["prefill"] + parts["decode"] == pytest.approx(parts["total"], abs=0.01)
    assert sum(choice["waited"]["for_ms"].values()) == pytest.approx(parts["queue"], abs=0.01)
    assert by_header["summary"] == choice["summary"]
    assert by_header["summary"].startswith("Took ")


async def test_every_choice_is_explained(client):
    body = {"prompt": [PROMPT, "another"], "n": 2, "max_tokens": 3}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    told = (await client.get(f"/v1/requests/{answer['id']}")).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_tokens"] for choice in told["choices"]] == [len(PROMPT)] * 2 + [len("another")] * 2


async def test_the_cache_is_named(client):
    for _ in range(2):
        answer = await client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2})
    [choice] = (await client.get(f"/v1/requests/{answer.json()['id']}")).json()["choices"]
    assert choice["prefix"] == {"hit_tokens": 36, "stopped_at": 36, "because": "whole"}
    assert "36 were in the cache" in choice["summary"]


@pytest.fixture
def narrow():
    """A gate before a server with two keys and one row."""
    gate = GatedExecutor(replace(CAPACITY, max_rows=1))
    with running(gate, config=ServerConfig(port=0, api_keys=("one", "two"), shutdown_timeout_s=0.0)) as server:
        yield gate, server
        gate.open()


async def test_one_that_waits_and_one_that_runs(narrow):
    gate, server = narrow
    async with httpx.AsyncClient(base_url=server.url, timeout=20, headers=ONE) as client:

        async def states() -> list[tuple[str, str, str | None]]:
            calls = (await client.get("/v1/requests")).json()["data"]
            choices = [(call["id"], call["choices"][0]) for call in calls]
            return [(name, choice["state"], choice["waited"]["now_for"]) for name, choice in choices]

        async def until_states(*expected: tuple[str, str, str | None]) -> None:
            async with asyncio.timeout(20):
                while await states() != list(expected):  # noqa: ASYNC110  # there is no event to wait for
                    await asyncio.sleep(0.001)

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            body = {"prompt": name, "max_tokens": 3}
            return asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"X-Request-Id": name}))

        asks = [ask("a")]
        await until_states(("a", "prefill", None))
        asks.append(ask("b"))
        await until_states(("a", "prefill", None), ("b", "waiting", "step"))
        gate.allow()
        await until_states(("a", "decode", None), ("b", "waiting", "rows"))
        assert "now for a free row" in (await client.get("/v1/requests/b")).json()["summary"]
        for request_id in ("a", "b"):
            check(await client.get(f"/v1/requests/{request_id}", headers=TWO), 404, "request_not_found")
        assert (await client.get("/v1/requests", headers=TWO)).json()["data"] == []
        gate.open()
        assert [(await task).status_code for task in asks] == [200, 200]
        check(await client.get("/v1/requests/b", headers=TWO), 404, "request_not_found")
        [choice] = (await client.get("/v1/requests/b")).json()["choices"]
        assert (choice["state"], choice["batch"]["max"]) == ("ended", 1)
        assert set(choice["waited"]["for_ms"]) <= {"intake", "rows", "step"}


async def test_a_cancelled_request_says_so():
    gate = GatedExecutor()
    with running(gate) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = {"prompt": "a", "max_tokens": 50}
            task = asyncio.create_task(client.post(COMPLETIONS, json=ask, headers={"X-Request-Id": "r"}))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            assert (await client.delete("/v1/requests/r")).status_code == 200
            gate.open()
            assert (await task).status_code == 499
            told = (await client.get("/v1/requests/r")).json()
            assert told["choices"][0]["finish_reason"] == "cancelled"
            assert "It was cancelled." in told["summary"]


async def test_unknown_and_refused_requests_are_not_found(client):
    error = check(await client.get("/v1/requests/nobody"), 404, "request_not_found")
    assert "computed elsewhere (by an upstream)" in error["message"]
    refused = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": -1}, headers={"X-Request-Id": "bad"})
    assert refused.status_code == 400
    check(await client.get("/v1/requests/bad"), 404, "request_not_found")


async def test_only_the_last_are_remembered():
    runtime = make_runtime(max_explained=3)
    try:
        async with make_client(runtime) as client:
            for idx in range(6):
                await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": f"r{idx}"})
            codes = [(await client.get(f"/v1/requests/r{idx}")).status_code for idx in range(6)]
            assert codes == [404, 404, 404, 200, 200, 200]
    finally:
        runtime.close()


async def test_of_calls_with_one_id_the_last_is_told(client):
    for num_tokens in (2, 3):
        ask = {"prompt": "a", "max_tokens": num_tokens}
        await client.post(COMPLETIONS, json=ask, headers={"X-Request-Id": "same"})
    assert (await client.get("/v1/requests/same")).json()["choices"][0]["completion_tokens"] == 3


async def test_without_a_journal_nothing_is_told():
    runtime = make_runtime(max_explained=0)
    try:
        async with make_client(runtime) as client:
            await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "r"})
            check(await client.get("/v1/requests/r"), 404, "request_not_found")
            assert (await client.get("/v1/requests")).json()["data"] == []
    finally:
        runtime.close()


async def test_the_pool_is_drawn_and_names_are_kept_from_others(narrow):
    gate, server = narrow
    async with httpx.AsyncClient(base_url=server.url, timeout=20, headers=ONE) as client:
        empty = (await client.get("/kv")).json()
        assert empty["map"] == [["null", 1], ["free", 512]]
        assert (empty["states"], empty["waste_ratio"]) == (
            {"free": 512, "cached": 0, "held": 0, "shared": 0, "adapter": 0, "null": 1},
            0,
        )
        ask = {"prompt": PROMPT, "max_tokens": 3}
        task = asyncio.create_task(client.post(COMPLETIONS, json=ask, headers={"X-Request-Id": "mine"}))
        await until(lambda: server.runtime.engine.load().num_running == 1)

        async def draw(num_held: int) -> dict:
            """A drawing is shown for a while."""
            async with asyncio.timeout(20):
                while (shown := (await client.get("/kv")).json())["states"]["held"] != num_held:
                    pass
            return shown

        drawn, theirs = await draw(3), (await client.get("/kv", headers=TWO)).json()
        assert drawn["map"] == [["null", 1], ["held", 3, 0], ["free", 509]]
        mine = {"request": "mine", "choice": 0, "blocks": 3, "tokens": len(PROMPT), "computed_tokens": 0}
        assert drawn["owners"] == [mine]
        assert drawn["waste_ratio"] == round((48 - len(PROMPT)) / 48, 5)
        assert theirs["owners"] == [{"request": None, "blocks": 3}]
        assert (await client.get("/load")).json()["kv_waste_ratio"] == drawn["waste_ratio"]
        gate.open()
        assert (await task).status_code == 200
        await until(lambda: server.runtime.engine.load().num_running == 0)
        after = await draw(0)
        assert sum(after["states"].values()) == after["blocks"] == sum(run[1] for run in after["map"])
        assert after["states"]["cached"] == 3
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as stranger:
        assert (await stranger.get("/kv")).status_code == 401


@pytest.mark.parametrize("path", ["/kv", "/v1/requests", "/v1/requests/r"])
async def test_large_answers_are_made_in_a_thread(client, monkeypatch, path):
    await client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2}, headers={"X-Request-Id": "r"})
    made_by = []

    def dumps(told):
        made_by.append(threading.current_thread())
        return fast_json.dumps(told)

    monkeypatch.setattr(answering, "fast_json", SimpleNamespace(dumps=dumps))
    response = await client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert threading.current_thread() not in made_by
    assert len(made_by) == 1


async def test_the_pool_is_drawn_once_for_all_who_ask_at_once(client, runtime, monkeypatch):
    drawn = []
    draw = runtime.engine.pool_map
    monkeypatch.setattr(runtime, "clock", VirtualClock())
    monkeypatch.setattr(runtime.engine, "pool_map", lambda: (drawn.append(1), draw())[1])
    for elapsed_ns in (0, 50_000_000, 50_000_000):
        runtime.clock.advance(elapsed_ns)
        await asyncio.gather(*(client.get("/kv") for _ in range(5)))
    assert len(drawn) == 2


async def test_a_pool_that_cannot_be_read_is_no_fault_of_the_caller(client, runtime, monkeypatch):
    def fail():
        raise TimeoutError("the engine thread holds the core lock")

    monkeypatch.setattr(runtime.engine, "pool_map", fail)
    check(await client.get("/kv"), 503, "unavailable")


async def test_the_event_loop_does_not_wait_for_the_core_lock(client, runtime, monkeypatch):
    asked_by = []
    monkeypatch.setattr(runtime.metrics, "read_waste", lambda: (asked_by.append(threading.current_thread()), 0.25)[1])
    assert (await client.get("/load")).json()["kv_waste_ratio"] == 0.25
    assert threading.current_thread() not in asked_by


async def test_who_asks_for_a_request_in_vain_is_told_why(client):
    message = (await client.get("/v1/requests/nobody")).json()["error"]["message"]
    assert "--explained-requests" in message
    assert "is running" not in message


async def test_an_ended_choice_that_is_forgotten_does_not_wait():
    gate = GatedExecutor(replace(CAPACITY, max_rows=1))
    with running(gate, max_explained=1) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            body = {"prompt": ["a", "b", "c"], "max_tokens": 2, "ignore_eos": True}
            task = asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "r"}))
            gate.allow(5)
            async with asyncio.timeout(20):
                while True:
                    told = (await client.get("/v1/requests/r")).json()
                    if told.get("choices") and told["choices"][-1]["state"] == "decode":
                        break
            assert [(choice["index"], choice["state"]) for choice in told["choices"]] == [(1, "ended"), (2, "decode")]
            assert told["forgotten_choices"] == 1
            gate.open()
            assert (await task).status_code == 200
