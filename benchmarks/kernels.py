"""How near do the kernels of the native backend come to what the machine can do, for every shape of a model and row count?

Every product of both models, with weights of every kind, and their attention, each on an engine of its own whose weights exceed
the caches. The bound of a product is the larger of its operations at the peak of multiply-adds and its weights at the speed of
memory, both measured between the products themselves; `share` is that bound over the time. One row is bound by memory, many
rows by the multiply-adds. Figures are of the fastest of several runs against the best peak, and `median_share` of the medians.
`worst_neighbours` is where one row count more costs most: how many rows a second are computed, against the next
smaller row count. Below 1 is a cliff.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --models smollm2 --shapes down --kinds q4_1 --rows 1-33 --no-attention
    python benchmarks/kernels.py --variant portable --rows 1,8,32

On a machine with other work to do, `--cpu-time` compares one thread's kernels with one thread's peaks, by the time that the
thread had a processor. The last line printed is one JSON object. The whole takes some five minutes on two cores; portable
is thirty times slower.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kernel_engines import (
    BLOCK_SIZE,
    WEIGHT_KINDS,
    AttentionCase,
    AttentionEngine,
    AttentionShape,
    Product,
    ProductEngine,
    WeightKind,
)
from peaks import PeakMeter, context, usable_threads

from penstock.backends.native._native import usable_variants
from penstock.types.kv_dtype import KvDtype

ROWS = "1,2,3,4,6,8,12,16,24,32,48,64,96,128,256,512"
COPIES_BYTES = 128 << 20
"""Size of one engine's weights: several times the last-level cache."""
PORTABLE_COPIES_BYTES = 16 << 20
"""Too slow for memory to matter."""
LEAST_RUNS = 3
LAYERS = 8
"""Layers of attention, each with KV of its own."""
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Model:
    products: tuple[Product, ...]
    attention: AttentionShape


MODELS = {
    "smollm2": Model(
        (
            Product("qkv", 576, (576, 192, 192)),
            Product("o", 576, (576,), has_residual=True),
            Product("gate_up", 576, (1536, 1536), is_gated=True),
            Product("down", 1536, (576,), has_residual=True),
            Product("logits", 576, (49_152,)),
        ),
        AttentionShape(9, 3, 64),
    ),
    "qwen2.5": Model(
        (
            Product("qkv", 1536, (1536, 256, 256)),
            Product("o", 1536, (1536,), has_residual=True),
            Product("gate_up", 1536, (8960, 8960), is_gated=True),
            Product("down", 8960, (1536,), has_residual=True),
            Product("logits", 1536, (151_936,)),
        ),
        AttentionShape(12, 2, 128),
    ),
}
ATTENTION = (
    AttentionCase(1, 1, 128),
    AttentionCase(1, 1, 1024),
    AttentionCase(1, 1, 8000),
    AttentionCase(8, 1, 200),
    AttentionCase(32, 1, 256),
    AttentionCase(32, 1, 1024),
    AttentionCase(4, 128, 256),
    AttentionCase(1, 512, 0),
    AttentionCase(1, 512, 1024),
)


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one run."""

    operations: float
    num_bytes: float

    def bound_s(self, gops: float, gbs: float) -> float:
        return max(self.operations / gops, self.num_bytes / gbs) / 1e9


def product_work(product: Product, kind: WeightKind, rows: int) -> Work:
    return Work(2.0 * rows * product.num_weights, product.num_bytes(kind))


def attention_work(shape: AttentionShape, case: AttentionCase) -> Work:
    """Scores and weighted sums of the positions that each query sees; every row's keys and values once: 8 bits and scales."""
    visible = case.query_len * case.context_len + case.query_len * (case.query_len + 1) // 2
    kv_bytes = case.rows * (case.context_len + case.query_len) * shape.num_kv_heads * KvDtype.INT8.head_bytes(shape.head_dim)
    return Work(4.0 * case.rows * visible * shape.num_heads * shape.head_dim, kv_bytes)


def measure(
    run: Callable[[Any], float], cases: Sequence[Any], meter: PeakMeter, kind: str, seconds: float
) -> dict[Any, list[float]]:
    """Seconds of every case, all in turn, and the machine's peak after every turn, for `seconds` but at least three turns."""
    times: dict[Any, list[float]] = {}
    for case in cases:
        run(case)  # touches the memory
        times[case] = []
    end = time.monotonic() + seconds
    turns = 0
    while turns < LEAST_RUNS or time.monotonic() < end:
        for case in cases:
            times[case].append(run(case))
        meter.sample([kind], repeat=1)
        turns += 1
    return times


def figures(times: Sequence[float], work: Work, meter: PeakMeter, kind: str) -> dict[str, float]:
    best, median = min(times), statistics.median(times)
    return {
        "us": round(best * 1e6, 2),
        "gops": round(work.operations / best / 1e9, 1),
        "gbs": round(work.num_bytes / best / 1e9, 2),
        "share": round(work.bound_s(meter.best(kind), meter.best("read")) / best, 3),
        "median_share": round(work.bound_s(meter.median(kind), meter.median("read")) / median, 3),
    }


