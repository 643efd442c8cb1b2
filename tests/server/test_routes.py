"""A name that is a route, over HTTP: it goes to one of two models by the question, in every API."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.config.components import config_from
from penstock.config.routes import RouteConfig
from penstock.config.sources import read_config_file
from penstock.deploy.factory import start_deployment
from penstock.deploy.routes import Route, open_routes
from penstock.routes.learned import SHARES, LearnedRoute
from penstock.serve.routes import question_of
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import STATE_WIDTH
from penstock.types.errors import ConfigError
from support.deployments import deployment_of
from support.server.harness import CAPACITY, make_client, make_runtime, make_text_runtime
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


def learned() -> LearnedRoute:
    """Digits make a question hard for the weak model alone."""
    weights = np.zeros(STATE_WIDTH + 3)
    weak = weights.copy()
    weak[STATE_WIDTH + 1] = -10.0
    return LearnedRoute("vectors", np.zeros(2), np.ones(2), weak, weights, tuple(1 - share for share in SHARES))


ROUTE = Route(name="auto", weak="small", strong="large", learned=learned(), threshold=0.25)


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
            before = [one.num_uses for one in models]
            answer = await client.post(path, json=BODIES[path](text))
            assert answer.status_code == 200, answer.text
            uses = {one.name: one.num_uses - num for one, num in zip(models, before, strict=True)}
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


async def test_other_names_are_not_routed_and_the_route_is_listed(models) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        for name in ("small", "large"):
            answer = await client.post("/v1/completions", json={"model": name, "prompt": HARD, "max_tokens": 1})
            assert (answer.json()["model"], "x-route" in answer.headers) == (name, False)
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["small", "large", "vectors", "auto"]
        unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "a"})
        assert (unknown.status_code, "auto" in unknown.text) == (404, True)


async def test_a_request_without_a_question_is_refused(models) -> None:
    async with make_client(*models, routes=[ROUTE]) as client:
        answer = await client.post("/v1/completions", json={"model": "auto", "prompt": [1, 2, 3]})
        assert (answer.status_code, "chooses a model by the text" in answer.text) == (400, True), answer.text
        card = await client.get("/v1/models/auto")
        assert (card.status_code, "auto is a route" in card.text) == (400, True)


async def test_keys_open_a_route_by_its_name_and_each_of_its_models(models, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with make_client(*models, routes=[ROUTE], api_keys_file=str(tmp_path / "keys.toml")) as client:

        async def status(name: str, text: str) -> int:
            headers = {"Authorization": f"Bearer the-key-of-{name}"}
            return (await client.post("/v1/completions", json=BODIES["/v1/completions"](text), headers=headers)).status_code

        assert [await status("all", text) for text in (EASY, HARD)] == [200, 200]
        assert [await status("small", text) for text in (EASY, HARD)] == [200, 404]
        num_vectors = models[2].num_uses
        assert await status("none", EASY) == 404
        assert models[2].num_uses == num_vectors, "nothing is computed for a key that opens neither"


async def test_an_encoder_that_is_away_is_waited_for(models) -> None:
    async with make_client(*models, routes=[ROUTE], load_timeout_s=0.1) as client:
        models[2].leave()
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY))
    assert (answer.status_code, "vectors" in answer.text) == (503, True)


async def test_a_route_by_a_model_that_is_no_encoder_is_refused(models) -> None:
    other = Route(name="auto", weak="small", strong="large", learned=learned(), threshold=0.25)
    object.__setattr__(other.learned, "embedder", "small")
    async with make_client(*models, routes=[other]) as client:
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"](EASY))
    assert (answer.status_code, "small, which is no embedding model" in answer.text) == (400, True)


def test_questions_are_found_in_each_shape() -> None:
    def found(**body: object) -> str:
        return question_of(json.dumps(body).encode())

    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "two"}]
    users = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": parts}]
    assert found(messages=users) == "one two"
    assert found(prompt=["a", "b"]) == "a b"
    assert found(input=[{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]) == "q"
    assert found(prompt="x" * 20_000 + "end").endswith("xend")
    assert len(found(prompt="x" * 20_000)) == 16_384
    for body in ({"messages": [{"role": "user", "content": None}]}, {"prompt": [[1, 2]]}, {"prompt": {"a": 1}}, {}):
        assert found(**body) == ""
    assert question_of(b"[1]") == ""


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"name": "small"}, "A route is called 'small', and so is a model"),
        ({"weak": "tiny"}, "The weak model of the route auto, 'tiny', is not served"),
        ({"strong": "huge"}, "The strong model of the route auto, 'huge', is not served"),
    ],
)
def test_a_route_of_models_that_are_not_served_is_refused(models, change: dict, cause: str) -> None:
    fields = {"name": "auto", "weak": "small", "strong": "large", "learned": learned(), "threshold": 0.0}
    with pytest.raises(ConfigError, match=cause):
        deployment_of(*models, routes=[Route(**fields | change)])


TABLE = '[[routes]]\nname = "auto"\nweak = "a"\nstrong = "b"\nfile = "r.json"\nshare = 0.3\n'


def test_routes_stand_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('model = "x"\n' + TABLE)
    [route] = read_config_file(path).routes
    assert route == RouteConfig(name="auto", weak="a", strong="b", file="r.json", share=0.3)
    learned().write(tmp_path / "r.json")
    [made] = open_routes([RouteConfig(name="auto", weak="a", strong="b", file=str(tmp_path / "r.json"), share=0.3)])
    assert made.threshold == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("share = 0.3", "share = 3", "share is not a number from 0 to 1"),
        ("share = 0.3", "", "share is not a number"),
        ('weak = "a"', "weak = 1", "there is no text 'weak'"),
        ('weak = "a"', 'week = "a"', "unknown key 'week'"),
        (TABLE, TABLE + TABLE, "two routes are called 'auto'"),
        ("[[routes]]", "[routes]", "routes are tables"),
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
    route = RouteConfig(name="auto", weak="small", strong="large", file=str(tmp_path / "r.json"), share=0.5)
    with pytest.raises(ConfigError, match="penstock serve small large vectors"):
        start_deployment(configs, routes=[route])
