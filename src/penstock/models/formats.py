"""The formats of weights in files, and how to decode them.

The quantised ones are GGML's. A row is divided into blocks of 32 to 256 columns; groups of 32 or 16 columns share a scale.
`ggml-common.h` and `ggml-quants.c` of https://github.com/ggml-org/ggml have the layouts of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
Parts = tuple[I8, F32, F32 | None]  # integers, the scale of each group, and its offset or None; in any shape
_PAIRS = np.array([0, 2, 4, 6], np.uint8)


class WeightFormat(StrEnum):
    """Formats of weights that every backend reads, possibly rounding floats to bf16. Loaders convert all others to these."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"  # uint16 bit patterns
    F8_E4M3 = "f8_e4m3"  # uint8: `E4M3_VALUES` times a scale (`BlockScales`)
    Q4_0 = "q4_0"  # w = d * (q - 8)
    Q4_1 = "q4_1"  # w = d * q + m
    Q5_0 = "q5_0"  # w = d * (q - 16)
    Q5_1 = "q5_1"  # w = d * q + m
    Q8_0 = "q8_0"  # w = d * q
    Q2_K = "q2_k"  # w = d * s * q - e * t
    Q3_K = "q3_k"  # w = d * (s - 32) * (q - 4)
    Q4_K = "q4_k"  # w = d * s * q - e * t
    Q5_K = "q5_k"  # as Q4_K, with a fifth bit
    Q6_K = "q6_k"  # w = d * s * (q - 32)
    IQ4_NL = "iq4_nl"  # w = d * IQ4_VALUES[q]
    IQ4_XS = "iq4_xs"  # w = d * (s - 32) * IQ4_VALUES[q]
    Q1_0 = "q1_0"  # w = d or -d
    Q2_0 = "q2_0"  # w = d * (q - 1)
    TQ1_0 = "tq1_0"  # w = d * (q - 1), five q in a byte
    TQ2_0 = "tq2_0"  # w = d * (q - 1)
    IQ1_S = "iq1_s"  # w = d * (2 s + 1) * (c +- 1/8), c = -1, 0 or 1
    IQ1_M = "iq1_m"  # as IQ1_S, with s for 16 columns
    IQ2_XXS = "iq2_xxs"  # w = d * (1/2 + s) / 4 * c, c = +-8, 25 or 43
    IQ2_XS = "iq2_xs"  # as IQ2_XXS, with s for 16 columns
    IQ2_S = "iq2_s"  # as IQ2_XS, with a larger codebook
    IQ3_XXS = "iq3_xxs"  # w = d * (1/2 + s) / 2 * c, abs(c) from 4 to 62
    IQ3_S = "iq3_s"  # w = d * (2 s + 1) * c, c odd, abs(c) <= 15
    MXFP4 = "mxfp4"  # w = 2^(e - 128) * E2M1_TWICE[q]
    NVFP4 = "nvfp4"  # w = s / 2 * E2M1_TWICE[q], s in E4M3 without a sign


E4M3_VALUES = tuple(
    (-1 if code & 128 else 1)
    * (math.nan if code & 127 == 127 else math.ldexp((code & 7) + (8 if code & 120 else 0), max(1, code >> 3 & 15) - 10))
    for code in range(256)
)
"""Numbers by code. Source: FP8 Formats for Deep Learning, arXiv 2209.05433."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of four bits. Source: OCP Microscaling Formats (MX) 1.0."""
_HALF_UE4M3 = tuple(
    0.0 if code == 127 else math.ldexp((code & 7) + (8 if code & 120 else 0), max(1, code >> 3 & 15) - 11)
    for code in range(256)
)
"""Halves of the scales of NVFP4 by code, as GGML reads them."""


def block(fmt: WeightFormat) -> tuple[int, int]:
    """Return (columns, bytes) of a block of this format. For floats a block is one number."""
    return BLOCKS.get(fmt) or (1, {WeightFormat.F32: 4, WeightFormat.F8_E4M3: 1}.get(fmt, 2))


