"""Lists the KV cache blocks of a step's rows in FlashInfer's form, from block tables on the device."""

# ruff: noqa: ANN001, ANN201, N803  # kernels: Triton reads their text, and names constants in capitals

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from penstock.backends.cuda.kernels.launch import jit

if TYPE_CHECKING:
    import torch

PAGES_AT_ONCE = 1024


@jit(do_not_specialize=["tables_ptr", "indptr_ptr", "table_stride"])
def page_indices_kernel(out_ptr, tables_ptr, indptr_ptr, table_stride, PAGES: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - begin
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    for first in range(0, count, PAGES):
        page = first + tl.arange(0, PAGES)
        block_ids = tl.load(table_ptr + page, mask=page < count, other=0)
        tl.store(out_ptr + begin + page, block_ids, mask=page < count)


def page_indices(out: torch.Tensor, block_tables: torch.Tensor, indptr: torch.Tensor, num_rows: int) -> None:
    """Write the block ids of row r's context to out[indptr[r] : indptr[r + 1]]. All int32; block_tables [R, max_blocks]"""
    page_indices_kernel[(num_rows,)](out, block_tables, indptr, block_tables.stride(0), PAGES=PAGES_AT_ONCE, num_warps=4)
