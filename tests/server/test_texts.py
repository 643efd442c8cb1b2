"""The faces of encoders over the hash executor: the numbers of every text are known, and depend on each of its tokens."""

import asyncio
import base64
import math
import struct
import threading
from dataclasses import replace

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.clock import VirtualClock
from penstock.deploy.off_loop import INLINE_MAX_SIZE
from penstock.engine.ports import OutputChunk
from penstock.obs.metrics import Metrics
from penstock.serve.tei import routes
from penstock.serve.texts.desk import ENTRY_BYTES, Desk
from penstock.serve.texts.tokens import named
from penstock.testing import expected_state, make_request
from penstock.types.encoder import TextTokens
from penstock.types.request import FinishReason
from penstock.types.tenant_limits import TenantLimits
from support.server.errors import check
from support.server.harness import (
    CLASSIFIER,
    EMBEDDER,
    LATE,
    RERANKER,
    TEXT_CAPACITY,
    GatedExecutor,
    JumpingClock,
    NarrowExecutor,
    make_client,
    make_runtime,
    make_text_runtime,
    until,
)
from support.server.texts import TOKENIZER, near, numbers, unit


def dot(first, second):
    return sum(a * b for a, b in zip(unit(first), unit(second), strict=True))


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def softmax(values):
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


@pytest.fixture(scope="module")
def post():
    """Sends a body to one of five models by its kind: `post(kind, path, **body)`."""
    runtimes = {
        kind: make_text_runtime(encoder=encoder)
        for kind, encoder in (("embed", EMBEDDER), ("rerank", RERANKER), ("classify", CLASSIFIER))
    }
    runtimes["sparse"] = make_text_runtime(encoder=replace(EMBEDDER, pooling="sparse"))
    runtimes["late"] = make_text_runtime(NarrowExecutor(4), encoder=LATE)
    clients = {kind: make_client(runtime) for kind, runtime in runtimes.items()}
    with asyncio.Runner() as runner:
        yield lambda kind, path, **body: runner.run(clients[kind].post(path, json=body))
        for client in clients.values():
            runner.run(client.aclose())
    for runtime in runtimes.values():
        runtime.close()


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


# /v1/embeddings


def test_an_embedding_is_a_vector_of_length_one(post):
    answer = ok(post("embed", "/v1/embeddings", model="toy", input="hello"))
    assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": near(unit(numbers("hello")))}]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert (answer["object"], answer["model"]) == ("list", "toy")


def test_lists_keep_their_order_and_count_each_text(post):
    texts = ["b", "a", "b"]
    answer = ok(post("embed", "/v1/embeddings", input=texts))
    assert [one["embedding"] for one in answer["data"]] == [near(unit(numbers(text))) for text in texts]
    assert answer["usage"]["prompt_tokens"] == 9


def test_base64_is_float32_in_little_endian(post):
    answer = ok(post("embed", "/v1/embeddings", input=["a"], encoding_format="base64"))
    values = struct.unpack("<4f", base64.b64decode(answer["data"][0]["embedding"]))
    assert list(values) == near(unit(numbers("a")))


def test_dimensions_cut_the_vector_and_make_it_a_unit_again(post):
    answer = ok(post("embed", "/v1/embeddings", input="a", dimensions=2))
    assert answer["data"][0]["embedding"] == near(unit(numbers("a")[:2]))


def test_token_ids_are_taken_as_they_are(post):
    ids = [5, 6, 7]
    state = list(struct.unpack("4f", expected_state(ids)))
    for given in (ids, [ids]):
        answer = ok(post("embed", "/v1/embeddings", input=given))
        assert answer["data"][0]["embedding"] == near(unit(state))
        assert answer["usage"]["prompt_tokens"] == 3


def test_a_list_may_have_texts_and_ids_side_by_side_and_ids_may_have_texts_between(post):
    ids = [5, 6, 7]
    state = list(struct.unpack("4f", expected_state(ids)))
    answer = ok(post("embed", "/v1/embeddings", input=["hello", ids]))
    assert [one["embedding"] for one in answer["data"]] == [near(unit(numbers("hello"))), near(unit(state))]
    spelled = ok(post("embed", "/tokenize", prompt="hello", add_special_tokens=False))["tokens"]
    wanted = ok(post("embed", "/v1/embeddings", input=[5, *spelled, 7]))["data"][0]["embedding"]
    for given in ([5, "hello", 7], [[5, "hello", 7]]):
        [one] = ok(post("embed", "/v1/embeddings", input=given))["data"]
        assert one["embedding"] == near(wanted)
    [one] = ok(post("embed", "/embedding", content=[5, "hello", 7]))
    assert one["embedding"][0] == near(wanted)


def test_a_prompt_by_name_stands_before_the_text(post):
    answer = ok(post("embed", "/v1/embeddings", input="a", prompt_name="query"))
    assert answer["data"][0]["embedding"] == near(unit(numbers("Q: a")))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_cuts_the_side_that_is_said(post, side):
    text = "".join(chr(0x41 + index % 26) for index in range(300))
    answer = ok(post("embed", "/v1/embeddings", input=text, truncate_prompt_tokens=-1, truncation_side=side))
    expected = numbers(text, max_tokens=128, truncation_side=side)
    assert answer["data"][0]["embedding"] == near(unit(expected))
    assert answer["usage"]["prompt_tokens"] == 128
    answer = ok(post("embed", "/v1/embeddings", input=text, truncate_prompt_tokens=5, truncation_side=side))
    assert answer["usage"]["prompt_tokens"] == 5


