"""Tools and reasoning in `/v1/chat/completions`: what is asked, what the prompt says, and how answers are taken apart."""

import json
from functools import partial

import openai
import pytest

from penstock.engine.bridge import merge_chunks
from penstock.serve.openai.write import ChatWriter
from penstock.testing import HashExecutor, HashModel
from penstock.text.dialects import Dialect, ReasoningFormat
from penstock.text.grammar import ANSWERS_PER_COMPILATION, Grammars
from support.server.completions import events
from support.server.errors import CHAT, check
from support.server.harness import (
    CAPACITY,
    CHAT_TEMPLATE,
    END_ID,
    VOCAB_SIZE,
    LiveServer,
    make_client,
    make_runtime,
    make_tokenizer,
)
from support.server.tools import CALL, CALL_NOW, NOW, THINKING_TEMPLATE, TOOLS_TEMPLATE, WEATHER, Scripted, says

ASK = {"messages": [{"role": "user", "content": "What is the weather?"}], "temperature": 0, "max_tokens": 400}


async def ask(text, *, chat_template=TOOLS_TEMPLATE, expects=200, **body):
    """The first choice of the answer of a model that says a text."""
    runtime = says(text, chat_template=chat_template)
    try:
        async with make_client(runtime) as client:
            response = await client.post(CHAT, json=ASK | {"tools": [WEATHER, NOW]} | body)
            assert response.status_code == expects, response.text
            return response.json()["choices"][0] if expects == 200 else response
    finally:
        runtime.close()


async def stream(text, *, chat_template=TOOLS_TEMPLATE, **body):
    """The deltas of a stream, and its finish reason."""
    runtime = says(text, chat_template=chat_template)
    try:
        async with make_client(runtime) as client:
            response = await client.post(CHAT, json=ASK | {"tools": [WEATHER, NOW], "stream": True} | body)
            assert response.status_code == 200, response.text
            chunks, is_done = events(response.text)
            assert is_done
            choices = [chunk["choices"][0] for chunk in chunks]
            return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]
    finally:
        runtime.close()


def calls_of(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


NAMED = {"type": "function", "function": {"name": "get_weather"}}
ROME = ("get_weather", {"place": "Rome", "days": 3})


@pytest.mark.parametrize("chat_template", [TOOLS_TEMPLATE, CHAT_TEMPLATE], ids=["hermes", "generic"])
async def test_a_call_is_told_apart_from_the_text_before_it(chat_template):
    choice = await ask(f"Let me see <how>.\n{CALL}\n{CALL_NOW}", chat_template=chat_template)
    message = choice["message"]
    assert message["content"] == "Let me see <how>."
    assert calls_of(message) == [ROME, ("now", {})]
    assert choice["finish_reason"] == "tool_calls"
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}


async def test_tagged_parameters_are_arguments_of_the_schema_s_types():
    """As Qwen3-Coder writes them. Masks turn what is no value of the schema into one."""
    template = TOOLS_TEMPLATE + "{# <function= <parameter= #}"
    call = (
        "<tool_call>\n<function=get_weather>\n<parameter=place>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    text = f"Let me see.\n\n{call}\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    choice = await ask(text, chat_template=template)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    assert calls_of(choice["message"]) == [ROME, ("now", {})]
    deltas, finish_reason = await stream(text, chat_template=template)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = ["".join(call["function"]["arguments"] for call in calls if call["index"] == index) for index in (0, 1)]
    assert (list(map(json.loads, arguments)), finish_reason) == ([ROME[1], {}], "tool_calls")
    for choice in (
        await ask(call.replace("Rome", "Rima"), chat_template=template, tool_choice="required"),
        await ask("What?", chat_template=template, tool_choice=NAMED),
    ):
        [(name, found)] = calls_of(choice["message"])
        assert (name, found["place"] in ("Rome", "Oslo"), 1 <= found["days"] <= 9) == ("get_weather", True, True)
    broken = await ask(text, chat_template=template, max_tokens=60)
    assert broken["finish_reason"] == "length"
    assert broken["message"]["content"].startswith("Let me see.<tool_call>\n<function=get_weather>\n<parameter=")


@pytest.mark.parametrize("chat_template", [TOOLS_TEMPLATE, CHAT_TEMPLATE], ids=["hermes", "generic"])
async def test_fenced_json_is_a_call_if_it_names_a_tool(chat_template):
    fenced = '```json\n{\n  "name": "now",\n  "arguments": {}\n}\n```'
    choice = await ask(fenced, chat_template=chat_template)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert calls_of(choice["message"]) == [("now", {})]
    deltas, finish = await stream(fenced, chat_template=chat_template)
    assert finish == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)
    for text in (fenced.replace("now", "Ada"), '```json {"name": "Ada", "age": 3}```', f"So: {fenced}"):
        choice = await ask(text, chat_template=chat_template)
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]


