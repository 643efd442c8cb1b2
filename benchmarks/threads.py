"""How much does the barrier after a stage cost, and how is a step divided among threads?

    python benchmarks/threads.py --threads 1 2
    python benchmarks/threads.py --plans --threads 4 8 16 32 64

Stages that compute nothing, with one task for all threads, one for each, and six for each: microseconds that a stage takes.
With more threads than cores the system's scheduler is measured, not the barrier.

With --plans nothing is timed: prints how many threads take part in a step of the model, its strands, and the tasks
of a layer's stages. Plans depend on the number of threads and not of cores, so any machine can print all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from kernel_engines import StagesEngine
from printed import origin, table
from step import open_executor, plan_shape
from step_shape import parse_step

from penstock import machine
from penstock.backends.native.executor import NativeExecutor
from penstock.lab.steps import StepRunner
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.types.kv_dtype import KvDtype

STEPS = ("1x1@256", "8x1@256", "32x1@256", "1x512@0")
NUM_STAGES = 3000
"""Ten times those of a step of SmolLM2, so that a run is long enough for all threads to come."""


def plan_words(executor: NativeExecutor) -> str:
    """Return the last step's division: threads that took part, strands, and a middle layer's product tasks."""
    own = [stage for stage in executor.stages if stage.strand == 0]
    attentions = [i for i, stage in enumerate(own) if stage.instruction == "attention"]
    first = attentions[len(attentions) // 2]
    after = next((i for i in attentions if i > first), len(own))
    tasks = [str(stage.num_tasks) for stage in own[first:after] if stage.instruction in ("linear", "gated")]
    return f"{executor.num_members} / {executor.num_strands}: {' '.join(tasks)}"


def print_plans(model_name: str, steps: Sequence[str], threads: Sequence[int]) -> None:
    model = load_model(resolve(model_name, default_cache_dir()))
    shapes = [parse_step(step) for step in steps]
    rows = []
    for num_threads in threads:
        executor = open_executor(model, shapes, num_threads, "", KvDtype.INT8)
        runner = StepRunner(executor, model.spec.vocab_size)
        words = []
        for shape in shapes:
            runner.run(plan_shape(shape))
            words.append(plan_words(executor))
        rows.append([num_threads, *words])
        executor.close()
    print(origin(model.name, "threads that take part / strands: tasks of a layer's products, from the attention on"))
    print(table(["threads", *steps], rows))


def print_costs(threads: Sequence[int], seconds: float) -> None:
    rows = []
    for num_threads in threads:
        engine = StagesEngine(NUM_STAGES, num_threads)
        cells = []
        for num_rows in (1, 4 * num_threads, 24 * num_threads):  # a task is four rows where there are enough
            times = []
            end = time.monotonic() + seconds
            while time.monotonic() < end or not times:
                times.append(1e6 * engine.run(num_rows))
            cells.append(f"{statistics.median(times):.2f} ({min(times):.2f}; {engine.num_tasks})")
        rows.append([num_threads, *cells])
    print(origin(f"{machine.usable_cpus()} CPUs", "microseconds of a stage, median (least; tasks)"))
    print(table(["threads", "one task", "one for each thread", "six for each"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--plans", action="store_true", help="print how steps are divided, and time nothing")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", nargs="+", default=STEPS)
    args = parser.parse_args()
    if args.plans:
        print_plans(args.model, args.steps, args.threads)
    else:
        print_costs(args.threads, args.seconds)


if __name__ == "__main__":
    main()
