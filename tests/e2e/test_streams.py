"""Many streams at once: each says what it says alone, whoever comes or leaves meanwhile, and the metrics agree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from string import ascii_letters
from typing import Any

import httpx
import pytest

from support.e2e.process import CHAT, COMPLETIONS, GOOD, TIMEOUT_S, Answer, RealServer, stream, stream_async, undisturbed, until

pytestmark = pytest.mark.model

NUM_STREAMS = 32
SENTENCES = (
    "The harbour froze before the last ferry had left.",
    "Nobody in the village could say who had painted the bridge blue.",
    "Eleven geese crossed the field, and the twelfth one waited for us.",
    "My grandmother kept buttons, string and three languages in the same drawer.",
    "The report lists 4,817 errors; most of them are spaces.",
    "When it rains in Trieste, the umbrellas fly south.",
    "def area(width: float, height: float) -> float:\n    return width * height\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "The clock struck thirteen, so we set it back, and it struck again.",
    "First peel the onions, then call your mother, then chop the onions. 🧅",
    "A lighthouse needs a rock, a lamp and somebody who likes to read.",
    "They voted twice, counted three times and agreed on nothing.",
)
QUESTIONS = (
    "Name the capital of France.",
    "Name the first three planets.",
    "Say hello in Spanish.",
    "What is 2 + 2?",
    "Which colour has the sky on a clear day?",
    "Write one sentence about a dog.",
    "What do bees make?",
    "Is ice cold? Answer with one word.",
)


def call(number: int, *, salt: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a stream. Prompts differ from their first token, so that none finds another's in the prefix cache."""
    sampling = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    common = {**sampling, "cache_salt": salt}
    if number % 4 == 0:
        question = QUESTIONS[number // 4]
        return CHAT, {**common, "messages": [{"role": "user", "content": question}], "max_tokens": 16}
    sentences = [SENTENCES[(number + i) % len(SENTENCES)] for i in range(1 + 5 * number % 11)]
    prompt = f"{ascii_letters[number]}. " + " ".join(sentences)
    return COMPLETIONS, {**common, "prompt": prompt, "max_tokens": 3 + number % 9}


def check_words(number: int, answer: Answer) -> None:
    """Usage and finish reason agree with the tokens that came and with what was asked."""
    _, body = call(number, salt="")
    assert answer.is_done
    assert answer.usage["completion_tokens"] == len(answer.token_ids) >= 1
    assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + len(answer.token_ids)
    assert answer.finish_reason == ("length" if len(answer.token_ids) == body["max_tokens"] else "stop")


def num_prompt_tokens(server: RealServer, number: int) -> int:
    _, body = call(number, salt="")
    prompt = {name: body[name] for name in ("prompt", "messages") if name in body}
    return int(server.post("/tokenize", prompt)["count"])


async def test_32_streams_say_what_each_says_alone(server: RealServer) -> None:
    alone = [stream(server.url, *call(number, salt="alone")) for number in range(NUM_STREAMS)]
    assert len({answer.text for answer in alone}) > NUM_STREAMS // 2, "the streams must not all be alike"
    assert {answer.finish_reason for answer in alone} == {"stop", "length"}

    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as client:
        calls = [call(number, salt="together") for number in range(NUM_STREAMS)]
        together = await asyncio.gather(*(stream_async(client, *each) for each in calls))

    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert (other.text, other.token_ids, other.finish_reason) == (one.text, one.token_ids, one.finish_reason), number
        check_words(number, other)
        assert other.usage["prompt_tokens"] == num_prompt_tokens(server, number)
        if number % 4:
            assert other.usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_client_that_leaves_frees_its_place_and_disturbs_nobody(server: RealServer, good: Answer) -> None:
    num_aborted = server.metric("request_success_total", finish_reason="abort")
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        others = [asyncio.create_task(stream_async(client, COMPLETIONS, GOOD)) for _ in range(3)]
        endless = {**GOOD, "prompt": "Once upon a time", "max_tokens": 8000, "stream": True}
        for path, body in ((COMPLETIONS, endless), (CHAT, {**endless, "messages": [{"role": "user", "content": "Hi"}]})):
            body = {name: value for name, value in body.items() if path == COMPLETIONS or name != "prompt"}
            async with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                await anext(response.aiter_lines())
        answers = await asyncio.gather(*others)
    assert [answer.text for answer in answers] == [good.text] * 3
    # Left alone, they would run for a minute.
    until(lambda: server.metric("requests_running") == 0)
    assert server.metric("request_success_total", finish_reason="abort") == num_aborted + 2
    assert server.metric("kv_blocks", state="held") == 0


def test_a_cancelled_stream_ends_with_an_error_and_disturbs_nobody(server: RealServer, good: Answer) -> None:
    body = {**GOOD, "max_tokens": 8000, "request_id": "to-be-cancelled"}
    cancelled: list[int] = []

    def cancel_once() -> None:
        if not cancelled:
            cancelled.append(httpx.delete(f"{server.url}/v1/requests/to-be-cancelled", timeout=TIMEOUT_S).status_code)

    with undisturbed(server, good):
        answer = stream(server.url, COMPLETIONS, body, on_event=cancel_once)
    assert cancelled == [200]
    assert answer.error is not None
    assert answer.error["code"] == "request_cancelled"
    assert not answer.is_done
    assert httpx.delete(f"{server.url}/v1/requests/to-be-cancelled", timeout=TIMEOUT_S).status_code == 404


class Counted:
    """How much the counters of a server have grown since this was made."""

    NAMES = (
        ("request_success_total", {"finish_reason": "stop"}),
        ("request_success_total", {"finish_reason": "length"}),
        ("generation_tokens_total", {}),
        ("prompt_tokens_total", {}),
        ("prompt_tokens_total", {"source": "cached"}),
        ("time_to_first_token_seconds_count", {}),
        ("inter_token_latency_seconds_count", {}),
        ("e2e_request_latency_seconds_count", {}),
    )

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self._before = list(self._read())

    def growth(self) -> list[float]:
        return [now - before for now, before in zip(self._read(), self._before, strict=True)]

    def _read(self) -> Iterator[float]:
        for name, labels in self.NAMES:
            yield self._server.metric(name, **labels)


def test_metrics_count_what_was_done(server: RealServer) -> None:
    until(lambda: server.metric("requests_running") == 0)
    counted = Counted(server)
    prompt = "A prompt that is so long that its beginning fills more than one block of the cache, which a second one finds."
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "cache_salt": "metrics"}
    first, second = (stream(server.url, COMPLETIONS, body) for _ in range(2))
    third = stream(server.url, COMPLETIONS, {**body, "stop_token_ids": [first.token_ids[4]], "max_tokens": 9})
    answers = (first, second, third)
    assert [answer.finish_reason for answer in answers] == ["length", "length", "stop"]

    num_generated = sum(answer.usage["completion_tokens"] for answer in answers)
    num_prompt = sum(answer.usage["prompt_tokens"] for answer in answers)
    num_cached = sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert num_cached == 2 * (first.usage["prompt_tokens"] - 1) > 0
    *others, num_gaps, num_ends = counted.growth()
    assert [*others, num_ends] == [1, 2, num_generated, num_prompt, num_cached, 3, 3]
    assert 3 <= num_gaps <= num_generated - 3  # a step with guesses may give several tokens at once
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0
    assert server.metric("kv_usage_ratio") == 0
