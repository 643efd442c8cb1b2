"""Cohere's `POST /v2/chat` over the hash executor."""

import json

import pytest

from support.server.harness import CHAT_TEMPLATE, make_client
from support.server.tools import CALL, THINKING_TEMPLATE, TOOLS_TEMPLATE, WEATHER, says

PATH = "/v2/chat"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "temperature": 0}
ROME = {"place": "Rome", "days": 3}


def events(response):
    lines = [event.split("\n") for event in response.text.strip().split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in told]
    return told


async def answer(text, *, chat_template=TOOLS_TEMPLATE, **body):
    """The response of a model that says a text."""
    runtime = says(text, chat_template=chat_template)
    try:
        async with make_client(runtime) as client:
            response = await client.post(PATH, json=ASK | body)
            assert response.status_code == 200, response.text
            return response
    finally:
        runtime.close()


async def test_a_text_with_its_usage():
    told = (await answer("Hello.")).json()
    assert told["message"] == {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}
    assert told["finish_reason"] == "COMPLETE"
    assert told["usage"]["tokens"] == told["usage"]["billed_units"]
    assert told["usage"]["tokens"]["output_tokens"] > 0


async def test_a_stream_has_a_block_for_each_kind_of_content():
    told = events(await answer("<think>Hm.</think>Hello.", chat_template=THINKING_TEMPLATE, stream=True))
    kinds = [event["type"] for event in told if event["type"] != "content-delta"]
    assert kinds == ["message-start", "content-start", "content-end", "content-start", "content-end", "message-end"]
    pieces = [event["delta"]["message"]["content"] for event in told if event["type"] == "content-delta"]
    assert "".join(piece.get("thinking", "") for piece in pieces) == "Hm."
    assert "".join(piece.get("text", "") for piece in pieces) == "Hello."
    assert [event["index"] for event in told if event["type"] == "content-start"] == [0, 1]
    assert told[-1]["delta"]["finish_reason"] == "COMPLETE"
    assert told[-1]["delta"]["usage"]["tokens"]["output_tokens"] > 0


async def test_thinking_can_be_turned_on_and_off():
    """The template does not turn it on by default."""
    template = "{% if enable_thinking %}THINK{% endif %}" + CHAT_TEMPLATE
    asked = ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled"}})
    answers = [(await answer("Hi.", chat_template=template, **fields)).json() for fields in asked]
    absent, off, on = [told["usage"]["tokens"]["input_tokens"] for told in answers]
    assert (off - absent, on - absent) == (0, len("THINK"))


async def test_calls_of_tools():
    told = (await answer(CALL, tools=[WEATHER])).json()
    [call] = told["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ROME)
    assert (told["finish_reason"], told["message"]["content"]) == ("TOOL_CALL", [])


async def test_the_text_before_calls_is_the_plan_and_can_be_sent_back():
    """Cohere's examples keep `tool_calls` and `tool_plan` of an answer, or the whole message."""
    said = (await answer(f"<think>Hm.</think>I look.\n{CALL}", chat_template=THINKING_TEMPLATE, tools=[WEATHER])).json()
    message = said["message"]
    assert (message["tool_plan"], message["content"]) == ("I look.", [{"type": "thinking", "thinking": "Hm."}])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "clear"}
    await answer("Clear.", chat_template=THINKING_TEMPLATE, messages=[*ASK["messages"], message, result])


async def test_a_streamed_call():
    told = events(await answer(CALL, tools=[WEATHER], stream=True))
    kinds = [event["type"] for event in told if event["type"] != "tool-call-delta"]
    assert kinds == ["message-start", "tool-call-start", "tool-call-end", "message-end"]
    pieces = [event["delta"]["message"]["tool_calls"] for event in told if event["type"] == "tool-call-delta"]
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == ROME


async def test_a_call_that_is_cut_before_its_arguments_is_text():
    told = events(await answer(CALL, tools=[WEATHER], stop_sequences=["get_"], stream=True))
    kinds = [event["type"] for event in told if event["type"] != "content-delta"]
    assert kinds == ["message-start", "content-start", "content-end", "message-end"]


@pytest.mark.parametrize("data", ['{"sky":"clear"}', {"sky": "clear"}])
async def test_a_history_with_a_call_and_its_result_is_the_chat_of_openai(client, data):
    """The data of a document is a text in Cohere's examples, and an object from its typed client and LangChain's."""
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ROME)}}
    document = {"type": "document", "document": {"data": data}}
    cohere = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "tool_plan": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": [document]},
    ]
    openai = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"sky":"clear"}'},
    ]
    settings = {"max_tokens": 10, "temperature": 0.8, "seed": 5}
    told = (await client.post(PATH, json={"messages": cohere, "k": 40, "p": 0.9, **settings})).json()
    same = {"messages": openai, "top_k": 40, "top_p": 0.9, **settings}
    expected = (await client.post("/v1/chat/completions", json=same)).json()
    assert told["message"]["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert told["usage"]["tokens"]["input_tokens"] == expected["usage"]["prompt_tokens"]


async def test_a_schema_is_followed():
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    told = (await answer('{"age": 7}', response_format={"type": "json_object", "json_schema": schema})).json()
    assert json.loads(told["message"]["content"][0]["text"]) == {"age": 7}


@pytest.mark.parametrize(
    ("fields", "reason"), [({"max_tokens": 2}, "MAX_TOKENS"), ({"stop_sequences": ["lo"]}, "STOP_SEQUENCE")]
)
async def test_other_ends(fields, reason):
    assert (await answer("Hello.", **fields)).json()["finish_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 501}, "'k' must be at most 500"),
        ({"documents": ["a"]}, "'documents' is not supported yet"),
        ({"messages": [{"role": "chatbot"}]}, "'messages[0].role' must be"),
        ({"stop_sequences": ["a"] * 17}, "'stop_sequences'"),
        ({"response_format": {"type": "json_object", "json_schema": {"type": "nothing"}}}, "'response_format.json_schema'"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_plan": "b"}]}, "has both 'tool_plan' and 'content'"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "c", "content": "a"}]},
            "'messages[0].tool_call_id' is 'c', which no 'tool_calls' before it have as an id",
        ),
        ({"messages": [{"role": "user", "content": 0}]}, "'messages[0].content' must be"),
        ({"messages": [{"role": "user", "content": {}}]}, "'messages[0].content' must be"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}]},
            "'messages[0].content[0].thinking' must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type": "b"}]}]},
            "'messages[0].content[1].type' must be 'text'",
        ),
        ({"thinking": {"type": "disabled", "token_budget": 5}}, "'thinking.token_budget' needs 'thinking.type' 'enabled'"),
    ],
)
async def test_errors_name_the_field_in_cohere_s_shape(client, fields, message):
    response = await client.post(PATH, json=ASK | fields)
    assert response.status_code == 400
    assert list(response.json()) == ["message"]
    assert message in response.json()["message"]


@pytest.mark.parametrize("path", ["/v2/classify", "/v2/models"])
async def test_an_unknown_route_is_an_error_in_cohere_s_shape(client, path):
    response = await client.post(path, json={})
    assert (response.status_code, list(response.json())) == (404, ["message"])