def test_a_cut_of_the_left_side_keeps_the_models_prompt(post):
    text = "".join(chr(0x41 + index % 26) for index in range(300))
    asked = {"input": text, "prompt_name": "query", "truncation_side": "left"}
    for size, kept in ((128, f"Q: {text[-123:]}"), (5, f"Q:{text[-1]}")):  # with two special tokens
        answer = ok(post("embed", "/v1/embeddings", **asked, truncate_prompt_tokens=size))
        assert answer["data"][0]["embedding"] == near(unit(numbers(kept))), size
    answer = ok(post("embed", "/v2/embed", texts=[text], input_type="search_document", truncate="START"))
    assert answer["embeddings"]["float"] == [near(unit(numbers(f"D: {text[-123:]}")))]


def test_two_thousand_texts_come_back_in_order(post):
    texts = [f"text {index % 700}" for index in range(2048)]
    answer = ok(post("embed", "/v1/embeddings", input=texts))
    assert len(answer["data"]) == 2048
    for index in (0, 1, 699, 700, 1399, 1400, 2047):
        assert answer["data"][index]["embedding"] == near(unit(numbers(texts[index])))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "empty string"),
        ({"input": []}, "input", "is empty"),
        ({"input": ["a", ""]}, "input[1]", "empty string"),
        ({"input": [[]]}, "input[0]", "is empty"),
        ({"input": ["a"] * 2049}, "input", "2049 texts; at most 2048"),
        (
            {"input": "a" * 300},
            "input",
            "maximum context length is 128 tokens (toy), special tokens included; 'input' has 302 tokens",
        ),
        ({"input": ["a", "b" * 300]}, "input[1]", "ask for truncation"),
        ({"input": [list(range(3, 200))]}, "input[0]", "197 tokens"),
        ({"input": ["a", *range(3, 200)]}, "input", "; 'input' has"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 5}, "dimensions", "1 to 4"),
        ({"input": [[1, 99999]]}, "input[0][1]", "check_embedding_ctx_length=False"),
        ({"input": [3, -1]}, "input[1]", "outside the vocabulary"),
        ({"input": [3, 2**70]}, "input[1]", "token id"),
        ({"input": [3, None]}, "input[1]", "token id"),
        ({"input": ["a", None]}, "input[1]", "must be a string"),
        ({"input": [3] + ["a"] * 2049}, "input", "2049 strings between token ids; at most 2048"),
        ({"input": [3, "a" * (2**20 + 1)]}, "input[1]", "the text has 1048577 characters, and at most 1048576 are tokenised"),
        ({"input": 7}, "input", "must be a string"),
        ({"input": None}, "input", "must be a string"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name", "'query', 'document'"),
        ({"input": [5, 6], "prompt_name": "query"}, "prompt_name", "needs texts"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "a whole number from 1"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "no text is cut"),
        ({"input": "a", "truncate_prompt_tokens": 2}, None, "At most 2"),
        ({"input": "a", "colour": 1}, "colour", "Unknown parameter"),
        ({}, "input", "Missing"),
    ],
)
def test_wrong_bodies_name_the_cause(post, body, param, words):
    response = post("embed", "/v1/embeddings", **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"], error
    assert error["param"] == param


# Tasks


@pytest.mark.parametrize(
    ("kind", "path", "body", "words"),
    [
        ("rerank", "/v1/embeddings", {"input": "a"}, "toy is a reranker and has no embeddings. Ask /v1/rerank"),
        ("classify", "/v1/embeddings", {"input": "a"}, "Ask /classify"),
        ("classify", "/v1/rerank", {"query": "a", "documents": ["b"]}, "no scores for pairs"),
        ("embed", "/classify", {"input": "a"}, "Ask /v1/embeddings"),
        ("embed", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "cannot generate text"),
        ("embed", "/v1/completions", {"prompt": "a"}, "cannot generate text"),
    ],
)
def test_a_task_that_the_model_does_not_have_is_refused_with_the_remedy(post, kind, path, body, words):
    response = post(kind, path, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_a_model_that_writes_has_no_embeddings(client):
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        response = await client.post(path, json=body)
        check(response, 400, "invalid_request_error", "model")
        assert "generates text" in response.json()["error"]["message"]
    response = await client.post("/embed", json={"inputs": "a"})
    assert response.status_code == 400
    assert response.json()["error_type"] == "Validation"


async def test_an_unknown_model_is_a_404(client):
    check(await client.post("/v1/embeddings", json={"input": "a", "model": "other"}), 404, "model_not_found", "model")


# Rerank and score


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_reranker_sorts_documents(post, path):
    documents = ["one", "two", "three"]
    scores = [sigmoid(numbers(("q", document))[0]) for document in documents]
    answer = ok(post("rerank", path, model="toy", query="q", documents=documents, top_n=2))
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == near([scores[index] for index in order])
    assert [result.get("document") for result in answer["results"]] == [
        None if path == "/v2/rerank" else {"text": documents[index]} for index in order
    ]
    assert answer["meta"]["billed_units"] == {"search_units": 1}


def test_the_root_does_what_the_model_is_for(post):
    assert ok(post("embed", "/", inputs="hello")) == ok(post("embed", "/embed", inputs="hello"))
    assert ok(post("classify", "/", inputs="hello")) == ok(post("classify", "/predict", inputs="hello"))
    texts = {"query": "q", "texts": ["one", "two", "three"]}
    ranking = ok(post("rerank", "/rerank", **texts))
    assert ok(post("rerank", "/", **texts)) == ranking
    assert ok(post("rerank", "/rerank", **texts, top_n=2)) == ranking[:2]
    assert post("embed", "/", colour=1).json()["error_type"] == "Validation"


def test_documents_may_be_objects_and_return_documents_is_obeyed(post):
    body = {"query": "q", "documents": [{"text": "one"}, "two"]}
    assert "document" not in ok(post("rerank", "/v1/rerank", **body, return_documents=False))["results"][0]
    found = ok(post("rerank", "/v2/rerank", **body, return_documents=True))["results"]
    assert {result["document"]["text"] for result in found} == {"one", "two"}


def test_cohere_cuts_documents_that_are_too_long_and_jina_refuses_them(post):
    body = {"query": "q", "documents": ["x" * 300]}
    assert ok(post("rerank", "/v2/rerank", **body))["usage"]["prompt_tokens"] == 128
    response = post("rerank", "/v1/rerank", **body)
    check(response, 400, "context_length_exceeded", "documents[0]")
    assert ok(post("rerank", "/v1/rerank", **body, truncate_prompt_tokens=-1))


def test_an_embedding_model_ranks_by_cosines_with_its_prompts(post):
    answer = ok(post("embed", "/v1/rerank", query="q", documents=["one", "two"]))
    expected = [dot(numbers("Q: q"), numbers(f"D: {text}")) for text in ("one", "two")]
    assert {result["index"]: result["relevance_score"] for result in answer["results"]} == near(dict(enumerate(expected)))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_pair_one_text_with_many_or_as_many(post, path):
    answer = ok(post("rerank", path, text_1="q", text_2=["one", "two"]))
    assert [one["score"] for one in answer["data"]] == near([sigmoid(numbers(("q", text))[0]) for text in ("one", "two")])
    answer = ok(post("rerank", path, text_1=["a", "b"], text_2=["c", "d"], use_activation=False))
    assert [one["score"] for one in answer["data"]] == near([numbers(pair)[0] for pair in (("a", "c"), ("b", "d"))])
    answer = ok(post("embed", path, text_1=["a", "b"], text_2=["c", "d"]))
    assert [one["score"] for one in answer["data"]] == near([dot(numbers(a), numbers(b)) for a, b in ("ac", "bd")])
    response = post("rerank", path, text_1=["a", "b"], text_2=["c", "d", "e"])
    check(response, 400, "invalid_request_error", "text_1")


# /classify and /pooling


def test_classify_names_the_likeliest_label(post):
    probabilities = softmax(numbers("hello"))
    [answer] = ok(post("classify", "/classify", input="hello"))["data"]
    assert answer["probs"] == near(probabilities)
    assert answer["label"] == "abcd"[probabilities.index(max(probabilities))]
    assert answer["num_classes"] == 4
    [answer] = ok(post("classify", "/classify", input=["hello"], use_activation=False))["data"]
    assert answer["probs"] == near(numbers("hello"))


def test_pooling_gives_the_numbers_as_they_are(post):
    for kind, width in (("embed", 4), ("rerank", 1), ("classify", 4)):
        [answer] = ok(post(kind, "/pooling", input="hello"))["data"]
        assert answer["data"] == near(numbers("hello")[:width])


@pytest.mark.parametrize("encoder", [RERANKER, CLASSIFIER])
async def test_the_default_prompt_of_a_head_stands_before_each_text_or_the_first_of_a_pair(encoder):
    runtime = make_text_runtime(encoder=replace(encoder, prompts={"rank": "R: "}, default_prompt="rank"))
    text, pair = "R: a", ("R: a", "b")
    asked = [
        (text, "/predict", {"inputs": "a", "raw_scores": True}, lambda answer: answer[0]["score"]),
        (text, "/classify", {"input": "a", "use_activation": False}, lambda answer: max(answer["data"][0]["probs"])),
        (text, "/pooling", {"input": "a"}, lambda answer: max(answer["data"][0]["data"])),
        (pair, "/predict", {"inputs": ["a", "b"], "raw_scores": True}, lambda answer: answer[0]["score"]),
        (pair, "/predict", {"inputs": [["a", "b"]], "raw_scores": True}, lambda answer: answer[0][0]["score"]),
        (text, "/predict", {"inputs": [["a"]], "raw_scores": True}, lambda answer: answer[0][0]["score"]),
    ]
    if encoder is RERANKER:
        score = {"text_1": "a", "text_2": "b", "use_activation": False}
        cut = {**score, "text_1": "long " * 9 + "a", "truncate_prompt_tokens": 9, "truncation_side": "left"}
        asked += [
            (pair, "/v1/score", score, lambda answer: answer["data"][0]["score"]),
            (pair, "/v1/score", cut, lambda answer: answer["data"][0]["score"]),
            (pair, "/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}, lambda answer: answer[0]["score"]),
        ]
    try:
        async with make_client(runtime) as client:
            for read, path, body, value in asked:
                found = value(ok(await client.post(path, json=body)))
                assert [found] == near([max(numbers(read)[: encoder.width])]), path
    finally:
        runtime.close()


# A vector for each token


def rows(text):
    values = numbers(text)
    return [values[:2], values[2:]]


def most_alike(query, document):
    return sum(max(dot(ours, theirs) for theirs in rows(document)) for ours in rows(query))


def test_each_token_has_a_vector(post):
    [answer] = ok(post("late", "/pooling", input="hello", task="token_embed"))["data"]
    assert answer["data"] == [near(row) for row in rows("hello")]
    for inputs, texts in (("hello", ["hello"]), (["a", "b"], ["a", "b"])):
        assert ok(post("late", "/embed_all", inputs=inputs)) == [[near(row) for row in rows(text)] for text in texts]
    assert ok(post("late", "/embed_all", inputs="a", prompt_name="query")) == [[near(row) for row in rows("Q: a")]]


def test_late_interaction_sums_the_best_cosine_of_each_token_of_the_query(post):
    wanted = [most_alike("Q: a", "D: c"), most_alike("Q: a", "D: d")]
    found = ok(post("late", "/v1/score", text_1="a", text_2=["c", "d"]))["data"]
    assert [one["score"] for one in found] == near(wanted)
    ranked = ok(post("late", "/v1/rerank", query="a", documents=["c", "d"]))["results"]
    assert {one["index"]: one["relevance_score"] for one in ranked} == {0: near(wanted[0]), 1: near(wanted[1])}
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]
    assert len(ok(post("late", "/rerank", query="a", texts=["c", "d"]))) == 2


def test_vectors_of_tokens_and_of_texts_are_not_confused(post):
    check(post("late", "/v1/embeddings", input="a"), 400, "invalid_request_error", "model")
    for kind, cause in (("embed", "returns one vector for a text"), ("rerank", "is a reranker and has no embeddings")):
        response = post(kind, "/embed_all", inputs="a")
        assert response.status_code == 400
        assert cause in response.json()["error"]
    check(post("embed", "/pooling", input="a", task="token_embed"), 400, "invalid_request_error", "task")
    assert len(ok(post("classify", "/pooling", input="a", task="classify"))["data"]) == 1


# Sparse vectors


def pairs(text):
    return [{"index": index, "value": near(value)} for index, value in enumerate(numbers(text))]


def test_sparse_vectors_are_pairs_of_index_and_value(post):
    assert ok(post("sparse", "/embed_sparse", inputs="hello")) == [pairs("hello")]
    assert ok(post("sparse", "/embed_sparse", inputs=["a", "b"], prompt_name="query")) == [pairs("Q: a"), pairs("Q: b")]
    [found] = ok(post("sparse", "/v1/score", text_1="a", text_2="b"))["data"]
    assert found["score"] == near(sum(x * y for x, y in zip(numbers("a"), numbers("b"), strict=True)))
    check(post("sparse", "/v1/embeddings", input="a"), 400, "invalid_request_error", "model")
    for kind, cause in (("embed", "has no sparse vectors"), ("classify", "has no embeddings")):
        response = post(kind, "/embed_sparse", inputs="a")
        assert response.status_code == 400
        assert cause in response.json()["error"]


def test_the_numbers_of_sparse_vectors_are_bounded(post, monkeypatch):
    monkeypatch.setattr(routes, "MAX_PAIRS", 8)
    assert len(ok(post("sparse", "/embed_sparse", inputs=["a", "b"]))) == 2
    response = post("sparse", "/embed_sparse", inputs=["a", "b", "c"])
    assert response.status_code == 400
    assert "more than 8 numbers" in response.json()["error"]


# text-embeddings-inference


def test_embed(post):
    assert ok(post("embed", "/embed", inputs="a")) == [near(unit(numbers("a")))]
    assert ok(post("embed", "/embed", inputs=["a", "b"], normalize=False)) == [near(numbers(text)) for text in "ab"]
    assert ok(post("embed", "/embed", inputs=[5, 6])) == [near(unit(struct.unpack("4f", expected_state([5, 6]))))]


async def test_vectors_that_a_model_normalises_keep_their_length_or_get_another_norm():
    runtime = make_text_runtime(encoder=replace(EMBEDDER, is_normalised=True))
    vector = numbers("a")  # as the model's files would have it
    async with make_client(runtime) as client:
        assert ok(await client.post("/embed", json={"inputs": "a", "normalize": False})) == [near(vector)]
        for norm, size in ((-1, 1), (1, sum(map(abs, vector)))):
            [one] = ok(await client.post("/embedding", json={"content": "a", "embd_normalize": norm}))
            assert one["embedding"] == [near([number / size for number in vector])]
    runtime.close()


@pytest.mark.parametrize("side", ["Left", "right"])
def test_embed_truncates_if_it_is_asked_to(post, side):
    text = "".join(chr(0x41 + index % 26) for index in range(300))
    answer = ok(post("embed", "/embed", inputs=text, truncate=True, truncation_direction=side))
    assert answer == [near(unit(numbers(text, max_tokens=128, truncation_side=side.lower())))]
    response = post("embed", "/embed", inputs=text)
    assert response.status_code == 400
    assert response.json()["error_type"] == "Validation"
    assert "302 tokens" in response.json()["error"]
    response = post("embed", "/embed", inputs="a", truncation_direction="Left")
    assert (response.status_code, "no text is cut" in response.json()["error"]) == (400, True)


async def test_another_model_than_the_default_one_is_named_by_model():
    models = [make_runtime(served_names=("writer",), aliases=())]
    for name, encoder in (("embed", EMBEDDER), ("sparse", replace(EMBEDDER, pooling="sparse")), ("classify", CLASSIFIER)):
        models.append(make_text_runtime(encoder=encoder, served_names=(name,), aliases=()))
    models.append(make_text_runtime(NarrowExecutor(4), encoder=LATE, served_names=("late",), aliases=()))
    async with make_client(*models) as client:
        for path, name in (("/embed", "embed"), ("/embed_all", "late"), ("/embed_sparse", "sparse"), ("/predict", "classify")):
            assert "Or set 'model' to 'embed'" in (await client.post(path, json={"inputs": "a"})).json()["error"]
            ok(await client.post(path, json={"inputs": "a", "model": name}))
        [ranked] = ok(await client.post("/rerank", json={"query": "a", "texts": ["b"], "model": "embed"}))
        assert ranked["score"] == near(dot(numbers("Q: a"), numbers("D: b")))
        prompted = {"inputs": "a", "prompt_name": "query"}
        assert (await client.post("/tokenize", json=prompted)).status_code == 400
        assert len(ok(await client.post("/tokenize", json=prompted | {"model": "embed"}))[0]) == 6
    for model in models:
        model.close()


def test_predict_sorts_labels_and_takes_pairs(post):
    probabilities = softmax(numbers("hello"))
    order = sorted(range(4), key=lambda index: -probabilities[index])
    expected = [{"label": "abcd"[index], "score": near(probabilities[index])} for index in order]
    assert ok(post("classify", "/predict", inputs="hello")) == expected
    assert ok(post("classify", "/predict", inputs=[["hello"]])) == [expected]
    [pair] = ok(post("rerank", "/predict", inputs=["a", "b"], raw_scores=True))
    assert pair == {"label": "score", "score": near(numbers(("a", "b"))[0])}
    response = post("classify", "/predict", inputs=[["a", "b", "c"]])
    assert (response.status_code, set(response.json())) == (400, {"error", "error_type"})
    response = post("classify", "/predict", inputs="a", raw_scores=True, parameters={"function_to_apply": "softmax"})
    assert (response.status_code, "leave out 'parameters" in response.json()["error"]) == (400, True)


def test_text_classification_of_hugging_faces_client(post):
    """It sends `parameters` without values as an empty object, and takes the first element of the answer."""
    labels = ok(post("classify", "/predict", inputs="hello"))
    assert ok(post("classify", "/", inputs="hello", parameters={})) == [labels]
    raw = ok(post("classify", "/predict", inputs="hello", raw_scores=True))
    asked = {"top_k": 2, "function_to_apply": "none"}
    assert ok(post("classify", "/", inputs="hello", parameters=asked)) == [raw[:2]]


def test_rerank_with_texts_is_that_of_text_embeddings_inference(post):
    scores = [sigmoid(numbers(("q", text))[0]) for text in ("one", "two")]
    order = sorted(range(2), key=lambda index: -scores[index])
    answer = ok(post("rerank", "/rerank", query="q", texts=["one", "two"], return_text=True))
    assert answer == [{"index": index, "text": ("one", "two")[index], "score": near(scores[index])} for index in order]
    raw = ok(post("rerank", "/rerank", query="q", texts=["one"], raw_scores=True))
    assert raw == [{"index": 0, "score": near(numbers(("q", "one"))[0])}]
    response = post("rerank", "/rerank", query="q", texts=[])
    assert (response.status_code, response.json()["error_type"]) == (400, "Validation")


def test_tokenize_has_two_shapes(post):
    [tokens] = ok(post("embed", "/tokenize", inputs="ab"))
    assert [token["id"] for token in tokens] == TOKENIZER.encode("ab", add_special_tokens=True)
    assert [token["special"] for token in tokens] == [True, False, False, True]
    assert len(ok(post("embed", "/tokenize", inputs=["ab", "c"], add_special_tokens=False))[1]) == 1
    assert ok(post("embed", "/tokenize", prompt="ab"))["count"] == 4


async def test_info(client):
    runtime = make_text_runtime(encoder=CLASSIFIER)
    async with make_client(runtime) as client:
        info = (await client.get("/info")).json()
    runtime.close()
    assert info["model_type"]["classifier"]["label2id"] == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert info["max_input_length"] == 128


# Cohere


def test_cohere_embed(post):
    body = {"model": "toy", "texts": ["a", "b"]}
    answer = ok(post("embed", "/v2/embed", **body, input_type="search_query", embedding_types=["float", "base64"]))
    expected = [unit(numbers(f"Q: {text}")) for text in "ab"]
    assert answer["embeddings"]["float"] == [near(vector) for vector in expected]
    packed = [struct.unpack("<4f", base64.b64decode(one)) for one in answer["embeddings"]["base64"]]
    assert [list(one) for one in packed] == [near(vector) for vector in expected]
    assert answer["texts"] == ["a", "b"]
    long = {"texts": ["x" * 300]}
    assert ok(post("embed", "/v2/embed", **long))["meta"]["billed_units"] == {"input_tokens": 128}
    for path, wrong, told in (
        ("/v2/embed", long | {"truncate": "NONE"}, "'texts[0]'"),
        ("/v2/embed", body | {"embedding_types": ["int8"]}, "'embedding_types[0]'"),
        ("/v2/rerank", {"query": "q"}, "'documents'"),
    ):
        response = post("embed", path, **wrong)
        assert (response.status_code, list(response.json())) == (400, ["message"])
        assert told in response.json()["message"]


async def test_cohere_s_input_type_finds_prompts_with_capital_letters():
    prompts = {"clustering": "C: ", "Clustering": "-", "Classification": "L: "}  # the last two are EmbeddingGemma's
    runtime = make_text_runtime(encoder=replace(EMBEDDER, prompts=prompts))
    async with make_client(runtime) as client:
        for purpose, read in (("clustering", "C: a"), ("classification", "L: a"), ("search_query", "a")):
            answer = ok(await client.post("/v2/embed", json={"texts": ["a"], "input_type": purpose}))
            assert answer["embeddings"]["float"] == [near(unit(numbers(read)))]
    runtime.close()


# How texts come to the engine


def texts_gate(capacity=TEXT_CAPACITY, **fields):
    gate = GatedExecutor(capacity)
    runtime = make_text_runtime(gate, **fields)
    return gate, runtime, make_client(runtime)


async def test_a_long_list_comes_to_the_engine_by_and_by():
    gate, runtime, client = texts_gate(max_queue=40)
    long = asyncio.create_task(client.post("/v1/embeddings", json={"input": [f"text {index:4}" for index in range(1000)]}))
    await until(lambda: runtime.bridge.num_open_requests > 0)
    assert runtime.bridge.num_open_requests == 16  # two steps have 16 rows
    other = asyncio.create_task(client.post("/v1/embeddings", json={"input": "short"}))
    await until(lambda: runtime.bridge.num_open_requests == 17)
    while not other.done():  # a few at a time: how many texts a step takes depends on how fast the machine is
        gate.allow(4)
        await asyncio.sleep(0.1)
    assert not long.done()
    gate.open()
    assert len((await long).json()["data"]) == 1000
    await client.aclose()
    runtime.close()


@pytest.mark.parametrize("max_step_tokens", [256, 8192])
async def test_a_list_does_not_shut_the_door_for_others(max_step_tokens):
    gate, runtime, client = texts_gate(replace(TEXT_CAPACITY, max_step_tokens=max_step_tokens), max_queue=100)
    body = {"input": [f"text {index:4}" for index in range(2048)]}
    long = asyncio.create_task(client.post("/v1/embeddings", json=body))
    await until(lambda: runtime.engine.load().num_running > 0)
    other = asyncio.create_task(client.post("/v1/embeddings", json={"input": "short"}))
    await until(lambda: other.done() or runtime.bridge.num_open_requests == 17)
    gate.open()
    assert (await other).status_code == (await long).status_code == 200
    await client.aclose()
    runtime.close()


async def test_a_list_of_token_ids_counts_for_as_many_requests_as_the_engine_gets_at_once():
    gate, runtime, client = texts_gate(limits=AdmissionLimits(tenant=TenantLimits(max_concurrent=100)))
    first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "short"}))
    await until(lambda: runtime.engine.load().num_running > 0)
    token_ids = [[5 + index % 50] * 11 for index in range(1000)]  # 16 of them fill two steps
    long = asyncio.create_task(client.post("/v1/embeddings", json={"input": token_ids}))
    await until(lambda: long.done() or runtime.bridge.num_open_requests == 17)
    gate.open()
    assert (await long).status_code == (await first).status_code == 200
    await client.aclose()
    runtime.close()


