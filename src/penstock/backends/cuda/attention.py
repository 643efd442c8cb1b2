"""The attention's shape and a step's sequence lengths, for the modules that choose and compute attention."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import Attention

MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Head counts and options of the model's attention, which decide what kernels can compute it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @staticmethod
    def of(op: Attention) -> AttentionShape:
        heads = (op.num_heads, op.num_kv_heads, op.head_dim)
        return AttentionShape(*heads, op.scale, op.window, op.softcap, op.sinks is not None)

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class StepKind(StrEnum):
    """Kinds of steps. Attention kernels are chosen for each kind."""

    DECODE = "decode"
    """Every row has one query."""
    PREFILL = "prefill"
    """Some row has more than one query."""


@dataclass(frozen=True, slots=True, eq=False)
class RowLens:
    """Query and context lengths of a step's requests, including padding. int32, on the host."""

    query_starts: NDArray[np.int32]
    """Prefix sums of query lengths, each at least 1. [R + 1]"""
    context_lens: NDArray[np.int32]
    """Positions in the cache before the step. [R]"""

    @staticmethod
    def padded(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], num_rows: int) -> RowLens:
        """Append padding rows, each with one query and no context, to reach the `num_rows` of a CUDA graph."""
        num_padding = num_rows - len(context_lens)
        more = query_starts[-1] + np.arange(1, num_padding + 1, dtype=np.int32)
        return RowLens(np.concatenate([query_starts, more]), np.pad(context_lens, (0, num_padding)))

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Context tokens plus queries of each row. [R]"""
        lens: NDArray[np.int32] = self.context_lens + np.diff(self.query_starts)
        return lens

    @property
    def kind(self) -> StepKind:
        return StepKind.DECODE if self.query_starts[-1] == self.num_rows else StepKind.PREFILL


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}"