async def test_an_object_in_doubled_braces_is_a_call_if_it_names_a_tool():
    text = '{{"name": "get_weather", "arguments": {"place": "Rome", "days": 3}}}'
    choice = await ask(text, chat_template=TOOLS_TEMPLATE)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert calls_of(choice["message"]) == [ROME]
    deltas, finish = await stream(text, chat_template=TOOLS_TEMPLATE)
    assert finish == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)
    for text in ("{{ place }} is a variable.", '{{"name": "Ada", "arguments": {}}}'):
        choice = await ask(text, chat_template=TOOLS_TEMPLATE)
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


async def test_json_that_was_asked_for_is_no_call_although_it_names_a_tool():
    schema = {"type": "object", "properties": {"name": {"const": "now"}, "arguments": {"const": {}}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"required": ["name", "arguments"]}}}
    message = (await ask('{"name": "now", "arguments": {}}', response_format=asked))["message"]
    assert json.loads(message["content"]) == {"name": "now", "arguments": {}}
    assert "tool_calls" not in message


async def test_json_that_was_asked_for_beside_tools_goes_on_where_it_was_cut():
    messages = [*ASK["messages"], {"role": "assistant", "content": '{"a"'}]
    message = (await ask(": 1}", messages=messages, continue_final_message=True, **JSON))["message"]
    assert message["content"] == ": 1}"


@pytest.mark.parametrize("begun", ["<tool", '<tool_call>{"name": "get_'])
async def test_a_begun_call_beside_json_that_was_asked_for_begins_anew(begun):
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
    assert calls_of((await ask(CALL, messages=messages, continue_final_message=True, **JSON))["message"]) == [ROME]


async def test_json_that_was_asked_for_is_a_call_in_llama_s_form_only_if_it_names_a_tool():
    template = CHAT_TEMPLATE.replace("{{ suffix }}", '{% if tools %}{# "parameters": <|start_header_id|> #}{% endif %}')
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "parameters": {}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"required": ["name", "parameters"]}}}
    bob = '{"name": "Bob", "parameters": {}}'
    message = (await ask(bob, chat_template=template, response_format=asked))["message"]
    assert json.loads(message["content"]) == {"name": "Bob", "parameters": {}}
    assert "tool_calls" not in message
    called = await ask(bob.replace("Bob", "now"), chat_template=template, response_format=asked)
    assert calls_of(called["message"]) == [("now", {})]


async def test_a_message_of_calls_alone_has_no_content():
    message = (await ask(CALL))["message"]
    assert message["content"] is None


async def test_without_a_call_the_answer_is_text():
    choice = await ask("It rains <tool_")
    assert choice["message"] == {"role": "assistant", "content": "It rains <tool_", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_stream_tells_name_then_arguments_in_pieces():
    deltas, finish_reason = await stream(f"Well:\n{CALL}")
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert calls[0]["index"] == 0
    assert calls[0]["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == ROME[1]
    assert len(calls) > 1  # steps that end together make one piece
    assert (deltas[-1], finish_reason) == ({}, "tool_calls")


def test_openai_s_client_puts_a_stream_together():
    with (
        LiveServer(says(f"One moment.\n{CALL}\n{CALL_NOW}", chat_template=TOOLS_TEMPLATE)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"model": "toy", "messages": ASK["messages"], "tools": [WEATHER, NOW]}
        with client.chat.completions.stream(**asked) as answer:
            message = answer.get_final_completion().choices[0].message
        assert message.content == "One moment."
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("get_weather", '{"place": "Rome", "days": 3}'),
            ("now", "{}"),
        ]
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        # What a client sends back is taken, with what it has made of the arguments.
        strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in (WEATHER, NOW)]
        parsed = client.chat.completions.parse(**asked | {"tools": strict}).choices[0].message
        assert parsed.tool_calls[0].function.parsed_arguments == {"place": "Rome", "days": 3}
        for told in (message, whole.message, parsed):
            results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in told.tool_calls]
            history = [*ASK["messages"], told, *results]
            assert client.chat.completions.create(**asked | {"messages": history}).choices[0].message.tool_calls
    server.runtime.close()


