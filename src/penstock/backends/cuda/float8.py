"""Rounds rows of floats to fp8 (e4m3), each with a scale of its own. Called by `weights` at load; never multiplies matrices.

A scale is a power of two, so that a rounded weight is a bf16 number, exactly, however it is multiplied. Source of the type:
FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
NOT_A_NUMBER = 0x7F
"""A code, less its sign."""
LEAST_EXPONENT = -126
"""Least exponent of a scale: a smaller one would be no normal float32."""


def round_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, int8 [n, num_cols], and scales, float32 [n], of rows of finite floats: value = scale * number, to nearest even.

    The largest of a row is at most 448 and, unless it is less than 2^-117, more than 224 times its scale; a row of zeros has
    some scale. Rows with what is not finite have codes `NOT_A_NUMBER`.
    """
    wide = values.to(torch.float32)
    mantissas, exponents = torch.frexp(wide.abs().amax(dim=1))  # largest = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    powers = exponents - torch.where(mantissas <= LARGEST / 512, 9, 8)
    scales = (powers.clamp(LEAST_EXPONENT, 127).to(torch.int32) + 127 << 23).view(torch.float32)
    numbers = torch.where(wide.isfinite(), wide / scales[:, None], torch.nan)
    return numbers.to(torch.float8_e4m3fn).view(torch.int8), scales


def has_no_number(codes: torch.Tensor) -> bool:
    """Whether one of int8 [n, num_cols] is not a number. Waits for the device."""
    return bool(((codes & NOT_A_NUMBER) == NOT_A_NUMBER).any())
