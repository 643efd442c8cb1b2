"""A pipeline over HTTP: the model is asked with what the index has for the question, in every API."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import httpx
import numpy as np
import pytest

from penstock.admission.door import Admission, AdmissionLimits
from penstock.config import ServerConfig
from penstock.config.pipelines import CheckConfig, PipelineConfig, RerankerConfig
from penstock.config.routes import AgreementConfig, VerifierConfig
from penstock.config.sources import read_config_file
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.pipelines import Pipeline, open_pipelines
from penstock.deploy.routes import Route
from penstock.deploy.running import RunningModel
from penstock.deploy.splits import Split
from penstock.routes.prices import Bill, Price
from penstock.search.index import PROBE, Hit, Reader, create, update
from penstock.serve.app import create_app
from penstock.serve.errors import ApiError
from penstock.serve.pipelines import Searcher, _filled, _names
from penstock.serve.questions import QuestionReader
from penstock.serve.responses.kept import Kept
from penstock.serve.responses.store import MemoryStore
from penstock.serve.verdicts import Verdicts
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import STATE_WIDTH
from penstock.types.errors import ConfigError, ModelAway, Rejected, RejectReason
from penstock.types.tenant_limits import TenantLimits
from support.deployments import deployment_of
from support.server.harness import (
    CAPACITY,
    EMBEDDER,
    PRINTABLE_MODEL,
    RERANKER,
    NarrowExecutor,
    make_client,
    make_runtime,
    make_text_runtime,
)
from support.server.responses import FUNCTIONS, ask
from support.server.tools import CALL_NOW, TOOLS_TEMPLATE, says


class TurnedExecutor(NarrowExecutor):
    """Another model of the same width."""

    def collect(self, ticket):
        result = super().collect(ticket)
        result.states = {name: (-np.frombuffer(states, np.float32)).tobytes() for name, states in result.states.items()}
        return result


TEXTS = {"a/one.md": "# One\n\nRed is a colour.", "two, or so.txt": "Cats sleep."}


@pytest.fixture
def models():
    made = [
        make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("writer",), aliases=()),
        make_text_runtime(served_names=("vectors",), aliases=()),
    ]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = tmp_path / "docs.index"
    create(path, folder, "vectors")
    rng = np.random.default_rng(0)
    for _ in update(path, folder, lambda texts: rng.normal(size=(len(texts), STATE_WIDTH)).astype(np.float32)):
        pass
    return path


@pytest.fixture
def pipeline(index: Path):
    [made] = open_pipelines([PipelineConfig(name="docs", index=str(index), model="writer", top=2)])
    yield made
    made.reader.close()


CHAT = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "What is red?"}],
    "max_tokens": 8,
    "seed": 1,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "What is red?", "max_tokens": 8, "seed": 1},
    "/v1/responses": {"input": "What is red?", "max_output_tokens": 16, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": "What is red?"}], "max_tokens": 8, "temperature": 0},
    "/api/generate": {"prompt": "What is red?", "options": {"num_predict": 8, "seed": 1}, "stream": False},
    "/completion": {"prompt": "What is red?", "n_predict": 8, "seed": 1},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_is_asked_with_the_sources(models, pipeline: Pipeline, path: str) -> None:
    body = BODIES[path]
    async with make_client(*models, pipelines=[pipeline]) as client:
        answer = await client.post(path, json=body | {"model": "docs"})
        assert answer.status_code == 200, answer.text
        assert sorted(answer.headers["x-sources"].split("; ")) in (
            ["1=a/one.md", "2=two%2C%20or%20so.txt"],
            ["1=two%2C%20or%20so.txt", "2=a/one.md"],
        )
        hits = pipeline.reader.nearest(np.ones((1, STATE_WIDTH), np.float32), 2)[0]
        hits.sort(key=lambda hit: answer.headers["x-sources"].index(hit.path[:3]))
        filled = json.loads(_filled(json.dumps(body).encode(), pipeline.config, hits))
        alone = await client.post(path, json=filled | {"model": "writer"})
        assert said(answer) == said(alone) != said(await client.post(path, json=body | {"model": "writer"}))


async def test_an_index_of_another_model_with_the_embedder_s_name_finds_nothing_wrong(models, index: Path, pipeline) -> None:
    async with make_client(*models, pipelines=[pipeline]) as client:

        async def ask() -> httpx.Response:
            return await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})

        [probe] = (await client.post("/v1/embeddings", json={"model": "vectors", "input": PROBE})).json()["data"]
        vector = np.array(probe["embedding"], np.float32)
        for made, status in ((-vector, 503), (-vector, 503), (vector, 200)):
            with sqlite3.connect(index) as base:
                base.execute("INSERT OR REPLACE INTO about VALUES ('probe', ?)", (made.tobytes().hex(),))
            base.close()
            answer = await ask()
            assert answer.status_code == status
            assert ("was made with another model than the one that is called vectors now" in answer.text) is (status == 503)


async def test_an_index_is_compared_with_the_model_that_runs_now(models, index: Path, pipeline: Pipeline) -> None:
    """Not with the one before it, which was unloaded or updated."""
    limits = AdmissionLimits(tenant=TenantLimits(tokens_per_minute=1))  # the comparison is not the client's
    texts = make_text_runtime(served_names=("vectors",), aliases=(), limits=limits)
    other = make_text_runtime(TurnedExecutor(EMBEDDER.width), served_names=("vectors",), aliases=())
    deployment = deployment_of(models[0], texts, pipelines=[pipeline])
    transport = httpx.ASGITransport(create_app(deployment, ServerConfig()), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            made = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
            assert made.status_code == 200, made.text
            with sqlite3.connect(index) as base:
                base.execute("INSERT OR REPLACE INTO about VALUES ('probe', ?)", (pipeline.reader.probe.hex(),))
            base.close()
            deployment.find("vectors").running = other
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
            assert answer.status_code == 503
            assert "was made with another model" in answer.text
    finally:
        texts.close()
        other.close()


async def test_a_response_keeps_the_request_that_the_client_has_sent(models, pipeline: Pipeline, monkeypatch) -> None:
    body = json.dumps(BODIES["/v1/responses"] | {"model": "docs", "background": True}).encode()
    kept: list[Kept] = []
    put = MemoryStore.put
    monkeypatch.setattr(MemoryStore, "put", lambda self, one: (kept.append(one), put(self, one)))
    monkeypatch.setattr(MemoryStore, "outlives", True)
    headers = {"Content-Type": "application/json", "Idempotency-Key": "a"}
    async with make_client(*models, pipelines=[pipeline]) as client:
        first = await client.post("/v1/responses", content=body, headers=headers)
        assert kept[0].asked == body, "after a restart, the question is searched for, not the filled template"
        again = await client.post("/v1/responses", content=body, headers=headers)
        assert again.json()["id"] == first.json()["id"]
        assert "x-sources" not in again.headers, "its name does not depend on the index"


def said(answer) -> str:
    value = answer.json()
    found = value.get("choices") or value.get("output") or value.get("content") or value.get("response")
    if isinstance(found, str):
        return found
    return json.dumps([{key: one[key] for key in ("text", "message", "content") if key in one} for one in found])


async def test_a_stream_and_its_wait(models, pipeline: Pipeline) -> None:
    async with make_client(*models, pipelines=[pipeline]) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "x-sources" in answer.headers
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
        assert answer.json()["model"] == "docs"
        assert "pipeline;dur=" in answer.headers["server-timing"]
        told = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
        assert "for its pipeline to look up passages" in told["summary"], told


def test_the_question_is_put_where_it_was() -> None:
    config = PipelineConfig(name="p", index="", model="m", template="S: {sources} Q: {question}")

    def filled(**body: object) -> object:
        return json.loads(_filled(json.dumps(body).encode(), config, []))

    image = {"type": "image_url", "image_url": {"url": "x"}}
    parts = [{"type": "text", "text": "{sources}?"}, image, {"type": "text", "text": "now"}]
    users = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": parts}]
    told = filled(messages=users)["messages"]
    assert told[:2] == users[:2]
    assert told[2]["content"] == [{"type": "text", "text": "S: (none) Q: {sources}? now"}, image]
    result = {"role": "user", "content": [{"type": "tool_result", "content": "42"}]}
    told = filled(messages=[{"role": "user", "content": "q"}, result])["messages"]
    assert told == [{"role": "user", "content": "S: (none) Q: q"}, result], "a tool's result is no question"
    assert filled(prompt="q")["prompt"] == "S: (none) Q: q"
    assert filled(prompt="q" * 20_000)["prompt"] == "S: (none) Q: " + "q" * 20_000, "only the search cuts it"
    assert filled(prompt={"prompt_string": "q"})["prompt"] == {"prompt_string": "S: (none) Q: q"}
    assert filled(prompt=["q"])["prompt"] == ["S: (none) Q: q"]
    assert filled(input=[{"role": "user", "content": "q"}])["input"][0]["content"] == "S: (none) Q: q"
    with pytest.raises(ApiError, match="one question at a time"):
        filled(prompt=[{"prompt_string": "a"}, "b"])
    with pytest.raises(ApiError, match="one question at a time"):
        filled(prompt=["a", "b"])


def test_the_header_names_each_file_once_and_is_never_too_long() -> None:
    hits = [Hit(path, "", "", 0.0) for path in ("a/b.md", "c, d.md", "a/b.md")]
    assert _names(hits) == "1,3=a/b.md; 2=c%2C%20d.md"
    assert 3000 < len(_names([Hit(f"{number}" * 30 + "\u4e2d" * 60, "", "", 0.0) for number in range(100)])) <= 4000


async def test_the_name_is_that_of_its_model_where_nothing_is_asked(models, pipeline: Pipeline) -> None:
    """As clients do before they chat."""
    async with make_client(*models, pipelines=[pipeline]) as client:
        assert (await client.post("/api/show", json={"model": "docs"})).status_code == 200
        assert (await client.post("/api/generate", json={"model": "docs"})).status_code == 200
        assert (await client.post("/tokenize", json={"model": "docs", "prompt": "a"})).status_code == 200


async def test_a_count_of_tokens_includes_the_sources(models, pipeline: Pipeline) -> None:
    body = BODIES["/v1/messages"] | {"model": "docs"}
    async with make_client(*models, pipelines=[pipeline]) as client:
        counted = await client.post("/v1/messages/count_tokens", json={key: body[key] for key in ("model", "messages")})
        answer = await client.post("/v1/messages", json=body)
    usage = answer.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_questions_that_wait_are_searched_for_together_but_not_too_many(pipeline: Pipeline) -> None:
    calls: list[int] = []

    class Slow:
        def nearest(self, questions: np.ndarray, num: int) -> list:
            calls.append(len(questions))
            return pipeline.reader.nearest(questions, num)

    slow = Slow()
    slow.lock = pipeline.reader.lock
    searcher = Searcher(slow, 1)
    states = np.ones(STATE_WIDTH, np.float32).tobytes()
    tasks = [asyncio.create_task(searcher.find(states)) for _ in range(40)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(len(hits) == 1 for hits in found[1:])
    assert (sum(calls), len(calls) <= 4, max(calls)) == (40, True, 16)


async def test_a_failing_search_is_an_error_and_the_next_one_works(models, pipeline: Pipeline, monkeypatch) -> None:
    async with make_client(*models, pipelines=[pipeline]) as client:
        with monkeypatch.context() as broken:
            broken.setattr(Reader, "nearest", lambda *_: 1 / 0)
            assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})).status_code == 500
        Path(pipeline.config.index).rename(pipeline.config.index + ".away")  # noqa: ASYNC240
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
        assert (answer.status_code, "does not exist" in answer.text) == (503, True)
        Path(pipeline.config.index + ".away").rename(pipeline.config.index)  # noqa: ASYNC240
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})).status_code == 200


async def test_a_request_without_a_text_and_one_for_vectors_are_refused(models, pipeline: Pipeline) -> None:
    async with make_client(*models, pipelines=[pipeline]) as client:
        for path, body in (("/v1/completions", {"prompt": [1, 2]}), ("/v1/embeddings", {"input": "a"})):
            assert (await client.post(path, json=body | {"model": "docs"})).status_code == 400


async def test_results_of_tools_go_on_with_the_sources_of_the_question(models, pipeline: Pipeline, monkeypatch) -> None:
    asked, odds = [], Verdicts.odds

    async def noted(self, name, http, call, conversation, words, **fields):
        asked.append("".join([message.content for message in conversation.messages]))
        return await odds(self, name, http, call, conversation, words, **fields)

    monkeypatch.setattr(Verdicts, "odds", noted)
    tool = says(CALL_NOW, chat_template=TOOLS_TEMPLATE, served_names=("writer",), aliases=())
    try:
        async with make_client(tool, models[1], pipelines=[pipeline]) as client:
            first = await ask(client, model="docs", input="What is red?", tools=FUNCTIONS, max_output_tokens=100)
            [call] = first["output"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
            then = {"model": "docs", "input": [result], "previous_response_id": first["id"]}
            [again] = (await ask(client, **then, tools=FUNCTIONS, max_output_tokens=100))["output"]
            assert again["name"] == "now"
            await ask(client, 400, **then | {"previous_response_id": None})
            for empty in (1, " ", [{"role": "user", "content": ""}], [result, {"role": "user", "content": ""}]):
                await ask(client, 400, **then | {"input": empty})
            client.app.state.parts.deployment.pipelines["docs"] = checked(pipeline)
            await ask(client, **then)
    finally:
        tool.close()
    [text] = asked
    assert "Red is a colour." in text
    assert text.endswith("Do the sources above support this answer? Reply with yes or no.")


KEYS = "".join(f'[[keys]]\nname = "{name}"\nkey = "the-key-of-{name}"\nmodels = ["{name}"]\n' for name in ("docs", "writer"))


async def test_a_key_must_allow_the_pipeline_itself(models, pipeline: Pipeline, tmp_path: Path) -> None:
    """Its documents are more than its model."""
    (tmp_path / "keys.toml").write_text(KEYS)
    async with make_client(*models, pipelines=[pipeline], api_keys_file=str(tmp_path / "keys.toml")) as client:
        for name, status, listed in (("docs", 200, ["docs"]), ("writer", 404, ["writer"])):
            headers = {"Authorization": f"Bearer the-key-of-{name}"}
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"}, headers=headers)
            assert answer.status_code == status, answer.text
            assert [one["id"] for one in (await client.get("/v1/models", headers=headers)).json()["data"]] == listed
            assert (await client.get("/v1/models/docs", headers=headers)).status_code == status


async def test_a_key_that_allows_a_pipeline_allows_the_route_under_it(models, pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    over = [replace(pipeline, config=replace(pipeline.config, model="either"))]
    route = Route(name="either", models=("writer", "second"))
    second = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("second",), aliases=())
    keys = str(tmp_path / "keys.toml")
    try:
        async with make_client(*models, second, routes=[route], pipelines=over, api_keys_file=keys) as client:
            headers = {"Authorization": "Bearer the-key-of-docs"}
            for name, status in (("docs", 200), ("either", 404), ("writer", 404)):
                answer = await client.post("/v1/chat/completions", json=CHAT | {"model": name}, headers=headers)
                assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"].endswith("Served: 'docs'.")
            assert [one["id"] for one in (await client.get("/v1/models", headers=headers)).json()["data"]] == ["docs"]
            assert [one["name"] for one in (await client.get("/api/tags", headers=headers)).json()["models"]] == ["docs"]
            for version in ({}, {"anthropic-version": "2023-06-01"}):
                card = await client.get("/v1/models/docs", headers=headers | version)
                assert (card.status_code, card.json().get("id")) == (200, "docs"), "as it is listed"
    finally:
        second.close()


@pytest.mark.parametrize("path", BODIES)
async def test_the_route_under_a_pipeline_chooses_by_the_question_and_reads_the_sources(
    models, pipeline: Pipeline, path: str
) -> None:
    over = replace(pipeline, config=replace(pipeline.config, model="either"))
    route = Route(name="either", models=("writer", "second"))
    second = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("second",), aliases=())
    try:
        async with make_client(*models, second, routes=[route], pipelines=[over]) as client:
            answer = await client.post(path, json=BODIES[path] | {"model": "docs"})
        assert answer.headers["x-route"] == "either; model=writer"
        assert "x-sources" in answer.headers
        async with make_client(*models, pipelines=[pipeline]) as client:
            assert said(answer) == said(await client.post(path, json=BODIES[path] | {"model": "docs"}))
    finally:
        second.close()


async def test_requests_for_a_pipeline_are_split_as_those_for_its_model(models, pipeline: Pipeline) -> None:
    second = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("second",), aliases=())
    splits = [Split(of="writer", to="second", tenants=frozenset(["beta"]))]
    try:
        async with make_client(*models, second, splits=splits, pipelines=[pipeline]) as client:
            for tenant, is_second in (("alpha", False), ("beta", True)):
                answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"}, headers={"X-Tenant": tenant})
                assert (answer.status_code, answer.json()["model"]) == (200, "docs"), answer.text
                assert (second.uses.num_uses > 0) == is_second
    finally:
        second.close()


def test_a_pipeline_sends_no_documents_to_another_server(models, pipeline: Pipeline) -> None:
    over = replace(pipeline, config=replace(pipeline.config, model="either"))
    upstream = UpstreamConfig(name="far", url="http://localhost:9/v1", model="m")
    with pytest.raises(ConfigError, match="would send its documents to the upstream far"):
        deployment_of(*models, routes=[Route(name="either", models=("writer", "far"))], upstreams=[upstream], pipelines=[over])


def checked(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, config=replace(pipeline.config, check=CheckConfig(model="writer", otherwise="Nobody knows.")))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_that_the_sources_do_not_support_is_replaced(
    models, pipeline: Pipeline, monkeypatch, path: str, stream: bool
) -> None:
    asked, rest = [], [0.75, 0.25]

    async def odds(self, name, http, call, conversation, words, truncates=True):
        asked.append((name, [message.content for message in conversation.messages]))
        yes = rest.pop(0)
        return [yes, 1 - yes]

    monkeypatch.setattr(Verdicts, "odds", odds)
    body = BODIES[path] | {"model": "docs"}
    async with make_client(*models, pipelines=[checked(pipeline)]) as client:
        kept = await client.post(path, json=body | {"stream": stream})
        replaced = await client.post(path, json=body | {"stream": stream})
        assert (kept.headers["x-check"], replaced.headers["x-check"]) == (
            "supported=0.750; least=0.5",
            "supported=0.250; least=0.5",
        )
        assert "Nobody knows." not in kept.text
        lines = [
            line for line in (await client.get("/metrics")).text.splitlines() if line.startswith("penstock_checked_answers_t")
        ]
        assert lines == [
            f'penstock_checked_answers_total{{model="writer",pipeline="docs",result="{result}"}} 1.0'
            for result in ("kept", "withheld")
        ]
        assert "Nobody knows." in replaced.text
        assert "error" not in replaced.text.replace('"error":null', "")
    async with make_client(*models, pipelines=[pipeline]) as client:
        plain = await client.post(path, json=body | {"stream": False})
    if not stream:
        assert said(kept) == said(plain)
    for name, texts in asked:
        assert name == "writer"
        assert "Red is a colour." in "".join(texts[:-2]), "it reads the sources"
        assert "support" in texts[-1]
    assert all(one.bridge.num_open_requests == 0 for one in models)


async def test_a_replaced_answer_has_no_log_probabilities_and_a_good_end(models, pipeline: Pipeline, monkeypatch) -> None:
    async def odds(*_args: object, **_words: object) -> list[float]:
        return [0.0, 1.0]

    monkeypatch.setattr(Verdicts, "odds", odds)
    async with make_client(*models, pipelines=[checked(pipeline)]) as client:
        body = CHAT | {"model": "docs", "logprobs": True}
        [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        [told] = (await client.get("/v1/requests?ended=9")).json()["data"]
        assert told["chosen"]["check"] == "supported=0.000; least=0.5"
        assert "a/one.md" in unquote(told["chosen"]["sources"])
        assert (choice["message"]["content"], choice["finish_reason"], choice["logprobs"]["content"]) == (
            "Nobody knows.",
            "stop",
            [],
        )
        refused = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs", "n": 2})
        assert (refused.status_code, "checks its answers. Request one answer" in refused.text) == (400, True)
        refused = await client.post(
            "/v1/chat/completions", json=CHAT | {"model": "docs", "response_format": {"type": "json_object"}}
        )
        assert (refused.status_code, "without tools, a response format" in refused.text) == (400, True)
        echoed = await client.post("/v1/completions", json={"model": "docs", "prompt": "What is red?", "echo": True})
        assert echoed.json()["choices"][0]["text"] == "Nobody knows.", "its prompt would show the sources"
        for path in ("/v1/chat/completions", "/v1/completions"):
            for stream in (False, True):
                body = BODIES[path] | {"model": "docs", "return_token_ids": True, "stream": stream}
                answer = await client.post(path, json=body)
                assert "Nobody knows." in answer.text
                assert "token_ids" not in answer.text, "the prompt's would show the sources"


async def test_no_place_is_kept_for_a_refused_check(models, pipeline: Pipeline, monkeypatch) -> None:
    """It has no claim of its own, so any other would take the place."""
    asks, decide = [], Admission.decide
    monkeypatch.setattr(
        Admission, "decide", lambda self, ask, *args, **more: asks.append(ask) or decide(self, ask, *args, **more)
    )
    async with make_client(*models, pipelines=[checked(pipeline)]) as client:
        answer = await client.post(
            "/v1/chat/completions", json=CHAT | {"model": "docs"}, headers={"X-Stainless-Retry-Count": "1"}
        )
        assert "x-check" in answer.headers, answer.text
    *_, own, verdict = asks
    assert (own.returns, own.is_retry, own.is_limited) == (True, True, True)
    assert (verdict.returns, verdict.is_retry, verdict.is_limited) == (False, False, False)


async def test_a_check_whose_model_can_not_read_all_sources_is_an_error(models, pipeline: Pipeline) -> None:
    """The operator's: without the sources it would judge nothing."""
    executor = HashExecutor(replace(CAPACITY, max_model_len=48), model=PRINTABLE_MODEL)
    short = make_runtime(executor, served_names=("short",), aliases=())
    over = replace(pipeline, config=replace(pipeline.config, check=CheckConfig(model="short", otherwise="Nobody knows.")))
    try:
        async with make_client(*models, short, pipelines=[over]) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
    finally:
        short.close()
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false"), answer.text
    assert answer.json()["error"]["message"].startswith(
        "short can't judge answers: This model's maximum context length is 48 tokens (short)"
    )
    assert all(one.bridge.num_open_requests == 0 for one in models)


