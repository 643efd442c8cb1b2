"""How long does one step of the native backend take, and which part of it?

Decodes of several batch sizes and prefill chunks with and without context, on the default model, straight through
the executor: no scheduler, no HTTP. `gops` counts two operations for each multiply-add with a weight, attention not counted.

    python benchmarks/step.py

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import count

from penstock.backends.native.executor import NativeExecutor
from penstock.models import registry
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams

BLOCK_SIZE = 16
SHAPES = [(1, 1, 128), (8, 1, 200), (32, 1, 256), (1, 512, 0), (1, 512, 1024)]
"""(rows, query_len, context_len)"""


def multiply_adds(model: LoadedModel, rows: int, query_len: int) -> int:
    """Of the products with weights; the output matrix only for the rows that sample."""
    last = "output" if "output" in model.weights else "embed"
    per_token = sum(
        t.num_rows * t.num_cols for name, t in model.weights.items() if name.startswith("layers.") and t.num_rows > 1
    )
    return rows * query_len * per_token + rows * model.weights[last].num_rows * model.weights[last].num_cols


def measure(
    executor: NativeExecutor, step_ids: count[int], rows: int, query_len: int, context_len: int, repeat: int
) -> dict[str, float]:
    """Medians in milliseconds. Every repetition is a fresh set of rows with the same context."""
    seconds: list[float] = []
    parts: dict[str, list[float]] = {}
    per_row = -(-(context_len + query_len + 1) // BLOCK_SIZE)
    for _ in range(repeat):
        step_id = next(step_ids)
        names = [f"{step_id}-{row}" for row in range(rows)]
        admits = tuple(
            AdmitRow(
                name,
                tuple(1000 + (step_id * 31 + i * 7) % 40000 for i in range(context_len + query_len)),
                context_len + query_len,
                tuple(range(1 + row * per_row, 1 + (row + 1) * per_row)),
                context_len,
                SamplingParams(temperature=0.0),
            )
            for row, name in enumerate(names)
        )
        plan = StepPlan(step_id, 0, admits, tuple(RowPlan(n, context_len, query_len, (), True) for n in names), ())
        timing = executor.collect(executor.submit(plan)).timing
        seconds.append((timing.end_ns - timing.start_ns) / 1e9)
        for part, part_ns in timing.parts.items():
            parts.setdefault(part, []).append(part_ns / 1e6)
        executor.collect(executor.submit(StepPlan(next(step_ids), 0, (), (), tuple(names))))
    medians = {part: round(statistics.median(values), 3) for part, values in parts.items()}
    return {"ms": round(statistics.median(seconds) * 1e3, 3), "min_ms": round(min(seconds) * 1e3, 3), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--variant", default="")
    args = parser.parse_args()
    model = load_model(resolve(DEFAULT_MODEL, default_cache_dir()))
    executor = NativeExecutor(
        model,
        registry.describe(model.spec),
        num_blocks=2048,
        block_size=BLOCK_SIZE,
        max_rows=64,
        max_step_tokens=512,
        max_model_len=2048,
        num_threads=args.threads,
        variant=args.variant,
    )
    step_ids = count()
    results = []
    for rows, query_len, context_len in SHAPES:
        measure(executor, step_ids, rows, query_len, context_len, 2)  # touches the memory
        figures = measure(executor, step_ids, rows, query_len, context_len, args.repeat)
        gops = 2 * multiply_adds(model, rows, query_len) / figures["ms"] / 1e6
        results.append({"batch": rows, "query_len": query_len, "context_len": context_len, **figures, "gops": round(gops)})
        print(results[-1], flush=True)
    summary = {"benchmark": "step", "variant": executor.variant, "threads": executor.num_threads, "steps": results}
    print(json.dumps(summary))
    executor.close()


if __name__ == "__main__":
    main()
