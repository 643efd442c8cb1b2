"""How long does a whole step of the cuda backend take, how near is that to what the GPU can do, and how long does the GPU idle?

Decodes of several batch sizes and contexts and chunks of prompts, straight through the executor: no scheduler, no HTTP.
Weights are random, of the shapes of SmolLM2-135M, Qwen2.5-1.5B and Llama-3.1-8B. Steps follow each other as fast as the host
can submit them, one in flight (depth 1) or two. `step_ms` is wall time per step, `device_ms` the GPU's own clock;
`gap` is the share of wall time in which no step was on the GPU. The bound of a step is the larger of two times: the
weights and the KV that it reads at the speed of a copy, and the operations of its products and its attention at the peak of a
bf16 product; both peaks are measured in between. Shares printed during the run use the best peaks so far, those in
the JSON object the best of the whole run. The bound ignores norms, sampling and writes. Attention is
computed as in a server: by FlashInfer where it is installed and a trial finds it faster (`--attention`).

    python benchmarks/gpu_step.py
    python benchmarks/gpu_step.py --shapes 8b --steps 64x1@1024 1x2048@0 --depths 2 --sampling greedy nucleus masks
    python benchmarks/gpu_step.py --shapes 8b --format F8_E4M3
    python benchmarks/gpu_step.py --self-test       # tiny, without a GPU in Triton's interpreter: shows that it runs

At the end it prints tables, and in the last line one JSON object. Without a usable GPU it says why and ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from gpu_peaks import DeviceClock, GpuPeaks, Measured, context, require_gpu, rounded, use_interpreter
from gpu_shapes import SHAPES, Shape, random_model
from gpu_tables import Result, above_the_bound, bound_by, figure, show
from gpu_work import ModelWork
from printed import percent, table
from step_shape import StepShape, parse_step

from penstock.models import architectures
from penstock.models.formats import WeightFormat
from penstock.types.plan import AdmitRow, RowPlan, StepPlan, Ticket
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.backends.cuda.executor import CudaExecutor

BLOCK_SIZE = 16
STEPS = (
    *(f"{rows}x1@{context_len}" for rows in (1, 8, 32, 64, 128, 256) for context_len in (128, 1024, 4096)),
    "1x512@0",
    "1x2048@0",
    "4x2048@0",
    "1x2048@6144",
)
NUM_WARM_UP = 4
"""Steps: kernels are compiled in the first, and a graph is captured after it."""
FREE_SHARE = 0.9
"""Share for KV of the memory that is left after the weights."""
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=1 << 20),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=1 << 20),
    "penalties": SamplingParams(temperature=0.7, top_k=50, repetition_penalty=1.1, seed=1, max_tokens=1 << 20),
    "masks": SamplingParams(temperature=0.0, max_tokens=1 << 20, follows_grammar=True),
}


def blocks_per_row(step: StepShape, num_steps: int) -> int:
    """Until the last step."""
    return -(-(step.context_len + step.query_len + num_steps * step.is_decode + 1) // BLOCK_SIZE)


class Runner:
    """Steps of one executor."""

    def __init__(self, executor: CudaExecutor, sampling: SamplingParams) -> None:
        self._executor = executor
        self._sampling = sampling
        self._mask = b"\xff" * executor.mask_bytes
        self._step_ids = count()
        self._names: list[str] = []
        self._runs = count()

    def run(self, step: StepShape, num_steps: int) -> tuple[float, list[StepResult]]:
        """Seconds by the wall and results of so many steps, after the warm-up."""
        plans = self._decodes(step, NUM_WARM_UP + num_steps) if step.is_decode else self._chunks(step, NUM_WARM_UP + num_steps)
        self._through(plans[:NUM_WARM_UP])
        begin = time.perf_counter()
        results = self._through(plans[NUM_WARM_UP:])
        elapsed = time.perf_counter() - begin
        self._through([self._plan(releases=self._names)])
        return elapsed, results

    def _through(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """With as many in flight as the executor takes."""
        flights: deque[tuple[StepPlan, Ticket]] = deque()
        results = []
        for plan in plans:
            flights.append((plan, self._executor.submit(plan)))
            if len(flights) == 1:
                self._restrict(*flights[0])
            if len(flights) == self._executor.depth:
                results.append(self._executor.collect(flights.popleft()[1]))
                if flights:
                    self._restrict(*flights[0])
        return results + [self._executor.collect(ticket) for _, ticket in flights]

    def _restrict(self, plan: StepPlan, ticket: Ticket) -> None:
        """Send all-allowing masks to rows that wait for them, once earlier steps were collected, as the engine does."""
        if self._sampling.follows_grammar and plan.rows:
            self._executor.restrict(ticket, dict.fromkeys((row.request_id for row in plan.rows), self._mask))

    def _plan(self, admits: Sequence[AdmitRow] = (), rows: Sequence[RowPlan] = (), releases: Sequence[str] = ()) -> StepPlan:
        return StepPlan(next(self._step_ids), 0, tuple(admits), tuple(rows), tuple(releases))

    def _admits(self, step: StepShape, num_steps: int) -> list[AdmitRow]:
        """Rows whose context counts as computed: it is what the blocks contain."""
        run, per_row = next(self._runs), blocks_per_row(step, num_steps)
        tokens = tuple(10 + position * 31 % 200 for position in range(step.context_len + step.query_len))
        self._names = [f"r{run}-{row}" for row in range(step.rows)]
        return [
            AdmitRow(
                name,
                tokens,
                len(tokens),
                tuple(range(1 + i * per_row, 1 + (i + 1) * per_row)),
                step.context_len,
                self._sampling,
            )
            for i, name in enumerate(self._names)
        ]

    def _decodes(self, step: StepShape, num_steps: int) -> list[StepPlan]:
        """The same rows, one token longer each step."""
        admits = self._admits(step, num_steps)
        return [
            self._plan(admits if not i else (), [RowPlan(name, step.context_len + i, 1, (), True) for name in self._names])
            for i in range(num_steps)
        ]

    def _chunks(self, step: StepShape, num_steps: int) -> list[StepPlan]:
        """New rows in every step."""
        plans = []
        for _ in range(num_steps):
            released = self._names if plans else []
            admits = self._admits(step, num_steps)
            rows = [RowPlan(name, step.context_len, step.query_len, (), True) for name in self._names]
            plans.append(self._plan(admits, rows, released))
        return plans


def measure(runner: Runner, step: StepShape, num_steps: int, model: ModelWork) -> tuple[Measured, dict[str, Any]]:
    """The step on the device, and what else is told of it."""
    wall_s, results = runner.run(step, num_steps)
    timings = [result.timing for result in results]
    device_s = [(timing.end_ns - timing.start_ns) / 1e9 for timing in timings]
    parts = {part: statistics.median(timing.parts[part] for timing in timings) for part in timings[0].parts}
    return Measured(model.of_step(step), device_s), {
        "step_ms": rounded(wall_s / num_steps * 1e3),
        **{f"{part}_ms": rounded(part_ns / 1e6) for part, part_ns in parts.items()},
        "gap": rounded(max(0.0, 1 - sum(device_s) / wall_s)),
        "tokens_per_s": rounded(step.num_tokens * num_steps / wall_s),
    }


def figures(measured: Measured, peaks: GpuPeaks) -> dict[str, Any]:
    """In milliseconds, with the middle half of the times: steps are slow at once where the host is."""
    of_device = peaks.figures(measured)
    times_ms = [rounded(seconds * 1e3) for seconds in sorted(measured.seconds)]
    return {
        "device_ms": rounded(of_device.pop("us") / 1e3),
        "device_ms_range": [rounded(edge / 1e3) for edge in of_device.pop("us_range")],
        "device_ms_quartiles": [times_ms[len(times_ms) // 4], times_ms[-1 - len(times_ms) // 4]],
        "bound_ms": rounded(peaks.bound_s(measured.work) * 1e3),
        **of_device,
    }


def make_executor(
    shape: Shape, fmt: WeightFormat, steps: Sequence[StepShape], depth: int, options: argparse.Namespace
) -> tuple[CudaExecutor, list[StepShape]]:
    """Return an executor with blocks for the steps that memory allows, and these steps."""
    from penstock.backends.cuda.executor import CudaExecutor

    model = random_model(shape, fmt)
    num_steps = NUM_WARM_UP + options.num_steps
    kv_block_bytes = ModelWork(shape, fmt).kv_bytes_per_token * BLOCK_SIZE * (1 if options.device == "cuda" else 2)
    weight_bytes = sum(tensor.num_bytes for tensor in model.weights.values())
    limit = _free_blocks(weight_bytes, kv_block_bytes) if options.device == "cuda" else 1 << 20
    fitting = [step for step in steps if step.rows * blocks_per_row(step, num_steps) < limit]
    executor = CudaExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=1 + max(step.rows * blocks_per_row(step, num_steps) for step in fitting),
        block_size=BLOCK_SIZE,
        max_rows=max(step.rows for step in fitting),
        max_step_tokens=max(step.num_tokens for step in fitting),
        max_model_len=max(step.context_len + step.query_len + num_steps for step in fitting) + 1,
        device=options.device,
        deterministic=options.deterministic,
        attention=options.attention,
        use_graphs=not options.no_graphs,
        depth=depth,
    )
    return executor, fitting


def _free_blocks(weight_bytes: int, block_bytes: int) -> int:
    import torch

    return int((torch.cuda.mem_get_info()[0] - 1.2 * weight_bytes) * FREE_SHARE / block_bytes)


def told(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']:5} {row['format']:7} {row['depth']:5} {row['sampling']:10} {row['step']:12}"
        f" {row['step_ms']:9.3f} {row['device_ms']:9.3f} {row['gap']:6.1%} {row['bandwidth_share']:8.1%}"
        f" {row['matrix_share']:8.1%} {row['share']:8.1%}"
    )


def measure_all(options: argparse.Namespace, peaks: GpuPeaks) -> list[dict[str, Any]]:
    print("shape format  depth sampling   step           step ms device ms    gap bandwidth   matrix of bound")
    found: list[tuple[dict[str, Any], Measured]] = []
    fmt = WeightFormat[options.format]
    peaks.sample()  # takes its memory before it is asked how much is left for KV
    for name in options.shapes:
        model = ModelWork(SHAPES[name], fmt)
        for depth in options.depths:
            executor, steps = make_executor(SHAPES[name], fmt, options.steps, depth, options)
            for left_out in set(map(str, options.steps)) - set(map(str, steps)):
                print(f"{name}: no memory for the KV of {left_out}", file=sys.stderr)
            attention = executor.choose_attention()
            for sampling in options.sampling:
                runner = Runner(executor, SAMPLING[sampling])
                for step in steps:
                    peaks.sample()
                    measured, others = measure(runner, step, options.num_steps, model)
                    about = {"shape": name, "format": options.format, "depth": depth, "sampling": sampling, "step": str(step)}
                    about |= {"rows": step.rows, "query_len": step.query_len, "context_len": step.context_len}
                    about |= {"attention": attention["decode" if step.is_decode else "prefill"], **others}
                    print(told(about | figures(measured, peaks)), flush=True)
                    found.append((about, measured))
            executor.close()
            del executor
            gc.collect()
    return [about | figures(measured, peaks) for about, measured in found]


def tables(result: Result) -> dict[str, list[str]]:
    """Return the paragraphs of each shape, by title."""
    found = {}
    for shape in dict.fromkeys(step["shape"] for step in result["steps"]):
        steps = [step for step in result["steps"] if step["shape"] == shape]
        shares = ((f"{step['step']} with {step['depth']} in flight", step["share"]) for step in steps)
        names = dict.fromkeys((("prompts", "decodes")[step["query_len"] == 1], step["attention"]) for step in steps)
        told = f"Attention of {', '.join(f'{kind}: {name}' for kind, name in names)}."
        found[_title(result, steps)] = [told, *above_the_bound(shares), _table(steps)]
    return found


def _title(result: Result, steps: Sequence[Result]) -> str:
    """Return the steps' shape, format and unusual settings."""
    samplings = list(dict.fromkeys(step["sampling"] for step in steps))
    words = [steps[0]["shape"], steps[0]["format"], *(["deterministic"] if result["deterministic"] else [])]
    words += [] if result["graphs"] else ["no graphs"]
    return ", ".join([*words, *([] if "greedy" in samplings else samplings)])