async def test_a_check_over_an_agreement_route(models, pipeline: Pipeline, monkeypatch) -> None:
    async def odds(*_args: object, **_words: object) -> list[float]:
        return [1.0, 0.0]

    monkeypatch.setattr(Verdicts, "odds", odds)
    over = checked(pipeline)
    over = replace(over, config=replace(over.config, model="agreed"))
    by = AgreementConfig(weak="writer", strong="second", samples=2, least=0.0)
    route = Route(name="agreed", models=("writer", "second"), by=by)
    second = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("second",), aliases=())
    try:
        async with make_client(*models, second, routes=[route], pipelines=[over]) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-check"] == "supported=1.000; least=0.5"
    finally:
        second.close()


async def test_a_check_that_must_be_loaded_first_leaves_the_verifier_in_force(models, pipeline: Pipeline, monkeypatch) -> None:
    """The route begins again after the load, and its second trial may ask the large model."""
    verdicts: list[float | ModelAway] = [1.0, ModelAway("writer"), 0.0, 1.0]  # verifier, check, verifier, check

    async def odds(*_args: object, **_words: object) -> list[float]:
        yes = verdicts.pop(0)
        if isinstance(yes, ModelAway):
            raise yes
        return [yes, 1 - yes]

    monkeypatch.setattr(Verdicts, "odds", odds)
    over = checked(pipeline)
    over = replace(over, config=replace(over.config, model="verified"))
    by = VerifierConfig(weak="writer", strong="second", verifier="second", least=0.5)
    route = Route(name="verified", models=("writer", "second"), by=by)
    second = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("second",), aliases=())
    try:
        async with make_client(*models, second, routes=[route], pipelines=[over]) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
    finally:
        second.close()
    assert answer.headers["x-route"] == "verified; model=second; verified=0.000; least=0.5", answer.text
    assert answer.headers["x-check"] == "supported=1.000; least=0.5"


