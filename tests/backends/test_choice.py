"""A variant is used once it has passed a self-test in a process of its own."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from penstock.backends.native import choice, self_test
from penstock.backends.native._native import usable_variants
from penstock.backends.native.choice import SELF_TEST, Choice, choose

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
if fault == "endless":
    self_test.MAX_CPU_S = 1
sys.argv = ["self_test", *sys.argv[1:]]
self_test.run()
"""


def program(fault: str) -> list[str]:
    """The self-test, with a fault in the avx2 kernels."""
    return [sys.executable, "-c", WITH_A_FAULT.format(fault=fault)]


@pytest.mark.parametrize("variant", usable_variants())
def test_the_variants_of_this_machine_pass(variant: str) -> None:
    assert self_test.first_difference(variant) == ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("wrong", "results of q4_0 differ by 4e-05 of the largest one"),
        ("nan", "results of q4_0 differ by nan of the largest one"),
        ("illegal", "ended by SIGILL"),
        ("endless", "ended by SIGXCPU"),
    ],
)
@pytest.mark.skipif("avx2" not in usable_variants(), reason="the fault is one of the avx2 kernels")
def test_a_faulty_variant_gives_way_to_the_next_and_the_verdict_is_kept(
    fault: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cache" / "kernels"
    first = choose(["avx2", "portable"], file, "m", program(fault))
    assert first == Choice("portable", {"avx2": words})
    assert f"The avx2 kernels failed their self-test on this processor ({words}), so others are used." in caplog.text
    assert f"to test again, delete {file}" in caplog.text
    assert first.words == f", not avx2, which failed its self-test ({words})"
    assert choose(["avx2", "portable"], file, "m", ["/nothing/starts/this"]) == first
    assert caplog.text.count("failed their self-test") == 1


PASSING = [sys.executable, "-c", "print('noise'); print('passed')"]
UNSTARTABLE = ["/nothing/starts/this"]


@pytest.mark.skipif("usable_variants() == ['portable']", reason="portable kernels are not tested")
def test_a_variant_that_passes_is_tested_once(tmp_path: Path) -> None:
    file, variants = tmp_path / "kernels", usable_variants()
    for program in (SELF_TEST, UNSTARTABLE):
        assert choose(variants, file, "m", program) == Choice(variants[0], {})
    assert file.read_text() == f"m\n{variants[0]} "
    assert file.stat().st_mode & 0o777 == 0o644


BITS = [
    "q4_0 37aef919",
    "q4_1 bbf00767",
    "q5_1 6852c0a9",
    "q8_0 dc9d4387",
    "iq4_nl 4e2d88d9",
    "bf16 cce92605",
    "texts 618d49e3",
    "states 07c59254",
]
"""The logits of the self-test's models, as AVX2 computes them: what a machine with Arm is compared with."""


def test_variants_of_avx_and_of_neon_have_the_same_bits() -> None:
    """Answers do not depend on which of these processors computes them."""
    for name in usable_variants():
        if name.startswith(("avx", "neon")):
            bits = [f"{part} {hashlib.sha256(found.tobytes()).hexdigest()[:8]}" for part, found, _ in self_test.results(name)]
            assert bits == BITS, name


@pytest.mark.parametrize("kept", ["", "m", "other\na bad", "m\nb bad"])
def test_verdicts_on_other_machines_or_variants_do_not_count(kept: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels"
    file.write_text(kept)
    assert choose(["a", "portable"], file, "m", PASSING) == Choice("a", {})
    assert "a " in file.read_text().splitlines()


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (UNSTARTABLE, "No such file"),
        ([sys.executable, "-c", "import nothing_like_that"], "No module named 'nothing_like_that'"),
        ([sys.executable, "-c", ""], "status 0 and no verdict"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], "status -15 and no verdict"),
        ([sys.executable, "-c", "import os; print('ready', flush=True); os.kill(os.getpid(), 9)"], "status -9 and no verdict"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"], "status -40 and no verdict"),
        ([sys.executable, "-c", "import sys; sys.stdout.buffer.write(bytes([255]))"], "status 0 and no verdict"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "timed out after 0.2 seconds"),
    ],
    ids=[
        "unstartable",
        "not installed",
        "silent",
        "ended early",
        "killed",
        "real-time signal",
        "garbage",
        "waiting",
    ],
)
def test_a_test_that_cannot_run_condemns_nothing(
    program: list[str], cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause lies outside the kernels, so the next start tests again."""
    if "sleep" in program[-1]:
        monkeypatch.setattr(choice, "TIMEOUT_S", 0.2)
    file = tmp_path / "kernels"
    assert choose(["a", "portable"], file, "m", program) == Choice("a", {})
    assert "could not run: " in caplog.text
    assert cause in caplog.text
    assert not file.exists()


def test_the_process_is_out_of_reach_of_the_terminal_and_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    look = "import os; print('failed', os.getpgid(0) == os.getpid(), sorted(k for k in os.environ if 'KEY' in k))"
    assert choose(["a", "portable"], None, "m", [sys.executable, "-c", look]).faults == {"a": "True []"}


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert choose(["a", "portable"], tmp_path / "file" / "kernels", "m", PASSING) == Choice("a", {})
    (tmp_path / "kernels").mkdir()
    assert choose(["a", "portable"], tmp_path / "kernels", "m", PASSING) == Choice("a", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kernels"]
    failing = [sys.executable, "-c", "print('failed so')"]
    assert choose(["a", "portable"], tmp_path / "kernels", "m", failing) == Choice("portable", {"a": "so"})
    assert "--kernels a uses them all the same." in caplog.text