def test_a_streamed_message_of_reasoning_alone_can_be_sent_back():
    with (
        LiveServer(says(THOUGHT, chat_template=THINKING_TEMPLATE)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"model": "toy", "messages": ASK["messages"], "tools": [NOW], "max_tokens": len("<think>Hm")}
        with client.chat.completions.stream(**asked) as answer:
            message = [event for event in answer if event.type == "chunk"][-1].snapshot.choices[0].message
        assert message.content is None
        assert client.chat.completions.create(**asked | {"messages": [*ASK["messages"], message]})
    server.runtime.close()


@pytest.mark.parametrize("chat_template", [TOOLS_TEMPLATE, CHAT_TEMPLATE], ids=["hermes", "generic"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"]
)
async def test_calls_that_are_required_are_valid_whatever_the_model_would_say(choice, chat_template):
    runtime = make_runtime(HashExecutor(CAPACITY, model=HashModel(vocab_size=VOCAB_SIZE)), chat_template=chat_template)
    async with make_client(runtime) as client:
        for seed in range(12):
            body = ASK | {"tools": [WEATHER, NOW], "tool_choice": choice, "temperature": 1, "seed": seed, "max_tokens": 700}
            answer = (await client.post(CHAT, json=body)).json()["choices"][0]
            if answer["finish_reason"] == "length":  # a random model may go on with calls
                continue
            assert answer["finish_reason"] == "tool_calls"
            for name, arguments in calls_of(answer["message"]):
                if name == "now":
                    assert (arguments, choice) == ({}, "required")
                else:
                    assert set(arguments) == {"place", "days"}
                    assert arguments["place"] in ("Rome", "Oslo")
                    assert 1 <= arguments["days"] <= 9
            if choice != "required":
                assert len(answer["message"]["tool_calls"]) == 1
    runtime.close()


async def test_arguments_of_a_call_that_the_model_begins_are_held_to_the_schema():
    wrong = CALL.replace('"days": 3', '"days": 77').replace("Rome", "Paris").replace("get_weather", "get_whether")
    [(name, arguments)] = calls_of((await ask(wrong))["message"])
    assert name == "get_weather"
    assert arguments["place"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 9


async def test_without_parallel_calls_there_is_one():
    choice = await ask(f"{CALL}\n{CALL_NOW}", parallel_tool_calls=False)
    assert calls_of(choice["message"]) == [ROME]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["now", {"function": {"name": "now"}}])
async def test_a_tool_can_be_named_as_huggingface_hub_does(choice):
    assert calls_of((await ask("What?", tool_choice=choice))["message"])[0][0] == "now"


async def test_with_the_choice_none_nothing_is_told_and_nothing_read():
    choice = await ask(CALL, tool_choice="none")
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("num_tokens", range(8, len(CALL) + 1, 7))
async def test_a_call_that_is_cut_is_no_call(num_tokens):
    choice = await ask(CALL, max_tokens=num_tokens)
    assert choice["finish_reason"] == "length"
    arguments_end = CALL.index("}") + 1
    if num_tokens < arguments_end:
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == CALL[:num_tokens]
    else:
        assert calls_of(choice["message"]) == [ROME]
    deltas, finish_reason = await stream(CALL, max_tokens=num_tokens)
    assert finish_reason == "length"
    told = "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ()))
    assert '{"place": "Rome", "days": 3}'.startswith(told)


TOLD_NOW = '{"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}'


async def test_the_template_gets_tools_and_arguments_as_objects():
    runtime = says("Fine.", chat_template=TOOLS_TEMPLATE)
    history = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "ü"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    async with make_client(runtime) as client:
        body = {"messages": history, "tools": [NOW]}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        prompt = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    runtime.close()
    assert prompt.startswith('<tools>{"type": "function", "function": ' + TOLD_NOW + "}</tools>")
    assert '<|turn|>assistant: <tool_call>{"name": "now", "arguments": {"zone": "ü"}}</tool_call><|end|>' in prompt
    assert "<|turn|>tool: noon<|end|>" in prompt


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": None}, {"required": []}])
async def test_a_template_may_concatenate_what_a_tool_has_not(parameters):
    template = (
        "{% for tool in tools %}{{ tool.function.description + tool.function.parameters.type }}"
        "{% for name in tool.function.parameters.properties.items() %}{{ name }}{% endfor %}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    assert (await ask("Fine.", chat_template=template + TOOLS_TEMPLATE, tools=[tool]))["message"]["content"] == "Fine."


async def test_null_in_the_parameters_of_a_strict_tool_counts_as_left_out():
    tool = {
        "type": "function",
        "function": {"name": "now", "strict": True, "parameters": {"type": "object", "properties": None}},
    }
    message = (await ask('<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>', tools=[tool]))["message"]
    assert calls_of(message) == [("now", {"x": 1})]


async def test_a_template_that_knows_no_tools_has_them_told_in_messages():
    runtime = says("Fine.")
    history = [
        {"role": "system", "content": "Be brief."},
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    async with make_client(runtime) as client:
        tokens = (await client.post("/tokenize", json={"messages": history, "tools": [NOW]})).json()["tokens"]
        prompt = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    runtime.close()
    assert prompt.startswith("<|turn|>system: Be brief.\n\nYou can call tools.")
    assert f"<tools>\n{TOLD_NOW}\n</tools>" in prompt
    assert '<|turn|>assistant: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end|>' in prompt
    assert "<|turn|>user: <tool_response>\nnoon\n</tool_response><|end|>" in prompt


THOUGHT = "<think>\nHm, <b>.\n</think>\n\n"


@pytest.mark.parametrize("tools", [[], [WEATHER, NOW]], ids=["plain", "tools"])
async def test_reasoning_is_no_content(tools):
    choice = await ask(f"{THOUGHT}Done.", chat_template=THINKING_TEMPLATE, tools=tools)
    assert choice["message"]["reasoning_content"] == "Hm, <b>."
    assert choice["message"]["content"] == "Done."
    deltas, finish_reason = await stream(f"{THOUGHT}Done.", chat_template=THINKING_TEMPLATE, tools=tools)
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, <b>."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Done."
    assert finish_reason == "stop"


@pytest.mark.parametrize("includes", [True, False])
@pytest.mark.parametrize("said", [f"{THOUGHT}Done.", "Done </think>.", "<think>cut"])
async def test_usage_tells_the_tokens_of_reasoning(said, includes):
    reasoning = {f"{THOUGHT}Done.": THOUGHT.strip(), "Done </think>.": "", "<think>cut": "<think>cut"}[said]
    runtime = says(said, chat_template=THINKING_TEMPLATE)
    asked = ASK | {"include_reasoning": includes, "max_tokens": len(said)}
    async with make_client(runtime) as client:
        whole = (await client.post(CHAT, json=asked)).json()["usage"]
        streamed = await client.post(CHAT, json=asked | {"stream": True, "stream_options": {"include_usage": True}})
    runtime.close()
    assert whole["completion_tokens_details"] == {"reasoning_tokens": len(reasoning)}
    assert events(streamed.text)[0][-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(reasoning)}


@pytest.mark.parametrize(
    "fields",
    [{"timings_per_token": True}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}],
    ids=["timings", "usage"],
)
async def test_usage_and_timings_come_in_the_events_of_the_text(fields):
    runtime = says("Fine.")
    async with make_client(runtime) as client:
        response = await client.post(CHAT, json=ASK | {"tools": [NOW], "stream": True} | fields)
    runtime.close()
    deltas = [choice["delta"] for chunk in events(response.text)[0] for choice in chunk["choices"]]
    assert deltas.count({}) == 1, "the finish reason's"


async def test_reasoning_can_be_left_out_and_turned_off():
    choice = await ask(f"{THOUGHT}Done.", chat_template=THINKING_TEMPLATE, include_reasoning=False)
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == "Done."
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        choice = await ask("Done.", chat_template=THINKING_TEMPLATE, **off)
        assert choice["message"]["content"] == "Done."


async def test_a_template_may_call_its_switch_thinking():
    template = CHAT_TEMPLATE + "{% if add_generation_prompt %}{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
    on = await ask("Hm.</think>Yes.", chat_template=template, reasoning_effort="high")
    assert (on["message"]["reasoning_content"], on["message"]["content"]) == ("Hm.", "Yes.")
    off = await ask("Yes.", chat_template=template, reasoning_effort="none")
    assert off["message"]["content"] == "Yes."


async def test_a_template_gets_its_switch_beside_the_effort():
    template = "{% set effort = reasoning_effort %}" + THINKING_TEMPLATE
    choice = await ask(f"{THOUGHT}Done.", chat_template=template, reasoning_effort="none")
    assert choice["message"]["content"] == f"{THOUGHT}Done.", "the prompt has an empty block"


@pytest.mark.parametrize("begin", ["", "{% set effort = reasoning_effort %}"], ids=["none", "effort"])
async def test_an_effort_of_none_ends_the_block_of_a_template_without_a_switch(begin):
    always = begin + CHAT_TEMPLATE.replace("{{ suffix }}", "<think>\n{# </think> #}")
    end = "\n</think>"
    none = await ask("a" * len(end) + "Hm.", chat_template=always, reasoning_effort="none")
    assert none["message"]["content"] == "Hm."
    high = await ask("Hm.</think>Yes.", chat_template=always, reasoning_effort="high")
    assert (high["message"]["reasoning_content"], high["message"]["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("begun", "answer", "expected"),
    [
        ("<think>The answer", " is 4.</think>\n\nFour.", (" is 4.", "Four.")),
        ("<think>a</think><think>\nThe", "\nanswer</think>Four.", ("\nanswer", "Four.")),
        ("<think>The", "\n</think> Four.", ("", "Four.")),
        ("<think>\n", "\nIt is 4.</think>Four.", ("It is 4.", "Four.")),
        ("<think>It is 4.</think>The answer", " is 4.", ("", " is 4.")),
    ],
)
async def test_a_begun_block_goes_on_where_it_ends(begun, answer, expected):
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
    continues = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    template = CHAT_TEMPLATE + "{# </think> #}"
    message = (await ask(answer, chat_template=template, **continues))["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == expected
    deltas, _ = await stream(answer, chat_template=template, **continues)
    keys = ("reasoning_content", "content")
    assert tuple("".join(delta.get(key) or "" for delta in deltas) for key in keys) == expected


@pytest.mark.parametrize(
    ("begun", "rest"), [('<think>It is 1.</think>\n\n{"a"', ": 1}"), ('{"</think> a', '": 1}'), ('{"a": 1, "</think>"', ": 2}")]
)
async def test_a_grammar_goes_on_with_a_begun_answer_behind_its_reasoning(begun: str, rest: str):
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
    continues = {"messages": messages, "continue_final_message": True, "chat_template": CHAT_TEMPLATE + "{# </think> #}"}
    numbers = {"name": "a", "schema": {"type": "object", "additionalProperties": {"type": "integer"}}}
    form = {"response_format": {"type": "json_schema", "json_schema": numbers}}
    message = (await ask(rest, tool_choice="none", **continues, **form))["message"]
    assert message["content"] == rest


async def test_reasoning_may_be_limited_in_an_answer_without_an_end():
    always = CHAT_TEMPLATE.replace("{{ suffix }}", "<think>\n{# </think> #}")
    end = "\n</think>"
    for limit in ({"reasoning_effort": "none"}, {"thinking_budget": 0}):
        choice = await ask("a" * len(end) + "Hm.", chat_template=always, tools=[], ignore_eos=True, max_tokens=20, **limit)
        assert choice["message"]["content"] == "Hm."
        assert choice["finish_reason"] == "length"
        refused = await ask("", chat_template=always, tools=[], allowed_token_ids=[70], expects=400, **limit)
        [name] = limit
        error = check(refused, 400, "invalid_request_error", param="allowed_token_ids")
        assert f"'allowed_token_ids' and '{name}' exclude" in error["message"]


async def test_an_effort_has_no_effect_on_a_model_that_does_not_reason():
    choices = [await ask("Yes.", **fields) for fields in ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "max"})]
    assert choices[0] == choices[1] == choices[2]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "xhigh"}),
        (CHAT, {"reasoning_effort": "max"}),
        ("/v1/messages", {"output_config": {"effort": "xhigh"}, "max_tokens": 4}),
        ("/v1/messages", {"output_config": {"effort": "max"}, "max_tokens": 4}),
        ("/api/chat", {"think": "max"}),
    ],
)
async def test_the_highest_effort_of_templates_is_high(path, fields):
    refuses = "{% if reasoning_effort != 'high' %}{{ raise_exception('I know only high.') }}{% endif %}"
    runtime = says("Yes.", chat_template=refuses + CHAT_TEMPLATE + "{# <think> </think> #}")
    async with make_client(runtime) as client:
        response = await client.post(path, json={"model": "toy", "messages": ASK["messages"]} | fields)
        assert response.status_code == 200, response.text
    runtime.close()


