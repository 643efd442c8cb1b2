"""Reads the tables of LLMServingSim's profiler: CSV files of kernels of one layer, in microseconds.

Format: https://github.com/casys-kaist/LLMServingSim, docs/profiler/output-bundle. The files lack the shape of the model, the
link between GPUs, and host time. Host time counts as 0: vLLM plans a step while the one before runs, and its CUDA graphs leave
no gaps between kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from penstock.lab.cost_files import CostFileError, SavedCost
from penstock.lab.kernel_files import (
    MAX_POINTS,
    Choice,
    Point,
    cost_of,
    curve_of,
    filled,
    num_layers_of,
    rows_of,
    summed,
    text_of,
)
from penstock.lab.kernel_tables import Experts, Grid, KernelTables


class Shape(NamedTuple):
    num_layers: int
    hidden_size: int


SHAPES: Mapping[str, Shape] = {
    "meta-llama/Llama-3.1-8B": Shape(32, 4096),
    "meta-llama/Llama-3.1-70B": Shape(80, 8192),
    "Qwen/Qwen3-32B": Shape(64, 5120),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Shape(48, 2048),
}
"""Models with published tables, by their config.json. The tables cover one layer, and give neither number."""

_DENSE, _ROWS, _ATTENTION, _EXPERTS = "dense.csv", "per_sequence.csv", "attention.csv", "moe.csv"
_ONCE = ("embedding", "final_layernorm")
_TWICE = "layernorm"
"""A layer has two: before attention, and before the MLP."""
_REQUIRED = ("qkv_proj", "o_proj", _TWICE)
BEYOND = 1e18
"""Upper end of a bin without one."""
_LABEL = re.compile(r"^\w+(<=|=|>)(\d+)(k|%)?$")


def is_there(folder: Path) -> bool:
    return any(path.exists() for path in (folder / _ATTENTION, *folder.glob("tp*")))


def read(folder: Path, choice: Choice) -> SavedCost:
    meta = _meta(folder, choice.num_gpus)
    model = meta.get("model", "")
    known = SHAPES.get(model)
    num_layers = num_layers_of(folder, choice, model, known and known.num_layers)
    hidden_size = choice.hidden_size or (known and known.hidden_size)
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
        layer_tokens=summed(per_layer),
        step_tokens=summed([dense[name] for name in _ONCE if name in dense]),
        step_rows=summed(list(rows.values())),
        decodes=decodes,
        prefills=prefills,
        mixtures=mixtures,
        skews=skews,
        experts=experts,
        reduce_ns=reduce_ns,
        reduce_token_ns=reduce_token_ns,
    )
    machine: dict[str, Any] = {"cpu": meta["gpu"]} if "gpu" in meta else {}
    if choice.num_gpus > 1:
        machine["gpus"] = choice.num_gpus
    notes = {"format": "LLMServingSim", "vllm": meta.get("vllm_version", ""), "variant": meta.get("variant", "")}
    return SavedCost(
        cost=cost_of(tables),
        source="kernels",
        model=model,
        machine=machine,
        date=meta.get("profiled_at", "")[:10],
        notes={name: value for name, value in notes.items() if value},
    )


def _tables_of(folder: Path, num_gpus: int) -> Path:
    """Return the folder of the tables of `num_gpus`: the given one, or its subfolder `tpN` from the profiler."""
    part, parts = folder / f"tp{num_gpus}", sorted(path.name for path in folder.glob("tp*"))
    if parts and not part.is_dir():
        raise CostFileError(f"{folder} has no tables of {num_gpus} GPUs, only {', '.join(parts)}.", remedy="Set --gpus.")
    return part if parts else folder


def _meta(folder: Path, num_gpus: int) -> Mapping[str, str]:
    """Return the plain values at the top of meta.yaml, the `alpha_default` of `num_gpus`, and whether `skew_fit` is off."""
    path = folder / "meta.yaml"
    if not path.exists():
        return {}
    text = text_of(path)
    found = {match[1]: match[2] for match in re.finditer(r"^(\w+): +'?([^'\[{\n]+?)'?$", text, re.MULTILINE)}
    if re.search(r"^skew_fit:\n +enabled: false$", text, re.MULTILINE):
        found["skews_are_off"] = "yes"
    of_gpus = re.search(rf"^ +{num_gpus}:\n(?: +(?!\d+:).*\n)*? +alpha_default: +([-+.\deE]+)$", text, re.MULTILINE)
    return found | ({"alpha_default": of_gpus[1]} if of_gpus else {})


def _curves(path: Path, column: str) -> dict[str, Grid]:
    """Read times of kernels by one number: name -> curve in nanoseconds."""
    points: defaultdict[str, dict[Point, float]] = defaultdict(dict)
    for _, words, (number, time_us) in rows_of(path, (column, "time_us"), words=("layer",)):
        points[words["layer"]][number,] = time_us * 1e3
    return {name: curve_of(found) for name, found in points.items()}


def _attention(path: Path) -> tuple[Grid, Grid, Grid]:
    """Read the times of attention: of decodes, of a prompt's chunk, and of both together."""
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    decodes, prefills, mixtures = dict[Point, float](), dict[Point, float](), dict[Point, float]()
    for line, _, (chunk, before, num, reads, time_us) in rows_of(path, (*columns, "time_us")):
        if chunk and num:
            mixtures[chunk, before, num, reads] = time_us * 1e3
        elif num:
            decodes[num, reads] = time_us * 1e3
        elif chunk:
            prefills[chunk, before] = time_us * 1e3
        else:
            raise CostFileError(f"{path}, line {line}: it has no chunk and no decodes.", remedy="Remove the line.")
    if not (decodes and prefills and mixtures):
        cause = f"{path} lacks times of decodes alone, of chunks alone, or of both together."
        raise CostFileError(cause, remedy="Copy the whole table.")
    if len({before for _, before in prefills}) < 2:
        raise CostFileError(f"{path} has chunks after one number of positions.", remedy="Copy the whole table.")
    return filled(path, decodes), filled(path, prefills), filled(path, mixtures)


