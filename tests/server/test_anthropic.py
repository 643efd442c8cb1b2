"""Anthropic's Messages API: what is asked, how answers and their events look, and how errors are told."""

import asyncio
import contextlib
import json
from dataclasses import replace

import httpx
import pytest

from support.server.chat import HI_PROMPT
from support.server.completions import oracle
from support.server.harness import CAPACITY, CHAT_TEMPLATE, GatedExecutor, make_client, make_tokenizer, running, until
from support.server.tools import CALL, CALL_NOW, THINKING_TEMPLATE, TOOLS_TEMPLATE, says

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
ASK = {"model": "toy", "max_tokens": 400, "temperature": 0, "messages": HI}
VERSION = {"anthropic-version": "2023-06-01"}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
    },
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
TOOLS = {"tools": [WEATHER, NOW]}
ROME = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"place": "Rome", "days": 3}}


def check(response, status, kind):
    """The response is an error in Anthropic's shape, and says this. Returns its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body == {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
    assert response.headers["x-request-id"]
    return body["error"]["message"]


def events(text):
    """The events of a stream, each checked to have its own name; without pings."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return [event for event in found if event["type"] != "ping"]


def gathered(found):
    """The message that a client puts together from events."""
    assert found[0]["type"] == "message_start"
    assert found[-1] == {"type": "message_stop"}
    message, is_open = found[0]["message"], False
    for event in found[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                is_open, block, pieces = True, event["content_block"], []
                message["content"].append(block)
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                kind, delta = event["delta"].pop("type"), event["delta"]
                if kind == "input_json_delta":
                    pieces.append(delta["partial_json"])
                else:
                    [(name, text)] = delta.items()
                    assert kind == f"{name}_delta"
                    block[name] += text
            case "content_block_stop":
                is_open = False
                if pieces:
                    with contextlib.suppress(ValueError):  # a call that was cut
                        block["input"] = json.loads("".join(pieces))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert not is_open
    return message


async def ask(text, *, chat_template=TOOLS_TEMPLATE, expects=200, config=None, **body):
    """The message of a model that says a text, which is the same when it is streamed."""
    told = []
    for stream in (False, True):
        runtime = says(text, chat_template=chat_template)
        try:
            async with make_client(runtime, **(config or {})) as client:
                response = await client.post(MESSAGES, json=ASK | body | {"stream": stream})
                if expects != 200:
                    return check(response, expects, "invalid_request_error")
                assert response.status_code == 200, response.text
                told.append(gathered(events(response.text)) if stream else response.json())
        finally:
            runtime.close()
    assert told[0] == told[1]
    return told[0]


async def test_a_message(client):
    answer = await client.post(MESSAGES, json=ASK | {"max_tokens": 10}, headers={"X-Request-Id": "abc"} | VERSION)
    num_prompt = len(make_tokenizer().encode(HI_PROMPT, add_special_tokens=False))
    assert answer.json() == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": oracle(HI_PROMPT, max_tokens=10)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 10,
        },
    }
    assert answer.headers["request-id"] == "abc"
    assert "server-timing" in answer.headers


async def test_cached_tokens_are_counted_apart(client):
    usages = [(await client.post(MESSAGES, json=ASK | {"max_tokens": 40})).json()["usage"] for _ in range(2)]
    assert usages[0]["cache_read_input_tokens"] == 0
    assert usages[1]["cache_read_input_tokens"] > 0
    totals = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
    assert totals[0] == totals[1]