async def test_calls_and_grammars_begin_behind_the_reasoning():
    choice = await ask(f"{THOUGHT}{CALL}", chat_template=THINKING_TEMPLATE)
    assert (choice["message"]["reasoning_content"], calls_of(choice["message"])) == ("Hm, <b>.", [ROME])
    choice = await ask(f"{THOUGHT}nothing", chat_template=THINKING_TEMPLATE, tool_choice="required", tools=[NOW])
    assert (choice["message"]["reasoning_content"], calls_of(choice["message"])) == ("Hm, <b>.", [("now", {})])
    asked = {"structured_outputs": {"regex": "[0-9]{3}"}, "tools": []}
    choice = await ask(f"{THOUGHT}12x", chat_template=THINKING_TEMPLATE, **asked)
    assert choice["message"]["reasoning_content"] == "Hm, <b>."
    assert choice["message"]["content"] == "120"
    choice = await ask("12x", chat_template=THINKING_TEMPLATE, **asked)
    assert choice["message"]["content"] == "120"


@pytest.mark.parametrize("start", [" no", "\n- no", "no"])
async def test_white_space_that_a_grammar_writes_behind_the_reasoning_is_content(start):
    asked = {"structured_outputs": {"choice": [start, "yes"]}, "tools": [], "chat_template": THINKING_TEMPLATE}
    message = (await ask(f"{THOUGHT}{start}", **asked))["message"]
    deltas, _ = await stream(f"{THOUGHT}{start}", **asked)
    assert message["content"] == "".join(delta.get("content") or "" for delta in deltas) == start


