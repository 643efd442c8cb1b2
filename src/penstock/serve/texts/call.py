"""A `TextsCall`: texts of one client that a model shall turn into numbers. A face makes it of a body, `run` answers it.

Every face (OpenAI's, Jina's and Cohere's, vLLM's, text-embeddings-inference's) is a translation to and from this one call. The
call knows neither JSON nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.calls.call import Terms
from penstock.deploy.running import RunningModel
from penstock.serve.shapes import TokenUsage
from penstock.types.encoder import TextTokens, TruncationSide

MAX_TEXTS = 2048
"""Texts of one call, as at OpenAI."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text as ids of its tokens, which are taken as they are: special tokens are among them, or there are none."""

    token_ids: tuple[int, ...]


TextInput = str | tuple[str, str] | TokenIds
"""A text, a pair of texts, or token ids."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """A text that is too long loses tokens at one side."""

    max_tokens: int
    """Tokens that are kept, special ones included; never more than the model takes."""
    side: TruncationSide = "right"
    """The side that is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsCall:
    running: RunningModel
    """The model that answers, an encoder."""
    terms: Terms
    texts: Sequence[TextInput]
    """1 to `MAX_TEXTS`, prompts included. None is empty."""
    name_of: Callable[[int], str]
    """The place of a text in the body, for messages; of a pair, that of its second text."""
    first_name_of: Callable[[int], str] | None = None
    """The place of a pair's first text, if it has one of its own."""
    truncation: Truncation | None
    """None: a text that is too long is refused."""
    claim: bytes
    """The same for a call that is sent again."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or a pair of texts, as the model reads it. It is found by its name: hashing all its tokens takes longer."""

    name: bytes
    """Equal for equal tokens alone."""
    tokens: TextTokens = field(compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.token_ids)


@dataclass(frozen=True, slots=True)
class TextResult:
    """The numbers of one text."""

    states: bytes
    """float32 in the machine's order of bytes: [width], or [num_tokens, width]."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextResults:
    results: list[TextResult]
    """In the order of the texts."""
    server_timing: str
    """The times of the text that ended last, as `Server-Timing` has them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts, each as often as it was sent."""
        return sum([result.num_tokens for result in self.results])

    @property
    def usage(self) -> TokenUsage:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}

    @property
    def num_bytes(self) -> int:
        return sum([len(result.states) for result in self.results])
