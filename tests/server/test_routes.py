"""A name that is a route, over HTTP: it goes to one of two models by the question, in every API."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.route import digest
from penstock.config.components import config_from
from penstock.config.routes import AgreementConfig, EnsembleConfig, LearnedConfig, RouteConfig, VerifierConfig
from penstock.config.routing import Routing
from penstock.config.sources import read_config_file
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.factory import start_deployment
from penstock.deploy.routes import Learned, Route, open_routes
from penstock.deploy.running import ServedModel
from penstock.routes import drift
from penstock.routes.learned import SHARES, Fit, LearnedRoute
from penstock.routes.prices import Bill, Price
from penstock.serve.questions import QuestionReader, question_of
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import STATE_WIDTH
from penstock.types.errors import ConfigError
from support.deployments import deployment_of
from support.failing_executor import FailingExecutor
from support.server.harness import CAPACITY, EMBEDDER, GatedExecutor, make_client, make_runtime, make_text_runtime, until
from support.tiny_models import TinyLlama, write_gguf

EASY, HARD = "What is red?", "What is 12345 * 6789?"
KEYS = """
[[keys]]
name = "all"
key = "the-key-of-all"
models = ["auto"]

[[keys]]
name = "small"
key = "the-key-of-small"
models = ["small"]

[[keys]]
name = "none"
key = "the-key-of-none"
models = ["vectors"]
"""


def key_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer the-key-of-{name}"}


def learned(embedder: str = "vectors") -> LearnedRoute:
    """Digits make a question hard for the weak model alone."""
    weights = np.zeros(STATE_WIDTH + 3)
    weak = weights.copy()
    weak[STATE_WIDTH + 1] = -10.0
    fit = Fit(np.zeros(2), np.ones(2), weak, weights)
    return LearnedRoute(embedder=embedder, by_question=fit, thresholds=tuple(1 - share for share in SHARES))


ROUTE = Route(name="auto", models=("small", "large"), learned=Learned(route=learned(), threshold=0.25))
FALLBACK = Route(name="auto", models=("large", "small"))


@pytest.fixture
def models():
    made = [
        *(make_runtime(HashExecutor(CAPACITY), served_names=(name,), aliases=()) for name in ("small", "large")),
        make_text_runtime(served_names=("vectors",), aliases=()),
    ]
    yield made
    for one in made:
        one.close()


def chat(text: str) -> dict:
    return {"model": "auto", "messages": [{"role": "system", "content": "1 2 3"}, {"role": "user", "content": text}]}


BODIES = {
    "/v1/completions": lambda text: {"model": "auto", "prompt": text, "max_tokens": 2},
    "/v1/chat/completions": lambda text: chat(text) | {"max_tokens": 2},
    "/v1/responses": lambda text: {"model": "auto", "input": text, "max_output_tokens": 16},
    "/v1/messages": lambda text: {
        "model": "auto",
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "max_tokens": 2,
    },
    "/api/chat": lambda text: {
        "model": "auto",
        "messages": [{"role": "user", "content": text}],
        "stream": False,
        "options": {"num_predict": 2},
    },
    "/completion": lambda text: {"model": "auto", "prompt": text, "n_predict": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_question_decides_which_model_answers(models, path: str) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        for text, name in ((EASY, "small"), (HARD, "large"), (EASY, "small")):
            before = [one.uses.num_uses for one in models]
            answer = await client.post(path, json=BODIES[path](text))
            assert answer.status_code == 200, answer.text
            uses = {one.name: one.uses.num_uses - num for one, num in zip(models, before, strict=True)}
            assert uses[name] > 0
            assert uses[{"small": "large", "large": "small"}[name]] == 0
            assert answer.headers["x-route"].startswith(f"auto; model={name}; gain=")
            if "model" in answer.json() and path.startswith("/v1"):
                assert answer.json()["model"] == name
        text = (await client.get("/metrics")).text
    counts = {line for line in text.splitlines() if line.startswith("penstock_routed_requests_total{")}
    assert counts == {
        'penstock_routed_requests_total{model="small",route="auto"} 2.0',
        'penstock_routed_requests_total{model="large",route="auto"} 1.0',
    }


async def test_questions_unlike_those_of_the_fit_are_seen(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit has seen easy questions alone."""
    monkeypatch.setattr(drift, "LEAST", 8)
    route = replace(ROUTE, learned=replace(ROUTE.learned, drift=drift.Drift(np.zeros(8))))
    async with make_client(*models, routes=[route, replace(FALLBACK, name="either")]) as client:

        async def ask(text: str, times: int) -> tuple[float | None, str]:
            for _ in range(times):
                await client.post("/v1/completions", json=BODIES["/v1/completions"](text))
            [told, other] = (await client.get("/load")).json()["routes"]
            assert other == {"name": "either", "usd": None, "saved_usd": None, "drift": None}
            series = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith("penstock_route_d")]
            return told["drift"], "".join(series)

        assert await ask(EASY, 7) == (None, "")
        assert await ask(EASY, 1) == (0.0, 'penstock_route_drift_ratio{route="auto"} 0.0')
        assert await ask(HARD, 8) == (0.5, 'penstock_route_drift_ratio{route="auto"} 0.5')


