"""How long do the row operations of the native backend take for a row of a model: norm, rounding to 8 bits, rope, KV write?

One thread's CPU time, so that other work disturbs little. Each operation runs many times over on
the same rows: a few rows fit in the core's own caches, 512 in the last level. A layer of Llama type has two norms
that are rounded, two values that are rounded, rope of queries and keys, and a KV write.

    python benchmarks/row_operations.py
    python benchmarks/row_operations.py --variant avx2 --rows 512

Nanoseconds per row, the fastest of several runs. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np
from kernel_engines import OUTLIER_SHARE, RowsEngine
from peaks import context

from penstock.backends.native._native import RowOp, RowOpKind, usable_variants

TIMES = 1000
"""Repetitions of an operation in a step, so that the step's other costs are negligible."""
RUNS = 5
ROWS = (1, 4, 32, 512)


@dataclass(frozen=True, slots=True)
class Model:
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = {"smollm2": Model(576, 1536, 9, 3, 64), "qwen2.5": Model(1536, 8960, 12, 2, 128)}


def operations(engine: RowsEngine, model: Model) -> dict[str, list[RowOp]]:
    """By name. Rope turns the same numbers on and on, which leaves their size as it is."""
    hidden, wide = engine.input(model.hidden, OUTLIER_SHARE), engine.input(model.intermediate, OUTLIER_SHARE)
    q, k, v = (engine.input(n * model.head_dim) for n in (model.num_heads, model.num_kv_heads, model.num_kv_heads))
    norm = engine.vector(np.linspace(0.5, 1.5, model.hidden, dtype=np.float32))
    rope = engine.rope(model.head_dim)
    normed = engine.engine.add_buffer(model.hidden, per_sample=False)
    small = engine.engine.add_activation(model.hidden, quantised=True, per_sample=False)
    large = engine.engine.add_activation(model.intermediate, quantised=True, per_sample=False)
    return {
        "norm": [RowOp(RowOpKind.RMS_NORM, out=normed, x=hidden, weight=norm, n=model.hidden, value=1e-5)],
        "norm, rounded": [RowOp(RowOpKind.QUANTIZE, out=small, x=hidden, weight=norm, value=1e-5)],
        f"rounded, {model.hidden}": [RowOp(RowOpKind.QUANTIZE, out=small, x=hidden)],
        f"rounded, {model.intermediate}": [RowOp(RowOpKind.QUANTIZE, out=large, x=wide)],
        "rope": [
            RowOp(RowOpKind.ROPE, x=q, weight=rope, n=model.num_heads, head_dim=model.head_dim),
            RowOp(RowOpKind.ROPE, x=k, weight=rope, n=model.num_kv_heads, head_dim=model.head_dim),
        ],
        "KV write": [RowOp(RowOpKind.KV_WRITE, x=k, y=v, n=0)],
    }


def measure(model: Model, name: str, rows: list[int], variant: str) -> dict[int, float]:
    """Nanoseconds per row of one operation, by how many rows a step has."""
    engine = RowsEngine(max(rows), model.num_kv_heads, model.head_dim, variant)
    engine.add(operations(engine, model)[name], TIMES)
    return {count: round(min(engine.run(count) for _ in range(RUNS)) * 1e9 / count / TIMES, 1) for count in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["smollm2"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--variant", choices=usable_variants(), default=usable_variants()[0])
    args = parser.parse_args()
    results: dict[str, dict[str, dict[int, float]]] = {}
    for model_name in args.models:
        model = MODELS[model_name]
        results[model_name] = {}
        for name in operations(RowsEngine(1, model.num_kv_heads, model.head_dim, args.variant), model):
            results[model_name][name] = measure(model, name, args.rows, args.variant)
            print(f"{model_name} {name:16}", results[model_name][name], flush=True)
    print(json.dumps({"benchmark": "row_operations", **context(1, args.variant, cpu_time=True), "ns_per_row": results}))


if __name__ == "__main__":
    main()
