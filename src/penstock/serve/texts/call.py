"""A `TextsCall`: the texts of one request for an encoder. An API makes it of its body, and `desk.run` answers it. It knows
neither JSON nor HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.calls.call import Terms
from penstock.deploy.running import RunningModel
from penstock.serve.shapes import TokenUsage
from penstock.types.encoder import TextTokens, TruncationSide

MAX_TEXTS = 2048
"""OpenAI's limit of texts in one call."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text as token ids. They are used as they are, with the special tokens that they have."""

    token_ids: tuple[int, ...]


TextInput = str | tuple[str, str] | TokenIds
"""A text, a pair of texts, or token ids."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a text that is too long is cut."""

    max_tokens: int
    """Tokens to keep, including special ones. Never more than the model takes."""
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
    """Where a text stands in the body, for messages. For a pair, where its second text stands."""
    first_name_of: Callable[[int], str] | None = None
    """Where a pair's first text stands, if it has a place of its own."""
    truncation: Truncation | None
    """None refuses a text that is too long."""
    claim: bytes
    """The same for a call that is sent again."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text or a pair of texts as tokens. It is compared by its name, which is faster than hashing all tokens."""

    name: bytes
    """Two texts have the same name only if their tokens are equal."""
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
