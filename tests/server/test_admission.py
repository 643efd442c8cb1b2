"""The door over HTTP: which check refused and when to come back, limits of time and of tenants, targets that are counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from penstock.admission.door import AdmissionLimits
from penstock.config import ServerConfig
from penstock.types.tenant_limits import TenantLimits
from support.server.admission import ONE_ROW, Held
from support.server.harness import (
    CAPACITY,
    GatedExecutor,
    JumpingClock,
    make_client,
    make_runtime,
    make_text_runtime,
    running,
    until,
)

BODY = {"prompt": "abc", "max_tokens": 4, "temperature": 0}


def check(response: httpx.Response, status: int, code: str, *words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    for word in words:
        assert word in error["message"]


async def metric(client: httpx.AsyncClient, line: str) -> float:
    text = (await client.get("/metrics")).text
    return next((float(found.split()[-1]) for found in text.splitlines() if found.startswith(f"penstock_{line}")), 0.0)


async def test_a_tenant_may_run_so_many_and_others_go_on():
    async with Held(tenant=TenantLimits(max_concurrent=1)) as held:
        again = asyncio.create_task(held.client.post("/v1/completions", json=BODY, headers={"X-Tenant": "acme"}))
        await until(lambda: held.server.runtime.engine.load().num_waiting == 1)
        refused = await held.client.post("/v1/completions", json=BODY, headers={"X-Tenant": "acme"})
        check(refused, 429, "overloaded", "tenant_concurrency", "at most 1")
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        other = asyncio.create_task(held.client.post("/v1/completions", json=BODY, headers={"X-Tenant": "other"}))
        await until(lambda: held.server.runtime.engine.load().num_waiting == 2)
        held.executor.open()
        assert (await again).status_code == (await other).status_code == 200
        assert (await held.client.post("/v1/completions", json=BODY, headers={"X-Tenant": "acme"})).status_code == 200
        assert await metric(held.client, 'requests_rejected_total{model="toy",reason="tenant_concurrency"}') == 1


async def test_the_key_names_the_tenant():
    runtime = make_runtime(limits=AdmissionLimits(tenant=TenantLimits(tokens_per_minute=40)))
    try:
        async with make_client(runtime, api_keys=("one", "two")) as client:

            async def ask(key: str) -> httpx.Response:
                body = {"prompt": "a" * 20, "max_tokens": 16, "ignore_eos": True}
                return await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

            assert (await ask("one")).status_code == 200
            refused = await ask("one")
            check(refused, 429, "overloaded", "tenant_tokens", "40 tokens per minute")
            assert 20 <= int(refused.headers["retry-after"]) <= 60
            assert "one" not in refused.json()["error"]["message"].split()
            assert (await ask("two")).status_code == 200
    finally:
        runtime.close()


async def test_choices_and_beams_take_their_prompt_from_the_tenants_tokens_once():
    runtime = make_runtime(limits=AdmissionLimits(tenant=TenantLimits(tokens_per_minute=400)))
    prompt = [*range(100)]
    body = {"prompt": prompt, "n": 3, "max_tokens": 4, "ignore_eos": True}
    try:
        async with make_client(runtime) as client:
            for fields in ({}, {"use_beam_search": True}):
                assert (await client.post("/v1/completions", json=body | fields)).status_code == 200
            refused = await client.post("/v1/completions", json=body | {"prompt": [prompt] * 3, "n": 1})
            check(refused, 429, "overloaded", "tenant_tokens")
    finally:
        runtime.close()


async def test_a_truncated_prompt_counts_as_what_is_left_of_it():
    runtime = make_runtime(limits=AdmissionLimits(tenant=TenantLimits(tokens_per_minute=400)))
    try:
        async with make_client(runtime) as client:
            for prompt in ("a" * 4000, ["a" * 1500] * 2):
                body = {"prompt": prompt, "truncate_prompt_tokens": 50, "max_tokens": 4, "ignore_eos": True}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert runtime.admission.lengths.prompt_tokens(400) == 100, "nothing is learned from what was cut"
    finally:
        runtime.close()


@pytest.mark.parametrize("trusts", [False, True])
async def test_with_keys_the_tenant_header_counts_only_if_it_is_trusted(trusts):
    runtime = make_runtime(limits=AdmissionLimits(tenant=TenantLimits(tokens_per_minute=40)))
    try:
        async with make_client(runtime, api_keys=("one",), trust_tenant_header=trusts) as client:
            statuses = []
            for idx in range(3):
                headers = {"Authorization": "Bearer one", "X-Tenant": f"t{idx}"}
                body = {"prompt": "a" * 20, "max_tokens": 16, "ignore_eos": True}
                statuses.append((await client.post("/v1/completions", json=body, headers=headers)).status_code)
        assert statuses == ([200, 200, 200] if trusts else [200, 429, 429])
    finally:
        runtime.close()


async def test_kv_headroom_is_named():
    async with Held(kv_headroom=0.5, slo_ttft_ns=10**12) as held:
        body = {"prompt": "a" * 2000, "max_tokens": 40, "ignore_eos": True}
        waiting = asyncio.create_task(held.client.post("/v1/completions", json=body))
        await until(lambda: held.server.runtime.engine.load().num_waiting == 1)
        huge = {"prompt": ["b" * 2000] * 8, "max_tokens": 40}
        check(await held.client.post("/v1/completions", json=huge), 429, "overloaded", "kv_headroom", "blocks")
        held.executor.open()
        assert (await waiting).status_code == 200


async def test_by_default_more_than_the_kv_cache_holds_waits_for_its_turn():
    executor = GatedExecutor(replace(CAPACITY, max_rows=64, num_blocks=200))
    with running(executor) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            body = {"prompt": "a" * 400, "max_tokens": 40, "ignore_eos": True}
            calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(32)]
            await until(lambda: server.runtime.engine.load().num_running >= 1)
            load = server.runtime.engine.load()
            assert load.num_blocks_total < len(calls) * 400 // CAPACITY.block_size, "they need more memory than there is"
            executor.open()
            assert [(await call).status_code for call in calls] == [200] * len(calls)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    async with Held() as held:
        held.server.runtime.admission.pace._step_ns = 5e6  # as was measured on a slower machine
        body = BODY | {"max_tokens": 1000, "ignore_eos": True}
        refused = await held.client.post("/v1/completions", json=body, headers={"X-Deadline-Ms": "400"})
        check(refused, 408, "deadline_exceeded", "can't be met", "ms are left")
        assert refused.headers["x-should-retry"] == "false"
        assert await metric(held.client, 'requests_rejected_total{model="toy",reason="deadline"}') == 1


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {"prompt": "a" * 10_000}, "context_length"),
        ("/v1/completions", BODY | {"structured_outputs": {"regex": "("}}, "invalid"),
        ("/v1/embeddings", {"input": "a" * 10_000}, "context_length"),
    ],
)
async def test_a_call_that_is_refused_behind_the_door_is_counted(path, body, reason, tmp_path):
    (keys := tmp_path / "keys.toml").write_text('[[keys]]\nname = "acme"\nkey = "secret"\n')
    runtime = make_text_runtime() if "input" in body else make_runtime()
    runtime.metrics.tenants = frozenset({"acme"})
    try:
        async with make_client(runtime, api_keys_file=str(keys)) as client:
            client.headers["Authorization"] = "Bearer secret"
            assert (await client.post(path, json=body)).status_code == 400
            assert await metric(client, f'requests_rejected_total{{model="toy",reason="{reason}"}}') == 1
            assert runtime.metrics.tenant_requests["acme", "rejected"] == 1
    finally:
        runtime.close()


@pytest.mark.parametrize("source", ["header", "setting"])
@pytest.mark.parametrize(
    ("header", "setting", "words"),
    [
        ("X-Queue-Timeout-Ms", "queue_timeout_s", "not started within the 20000 ms"),
        ("X-First-Token-Timeout-Ms", "first_token_timeout_s", "No token was generated within 20000 ms"),
        ("X-Deadline-Ms", "request_timeout_s", "did not finish within its deadline of 20000 ms"),
    ],
)
async def test_who_waits_too_long_is_told_which_limit_that_was(source, header, setting, words):
    headers = {header: "20000"} if source == "header" else {}
    executor, clock = GatedExecutor(ONE_ROW), JumpingClock()
    config = ServerConfig(port=0, shutdown_timeout_s=0.0, **({setting: 20.0} if source == "setting" else {}))
    with running(executor, config=config, clock=clock) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            slow = {"X-Queue-Timeout-Ms": "60000", "X-First-Token-Timeout-Ms": "60000", "X-Deadline-Ms": "60000"}
            first = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 1000}, headers=slow))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            ask = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=headers))
            # Before the first step has ended nothing is known by which the door could refuse it at once.
            await until(lambda: server.runtime.engine.load().num_waiting == 1)
            clock.offset_ns = 30_000_000_000
            while not ask.done():  # it is looked for after a step
                executor.allow()
                await asyncio.sleep(0.005)
            check(await ask, 408, "deadline_exceeded", words)
            first.cancel()
            executor.open()


@pytest.mark.parametrize("header", ["X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms"])
@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["abc", "def"]}, {"n": 2, "stream": True}])
async def test_limits_of_a_wait_are_those_of_a_calls_first_choice(body, header):
    executor, clock = GatedExecutor(ONE_ROW), JumpingClock()
    with running(executor, config=ServerConfig(port=0, shutdown_timeout_s=0.0), clock=clock) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = asyncio.create_task(client.post("/v1/completions", json=BODY | body, headers={header: "20000"}))
            began_ns = clock.now_ns()
            executor.allow()
            await until(lambda: server.runtime.engine.load().served_ns > began_ns)
            clock.offset_ns = 30_000_000_000
            executor.open()
            answer = await ask
            assert answer.status_code == 200
            assert "deadline_exceeded" not in answer.text


async def test_targets_are_counted_by_whether_they_were_met():
    runtime = make_runtime(limits=AdmissionLimits(slo_ttft_ns=60_000_000_000))
    runtime.metrics.slo_ttft_ns = 60_000_000_000
    try:
        async with make_client(runtime) as client:
            headers = {"X-SLO-TTFT-Ms": "60000", "X-SLO-ITL-Ms": "60000"}
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert await metric(client, 'slo_attainment_total{met="true",model="toy",slo="ttft"}') == 2
            assert await metric(client, 'slo_attainment_total{met="true",model="toy",slo="itl"}') == 1
            assert await metric(client, 'slo_attainment_total{met="false",model="toy",slo="itl"}') == 0
            assert await metric(client, 'slo_attainment_total{met="true",model="toy",slo="ttft_asked"}') == 0, "it is the same"
    finally:
        runtime.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_counts_once_for_a_target_however_many_answers_it_has(stream):
    executor, clock = GatedExecutor(ONE_ROW), JumpingClock()
    with running(executor, config=ServerConfig(port=0, shutdown_timeout_s=0.0), clock=clock) as server:
        server.runtime.metrics.slo_ttft_ns = 60_000_000_000
        body = BODY | {"prompt": ["abc", "def"], "n": 2, "stream": stream}
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            late = asyncio.create_task(client.post("/v1/completions", json=body, headers={"X-First-Token-Timeout-Ms": "20000"}))
            await until(lambda: server.runtime.engine.load().num_waiting)
            clock.offset_ns = 30_000_000_000
            executor.open()
            assert "deadline_exceeded" in (await late).text
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert server.runtime.metrics.slo == {("ttft", True): 1, ("ttft", False): 1}


async def test_a_target_that_was_missed_is_counted_so():
    executor = GatedExecutor(ONE_ROW)
    with running(executor) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = asyncio.create_task(
                client.post("/v1/completions", json=BODY, headers={"X-SLO-TTFT-Ms": "1", "X-SLO-ITL-Ms": "1"})
            )
            await until(lambda: server.runtime.engine.load().num_running == 1)
            while not ask.done():
                await asyncio.sleep(0.005)
                executor.allow()
            assert (await ask).status_code == 200
            assert await metric(client, 'slo_attainment_total{met="false",model="toy",slo="ttft_asked"}') == 1
            assert await metric(client, 'slo_attainment_total{met="false",model="toy",slo="ttft"}') == 0, "the server has none"
            assert await metric(client, 'slo_attainment_total{met="false",model="toy",slo="itl"}') == 1
