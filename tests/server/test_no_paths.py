"""Where files lie is nobody's business but the operator's: no answer to an ordinary key has an absolute path."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from penstock.config import BackendConfig, Config, KvConfig, LoraConfig, ModelConfig, ServerConfig
from penstock.deploy.factory import start_model
from penstock.deploy.running import RunningModel
from penstock.models.catalog import resolve
from penstock.serve.app import create_app
from penstock.types.errors import ModelError
from support.deployments import deployment_of
from support.server.harness import make_client
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_hf

TINY = TinyLlama()
BROKEN = ("dora", "wide", "not-finite", "too-large", "cut-short", "no-json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter of it, and adapters that can't be served."""
    folder = tmp_path_factory.mktemp("a folder of mine")
    write_hf(folder / "tiny", TINY)
    factors = factors_of_llama(TINY, rank=4, ends=("q_proj",))
    adapters = folder / "adapters"
    for name in ("red", "cut-short", "no-json"):
        write_adapter(adapters / name, factors)
    write_adapter(adapters / "dora", factors, use_dora=True)
    write_adapter(adapters / "wide", factors_of_llama(TINY, rank=40, ends=("q_proj",)))
    write_adapter(adapters / "not-finite", factors, lora_alpha=math.nan)
    write_adapter(adapters / "too-large", factors, lora_alpha=1e30)
    weights = adapters / "cut-short" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (adapters / "no-json" / "adapter_config.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> RunningModel:
    config = Config(
        model=ModelConfig(model=str(folder / "tiny")),
        backend=BackendConfig(backend="native", threads=1),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        lora=LoraConfig(
            lora_dir=str(folder / "adapters"), lora_modules=(f"crimson={folder / 'adapters' / 'red'}",), max_lora_rank=8
        ),
    )
    running = start_model(config, resolve(str(folder / "tiny"), folder))
    yield running
    running.close()


async def answers_of(client: httpx.AsyncClient, running: RunningModel) -> dict[str, str]:
    """The text and the headers of every GET route, and of requests that are refused, by what was asked."""
    app = create_app(deployment_of(running), ServerConfig())
    paths = {route.path for route in app.routes if isinstance(route, Route) and "GET" in (route.methods or ())}
    named = {re.sub(r"\{.*?\}", name, path) for path in paths for name in ("tiny", "crimson", "nothing")}
    brief = {"/debug/trace": "/debug/trace?seconds=0.01"}  # by default it watches for 5 s
    asks = [("GET", brief.get(path, path), None) for path in sorted(named)]
    asks += [
        ("GET", f"{path}?model={name}", None) for path in ("/props", "/slots", "/kv", "/load") for name in ("red", "mauve")
    ]
    for name in (*BROKEN, "mauve", "../tiny"):
        body = {"model": name, "prompt": "hi", "max_tokens": 1}
        asks += [("POST", "/v1/completions", body), ("POST", "/tokenize", body), ("GET", f"/v1/models/{name}", None)]
    asks += [("POST", "/api/show", {"model": "tiny"}), ("POST", "/v1/embeddings", {"model": "tiny", "input": "hi"})]
    asks += [("POST", "/v1/completions", {"model": "crimson", "prompt": 1}), ("GET", "/v1/models", None)]
    found = {}
    for method, path, body in asks:
        async with asyncio.timeout(20):
            response = await client.request(method, path, json=body)
        assert response.status_code != 500, (path, body, response.text)
        found[f"{method} {path} {body}"] = f"{response.headers} {response.text}"
    return found


async def test_no_answer_has_the_folder_in_which_files_lie(running: RunningModel, folder: Path) -> None:
    async with make_client(running) as client:
        answers = await answers_of(client, running)
    assert len(answers) > 60
    assert [ask for ask, answer in answers.items() if str(folder.parent) in answer] == []


@pytest.mark.parametrize("name", BROKEN)
async def test_an_adapter_that_can_not_be_served_is_refused_with_the_reason(running: RunningModel, name: str) -> None:
    reasons = {"dora": "DoRA", "wide": "--max-lora-rank", "not-finite": "lora_alpha", "too-large": "too large"}
    async with make_client(running) as client:
        response = await client.post("/v1/completions", json={"model": name, "prompt": "hi"})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert reasons.get(name, "adapter_") in message
    assert "Ask again" not in message


async def test_props_and_slots_of_an_unknown_model_are_404_beside_adapters(running: RunningModel) -> None:
    async with make_client(running) as client:
        for path in ("/props", "/slots"):
            assert (await client.get(f"{path}?model=mauve")).status_code == 404
            assert (await client.get(f"{path}?model=red")).status_code == 200


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/srv/my models/tiny/config.json: it is cut short", "config.json: it is cut short"),
        ("/srv/tiny: it asks for /srv/other/a.gguf", "tiny: it asks for a.gguf"),
        ("No model lies at '/srv/tiny'.", "No model lies at 'tiny'."),
        ("Ask https://example.org/a/b, and/or /v1/models", "Ask https://example.org/a/b, and/or models"),
    ],
)
def test_errors_have_a_form_without_folders(message: str, told: str) -> None:
    assert ModelError(message).without_folders() == told