async def test_a_text_that_is_twice_in_a_list_is_computed_once():
    gate, runtime, client = texts_gate()
    call = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["same", "same"]}))
    await until(lambda: runtime.bridge.num_open_requests == 1)
    gate.open()
    answer = (await call).json()
    assert answer["data"][0]["embedding"] == answer["data"][1]["embedding"]
    assert answer["usage"]["prompt_tokens"] == 12
    await client.aclose()
    runtime.close()


async def test_a_cancelled_call_leaves_other_calls_their_texts():
    gate, runtime, client = texts_gate()
    first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "same"}, headers={"X-Request-Id": "first"}))
    second = asyncio.create_task(client.post("/v1/embeddings", json={"input": "same"}))
    await until(lambda: runtime.bridge.num_open_requests == 2)
    assert (await client.delete("/v1/requests/first")).json()["cancelled"]
    check(await first, 499, "request_cancelled")
    gate.open()
    assert (await second).json()["data"][0]["embedding"] == near(unit(numbers("same")))
    await until(lambda: runtime.bridge.num_open_requests == 0)
    await client.aclose()
    runtime.close()


async def test_a_client_that_leaves_has_its_texts_cancelled():
    gate, runtime, client = texts_gate()
    call = asyncio.create_task(client.post("/v1/embeddings", json={"input": [f"text {index}" for index in range(500)]}))
    await until(lambda: runtime.bridge.num_open_requests > 10)
    call.cancel()
    await until(lambda: runtime.bridge.num_open_requests == 0)
    gate.open()
    await until(lambda: runtime.engine.load().num_running + runtime.engine.load().num_waiting == 0)
    await client.aclose()
    runtime.close()


