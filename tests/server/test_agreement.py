"""A cascade by agreement over HTTP: one of the small model's answers, or the large model's if too few say the same."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest

from penstock.calls import in_flight
from penstock.config.routes import AgreementConfig
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.routes import Route
from penstock.engine.ports import OutputChunk
from penstock.routes.prices import Bill, Price
from penstock.serve import answering
from penstock.serve.course import Routed
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import HashModel
from penstock.types.request import FinishReason
from penstock.types.sampling import PARAMETERS
from support.server.harness import (
    CAPACITY,
    CHAT_TEMPLATE,
    END_ID,
    PRINTABLE_MODEL,
    VOCAB_SIZE,
    GatedExecutor,
    make_client,
    make_runtime,
    until,
)
from support.server.tools import CALL, THINKING_TEMPLATE, TOOLS_TEMPLATE, WEATHER, Scripted

CHAT = "/v1/chat/completions"
SAMPLES = 5
BY = AgreementConfig(weak="small", strong="large", samples=SAMPLES, temperature=0.7, least=0.8, part=re.compile("(.)$"))
ROUTE = Route(name="auto", models=("small", "large"), by=BY)
TWO_WORDS = HashModel(vocab_size=VOCAB_SIZE, first_token_id=VOCAB_SIZE - 2)
"""Each token is one of two characters, by the seed. The last one of an answer is compared."""


class SlowExecutor(HashExecutor):
    """Begins a step when the event loop has read the tokens of the last one."""

    bridge = None

    def submit(self, plan):
        while self.bridge is not None and self.bridge._deliveries:
            time.sleep(0.001)
        time.sleep(0.002)
        return super().submit(plan)


def made(small, **fields):
    return [
        make_runtime(small, served_names=("small",), aliases=(), **fields),
        make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("large",), aliases=()),
    ]


@pytest.fixture
def models():
    found = made(HashExecutor(CAPACITY, model=TWO_WORDS))
    yield found
    for one in found:
        one.close()


@pytest.fixture
def gated_models():
    """The small model computes nothing by itself."""
    found = made(GatedExecutor(replace(CAPACITY, max_rows=SAMPLES), model=TWO_WORDS), max_queue=SAMPLES)
    yield found
    found[0].engine._executor.open()
    for one in found:
        one.close()


def body(seed: int, model: str = "auto", **fields: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "Heads?"}], "max_tokens": 6, "seed": seed, **fields}


def said(answer) -> str:
    if "json" in answer.headers["content-type"]:
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def samples(client, seed: int) -> list[str]:
    """The answers that the small model gives if it is asked for all of them."""
    asked = body(seed, "small", n=SAMPLES, temperature=0.7)
    choices = (await client.post(CHAT, json=asked)).json()["choices"]
    return [choice["message"]["content"] for choice in sorted(choices, key=lambda choice: choice["index"])]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_of_those_that_agree_is_the_answer_or_the_large_models(models, stream: bool) -> None:
    kept = Counter()
    async with make_client(*models, routes=[ROUTE]) as client:
        for seed in range(12):
            texts = await samples(client, seed)
            last, count = Counter(text[-1] for text in texts).most_common(1)[0]
            answer = await client.post(CHAT, json=body(seed, stream=stream))
            kept[count >= 4] += 1
            name = "small" if count >= 4 else "large"
            why = f"agreement={count / SAMPLES:.2f}; least=0.80"
            assert answer.headers["x-route"] == f"auto; model={name}; {why}"
            if name == "small":
                assert said(answer) == next(text for text in texts if text[-1] == last)
            else:
                assert said(answer) == said(await client.post(CHAT, json=body(seed, "large")))
        assert min(kept[True], kept[False]) > 0, "both were tried"
        assert all(one.bridge.num_open_requests == 0 for one in models)


async def test_the_client_sees_one_answer_and_its_tokens(models) -> None:
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=0.0))]) as client:
        for path, asked in (
            (CHAT, body(1, logprobs=True, top_logprobs=2)),
            ("/v1/completions", {"model": "auto", "prompt": "Heads?", "max_tokens": 6, "seed": 1}),
        ):
            answer = (await client.post(path, json=asked, headers={"X-Request-Id": "mine"})).json()
            assert [choice["index"] for choice in answer["choices"]] == [0]
            assert answer["usage"]["completion_tokens"] == 6
            told = (await client.get("/v1/requests/mine")).json()
            assert [choice["completion_tokens"] for choice in told["choices"]] == [6]


async def test_cached_tokens_are_those_of_the_first_sample_whichever_is_kept(models) -> None:
    kept = set()
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=0.0))]) as client:
        for seed in range(8):
            asked = {"prompt": chr(97 + seed) * 70, "max_tokens": 6, "seed": seed, "timings_per_token": True}
            for num_cached in (0, 69):
                answer = (await client.post("/v1/completions", json=asked | {"model": "auto"})).json()
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
                times = answer["timings"]
                assert (times["cache_n"], times["prompt_n"]) == (num_cached, 70 - num_cached)
            asked |= {"model": "small", "n": SAMPLES, "temperature": 0.7}
            choices = (await client.post("/v1/completions", json=asked)).json()["choices"]
            kept.add([choice["text"] for choice in choices].index(answer["choices"][0]["text"]))
    assert len(kept) > 1


async def test_a_kept_stream_of_messages_begins_with_the_size_of_the_whole_prompt(models) -> None:
    messages = [{"role": "user", "content": "Heads or tails?"}]
    asked = {"model": "auto", "messages": messages, "max_tokens": 6, "stream": True}
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=0.0))]) as client:
        await client.post("/v1/messages", json=asked)
        again = (await client.post("/v1/messages", json=asked)).text
    at_start, at_end = re.findall(r'"cache_read_input_tokens":(\d+)', again)
    assert int(at_start) == 0 < int(at_end)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/generate", "/completion"])
async def test_it_works_in_each_api(models, path: str, stream: bool) -> None:
    asked = {
        "/v1/responses": {"input": "Heads?", "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": "Heads?"}], "max_tokens": 6},
        "/api/generate": {"prompt": "Heads?", "options": {"num_predict": 6}},
        "/completion": {"prompt": "Heads?", "n_predict": 6},
    }[path]
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=0.0))]) as client:
        answer = await client.post(path, json=asked | {"model": "auto", "stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-route"].startswith("auto; model=small; agreement=")
        assert re.search(r"[}~]{6}", answer.text)


@pytest.mark.parametrize("least", [0.0, 1.01], ids=["kept", "not kept"])
async def test_all_samples_are_paid_for(models, least: float) -> None:
    bill = Bill({"small": Price(1.0, 4.0), "large": Price(16.0, 64.0)})
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=least), bill=bill)]) as client:
        usage = (await client.post(CHAT, json=body(1))).json()["usage"]
    tokens, price = (usage["prompt_tokens"], usage["completion_tokens"]), bill.prices["small"]
    if least:  # nothing is kept, and the first end says so: others may lack some tokens
        assert price.of(tokens[0], 6) <= bill.paid["small"] <= price.of(tokens[0], SAMPLES * 6)
    else:
        assert bill.paid["small"] == pytest.approx(price.of(tokens[0], SAMPLES * 6))
    assert bill.paid.get("large", 0.0) == pytest.approx(bill.prices["large"].of(*tokens) if least else 0.0)
    assert bill.full == pytest.approx(bill.prices["large"].of(*tokens))


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_what_is_not_one_answer_goes_to_the_large_model(models, fields: dict) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        answer = await client.post(CHAT, json=body(1, **fields))
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=large; not one answer alone")


async def test_the_small_model_answers_if_a_large_one_elsewhere_can_not(models) -> None:
    route = replace(ROUTE, models=("small", "far"), by=replace(BY, least=1.01))
    upstream = UpstreamConfig(name="far", url="http://localhost:9/v1", model="m")  # nobody listens there
    async with make_client(models[0], routes=[route], upstreams=[upstream]) as client:
        answer = await client.post(CHAT, json=body(1))
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=small; after=far")
        for one in client.app.state.parts.upstreams.values():
            await one.close()


@pytest.mark.parametrize("leaves", [True, False])
async def test_whoever_leaves_or_cancels_ends_all_samples(gated_models, leaves: bool) -> None:
    small, large = gated_models
    async with make_client(*gated_models, routes=[ROUTE]) as client:
        asked = asyncio.create_task(client.post(CHAT, json=body(1), headers={"X-Request-Id": "mine"}))
        await until(lambda: small.engine.load().num_waiting + small.engine.load().num_running == SAMPLES)
        if leaves:
            asked.cancel()
        else:
            assert (await client.delete("/v1/requests/mine")).status_code == 200
        small.engine._executor.open()
        if not leaves:
            assert "cancelled" in (await asked).text
        await until(lambda: small.engine.load().num_waiting + small.engine.load().num_running == 0)
        assert small.bridge.num_open_requests == 0
        assert large.uses.num_uses == 0


async def test_tokens_for_a_client_that_leaves_are_paid_for(gated_models, monkeypatch: pytest.MonkeyPatch) -> None:
    small, opened, run = gated_models[0], [], answering.run

    async def noted(call, in_flight):
        opened.append(await run(call, in_flight))
        return opened[-1]

    monkeypatch.setattr(answering, "run", noted)
    bill = Bill({"small": Price(1.0, 4.0), "large": Price(16.0, 64.0)})
    async with make_client(*gated_models, routes=[replace(ROUTE, bill=bill)]) as client:
        asked = asyncio.create_task(client.post(CHAT, json=body(1)))
        await until(lambda: small.engine.load().num_waiting + small.engine.load().num_running == SAMPLES)
        small.engine._executor.allow(5)
        [call] = opened
        await until(lambda: call.num_counted_tokens)
        asked.cancel()
        await until(lambda: bill.paid)
        assert bill.paid == {"small": pytest.approx(bill.prices["small"].of(call.num_prompt_tokens, call.num_counted_tokens))}
        small.engine._executor.open()


def test_what_has_no_tokens_costs_nothing() -> None:
    bill = Bill({"small": Price(1.0, 4.0)})
    assert Routed("auto", "small", bill=bill).pay_discarded(9, 0).discarded_usd == 0.0
    assert not bill.paid


async def test_the_samples_differ_whatever_the_request_allows(models, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], answering.run

    def noted(call, in_flight):
        seen.append(call.sampling)
        return run(call, in_flight)

    monkeypatch.setattr(answering, "run", noted)
    narrow = {name: one.kind(0.1) or 1 for name, one in PARAMETERS.items() if one.narrows}
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=1.01))]) as client:
        assert (await client.post(CHAT, json=body(1, temperature=0, **narrow))).status_code == 200
    own, of_client = seen
    assert own == replace(of_client, temperature=0.7, **{name: PARAMETERS[name].neutral for name in narrow})
    assert {name: getattr(of_client, name) for name in narrow} == narrow


@pytest.mark.parametrize(("least", "name"), [(0.2, "small"), (1.0, "large")])
async def test_samples_end_as_soon_as_they_can_change_nothing(least: float, name: str) -> None:
    """One answer is enough where one of five must say so, and two different ones where all must say the same."""
    executor = SlowExecutor(CAPACITY, model=replace(PRINTABLE_MODEL, eos_token_id=END_ID, eos_period=30))
    models = made(executor)
    executor.bridge = models[0].bridge
    bill = Bill({"small": Price(0.0, 1e6), "large": Price(0.0, 0.0)})  # a dollar for each token
    route = replace(ROUTE, by=replace(BY, least=least, part=None), bill=bill)
    try:
        async with make_client(*models, routes=[route]) as client:
            asked = body(3, max_tokens=200)
            choices = (await client.post(CHAT, json=asked | {"model": "small", "n": SAMPLES, "temperature": 0.7})).json()
            answer = await client.post(CHAT, json=asked)
        lengths = sorted(len(choice["message"]["content"]) for choice in choices["choices"])
        assert answer.json()["model"] == name
        if name == "small":
            assert len(said(answer)) == lengths[0] < lengths[-1], "the first that has ended"
        assert bill.paid["small"] < choices["usage"]["completion_tokens"], "the others were not computed to their ends"
        assert all(one.bridge.num_open_requests == 0 for one in models)
        await until(lambda: models[0].engine.load().num_running == 0)
    finally:
        for one in models:
            one.close()


def fail_first(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many answers of each call fail."""
    whole = in_flight.RunningCall.whole

    async def with_failures(call, is_enough):
        chunks = await whole(call, is_enough)
        for chunk in chunks[:number]:
            chunk.finish_reason = FinishReason.ERROR
        return chunks

    monkeypatch.setattr(in_flight.RunningCall, "whole", with_failures)


