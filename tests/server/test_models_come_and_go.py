"""Models that are loaded when they are asked for, over HTTP: all is answered, and as by models that never leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.calls import run as run_file
from penstock.clock import VirtualClock
from penstock.config import ServerConfig
from penstock.deploy.adapters import Adapters
from penstock.deploy.deployment import RETRY_NS, Deployment
from penstock.deploy.resources import MemoryBudget, MemoryShare
from penstock.deploy.routes import Route
from penstock.deploy.running import ModelState, ServedModel
from penstock.models.facts import ModelFacts
from penstock.obs.metrics import Metrics
from penstock.serve.app import create_app
from penstock.serve.course import COURSE_KEY, Course
from penstock.serve.waiting import FolderWatch
from penstock.testing import HashExecutor, HashModel
from penstock.types.errors import ModelError
from penstock.types.tenant_limits import TenantLimits
from support.server.harness import CAPACITY, PRINTABLE_MODEL, GatedExecutor, make_client, make_runtime, make_text_runtime, until

NAMES = ("a", "b", "texts")
ASK = {"prompt": "hello", "max_tokens": 12, "temperature": 0}


def runtime_of(name, **fields):
    if name == "texts":
        return make_text_runtime(served_names=(name,), aliases=(), **fields)
    model = HashModel(vocab_size=PRINTABLE_MODEL.vocab_size, first_token_id=PRINTABLE_MODEL.first_token_id + ord(name) % 32)
    return make_runtime(HashExecutor(CAPACITY, model=model), served_names=(name,), aliases=(), **fields)


class Served:
    """A deployment of hash models with room for some of them, its client, and gates that hold its loads."""

    def __init__(self, num_rooms=1, **fields):
        self.memory = MemoryBudget(lambda: 1000, limit_bytes=num_rooms)
        self.may_load = threading.Event()
        self.may_load.set()
        self.error = None
        self.runtimes = []
        self.make = runtime_of
        served = [
            ServedModel(
                names=(name,),
                metrics=Metrics(name),
                load=lambda name=name: self.load(name),
                plan=lambda: MemoryShare(num_kv_bytes=1, num_reserve_bytes=0),
                **fields,
            )
            for name in NAMES
        ]
        self.deployment = Deployment(served, self.memory)
        self.of = dict(zip(NAMES, served, strict=True))

    def load(self, name):
        assert self.may_load.wait(20)
        if self.error is not None:
            raise self.error
        self.memory.take(name, MemoryShare(num_kv_bytes=1, num_reserve_bytes=0))
        runtime = self.make(name)

        def release():  # as that of a model that was loaded from files
            runtime.bridge.detach()
            self.memory.give_back(name)

        runtime.release = release
        self.runtimes.append(runtime)
        return runtime

    @property
    def num_loads(self):
        return sum(one.num_loads for one in self.of.values())


@contextlib.asynccontextmanager
async def serving(num_rooms=1, config=None, **fields):
    world = Served(num_rooms, **fields)
    world.deployment.start()
    transport = httpx.ASGITransport(create_app(world.deployment, config or ServerConfig()), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=60) as world.client:
            yield world
    finally:
        world.may_load.set()
        await asyncio.to_thread(world.deployment.close)
        for runtime in world.runtimes:
            runtime.close()


def lines_of_batches(world):
    """A client whose requests are lines of batches."""
    app = create_app(world.deployment, ServerConfig())

    async def as_line(scope, receive, send):
        await app({**scope, COURSE_KEY: Course(is_background=True)}, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(as_line), base_url="http://toy", timeout=60)


def calls():
    """Calls of every kind: (path, body)."""
    text = [
        ("/v1/completions", ASK),
        ("/v1/completions", ASK | {"n": 3, "temperature": 1, "seed": 5}),
        ("/v1/completions", ASK | {"stream": True}),
        ("/v1/completions", ASK | {"use_beam_search": True, "n": 2}),
        ("/v1/completions", ASK | {"structured_outputs": {"choice": ["one", "two"]}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}),
        ("/tokenize", {"prompt": "hello"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/detokenize", {"tokens": [70, 71]}),
    ]
    asked = [(path, body | {"model": name}) for name in ("a", "b") for path, body in text]
    many = [f"text number {number}" for number in range(40)]
    return [
        *asked,
        ("/v1/embeddings", {"model": "texts", "input": "hello"}),
        ("/v1/embeddings", {"model": "texts", "input": many}),
    ]


def told(response):
    """The answer without its ids and times."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return "".join(part.partition('"text":')[2].partition(',"')[0].strip('"') for part in response.text.split("data: "))
    answer = response.json()
    for key in ("id", "created", "usage"):
        answer.pop(key, None)
    return answer


async def answers_of_models_that_stay():
    models = [runtime_of(name) for name in NAMES]
    try:
        async with make_client(*models) as client:
            return [told(await client.post(path, json=body)) for path, body in calls()]
    finally:
        for model in models:
            model.close()


