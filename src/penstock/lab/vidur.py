"""Reads the tables of Vidur (https://github.com/microsoft/vidur): kernels of one layer, in milliseconds.

A model's folder, such as data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B, has products and norms in mlp.csv and
attention in attention.csv. Times are summed as in Vidur's execution_time.py, plus the embedding. The logits are not measured:
they take as long as the first product of the MLP, in proportion to their outputs. Sampling and the host count as 0.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from penstock.lab.cost_files import CostFileError, SavedCost
from penstock.lab.kernel_files import Choice, Point, cost_of, curve_of, filled, num_layers_of, rows_of, summed, text_of
from penstock.lab.kernel_tables import Grid, KernelTables

NUM_LAYERS: Mapping[str, int] = {
    "Qwen/Qwen-72B": 80,
    "codellama/CodeLlama-34b-Instruct-hf": 48,
    "internlm/internlm-20b": 60,
    "meta-llama/Llama-2-70b-hf": 80,
    "meta-llama/Llama-2-7b-hf": 32,
    "meta-llama/Meta-Llama-3-70B": 80,
    "meta-llama/Meta-Llama-3-8B": 32,
    "microsoft/phi-2": 32,
}
"""Models with published tables, by their config.json."""

_PRODUCTS, _ATTENTION, _REDUCE = "mlp.csv", "attention.csv", "all_reduce.csv"
_EMBEDDING, _MLP_INPUT = "emb", "mlp_up_proj"
_MEDIAN = re.compile(r"time_stats\.(\w+)\.median")
_KERNELS = ("prefill", "decode", "kv_cache_save")
_GPUS = "num_tensor_parallel_workers"
_NS_PER_MS = 1e6
_BF16_BYTES = 2

_Points = defaultdict[Point, list[float]]
"""A point has several times if tables of several runs were joined, or if a kernel does not depend on all that varies."""


def is_there(folder: Path) -> bool:
    return (folder / _PRODUCTS).exists()


def read(folder: Path, choice: Choice) -> SavedCost:
    if choice.hidden_size or choice.link_bytes_per_s or choice.link_latency_ns:
        remedy = "Leave out --hidden-size, --link-gbytes-per-s and --link-latency-us."
        raise CostFileError(f"The model's width and the link's times are in the tables of {folder}.", remedy=remedy)
    device, *names = folder.resolve().parts[-3:]
    model = "/".join(names)
    num_layers = num_layers_of(folder, choice, model, NUM_LAYERS.get(model))
    layer_ns, embedding_ns, logits_ns, hidden_size = _products(folder / _PRODUCTS, choice.num_gpus)
    decodes, prefills, saves_ns = _attention(folder / _ATTENTION, choice.num_gpus)
    reduced = [_reduced(folder / _REDUCE, choice.num_gpus, hidden_size)] if choice.num_gpus > 1 else []
    tables = KernelTables(
        num_layers=num_layers,
        layer_tokens=summed([layer_ns, saves_ns, *reduced, *reduced]),  # after attention, and after the MLP
        step_tokens=summed([embedding_ns, *reduced]),
        step_rows=logits_ns,
        decodes=decodes,
        prefills=prefills,
    )
    machine = {"cpu": device} if model in NUM_LAYERS else {}
    return SavedCost(
        cost=cost_of(tables),
        source="kernels",
        model=model,
        machine=machine if choice.num_gpus == 1 else machine | {"gpus": choice.num_gpus},
        notes={"format": "Vidur"},
    )


def _products(path: Path, num_gpus: int) -> tuple[Grid, Grid, Grid, int]:
    """Read a layer's kernels besides attention, the embedding and the logits, each by tokens, and the hidden size."""
    header = next(csv.reader(text_of(path).splitlines()), [])
    kernels = [match[1] for name in header if (match := _MEDIAN.fullmatch(name))]
    columns = ("num_tokens", "n_embd", "n_expanded_embd", "vocab_size", *map("time_stats.{}.median".format, kernels))
    layer, embedding, logits = _Points(list), _Points(list), _Points(list)
    hidden_size = 0.0
    for is_gated, numbers in _of_gpus(path, columns, "use_gated_mlp", num_gpus):
        tokens, hidden_size, mlp_size, vocab_size, *times = numbers
        ns = dict(zip(kernels, (ms * _NS_PER_MS for ms in times), strict=True))
        if _MLP_INPUT not in ns or not mlp_size:
            raise CostFileError(f"{path} has no times of {_MLP_INPUT}.", remedy="Copy the whole table.")
        logits[tokens,].append(ns[_MLP_INPUT] * vocab_size / mlp_size / (2 if is_gated == "True" else 1))
        embedding[tokens,].append(ns.pop(_EMBEDDING, 0.0))
        layer[tokens,].append(sum(ns.values()))
    return curve_of(_means(layer)), curve_of(_means(embedding)), curve_of(_means(logits)), int(hidden_size)


