"""Which parameters are taken because they ask for nothing, which are refused by name, and which a setting lets pass."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import pytest

import sampling_table
from penstock import fast_json
from penstock.inprocess import SamplingParams
from penstock.serve.anthropic.schemas import ClientTool, MessagesBody, MetadataBody
from penstock.serve.bodies import MAX_LOGGED_CHARS, MAX_LOGGED_NAMES, Body, IgnoredParameters, StructuredOutputs, parse_body
from penstock.serve.cohere.chat import CohereChatBody
from penstock.serve.errors import ApiError
from penstock.serve.llama_cpp.read import LlamaBody, LlamaFileBody
from penstock.serve.messages import PART_NO_EFFECT, CalledFunction, ChatMessage, FunctionBody, ToolBody, ToolCallBody
from penstock.serve.ollama.models import OllamaPullBody, OllamaShowBody
from penstock.serve.ollama.read import OllamaCall, OllamaFunction, OptionsBody
from penstock.serve.openai.embeddings import EmbeddingsBody
from penstock.serve.openai.schemas import (
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
)
from penstock.serve.responses.schemas import (
    FunctionCallItem,
    MessageItem,
    ResponsesBody,
    ResponseStreamOptions,
    TextOptions,
    TextPart,
)
from penstock.serve.vllm.tokenize import DetokenizeBody, TokenizeBody
from penstock.types.sampling import PARAMETERS
from support.server.chat import HI_PROMPT
from support.server.completions import oracle
from support.server.errors import CHAT, COMPLETIONS, check
from support.server.harness import make_client

BODIES = {COMPLETIONS: CompletionBody, CHAT: ChatCompletionBody}
INPUTS = {COMPLETIONS: {"prompt": "Hello"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
PLAIN = {COMPLETIONS: oracle("Hello", max_tokens=3), CHAT: oracle(HI_PROMPT, max_tokens=3)}
EPHEMERAL = {"type": "ephemeral"}
FIELDS = Path(__file__).parents[2] / "docs" / "fields.md"


async def check_plain(client, path, fields):
    """The answer is the one that comes without these fields."""
    response = await client.post(path, json=INPUTS[path] | {"temperature": 0, "max_tokens": 3} | fields)
    assert response.status_code == 200, (fields, response.text)
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == PLAIN[path]


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_ask_for_nothing_are_taken(client, path):
    for name, field in BODIES[path].unsupported.items():
        for value in (None, *field.neutral):
            await check_plain(client, path, {name: value})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": None},
        {"length_penalty": 1.0, "early_stopping": False},
        {"spaces_between_special_tokens": True},
        {"include_reasoning": True},
        {"session_id": "s", "user": "u", "prompt_cache_key": "k"},
        {"cache_control": EPHEMERAL},
        {"store": True, "service_tier": "flex", "stream_interval": 8},
        {"metadata": {"a": 1}},
        {"truncation_side": "left"},
        {"response_format": {"type": "text", "schema": None, "json_schema": None}},
        # All that vLLM's own request object has where nothing was set.
        {
            "stop": [],
            "stop_token_ids": [],
            "bad_words": [],
            "min_tokens": 0,
            "ignore_eos": False,
            "use_beam_search": False,
            "skip_special_tokens": True,
            "include_stop_str_in_output": False,
            "priority": 0,
            "stream": False,
            "stream_options": None,
            "logit_bias": None,
        },
    ],
    ids=lambda value: next(iter(value)),
)
async def test_defaults_of_other_servers_are_taken(client, path, fields):
    await check_plain(client, path, fields)


def test_the_docs_show_every_value_that_asks_for_nothing():
    text = FIELDS.read_text(encoding="utf-8")
    section = text[text.index("## Unknown and unsupported fields") :]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("|")]
    for body_type in (CompletionBody, ChatCompletionBody, ChatMessage, StreamOptions, StructuredOutputs):
        for name, field in body_type.unsupported.items():
            values = [row[2] for row in rows if re.search(rf"[`.]{name}`", row[1])]
            for neutral in field.neutral:
                if not isinstance(neutral, dict) or not neutral:  # those are described in words
                    assert any(fast_json.dumps(neutral).decode() in value for value in values), (name, neutral)


def test_the_docs_name_every_unsupported_field():
    text = FIELDS.read_text(encoding="utf-8")
    section = text[text.index("## Unknown and unsupported fields") :]
    table, _, _ = section.partition("On encoders' routes")
    body_types = (CompletionBody, ChatCompletionBody, ChatMessage, StreamOptions, StructuredOutputs)
    for name in set().union(*(body_type.unsupported for body_type in body_types)):
        assert f"{name}`" in table or name.startswith("guided_"), name


# Fields without effect


def bodies_of(body_type=Body):
    return {body_type}.union(*map(bodies_of, body_type.__subclasses__()))


def test_the_docs_list_every_field_without_effect():
    """Each item of the list stands for some bodies, and names exactly their fields with the mark."""
    text = FIELDS.read_text(encoding="utf-8")
    section = text[text.index("## Fields without effect") : text.index("## Unknown and unsupported fields")]
    rows = dict(re.findall(r"^- \*\*(.+?)\*\*: (`.+?)(?=\n- |\n\n)", section, re.MULTILINE | re.DOTALL))
    told = {place: set(re.findall(r"`([\w.]+)`", fields)) for place, fields in rows.items()}
    common = GenerationBody.no_effect
    assert told == {
        "chats and completions": {*common, *(f"stream_options.{name}" for name in StreamOptions.no_effect)},
        "chats": ChatCompletionBody.no_effect - common,
        "a chat's messages": {
            *ChatMessage.no_effect,
            *(f"tool_calls.{name}" for name in ToolCallBody.no_effect),
            *(f"tool_calls.function.{name}" for name in CalledFunction.no_effect),
            *(f"content.{name}" for name in PART_NO_EFFECT),
        },
        "a chat's tools": {*ToolBody.no_effect, *(f"function.{name}" for name in FunctionBody.no_effect)},
        "`/v1/responses`": {
            *ResponsesBody.no_effect,
            *(f"text.{name}" for name in TextOptions.no_effect),
            *(f"stream_options.{name}" for name in ResponseStreamOptions.no_effect),
        },
        "items of `input`": {
            *MessageItem.no_effect,
            *FunctionCallItem.no_effect,
            *(f"content.{name}" for name in TextPart.no_effect),
        },
        "`/v1/messages`": {
            *MessagesBody.no_effect,
            *(f"metadata.{name}" for name in MetadataBody.no_effect),
            *(f"tools.{name}" for name in ClientTool.no_effect),
        },
        "`/completion`, `/infill`": {
            *LlamaBody.no_effect,
            *(f"input_extra.{name}" for name in LlamaFileBody.no_effect),
        },
        "`/api/...`": {
            *(f"options.{name}" for name in OptionsBody.no_effect),
            *OllamaShowBody.no_effect,
            *OllamaPullBody.no_effect,
            *(f"tool_calls.{name}" for name in OllamaCall.no_effect),
            *(f"tool_calls.function.{name}" for name in OllamaFunction.no_effect),
        },
        "`/v2/chat`": CohereChatBody.no_effect,
        "OpenAI's, Jina's and vLLM's routes of encoders": EmbeddingsBody.no_effect,
    }  # fmt: skip
    assert {name for body_type in bodies_of() for name in body_type.no_effect} == {
        name.rpartition(".")[2] for names in told.values() for name in names
    }


ODD = [True, 2**62, -1.5, "x" * 1000, [[], {}, None], {"a": {"b": ["c"]}}]


@pytest.mark.parametrize("path", BODIES)
async def test_values_of_any_kind_without_effect_are_accepted(client, path):
    for name in sorted(BODIES[path].no_effect - TEXTS):
        for value in ODD:
            await check_plain(client, path, {name: value})
    for value in ODD:
        body = INPUTS[path] | {"stream": True, "max_tokens": 1, "stream_options": {"include_obfuscation": value}}
        assert (await client.post(path, json=body)).status_code == 200


TEXTS = {"user", "safety_identifier", "prompt_cache_key", "session_id"}


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(ChatMessage.unsupported),
        {"annotations": [], "tool_calls": [], "reasoning_content": "", "reasoning": ""},
        {"parsed": None},
        {"parsed": {"colour": "red"}},
        {"cache_control": {"type": "forever"}},
        {"content": [{"type": "text", "text": "hi", "cache_control": {}}]},
        {"content": [{"type": "text", "text": "hi", "cache_control": None, "prompt_cache_breakpoint": {"mode": "explicit"}}]},
    ],
    ids=range(7),
)
async def test_messages_may_have_fields_that_ask_for_nothing(client, fields):
    await check_plain(client, CHAT, {"messages": [{"role": "user", "content": "hi", **fields}]})


async def test_tools_may_be_marked_for_a_cache(client):
    function = {"name": "now", "cache_control": EPHEMERAL}
    tool = {"type": "function", "function": function, "cache_control": EPHEMERAL}
    await check_plain(client, CHAT, {"tools": [tool], "tool_choice": "none"})


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"refusal": "no"}, "refusal"),
        ({"audio": {"id": "x"}}, "audio"),
        ({"function_call": {"name": "f", "arguments": ""}}, "function_call"),
        ({"reasoning_content": "hm"}, "reasoning_content"),
        ({"content": [{"type": "text", "text": "hi", "colour": {}}]}, "content[0].colour"),
    ],
    ids=lambda value: str(value),
)
async def test_messages_that_ask_for_more_are_refused_by_name(client, message, param):
    body = {"messages": [{"role": "user", "content": "hi", **message}]}
    check(await client.post(CHAT, json=body), 400, "invalid_request_error", f"messages[0].{param}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_decoding_backend", "outlines"),
        ("return_mm_kwargs", False),
        ("truncation_side", "right"),
        ("watermarking", 0),
        ("vllm_xargs", {"a": 1}),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_values_that_ask_for_what_is_not_there_are_refused_by_name(client, path, name, value):
    check(await client.post(path, json=INPUTS[path] | {name: value}), 400, "invalid_request_error", name)


WRONG = [True, 7, -1.5, 2**64, 10**18, "", "x" * 300_000, [], ["x"] * 300, [[]], [{}], [None], [1.5], {}, {"x": 1}, {"a": []}]
LEAKS = re.compile(r"Input|valid |instance|validation|\b(True|False|None|dict|str|int|float|bool|List|Dict)\b|Body|pydantic")


def every_field():
    """(type of a body, what makes one with a value in this field)."""
    tops = {CompletionBody: {"prompt": "a"}, ChatCompletionBody: INPUTS[CHAT], TokenizeBody: {}, DetokenizeBody: {"tokens": []}}
    for body_type, base in tops.items():
        for field in body_type.field_names:
            yield body_type, lambda value, base=base, field=field: base | {field: value}
    nested = {
        "stream_options": (StreamOptions, {}),
        "response_format": (ResponseFormat, {"type": "json_schema"}),
        "structured_outputs": (StructuredOutputs, {}),
    }
    for outer, (inner_type, inner) in nested.items():
        for field in inner_type.field_names:
            yield (
                CompletionBody,
                lambda value, outer=outer, inner=inner, field=field: {"prompt": "a", outer: inner | {field: value}},
            )
    for field in ChatMessage.field_names:
        yield ChatCompletionBody, lambda value, field=field: {"messages": [{"role": "user", field: value}]}
    for field in JsonSchemaFormat.field_names:
        yield (
            ChatCompletionBody,
            lambda value, field=field: (
                INPUTS[CHAT] | {"response_format": {"type": "json_schema", "json_schema": {field: value}}}
            ),
        )


def test_no_message_speaks_of_the_library_behind_it():
    messages = set()
    for body_type, place in every_field():
        for wrong in WRONG:
            try:
                parse_body(json.dumps(place(wrong)).encode(), body_type)
            except ApiError as error:
                messages.add(error.message)
    assert len(messages) > 200
    assert [message for message in messages if LEAKS.search(message)] == []


# --ignore-unknown-parameters


@pytest.fixture
async def tolerant(runtime):
    async with make_client(runtime, ignore_unknown_parameters=True) as client:
        yield client


def ignored_names(caplog):
    return [record.args[0] for record in caplog.records if record.args and "is ignored" in record.msg]


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_names_are_ignored_and_logged_once(tolerant, caplog, path):
    fields = {"no_such_thing": [1], "nor_this": True, "store": True, "prompt_cache_key": "k"}
    for _ in range(3):
        await check_plain(tolerant, path, fields)
    assert ignored_names(caplog) == ["no_such_thing", "nor_this"]
    assert all(record.levelno == logging.WARNING for record in caplog.records if "is ignored" in record.msg)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"functions": {}}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"temperature": 3}, "temperature"),
        ({"messages": [{"role": "user", "content": "hi", "no_such_thing": 1}]}, "messages[0].no_such_thing"),
        ({"response_format": {"type": "text", "no_such_thing": 1}}, "response_format.no_such_thing"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_the_answer_depends_on_is_never_ignored(tolerant, fields, param):
    check(await tolerant.post(CHAT, json=INPUTS[CHAT] | fields), 400, "invalid_request_error", param)


async def test_without_the_setting_nothing_is_ignored(client):
    check(await client.post(CHAT, json=INPUTS[CHAT] | {"no_such_thing": 1}), 400, "invalid_request_error", "no_such_thing")


async def test_other_routes_ignore_too(tolerant):
    answer = (await tolerant.post("/tokenize", json={"prompt": "a", "no_such_thing": 1})).json()
    assert answer["count"] == 1


def test_what_is_logged_and_remembered_of_names_is_bounded(caplog):
    ignored = IgnoredParameters()
    ignored.note(["x" * 10_000, "x" * 10_000 + "y", "a\nb"])
    ignored.note(str(number) for number in range(10_000))
    names = ignored_names(caplog)
    assert len(names) == len(set(names)) == MAX_LOGGED_NAMES
    assert max(map(len, names)) == MAX_LOGGED_CHARS
    assert "not logged" in caplog.records[-1].getMessage()
    assert len(caplog.records) == MAX_LOGGED_NAMES + 1
    assert "\n" not in caplog.records[1].getMessage()


async def test_a_body_of_unknown_names_alone_is_answered(tolerant, caplog):
    await check_plain(tolerant, COMPLETIONS, {f"x{number}": 1 for number in range(10_000)})
    assert len(ignored_names(caplog)) == MAX_LOGGED_NAMES


# The table of sampling parameters


def test_the_docs_have_the_table_of_sampling_parameters():
    assert sampling_table.page() == sampling_table.PAGE.read_text(encoding="utf-8"), "make docs"


def test_the_python_api_has_the_parameters_that_the_table_gives_it():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    named = {name for name, one in PARAMETERS.items() if "python" in one.spellings}
    assert named == fields.keys() & PARAMETERS.keys()
    assert all(fields[name] == PARAMETERS[name].neutral for name in named)


async def test_a_parameter_that_the_backend_does_not_compute_is_refused(runtime, client):
    capacity = dataclasses.replace(runtime.model.capacity, unsupported_parameters=frozenset({"min_p"}))
    runtime.model = dataclasses.replace(runtime.model, capacity=capacity)
    check(await client.post(COMPLETIONS, json={"prompt": "a", "min_p": 0.1}), 400, "invalid_request_error", "min_p")
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "min_p": 0})).status_code == 200
    options = {"model": "toy", "prompt": "a", "options": {"min_p": 0.1}}
    answer = await client.post("/api/generate", json=options)
    assert answer.status_code == 400
    assert "'options.min_p' can't be computed" in answer.json()["error"]
