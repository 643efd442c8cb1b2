"""Device functions that turn stored words into numbers by placing bits; conversions take several times as long."""
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, SIM300  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

EXPONENTS_APART = tl.constexpr(float(1 << 120))
"""Exponents of fp8 (e4m3) count from -7, of bf16 and float32 from -127."""


def words_of(scales: torch.Tensor) -> torch.Tensor:
    """Pair 16-bit scales: narrower loads are not pipelined."""
    return scales.view(torch.int32) if scales.dtype.itemsize == 2 else scales


@triton.jit
def _masked(
    words, SHIFT: tl.constexpr, MASK: tl.constexpr, MAGIC: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """(words >> SHIFT & MASK) ^ MAGIC as bits: int16 [.] -> DTYPE [.]."""
    if IS_INTERPRETED:
        return ((words >> SHIFT & MASK) ^ MAGIC).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        # Two words at a time; the compiler would not do it.
        found = tl.inline_asm_elementwise(
            asm=_masking(SHIFT, MASK, MAGIC), constraints="=r,r", args=[words], dtype=tl.int16, is_pure=True, pack=2
        )
        return found.to(DTYPE, bitcast=True)


@triton.constexpr_function
def _masking(shift: int, mask: int, magic: int) -> str:
    """PTX for two words in a register. The mask drops bits from the upper word."""
    both = 0x10001
    look_up = (0xF0 & 0xCC) ^ 0xAA  # (a & b) ^ c
    return f"""{{
        .reg .b32 shifted;
        shr.b32 shifted, $1, {shift};
        lop3.b32 $0, shifted, {mask * both:#x}, {magic * both:#x}, {look_up:#x};
    }}"""


@triton.jit
def _numbers(
    words, WHICH: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """The exact integers in bits BITS * WHICH and up, made as low bits of a number above 128 (or 1024)."""
    SHIFT: tl.constexpr = BITS * WHICH
    if DTYPE == tl.float32:
        unsigned = words.to(tl.int32) >> SHIFT & (15 if BITS == 4 else 255)
        return ((unsigned ^ 128) - 128 if BITS == 8 else unsigned - ZERO).to(tl.float32)
    elif DTYPE == tl.float16:
        if BITS == 4:
            return _masked(words, SHIFT, 0x0F, 0x6400, DTYPE, IS_INTERPRETED) - (1024.0 + ZERO)
        else:  # with the sign inverted, from 0 to 255
            return _masked(words, SHIFT, 0xFF, 0x6480, DTYPE, IS_INTERPRETED) - 1152.0
    elif BITS == 4:
        return _masked(words, SHIFT, 0x0F, 0x4300, DTYPE, IS_INTERPRETED) - (128.0 + ZERO)
    else:  # seven bits fit; the eighth turns the 128 that is taken off into 256
        positive = _masked(words, SHIFT, 0x7F, 0x4300, DTYPE, IS_INTERPRETED)
        return positive - _masked(words, SHIFT, 0x80, 0x4300, DTYPE, IS_INTERPRETED)


@triton.jit
def _float8_bits(words, WHICH: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """fp8 in byte WHICH as bits of DTYPE, exponent not corrected: int16 [.] -> DTYPE [.]."""
    if IS_INTERPRETED:
        code = words.to(tl.int32) >> 8 * WHICH
        return ((code & 0x7F) << (7 if DTYPE == tl.float16 else 4) | (code & 0x80) << 8).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        found = tl.inline_asm_elementwise(
            asm=float8_widening(WHICH, DTYPE == tl.float16),
            constraints="=r,r",
            args=[words],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        return found.to(DTYPE, bitcast=True)


@triton.constexpr_function
def float8_widening(which: int, is_half: bool) -> str:
    """PTX for two words in a register."""
    both = 0x10001
    up = (7 if is_half else 4) - 8 * which
    select = (0xF0 & 0xCC) | 0xAA  # (a & b) | c
    return f"""{{
        .reg .b32 low;
        .reg .b32 high;
        {"shl" if up > 0 else "shr"}.b32 low, $1, {abs(up)};
        and.b32 low, low, {(0x3F80 if is_half else 0x07F0) * both:#x};
        shl.b32 high, $1, {8 - 8 * which};
        lop3.b32 $0, high, {0x8000 * both:#x}, low, {select:#x};
    }}"""


@triton.jit
def _float8(words, WHICH: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """The exact fp8 (e4m3) numbers in byte WHICH. The GPU's instruction needs capability 8.9 and gives float16."""
    if DTYPE == tl.float32:
        return float8_as_float(words.to(tl.int32) >> 8 * WHICH)
    elif DTYPE == tl.float16:
        return _float8_bits(words, WHICH, DTYPE, IS_INTERPRETED) * 256.0
    else:
        return _float8_bits(words, WHICH, DTYPE, IS_INTERPRETED) * EXPONENTS_APART


@triton.jit
def float8_as_float(codes):
    """The exact fp8 (e4m3) numbers in the lowest bytes: int32 [.] -> float32 [.]"""
    return ((codes & 0x7F) << 20 | (codes & 0x80) << 24).to(tl.float32, bitcast=True) * EXPONENTS_APART


@triton.jit
def _scale(
    ptr, at, WHICH: tl.constexpr, GROUP: tl.constexpr, STEP_COLS: tl.constexpr, QUARTER_COLS: tl.constexpr, DTYPE: tl.constexpr
):
    """The scales of a quarter. [rows, 1]"""
    COUNT: tl.constexpr = STEP_COLS // GROUP
    PLACE: tl.constexpr = WHICH * QUARTER_COLS // GROUP
    if DTYPE == tl.float32:
        return tl.load(ptr + at * COUNT + PLACE)[:, None]
    else:
        words = tl.load(ptr + at * (COUNT // 2) + PLACE // 2)
        return (words >> (PLACE % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True)[:, None]


@triton.jit
def quarter_weights(
    words,
    scales_ptr,
    offsets_ptr,
    at,
    WHICH: tl.constexpr,
    QUARTER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """A quarter of a step, without row scales. [rows, QUARTER_COLS]"""
    if IS_FLOAT:
        numbers = _float8(words, WHICH, DTYPE, IS_INTERPRETED)
    else:
        numbers = _numbers(words, WHICH, BITS, ZERO, DTYPE, IS_INTERPRETED)
    if GROUP == 0:
        return numbers
    else:
        return _scaled(numbers, scales_ptr, offsets_ptr, at, QUARTER, GROUP, HAS_OFFSET, STEP_COLS, QUARTER_COLS, DTYPE)


@triton.jit
def _scaled(
    numbers,
    scales_ptr,
    offsets_ptr,
    at,
    QUARTER: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """numbers * scale (+ offset). [rows, QUARTER_COLS]

    Scaling weights, not sums, lets scales load early. Two bf16 parts carry an 11-bit scale, so that rounding does not shift a
    group alike.
    """
    scale = _scale(scales_ptr, at, QUARTER, GROUP, STEP_COLS, QUARTER_COLS, DTYPE)
    if DTYPE == tl.bfloat16:
        high = scale.to(tl.bfloat16)
        rest = (scale.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        # `fma` explicitly, so that no compiler rounds a product first in one kernel and not in another.
        if HAS_OFFSET:
            offset = _scale(offsets_ptr, at, QUARTER, GROUP, STEP_COLS, QUARTER_COLS, DTYPE).to(tl.bfloat16)
            return tl.fma(numbers, high, tl.fma(numbers, rest, offset))
        else:
            return tl.fma(numbers, high, numbers * rest)
    elif HAS_OFFSET:
        return tl.fma(numbers, scale, _scale(offsets_ptr, at, QUARTER, GROUP, STEP_COLS, QUARTER_COLS, DTYPE))
    else:
        return numbers * scale
