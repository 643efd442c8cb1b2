"""The probes: they give a bound that no kernel can be above, in every instruction set that this machine can run."""

from __future__ import annotations

import os

import pytest

from penstock.backends import native
from penstock.backends.native._native import ProbeKind, emulated_variants, peak_gops, peak_read_gbs, usable_variants

SHORT = {"seconds": 0.002, "repeat": 3}
MIB = 1 << 20


@pytest.mark.parametrize("variant", [*usable_variants(), *emulated_variants()])
@pytest.mark.parametrize("kind", list(ProbeKind))
def test_every_peak_is_that_of_a_cpu(variant: str, kind: ProbeKind) -> None:
    if kind.name.endswith("TILES") and not variant.startswith("amx"):
        assert peak_gops(kind, num_threads=2, variant=variant, **SHORT) == 0.0
    else:
        assert 0.1 < peak_gops(kind, num_threads=2, variant=variant, **SHORT) < 1e6


@pytest.mark.parametrize("variant", usable_variants())
def test_memory_is_read(variant: str) -> None:
    assert 0.1 < peak_read_gbs(num_threads=2, num_bytes=8 * MIB, variant=variant, **SHORT) < 1e5


@pytest.mark.parametrize(
    ("caches", "available", "probed"),
    [
        (0, 8 << 30, 256 * MIB),
        (128 * MIB, 8 << 30, 512 * MIB),
        (484 * MIB, 8 << 30, 1936 * MIB),
        (484 * MIB, 1 << 30, 512 * MIB),
    ],
)
def test_more_memory_is_probed_than_caches_hold(
    caches: int, available: int, probed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "data_cache_bytes", lambda: caches)
    monkeypatch.setattr(native, "available_memory_bytes", lambda: available)
    assert native.probed_bytes() == probed
    warned = "\n".join(caplog.messages)
    assert ("measured on 512 MiB instead of 1936" in warned) if probed < native.PROBED_CACHES * caches else not warned


def test_waiting_for_a_processor_counts_only_in_wall_time() -> None:
    crowd = {"num_threads": 8 * len(os.sched_getaffinity(0)), "seconds": 0.03, "repeat": 1}
    assert peak_gops(ProbeKind.INT8, cpu_time=True, **crowd) > 2 * peak_gops(ProbeKind.INT8, **crowd)


def test_without_a_variant_it_is_the_best_one() -> None:
    best = max(peak_gops(ProbeKind.INT8, num_threads=1, **SHORT) for _ in range(5))
    assert best > 0.5 * peak_gops(ProbeKind.INT8, num_threads=1, variant=usable_variants()[0], **SHORT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 1, "seconds": 0.0}, "seconds"),
        ({"num_threads": 1, "seconds": float("nan")}, "seconds"),
        ({"num_threads": 1, "repeat": 0}, "repeat"),
        ({"num_threads": 1, "variant": "sse9"}, "sse9"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peak_gops(ProbeKind.INT8, **options)
    with pytest.raises(ValueError, match=message):
        peak_read_gbs(num_bytes=8 * MIB, **options)


def test_every_thread_needs_memory_of_its_own() -> None:
    with pytest.raises(ValueError, match="1 MiB"):
        peak_read_gbs(num_threads=4, num_bytes=3 * MIB)
