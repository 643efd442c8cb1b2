"""Clients that leave, read slowly or come in crowds. Steps are counted: the executor runs one only when the test allows it."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from penstock import fast_json
from support.server.connections import LONG, load, send
from support.server.harness import CAPACITY, GatedExecutor, running, until

ONE_TOKEN = {"prompt": "hello", "max_tokens": 1}
ONE_ROW = replace(CAPACITY, max_rows=1)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_its_requests_within_one_step(gated, gate, is_streamed, n):
    reader, writer = await send(gated, LONG | {"stream": is_streamed, "n": n})
    await until(lambda: load(gated).num_running == n)
    gate.allow(2)
    if is_streamed:
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: gated.runtime.bridge.num_open_requests == 0)
    num_steps = gate.num_steps
    gate.allow()
    await until(lambda: load(gated).num_running == 0)
    assert gate.num_steps <= num_steps + 2
    await until(lambda: gate.num_known_requests == n)  # They are forgotten with the next plan, and hold no blocks now.


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_behind", [1, 3])
async def test_a_client_that_leaves_with_requests_behind_ends_the_one_that_runs(gated, gate, is_streamed, num_behind):
    _, writer = await send(gated, LONG | {"stream": is_streamed})
    await until(lambda: load(gated).num_running == 1)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * num_behind)
    await writer.drain()
    connection = next(iter(gated.server.acceptor.connections))
    await until(lambda: len(connection.exchanges) == 1 + num_behind)
    writer.close()
    gate.allow(2)
    await until(lambda: gated.runtime.bridge.num_open_requests == 0)
    gate.open()


async def test_a_client_that_leaves_while_waiting_is_never_run():
    executor = GatedExecutor()
    with running(executor) as server:
        _, first = await send(server, LONG)
        await until(lambda: load(server).num_running == 1)
        _, second = await send(server, LONG)
        await until(lambda: load(server).num_waiting == 1)
        second.close()
        await until(lambda: server.runtime.bridge.num_open_requests == 1)
        executor.allow(3)
        await until(lambda: executor.num_steps == 3)
        assert executor.num_known_requests == 1
        first.close()
        executor.open()


async def test_a_slow_reader_blocks_nobody_and_gets_everything():
    executor = GatedExecutor()
    with running(executor) as server:
        body = {"prompt": "slow", "max_tokens": 2000, "temperature": 0, "stream": True, "logprobs": 20}
        reader, writer = await send(server, body)
        await until(lambda: load(server).num_running == 1)
        executor.open()
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            # The slow one does not read; the engine finishes it, and serves others meanwhile.
            quick = await client.post("/v1/completions", json={"prompt": "quick", "max_tokens": 50})
            assert quick.status_code == 200
            await until(lambda: load(server).num_running == 0)
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += await reader.read(1 << 16)
        writer.close()
        # Counted in the payloads: chunks may have been merged, tokens may not be lost.
        payloads = [fast_json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        assert sum(len(payload["choices"][0]["logprobs"]["tokens"]) for payload in payloads) == 2000


async def test_an_overloaded_server_answers_429_with_the_time_to_wait():
    executor = GatedExecutor(ONE_ROW)
    with running(executor, max_queue=2) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            writers = [(await send(server, LONG))[1]]
            await until(lambda: load(server).num_running == 1)
            for num_waiting in (1, 2):
                writers.append((await send(server, LONG))[1])
                await until(lambda expected=num_waiting: load(server).num_waiting == expected)
            response = await client.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "overloaded"
            assert "queue" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["message"].endswith(f"Try again in {response.headers['retry-after']} s.")
            metrics = (await client.get("/metrics")).text
            assert 'penstock_requests_rejected_total{model="toy",reason="queue_full"} 1.0' in metrics
            for writer in writers:
                writer.close()
            executor.open()
            await until(lambda: load(server).num_running + load(server).num_waiting == 0)
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_burst_on_an_idle_server_fills_its_rows_before_its_queue():
    executor = GatedExecutor(replace(CAPACITY, max_rows=8))
    with running(executor, max_queue=4) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            asks = [asyncio.create_task(client.post("/v1/completions", json=ONE_TOKEN)) for _ in range(20)]
            await until(lambda: sum(ask.done() for ask in asks) == 8)
            executor.open()
            assert sorted([(await ask).status_code for ask in asks]) == [200] * 12 + [429] * 8


async def test_a_burst_cannot_overshoot_the_bound():
    """Long prompts are tokenised in threads: while that lasts they count as waiting."""
    executor = GatedExecutor(ONE_ROW)
    with running(executor, max_queue=4) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20, limits=httpx.Limits(max_connections=40)) as client:
            blocker = (await send(server, LONG))[1]
            await until(lambda: load(server).num_running == 1)
            body = {"prompt": "z" * 6000, "truncate_prompt_tokens": 5, "max_tokens": 1}
            asks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(20)]
            await until(lambda: sum(ask.done() for ask in asks) == 16)
            await until(lambda: load(server).num_waiting == 4)
            blocker.close()
            executor.open()
            statuses = sorted([(await ask).status_code for ask in asks])
            assert statuses == [200] * 4 + [429] * 16


async def test_requests_on_one_kept_connection_do_not_disturb_each_other(live):
    async with httpx.AsyncClient(base_url=live.url, timeout=20, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(5):
            response = await client.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3})
            assert response.text.endswith("data: [DONE]\n\n")
            assert (await client.post("/v1/completions", json={"prompt": "a", "temperature": 7})).status_code == 400
    assert live.runtime.bridge.num_open_requests == 0


async def test_only_the_owner_can_cancel(gated, gate):
    async with httpx.AsyncClient(base_url=gated.url, timeout=20) as client:
        headers = {"X-Request-Id": "shared", "X-Tenant": "alice"}
        ask = asyncio.create_task(client.post("/v1/completions", json=LONG, headers=headers))
        await until(lambda: load(gated).num_running == 1)
        for tenant in ({}, {"X-Tenant": "bob"}):
            assert (await client.delete("/v1/requests/shared", headers=tenant)).status_code == 404
        assert (await client.delete("/v1/requests/cmpl-shared", headers={"X-Tenant": "alice"})).status_code == 200
        gate.allow(2)
        assert (await ask).status_code == 499


async def test_one_id_for_several_calls_is_no_conflict(live):
    async with httpx.AsyncClient(base_url=live.url, timeout=20) as client:
        headers = {"X-Request-Id": "trace"}
        asks = [client.post("/v1/completions", json={"prompt": "a"}, headers=headers) for _ in range(5)]
        responses = await asyncio.gather(*asks)
        assert [response.status_code for response in responses] == [200] * 5
        assert {response.headers["x-request-id"] for response in responses} == {"trace"}
