"""How close is linear attention to what the machine can do: one token of a row, and prompts?

The least work of a layer is to read and write its state once, or four multiply-adds in float32 for each number of the state
and token. A token of one row reads its state from memory: the layers' states exceed the last-level cache. Prompts are
one row.

    python benchmarks/linear_attention.py
    python benchmarks/linear_attention.py --models qwen3.5-0.8b --variant avx2 --threads 1

Shares of the bound, of the fastest of several runs; one thread is timed by CPU time. The last line printed
is one JSON object.
"""

from __future__ import annotations

import argparse
import json

from kernel_engines import LinearAttentionEngine, LinearAttentionShape
from peaks import PeakMeter, Work, context, fastest_s, usable_threads

from penstock.backends.native import probed_bytes
from penstock.backends.native._native import usable_variants

MODELS = {
    "qwen3.5-0.8b": LinearAttentionShape(16, 16, 128, 128, ((2, 256),) * 6),
    "qwen3-next": LinearAttentionShape(32, 16, 128, 128, ((2, 256),) * 12),
}
PROMPT_LAYERS = 4
MOST_TOKENS = 512


def work(shape: LinearAttentionShape, case: tuple[int, int]) -> Work:
    rows, num_tokens = case
    return Work(8 * shape.state_floats * rows * num_tokens, 8 * shape.state_floats * rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, MOST_TOKENS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--variant", choices=usable_variants(), default=usable_variants()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    cpu_time = args.threads == 1
    meter = PeakMeter(args.threads, args.variant, cpu_time=cpu_time)
    options = {"num_threads": args.threads, "variant": args.variant, "cpu_time": cpu_time}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.models:
        shape = MODELS[name]
        results[name] = {}
        for cases in (*([(rows, 1)] for rows in args.rows), [(1, num_tokens) for num_tokens in args.prompts]):
            rows, max_tokens = cases[0][0], max(rows * num_tokens for rows, num_tokens in cases)
            is_decode = max_tokens == rows
            num_layers = -(-probed_bytes() // (4 * shape.state_floats * rows)) if is_decode else PROMPT_LAYERS
            engine = LinearAttentionEngine(shape, num_layers=num_layers, max_rows=rows, max_tokens=max_tokens, **options)
            for case, seconds in fastest_s(engine.run, cases, meter, "float32", args.seconds).items():
                share = work(shape, case).share(seconds, meter, "float32")
                key = f"{case[0]} x {case[1]}"
                results[name][key] = {"us": round(1e6 * seconds, 1), "share": round(share, 3)}
                print(f"{name} {key:8}", results[name][key], flush=True)
    peaks = {kind: meter.best(kind) for kind in ("float32", "read")}
    print(
        json.dumps(
            {
                "benchmark": "linear_attention",
                **context(args.threads, args.variant, cpu_time=cpu_time),
                "peaks": peaks,
                "runs": results,
            }
        )
    )


if __name__ == "__main__":
    main()
