"""The benchmark of a step runs on a model, and prints a line for each step."""

import argparse
import json

import pytest
import step

from penstock.backends.native._native import emulated_variants


def test_steps_are_named_by_rows_queries_and_context():
    assert step.parse_step("4x128@256") == step.StepShape(rows=4, query_len=128, context_len=256)
    for text in ("4x128", "0x1@2", "4x-1@2"):
        with pytest.raises(argparse.ArgumentTypeError):
            step.parse_step(text)


@pytest.mark.model
@pytest.mark.parametrize("steps", [["2x1@33", "1x24@16", "4x40@0"], ["1x1@0"]], ids=" ".join)
def test_steps_are_printed_as_a_table(capsys, monkeypatch, steps):
    monkeypatch.setattr("peaks.probed_bytes", lambda: 1 << 26)  # less memory than for a figure takes less time
    step.main(["--rounds", "1", "--steps", *steps])
    told, _, head, _, *lines, last = capsys.readouterr().out.splitlines()
    assert "int8 keys and values" in told
    assert head == "| step | ms (fastest) | linear ms | attention ms | rows ms | bound by | share of the bound |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[0] for line in cells] == steps
    assert all(float(line[1].split()[0]) >= float(line[2]) > 0.0 for line in cells), "a part takes no longer than the step"
    assert all(0 < int(line[-1].strip("* %")) < 200 for line in cells)
    assert list(json.loads(last)["steps"]) == steps


class Meter:
    """Peaks of 100 GOP/s of tiles and 10 GB/s."""

    def __init__(self, *_):
        pass

    def sample(self, names, *, repeat):
        assert (names, repeat) == (["bf16_tiles", "read"], 1)

    def median(self, name):
        return {"bf16_tiles": 100.0, "read": 10.0}[name]


@pytest.mark.model
@pytest.mark.skipif("amx-emulated" not in emulated_variants(), reason="this processor can't emulate tiles")
def test_with_tiles_the_bound_is_theirs(monkeypatch, capsys):
    monkeypatch.setattr(step, "PeakMeter", Meter)
    monkeypatch.setattr("penstock.lab.steps.NUM_TO_WARM", 1)  # each takes long where tiles are emulated
    step.main(["--rounds", "1", "--variant", "amx-emulated", "--steps", "1x16@0"])
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert "bf16_tiles 100 GOP/s, reads 10 GB/s" in out
    assert (found["variant"], found["peak"], found["peak_gops"], found["read_gbs"]) == (
        "amx-emulated",
        "bf16_tiles",
        100.0,
        10.0,
    )
    figures = found["steps"]["1x16@0"]
    operations = figures["compute_share"] * 100e9 * figures["ms"] / 1e3
    assert 16 * 2 * 100e6 < operations < 16 * 2 * 135e6, "SmolLM2's products of 16 tokens"