async def test_other_names_are_not_routed_and_the_route_is_listed(models) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        for name in ("small", "large"):
            answer = await client.post("/v1/completions", json={"model": name, "prompt": HARD, "max_tokens": 1})
            assert (answer.json()["model"], "x-route" in answer.headers) == (name, False)
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["small", "large", "vectors", "auto"]
        unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "a"})
        assert (unknown.status_code, "auto" in unknown.text) == (404, True)


async def test_a_request_without_a_question_goes_to_the_strong_model(models) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        answer = await client.post("/v1/completions", json={"model": "auto", "prompt": [1, 2, 3]})
        assert (answer.json()["model"], answer.headers["x-route"]) == ("large", "auto; model=large; no question")


async def test_a_route_has_a_card_and_no_vectors(models) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        card = await client.get("/v1/models/auto")
        assert (card.status_code, card.json()["id"], card.json()["task"]) == (200, "auto", "generate")
        assert "auto" in [one["name"] for one in (await client.get("/api/tags")).json()["models"]]
        vectors = await client.post("/v1/embeddings", json={"model": "auto", "input": "a"})
        assert (vectors.status_code, "writes text: name an encoder" in vectors.text) == (400, True)


async def test_keys_open_a_route_by_its_name_and_each_of_its_models(models, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with make_client(*models, routes=[ROUTE], api_keys_file=str(tmp_path / "keys.toml")) as client:

        async def status(name: str, text: str) -> int:
            body = BODIES["/v1/completions"](text)
            return (await client.post("/v1/completions", json=body, headers=key_of(name))).status_code

        assert [await status("all", text) for text in (EASY, HARD)] == [200, 200]
        assert [await status("small", text) for text in (EASY, HARD)] == [200, 200], "by the one that it allows"
        num_vectors = models[2].uses.num_uses
        refused = await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY), headers=key_of("none"))
        assert (refused.status_code, "auto" in refused.json()["error"]["message"].partition("Served:")[2]) == (404, False)
        assert models[2].uses.num_uses == num_vectors, "nothing is computed for a key that opens neither"
        for name, listed in (("all", ["auto"]), ("small", ["small", "auto"]), ("none", ["vectors"])):
            cards = (await client.get("/v1/models", headers=key_of(name))).json()["data"]
            assert [card["id"] for card in cards if card["id"] in ("auto", name, "vectors")] == listed
            load = (await client.get("/load", headers=key_of(name))).json()
            assert [one["name"] for one in (*load["models"], *load.get("routes", ()))] == listed


async def test_an_encoder_that_is_away_is_waited_for(models) -> None:
    async with make_client(*models, routes=[ROUTE], load_timeout_s=0.1) as client:
        models[2].leave()
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY))
    assert (answer.status_code, "vectors" in answer.text) == (503, True)


async def test_a_route_by_a_model_that_is_no_encoder_is_refused(models) -> None:
    by_small = Learned(route=learned("small"), threshold=0.25)
    other = Route(name="auto", models=("small", "large"), learned=by_small)
    async with make_client(*models, routes=[other]) as client:
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY))
    assert (answer.status_code, "small should be an embedding model, but is not" in answer.text) == (500, True)


