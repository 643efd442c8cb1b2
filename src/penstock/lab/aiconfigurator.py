"""Reads the tables of AIConfigurator (https://github.com/ai-dynamo/aiconfigurator): kernels by operation, in milliseconds.

The tables list matrix products by shape and attention by heads, so one folder serves any dense model: the model's config.json
selects the entries. Norms and activations are not measured; AIConfigurator's formula gives their time, with constants from the
system's file (`h200_sxm.yaml`). Times are summed as in aic-core (sdk/models/llama.py, operators/*.rs), without its corrections
of whole requests, which a simulation does not need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from math import ceil, inf, log2, prod
from pathlib import Path
from typing import NamedTuple

from penstock.lab.cost_files import CostFileError, SavedCost
from penstock.lab.kernel_files import Choice, Point, cost_of, curve_of, filled, rows_of, summed, text_of
from penstock.lab.kernel_tables import Grid, KernelTables

_GEMM, _CONTEXT, _GENERATION = "gemm_perf", "context_attention_perf", "generation_attention_perf"
_REDUCE = "custom_allreduce_perf"
_SCALES, _ROUNDING = "computescale_perf", "scale_matrix_perf"
_FAMILIES = {_GEMM: "gemm", _CONTEXT: "attention", _GENERATION: "attention", _REDUCE: "comm"} | dict.fromkeys(
    (_SCALES, _ROUNDING), "quantize"
)
"""Table -> parent of the engine's folder. Releases before 2026 have the engine's folder at the top."""
_NOT_DENSE = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "a mixture of experts") | {
    "kv_lora_rank": "attention over latents"
}
"""Setting of a config.json -> the unsupported kind of layer that it implies."""
_MAX_SIZE = 1 << 24
_ENDINGS = (".parquet", ".txt", ".csv")
_STATIC = "_static"
"""Suffix of weight types whose activation scales are known in advance. Times in the tables include computing the scales."""
_LOW_PRECISION_INPUTS = ("output", "down")
"""Products whose input comes from a kernel that can write it quantized. With known scales, these need no separate pass."""
_BF16_BYTES = 2
_NORM_COPIES = 8
"""Bytes per element that a residual addition with its norm moves: two vectors in and two out, in bf16."""


_Tables = dict[tuple[int, ...], dict[Point, float]]
"""Sizes -> times at points."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a dense decoder."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int

    def products(self, num_gpus: int) -> Mapping[str, tuple[int, int]]:
        """Return the (outputs, inputs) of a layer's products on each GPU."""
        heads, kv_heads, mlp_size = self.num_heads // num_gpus, self.kv_heads_of(num_gpus), self.mlp_size // num_gpus
        return {
            "qkv": ((heads + 2 * kv_heads) * self.head_size, self.hidden_size),
            "output": (self.hidden_size, heads * self.head_size),
            "gate and up": (2 * mlp_size, self.hidden_size),
            "down": (self.hidden_size, mlp_size),
        }

    def logits(self, num_gpus: int) -> tuple[int, int]:
        return ceil(self.vocab_size / num_gpus), self.hidden_size

    def kv_heads_of(self, num_gpus: int) -> int:
        return max(1, self.num_kv_heads // num_gpus)


class System(NamedTuple):
    """A GPU's memory speed, from the system's file."""

    read_bytes_per_s: float
    read_share: float
    latency_s: float

    def copy_ns(self, num_bytes: float) -> float:
        return 1e9 * (num_bytes / (self.read_bytes_per_s * self.read_share) + self.latency_s)


def is_there(folder: Path) -> bool:
    return bool(_engines(folder, _GEMM))


def read(folder: Path, choice: Choice) -> SavedCost:
    if choice.model_config is None:
        raise CostFileError(f"{folder} names no model.", remedy="Name one: --model-config config.json.")
    if choice.num_layers or choice.hidden_size or choice.link_bytes_per_s or choice.link_latency_ns:
        remedy = "Leave out --layers, --hidden-size, --link-gbytes-per-s and --link-latency-us."
        raise CostFileError(f"The model's sizes and the link's times are in {choice.model_config} and {folder}.", remedy=remedy)
    model, system, gpus = read_model(choice.model_config), read_system(folder), choice.num_gpus
    if model.num_heads % gpus or model.mlp_size % gpus or (model.num_kv_heads % gpus and gpus % model.num_kv_heads):
        cause = f"{gpus} GPUs can't share the {model.num_heads} heads and {model.num_kv_heads} KV heads of {model.name}."
        raise CostFileError(cause, remedy="Set --gpus.")
    notes: dict[str, str] = {}
    path = _find(folder, choice.engine, _GEMM)
    found = _products(path, choice.weights.removesuffix(_STATIC))
    logits = found if choice.weights == "bfloat16" else _products(path, "bfloat16")
    reduced = _reduced(_find(folder, choice.engine, _REDUCE), gpus, model.hidden_size) if gpus > 1 else None
    layer, once = [], []
    for name, shape in model.products(gpus).items():
        product_ns = _nearest(found, shape, (0, 1), f"the product {name}", notes)
        if choice.weights.endswith(_STATIC):
            number = 2 if name in _LOW_PRECISION_INPUTS else 1
            passes = _passes(folder, choice.engine, shape[1], number, system, product_ns.axes[0], notes)
            product_ns = _without_scales(product_ns, passes, 1e9 * shape[0] * shape[1] / system.read_bytes_per_s)
        layer.append(product_ns)
    if reduced is not None:
        layer += [reduced, reduced]
        once.append(reduced)
    axis = sorted({number for curve in layer for number in curve.axes[0]})
    norm, act = _NORM_COPIES * model.hidden_size, 3 * _BF16_BYTES * model.mlp_size // gpus
    layer += [_copies(system, norm, axis), _copies(system, norm, axis), _copies(system, act, axis)]
    once += [_copies(system, _BF16_BYTES * model.hidden_size, axis), _copies(system, norm, axis)]
    heads = (model.num_heads // gpus, model.kv_heads_of(gpus), model.head_size)
    path = _find(folder, choice.engine, _GENERATION)
    make = partial(filled, path, work=lambda num, reads: num * reads)
    decodes = _nearest(_decodes(path, choice.kv), heads, (1, 2), "decodes", notes, make)
    prompts = _nearest(_prompts(_find(folder, choice.engine, _CONTEXT), choice.kv), heads, (0, 2), "prompts", notes)
    tables = KernelTables(
        num_layers=model.num_layers,
        layer_tokens=summed(layer),
        step_tokens=summed(once),
        step_rows=_nearest(logits, model.logits(gpus), (0, 1), "the product logits", notes),
        decodes=decodes,
        prefills=_after_prefixes(prompts),
    )
    name = folder.resolve().name
    about = {"format": "AIConfigurator", "engine": choice.engine, "weights": choice.weights, "kv": choice.kv}
    return SavedCost(
        cost=cost_of(tables),
        source="kernels",
        model=model.name,
        machine={"cpu": name} if gpus == 1 else {"cpu": f"{gpus} {name}", "gpus": gpus},
        notes=about | notes,
    )


def read_model(path: Path) -> Model:
    """Read a dense model's config.json. Raises CostFileError for missing settings and for layers that are not dense."""
    remedy = "Give the config.json of a dense model, as Hugging Face has it."
    try:
        config = json.loads(text_of(path))
        for name, what in _NOT_DENSE.items():
            if config.get(name):
                raise CostFileError(f"{path} describes {what} ({name}).", remedy=remedy)
        heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        name = path.resolve().parent.name if path.stem == "config" else path.stem.removesuffix("_config").replace("--", "/")
        model = Model(
            name=str(config.get("_name_or_path") or name),
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden_size // heads),
            mlp_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
        )
        if not all(0 < size <= _MAX_SIZE for size in astuple(model) if isinstance(size, int)):
            raise ValueError(f"its sizes are not all from 1 to {_MAX_SIZE}")
        return model
    except KeyError as error:
        raise CostFileError(f"{path} has no {error.args[0]}.", remedy=remedy) from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CostFileError(f"{path} is not a model's configuration: {error}.", remedy=remedy) from None


def read_system(folder: Path) -> System:
    """Read a system's speed of memory from the file beside `data`, such as `systems/h200_sxm.yaml`."""
    path = folder.resolve().parent.parent / f"{folder.resolve().name}.yaml"
    text = text_of(path)

    def value(name: str) -> float:
        match = re.search(rf"^ +{name}: +(\S+)", text, re.MULTILINE)
        with suppress(ValueError):
            if match is not None and 0 < (number := float(match[1])) < inf:
                return number
        raise CostFileError(f"{path} has no {name} above 0.", remedy="Copy the file as it is published.")

    names = ("mem_bw", "mem_bw_empirical_scaling_factor", "mem_empirical_constant_latency")
    return System(*map(value, names))


def _engines(folder: Path, table: str) -> list[str]:
    paths = [*folder.glob(f"{_FAMILIES[table]}/*/*/{table}.*"), *folder.glob(f"*/*/{table}.*")]
    return sorted({f"{path.parent.parent.name}/{path.parent.name}" for path in paths if path.suffix in _ENDINGS})


def _find(folder: Path, engine: str, table: str) -> Path:
    for inside, ending in product((folder / _FAMILIES[table], folder), _ENDINGS):
        path = inside / engine / f"{table}{ending}"
        if engine and path.exists():
            return path
    named = f"for {engine}" if engine else "for an unnamed engine"
    raise CostFileError(
        f"{folder} has no {table} {named}.", remedy=f"Set --engine, one of: {', '.join(_engines(folder, table)) or 'none'}."
    )


def _grouped(rows: Iterable[tuple[Sequence[float], Point, float]]) -> _Tables:
    """Group rows of (sizes, point, milliseconds) by sizes. The first of duplicate points counts."""
    tables: _Tables = {}
    for sizes, point, ms in rows:
        tables.setdefault(tuple(map(int, sizes)), {}).setdefault(point, ms * 1e6)
    return tables


def _products(path: Path, weights: str) -> _Tables:
    """Read products of one type of weights: (outputs, inputs) -> times by tokens."""
    rows = _of(path, ("m", "n", "k", "latency"), "gemm_dtype", weights, "--weights")
    return _grouped(((outputs, inputs), (tokens,), ms) for tokens, outputs, inputs, ms in rows)


def _without_scales(times: Grid, passes: Sequence[Grid], least_ns: float) -> Grid:
    """Return times of a product without passes over its input, and not below the time to read its weights."""
    values = [
        max(min(ns, least_ns), ns - sum(one.at(tokens) for one in passes))
        for tokens, ns in zip(times.axes[0], times.values, strict=True)
    ]
    return Grid(times.axes, tuple(values))


def _passes(
    folder: Path, engine: str, inputs: int, number: int, system: System, axis: Sequence[float], notes: dict[str, str]
) -> list[Grid]:
    """Return times by tokens to find a product input's scales and, if `number` is 2, to round it.

    An engine without such tables gets the time of copies.
    """
    if engine not in _engines(folder, _SCALES):
        return [_copies(system, _BF16_BYTES * inputs, axis)] * number
    found = []
    for table in (_SCALES, _ROUNDING)[:number]:
        rows = _of(_find(folder, engine, table), ("m", "k", "latency"), "quant_dtype", "fp8", "--weights")
        points = _grouped(((width,), (tokens,), ms) for tokens, width, ms in rows)
        found.append(_nearest(points, (inputs,), (0,), f"{table} of {inputs}", notes))
    return found


def _of(path: Path, columns: tuple[str, ...], word: str, wanted: str, option: str) -> Iterator[list[float]]:
    """Yield rows whose column `word` has the wanted value."""
    others = set[str]()
    is_found = False
    for line, words, numbers in rows_of(path, columns, words=(word,), where=_PLAIN):
        if words[word] == wanted:
            is_found = True
            if small := [name for name, number in zip(columns, numbers, strict=True) if number < 1 and name in _SIZES]:
                cause = f"{path}, line {line}: {', '.join(small)} is below 1."
                raise CostFileError(cause, remedy="Remove the line.")
            yield numbers
        else:
            others.add(words[word])
    if not is_found:
        raise CostFileError(f"{path} has no rows of {wanted}.", remedy=f"Set {option}, one of: {', '.join(sorted(others))}.")


_PLAIN = {"attn_dtype": "bfloat16", "window_size": "0"}
"""Attention that computes in bf16 over the whole context. Older tables have no windows."""
_HEADS = ("num_heads", "num_key_value_heads", "head_dim", "batch_size", "isl")
_SIZES = ("m", "n", "k", *_HEADS)


def _decodes(path: Path, kv: str) -> _Tables:
    """Read attention of decodes: (heads, KV heads, head size) -> times by (decodes, positions that each reads)."""
    rows = _of(path, (*_HEADS, "step", "latency"), "kv_cache_dtype", kv, "--kv")
    return _grouped((heads, (num, isl + step), ms) for *heads, num, isl, step, ms in rows)


def _prompts(path: Path, kv: str) -> _Tables:
    """Read attention of one prompt: (heads, KV heads, head size) -> times by tokens."""
    rows = _of(path, (*_HEADS, "latency"), "kv_cache_dtype", kv, "--kv")
    points = _grouped((heads, (tokens,), ms) for *heads, num, tokens, ms in rows if num == 1)
    if not points:
        raise CostFileError(f"{path} has no times of one prompt alone.", remedy="Copy the whole table.")
    return points


def _after_prefixes(prompts: Grid) -> Grid:
    """Return times of a chunk by (tokens, positions before): the prompt's time, times the chunk's share of query-key pairs.

    Interpolates the square root of the time, which is nearly linear in the tokens.
    """
    (axis,) = prompts.axes
    roots = Grid(prompts.axes, tuple(ns**0.5 for ns in prompts.values))

    def whole_ns(tokens: float) -> float:
        last = axis[-1]
        return roots.at(tokens) ** 2 * max(1.0, tokens / last) ** 2

    befores = (0.0, *axis)
    values = [whole_ns(new + old) * (1 - (old / (new + old)) ** 2) for new, old in product(axis, befores)]
    return Grid((axis, befores), tuple(round(ns, 1) for ns in values))


def _reduced(path: Path, num_gpus: int, hidden_size: int) -> Grid:
    """Read times to all-reduce a vector per token, by tokens. The table counts elements of 16 bits."""
    points: dict[Point, float] = {}
    others = set[int]()
    for _, words, (gpus, size, ms) in rows_of(path, ("num_gpus", "message_size", "latency"), words=("kernel_source",)):
        others.add(int(gpus))
        if gpus == num_gpus and not words["kernel_source"].endswith("_eager"):
            points.setdefault((size / hidden_size,), ms * 1e6)
    if not points:
        raise CostFileError(
            f"{path} has no times of {num_gpus} GPUs.", remedy=f"Set --gpus, one of: {', '.join(map(str, sorted(others)))}."
        )
    return curve_of(points)


def _copies(system: System, token_bytes: float, axis: Sequence[float]) -> Grid:
    return Grid((tuple(axis),), tuple(system.copy_ns(token_bytes * tokens) for tokens in axis))


def _nearest(
    found: _Tables,
    wanted: tuple[int, ...],
    work: Sequence[int],
    what: str,
    notes: dict[str, str],
    make: Callable[[Mapping[Point, float]], Grid] = curve_of,
) -> Grid:
    """Return the table of the wanted sizes, or the nearest table (distance in doublings) scaled by the ratio of work.

    `work`: indices of the sizes whose product is the work.
    """

    def distance(sizes: tuple[int, ...]) -> float:
        return sum(abs(log2(size / other)) for size, other in zip(sizes, wanted, strict=True))

    nearest = min(sorted(found), key=distance)
    grid = make(found[nearest])
    if nearest == wanted:
        return grid
    share = prod(wanted[idx] for idx in work) / prod(nearest[idx] for idx in work)
    notes[what] = f"{'x'.join(map(str, wanted))}, from {'x'.join(map(str, nearest))}"
    return Grid(grid.axes, tuple(ns * share for ns in grid.values))