async def test_a_check_without_sources_is_explained(models, pipeline: Pipeline, monkeypatch) -> None:
    async def odds(*_args: object, **_words: object) -> list[float]:
        return [0.0, 1.0]

    monkeypatch.setattr(Verdicts, "odds", odds)
    monkeypatch.setattr(Reader, "nearest", lambda _self, vectors, _num: [[] for _ in vectors])
    async with make_client(*models, pipelines=[checked(pipeline)]) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})).status_code == 200
        [told] = (await client.get("/v1/requests?ended=9")).json()["data"]
    assert (told["chosen"]["sources"], told["chosen"]["check"]) == ("", "supported=0.000; least=0.5")


async def test_what_a_pipelines_helper_refuses_is_not_laid_to_its_routes_model(models, pipeline: Pipeline, monkeypatch) -> None:
    """Neither a busy check nor a busy embedding model asks the route's next model."""
    bill = Bill({"writer": Price(1.0, 1.0), "second": Price(2.0, 2.0)})
    over = checked(pipeline)
    over = replace(over, config=replace(over.config, model="either"))
    route = Route(name="either", models=("writer", "second"), bill=bill)
    second = make_runtime(HashExecutor(CAPACITY, model=PRINTABLE_MODEL), served_names=("second",), aliases=())

    async def busy(*_args: object, **_fields: object) -> list[float]:
        raise Rejected(RejectReason.QUEUE_FULL, "busy")

    try:
        async with make_client(*models, second, routes=[route], pipelines=[over]) as client:
            for owner, name in ((Verdicts, "odds"), (QuestionReader, "embed")):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, busy)
                    answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
                assert answer.status_code == 429, answer.text
                assert second.uses.num_uses == 0
        assert {*bill.paid} == {"writer"}, "the answer that was not checked was begun in vain"
        assert bill.full == 0.0
    finally:
        second.close()