@pytest.mark.parametrize("isolates", [False, True])
async def test_tenants_that_share_no_prefixes_share_no_texts(isolates):
    runtime = make_text_runtime()
    runtime.prefix_sharing = "tenant" if isolates else "all"
    async with make_client(runtime, embedding_cache_bytes=1 << 20) as client:
        for tenant in ("one", "two"):
            ok(await client.post("/v1/embeddings", json={"input": "same"}, headers={"X-Tenant": tenant}))
    assert runtime.metrics.num_shared_texts == (not isolates)
    runtime.close()


async def test_a_draining_server_refuses_texts():
    runtime = make_text_runtime()
    async with make_client(runtime) as client:
        runtime.engine.drain()
        check(await client.post("/v1/embeddings", json={"input": "a"}), 503, "unavailable")
        response = await client.post("/embed", json={"inputs": "a"})
        assert (response.status_code, response.json()["error_type"]) == (503, "Unhealthy")
    runtime.close()


async def test_a_server_that_drains_lets_a_long_list_end():
    gate, runtime, client = texts_gate()
    call = asyncio.create_task(client.post("/v1/embeddings", json={"input": [f"text {index}" for index in range(300)]}))
    await until(lambda: runtime.bridge.num_open_requests > 10)
    runtime.engine.drain()
    check(await client.post("/v1/embeddings", json={"input": "other"}), 503, "unavailable")
    gate.open()
    assert len((await call).json()["data"]) == 300
    await until(lambda: runtime.engine.state == "stopped")
    await client.aclose()
    runtime.close()


