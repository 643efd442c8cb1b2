"""A client gets an answer or an error object that names the cause, whatever it sends: never a 422, never a 500."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import fast_json
from penstock.serve.cohere.chat import CohereChatBody
from penstock.serve.llama_cpp.endpoints import LlamaTokenizeBody
from penstock.serve.llama_cpp.read import LlamaCompletionBody, LlamaInfillBody
from penstock.serve.ollama.read import OllamaChatBody, OllamaGenerateBody
from penstock.serve.openai.schemas import ChatCompletionBody, CompletionBody
from penstock.serve.tgi.generate import TgiBody, TgiParameters
from penstock.serve.vllm.tokenize import DetokenizeBody, TokenizeBody
from penstock.text import fim
from support.server.fuzz import JSON, TEXT, as_json
from support.server.harness import SPECIAL_TOKENS, make_client, make_runtime

SETTINGS = settings(suppress_health_check=list(HealthCheck))
SCHEMAS = st.recursive(
    st.sampled_from(
        [{}, True, {"type": "integer"}, {"type": "string", "maxLength": 3}, {"enum": ["a", 1, None]}, {"const": "é"}]
    )
    | st.fixed_dictionaries({"$ref": TEXT})
    | st.fixed_dictionaries({"pattern": TEXT}),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(TEXT, inner, max_size=3)},
            optional={"required": st.lists(TEXT, max_size=2), "additionalProperties": inner | st.booleans()},
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)})
    ),
    max_leaves=5,
)
REGEXES = st.sampled_from(["[ab]{2,4}", "(a|b)+c?", "\\d{3}", "(?!a)b", "(", ".*", "a{2}b"]) | TEXT
OUTPUTS = (
    st.fixed_dictionaries({"json": SCHEMAS | SCHEMAS.map(json.dumps) | JSON})
    | st.fixed_dictionaries({"json_object": st.booleans() | JSON})
    | st.fixed_dictionaries({"regex": REGEXES | JSON})
    | st.fixed_dictionaries({"choice": st.lists(TEXT, max_size=4) | JSON})
    | st.fixed_dictionaries({"grammar": st.sampled_from(['start: "a" | "b"', "start: /[0-9]+/", "start: x"]) | TEXT})
    | st.dictionaries(st.sampled_from(["json", "regex", "choice", "whitespace_pattern"]) | TEXT, JSON, max_size=3)
)
FORMATS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"])}, optional={"json_schema": JSON}
) | st.fixed_dictionaries(
    {
        "type": st.just("json_schema"),
        "json_schema": st.fixed_dictionaries(
            {"name": st.just("a") | TEXT, "schema": SCHEMAS | JSON}, optional={"strict": st.booleans()}
        ),
    }
)
LIKELY = {
    "response_format": FORMATS,
    "structured_outputs": OUTPUTS,
    "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(0, 258), max_size=5) | JSON,
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT | JSON}),
        max_size=3,
    )
    | JSON,
    "max_tokens": st.integers(1, 20),
    "options": st.fixed_dictionaries({"num_predict": st.integers(1, 5)}, optional={"top_k": JSON, "num_ctx": JSON}),
    "format": SCHEMAS | JSON,
    "keep_alive": st.sampled_from(["5m", "0", 0, -1]) | JSON,
    "model": st.sampled_from(["toy", None]) | TEXT,
    "temperature": st.floats(0, 2),
    "n": st.integers(1, 3),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "logprobs": st.booleans() | st.integers(0, 5),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-100, 100), max_size=3),
    "bad_words": st.lists(TEXT, max_size=2),
    "n_predict": st.integers(0, 20),
    "content": TEXT | st.lists(TEXT | st.integers(-1, 260), max_size=3),
    "input_prefix": TEXT,
    "input_suffix": TEXT,
    "input_extra": st.lists(st.fixed_dictionaries({"text": TEXT}, optional={"filename": TEXT, "time": JSON}), max_size=3),
    "samplers": st.lists(st.sampled_from(["penalties", "dry", "top_k", "top_p", "temperature", "infill"]) | TEXT, max_size=3),
    "json_schema": SCHEMAS | JSON,
    "grammar": st.sampled_from(['root ::= "a" | "b"', "root ::= [0-9]+", "root ::= x", ""]) | TEXT,
    "response_fields": st.lists(st.sampled_from(["content", "timings/prompt_n", ""]) | TEXT, max_size=3),
    "tokens": st.lists(st.integers(-1, 260), max_size=4),
    "inputs": TEXT,
    "parameters": st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 20)},
        optional={name: JSON for name in TgiParameters.model_fields if name != "max_new_tokens"},
    ),
}
ROUTES = {
    "/v1/completions": (CompletionBody, {"prompt"}),
    "/v1/chat/completions": (ChatCompletionBody, {"messages"}),
    "/tokenize": (TokenizeBody, set()),
    "/detokenize": (DetokenizeBody, {"tokens"}),
    "/api/chat": (OllamaChatBody, {"model", "messages", "options"}),
    "/api/generate": (OllamaGenerateBody, {"model", "prompt", "options"}),
    "/v2/chat": (CohereChatBody, {"messages"}),
    "/generate": (TgiBody, {"inputs", "parameters"}),
    "/completion": (LlamaCompletionBody, {"prompt", "n_predict"}),
    "/infill": (LlamaInfillBody, {"input_prefix", "input_suffix", "n_predict"}),
}


def bodies(model, required):
    """Objects with the route's own field names and mostly sensible values."""
    values = {name: LIKELY.get(name, JSON) | JSON for name in model.model_fields}
    optional = {name: value for name, value in values.items() if name not in required}
    return st.fixed_dictionaries({name: LIKELY[name] for name in required}, optional=optional).map(
        lambda body: body | ({"max_tokens": 5} if "max_tokens" in model.model_fields and "max_tokens" not in body else {})
    )