async def test_a_question_is_embedded_as_the_fit_embedded_it(monkeypatch) -> None:
    """The model's default prompt comes before the question."""
    embed, read = QuestionReader.embed, []

    async def noting(*args: object, **options: object) -> bytes:
        read.append(await embed(*args, **options))
        return read[-1]

    monkeypatch.setattr(QuestionReader, "embed", noting)
    made = [make_runtime(HashExecutor(CAPACITY), served_names=(name,), aliases=()) for name in ("small", "large")]
    encoder = replace(EMBEDDER, default_prompt="query")
    made.append(make_text_runtime(encoder=encoder, served_names=("vectors",), aliases=()))
    try:
        async with make_client(*made, routes=[ROUTE]) as client:
            assert (await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY))).status_code == 200
            alike = await client.post("/v1/embeddings", json={"model": "vectors", "input": EASY})
    finally:
        for one in made:
            one.close()
    [vector] = [np.frombuffer(states, np.float32) for states in read]
    np.testing.assert_allclose(vector / np.linalg.norm(vector), alike.json()["data"][0]["embedding"], rtol=1e-5)


@pytest.fixture
def busy_models():
    """The large one computes nothing, and its queue has room for one request."""
    made = [
        make_runtime(GatedExecutor(replace(CAPACITY, max_rows=1)), served_names=("large",), aliases=(), max_queue=1),
        make_runtime(HashExecutor(CAPACITY), served_names=("small",), aliases=()),
    ]
    yield made
    made[0].engine._executor.open()
    for one in made:
        one.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_one_model_refuses_goes_to_the_next(busy_models, stream: bool) -> None:
    large, _ = busy_models
    body = {"model": "auto", "prompt": "a", "max_tokens": 2, "stream": stream}
    async with make_client(*busy_models, routes=[FALLBACK]) as client:
        of_large = {**body, "model": "large"}
        held = [asyncio.create_task(client.post("/v1/completions", json=of_large)) for _ in range(4)]
        await until(lambda: any(one.done() for one in held))
        assert next(one.result().status_code for one in held if one.done()) == 429, "its queue is full"
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=small; after=large")
        assert '"small"' in answer.text
        wrong = await client.post("/v1/completions", json={**body, "temperature": 9})
        assert (wrong.status_code, "x-route" in wrong.headers) == (400, False), "what no model would answer is refused at once"
        large.engine._executor.open()
        assert {one.status_code for one in await asyncio.gather(*held)} == {200, 429}
        again = await client.post("/v1/completions", json=body)
        assert (again.status_code, again.headers["x-route"]) == (200, "auto; model=large")
        counts = [line for line in (await client.get("/metrics")).text.splitlines() if "routed_requests_total{" in line]
        assert {line.rpartition(" ")[2] for line in counts} == {"1.0"}, "those that were answered"


async def test_an_answer_that_fails_is_begun_in_vain() -> None:
    bill = Bill({"large": Price(1.0, 4.0), "small": Price(16.0, 64.0)})
    broken = FailingExecutor(HashExecutor(CAPACITY), fail_at_step=5)
    models = [make_runtime(broken, served_names=("large",)), make_runtime(served_names=("small",), aliases=())]
    async with make_client(*models, routes=[replace(FALLBACK, bill=bill)]) as client:
        answer = await client.post("/v1/chat/completions", json=chat(EASY) | {"max_tokens": 20})
        assert answer.headers["x-route"].startswith("auto; model=small; after=large; ")
        usage = answer.json()["usage"]
    full = bill.prices["small"].of(usage["prompt_tokens"], usage["completion_tokens"])
    assert bill.paid["large"] > 0.0
    assert bill.paid["small"] == pytest.approx(full)
    assert bill.full == pytest.approx(full), "of the answer that the client has"
    for one in models:
        one.close()


async def test_a_response_in_the_background_has_its_price(models) -> None:
    bill = Bill({"large": Price(1.0, 4.0), "small": Price(16.0, 64.0)})
    async with make_client(*models, routes=[replace(FALLBACK, bill=bill)]) as client:
        made = (await client.post("/v1/responses", json=BODIES["/v1/responses"](EASY) | {"background": True})).json()
        await until(lambda: not any(one.uses.num_users for one in models))
        usage = (await client.get(f"/v1/responses/{made['id']}")).json()["usage"]
    tokens = usage["input_tokens"], usage["output_tokens"]
    assert bill.paid == pytest.approx({"large": bill.prices["large"].of(*tokens)})


