"""How the pieces of a vocabulary spell bytes. Used by `Tokenizer`; never cuts text into pieces.

Two spellings exist. Byte-level vocabularies (GPT-2, https://github.com/openai/gpt-2) write every byte as one printable
character. SentencePiece vocabularies (https://github.com/google/sentencepiece) write text as it is, a space
as U+2581, and bytes that no piece covers as `<0xAB>`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

SPACE_MARK = "\u2581"


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 stands for itself, the other 68 bytes take U+0100 onwards in order."""
    alphabet: dict[str, int] = {}
    num_moved = 0
    for byte in range(256):
        is_printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        alphabet[chr(byte if is_printable else 0x100 + num_moved)] = byte
        num_moved += not is_printable
    return alphabet


def byte_of_piece(piece: str) -> int | None:
    """The byte that a SentencePiece byte piece stands for, `<0xAB>` -> 0xAB; None if it is not one."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def piece_decoder(spelling: Spelling) -> Callable[[str], bytes]:
    """A function from a piece to the bytes that it spells."""
    if spelling is Spelling.SENTENCEPIECE:
        return _sentencepiece_bytes
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


class ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled on first use: 49,152 entries at once would cost start-up time that few replies need.

    Threads may share it: a race computes the same entry twice.
    """

    __slots__ = ("_lookup",)

    def __init__(self, lookup: Callable[[int], bytes]) -> None:
        super().__init__()
        self._lookup = lookup

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._lookup(token_id)
        return value


class TextTable(dict[int, str | None]):
    """Token id -> its text, if that is text whatever comes before and after; None for one with part of a character."""

    __slots__ = ("_bytes",)

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._bytes = table

    def __missing__(self, token_id: int) -> str | None:
        value = self[token_id] = _text_or_none(self._bytes[token_id])
        return value


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
