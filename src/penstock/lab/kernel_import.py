"""Reads tables of kernel times that others have published, and makes cost models of them.

A format is a reader in `READERS`: a function from a folder to `KernelTables`. So far there is that of LLMServingSim's profiler
(https://github.com/casys-kaist/LLMServingSim, docs/profiler/output-bundle): CSV files of kernels of one layer, in microseconds.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.lab.cost_files import CostFileError, SavedCost, read_text
from penstock.lab.cost_model import NO_COSTS, Fitted
from penstock.lab.kernel_tables import Experts, Grid, KernelTables

MAX_TABLE_BYTES = 64 << 20
MAX_POINTS = 1 << 20


class Shape(NamedTuple):
    num_layers: int
    hidden_size: int


SHAPES: Mapping[str, Shape] = {
    "meta-llama/Llama-3.1-8B": Shape(32, 4096),
    "meta-llama/Llama-3.1-70B": Shape(80, 8192),
    "Qwen/Qwen3-32B": Shape(64, 5120),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Shape(48, 2048),
}
"""Models with published tables, by their config.json. The tables are of one layer, and say neither number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Facts that the tables lack. None: as in `SHAPES`, for the model that the tables name."""

    num_layers: int | None = None
    hidden_size: int | None = None
    num_gpus: int = 1
    """GPUs that share each layer (tensor parallelism)."""
    link_bytes_per_s: float = 0.0
    """Bytes that each GPU can send to the others."""
    link_latency_ns: float = 0.0


_Point = tuple[float, ...]


def import_folder(folder: Path, choice: Choice = Choice()) -> SavedCost:
    """Read a folder of kernel tables. Raises CostFileError, which names the file and the line."""
    for is_there, read in READERS.values():
        if is_there(folder):
            return read(folder, choice)
    remedy = f"Formats: {', '.join(READERS)}; such a folder has dense.csv, attention.csv and per_sequence.csv."
    raise CostFileError(f"{folder} has no tables of kernels that Penstock reads.", remedy=remedy)


# LLMServingSim
#
# Everything is from its files, but for the shape of the model, the link of several GPUs, and the host. The host takes no time:
# vLLM plans a step while the one before runs, and its graphs of kernels leave no gaps between them.

_DENSE, _ROWS, _ATTENTION, _EXPERTS = "dense.csv", "per_sequence.csv", "attention.csv", "moe.csv"
_ONCE = ("embedding", "final_layernorm")
_TWICE = "layernorm"
"""A layer has two: before attention, and before its products."""
_REQUIRED = ("qkv_proj", "o_proj", _TWICE)
BEYOND = 1e18
"""Upper end of a bin without one."""
_LABEL = re.compile(r"^\w+(<=|=|>)(\d+)(k|%)?$")


def _llmservingsim(folder: Path, choice: Choice) -> SavedCost:
    meta = _meta(folder, choice.num_gpus)
    model = meta.get("model", "")
    known = SHAPES.get(model)
    num_layers = choice.num_layers or (known and known.num_layers)
    hidden_size = choice.hidden_size or (known and known.hidden_size)
    if not num_layers:
        raise CostFileError(
            f"{folder} has kernels of one layer of {model or 'a model'}, and does not say how many layers there are.",
            remedy="Give their number, as in the model's config.json: --layers N.",
        )
    reduce_ns = reduce_token_ns = 0.0
    if choice.num_gpus > 1:
        if not hidden_size or not choice.link_bytes_per_s:
            raise CostFileError(
                f"{folder} does not say how long {choice.num_gpus} GPUs take to add up their results.",
                remedy="Give --link-gbytes-per-s, and --hidden-size if the model is not known.",
            )
        # Attention and products each end in an all-reduce of a bf16 vector per token, in a ring.
        num_parts = choice.num_gpus - 1
        reduce_ns = 2 * 2 * num_parts * choice.link_latency_ns
        reduce_token_ns = 2 * 2 * num_parts / choice.num_gpus * 2 * hidden_size / choice.link_bytes_per_s * 1e9
    folder = _tables_of(folder, choice.num_gpus)
    dense = _curves(folder / _DENSE, "tokens")
    if lacking := [name for name in _REQUIRED if name not in dense]:
        raise CostFileError(f"{folder / _DENSE} has no times of {', '.join(lacking)}.", remedy="Copy the whole table.")
    per_layer = [curve for name, curve in dense.items() if name not in _ONCE] + [dense[_TWICE]]
    rows = _curves(folder / _ROWS, "sequences")
    decodes, prefills, mixtures = _attention(folder / _ATTENTION)
    skews = _skews(folder / "skew_fit.csv", float(meta.get("alpha_default", 0.0))) if "skews_are_off" not in meta else None
    experts = _experts(folder / _EXPERTS) if (folder / _EXPERTS).exists() else None
    if experts is None and "down_proj" not in dense:
        raise CostFileError(f"{folder} has neither {_EXPERTS} nor times of down_proj.", remedy="Copy all of its tables.")
    tables = KernelTables(
        num_layers=num_layers,
        layer_tokens=_sum(per_layer),
        step_tokens=_sum([dense[name] for name in _ONCE if name in dense]),
        step_rows=_sum(list(rows.values())),
        decodes=decodes,
        prefills=prefills,
        mixtures=mixtures,
        skews=skews,
        experts=experts,
        reduce_ns=reduce_ns,
        reduce_token_ns=reduce_token_ns,
    )
    fitted = Fitted(
        max_rows=int(tables.step_rows.axes[0][-1]),
        max_decodes=tables.max_decodes,
        max_prefill_tokens=tables.max_tokens,
        max_context_len=tables.max_context_len,
    )
    notes = {"format": "LLMServingSim", "vllm": meta.get("vllm_version", ""), "variant": meta.get("variant", "")}
    return SavedCost(
        cost=replace(NO_COSTS, kernels=tables, fitted=fitted),
        source="kernels",
        model=model,
        machine={"cpu": meta["gpu"]} if "gpu" in meta else {},
        date=meta.get("profiled_at", "")[:10],
        notes={name: value for name, value in notes.items() if value},
    )


def _tables_of(folder: Path, num_gpus: int) -> Path:
    """Return the folder of the tables of `num_gpus`: the one that was given, or its part as the profiler writes it."""
    part, parts = folder / f"tp{num_gpus}", sorted(path.name for path in folder.glob("tp*"))
    if parts and not part.is_dir():
        raise CostFileError(f"{folder} has no tables of {num_gpus} GPUs, only {', '.join(parts)}.", remedy="Set --gpus.")
    return part if parts else folder


def _meta(folder: Path, num_gpus: int) -> Mapping[str, str]:
    """Return the plain values at the top of meta.yaml, the `alpha_default` of `num_gpus`, and whether `skew_fit` is off."""
    path = folder / "meta.yaml"
    if not path.exists():
        return {}
    text = _text(path)
    found = {match[1]: match[2] for match in re.finditer(r"^(\w+): +'?([^'\[{\n]+?)'?$", text, re.MULTILINE)}
    if re.search(r"^skew_fit:\n +enabled: false$", text, re.MULTILINE):
        found["skews_are_off"] = "yes"
    of_gpus = re.search(rf"^ +{num_gpus}:\n(?: +(?!\d+:).*\n)*? +alpha_default: +([-+.\deE]+)$", text, re.MULTILINE)
    return found | ({"alpha_default": of_gpus[1]} if of_gpus else {})


def _text(path: Path) -> str:
    try:
        return read_text(path, MAX_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise CostFileError(f"{path} can't be read as a table: {error}.", remedy="Copy the whole folder.") from None


def _rows(
    path: Path, columns: Sequence[str], *, words: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str], list[float]]]:
    """Yield (line, values of the columns in `words`, numbers of the others)."""
    reader = csv.reader(_text(path).splitlines())
    header = next(reader, [])
    if missing := [name for name in (*words, *columns) if name not in header]:
        raise CostFileError(f"{path}, line 1: there is no column {', '.join(missing)}.", remedy="Copy the whole table.")
    num_rows = 0
    for cells in filter(None, reader):
        at = f"{path}, line {reader.line_num}"
        if len(cells) != len(header):
            cause = f"{at}: {len(cells)} values for {len(header)} columns."
            raise CostFileError(cause, remedy="Copy the file again: it may be cut off.")
        row = dict(zip(header, cells, strict=True))
        num_rows += 1
        yield reader.line_num, {name: row[name] for name in words}, [_number(at, name, row[name]) for name in columns]
    if not num_rows:
        raise CostFileError(f"{path} has no rows below its header.", remedy="Copy the file again: it may be cut off.")


def _number(at: str, name: str, cell: str) -> float:
    with suppress(ValueError):
        value = float(cell)
        if isfinite(value) and (value >= 0 or name == "alpha"):
            return value
    raise CostFileError(f"{at}: {name} is {cell!r}.", remedy="It must be a number of at least 0.")


def _curves(path: Path, column: str) -> dict[str, Grid]:
    """Read times of kernels by one number: name -> curve in nanoseconds."""
    points: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for _, words, (number, time_us) in _rows(path, (column, "time_us"), words=("layer",)):
        points[words["layer"]][number] = time_us * 1e3
    return {name: Grid((tuple(sorted(found)),), tuple(found[at] for at in sorted(found))) for name, found in points.items()}


def _sum(curves: Sequence[Grid]) -> Grid:
    axis = sorted({number for curve in curves for number in curve.axes[0]})
    return Grid((tuple(axis),), tuple(round(sum(curve.at(number) for curve in curves), 1) for number in axis))


def _attention(path: Path) -> tuple[Grid, Grid, Grid]:
    """Read the times of attention: of decodes, of a prompt's chunk, and of both together."""
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    decodes, prefills, mixtures = dict[_Point, float](), dict[_Point, float](), dict[_Point, float]()
    for line, _, (chunk, before, num, reads, time_us) in _rows(path, (*columns, "time_us")):
        if chunk and num:
            mixtures[chunk, before, num, reads] = time_us * 1e3
        elif num:
            decodes[num, reads] = time_us * 1e3
        elif chunk:
            prefills[chunk, before] = time_us * 1e3
        else:
            raise CostFileError(f"{path}, line {line}: there are neither a chunk nor decodes.", remedy="Remove the line.")
    if not (decodes and prefills and mixtures):
        cause = f"{path} lacks times of decodes alone, of chunks alone, or of both together."
        raise CostFileError(cause, remedy="Copy the whole table.")
    if len({before for _, before in prefills}) < 2:
        raise CostFileError(f"{path} has chunks after one number of positions.", remedy="Copy the whole table.")
    return _filled(path, decodes), _filled(path, prefills), _filled(path, mixtures)


