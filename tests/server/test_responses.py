"""`/v1/responses`: what is asked and told, streamed and not; tools, reasoning, formats; errors in its own words."""

import json

import httpx
import pytest

from penstock.engine.bridge import merge_chunks
from penstock.serve.responses.write import ResponsesWriter, find_tokens
from penstock.testing import HashExecutor
from penstock.types.plan import Capacity
from support.server.chat import HI_PROMPT
from support.server.completions import oracle
from support.server.harness import GatedExecutor, make_client, make_runtime, running
from support.server.responses import ASK, FUNCTIONS, PATH, ROME, ask
from support.server.tools import CALL, CALL_NOW, THINKING_TEMPLATE, TOOLS_TEMPLATE, says

NOW_TOOL = FUNCTIONS[1]
CLOCK = {"type": "namespace", "name": "clock", "description": "Times.", "tools": [NOW_TOOL]}


def events_of(text):
    """The data of all events, whose names and numbers are right."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


async def stream(client, **body):
    response = await client.post(PATH, json=ASK | body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


async def said(text, *, chat_template=TOOLS_TEMPLATE, **body):
    """A model's answer that says a text, as it is told at once; a stream tells the same."""
    runtime = says(text, chat_template=chat_template)
    try:
        async with make_client(runtime) as client:
            body = {"max_output_tokens": 400, "store": False} | body
            answer, events = await ask(client, **body), await stream(client, **body)
    finally:
        runtime.close()
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{answer['status']}"
    for one in (answer, last):
        del one["id"]
        one["usage"].pop("input_tokens_details")  # the second finds the prompt in the cache
        for item in one["output"]:
            assert item.pop("id").startswith({"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[item["type"]])
            item.pop("call_id", None)
    assert last == answer
    return answer, events


def text_of(answer):
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


async def prompt_of(client, **body):
    """The tokens that an answer begins with, told by its usage."""
    return (await ask(client, **body))["usage"]["input_tokens"]


async def test_text(client):
    answer = await ask(client, metadata={"a": "b"}, user="me")
    [item] = answer.pop("output")
    text = oracle(HI_PROMPT, max_tokens=12)
    assert item == {
        "id": "msg_id1_1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        "status": "incomplete",
    }
    assert answer == {
        "id": "resp_id1",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": "incomplete",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": 12,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "toy",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "system_fingerprint": "fp_toy",
        "temperature": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1,
        "truncation": "disabled",
        "usage": {
            "input_tokens": len(HI_PROMPT_TOKENS),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 12,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(HI_PROMPT_TOKENS) + 12,
        },
        "user": "me",
    }


HI_PROMPT_TOKENS = HI_PROMPT.replace("<|turn|>", "T").replace("<|end|>", "E")
"""A character for each token."""


async def test_a_stream_tells_of_each_item_as_it_begins_grows_and_ends(client):
    events = await stream(client)
    text = oracle(HI_PROMPT, max_tokens=12)
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    num = len(deltas)
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    assert "".join(delta["delta"] for delta in deltas) == text
    place = {"item_id": "msg_id1_1", "output_index": 0, "content_index": 0}
    assert all(event.items() >= place.items() for event in events[3 : num + 6])
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    assert events[num + 4]["text"] == text
    assert events[num + 5]["part"] == part
    assert events[num + 6]["item"]["content"] == [part]
    assert events[-1]["response"]["output"] == [events[num + 6]["item"]]
    assert events[-1]["response"]["usage"]["output_tokens"] == 12


async def test_a_complete_answer():
    answer, events = await said("It rains.")
    assert text_of(answer) == "It rains."
    assert answer["status"] == "completed"
    assert answer["completed_at"] == 1_700_000_000
    assert answer["incomplete_details"] is None
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.completed"]


async def test_an_empty_answer_has_a_message():
    answer, _ = await said("")
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("message", "completed")]
    assert text_of(answer) == ""


async def test_what_stands_for_the_same_conversation(client):
    """Strings, parts, instructions and items of the system become the messages of a chat."""
    text = oracle(HI_PROMPT, max_tokens=12)
    same = [
        [{"role": "user", "content": "hi"}],
        [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}],
            }
        ],
        [{"type": "message", "role": "user", "content": "hi", "id": "msg_1", "status": "completed"}],
    ]
    for items in same:
        assert text_of(await ask(client, input=items)) == text
    system = "<|turn|>system: be brief\n\nand kind<|end|>\n" + HI_PROMPT
    asked = await ask(client, instructions="be brief", input=[{"role": "developer", "content": "and kind"}, *same[0]])
    assert text_of(asked) == oracle(system, max_tokens=12)
    assert asked["instructions"] == "be brief"


