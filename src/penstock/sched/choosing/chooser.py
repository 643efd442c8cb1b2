"""The seam for choosing the next tokens of a request. Contracts only; the scheduler calls them.

As a rule nothing is behind it: the executor samples one token for each row, and the request gets it. There are two exceptions:

- The requests of a group (`groups.py`) are given their tokens by a `Chooser`: it is told what the executor computed for each of
  them, and chooses for all at once.
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
    """Its last token is a stop token; else it has reached its limit."""


class Chooser(Protocol):
    """Chooses the tokens of requests in groups, in place of the executor's samples."""

    def take(self, request: Request, result: StepResult) -> None:
        """A row of the request that samples was computed, and its blocks are published."""
        ...

    def choose(self, now_ns: int) -> Iterator[Answer]:
        """All rows of the step were told: give each request of the groups that have all they need its next token.

        Yields the answers of the groups that have ended. Their requests still run, and are ended before the next is asked for.
        """
        ...


class Speculation(Protocol):
    """Says how many tokens of a row the executor may sample in one step.

    The executor guesses tokens, checks all guesses in one pass over the model, and keeps those that it would have sampled one
    at a time. So answers are the same as without, in fewer steps. No step is planned ahead meanwhile, since the number of
    tokens that a row gets is not known before.
    """

    def max_samples(self, request: Request) -> int:
        """Tokens that a request which decodes may get in its next step, at least 1.

        It may get fewer if the step's tokens, the pool or the request's limit leave less room. Asked neither of requests in a
        group nor of answers that follow a grammar, whose next token depends on more than the tokens before it.
        """
        ...
