"""Reads and writes cost models: JSON files of `penstock profile`, and CSV tables for other hardware.

A table lists steps (`rows,tokens,context,ms`: each of `rows` rows computes `tokens` tokens after `context` others) or costs by
name (`cost,ns`). Its comments `# key: value` give its origin; `# estimated: yes` marks times that were not measured. See
docs/profile.md.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.lab.cost_model import CostModel
from penstock.lab.fitting import Errors, fit
from penstock.lab.steps import MeasuredStep
from penstock.types.errors import PenstockError
from penstock.types.plan import StepShape

FORMAT = "penstock-cost-model"
VERSION = 6
READ_VERSIONS = (3, 4, 5, 6)
"""Version 3 has no kernel tables; those of version 4 always have `mixtures`; version 5 has no `repeated_ns` and `text_ns`."""
MAX_FILE_BYTES = 16 << 20
MAX_ROWS = 1 << 16
_STEP_COLUMNS = ("rows", "tokens", "context", "ms")
_COST_COLUMNS = ("cost", "ns")
_PLAIN_COSTS = tuple(part.name for part in fields(CostModel) if part.name.endswith("_ns"))


class CostFileError(PenstockError):
    """Error for a file that is not a cost model, or is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCost:
    cost: CostModel
    source: str
    """Origin: `profile`, `recording`, `table` or `kernels`."""
    is_estimated: bool = False
    """Whether the steps were computed from published figures instead of measured."""
    model: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    penstock: str = ""
    num_steps: int = 0
    errors: Mapping[str, Errors] = field(default_factory=dict)
    """Part of the step -> errors on steps that were left out of the fit."""
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        origin = "published times of kernels" if self.source == "kernels" else f"a {self.source}"
        kind = "estimated, not measured" if self.is_estimated else f"from {origin}"
        missed = self.errors.get("execute")
        parts = [self.model, str(self.machine.get("cpu", "")), kind, self.date]
        if missed is not None and not self.is_estimated:  # no step was measured
            parts.append(f"median error {missed.median:.1%} of steps left out")
        return ", ".join(part for part in parts if part)


def cost_of_option(name: str) -> tuple[CostModel, str]:
    """Return the cost model of a command's word, `default` or as for `load_cost`, and what it is. Raises CostFileError."""
    if name == "default":
        return CostModel(), "the default, of SmolLM2-135M on one thread of a CPU"
    saved = load_cost(Path(name))
    return saved.cost, saved.words


def save_cost(path: Path, saved: SavedCost) -> None:
    written = {"format": FORMAT, "version": VERSION, **asdict(saved)}
    try:
        path.write_text(json.dumps(written, indent=2 if saved.cost.kernels is None else None) + "\n", encoding="utf-8")
    except OSError as error:
        raise CostFileError(f"{path} can't be written: {error}.", remedy="Name another file.") from None


def load_cost(path: Path) -> SavedCost:
    """Read a cost model from a file, or one that comes with Penstock (`h100-llama-8b`).

    Raises CostFileError, which names the line if the file is a table.
    """
    tables = (file for file in files("penstock.lab").iterdir() if file.name.endswith(".csv") and file.name != "hardware.csv")
    own = {table.name.removesuffix(".csv"): table for table in tables}
    if str(path) in own and not path.exists():
        return _from_table(path, own[str(path)].read_text(encoding="utf-8").splitlines())
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        remedy = f"Make one with `penstock profile --fit FILE`, or take one that comes with Penstock: {', '.join(sorted(own))}."
        raise CostFileError(f"{path} can't be read as a cost model: {error}.", remedy=remedy) from None
    saved = _from_json(path, text) if text.lstrip().startswith("{") else _from_table(path, text.splitlines())
    if not saved.cost.duration_ns(StepShape(((1, 1),), 1)):
        raise CostFileError(f"By {path} a step takes no time.", remedy="Give it at least step_ns or decode_row_ns.")
    return saved


def read_text(path: Path, max_bytes: int) -> str:
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes >> 20} MiB")
    return data.decode()


