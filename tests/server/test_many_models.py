"""Two models in one server: each request reaches its own, each is measured apart, and one that fails leaves the other alone."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.clock import WallClock
from penstock.engine.bridge import Bridge
from penstock.engine.output import OutputStage
from penstock.engine.state import EngineState
from penstock.engine.supervisor import Supervisor
from penstock.engine.thread import Engine
from penstock.obs.metrics import Metrics
from penstock.testing import HashExecutor, HashModel, make_core
from penstock.text.tokenizer import detokenizer_factory
from support.failing_executor import FailingExecutor
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, make_client, make_runtime, running, until

OTHER_MODEL = HashModel(vocab_size=PRINTABLE_MODEL.vocab_size, first_token_id=PRINTABLE_MODEL.first_token_id + 30)
ASK = {"prompt": "hello", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def one():
    runtime = make_runtime(served_names=("one",), aliases=("uno",))
    yield runtime
    runtime.close()


@pytest.fixture
def two():
    runtime = make_runtime(HashExecutor(CAPACITY, model=OTHER_MODEL), served_names=("two", "zwei"), aliases=())
    yield runtime
    runtime.close()


@pytest.fixture
async def client(one, two):
    async with make_client(one, two) as client:
        yield client


async def text_of(client, model=None, path="/v1/completions", **fields):
    body = ASK | fields | ({} if model is None else {"model": model})
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"], response.json()["model"]


async def test_a_request_reaches_the_model_that_it_names(client):
    answers = {name: await text_of(client, name) for name in ("one", "uno", "two", "zwei", None)}
    assert {name: model for name, (_, model) in answers.items()} == {
        "one": "one",
        "uno": "uno",
        "two": "two",
        "zwei": "zwei",
        None: "one",
    }
    texts = {name: text for name, (text, _) in answers.items()}
    assert texts["one"] == texts["uno"] == texts[None]
    assert texts["two"] == texts["zwei"] != texts["one"]


async def test_both_answer_at_once_as_each_does_alone(client):
    alone = {name: await text_of(client, name) for name in ("one", "two")}
    names = ["one", "two"] * 8
    assert await asyncio.gather(*[text_of(client, name) for name in names]) == [alone[name] for name in names]


async def test_a_chat_and_a_tokenizer_are_the_model_s_own(client, two):
    two.chat_template = None
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert (await client.post("/v1/chat/completions", json=messages | {"model": "one"})).status_code == 200
    refused = await client.post("/v1/chat/completions", json=messages | {"model": "two"})
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"]
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [70]})):
        assert (await client.post(path, json=body | {"model": "two"})).status_code == 200
        assert (await client.post(path, json=body | {"model": "three"})).status_code == 404


async def test_an_unknown_model_is_404_with_the_names_of_all(client):
    for path, fields in (("/v1/completions", ASK), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
        response = await client.post(path, json=fields | {"model": "three"})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "Served: 'one', 'two', 'zwei'" in error["message"]
    for path in ("/v1/models/three", "/load?model=three", "/kv?model=three"):
        assert (await client.get(path)).status_code == 404


async def test_all_are_listed_and_each_can_be_asked_about(client, two):
    assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["one", "two", "zwei"]
    assert (await client.get("/v1/models/uno")).json()["id"] == "uno"
    await text_of(client, "two", prompt="a" * 100)
    pools = [(await client.get(f"/kv?model={name}")).json()["states"]["cached"] for name in ("one", "two")]
    assert pools[0] == 0 < pools[1]
    assert (await client.get("/load?model=two")).json()["kv_blocks"] == two.engine.load().num_blocks_total


async def test_metrics_have_a_series_for_each_model_and_a_family_once(client):
    await text_of(client, "two")
    text = (await client.get("/metrics")).text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    series = {
        sample.labels["model"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "penstock_generation_tokens_total"
    }
    assert series == {"one": 0, "two": 12}


async def test_requests_of_both_are_told_and_cancelled_by_their_ids():
    gate, other = GatedExecutor(), GatedExecutor()
    models = [make_runtime(gate, served_names=("one",), aliases=()), make_runtime(other, served_names=("two",), aliases=())]
    try:
        async with make_client(*models) as client:
            asking = [
                asyncio.create_task(client.post("/v1/completions", json=ASK | {"model": name}, headers={"X-Request-Id": name}))
                for name in ("one", "two")
            ]
            await until(lambda: all(model.bridge.num_open_requests for model in models))
            assert [call["id"] for call in (await client.get("/v1/requests")).json()["data"]] == ["one", "two"]
            assert (await client.delete("/v1/requests/two")).status_code == 200
            other.open()
            await asking[1]
            gate.open()
            assert (await asking[0]).status_code == 200
            assert (await client.get("/v1/requests/two")).json()["choices"][0]["finish_reason"] == "cancelled"
    finally:
        for model in models:
            model.close()


def supervised(make_executor, **fields):
    """A model whose engine is made anew, with the next executor, when it fails."""
    runtime = make_runtime(**fields)
    runtime.engine.close(0.0)
    bridge, metrics = Bridge(), Metrics(fields["served_names"][0])

    def make_engine(on_failed):
        output = OutputStage(detokenizer_factory(runtime.tokenizer))
        return Engine(make_core(CAPACITY), make_executor(), output, clock=WallClock(), sink=bridge.deliver, on_failed=on_failed)

    engine = Supervisor(make_engine, clock=WallClock(), step_timeout_s=None, on_restart=metrics.count_restart)
    bridge.attach(engine)
    metrics.connect(load=engine.load, signals=runtime.metrics.read_signals, waste=engine.kv_waste_ratio)
    engine.start()
    runtime.engine, runtime.bridge, runtime.metrics = engine, bridge, metrics
    return runtime


async def test_one_that_fails_is_made_anew_and_the_other_does_not_notice(two):
    may_restart = asyncio.Event()
    loop = asyncio.get_running_loop()
    executors = [FailingExecutor(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), fail_at_step=2)]

    def next_executor():
        if executors:
            return executors.pop()
        asyncio.run_coroutine_threadsafe(may_restart.wait(), loop).result(20)
        return HashExecutor(CAPACITY, model=PRINTABLE_MODEL)

    one = supervised(next_executor, served_names=("one",), aliases=())
    try:
        async with make_client(one, two) as client:
            expected = await text_of(client, "two")
            failed, other = await asyncio.gather(
                client.post("/v1/completions", json=ASK | {"model": "one"}), text_of(client, "two")
            )
            assert failed.status_code >= 500
            assert other == expected
            await until(lambda: one.engine.state is EngineState.RESTARTING)
            assert await text_of(client, "two") == expected
            assert (await client.post("/v1/completions", json=ASK | {"model": "one"})).status_code == 503
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert "the engine of one is restarting" in ready.text
            assert (await client.get("/health")).status_code == 200
            may_restart.set()
            await until(lambda: one.engine.state is EngineState.READY)
            assert (await client.get("/ready")).status_code == 200
            assert (await text_of(client, "one"))[1] == "one"
            assert await text_of(client, "two") == expected
            assert two.engine.state is EngineState.READY
            assert (one.metrics.num_restarts, two.metrics.num_restarts) == (1, 0)
    finally:
        one.close()


async def test_a_model_that_can_not_be_made_anew_is_told_by_its_name(one, two):
    async with make_client(one, two) as client:
        two.engine.close(0.0)
        health = await client.get("/health")
        assert health.status_code == 503
        assert "The engine of two has stopped" in health.text
        assert (await text_of(client, "one"))[1] == "one"


def test_a_real_server_serves_both_and_drains_both(two):
    with running(served_names=("one",), aliases=(), others=(two,)) as server:
        assert "serves one, two at" in server.ready_text
        for name in ("one", "two"):
            assert httpx.post(f"{server.url}/v1/completions", json=ASK | {"model": name}).json()["model"] == name
    assert two.engine.state is EngineState.STOPPED
