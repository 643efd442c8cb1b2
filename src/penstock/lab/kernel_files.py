"""Reads files of kernel times, CSV or parquet, and makes whole tables of them: for the readers of each publisher's format."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.lab.cost_files import CostFileError, read_text
from penstock.lab.cost_model import NO_COSTS, CostModel, Fitted
from penstock.lab.kernel_tables import Grid, KernelTables

MAX_TABLE_BYTES = 64 << 20
MAX_POINTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Facts that kernel tables lack. None takes them from the model that the tables name."""

    num_layers: int | None = None
    hidden_size: int | None = None
    num_gpus: int = 1
    """GPUs that share each layer (tensor parallelism)."""
    link_bytes_per_s: float = 0.0
    """Bytes that each GPU can send to the others."""
    link_latency_ns: float = 0.0
    model_config: Path | None = None
    """The model's config.json, for tables by operation."""
    engine: str = ""
    """Name and version of the engine that ran the kernels, such as `vllm/0.14.0`, if a folder has several."""
    weights: str = "bfloat16"
    """Type of the weights, as the tables name it. `kv`: the same for the KV cache."""
    kv: str = "bfloat16"


USUAL = Choice()

Point = tuple[float, ...]


def num_layers_of(folder: Path, choice: Choice, model: str, known: int | None) -> int:
    """Return how many layers a model has, for tables of one layer's kernels. `known`: their number, if the model is known.

    Raises CostFileError if nobody says it, and for options of tables by operation.
    """
    if choice.model_config or choice.engine or (choice.weights, choice.kv) != (USUAL.weights, USUAL.kv):
        remedy = "Leave out --model-config, --engine, --weights and --kv."
        raise CostFileError(f"{folder} has tables of one model and engine.", remedy=remedy)
    if num_layers := choice.num_layers or known:
        return num_layers
    raise CostFileError(
        f"{folder} has kernels of one layer of {model or 'a model'}, and does not say how many layers there are.",
        remedy="Give their number, as in the model's config.json: --layers N.",
    )


