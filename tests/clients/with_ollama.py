"""Ollama's own client against a server with `smollm2:135m` and `minilm`: chats, prompts, tools, embeddings, models, errors.

    python tests/clients/with_ollama.py http://127.0.0.1:8000      # run.sh starts one

Runs in an environment with the client, without Penstock. Prints a line for each, and exits with 1 if one fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import ollama

from support.clients.checks import run

MODEL, EMBEDDER = "smollm2:135m", "minilm"
MESSAGES = [{"role": "user", "content": "Name the capital of France."}]
OPTIONS = {"temperature": 0, "num_predict": 30}


def get_weather(place: str) -> str:
    """
    The weather of a place.

    Args:
      place: The name of a town.
    """
    return f"It rains in {place}."


def check_times(answer: ollama.ChatResponse | ollama.GenerateResponse) -> None:
    numbers = (answer.prompt_eval_duration or 0, answer.eval_duration or 0, answer.prompt_eval_count, answer.eval_count)
    assert (answer.done, answer.done_reason in ("stop", "length")) == (True, True)
    assert all(numbers), numbers
    assert (answer.total_duration or 0) >= numbers[0] + numbers[1]


def chat(client: ollama.Client) -> None:
    whole = client.chat(MODEL, messages=MESSAGES, options=OPTIONS)
    assert "Paris" in (whole.message.content or "")
    check_times(whole)
    *pieces, last = client.chat(MODEL, messages=MESSAGES, options=OPTIONS, stream=True)
    assert "".join([piece.message.content or "" for piece in pieces]) == whole.message.content
    check_times(last)


def generate(client: ollama.Client) -> None:
    whole = client.generate(MODEL, "Name the capital of France.", options=OPTIONS)
    pieces = list(client.generate(MODEL, "Name the capital of France.", options=OPTIONS, stream=True))
    assert "".join([piece.response or "" for piece in pieces]) == whole.response
    check_times(whole)
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=OPTIONS)
    assert "Paris" in (raw.response or "")


def schema(client: ollama.Client) -> None:
    form = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    answer = client.chat(MODEL, messages=MESSAGES, format=form, options={"temperature": 0, "num_predict": 60})
    assert isinstance(json.loads(answer.message.content or "")["city"], str)


def tools(client: ollama.Client) -> None:
    """Whether so small a model calls the tool is its own affair; what it calls has to be whole, and can be answered."""
    history: list[ollama.Message | dict[str, object]] = [
        {"role": "user", "content": "Use the tool: what is the weather in Rome?"}
    ]
    for is_streamed in (False, True):
        answers = client.chat(MODEL, messages=history, tools=[get_weather], options=OPTIONS, stream=is_streamed)
        found = [call for answer in (answers if is_streamed else [answers]) for call in answer.message.tool_calls or ()]
        assert all(isinstance(call.function.arguments["place"], str) for call in found)
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="get_weather", arguments={"place": "Rome"}))
    history.append(ollama.Message(role="assistant", content="", tool_calls=[call]))
    history.append(ollama.Message(role="tool", tool_name="get_weather", content=get_weather("Rome")))
    assert client.chat(MODEL, messages=history, tools=[get_weather], options=OPTIONS).message.content is not None


def embed(client: ollama.Client) -> None:
    answer = client.embed(EMBEDDER, ["a river", "a stream", "a loan"])
    river, stream, loan = answer.embeddings
    assert sum(a * b for a, b in zip(river, stream, strict=True)) > sum(a * b for a, b in zip(river, loan, strict=True))
    older = client.embeddings(EMBEDDER, "a river").embedding
    assert all(abs(a - b) < 1e-5 for a, b in zip(older, river, strict=True))


def models(client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    assert {MODEL, EMBEDDER} <= listed.keys()
    assert (bool(listed[MODEL].size), listed[MODEL].details["format"]) == (True, "gguf")
    shown = client.show(f"{EMBEDDER}:latest")
    assert shown.capabilities == ["embedding"], shown.capabilities
    shown = client.show(MODEL)
    assert shown.capabilities[:2] == ["completion", "tools"], shown.capabilities
    assert shown.modelinfo["general.architecture"] == "llama", shown.modelinfo
    loaded = {model.model: model for model in client.ps().models}
    assert all((loaded[MODEL].size, loaded[MODEL].expires_at, loaded[MODEL].context_length))


def errors(client: ollama.Client) -> None:
    for ask, status, told in (
        (lambda: client.chat("nothing", messages=MESSAGES), 404, "not served"),
        (lambda: client.chat(MODEL, messages=MESSAGES, options={"temperature": -1}), 400, "temperature"),
        (lambda: client.pull("llama3"), 501, "penstock pull"),
        (lambda: client.delete(MODEL), 501, "Delete the files"),
    ):
        found = (0, "")
        try:
            ask()
        except ollama.ResponseError as error:
            found = (error.status_code, error.error)
        assert (found[0], told in found[1]) == (status, True), found


CHECKS: tuple[Callable[[ollama.Client], None], ...] = (chat, generate, schema, tools, embed, models, errors)


if __name__ == "__main__":
    sys.exit(run("ollama", CHECKS, lambda _: ollama.Client(host=sys.argv[1])))
