"""Converts a matrix a few rows at a time, to bound memory, on all processors. Called by `gguf_tensors`; knows no format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

_SLICE_VALUES = 1 << 18
"""Values converted at a time by a thread: what NumPy makes on the way, a few MiB, stays near the processor."""


def row_slices(num_rows: int, num_cols: int) -> Iterator[slice]:
    """Consecutive slices of rows that cover all of them, of a bounded number of values each (but one row at least)."""
    step = max(1, _SLICE_VALUES // max(1, num_cols))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def convert_rows(
    convert: Callable[[slice], NDArray[np.uint8]], num_rows: int, num_cols: int, row_bytes: int
) -> NDArray[np.uint8]:
    """uint8 [num_rows, row_bytes], of which `convert` makes some rows at a time, in any order and from several threads.

    NumPy leaves the interpreter's lock for most of it. What `convert` raises is raised.
    """
    out = np.empty((num_rows, row_bytes), dtype=np.uint8)

    def fill(rows: slice) -> None:
        out[rows] = convert(rows)

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        for _ in threads.map(fill, row_slices(num_rows, num_cols)):
            pass
    return out
