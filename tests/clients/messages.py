"""Anthropic's own client, by a server's URL: messages, streams, tools, counts, models, errors and cancelling.

    python tests/clients/messages.py http://127.0.0.1:8000      # a chat model; run.sh starts one

Runs in an environment with the client, without Penstock. Prints a line for each check, and exits with 1 if one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence

import anthropic

from support.clients.checks import run, wait_until_none_runs

KEY = "none"
MODEL = "smollm2:135m"
HI = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]},
}


def new_client(url: str, **options: object) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, **options)


def create(url: str) -> None:
    message = new_client(url).messages.create(model=MODEL, max_tokens=20, system="Be brief.", messages=HI)
    assert message.content[0].text
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert 0 < message.usage.output_tokens <= 20
    assert message._request_id
    again = new_client(url).messages.create(model=MODEL, max_tokens=5, system="Be brief.", messages=HI)
    assert again.usage.cache_read_input_tokens > 0


def stop_sequences(url: str) -> None:
    asked = {"model": MODEL, "max_tokens": 60, "messages": HI, "extra_body": {"temperature": 0}}
    text = new_client(url).messages.create(**asked).content[0].text
    stop = text.split()[1]
    message = new_client(url).messages.create(**asked, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text.partition(stop)[0]


def stream(url: str) -> None:
    asked = {"model": MODEL, "max_tokens": 30, "messages": HI, "extra_body": {"temperature": 0}}
    whole = new_client(url).messages.create(**asked)
    with new_client(url).messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    assert message.content[0].text == text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in new_client(url).messages.create(**asked, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def loop_of_tools(url: str) -> None:
    """A call, its result and an answer in words, as agents do it."""
    client = new_client(url)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER]}
    message = client.messages.create(**asked, messages=messages, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls[0].name == "get_weather"
    assert calls[0].input["place"] in ("Rome", "Oslo")
    messages += [
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 24 degrees"} for call in calls],
        },
    ]
    told = client.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
    assert told.content[0].type == "text"
    assert told.content[0].text


def runner_of_tools(url: str) -> None:
    """The client's own loop, which sends results until no tool is called."""

    @anthropic.beta_tool
    def get_weather(place: str) -> str:
        """The weather of a place.

        Args:
            place: A city.
        """
        return f"sunny in {place}"

    runner = new_client(url).beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[get_weather], messages=HI, max_iterations=2
    )
    assert [message.stop_reason for message in runner]


def stream_of_tools(url: str) -> None:
    asked = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER], "messages": HI}
    with new_client(url).messages.stream(**asked, tool_choice={"type": "tool", "name": "get_weather"}) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        message = events.get_final_message()
    assert message.stop_reason == "tool_use"
    assert json.loads("".join(pieces)) == message.content[0].input
    assert message.content[0].input["place"] in ("Rome", "Oslo")


def count_tokens(url: str) -> None:
    client = new_client(url)
    counted = client.messages.count_tokens(model=MODEL, messages=HI, tools=[WEATHER]).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=HI, tools=[WEATHER]).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def models(url: str) -> None:
    client = new_client(url)
    names = [model.id for model in client.models.list()]
    assert names
    assert client.models.retrieve(names[0]).max_input_tokens > 0


def refusal(ask: Callable[[], object], kind: type[anthropic.APIStatusError]) -> anthropic.APIStatusError:
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"there was no {kind.__name__}")


def errors(url: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with_image = [{"role": "user", "content": [image]}]

    def ask(messages: object, model: str = MODEL, key: str = KEY) -> Callable[[], object]:
        client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        return lambda: client.messages.create(model=model, max_tokens=5, messages=messages)

    for error in (refusal(ask(with_image), anthropic.BadRequestError), refusal(ask([]), anthropic.BadRequestError)):
        assert error.body["error"]["type"] == "invalid_request_error"
        assert error.request_id
    assert refusal(ask(HI, model="claude"), anthropic.NotFoundError).body["error"]["type"] == "not_found_error"
    refusal(ask(HI, key="wrong"), anthropic.AuthenticationError)


def cancel(url: str) -> None:
    """A task that is cancelled in the middle of a stream ends its request at the server."""

    async def read_a_little() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
            stream = await client.messages.create(model=MODEL, max_tokens=4000, messages=HI, stream=True)
            async for event in stream:
                if event.type == "content_block_delta":
                    await asyncio.sleep(60)

    async def check() -> None:
        task = asyncio.create_task(read_a_little())
        await asyncio.sleep(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until_none_runs, url, KEY)

    asyncio.run(check())


CHECKS: Sequence[Callable[[str], None]] = (
    create,
    stop_sequences,
    stream,
    loop_of_tools,
    runner_of_tools,
    stream_of_tools,
    count_tokens,
    models,
    errors,
    cancel,
)


if __name__ == "__main__":
    sys.exit(run("anthropic", CHECKS, lambda _: sys.argv[1]))
