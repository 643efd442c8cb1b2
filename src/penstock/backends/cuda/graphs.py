"""Owns the captured graphs of decode steps: one for each listed number of rows and limit of their length.

Called by the executor with steps in which every row computes one token and samples. Never pads by itself: `padded_rows` says to
what size, and the executor fills the rest with rows of the null slot, whose KV goes to the null block.
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
SIZE_STEP = 8
"""Sizes above are multiples of it: less than 8 rows of a step are padding."""
LEAST_SEQ_LIMIT = 1024

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph; `replay` computes `result` anew from what lies at the addresses of the step that it was captured with."""

    replay: Callable[[], object]
    result: torch.Tensor

    @classmethod
    def without_device(cls, run: Run) -> Captured:
        """For tests where there is no GPU: its replay is to run it."""
        result = run()
        return cls(lambda: result.copy_(run()), result)


Capture = Callable[[Run], Captured]


class CudaCapture:
    """Makes graphs that share the memory of what they allocate, since they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Captured:
        """Record what `run` queues on the current stream, without running it. It must have run before."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator each time, while every row waits for a token.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
        return Captured(graph.replay, result)


class DecodeGraphs:
    """Captured lazily: the first step of a size runs as it is, which a capture needs before it, and is captured then.

    If a capture fails there are no more: steps run as they are.
    """

    def __init__(self, *, max_rows: int, max_model_len: int, capture: Capture) -> None:
        steps = range(SIZE_STEP, max_rows + SIZE_STEP, SIZE_STEP)
        self.sizes: list[int] = sorted({min(size, max_rows) for size in (*SMALL_SIZES, *steps)})
        self._max_model_len = max_model_len
        self._capture = capture
        self._graphs: dict[tuple[int, int], tuple[int, Captured]] = {}
        """By size and limit, with the address of the step's positions."""
        self._can_capture = True

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def padded_rows(self, num_rows: int) -> int:
        """The listed size that has room for so many rows."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def run(self, step: StepTensors, forward: Callable[[StepTensors], torch.Tensor]) -> torch.Tensor:
        """`forward` of a padded step, from a graph if there is one."""
        limit = self.seq_limit(step.max_seq_len)
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
        except RuntimeError as error:  # what CUDA and PyTorch raise, also for want of memory; the step itself has run
            _logger.warning("no CUDA graph of a decode step can be captured; kernels are launched one by one: %s", error)
            self._can_capture = False

    def seq_limit(self, max_seq_len: int) -> int:
        """What stands for the longest row's length: grids are made for it, so it should not be much more than the rows need."""
        limit = LEAST_SEQ_LIMIT
        while limit < max_seq_len:
            limit *= 2
        return min(limit, self._max_model_len)
