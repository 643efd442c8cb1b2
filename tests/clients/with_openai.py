"""OpenAI's own client, by a server's URL: completions, chats, tools, schemas, responses, streams, errors and cancelling.

    python tests/clients/with_openai.py http://127.0.0.1:8000      # a server with smollm2:135m; run.sh starts one

Runs in an environment with the client, without Penstock. Prints a line for each check, and exits with 1 if one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import openai
from pydantic import BaseModel, Field

from support.clients.checks import run, wait_until_none_runs

MODEL = "smollm2:135m"
PROMPT = "The capital of France is"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name the capital of France."}]
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": PLACE}}
FUNCTION = {"type": "function", **WEATHER["function"]}
"""The same tool as `responses` wants it."""
FEW = {"model": MODEL, "temperature": 0, "max_tokens": 30}


class City(BaseModel):
    name: str = Field(max_length=20)
    country: Literal["France", "Norway"]


def completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(**FEW, prompt=PROMPT)
    assert "Paris" in whole.choices[0].text
    pieces = client.completions.create(**FEW, prompt=PROMPT, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    both = client.completions.create(model=MODEL, prompt=[PROMPT, "Hello"], n=2, seed=1, max_tokens=5, stop=["\n"])
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    echoed = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=1)
    assert "".join(echoed.choices[0].logprobs.tokens) == echoed.choices[0].text
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


def chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**FEW, messages=MESSAGES)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert 0 < whole.usage.completion_tokens <= 30
    assert whole._request_id
    chunks = list(client.chat.completions.create(**FEW, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def chat_of_its_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**FEW, messages=MESSAGES) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        answer = events.get_final_completion()
    assert answer.choices[0].message.content == text
    assert "Paris" in text


def logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**FEW, messages=MESSAGES, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)


def parse(client: openai.OpenAI) -> None:
    """An answer that follows a model of pydantic, whole, and as a stream."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 60, "messages": MESSAGES, "response_format": City}
    answer = client.chat.completions.parse(**asked)
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        streamed = events.get_final_completion().choices[0].message.parsed
    assert streamed == answer.choices[0].message.parsed
    more = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And of Norway?"}]
    assert client.chat.completions.parse(**asked | {"messages": more}).choices[0].message.parsed


def tools(client: openai.OpenAI) -> None:
    """A call, its result and an answer in words, as agents do it."""
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 100, "tools": [WEATHER]}
    answer = client.chat.completions.create(**asked, messages=messages, tool_choice="required", parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
    asked |= {"parallel_tool_calls": False}
    assert client.chat.completions.create(**asked, messages=messages).choices[0].message  # words or a call, as it likes
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(**asked, messages=messages, tool_choice=named) as events:
        pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        streamed = events.get_final_completion()
    assert "".join(pieces) == streamed.choices[0].message.tool_calls[0].function.arguments
    parsed = client.chat.completions.parse(
        **asked | {"tools": [openai.pydantic_function_tool(City)]}, messages=messages, tool_choice="required"
    )
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, City)
    for called in (answer, streamed, parsed):
        [call] = called.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 24 degrees"}
        history = [*messages, called.choices[0].message, result]
        told = client.chat.completions.create(**asked, messages=history, tool_choice="none")
        assert told.choices[0].message.content


def responses(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 30}
    first = client.responses.create(**asked, instructions="Be brief.", input="Name the capital of France.")
    assert "Paris" in first.output_text
    with client.responses.stream(**asked, instructions="Be brief.", input="Name the capital of France.") as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events.get_final_response().output_text == text == first.output_text
    more = client.responses.create(**asked, previous_response_id=first.id, input="And of Norway?")
    assert more.output_text
    assert client.responses.retrieve(more.id).output_text == more.output_text
    assert client.responses.input_items.list(more.id).data
    client.responses.delete(more.id)


def responses_with_tools_and_schemas(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 100, "store": False}
    history = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = client.responses.create(
        **asked, input=history, tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False
    )
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    history += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(**asked, input=history, tools=[FUNCTION], tool_choice="none").output_text
    parsed = client.responses.parse(**asked, input="Name the capital of France.", text_format=City)
    assert isinstance(parsed.output_parsed, City)


def models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def refusal(ask: Callable[[], object], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"there was no {kind.__name__}")


def errors(client: openai.OpenAI) -> None:
    chats = client.chat.completions
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}]
    assert refusal(lambda: chats.create(model=MODEL, messages=[]), openai.BadRequestError).param == "messages"
    refusal(lambda: chats.create(model=MODEL, messages=image), openai.BadRequestError)
    long = [{"role": "user", "content": "Hello! " * 10_000}]
    error = refusal(lambda: chats.create(model=MODEL, messages=long), openai.BadRequestError)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert refusal(lambda: chats.create(model="gpt-5", messages=MESSAGES), openai.NotFoundError).code == "model_not_found"
    assert refusal(lambda: client.responses.retrieve("resp_none"), openai.NotFoundError).request_id


def many_at_once(client: openai.OpenAI) -> None:
    """Answers of one client that run together are those that it gets alone."""
    questions = [[{"role": "user", "content": f"Count from {number} to ten."}] for number in range(8)]
    alone = client.chat.completions.create(**FEW, messages=questions[0]).choices[0].message.content

    async def check() -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as together:
            answers = await asyncio.gather(
                *(together.chat.completions.create(**FEW, messages=question) for question in questions)
            )
        assert answers[0].choices[0].message.content == alone
        assert all(answer.choices[0].message.content for answer in answers)

    asyncio.run(check())


def cancel(client: openai.OpenAI) -> None:
    """A request ends at the server when its task is cancelled, in a stream or before the answer, or its stream is closed."""
    long = {"model": MODEL, "max_tokens": 4000, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    url = str(client.base_url).removesuffix("/v1/")

    async def stream(begun: asyncio.Event, asking: openai.AsyncOpenAI) -> None:
        async for _ in await asking.chat.completions.create(**long, stream=True):
            begun.set()

    async def whole(begun: asyncio.Event, asking: openai.AsyncOpenAI) -> None:
        begun.set()
        await asking.chat.completions.create(**long)

    async def leave(ask: Callable[[asyncio.Event, openai.AsyncOpenAI], object]) -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as asking:
            begun = asyncio.Event()
            task = asyncio.ensure_future(ask(begun, asking))
            await begun.wait()
            await asyncio.sleep(0.5)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until_none_runs, url, client.api_key)

    asyncio.run(leave(stream))
    asyncio.run(leave(whole))
    with client.chat.completions.create(**long, stream=True) as chunks:
        next(iter(chunks))
    wait_until_none_runs(url, client.api_key)


CHECKS: Sequence[Callable[[openai.OpenAI], None]] = (
    completions,
    chat,
    chat_of_its_stream_helper,
    logprobs,
    parse,
    tools,
    responses,
    responses_with_tools_and_schemas,
    models,
    errors,
    many_at_once,
    cancel,
)


def new_client(name: str) -> openai.OpenAI:
    """A client whose key is its check's name, which a recording tells."""
    return openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=f"openai-{name}", max_retries=0, timeout=60)


if __name__ == "__main__":
    sys.exit(run("openai", CHECKS, new_client))