async def test_no_place_is_kept_for_a_request_that_another_model_answers(busy_models) -> None:
    large, _ = busy_models
    body = {"prompt": "a", "max_tokens": 2}
    async with make_client(*busy_models, routes=[FALLBACK]) as client:
        held = [asyncio.create_task(client.post("/v1/completions", json=body | {"model": "large"})) for _ in range(2)]
        await until(lambda: large.engine.load().num_running + large.engine.load().num_waiting == 2)
        for number in range(20):
            answer = await client.post("/v1/completions", json={"model": "auto", "prompt": f"{number}", "max_tokens": 2})
            assert (answer.status_code, answer.json()["model"]) == (200, "small")
        assert not large.admission._promises._later
        refused = await client.post("/v1/completions", json=body | {"model": "large"})
        assert refused.status_code == 429
        assert len(large.admission._promises._later) == 1, "one that asks for the model itself may come back"
        large.engine._executor.open()
        await asyncio.gather(*held)


AGREED = AgreementConfig(weak="large", strong="small", least=0.5)


@pytest.mark.parametrize("route", [FALLBACK, replace(FALLBACK, by=AGREED)], ids=["fallback", "agreement"])
async def test_calls_that_a_keys_limit_refuses_get_times_apart(models, tmp_path: Path, route: Route) -> None:
    """No other model is asked for them, so they return to the one that refused."""
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "me"\nkey = "the-key-of-mine"\nrequests_per_minute = 6\n')
    async with make_client(*models, routes=[route], api_keys_file=str(tmp_path / "keys.toml")) as client:
        client.headers["Authorization"] = "Bearer the-key-of-mine"
        answers = [
            await client.post("/v1/completions", json={"model": "auto", "prompt": f"{number}", "max_tokens": 2})
            for number in range(9)
        ]
    assert [one.status_code for one in answers] == [200] * 6 + [429] * 3
    waits_s = [int(one.headers["retry-after"]) for one in answers[6:]]
    assert waits_s == pytest.approx([10, 20, 30], abs=5)


async def test_when_all_refuse_the_last_refusal_is_the_answer(models) -> None:
    async with make_client(*models, routes=[FALLBACK], load_timeout_s=0.05) as client:
        models[0].leave()
        models[1].leave()
        answer = await client.post("/v1/completions", json={"model": "auto", "prompt": "a"})
    assert (answer.status_code, "small" in answer.json()["error"]["message"]) == (503, True), answer.text


