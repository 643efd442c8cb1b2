"""How fast can this machine multiply and read memory, right now? The other benchmarks give their figures as shares of it.

    python benchmarks/peaks.py

The last line printed is one JSON object: 1e9 operations per second (a multiply-add is two) and 1e9 bytes per second, of all
threads together; best and median of many short measurements. Memory reads are of the machine, whatever the variant.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Iterable
from typing import Any

import penstock
from penstock import machine
from penstock.backends.native._native import ProbeKind, peak_gops, peak_read_gbs, usable_variants

KINDS = {"int8": ProbeKind.INT8, "bf16": ProbeKind.BF16, "float32": ProbeKind.FLOAT32}
READ = "read"
READ_BYTES = 1 << 28
"""Several times the last-level cache."""
SHORT_S = 0.01
"""Time of one measurement: short enough that some fall between the interruptions of a shared machine."""


class PeakMeter:
    """Peaks as they were measured between the benchmark's own measurements, so that both saw the same machine."""

    def __init__(self, num_threads: int, variant: str, *, cpu_time: bool = False) -> None:
        """With `cpu_time`, the time that a thread waits for a processor counts for nothing."""
        self._options: dict[str, Any] = {
            "num_threads": num_threads,
            "variant": variant,
            "seconds": SHORT_S,
            "cpu_time": cpu_time,
        }
        self._samples: dict[str, list[float]] = {}

    def sample(self, names: Iterable[str] = (*KINDS, READ), *, repeat: int = 3) -> None:
        """Measure each of the named peaks `repeat` times, one after the other."""
        for name in names:
            for _ in range(1 if name == READ else repeat):
                self._samples.setdefault(name, []).append(self._measure(name, repeat))

    def _measure(self, name: str, repeat: int) -> float:
        if name == READ:  # most of the time goes into filling the memory: one after the other on the same
            return peak_read_gbs(num_bytes=READ_BYTES, repeat=3 * repeat, **self._options)
        return peak_gops(KINDS[name], repeat=1, **self._options)

    def best(self, name: str) -> float:
        return max(self._samples[name])

    def median(self, name: str) -> float:
        return statistics.median(self._samples[name])

    def bests(self) -> dict[str, float]:
        return {name: self.best(name) for name in self._samples}

    def medians(self) -> dict[str, float]:
        return {name: self.median(name) for name in self._samples}

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: {"best": round(self.best(name), 1), "median": round(self.median(name), 1)} for name in self._samples}


def context(num_threads: int, variant: str, *, cpu_time: bool = False) -> dict[str, Any]:
    """When, where and by which clock a benchmark ran; part of its JSON object."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "penstock": penstock.__version__,
        "cpu": machine.cpu_name(),
        "threads": num_threads,
        "variant": variant,
        "clock": "CPU time" if cpu_time else "wall time",
    }


def usable_threads() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--variant", choices=usable_variants(), help="all, if none is named")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    peaks = {}
    for variant in [args.variant] if args.variant else usable_variants():
        meter = PeakMeter(args.threads, variant)
        meter.sample(repeat=args.repeat)
        peaks[variant] = meter.summary()
        print(f"{variant}: " + ", ".join(f"{k} {v['best']:.0f}" for k, v in peaks[variant].items()), flush=True)
    print(json.dumps({"benchmark": "peaks", **context(args.threads, args.variant or ""), "peaks": peaks}))


if __name__ == "__main__":
    main()
