"""The CPU backend: describes its kernels and measures how fast they can be on this machine."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from penstock.machine import available_memory_bytes, data_cache_bytes

_log = logging.getLogger(__name__)

KV_TILE = 16  # block sizes must be multiples of this (`kKvTile` in native/kernels/kernels.h).
LARGEST_HEAD_DIM = 576  # `kLargestHeadDim` in native/kernels/kernels.h.


class KernelInfo(TypedDict):
    """The kernels of this build that this machine can run."""

    variants: list[str]  # usable instruction-set variants, best first
    why_no_tiles: str
    """The reason if the processor has AMX tiles that can't be used, else empty."""


def info() -> KernelInfo:
    """Return the kernels that this machine can run. Raises ImportError if the compiled module was not built."""
    from penstock.backends.native import _native

    return {"variants": _native.usable_variants(), "why_no_tiles": _native.why_no_tiles()}


def spreading_refusal(nodes: Sequence[int]) -> str | None:
    """Return why the system can't spread memory over these NUMA nodes, and a remedy, or None."""
    from penstock.backends.native import _native

    try:
        error = _native.spreading_error(nodes)
    except ValueError as unknown:
        return str(unknown)
    if error == errno.EEXIST:
        return "the policy that the process was started with stays (numactl)"
    remedy = "; give the container CAP_SYS_NICE (--cap-add SYS_NICE)" if error == errno.EPERM else ""
    return os.strerror(error) + remedy if error else None


PROBE_S = 0.01  # short enough that some measurements fall between the interruptions of a shared machine
PROBED_CACHES = 4
"""A probe reads this many times the size of the caches, so that few reads hit them (docs/performance.md, Peaks)."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peak speeds of all threads together: the best of several short measurements."""

    variant: str
    quantised: str  # the arithmetic of quantised weights: int8, or bf16 tiles
    quantised_ops_per_s: float
    bf16_ops_per_s: float
    read_bytes_per_s: float


def probed_bytes() -> int:
    """Return how many bytes to read to measure memory's speed: much more than the caches hold, at most half of what is free."""
    wanted, most = max(1 << 28, PROBED_CACHES * data_cache_bytes()), available_memory_bytes() // 2
    if wanted > most:
        _log.warning(
            "The speed of memory is measured on %d MiB instead of %d, because no more than twice as much is available. It may "
            "partly be the speed of the caches: free memory, and measure again.",
            most >> 20,
            wanted >> 20,
        )
    return min(wanted, most)


def probe_peaks(num_threads: int, variant: str) -> Peaks:
    """Measure how fast this machine multiplies and reads memory. Takes seconds."""
    from penstock.backends.native import _native
    from penstock.backends.native._native import ProbeKind

    def best(kind: ProbeKind) -> float:
        return 1e9 * max(
            _native.peak_gops(kind, num_threads=num_threads, variant=variant, seconds=PROBE_S, repeat=1) for _ in range(8)
        )

    read_gbs = _native.peak_read_gbs(
        num_threads=num_threads, num_bytes=probed_bytes(), variant=variant, seconds=PROBE_S, repeat=8
    )
    if variant == "amx":
        tiles = best(ProbeKind.BF16_TILES)
        return Peaks(variant, "bf16 tiles", tiles, tiles, 1e9 * read_gbs)
    return Peaks(variant, "int8", best(ProbeKind.INT8), best(ProbeKind.BF16), 1e9 * read_gbs)
