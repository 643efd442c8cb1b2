"""What all keys of a layer share and none needs to store. Pure; called by the backends when they take a program over.

A constant vector c in every key adds q c to every score of a query, which softmax does not see. Keys of some
architectures have such a part: a bias that is large where the rotation is slowest (Qwen2.5: hundreds, where other
columns are of size one). Eight bits with one scale can't hold both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import KvWrite

F32 = NDArray[np.float32]


def still_columns(inv_freq: tuple[float, ...], head_dim: int, num_positions: int) -> tuple[int, ...]:
    """Columns of a head that rotate by less than one radian over so many positions, and those that never do.

    Below a radian a turned vector less itself is shorter than the vector: what is taken off never makes a key larger.
    """
    half = len(inv_freq)
    slow = [i for i, frequency in enumerate(inv_freq) if frequency * num_positions < 1]
    return (*slow, *(half + i for i in slow), *range(2 * half, head_dim))


def key_centre(op: KvWrite, bias: F32, head_dim: int) -> F32:
    """What is to be subtracted from every key before it is stored. [num_kv_heads * head_dim], as `bias` is"""
    centre = np.zeros((bias.size // head_dim, head_dim), np.float32)
    columns = list(op.still_columns)
    centre[:, columns] = bias.reshape(-1, head_dim)[:, columns] * np.float32(op.bias_factor)
    return centre.reshape(-1)
