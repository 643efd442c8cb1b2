"""Background requests: the server alone can ask for them, by a key of the scope."""

import time

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.serve.app import create_app
from penstock.serve.course import COURSE_KEY, Course
from support.deployments import deployment_of
from support.server.harness import GatedExecutor, make_runtime, make_text_runtime, wait_until
from support.server.jobs import begun, ended, line, serving

QUESTIONS = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a", "model": "toy"}),
]


@pytest.mark.parametrize(("path", "body"), QUESTIONS)
@pytest.mark.parametrize("in_background", [False, True])
async def test_only_the_scope_makes_a_request_background(monkeypatch, path, body, in_background):
    runtime = make_text_runtime() if "embeddings" in path else make_runtime()
    entered, add_some_requests = [], runtime.admission.add_some_requests
    monkeypatch.setattr(
        runtime.admission,
        "add_some_requests",
        lambda entering, requests, now_ns, **kw: (
            entered.extend(requests),
            add_some_requests(entering, requests, now_ns, **kw),
        ),
    )
    app = create_app(deployment_of(runtime), ServerConfig(ignore_unknown_parameters=True))

    async def as_server(scope, receive, send):
        await app({**scope, COURSE_KEY: Course(is_background=True)} if in_background else scope, receive, send)

    claims = {COURSE_KEY: "1", "X-Background": "1"}  # headers that mean nothing
    async with httpx.AsyncClient(transport=httpx.ASGITransport(as_server), base_url="http://toy", headers=claims) as client:
        answer = await client.post(path, json=body | {"background": True, COURSE_KEY: True})
    runtime.close()
    assert answer.status_code == 200
    assert [request.background for request in entered] == [in_background]


def test_a_line_waits_as_long_as_it_takes(tmp_path):
    """Neither the server's limits of time nor its key's of requests are for lines of batches."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "job"\nkey = "secret"\nrequests_per_minute = 1\nmax_concurrent = 1\n')
    executor = GatedExecutor()
    limits = {"request_timeout_s": 0.05, "queue_timeout_s": 0.05, "first_token_timeout_s": 0.05}
    with serving(tmp_path / "jobs", executor, api_keys_file=str(keys), **limits) as server:
        client = server.client("secret")
        batch = begun(client, [line(str(number)) for number in range(10)])
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        time.sleep(0.3)
        executor.open()
        done = ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (10, 0)


def test_a_job_does_not_push_out_what_people_ask_about(tmp_path):
    with serving(tmp_path / "jobs") as server:
        httpx.post(f"{server.url}/v1/completions", json=QUESTIONS[0][1], headers={"X-Request-Id": "person"}).raise_for_status()
        batch = begun(server.client(), [line(str(number)) for number in range(150)])  # 100 are remembered
        assert ended(server.client(), batch).request_counts.completed == 150
        assert httpx.get(f"{server.url}/v1/requests/person").status_code == 200
        gone = httpx.get(f"{server.url}/v1/requests/{batch.id}-1")
        assert gone.status_code == 404
        assert "was a line of a batch" in gone.json()["error"]["message"]
