"""CUDA graphs of decode steps, one for each listed number of rows and length limit. The executor pads steps to a listed size.

The limit of sequence lengths decides how many attention programs a row gets. With many rows, one limit suffices.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from penstock.backends.cuda.step import StepTensors

_logger = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4)
SIZE_STEPS = ((8, 64), (16, 256), (32, 1 << 30))
"""(step, last size): sizes grow by `step` up to `last size`. Padding is below eight rows or a fifth."""
LEAST_SEQ_LIMIT = 1024
USUAL_SEQ_LEN = 4096
"""Graphs for rows up to this length are captured at startup, others when first needed."""

Programs = Callable[[int, int], int]
"""Returns the attention programs per row for (number of rows, length limit)."""

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A captured CUDA graph. `replay` recomputes `result` from the captured step's tensors."""

    replay: Callable[[], object]
    result: torch.Tensor

    @classmethod
    def without_device(cls, run: Run) -> Captured:
        """Make a stand-in without a GPU, for tests: `replay` calls `run`."""
        result = run()
        return cls(lambda: result.copy_(run()), result)


Capture = Callable[[Run], Captured]


class CudaCapture:
    """Captures CUDA graphs. They share memory, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        """All graphs, even failed ones. Freeing one makes PyTorch (2.13 at least) free the cuBLAS workspace that other graphs
        still use: pytorch/pytorch#193402."""

    def __call__(self, run: Run) -> Captured:
        """Capture the GPU work that `run` queues. Call `run` once before."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator while every row waits for a token.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
        return Captured(graph.replay, result)


@dataclass(frozen=True, slots=True)
class CaptureRun:
    num_captured: int
    num_left: int
    seconds: float


class DecodeGraphs:
    """Runs decodes by CUDA graph. A step without a graph runs normally and is then captured. After a failure, captures stop."""

    def __init__(self, *, max_rows: int, max_model_len: int, programs: Programs, capture: Capture) -> None:
        self.sizes = listed_sizes(max_rows)
        self._max_model_len = max_model_len
        self._programs = programs
        self._limits: dict[int, list[int]] = {}
        """Length limits by number of rows, ascending."""
        self._capture = capture
        self._graphs: dict[tuple[int, int], tuple[int, Captured]] = {}
        """(rows, length limit) -> (address of the captured step's positions, graph)"""
        self._can_capture = True

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_left(self) -> int:
        if not self._can_capture:
            return 0
        return sum((size, limit) not in self._graphs for size in self.sizes for limit in self._limits_of(size))

    def capture_usual(
        self, run: Callable[[int, int], None], most: int | None, max_seconds: float, clock: Callable[[], float]
    ) -> CaptureRun:
        """Capture missing graphs for sequences up to `USUAL_SEQ_LEN`, at most `most`, largest first: others share its memory.

        `run(rows, limit)` runs a step, which captures it. No capture begins after `max_seconds`. Raises MemoryError if a step
        does not fit even uncaptured.
        """
        begin, num_before = clock(), self.num_captured
        for count, (size, limit) in enumerate(self._usual()[:most], 1):
            if clock() - begin >= max_seconds:
                break
            try:
                run(size, limit)
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"the GPU has no room for a decode of {size} rows: {error}") from error
            if self.num_captured < num_before + count:
                break
        return CaptureRun(self.num_captured - num_before, self.num_left, clock() - begin)

    def _usual(self) -> list[tuple[int, int]]:
        longest = min(USUAL_SEQ_LEN, self._max_model_len)
        limits = {
            size: [limit for limit in self._limits_of(size) if limit <= self.seq_limit(size, longest)] for size in self.sizes
        }
        return sorted({(size, limit) for size in self.sizes for limit in limits[size]} - self._graphs.keys(), reverse=True)

    def padded_rows(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def run(self, step: StepTensors, forward: Callable[[StepTensors], torch.Tensor]) -> torch.Tensor:
        """Return `forward(step)` for a padded decode, by its graph if there is one. Otherwise capture a graph afterwards."""
        limit = self.seq_limit(step.num_rows, step.max_seq_len)
        key = step.num_rows, limit
        address = step.positions.data_ptr()
        if key in self._graphs:
            captured_at, captured = self._graphs[key]
            assert address == captured_at, "a step does not lie where the graph was captured"
            captured.replay()
            return captured.result
        step = replace(step, max_seq_len=limit)
        result = forward(step)
        if self._can_capture:
            self._keep(key, address, lambda: forward(step))
        return result

    def _keep(self, key: tuple[int, int], address: int, run: Run) -> None:
        try:
            self._graphs[key] = address, self._capture(run)
        except RuntimeError as error:  # CUDA and PyTorch raise it, even if memory runs out; the step itself has run
            _logger.warning("no CUDA graph of a decode step can be captured; kernels are launched one by one: %s", error)
            self._can_capture = False

    def seq_limit(self, num_rows: int, max_seq_len: int) -> int:
        limits = self._limits_of(num_rows)
        return limits[bisect_left(limits, max_seq_len)]

    def _limits_of(self, num_rows: int) -> list[int]:
        """Return sequence length limits, a graph for each. The last allows every length.

        Limits double while a lower one at least halves the attention programs.
        """
        if num_rows not in self._limits:
            limits, limit, most = [], LEAST_SEQ_LIMIT, self._programs(num_rows, self._max_model_len)
            while limit < self._max_model_len and not self._suits_all(num_rows, limit, most):
                limits.append(limit)
                limit *= 2
            self._limits[num_rows] = [*limits, self._max_model_len]
        return self._limits[num_rows]

    def _suits_all(self, num_rows: int, limit: int, most: int) -> bool:
        programs = self._programs(num_rows, limit)
        return programs == most or 0 < most < 2 * programs


def listed_sizes(max_rows: int) -> list[int]:
    sizes, size = {*SMALL_SIZES}, 0
    for step, last in SIZE_STEPS:
        while size < min(last, max_rows):
            size += step
            sizes.add(size)
    return sorted({min(size, max_rows) for size in sizes})
