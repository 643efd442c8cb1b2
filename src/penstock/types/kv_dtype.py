"""How keys and values are stored."""

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
        if self is KvDtype.INT8:
            return 2 * head_dim + 2 * (-(-head_dim // KEY_GROUP) + 1)
        return 2 * 2 * head_dim + 4


KEY_GROUP = 32
"""Columns of a key that share a scale in `INT8`."""
