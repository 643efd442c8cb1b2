"""The attention of a step in numbers: the shape of a layer's, and what the host knows of the rows. Computes nothing.

`triton_attention` and `flashinfer_attention` compute it, and `attention_choice` says which of them a step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import Attention

MAX_ERROR_CHARS = 300
"""That the log shows of one."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one layer's attention: see `program.Attention`."""

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
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class StepKind(StrEnum):
    """Kinds of steps whose attention is chosen separately; the log shows the value."""

    DECODE = "decode"
    """Every row has one query."""
    PREFILL = "prefill"
    """Some row has more; others may have one."""


@dataclass(frozen=True, slots=True, eq=False)
class RowLens:
    """The rows of a step, padding among them, as the host knows them: int32."""

    query_starts: NDArray[np.int32]
    """Prefix sums of the rows' query lengths, each at least 1. [R + 1]"""
    context_lens: NDArray[np.int32]
    """Positions in the cache before the step. [R]"""

    @staticmethod
    def padded(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], num_rows: int) -> RowLens:
        """With rows of one query after nothing up to `num_rows`, as `staging.step_arrays` pads a step."""
        num_padding = num_rows - len(context_lens)
        more = query_starts[-1] + np.arange(1, num_padding + 1, dtype=np.int32)
        return RowLens(np.concatenate([query_starts, more]), np.pad(context_lens, (0, num_padding)))

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Positions that the last query of each row sees. [R]"""
        lens: NDArray[np.int32] = self.context_lens + np.diff(self.query_starts)
        return lens

    @property
    def kind(self) -> StepKind:
        return StepKind.DECODE if self.query_starts[-1] == self.num_rows else StepKind.PREFILL


def in_words(error: BaseException) -> str:
    """An error of a library that computes attention, in one line: compilers say much."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}"