async def test_models_that_take_each_others_memory_are_an_error(models, pipeline: Pipeline, monkeypatch) -> None:
    """Not an endless loop: the check's model is away whenever it is needed."""
    tries = []

    async def away(self, name: str, *_args: object, **_words: object) -> list[float]:
        tries.append(name)
        raise ModelAway(name)

    monkeypatch.setattr(Verdicts, "odds", away)
    async with make_client(*models, pipelines=[checked(pipeline)]) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
    assert answer.status_code == 503
    assert "This request waited for writer 3 times" in answer.json()["error"]["message"]
    assert len(tries) == 4


TABLE = '[[pipelines]]\nname = "docs"\nindex = "docs.index"\nmodel = "writer"\n'


def test_pipelines_stand_in_the_file(index: Path) -> None:
    path = index.with_name("penstock.toml")
    path.write_text(TABLE + 'top = 3\ntemplate = "{question} {sources}"\n')
    [config] = read_config_file(path).routing.pipelines
    assert config == PipelineConfig(name="docs", index=str(index), model="writer", top=3, template="{question} {sources}")
    path.write_text(TABLE + 'reranker = "judge"\n')
    [config] = read_config_file(path).routing.pipelines
    assert config.reranker == RerankerConfig(model="judge", candidates=20)
    path.write_text(TABLE + 'check = "judge"\nsupported = 0.7\nunsupported = "No."\n')
    [config] = read_config_file(path).routing.pipelines
    assert config.check == CheckConfig(model="judge", least=0.7, otherwise="No.")


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ('model = "writer"', "", "'model' is missing"),
        ('model = "writer"', 'model = "writer"\ntop = 0', "top is not a number"),
        ('model = "writer"', 'model = "writer"\ntemplate = "x"', "has no {sources}"),
        ('model = "writer"', 'model = "writer"\ncandidates = 9', "candidates are for a reranker"),
        (
            'model = "writer"',
            'model = "writer"\nreranker = "judge"\ncandidates = 3',
            "candidates is not a number from 4 to 100",
        ),
        ('model = "writer"', 'model = "writer"\nsupported = 0.7', "'supported' is for a check"),
        ('model = "writer"', 'model = "writer"\ncheck = "m"\nsupported = 7', "supported is not a number from 0 to 1"),
        ('name = "docs"', 'name = "do cs"', "can't be a name"),
        ("index =", "indices =", "unknown key 'indices'"),
        (TABLE, TABLE + TABLE, "two pipelines are called 'docs'"),
        ("[[pipelines]]", "[pipelines]", "pipelines are tables"),
    ],
)
def test_wrong_tables_are_refused(old: str, new: str, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(ConfigError, match=cause):
        read_config_file(path)


def test_a_pipeline_of_models_that_are_not_served_is_refused(models, pipeline: Pipeline) -> None:
    with pytest.raises(ConfigError, match="needs 'vectors', which is not served"):
        deployment_of(models[0], pipelines=[pipeline])
    other = Pipeline(config=PipelineConfig(name="writer", index="", model="writer"), reader=pipeline.reader)
    with pytest.raises(ConfigError, match="A pipeline is called 'writer'"):
        deployment_of(*models, pipelines=[other])


def answer_names(names: str) -> list[str]:
    """The files of the header `X-Sources`, in the order of their passages."""
    pairs = [part.split("=") for part in names.split("; ")]
    return [name for _, name in sorted((int(number), name) for numbers, name in pairs for number in numbers.split(","))]


@pytest.mark.parametrize("prompt", ["", "Rank: "])
@pytest.mark.parametrize("question", ["What is red?", "a question that is longer than the reranker reads " * 9])
async def test_a_reranker_chooses_among_the_nearest(models, pipeline: Pipeline, question: str, prompt: str) -> None:
    """In the order that `/v1/rerank` gives."""
    config = replace(pipeline.config, top=1, reranker=RerankerConfig(model="judge", candidates=2))
    encoder = replace(RERANKER, prompts={"rank": prompt}, default_prompt="rank")
    judge = make_text_runtime(encoder=encoder, served_names=("judge",), aliases=())
    body = CHAT | {"model": "docs", "messages": [{"role": "user", "content": question}]}
    try:
        async with make_client(*models, judge, pipelines=[replace(pipeline, config=config)]) as client:
            hits = pipeline.reader.nearest(np.ones((1, STATE_WIDTH), np.float32), 2)[0]
            asked = {
                "model": "judge",
                "query": question,
                "documents": [hit.as_read for hit in hits],
                "truncate_prompt_tokens": -1,
            }
            ranked = (await client.post("/v1/rerank", json=asked)).json()["results"]
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer_names(unquote(answer.headers["x-sources"])) == [hits[ranked[0]["index"]].path]
            assert "One" in hits[0].as_read + hits[1].as_read, "headings are read"
    finally:
        judge.close()


async def test_pairs_for_the_reranker_count_towards_no_limit(models, pipeline: Pipeline) -> None:
    config = replace(pipeline.config, reranker=RerankerConfig(model="judge", candidates=2))
    limits = AdmissionLimits(tenant=TenantLimits(tokens_per_minute=1))  # the first pairs would use it up
    judge = make_text_runtime(encoder=RERANKER, served_names=("judge",), aliases=(), limits=limits)
    try:
        async with make_client(*models, judge, pipelines=[replace(pipeline, config=config)]) as client:
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
                assert answer.status_code == 200, answer.text
    finally:
        judge.close()


async def test_a_search_is_not_repeated_while_the_reranker_is_loaded(models, pipeline: Pipeline, monkeypatch) -> None:
    """Else the two could take each other's memory for ever."""
    config = replace(pipeline.config, reranker=RerankerConfig(model="judge", candidates=2))
    num_searches, nearest = [], Reader.nearest
    monkeypatch.setattr(Reader, "nearest", lambda self, *args: num_searches.append(1) or nearest(self, *args))
    judge = make_text_runtime(encoder=RERANKER, served_names=("judge",), aliases=())
    score, tries = QuestionReader.score, []

    async def away_at_first(self: QuestionReader, name: str, *args: object) -> list[float]:
        tries.append(name)
        if len(tries) == 1:
            raise ModelAway(name)
        return await score(self, name, *args)

    monkeypatch.setattr(QuestionReader, "score", away_at_first)
    try:
        async with make_client(*models, judge, pipelines=[replace(pipeline, config=config)]) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})).status_code == 200
    finally:
        judge.close()
    assert (len(tries), len(num_searches)) == (2, 1)


