"""The benchmark of a step runs on a model, and prints a line for each step."""

import argparse
import sys

import pytest
import step


def test_steps_are_named_by_rows_queries_and_context():
    assert step.parse_step("4x128@256") == step.StepShape(rows=4, query_len=128, context_len=256)
    for text in ("4x128", "0x1@2", "4x-1@2"):
        with pytest.raises(argparse.ArgumentTypeError):
            step.parse_step(text)


@pytest.mark.model
@pytest.mark.parametrize("steps", [["2x1@33", "1x24@16"], ["1x1@0"], ["4x40@0"]], ids=" ".join)
def test_steps_are_printed_as_a_table(monkeypatch, capsys, steps):
    monkeypatch.setattr(sys, "argv", ["step.py", "--rounds", "1", "--steps", *steps])
    step.main()
    told, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert "int8 keys and values" in told
    assert head == "| step | ms (fastest) | linear ms | attention ms | rows ms | bound by | share of the bound |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[0] for line in cells] == steps
    assert all(float(line[1].split()[0]) >= float(line[2]) > 0.0 for line in cells), "a part takes no longer than the step"
    assert all(0 < int(line[-1].strip("* %")) < 200 for line in cells)