@pytest.fixture(scope="module")
def post():
    """Sends one body to an in-process server and gives the response."""
    runtime = make_runtime()
    client = make_client(runtime)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(
        fim, "NAMES", ((SPECIAL_TOKENS[1], SPECIAL_TOKENS[2], SPECIAL_TOKENS[0]),)
    )  # the toy fills in the middle
    with asyncio.Runner() as runner:
        yield lambda path, content: runner.run(client.post(path, content=content))
        runner.run(client.aclose())
    monkeypatch.undo()
    runtime.close()


def check(response):
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        told = response.json()
        error = told["error"] if "error" in told else told["message"]
        assert isinstance(error, str) or set(error) in ({"message", "type", "param", "code"}, {"message", "type", "code"})
        assert len(error if isinstance(error, str) else error["message"]) < 2000
    elif response.headers["content-type"].startswith("text/event-stream"):
        *_, last = response.text.removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]" or "error" not in fast_json.loads(last.removeprefix("data:"))
    elif response.headers["content-type"] == "application/x-ndjson":
        assert [fast_json.loads(line) for line in response.text.splitlines()][-1]["done"] is True
    else:
        response.json()


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_breaks_a_route(post, path):
    @SETTINGS
    @given(body=bodies(*ROUTES[path]))
    def run(body):
        check(post(path, as_json(body)))

    run()


@pytest.mark.parametrize("path", ROUTES)
def test_no_bytes_break_a_route(post, path):
    @SETTINGS
    @given(content=st.binary(max_size=60) | JSON.map(as_json))
    def run(content):
        check(post(path, content))

    run()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["response_format", "structured_outputs"])
def test_no_grammar_breaks_a_route(post, path, name):
    good = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}

    @SETTINGS
    @given(value=LIKELY[name], seed=st.integers(0, 9), is_streamed=st.booleans())
    def run(value, seed, is_streamed):
        check(post(path, as_json(good | {"max_tokens": 20, "seed": seed, "stream": is_streamed, name: value})))

    run()


def test_one_changed_field_never_breaks_a_good_request(post):
    good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}

    @SETTINGS
    @given(name=st.sampled_from(sorted(ChatCompletionBody.model_fields)), value=JSON, is_streamed=st.booleans())
    def run(name, value, is_streamed):
        if name == "max_tokens" and value is None:
            return  # The rest of the context is a long answer.
        check(post("/v1/chat/completions", as_json(good | {"stream": is_streamed, name: value})))

    run()


def test_the_document_describes_what_is_accepted(post):
    """Every field of the bodies is in the OpenAPI document, so that a client made from it can send it."""
    runtime = make_runtime()
    client = make_client(runtime)
    document = fast_json.loads(asyncio.run(client.get("/openapi.json")).content)
    runtime.close()
    for model in (
        *(CompletionBody, ChatCompletionBody, TokenizeBody, DetokenizeBody),
        *(LlamaCompletionBody, LlamaInfillBody, LlamaTokenizeBody, CohereChatBody, TgiBody),
    ):
        assert set(document["components"]["schemas"][model.__name__]["properties"]) == set(model.model_fields)