async def test_passages_are_not_scored_before_the_checks_model_is_loaded(models, pipeline: Pipeline, monkeypatch) -> None:
    """Else they would be scored twice."""
    score, check_there, calls = QuestionReader.score, Verdicts.check_there, []

    async def noting(self: QuestionReader, *args: object) -> list[float]:
        calls.append("score")
        return await score(self, *args)

    def away_at_first(self: Verdicts, name: str) -> RunningModel:
        calls.append("check")
        if calls.count("check") == 1:
            raise ModelAway(name)
        return check_there(self, name)

    monkeypatch.setattr(QuestionReader, "score", noting)
    monkeypatch.setattr(Verdicts, "check_there", away_at_first)
    over = checked(pipeline)
    over = replace(over, config=replace(over.config, reranker=RerankerConfig(model="judge", candidates=2)))
    judge = make_text_runtime(encoder=RERANKER, served_names=("judge",), aliases=())
    try:
        async with make_client(*models, judge, pipelines=[over]) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
            assert answer.status_code == 200, answer.text
    finally:
        judge.close()
    assert calls.count("score") == 1


async def test_a_reranker_that_scores_nothing_is_named(models, pipeline: Pipeline) -> None:
    config = replace(pipeline.config, reranker=RerankerConfig(model="vectors", candidates=2))
    async with make_client(*models, pipelines=[replace(pipeline, config=config)]) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
    assert (answer.status_code, "vectors should be a reranker, but is not" in answer.text) == (500, True)


async def test_questions_are_embedded_as_questions(models, pipeline: Pipeline, monkeypatch) -> None:
    """The model's prompt for queries comes before the question."""
    asked: list[np.ndarray] = []
    nearest = Reader.nearest
    monkeypatch.setattr(Reader, "nearest", lambda self, vectors, num: asked.append(vectors) or nearest(self, vectors, num))
    async with make_client(*models, pipelines=[pipeline]) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})).status_code == 200
        alike = await client.post("/v1/embeddings", json={"model": "vectors", "input": "Q: What is red?"})
    [[vector]] = asked
    wanted = np.array(alike.json()["data"][0]["embedding"], np.float32)
    np.testing.assert_allclose(vector / np.linalg.norm(vector), wanted, rtol=1e-5)
