"""What all keys of a layer share and none needs to store. Pure; called by the backends when they take a program over.

A constant vector c in every key adds q c to every score of a query, which softmax does not see. Keys of some
architectures have such a part: a bias that is large where the rotation is slowest (Qwen2.5: hundreds, where other
columns are of size one), and beside which a scale of 32 columns is coarse.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import KvWrite

F32 = NDArray[np.float32]


def still_pairs(inv_freq: tuple[float, ...], num_positions: int) -> list[int]:
    """Pairs of columns (i, i + half) that rotate by less than one radian over so many positions.

    Below a radian a turned vector less itself is shorter than the vector.
    """
    return [i for i, frequency in enumerate(inv_freq) if frequency * num_positions < 1]


def key_centre(op: KvWrite, bias: F32, head_dim: int, num_positions: int) -> F32:
    """What is to be subtracted from every key before it is stored. [num_kv_heads * head_dim], as `bias` is

    What the bias adds where keys hardly turn over `num_positions`, the longest context served, and in columns that never turn.
    """
    heads = bias.reshape(-1, head_dim)
    half = len(op.inv_freq)
    pairs = still_pairs(op.inv_freq, num_positions)
    turning = pairs + [half + i for i in pairs]
    centre = np.zeros_like(heads)
    centre[:, turning] = heads[:, turning] * np.float32(op.attention_factor)
    centre[:, 2 * half :] = heads[:, 2 * half :]
    return centre.reshape(-1)
