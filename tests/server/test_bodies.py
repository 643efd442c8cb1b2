"""Bodies as large as the limit allows, made to cost as much as possible: refused or answered, and the event loop goes on."""

import asyncio
import contextlib
import gzip
import threading
import time

import httpx
import pytest
from pydantic import ValidationError

from penstock import fast_json
from penstock.fast_json import MAX_CONTAINERS
from penstock.serve.anthropic.schemas import MessagesBody
from penstock.serve.bodies import MAX_TOKEN_IDS, parse_body
from penstock.serve.errors import ApiError
from penstock.serve.llama_cpp.read import LlamaCompletionBody
from penstock.serve.messages import MAX_MESSAGES
from penstock.serve.openai.schemas import ChatCompletionBody, CompletionBody
from penstock.serve.responses.schemas import ResponsesBody
from penstock.serve.vllm.tokenize import DetokenizeBody, TokenizeBody
from support.server.errors import CHAT, COMPLETIONS, check
from support.server.harness import running
from support.work_time import others_are_no_garbage, thread_s

MAX_BYTES = 4 << 20
MAX_FINDINGS = 200
BODY_TYPES = {COMPLETIONS: CompletionBody, CHAT: ChatCompletionBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


def many(number, value=1):
    return {f"z{i}": value for i in range(number)}


def prompt(text="a", **fields):
    return {"prompt": text, "max_tokens": 1} | fields


def chat(messages, **fields):
    return {"messages": messages, "max_tokens": 1, **fields}


def by_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def nested(depth):
    schema = {}
    for _ in range(depth // 2):
        schema = {"properties": {"a": schema}}
    return schema


def every_way(depth):
    """A schema whose answers have exponentially many ways to be right."""
    names = [f"n{i}" for i in range(depth)]
    choices = [{"properties": {"a": {"$ref": f"#/$defs/{name}"}}} for name in names]
    return {"$defs": {name: {"anyOf": choices} for name in names}, "$ref": "#/$defs/n0"}


def rules(number):
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1} | r{i + 1}" for i in range(number)) + f'\nr{number}: "a"'


HI = {"role": "user", "content": "hi"}
COSTLY = {
    "wrong messages": (CHAT, chat([1] * 1_000_000)),
    "wrong messages to tokenize": ("/tokenize", {"messages": [1] * 1_000_000}),
    "messages with an unknown field": (CHAT, chat([{"role": "user", "x": 1}] * 90_000)),
    "a message with unknown fields": (CHAT, chat([{**HI, **many(250_000)}])),
    "empty messages": (CHAT, chat([{"role": "user", "content": ""}] * 90_000)),
    "as many messages as may be": (CHAT, chat([HI] * MAX_MESSAGES)),
    "parts": (CHAT, chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 90_000}])),
    "unknown fields": (COMPLETIONS, prompt(**many(300_000))),
    "wrong metadata": (COMPLETIONS, prompt(metadata=many(300_000))),
    "wrong biases": (COMPLETIONS, prompt(logit_bias=many(300_000, "x"))),
    "template variables": (CHAT, chat([HI], chat_template_kwargs=many(250_000))),
    "wrong token ids": (COMPLETIONS, prompt(allowed_token_ids=[-1] * 1_000_000)),
    "wrong stop strings": (COMPLETIONS, prompt(stop=[1] * 1_500_000)),
    "wrong stop tokens": (COMPLETIONS, prompt(stop_token_ids=["x"] * 1_000_000)),
    "wrong bad words": (COMPLETIONS, prompt(bad_words=[1] * 1_500_000)),
    "long bad words": (COMPLETIONS, prompt(bad_words=["w" * 15_000] * 256)),
    "as many bad words as may be": (COMPLETIONS, prompt(bad_words=[f"{i:03}" + "w" * 29 for i in range(256)])),
    "token ids": (COMPLETIONS, prompt([5] * 1_500_000)),
    "prompts": (COMPLETIONS, prompt(["abcd" * 1_000] * 128, truncate_prompt_tokens=5)),
    "text to tokenize": ("/tokenize", {"prompt": "ab1 " * 1_000_000}),
    "text to tokenize into strings": ("/tokenize", {"prompt": "ab1 " * 1_000_000, "return_token_strs": True}),
    "token ids to detokenize": ("/detokenize", {"tokens": [70] * 1_000_000}),
    "wrong token ids to detokenize": ("/detokenize", {"tokens": [-1] * 1_000_000}),
    "a large schema": (CHAT, chat([HI], response_format=by_schema({"anyOf": [{"const": "abcd" * 8}] * 90_000}))),
    "as large a schema as may be": (CHAT, chat([HI], response_format=by_schema({"enum": [f"{i:05}" for i in range(8_000)]}))),
    "properties": (CHAT, chat([HI], response_format=by_schema({"properties": many(2_500, {"type": "string"})}))),
    "nested schemas": (CHAT, chat([HI], response_format=by_schema(nested(250)))),
    "schemas within each other": (CHAT, chat([HI], response_format=by_schema(every_way(40)))),
    "a schema as a long text": (COMPLETIONS, prompt(structured_outputs={"json": "[" * 4_000_000})),
    "wrong choices": (COMPLETIONS, prompt(structured_outputs={"choice": [1] * 1_500_000})),
    "long choices": (COMPLETIONS, prompt(structured_outputs={"choice": ["w" * 990] * 4_000})),
    "as many choices as may be": (COMPLETIONS, prompt(structured_outputs={"choice": [f"{i:010}" for i in range(4_096)]})),
    "a long regex": (COMPLETIONS, prompt(structured_outputs={"regex": "(a|b)*" * 1_300})),
    "a regex of much": (COMPLETIONS, prompt(structured_outputs={"regex": "((a{0,99}){0,99}b?){0,99}" * 99})),
    "a long grammar": (COMPLETIONS, prompt(structured_outputs={"grammar": "start: " + "|".join(['"a"'] * 16_000)})),
    "many rules": (COMPLETIONS, prompt(structured_outputs={"grammar": rules(3_500)})),
    "a grammar for many": (COMPLETIONS, prompt(["a"] * 128, structured_outputs={"regex": "[^a]{1,5000}" * 99})),
    "nested lists": (COMPLETIONS, {"prompt": "a", "user": [[[[[[[[[]]]]]]]]] * 200_000}),
}