def worst_neighbours(rows: Sequence[int], times: Sequence[float]) -> dict[str, Any]:
    """The pair of row counts whose larger one computes fewest rows a second against the smaller one."""
    rates = {m: m / s for m, s in zip(rows, times, strict=True)}
    pairs = [(rates[b] / rates[a], a, b) for a, b in pairwise(rows)]
    ratio, smaller, larger = min(pairs, default=(math.nan, 0, 0))
    return {"ratio": round(ratio, 3), "rows": [smaller, larger]}


def measure_product(product: Product, kind: WeightKind, args: argparse.Namespace, variant: str) -> dict[str, Any]:
    copies_bytes = PORTABLE_COPIES_BYTES if variant == "portable" else COPIES_BYTES
    engine = ProductEngine(
        product,
        kind,
        num_copies=max(1, round(copies_bytes / product.num_bytes(kind))),
        max_rows=max(args.rows),
        num_threads=args.threads,
        variant=variant,
        cpu_time=args.cpu_time,
    )
    meter = PeakMeter(args.threads, variant, cpu_time=args.cpu_time)
    peak = "int8" if kind.is_quantised else "bf16"
    meter.sample([peak, "read"])
    times = measure(engine.run, args.rows, meter, peak, args.seconds)
    by_rows = {m: figures(times[m], product_work(product, kind, m), meter, peak) for m in args.rows}
    worst = worst_neighbours(args.rows, [min(times[m]) for m in args.rows])
    return {"rows": by_rows, "worst_neighbours": worst, "peaks": meter.summary()}


def measure_attention(shape: AttentionShape, args: argparse.Namespace, variant: str) -> dict[str, Any]:
    room = max(c.rows * (c.context_len + c.query_len + 2 * BLOCK_SIZE) for c in ATTENTION) + MAX_TOKENS
    engine = AttentionEngine(
        shape,
        num_layers=LAYERS,
        num_positions=room,
        max_tokens=MAX_TOKENS,
        num_threads=args.threads,
        variant=variant,
        cpu_time=args.cpu_time,
    )
    meter = PeakMeter(args.threads, variant, cpu_time=args.cpu_time)
    meter.sample(["bf16", "float32", "read"])
    times = measure(engine.run, ATTENTION, meter, "bf16", args.seconds)
    cases = [
        {
            "rows": case.rows,
            "query_len": case.query_len,
            "context_len": case.context_len,
            **figures(times[case], attention_work(shape, case), meter, "bf16"),
        }
        for case in ATTENTION
    ]
    return {"cases": cases, "peaks": meter.summary()}


def print_product(name: str, result: dict[str, Any]) -> None:
    shares = " ".join(f"{m}:{figure['share'] * 100:.0f}" for m, figure in result["rows"].items())
    worst = result["worst_neighbours"]
    print(f"{name:32} {shares}  worst neighbours {worst['ratio']} at {worst['rows']}", flush=True)


def measure_variant(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    products, attention = [], []
    for model_name in args.models:
        model = MODELS[model_name]
        for product in (p for p in model.products if p.name in args.shapes):
            for kind in (WEIGHT_KINDS[name] for name in args.kinds):
                result = measure_product(product, kind, args, variant)
                print_product(f"{variant} {model_name} {product.name} {kind.name}", result)
                products.append({"model": model_name, "shape": product.name, "kind": kind.name, **result})
        if args.attention:
            result = measure_attention(model.attention, args, variant)
            for case in result["cases"]:
                print(variant, model_name, "attention", case, flush=True)
            attention.append({"model": model_name, **result})
    return {"products": products, "attention": attention}


def parse_rows(text: str) -> list[int]:
    """`1,2,8-12` as ascending row counts."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError("row counts are at least 1")
    return sorted(found)


def add_choices(
    parser: argparse.ArgumentParser, option: str, values: Iterable[str], default: Sequence[str] | None = None
) -> None:
    names = list(values)
    parser.add_argument(option, nargs="+", choices=names, default=list(default or names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choices(parser, "--models", MODELS)
    add_choices(parser, "--shapes", [p.name for p in MODELS["smollm2"].products])
    add_choices(parser, "--kinds", WEIGHT_KINDS)
    add_choices(parser, "--variant", usable_variants(), usable_variants()[:1])
    parser.add_argument("--rows", type=parse_rows, default=parse_rows(ROWS), help=f"such as 1,2,8-12; default {ROWS}")
    parser.add_argument("--attention", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--seconds", type=float, default=1.5, help="for each shape and kind of weights; at least three runs")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's time on a processor: on a machine with other work"
    )
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    results = {variant: measure_variant(variant, args) for variant in args.variant}
    origin = context(args.threads, " ".join(args.variant), cpu_time=args.cpu_time)
    print(json.dumps({"benchmark": "kernels", **origin, "variants": results}))


if __name__ == "__main__":
    main()
