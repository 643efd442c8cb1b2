"""Requests of a chaos test, each with the answer that a single server gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from support.server.completions import URL, oracle
from support.server.harness import running

CHAT_URL = "/v1/chat/completions"
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;:!?0123456789"
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"a": {"enum": ["red", "green"]}, "b": {"type": "boolean"}}, "required": ["a", "b"]},
)


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]
    answers: tuple[tuple[str, str], ...]
    """(Text, finish reason) of each choice."""


class Asks:
    """An endless supply. Answers of most come from `oracle`; a single server gives those that it can't compute."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._beginnings = [self._text(20, 250) for _ in range(8)]
        with running() as alone:
            self._others = [self._answered(alone.url, path, body) for path, body in self._bodies()]

    def next(self) -> Ask:
        if self._random.random() < 0.3:
            return self._random.choice(self._others)
        return self._plain()

    def _text(self, low: int, high: int) -> str:
        return "".join(self._random.choices(LETTERS, k=self._random.randint(low, high)))

    def _plain(self) -> Ask:
        rng = self._random
        prompt = rng.choice(self._beginnings) + self._text(1, 40)
        settings = {
            "max_tokens": min(200, 2 + int(rng.expovariate(1 / 50))),
            "temperature": rng.choice([0.0, 0.9]),
            "seed": rng.randrange(1000),
        }
        text, reason = oracle(prompt, **settings), "length"
        body = {"prompt": prompt, **settings}
        if rng.random() < 0.4:
            body["stop"] = stop = self._text(1, 2)
            if (at := text.find(stop)) >= 0:
                text, reason = text[:at], "stop"
        return Ask(URL, body, ((text, reason),))

    def _bodies(self) -> Sequence[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        for number in range(12):
            settings = {"temperature": number % 2, "seed": number, "max_tokens": 40}
            messages = [{"role": "user", "content": self._text(5, 80)}]
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMAS[number % len(_SCHEMAS)]}}
            found += [
                (CHAT_URL, {"messages": messages, "response_format": form, **settings}),
                (CHAT_URL, {"messages": messages, "n": 2, "frequency_penalty": 0.5, **settings, "temperature": 1.0}),
                (URL, {"prompt": self._text(5, 80), "n": 2, "stop": [self._text(2, 2)], **settings}),
            ]
        return found

    def _answered(self, url: str, path: str, body: dict[str, Any]) -> Ask:
        response = httpx.post(url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        return Ask(path, body, tuple((text_of(choice), choice["finish_reason"]) for choice in choices))


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, or of a piece of it."""
    part = choice.get("message") or choice.get("delta")
    return choice.get("text", "") if part is None else part.get("content") or ""