async def test_a_sample_that_fails_says_nothing(models, monkeypatch) -> None:
    fail_first(1, monkeypatch)
    async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=0.4, part=re.compile("()")))]) as client:
        answer = await client.post(CHAT, json=body(1))
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=small; agreement=0.80; least=0.40")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking(Scripted):
    """Says a text with a letter that depends on the seed in place of `@`."""

    def sample(self, value, sampling, num_generated, mask=None):
        text = self.text.replace("@", chr(97 + sampling.seed % 26))
        return Scripted(text=text).sample(value, sampling, num_generated, mask)


@pytest.mark.parametrize(("text", "fields"), [("Red.", {}), (CALL, {"tools": [WEATHER]})], ids=["text", "call"])
async def test_reasoning_is_not_compared(text: str, fields: dict) -> None:
    template = TOOLS_TEMPLATE + THINKING_TEMPLATE.removeprefix(CHAT_TEMPLATE)
    models = made(HashExecutor(CAPACITY, model=Thinking(text=f"<think>@</think>{text}")), chat_template=template)
    asked = body(1, max_tokens=150, **fields)
    try:
        async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=1.0, part=None))]) as client:
            choices = (await client.post(CHAT, json=asked | {"model": "small", "n": SAMPLES})).json()["choices"]
            assert len({choice["message"]["reasoning_content"] for choice in choices}) > 1
            answer = await client.post(CHAT, json=asked)
            assert answer.headers["x-route"] == "auto; model=small; agreement=1.00; least=1.00"
    finally:
        for one in models:
            one.close()


