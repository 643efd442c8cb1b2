"""A client of an encoder gets numbers or an error that names the cause, whatever it sends: never a 422, never a 500."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.serve.cohere.embed import CohereEmbedBody
from penstock.serve.cohere.rerank import RerankBody
from penstock.serve.openai.embeddings import EmbeddingsBody
from penstock.serve.tei.routes import EmbedBody, InputsBody, PredictBody, TeiRerankBody, TeiTokenizeBody
from penstock.serve.vllm.texts import ClassifyBody, PoolingBody, ScoreBody
from penstock.serve.vllm.tokenize import TokenizeBody
from support.server.fuzz import JSON, TEXT, as_json
from support.server.harness import CLASSIFIER, EMBEDDER, LATE, RERANKER, NarrowExecutor, make_client, make_text_runtime

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TEXTS = TEXT | st.lists(TEXT.filter(bool), min_size=1, max_size=3) | st.lists(TEXT, max_size=3)
IDS = st.lists(st.integers(-1, 260), max_size=5)
DOCUMENTS = st.lists(TEXT.filter(bool) | st.fixed_dictionaries({"text": TEXT.filter(bool)}), min_size=1, max_size=3)
LIKELY = {
    "input": TEXTS | IDS | st.lists(IDS, max_size=3),
    "inputs": TEXTS | IDS | st.lists(st.lists(TEXT, max_size=3), max_size=3),
    "texts": TEXTS,
    "text_1": TEXTS,
    "text_2": TEXTS,
    "query": TEXT,
    "documents": DOCUMENTS,
    "model": st.sampled_from(["toy", None]) | TEXT,
    "encoding_format": st.sampled_from(["float", "base64"]),
    "embedding_types": st.lists(st.sampled_from(["float", "base64", "int8"]), max_size=3),
    "dimensions": st.integers(0, 5),
    "truncate_prompt_tokens": st.integers(-1, 200),
    "truncation_side": st.sampled_from(["left", "right"]),
    "truncate": st.booleans() | st.sampled_from(["NONE", "START", "END"]),
    "truncation_direction": st.sampled_from(["Left", "right"]),
    "top_n": st.integers(1, 4),
    "prompt_name": st.sampled_from(["query", "document"]) | TEXT,
    "prompt": TEXT,
}
ROUTES = [
    ("embed", "/v1/embeddings", EmbeddingsBody, {"input"}),
    ("embed", "/v2/embed", CohereEmbedBody, {"texts"}),
    ("embed", "/embed", EmbedBody, {"inputs"}),
    ("embed", "/pooling", PoolingBody, {"input"}),
    ("sparse", "/embed_sparse", InputsBody, {"inputs"}),
    ("late", "/embed_all", InputsBody, {"inputs"}),
    ("late", "/v1/score", ScoreBody, {"text_1", "text_2"}),
    ("embed", "/rerank", RerankBody, {"query", "documents"}),
    ("embed", "/tokenize", TeiTokenizeBody, {"inputs"}),
    ("embed", "/tokenize", TokenizeBody, set()),
    ("rerank", "/v1/rerank", RerankBody, {"query", "documents"}),
    ("rerank", "/v2/rerank", RerankBody, {"query", "documents"}),
    ("rerank", "/rerank", TeiRerankBody, {"query", "texts"}),
    ("rerank", "/v1/score", ScoreBody, {"text_1", "text_2"}),
    ("classify", "/classify", ClassifyBody, {"input"}),
    ("classify", "/predict", PredictBody, {"inputs"}),
]


@pytest.fixture(scope="module")
def post():
    """Sends one body to an in-process server of an embedding model, a reranker or a classifier."""
    runtimes = {"embed": EMBEDDER, "rerank": RERANKER, "classify": CLASSIFIER}
    runtimes = {kind: make_text_runtime(encoder=encoder) for kind, encoder in runtimes.items()}
    runtimes["sparse"] = make_text_runtime(encoder=replace(EMBEDDER, pooling="sparse"))
    runtimes["late"] = make_text_runtime(NarrowExecutor(4), encoder=LATE)
    clients = {kind: make_client(runtime) for kind, runtime in runtimes.items()}
    with asyncio.Runner() as runner:
        yield lambda kind, path, content: runner.run(clients[kind].post(path, content=content))
        for client in clients.values():
            runner.run(client.aclose())
    for runtime in runtimes.values():
        runtime.close()


def check(response):
    assert response.status_code in (200, 400, 404), response.text
    answer = response.json()
    if response.status_code != 200 and "error_type" in answer:
        assert set(answer) == {"error", "error_type"}
        assert answer["error_type"] == "Validation"
        assert len(answer["error"]) < 2000
    elif response.status_code != 200 and response.url.path.startswith("/v2/"):  # Cohere's
        assert list(answer) == ["message"]
        assert len(answer["message"]) < 2000
    elif response.status_code != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(answer["error"]["message"]) < 2000


@pytest.mark.parametrize(("kind", "path", "body_type", "required"), ROUTES)
def test_no_body_breaks_a_route(post, kind, path, body_type, required):
    values = {name: LIKELY.get(name, JSON) | JSON for name in body_type.model_fields}
    optional = {name: value for name, value in values.items() if name not in required}
    bodies = st.fixed_dictionaries({name: LIKELY[name] for name in required}, optional=optional)
    only_likely = st.fixed_dictionaries(
        {name: LIKELY[name] for name in required},
        optional={name: LIKELY[name] for name in optional if name in LIKELY},
    )

    @SETTINGS
    @given(body=bodies | only_likely)
    def run(body):
        check(post(kind, path, as_json(body)))

    run()


@pytest.mark.parametrize(("kind", "path"), sorted({(kind, path) for kind, path, _, _ in ROUTES}))
def test_no_bytes_break_a_route(post, kind, path):
    @SETTINGS
    @given(content=st.binary(min_size=1, max_size=60) | JSON.map(as_json))
    def run(content):
        check(post(kind, path, content))

    run()