@pytest.fixture(scope="module")
def costly():
    """The bodies as bytes."""
    contents = {kind: fast_json.dumps(body) for kind, (_, body) in COSTLY.items()}
    assert max(map(len, contents.values())) < MAX_BYTES
    return contents


@pytest.mark.parametrize("kind", COSTLY)
def test_no_body_has_many_findings(kind):
    """One message tells all findings, and each finding costs more than the item that it is about."""
    path, body = COSTLY[kind]
    num_findings = 0
    try:
        BODY_TYPES[path].model_validate(body)
    except ValidationError as error:
        num_findings = error.error_count()
    assert num_findings <= MAX_FINDINGS


class Heartbeat:
    """Beats in an event loop, and knows the longest times between two beats.

    CPU time of this process does not pass while other processes keep it waiting, so its limit can be strict. It does not pass
    while a loop waits for a lock or a disk either: real time has a coarse limit.
    """

    def __init__(self):
        self.longest_cpu_s = self.longest_real_s = 0.0

    @contextlib.contextmanager
    def timed(self):
        begin_cpu_s, begin_real_s = time.process_time(), time.perf_counter()
        yield
        self.longest_cpu_s = max(self.longest_cpu_s, time.process_time() - begin_cpu_s)
        self.longest_real_s = max(self.longest_real_s, time.perf_counter() - begin_real_s)

    async def beat(self):
        while True:
            with self.timed():
                await asyncio.sleep(0.001)

    @property
    def is_steady(self):
        return self.longest_cpu_s < 0.3 and self.longest_real_s < 5


@pytest.fixture(scope="module")
def spacious():
    with running() as server:
        yield server


@pytest.mark.parametrize("kind", COSTLY)
def test_no_body_holds_up_the_event_loop(spacious, costly, kind):
    """Everything in the process shares one lock with the server's loop: this thread's own loop feels what that one feels."""
    path = COSTLY[kind][0]

    async def is_steady():
        heartbeat = Heartbeat()
        async with httpx.AsyncClient(base_url=spacious.url, timeout=60) as client:
            task = asyncio.create_task(heartbeat.beat())
            ask = asyncio.create_task(client.post(path, content=costly[kind]))
            ready = [(await client.get("/health")).status_code]
            while not ask.done():
                with heartbeat.timed():
                    ready.append((await client.get("/health")).status_code)
            task.cancel()
        response = await ask
        assert response.status_code in (200, 400), response.text[:300]
        assert response.status_code == 200 or len(response.content) < 2_000
        assert set(ready) == {200}
        return heartbeat.is_steady

    # A virtual machine may charge us for its host's other work once, and twice: the least of three is what the body costs.
    with others_are_no_garbage():
        assert any(asyncio.run(is_steady()) for _ in range(3))


