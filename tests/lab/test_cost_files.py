"""Cost models survive being written down; tables of others are read, and errors name the line."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.lab.cost_files import CostFileError, SavedCost, load_cost, save_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.fitting import fit
from penstock.lab.step_counts import counts_of
from penstock.types.plan import StepShape
from support.lab.fitting import steps


@functools.cache
def saved() -> SavedCost:
    fitted = fit(steps(), are_in_order=True)
    return SavedCost(
        cost=fitted.cost,
        source="profile",
        model="tiny",
        machine={"cpu": "a processor", "cpus": 2},
        date="2026-11-22",
        penstock="1",
        num_steps=fitted.num_steps,
        errors=fitted.left_out,
        notes={"backend": "native"},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, one = tmp_path / "cost.json", saved()
    save_cost(path, one)
    assert load_cost(path) == one
    assert one.words.startswith("tiny, a processor, from a profile, 2026-11-22, median error ")


def test_a_table_of_steps_is_fitted(tmp_path: Path) -> None:
    path, cost = tmp_path / "gpu.csv", CostModel(4e6, 2e4, 1e4, 50, 5)
    lines = ["# hardware: H999", "# estimated: yes", "# a remark: of no kind", "rows,tokens,context,ms"]
    for rows, tokens in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 64), (1, 512), (2, 256), (1, 2048)):
        for context in (0, 500, 4000):
            shape = StepShape(((tokens, context),) * rows, rows)
            lines.append(f"{rows}, {tokens},{context},{cost.duration_ns(shape) / 1e6}")
    path.write_text("\n".join(lines))
    found = load_cost(path)
    assert found.is_estimated
    assert found.machine == {"cpu": "H999"}
    assert found.words.startswith("H999, estimated, not measured")
    assert "error" not in found.words, "there are no measured steps to err from"
    assert found.cost.residuals == (), "what a fit misses is no noise"
    shape = StepShape(((1, 1000),) * 16, 16)
    assert found.cost.duration_ns(shape) == pytest.approx(cost.duration_ns(shape), rel=0.02)
    assert found.cost.outside(counts_of(StepShape(((1, 9000),), 1)))


def test_costs_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    path.write_text("# model: a model\ncost,ns\nstep_ns,5e6\ndecode_row_ns,1000\n")
    found = load_cost(path)
    assert found.cost == CostModel(5e6, 1000, 0, 0, 0)
    assert (found.model, found.is_estimated) == ("a model", False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is neither a cost model nor a table of steps"),
        ("rows,tokens\n", "is neither a cost model nor a table of steps"),
        ("rows,tokens,context,ms\n1,1,1\n", "line 2: 3 values for 4 columns"),
        ("\nrows,tokens,context,ms\n1,x,1,1\n", "line 3: tokens is 'x', and must be a number"),
        ("rows,tokens,context,ms\n1,1,1,nan\n", "line 2: ms is 'nan'"),
        ("rows,tokens,context,ms\n1,1,-1,1\n", "line 2: context is '-1'"),
        ("rows,tokens,context,ms\n0,1,1,1\n", "line 2: rows .* and tokens are whole numbers"),
        ("rows,tokens,context,ms\n999999999,1,1,1\n", "line 2: rows .at most 65536."),
        ("rows,tokens,context,ms\n1.5,1,1,1\n", "line 2: rows"),
        ("rows,tokens,context,ms\n1,1,1,1\n", "1 steps in 1 groups can't tell"),
        ("cost,ns\nspeed,1\n", "line 2: there is no cost 'speed'. Valid: step_ns"),
        ("cost,ns\n", "a step takes no time"),
        ("cost,ns\nstep_ns,0\n", "a step takes no time"),
        ("{", "is not a cost model"),
        ('{"a":' + 100_000 * "[", "is not a cost model"),
        ("cost,ns\nstep_ns," + 200_000 * "1", "line 2: field larger than field limit"),
        ('{"format": "other", "version": 3}', "is 'other' of version 3"),
        (
            '{"format": "penstock-cost-model", "version": 9}',
            "of version 9; this Penstock reads .* of versions 3 to 6",
        ),
        ('{"format": "penstock-cost-model", "version": 3}', "is a damaged cost model"),
        ('{"format": "penstock-cost-model", "version": 3, "cost": [], "source": ""}', "is a damaged cost model"),
    ],
)
def test_what_can_not_be_read_is_told(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cost"
    path.write_text(text)
    with pytest.raises(CostFileError, match=says):
        load_cost(path)


@pytest.mark.parametrize("name", ["step_ns", "narrow_read_ns"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(name: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    save_cost(path, saved())
    written = json.loads(path.read_text())
    written["cost"][name] = value
    path.write_text(json.dumps(written))
    with pytest.raises(CostFileError, match="negative, or not numbers"):
        load_cost(path)


def test_a_correlation_that_is_none_is_refused(tmp_path: Path) -> None:
    save_cost(tmp_path / "cost.json", replace(saved(), cost=replace(saved().cost, residual_correlation=3.0)))
    with pytest.raises(CostFileError, match="a residual_correlation of 3, which is not at least 0 and below 1"):
        load_cost(tmp_path / "cost.json")


def test_files_that_are_absent_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CostFileError, match="can't be read"):
        load_cost(tmp_path / "absent")
    monkeypatch.setattr("penstock.lab.cost_files.MAX_FILE_BYTES", 10)
    (tmp_path / "large").write_text("x" * 11)
    with pytest.raises(CostFileError, match="more than"):
        load_cost(tmp_path / "large")
    with pytest.raises(CostFileError, match="can't be written"):
        save_cost(tmp_path / "no" / "folder", saved())