async def test_calls():
    answer, events = await said(f"Let me see.\n{CALL}\n{CALL_NOW}", tools=FUNCTIONS)
    message, *calls = answer["output"]
    assert text_of(answer) == "Let me see."
    assert [(call["type"], call["name"], json.loads(call["arguments"]), call["status"]) for call in calls] == [
        ("function_call", "get_weather", ROME, "completed"),
        ("function_call", "now", {}, "completed"),
    ]
    assert answer["status"] == message["status"] == "completed"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["type"] for item in added] == ["message", "function_call", "function_call"]
    assert added[1]["arguments"] == ""
    of_rome = [event for event in events if event.get("item_id") == added[1]["id"]]
    assert {event["type"] for event in of_rome[:-1]} == {"response.function_call_arguments.delta"}
    assert json.loads("".join(event["delta"] for event in of_rome[:-1])) == ROME
    assert of_rome[-1]["type"] == "response.function_call_arguments.done"
    assert json.loads(of_rome[-1]["arguments"]) == ROME
    assert answer["tools"][1] == {"type": "function", "name": "now", "parameters": None, "strict": False}


async def test_functions_of_a_namespace():
    """The model knows each under a longer name. The client sees the name and the namespace."""
    answer, events = await said(
        '<tool_call>\n{"name": "clock__now", "arguments": {}}\n</tool_call>', tools=[FUNCTIONS[0], CLOCK]
    )
    [call] = answer["output"]
    assert (call["type"], call["name"], call["namespace"], call["arguments"]) == ("function_call", "now", "clock", "{}")
    [added] = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (added["name"], added["namespace"]) == ("now", "clock")
    assert answer["tools"][1] == CLOCK | {"tools": [NOW_TOOL | {"parameters": None, "strict": False}]}
    answer, _ = await said(CALL_NOW, tools=[CLOCK, NOW_TOOL])
    assert "namespace" not in answer["output"][0]


async def test_the_model_sees_a_namespace_as_functions():
    flat = [{"type": "function", "name": "clock__now", "description": "Times."}]
    history = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "now", "namespace": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "name": "now", "namespace": "clock", "output": "noon"},
    ]
    flat_history = [history[0], {"type": "function_call", "call_id": "c", "name": "clock__now", "arguments": "{}"}]
    runtime = says("Noon.", chat_template=TOOLS_TEMPLATE)
    try:
        async with make_client(runtime) as client:
            fields = {"input": history, "tools": [CLOCK]}
            flat_fields = {
                "input": [*flat_history, {"type": history[2]["type"], "call_id": "c", "output": "noon"}],
                "tools": flat,
            }
            first = await ask(client, **fields)
            assert first["usage"]["input_tokens"] == await prompt_of(client, **flat_fields)
            listed = (await client.get(f"{PATH}/{first['id']}/input_items", params={"order": "asc"})).json()["data"]
            assert (listed[1]["name"], listed[1]["namespace"]) == ("now", "clock")
            followed = await ask(client, previous_response_id=first["id"], tools=[CLOCK])
            assert text_of(followed) == "Noon."
    finally:
        runtime.close()


