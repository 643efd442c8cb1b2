"""What does each part of a step cost? Fits the simulator's cost model to steps of the native backend.

    python benchmarks/step_costs.py
    python benchmarks/step_costs.py --cpu-time
    python benchmarks/step_costs.py --model qwen2.5-coder:1.5b --threads 4

Decodes of 1 to 64 rows and prefill chunks, with and without context, straight through the executor; the fastest of a few runs
each. The last line printed is one JSON object: the coefficients in nanoseconds (`penstock.lab.cost_model`), and by how
much the model misses the measured steps.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from step import StepRunner, open_executor
from step_shape import StepShape

from penstock.lab.fitting import fit
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.types import plan
from penstock.types.kv_dtype import KvDtype

DECODES = [StepShape(rows, 1, context) for rows in (1, 2, 4, 8, 16, 32, 64) for context in (32, 256, 1024)]
PREFILLS = [StepShape(1, tokens, context) for tokens in (16, 64, 128, 256, 512) for context in (0, 512, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of the parts of a step.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: if the machine has other work")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        arguments.threads = 1
    model = load_model(resolve(arguments.model, default_cache_dir()))
    executor = open_executor(model, DECODES + PREFILLS, arguments.threads, "", KvDtype.INT8)
    runner = StepRunner(executor, model.spec.vocab_size, cpu_time=arguments.cpu_time)
    runner.fill()
    shapes, times_ns = DECODES + PREFILLS, []
    for shape in shapes:
        times_ns.append(round(min(runner.run(shape)["ms"] for _ in range(arguments.repeat)) * 1e6))
    rows = [plan.StepShape(((shape.query_len, shape.context_len),) * shape.rows, shape.rows) for shape in shapes]
    fitted = fit(list(zip(rows, times_ns, strict=True)))
    for shape, time_ns, error in zip(shapes, times_ns, fitted.errors, strict=True):
        print(f"{shape.rows:3} x {shape.query_len:3} @ {shape.context_len:4}  {time_ns / 1e6:8.2f} ms  model {error:+.1%}")
    summary = {
        "benchmark": "step_costs",
        "model": model.name,
        "threads": executor.num_threads,
        "variant": executor.variant,
        "cpu_time": arguments.cpu_time,
        "cost_ns": {part: round(cost, 1) for part, cost in asdict(fitted.cost).items()},
        "mean_error": round(fitted.mean_error, 3),
        "largest_error": round(max(map(abs, fitted.errors)), 3),
    }
    print(json.dumps(summary))
    executor.close()


if __name__ == "__main__":
    main()
