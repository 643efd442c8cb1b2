"""A name that is split between two models, over HTTP: who goes where, under which keys, and what metrics say of both."""

from __future__ import annotations

import pytest

from penstock.deploy.splits import Split
from penstock.testing import HashExecutor
from support.server.harness import CAPACITY, make_client, make_runtime, make_text_runtime

COMPLETIONS = "/v1/completions"
ASK = {"model": "chat", "prompt": "abc", "max_tokens": 2, "temperature": 0}
HALF = [Split(of="chat", to="chat-b", share=0.5)]
BETA = [Split(of="chat", to="chat-b", tenants=frozenset(["beta"]))]
USERS = [f"u{number}" for number in range(20)]
MESSAGES = [{"role": "user", "content": "hi"}]
KEYS = """
[[keys]]
name = "alpha"
key = "alphas-secret"
models = ["chat"]

[[keys]]
name = "beta"
key = "betas-secret"
models = ["chat"]
"""


@pytest.fixture
def models():
    made = [make_runtime(HashExecutor(CAPACITY), served_names=names, aliases=()) for names in (("chat", "chat-a"), ("chat-b",))]
    yield made
    for one in made:
        one.close()


async def model_of(client, models, body=ASK, path=COMPLETIONS, headers=None):
    """The name of the model that answered."""
    before = [one.uses.num_uses for one in models]
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    [name] = [one.name for one, num_uses in zip(models, before, strict=True) if one.uses.num_uses > num_uses]
    return name


async def test_a_user_stays_with_one_model_and_users_are_on_both(models):
    async with make_client(*models, splits=HALF) as client:
        for field in ("user", "safety_identifier"):
            asked = [[await model_of(client, models, ASK | {field: user}) for _ in range(2)] for user in USERS]
            assert all(first == again for first, again in asked)
            assert {first for first, _ in asked} == {"chat", "chat-b"}


async def test_requests_without_a_user_are_drawn_one_by_one(models):
    async with make_client(*models, splits=HALF) as client:
        bodies = (ASK, {name: value for name, value in ASK.items() if name != "model"})
        for body in bodies:
            assert {await model_of(client, models, body) for _ in range(20)} == {"chat", "chat-b"}
        again = [await model_of(client, models, headers={"X-Request-Id": "mine"}) for _ in range(5)]
        assert len(set(again)) == 1, "an attempt that is repeated has the model of the first"


async def test_other_names_of_the_models_are_not_split(models):
    async with make_client(*models, splits=HALF) as client:
        for _ in range(10):
            assert await model_of(client, models, ASK | {"model": "chat-a"}) == "chat"
            assert await model_of(client, models, ASK | {"model": "chat-b"}) == "chat-b"
        assert (await client.post(COMPLETIONS, json=ASK | {"model": "unknown"})).status_code == 404
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["chat", "chat-a", "chat-b"]


async def test_a_tenant_is_answered_by_its_model_in_every_api(models):
    of_beta = {"X-Tenant": "beta"}
    chat = {"model": "chat", "messages": MESSAGES, "max_tokens": 2}
    async with make_client(*models, splits=BETA) as client:
        for path, body in (
            (COMPLETIONS, ASK),
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"model": "chat", "input": "hi", "max_output_tokens": 16}),
            ("/v1/messages", chat),
            ("/completion", {"model": "chat", "prompt": "hi", "n_predict": 2}),
            ("/api/chat", {"model": "chat", "messages": MESSAGES, "stream": False, "options": {"num_predict": 2}}),
        ):
            for headers in (None, of_beta):
                assert (await client.post(path, json=body, headers=headers)).status_code == 200
        text = (await client.get("/metrics")).text
    for model in ("chat", "chat-b"):
        counts = [line for line in text.splitlines() if "request_success_total" in line and f'model="{model}"' in line]
        assert sum(float(line.split()[-1]) for line in counts) == 6


async def test_users_of_anthropics_api_are_drawn_by_their_ids(models):
    body = {"model": "chat", "messages": MESSAGES, "max_tokens": 2}
    async with make_client(*models, splits=HALF) as client:
        for user in USERS:
            answered = await model_of(client, models, body | {"metadata": {"user_id": user}}, "/v1/messages")
            assert answered == await model_of(client, models, ASK | {"user": user})


async def test_a_key_that_opens_the_name_opens_its_parts(models, tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    async with make_client(*models, splits=BETA, api_keys_file=str(tmp_path / "keys.toml")) as client:
        for name, model in (("alpha", "chat"), ("beta", "chat-b")):
            headers = {"Authorization": f"Bearer {name}s-secret"}
            assert await model_of(client, models, headers=headers) == model
            assert (await client.post(COMPLETIONS, json=ASK | {"model": "chat-b"}, headers=headers)).status_code == 404


async def test_a_model_that_is_away_is_told_by_its_own_name(models):
    async with make_client(*models, splits=BETA, load_timeout_s=0.1) as client:
        models[1].leave()
        assert await model_of(client, models) == "chat"
        refused = await client.post(COMPLETIONS, json=ASK, headers={"X-Tenant": "beta"})
    assert refused.status_code == 503
    assert "chat-b" in refused.json()["error"]["message"]


async def test_encoders_are_split_too():
    models = [make_text_runtime(served_names=(name,), aliases=()) for name in ("chat", "chat-b")]
    try:
        async with make_client(*models, splits=HALF) as client:
            body, found = {"model": "chat", "input": "some text"}, set()
            for user in USERS:
                asked = [await model_of(client, models, body | {"user": user}, "/v1/embeddings") for _ in range(2)]
                assert len(set(asked)) == 1
                found.update(asked)
        assert found == {"chat", "chat-b"}
    finally:
        for one in models:
            one.close()
