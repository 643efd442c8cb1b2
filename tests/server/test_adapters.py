"""Adapters over HTTP, on the native backend: each request is answered by the one that it names, whatever else runs."""

import asyncio
import json
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from penstock.config import BackendConfig, Config, KvConfig, LoraConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.deploy import adapters as registry_file
from penstock.deploy.factory import open_executor, start_deployment, start_model
from penstock.deploy.routes import Route
from penstock.engine.state import EngineState
from penstock.models.architectures import describe
from penstock.models.catalog import resolve
from penstock.models.load import load_adapter
from penstock.serve import waiting
from penstock.serve.app import create_app
from penstock.serve.asking import _find_unchecked
from penstock.serve.cards import Listed
from penstock.serve.vllm import adapters as route_file
from penstock.serve.waiting import look_up
from penstock.types.adapter import AdapterOutlook
from penstock.types.errors import ConfigError, NotEnoughMemory
from support.deployments import deployment_of
from support.server.harness import make_client, make_runtime, until
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_hf

TINY = TinyLlama()
ENDS = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMES = ("red", "green", "team/blue")
ASK = {"prompt": "in the beginning", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
NUM_MORE = 40
NUM_ROUNDS = 1000 if "PENSTOCK_SOAK_S" in os.environ else 200
"""Loads and unloads in one server; `make test-soak` does the most."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in `tiny`, and its adapters in `adapters`; there are more than `max_loras` and than memory keeps."""
    folder = tmp_path_factory.mktemp("served")
    write_hf(folder / "tiny", TINY)
    for seed, name in enumerate([*NAMES, *(f"more-{index}" for index in range(NUM_MORE))], 1):
        factors = factors_of_llama(TINY, rank=2 + seed % 7, ends=ENDS, seed=seed)
        write_adapter(folder / "adapters" / name, factors, lora_alpha=24)
    write_adapter(folder / "adapters" / "more-late", factors, lora_alpha=24)
    return folder


def config_of(folder: Path, **lora: object) -> Config:
    lora = {"lora_modules": (f"crimson={folder / 'adapters' / 'red'}",), "lora_dir": str(folder / "adapters"), **lora}
    return Config(
        model=ModelConfig(model=str(folder / "tiny")),
        backend=BackendConfig(backend="native", threads=2),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, speculation="off"),  # answers last long enough to be met under way
        lora=LoraConfig(**({"max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 16} | lora)),
    )


@pytest.fixture(scope="module")
def running(folder):
    running = start_model(config_of(folder), resolve(str(folder / "tiny"), folder))
    yield running
    running.close()


@pytest.fixture
async def client(running):
    async with make_client(running) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[int]]:
    """Tokens of `ASK` by the name of an adapter, each computed alone, one text at a time; the base's is ''."""
    _, model, executor = open_executor(config_of(folder), resolve(str(folder / "tiny"), folder))
    program = describe(model.spec)
    running = start_model(config_of(folder), resolve(str(folder / "tiny"), folder))
    prompt = list(running.tokenizer.encode(ASK["prompt"], add_special_tokens=True))
    running.close()
    tokens = {}
    for number, name in enumerate(("", *NAMES)):
        if name:
            factors = load_adapter(folder / "adapters" / name, model.spec, program, tables=model.weights, max_rank=16)
            packed = executor.adapter_packer(factors)
            last = executor.capacity.num_blocks
            executor.place_adapter(number, packed, range(last - packed.num_pages, last))
        ids = list(prompt)
        for _ in range(ASK["max_tokens"]):
            ids.append(int(np.argmax(executor.forward_logits(ids, adapter=number)[-1])))
        tokens[name] = ids[len(prompt) :]
        executor.drop_adapter(number)
    executor.close()
    return tokens


async def tokens_of(client, model: str | None, **fields) -> list[int]:
    response = await client.post(
        "/v1/completions", json=ASK | {"ignore_eos": True} | fields | ({"model": model} if model else {})
    )
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == (model or "tiny")
    return body["choices"][0]["token_ids"]


async def test_a_request_is_answered_by_the_adapter_that_it_names(client, expected):
    for name in ("", *NAMES):
        assert await tokens_of(client, name or None) == expected[name], name
    assert await tokens_of(client, "crimson") == expected["red"]
    assert len({tuple(tokens) for tokens in expected.values()}) == 4, "else this proves nothing"


async def test_all_of_them_at_once(client, expected):
    names = [None, *NAMES] * 6
    more = [f"more-{index}" for index in range(NUM_MORE)]
    alone = {name: await tokens_of(client, name) for name in more[::8]}
    answers = await asyncio.gather(*[tokens_of(client, name) for name in [*names, *more]])
    for name, tokens in zip([*names, *more], answers, strict=True):
        if name is None or name in NAMES:
            assert tokens == expected[name or ""], name
        elif name in alone:
            assert tokens == alone[name], name


async def test_an_answer_ends_where_the_kv_cache_does_beside_its_adapter(client, running, monkeypatch):
    """As it does at the end of the context; a completion that asks for more is refused at once, with the numbers."""
    num_pages = running.engine.load().num_blocks_total - 2
    monkeypatch.setattr(running.adapters, "outlook", lambda _: AdapterOutlook(num_pages=num_pages))
    chat = {"model": "red", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    room = running.admission.max_len(running.adapters.find("red"))
    assert room < running.model.capacity.max_model_len
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", room)
    refused = await client.post("/v1/completions", json={"model": "red", "prompt": "hi", "max_tokens": room})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert f"context length is {room} tokens (tiny) on this server beside this adapter" in error["message"]
    assert "more KV cache would raise that" in error["message"]


async def test_chats_and_streams_have_it_too(client, expected):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answers = []
    for name in ("tiny", "red"):
        response = await client.post("/v1/chat/completions", json=chat | {"model": name})
        assert response.json()["model"] == name
        answers.append(response.json()["choices"][0]["token_ids"])
    assert answers[0] != answers[1]
    response = await client.post("/v1/completions", json=ASK | {"model": "red", "stream": True, "ignore_eos": True})
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0].get("token_ids") or ()] == expected["red"]
    assert {event["model"] for event in events} == {"red"}


async def test_a_prefix_of_the_base_is_none_of_an_adapter(client, expected):
    prompt = "in the beginning" * 5
    fresh = await tokens_of(client, "green", prompt=prompt, cache_salt="alone")
    await tokens_of(client, None, prompt=prompt)
    assert await tokens_of(client, "green", prompt=prompt) == fresh


async def test_models_are_listed_with_the_adapters_that_were_named_or_asked_for(client, folder):
    await tokens_of(client, "team/blue")
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert {"tiny", "crimson", "team/blue"} <= cards.keys()
    assert "more-no-one-asked" not in cards
    assert cards["crimson"]["parent"] == "tiny"
    assert cards["crimson"]["root"] == "red"
    assert cards["tiny"]["parent"] is None
    assert (await client.get("/v1/models/team/blue")).json() == cards["team/blue"]
    assert (await client.get("/v1/models/mauve")).status_code == 404


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_a_list_of_many_names_is_told_off_the_event_loop(monkeypatch, headers):
    """100,000 names, as many as there may be, took seconds there."""
    registered = {f"adapter-{index}": Path(f"/adapters/{index}") for index in range(1000)}
    tellers = set()
    card = Listed.card
    monkeypatch.setattr(Listed, "card", lambda listed: [card(listed), tellers.add(threading.current_thread())][0])
    runtime = make_runtime()
    deployment = deployment_of(runtime)
    deployment.default.adapters = SimpleNamespace(registered=lambda: registered, has=lambda _name: False)
    transport = httpx.ASGITransport(create_app(deployment, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        shown = (await client.get("/v1/models", params={"limit": "1000"} if headers else {}, headers=headers)).json()["data"]
    runtime.close()
    names = [*deployment.names, *registered]
    assert [one["id"] for one in shown] == (names[:1000] if headers else names)
    assert tellers
    assert threading.current_thread() not in tellers


@pytest.mark.parametrize("name", ["mauve", "../tiny", "adapters/../red", "/etc", "team", "a" * 5000, "red\0"])
async def test_a_name_that_nothing_has_is_not_found(client, name):
    response = await client.post("/v1/completions", json=ASK | {"model": name})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_who_may_ask_every_model_is_told_that_the_folder_was_asked(running, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "all"\nkey = "all"\n[[keys]]\nname = "some"\nkey = "some"\nmodels = ["tiny"]')
    async with make_client(running, api_keys_file=str(keys)) as client:
        for key, name, is_told in (("all", "mauve", True), ("all", "../tiny", False), ("some", "mauve", False)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=ASK | {"model": name}, headers=headers)
            assert answer.status_code == 404
            assert ("and no adapter of that name is in --lora-dir" in answer.text) is is_told, (key, name)


async def test_a_key_may_use_an_adapter_only_by_its_name(running, folder, tmp_path):
    """Not by its model's: other adapters of the model may be other tenants'. These are not even looked up."""
    write_adapter(folder / "adapters" / "unseen", factors_of_llama(TINY, ends=("q_proj",)))
    names, keys = {"tiny", *NAMES}, tmp_path / "keys.toml"
    allowed = {"all": names, "model": {"tiny"}, "adapter": {NAMES[0]}}
    lines = [f'[[keys]]\nname = "{key}"\nkey = "{key}"\n' for key in allowed]
    keys.write_text(f"{lines[0]}{lines[1]}models = ['tiny']\n{lines[2]}models = ['{NAMES[0]}']\n")
    async with make_client(running, api_keys_file=str(keys)) as client:
        for key, wanted in allowed.items():
            headers = {"Authorization": f"Bearer {key}"}
            for name in names if key == "all" else {*names, "unseen"}:
                answer = await client.post("/v1/completions", json=ASK | {"model": name}, headers=headers)
                card = await client.get(f"/v1/models/{name}", headers=headers)
                assert (answer.status_code, card.status_code) == ((200, 200) if name in wanted else (404, 404)), (key, name)
            listed = (await client.get("/v1/models", headers=headers)).json()["data"]
            assert {one["id"] for one in listed} & names == wanted
    assert "unseen" not in running.adapters.registered()


async def test_an_adapter_that_can_t_be_had_is_refused_with_the_cause(client, folder):
    other = factors_of_llama(replace(TINY, hidden_size=32), ends=("q_proj",))
    write_adapter(folder / "adapters" / "wide", factors_of_llama(TINY, rank=17, ends=ENDS))
    write_adapter(folder / "adapters" / "of-another", other)
    copy = {"base_model.model.model.embed_tokens.base_layer.weight": np.ones((264, 64), np.float32)}
    write_adapter(folder / "adapters" / "of-other-tokens", factors_of_llama(TINY, ends=("q_proj",)), extra=copy)
    causes = ("--max-lora-rank", "the model's matrix needs", "differs from the model's matrix in 264 rows")
    for name, cause in zip(("wide", "of-another", "of-other-tokens"), causes, strict=True):
        for _ in range(2):  # waited for, and known by then
            response = await client.post("/v1/completions", json=ASK | {"model": name})
            assert response.status_code == 400, response.text
            assert cause in response.json()["error"]["message"], response.text
    assert await tokens_of(client, "red")


async def test_without_adapters_nothing_is_looked_up(folder):
    runtime = make_runtime()
    try:
        async with make_client(runtime) as client:
            assert (await client.post("/v1/completions", json=ASK | {"model": "red"})).status_code == 404
    finally:
        runtime.close()


async def test_names_stay_when_the_model_is_unloaded_and_memory_is_given_back(folder, expected):
    deployment = start_deployment([config_of(folder)])
    served = deployment.default
    try:
        async with make_client(served.running) as client:
            assert await tokens_of(client, "red") == expected["red"]
        assert served.adapters.stats.num_in_memory == 1
        assert served.share.num_adapter_bytes > 0
        deployment.unload(served).result(30)
        assert served.adapters.stats.num_in_memory == 0
        assert served.adapters.find("red") is not None
        running = deployment.want(served).result(30)
        assert running.adapters is served.adapters
        async with make_client(running) as client:
            assert await tokens_of(client, "red") == expected["red"]
    finally:
        deployment.close(10)


async def change(client, verb: str, **body) -> tuple[int, str]:
    response = await client.post(f"/v1/{verb}_lora_adapter", json=body)
    return response.status_code, response.text


async def test_an_adapter_is_loaded_replaced_and_unloaded_by_name(client, folder, expected):
    red, green = (str(folder / "adapters" / name) for name in ("red", "green"))
    assert (await client.post("/v1/completions", json=ASK | {"model": "new"})).status_code == 404
    status, text = await change(client, "load", lora_name="new", lora_path=red)
    assert (status, text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert await tokens_of(client, "new") == expected["red"]
    status, text = await change(client, "load", lora_name="new", lora_path=green)
    assert status == 400
    assert "load_inplace" in text
    assert (await change(client, "load", lora_name="new", lora_path=green, load_inplace=True))[0] == 200
    assert await tokens_of(client, "new") == expected["green"]
    assert (await change(client, "unload", lora_name="new"))[0] == 200
    assert (await client.post("/v1/completions", json=ASK | {"model": "new"})).status_code == 404
    assert (await change(client, "unload", lora_name="new"))[0] == 404


async def test_a_request_ends_with_the_adapter_that_it_began_with(client, folder, running):
    assert (await change(client, "load", lora_name="going", lora_path=str(folder / "adapters" / "red")))[0] == 200
    body = ASK | {"model": "going", "ignore_eos": True, "max_tokens": 200}
    alone = await tokens_of(client, "red", max_tokens=200)
    answer = asyncio.create_task(client.post("/v1/completions", json=body, headers={"X-Request-Id": "going"}))
    await until(lambda: running.engine.load().num_running > 0)
    assert (await change(client, "unload", lora_name="going"))[0] == 200
    assert (await client.post("/v1/completions", json=body)).status_code == 404
    assert (await answer).json()["choices"][0]["token_ids"] == alone


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        ({"lora_path": "{folder}/tiny"}, 400, "--lora-dir"),
        ({"lora_path": "{folder}/adapters/../tiny"}, 400, "--lora-dir"),
        ({"lora_path": "/etc"}, 400, "--lora-dir"),
        ({"lora_path": "x\0y"}, 400, "--lora-dir"),
        ({"lora_path": "{folder}/adapters/nobody"}, 400, "adapter_config.json"),
        ({"lora_name": "tiny"}, 400, "the name of a model"),
        ({"lora_name": "a" * 500}, 400, "can't be the name of an adapter"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"model": "mauve"}, 404, "mauve"),
        ({"lora_path": 7}, 400, "must be a string"),
    ],
)
async def test_what_can_t_be_loaded_is_refused_by_name(client, folder, body, status, cause):
    asked = {"lora_name": "bad", "lora_path": str(folder / "adapters" / "red")} | body
    if isinstance(asked["lora_path"], str):
        asked["lora_path"] = asked["lora_path"].replace("{folder}", str(folder))
    told = await change(client, "load", **asked)
    assert told[0] == status, told
    assert cause in told[1]
    assert (await client.get("/v1/models/bad")).status_code == 404


async def test_a_model_without_adapters_is_named(running):
    plain = make_runtime(served_names=("plain",))
    try:
        async with make_client(running, plain) as client:
            told = await change(client, "unload", model="plain", lora_name="red")
    finally:
        plain.close()
    assert (told[0], "plain is not served with adapters" in told[1]) == (400, True), told


async def test_an_adapter_can_not_have_the_name_of_a_route_which_would_hide_it(running, folder):
    async with make_client(running, routes=[Route(name="auto", models=("tiny",))]) as client:
        told = await change(client, "load", lora_name="auto", lora_path=str(folder / "adapters" / "red"))
    assert (told[0], "the name of a model, route or pipeline" in told[1]) == (400, True), told
    assert not running.adapters.has("auto")


async def test_with_keys_adapters_are_an_admin_s_who_may_load_from_the_folder_alone_too(running, folder, tmp_path):
    elsewhere = write_adapter(tmp_path / "elsewhere", factors_of_llama(TINY, ends=ENDS))
    body = {"lora_name": "else", "lora_path": str(folder / "adapters" / "red")}
    async with make_client(running, api_keys=("user",), admin_api_keys=("boss",)) as client:
        for key, status in ((None, 401), ("user", 403), ("boss", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert (await client.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == status
        for key, status in (("user", 403), ("boss", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            if key == "boss":
                out = body | {"lora_name": "out", "lora_path": str(elsewhere)}
                out = await client.post("/v1/load_lora_adapter", json=out, headers=headers)
                assert (out.status_code, "--lora-dir" in out.text) == (400, True)
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "else"}, headers=headers)
            assert gone.status_code == status


async def test_a_gateway_is_told_which_adapters_are_in_the_kv_cache(client, running):
    await tokens_of(client, "red")
    await tokens_of(client, "team/blue")
    async with make_client(running, metrics_compat="vllm") as gateway:
        [line] = re.findall(r"^vllm:lora_requests_info.*", (await gateway.get("/metrics")).text, re.MULTILINE)
    assert 'max_lora="4"' in line
    [names] = re.findall(r'running_lora_adapters="(.*?)"', line)
    assert {"red", "team/blue"} <= set(names.split(","))
    # An adapter whose files were changed is there twice.
    assert len(names.split(",")) <= running.engine.load().adapters.num_resident


async def test_metrics_and_load_tell_of_adapters_without_their_names(client, running):
    await tokens_of(client, "red")
    text = (await client.get("/metrics")).text
    values = {}
    for line in text.splitlines():
        if line.startswith("penstock_adapter"):
            series, _, value = line.rpartition(" ")
            values[series.replace('model="tiny",', "").replace('{model="tiny"}', "")] = float(value)
    assert values['penstock_adapter_loads_total{result="ok"}'] >= 1
    assert values['penstock_adapters{place="memory"}'] >= 1
    assert values["penstock_adapter_memory_bytes"] > 0
    assert values["penstock_adapter_kv_blocks"] > 0
    assert values["penstock_adapter_placements_total"] >= 1
    assert '"red"' not in text
    load = (await client.get("/load")).json()["adapters"]
    assert load["kv_cache"] >= 1
    assert load["memory"] <= 8, "max_cpu_loras"
    assert load["names"] >= 2


async def test_a_request_that_waits_for_its_adapter_says_so_and_others_pass_it(client, running, expected, monkeypatch):
    read, gate = running.adapters._read, threading.Event()
    monkeypatch.setattr(running.adapters, "_read", lambda path, files: read(path, files) if gate.wait(20) else None)
    body = ASK | {"model": "more-late", "ignore_eos": True}
    waiting = asyncio.create_task(client.post("/v1/completions", json=body, headers={"X-Request-Id": "why"}))
    told = {}

    async def is_waiting() -> bool:
        answer = await client.get("/v1/requests/why")
        told.update(answer.json()["choices"][0]["waited"] if answer.status_code == 200 else {})
        return told.get("now_for") == "adapter"

    try:
        async with asyncio.timeout(20):
            while not await is_waiting():  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0.001)
        assert await tokens_of(client, None) == expected[""]
    finally:
        gate.set()
    assert (await waiting).status_code == 200
    ended = (await client.get("/v1/requests/why")).json()
    assert "for its adapter" in ended["summary"]
    assert ended["choices"][0]["waited"]["for_ms"]["adapter"] > 0


async def test_without_adapters_there_is_nothing_to_load_or_to_measure():
    runtime = make_runtime()
    try:
        async with make_client(runtime) as client:
            status, text = await change(client, "load", lora_name="red", lora_path="/nowhere")
            assert status == 400
            assert "--lora-dir" in text
            assert "penstock_adapter" not in (await client.get("/metrics")).text
            assert "adapters" not in (await client.get("/load")).json()
    finally:
        runtime.close()


def test_an_adapter_that_is_called_like_a_model_is_refused(folder):
    modules = (f"tiny={folder / 'adapters' / 'red'}",)
    with pytest.raises(ConfigError, match="An adapter of tiny is called 'tiny'"):
        start_deployment([config_of(folder, lora_modules=modules)])


async def test_an_engine_that_is_made_anew_has_the_adapters_of_the_one_before(folder, expected):
    running = start_model(config_of(folder), resolve(str(folder / "tiny"), folder))
    try:
        async with make_client(running) as client:
            assert await tokens_of(client, "red") == expected["red"]
            running.engine._engine._core.begin = broken
            assert (await client.post("/v1/completions", json=ASK | {"model": "red"})).status_code in (500, 503)
            await until(lambda: running.engine.state is EngineState.READY)
            assert await tokens_of(client, "red") == expected["red"]
            assert running.adapters.stats.num_loads == 1
    finally:
        running.close()


def broken(_now_ns):
    raise AssertionError("a fault of ours")


@pytest.mark.parametrize(
    ("lora", "cause"),
    [
        ({"lora_modules": ("red",)}, "not NAME=PATH"),
        ({"lora_modules": ("red=/nowhere",)}, "there is no /nowhere"),
        ({"lora_modules": ("red=.", "red=.")}, "two adapters are called 'red'"),
        ({"lora_dir": "/nowhere"}, "there is no folder"),
    ],
)
def test_settings_that_name_nothing_are_refused_before_a_model_is_loaded(folder, lora, cause):
    with pytest.raises(ConfigError, match=cause):
        start_model(config_of(folder, **lora), resolve(str(folder / "tiny"), folder))


def test_more_adapters_than_memory_are_refused_with_the_remedy(folder):
    config = config_of(folder, max_cpu_loras=100_000, max_lora_rank=256)
    config = replace(config, kv=KvConfig())
    with pytest.raises(NotEnoughMemory, match="--max-cpu-loras"):
        start_model(config, resolve(str(folder / "tiny"), folder))


# what becomes of adapters while they are in use


@pytest.fixture
async def small(folder, tmp_path):
    """A server of its own that keeps few adapters in memory, and runs one at a time; and its folder, which tests change."""
    adapters = tmp_path / "adapters"
    shutil.copytree(folder / "adapters", adapters, ignore=shutil.ignore_patterns("more-*"))
    config = config_of(folder, lora_modules=(), lora_dir=str(adapters), max_cpu_loras=3, max_loras=1)
    running = start_model(replace(config, kv=KvConfig(kv_cache_memory_bytes=1 << 17)), resolve(str(folder / "tiny"), folder))
    try:
        async with make_client(running) as client:
            yield running, client, adapters
    finally:
        running.close()


async def test_requests_that_wait_go_on_with_the_adapter_that_they_asked_for(small, expected, monkeypatch):
    """Its name goes or becomes another's, its files are gone, and others want the memory and the pages."""
    running, client, adapters = small
    core, gate = running.engine._engine._core, threading.Event()
    begin = core.begin
    monkeypatch.setattr(core, "begin", lambda now_ns: begin(now_ns) if gate.is_set() else None)

    async def ask(name):
        num = running.engine.load().num_waiting
        task = asyncio.create_task(tokens_of(client, name))
        await until(lambda: running.engine.load().num_waiting > num)
        return task

    path = adapters / "red" / "again"
    shutil.copytree(adapters / "red", path)
    assert (await change(client, "load", lora_name="going", lora_path=str(path)))[0] == 200
    waiting = [(await ask("going"), "red")]
    shutil.rmtree(path)
    shutil.copytree(adapters / "green", path)
    assert (await change(client, "load", lora_name="going", lora_path=str(path), load_inplace=True))[0] == 200
    waiting += [(await ask(name), name) for name in ("red", "team/blue")]
    waiting.append((await ask("going"), "green"))
    assert (await change(client, "unload", lora_name="going"))[0] == 200
    shutil.rmtree(path)
    assert (await client.post("/v1/completions", json=ASK | {"model": "going"})).status_code == 404
    gate.set()
    waiting += [(asyncio.create_task(tokens_of(client, name)), name) for name in ("green", "team/blue", "red")]
    for task, name in waiting:
        assert await task == expected[name], name


async def test_a_folder_that_goes_while_it_is_served_stays_for_as_long_as_memory_has_it(small, expected):
    running, client, adapters = small
    assert await tokens_of(client, "red") == expected["red"]
    shutil.rmtree(adapters / "red")
    assert await tokens_of(client, "red") == expected["red"]
    assert await tokens_of(client, "green") == expected["green"]
    running.adapters.close()  # nothing is in memory, and the pool of pages has it still
    assert await tokens_of(client, "red") == expected["red"]


async def test_a_name_whose_folder_went_is_not_found_once_nothing_has_it(small):
    running, client, adapters = small
    shutil.copytree(adapters / "red", adapters / "brief")
    assert running.adapters.find("brief") is not None
    shutil.rmtree(adapters / "brief")
    answers = [await client.post("/v1/completions", json=ASK | {"model": "brief"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 404]  # it was found, and can't be read


@pytest.mark.parametrize("config_is_pipe", [True, False])
async def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(small, expected, config_is_pipe):
    _, client, adapters = small
    for name in ("piped", "also"):
        shutil.copytree(adapters / "red", adapters / name)
        pipe = adapters / name / ("adapter_config.json" if config_is_pipe else "adapter_model.safetensors")
        pipe.unlink()
        os.mkfifo(pipe)
    async with asyncio.timeout(20):
        assert (await change(client, "load", lora_name="new", lora_path=str(adapters / "piped")))[0] == 400
        response = await client.post("/v1/completions", json=ASK | {"model": "also"})
        assert response.status_code == (404 if config_is_pipe else 400)
        assert (await client.get("/metrics")).status_code == 200
        assert await tokens_of(client, "red") == expected["red"]


async def test_a_load_that_does_not_end_holds_up_neither_metrics_nor_other_loads(small, expected, monkeypatch):
    """As from a disk that does not answer: another thread reads after five seconds, and whoever waits is told."""
    running, client, adapters = small
    registry, gate = running.adapters, threading.Event()
    read = registry._read
    monkeypatch.setattr(registry_file, "_STUCK_NS", 0)
    monkeypatch.setattr(route_file, "LOAD_TIMEOUT_S", 0.05)

    def slow(path, files):
        assert path.name != "green" or gate.wait(20)
        return read(path, files)

    monkeypatch.setattr(registry, "_read", slow)
    try:
        loads = [change(client, "load", lora_name=f"new{idx}", lora_path=str(adapters / "green")) for idx in range(40)]
        for status, text in await asyncio.gather(*loads):
            assert (status, "was not read in" in text or "being loaded by name" in text) in ((503, True), (429, True)), text
        assert (await client.get("/metrics")).status_code == 200
    finally:
        gate.set()
    assert await tokens_of(client, "red") == expected["red"]
    await until(lambda: not registry._asked)
    assert set(registry.registered()) <= {"red"}, "nobody waited for these names"


@pytest.fixture
def slow_disk(small, monkeypatch):
    """A disk that takes up to a second for each question about the folder: set the event, and it answers at once."""
    _, _, adapters = small
    answers, asked, is_file = threading.Event(), [], Path.is_file

    def ask(path):
        if path.is_relative_to(adapters):
            is_on_loop = threading.current_thread() is threading.main_thread()
            assert answers.is_set() or not is_on_loop, "the event loop waits for the disk"
            asked.append(path.parent.name)
            answers.wait(1.0)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", ask)
    yield answers, asked
    answers.set()


async def test_a_slow_disk_that_is_asked_for_a_name_holds_up_no_other_request(small, slow_disk, expected):
    """It took three seconds from every stream: the event loop asked."""
    _, client, _ = small
    answers, asked = slow_disk
    answers.set()
    assert await tokens_of(client, "green") == expected["green"]
    answers.clear()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    asks = [client.post("/v1/completions", json=ASK | {"model": "red"}) for _ in range(5)]
    asks += [client.post("/v1/chat/completions", json=chat | {"model": "red"}), client.get("/v1/models/red")]
    asks += [client.post("/tokenize", json={"model": "red", "prompt": "in"}), client.get("/v1/models/mauve")]
    tasks = [asyncio.create_task(ask) for ask in asks]
    stream = asyncio.create_task(client.post("/v1/completions", json=ASK | {"model": "green", "stream": True}))
    await until(lambda: stream.done() and {"red", "mauve"} <= set(asked))
    assert stream.result().status_code == 200
    assert not any(task.done() for task in tasks), "else this proves nothing"
    assert asked.count("red") == 1, "all share one look"
    answers.set()
    statuses = [response.status_code for response in await asyncio.gather(*tasks)]
    assert statuses == [200] * 8 + [404]
    assert await tokens_of(client, "red") == expected["red"]


async def test_a_disk_that_hangs_refuses_new_names_and_no_others(small, slow_disk, expected, monkeypatch):
    _, client, _ = small
    answers, asked = slow_disk
    monkeypatch.setattr(waiting, "MAX_LOOK_S", 0.02)
    monkeypatch.setattr(waiting, "MAX_LOOKS", 8)
    for index in range(10):
        response = await client.post("/v1/completions", json=ASK | {"model": f"new-{index}"})
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert ("too many" if index >= 8 else "could not be searched") in response.text.lower()
    assert len(asked) == waiting.MAX_LOOK_THREADS, "others wait for a thread"
    assert await tokens_of(client, None) == expected[""]
    answers.set()
    monkeypatch.setattr(waiting, "MAX_LOOK_S", 5.0)
    async with asyncio.timeout(20):  # until the looks that were put off have ended
        # No event says when a lookup gives its place back.
        while (await client.post("/v1/completions", json=ASK | {"model": "red"})).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await tokens_of(client, "red") == expected["red"]
    assert len(asked) >= 8


async def test_a_disk_that_fails_is_told(small, monkeypatch):
    _, client, _ = small

    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "is_file", fail)
    response = await client.post("/v1/completions", json=ASK | {"model": "red"})
    assert (response.status_code, "Input/output error" in response.text) == (503, True), response.text


async def test_a_file_that_was_rewritten_in_place_is_read_by_load_inplace(small, expected):
    _, client, adapters = small
    path = adapters / "red" / "adapter_model.safetensors"
    prompt = {"prompt": "in the beginning" * 5}
    before = await client.post("/v1/completions", json=ASK | prompt | {"model": "red", "stream": True})
    assert await tokens_of(client, "red") == expected["red"]
    data, status = bytearray(path.read_bytes()), path.stat()
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin:] = bytes(len(data) - begin)  # zeros: the base's own answer
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert await tokens_of(client, "red") == expected["red"], "until it is read again"
    assert (await change(client, "load", lora_name="red", lora_path=str(adapters / "red"), load_inplace=True))[0] == 200
    assert await tokens_of(client, "red") == expected[""]
    after = await client.post("/v1/completions", json=ASK | prompt | {"model": "red", "stream": True})
    firsts = [one.text.partition("\ndata: ")[2].partition("\n")[0] for one in (before, after)]
    prints = [json.loads(first)["system_fingerprint"] for first in firsts]
    assert prints[0] != prints[1]
    assert {len(one.rpartition("_")[2]) for one in prints} == {8}
    base = await client.post("/v1/completions", json=ASK | prompt)
    fresh = await tokens_of(client, "red", **prompt)
    assert base.json()["choices"][0]["token_ids"] == fresh, "no prefix of the old one was used"


async def test_an_adapter_is_loaded_while_the_kv_cache_is_full(small, expected):
    running, client, adapters = small
    body = ASK | {"ignore_eos": True, "max_tokens": 200}
    fillers = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
    await until(lambda: running.engine.load().num_running and running.engine.load().num_waiting, 10.0)
    assert running.engine.load().num_rows_free, "it is memory that those who wait lack"
    assert (await change(client, "load", lora_name="new", lora_path=str(adapters / "red")))[0] == 200
    assert await tokens_of(client, "new") == expected["red"]
    for one in fillers:
        assert (await one).status_code == 200


async def test_an_adapter_that_is_too_large_for_the_memory_is_refused_with_the_remedy(folder, tmp_path):
    write_adapter(tmp_path / "large", factors_of_llama(TINY, rank=16))
    config = config_of(folder, lora_modules=(), lora_dir=str(tmp_path), max_cpu_loras=1, max_lora_rank=16)
    running = start_model(config, resolve(str(folder / "tiny"), folder))
    try:
        async with make_client(running) as client:
            response = await client.post("/v1/completions", json=ASK | {"model": "large"})
            assert response.status_code == 400, response.text
            assert "adapters may take" in response.text
            assert "--max-cpu-loras" in response.text
    finally:
        running.close()


async def test_a_name_that_two_models_could_have_is_the_first_one_s_that_was_asked(folder):
    first = replace(
        config_of(folder, lora_modules=(), lora_dir=str(folder / "none")), model=ModelConfig(model=str(folder / "tiny"))
    )
    (folder / "none").mkdir(exist_ok=True)
    other = replace(
        config_of(folder, lora_modules=()), model=ModelConfig(model=str(folder / "tiny"), served_model_names=("other",))
    )
    deployment = start_deployment([first, other])
    try:
        one, two = deployment.served
        found, ref = look_up("red", deployment)
        assert (found, deployment.adapter_owner("red")) == (two, two)
        shutil.copytree(folder / "adapters" / "red", folder / "none" / "red", dirs_exist_ok=True)
        assert _find_unchecked("red", deployment, {}) == (two, ref), (
            "it stays, though the first model's folder has the name now"
        )
        assert not one.adapters.has("red")
        assert one.adapters.find("red") is not None
        assert _find_unchecked("red", deployment, {})[0] is one, "of two that have it, the first"
        app = create_app(deployment, ServerConfig())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            path = str(folder / "adapters" / "green")
            look_up("green", deployment)
            status, text = await change(client, "load", model="tiny", lora_name="green", lora_path=path)
            assert (status, "an adapter of another model" in text) == (400, True), text
            status, text = await change(client, "load", model="tiny", lora_name="other", lora_path=path)
            assert (status, "the name of a model" in text) == (400, True), text
            status, text = await change(client, "load", lora_name="green", lora_path=path, load_inplace=True)
            assert (status, deployment.adapter_owner("green")) == (200, two), text
            assert (await change(client, "unload", lora_name="green"))[0] == 200
            assert deployment.adapter_owner("green") is None
    finally:
        deployment.close(10)
        shutil.rmtree(folder / "none")


async def test_loads_and_unloads_under_traffic_leave_memory_flat(small, expected):
    running, client, adapters = small
    await churn(client, running, adapters, expected, num_rounds=60)
    before = resident_bytes()
    await churn(client, running, adapters, expected, num_rounds=NUM_ROUNDS - 60)
    grown = resident_bytes() - before
    assert grown < 8 << 20, f"{grown >> 10} KiB"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def churn(client, running, adapters: Path, expected, *, num_rounds: int) -> None:
    """Names come and go while requests of others run; no name, page or image is left, and every answer is right."""

    async def ask() -> None:
        for idx in range(num_rounds // 10):
            name = ("", "green", "team/blue")[idx % 3]
            assert await tokens_of(client, name or None) == expected[name]

    async def come_and_go() -> None:
        for idx in range(num_rounds):
            name = ("red", "green")[idx % 2]
            status, text = await change(client, "load", lora_name="passing", lora_path=str(adapters / name))
            assert status == 200, text
            if idx % 5 == 0:
                assert await tokens_of(client, "passing") == expected[name]
            assert (await change(client, "unload", lora_name="passing"))[0] == 200

    await asyncio.gather(ask(), come_and_go())
    registry, kv = running.adapters, running.engine._engine._core.scheduler.kv
    await until(lambda: running.engine.load().num_running == 0)
    assert registry.stats.num_in_memory <= 3
    assert len(registry._by_number) <= 2 + 8, "those with a name, and those of the last step's requests"
    assert kv.pool.num_available == kv.num_total_blocks
    assert sum(len(one.block_ids) for one in kv.adapters.residents.values()) == kv.adapters.counts.num_blocks