def let_models_leave_at_once(monkeypatch):
    for name in ("MIN_STAY_NS", "LOADS_PER_STAY"):
        monkeypatch.setattr(f"penstock.deploy.room.{name}", 0)


@pytest.mark.parametrize("num_rooms", [1, 2])
async def test_every_call_is_answered_as_by_models_that_never_leave(num_rooms, monkeypatch):
    let_models_leave_at_once(monkeypatch)
    monkeypatch.setattr("penstock.serve.waiting.MAX_LOADS", 100)  # on a busy machine one may leave before its callers wake
    expected = await answers_of_models_that_stay()
    jobs = [(index, *call) for index, call in enumerate(calls())] * 4
    random.Random(3).shuffle(jobs)
    async with serving(num_rooms) as world:

        async def ask(index, path, body):
            assert told(await world.client.post(path, json=body)) == expected[index]

        for first in range(0, len(jobs), 8):
            await asyncio.gather(*[ask(*job) for job in jobs[first : first + 8]])
        assert world.num_loads > 8, "models came and went"
        assert all(not one.num_waiting for one in world.of.values())
        await until(lambda: all(not runtime.uses.num_users for runtime in world.runtimes))


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/tokenize", {"prompt": "hello"}, "encode"),
        ("/tokenize", {"content": "hello"}, "encode"),
        ("/tokenize", {"inputs": "hello"}, "encode_batch"),
        ("/tokenize", CHAT, "encode"),
        ("/detokenize", {"tokens": [70, 71]}, "decode"),
        ("/v1/messages/count_tokens", CHAT | {"model": "a"}, "encode"),
    ],
)
async def test_a_model_does_not_leave_while_it_tokenizes(path, body, method, monkeypatch):
    async with serving() as world:
        assert (await world.client.post(path, json=body)).status_code == 200
        [runtime] = world.runtimes
        tokenize, num_users = getattr(runtime.tokenizer, method), []

        def noted(*args, **options):
            num_users.append(runtime.uses.num_users)
            return tokenize(*args, **options)

        monkeypatch.setattr(runtime.tokenizer, method, noted)
        assert (await world.client.post(path, json=body)).status_code == 200
        assert (num_users, runtime.uses.num_users) == ([1], 0)


async def test_a_line_of_a_batch_leaves_its_model_to_people_and_comes_again_as_no_other_model_answers_it():
    gate = GatedExecutor()
    async with serving() as world, lines_of_batches(world) as lines:
        world.deployment.routes["auto"] = Route(name="auto", models=("a", "b"))
        world.make = lambda name: make_runtime(gate, served_names=("a",), aliases=()) if name == "a" else runtime_of(name)
        line = asyncio.create_task(lines.post("/v1/completions", json=ASK | {"model": "auto"}))
        await until(lambda: world.runtimes and world.runtimes[0].bridge.num_open_requests)
        person = asyncio.create_task(world.client.post("/v1/completions", json=ASK | {"model": "b"}))
        await until(lambda: world.of["a"].state is not ModelState.LOADED)
        gate.open()
        assert (await person).status_code == 200
        again = await lines.post("/v1/completions", json=ASK | {"model": "auto"})
        for refused, why in ((await line, "its model was unloaded"), (again, "which people use")):
            assert (refused.status_code, why in refused.text) == (503, True)


async def test_a_line_that_is_too_long_for_a_model_that_leaves_is_answered_by_the_next_one(monkeypatch):
    monkeypatch.setattr("penstock.deploy.off_loop.INLINE_MAX_SIZE", 0)
    reads, may_read, tokenise = threading.Event(), threading.Event(), run_file.tokenise

    def read(call, prompts):
        if call.running.name == "a":
            reads.set()
            assert may_read.wait(20)
        return tokenise(call, prompts)

    monkeypatch.setattr(run_file, "tokenise", read)
    async with serving() as world, lines_of_batches(world) as lines:
        world.deployment.routes["auto"] = Route(name="auto", models=("a", "b"))
        small = HashExecutor(replace(CAPACITY, max_model_len=16), model=PRINTABLE_MODEL)
        world.make = lambda name: make_runtime(small, served_names=("a",), aliases=()) if name == "a" else runtime_of(name)
        line = asyncio.create_task(lines.post("/v1/completions", json=ASK | {"model": "auto"}))
        await until(reads.is_set)
        assert (await world.client.post("/v1/completions", json=ASK | {"model": "b"})).status_code == 200
        may_read.set()
        assert (await line).json()["model"] == "b"


async def test_an_answer_that_has_begun_ends_before_its_model_leaves(monkeypatch):
    let_models_leave_at_once(monkeypatch)
    gate = GatedExecutor()
    async with serving() as world:
        world.make = lambda name: make_runtime(gate, served_names=(name,), aliases=()) if name == "a" else runtime_of(name)
        first = asyncio.create_task(world.client.post("/v1/completions", json=ASK | {"model": "a"}))
        await until(lambda: world.runtimes and world.runtimes[0].bridge.num_open_requests)
        second = asyncio.create_task(world.client.post("/v1/completions", json=ASK | {"model": "b"}))
        await until(lambda: world.of["a"].state is ModelState.LEAVING)
        third = asyncio.create_task(world.client.post("/v1/completions", json=ASK | {"model": "a"}))
        await until(lambda: world.of["a"].num_waiting)
        world.make = runtime_of
        gate.open()
        answers = await asyncio.gather(first, second, third)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert (world.of["a"].num_loads, world.of["b"].num_loads) == (2, 1)