@pytest.mark.parametrize(("num_steps", "num_ended"), [(1, 1), (3, 6)])
async def test_limits_of_a_wait_are_those_of_a_lists_first_numbers(monkeypatch, num_steps, num_ended):
    ended, put = [], Desk.put
    monkeypatch.setattr(Desk, "put", lambda self, chunk: (ended.append(chunk.finish_reason), put(self, chunk)))
    clock = VirtualClock()
    gate, runtime, client = texts_gate(clock=clock)
    headers = {"X-Queue-Timeout-Ms": "1000", "X-First-Token-Timeout-Ms": "1000"}
    body = {"input": [f"{index:100}" for index in range(30)]}  # six of them fill two steps
    call = asyncio.create_task(client.post("/v1/embeddings", json=body, headers=headers))
    gate.allow(num_steps)
    await until(lambda: len(ended) >= num_ended)
    clock.advance(2_000_000_000)
    gate.open()
    assert len((await call).json()["data"]) == 30
    await client.aclose()
    runtime.close()


async def test_a_call_whose_deadline_passes_leaves_other_calls_their_texts():
    clock = VirtualClock()
    gate, runtime, client = texts_gate(clock=clock)
    body = {"input": "same"}
    patient = asyncio.create_task(client.post("/v1/embeddings", json=body))
    hurried = asyncio.create_task(client.post("/v1/embeddings", json=body, headers={"X-Deadline-Ms": "50"}))
    await until(lambda: runtime.bridge.num_open_requests == 2)
    clock.advance(60_000_000)
    gate.open()
    check(await hurried, 408, "deadline_exceeded")
    assert (await patient).status_code == 200
    await client.aclose()
    runtime.close()