def _attention(path: Path, num_gpus: int) -> tuple[Grid, Grid, Grid]:
    """Read attention of decodes, of a prompt's chunk, and the time to write keys and values by tokens."""
    columns = ("batch_size", "prefill_chunk_size", "kv_cache_size", *map("time_stats.attn_{}.median".format, _KERNELS))
    decodes, prefills, saves = _Points(list), _Points(list), _Points(list)
    for is_prefill, (num, chunk, before, prefill_ms, decode_ms, save_ms) in _of_gpus(path, columns, "is_prefill", num_gpus):
        if is_prefill == "True":
            prefills[chunk, before].append(prefill_ms * _NS_PER_MS)
        else:
            decodes[num, before].append(decode_ms * _NS_PER_MS)
        saves[max(num, chunk),].append(save_ms * _NS_PER_MS)
    if not (decodes and prefills):
        raise CostFileError(f"{path} lacks times of decodes or of chunks.", remedy="Copy the whole table.")
    reads_of, pairs_of = (lambda num, before: num * (before + 1)), (lambda chunk, before: chunk * (before + chunk / 2))
    return filled(path, _means(decodes), reads_of), filled(path, _means(prefills), pairs_of), curve_of(_means(saves))


def _of_gpus(path: Path, columns: Sequence[str], word: str, num_gpus: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the value of the column `word` and the numbers of `columns` from rows of `num_gpus`."""
    others = set[int]()
    for _, words, (gpus, *numbers) in rows_of(path, (_GPUS, *columns), words=(word,)):
        others.add(int(gpus))
        if gpus == num_gpus:
            yield words[word], numbers
    if num_gpus not in others:
        remedy = f"Set --gpus, one of: {', '.join(map(str, sorted(others)))}."
        raise CostFileError(f"{path} has no times of {num_gpus} GPUs.", remedy=remedy)


def _reduced(path: Path, num_gpus: int, hidden_size: int) -> Grid:
    """Read times to all-reduce a vector per token between the GPUs of one machine, by tokens."""
    if not path.exists():
        raise CostFileError(
            f"{path.parent} does not say how long {num_gpus} GPUs take to add up their results.",
            remedy=f"Copy Vidur's table of the machine, such as data/profiling/network/a100_dgx/{_REDUCE}, into the folder.",
        )
    points = _Points(list)
    where = {"collective": "all_reduce", "num_workers": str(num_gpus), "devices_per_node": str(num_gpus)}
    for _, _, (num_bytes, ms) in rows_of(path, ("size", "time_stats.all_reduce.median"), where=where):
        points[num_bytes / _BF16_BYTES / hidden_size,].append(ms * _NS_PER_MS)
    if not points:
        raise CostFileError(f"{path} has no times of {num_gpus} GPUs in one machine.", remedy="Set --gpus.")
    return curve_of(_means(points))


def _means(points: Mapping[Point, Sequence[float]]) -> dict[Point, float]:
    return {point: fmean(times) for point, times in points.items()}
