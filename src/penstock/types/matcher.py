"""What says, token by token, how an answer may go on: the state of a grammar within one answer. Contract only.

Made by `text.grammar` for each request that asks for structured output, and brought along by it; asked by the engine thread
alone. The tokens that a mask leaves out can't be sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Of one request. Both methods raise `GrammarFailure` once the grammar can't be followed any further; `mask` only when it
    is called for the first time after an `accept`.
    """

    def accept(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer, as they were sampled."""
        ...

    def mask(self) -> bytes:
        """What may be sampled next: bit i % 8 of byte i // 8 is token i; a whole number of 32-bit words, little-endian.

        Never without any token: an answer that is complete may be followed by the model's end tokens. [ceil(vocab / 32) * 4]
        """
        ...
