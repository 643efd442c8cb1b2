"""A pipeline over HTTP: the model is asked with what the index has for the question, in every API."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from penstock.config.pipelines import PipelineConfig, RerankerConfig
from penstock.config.sources import read_config_file
from penstock.deploy.pipelines import Pipeline, open_pipelines
from penstock.search.index import Hit, Reader, create, update
from penstock.serve.errors import ApiError
from penstock.serve.pipelines import Searcher, _filled, _names
from penstock.serve.questions import QuestionReader
from penstock.testing import HashExecutor
from penstock.testing.hash_executor import STATE_WIDTH
from penstock.types.errors import ConfigError, ModelAway
from support.deployments import deployment_of
from support.server.harness import CAPACITY, PRINTABLE_MODEL, RERANKER, make_client, make_runtime, make_text_runtime

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
        assert "for its pipeline to look it up" in told["summary"], told


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
    assert filled(prompt=["q"])["prompt"] == ["S: (none) Q: q"]
    assert filled(input=[{"role": "user", "content": "q"}])["input"][0]["content"] == "S: (none) Q: q"
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


async def test_questions_that_wait_are_searched_for_together(pipeline: Pipeline) -> None:
    calls: list[int] = []

    class Slow:
        def nearest(self, questions: np.ndarray, num: int) -> list:
            calls.append(len(questions))
            return pipeline.reader.nearest(questions, num)

    slow = Slow()
    slow.lock = pipeline.reader.lock
    searcher = Searcher(slow, 1)
    states = np.ones(STATE_WIDTH, np.float32).tobytes()
    tasks = [asyncio.create_task(searcher.find(states)) for _ in range(20)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(len(hits) == 1 for hits in found[1:])
    assert (sum(calls), len(calls) <= 2) == (20, True)


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


TABLE = '[[pipelines]]\nname = "docs"\nindex = "docs.index"\nmodel = "writer"\n'


def test_pipelines_stand_in_the_file(index: Path) -> None:
    path = index.with_name("penstock.toml")
    path.write_text(TABLE + 'top = 3\ntemplate = "{question} {sources}"\n')
    [config] = read_config_file(path).routing.pipelines
    assert config == PipelineConfig(name="docs", index=str(index), model="writer", top=3, template="{question} {sources}")
    path.write_text(TABLE + 'reranker = "judge"\n')
    [config] = read_config_file(path).routing.pipelines
    assert config.reranker == RerankerConfig(model="judge", candidates=20)


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


@pytest.mark.parametrize("question", ["What is red?", "a question that is longer than the reranker reads " * 9])
async def test_a_reranker_chooses_among_the_nearest(models, pipeline: Pipeline, question: str) -> None:
    """In the order that `/v1/rerank` gives."""
    config = replace(pipeline.config, top=1, reranker=RerankerConfig(model="judge", candidates=2))
    judge = make_text_runtime(encoder=RERANKER, served_names=("judge",), aliases=())
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


async def test_a_reranker_that_scores_nothing_is_named(models, pipeline: Pipeline) -> None:
    config = replace(pipeline.config, reranker=RerankerConfig(model="vectors", candidates=2))
    async with make_client(*models, pipelines=[replace(pipeline, config=config)]) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "docs"})
    assert (answer.status_code, "vectors is needed for the question, and is not a reranker" in answer.text) == (503, True)


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
