"""How keys, values and recurrent state are stored."""

from __future__ import annotations

from enum import StrEnum


class KvDtype(StrEnum):
    """The values of `--kv-cache-dtype`."""

    INT8 = "int8"
    """8-bit integers: keys with a scale per head and 32 columns, values with one per head; the scales are bf16."""
    BF16 = "bf16"
    """16 bits. The native backend keeps the keys as 16-bit integers with a float32 scale per head, which is finer still."""

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of the key and the value of one position and head, with their scales, as the native backend stores them."""
        columns = padded_head_dim(head_dim)
        if self is KvDtype.INT8:
            return 2 * columns + 2 * (-(-columns // KEY_GROUP) + 1)
        return 2 * 2 * columns + 4


KEY_GROUP = 32
"""Columns of a key that share a scale in `INT8`."""


def padded_head_dim(head_dim: int) -> int:
    """Columns of a head as the native backend stores it: its kernels take sixteen at a time, so zeros fill the last sixteen."""
    return -(-head_dim // 16) * 16


def state_bytes(num_columns: int, width: int) -> int:
    """Bytes of recurrent state in a block of the native backend, of so many columns in all layers: bf16, whole cache lines."""
    return -(-2 * num_columns * width // 64) * 64
