"""How near does the attention of the native backend come to what the machine can do, by rows and context?

One attention layer of several models, over 8-bit keys and values that exceed the caches. The bound is the larger of two
times: the operations (scores and weighted sums of the positions that each query sees, both int8 products) at the int8 peak,
and reading every row's keys and values once at memory speed; both peaks are measured in between. Figures are for the
fastest run and the best peaks. `kernels.py` has the products.

    python benchmarks/attention.py
    python benchmarks/attention.py --variant avx2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kernel_engines import BLOCK_SIZE, AttentionCase, AttentionEngine, AttentionShape
from peaks import PeakMeter, Work, fastest_s, usable_threads
from printed import origin, percent, table

from penstock.backends.native._native import usable_variants
from penstock.models.program import KvShape
from penstock.types.kv_dtype import KvDtype

LAYERS = 8
"""Each with KV of its own."""
MAX_TOKENS = 512
MODELS = {
    "smollm2": AttentionShape(9, 3, 64),
    "qwen2.5": AttentionShape(12, 2, 128),
    "deepseek-v2-lite": AttentionShape(16, 1, 576, 512),
    "deepseek-v3": AttentionShape(128, 1, 576, 512),
}
CASES = (
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


def attention_work(shape: AttentionShape, case: AttentionCase) -> Work:
    visible = case.query_len * case.context_len + case.query_len * (case.query_len + 1) // 2
    kv = KvShape(shape.num_kv_heads, shape.head_dim, shape.num_latent)
    kv_bytes = case.rows * (case.context_len + case.query_len) * kv.num_bytes(KvDtype.INT8)
    columns = shape.head_dim + (shape.num_latent or shape.head_dim)
    return Work(2.0 * case.rows * visible * shape.num_heads * columns, kv_bytes)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=usable_variants(), default=usable_variants()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="for each model; at least three runs")
    parser.add_argument("--cpu-time", action="store_true", help="one thread's time on a processor")
    args = parser.parse_args(words)
    threads = 1 if args.cpu_time else usable_threads()
    room = max(case.rows * (case.context_len + case.query_len + 2 * BLOCK_SIZE) for case in CASES) + MAX_TOKENS
    for model, shape in MODELS.items():
        engine = AttentionEngine(
            shape,
            num_layers=LAYERS,
            num_positions=room,
            max_tokens=MAX_TOKENS,
            num_threads=threads,
            variant=args.variant,
            cpu_time=args.cpu_time,
        )
        meter = PeakMeter(threads, args.variant, cpu_time=args.cpu_time)
        rows = []
        for case, seconds in fastest_s(engine.run, CASES, meter, "int8", args.seconds).items():
            work = attention_work(shape, case)
            name = f"{case.rows}x{case.query_len}@{case.context_len}"
            speeds = [f"{work.operations / seconds / 1e9:.0f}", f"{work.num_bytes / seconds / 1e9:.1f}"]
            rows.append([name, f"{seconds * 1e6:.0f}", *speeds, percent(work.share(seconds, meter, "int8"))])
        print(origin(model, args.variant, f"{threads} threads"))
        print(table(["step", "us a layer", "GOP/s", "GB/s", "share of the bound"], rows) + "\n", flush=True)


if __name__ == "__main__":
    main()