def _skews(path: Path, usual: float) -> Grid | None:
    """Read how decodes of uneven lengths differ from even ones. `usual`: for bins without steps."""
    if not path.exists():
        return None
    labels = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
    points: dict[Point, float] = {}
    for line, words, (chunk, alpha) in rows_of(path, ("pc", "alpha"), words=labels):
        num, share, longest, before = (_bound(f"{path}, line {line}", label, words[label]) for label in labels)
        points[chunk, num, share, longest, before] = alpha
    axes = tuple(tuple(sorted(set(values))) for values in zip(*points, strict=True))
    if (num := prod(map(len, axes))) > MAX_POINTS:
        raise CostFileError(f"{path} is not a grid: its bins have {num} combinations.", remedy="Copy the whole table.")
    return Grid(axes, tuple(points.get(point, usual) for point in product(*axes)))


def _bound(at: str, name: str, label: str) -> float:
    """Return the upper end of a bin from its label: `n<=128`, `sr<=15%`, `kvB<=4k`, `kp=0`, or `sr>70%` without one."""
    match = _LABEL.match(label)
    if match is None:
        raise CostFileError(f"{at}: {name} is {label!r}.", remedy="It must be like n<=128, sr<=15%, kvB<=4k or kp=0.")
    sign, number, unit = match.groups()
    return BEYOND if sign == ">" else float(number) * {"k": 1024, "%": 0.01, None: 1}[unit]


def _experts(path: Path) -> Experts:
    points: dict[Point, float] = {}
    for _, _, (tokens, num_experts, time_us) in rows_of(path, ("tokens", "activated_experts", "time_us")):
        points[tokens, num_experts] = time_us * 1e3
    ns = filled(path, points)
    if ns.axes[0][0] != 1 or ns.axes[1][0] < 1:
        raise CostFileError(f"{path} has no times of one token with its experts.", remedy="Copy the whole table.")
    return Experts(ns=ns, num_experts=int(ns.axes[1][-1]), num_experts_per_token=int(ns.axes[1][0]))
