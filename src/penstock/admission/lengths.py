"""How long prompts and answers are, learned from those that came: decaying means. Kept by `door`; never sees a text."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98
"""Of what is remembered, per observation: the last fifty or so count."""
FIRST_TOKENS_PER_CHAR = 0.25
FIRST_WEIGHT_CHARS = 400.0
FIRST_OUTPUT_TOKENS = 128.0
"""Assumed until the first answers have ended."""


@dataclass(slots=True)
class Mean:
    """A decaying ratio of sums."""

    total: float
    weight: float

    def add(self, value: float, weight: float = 1.0) -> None:
        self.total = DECAY * self.total + value
        self.weight = DECAY * self.weight + weight

    @property
    def value(self) -> float:
        return self.total / self.weight


class Lengths:
    def __init__(self) -> None:
        self._tokens_per_char = Mean(FIRST_TOKENS_PER_CHAR * FIRST_WEIGHT_CHARS, FIRST_WEIGHT_CHARS)
        """Written by the event loop."""
        self._output_tokens = Mean(FIRST_OUTPUT_TOKENS, 1.0)
        """This and what follows: written by the engine thread."""
        self._cached_share = Mean(0.0, 1.0)

    def on_prompt(self, num_chars: int, num_tokens: int) -> None:
        """A text of so many characters, and whatever its template added, has so many tokens."""
        if num_chars:
            self._tokens_per_char.add(num_tokens, num_chars)

    def on_end(self, num_prompt_tokens: int, num_cached_tokens: int, num_generated_tokens: int) -> None:
        """An answer ended by itself."""
        self._output_tokens.add(num_generated_tokens)
        self._cached_share.add(num_cached_tokens, num_prompt_tokens)

    def prompt_tokens(self, num_chars: int) -> int:
        return round(num_chars * self._tokens_per_char.value)

    def new_tokens(self, min_tokens: int, max_tokens: int | None) -> int:
        """Predicted length of an answer within its limits."""
        predicted = max(min_tokens, round(self._output_tokens.value))
        return predicted if max_tokens is None else min(predicted, max_tokens)

    @property
    def computed_share(self) -> float:
        """Of the prompt tokens: those that are not found in the prefix cache."""
        return 1.0 - self._cached_share.value