def _filled(path: Path, points: Mapping[_Point, float]) -> Grid:
    """Return a whole grid of what may be a union of several: holes are interpolated along one axis after the other."""
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    shape = tuple(map(len, axes))
    if prod(shape) > MAX_POINTS:
        raise CostFileError(f"{path} is not a grid: its numbers have {prod(shape)} combinations.", remedy="Round its numbers.")
    values = np.full(shape, np.nan)
    places = [{number: idx for idx, number in enumerate(axis)} for axis in axes]
    for point, ns in points.items():
        values[tuple(place[number] for place, number in zip(places, point, strict=True))] = ns
    for outside in (np.nan, None):  # inside what is known first, then as at its edge
        for number in range(len(axes) - 1, -1, -1):
            values = np.apply_along_axis(_fill, number, values, np.array(axes[number]), outside)
    return Grid(tuple(map(tuple, axes)), tuple(values.round().ravel().tolist()))


def _fill(line: NDArray[np.float64], axis: NDArray[np.float64], outside: float | None) -> NDArray[np.float64]:
    known = ~np.isnan(line)
    if known.all() or not known.any():
        return line
    return np.interp(axis, axis[known], line[known], left=outside, right=outside)


def _skews(path: Path, usual: float) -> Grid | None:
    """Read how decodes of uneven lengths differ from even ones. `usual`: for bins without steps."""
    if not path.exists():
        return None
    labels = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
    points: dict[_Point, float] = {}
    for line, words, (chunk, alpha) in _rows(path, ("pc", "alpha"), words=labels):
        num, share, longest, before = (_bound(f"{path}, line {line}", label, words[label]) for label in labels)
        points[chunk, num, share, longest, before] = alpha
    axes = tuple(tuple(sorted(set(values))) for values in zip(*points, strict=True))
    return Grid(axes, tuple(points.get(point, usual) for point in product(*axes)))