def refusal(content, body_type=CompletionBody):
    with pytest.raises(ApiError) as caught:
        parse_body(content, body_type)
    return caught.value


def test_unknown_parameters_are_named_but_not_all_of_them():
    error = refusal(fast_json.dumps(prompt(**many(300))))
    assert error.param == "z0"
    assert error.message == "Unknown parameters: 'z0', 'z1', 'z2' and more."
    error = refusal(fast_json.dumps({"messages": [{**HI, **many(300)}]}), ChatCompletionBody)
    assert error.param == "messages[0].z0"
    one = {"type": "function", "function": {"name": "now"}, "z0": 0}  # with more fields than a tool can have
    assert refusal(fast_json.dumps({"messages": [HI], "tools": [one]}), ChatCompletionBody).message.endswith("'tools[0].z0'.")


IDS_OF = [(CompletionBody, "prompt"), (LlamaCompletionBody, "prompt"), (DetokenizeBody, "tokens")]


@pytest.mark.parametrize(("body_type", "field"), IDS_OF)
def test_more_token_ids_than_any_context_takes_are_refused_before_they_are_parsed(body_type, field):
    """Parsing is one call, during which no other thread runs Python."""
    content = fast_json.dumps({field: [5] * 1_500_000})
    assert str(MAX_TOKEN_IDS) in refusal(content, body_type).message
    assert thread_s(lambda: refusal(content, body_type)) < 0.05


@pytest.mark.parametrize(("body_type", "field"), IDS_OF)
def test_as_many_token_ids_as_may_be_are_parsed_in_a_short_time(body_type, field):
    content = fast_json.dumps({field: [5] * MAX_TOKEN_IDS})
    assert thread_s(lambda: parse_body(content, body_type)) < 0.05


@pytest.mark.parametrize("body_type", [ChatCompletionBody, MessagesBody])
def test_messages_have_a_limit(body_type):
    body = {"model": "m", "max_tokens": 1, "messages": [HI] * (MAX_MESSAGES + 1)}
    assert str(MAX_MESSAGES) in refusal(fast_json.dumps(body), body_type).message


@pytest.mark.parametrize(
    ("field", "value", "more", "limit"),
    [
        ("logit_bias", {str(i): 1.5 for i in range(1024)}, {"1024": 1.5}, "at most 1024 entries"),
        ("allowed_token_ids", list(range(8192)), [8192], "at most 8192"),
        ("bad_words", ["w" * 32] * 255 + ["w" * 31], ["no"], "at most 256"),
        ("bad_words", ["w" * 1000] * 8 + ["w" * 192], ["w"], "at most 8192 characters in all"),
    ],
)
def test_lists_that_a_request_keeps_have_limits(field, value, more, limit):
    """A full queue of them fits into memory."""
    parse_body(fast_json.dumps(prompt(**{field: value})), CompletionBody)
    error = refusal(fast_json.dumps(prompt(**{field: value | more if isinstance(value, dict) else value + more})))
    assert (error.param, limit in error.message) == (field, True), error.message


def test_commas_in_text_are_no_elements():
    text = ',\\",' * MAX_TOKEN_IDS
    assert parse_body(fast_json.dumps({"prompt": text}), CompletionBody).prompt == text


def test_brackets_in_text_are_no_lists():
    text = '{"a\\": ["\\\\' * MAX_CONTAINERS
    assert parse_body(fast_json.dumps({"prompt": text}), CompletionBody).prompt == text
    lists = [text[:100], *[[]] * MAX_CONTAINERS]
    assert str(MAX_CONTAINERS) in refusal(fast_json.dumps({"prompt": lists})).message


def test_a_field_named_body_is_as_unknown_as_others():
    assert refusal(b'{"prompt": "a", "body": 1}').param == "body"


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        (many(17, "x"), "metadata"),
        ({"a": "x" * 513}, "metadata.a"),
        ({"k" * 65: "x"}, "metadata." + "k" * 65 + ".[key]"),
    ],
)
def test_metadata_has_openais_limits(metadata, param):
    assert refusal(fast_json.dumps({"input": "a", "metadata": metadata}), ResponsesBody).param == param


async def test_a_compressed_body_is_named(client):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    response = await client.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    error = check(response, 415, "unsupported_encoding", "Content-Encoding")
    assert "Content-Encoding 'gzip'" in error["message"]
    headers["Content-Encoding"] = "identity"
    assert (await client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)).status_code == 200


