"""Calls of tools by the default model, which was never taught to make any: what it writes is valid all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.e2e.process import MODEL, RealServer

pytestmark = pytest.mark.model

ORDER = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "minLength": 1, "maxLength": 20},
        "size": {"enum": ["S", "M", "L"]},
        "number": {"type": "integer", "minimum": 1, "maximum": 12},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 2},
    },
    "required": ["item", "size", "number"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "order", "description": "Order something.", "parameters": ORDER}},
    {"type": "function", "function": {"name": "order_status", "description": "How the orders stand."}},
]
QUESTIONS = ["Order three large shirts, please.", "How do my orders stand?", "Hello!", "2 + 2 ="]


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(calls: list[tuple[str, str]]) -> None:
    for name, text in calls:
        arguments = json.loads(text)
        if name == "order_status":
            assert arguments == {}
            continue
        assert name == "order"
        assert {"item", "size", "number"} <= set(arguments) <= set(ORDER["properties"])
        assert 1 <= len(arguments["item"]) <= 20
        assert arguments["size"] in ("S", "M", "L")
        assert 1 <= arguments["number"] <= 12
        assert all(len(note) <= 10 for note in arguments.get("notes", ()))
        assert len(arguments.get("notes", ())) <= 2


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_call_that_is_required_is_valid(client: openai.OpenAI, question: str) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": question}], "tools": TOOLS, "max_tokens": 300}
    answer = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=1, n=4
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        check([(call.function.name, call.function.arguments)])
    named = {"type": "function", "function": {"name": "order"}}
    with client.chat.completions.stream(**asked, tool_choice=named, seed=1) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["order"]
    check([(call.function.name, call.function.arguments) for call in message.tool_calls])