@pytest.mark.parametrize("start", [" n", "\n- n"])
async def test_a_begun_answer_keeps_the_white_space_before_it(start):
    messages = [*ASK["messages"], {"role": "assistant", "content": f"{THOUGHT}{start}"}]
    continues = {"messages": messages, "continue_final_message": True, "chat_template": CHAT_TEMPLATE + "{# </think> #}"}
    choice = await ask("o", structured_outputs={"choice": [f"{start}o", "yes"]}, tools=[], **continues)
    assert choice["message"]["content"] == "o"


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("opens", [True, False], ids=["prompt", "model"])
async def test_a_budget_of_reasoning_ends_the_block(budget, opens):
    template = (
        CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}" if opens else THINKING_TEMPLATE
    )
    text = "a" * 60 if opens else "<think>" + "a" * 60
    choice = await ask(text, chat_template=template, thinking_budget=budget, tools=[], max_tokens=40)
    message = choice["message"]
    assert message.get("reasoning_content", "") == "a" * budget
    assert message["content"] == "a" * (40 - budget - len("\n</think>") - (0 if opens else len("<think>")))


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def deep(num_levels):
    value = {}
    for _ in range(num_levels):
        value = {"properties": {"a": value}}
    return value


def wide(num_fields, **fields):
    return {"properties": {f"{'x' * 60}{nth}": {"type": "string", **fields} for nth in range(num_fields)}}