@pytest.mark.parametrize("penalty", [0, 1e-300, 1e-40, 0.00999, 100.1])
async def test_a_repetition_penalty_has_a_range(client, penalty):
    response = await client.post(COMPLETIONS, json=prompt(repetition_penalty=penalty))
    error = check(response, 400, "invalid_request_error", "repetition_penalty")
    assert ("0.01" if penalty < 1 else "100") in error["message"]
    for allowed in (0.01, 100):
        assert (await client.post(COMPLETIONS, json=prompt(repetition_penalty=allowed))).status_code == 200


async def test_long_names_are_told_back_shortened(client):
    response = await client.post(COMPLETIONS, json=prompt(model="x" * 1_000_000))
    check(response, 404, "model_not_found", "model")
    assert len(response.content) < 1_000
    for method, path in (("DELETE", "/v1/requests/"), ("GET", "/v1/models/"), ("GET", "/"), ("POST", "/health/")):
        response = await client.request(method, path + "x" * 50_000)
        assert response.status_code == 404
        assert len(response.content) < 1_000


async def test_a_large_answer_is_put_together_beside_the_event_loop(client, monkeypatch):
    threads = []

    def written(*args, **kwargs):
        threads.append(threading.current_thread() is threading.main_thread())
        return {}

    monkeypatch.setattr("penstock.serve.openai.write.CompletionWriter.whole", written)
    client.event_hooks = {}
    for fields in ({"max_tokens": 5}, {"max_tokens": 50, "n": 10, "logprobs": 20}, {"max_tokens": 1000, "n": 5}):
        assert (await client.post(COMPLETIONS, json=prompt(**fields | {"temperature": 1}))).status_code == 200
    assert threads == [True, False, False]


SHAPE = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
REMEDIES = [
    (CompletionBody, prompt(temprature=1), "temprature", "Did you mean 'temperature'?"),
    (CompletionBody, prompt(max_token=1), "max_token", "Did you mean 'max_tokens'?"),
    (CompletionBody, prompt(structured_outputs={"regexp": "a"}), "structured_outputs.regexp", "Did you mean 'regex'?"),
    (CompletionBody, prompt(response_format={"type": "regexp", "regexp": "a"}), "response_format.type", "must be 'text'"),
    (CompletionBody, prompt(max_completion_tokens=1), "max_completion_tokens", "Send 'max_tokens'."),
    (CompletionBody, prompt(n_predict=1), "n_predict", "Send 'max_tokens'."),
    (CompletionBody, prompt(grammar="a"), "grammar", "'structured_outputs': {'grammar': ...}"),
    (CompletionBody, {"messages": [HI]}, "messages", "/v1/chat/completions"),
    (ChatCompletionBody, {"messages": [HI], "json_schema": {}}, "json_schema", "'structured_outputs': {'json': ...}"),
    (ChatCompletionBody, {"messages": [HI], "regex": "a+"}, "regex", "'structured_outputs': {'regex': ...}"),
    (CompletionBody, prompt(ebnf="a"), "ebnf", "'structured_outputs': {'grammar': ...}"),
    (ChatCompletionBody, prompt(), "prompt", "/v1/completions"),
    (ChatCompletionBody, {"messages": [HI], "tools": [{"name": "now"}]}, "tools[0].name", SHAPE),
    (ChatCompletionBody, {"messages": [HI], "tools": [{"type": "function", "name": "now"}]}, "tools[0].name", SHAPE),
    (LlamaCompletionBody, prompt(n_predct=1), "n_predct", "Did you mean 'n_predict'?"),
]


@pytest.mark.parametrize(("body_type", "body", "param", "remedy"), REMEDIES)
def test_a_field_of_another_name_route_or_api_is_told_what_does_it_here(body_type, body, param, remedy):
    error = refusal(fast_json.dumps(body), body_type)
    assert error.param == param
    assert remedy in error.message


def test_only_names_of_a_field_s_length_are_likened():
    assert refusal(fast_json.dumps(prompt(**{"temperature" * 6: 1}))).message.endswith("'.")
    assert refusal(fast_json.dumps(prompt(colour=1))).message == "Unknown parameter: 'colour'."


def test_null_is_the_same_as_absent_for_unknown_fields_too():
    assert parse_body(fast_json.dumps(prompt(colour=None, shape=None)), CompletionBody) == parse_body(
        fast_json.dumps(prompt()), CompletionBody
    )
    assert refusal(fast_json.dumps(prompt(colour=None, shape=1))).message.startswith("Unknown parameter: 'shape'.")