async def test_tools_that_run_elsewhere_are_left_out(caplog):
    """The answer is the one without them; its header and one line of the log name their types."""
    others = [
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation", "output_format": "png"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "tool_search", "execution": "client", "parameters": {}},
    ]
    runtime = says("Sun.", chat_template=TOOLS_TEMPLATE)
    try:
        async with make_client(runtime) as client:
            alone = await client.post(PATH, json=ASK | {"tools": FUNCTIONS})
            assert "x-tools-left-out" not in alone.headers
            for more in ({}, {"stream": True}, {"background": True}):
                response = await client.post(PATH, json=ASK | {"tools": [*others, *FUNCTIONS]} | more)
                assert response.status_code == 200, response.text
                assert response.headers["x-tools-left-out"] == "custom, image_generation, tool_search, web_search"
            answer = await ask(client, tools=[*others, *FUNCTIONS])
            assert answer["usage"]["input_tokens"] == alone.json()["usage"]["input_tokens"]
            assert answer["tools"] == alone.json()["tools"]
    finally:
        runtime.close()
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == len(others)
    assert len(set(told)) == len(others)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather"]),
        ({"type": "function", "name": "now"}, ["now"]),
        ("now", ["now"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, ["now"]),
        ("none", []),
    ],
)
async def test_tool_choice(choice, names):
    answer, _ = await said(CALL if names == ["get_weather"] else CALL_NOW, tools=FUNCTIONS, tool_choice=choice)
    assert [item["name"] for item in answer["output"] if item["type"] == "function_call"] == names
    assert answer["tool_choice"] == ({"type": "function", "name": "now"} if choice == "now" else choice)


async def test_one_call_at_most():
    answer, _ = await said(f"{CALL}\n{CALL_NOW}", tools=FUNCTIONS, parallel_tool_calls=False)
    assert [item["name"] for item in answer["output"]] == ["get_weather"]
    assert answer["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("fields", "details"), [({"max_output_tokens": 60}, {"reason": "max_output_tokens"}), ({"stop": ["Rome"]}, None)]
)
async def test_a_call_that_was_cut_is_incomplete(fields, details):
    answer, _ = await said(CALL, tools=FUNCTIONS, **fields)
    [call] = answer["output"]
    assert (call["name"], call["status"], answer["status"]) == ("get_weather", "incomplete", "incomplete")
    assert answer["incomplete_details"] == details
    assert json.loads(json.dumps(ROME)) != call["arguments"]


async def test_calls_and_their_outputs_come_back():
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": json.dumps(ROME)},
        {"type": "function_call", "call_id": "c3", "name": "now", "arguments": '{"cu', "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "function_call_output", "call_id": "c3", "output": "aborted"},
    ]
    runtime = make_runtime(chat_template=TOOLS_TEMPLATE)
    tool_call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    calls = tool_call % ("now", "{}") + tool_call % ("get_weather", json.dumps(ROME))
    prompt = (
        f"<|turn|>user: Weather?<|end|>\n<|turn|>assistant: {calls}<|end|>\n"
        "<|turn|>tool: noon<|end|>\n<|turn|>tool: sunny<|end|>\n<|turn|>assistant: "
    )
    try:
        async with make_client(runtime) as client:
            assert text_of(await ask(client, input=items)) == oracle(prompt, max_tokens=12)
            passed = {"internal_chat_message_metadata_passthrough": {"turn_id": "x"}}
            items = [item | passed for item in items]
            assert text_of(await ask(client, input=items)) == oracle(prompt, max_tokens=12)
    finally:
        runtime.close()


async def test_reasoning():
    answer, events = await said("<think>Rain or\nsun?</think>\n\nSun.", chat_template=THINKING_TEMPLATE)
    reasoning, message = answer["output"]
    assert reasoning == {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Rain or\nsun?"}],
        "status": "completed",
    }
    assert message["content"][0]["text"] == "Sun."
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>Rain or\nsun?</think>")}
    of_reasoning = [event["type"] for event in events if event.get("output_index") == 0]
    num = len(of_reasoning)
    assert of_reasoning == [
        "response.output_item.added",
        "response.content_part.added",
        *["response.reasoning_text.delta"] * (num - 5),
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


async def test_reasoning_that_was_cut():
    answer, _ = await said("<think>Rain or sun?</think>Sun.", chat_template=THINKING_TEMPLATE, max_output_tokens=12)
    [reasoning] = answer["output"]
    assert (reasoning["status"], answer["status"]) == ("incomplete", "incomplete")
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 12}


async def test_an_effort_is_told_to_the_template():
    answer, _ = await said("Sun.", chat_template=THINKING_TEMPLATE, reasoning={"effort": "none", "summary": "auto"})
    assert answer["reasoning"] == {"effort": "none", "summary": None}
    assert [item["type"] for item in answer["output"]] == ["message"]


