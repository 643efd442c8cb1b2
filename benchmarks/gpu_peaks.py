"""How fast can this GPU copy memory and multiply matrices, right now? Times launches; the GPU benchmarks give shares of it.

    python benchmarks/gpu_peaks.py

The last line printed is one JSON object: 1e9 bytes per second, read and written ones added, and 1e12 operations per second of a
bf16 product (a multiply-add is two); best and median of several measurements. Without a usable GPU it says why and ends with 1.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import penstock

MIN_REPLAYS = 5
SAMPLES = 5
COPY_BYTES = 2 << 30
MATRIX_SIDE = 8192
CPU_SIDE = 64
"""Of both, on a CPU: for the benchmarks' own tests."""


def require_gpu() -> None:
    """Ends the program with 1, and the cause, where there is no usable GPU."""
    from penstock.backends.cuda import why_not

    if (cause := why_not()) is not None:
        print(f"This benchmark measures an NVIDIA GPU, and there is none to use: {cause}.", file=sys.stderr)
        raise SystemExit(1)


class DeviceClock:
    """Times of launches, by the device: a graph of them is captured and replayed, so that the host's work counts for nothing.

    On a CPU, by the wall: for tests.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def seconds(self, launches: Sequence[Callable[[], None]]) -> float:
        """Of one launch: the median over replays of all in a row."""
        for launch in launches:
            launch()  # compiles, and touches the memory
        replay = self._captured(launches) if self.device == "cuda" else lambda: [launch() for launch in launches]
        replay()
        return statistics.median(self._replay_seconds(replay) for _ in range(MIN_REPLAYS)) / len(launches)

    def _captured(self, launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
        import torch

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        return graph.replay

    def _replay_seconds(self, replay: Callable[[], object]) -> float:
        if self.device != "cuda":
            begin = time.perf_counter()
            replay()
            return time.perf_counter() - begin
        import torch

        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        replay()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1e3


class GpuPeaks:
    """Peaks as they were measured between a benchmark's own measurements, so that both saw the same device."""

    def __init__(self, clock: DeviceClock) -> None:
        import torch

        self._clock = clock
        is_gpu = clock.device == "cuda"
        dtype = torch.bfloat16 if is_gpu else torch.float32
        num_copied = COPY_BYTES // 2 if is_gpu else CPU_SIDE
        side = MATRIX_SIDE if is_gpu else CPU_SIDE
        # Random: products of zeros take less power, and so less time.
        self._source = torch.empty(num_copied, dtype=dtype, device=clock.device).normal_()
        self._target = torch.empty_like(self._source)
        self._a, self._b = (torch.randn((side, side), dtype=dtype, device=clock.device) for _ in range(2))
        self._c = torch.empty_like(self._a)
        self.gbs: list[float] = []
        self.tflops: list[float] = []

    def sample(self) -> None:
        """Measure both once."""
        import torch

        copied = 2 * self._source.nbytes
        self.gbs.append(copied / self._clock.seconds([lambda: self._target.copy_(self._source)]) / 1e9)
        operations = 2.0 * self._a.shape[0] ** 3
        self.tflops.append(operations / self._clock.seconds([lambda: torch.mm(self._a, self._b, out=self._c)]) / 1e12)

    def bound_s(self, operations: float, num_bytes: float) -> float:
        """The least time of so much work, at the best peaks."""
        return max(operations / max(self.tflops) / 1e12, num_bytes / max(self.gbs) / 1e9)

    def summary(self) -> dict[str, dict[str, float]]:
        found = {"copy_gbs": self.gbs, "matrix_tflops": self.tflops}
        return {name: {"best": round(max(v), 1), "median": round(statistics.median(v), 1)} for name, v in found.items()}


def context(device: str) -> dict[str, Any]:
    """When and where a benchmark ran; part of its JSON object."""
    import torch
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "penstock": penstock.__version__,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none: the interpreter on a CPU, whose times mean nothing",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    require_gpu()
    peaks = GpuPeaks(DeviceClock("cuda"))
    for _ in range(SAMPLES):
        peaks.sample()
    print(json.dumps({"benchmark": "gpu_peaks", **context("cuda"), "peaks": peaks.summary()}))


if __name__ == "__main__":
    main()
