"""The first question that anybody asks, through the clients that people use."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from support.e2e.process import CHAT, MODEL, RealServer

pytestmark = pytest.mark.model

MESSAGES = [{"role": "user", "content": "Name the capital of France."}]
ASK = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
BEGIN = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: RealServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*", "--max-time", "60", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=70, check=True).stdout


@NEEDS_CURL
def test_curl(server: RealServer) -> None:
    answer = json.loads(curl(f"{server.url}{CHAT}", "--json", json.dumps(ASK)))
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@NEEDS_CURL
def test_curl_streams(server: RealServer) -> None:
    lines = curl("--no-buffer", f"{server.url}{CHAT}", "--json", json.dumps({**ASK, "stream": True})).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if not line.startswith(":")]
    assert "Paris" in "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@NEEDS_CURL
@pytest.mark.parametrize("is_streamed", [False, True])
def test_llama_cpps_words(server: RealServer, is_streamed: bool) -> None:
    body = {"prompt": BEGIN["prompt"], "n_predict": 40, "temperature": 0, "stop": ["."], "n_probs": 2, "stream": is_streamed}
    answer = curl("--no-buffer", f"{server.url}/completion", "--json", json.dumps(body))
    *pieces, last = [json.loads(event.removeprefix("data: ")) for event in answer.split("\n\n") if event[:1] not in ("", ":")]
    assert "".join(piece["content"] for piece in (*pieces, last)) == " Paris"
    assert (last["stop_type"], last["stopping_word"], last["tokens_predicted"]) == ("word", ".", 2)
    first = (*pieces, last)[0]["completion_probabilities"][0]
    assert (first["token"], bytes(first["bytes"]), len(first["top_logprobs"])) == (" Paris", b" Paris", 2)


@NEEDS_CURL
def test_a_token_that_is_banned_never_comes(server: RealServer) -> None:
    body = {"prompt": BEGIN["prompt"], "n_predict": 8, "temperature": 0, "logit_bias": [[" Paris", False]]}
    assert "Paris" not in json.loads(curl(f"{server.url}/completion", "--json", json.dumps(body)))["content"]


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_chat_streams(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(**BEGIN)
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens == 8
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**BEGIN, stream=True))
    assert text == answer.choices[0].text


async def test_openai_async(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(**ASK)
    assert "Paris" in answer.choices[0].message.content
    chunks = await async_client.chat.completions.create(**ASK, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    assert text == answer.choices[0].message.content


async def test_openai_async_completion(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.completions.create(**BEGIN)
    assert "Paris" in answer.choices[0].text
    chunks = await async_client.completions.create(**BEGIN, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in chunks]) == answer.choices[0].text


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
