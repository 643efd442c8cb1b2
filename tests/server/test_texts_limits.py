"""Limits of what a list of texts costs, whatever its body says: of memory, and of the event loop's time."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest

from penstock import fast_json
from penstock.deploy.off_loop import LARGE_SIZE, OffLoop
from penstock.serve.texts import desk, endpoint, tokens
from penstock.serve.texts import write as json_writer
from penstock.text.tokenizer import Tokenizer
from support.server.errors import check
from support.server.harness import CLASSIFIER, EMBEDDER, RERANKER, make_client, make_text_runtime


@pytest.fixture
async def serve():
    """Makes a client of a model: `serve(encoder)`; settings of the server may follow."""
    made = []

    def make(encoder=EMBEDDER, executor=None, **config_fields):
        runtime = make_text_runtime(executor, encoder=encoder)
        client = make_client(runtime, **config_fields)
        made.append((runtime, client))
        return client

    yield make
    for runtime, client in made:
        await client.aclose()
        runtime.close()


@pytest.fixture
def encoded(monkeypatch):
    """The texts of each call of the tokenizer's library."""
    calls = []
    encode = Tokenizer.encode_batch

    def record(self, texts, *, add_special_tokens):
        calls.append(list(texts))
        return encode(self, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", record)
    return calls


# Memory


async def test_a_question_is_tokenised_once_however_many_documents_there_are(serve, encoded):
    response = await serve(RERANKER).post("/v1/rerank", json={"query": "q" * 60, "documents": ["one", "two"] * 1024})
    assert len(response.json()["results"]) == 2048
    assert [text for texts in encoded for text in texts] == ["q" * 60, "one", "two"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/rerank", {"documents": ["a"] * 2048}, "query"),
        ("/v1/score", {"text_2": ["a"] * 2048}, "text_1"),
        ("/rerank", {"texts": ["a"] * 2048}, "query"),
    ],
)
async def test_a_question_that_is_too_long_alone_is_refused_by_its_name(serve, encoded, path, body, name):
    response = await serve(RERANKER).post(path, json={name: "q" * 100_000, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert f"context length is 128 tokens (toy), special tokens included; '{name}' has 100002 tokens" in message
    assert [text for texts in encoded for text in texts] == ["q" * 100_000]


async def test_a_pair_that_is_too_long_names_both_and_the_longer(serve):
    client = serve(RERANKER)
    response = await client.post("/v1/rerank", json={"query": "q" * 120, "documents": ["a", "b" * 100]})
    check(response, 400, "context_length_exceeded", "query")
    assert "'query' and 'documents[1]' together have 224 tokens" in response.json()["error"]["message"]
    response = await client.post("/v1/rerank", json={"query": "q" * 20, "documents": ["a", "b" * 120]})
    check(response, 400, "context_length_exceeded", "documents[1]")


async def test_long_texts_are_tokenised_few_at_once(serve, encoded):
    texts = [letter * 40_000 for letter in "abc"] + ["short"] * 3
    response = await serve().post("/v1/embeddings", json={"input": texts, "truncate_prompt_tokens": 8})
    assert len(response.json()["data"]) == 6
    assert [[len(text) for text in piece] for piece in encoded] == [[40_000], [40_000], [40_000, 5]]


async def test_texts_that_are_cut_teach_nothing_about_the_length_of_others():
    runtime = make_text_runtime(encoder=EMBEDDER)
    async with make_client(runtime) as client:
        await client.post("/v1/embeddings", json={"input": "a" * 40_000, "truncate_prompt_tokens": 8})
        assert runtime.admission.lengths.prompt_tokens(400) == 100
    runtime.close()


async def test_all_pairs_together_have_a_limit_of_tokens(serve, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_TOKENS", 1000)
    body = {"query": "q" * 90, "documents": ["a"] * 11}
    response = await serve(RERANKER).post("/v1/rerank", json=body)
    check(response, 400, "invalid_request_error", None)
    assert "more than 1000 tokens together" in response.json()["error"]["message"]


async def test_an_answer_has_a_limit_of_bytes(serve):
    client = serve(replace(EMBEDDER, pooling="each", width=4096))
    response = await client.post("/pooling", json={"input": ["a" * 98] * 21})
    check(response, 400, "invalid_request_error", None)
    message = response.json()["error"]["message"]
    assert "2100 rows of 4096 numbers, 34406400 bytes" in message
    assert "Send the texts in several requests" in message


async def test_scores_by_vectors_have_a_larger_limit_than_vectors_in_an_answer(serve):
    client, body = serve(replace(EMBEDDER, width=30_000)), {"query": "q", "documents": ["a"] * 1000}
    assert (await client.post("/v1/embeddings", json={"input": body["documents"]})).status_code == 400
    assert len((await client.post("/v1/rerank", json=body)).json()["results"]) == 1000
    response = await client.post("/v1/rerank", json=body | {"documents": ["a"] * 2000})
    check(response, 400, "invalid_request_error", None)
    assert "The scores would need 2001 rows of 30000 numbers" in response.json()["error"]["message"]


async def test_tokenize_tells_a_limited_number_of_tokens(serve, encoded):
    response = await serve().post("/tokenize", json={"inputs": ["!" * 40_000, "!" * 40_000, "!" * 40_000]})
    assert response.status_code == 400
    assert "more than 65536 tokens" in response.json()["error"]
    assert len(encoded) == 2  # and the third text was not read


# The event loop's time


@pytest.fixture
def threads(monkeypatch):
    """Names of the work of a call -> the thread that did it."""
    found = {}

    def watch(module, name):
        work = getattr(module, name)

        def watched(*args):
            found[name] = threading.current_thread()
            return work(*args)

        monkeypatch.setattr(module, name, watched)

    watch(desk, "tokenise")
    watch(endpoint, "write_json")
    return found


@pytest.mark.parametrize(
    ("encoder", "path", "body", "num_items"),
    [
        (EMBEDDER, "/v1/embeddings", {"input": ["a"]}, 1),
        (EMBEDDER, "/v1/embeddings", {"input": ["a"] * 200}, 200),
        (RERANKER, "/v1/rerank", {"query": "q", "documents": ["a"] * 200}, 200),
        (CLASSIFIER, "/predict", {"inputs": [["a"]]}, 1),
        (CLASSIFIER, "/predict", {"inputs": [["a"]] * 63}, 63 * 4),
    ],
)
async def test_a_list_of_many_short_texts_is_no_work_for_the_event_loop(serve, threads, encoder, path, body, num_items):
    assert (await serve(encoder).post(path, json=body)).status_code == 200
    is_inline = {name: thread is threading.main_thread() for name, thread in threads.items()}
    assert is_inline == {"tokenise": num_items < 200 or path == "/predict", "write_json": num_items == 1}


async def test_many_labels_are_no_reason_to_refuse_the_texts_of_others(serve, monkeypatch):
    sizes, finish = [], OffLoop.finish
    monkeypatch.setattr(OffLoop, "finish", lambda self, size, work: (sizes.append(size), finish(self, size, work))[1])
    assert (await serve(CLASSIFIER).post("/predict", json={"inputs": [["a"]] * 2048})).status_code == 200
    assert sizes == [LARGE_SIZE + 1]


def test_json_is_written_in_pieces_of_its_numbers_wherever_they_are(monkeypatch):
    sizes = []
    dumps = json_writer.fast_json.dumps
    counted = SimpleNamespace(dumps=lambda value: (sizes.append(json_writer._size(value)), dumps(value))[1])
    monkeypatch.setattr(json_writer, "fast_json", counted)
    rows = numpy.arange(60_000, dtype=numpy.float32).reshape(100, 600)
    value = {
        "embeddings": {"float": [rows[0]] * 300, "base64": ["x" * 3000] * 300},
        "data": [{"index": 0, "data": rows}, {"index": 1, "data": rows[:2]}],
        "texts": ["ä\n"] * 30_000,
        "none": [],
    }
    found = json_writer.write_json(value)
    assert found == fast_json.dumps(value)
    assert max(sizes) <= json_writer.PIECE_SIZE + 1
    assert len(sizes) < 60
