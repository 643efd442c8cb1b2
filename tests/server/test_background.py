"""Background requests: the server alone can ask for them, by a key of the scope."""

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.serve.app import create_app
from penstock.serve.asking import BACKGROUND_KEY
from support.deployments import deployment_of
from support.server.harness import make_runtime, make_text_runtime

QUESTIONS = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a", "model": "toy"}),
]


@pytest.mark.parametrize(("path", "body"), QUESTIONS)
@pytest.mark.parametrize("in_background", [False, True])
async def test_only_the_scope_makes_a_request_background(monkeypatch, path, body, in_background):
    runtime = make_text_runtime() if "embeddings" in path else make_runtime()
    entered, enter_more = [], runtime.admission.enter_more
    monkeypatch.setattr(
        runtime.admission,
        "enter_more",
        lambda place, requests, now_ns: (entered.extend(requests), enter_more(place, requests, now_ns)),
    )
    app = create_app(deployment_of(runtime), ServerConfig(ignore_unknown_parameters=True))

    async def as_server(scope, receive, send):
        await app({**scope, BACKGROUND_KEY: True} if in_background else scope, receive, send)

    claims = {BACKGROUND_KEY: "1", "X-Background": "1"}  # headers that mean nothing
    async with httpx.AsyncClient(transport=httpx.ASGITransport(as_server), base_url="http://toy", headers=claims) as client:
        answer = await client.post(path, json=body | {"background": True, BACKGROUND_KEY: True})
    runtime.close()
    assert answer.status_code == 200
    assert [request.background for request in entered] == [in_background]
