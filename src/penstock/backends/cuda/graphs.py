"""Owns the captured graphs of decode steps: one for each listed number of rows and limit of their length, of which many sizes
have a single one: what a limit changes is how many programs the attention of a row is launched with, and where there are many
rows, that is few for any length.

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
SIZE_STEPS = ((8, 64), (16, 256), (32, 1 << 30))
"""(step, up to how many rows). Less than eight rows of a step are padding, or less than a fifth of them; and what there is to
capture stays little: 23 sizes for 256 rows."""
LEAST_SEQ_LIMIT = 1024
USUAL_SEQ_LEN = 4096
"""Positions of requests whose graphs are captured before the first one comes. Longer ones, among few rows, are rarer than the
start of a server is."""

Programs = Callable[[int, int], int]
"""Number of programs, by some measure, of the attention of so many rows with a limit of their length."""

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
        self._graphs: list[torch.cuda.CUDAGraph] = []
        """All of them, also those that failed. With each that goes, PyTorch (2.13, for one) frees the memory that cuBLAS works
        in on the stream, and whatever was captured there before still writes to it: pytorch/pytorch#193402."""

    def __call__(self, run: Run) -> Captured:
        """Record what `run` queues on the current stream, without running it. It must have run before."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator each time, while every row waits for a token.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
        return Captured(graph.replay, result)


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """The graphs that were captured before requests come."""

    num_captured: int
    num_left: int
    """Captured when they are needed."""
    seconds: float


class DecodeGraphs:
    """A step whose graph is not there runs as it is, which a capture needs before it, and is captured then.

    If a capture fails there are no more: steps run as they are.
    """

    def __init__(self, *, max_rows: int, max_model_len: int, programs: Programs, capture: Capture) -> None:
        self.sizes = listed_sizes(max_rows)
        self._max_model_len = max_model_len
        self._programs = programs
        self._limits: dict[int, list[int]] = {}
        """By size; ascending."""
        self._capture = capture
        self._graphs: dict[tuple[int, int], tuple[int, Captured]] = {}
        """By size and limit, with the address of the step's positions."""
        self._can_capture = True

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_left(self) -> int:
        """That steps may still ask for."""
        if not self._can_capture:
            return 0
        return sum((size, limit) not in self._graphs for size in self.sizes for limit in self._limits_of(size))

    def capture_usual(
        self, run: Callable[[int, int], None], most: int | None, max_seconds: float, clock: Callable[[], float]
    ) -> CaptureRun:
        """Those for lengths up to `USUAL_SEQ_LEN` that are not there, the largest first: what it takes of the memory that they
        share is enough for the others. At most `most`, and none is begun after `max_seconds` of the clock.

        `run` is called with a number of rows and a limit, and has to run such a step. Raises MemoryError if not even that has
        room, which it must have before any capture.
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
        """The listed size that has room for so many rows."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def run(self, step: StepTensors, forward: Callable[[StepTensors], torch.Tensor]) -> torch.Tensor:
        """`forward` of a padded step, from a graph if there is one."""
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
        except RuntimeError as error:  # what CUDA and PyTorch raise, also for want of memory; the step itself has run
            _logger.warning("no CUDA graph of a decode step can be captured; kernels are launched one by one: %s", error)
            self._can_capture = False

    def seq_limit(self, num_rows: int, max_seq_len: int) -> int:
        """The number that stands for the longest row's length in a step of a listed size."""
        limits = self._limits_of(num_rows)
        return limits[bisect_left(limits, max_seq_len)]

    def _limits_of(self, num_rows: int) -> list[int]:
        """Each twice the one before, as long as that halves the programs; the last one is for all lengths."""
        if num_rows not in self._limits:
            limits, limit, most = [], LEAST_SEQ_LIMIT, self._programs(num_rows, self._max_model_len)
            while limit < self._max_model_len and not self._suits_all(num_rows, limit, most):
                limits.append(limit)
                limit *= 2
            self._limits[num_rows] = [*limits, self._max_model_len]
        return self._limits[num_rows]

    def _suits_all(self, num_rows: int, limit: int, most: int) -> bool:
        """Whether what is launched for any length is less than twice what the limit needs: no more than limits cost anyway."""
        programs = self._programs(num_rows, limit)
        return programs == most or 0 < most < 2 * programs


def listed_sizes(max_rows: int) -> list[int]:
    """The numbers of rows that steps are padded to, ascending."""
    sizes, size = {*SMALL_SIZES}, 0
    for step, last in SIZE_STEPS:
        while size < min(last, max_rows):
            size += step
            sizes.add(size)
    return sorted({min(size, max_rows) for size in sizes})