def _bound(at: str, name: str, label: str) -> float:
    """Return the upper end of a bin from its label: `n<=128`, `sr<=15%`, `kvB<=4k`, `kp=0`, or `sr>70%` without one."""
    match = _LABEL.match(label)
    if match is None:
        raise CostFileError(f"{at}: {name} is {label!r}.", remedy="It must be like n<=128, sr<=15%, kvB<=4k or kp=0.")
    sign, number, unit = match.groups()
    return BEYOND if sign == ">" else float(number) * {"k": 1024, "%": 0.01, None: 1}[unit]


def _experts(path: Path) -> Experts:
    points: dict[_Point, float] = {}
    for _, _, (tokens, num_experts, time_us) in _rows(path, ("tokens", "activated_experts", "time_us")):
        points[tokens, num_experts] = time_us * 1e3
    ns = _filled(path, points)
    if ns.axes[0][0] != 1 or ns.axes[1][0] < 1:
        raise CostFileError(f"{path} has no times of one token with its experts.", remedy="Copy the whole table.")
    return Experts(ns=ns, num_experts=int(ns.axes[1][-1]), num_experts_per_token=int(ns.axes[1][0]))


READERS: Mapping[str, tuple[Callable[[Path], bool], Callable[[Path, Choice], SavedCost]]] = {
    "LLMServingSim": (lambda folder: any(path.exists() for path in (folder / _ATTENTION, *folder.glob("tp*"))), _llmservingsim),
}
"""By format: whether a folder has it, and its reader."""
