"""Clients of other APIs that have a model write: cohere, and huggingface_hub for text-generation-inference.

    python tests/clients/chats.py http://127.0.0.1:8000      # smollm2:135m; run.sh starts one

Runs in an environment with the clients, without Penstock. Prints a line for each, and exits with 1 if one fails.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from support.clients.checks import run

MODEL, KEY = "smollm2:135m", "none"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Where is the Eiffel Tower?"}]}
PROMPT = "The capital of France is"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 10}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


def with_cohere(url: str) -> None:
    import cohere

    client = cohere.ClientV2(api_key=KEY, base_url=url)
    answer = client.chat(**ASK, max_tokens=40, temperature=0)
    assert "Paris" in answer.message.content[0].text
    assert answer.finish_reason == "COMPLETE"
    events = list(client.chat_stream(**ASK, max_tokens=40, temperature=0))
    pieces = [event.delta.message.content.text for event in events if event.type == "content-delta"]
    assert "".join(pieces) == answer.message.content[0].text
    assert events[-1].delta.usage.tokens.output_tokens == answer.usage.tokens.output_tokens


def with_cohere_tools(url: str) -> None:
    import cohere

    client = cohere.ClientV2(api_key=KEY, base_url=url)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    # There is room for one call. The model would begin others.
    asked = client.chat(model=MODEL, messages=messages, tools=[WEATHER], tool_choice="REQUIRED", temperature=0, max_tokens=28)
    [call, *_] = asked.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"place"}
    result = {"type": "document", "document": {"data": "sunny"}}
    messages += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": [result]}]
    answer = client.chat(model=MODEL, messages=messages, tools=[WEATHER], tool_choice="NONE", temperature=0, max_tokens=20)
    assert answer.message.content[0].text


def with_huggingface_hub(url: str) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=url)
    text = client.text_generation(PROMPT, max_new_tokens=8)
    assert "Paris" in text
    details = client.text_generation(PROMPT, max_new_tokens=8, details=True).details
    assert (details.finish_reason, len(details.tokens)) == ("length", 8)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=8, stream=True)) == text
    *_, last = client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True)
    assert (last.generated_text, last.details.generated_tokens) == (text, 8)


def with_huggingface_hub_chat(url: str) -> None:
    from huggingface_hub import InferenceClient

    ask = partial(InferenceClient(base_url=url, api_key=KEY).chat_completion, **ASK, max_tokens=60, temperature=0)
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER["function"]["parameters"]}}
    assert set(json.loads(ask(response_format=form).choices[0].message.content)) == {"place"}
    [call] = ask(tools=[WEATHER], tool_choice="get_weather").choices[0].message.tool_calls
    assert call.function.name == "get_weather"


CHECKS = (with_cohere, with_cohere_tools, with_huggingface_hub, with_huggingface_hub_chat)

if __name__ == "__main__":
    sys.exit(run("chats", CHECKS, lambda _: sys.argv[1]))
