"""How fast can this machine multiply and read memory, right now? The other benchmarks give their figures as shares of it.

    python benchmarks/peaks.py

1e9 operations per second (a multiply-add is two) and 1e9 bytes per second, of all threads together; best and median of many
short measurements. Memory reads are of the machine, whatever the variant, and of more memory than its caches hold. The last
line is a JSON object with the best of each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from printed import origin, table

import penstock
from penstock import machine
from penstock.backends.native import probed_bytes
from penstock.backends.native._native import ProbeKind, peak_gops, peak_read_gbs, usable_variants

KINDS = {kind.name.lower(): kind for kind in ProbeKind}
"""The names of all; tiles multiply at 0 GOP/s where there are none."""
READ = "read"
SHORT_S = 0.01
"""Time of one measurement: short enough that some fall between the interruptions of a shared machine."""
LEAST_TURNS = 3
Case = TypeVar("Case")


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

    @cached_property
    def _num_bytes(self) -> int:
        return probed_bytes()

    def sample(self, names: Iterable[str] = (*KINDS, READ), *, repeat: int = 3) -> None:
        """Measure each of the named peaks `repeat` times, one after the other."""
        for name in names:
            for _ in range(1 if name == READ else repeat):
                self._samples.setdefault(name, []).append(self._measure(name, repeat))

    def _measure(self, name: str, repeat: int) -> float:
        if name == READ:  # most of the time goes into filling the memory: one after the other on the same
            return peak_read_gbs(num_bytes=self._num_bytes, repeat=3 * repeat, **self._options)
        return peak_gops(KINDS[name], repeat=1, **self._options)

    def best(self, name: str) -> float:
        return max(self._samples[name])

    def median(self, name: str) -> float:
        return statistics.median(self._samples[name])


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one run."""

    operations: float
    num_bytes: float

    def share(self, seconds: float, meter: PeakMeter, kind: str) -> float:
        """The least time that the machine needs for it, at its best peaks, over the time that it took."""
        return max(self.operations / meter.best(kind), self.num_bytes / meter.best(READ)) / 1e9 / seconds


def fastest_s(
    run: Callable[[Case], float], cases: Sequence[Case], meter: PeakMeter, kind: str, seconds: float
) -> dict[Case, float]:
    """Seconds of the fastest run of every case: all in turn, the peak after each turn, for `seconds`, three turns at least."""
    meter.sample([kind, READ])
    times: dict[Case, list[float]] = {}
    for case in cases:
        run(case)  # touches the memory
        times[case] = []
    end = time.monotonic() + seconds
    turns = 0
    while turns < LEAST_TURNS or time.monotonic() < end:
        for case in cases:
            times[case].append(run(case))
        meter.sample([kind], repeat=1)
        turns += 1
    meter.sample([READ])
    return {case: min(found) for case, found in times.items()}


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
    return machine.find_cores().num_threads


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args(words)
    meters = {variant: PeakMeter(usable_threads(), variant) for variant in usable_variants()}
    for meter in meters.values():
        meter.sample(repeat=args.repeat)
    kinds = [kind for kind in KINDS if any(meter.best(kind) > 0 for meter in meters.values())]
    rows = []
    for variant, meter in meters.items():
        rows.append([variant, *(f"{meter.best(name):.0f} ({meter.median(name):.0f})" for name in (*kinds, READ))])
    print(origin(f"{usable_threads()} threads", "best (median)"))
    print(table(["", *(f"{kind} GOP/s" for kind in kinds), "DRAM GB/s"], rows))
    found = {variant: {name: meter.best(name) for name in (*kinds, READ)} for variant, meter in meters.items()}
    print(json.dumps({"benchmark": "peaks", **context(usable_threads(), ""), "peaks": found}))


if __name__ == "__main__":
    main()
