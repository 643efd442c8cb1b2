"""The arrays of one step on the device, and the port of what computes its attention. Computes nothing.

The executor makes the arrays, and the program and its kernels read them. The lowering calls the port once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.attention import AttentionShape
    from penstock.backends.cuda.kv_cache import KvLayer


@dataclass(slots=True)
class StepTensors:
    """R rows, T tokens, S samples. All int32 but `slot_mapping`, contiguous, on the device.

    Under a captured graph these are fixed addresses, filled anew before each replay.
    """

    token_ids: torch.Tensor
    """-1 where the token is the row's last sampled one and not known to the host: the executor puts it in place, on the device,
    before the program runs. [T]"""
    positions: torch.Tensor
    """[T]"""
    row_of_token: torch.Tensor
    """Index into the R rows. [T]"""
    slot_mapping: torch.Tensor
    """block_id * block_size + offset of each token, int64. [T]"""
    query_start_loc: torch.Tensor
    """Prefix sums of the rows' query lengths. [R + 1]"""
    context_lens: torch.Tensor
    """Positions in the cache before this step. [R]"""
    block_tables: torch.Tensor
    """Block ids by row; those after a row's last block have no meaning. [R, max_blocks]"""
    sample_tokens: torch.Tensor
    """Index into T of the last token of each row that samples. [S]"""

    # Known to the host, for choosing grids. Under a captured graph they are those of the capture, and limits for every replay.
    num_tokens: int
    num_rows: int
    num_samples: int
    max_query_len: int
    max_seq_len: int
    """Context and query of the longest row."""

    types: torch.Tensor | None = None
    """1 for tokens of a pair's second text, else 0; given to programs that read texts. [T]"""
    attention: StepAttention | None = None
    """The attention that was planned for the step; None: the program's own kernels."""
    adapted_tokens: AdaptedRows | None = None
    """Tokens whose row has an adapter; None: there is none."""
    adapted_samples: AdaptedRows | None = None
    """The same of samples."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """Tokens or samples whose row has an adapter, in groups of one adapter each: `kernels.lora` has their form."""

    order: torch.Tensor
    """Indices of them, by adapter. int32 [places]"""
    groups: torch.Tensor
    """int64 [groups, GROUP_WORDS]"""
    max_rank: int
    """The greatest of the step's adapters."""


class StepAttention(Protocol):
    """Computes the attention of a step. It waits for nothing, so that a step can be captured in a CUDA graph."""

    def begin(self, step: StepTensors) -> None:
        """Before the step's first layer, on the device."""
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
        """One layer's, whose keys and values of this step are in the cache.

        q, out [num_tokens, num_heads * head_dim]; rows of q may lie apart. `sinks` are given if the shape has them: those of
        the program times log2(e), float32 [num_heads].
        """
        ...
