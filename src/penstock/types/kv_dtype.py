"""Storage formats of keys, values and recurrent state."""

from __future__ import annotations

from enum import StrEnum


class KvDtype(StrEnum):
    """Storage formats of keys and values; the values of `--kv-cache-dtype`."""

    INT8 = "int8"  # keys have a bf16 scale per head and 32 columns, values one per head
    BF16 = "bf16"
    """The native backend keeps keys as 16-bit integers with a float32 scale per head, which is finer still."""
    INT4 = "int4"  # rotated heads, keys of 5 bits and values of 4, each with a scale of 8 bits per head

    def head_bytes(self, head_dim: int, *, has_values: bool = True) -> int:
        """Return the bytes of one position's key and value in one head of the native backend.

        Without values of its own, a head has them among the columns of its key.
        """
        columns = padded_head_dim(head_dim)
        numbers = 2 * columns if has_values else columns
        if self is KvDtype.INT4:
            return columns * 5 // 8 + columns // 2 + 2
        if self is KvDtype.INT8:
            return numbers + 2 * (-(-columns // KEY_GROUP) + 1)
        return 2 * numbers + 4


KEY_GROUP = 32  # columns of a key that share a scale in `INT8`


def padded_head_dim(head_dim: int) -> int:
    """Return `head_dim` rounded up to a multiple of 16. Native kernels take 16 columns at a time; the added ones are zeros."""
    return -(-head_dim // 16) * 16


def padded_latent(num_latent: int) -> int:
    """Return `num_latent` rounded up to whole groups of columns. A latent has one scale, and the rotated key its own."""
    return -(-num_latent // KEY_GROUP) * KEY_GROUP


def state_bytes(num_columns: int, width: int) -> int:
    """Return the bytes of recurrent state per block in the native backend, with `num_columns` in all layers together."""
    return -(-2 * num_columns * width // 64) * 64