@pytest.mark.parametrize("header", ["X-Deadline-Ms", "X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms"])
async def test_deadlines_pass_while_texts_are_read(monkeypatch, header):
    _, runtime, client = texts_gate()
    may_go_on = threading.Event()
    monkeypatch.setattr("penstock.serve.texts.desk.tokenise", lambda call: may_go_on.wait(60))
    body = {"input": "a" * (INLINE_MAX_SIZE + 1), "truncate_prompt_tokens": -1}
    try:
        error = check(await client.post("/v1/embeddings", json=body, headers={header: "50"}), 408, "deadline_exceeded")
        assert "texts were not read within the 50 ms" in error["message"]
        assert not runtime.bridge.num_open_requests
    finally:
        may_go_on.set()
        await client.aclose()
        runtime.close()


async def test_texts_of_the_cache_let_others_have_their_turns(monkeypatch):
    runtime = make_text_runtime()
    turns, num_turns = [], 0
    ask = Desk.ask
    monkeypatch.setattr(Desk, "ask", lambda self, *args: (turns.append(num_turns), ask(self, *args)))

    async def others():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with make_client(runtime, embedding_cache_bytes=1 << 20) as client:
        body = {"input": [f"text {index}" for index in range(300)]}
        ok(await client.post("/v1/embeddings", json=body))
        turns.clear()
        other = asyncio.create_task(others())
        ok(await client.post("/v1/embeddings", json=body))
        other.cancel()
    assert len(turns) > 5
    assert len(set(turns)) == len(turns)
    runtime.close()


