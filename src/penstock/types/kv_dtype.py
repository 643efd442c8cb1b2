"""Storage formats of keys, values and recurrent state."""

from __future__ import annotations

from enum import StrEnum


class KvDtype(StrEnum):
    """Storage formats of keys and values; the values of `--kv-cache-dtype`."""

    INT8 = "int8"  # keys have a bf16 scale per head and 32 columns, values one per head
    BF16 = "bf16"
    """The native backend keeps keys as 16-bit integers with a float32 scale per head, which is finer still."""

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of one position's key and value in one head of the native backend."""
        columns = padded_head_dim(head_dim)
        if self is KvDtype.INT8:
            return 2 * columns + 2 * (-(-columns // KEY_GROUP) + 1)
        return 2 * 2 * columns + 4


KEY_GROUP = 32  # columns of a key that share a scale in `INT8`


def padded_head_dim(head_dim: int) -> int:
    """Return `head_dim` rounded up to a multiple of 16. Native kernels take 16 columns at a time; the added ones are zeros."""
    return -(-head_dim // 16) * 16


def state_bytes(num_columns: int, width: int) -> int:
    """Return the bytes of recurrent state per block in the native backend, with `num_columns` in all layers together."""
    return -(-2 * num_columns * width // 64) * 64
