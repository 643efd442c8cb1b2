"""Are all tool calls complete and valid? An agent on a real model asks, runs the tools, and asks again.

    python benchmarks/agent_loop.py                                   # Qwen2.5-Coder-1.5B, 50 calls
    python benchmarks/agent_loop.py --model smollm2:135m --calls 20
    python benchmarks/agent_loop.py --tool-choice auto                # how often does it call of its own accord?

Each task is a conversation. The model may call (`auto`), must (`required`), or must call one tool (a name), in turn, streamed
and not; results go back to it, and an answer in words begins the next task. Every call is parsed as JSON and checked against
its tool's schema by hand-written rules, independent of the server's grammars. Then each task is asked again with few
tokens, so that answers are cut within a call: no such fragment may be returned as a call.

Reports calls by choice, complete answers in words, how many of those have the JSON of a call, faults of each kind, and seconds.
The last line is JSON. Exits with 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from printed import origin, table
from sessions import serving

MAX_TOKENS = 300
SHORT_TOKENS = (3, 8, 14, 20, 27)
"""Few enough that most calls do not fit."""
CHOICES = ("auto", "required", "named")
MAX_TURNS = 6
"""Answers in one conversation."""
SYSTEM = "You are an agent in a shop's back office. Call the tools to do what you are asked, one step after the other."
TASKS = (
    "How many lamps are in stock in Oslo? Order 20 more if there are fewer than 10.",
    "Ship two chairs and a table to Ada Lovelace, 12 St James's Square, London. It is urgent.",
    'Write a note to the buyer that says: "the 3\\" screws {M4} are late", with the labels late and screws.',
    "What is 17.5 percent of 2,340? Then look up the stock of tables in Rome.",
    "Convert 250 EUR to JPY, and write a note with the result to the cashier.",
)


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_stock(given: Mapping[str, Any]) -> bool:
    return given["item"] in ("lamp", "chair", "table") and given["place"] in ("Oslo", "Rome", "Lima")


def _is_order(given: Mapping[str, Any]) -> bool:
    return given["item"] in ("lamp", "chair", "table") and _is_int(given["count"], 1, 500)


def _is_parcel(given: Mapping[str, Any]) -> bool:
    address, lines = given["address"], given["lines"]
    return (
        set(address) == {"name", "street", "city"}
        and all(isinstance(part, str) and len(part) <= 60 for part in address.values())
        and isinstance(lines, list)
        and 1 <= len(lines) <= 3
        and all(set(line) == {"item", "count"} and _is_order(line) for line in lines)
        and isinstance(given.get("urgent", False), bool)
    )


def _is_note(given: Mapping[str, Any]) -> bool:
    labels = given.get("labels", [])
    texts = [given["to"], given["text"], *labels]
    return isinstance(labels, list) and len(labels) <= 4 and all(isinstance(text, str) and len(text) <= 120 for text in texts)


def _is_sum(given: Mapping[str, Any]) -> bool:
    number = (int, float)
    return given["op"] in ("+", "-", "*", "/") and isinstance(given["a"], number) and isinstance(given["b"], number)


ITEM = {"enum": ["lamp", "chair", "table"]}
COUNT = {"type": "integer", "minimum": 1, "maximum": 500}
TOOLS: dict[str, tuple[str, dict[str, Any], list[str], Callable[[Mapping[str, Any]], bool], str]] = {
    "stock": (
        "Items in stock.",
        {"item": ITEM, "place": {"enum": ["Oslo", "Rome", "Lima"]}},
        ["item", "place"],
        _is_stock,
        "7",
    ),
    "order": ("Order items.", {"item": ITEM, "count": COUNT}, ["item", "count"], _is_order, "ordered"),
    "ship": (
        "Send a parcel.",
        {
            "address": {
                "type": "object",
                "properties": {part: {"type": "string", "maxLength": 60} for part in ("name", "street", "city")},
                "required": ["name", "street", "city"],
                "additionalProperties": False,
            },
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"item": ITEM, "count": COUNT},
                    "required": ["item", "count"],
                    "additionalProperties": False,
                },
            },
            "urgent": {"type": "boolean"},
        },
        ["address", "lines"],
        _is_parcel,
        "shipped as parcel 4711",
    ),
    "note": (
        "Write a note to somebody.",
        {
            "to": {"type": "string", "maxLength": 120},
            "text": {"type": "string", "maxLength": 120},
            "labels": {"type": "array", "maxItems": 4, "items": {"type": "string", "maxLength": 120}},
        },
        ["to", "text"],
        _is_note,
        "sent",
    ),
    "calculate": (
        "Compute with two numbers.",
        {"op": {"enum": ["+", "-", "*", "/"]}, "a": {"type": "number"}, "b": {"type": "number"}},
        ["op", "a", "b"],
        _is_sum,
        "409.5",
    ),
}
"""By name: description, properties, required properties, a check of the arguments, and the result."""


def tools_for_template() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
            },
        }
        for name, (description, properties, required, _, _) in TOOLS.items()
    ]


def fault_of(call: Mapping[str, Any]) -> str | None:
    """Return the fault of a call, or None."""
    name = call["function"]["name"]
    if name not in TOOLS or not call.get("id"):
        return "unknown tool" if call.get("id") else "no id"
    _, properties, required, is_valid, _ = TOOLS[name]
    try:
        given = json.loads(call["function"]["arguments"])
    except ValueError:
        return "no JSON"
    if not isinstance(given, dict) or set(given) - set(properties) or set(required) - set(given) or not is_valid(given):
        return "not the schema"
    return None


def ask(address: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return an answer's message and finish reason. A stream's message is assembled from its deltas."""
    connection = HTTPConnection(address, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {data.decode()}")
        if not body["stream"]:
            choice = json.loads(data)["choices"][0]
            return choice["message"], choice["finish_reason"]
        events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
        return assembled([event["choices"][0] for event in events if event["choices"]])
    finally:
        connection.close()


def assembled(choices: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    calls: list[dict[str, Any]] = []
    content, finish = "", ""
    for choice in choices:
        delta, finish = choice["delta"], choice["finish_reason"] or finish
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(calls):
                calls.append(
                    {"id": piece["id"], "type": "function", "function": {"name": piece["function"]["name"], "arguments": ""}}
                )
            calls[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments") or ""
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}, finish


class Loop:
    """Conversations with one server, and the counts of what came back."""

    def __init__(self, address: str, model: str, kinds: Sequence[str]) -> None:
        self._address, self._model, self._kinds = address, model, kinds
        self.num_asked = 0
        self.calls: Counter[str] = Counter()
        self.words: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        """Answers in words that have the JSON of a call in them."""
        self.faults: Counter[str] = Counter()

    @property
    def is_streamed(self) -> bool:
        """The last answer was."""
        return self.num_asked % 2 == 0

    def choice(self) -> tuple[str, object]:
        kind = self._kinds[self.num_asked // 2 % len(self._kinds)]
        name = list(TOOLS)[self.num_asked % len(TOOLS)]
        return kind, {"type": "function", "function": {"name": name}} if kind == "named" else kind

    def ask(self, messages: list[dict[str, Any]], choice: object, max_tokens: int) -> tuple[dict[str, Any], str]:
        self.num_asked += 1
        fields = {"model": self._model, "messages": messages, "tools": tools_for_template(), "tool_choice": choice}
        return ask(
            self._address,
            fields | {"max_tokens": max_tokens, "temperature": 0.7, "seed": self.num_asked, "stream": self.is_streamed},
        )

    def converse(self, task: str, num_calls: int) -> None:
        """One task, until there are so many calls in all, or the model answers in words."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        for _ in range(MAX_TURNS):
            kind, choice = self.choice()
            message, finish = self.ask(messages, choice, MAX_TOKENS)
            calls = message.get("tool_calls") or []
            if finish == "length" and calls and self.is_streamed:
                calls.pop()  # may have been cut: a stream has already sent its beginning
            if bool(calls) != (finish == "tool_calls") and finish != "length":
                self.faults["calls and finish_reason differ"] += 1
            if kind != "auto" and not calls and finish != "length":
                self.faults[f"no call with {kind}"] += 1
            if any(mark in (message.get("content") or "") for mark in ("<tool_call>", "</tool_call>")) and finish != "length":
                self.faults["half a call in words"] += 1
            self.faults.update(fault for call in calls if (fault := fault_of(call)) is not None)
            self.calls[kind] += len(calls)
            if not calls or self.calls.total() >= num_calls:
                if not calls and finish != "length":
                    self.words[kind] += 1
                    self.written[kind] += '"arguments"' in (message.get("content") or "")
                return
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": TOOLS[call["function"]["name"]][4]} for call in calls
            ]

    def cut(self, task: str) -> None:
        """Answers that end soon."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        for max_tokens in SHORT_TOKENS:
            for choice in ("auto", "required"):
                message, finish = self.ask(messages, choice, max_tokens)
                calls = message.get("tool_calls") or []
                if finish == "tool_calls" or not self.is_streamed:  # a stream has already sent the cut call's beginning
                    self.faults.update(fault for call in calls if (fault := fault_of(call)) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder:1.5b")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--tool-choice", choices=CHOICES, help="of every answer (default: these in turn)")
    args = parser.parse_args()
    with serving(args.model) as session:
        kinds = CHOICES if args.tool_choice is None else [args.tool_choice]
        loop, began_s, number = Loop(urlsplit(session.url).netloc, session.model, kinds), time.monotonic(), 0
        while loop.calls.total() < args.calls and number < args.calls:
            loop.converse(TASKS[number % len(TASKS)], args.calls)
            number += 1
        for task in TASKS:
            loop.cut(task)
        seconds = time.monotonic() - began_s
    print(origin(f"{args.model}, {number} conversations, {loop.num_asked} answers, {seconds:.0f} s"))
    rows = [[kind, loop.calls[kind], loop.words[kind], loop.written[kind]] for kind in kinds]
    print(table(["choice", "calls", "answers in words", "with JSON of a call"], rows))
    print(f"faults: {dict(loop.faults) or 'none'}")
    counts = {name: dict(getattr(loop, name)) for name in ("calls", "words", "written", "faults")}
    print(json.dumps({**counts, "seconds": seconds}))
    sys.exit(1 if loop.faults else 0)


if __name__ == "__main__":
    main()
