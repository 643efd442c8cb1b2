"""The script for Arm machines: which commands it runs, and how it judges their output."""

import json
from types import SimpleNamespace

import amx
import pytest
from workloads import SHAREGPT_FILE

import arm
from penstock.backends.native._native import usable_variants

STEPS = {
    arm.PROMPT: {"ms": 78.5, "compute_share": 0.41, "read_share": 0.1},
    arm.ROW: {"ms": 2.0, "compute_share": 0.01, "read_share": 0.8496},
}
FOUND = {"peaks.py": {"peaks": {}}, "step.py": {"steps": STEPS}, "peers.py": {"ratios": {"llamacpp": {"8": 1.3, "1": 1.2}}}}
"""The last line of each benchmark."""


def output_of(command):
    if "pytest" in command:
        return "....\n12 passed in 0.31s\n"
    return f"| table |\n{json.dumps(FOUND.get(command[1].removeprefix('benchmarks/'), {}))}\n"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the script on a machine with the given variants; gives (exit status, its lines by their first cell)."""
    (tmp_path / SHAREGPT_FILE).touch()

    def run_with(variants, *words, fails=""):
        monkeypatch.setattr(arm, "usable_variants", lambda: [*variants, "portable"])
        monkeypatch.setattr(arm, "FOLDER", tmp_path / "arm")
        done = lambda command, **_: SimpleNamespace(  # noqa: E731
            stdout=output_of(command), returncode=int(bool(fails) and fails in command)
        )
        monkeypatch.setattr(amx.subprocess, "run", done)
        with pytest.raises(SystemExit) as ended:
            arm.main(["--traces", str(tmp_path), *words])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return ended.value.code, {row[0]: row[1:] for row in rows}

    return run_with


def test_figures_are_judged_one_by_one(run):
    status, rows = run(["neon-i8mm", "neon"])
    assert status == 1
    assert rows["smollm2, prompt of 512: share of the peak"] == ["40 %", "41 %", "yes"]
    assert rows["qwen, one row: share of the speed of memory"] == ["85 %", "84.96 %", "**no**"]
    assert rows["smollm2, ShareGPT, 8, over llama.cpp"] == ["1.2 times", "1.3 times", "yes"]
    assert rows["answers of both variants are the same"] == ["100 %", "100 %", "yes"]
    assert rows["step-qwen-neon, 1x512@0"] == ["78.50 ms"]


def test_answers_that_differ_miss_their_goal(run):
    _, rows = run(["neon-i8mm", "neon"], fails="compare")
    assert rows["answers of both variants are the same"] == ["100 %", "0 %", "**no**"]


def test_one_variant_and_no_peer_leave_their_goals_out(run):
    _, rows = run(["neon"], "--without", "llamacpp")
    assert not [what for what in rows if "llama" in what or "both" in what]
    assert "step-smollm2-neon, 1x512@0" in rows


@pytest.mark.skipif(usable_variants()[0].startswith("neon"), reason="this is an Arm processor")
def test_another_machine_is_told_so():
    with pytest.raises(SystemExit, match=r"^No Arm processor with dot products here, but .*portable"):
        arm.main([])
