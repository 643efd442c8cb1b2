"""Which type of KV cache is faster, at which shapes of step? All types in turn, straight through the executor.

    python benchmarks/kv_dtypes.py                  # on a machine with nothing else to do
    python benchmarks/kv_dtypes.py --cpu-time       # one thread's time on a processor
    python benchmarks/kv_dtypes.py --dtypes int8 int4 --model qwen2.5-coder:1.5b --steps 1x1@512 1x1@32768

Executors in one process, each with its own weights and KV, take steps in turn; a figure is the median of its steps. `ratios`
are quartiles, over neighbouring rounds, of the times over those with the next larger type. Also printed: how many tokens
a GiB holds. For the cost of the rounding in accuracy see `kv_rounding.py`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from kernel_engines import wait_for_huge_pages
from step import open_executor, plan_shape
from step_shape import StepShape, parse_step

from penstock.backends.native import footprint
from penstock.lab.steps import StepRunner
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.types import plan
from penstock.types.kv_dtype import KvDtype

STEPS = ("1x512@0", "1x512@1024", *(f"{rows}x1@{context}" for rows in (1, 8, 32) for context in (128, 512, 1024, 2048)))
ROUND_MS = 30.0
"""Time of a round of steps of one type, before one of the other: the machine does not change much in that time."""


def compare(runners: dict[KvDtype, StepRunner], shape: StepShape, repeat: int, *, cpu_time: bool) -> dict[str, Any]:
    """Medians of all types over `repeat` rounds of each, and of the ratios of their rounds."""
    step = plan_shape(shape)
    for runner in runners.values():
        runner.run(step)  # touches the memory
    per_round = max(1, round(ROUND_MS / ms_of(next(iter(runners.values())), step, cpu_time=cpu_time)))
    rounds: dict[KvDtype, list[float]] = {dtype: [] for dtype in runners}
    for idx in range(repeat):
        for dtype in list(runners)[:: 1 if idx % 2 else -1]:
            steps = [ms_of(runners[dtype], step, cpu_time=cpu_time) for _ in range(per_round)]
            rounds[dtype].append(statistics.median(steps))
    ratios = {}
    for larger, smaller in itertools.pairwise(runners):
        found = [a / b for a, b in zip(rounds[smaller], rounds[larger], strict=True)]
        ratios[f"{smaller.value}/{larger.value}"] = [round(quartile, 3) for quartile in statistics.quantiles(found, n=4)]
    return {
        "step": f"{shape.rows}x{shape.query_len}@{shape.context_len}",
        **{dtype.value: round(statistics.median(found), 3) for dtype, found in rounds.items()},
        "ratios": ratios,
    }


def ms_of(runner: StepRunner, step: plan.StepShape, *, cpu_time: bool) -> float:
    """By the executor's clock, or the time that this thread had of a processor, which has some 0.1 ms of Python in it."""
    begin_ns = time.thread_time_ns()
    duration_ns, _ = runner.run(step)
    return (time.thread_time_ns() - begin_ns if cpu_time else duration_ns) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", nargs="+", type=parse_step, default=[parse_step(step) for step in STEPS])
    parser.add_argument(
        "--dtypes", nargs="+", type=KvDtype, default=[KvDtype.BF16, KvDtype.INT8, KvDtype.INT4], help="largest first"
    )
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--variant", default="")
    parser.add_argument("--cpu-time", action="store_true", help="one thread's time on a processor")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    model = load_model(resolve(args.model, default_cache_dir()))
    executors = {dtype: open_executor(model, args.steps, args.threads, args.variant, dtype) for dtype in args.dtypes}
    runners = {dtype: StepRunner(executor, model.spec.vocab_size) for dtype, executor in executors.items()}
    for dtype, executor in executors.items():
        wait_for_huge_pages(executor)
        runners[dtype].fill()
    results = []
    for shape in args.steps:
        results.append(compare(runners, shape, args.repeat, cpu_time=args.cpu_time))
        print(results[-1], flush=True)
    first = next(iter(executors.values()))
    summary = {
        "benchmark": "kv_dtypes",
        "model": model.name,
        "variant": first.variant,
        "threads": first.num_threads,
        "cpu_time": args.cpu_time,
        "tokens_per_gib": {dtype.value: (1 << 30) // footprint.kv_bytes_per_token(model.spec, dtype) for dtype in args.dtypes},
        "steps": results,
    }
    print(json.dumps(summary))
    for executor in executors.values():
        executor.close()


if __name__ == "__main__":
    main()