CHOICE = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOICE]}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
REFUSED = [
    ({"tools": [function(parameters=deep(300))]}, "tools[0].function.parameters"),
    ({"tools": [function(parameters=wide(800))]}, "tools"),
    ({"tools": [function(description="x" * 40_000)]}, "tools[0].function.description"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": deep(300)}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"name": "now"}}, "tool_choice.type"),
    ({"tool_choice": CHOICE | {"type": "custom"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": CHOICE | {"strict": True}}, "tool_choice.strict"),
    ({"tool_choice": CHOICE | {"function": {"name": "now", "strict": True}}}, "tool_choice.function.strict"),
    ({"tool_choice": ALLOWED | {"mode": "auto"}}, "tool_choice.mode"),
    ({"tool_choice": ALLOWED | {"allowed_tools": ALLOWED["allowed_tools"] | {"x": 1}}}, "tool_choice.allowed_tools.x"),
    (
        {"tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": [CHOICE | {"type": "mcp"}]}}},
        "tool_choice.allowed_tools.tools[0].type",
    ),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"function_call": {"name": "a"}}, "function_call"),
    ({"thinking_budget": 3}, "thinking_budget"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"messages": [{"role": "function", "name": "f", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "a"}, CALLED]}, "messages[0].tool_call_id"),
    ({"messages": [CALLED, {"role": "tool", "tool_call_id": "d", "content": "a"}]}, "messages[1].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages[0].reasoning_content"),
    (
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "c"}]},
        "messages[0].reasoning",
    ),
]