async def test_a_client_that_leaves_waits_no_more_and_the_load_goes_on():
    async with serving() as world:
        world.may_load.clear()
        asking = asyncio.create_task(world.client.post("/v1/completions", json=ASK))
        await until(lambda: world.of["a"].num_waiting)
        asking.cancel()
        await until(lambda: not world.of["a"].num_waiting)
        world.may_load.set()
        await until(lambda: world.of["a"].state is ModelState.LOADED)


async def test_a_line_of_a_batch_takes_no_model_from_those_who_use_it():
    async with serving() as world:
        assert (await world.client.post("/v1/completions", json=ASK | {"model": "a"})).status_code == 200
        world.deployment.routes["auto"] = Route(name="auto", models=("b", "a"))
        app = create_app(world.deployment, ServerConfig())

        async def as_line(scope, receive, send):
            await app({**scope, COURSE_KEY: Course(is_background=True)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(as_line), base_url="http://toy", timeout=60) as lines:
            refused = await lines.post("/v1/completions", json=ASK | {"model": "b"})
            not_by_another = await lines.post("/v1/completions", json=ASK | {"model": "auto"})
        assert not_by_another.status_code == 503
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60"), refused.text
        assert "b can't be loaded while other models, which people use, need the memory." in refused.text
        assert world.num_loads == 1


async def test_a_request_that_may_not_wait_so_long_is_told_when_to_come_back():
    async with serving() as world:
        world.of["a"].load_ns = 5_000_000_000
        world.may_load.clear()
        refused = await world.client.post("/v1/completions", json=ASK, headers={"X-Queue-Timeout-Ms": "1000"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "a is being loaded" in refused.json()["error"]["message"]
        malformed = await world.client.post("/v1/completions", json=ASK, headers={"X-Queue-Timeout-Ms": "soon"})
        assert malformed.status_code == 400
        world.may_load.set()
        await until(lambda: world.of["a"].state is ModelState.LOADED)
        answer = await world.client.post("/v1/completions", json=ASK, headers={"X-Queue-Timeout-Ms": "5000"})
        assert answer.status_code == 200


async def test_a_request_whose_time_is_over_while_it_waits_is_refused():
    async with serving() as world:
        world.of["a"].load_ns = 1
        world.may_load.clear()
        refused = await world.client.post("/v1/completions", json=ASK, headers={"X-Deadline-Ms": "20"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert not world.of["a"].num_waiting


async def test_the_wait_for_a_model_is_a_part_of_the_request_s_time(monkeypatch):
    """A deadline counts from the request's arrival and not from the end of the load."""
    async with serving() as world:
        world.of["a"].load_ns = 1
        world.may_load.clear()
        seen = []
        world.make = lambda name: seen.append(runtime_of(name)) or seen[0]
        asking = asyncio.create_task(world.client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine"}))
        await until(lambda: world.of["a"].num_waiting)
        began_ns = world.deployment.clock.now_ns()
        world.may_load.set()
        assert (await asking).status_code == 200
        explained = (await world.client.get("/v1/requests/mine")).json()["choices"][0]
        loaded_ns = world.of["a"].loaded_ns
        assert explained["time_ms"]["queue"] >= (loaded_ns - began_ns) / 1e6


@pytest.mark.parametrize("kind", ["chat", "texts"])
async def test_a_request_is_listed_while_it_waits_for_its_model(kind):
    path = "/v1/embeddings" if kind == "texts" else "/v1/completions"
    name, body = ("texts", {"input": "hello"}) if kind == "texts" else ("a", ASK)
    async with serving() as world:
        world.may_load.clear()
        asking = asyncio.create_task(world.client.post(path, json=body | {"model": name}, headers={"X-Request-Id": "mine"}))
        await until(lambda: world.of[name].num_waiting)
        [listed] = (await world.client.get("/v1/requests")).json()["data"]
        told = (await world.client.get("/v1/requests/mine")).json()
        assert (listed["id"], told["id"]) == ("mine", "mine")
        [choice] = told["choices"]
        assert (choice["state"], choice["waited"]["now_for"]) == ("waiting", "model")
        assert choice["waited"]["for_ms"].keys() <= {"model", "intake"}
        assert sum(choice["waited"]["for_ms"].values()) == pytest.approx(choice["time_ms"]["queue"], abs=0.01)
        assert told["summary"].endswith("now for its model to load.")
        assert (await world.client.get("/v1/requests", headers={"X-Tenant": "other"})).json()["data"] == []
        assert (await world.client.get("/v1/requests/mine", headers={"X-Tenant": "other"})).status_code == 404
        world.may_load.set()
        assert (await asking).status_code == 200
        assert (await world.client.get("/v1/requests")).json()["data"] == []


@pytest.mark.parametrize("kind", ["whole", "stream", "texts"])
async def test_the_wait_for_a_model_is_told_apart(kind):
    """In the explanation, in `Server-Timing` and in a histogram; a request of a model that is there has none."""
    path = "/v1/embeddings" if kind == "texts" else "/v1/completions"
    name, body = ("texts", {"input": "hello"}) if kind == "texts" else ("a", ASK | {"stream": kind == "stream"})
    async with serving() as world:
        world.may_load.clear()
        ask = partial(world.client.post, path, json=body | {"model": name}, headers={"X-Request-Id": "mine"})
        asking = asyncio.create_task(ask())
        await until(lambda: world.of[name].num_waiting)
        await asyncio.sleep(0.05)
        world.may_load.set()
        first = await asking
        explained = (await world.client.get("/v1/requests/mine")).json()["choices"][0]
        waited_for = explained["waited"]["for_ms"]
        assert waited_for["model"] >= 50
        assert sum(waited_for.values()) == pytest.approx(explained["time_ms"]["queue"], abs=0.01)
        assert "for its model to load" in explained["summary"]
        second = await ask()
        explained = (await world.client.get("/v1/requests/mine")).json()["choices"][0]
        assert "model" not in explained["waited"]["for_ms"]
        waited = re.search(
            r"queue;dur=([0-9.]+), prefill;dur=[0-9.]+(?:, decode;dur=[0-9.]+)?, model;dur=([0-9.]+)$", told_times(first)
        )
        assert waited is not None
        assert 50 <= float(waited[2]) <= float(waited[1])
        assert "model" not in told_times(second)
        assert (await series(world))["model_wait_seconds_count", name] == 1
        assert 0.05 <= (await series(world))["model_wait_seconds_sum", name] <= float(waited[1]) / 1e3


async def explained(world):
    return (await world.client.get("/v1/requests/mine")).json()["choices"][0]


async def test_the_search_for_a_new_model_is_a_part_of_the_request_s_time(tmp_path):
    async with serving() as world:
        (tmp_path / "d").touch()
        found, looked_ns = [served_of(world, tmp_path / "d")], []

        def find_new():
            looked_ns.append(world.deployment.clock.now_ns())
            time.sleep(0.02)
            return [found.pop()] if found else []

        world.deployment._find_new = find_new
        answer = await world.client.post("/v1/completions", json=ASK | {"model": "d"}, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 200
        assert (await explained(world))["time_ms"]["queue"] >= (world.of["d"].loaded_ns - looked_ns[0]) / 1e6


async def test_the_wait_for_a_model_that_can_not_be_loaded_is_told_if_another_answers():
    async with serving(num_rooms=2) as world:
        world.deployment.routes["auto"] = Route(name="auto", models=("a", "b"))

        def make(name):
            if name == "b":
                return runtime_of(name)
            time.sleep(0.05)
            raise ModelError("The file is cut short.")

        world.make = make
        answer = await world.client.post("/v1/completions", json=ASK | {"model": "auto"}, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-route"] == "auto; model=b; after=a"
        waited = await explained(world)
        assert waited["waited"]["for_ms"]["route"] >= 50
        assert sum(waited["waited"]["for_ms"].values()) == pytest.approx(waited["time_ms"]["queue"], abs=0.01)


def told_times(response):
    assert response.status_code == 200, response.text
    [in_stream] = re.findall("(?m)^: server-timing (.*)$", response.text) or [""]
    return in_stream or response.headers["server-timing"]


async def test_too_many_that_wait_are_turned_away():
    async with serving(max_waiting=2) as world:
        world.may_load.clear()
        waiting = [asyncio.create_task(world.client.post("/v1/completions", json=ASK)) for _ in range(2)]
        await until(lambda: world.of["a"].num_waiting == 2)
        refused = await world.client.post("/v1/completions", json=ASK)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "2 requests are already waiting for a to be loaded" in refused.json()["error"]["message"]
        world.may_load.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_requests_that_wait_for_a_load_count_to_their_tenants_limit(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "greedy"\nkey = "g"\nmax_concurrent = 1\n[[keys]]\nname = "alice"\nkey = "a"\n')
    async with serving(
        config=ServerConfig(api_keys_file=str(keys)), max_waiting=8, tenant_limits=TenantLimits(max_concurrent=2)
    ) as world:
        world.may_load.clear()
        waiting = []
        for key, most in (("g", 1), ("a", 2)):
            headers = {"Authorization": f"Bearer {key}"}
            for _ in range(most):
                waiting.append(asyncio.create_task(world.client.post("/v1/completions", json=ASK, headers=headers)))
                await until(lambda: world.of["a"].num_waiting == len(waiting))
            refused = await world.client.post("/v1/completions", json=ASK, headers=headers)
            assert (refused.status_code, "tenant_concurrency" in refused.text) == (429, True), refused.text
        world.may_load.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3


async def test_a_tenants_places_are_one_count_for_all_its_keys_and_without_lines_of_batches(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "one"\nkey = "1"\n[[keys]]\nname = "two"\nkey = "2"\n')
    config = ServerConfig(api_keys_file=str(keys), trust_tenant_header=True)
    async with serving(config=config, tenant_limits=TenantLimits(max_concurrent=1)) as world, lines_of_batches(world) as lines:
        world.may_load.clear()

        async def ask(client, key):
            headers = {"Authorization": f"Bearer {key}", "X-Tenant": "alice"}
            answer = await client.post("/v1/completions", json=ASK, headers=headers)
            return answer.status_code

        waiting = []
        for client in (lines, lines, world.client):
            waiting.append(asyncio.create_task(ask(client, "1")))
            await until(lambda: world.of["a"].num_waiting == len(waiting))
        waiting.append(asyncio.create_task(ask(world.client, "2")))
        await until(lambda: waiting[-1].done() or world.of["a"].num_waiting == len(waiting))
        world.may_load.set()
        assert await asyncio.gather(*waiting) == [200, 200, 200, 429]


@pytest.mark.parametrize("max_bytes", [1 << 20, 1500], ids=["places", "bytes"])
async def test_a_tenant_has_half_of_the_room_to_wait_for_a_load(monkeypatch, max_bytes):
    monkeypatch.setattr("penstock.serve.waiting.MAX_WAITING_BYTES", max_bytes)
    async with serving(max_waiting=2 if max_bytes > 1500 else 8) as world:
        world.may_load.clear()
        ask = partial(world.client.post, "/v1/completions", json=ASK | {"prompt": "a" * 600})
        waiting = []
        for tenant in ("alice", "bob"):
            waiting.append(asyncio.create_task(ask(headers={"X-Tenant": tenant})))
            await until(lambda: world.of["a"].num_waiting == len(waiting))
            refused = await ask(headers={"X-Tenant": tenant})
            assert refused.status_code == 429
            assert "1 request of the tenant is already waiting for a" in refused.text
        world.may_load.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_refusal_while_a_model_loads_is_counted_for_its_key(tmp_path):
    (keys := tmp_path / "keys.toml").write_text('[[keys]]\nname = "alice"\nkey = "secret"\n')
    headers = {"Authorization": "Bearer secret", "X-Tenant": "bob"}
    async with serving(config=ServerConfig(api_keys_file=str(keys), trust_tenant_header=True), max_waiting=0) as world:
        world.of["a"].metrics.tenants = frozenset({"alice"})
        world.may_load.clear()
        refused = await world.client.post("/v1/completions", json=ASK, headers=headers)
        assert refused.status_code == 429
        world.of["a"].max_waiting = 1
        refused = await world.client.post("/v1/completions", json=ASK, headers=headers | {"X-Queue-Timeout-Ms": "1"})
        assert refused.status_code == 503
        assert world.of["a"].metrics.tenant_requests["alice", "rejected"] == 2
        world.may_load.set()


async def test_bodies_that_wait_take_so_much_memory_and_no_more(monkeypatch):
    monkeypatch.setattr("penstock.serve.waiting.MAX_WAITING_BYTES", 1000)
    async with serving() as world:
        world.may_load.clear()
        waiting = asyncio.create_task(world.client.post("/v1/completions", json=ASK | {"prompt": "a" * 600}))
        await until(lambda: world.of["a"].num_waiting)
        assert (await world.client.post("/v1/completions", json=ASK | {"prompt": "a" * 600})).status_code == 429
        world.may_load.set()
        assert (await waiting).status_code == 200
        assert not world.of["a"].waiting


async def test_a_model_that_can_not_be_loaded_is_503_with_its_cause_and_the_others_answer():
    async with serving() as world:
        world.error = ModelError("The file is cut short.", remedy="Fetch it again.")
        refused = await world.client.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert "a could not be loaded: The file is cut short. Fetch it again." in refused.json()["error"]["message"]
        async with lines_of_batches(world) as lines:
            assert (await lines.post("/v1/completions", json=ASK)).status_code == 503
        assert world.of["a"].metrics.rejected["unavailable"] == 1, "a line of a batch comes again"
        world.error = None
        assert (await world.client.post("/v1/completions", json=ASK | {"model": "b"})).status_code == 200
        assert (await world.client.post("/v1/completions", json=ASK)).status_code == 503


async def test_the_files_of_a_model_that_is_away_are_read_once():
    num_reads = 0

    def read_facts():
        nonlocal num_reads
        num_reads += 1
        return ModelFacts(max_model_len=99)

    async with serving(read_facts=read_facts) as world:
        for path in ("/props?model=b", "/props?model=b", "/api/tags"):
            assert (await world.client.get(path)).status_code == 200
        props = (await world.client.get("/props?model=b")).json()
        assert props["default_generation_settings"]["n_ctx"] == 99
    assert num_reads == len(NAMES)


async def test_a_server_that_drains_is_not_ready_even_without_a_loaded_model():
    async with serving() as world:
        world.deployment.drain()
        assert [(await world.client.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]


async def test_questions_about_a_model_that_is_away_do_not_load_it():
    async with serving() as world:
        assert [card["id"] for card in (await world.client.get("/v1/models")).json()["data"]] == list(NAMES)
        assert (await world.client.get("/v1/models/b")).json()["max_model_len"] is None
        assert (await world.client.get("/load?model=b")).json()["requests_running"] == 0
        away = await world.client.get("/kv?model=b")
        assert (away.status_code, "b is not loaded" in away.text) == (503, True)
        assert (await world.client.get("/metrics")).status_code == 200
        assert (await world.client.get("/ready")).status_code == 200
        props = (await world.client.get("/props?model=b")).json()
        assert (props["model_alias"], props["is_sleeping"]) == ("b", True)
        assert world.num_loads == 0


async def test_what_is_known_of_a_request_outlives_its_model():
    async with serving() as world:
        journals = {}

        def make(name):
            runtime = runtime_of(name)
            runtime.journal = journals.setdefault(name, runtime.journal)
            return runtime

        world.make = make
        assert (await world.client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine"})).status_code == 200
        await asyncio.wrap_future(world.deployment.unload(world.of["a"]))
        assert (await world.client.get("/v1/requests/mine")).json()["choices"][0]["completion_tokens"] == 12


async def test_a_model_that_is_put_into_the_folder_is_found_and_one_that_is_taken_is_404(tmp_path, monkeypatch):
    come, looks, asked = [], [], []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: [is_file(path), asked.append(threading.current_thread())][0])
    async with serving() as world:

        def find_new():
            looks.append(threading.current_thread())
            found = [served_of(world, path) for path in come]
            come.clear()
            return found

        world.deployment._find_new = find_new
        world.deployment.default.metrics.tenants = frozenset({"alice"})
        transport = httpx.ASGITransport(create_app(world.deployment, ServerConfig()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=60) as client:

            async def ask(name, path="/v1/completions"):
                return await client.post(path, json=ASK | {"model": name})

            refused = await asyncio.gather(*[ask("d") for _ in range(20)])
            assert {answer.status_code for answer in refused} == {404}
            assert 1 <= len(looks) <= 3, "many ask for one look"
            assert threading.current_thread() not in looks
            for name, path in (("d", "/v1/completions"), ("e", "/models/load"), ("f", "/v1/models/f"), ("g", "/v1/models")):
                (tmp_path / name).touch()
                come.append(tmp_path / name)
                answer = await (
                    client.get(path)
                    if path.startswith("/v1/models")
                    else client.post(path, json={"model": name} if path == "/models/load" else ASK | {"model": name})
                )
                assert answer.status_code == 200, answer.text
            assert {one.metrics.tenants for one in world.deployment.served[-4:]} == {frozenset({"alice"})}
            assert (await ask("d")).status_code == 200
            num_looks = len(looks)
            assert (await ask("d")).status_code == 200
            assert len(looks) == num_looks, "nobody looks for a model that is loaded"
            listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
            assert listed == [*NAMES, "d", "e", "f", "g"]
            (tmp_path / "e").unlink()
            (tmp_path / "d").unlink()
            assert (await ask("d")).status_code == 200, "it is loaded"
            gone = await ask("e")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
            assert "'e' is not served here. Served: 'a', 'b', 'texts', 'd', 'f'" in gone.text
            listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
            assert listed == [*NAMES, "d", "f", "g"]
            (tmp_path / "e").touch()
            assert (await ask("e")).status_code == 200, "it is back"
            assert asked
            assert threading.current_thread() not in asked, "the event loop waits for the disk"

            monkeypatch.setattr("penstock.serve.waiting.MAX_LOOK_S", 0.05)
            assert world.deployment._looking.acquire(timeout=1)  # the disk hangs
            assert (await ask("h")).status_code == 404
            world.deployment._looking.release()


async def test_between_two_looks_is_ten_times_as_long_as_one_takes(monkeypatch):
    """And no longer for a request that came while another's look was under way."""
    has_begun, may_end, beyond_s, sleep = threading.Event(), threading.Event(), [], asyncio.sleep

    def look():
        has_begun.set()
        assert may_end.wait(20)

    async def note(rest_s):
        if asyncio.current_task() not in (first, second):  # another event loop of this process
            return await sleep(rest_s)
        beyond_s.append(rest_s - 10 * (watch._ended_s - watch._began_s))

    watch = FolderWatch(SimpleNamespace(may_grow=True, look=look))
    first = second = None
    monkeypatch.setattr(asyncio, "sleep", note)
    first = asyncio.create_task(watch.look())
    assert await asyncio.to_thread(has_begun.wait, 20)
    second = asyncio.create_task(watch.look())
    asyncio.get_running_loop().call_later(0.01, may_end.set)
    await asyncio.gather(first, second)
    assert beyond_s[0] == 0 >= beyond_s[1]


@pytest.mark.parametrize("is_in_folder", [False, True])
async def test_an_adapter_of_a_model_that_was_taken_from_the_folder_is_404(is_in_folder, tmp_path, monkeypatch):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "sql").mkdir(exist_ok=True)
        (tmp_path / "sql" / name).touch()
    adapters = Adapters(folder=tmp_path) if is_in_folder else Adapters(modules={"sql": tmp_path / "sql"})
    find, names = FolderWatch.find, []

    async def find_at_most_20_times(watch, name):
        names.append(name)
        if len(names) > 20:  # or else the event loop would never be free again
            raise AssertionError("the request goes round in circles")
        return await find(watch, name)

    monkeypatch.setattr(FolderWatch, "find", find_at_most_20_times)
    async with serving() as world:
        found = [served_of(world, tmp_path / "d", adapters=adapters)]
        world.deployment._find_new = lambda: [found.pop()] if found else []
        (tmp_path / "d").touch()
        assert len((await world.client.get("/v1/models")).json()["data"]) == len(NAMES) + 1 + (not is_in_folder)
        (tmp_path / "d").unlink()
        for _ in range(2):  # the first request finds out that the model has gone
            gone = await world.client.post("/v1/completions", json=ASK | {"model": "sql"})
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def served_of(world, path, **fields):
    served = ServedModel(
        names=(path.name,),
        metrics=Metrics(path.name),
        load=lambda: world.load(path.name),
        plan=lambda: MemoryShare(num_kv_bytes=1, num_reserve_bytes=0),
        path=path,
        **fields,
    )
    world.of[path.name] = served
    return served


async def states_of(world):
    return {card["id"]: card["status"]["value"] for card in (await world.client.get("/v1/models")).json()["data"]}


async def test_an_admin_loads_and_unloads_models():
    async with serving(num_rooms=2) as world:
        assert await states_of(world) == dict.fromkeys(NAMES, "unloaded")
        for name in ("a", "texts"):
            assert (await world.client.post("/models/load", json={"model": name})).json() == {"success": True}
        assert await states_of(world) == {"a": "loaded", "b": "unloaded", "texts": "loaded"}
        assert (await world.client.post("/models/load", json={"model": "a"})).status_code == 200
        for _ in range(2):  # what is done already is done
            assert (await world.client.post("/models/unload", json={"model": "a"})).json() == {"success": True}
        assert await states_of(world) == {"a": "unloaded", "b": "unloaded", "texts": "loaded"}
        assert world.of["a"].num_unloads == {"idle": 0, "room": 0, "asked": 1, "failed": 0, "replaced": 0}
        assert (await world.client.post("/v1/completions", json=ASK)).status_code == 200, "a request loads it again"


async def test_a_load_need_not_be_waited_for():
    async with serving() as world:
        world.may_load.clear()
        told_at_once = await world.client.post("/models/load", json={"model": "a", "wait": False})
        assert told_at_once.status_code == 202
        await until(lambda: world.of["a"].state is ModelState.LOADING)
        assert (await states_of(world))["a"] == "loading"
        world.may_load.set()
        await until(lambda: world.of["a"].state is ModelState.LOADED)


async def test_an_admin_s_load_that_fails_tells_the_cause_and_so_do_cards():
    async with serving() as world:
        world.deployment.clock = clock = VirtualClock()
        world.error = ModelError("The file is cut short.", remedy="Fetch it again.")
        for body in ({"model": "a"}, {"model": "a", "wait": False}):  # the second is refused at once
            failed = await world.client.post("/models/load", json=body)
            assert failed.status_code == 503
            assert "The file is cut short." in failed.json()["error"]["message"]
        card = (await world.client.get("/v1/models/a")).json()
        assert (card["status"]["value"], "cut short" in card["status"]["cause"]) == ("failed", True)
        assert (await world.client.get("/ready")).status_code == 200, "the others can be asked"
        for name in ("b", "texts"):
            await world.client.post("/models/load", json={"model": name})
        assert "no model can be loaded. The file is cut" in (await world.client.get("/ready")).text
        clock.advance(RETRY_NS)
        assert (await world.client.get("/ready")).status_code == 200, "a balancer sends the request that tries again"
        world.error = None
        assert (await world.client.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_model_in_use_is_unloaded_when_its_answers_have_ended_or_their_time_is_over():
    gate = GatedExecutor()
    async with serving() as world:
        world.make = lambda name: make_runtime(gate, served_names=(name,), aliases=())
        answer = asyncio.create_task(world.client.post("/v1/completions", json=ASK))
        await until(lambda: world.runtimes and world.runtimes[0].bridge.num_open_requests)
        unloading = asyncio.create_task(world.client.post("/models/unload", json={"model": "a"}))
        await until(lambda: world.of["a"].state is ModelState.LEAVING)
        assert (await states_of(world))["a"] == "leaving"
        assert [(await world.client.get(path)).status_code for path in ("/ready", "/health")] == [200, 200]
        gate.open()
        assert [(await task).status_code for task in (answer, unloading)] == [200, 200]
        gate = GatedExecutor()
        answer = asyncio.create_task(world.client.post("/v1/completions", json=ASK | {"max_tokens": 2000}))
        await until(lambda: len(world.runtimes) == 2 and world.runtimes[1].bridge.num_open_requests)
        unloading = asyncio.create_task(world.client.post("/models/unload", json={"model": "a", "timeout_s": 0}))
        await until(lambda: world.of["a"].state is not ModelState.LOADED)
        gate.open()
        refused = await answer
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        message = refused.json()["error"]["message"]
        assert "its model was unloaded" in message
        assert "shutting down" not in message
        assert (await unloading).status_code == 200


async def test_a_request_that_is_read_while_its_model_is_unloaded_by_force_is_told_to_come_again(monkeypatch):
    is_read, may_go = asyncio.Event(), asyncio.Event()
    tokenised = run_file._tokenised

    async def read_slowly(call):
        result = await tokenised(call)
        is_read.set()
        await may_go.wait()
        return result

    async with serving() as world:
        await world.client.post("/v1/completions", json=ASK)
        monkeypatch.setattr(run_file, "_tokenised", read_slowly)
        answer = asyncio.create_task(world.client.post("/v1/completions", json=ASK))
        await is_read.wait()
        unloaded = await world.client.post("/models/unload", json={"model": "a", "timeout_s": 0})
        assert unloaded.status_code == 200
        may_go.set()
        refused = await answer
        assert (refused.status_code, "was unloaded" in refused.text, "retry-after" in refused.headers) == (503, True, True)


@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
async def test_what_is_in_memory_is_changed_by_admins_alone(path):
    config = ServerConfig(api_keys=("user",), admin_api_keys=("admin",))
    async with serving(config=config) as world:
        told_by = {key: {"Authorization": f"Bearer {key}"} for key in ("user", "admin", "wrong")}
        answers = {key: await world.client.post(path, json={"model": "a"}, headers=told_by[key]) for key in told_by}
        assert {key: answer.status_code for key, answer in answers.items()} == {"user": 403, "admin": 200, "wrong": 401}
        assert answers["user"].json()["error"]["code"] == "admin_key_required"
        absent = await world.client.post(path, json={"model": "c"}, headers=told_by["admin"])
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_that_its_deployment_can_not_load_again_is_not_unloaded():
    runtime = runtime_of("a")
    try:
        async with make_client(runtime) as client:
            refused = await client.post("/models/unload", json={"model": "a"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    finally:
        runtime.close()


async def test_after_the_end_has_begun_nothing_is_unloaded():
    async with serving() as world:
        await world.client.post("/models/load", json={"model": "a"})
        world.deployment.drain()
        for path in ("/models/load", "/models/unload"):
            assert (await world.client.post(path, json={"model": "a"})).status_code == 503


async def series(world):
    text = (await world.client.get("/metrics")).text
    return {
        (sample.name.removeprefix("penstock_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_tell_what_is_loaded_and_counts_go_on():
    async with serving() as world:
        for _ in range(2):
            await world.client.post("/v1/completions", json=ASK)
            await world.client.post("/models/unload", json={"model": "a"})
        away = await series(world)
        assert (away["model_state", "a", "unloaded"], away["model_state", "a", "loaded"]) == (1, 0)
        assert (away["model_loads_total", "a", "ok"], away["model_unloads_total", "a", "asked"]) == (2, 2)
        assert away["model_load_seconds_total", "a"] > 0
        assert ("memory_bytes", "a", "kv") not in away
        await world.client.post("/v1/completions", json=ASK)
        there = await series(world)
        assert (there["model_state", "a", "loaded"], there["memory_bytes", "a", "kv"]) == (1, 1)
        assert there["model_loads_total", "a", "ok"] == 3
        world.error = ModelError("It is cut short.")
        await world.client.post("/models/load", json={"model": "b"})
        failed = await series(world)
        assert (failed["model_state", "b", "failed"], failed["model_loads_total", "b", "failed"]) == (1, 1)


async def test_the_load_of_all_models_and_their_memory_is_told():
    async with serving(num_rooms=2) as world:
        await world.client.post("/v1/completions", json=ASK)
        load = (await world.client.get("/load")).json()
        assert (load["state"], load["memory"]) == ("loaded", {"limit_bytes": 2, "free_bytes": 1, "stuck_bytes": 0})
        a, b, _ = load["models"]
        assert (a["name"], a["state"], sum(a["memory_bytes"].values())) == ("a", "loaded", 1)
        assert 0 <= a["last_used_s"] < 20
        assert (b["state"], b["memory_bytes"], b["last_used_s"]) == ("unloaded", {}, None)
        one = (await world.client.get("/load?model=b")).json()
        assert (one["state"], "models" in one) == ("unloaded", False)
        is_held = [True]
        world.memory.hold_stuck("a", lambda: is_held[0])
        for _ in range(2):
            await world.client.post("/models/unload", json={"model": "a"})
            stuck = (await world.client.get("/load")).json()["memory"]
            assert stuck == {"limit_bytes": 2, "free_bytes": 1 + (not is_held[0]), "stuck_bytes": int(is_held[0])}
            is_held[0] = False
