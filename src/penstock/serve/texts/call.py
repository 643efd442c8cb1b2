"""A `TextsCall`: the input texts of one request to an encoder. APIs make it from their bodies, and `desk.run` answers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.calls.call import Terms
from penstock.deploy.running import RunningModel
from penstock.serve.shapes import TokenUsage
from penstock.types.encoder import TextTokens, TruncationSide

MAX_TEXTS = 2048
"""Most texts in one call: OpenAI's limit."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An input text given as token ids. No special tokens are added."""

    token_ids: tuple[int, ...]


TextInput = str | tuple[str, str] | TokenIds
"""A text, a pair of texts, or token ids."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How an input text that is too long is cut."""

    max_tokens: int
    """Tokens to keep, including special tokens, at most the model's context."""
    side: TruncationSide = "right"
    """The side that is cut off. On the left, a prompt of the model at the beginning of the text is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsCall:
    running: RunningModel
    """The model that answers, an encoder."""
    terms: Terms
    texts: Sequence[TextInput]
    """1 to `MAX_TEXTS` texts, with the model's prompt before each. No text is empty."""
    name_of: Callable[[int], str]
    """Returns the field of text i in the body, for error messages. For a pair, the field of its second text."""
    first_name_of: Callable[[int], str] | None = None
    """Returns the field of the first text of pair i, if it differs from the second's."""
    has_vectors: bool = True
    """The answer has all numbers of the results, not a score for each pair."""
    truncation: Truncation | None
    """None means that texts beyond the context are refused."""
    claim: bytes
    """Hash of the request. Admission recognises a retry by it."""


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of an input text or of a pair of texts. Compared by `name`, which is faster than hashing all tokens."""

    name: bytes
    """A hash of the tokens: texts with equal names have equal tokens."""
    tokens: TextTokens = field(compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.token_ids)


@dataclass(frozen=True, slots=True)
class TextResult:
    """The encoder's output for one input text."""

    states: bytes
    """float32 in the machine's order of bytes: [width], or [num_tokens, width]."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextResults:
    results: list[TextResult]
    """In the order of the texts."""
    server_timing: str
    """Value of the header `Server-Timing`: the times of the text that ended last."""
    first_ns: int
    """When the first of them was there, by the server's clock."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all texts. A text that was sent twice counts twice."""
        return sum([result.num_tokens for result in self.results])

    @property
    def usage(self) -> TokenUsage:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}

    @property
    def num_bytes(self) -> int:
        return sum([len(result.states) for result in self.results])
