"""Converts rows a few at a time, to bound memory, on all processors. Called by `models.weights`; knows no format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Array = TypeVar("_Array", bound=NDArray[np.generic])
_SLICE_VALUES = 1 << 17
"""Values converted at a time by a thread: what NumPy makes on the way, a MiB or two, stays in the second-level cache."""


def row_slices(num_rows: int, num_cols: int) -> Iterator[slice]:
    """Consecutive slices of rows that cover all of them, of a bounded number of values each (but one row at least)."""
    step = max(1, _SLICE_VALUES // max(1, num_cols))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def convert_rows(convert: Callable[[slice], _Array], out: _Array, num_cols: int) -> _Array:
    """`out`, of which `convert` makes some rows at a time, in any order and from several threads.

    A row has `num_cols` values. NumPy leaves the interpreter's lock for most of it. What `convert` raises is raised.
    """
    slices = list(row_slices(len(out), num_cols))

    def fill(rows: slice) -> None:
        out[rows] = convert(rows)

    if len(slices) == 1:
        fill(slices[0])
        return out
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        for _ in threads.map(fill, slices):
            pass
    return out
