"""A cascade over HTTP: the small model begins, and a client sees its answer or the large model's, never both."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.routes import Learned, Route
from penstock.routes.drift import Drift
from penstock.routes.learned import Cascade, Fit, LearnedRoute
from penstock.routes.prices import Bill, Price
from penstock.serve import waiting
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import STATE_WIDTH, HashModel
from support.server.harness import (
    CAPACITY,
    PRINTABLE_MODEL,
    VOCAB_SIZE,
    GatedExecutor,
    make_client,
    make_runtime,
    make_text_runtime,
    until,
)

EASY, HARD = "What is red?", "What is 12345 * 6789?"
WINDOW = 8
OTHER_WORDS = HashModel(vocab_size=VOCAB_SIZE, first_token_id=VOCAB_SIZE - 30)


def cascade(margin: float = 1.0) -> Route:
    """Digits make a question hard for the small model. The question alone says nearly that."""

    def fit(num_extras: int, weight: float) -> Fit:
        strong = np.zeros(STATE_WIDTH + num_extras + 1)
        weak = strong.copy()
        weak[STATE_WIDTH + 1] = -weight
        return Fit(np.zeros(num_extras), np.ones(num_extras), weak, strong)

    begun = Cascade("small", WINDOW, margin, fit(5, 10.0))
    route = LearnedRoute(embedder="vectors", by_question=fit(2, 2.0), cascade=begun, thresholds=(0.0,) * 21)
    return Route(name="auto", models=("small", "large"), learned=Learned(route=route, threshold=0.25))


@pytest.fixture
def models():
    made = [
        make_runtime(HashExecutor(CAPACITY, model=OTHER_WORDS), served_names=("small",), aliases=()),
        make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("large",), aliases=()),
        make_text_runtime(served_names=("vectors",), aliases=()),
    ]
    yield made
    for one in made:
        one.close()


def chat(text: str, **fields: object) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "seed": 3, **fields}


BODIES = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 20, "seed": 3},
    "/v1/chat/completions": chat,
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 20, "temperature": 0},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0},
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": 20, "seed": 3}},
    "/completion": lambda text: {"prompt": text, "n_predict": 20, "seed": 3},
}


def texts_in(value: object) -> list[str]:
    """The texts of an answer in any API, without ids and times."""
    if isinstance(value, dict):
        found = [value[key] for key in ("text", "content", "response", "delta") if isinstance(value.get(key), str)]
        return [*found, *(text for inner in value.values() for text in texts_in(inner))]
    return [text for inner in value for text in texts_in(inner)] if isinstance(value, list) else []


def said(answer) -> str:
    """Return the text of an answer, whole or streamed."""
    if "json" in answer.headers["content-type"] and "ndjson" not in answer.headers["content-type"]:
        return "".join(texts_in(answer.json()))
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return "".join(text for line in lines if line.startswith("{") for text in texts_in(json.loads(line)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_is_that_of_one_model_alone(models, path: str, stream: bool) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        for text, name, other in ((EASY, "small", "large"), (HARD, "large", "small")):
            body = BODIES[path](text) | {"stream": stream}
            answer, alone, by_other = [await client.post(path, json=body | {"model": one}) for one in ("auto", name, other)]
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-route"].startswith(f"auto; model={name}; gain=")
            assert said(answer) == said(alone) != said(by_other)
            assert ("prob" in answer.text) == ("prob" in alone.text)
        counts = {line for line in (await client.get("/metrics")).text.splitlines() if "routed_requests_total{" in line}
    assert {line.rpartition(" ")[2] for line in counts} == {"1.0"}
    assert all(one.engine.load().num_running == 0 for one in models)


async def test_where_first_tokens_can_change_nothing_the_question_decides(models) -> None:
    small = models[0]
    async with make_client(*models, routes=[cascade(margin=0.1)]) as client:
        before = small.uses.num_uses
        answer = await client.post("/v1/chat/completions", json=chat(HARD, model="auto"))
        assert (answer.json()["model"], small.uses.num_uses - before) == ("large", 0)
        answer = await client.post("/v1/chat/completions", json=chat(EASY, model="auto"))
        assert (answer.json()["model"], answer.headers["x-route"]) == (
            "small",
            "auto; model=small; gain=0.000; threshold=0.250",
        )


@pytest.mark.parametrize("margin", [1.0, 0.1])
async def test_each_question_counts_once_by_the_gain_that_has_decided(models, margin: float) -> None:
    route = cascade(margin)
    drift = Drift(np.zeros(8))
    route = replace(route, learned=replace(route.learned, drift=drift))
    async with make_client(*models, routes=[route]) as client:
        told = [(await client.post("/v1/chat/completions", json=chat(one, model="auto"))) for one in (EASY, HARD)]
    assert told[0].headers["x-route"].split("; ")[2] == f"gain={drift.recent[0]:.3f}"
    assert told[1].headers["x-route"].split("; ")[2] == f"gain={drift.recent[1]:.3f}"
    assert len(drift.recent) == 2


async def test_fewer_tokens_than_the_window_decide_too(models) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        for length in (0, 1, WINDOW - 1, WINDOW, WINDOW + 1):
            for text, name in ((EASY, "small"), (HARD, "large")):
                body = {"prompt": text, "max_tokens": length, "seed": 3}
                answer, alone = [await client.post("/v1/completions", json=body | {"model": one}) for one in ("auto", name)]
                assert answer.json()["choices"] == alone.json()["choices"]
                assert answer.json()["usage"]["completion_tokens"] == alone.json()["usage"]["completion_tokens"] == length


async def test_choices_and_asked_log_probabilities_are_those_of_the_model(models) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        for text, name in ((EASY, "small"), (HARD, "large")):
            for fields in ({"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e"]}):
                body = chat(text, **fields)
                answer, alone = [
                    await client.post("/v1/chat/completions", json=body | {"model": one}) for one in ("auto", name)
                ]
                assert answer.json()["choices"] == alone.json()["choices"]


async def test_a_search_for_beams_has_no_first_tokens_and_goes_to_the_large_model(models) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        body = {"model": "auto", "prompt": EASY, "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=large; beam search")


async def test_the_wait_for_the_small_model_is_told(models) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        answer = await client.post("/v1/chat/completions", json=chat(HARD, model="auto"))
        parts = dict(part.strip().split(";dur=") for part in answer.headers["server-timing"].split(","))
        assert 0 < float(parts["route"]) < float(parts["queue"])
        told = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
        assert "for its route to choose a model" in told["summary"], told


async def test_if_the_large_model_has_gone_the_small_one_goes_on(models, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        monkeypatch.setattr(waiting, "models_of", lambda *_: ["small"])  # once the route has chosen
        answer = await client.post("/v1/chat/completions", json=chat(HARD, model="auto"))
        assert (answer.status_code, answer.json()["model"]) == (200, "small")


async def test_the_small_model_answers_if_a_large_one_elsewhere_can_not(models) -> None:
    small, _, vectors = models
    route = replace(cascade(), models=("small", "far"))
    upstream = UpstreamConfig(name="far", url="http://localhost:9/v1", model="m")  # nobody listens there
    async with make_client(small, vectors, routes=[route], upstreams=[upstream]) as client:
        answer = await client.post("/v1/chat/completions", json=chat(HARD, model="auto"))
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=small; after=far")
        for one in client.app.state.parts.upstreams.values():
            await one.close()


@pytest.fixture
def gated_models():
    """The small model computes nothing by itself."""
    made = [
        make_runtime(
            GatedExecutor(replace(CAPACITY, max_rows=1), model=OTHER_WORDS), served_names=("small",), aliases=(), max_queue=1
        ),
        make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("large",), aliases=()),
        make_text_runtime(served_names=("vectors",), aliases=()),
    ]
    yield made
    made[0].engine._executor.open()
    for one in made:
        one.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_window_ends_the_small_models_work(gated_models, stream: bool) -> None:
    small, large, _ = gated_models
    async with make_client(*gated_models, routes=[cascade()]) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat(EASY, model="auto", stream=stream)))
        await until(lambda: small.engine.load().num_waiting + small.engine.load().num_running == 1)
        asked.cancel()
        small.engine._executor.open()
        await until(lambda: small.engine.load().num_waiting + small.engine.load().num_running == 0)
        assert small.bridge.num_open_requests == 0
        assert large.uses.num_uses == 0


async def test_a_cancelled_request_is_not_asked_again(gated_models) -> None:
    small, large, _ = gated_models
    async with make_client(*gated_models, routes=[cascade()]) as client:
        headers = {"X-Request-Id": "mine"}
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat(HARD, model="auto"), headers=headers))
        await until(lambda: small.engine.load().num_waiting + small.engine.load().num_running == 1)
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        small.engine._executor.open()
        answer = await asked
        assert "cancelled" in answer.text
        assert large.uses.num_uses == 0


async def test_the_large_model_answers_when_the_small_one_refuses(gated_models) -> None:
    small, _, _ = gated_models
    async with make_client(*gated_models, routes=[cascade()]) as client:
        held = [asyncio.create_task(client.post("/v1/chat/completions", json=chat(EASY, model="small"))) for _ in range(3)]
        await until(lambda: any(one.done() for one in held))
        answer = await client.post("/v1/chat/completions", json=chat(EASY, model="auto"))
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=large; after=small")
        small.engine._executor.open()
        await asyncio.gather(*held)


async def test_a_deadline_that_passes_in_the_window_is_the_answer(gated_models) -> None:
    small, large, _ = gated_models
    async with make_client(*gated_models, routes=[cascade()]) as client:
        asked = client.post("/v1/chat/completions", json=chat(HARD, model="auto"), headers={"X-Deadline-Ms": "30"})
        task = asyncio.create_task(asked)
        await asyncio.sleep(0.05)
        small.engine._executor.open()
        answer = await task
        assert (answer.status_code, "deadline" in answer.text) == (408, True), answer.text
        assert large.uses.num_uses == 0


PRICES = {"small": Price(1.0, 4.0), "large": Price(16.0, 64.0)}


def priced() -> Route:
    return replace(cascade(), bill=Bill(PRICES))


def dollars(metrics: str) -> dict[str, float]:
    """The costs in a scrape: by model, and `full`."""
    lines = [line.rpartition(" ") for line in metrics.splitlines() if line.startswith("penstock_route_")]
    found = {(re.findall('model="([^"]+)"', name) or ["full"])[0]: float(value) for name, _, value in lines}
    assert all('route="auto"' in name for name, _, _ in lines)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_kept_saves_what_the_large_model_would_have_cost(models, stream: bool) -> None:
    async with make_client(*models, routes=[priced()]) as client:
        body = chat(EASY, model="auto", stream=stream, stream_options={"include_usage": True} if stream else None)
        answer = await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
        usage = json.loads(re.findall(r'"usage":({[^}]*})', answer.text.replace(" ", ""))[-1] + "}")
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        paid, full = PRICES["small"].of(*tokens), PRICES["large"].of(*tokens)
        told = (await client.get("/v1/requests/mine")).json()
        assert told["cost"] == pytest.approx({"usd": paid, "saved_usd": full - paid})
        assert dollars((await client.get("/metrics")).text) == pytest.approx({"small": paid, "full": full})
        assert ("cost=" in answer.headers["x-route"]) == (not stream)  # a stream's is not known when its head is sent


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_begun_in_vain_is_paid_for(models, stream: bool) -> None:
    async with make_client(*models, routes=[priced()]) as client:
        body = chat(HARD, model="auto", stream=stream)
        await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
        alone = (await client.post("/v1/chat/completions", json=chat(HARD, model="large"))).json()["usage"]
        told, paid = (await client.get("/v1/requests/mine")).json(), dollars((await client.get("/metrics")).text)
        assert (
            paid["large"]
            == paid["full"]
            == pytest.approx(PRICES["large"].of(alone["prompt_tokens"], alone["completion_tokens"]))
        )
        assert paid["small"] >= PRICES["small"].of(alone["prompt_tokens"], WINDOW)
        assert told["cost"] == pytest.approx({"usd": paid["small"] + paid["large"], "saved_usd": -paid["small"]})


async def test_a_route_without_prices_tells_no_costs(models) -> None:
    async with make_client(*models, routes=[cascade()]) as client:
        await client.post("/v1/chat/completions", json=chat(HARD, model="auto"), headers={"X-Request-Id": "mine"})
        assert "cost" not in (await client.get("/v1/requests/mine")).json()
        assert not dollars((await client.get("/metrics")).text)


async def test_what_refuses_costs_nothing(gated_models) -> None:
    small, _, _ = gated_models
    async with make_client(*gated_models, routes=[priced()]) as client:
        held = [asyncio.create_task(client.post("/v1/chat/completions", json=chat(EASY, model="small"))) for _ in range(3)]
        await until(lambda: any(one.done() for one in held))
        answer = await client.post("/v1/chat/completions", json=chat(EASY, model="auto"))
        assert answer.headers["x-route"].startswith("auto; model=large; after=small; cost=")
        assert {*dollars((await client.get("/metrics")).text)} == {"large", "full"}
        small.engine._executor.open()
        await asyncio.gather(*held)
