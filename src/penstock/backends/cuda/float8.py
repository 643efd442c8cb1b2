"""Rounds weights to fp8 (e4m3, arXiv 2209.05433) at load. Powers of two as scales keep rounded weights exact in bf16."""

from __future__ import annotations

import torch

LARGEST = 448.0
NOT_A_NUMBER = 0x7F
"""The code of NaN, without its sign bit."""
LEAST_EXPONENT = -126
"""The least exponent of a scale. Below it float32 numbers are not normal."""


def round_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to fp8, nearest even. Return codes, int8 [n, num_cols], and a scale per row, float32 [n].

    The scale brings a row's largest number between 224 and 448, except for values below 2^-117. Values that are not finite get
    the code `NOT_A_NUMBER`.
    """
    wide = values.to(torch.float32)
    mantissas, exponents = torch.frexp(wide.abs().amax(dim=1))  # largest = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    powers = exponents - torch.where(mantissas <= LARGEST / 512, 9, 8)
    scales = (powers.clamp(LEAST_EXPONENT, 127).to(torch.int32) + 127 << 23).view(torch.float32)
    numbers = torch.where(wide.isfinite(), wide / scales[:, None], torch.nan)
    return numbers.to(torch.float8_e4m3fn).view(torch.int8), scales


def has_no_number(codes: torch.Tensor) -> bool:
    """Return whether any fp8 code is NaN. Waits for the device."""
    return bool(((codes & NOT_A_NUMBER) == NOT_A_NUMBER).any())
