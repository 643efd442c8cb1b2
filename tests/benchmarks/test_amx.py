"""The script for machines with AMX: which commands it runs, what it takes from their output, and how it judges that."""

import json
import shlex
from types import SimpleNamespace

import amx
import peaks
import pytest
from workloads import SHAREGPT_FILE

from penstock.backends.native._native import usable_variants

STEPS = {
    amx.PROMPT: {"ms": 78.5, "compute_share": 0.4, "read_share": 0.1},
    amx.ROW: {"ms": 2.0, "compute_share": 0.01, "read_share": 0.8996},
}
RATIOS = {"openvino": {"32": 2.5, "16": 1.7, "8": 1.9, "1": 1.4}, "vllm": {"8": 1.49}}
FOUND = {
    "peaks.py": {"peaks": {"amx": {"int8": 7300.0, "read": 31.0}}},
    "step.py": {"steps": STEPS},
    "peers.py": {"ratios": RATIOS},
}
"""The last line of each benchmark."""


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the script with an output for each command; gives (exit status, its lines by their first cell, all that it said)."""
    (tmp_path / SHAREGPT_FILE).touch()

    def run_with(output_of, *words):
        said = lambda command, **_: SimpleNamespace(stdout=output_of(command), returncode=0)  # noqa: E731
        monkeypatch.setattr(amx.subprocess, "run", said)
        monkeypatch.setattr(amx, "FOLDER", tmp_path / "amx")
        with pytest.raises(SystemExit) as ended:
            amx.main(["--traces", str(tmp_path), *words])
        out = capsys.readouterr().out
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("| ")]
        return ended.value.code, {row[0]: row[1:] for row in rows}, out

    monkeypatch.setattr(amx, "usable_variants", lambda: ["amx", "avx512", "avx2", "portable"])
    return run_with


def usual_output(command):
    if "pytest" in command:
        return "....\n12 passed in 0.31s\n"
    name = command[1].removeprefix("benchmarks/")
    return f"| table |\n{json.dumps(FOUND.get(name, {}))}\n"


def test_figures_are_judged_one_by_one(run):
    status, rows, out = run(usual_output)
    assert status == 1
    assert rows["SmolLM2, prompt of 512: share of the tiles' peak"] == ["40 %", "40 %", "yes"]
    assert rows["SmolLM2, one row: share of the speed of memory"] == ["90 %", "89.96 %", "**no**"]
    assert rows["SmolLM2, ShareGPT, 32 clients, over OpenVINO"] == ["2.2 times", "2.5 times", "yes"]
    assert rows["SmolLM2, long prompts, 8 clients, over vLLM"] == ["1.5 times", "1.49 times", "**no**"]
    assert rows["tests that tiles have the bits of their emulation"] == ["100 %", "100 %", "yes"]
    assert rows["peak, int8"] == ["7300 GOP/s"]
    assert rows["peak, read"] == ["31 GB/s"]
    assert rows["step-qwen-avx512, 1x512@0"] == ["78.50 ms"]
    assert "make test-parity" in out


def test_the_exit_status_is_0_where_all_goals_are_met(run, monkeypatch):
    monkeypatch.setattr(amx, "GOALS", [goal for goal in amx.GOALS if "vLLM" not in goal.what and "one row" not in goal.what])
    status, rows, _ = run(usual_output)
    assert status == 0
    assert len(amx.GOALS) == 10
    assert all(rows[goal.what][-1] == "yes" for goal in amx.GOALS)


def test_what_fails_is_not_measured_and_the_others_go_on(run):
    status, rows, _ = run(lambda command: "a traceback\n" if "qwen2.5-coder:1.5b" in command else usual_output(command))
    assert status == 1
    assert rows["Qwen2.5-Coder, one row: share of the speed of memory"] == ["90 %", "not measured", "**no**"]
    assert rows["Qwen2.5-Coder, ShareGPT, 1 client, over OpenVINO"] == ["1.1 times", "1.4 times", "yes"]


def test_a_peer_that_failed_is_not_measured(run):
    def output_of(command):
        return json.dumps({"ratios": {"openvino": RATIOS["openvino"]}}) if "vllm" in command else usual_output(command)

    _, rows, _ = run(output_of)
    assert rows["SmolLM2, long prompts, 8 clients, over vLLM"] == ["1.5 times", "not measured", "**no**"]
    assert rows["SmolLM2, long prompts, 8 clients, over OpenVINO"] == ["1.5 times", "1.9 times", "yes"]


@pytest.mark.parametrize(
    ("summary", "passed"),
    [
        ("12 passed in 0.3s", 1.0),
        ("1 failed, 3 passed in 0.3s", 0.75),
        ("1 failed, 3 passed, 2 errors in 0.3s", 0.5),
        ("3 passed, 1 skipped in 0.3s", 1.0),
    ],
)
def test_tests_that_ran_count(summary, passed):
    assert amx.result_of("tiles", f"...\nSKIPPED [1] 5 passed\n{summary}\n") == {"passed": passed}


@pytest.mark.parametrize("output", ["", "no tests ran in 0.00s\n", "9 skipped in 1s\n"])
def test_no_test_at_all_is_no_result(output):
    with pytest.raises(ValueError, match="no test ran"):
        amx.result_of("tiles", output)


def test_without_amx_it_says_so(monkeypatch):
    monkeypatch.setattr(amx, "usable_variants", lambda: ["avx2", "portable"])
    for why, told in (("", "the processor has none"), ("the host has switched them off", "the host has switched them off")):
        monkeypatch.setattr(amx, "why_no_tiles", lambda why=why: why)
        with pytest.raises(SystemExit, match=f"^No AMX here, but avx2, portable: {told}.$"):  # a text: exit status 1
            amx.main([])


def test_what_all_runs_need_is_there_before_the_first(run, monkeypatch, tmp_path):
    """A day later is too late to learn that a peer, a model or a trace is missing."""
    begun = []

    def output_of(command):
        begun.append(command)
        return "vllm is left out: pip failed, see make-vllm.log\n{}\n" if "--setup" in command else usual_output(command)

    told, _, _ = run(output_of)
    assert told.splitlines() == [
        "vllm is left out: pip failed, see make-vllm.log",
        "Nothing was measured. To do without a peer: --without NAME.",
    ]
    assert begun == list(amx.preparations(tmp_path, amx.PEERS).values())
    status, rows, _ = run(usual_output, "--without", "vllm", "openvino")
    assert status == 1
    assert rows["SmolLM2, prompt of 512: share of the tiles' peak"][-1] == "yes"
    failed = lambda command, **_: SimpleNamespace(stdout="", returncode=1)  # noqa: E731
    monkeypatch.setattr(amx.subprocess, "run", failed)
    with pytest.raises(SystemExit, match=r"^pull-smollm2 exited with 1\.\nNothing was measured"):
        amx.main(["--traces", str(tmp_path)])
    (tmp_path / SHAREGPT_FILE).unlink()
    with pytest.raises(SystemExit, match=f"{SHAREGPT_FILE} is missing"):
        amx.main(["--traces", str(tmp_path)])
    monkeypatch.setattr(amx.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"^pytest is missing"):
        amx.main(["--traces", str(tmp_path)])


def test_a_dry_run_prints_the_commands_on_any_machine(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(amx.subprocess, "run", None)
    amx.main(["--dry-run", "--traces", str(tmp_path), "--without", "vllm"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [command for made in (amx.preparations, amx.commands) for command in made(tmp_path, ["openvino"]).values()]
    assert not any("vllm" in line for line in lines)


def test_every_goal_is_of_a_run_and_every_option_is_there(tmp_path):
    runs = amx.commands(tmp_path, amx.PEERS)
    assert {goal.run for goal in amx.GOALS} <= runs.keys()
    assert all((amx.ROOT / "tests" / "backends" / f"{name}.py").is_file() for name in amx.TESTS)
    for command in [*amx.preparations(tmp_path, amx.PEERS).values(), *runs.values()]:
        if command[1] != "-m":
            text = (amx.ROOT / command[1]).read_text()
            assert all(f'"{word}"' in text for word in command[2:] if word.startswith("--"))


def test_the_peaks_of_each_variant_are_told(monkeypatch, capsys):
    """Reads are of as much memory as a probe takes."""
    read = []
    monkeypatch.setattr(peaks, "peak_read_gbs", lambda *, num_bytes, **_: read.append(num_bytes) or 31.0)
    monkeypatch.setattr(peaks, "probed_bytes", lambda: 968 << 20)
    peaks.main(["--repeat", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["peaks"]
    assert list(found) == usable_variants()
    kinds = set(peaks.KINDS) if "amx" in found else {"int8", "bf16", "float32"}
    assert all(figures.keys() == {*kinds, "read"} and figures["int8"] > 0 for figures in found.values())
    assert read == [968 << 20] * len(found)