def text_of(path: Path) -> str:
    try:
        return read_text(path, MAX_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise CostFileError(f"{path} can't be read as a table: {error}.", remedy="Copy the whole folder.") from None


def rows_of(
    path: Path, columns: Sequence[str], *, words: Sequence[str] = (), where: Mapping[str, str] = {}
) -> Iterator[tuple[int, dict[str, str], list[float]]]:
    """Yield (line, values of the columns in `words`, numbers of the others). Other columns are passed over.

    `where`: values of further columns; rows with others are left out. A table may lack such a column.
    """
    num_rows = 0
    read = _parquet if path.suffix == ".parquet" else _csv
    for line, row in read(path, (*words, *columns), tuple(where)):
        num_rows += 1
        if any(str(row.get(name, value)) != value for name, value in where.items()):
            continue
        at = f"{path}, line {line}"
        yield line, {name: str(row[name]) for name in words}, [_number(at, name, row[name]) for name in columns]
    if not num_rows:
        raise CostFileError(f"{path} has no rows below its header.", remedy="Copy the file again: it may be cut off.")


def _csv(path: Path, columns: Sequence[str], _optional: Sequence[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.reader(text_of(path).splitlines())
    try:
        header = next(reader, [])
        _require(path, columns, header)
        for cells in filter(None, reader):
            if len(cells) != len(header):
                cause = f"{path}, line {reader.line_num}: {len(cells)} values for {len(header)} columns."
                raise CostFileError(cause, remedy="Copy the file again: it may be cut off.")
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise CostFileError(f"{path}, line {reader.line_num}: {error}.", remedy="Copy the file again.") from None


def _parquet(path: Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield rows of a parquet file. Line numbers are those of the same table as CSV, with a header."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CostFileError(
            f"{path} needs pyarrow, which is not installed.", remedy="pip install pyarrow, or save the table as .csv."
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require(path, columns, file.schema_arrow.names)
            columns = [*columns, *(name for name in optional if name in file.schema_arrow.names)]
            groups = [file.metadata.row_group(idx) for idx in range(file.metadata.num_row_groups)]
            num_bytes = sum(group.total_byte_size for group in groups)
            if file.metadata.num_rows > MAX_POINTS or num_bytes > MAX_TABLE_BYTES:
                cause = f"{path} has more than {MAX_POINTS} rows or {MAX_TABLE_BYTES >> 20} MiB."
                raise CostFileError(cause, remedy="Keep those of one model.")
            table = file.read(columns=columns).to_pydict()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise CostFileError(f"{path} can't be read as a table: {error}.", remedy="Copy the whole folder.") from None
    for line, values in enumerate(zip(*(table[name] for name in columns), strict=True), start=2):
        yield line, dict(zip(columns, values, strict=True))


def _require(path: Path, columns: Sequence[str], header: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in header]:
        raise CostFileError(f"{path}, line 1: there is no column {', '.join(missing)}.", remedy="Copy the whole table.")


def _number(at: str, name: str, cell: object) -> float:
    with suppress(ValueError):
        value = float(str(cell))
        if isfinite(value) and (value >= 0 or name == "alpha"):
            return value
    raise CostFileError(f"{at}: {name} is {cell!r}.", remedy="It must be a number of at least 0.")


def cost_of(tables: KernelTables) -> CostModel:
    fitted = Fitted(
        max_rows=int(tables.step_rows.axes[0][-1]),
        max_decodes=tables.max_decodes,
        max_prefill_tokens=tables.max_tokens,
        max_context_len=tables.max_context_len,
    )
    return replace(NO_COSTS, kernels=tables, fitted=fitted)


def curve_of(points: Mapping[Point, float]) -> Grid:
    axis = sorted(points)
    return Grid((tuple(number for (number,) in axis),), tuple(points[at] for at in axis))


def summed(curves: Sequence[Grid]) -> Grid:
    """Return the sum of curves, up to the end of the shortest."""
    last = min(curve.axes[0][-1] for curve in curves)
    axis = sorted({number for curve in curves for number in curve.axes[0] if number <= last})
    return Grid((tuple(axis),), tuple(round(sum(curve.at(number) for curve in curves), 1) for number in axis))


def filled(path: Path, points: Mapping[Point, float], work: Callable[..., float] | None = None) -> Grid:
    """Return a full grid from points that may be a union of grids: holes are interpolated along one axis after the other.

    Beyond the known points, the value at the edge is used, scaled by `work`, a function of a point.
    """
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    shape = tuple(map(len, axes))
    if prod(shape) > MAX_POINTS:
        raise CostFileError(f"{path} is not a grid: its numbers have {prod(shape)} combinations.", remedy="Round its numbers.")
    values = np.full(shape, np.nan)
    places = [{number: idx for idx, number in enumerate(axis)} for axis in axes]
    for point, ns in points.items():
        values[tuple(place[number] for place, number in zip(places, point, strict=True))] = ns
    shares = 1.0 if work is None else np.vectorize(work, otypes=[float])(*np.meshgrid(*axes, indexing="ij"))
    values = _fill_all(values, axes, np.nan)  # inside what is known
    values = _fill_all(values / shares, axes, None) * shares
    return Grid(tuple(map(tuple, axes)), tuple(values.round().ravel().tolist()))


def _fill_all(values: NDArray[np.float64], axes: Sequence[Sequence[float]], outside: float | None) -> NDArray[np.float64]:
    for number in range(len(axes) - 1, -1, -1):
        values = np.apply_along_axis(_fill, number, values, np.array(axes[number]), outside)
    return values


def _fill(line: NDArray[np.float64], axis: NDArray[np.float64], outside: float | None) -> NDArray[np.float64]:
    known = ~np.isnan(line)
    if known.all() or not known.any():
        return line
    return np.interp(axis, axis[known], line[known], left=outside, right=outside)
