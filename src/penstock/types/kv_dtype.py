"""How keys and values are stored."""

from __future__ import annotations

from enum import StrEnum


class KvDtype(StrEnum):
    """The values of `--kv-cache-dtype`."""

    INT8 = "int8"
    """8-bit integers: keys with a scale per head and 32 columns, values with one per head; the scales are bf16."""
    BF16 = "bf16"
    """16 bits. The native backend keeps the keys as 16-bit integers with a float32 scale per head, which is finer still."""


KEY_GROUP = 32
"""Columns of a key that share a scale in `INT8`."""
