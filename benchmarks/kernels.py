"""How near do the products of the native backend come to what the machine can do, for every shape of a model and row count?

Every product of three models, with weights of every kind, each on an engine of its own whose weights exceed the caches. The
bound of a product is the larger of its operations at the peak of multiply-adds and its weights at the speed of memory, both
measured between the products themselves; the figures are that bound over the time, of the fastest of several runs against the
best peak.
One row is bound by memory, many rows by the multiply-adds. "Worst neighbours" are the row counts with the lowest ratio of
rows per second to those of the next smaller row count. Below 1 is a cliff.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --models smollm2 --shapes down --kinds q4_1 --rows 1-33
    python benchmarks/kernels.py --variant portable --rows 1,8,32

On a machine with other work to do, `--cpu-time` compares one thread's kernels with one thread's peaks, both by the thread's
CPU time. The whole takes some five minutes on two cores; portable is thirty times slower. `attention.py` measures
attention.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kernel_engines import WEIGHT_KINDS, Product, ProductEngine, WeightKind
from peaks import PeakMeter, Work, fastest_s, usable_threads
from printed import origin, table

from penstock.backends.native._native import emulated_variants, usable_variants

ROWS = "1,2,3,4,6,8,12,16,24,32,48,64,96,128,256,512"
SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
"""Columns; the others only reveal cliffs."""
COPIES_BYTES = 128 << 20
"""Size of one engine's weights: several times the last-level cache."""
PORTABLE_COPIES_BYTES = 16 << 20
"""Too slow for memory to matter."""

MODELS = {
    "smollm2": (
        Product("qkv", 576, (576, 192, 192)),
        Product("o", 576, (576,), has_residual=True),
        Product("gate_up", 576, (1536, 1536), is_gated=True),
        Product("down", 1536, (576,), has_residual=True),
        Product("logits", 576, (49_152,)),
    ),
    "qwen2.5": (
        Product("qkv", 1536, (1536, 256, 256)),
        Product("o", 1536, (1536,), has_residual=True),
        Product("gate_up", 1536, (8960, 8960), is_gated=True),
        Product("down", 8960, (1536,), has_residual=True),
        Product("logits", 1536, (151_936,)),
    ),
    "minilm": (
        Product("qkv", 384, (384, 384, 384)),
        Product("o", 384, (384,), has_residual=True),
        Product("up", 384, (1536,), has_gelu=True),
        Product("down", 1536, (384,), has_residual=True),
    ),
}
ENCODERS = ("minilm",)
"""The others have no weights with a scale for each row."""


def product_work(product: Product, kind: WeightKind, rows: int) -> Work:
    return Work(2.0 * rows * product.num_weights, product.num_bytes(kind))


def worst_neighbours(times: dict[int, float]) -> tuple[float, int, int]:
    """Return (ratio, smaller, larger) of the neighbouring row counts with the lowest ratio of rows per second."""
    rates = {rows: rows / seconds for rows, seconds in times.items()}
    return min(((rates[b] / rates[a], a, b) for a, b in pairwise(times)), default=(math.nan, 0, 0))


def measure_product(product: Product, kind: WeightKind, args: argparse.Namespace) -> list[object]:
    """A line of the table."""
    copies_bytes = PORTABLE_COPIES_BYTES if args.variant == "portable" else COPIES_BYTES
    engine = ProductEngine(
        product,
        kind,
        num_copies=max(1, round(copies_bytes / product.num_bytes(kind))),
        max_rows=max(args.rows),
        num_threads=args.threads,
        variant=args.variant,
        cpu_time=args.cpu_time,
    )
    meter = PeakMeter(args.threads, args.variant, cpu_time=args.cpu_time)
    peak = "bf16_tiles" if args.variant.startswith("amx") and not kind.by_row else "int8" if kind.is_quantised else "bf16"
    times = fastest_s(engine.run, args.rows, meter, peak, args.seconds)
    shares = [
        f"{100 * product_work(product, kind, rows).share(times[rows], meter, peak):.0f}" if rows in times else ""
        for rows in SHOWN_ROWS
    ]
    fewest, most = min(times), max(times)
    gops = product_work(product, kind, most).operations / times[most] / 1e9
    ratio, smaller, larger = worst_neighbours(times)
    speeds = [f"{times[fewest] * 1e6:.1f} ({fewest})", f"{gops:.0f} ({most})"]
    return [f"{product.name} {kind.name}", *shares, *speeds, f"{ratio:.2f} ({smaller} to {larger})"]


def parse_rows(text: str) -> list[int]:
    """`1,2,8-12` as ascending row counts."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError("row counts are at least 1")
    return sorted(found)


def add_choices(parser: argparse.ArgumentParser, option: str, values: Iterable[str]) -> None:
    parser.add_argument(option, nargs="+", choices=list(values), default=list(values))


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choices(parser, "--models", MODELS)
    add_choices(parser, "--shapes", dict.fromkeys(product.name for products in MODELS.values() for product in products))
    add_choices(parser, "--kinds", WEIGHT_KINDS)
    parser.add_argument("--variant", choices=[*usable_variants(), *emulated_variants()], default=usable_variants()[0])
    parser.add_argument("--rows", type=parse_rows, default=parse_rows(ROWS), help=f"such as 1,2,8-12; default {ROWS}")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each shape and kind of weights; at least three runs")
    parser.add_argument("--cpu-time", action="store_true", help="one thread's time on a processor")
    args = parser.parse_args(words)
    args.threads = 1 if args.cpu_time else usable_threads()
    return args


def main() -> None:
    args = read_arguments()
    for model in args.models:
        rows = [
            measure_product(product, WEIGHT_KINDS[kind], args)
            for product in MODELS[model]
            if product.name in args.shapes
            for kind in args.kinds
            if model in ENCODERS or not WEIGHT_KINDS[kind].by_row
        ]
        print(origin(model, args.variant, f"{args.threads} threads"))
        head = ["% of the bound", *SHOWN_ROWS, "us (fewest rows)", "GOP/s (most rows)", "worst neighbours"]
        print(table(head, rows) + "\n", flush=True)


if __name__ == "__main__":
    main()
