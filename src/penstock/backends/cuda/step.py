"""The arrays of one step on the device: made by the executor, read by the program and its kernels. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.attention import StepAttention


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

    attention: StepAttention | None = None
    """The attention that was planned for the step; None: the program's own kernels."""