def _from_json(path: Path, text: str) -> SavedCost:
    from pydantic import TypeAdapter, ValidationError

    remedy = "Make one with `penstock profile --fit FILE`."
    try:
        written = json.loads(text)
        kind, version = written.pop("format"), written.pop("version")
    except (ValueError, KeyError, RecursionError) as error:
        raise CostFileError(f"{path} is not a cost model: {error}.", remedy=remedy) from None
    if kind != FORMAT or version not in READ_VERSIONS:
        known = f"{FORMAT!r} of versions {READ_VERSIONS[0]} to {VERSION}"
        cause = f"{path} is {kind!r} of version {version}; this Penstock reads {known}."
        raise CostFileError(cause, remedy=remedy)
    try:
        saved = TypeAdapter(SavedCost).validate_python(written)
    except ValidationError as error:
        raise CostFileError(f"{path} is a damaged cost model: {error}.", remedy=remedy) from None
    cost = saved.cost
    values = [getattr(cost, name) for name in _PLAIN_COSTS]
    values += [*cost.host_residuals, *(value for bracket in cost.token_brackets for value in bracket)]
    values += [value for up_to_ns, ratios in cost.residuals for value in (up_to_ns, *ratios)]
    if cost.kernels is not None:
        values += cost.kernels.times()
    is_empty = any(not one.ratios for one in cost.residuals)
    if is_empty or any(not math.isfinite(value) or value < 0 for value in values):
        raise CostFileError(f"{path} has costs that are negative, or not numbers.", remedy=remedy)
    if not 0 <= cost.residual_correlation < 1:
        cause = f"{path} has a residual_correlation of {cost.residual_correlation:g}, which is not at least 0 and below 1."
        raise CostFileError(cause, remedy=remedy)
    return saved


def _from_table(path: Path, lines: Sequence[str]) -> SavedCost:
    notes: dict[str, str] = {}
    numbered: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            key, colon, value = line[1:].partition(":")
            if colon and " " not in key.strip():
                notes[key.strip()] = value.strip()
        elif line.strip():
            numbered.append((number, line))
    header = tuple(_cells(path, *numbered[0])) if numbered else ()
    if header not in (_STEP_COLUMNS, _COST_COLUMNS):
        remedy = f"Give it a header: {','.join(_STEP_COLUMNS)}; or {','.join(_COST_COLUMNS)}."
        raise CostFileError(f"{path} is neither a cost model nor a table of steps.", remedy=remedy)
    rows: list[tuple[int, list[str]]] = []
    for number, line in numbered[1:]:
        cells = _cells(path, number, line)
        if len(cells) != len(header):
            raise CostFileError(f"{path}, line {number}: {len(cells)} values for {len(header)} columns.")
        rows.append((number, cells))
    about: dict[str, Any] = {
        "source": "table",
        "is_estimated": notes.get("estimated", "no") != "no",
        "model": notes.get("model", ""),
        "machine": {"cpu": notes["hardware"]} if "hardware" in notes else {},
        "date": notes.get("date", ""),
        "notes": notes,
    }
    if header == _COST_COLUMNS:
        return SavedCost(cost=_named_costs(path, rows), **about)
    steps = [_step(path, number, cells, idx) for idx, (number, cells) in enumerate(rows)]
    try:
        fitted = fit(steps)
    except ValueError as error:
        raise CostFileError(f"{path}: {error}.", remedy="Add steps of other shapes.") from None
    cost = replace(fitted.cost, residuals=())  # errors of the fit are not noise of the machine
    return SavedCost(cost=cost, num_steps=len(steps), errors=fitted.left_out, **about)


def _cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise CostFileError(f"{path}, line {number}: {error}.") from None


def _named_costs(path: Path, rows: Sequence[tuple[int, Sequence[str]]]) -> CostModel:
    costs: dict[str, Any] = dict.fromkeys(_PLAIN_COSTS, 0.0)
    for number, (name, value) in rows:
        if name not in costs:
            raise CostFileError(f"{path}, line {number}: there is no cost {name!r}.", remedy=f"Valid: {', '.join(costs)}.")
        costs[name] = _number(path, number, name, value)
    return CostModel(**costs)


def _step(path: Path, number: int, cells: Sequence[str], group: int) -> MeasuredStep:
    values = [_number(path, number, name, cell) for name, cell in zip(_STEP_COLUMNS, cells, strict=True)]
    num_rows, query_len, context_len = (int(value) for value in values[:3])
    if values[:3] != [num_rows, query_len, context_len] or not 0 < num_rows <= MAX_ROWS or query_len < 1 or values[3] <= 0:
        words = f"rows (at most {MAX_ROWS}) and tokens are whole numbers of at least 1, and ms is more than 0"
        raise CostFileError(f"{path}, line {number}: {words}.")
    return MeasuredStep(StepShape(((query_len, context_len),) * num_rows, num_rows), round(values[3] * 1e6), group=group)


def _number(path: Path, number: int, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise CostFileError(f"{path}, line {number}: {name} is {cell!r}, and must be a number of at least 0.")
    return value