async def test_formats(client):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    answer = await ask(client, text={"format": shape}, max_output_tokens=100)
    assert json.loads(text_of(answer)) == {"colour": "red"}
    assert answer["text"]["format"] == shape
    answer = await ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=300, seed=1, temperature=1)
    assert text_of(answer).startswith("{")


async def test_logprobs(client):
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    [part] = (await ask(client, **body))["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == list(part["text"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    events = await stream(client, **body)
    told = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert told == part["logprobs"]
    assert events[-1]["response"]["output"][0]["content"] == [part]


@pytest.mark.parametrize("said_text", ["<think>Hm.</think>Sun.", "Sun." + CALL_NOW])
@pytest.mark.parametrize("is_merged", [False, True])
async def test_a_message_has_the_logprobs_of_its_text_alone(said_text, is_merged, monkeypatch):
    """A merged chunk has all that came while its reader was busy, or while a route held the answer back."""
    whole = ResponsesWriter.whole

    def merged(self, records):
        records[0].chunks = merge_chunks(records[0].chunks)
        return whole(self, records)

    if is_merged:
        monkeypatch.setattr(ResponsesWriter, "whole", merged)
    template = THINKING_TEMPLATE if "<think>" in said_text else TOOLS_TEMPLATE
    body = {"include": ["message.output_text.logprobs"], "tools": FUNCTIONS, "chat_template": template}
    answer, _ = await said(said_text, **body)
    [part] = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Sun."


@pytest.mark.parametrize(
    ("text", "tokens", "span"),
    [
        ("hi", ["</think>", "hi", "<"], (1, 2)),
        ("hi", ["</think>", "\n", " hi"], (2, 3)),  # the reader drops white space
        (">", ["</think>", "\n\n", ">"], (2, 3)),
        ("a", ["assistant", "final", "a"], (2, 3)),
        ("Sun.", ["Su", "n.\n<"], (0, 2)),
        ("Sun.", ["\n", "Su", "n", ".", "Sun."], (1, 4)),
        ("Paris", ["</think>", " Paris", "<tool_call>", "Paris"], (1, 2)),  # the call's comes later
        ("Moon.", ["Su", "n"], (0, 2)),
    ],
)
def test_a_text_is_not_found_within_a_mark(text, tokens, span):
    assert find_tokens(text, [{"bytes": token.encode()} for token in tokens]) == span


async def test_a_request_id_of_the_client_is_no_id_of_a_response(client):
    """A client may use one twice, and a response that is kept needs its own."""
    one = await client.post(PATH, json=ASK, headers={"X-Request-Id": "mine"})
    two = await client.post(PATH, json=ASK | {"request_id": "mine"})
    assert one.headers["x-request-id"] == two.headers["x-request-id"] == "mine"
    assert one.json()["id"] != two.json()["id"]


WRONG = [
    ({"input": None}, "input", "Missing required parameter: 'input'."),
    ({"input": []}, "input", "not empty"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "There are no messages."),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "only text",
    ),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0].type", "'input_text'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "Missing required parameter"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be 'user'"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type", "'computer_call' is not supported"),
    ({"input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]}, "input[1].type", "does not compact"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id", "no 'function_call'"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}]}, "input[0].name", "1 to 128"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": "["}]}, "input[0].arguments", "JSON text"),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
        "not supported",
    ),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type", "'file_search', which this server"),
    ({"tools": {}}, "tools", "must be a list"),
    ({"tools": [3]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": ["function"]}]}, "tools[0].type", "must be 'function'"),
    ({"tools": [{"name": "now"}]}, "tools[0].type", "Missing required parameter"),
    ({"tools": [{"type": "namespace", "name": "clock", "tools": [NOW_TOOL] * 129}]}, "tools[0].tools", "at most 128"),
    (
        {"tools": [{"type": "namespace", "name": name, "tools": [NOW_TOOL] * 100} for name in "ab"]},
        "tools",
        "have 200 functions",
    ),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "'tools[0].name' must be 1 to 128"),
    (
        {"tools": [{"type": "web_search"}, {**CLOCK, "tools": [NOW_TOOL, {"type": "function", "name": "a b"}]}]},
        "tools[1].tools[1].name",
        "'tools[1].tools[1].name' must be 1 to 128",
    ),
    ({"tools": [{**CLOCK, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name", "Missing required parameter"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "not supported"),
    ({"tools": [FUNCTIONS[1], FUNCTIONS[1]]}, "tools[1].name", "the name of another tool"),
    (
        {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
        "not the name of a tool",
    ),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "file_search"}}, "tool_choice.type", "'file_search' is not supported"),
    ({"tools": FUNCTIONS, "tool_choice": {"name": "now"}}, "tool_choice.type", "is missing; it must be 'function'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "now", "x": 1}}, "tool_choice.x", "Unknown parameter"),
    (
        {
            "tools": FUNCTIONS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "name": "now"}]},
        },
        "tool_choice.tools[0].type",
        "must be 'function'",
    ),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "Missing"),
    ({"text": {"format": {"type": "json_object", "name": "x"}}}, "text.format.name", "needs 'type': 'json_schema'"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
        "text.format.schema",
        "'text.format.schema'",
    ),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "'reasoning.effort' must be one of"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not supported"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"input": "x" * 5000, "max_output_tokens": None}, "input", "context"),
    ({"top_logprobs": 2}, "top_logprobs", "'include'"),
    ({"max_tokens": 3}, "max_tokens", "Unknown parameter: 'max_tokens'."),
    ({"background": True, "store": False}, "background", "kept"),
    ({"chat_template_kwargs": {"x": json.loads("[" * 300 + "]" * 300)}}, "chat_template_kwargs", "nested too deeply"),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), WRONG, ids=[f"{param} {index}" for index, (_, param, _) in enumerate(WRONG)]
)
async def test_what_is_wrong_is_named_in_words_of_this_api(client, body, param, message):
    error = (await ask(client, expects=400, **body))["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_a_stream_fails_with_a_code_of_its_own_if_the_memory_is_too_small():
    """Codex CLI looks for the code, and drops the oldest items then."""
    tiny = Capacity(num_blocks=5, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=2048)
    runtime = make_runtime(HashExecutor(tiny))
    async with make_client(runtime) as client:
        failed = (await stream(client, input="x" * 60, max_output_tokens=60))[-1]
    runtime.close()
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")


async def test_a_cancelled_stream_ends_without_an_error():
    """Codex CLI sends a request again after `response.failed`."""
    gate = GatedExecutor()
    with running(gate) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            headers = {"X-Request-Id": "mine"}
            async with client.stream("POST", PATH, json=ASK | {"stream": True}, headers=headers) as response:
                early = await client.get(f"{PATH}/resp_mine")
                assert (early.status_code, "it has not ended" in early.text) == (404, True)
                assert (await client.delete("/v1/requests/mine")).status_code == 200
                gate.open()
                last = events_of((await response.aread()).decode())[-1]
            ended = last["response"]
            assert (last["type"], ended["status"], ended["error"]) == ("response.incomplete", "cancelled", None)
            assert ended["incomplete_details"] == {"reason": "cancelled"}
            assert (await client.get(f"{PATH}/{ended['id']}")).json() == ended


async def test_compaction_is_refused_with_a_remedy(client):
    response = await client.post(f"{PATH}/compact", json={"model": "toy", "input": "hi"})
    assert response.status_code == 501
    assert "another name than 'OpenAI'" in response.json()["error"]["message"]


async def test_a_websocket_is_answered_by_426(client):
    """Codex goes on over HTTP at once; after a 405 it tries six times more."""
    plain = await client.get(PATH)
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")
    response = await client.get(PATH, headers={"Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"})
    assert (response.status_code, response.headers["upgrade"]) == (426, "HTTP/1.1")
    assert response.json()["error"]["code"] == "websocket_not_supported"


async def test_the_route_is_described(client):
    document = (await client.get("/openapi.json")).json()
    assert document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "ResponsesBody"
    )
    assert set(document["paths"][PATH + "/{response_id}"]) == {"get", "delete"}


async def test_tools_are_refused_that_could_not_be_told_back(client):
    statuses = []
    for depth in range(240, 260):
        schema = {"type": "object", "examples": json.loads("[" * depth + "]" * depth)}
        tool = {"type": "function", "name": "f", "parameters": schema}
        statuses.append((await client.post(PATH, json=ASK | {"tools": [tool], "tool_choice": "none"})).status_code)
    assert sorted(set(statuses)) == [200, 400]
