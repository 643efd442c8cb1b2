"""How long do a step and its parts take with an instruction set, and how near is that to what the machine can do?

Decodes of several batch sizes and chunks of prompts, straight through the executor: no scheduler, no HTTP. Steps are measured,
and their bound is counted, as by `penstock profile` (docs/profile.md), which takes the best instruction set of the machine.
Here it can be chosen, as well as the steps, and the peaks are probed after each round of steps, so that both saw the same
machine. A share is of the medians: of the bound at the median peaks over the median time. The last line is a JSON object.

    python benchmarks/step.py
    python benchmarks/step.py --variant avx2
    python benchmarks/step.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --steps 1x1@128 16x1@256

A step is ROWSxTOKENS@CONTEXT: so many rows, tokens of each, positions before them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kernel_engines import wait_for_huge_pages
from peaks import PeakMeter, context
from printed import origin, percent, table
from step_shape import StepShape, parse_step

from penstock.backends.native import footprint
from penstock.backends.native.executor import NativeExecutor
from penstock.config import Config
from penstock.deploy.forecast import read_outline
from penstock.deploy.resolve import decide
from penstock.lab.step_table import Peaks, figures_of
from penstock.lab.steps import REFERENCE, StepRunner, measure
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.types import plan
from penstock.types.kv_dtype import KvDtype

BLOCK_SIZE = 16
STEPS = ("1x1@128", "8x1@200", "32x1@256", "4x128@0", "1x512@0", "1x512@1024")
PARTS = ("linear", "attention", "rows")


def open_executor(
    model: LoadedModel,
    shapes: Sequence[StepShape],
    threads: int,
    variant: str,
    kv_dtype: KvDtype,
    expert_file: int | None = None,
) -> NativeExecutor:
    """An executor with room for each of the steps, and for the reference step that is measured beside them."""
    reference = [StepShape(1, query_len, context_len) for query_len, context_len in REFERENCE.rows]
    shapes = [*shapes, *reference]
    num_blocks = [-(-(shape.context_len + shape.query_len + 1) // BLOCK_SIZE) for shape in shapes]  # of a row
    program = architectures.describe(model.spec)
    block_bytes = footprint.block_bytes(model.spec, kv_dtype, BLOCK_SIZE)
    num_state_blocks = footprint.num_state_blocks(program.paged_state, block_bytes)
    return NativeExecutor(
        model,
        program,
        num_blocks=2 + max(shape.rows * (num + num_state_blocks) for shape, num in zip(shapes, num_blocks, strict=True)),
        block_size=BLOCK_SIZE,
        max_rows=max(shape.rows for shape in shapes),
        max_step_tokens=max(shape.num_tokens for shape in shapes),
        max_model_len=(1 + max(num_blocks)) * BLOCK_SIZE,
        kv_dtype=kv_dtype,
        num_threads=threads,
        variant=variant,
        expert_file=expert_file,
    )


def plan_shape(step: StepShape) -> plan.StepShape:
    """The step as the lab's runner takes it: every row samples."""
    return plan.StepShape(((step.query_len, step.context_len),) * step.rows, step.rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", nargs="+", type=parse_step, default=[parse_step(step) for step in STEPS])
    parser.add_argument("--rounds", type=int, default=25, help="each step once in each")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--variant", default="", help="the best that there is, if none is named")
    parser.add_argument("--kv-cache-dtype", type=KvDtype, choices=list(KvDtype), default=KvDtype.INT8)
    args = parser.parse_args(words)
    source = resolve(args.model, default_cache_dir())
    model, outline = load_model(source), read_outline(Config(), source, decide(Config(), is_gpu=False))
    executor = open_executor(model, args.steps, args.threads, args.variant, args.kv_cache_dtype)
    wait_for_huge_pages(executor)
    runner = StepRunner(executor, model.spec.vocab_size)
    runner.fill()
    kind = "bf16_tiles" if executor.variant.startswith("amx") else "int8" if outline.is_quantised else "bf16"
    meter = PeakMeter(executor.num_threads, executor.variant)
    shapes = [plan_shape(step) for step in args.steps]
    steps, _ = measure(runner, shapes, num_rounds=args.rounds, progress=lambda *_: meter.sample([kind, "read"], repeat=1))
    size = outline.size(args.kv_cache_dtype)
    peaks = Peaks(ops_per_s=1e9 * meter.median(kind), read_bytes_per_s=1e9 * meter.median("read"), words=kind)
    rows, found = [], {}
    for shape, figures in zip(args.steps, figures_of(steps, size, peaks), strict=True):
        fastest_ns = min(step.execute_ns for step in steps if step.shape == figures.shape)
        parts = [f"{figures.parts_ns[part] / 1e6:.2f}" for part in PARTS]
        share = max(figures.compute_share or 0.0, figures.read_share or 0.0)
        ms = f"{figures.duration_ns / 1e6:.2f} ({fastest_ns / 1e6:.2f})"
        rows.append([shape, ms, *parts, figures.bound, f"**{percent(share)}**"])
        found[str(shape)] = {
            "ms": figures.duration_ns / 1e6,
            "compute_share": figures.compute_share,
            "read_share": figures.read_share,
        }
    about = [f"{model.name}, {executor.variant}, {executor.num_threads} threads, {args.kv_cache_dtype} keys and values"]
    about += [f"{kind} {meter.median(kind):.0f} GOP/s, reads {meter.median('read'):.0f} GB/s"]
    print(origin(*about))
    print(table(["step", "ms (fastest)", *(f"{part} ms" for part in PARTS), "bound by", "share of the bound"], rows))
    told = {
        "model": model.name,
        "peak": kind,
        "peak_gops": meter.median(kind),
        "read_gbs": meter.median("read"),
        "steps": found,
    }
    print(json.dumps({"benchmark": "step", **context(executor.num_threads, executor.variant), **told}))
    executor.close()


if __name__ == "__main__":
    main()