@pytest.mark.parametrize(
    ("path", "field", "call"),
    [
        (CHAT, "tool_calls", {"id": "c", "function": {"name": "now", "arguments": "{}"}}),
        ("/v2/chat", "tool_calls", {"id": "c", "function": {"name": "now", "arguments": "{}"}}),
        ("/api/chat", "tool_calls", {"function": {"name": "now", "arguments": {}}}),
        ("/v1/messages", "content", {"type": "tool_use", "id": "c", "name": "now", "input": {}}),
    ],
)
async def test_a_model_s_many_calls_can_be_sent_back(path, field, call):
    """Nothing limits how often a model repeats a call."""
    user = {"role": "user", "content": "a"}
    body = {"model": "toy", "messages": [user, {"role": "assistant", field: [call] * 200}, user]}
    body |= {"max_tokens": 9} if path == "/v1/messages" else {}
    runtime = says("Yes.", chat_template="{{ messages | length }}")
    async with make_client(runtime) as client:
        response = await client.post(path, json=body)
    runtime.close()
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_errors_name_the_field(body, param):
    check(await ask("", expects=400, **body), 400, "invalid_request_error", param=param)


async def test_descriptions_inside_a_schema_do_not_count():
    described = wide(3, description="y" * 40_000, title="t") | {"required": []}
    described["properties"]["description"] = {"const": "kept"}
    said = '<tool_call>{"name": "f", "arguments": {"description": "lost"}}</tool_call>'
    runtime = says(said, chat_template=CHAT_TEMPLATE.replace("{{ suffix }}", "{# tools #}"))
    async with make_client(runtime) as client:
        body = ASK | {"tools": [function(parameters=described)], "truncate_prompt_tokens": 100}
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    runtime.close()
    assert calls_of(message) == [("f", {"description": "kept"})]


async def test_a_schema_that_can_not_be_followed_is_refused_if_it_is_strict():
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    said = '<tool_call>{"name": "odd", "arguments": {"a": [1, {}]}}</tool_call>'
    assert calls_of((await ask(said, tools=[tool, NOW]))["message"]) == [("odd", {"a": [1, {}]})]
    tool["function"]["strict"] = True
    error = check(await ask(said, tools=[tool, NOW], expects=400), 400, "invalid_request_error", param="tools")
    assert "'odd'" in error["message"]


SPECIAL_MARKS = Dialect(
    reasoning=ReasoningFormat(name="special", open="<|begin|>", close="<|turn|>", marks=(), forced="<|turn|>"),
)


async def test_marks_may_be_special_tokens_and_are_not_shown():
    for streams in (False, True):
        runtime = says("<|begin|>Hm.<|turn|>\n\nDone.")
        runtime.dialect = SPECIAL_MARKS
        async with make_client(runtime) as client:
            response = await client.post(CHAT, json=ASK | {"stream": streams})
        runtime.close()
        if streams:
            chunks, is_done = events(response.text)
            assert is_done
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
            assert "".join(delta.get("content") or "" for delta in deltas) == "Done."
        else:
            message = response.json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Done.")


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_stop_string_behind_special_marks_has_no_log_probabilities(streams, skips):
    runtime = says("<|begin|>Hm.<|turn|>DoneEND")
    runtime.dialect = SPECIAL_MARKS
    body = ASK | {"stop": ["END"], "logprobs": True, "skip_special_tokens": skips, "stream": streams}
    async with make_client(runtime) as client:
        response = await client.post(CHAT, json=body)
    runtime.close()
    answers = events(response.text)[0] if streams else [response.json()]
    told = [answer["choices"][0]["logprobs"] for answer in answers]
    shown = "".join(entry["token"] for one in told if one for entry in one["content"])
    assert shown == ("Hm.Done" if skips else "<|begin|>Hm.<|turn|>Done")


@pytest.mark.parametrize("skips", [True, False])
async def test_special_tokens_are_hidden_where_the_prompt_has_ended_the_reasoning(skips):
    runtime = says("<|begin|>Done.<|turn|>", chat_template=CHAT_TEMPLATE + "<|begin|><|turn|>")
    runtime.dialect = SPECIAL_MARKS
    async with make_client(runtime) as client:
        response = await client.post(CHAT, json=ASK | {"skip_special_tokens": skips})
    runtime.close()
    message = response.json()["choices"][0]["message"]
    assert message["content"] == ("Done." if skips else "<|begin|>Done.<|turn|>")
    assert "reasoning_content" not in message