def test_questions_are_found_in_each_shape() -> None:
    def found(**body: object) -> str:
        return question_of(json.dumps(body).encode())

    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "two"}]
    users = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": parts}]
    assert found(messages=users) == "one two"
    assert found(prompt=["a", "b"]) == "a b"
    assert found(input=[{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]) == "q"
    assert found(prompt="begin" + "x" * 20_000).startswith("beginx")
    assert len(found(prompt="x" * 20_000)) == 16_384
    for body in ({"messages": [{"role": "user", "content": None}]}, {"prompt": [[1, 2]]}, {"prompt": {"a": 1}}, {}):
        assert found(**body) == ""
    assert question_of(b"[1]") == ""


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"name": "small"}, "A route is called 'small', and so is a model"),
        ({"models": ("tiny", "large")}, "The route auto needs 'tiny', which is not served"),
        ({"models": ("small", "huge"), "learned": None}, "The route auto needs 'huge', which is not served"),
        ({"models": ("small", "auto"), "learned": None}, "The route auto contains the route auto"),
    ],
)
def test_a_route_of_models_that_are_not_served_is_refused(models, change: dict, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        deployment_of(*models, routes=[replace(ROUTE, **change)])


TABLE = '[[routes]]\nname = "auto"\nweak = "a"\nstrong = "b"\nfile = "r.json"\nshare = 0.3\n'


AGREEMENT = """
[[routes]]
name = "auto"
weak = "a"
strong = "b"
confidence = "agreement"
agreement = 0.6
samples = 3
part = "= *(.*)"
"""


VERIFIER = '[[routes]]\nname = "auto"\nweak = "a"\nstrong = "b"\nconfidence = "verifier"\nleast = 0.7\n'
ENSEMBLE = '[[routes]]\nname = "auto"\nensemble = ["a", "b"]\n'


def test_routes_stand_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('model = "x"\n' + TABLE)
    [route] = read_config_file(path).routing.routes
    by = LearnedConfig(weak="a", strong="b", file=str(tmp_path / "r.json"), share=0.3)
    assert route == RouteConfig(name="auto", by=by)
    learned().write(tmp_path / "r.json")
    [made] = open_routes([route])
    assert (made.models, made.learned.threshold) == (("a", "b"), pytest.approx(0.7))
    path.write_text('[[routes]]\nname = "auto"\nfallback = ["b", "a", "c"]\n')
    [made] = open_routes(read_config_file(path).routing.routes)
    assert made == Route(name="auto", models=("b", "a", "c"))
    path.write_text('[[routes]]\nname = "auto"\nfallback = ["b", "a"]\nprice = {a = [0.5, 2], b = [0, 0]}\n')
    [made] = open_routes(read_config_file(path).routing.routes)
    assert made.bill == Bill({"a": Price(0.5, 2.0), "b": Price(0.0, 0.0)}, judges=set())
    path.write_text(AGREEMENT)
    [made] = open_routes(read_config_file(path).routing.routes)
    by = AgreementConfig(weak="a", strong="b", samples=3, temperature=0.7, least=0.6, part=re.compile("= *(.*)"))
    assert made == Route(name="auto", models=("a", "b"), by=by)
    path.write_text(VERIFIER)
    [made] = open_routes(read_config_file(path).routing.routes)
    verifier = VerifierConfig(weak="a", strong="b", verifier="a", least=0.7)
    assert (made, made.helpers) == (Route(name="auto", models=("a", "b"), by=verifier), ("a",))
    path.write_text(VERIFIER + 'verifier = "c"\nprice = {a = [1, 2], b = [3, 4], c = [5, 6]}\n')
    [made] = open_routes(read_config_file(path).routing.routes)
    assert (made.helpers, made.bill.prices["c"]) == (("c",), Price(5.0, 6.0))
    assert made.bill.answered("a", 1_000_000, 0, discarded_usd=5.0) == (6.0, 3.0), "what b would have cost: c only judges"
    path.write_text(ENSEMBLE + 'judge = "c"\n')
    [made] = open_routes(read_config_file(path).routing.routes)
    ensemble = EnsembleConfig(models=("a", "b"), judge="c")
    assert (made, made.helpers) == (Route(name="auto", models=("a", "b"), by=ensemble), ("c",))


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("share = 0.3", "share = 3", "share is not a number from 0 to 1"),
        ("share = 0.3", "", "'share' is missing"),
        ('weak = "a"', "weak = 1", "'weak' is missing, or not a text"),
        ('weak = "a"', 'week = "a"', r"unknown key 'week'\. Did you mean weak\?"),
        (TABLE, TABLE + TABLE, "two routes are called 'auto'"),
        ("[[routes]]", "[routes]", "routes are tables"),
        ('weak = "a"', 'fallback = ["a", "b"]', "unknown key 'file'"),
        (TABLE, '[[routes]]\nname = "auto"\nfallback = ["a"]\n', "fallback is not a list of two models or more"),
        (TABLE, '[[routes]]\nname = "auto"\nfallback = ["a", "b", "a"]\n', "fallback names a model twice"),
        ('strong = "b"', 'strong = "a"', "weak and strong are one model"),
        ('name = "auto"', 'name = "auto\\r\\nx"', "can't be a name"),
        (TABLE, AGREEMENT.replace('"agreement"', '"luck"'), "confidence is not 'agreement' or 'verifier'"),
        (TABLE, AGREEMENT.replace("samples = 3", "samples = 1"), "samples is not a number from 2 to 32"),
        (TABLE, AGREEMENT.replace("samples = 3", "samples = 2.5"), "samples is not a whole number"),
        (TABLE, AGREEMENT.replace("samples = 3", "temperature = 0"), "temperature is not a number from 0.01 to 2"),
        (TABLE, AGREEMENT.replace("agreement = 0.6", ""), "'agreement' is missing"),
        (TABLE, AGREEMENT.replace("= *(.*)", "("), "is not a regular expression"),
        (TABLE, AGREEMENT.replace('weak = "a"', 'weak = "b"'), "weak and strong are one model"),
        (TABLE, VERIFIER.replace("least = 0.7", ""), "'least' is missing"),
        (TABLE, VERIFIER.replace('"verifier"', '["verifier"]'), "confidence is not"),
        (TABLE, VERIFIER.replace("least = 0.7", "samples = 5"), "unknown key 'samples'"),
        (TABLE, VERIFIER + 'verifier = "c"\nprice = {a = [1, 2], b = [1, 2]}', "price is not that of a, b, c"),
        (TABLE, ENSEMBLE.replace('["a", "b"]', '["a"]'), "ensemble is not a list of two models or more"),
        (TABLE, ENSEMBLE.replace('["a", "b"]', str([*"abcdefghij"])), "ensemble has 10 models"),
        (TABLE, ENSEMBLE + 'judge = "a"\nreranker = "b"', "a judge, a reranker or a part, not several"),
        (TABLE, ENSEMBLE + "share = 0.3", "unknown key 'share'"),
        ("share = 0.3", "share = 0.3\nprice = {a = [1, 2]}", "price is not that of a, b"),
        ("share = 0.3", "share = 0.3\nprice = {a = [1, 2], b = [1, -2]}", "the price of b is not two numbers"),
        ("share = 0.3", "share = 0.3\nprice = {a = [1, inf], b = [1, 2]}", "the price of a is not two numbers"),
        ("share = 0.3", "share = 0.3\nprice = {a = 1, b = [1, 2]}", "the price of a is not two numbers"),
    ],
)
def test_a_wrong_table_is_named(old: str, new: str, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(ConfigError, match=cause):
        read_config_file(path)


def test_a_server_starts_with_its_routes(tmp_path: Path) -> None:
    """Real models; the route's embedding model is not among them, and the error says how to serve it."""
    paths = [write_gguf(tmp_path / f"{name}.gguf", TinyLlama(seed=seed)) for seed, name in enumerate(("small", "large"))]
    common = {"threads": 1, "kv_cache_memory": 4 << 20}
    configs = [config_from({"model": str(path), "served_model_name": (path.stem,), **common}) for path in paths]
    learned().write(tmp_path / "r.json")
    by = LearnedConfig(weak="small", strong="large", file=str(tmp_path / "r.json"), share=0.5)
    route = RouteConfig(name="auto", by=by)
    with pytest.raises(ConfigError, match="penstock serve small large vectors"):
        start_deployment(configs, routing=Routing(routes=(route,)))


def test_a_server_warns_of_a_model_that_is_not_the_one_of_the_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_gguf(tmp_path / f"{name}.gguf", TinyLlama(seed=seed)) for seed, name in enumerate(("small", "large"))]
    configs = [config_from({"model": str(path), "load_on": "request", "kv_cache_memory": 4 << 20}) for path in paths]
    by = LearnedConfig(weak="small", strong="large", file=str(tmp_path / "r.json"), share=0.5)
    routing = Routing(routes=(RouteConfig(name="auto", by=by),))
    for digests, warnings in (({"large": digest(str(paths[1]))}, []), ({"large": "0" * 32}, ["another large than large is"])):
        replace(learned("large"), digests=digests).write(tmp_path / "r.json")
        caplog.clear()
        start_deployment(configs, routing=routing).close()
        told = [record.getMessage() for record in caplog.records if "fitted" in record.getMessage()]
        assert len(told) == len(warnings)
        assert all(part in line for part, line in zip(warnings, told, strict=True))


