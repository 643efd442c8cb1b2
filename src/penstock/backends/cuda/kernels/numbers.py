"""Device functions that turn packed quantised weights into floats by moving bits, several times as fast as conversions."""
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, SIM300  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

EXPONENTS_APART = tl.constexpr(float(1 << 120))
"""2 ** (127 - 7), the ratio between biases of exponents: 127 in bf16 and float32, 7 in fp8 (e4m3)."""


def words_of(scales: torch.Tensor) -> torch.Tensor:
    """View 16-bit scales as 32-bit words, because Triton does not pipeline narrower loads."""
    return scales.view(torch.int32) if scales.dtype.itemsize == 2 else scales


@triton.jit
def _masked(
    words, SHIFT: tl.constexpr, MASK: tl.constexpr, MAGIC: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """Return floats of DTYPE with the bits (words >> SHIFT & MASK) ^ MAGIC. words int16"""
    if IS_INTERPRETED:
        return ((words >> SHIFT & MASK) ^ MAGIC).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        # The compiler would not handle two words at a time.
        found = tl.inline_asm_elementwise(
            asm=_masking(SHIFT, MASK, MAGIC), constraints="=r,r", args=[words], dtype=tl.int16, is_pure=True, pack=2
        )
        return found.to(DTYPE, bitcast=True)


@triton.constexpr_function
def _masking(shift: int, mask: int, magic: int) -> str:
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
    """Return the WHICH-th integer of BITS bits in each word as an exact float, made from the low bits of 128 or 1024."""
    SHIFT: tl.constexpr = BITS * WHICH
    if DTYPE == tl.float32:
        unsigned = words.to(tl.int32) >> SHIFT & (15 if BITS == 4 else 255)
        return ((unsigned ^ 128) - 128 if BITS == 8 else unsigned - ZERO).to(tl.float32)
    elif DTYPE == tl.float16:
        if BITS == 4:
            return _masked(words, SHIFT, 0x0F, 0x6400, DTYPE, IS_INTERPRETED) - (1024.0 + ZERO)
        else:  # the sign inverted: 0 to 255
            return _masked(words, SHIFT, 0xFF, 0x6480, DTYPE, IS_INTERPRETED) - 1152.0
    elif BITS == 4:
        return _masked(words, SHIFT, 0x0F, 0x4300, DTYPE, IS_INTERPRETED) - (128.0 + ZERO)
    else:  # seven bits fit; the eighth turns 128, subtracted below, into 256
        positive = _masked(words, SHIFT, 0x7F, 0x4300, DTYPE, IS_INTERPRETED)
        return positive - _masked(words, SHIFT, 0x80, 0x4300, DTYPE, IS_INTERPRETED)


@triton.jit
def _float8_bits(words, WHICH: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return the fp8 number in byte WHICH of each word in DTYPE's bits, but with the fp8 exponent bias. words int16"""
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
    """Return assembly (PTX) for `_float8_bits`, for two words in a register."""
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
    """Return the fp8 (e4m3) number in byte WHICH of each word, exact. The GPU's own instruction needs capability 8.9."""
    if DTYPE == tl.float32:
        return float8_as_float(words.to(tl.int32) >> 8 * WHICH)
    elif DTYPE == tl.float16:
        return _float8_bits(words, WHICH, DTYPE, IS_INTERPRETED) * 256.0
    else:
        return _float8_bits(words, WHICH, DTYPE, IS_INTERPRETED) * EXPONENTS_APART


@triton.jit
def float8_as_float(codes):
    """Return the fp8 (e4m3) number in the lowest byte of each int32 code, as exact float32."""
    return ((codes & 0x7F) << 20 | (codes & 0x80) << 24).to(tl.float32, bitcast=True) * EXPONENTS_APART


@triton.jit
def _scale(
    ptr, at, WHICH: tl.constexpr, GROUP: tl.constexpr, STEP_COLS: tl.constexpr, QUARTER_COLS: tl.constexpr, DTYPE: tl.constexpr
):
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
    """Return the quantised weights of a quarter of STEP_COLS columns as floats, without row scales. [rows, QUARTER_COLS]"""
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
    """Return numbers * scale (+ offset), [rows, QUARTER_COLS].

    Scaling weights, and not their sums later, lets scales load early. In bf16 a scale is split in two parts, because rounding
    it would shift all numbers of a group.
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
