"""A step's arrays on the device, and the port of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.attention import AttentionShape
    from penstock.backends.cuda.kv_cache import KvLayer


@dataclass(slots=True)
class StepTensors:
    """R rows, T tokens, S samples. Contiguous int32 on the device, except int64 `slot_mapping`; at fixed addresses under a
    captured graph."""

    token_ids: torch.Tensor
    """-1 for a sampled token that the host does not know; the device fills it in. [T]"""
    positions: torch.Tensor
    """[T]"""
    row_of_token: torch.Tensor
    """[T]"""
    slot_mapping: torch.Tensor
    """block_id * block_size + offset, int64. [T]"""
    query_start_loc: torch.Tensor
    """Prefix sums of query lengths. [R + 1]"""
    context_lens: torch.Tensor
    """Positions before this step. [R]"""
    block_tables: torch.Tensor
    """Undefined after a row's last block. [R, max_blocks]"""
    sample_tokens: torch.Tensor
    """Each sampling row's last token in T. [S]"""

    # For choosing grids, on the host. Under a captured graph these are the capture's values, which limit every replay.
    num_tokens: int
    num_rows: int
    num_samples: int
    max_query_len: int
    max_seq_len: int
    """Context plus query."""

    types: torch.Tensor | None = None
    """1 in a pair's second text, else 0; only for programs that read texts. [T]"""
    attention: StepAttention | None = None
    """None means the program's own."""
    adapted_tokens: AdaptedRows | None = None
    """None without adapters."""
    adapted_samples: AdaptedRows | None = None
    """None without adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """Rows grouped by adapter, as in `kernels.lora`."""

    order: torch.Tensor
    """Row indices by adapter. int32 [places]"""
    groups: torch.Tensor
    """int64 [groups, GROUP_WORDS]"""
    max_rank: int


class StepAttention(Protocol):
    """A step's attention. It never waits, so it can be captured."""

    def begin(self, step: StepTensors) -> None:
        """Call it before the first layer."""
        ...

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        layer: KvLayer,
        step: StepTensors,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend in one layer; its cache has this step's keys and values.

        q, out [num_tokens, num_heads * head_dim]; rows of q may be strided. `sinks`: the program's times log2(e), float32
        [num_heads], or None.
        """
        ...