async def test_a_prompt_that_is_too_long_for_one_model_goes_to_the_next(models) -> None:
    narrow = make_runtime(HashExecutor(replace(CAPACITY, max_model_len=32)), served_names=("narrow",), aliases=())
    try:
        async with make_client(*models, narrow, routes=[Route(name="auto", models=("narrow", "large"))]) as client:
            body = {"model": "auto", "prompt": "x" * 40, "max_tokens": 4}
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["x-route"]) == (200, "auto; model=large; after=narrow")
    finally:
        narrow.close()


def test_a_route_says_which_helper_is_missing_and_an_ensemble_stays_here(models) -> None:
    by = EnsembleConfig(models=("small", "large"), judge="third")
    with pytest.raises(ConfigError, match="needs 'third', which is not served"):
        deployment_of(*models, routes=[Route(name="auto", models=by.models, by=by)])
    upstream = UpstreamConfig(name="far", url="http://localhost:9/v1", model="m")
    by = EnsembleConfig(models=("small", "far"))
    with pytest.raises(ConfigError, match="The ensemble auto has an upstream"):
        deployment_of(*models, routes=[Route(name="auto", models=by.models, by=by)], upstreams=[upstream])


async def test_a_route_whose_models_have_gone_is_a_404(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when their files were taken out of the folder of models."""
    client = make_client(*models, routes=[ROUTE])
    monkeypatch.setattr(ServedModel, "is_there", property(lambda served: served.name == "vectors"))
    async with client:
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY))
    assert (answer.status_code, "auto" in answer.text) == (404, True)
