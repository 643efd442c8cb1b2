"""The vocabulary of a tokenizer: its `tokenizers` object, and how its pieces spell bytes.

There are three spellings. Byte-level vocabularies (GPT-2, https://github.com/openai/gpt-2) write every byte as one printable
character. SentencePiece vocabularies (https://github.com/google/sentencepiece) write text, with U+2581 for a space and `<0xAB>`
for bytes without a piece. WordPiece's write `##` before a piece that continues a word.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import tokenizers
from tokenizers import processors

SPACE_MARK = "\u2581"
_GROUPS = r"(?=(?:\d{3})++(?!\d))"
LINEAR = {
    r"(?=(\d{3})+(?!\d))": rf"(?<!\d)(?:\d{{1,2}}\K{_GROUPS}|\d{{3}}{_GROUPS}|(?=\d{{3}}(?!\d)))|(?<=\d)\G\d{{3}}(?=\d)",
    r"\d{1,3}(?=(?:\d{3})*\b)": r"(?<!\d)\d{1,3}(?=(?:\d{3})*+\b)|(?<=\d)\G\d{3}",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))": r"(?<!\p{N})\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))|(?<=\p{N})\G\p{N}{3}",
    r"\s+$": r"(?<!\s)\s+$",
}
"""Regexes of models that take quadratic time for a run of digits or spaces -> others that cut a text at the same places.

The digits before the first group of three are found once for each run (`(?<!`), and each group follows the last (`\\G`).
"""
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
MAX_TEXTS = 4096
"""Most tokens cached as text: half a megabyte, which covers six of seven tokens in ShareGPT's replies."""


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"
    WORDPIECE = "wordpiece"


def byte_level_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies. Printable Latin-1 stands for itself, U+0100 and up for the rest."""
    alphabet: dict[str, int] = {}
    num_moved = 0
    for byte in range(256):
        is_printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        alphabet[chr(byte if is_printable else 0x100 + num_moved)] = byte
        num_moved += not is_printable
    return alphabet


def byte_of_piece(piece: str) -> int | None:
    """Return 0xAB for the SentencePiece piece `<0xAB>`, or None for any other piece."""
    found = _BYTE_PIECE.fullmatch(piece)
    return None if found is None else int(found[1], 16)


def piece_decoder(spelling: Spelling) -> Callable[[str], bytes]:
    """Return a function from a piece, as the file spells it, to its bytes."""
    if spelling is Spelling.SENTENCEPIECE:
        return _sentencepiece_bytes
    if spelling is Spelling.WORDPIECE:
        return lambda piece: (piece[2:] if piece.startswith("##") else f" {piece}").encode()
    alphabet = byte_level_alphabet()

    def byte_level_bytes(piece: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in piece])
        except KeyError:  # not written in the alphabet: it can only be meant literally
            return piece.encode()

    return byte_level_bytes


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = byte_of_piece(piece)
    return piece.replace(SPACE_MARK, " ").encode() if byte is None else bytes((byte,))


def put_ends(
    encoder: tokenizers.Tokenizer,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    between: Sequence[str],
) -> None:
    """Set the special tokens that the encoder puts around a text, or around and between a pair.

    `between` names the tokens between the texts of a pair. The second text has type 1. The template uses aliases for tokens,
    since their text could be template syntax.
    """
    ids = {name: token_id for name, token_id in (("bos", bos_token_id), ("eos", eos_token_id)) if token_id is not None}
    texts = ("$A", "$B:1")

    def template(*names: str) -> list[str]:
        return [name for name in names if name in texts or name.removesuffix(":1") in ids]

    encoder.post_processor = processors.TemplateProcessing(
        single=template("bos", "$A", "eos"),
        pair=template("bos", "$A", *between, "$B:1", "eos:1"),
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [encoder.id_to_token(token_id) or name]} for name, token_id in ids.items()
        ],
    )


class Ends(NamedTuple):
    """The special tokens that an encoder puts around a text, or around and between a pair of texts."""

    parts: tuple[tuple[int, ...], ...]
    """Token ids before the first text, and after each."""
    has_types: bool
    """The second text, and everything after it, has type 1."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))