@pytest.mark.parametrize(("least", "num_failed"), [(0.0, 0), (0.8, 0), (0.8, 1)])
async def test_answers_that_end_while_reasoning_do_not_agree(least: float, num_failed: int, monkeypatch) -> None:
    fail_first(num_failed, monkeypatch)
    models = made(
        HashExecutor(CAPACITY, model=Thinking(text="<think>A long thought.</think>@")), chat_template=THINKING_TEMPLATE
    )
    try:
        async with make_client(*models, routes=[replace(ROUTE, by=replace(BY, least=least, part=None))]) as client:
            answer = await client.post(CHAT, json=body(1, max_tokens=12))
            assert answer.headers["x-route"] == f"auto; model=large; agreement=0.00; least={least:.2f}"
    finally:
        for one in models:
            one.close()


async def test_long_answers_are_not_copied_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, num_steps, num_copied = in_flight.merge_chunks, 500, 0

    def counted(chunks):
        nonlocal num_copied
        num_copied += sum(len(chunk.token_ids) for chunk in chunks)
        return merge(chunks)

    class Stream:
        num_given = 0
        put_back = staticmethod(lambda chunks: None)

        async def next_chunks(self):
            self.num_given += 1
            end = FinishReason.LENGTH if self.num_given == num_steps else None
            return [OutputChunk("a", ".", (7,), (), 0, num_generated_tokens=self.num_given, finish_reason=end)]

    monkeypatch.setattr(in_flight, "merge_chunks", counted)
    call = SimpleNamespace(stream=Stream(), requests=["a"], engine_ids=("a",), _count=lambda chunks: None)
    call._hold = partial(in_flight.RunningCall._hold, call)
    [chunk] = await in_flight.RunningCall.begin(call, num_steps + 1)
    assert (chunk.text, len(chunk.token_ids)) == ("." * num_steps, num_steps)
    assert num_copied < 10 * num_steps


async def test_the_large_model_answers_when_the_small_one_refuses(gated_models) -> None:
    small, _ = gated_models
    async with make_client(*gated_models, routes=[ROUTE]) as client:
        held = [asyncio.create_task(client.post(CHAT, json=body(1, "small"))) for _ in range(3 * SAMPLES)]
        await until(lambda: any(one.done() for one in held))
        answer = await client.post(CHAT, json=body(1))
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=large; after=small")
        small.engine._executor.open()
        await asyncio.gather(*held)
