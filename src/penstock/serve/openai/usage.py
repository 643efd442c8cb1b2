"""Token counts of one call, in OpenAI's shape. Kept by the answer writers, fed with every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.ports import OutputChunk
from penstock.serve.service import Choice


class Usage:
    """Each prompt counts once, however many choices it has; `cached_tokens` is what its first choice found in the cache."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._first_choice = {choice.prompt_idx: choice for choice in reversed(choices)}
        self._num_prompt_tokens = sum(len(choice.prompt_token_ids) for choice in self._first_choice.values())
        self._num_generated = [0] * len(choices)
        self._num_cached = [0] * len(choices)

    def add(self, index: int, chunk: OutputChunk) -> None:
        self._num_generated[index] = chunk.num_generated_tokens
        self._num_cached[index] = chunk.num_cached_tokens

    def body(self) -> dict[str, Any]:
        num_generated = sum(self._num_generated)
        num_cached = sum(self._num_cached[choice.index] for choice in self._first_choice.values())
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self._num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
