"""Rotation frequencies of rotary position embeddings, scaled or not. Called by the loaders; reads no files.

Source: RoFormer, arXiv 2104.09864; linear scaling, arXiv 2306.15595; `llama3` as in the reference code of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def inverse_frequencies(dim: int, base: float) -> tuple[float, ...]:
    """base ** (-2 i / dim) radians per position, for each pair i. [dim / 2]"""
    return tuple(base ** (-2.0 * pair / dim) for pair in range(dim // 2))


def scale_linear(inv_freq: Sequence[float], factor: float) -> tuple[float, ...]:
    """Every position counts 1 / factor."""
    return tuple(freq / factor for freq in inv_freq)


def divide(inv_freq: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    """One divisor per pair, as `rope_freqs.weight` of a GGUF file gives them. Both [dim / 2]."""
    return tuple(freq / factor for freq, factor in zip(inv_freq, factors, strict=True))


def scale_llama3(
    inv_freq: Sequence[float], *, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> tuple[float, ...]:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""

    def stretch(freq: float) -> float:
        turns = original_context * freq / (2.0 * math.pi)
        if turns < low_freq_factor:
            return freq / factor
        if turns > high_freq_factor:
            return freq
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        return (1.0 - kept) * freq / factor + kept * freq

    return tuple(stretch(freq) for freq in inv_freq)
