"""Three sets of real texts for encoders, made of the ShareGPT conversations. For `encoder_peers.py` and others; sends nothing.

- `short`: 1,000 sentences of 16 to 32 tokens, of every eighth turn.
- `mixed`: 1,000 turns of 10 to 510 tokens, prompts and answers as they are.
- `long`: 200 turns, each cut behind its 510th token.

Tokens are those of the model's tokenizer, without the two that it adds at the ends. A set has evenly spaced ones of all
different texts of such a length, in file order. The same trace and tokenizer give the same sets, whose digests tell so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from workloads import DEFAULT_TRACES, SHAREGPT_FILE, TRACES_HELP

from penstock.lab.traces import read_conversations

SHORT_TOKENS = (16, 32)
MIXED_TOKENS = (10, 510)
LONG_TOKENS = 510
NUM_ENDS = 2
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True, slots=True)
class TextSet:
    name: str
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of each text, with both ends."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.name}: {len(self.texts)} texts of {sum(self.lengths) / len(self.texts):.0f} tokens ({self.digest})"


Counted = tuple[str, int]
"""A text, and its tokens without the ends."""


class Turns:
    """The turns of the conversations, in file order."""

    def __init__(self, trace: Path, tokenizer: Path) -> None:
        """Raises SystemExit if the trace is missing, with how to get it."""
        if not trace.is_file():
            raise SystemExit(f"{trace} is missing: name its folder with --traces. {TRACES_HELP}")
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._texts = [text for pairs in read_conversations(trace) for pair in pairs for text in pair]
        self._encoded = self._tokenizer.encode_batch(self._texts, add_special_tokens=False)

    def short(self) -> Iterator[Counted]:
        return self._between([part.strip() for text in self._texts[::8] for part in _SENTENCE_END.split(text)], *SHORT_TOKENS)

    def mixed(self) -> Iterator[Counted]:
        least, most = MIXED_TOKENS
        lengths = map(len, self._encoded)
        return ((text, num) for text, num in zip(self._texts, lengths, strict=True) if least <= num <= most)

    def long(self) -> Iterator[Counted]:
        """A text whose beginning has other tokens once cut is left out."""
        both = zip(self._texts, self._encoded, strict=True)
        cut = [text[: one.offsets[LONG_TOKENS - 1][1]] for text, one in both if len(one) >= LONG_TOKENS]
        return self._between(cut, LONG_TOKENS, LONG_TOKENS)

    def _between(self, texts: list[str], least: int, most: int) -> Iterator[Counted]:
        lengths = map(len, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return ((text, num) for text, num in zip(texts, lengths, strict=True) if least <= num <= most)


SETS: dict[str, tuple[Callable[[Turns], Iterator[Counted]], int]] = {
    "short": (Turns.short, 1000),
    "mixed": (Turns.mixed, 1000),
    "long": (Turns.long, 200),
}
"""Name -> the texts to choose from, and how many are chosen."""


def read_sets(tokenizer: Path, traces: Path = DEFAULT_TRACES, *, share: int = 1) -> dict[str, TextSet]:
    """The sets by name; with `share` only every so many-th text. Raises SystemExit without the trace or enough texts in it."""
    turns = Turns(traces / SHAREGPT_FILE, tokenizer)
    return {name: _chosen(name, dict(make(turns)), count, share) for name, (make, count) in SETS.items()}


def _chosen(name: str, found: dict[str, int], count: int, share: int) -> TextSet:
    if len(found) < count:
        raise SystemExit(f"the trace has only {len(found)} of {count} {name} texts")
    texts = list(found)
    chosen = [texts[k * len(texts) // count] for k in range(0, count, share)]
    return TextSet(name, tuple(chosen), tuple(found[text] + NUM_ENDS for text in chosen))
