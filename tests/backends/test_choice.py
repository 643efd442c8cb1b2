"""A variant is used once it has passed a self-test in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.backends.native import choice, self_test
from penstock.backends.native.choice import SELF_TEST, Choice, choose
from support.native_variants import VARIANTS

WITH_A_FAULT = """
import ctypes, mmap, sys
from penstock.backends.native import self_test

sound = self_test.Engine
fault = {fault!r}

class Engine:
    def __init__(self, *, variant, **shape):
        self.variant, self.engine = variant, sound(variant=variant, **shape)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def logits_step(self, *arrays):
        self.engine.logits_step(*arrays)
        if self.variant != "avx2":
            return
        if fault == "wrong":
            arrays[8][-1, 5] += 1e-3
        elif fault == "nan":
            arrays[8][0, 0] = float("nan")
        elif fault == "illegal":
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(bytes([0x0F, 0x0B]))  # ud2
            ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        elif fault == "endless":
            while True:
                pass

self_test.Engine = Engine
self_test.MAX_CPU_S = 1
sys.argv = ["self_test", *sys.argv[1:]]
self_test.run()
"""


def program(fault: str) -> list[str]:
    """The self-test, with a fault in the avx2 kernels."""
    return [sys.executable, "-c", WITH_A_FAULT.format(fault=fault)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_variants_of_this_machine_pass(variant: str) -> None:
    if variant != "amx-emulated":  # the reference of amx, which differs from portable code
        assert self_test.main(variant) == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("wrong", "results of q4_0 differ by 0.0002 of the largest one"),
        ("nan", "results of q4_0 differ by nan of the largest one"),
        ("illegal", "ended by SIGILL"),
        ("endless", "ended by SIGXCPU"),
    ],
)
@pytest.mark.skipif("avx2" not in VARIANTS, reason="the fault is one of the avx2 kernels")
def test_a_faulty_variant_gives_way_to_the_next_and_the_verdict_is_kept(
    fault: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "illegal" and sys.platform != "linux":
        pytest.skip("writes x86 machine code")
    file = tmp_path / "cache" / "kernels"
    first = choose(["avx2", "portable"], file, "m", program(fault))
    assert first == Choice("portable", {"avx2": words})
    assert caplog.text.count("failed its self-test") + caplog.text.count("failed their self-test") == 1
    assert first.words == f", not avx2, which failed its self-test ({words})"
    assert choose(["avx2", "portable"], file, "m", ["/nothing/starts/this"]) == first
    assert caplog.text.count("failed their self-test") == 1


def test_a_variant_that_passes_is_tested_once(tmp_path: Path) -> None:
    file = tmp_path / "kernels"
    best = [name for name in VARIANTS if name != "amx-emulated"]
    for self_test_program in (SELF_TEST, ["/nothing/starts/this"]):
        assert choose(best, file, "m", self_test_program) == Choice(best[0], {})
    assert not file.exists() or file.read_text() == f"m\n{best[0]} "


@pytest.mark.parametrize("kept", ["", "m", "other\na bad", "m\nb bad"])
def test_what_another_machine_or_nobody_wrote_does_not_count(kept: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels"
    file.write_text(kept)
    assert choose(["a", "portable"], file, "m", [sys.executable, "-c", ""]) == Choice("a", {})


def test_a_process_that_only_waits_gives_way_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the fault of a busy machine, so the next start tests again."""
    monkeypatch.setattr(choice, "TIMEOUT_S", 0.2)
    file = tmp_path / "kernels"
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert choose(["a", "portable"], file, "m", waiting) == Choice("portable", {"a": "no result within 0.2 s"})
    assert choose(["a", "portable"], file, "m", [sys.executable, "-c", ""]) == Choice("a", {})


@pytest.mark.parametrize("self_test_program", [["/nothing/starts/this"], [sys.executable, "-c", "import nothing_like_that"]])
def test_a_test_that_cannot_run_condemns_nothing(
    self_test_program: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(["a", "portable"], tmp_path / "kernels", "m", self_test_program) == Choice("a", {})
    assert "could not run: " in caplog.text
    assert not (tmp_path / "kernels").exists()


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose(["a", "portable"], tmp_path / "file" / "kernels", "m", [sys.executable, "-c", ""]) == Choice("a", {})