async def test_a_stream_has_the_same_message(client):
    whole = (await client.post(MESSAGES, json=ASK | {"max_tokens": 30})).json()
    response = await client.post(MESSAGES, json=ASK | {"max_tokens": 30, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "event: ping\n" in response.text
    found = events(response.text)
    assert [event["type"] for event in found[:2]] == ["message_start", "content_block_start"]
    assert found[0]["message"]["stop_reason"] is None
    streamed = gathered(found)
    assert streamed["content"] == whole["content"]
    assert streamed["stop_reason"] == "max_tokens"
    assert streamed["usage"]["output_tokens"] == 30


async def test_the_ends_of_an_answer():
    answer = await ask("Yes, and no.")
    assert (answer["stop_reason"], answer["content"]) == ("end_turn", [{"type": "text", "text": "Yes, and no."}])
    answer = await ask("Yes, and no.", stop_sequences=["maybe", " and"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " and")
    assert answer["content"] == [{"type": "text", "text": "Yes,"}]
    answer = await ask("Yes,<|turn|> and no.", stop_sequences=["<|turn|>"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<|turn|>")
    assert answer["content"] == [{"type": "text", "text": "Yes,"}]
    answer = await ask("")
    assert (answer["stop_reason"], answer["content"]) == ("end_turn", [])


async def test_more_tokens_than_the_context_has_end_with_it(client):
    answer = (await client.post(MESSAGES, json=ASK | {"max_tokens": 64_000})).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 2048
    response = await client.post(MESSAGES, json=ASK | {"messages": [{"role": "user", "content": "a" * 3000}]})
    told = check(response, 400, "invalid_request_error")
    assert told.startswith("Prompt is too long: ")
    assert "2048" in told


async def test_an_assistants_last_message_is_continued(client):
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    answer = (await client.post(MESSAGES, json=ASK | {"messages": begun, "max_tokens": 8})).json()
    assert answer["content"][0]["text"] == oracle(HI_PROMPT + "Well", max_tokens=8)


async def prompt_of(chat_template=TOOLS_TEMPLATE, **body):
    """The text of the prompt that a body becomes, by the model's tokens: what its first request has."""
    runtime = says("x", chat_template=chat_template)
    seen = []
    bridge_open = runtime.bridge.open
    runtime.bridge.open = lambda requests: (seen.extend(requests), bridge_open(requests))[1]
    try:
        async with make_client(runtime) as client:
            response = await client.post(MESSAGES, json=ASK | body)
            assert response.status_code == 200, response.text
            count = await client.post(COUNT, json={"model": "toy", "messages": HI} | body)
            assert count.json() == {"input_tokens": len(seen[0].prompt_token_ids)}
        return runtime.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    finally:
        runtime.close()


async def test_a_prompt_is_what_the_blocks_say():
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    prompt = await prompt_of(
        CHAT_TEMPLATE,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one", **cached}, {"type": "text", "text": "two"}]},
            {"role": "user", "content": "three"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a", "citations": None}, {"type": "text", "text": "b", "new": None}],
            },
            {"role": "user", "content": "four"},
        ],
    )
    assert prompt == (
        "<|turn|>system: Be brief.\nBe kind.<|end|>\n<|turn|>user: one\ntwo\nthree<|end|>\n"
        "<|turn|>assistant: ab<|end|>\n<|turn|>user: four<|end|>\n<|turn|>assistant: "
    )


def billing_line(value):
    return f"x-anthropic-billing-header: cc_version=2.1.{value}; cc_entrypoint=cli; cch={value};"


async def test_a_prompt_has_no_billing_line():
    """Claude Code sends it as the first block of its system prompt, with other values in each request."""
    brief = {"type": "text", "text": "Be brief."}
    plain = await prompt_of(CHAT_TEMPLATE, system=[brief])
    for value in ("10a", "9f9"):
        assert plain == await prompt_of(CHAT_TEMPLATE, system=[{"type": "text", "text": billing_line(value)}, brief])
    assert await prompt_of(CHAT_TEMPLATE, system=billing_line("10a")) == HI_PROMPT
    for mentions in (
        {"system": f"Never write {billing_line(7)}"},
        {"messages": [{"role": "user", "content": billing_line(7)}]},
    ):
        assert billing_line(7) in await prompt_of(CHAT_TEMPLATE, **mentions)


@pytest.mark.parametrize(
    ("path", "asked", "brief", "count"),
    [
        (
            "/v1/chat/completions",
            lambda system: {"messages": [{"role": "system", "content": system}, *HI]},
            {"max_tokens": 2},
            "prompt_tokens",
        ),
        ("/v1/responses", lambda system: {"instructions": system, "input": "hi"}, {"max_output_tokens": 2}, "input_tokens"),
    ],
)
async def test_other_apis_leave_out_the_billing_line_too(client, path, asked, brief, count):
    """Proxies translate Claude Code's requests."""
    told = ["Be brief.", f"{billing_line(1)}\nBe brief.", f"{billing_line(2)}Be brief."]
    usages = [(await client.post(path, json=asked(system) | brief)).json()["usage"] for system in told]
    assert len({usage[count] for usage in usages}) == 1
    cached = [usage[f"{count}_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert cached[1] == cached[2] > 0


async def test_a_late_system_message_is_part_of_the_users_turn():
    """The template refuses it in its own role."""
    late = {"role": "system", "content": "Agents: none."}
    for turns in ([*HI, late], [HI[0], late, *HI]):
        text = "\n".join(turn["content"] for turn in turns)
        prompt = await prompt_of(CHAT_TEMPLATE, system="Be brief.", messages=turns)
        assert prompt == f"<|turn|>system: Be brief.<|end|>\n<|turn|>user: {text}<|end|>\n<|turn|>assistant: "
    prompt = await prompt_of(CHAT_TEMPLATE, messages=[late, *HI])
    assert prompt.startswith("<|turn|>system: Agents: none.<|end|>\n<|turn|>user: hi")


async def test_tools_calls_and_results_are_in_the_prompt():
    turns = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, ROME | {"caller": {"type": "direct"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    prompt = await prompt_of(messages=turns, tools=[WEATHER])
    assert prompt.startswith('<tools>{"type": "function", "function": {"name": "get_weather", ')
    assert '"parameters": {"type": "object", "properties": {"place"' in prompt
    assert prompt.endswith(
        '<|turn|>assistant: I look.<tool_call>{"name": "get_weather", "arguments": {"place": "Rome", "days": 3}}</tool_call>'
        "<|end|>\n<|turn|>tool: sunny<|end|>\n<|turn|>user: And?<|end|>\n<|turn|>assistant: "
    )
    turns[-1]["content"] = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "no network", "is_error": True}]
    assert "<|turn|>tool: Error: no network<|end|>" in await prompt_of(messages=turns, tools=[WEATHER])
    assert "<tools>" not in await prompt_of(messages=turns, tools=[WEATHER], tool_choice={"type": "none"})


async def test_a_deferred_tool_is_shown_once_a_result_refers_to_it():
    search, now = WEATHER | {"name": "search"}, NOW | {"defer_loading": True}
    turns = [*HI, {"role": "assistant", "content": [ROME | {"name": "search"}]}]
    turns += [{"role": "user", "content": [RESULT | {"content": [{"type": "tool_reference", "tool_name": "now"}]}]}]
    before = await prompt_of(messages=HI, tools=[search, now])
    assert '"name": "search"' in before
    assert '"name": "now"' not in before
    after = await prompt_of(messages=turns, tools=[search, now])
    assert '"name": "now"' in after
    assert "<|turn|>tool: The tool now can be called now.<|end|>" in after


async def test_calls_are_blocks_after_the_text():
    answer = await ask(f"Let me see.\n{CALL}\n{CALL_NOW}", **TOOLS)
    assert answer["stop_reason"] == "tool_use"
    text, rome, now = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert rome == ROME | {"id": rome["id"]}
    assert now == {"type": "tool_use", "id": now["id"], "name": "now", "input": {}}
    assert rome["id"].startswith("toolu_")
    assert rome["id"] != now["id"]


@pytest.mark.parametrize("value", ["[" * 300 + "]" * 300, "1e999", "123456789012345678901234567890"])
async def test_input_is_told_as_the_model_wrote_it(value):
    runtime = says(CALL_NOW.replace("{}", '{"a": ' + value + "}"))
    try:
        async with make_client(runtime) as client:
            response = await client.post(MESSAGES, json=ASK | {"tools": [NOW], "max_tokens": 1000})
            assert response.status_code == 200, response.text
            assert f'"name":"now","input":{{"a": {value}}}' in response.text
    finally:
        runtime.close()


async def test_choices_of_tools():
    kinds = lambda answer: [block.get("name", block["type"]) for block in answer["content"]]  # noqa: E731
    assert kinds(await ask("no", **TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})) in (
        ["get_weather"],
        ["now"],
    )
    assert kinds(await ask(CALL_NOW, **TOOLS, tool_choice={"type": "tool", "name": "get_weather"})) == ["get_weather"]
    assert kinds(await ask(CALL_NOW, **TOOLS, tool_choice={"type": "none"})) == ["text"]
    twice = f"{CALL}\n{CALL}"
    assert kinds(await ask(twice, **TOOLS, tool_choice={"type": "auto"})) == ["get_weather", "get_weather"]
    once = await ask(twice, **TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert kinds(once) == ["get_weather"]


@pytest.mark.parametrize("num_cut", range(1, len(CALL), 9))
async def test_a_call_that_is_cut_stays_in_its_place_without_input(num_cut):
    before = f"Let me see.\n{CALL}\n"
    answer = await ask(before + CALL, **TOOLS, max_tokens=len(before) + num_cut, tool_choice={"type": "auto"})
    text, rome, *cut = answer["content"]
    assert answer["stop_reason"] == "max_tokens"
    assert (text["text"], rome["input"]) == ("Let me see.", ROME["input"])
    if num_cut <= CALL.index(": {"):
        assert [block["type"] for block in cut] in ([], ["text"])
    elif num_cut <= CALL.index("}"):
        assert cut == [{"type": "tool_use", "id": cut[0]["id"], "name": "get_weather", "input": {}}]
    else:
        assert [block["input"] for block in cut] == [ROME["input"]]


HARMONY = "{# <|channel|> <|message|> functions. #}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|start|>assistant"


@pytest.mark.parametrize("arguments", ["[1]", "print(1)"])
async def test_a_call_with_wrong_arguments_is_text_and_not_a_call_without_arguments(arguments):
    said = f"<|channel|>commentary json to=functions.now<|message|>{arguments}"  # a header that no grammar expects
    runtime = says(said, chat_template=HARMONY)
    try:
        async with make_client(runtime) as client:
            answer = (await client.post(MESSAGES, json=ASK | {"tools": [NOW]})).json()
    finally:
        runtime.close()
    assert answer["content"] == [{"type": "text", "text": said}]
    assert answer["stop_reason"] == "end_turn"


async def test_a_call_that_a_stop_string_cuts_has_no_input():
    answer = await ask(CALL, **TOOLS, stop_sequences=["Rome"])
    [cut] = answer["content"]
    assert (cut["type"], cut["input"], answer["stop_reason"]) == ("tool_use", {}, "stop_sequence")


THOUGHT = "<think>\nA pause.\n</think>\n\nDone."


async def test_thinking_is_a_block_of_its_own():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = await ask(THOUGHT, chat_template=THINKING_TEMPLATE, thinking=thinking)
    thought, text = answer["content"]
    assert thought == {"type": "thinking", "thinking": "A pause.", "signature": thought["signature"]}
    assert thought["signature"]
    assert text == {"type": "text", "text": "Done."}
    assert (await ask(THOUGHT, chat_template=THINKING_TEMPLATE, thinking={"type": "adaptive"}))["content"] == [thought, text]
    told = await ask(THOUGHT, chat_template=THINKING_TEMPLATE, thinking={"type": "adaptive", "display": "updates"})
    assert told["content"] == [thought, text]
    hidden = await ask(THOUGHT, chat_template=THINKING_TEMPLATE, thinking=thinking | {"display": "omitted"})
    assert hidden["content"] == [text]
    again = [*HI, {"role": "assistant", "content": [thought, text]}, *HI]
    assert (await ask("Yes.", chat_template=THINKING_TEMPLATE, messages=again))["content"][0]["text"] == "Yes."


async def test_a_budget_ends_the_thinking():
    answer = await ask(
        f"<think>{'a' * 99}</think>b", chat_template=THINKING_TEMPLATE, thinking={"type": "enabled", "budget_tokens": 9}
    )
    thought = answer["content"][0]
    assert thought["type"] == "thinking"
    assert thought["thinking"] == "a" * 9


async def test_without_thinking_nothing_is_thought():
    switched = "<|turn|>assistant: <think>\n\n</think>\n\n"
    assert (await prompt_of(THINKING_TEMPLATE)).endswith(switched)
    assert (await prompt_of(THINKING_TEMPLATE, thinking={"type": "disabled"})).endswith(switched)
    assert (await prompt_of(THINKING_TEMPLATE, thinking={"type": "adaptive"})).endswith("<|turn|>assistant: ")
    always = CHAT_TEMPLATE.replace("{{ suffix }}", "<think>\n{# </think> #}")
    forced = "\n</think>"
    answer = await ask("a" * len(forced) + "Hm.", chat_template=always)
    assert answer["content"] == [{"type": "text", "text": "Hm."}]


async def test_an_answer_follows_a_schema():
    config = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    assert json.loads((await ask("maybe", output_config=config))["content"][0]["text"]) in ("yes", "no")
    bad = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    assert "'output_config.format.schema'" in await ask("", output_config=bad, expects=400)
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    bad = {"format": {"type": "json_schema", "schema": deep}}
    assert "'output_config.format.schema'" in await ask("", output_config=bad, expects=400)
    assert (await ask(CALL_NOW, **TOOLS, output_config=config))["content"][0]["name"] == "now"
    assert json.loads((await ask("maybe", **TOOLS, output_config=config))["content"][0]["text"]) in ("yes", "no")


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks):
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}]}


CLEAR = "clear_thinking_20251015"
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
REFUSED = [
    ({"model": None}, "'model'"),
    ({"max_tokens": 0}, "'max_tokens'"),
    ({"max_tokens": None}, "'max_tokens'"),
    ({"messages": []}, "'messages'"),
    ({"n": 2}, "'n'"),
    ({"temperature": "1"}, "'temperature'"),
    ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
    ({"stop_sequences": ["a"] * 17}, "'stop_sequences'"),
    ({"metadata": {"user": "a"}}, "'metadata.user'"),
    ({"container": "c"}, "'container'"),
    ({"mcp_servers": [{}]}, "'mcp_servers'"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'context_management.edits[0].type' must be"),
    ({"context_management": {"edits": [{"type": CLEAR}]}}, "parameter: 'context_management.edits[0].keep'"),
    (
        {"context_management": {"edits": [{"type": CLEAR, "keep": {"type": "thinking_turns", "value": 1}}]}},
        "'context_management.edits[0].keep' must be 'all'",
    ),
    ({"system": [{"type": "image"}]}, "'system[0].type'"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "'messages[0].role'"),
    ({"messages": [{"role": "user", "content": 3}]}, "'messages[0].content'"),
    (user(), "'messages[0].content'"),
    (user({"type": "text"}), "'messages[0].content[0].text'"),
    (user({"type": "text", "text": "a", "colour": 1}), "'messages[0].content[0].colour'"),
    (
        user({"type": "image", "source": {}}),
        "'messages[0].content[0].type' 'image' is not supported: the models here read text",
    ),
    (user({"type": "document", "source": {}}), "send the document's text"),
    (user(ROME), "'messages[0].content[0].type' 'tool_use'"),
    (user(RESULT), "'messages[0].content[0].tool_use_id' is 'toolu_1'"),
    (assistant(ROME), "'messages[1]' calls tools and is the last message"),
    (assistant(ROME | {"input": "{}"}), "'messages[1].content[0].input'"),
    (assistant(ROME | {"id": ""}), "'messages[1].content[0].id'"),
    (assistant({"type": "redacted_thinking", "data": "x"}), "leave it out"),
    (assistant({"type": "thinking", "thinking": None}), "'messages[1].content[0].thinking'"),
    ({"messages": [*assistant(ROME)["messages"], *user(RESULT | {"content": [{"type": "image"}]})["messages"]]}, "image"),
    ({"messages": [*assistant(ROME)["messages"], *user(RESULT | {"is_error": 1})["messages"]]}, "is_error"),
    ({"tools": [NOW, NOW]}, "'tools[1].name'"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "'tools[0].name'"),
    ({"tools": [NOW | {"defer_loading": True}, {"name": "a b", "input_schema": {}}]}, "'tools[1].name'"),
    (
        {"tools": [NOW | {"defer_loading": True}, {"name": "a", "input_schema": {"type": "string"}}]},
        "'tools[1].input_schema' must describe an object",
    ),
    ({"tools": [{"name": "a"}]}, "'tools[0].input_schema'"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "'tools[0].input_schema'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "'web_search_20250305'"),
    (
        {"tools": [WEATHER, NOW | {"defer_loading": True}], "tool_choice": {"type": "tool", "name": "now"}},
        "'tool_choice.name' is 'now'",
    ),
    (
        {"messages": [*assistant(ROME)["messages"], *user(RESULT | {"content": [{"type": "tool_reference"}]})["messages"]]},
        "'messages[2].content[0].content[0].tool_name'",
    ),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "no"}}, "'tool_choice.name'"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
    ({"tools": [NOW], "tool_choice": {"type": "any", "name": "now"}}, "'tool_choice.name'"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
    ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens'"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "'thinking.budget_tokens'"),
]


@pytest.mark.parametrize(("body", "told"), REFUSED, ids=[told[:40] for _, told in REFUSED])
async def test_errors_name_the_field(client, body, told):
    response = await client.post(MESSAGES, json=ASK | body)
    assert told in check(response, 400, "invalid_request_error")


async def test_the_client_is_told_to_send_whole_conversations(client):
    error = (await client.post(MESSAGES, json=ASK | {"thread": {"type": "create"}})).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"]["error_code"] == "thread_unsupported_request"


async def test_what_asks_for_nothing_is_taken():
    asked = {
        "metadata": {"user_id": "u"},
        "service_tier": "standard_only",
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "tools": [NOW | {"type": "custom", "allowed_callers": ["direct"], "eager_input_streaming": True}],
        "top_k": 5,
        "top_p": 0.9,
        "speed": "fast",
        "context_management": {"edits": [{"type": CLEAR, "keep": "all"}]},
    }
    assert (await ask("Yes.", **asked))["content"] == [{"type": "text", "text": "Yes."}]


async def test_unknown_fields_are_passed_over_where_the_server_says_so():
    answer = await ask("Yes.", chat_template=CHAT_TEMPLATE, config={"ignore_unknown_parameters": True}, colour=3)
    assert answer["content"][0]["text"] == "Yes."


async def test_errors_of_every_layer_have_anthropics_shape(runtime):
    async with make_client(runtime, api_keys=("key",), max_body_bytes=2000) as client:
        check(await client.post(MESSAGES, json=ASK), 401, "authentication_error")
        check(await client.post(MESSAGES, json=ASK, headers={"X-Api-Key": "other"}), 401, "authentication_error")
        for headers in ({"X-Api-Key": "key"}, {"Authorization": "Bearer key"}):
            assert (await client.post(MESSAGES, json=ASK, headers=headers)).status_code == 200
        client.headers["x-api-key"] = "key"
        check(await client.post(MESSAGES, json=ASK | {"model": "other"}), 404, "not_found_error")
        check(await client.post(MESSAGES, content=b"[" + b" " * 2000), 413, "request_too_large")
        check(await client.post(COUNT, content=b"[]"), 400, "invalid_request_error")
        check(await client.get(MESSAGES), 405, "invalid_request_error")
        assert (await client.get("/v1/models")).status_code == 200


async def test_errors_of_other_routes_have_anthropics_shape_for_its_clients(runtime):
    async with make_client(runtime, api_keys=("key",)) as client:
        check(await client.get("/v1/models", headers=VERSION), 401, "authentication_error")
        client.headers["x-api-key"] = "key"
        told = check(await client.post("/v1/messages/others", json={}, headers=VERSION), 404, "not_found_error")
        assert told == "There is nothing at POST /v1/messages/others."
        assert "param" in (await client.post("/v1/messages/others", json={})).json()["error"], "OpenAI's without the header"


async def test_who_finds_the_queue_full_is_told_when_to_come_back():
    gate = GatedExecutor(replace(CAPACITY, max_rows=1))
    with running(gate, max_queue=1) as server:
        load = server.runtime.engine.load
        async with httpx.AsyncClient(base_url=server.url) as client:
            first = asyncio.create_task(client.post(MESSAGES, json=ASK | {"max_tokens": 1}))
            await until(lambda: load().num_running == 1)
            second = asyncio.create_task(client.post(MESSAGES, json=ASK | {"max_tokens": 1}))
            await until(lambda: load().num_waiting == 1)
            response = await client.post(MESSAGES, json=ASK)
            check(response, 429, "rate_limit_error")
            assert int(response.headers["retry-after"]) >= 1
            gate.open()
            assert [(await task).status_code for task in (first, second)] == [200, 200]


async def test_counting_needs_no_limit_and_no_place(client):
    assert (await client.post(COUNT, json={"model": "toy", "messages": HI})).json() == {
        "input_tokens": len(make_tokenizer().encode(HI_PROMPT, add_special_tokens=False))
    }
    long = await client.post(COUNT, json={"model": "toy", "messages": [{"role": "user", "content": "a" * 5000}]})
    assert long.json()["input_tokens"] > 5000
    check(await client.post(COUNT, json={"messages": HI}), 400, "invalid_request_error")
    check(await client.post(COUNT, json={"model": "x", "messages": HI}), 404, "not_found_error")


async def test_models_have_the_shape_that_the_client_knows(client):
    assert (await client.get("/v1/models")).json()["object"] == "list"
    page = (await client.get("/v1/models", headers=VERSION)).json()
    assert [card["id"] for card in page["data"]] == ["toy", "org/toy"]
    assert page["data"][0] == {
        "type": "model",
        "id": "toy",
        "display_name": "toy",
        "created_at": "2020-09-13T12:26:40Z",
        "lifecycle": "active",
        "max_input_tokens": 2048,
        "max_tokens": 2048,
    }
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "toy", "org/toy")
    assert (await client.get("/v1/models/org/toy", headers=VERSION)).json()["id"] == "org/toy"
    check(await client.get("/v1/models/other", headers=VERSION), 404, "not_found_error")


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("limit=1", ["toy"], True),
        ("limit=1&after_id=toy", ["org/toy"], False),
        ("before_id=org/toy", ["toy"], False),
        ("after_id=org/toy", [], False),
        ("limit=0", None, None),
        ("limit=x", None, None),
        ("after_id=x", None, None),
    ],
)
async def test_pages_of_models(client, query, ids, has_more):
    response = await client.get(f"/v1/models?{query}", headers=VERSION)
    if ids is None:
        assert query.split("=")[0] in check(response, 400, "invalid_request_error")
        return
    page = response.json()
    assert ([card["id"] for card in page["data"]], page["has_more"]) == (ids, has_more)


async def test_a_client_that_leaves_cancels_its_message():
    gate = GatedExecutor()
    with running(gate) as server:
        load = server.runtime.engine.load
        async with httpx.AsyncClient(base_url=server.url) as client:
            gate.allow(2)
            async with client.stream("POST", MESSAGES, json=ASK | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line == "event: content_block_delta":
                        break
            gate.open()
            await until(lambda: load().num_running == 0)


async def test_a_message_is_explained_by_its_id(client):
    answer = (await client.post(MESSAGES, json=ASK | {"max_tokens": 3})).json()
    explained = (await client.get(f"/v1/requests/{answer['id']}")).json()
    assert [choice["completion_tokens"] for choice in explained["choices"]] == [answer["usage"]["output_tokens"]] == [3]
