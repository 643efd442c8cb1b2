"""Decodes blocks of GGML's types IQ1 to IQ3, whose codes are indices into a codebook. Nothing is rounded.

A codebook's entry is one number of 32 or 64 bits with its 4 or 8 integers. The entries come from codebooks.h, which the native
backend also uses. Layouts: `ggml-common.h` and `ggml-quants.c` of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
Parts = tuple[I8, F32, F32 | None]  # integers, the scale of each group, and its offset or None; in any shape

_SOURCE = Path(__file__).with_name("codebooks.h")
_OF_IQ2 = (8, 25, 43)
_OF_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_OF_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_OF_IQ1 = (-8, 0, 8)  # in eighths, so that the shift by an eighth gives integers

_BIT_FIELDS = np.array([0, 7, 14, 21], np.uint32)  # first bits of four fields of 7 bits
_NIBBLES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)
_TRIPLES = np.array([0, 3, 6, 9], np.uint16)


@cache
def _book(name: str, sizes: tuple[int, ...]) -> NDArray[Any]:
    """`sizes` are the values of a column's bits."""
    found = re.search(rf"\b{name}\[\d+\] = {{([^}}]*)}}", _SOURCE.read_text())
    assert found is not None
    packed = np.array([int(number) for number in found[1].split(",")[:-1]], np.uint16)
    bits, columns = (2, 8) if len(sizes) == 3 else (3, 4)
    shifts = np.arange(columns, dtype=np.uint16) * np.uint16(bits)
    entries = np.array(sizes, np.int8)[packed[:, None] >> shifts & ((1 << bits) - 1)]
    numbers: NDArray[Any] = entries.view(np.uint64 if columns == 8 else np.uint32)[:, 0]
    return numbers


@cache
def _signs() -> NDArray[np.uint64]:
    """Return eight factors, 1 or -1, for every byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    factors: NDArray[np.uint64] = (1 - 2 * bits.astype(np.int8)).view(np.uint64)[:, 0]
    return factors


@cache
def _even_signs() -> NDArray[np.uint64]:
    """The same for 7 bits. The eighth sign makes the number of minus signs even."""
    codes = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(codes[:, None], axis=1).sum(axis=1, dtype=np.uint8) & 1
    factors: NDArray[np.uint64] = _signs()[codes | parity << 7]
    return factors


def _entries(book: NDArray[Any], codes: NDArray[Any]) -> I8:
    """[num_blocks, num_codes] -> [num_blocks, columns]"""
    return book.take(codes.reshape(len(codes), -1)).view(np.int8)


def _f16(raw: U8) -> F32:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _fields(packed: NDArray[Any], shifts: NDArray[Any], mask: int) -> NDArray[Any]:
    """Return the bits of each number at each shift. [num_blocks, n] -> [num_blocks, n * shifts]"""
    found: NDArray[Any] = packed[..., None] >> shifts & packed.dtype.type(mask)
    return found.reshape(len(packed), -1)


def _words(raw: U8, dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(raw).view(dtype)


def _wide(low: U8, high: NDArray[Any]) -> NDArray[Any]:
    return low | high.astype(np.uint16) << 8


def _halved(blocks_scale: F32, fields: NDArray[Any], factor: float) -> F32:
    """Return d (1/2 + field) factor, multiplied in this order."""
    return blocks_scale * (np.float32(0.5) + fields.astype(np.float32)) * np.float32(factor)


def iq2_xxs(blocks: U8) -> Parts:
    words = _words(blocks[:, 2:], np.uint32).reshape(len(blocks), 8, 2)
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs = _entries(_even_signs(), _fields(words[..., 1], _BIT_FIELDS, 127))
    return _entries(_book("kIq2Xxs", _OF_IQ2), codes) * signs, _halved(_f16(blocks[:, :2]), words[..., 1] >> 28, 0.25), None


def iq2_xs(blocks: U8) -> Parts:
    codes = _words(blocks[:, 2:66], np.uint16)
    integers = _entries(_book("kIq2Xs", _OF_IQ2), codes & 511) * _entries(_even_signs(), codes >> 9)
    return integers, _halved(_f16(blocks[:, :2]), _fields(blocks[:, 66:], _NIBBLES, 15), 0.25), None


def iq2_s(blocks: U8) -> Parts:
    codes = _wide(blocks[:, 2:34], _fields(blocks[:, 66:74], _PAIRS, 3))
    integers = _entries(_book("kIq2S", _OF_IQ2), codes) * _entries(_signs(), blocks[:, 34:66])
    return integers, _halved(_f16(blocks[:, :2]), _fields(blocks[:, 74:], _NIBBLES, 15), 0.25), None


def iq3_xxs(blocks: U8) -> Parts:
    words = _words(blocks[:, 66:], np.uint32)
    signs = _entries(_even_signs(), _fields(words, _BIT_FIELDS, 127))
    integers = _entries(_book("kIq3Xxs", _OF_IQ3_XXS), blocks[:, 2:66]) * signs
    return integers, _halved(_f16(blocks[:, :2]), words >> 28, 0.5), None


def iq3_s(blocks: U8) -> Parts:
    codes = _wide(blocks[:, 2:66], _fields(blocks[:, 66:74], _BITS, 1))
    integers = _entries(_book("kIq3S", _OF_IQ3_S), codes) * _entries(_signs(), blocks[:, 74:106])
    return integers, _f16(blocks[:, :2]) * (1 + 2 * _fields(blocks[:, 106:], _NIBBLES, 15)).astype(np.float32), None


def _shifted(codes: NDArray[Any], is_down: NDArray[np.bool_]) -> I8:
    """Look up codes of IQ1 and shift each run of columns by an eighth. `is_down` is [num_blocks, runs]."""
    entries = _entries(_book("kIq1", _OF_IQ1), codes)
    shifts = np.where(is_down, np.int8(-1), np.int8(1))
    return (entries.reshape(*shifts.shape, -1) + shifts[..., None]).reshape(entries.shape)


def _eighths(blocks_scale: F32, fields: NDArray[Any]) -> F32:
    """Return d (2 field + 1) / 8."""
    return blocks_scale * (2 * fields + 1).astype(np.float32) * np.float32(0.125)


def iq1_s(blocks: U8) -> Parts:
    words = _words(blocks[:, 34:], np.uint16)
    integers = _shifted(_wide(blocks[:, 2:34], _fields(words, _TRIPLES, 7)), words >= 0x8000)
    return integers, _eighths(_f16(blocks[:, :2]), words >> 12 & 7), None


def iq1_m(blocks: U8) -> Parts:
    """The scale of the block is in the highest bits of four words."""
    upper, words = _fields(blocks[:, 32:48], _NIBBLES, 15), _words(blocks[:, 48:], np.uint16)
    parts = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    scale = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    integers = _shifted(_wide(blocks[:, :32], upper & 7), upper >= 8)
    return integers, _eighths(scale, _fields(words, _TRIPLES, 7)), None
