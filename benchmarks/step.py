"""How long does one step of the native backend take, which part of it, and how near is it to what the machine can do?

Decodes of several batch sizes and prefill chunks with and without context, straight through the executor: no scheduler, no
HTTP. The bound of a step is the larger of two times: the operations of its products with weights at the peak of
multiply-adds, and the weights and the KV that it reads at the speed of memory. Attention, norms and sampling are part of
the step's time and count for nothing in the bound. `share` is the bound over the median time, the peaks being medians
too; `best_share` the same of the fastest run and the best peaks. Peaks are measured between the steps.

    python benchmarks/step.py
    python benchmarks/step.py --variant avx2
    python benchmarks/step.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --steps 1x1@128 16x1@256
    python benchmarks/step.py --steps 32x1@256 --same-blocks

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import count
from typing import Any

from kernel_engines import wait_for_huge_pages
from peaks import PeakMeter, context
from step_shape import StepShape, parse_step

from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel, WeightFormat
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams

BLOCK_SIZE = 16
ROUND_MS = 30.0
"""Time of steps between two looks at the machine's peaks; at least one step."""


STEPS = ("1x1@128", "8x1@200", "32x1@256", "4x128@0", "1x512@0", "1x512@1024")


def blocks_per_row(shape: StepShape) -> int:
    return -(-(shape.context_len + shape.query_len + 1) // BLOCK_SIZE)


class StepCost:
    """The least work of a step of a model."""

    def __init__(self, model: LoadedModel, weight_bytes: int, kv_dtype: KvDtype) -> None:
        self._kv_bytes_per_token = model.spec.kv_bytes_per_token(kv_dtype)
        matrices = {name: t for name, t in model.weights.items() if t.num_rows > 1}
        output = matrices.get("output", matrices["embed"])
        bf16 = (WeightFormat.BF16, WeightFormat.F32)
        self._per_token = {False: 0, True: 0}
        """Weights that multiply each token, by whether they are bf16 and not quantised."""
        self._per_sample = {False: 0, True: 0}
        self._per_sample[output.format in bf16] = output.num_rows * output.num_cols
        last = f"layers.{model.spec.num_layers - 1}."
        for name, tensor in matrices.items():
            if name.startswith("layers."):
                # What follows the last attention is wanted of samples alone.
                is_sampled = name.startswith(last) and name.removeprefix(last) not in {"q", "k", "v"}
                count = self._per_sample if is_sampled else self._per_token
                count[tensor.format in bf16] += tensor.num_rows * tensor.num_cols
        self.weight_bytes = weight_bytes
        """Packed; an embedding that is not the output matrix, too, is none of them."""

    def operations(self, shape: StepShape, *, are_bf16: bool) -> int:
        """A multiply-add is two; of the products with weights alone."""
        return 2 * (shape.num_tokens * self._per_token[are_bf16] + shape.rows * self._per_sample[are_bf16])

    def num_bytes(self, shape: StepShape) -> int:
        return self.weight_bytes + shape.rows * (shape.context_len + shape.query_len) * self._kv_bytes_per_token

    def shares(self, shape: StepShape, seconds: float, peaks: dict[str, float]) -> dict[str, float]:
        """Shares of the multiply-adds' peak, of the memory's, and of the larger one, which is the bound."""
        compute_s = sum(self.operations(shape, are_bf16=b) / peaks["bf16" if b else "int8"] for b in (False, True)) / 1e9
        read_s = self.num_bytes(shape) / peaks["read"] / 1e9
        return {
            "share": round(max(compute_s, read_s) / seconds, 3),
            "compute_share": round(compute_s / seconds, 3),
            "read_share": round(read_s / seconds, 3),
        }


class StepRunner:
    """Runs steps of fresh rows whose context is what `fill` left in their blocks."""

    def __init__(self, executor: NativeExecutor, vocab_size: int, *, cpu_time: bool = False, same_blocks: bool = False) -> None:
        self._executor = executor
        self._cpu_time = cpu_time
        self._same_blocks = same_blocks
        self._vocab_size = vocab_size
        self._ids = count()

    def fill(self) -> None:
        """Give every block keys and values: memory never written is one page of zeros, which is read from the cache."""
        capacity = self._executor.capacity
        room = min(capacity.num_blocks - 1, capacity.max_model_len // BLOCK_SIZE) - 1  # a row has a block for its next token
        filled = max(1, min(room, capacity.max_step_tokens // BLOCK_SIZE))
        for begin in range(0, filled * BLOCK_SIZE, capacity.max_step_tokens):
            self.run(StepShape(1, min(capacity.max_step_tokens, filled * BLOCK_SIZE - begin), begin))
        pairs = [(1 + block % filled, 1 + block) for block in range(filled, capacity.num_blocks - 1)]
        self._executor.copy_blocks(pairs)

    def run(self, shape: StepShape) -> dict[str, float]:
        """Milliseconds of the whole step (`ms`) and of its parts; of CPU time, the parts are not known."""
        step_id = next(self._ids)
        names = [f"{step_id}-{row}" for row in range(shape.rows)]
        plan = StepPlan(
            step_id,
            0,
            tuple(self._admit(shape, name, step_id, row) for row, name in enumerate(names)),
            tuple(RowPlan(name, shape.context_len, shape.query_len, (), True) for name in names),
            (),
        )
        ticket = self._executor.submit(plan)
        begin_ns = time.thread_time_ns()
        timing = self._executor.collect(ticket).timing
        cpu_ms = (time.thread_time_ns() - begin_ns) / 1e6
        self._executor.collect(self._executor.submit(StepPlan(next(self._ids), 0, (), (), tuple(names))))
        if self._cpu_time:
            return {"ms": cpu_ms}
        parts = {part: part_ns / 1e6 for part, part_ns in timing.parts.items()}
        return {"ms": (timing.end_ns - timing.start_ns) / 1e6, **parts}

    def _admit(self, shape: StepShape, name: str, step_id: int, row: int) -> AdmitRow:
        length = shape.context_len + shape.query_len
        tokens = tuple(1000 + (step_id * 31 + i * 7) % (self._vocab_size - 2000) for i in range(length))
        first = 1 if self._same_blocks else 1 + row * blocks_per_row(shape)
        blocks = tuple(range(first, first + blocks_per_row(shape)))
        return AdmitRow(name, tokens, length, blocks, shape.context_len, SamplingParams(temperature=0.0))


def measure(runner: StepRunner, cost: StepCost, shape: StepShape, meter: PeakMeter, repeat: int) -> dict[str, Any]:
    """Figures of at least `repeat` steps, in `repeat` rounds; the peaks are measured after each."""
    runner.run(shape)  # touches the memory
    per_round = max(1, round(ROUND_MS / runner.run(shape)["ms"]))
    runs: list[dict[str, float]] = []
    for _ in range(repeat):
        runs += [runner.run(shape) for _ in range(per_round)]
        meter.sample(["int8", "bf16", "read"], repeat=1)
    medians = {part: round(statistics.median(run[part] for run in runs), 3) for part in runs[0]}
    least_ms = min(run["ms"] for run in runs)
    gops = sum(cost.operations(shape, are_bf16=b) for b in (False, True)) / medians["ms"] / 1e6
    best = cost.shares(shape, least_ms / 1e3, meter.bests())
    return {
        "batch": shape.rows,
        "query_len": shape.query_len,
        "context_len": shape.context_len,
        **medians,
        "min_ms": round(least_ms, 3),
        **cost.shares(shape, medians["ms"] / 1e3, meter.medians()),
        "best_share": best["share"],
        "gops": round(gops),
        "gbs": round(cost.num_bytes(shape) / medians["ms"] / 1e6, 1),
    }


def open_executor(model: LoadedModel, shapes: list[StepShape], threads: int, variant: str, kv_dtype: KvDtype) -> NativeExecutor:
    return NativeExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=2 + max(shape.rows * blocks_per_row(shape) for shape in shapes),
        block_size=BLOCK_SIZE,
        max_rows=max(shape.rows for shape in shapes),
        max_step_tokens=max(shape.num_tokens for shape in shapes),
        max_model_len=(1 + max(blocks_per_row(shape) for shape in shapes)) * BLOCK_SIZE,
        kv_dtype=kv_dtype,
        num_threads=threads,
        variant=variant,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", nargs="+", type=parse_step, default=[parse_step(step) for step in STEPS])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--variant", default="")
    parser.add_argument("--kv-cache-dtype", type=KvDtype, choices=list(KvDtype), default=KvDtype.INT8)
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's time on a processor: if the machine has other work"
    )
    parser.add_argument(
        "--same-blocks",
        action="store_true",
        help="all rows have the first one's blocks: what a step takes if the processor's cache holds its keys and values",
    )
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    model = load_model(resolve(args.model, default_cache_dir()))
    executor = open_executor(model, args.steps, args.threads, args.variant, args.kv_cache_dtype)
    wait_for_huge_pages(executor)
    runner = StepRunner(executor, model.spec.vocab_size, cpu_time=args.cpu_time, same_blocks=args.same_blocks)
    runner.fill()
    cost = StepCost(model, executor.weight_bytes, args.kv_cache_dtype)
    meter = PeakMeter(executor.num_threads, executor.variant, cpu_time=args.cpu_time)
    results = []
    for shape in args.steps:
        results.append(measure(runner, cost, shape, meter, args.repeat))
        print(results[-1], flush=True)
    summary = {
        "benchmark": "step",
        **context(executor.num_threads, executor.variant, cpu_time=args.cpu_time),
        "model": model.name,
        "kv_cache_dtype": args.kv_cache_dtype,
        "same_blocks": args.same_blocks,
        "steps": results,
        "peaks": meter.summary(),
    }
    print(json.dumps(summary))
    executor.close()


if __name__ == "__main__":
    main()
