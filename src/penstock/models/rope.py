"""Rotary position embeddings: their frequencies, scaled or not, and what they leave of a key's bias. Pure arithmetic.

Loaders ask for frequencies. Backends ask for the part that all keys of a layer share, which none needs to store: a constant
vector c in every key adds q c to every score of a query, and softmax does not see it. Keys of some architectures have such a
part: a bias that is large where the rotation is slowest (Qwen2.5: hundreds, where other columns are of size one), and beside
which a scale of 32 columns is coarse.

Sources: RoFormer, arXiv 2104.09864; linear scaling, arXiv 2306.15595; `llama3` as in the reference code of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import KvWrite


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


F32 = NDArray[np.float32]


def still_pairs(inv_freq: tuple[float, ...], num_positions: int) -> list[int]:
    """Pairs of columns (i, i + half) that rotate by less than one radian over so many positions.

    Below a radian a turned vector less itself is shorter than the vector.
    """
    return [i for i, frequency in enumerate(inv_freq) if frequency * num_positions < 1]


def key_centre(op: KvWrite, bias: F32, head_dim: int, num_positions: int) -> F32:
    """The vector to subtract from every key before it is stored. [num_kv_heads * head_dim], as `bias` is

    It is the bias where keys hardly turn over `num_positions`, the longest context served, and in columns that never turn.
    """
    heads = bias.reshape(-1, head_dim)
    half = len(op.inv_freq)
    pairs = still_pairs(op.inv_freq, num_positions)
    turning = pairs + [half + i for i in pairs]
    centre = np.zeros_like(heads)
    centre[:, turning] = heads[:, turning] * np.float32(op.attention_factor)
    centre[:, 2 * half :] = heads[:, 2 * half :]
    return centre.reshape(-1)
