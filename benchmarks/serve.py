"""How many tokens per second does a server stream to many clients? A named workload against a URL.

A closed loop over the prompts of a workload (`workloads.py`) in order, greedy, with `ignore_eos` and replies of the
real length, at each `--concurrency`; medians of `--repeat` runs, and the range of the throughput. The client (`load.py`)
also tells what it used of the CPU itself. Works against any server that speaks OpenAI's completions and vLLM's `ignore_eos`.

    penstock serve --no-prefix-caching &
    python benchmarks/serve.py --url http://127.0.0.1:8000

Needs the model's GGUF file for its tokenizer (`penstock pull`), and the traces. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from load import Job, Run, replay, summarise
from workloads import (
    DEFAULT_TRACES,
    MAX_PROMPT_TOKENS,
    MAX_REPLY_TOKENS,
    WORKLOADS,
    Source,
    describe,
    read_jobs,
    read_tokenizer,
)

from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve

WARM_UP_TOKENS = 8


def served_model(url: str) -> str:
    """The first model that the server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


def warm_up(url: str, model: str, jobs: Sequence[Job], concurrency: int) -> None:
    """The beginning of the first replies, so that no run pays for what a server does only once."""
    replay(url, model, [replace(job, max_tokens=WARM_UP_TOKENS) for job in jobs[:concurrency]], concurrency)


def median_figures(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure, and the range of the throughput."""
    figures = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    rates = [run["output_tokens_per_s"] for run in runs]
    return figures | {"output_tokens_per_s_min": round(min(rates), 3), "output_tokens_per_s_max": round(max(rates), 3)}


def show(label: str, run: Run) -> dict[str, float]:
    figures = summarise(run)
    short = ("output_tokens_per_s", "seconds", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "client_cpu_s")
    print(f"{label}: " + ", ".join(f"{name} {figures[name]:.4g}" for name in short), flush=True)
    return figures


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="as the server calls it (default: the first that it lists)")
    parser.add_argument("--workload", choices=WORKLOADS, default="sharegpt")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: %(default)s)")
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="GGUF file whose tokenizer counts (default: %(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=MAX_PROMPT_TOKENS, help="of sharegpt (default: %(default)s)")
    parser.add_argument("--max-reply-tokens", type=int, default=MAX_REPLY_TOKENS, help="of sharegpt (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--requests", type=int, nargs="+", default=[96, 32, 8], help="for each concurrency")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if len(args.concurrency) != len(args.requests):
        parser.error("--requests takes as many numbers as --concurrency")
    return args


def main() -> None:
    args = read_arguments()
    tokenizer = read_tokenizer(resolve(args.tokenizer, default_cache_dir()).path)
    source = Source(args.traces, tokenizer, args.max_prompt_tokens, args.max_reply_tokens)
    jobs = read_jobs(args.workload, source, max(args.requests))
    print(f"{args.workload}: {describe(jobs)}")
    model = args.model or served_model(args.url)
    warm_up(args.url, model, jobs, max(args.concurrency))
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeat):
        for concurrency, count in zip(args.concurrency, args.requests, strict=True):
            run = replay(args.url, model, jobs[:count], concurrency)
            results.setdefault(str(concurrency), []).append(show(f"concurrency {concurrency}", run))
    medians = {concurrency: median_figures(runs) for concurrency, runs in results.items()}
    report = {"benchmark": "serve", "model": model, "workload": args.workload, "repeat": args.repeat}
    print(json.dumps(report | {"median_by_concurrency": medians}))


if __name__ == "__main__":
    main()
