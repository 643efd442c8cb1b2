"""The seam: who chooses the next tokens of a request. Contracts only; the scheduler calls them when it commits a step.

As a rule nobody does: the executor samples a token for each row, and the request gets it. The requests of a group
(`groups.py`) are the exception: a chooser is told what the executor computed for each of them, and chooses for all at once.
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