async def test_the_models_name_and_the_explanation_are_those_of_other_calls():
    runtime = make_text_runtime()
    async with make_client(runtime) as client:
        response = await client.post("/v1/embeddings", json={"input": ["a", "b"], "request_id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.headers["server-timing"].startswith("queue;dur=")
        told = (await client.get("/v1/requests/mine")).json()
        assert told["choices"][0]["state"] == "ended"
        assert (await client.get("/v1/requests/embd-mine")).status_code == 200
    runtime.close()


# The desk


class Bridge:
    """Takes requests, and has chunks told when the test says so."""

    def __init__(self):
        self.requests, self.aborted = {}, []

    def submit(self, requests, reader):
        self.requests |= {request.prompt_token_ids: request.request_id for request in requests}
        self._reader = reader

    def abort(self, request_id, detail):
        self.aborted.append(request_id)

    def forget(self, request_id):
        self.requests = {text: other for text, other in self.requests.items() if other != request_id}

    def tell(self, text, finish_reason=FinishReason.STOP, states=b"1234", **fields):
        chunk = OutputChunk(self.requests[text], "", (), (), 0, finish_reason=finish_reason, states=states, **fields)
        self._reader.put(chunk)
        self._reader.flush()


class Call:
    """A call at the desk, that notes what it is told."""

    def __init__(self, name):
        self.name, self.told, self.num_wakes, self.requests = name, [], 0, []

    def request_for(self, text):
        self.requests.append(make_request(f"{self.name}.{len(self.requests) + 1}", text.tokens.token_ids))
        return self.requests[-1]

    def report_requests(self, requests):
        pass

    def take(self, text, states, chunk):
        self.told.append((text.tokens.token_ids, states))

    def fail(self, chunk):
        self.told.append(chunk.detail)

    def wake(self):
        self.num_wakes += 1


A, B, C = (named(TextTokens((token_id,), 0)) for token_id in range(3))


def make_desk(*, isolates_tenants=False, **options):
    bridge = Bridge()
    return bridge, Desk(bridge, Metrics("toy"), isolates_tenants=isolates_tenants, **options), Call("first"), Call("second")


def test_a_second_text_of_a_pair_makes_another_text():
    _bridge, desk, first, _ = make_desk()
    desk.ask([named(TextTokens((5, 6), 0)), named(TextTokens((5, 6), 1))], first, "")
    assert len(first.requests) == 2


def test_each_call_is_told_of_its_own_texts():
    bridge, desk, first, second = make_desk()
    desk.ask([A, B], first, "")
    desk.ask([C], second, "")
    bridge.tell((0,))
    bridge.tell((1,), FinishReason.ERROR, b"", detail="broken")
    assert (first.told, first.num_wakes) == ([((0,), b"1234"), "broken"], 2)
    assert (second.told, second.num_wakes) == ([], 0)


def test_who_leaves_takes_along_its_unfinished_texts():
    bridge, desk, first, second = make_desk()
    desk.ask([A, B], first, "")
    desk.ask([C], second, "")
    bridge.tell((0,))
    desk.leave(first, "gone")
    assert (bridge.aborted, list(bridge.requests)) == (["first.2"], [(2,)])


def test_the_cache_has_the_texts_that_were_asked_for_last_within_its_bytes():
    bridge, desk, first, _ = make_desk(max_cache_bytes=2 * (4 + ENTRY_BYTES))

    def is_found(text):
        first.told.clear()
        desk.ask([text], first, "")
        if first.told:
            return True
        bridge.tell(text.tokens.token_ids)
        return False

    asked = [is_found(text) for text in (A, A, B, A, C, A, B)]
    assert asked == [False, True, False, True, False, True, False]
    assert first.told == [((1,), b"1234")]


def test_a_text_that_is_computed_twice_takes_room_in_the_cache_once():
    bridge, desk, first, second = make_desk(max_cache_bytes=2 * (4 + ENTRY_BYTES))
    desk.ask([A], first, "")
    first_id = bridge.requests[(0,)]
    desk.ask([A], second, "")
    bridge.tell((0,))
    bridge.requests[(0,)] = first_id
    bridge.tell((0,))
    desk.ask([B], first, "")
    bridge.tell((1,))
    first.told.clear()
    desk.ask([A, B], first, "")
    assert len(first.told) == 2


def test_a_cache_is_not_shared_by_tenants_that_share_nothing():
    bridge, desk, first, second = make_desk(max_cache_bytes=10_000, isolates_tenants=True)
    desk.ask([A], first, "one")
    bridge.tell((0,))
    desk.ask([A], second, "two")
    assert second.told == []
    bridge.tell((0,))
    desk.ask([A], second, "two")
    assert len(second.told) == 2


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_a_call_counts_once_for_a_target_however_many_texts_it_has(cache_bytes):
    executor, clock = GatedExecutor(TEXT_CAPACITY), JumpingClock()
    runtime = make_text_runtime(executor, clock=clock)
    runtime.metrics.slo_ttft_ns = 60_000_000_000
    try:
        async with make_client(runtime, embedding_cache_bytes=cache_bytes) as client:
            body, header = {"input": ["red", "green", "blue"]}, {"X-First-Token-Timeout-Ms": "20000"}
            late = asyncio.create_task(client.post("/v1/embeddings", json=body, headers=header))
            await until(lambda: runtime.bridge.num_open_requests == 3)
            clock.offset_ns = 30_000_000_000
            executor.open()
            assert (await late).status_code == 408
            for _ in range(2):
                assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    finally:
        runtime.close()
    assert runtime.metrics.slo == {("ttft", True): 2, ("ttft", False): 1}
