"""The seam for choosing a request's next tokens. Normally the executor samples one token per row, and the request gets it.

- Requests of a group (`groups.py`) get their tokens from a `Chooser`, which sees all their rows and chooses for all at once.
- A `Speculation` lets the executor sample several tokens of a row in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.types.request import Request
from penstock.types.result import StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer of a request, which ends with it."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Empty, or as long as `token_ids`."""
    is_stopped: bool
    """True if the last token is a stop token, False if the answer reached its limit."""


class Chooser(Protocol):
    """Chooses the tokens of grouped requests, instead of the executor."""

    def take(self, request: Request, result: StepResult) -> None:
        """Note that a sampling row of the request was computed and its blocks are published."""
        ...

    def choose(self, now_ns: int) -> Iterator[Answer]:
        """Choose the next token of every group that has all it needs, once all rows of the step were taken.

        Yields the answers of groups that have ended. The caller must end those requests before it asks for the next answer.
        """
        ...


class Speculation(Protocol):
    """Limits how many tokens of a row the executor may sample in one step.

    The executor guesses tokens, checks all guesses in one pass over the model, and keeps those that it would have sampled
    one at a time. So answers stay the same in fewer steps. No step is planned ahead meanwhile, since the number of tokens is
    unknown.
    """

    def max_samples(self, request: Request) -> int:
        """Return how many tokens a decoding request may get in its next step, at least 1.

        It may get fewer for lack of tokens, blocks or output limit. Never asked about groups or about answers that follow a
        grammar, whose next token depends on more than earlier tokens.
        """
        ...