def find_ends(encoder: tokenizers.Tokenizer, num_texts: int) -> Ends | None:
    """Return the special tokens that an encoder puts around one text (or a pair), or None if `Ends` can't describe them."""
    encoding = encoder.encode("a", "a" if num_texts == 2 else None)
    texts, types = encoding.sequence_ids, encoding.type_ids
    found = [at for at in range(len(texts)) if texts[at] is not None]
    if [texts[at] for at in found] != sorted([texts[at] or 0 for at in found]) or len({*texts} - {None}) != num_texts:
        return None
    parts: list[tuple[int, ...]] = []
    begin = 0
    for text in range(num_texts):
        at = texts.index(text)
        parts.append(tuple(encoding.ids[begin:at]))
        begin = at + texts.count(text)
        if None in texts[at:begin]:  # the text appears twice
            return None
    second_at = texts.index(1) if num_texts == 2 else len(types)
    typed = [0] * second_at + [1] * (len(types) - second_at)
    if types not in (typed, [0] * len(types)):
        return None
    return Ends((*parts, tuple(encoding.ids[begin:])), has_types=any(types))


class ByteTable:
    """A cache from token id to the token's bytes, filled on first use. Thread-safe.

    The bytes are packed into one array, 15 bytes per token. Objects in a dict would take 200, and since rare tokens keep
    coming, a server's memory would grow for hours.
    """

    __slots__ = ("_data", "_ends", "_hidden_ids", "_lock", "_lookup", "_starts")

    def __init__(self, lookup: Callable[[int], bytes], num_tokens: int) -> None:
        """Ids outside [0, `num_tokens`) are not cached."""
        self._lookup = lookup
        self._hidden_ids: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._data = bytearray(1)  # no token ends at 0
        self._starts = array("I", bytes(array("I").itemsize * num_tokens))
        self._ends = array("I", self._starts)
        """End of each token in `_data`; 0 if not cached."""

    def hiding(self, token_ids: frozenset[int]) -> ByteTable:
        """Return a view of this table in which `token_ids` have no bytes."""
        other = copy(self)
        other._hidden_ids = token_ids
        return other

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._hidden_ids:
            return b""
        if not 0 <= token_id < len(self._ends):
            return self._lookup(token_id)
        end = self._ends[token_id]
        return bytes(self._data[self._starts[token_id] : end]) if end else self._learn(token_id)

    def _learn(self, token_id: int) -> bytes:
        value = self._lookup(token_id)
        with self._lock:
            if not self._ends[token_id]:
                self._starts[token_id] = len(self._data)
                self._data += value
                self._ends[token_id] = len(self._data)
        return value


class TextTable(dict[int, str | None]):
    """A cache of `MAX_TEXTS` recent tokens: token id -> its text, or None if its bytes are incomplete characters."""

    __slots__ = ("_bytes",)

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._bytes = table

    def __missing__(self, token_id: int) -> str | None:
        value = _text_or_none(self._bytes[token_id])
        if len(self) >= MAX_TEXTS:
            self.clear()
        self[token_id] = value
        return value


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


MAX_EXPANDED_BYTES = 8 << 20
"""Most bytes of one text before it is tokenised: twice the longest text of a request."""


class Expansion(NamedTuple):
    """How much longer normalisation can make a text: n bytes become at most `n * factor + extra_bytes`."""

    factor: float
    extra_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    encoder: tokenizers.Tokenizer
    vocab_size: int
    """Number of ids, including unused ones."""
    piece: Callable[[int], str | None]
    """Returns the piece of an id, or None: models may have more ids than tokens."""
    spelling: Spelling
    literal_ids: frozenset[int]
    """Added tokens: their piece is their text, in any spelling."""
    special_ids: frozenset[int]
    """Control tokens, which are not text."""
    silent_ids: frozenset[int]
    """Unused tokens that pad the vocabulary. They have no text."""
    starts_with_space: bool
    """Encoding puts a space before a text; decoding removes it."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unknown_token_id: int | None
    padding_token_id: int | None
    expansion: Expansion | None = None
    """How far the file's own steps can expand a text. None: to twice its bytes, as in byte-level vocabularies."""