@pytest.mark.parametrize("ignores_end", [True, False])
async def test_text_that_spells_a_hidden_token_stays_in_a_chunk_with_that_token(ignores_end, monkeypatch):
    """A chunk has several tokens after guesses, or if its reader was busy, or while a route held the answer back."""
    before, after = "<|begin|>Hm.<|turn|>By <|e", "nd|>."  # tokens of a text that is cut there
    encode, whole = partial(make_tokenizer().encode, add_special_tokens=False), ChatWriter.whole
    ids = (*encode(before + after, cuts=(len(before),)), END_ID, *encode(" More."))

    def merged(self, records):
        records[0].chunks = merge_chunks(records[0].chunks)
        return whole(self, records)

    monkeypatch.setattr(ChatWriter, "whole", merged)
    runtime = make_runtime(HashExecutor(CAPACITY, model=Scripted(ids=ids)))
    runtime.dialect = SPECIAL_MARKS
    async with make_client(runtime) as client:
        response = await client.post(CHAT, json=ASK | {"max_tokens": len(ids), "ignore_eos": ignores_end})
    runtime.close()
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "By <|end|>." + " More." * ignores_end)


async def test_log_probabilities_are_of_all_tokens():
    asked = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = await ask(CALL, **asked)
    assert bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]).decode() == CALL
    assert calls_of(choice["message"]) == [ROME]
    runtime = says(CALL, chat_template=TOOLS_TEMPLATE)
    async with make_client(runtime) as client:
        response = await client.post(CHAT, json=ASK | {"tools": [WEATHER, NOW], "stream": True} | asked)
    runtime.close()
    choices = [chunk["choices"][0] for chunk in events(response.text)[0]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == CALL
    told = "".join(call["function"]["arguments"] for choice in choices for call in choice["delta"].get("tool_calls", ()))
    assert json.loads(told) == ROME[1]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert token_ids == [*make_tokenizer().encode(CALL, add_special_tokens=False), END_ID]


async def test_each_choice_has_calls_of_its_own():
    runtime = says(CALL, chat_template=TOOLS_TEMPLATE)
    async with make_client(runtime) as client:
        response = await client.post(CHAT, json=ASK | {"tools": [WEATHER, NOW], "n": 3})
    runtime.close()
    choices = response.json()["choices"]
    assert [calls_of(choice["message"]) for choice in choices] == [[ROME]] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


async def test_many_choices_that_may_call_share_one_compilation(monkeypatch):
    """They count as answers of it only once they call, so no number of them is too many."""
    compiled, compile_one = [], Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: compiled.append("new") or compile_one(self, grammar))
    matcher = Grammars.matcher
    monkeypatch.setattr(Grammars, "matcher", lambda *args: compiled.append("one by one") or matcher(*args))
    runtime = says("Fine.", chat_template=TOOLS_TEMPLATE)
    async with make_client(runtime) as client:
        for _ in range(2):
            response = await client.post(CHAT, json=ASK | {"tools": [WEATHER, NOW], "n": ANSWERS_PER_COMPILATION + 1})
            assert len(response.json()["choices"]) == ANSWERS_PER_COMPILATION + 1
    runtime.close()
    assert compiled == ["new"]


async def test_some_of_the_tools_may_be_allowed():
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = await ask(CALL, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, parallel_tool_calls=False)
    assert calls_of(choice["message"]) == [("now", {})]


JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"a": 1}}}}}


@pytest.mark.parametrize("chat_template", [TOOLS_TEMPLATE, THINKING_TEMPLATE], ids=["hermes", "thinking"])
async def test_beside_tools_the_answer_may_be_held_to_a_schema(chat_template):
    thought = THOUGHT if chat_template is THINKING_TEMPLATE else ""
    choice = await ask(f"{thought}{CALL}", chat_template=chat_template, **JSON)
    assert calls_of(choice["message"]) == [ROME]
    assert choice["finish_reason"] == "tool_calls"
    choice = await ask(thought + '{"a": 7}', chat_template=chat_template, **JSON)
    assert json.loads(choice["message"]["content"]) == {"a": 1}
    assert choice["finish_reason"] == "stop"
    choice = await ask(thought + '{"a": 1}', chat_template=chat_template, tool_choice="required", tools=[NOW], **JSON)
    assert calls_of(choice["message"]) == [("now", {})]
    choice = await ask(thought + '{"a": 1}', chat_template=chat_template, tool_choice="none", **JSON)
    assert json.loads(choice["message"]["content"]) == {"a": 1}
    odd = {"response_format": {"type": "json_object", "schema": {"not": {}}}}
    error = check(await ask("", expects=400, **odd), 400, "invalid_request_error", param="response_format.schema")
    assert "'response_format.schema' beside 'tools' is refused" in error["message"]


async def test_a_stop_string_within_a_call_ends_it_and_says_so():
    choice = await ask(CALL, stop=["Rome"])
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == CALL[: CALL.index("Rome")]
