"""An A/B test over HTTP: limits of the door and time-outs go by the arm, and metrics and explanations name it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
from harness import CAPACITY, GatedExecutor, make_client, make_runtime, running, until
from test_admission import JumpingClock

from penstock.config import AbConfig, Config
from penstock.deploy.arms import read_arms

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
ARM_B = {"X-Tenant": "b"}


def arms_of(folder, settings):
    """Tenant `b` is arm B, with these settings."""
    (folder / "b.toml").write_text(settings)
    return read_arms(Config(ab=AbConfig(ab=str(folder / "b.toml"), ab_tenants=("b",))))


async def explained(client, answer, headers=None):
    told = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}", headers=headers)).json()
    return told["choices"][0]


async def test_an_explanation_names_the_arm(tmp_path):
    runtime = make_runtime(arms=arms_of(tmp_path, 'queue_timeout = "9s"\n'))
    async with make_client(runtime) as client:
        for headers, arm in ((None, "A"), (ARM_B, "B")):
            choice = await explained(client, await client.post(COMPLETIONS, json=BODY, headers=headers), headers)
            assert choice["arm"] == arm
            assert choice["summary"].endswith(f"It was in arm {arm} of the A/B test.")
    runtime.close()


async def test_metrics_have_the_arm_as_a_label(tmp_path):
    runtime = make_runtime(arms=arms_of(tmp_path, 'queue_timeout = "9s"\n'))
    async with make_client(runtime) as client:
        for headers in (None, ARM_B, ARM_B):
            assert (await client.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 200
        text = (await client.get("/metrics")).text
    runtime.close()
    assert 'penstock_request_success_total{arm="A",finish_reason="length",model="toy"} 1.0' in text
    assert 'penstock_request_success_total{arm="B",finish_reason="length",model="toy"} 2.0' in text
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency", "queue_time"):
        assert f'penstock_{name}_seconds_count{{arm="B",model="toy"}} 2.0' in text
    assert 'penstock_inter_token_latency_seconds_count{model="toy"}' in text


async def test_without_a_test_nothing_has_an_arm():
    runtime = make_runtime()
    async with make_client(runtime) as client:
        answer = await client.post(COMPLETIONS, json=BODY, headers=ARM_B)
        choice = await explained(client, answer, ARM_B)
        text = (await client.get("/metrics")).text
    runtime.close()
    assert "arm" not in choice
    assert "arm" not in choice["summary"]
    assert "arm=" not in text
    assert 'penstock_request_success_total{finish_reason="length",model="toy"} 1.0' in text


async def test_the_door_refuses_by_arm(tmp_path):
    """One row, which is taken: of arm B one may wait, of arm A 64."""
    executor = GatedExecutor(replace(CAPACITY, max_rows=1))
    refused: list[tuple[str, str, str]] = []
    with running(executor, arms=arms_of(tmp_path, "max_queue = 1\n")) as server:
        server.runtime.on_refused = lambda *told: refused.append(told)
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            calls = [asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "max_tokens": 40}))]
            await until(lambda: server.runtime.engine.load().num_running == 1)
            calls.append(asyncio.create_task(client.post(COMPLETIONS, json=BODY)))
            await until(lambda: server.runtime.engine.load().num_waiting == 1)
            assert (await client.post(COMPLETIONS, json=BODY, headers=ARM_B)).status_code == 429
            calls.append(asyncio.create_task(client.post(COMPLETIONS, json=BODY)))
            await until(lambda: server.runtime.engine.load().num_waiting == 2)
            executor.open()
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 3
            text = (await client.get("/metrics")).text
    assert refused == [("b", "B", "queue_full")]
    assert 'penstock_requests_rejected_total{arm="B",model="toy",reason="queue_full"} 1.0' in text
    assert 'requests_rejected_total{arm="A"' not in text


async def test_targets_and_time_outs_go_by_arm(tmp_path):
    executor = GatedExecutor(replace(CAPACITY, max_rows=1))
    settings, clock = 'queue_timeout = "50s"\nslo_ttft = "1ms"\n', JumpingClock()
    with running(executor, arms=arms_of(tmp_path, settings), clock=clock) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "max_tokens": 40}))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            waiting = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            await until(lambda: server.runtime.engine.load().num_waiting == 1)
            # Nothing was measured yet, so the door lets it in: its time in the queue runs out.
            late = asyncio.create_task(client.post(COMPLETIONS, json=BODY, headers=ARM_B))
            await until(lambda: server.runtime.engine.load().num_waiting == 2)
            clock.offset_ns += 60_000_000_000
            executor.open()
            assert (await late).status_code == 408
            assert [(await call).status_code for call in (first, waiting)] == [200, 200]
            assert (await client.post(COMPLETIONS, json=BODY, headers=ARM_B)).status_code == 200
            text = (await client.get("/metrics")).text
    assert 'penstock_requests_rejected_total{arm="B",model="toy",reason="queue_timeout"} 1.0' in text
    of_b = [line for line in text.splitlines() if line.startswith('penstock_slo_attainment_total{arm="B"') and "ttft" in line]
    of_a = [line for line in text.splitlines() if line.startswith('penstock_slo_attainment_total{arm="A"') and "ttft" in line]
    assert sum(float(line.split()[-1]) for line in of_b) == 2
    assert sum(float(line.split()[-1]) for line in of_a) == 0


async def test_the_user_of_the_body_decides(tmp_path):
    (tmp_path / "b.toml").write_text('queue_timeout = "9s"\n')
    arms = read_arms(Config(ab=AbConfig(ab=str(tmp_path / "b.toml"))))
    runtime = make_runtime(arms=arms)
    async with make_client(runtime) as client:
        for field in ("user", "safety_identifier"):
            for user in ("ann", "ben", "cid", "dan", "eve"):
                choices = [
                    await explained(client, await client.post(COMPLETIONS, json={**BODY, field: user})) for _ in range(2)
                ]
                assert {choice["arm"] for choice in choices} == {arms.arm_of("", user)}
    runtime.close()


async def test_the_name_that_a_client_gives_its_call_decides_nothing(tmp_path):
    (tmp_path / "b.toml").write_text('queue_timeout = "9s"\n')
    runtime = make_runtime(arms=read_arms(Config(ab=AbConfig(ab=str(tmp_path / "b.toml"), ab_by="request"))))
    async with make_client(runtime) as client:
        for _ in range(40):
            assert (await client.post(COMPLETIONS, json=BODY, headers={"X-Request-Id": "mine"})).status_code == 200
        text = (await client.get("/metrics")).text
    runtime.close()
    for arm in "AB":
        assert f'penstock_request_success_total{{arm="{arm}",finish_reason="length",model="toy"}}' in text
