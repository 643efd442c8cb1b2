"""A step's arrays on the device, and the interface of attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.attention import AttentionShape
    from penstock.backends.cuda.kv_cache import KvLayer


@dataclass(slots=True)
class StepTensors:
    """A step's input arrays on the device, for R rows, T tokens and S samples. Contiguous, int32 except `slot_mapping`.

    Under a captured graph their addresses are fixed.
    """

    token_ids: torch.Tensor
    """Ids of the step's tokens. [T]"""
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
    """Block ids. Entries after a row's last block are undefined. [R, max_blocks]"""
    sample_tokens: torch.Tensor
    """Index of each sampling row's last token. [S]"""

    # On the host, to choose grids. A captured graph keeps the values of its capture, as limits for every replay.
    num_tokens: int
    num_rows: int
    num_samples: int
    max_query_len: int
    max_seq_len: int
    """Largest sum of a row's context and queries."""

    types: torch.Tensor | None = None
    """1 in a pair's second text, else 0; only for programs that read texts. [T]"""
    attention: StepAttention | None = None
    """None means our kernels."""
    adapted_tokens: AdaptedRows | None = None
    """Tokens with an adapter, or None."""
    adapted_samples: AdaptedRows | None = None
    """Samples with an adapter, or None."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """A step's tokens or samples with a LoRA adapter, grouped by adapter."""

    order: torch.Tensor
    """Row indices by adapter. int32 [places]"""
    groups: torch.Tensor
    """int64 [groups, GROUP_WORDS]"""
    max_rank: int


class StepAttention(Protocol):
    """Computes a step's attention. Methods never wait, so that a graph can capture them."""

    def begin(self, step: StepTensors) -> None:
        """Prepare the attention of a step, before its first layer."""
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
        """Write one layer's attention of queries `q` to `out`. The step's keys and values must be in the cache.

        q, out [num_tokens, num_heads * head_dim]; rows of q may be strided. `sinks`: the program's times log2(e), float32
        [num_heads], or None.
        """
        ...
