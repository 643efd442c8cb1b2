"""How fast can this GPU copy memory and multiply matrices, right now? Times launches; the GPU benchmarks give shares of it.

    python benchmarks/gpu_peaks.py
    python benchmarks/gpu_peaks.py --self-test       # tiny, on a CPU: shows that it runs

At the end it prints a paragraph, and in the last line one JSON object: 1e9 bytes per second, read and written ones added, and
1e12 operations per second of a bf16 product (a multiply-add is two); best and median of several measurements. Without a usable
GPU it says why and ends with 1.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_tables import show
from gpu_work import Work

import penstock

NUM_REPLAYS = 5
SAMPLES = 5
COPY_BYTES = 2 << 30
MATRIX_SIDE = 8192
CPU_SIDE = 64
"""Side of both matrices on a CPU: for the benchmarks' own tests."""


def require_gpu() -> None:
    """Without a usable GPU, print why and exit with 1."""
    from penstock.backends.cuda import why_not

    if (cause := why_not()) is not None:
        print(f"This benchmark measures an NVIDIA GPU, and there is none to use: {cause}.", file=sys.stderr)
        raise SystemExit(1)


def rounded(value: float) -> float:
    """Round to four significant digits: small values stay above 0."""
    return float(f"{value:.4g}")


@dataclass(frozen=True, slots=True)
class Measured:
    """The work of a launch, and its time."""

    work: Work
    seconds: Sequence[float]
    """Time of each measurement."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


class DeviceClock:
    """Times launches by the device's clock: captures and replays a graph of them, so that the host's work does not count.

    On a CPU, by wall time: for tests.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def seconds(self, launches: Sequence[Callable[[], None]]) -> list[float]:
        """The time of one launch: the average in each replay of all in a row."""
        for launch in launches:
            launch()  # compiles, and touches the memory
        replay = self._captured(launches) if self.device == "cuda" else lambda: [launch() for launch in launches]
        replay()
        return [self._replay_seconds(replay) / len(launches) for _ in range(NUM_REPLAYS)]

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
        self._clock = clock
        self._launches: list[Callable[[], None]] = []
        self._copied_bytes = 0
        self._operations = 0.0
        self.gbs: list[float] = []
        self.tflops: list[float] = []

    def sample(self) -> None:
        """Measure both once. Takes memory, which it keeps until `release`."""
        if not self._launches:
            self._allocate()
        copy_s, product_s = (statistics.median(self._clock.seconds([launch])) for launch in self._launches)
        self.gbs.append(self._copied_bytes / copy_s / 1e9)
        self.tflops.append(self._operations / product_s / 1e12)

    def release(self) -> None:
        """Free the memory for users of the whole device."""
        self._launches.clear()
        if self._clock.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _allocate(self) -> None:
        import torch

        device, is_gpu = self._clock.device, self._clock.device == "cuda"
        dtype = torch.bfloat16 if is_gpu else torch.float32
        num_copied = COPY_BYTES // 2 if is_gpu else CPU_SIDE
        side = MATRIX_SIDE if is_gpu else CPU_SIDE
        # Random: products of zeros take less power, and so less time.
        source = torch.empty(num_copied, dtype=dtype, device=device).normal_()
        target = torch.empty_like(source)
        a, b = (torch.randn((side, side), dtype=dtype, device=device) for _ in range(2))
        c = torch.empty_like(a)
        self._copied_bytes, self._operations = 2 * source.nbytes, 2.0 * side**3
        self._launches = [lambda: target.copy_(source), lambda: torch.mm(a, b, out=c)]

    def bound_s(self, work: Work) -> float:
        """The least time of so much work, at the best peaks so far."""
        return max(work.operations / max(self.tflops) / 1e12, work.num_bytes / max(self.gbs) / 1e9)

    def share(self, measured: Measured) -> float:
        """The least time over the median."""
        return self.bound_s(measured.work) / measured.median_s

    def figures(self, measured: Measured) -> dict[str, Any]:
        """Part of a benchmark's JSON object, at its end: shares are of the best peaks so far."""
        work, seconds = measured.work, measured.median_s
        gbs, tflops = work.num_bytes / seconds / 1e9, work.operations / seconds / 1e12
        return {
            "us": rounded(seconds * 1e6),
            "us_range": [rounded(edge(measured.seconds) * 1e6) for edge in (min, max)],
            "operations": work.operations,
            "bytes": work.num_bytes,
            "gbs": rounded(gbs),
            "tflops": rounded(tflops),
            "bandwidth_share": rounded(gbs / max(self.gbs)),
            "matrix_share": rounded(tflops / max(self.tflops)),
            "share": rounded(self.share(measured)),
        }

    def summary(self) -> dict[str, dict[str, float]]:
        found = {"copy_gbs": self.gbs, "matrix_tflops": self.tflops}
        return {name: {"best": rounded(max(v)), "median": rounded(statistics.median(v))} for name, v in found.items()}


def use_interpreter() -> str:
    """Return the device for self-tests, "cpu" without a GPU. Call before importing triton."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.interpreted import DEVICE

    return str(DEVICE)


def context(device: str, *, is_self_test: bool) -> dict[str, Any]:
    """When, where and how a benchmark ran; part of its JSON object. `gpu` is None where there was none."""
    import torch
    import triton

    from penstock.backends.cuda import flashinfer_version

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "is_self_test": is_self_test,
        "penstock": penstock.__version__,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flashinfer": flashinfer_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="tiny, on a CPU; its figures mean nothing")
    args = parser.parse_args()
    if args.self_test:
        device = use_interpreter()
    else:
        require_gpu()
        device = "cuda"
    peaks = GpuPeaks(DeviceClock(device))
    for _ in range(SAMPLES):
        peaks.sample()
    ridge = f"Work with less than {1e3 * max(peaks.tflops) / max(peaks.gbs):.0f} operations per byte is bound by memory."
    result = {"benchmark": "gpu_peaks", **context(device, is_self_test=args.self_test), "peaks": peaks.summary()}
    show(result, lambda _: {"peaks": [ridge]})


if __name__ == "__main__":
    main()