def stored_bytes(fmt: WeightFormat, num_rows: int, num_cols: int) -> int:
    cols, num_bytes = block(fmt)
    return num_rows * (num_cols // cols) * num_bytes


class Floats(StrEnum):
    """The format in which a backend keeps matrices that a file stores as floats."""

    BF16 = "bf16"  # all become bf16, as in the native backend
    AS_STORED = "as stored"  # fp8 stays; all others become bf16
    FP8 = "fp8"  # all become fp8, except embeddings and the output matrix, which stay as stored


def held_bytes(
    fmt: WeightFormat, num_rows: int, num_cols: int, floats: Floats = Floats.BF16, *, has_blocks: bool = False
) -> int:
    """Return the bytes that a matrix takes in a backend's memory. See `PackedMatrix` in native/kernels/kernels.h."""
    if fmt is WeightFormat.F32 and num_rows == 1:
        return stored_bytes(fmt, num_rows, num_cols)
    rows = padded(num_rows, 16)
    if fmt not in BLOCKS:
        if floats is Floats.FP8 or (floats is Floats.AS_STORED and fmt is WeightFormat.F8_E4M3):
            return rows * (num_cols + 4 + (padded(num_cols, 32) // 32 * 2 if has_blocks else 0))
        return rows * padded(num_cols, 2) * 2
    kind = _QUANTISED[fmt]
    bits = 4 if kind.has_table and floats is Floats.BF16 else kind.held_bits
    groups = padded(num_cols // 32, 2 if floats is Floats.BF16 else 1)
    offsets = rows * padded(groups, 2) * 2 if kind.has_held_offsets else 0
    return rows * groups * (32 * bits // 8 + 2) + offsets


def held_table_bytes(fmt: WeightFormat, num_rows: int, num_cols: int) -> int:
    """Return the bytes that an embedding takes in the native backend if rows stay in the file: 0, but fp8 becomes float32."""
    return stored_bytes(WeightFormat.F32, num_rows, num_cols) if fmt is WeightFormat.F8_E4M3 else 0


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True, eq=False)
class GroupedIntegers:
    """Decoded rows of a quantised matrix. A value is scale * integer (+ offset); a group of columns shares a scale."""

    integers: I8  # [num_rows, num_cols]
    scales: F32  # [num_rows, num_groups]
    offsets: F32 | None  # [num_rows, num_groups]

    @property
    def group(self) -> int:
        return int(self.integers.shape[1]) // int(self.scales.shape[1])


def grouped_integers(data: NDArray[np.generic], fmt: WeightFormat, num_cols: int) -> GroupedIntegers:
    """Decode raw rows of a quantised format. Raises KeyError for a format of floats."""
    kind = _QUANTISED[fmt]
    blocks = np.ascontiguousarray(data, dtype=np.uint8).reshape(-1, kind.num_bytes)
    with np.errstate(all="ignore"):  # infinite scales of a corrupt file
        integers, scales, offsets = kind.parts(blocks)
    rows = len(data)
    return GroupedIntegers(
        integers.reshape(rows, num_cols), scales.reshape(rows, -1), None if offsets is None else offsets.reshape(rows, -1)
    )


def dequantize(data: NDArray[np.generic], fmt: WeightFormat, num_cols: int) -> F32:
    """Decode raw rows of any format. Scales of F8_E4M3 are not applied. float32 [num_rows, num_cols]"""
    if fmt in (WeightFormat.F32, WeightFormat.F16):
        return np.ascontiguousarray(data, dtype=np.float32)
    if fmt is WeightFormat.BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if fmt is WeightFormat.F8_E4M3:
        values: F32 = np.array(E4M3_VALUES, np.float32)[data]
        return values
    parts = grouped_integers(data, fmt, num_cols)
    values = parts.integers.reshape(*parts.scales.shape, parts.group).astype(np.float32)
    with np.errstate(all="ignore"):
        values *= parts.scales[..., None]
        if parts.offsets is not None:
            values += parts.offsets[..., None]
    return values.reshape(len(data), num_cols)


def _f16(blocks: U8, at: int) -> F32:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _halves(packed: U8) -> U8:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _bits(packed: U8) -> U8:
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q4_0(blocks: U8) -> Parts:
    return _halves(blocks[:, 2:]).view(np.int8) - np.int8(8), _f16(blocks, 0), None


def _q4_1(blocks: U8) -> Parts:
    return _halves(blocks[:, 4:]).view(np.int8), _f16(blocks, 0), _f16(blocks, 2)


def _q5_0(blocks: U8) -> Parts:
    q = _halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return q.view(np.int8) - np.int8(16), _f16(blocks, 0), None


def _q5_1(blocks: U8) -> Parts:
    q = _halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return q.view(np.int8), _f16(blocks, 0), _f16(blocks, 2)


def _q8_0(blocks: U8) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _f16(blocks, 0), None


def _affine_k(blocks: U8, q: U8) -> Parts:
    a, b, c = (blocks[:, at : at + 4] for at in (4, 8, 12))
    s = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1).astype(np.float32)
    t = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1).astype(np.float32)
    return q.view(np.int8), _f16(blocks, 0) * s, -(_f16(blocks, 2) * t)


def _nibbles_k(packed: U8) -> U8:
    return _halves(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _pairs_k(packed: U8) -> U8:
    shifts = _PAIRS[:, None]
    pairs: U8 = packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return pairs.reshape(-1, 16, 16)


def _q2_k(blocks: U8) -> Parts:
    scale = _f16(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    offset = _f16(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _pairs_k(blocks[:, 16:80]).view(np.int8), scale, -offset


def _q3_k(blocks: U8) -> Parts:
    third = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little").reshape(-1, 16, 16)
    upper = blocks[:, 104:108].reshape(-1, 1, 4) >> _PAIRS[:, None] & 3
    s = (_halves(blocks[:, 96:104]) | upper.reshape(-1, 16) << 4).astype(np.float32) - 32
    q = (_pairs_k(blocks[:, 32:96]) | third << 2).astype(np.int8) - np.int8(4)
    return q, _f16(blocks, 108) * s, None


def _q4_k(blocks: U8) -> Parts:
    return _affine_k(blocks, _nibbles_k(blocks[:, 16:]))


def _q5_k(blocks: U8) -> Parts:
    fifth = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")
    return _affine_k(blocks, (_nibbles_k(blocks[:, 48:]) | fifth << 4).astype(np.uint8))


def _q6_k(blocks: U8) -> Parts:
    nibbles = blocks[:, :128].reshape(-1, 2, 2, 32)  # [block, half, 32-column group modulo 2, column]
    lower = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS[:, None] & 3
    q = (lower | upper << 4).astype(np.int8) - np.int8(32)
    scale = _f16(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return q, scale, None


def _iq4_nl(blocks: U8) -> Parts:
    return np.array(IQ4_VALUES, np.int8)[_halves(blocks[:, 2:])], _f16(blocks, 0), None


def _iq4_xs(blocks: U8) -> Parts:
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    upper = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> shifts & 3
    lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scale = _f16(blocks, 0) * ((lower | upper << 4).astype(np.float32) - 32)
    return np.array(IQ4_VALUES, np.int8)[_halves(blocks[:, 8:].reshape(-1, 8, 16))], scale, None


def _in_groups(scale: F32, num: int) -> F32:
    return np.repeat(scale, num, axis=1)


def _q1_0(blocks: U8) -> Parts:
    return _bits(blocks[:, 2:]).view(np.int8) * np.int8(2) - np.int8(1), _in_groups(_f16(blocks, 0), 4), None


def _q2_0(blocks: U8) -> Parts:
    q = blocks[:, 2:, None] >> _PAIRS & 3
    return q.view(np.int8) - np.int8(1), _in_groups(_f16(blocks, 0), 2), None


def _digits(packed: U8, num: int) -> U8:
    rests = packed[:, None] * np.array([1, 3, 9, 27, 81], np.uint8)[:num, None]
    return (rests.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _tq1_0(blocks: U8) -> Parts:
    q = np.concatenate([_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)], axis=1)
    return q.view(np.int8) - np.int8(1), _in_groups(_f16(blocks, 52), 8), None


def _tq2_0(blocks: U8) -> Parts:
    return _pairs_k(blocks[:, :64]).view(np.int8) - np.int8(1), _in_groups(_f16(blocks, 64), 8), None


def _mxfp4(blocks: U8) -> Parts:
    return (
        np.array(E2M1_TWICE, np.int8)[_halves(blocks[:, 1:])],
        np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128),
        None,
    )


def _nvfp4(blocks: U8) -> Parts:
    scales = np.array(_HALF_UE4M3, np.float32)[blocks[:, :4]]
    return np.array(E2M1_TWICE, np.int8)[_halves(blocks[:, 4:].reshape(-1, 4, 8))], scales, None


# IQ1 to IQ3: codes are indices into a codebook. An entry is one number of 32 or 64 bits with its 4 or 8 integers. The entries
# come from codebooks.h, which the native backend also uses.

_CODEBOOKS = Path(__file__).with_name("codebooks.h")
_OF_IQ2 = (8, 25, 43)
_OF_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_OF_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_OF_IQ1 = (-8, 0, 8)  # in eighths, so that the shift by an eighth gives integers

_BIT_FIELDS = np.array([0, 7, 14, 21], np.uint32)  # first bits of four fields of 7 bits
_NIBBLES = np.array([0, 4], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)
_TRIPLES = np.array([0, 3, 6, 9], np.uint16)


@cache
def _book(name: str, sizes: tuple[int, ...]) -> NDArray[Any]:
    """Read a codebook from codebooks.h. `sizes` has the value that each code of a column stands for."""
    found = re.search(rf"\b{name}\[\d+\] = {{([^}}]*)}}", _CODEBOOKS.read_text())
    assert found is not None
    packed = np.array([int(number) for number in found[1].split(",")[:-1]], np.uint16)
    bits, columns = (2, 8) if len(sizes) == 3 else (3, 4)
    shifts = np.arange(columns, dtype=np.uint16) * np.uint16(bits)
    entries = np.array(sizes, np.int8)[packed[:, None] >> shifts & ((1 << bits) - 1)]
    numbers: NDArray[Any] = entries.view(np.uint64 if columns == 8 else np.uint32)[:, 0]
    return numbers


@cache
def _signs() -> NDArray[np.uint64]:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    factors: NDArray[np.uint64] = (1 - 2 * bits.astype(np.int8)).view(np.uint64)[:, 0]
    return factors


@cache
def _even_signs() -> NDArray[np.uint64]:
    """Return the eight signs of each 7-bit code. The eighth sign makes the number of minus signs even."""
    codes = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(codes[:, None], axis=1).sum(axis=1, dtype=np.uint8) & 1
    factors: NDArray[np.uint64] = _signs()[codes | parity << 7]
    return factors


def _entries(book: NDArray[Any], codes: NDArray[Any]) -> I8:
    return book.take(codes.reshape(len(codes), -1)).view(np.int8)


def _fields(packed: NDArray[Any], shifts: NDArray[Any], mask: int) -> NDArray[Any]:
    found: NDArray[Any] = packed[..., None] >> shifts & packed.dtype.type(mask)
    return found.reshape(len(packed), -1)


def _words(raw: U8, dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(raw).view(dtype)


def _wide(low: U8, high: NDArray[Any]) -> NDArray[Any]:
    return low | high.astype(np.uint16) << 8


def _halved(blocks_scale: F32, fields: NDArray[Any], factor: float) -> F32:
    return blocks_scale * (np.float32(0.5) + fields.astype(np.float32)) * np.float32(factor)


def _iq2_xxs(blocks: U8) -> Parts:
    words = _words(blocks[:, 2:], np.uint32).reshape(len(blocks), 8, 2)
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs = _entries(_even_signs(), _fields(words[..., 1], _BIT_FIELDS, 127))
    return _entries(_book("kIq2Xxs", _OF_IQ2), codes) * signs, _halved(_f16(blocks, 0), words[..., 1] >> 28, 0.25), None


def _iq2_xs(blocks: U8) -> Parts:
    codes = _words(blocks[:, 2:66], np.uint16)
    integers = _entries(_book("kIq2Xs", _OF_IQ2), codes & 511) * _entries(_even_signs(), codes >> 9)
    return integers, _halved(_f16(blocks, 0), _fields(blocks[:, 66:], _NIBBLES, 15), 0.25), None


def _iq2_s(blocks: U8) -> Parts:
    codes = _wide(blocks[:, 2:34], _fields(blocks[:, 66:74], _PAIRS, 3))
    integers = _entries(_book("kIq2S", _OF_IQ2), codes) * _entries(_signs(), blocks[:, 34:66])
    return integers, _halved(_f16(blocks, 0), _fields(blocks[:, 74:], _NIBBLES, 15), 0.25), None


def _iq3_xxs(blocks: U8) -> Parts:
    words = _words(blocks[:, 66:], np.uint32)
    signs = _entries(_even_signs(), _fields(words, _BIT_FIELDS, 127))
    integers = _entries(_book("kIq3Xxs", _OF_IQ3_XXS), blocks[:, 2:66]) * signs
    return integers, _halved(_f16(blocks, 0), words >> 28, 0.5), None


def _iq3_s(blocks: U8) -> Parts:
    codes = _wide(blocks[:, 2:66], _fields(blocks[:, 66:74], _BITS, 1))
    integers = _entries(_book("kIq3S", _OF_IQ3_S), codes) * _entries(_signs(), blocks[:, 74:106])
    return integers, _f16(blocks, 0) * (1 + 2 * _fields(blocks[:, 106:], _NIBBLES, 15)).astype(np.float32), None


def _shifted(codes: NDArray[Any], is_down: NDArray[np.bool_]) -> I8:
    """Look up codes of IQ1 and add 1/8 to each run of columns, or subtract it where `is_down`. [num_blocks, runs]"""
    entries = _entries(_book("kIq1", _OF_IQ1), codes)
    shifts = np.where(is_down, np.int8(-1), np.int8(1))
    return (entries.reshape(*shifts.shape, -1) + shifts[..., None]).reshape(entries.shape)


def _eighths(blocks_scale: F32, fields: NDArray[Any]) -> F32:
    return blocks_scale * (2 * fields + 1).astype(np.float32) * np.float32(0.125)


def _iq1_s(blocks: U8) -> Parts:
    words = _words(blocks[:, 34:], np.uint16)
    integers = _shifted(_wide(blocks[:, 2:34], _fields(words, _TRIPLES, 7)), words >= 0x8000)
    return integers, _eighths(_f16(blocks, 0), words >> 12 & 7), None


def _iq1_m(blocks: U8) -> Parts:
    upper, words = _fields(blocks[:, 32:48], _NIBBLES, 15), _words(blocks[:, 48:], np.uint16)
    parts = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    scale = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    integers = _shifted(_wide(blocks[:, :32], upper & 7), upper >= 8)
    return integers, _eighths(scale, _fields(words, _TRIPLES, 7)), None


@dataclass(frozen=True, slots=True)
class _Quantised:
    ggml: int  # `ggml_type` in ggml.h
    cols: int
    num_bytes: int
    parts: Callable[[U8], Parts]
    held_bits: int = 8  # bits of an integer in memory
    has_table: bool = False
    """Codes index a table of at most 16 numbers. Backends with floats in bf16 hold 4-bit codes, others `held_bits`."""
    has_held_offsets: bool = False
    group: int = 32  # columns that share a scale


_QUANTISED: Mapping[WeightFormat, _Quantised] = {
    WeightFormat.Q4_0: _Quantised(2, 32, 18, _q4_0, held_bits=4),
    WeightFormat.Q4_1: _Quantised(3, 32, 20, _q4_1, held_bits=4, has_held_offsets=True),
    WeightFormat.Q5_0: _Quantised(6, 32, 22, _q5_0),
    WeightFormat.Q5_1: _Quantised(7, 32, 24, _q5_1, has_held_offsets=True),
    WeightFormat.Q8_0: _Quantised(8, 32, 34, _q8_0),
    WeightFormat.Q2_K: _Quantised(10, 256, 84, _q2_k, group=16),
    WeightFormat.Q3_K: _Quantised(11, 256, 110, _q3_k, group=16),
    WeightFormat.Q4_K: _Quantised(12, 256, 144, _q4_k, held_bits=4, has_held_offsets=True),
    WeightFormat.Q5_K: _Quantised(13, 256, 176, _q5_k, has_held_offsets=True),
    WeightFormat.Q6_K: _Quantised(14, 256, 210, _q6_k, group=16),
    WeightFormat.IQ4_NL: _Quantised(20, 32, 18, _iq4_nl, has_table=True),
    WeightFormat.IQ4_XS: _Quantised(23, 256, 136, _iq4_xs, has_table=True),
    WeightFormat.Q1_0: _Quantised(41, 128, 18, _q1_0, held_bits=4),
    WeightFormat.Q2_0: _Quantised(42, 64, 18, _q2_0, held_bits=4),
    WeightFormat.TQ1_0: _Quantised(34, 256, 54, _tq1_0, held_bits=4),
    WeightFormat.TQ2_0: _Quantised(35, 256, 66, _tq2_0, held_bits=4),
    WeightFormat.IQ1_S: _Quantised(19, 256, 50, _iq1_s, has_table=True),
    WeightFormat.IQ1_M: _Quantised(29, 256, 56, _iq1_m, group=16),
    WeightFormat.IQ2_XXS: _Quantised(16, 256, 66, _iq2_xxs, has_table=True),
    WeightFormat.IQ2_XS: _Quantised(17, 256, 74, _iq2_xs, group=16),
    WeightFormat.IQ2_S: _Quantised(22, 256, 82, _iq2_s, group=16),
    WeightFormat.IQ3_XXS: _Quantised(18, 256, 98, _iq3_xxs, has_table=True),
    WeightFormat.IQ3_S: _Quantised(21, 256, 110, _iq3_s, has_table=True),
    WeightFormat.MXFP4: _Quantised(39, 32, 17, _mxfp4, has_table=True),
    WeightFormat.NVFP4: _Quantised(40, 64, 36, _nvfp4, group=16),
}
BLOCKS: Mapping[WeightFormat, tuple[int, int]] = {fmt: (kind.cols, kind.num_bytes) for fmt, kind in _QUANTISED.items()}
"""(columns, bytes) of a block of every quantised format."""
GROUP_OF_16 = frozenset(fmt for fmt, kind in _QUANTISED.items() if kind.group == 16)
"""Formats in which 16 columns share a scale. In other quantised formats 32 do."""
FOUR_BITS = frozenset(fmt for fmt, kind in _QUANTISED.items() if kind.held_bits == 4)
"""Formats whose integers every backend holds in 4 bits."""
GGML_TYPES: Mapping[int, WeightFormat] = {
    **{0: WeightFormat.F32, 1: WeightFormat.F16, 30: WeightFormat.BF16},
    **{kind.ggml: fmt for fmt, kind in _QUANTISED.items()},
}
"""GGML's number of a type -> our format."""
