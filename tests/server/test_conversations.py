"""Conversations over HTTP: the fields that name one, and what is told of a history that came back otherwise."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from penstock.testing import HashExecutor
from support.server.harness import CAPACITY, make_client, make_runtime

SMALL = replace(CAPACITY, num_blocks=41)
"""Room for 640 tokens."""
HISTORY = "What a conversation begins with, as a long prompt does. " * 4

NAMES = [
    ("/v1/completions", {"prompt": HISTORY, "prompt_cache_key": "mine"}),
    ("/v1/completions", {"prompt": HISTORY, "user": "mine"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HISTORY}], "prompt_cache_key": "mine"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": HISTORY}], "metadata": {"user_id": "mine"}}),
    ("/v1/responses", {"input": HISTORY, "prompt_cache_key": "mine"}),
]


async def hit_tokens(client, path, body, tenant=""):
    """Tokens of the prompt that were found in the cache, as the explanation tells them."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    headers = {"X-Request-Id": "asked", "X-Tenant": tenant} if tenant else {"X-Request-Id": "asked"}
    answer = await client.post(path, json={"model": "toy", limit: 2, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    told = await client.get(f"/v1/requests/{answer.headers['X-Request-Id']}", headers=headers)
    return told.json()["choices"][0]["prefix"]


async def flood(client):
    for idx in range(5):
        await client.post("/v1/completions", json={"model": "toy", "prompt": f"{idx} is asked aside" * 10, "max_tokens": 2})


@pytest.mark.parametrize(("path", "body"), NAMES, ids=lambda value: value if isinstance(value, str) else list(value)[-1])
async def test_a_conversation_that_the_client_names_outlasts_others(path, body):
    unnamed = {key: value for key, value in body.items() if key not in ("prompt_cache_key", "user", "metadata")}
    for given, is_kept in ((unnamed, False), (body, True)):
        with closing(make_runtime(HashExecutor(SMALL))) as runtime:
            async with make_client(runtime) as client:
                await hit_tokens(client, path, given)
                await flood(client)
                found = await hit_tokens(client, path, given)
                assert (found["because"] == "whole") == is_kept


async def test_no_tenant_names_the_conversation_of_another():
    """A longer prompt under the same name would else make this one a request that is asked aside."""
    with closing(make_runtime(HashExecutor(SMALL))) as runtime:
        async with make_client(runtime) as client:
            path, body = NAMES[0]
            await hit_tokens(client, path, {**body, "prompt": HISTORY * 2}, tenant="other")
            await hit_tokens(client, path, body, tenant="mine")
            await flood(client)
            assert (await hit_tokens(client, path, body, tenant="mine"))["because"] == "whole"


async def test_a_history_without_an_answer_is_told_as_one(client):
    prompt = "the beginning of it all"
    await client.post("/v1/completions", json={"model": "toy", "prompt": prompt, "max_tokens": 30, "ignore_eos": True})
    found = await hit_tokens(client, "/v1/completions", {"prompt": prompt + "\x01 and what is asked next"})
    assert found == {"hit_tokens": len(prompt), "stopped_at": len(prompt), "because": "answer differs"}