def _table(steps: Sequence[Result]) -> str:
    """A line for each step; times on the device are those with the most steps in flight."""
    depths = sorted({step["depth"] for step in steps})
    by_step: dict[tuple[str, str], dict[int, Result]] = {}
    for step in steps:
        by_step.setdefault((step["step"], step["sampling"]), {})[step["depth"]] = step
    rows = []
    for (_, sampling), by_depth in by_step.items():
        step = by_depth[max(by_depth)]
        cells = [f"{figure(by_depth[d]['step_ms'])}, {percent(by_depth[d]['gap'])}" if d in by_depth else "" for d in depths]
        rows.append(
            [
                step["step"] if sampling == "greedy" else f"{step['step']}, {sampling}",
                figure(step["device_ms"]),
                figure(step["bound_ms"]),
                bound_by(step),
                f"**{percent(step['share'])}**",
                *cells,
                figure(step["tokens_per_s"]),
                figure(step["host_ms"]),
            ]
        )
    head = ["rows x tokens @ context", "ms on the GPU", "bound ms", "bound by", "share of the bound"]
    head += [f"ms a step, gap; {depth} in flight" for depth in depths]
    return table([*head, f"tokens/s, {depths[-1]} in flight", "ms of the host"], rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1.5b", "8b"])
    parser.add_argument("--format", choices=["BF16", "F8_E4M3", "Q8_0", "Q4_0"], default="BF16")
    parser.add_argument("--steps", nargs="+", type=parse_step, default=[parse_step(text) for text in STEPS])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=["greedy"])
    parser.add_argument("--num-steps", type=int, default=30, help="measured of each shape (default 30)")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--attention", choices=["auto", "triton", "flashinfer"], default="auto", help="as the server's")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--self-test", action="store_true", help="tiny, without a GPU in the interpreter")
    options = parser.parse_args()
    options.device = "cuda"
    if options.self_test:
        options.shapes, options.num_steps = ["tiny"], 1
        options.steps = [parse_step(text) for text in ("2x1@3", "1x4@0")]
    return options


def main() -> None:
    options = parse_options()
    if options.self_test:
        options.device = use_interpreter()
    else:
        require_gpu()
    peaks = GpuPeaks(DeviceClock(options.device))
    rows = measure_all(options, peaks)
    about = context(options.device, is_self_test=options.self_test)
    about |= {"deterministic": options.deterministic, "graphs": not options.no_graphs, "num_steps": options.num_steps}
    result = {"benchmark": "gpu_step", **about, "peaks": peaks.summary(), "steps": rows}
    show(result, tables)


if __name__ == "__main__":
    main()
