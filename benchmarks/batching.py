"""What does it cost to batch whole requests instead of steps? One workload through static, dynamic and continuous batching.

The real engine, in process: the same requests, with the lengths of ShareGPT's conversations, arrive all at once or (with
`--rate`) as a Poisson process, once per strategy and round; rounds go through the strategies in turn, and medians over
the rounds are reported. No strategy runs more than `--batch-size` requests at a time. Only the gate differs: each splits the
tokens of a step decode first, keeps no prefixes, and pads as its kind of system does (docs/batching.md).

    python benchmarks/batching.py
    python benchmarks/batching.py --rate 3 --rounds 1

`waste` is the share of computed positions that were padding, `batch` the mean number of requests with a row in a step, those
of padding aside; `cpu_s`, the CPU time of the process, tells more than `seconds` where others use the machine, too.

The gain that the lengths alone allow: cut into batches of N in their order, prompts p and replies r,

    prompts   sum over batches of N * max p        /  sum of p            so many times the positions before first tokens
    decodes   sum over batches of N * (max r - 1)  /  sum of (r - 1)      and after them, in a static batch

Continuous batching computes what was asked for. With rows busy to the last it is faster by a mean of the two, weighted by
the time that either takes without padding. The smaller of them is the least that is to be gained, whatever a position costs;
`expected` is the mean at the costs that are measured first (`prompt_ms` and `decode_ms` a position).

Needs the default model in the cache (`penstock pull`) and the traces. The last line printed is one JSON object; a table for
docs stands before it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from workloads import DEFAULT_TRACES, WORKLOADS, Source, describe, read_jobs

from penstock import machine
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import start_model
from penstock.lab.arrivals import NS_PER_S, poisson
from penstock.lab.workload import Job
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel
    from penstock.engine.ports import OutputChunk
    from penstock.obs.metrics import Metrics

KV_BYTES = 1 << 30
STRATEGIES = ("static", "dynamic", "continuous")
COLUMNS = {
    "tokens_per_s": "tokens/s",
    "p50_s": "latency p50 (s)",
    "p99_s": "p99",
    "ttft_p50_s": "TTFT p50 (s)",
    "ttft_p99_s": "p99",
    "waste": "padding waste",
    "batch": "mean batch",
}


class Counters:
    """The counts of the engine's metrics between two readings."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last = self._read()

    def _read(self) -> tuple[float, ...]:
        with self._metrics.lock:
            self._metrics.settle()
            sizes, num_rows = self._metrics.batch_size.snapshot()
            _, num_tokens = self._metrics.batch_tokens.snapshot()
            return num_tokens, self._metrics.num_padding_tokens, num_rows, sizes[-1][1]

    def take(self) -> dict[str, float]:
        now = self._read()
        tokens, padding, rows, steps = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return {"waste": padding / max(tokens, 1), "batch": rows / max(steps, 1), "steps": steps}


class Replay:
    """Requests of one engine."""

    def __init__(self, runtime: RunningModel, jobs: Sequence[Job]) -> None:
        self._runtime = runtime
        encode = runtime.tokenizer.encode
        self._jobs = [(tuple(encode(job.prompt, add_special_tokens=True)), job.num_output_tokens) for job in jobs]
        self._ids = count()
        self._counters = Counters(runtime.metrics)

    def run(self, arrivals_s: Sequence[float]) -> dict[str, float]:
        """Figures of one replay; seconds."""
        self._counters.take()
        start_ns, start_cpu_s = self._runtime.clock.now_ns(), time.process_time()
        jobs = [(prompt, num_tokens, at_s) for (prompt, num_tokens), at_s in zip(self._jobs, arrivals_s, strict=False)]
        ends = asyncio.run(self._ask_all(jobs))
        seconds = (max(end.at_ns for end, _ in ends) - start_ns) / 1e9
        latencies = [(end.at_ns - arrival_ns) / 1e9 for end, arrival_ns in ends]
        ttfts = [((end.first_token_ns or 0) - arrival_ns) / 1e9 for end, arrival_ns in ends]
        return {
            "tokens_per_s": sum(end.num_generated_tokens for end, _ in ends) / seconds,
            "seconds": seconds,
            "cpu_s": time.process_time() - start_cpu_s,
            "p50_s": statistics.median(latencies),
            "p99_s": _p99(latencies),
            "ttft_p50_s": statistics.median(ttfts),
            "ttft_p99_s": _p99(ttfts),
            **self._counters.take(),
        }

    def run_all(self, lengths: Sequence[tuple[Sequence[int], int]]) -> float:
        """Seconds for (prompt, tokens) that come all at once; the best of two."""
        best_s = math.inf
        for _ in range(2):
            start_ns = self._runtime.clock.now_ns()
            ends = asyncio.run(self._ask_all([(tuple(prompt), num_tokens, 0.0) for prompt, num_tokens in lengths]))
            best_s = min(best_s, (max(end.at_ns for end, _ in ends) - start_ns) / 1e9)
        return best_s

    async def _ask_all(self, jobs: Sequence[tuple[tuple[int, ...], int, float]]) -> list[tuple[OutputChunk, int]]:
        """(prompt, tokens, arrival in seconds) each."""
        start_s = time.perf_counter()
        return await asyncio.gather(*(self._ask(prompt, num_tokens, start_s + at_s) for prompt, num_tokens, at_s in jobs))

    async def _ask(self, prompt: tuple[int, ...], max_tokens: int, due_s: float) -> tuple[OutputChunk, int]:
        """The last chunk, and when the request came."""
        if (delay_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(delay_s)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(f"request-{next(self._ids)}", prompt, sampling, self._runtime.clock.now_ns())
        with self._runtime.bridge.open([request]) as stream:
            while chunks := await stream.next_chunks():
                last = chunks[-1]
        if last.num_generated_tokens != max_tokens:
            raise RuntimeError(f"{last.num_generated_tokens} tokens instead of {max_tokens}: {last.detail}")
        return last, request.arrival_ns


def bounds(jobs: Sequence[Job], batch_size: int, costs: dict[str, float]) -> dict[str, float]:
    """The gain that the lengths allow; see the head of this file."""
    batches = [jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size)]
    num_prompt = sum(job.num_prompt_tokens for job in jobs)
    num_decodes = sum(job.num_output_tokens - 1 for job in jobs)
    prompts = sum(len(batch) * max(job.num_prompt_tokens for job in batch) for batch in batches) / num_prompt
    decodes = sum(len(batch) * max(job.num_output_tokens - 1 for job in batch) for batch in batches) / num_decodes
    prompt_ms, decode_ms = num_prompt * costs["prompt_ms"], num_decodes * costs["decode_ms"]
    expected = (prompts * prompt_ms + decodes * decode_ms) / (prompt_ms + decode_ms)
    return {"prompts": prompts, "decodes": decodes, "least": min(prompts, decodes), "expected": expected}


def measure_costs(replay: Replay, batch_size: int) -> dict[str, float]:
    """Milliseconds of a position, in prompts of 128 tokens and in steps that only decode, with every row busy."""
    prompt_s = replay.run_all([(range(1000, 1128), 1)] * batch_size)
    decode_s = replay.run_all([(range(1000, 1008), 64)] * batch_size)
    prompt_ms = prompt_s * 1e3 / batch_size / 128
    return {"prompt_ms": prompt_ms, "decode_ms": (decode_s * 1e3 / batch_size - 8 * prompt_ms) / 63}


def make_runtime(args: argparse.Namespace, strategy: str) -> RunningModel:
    is_continuous = strategy == "continuous"
    scheduler = SchedulerConfig(
        batching=strategy,
        budget="decode-first",
        max_num_seqs=args.batch_size if is_continuous else 2 * args.batch_size,
        max_batch_size=None if is_continuous else args.batch_size,
        batch_window_s=None if is_continuous else {"static": args.static_delay, "dynamic": args.batch_window}[strategy],
        length_buckets=tuple(args.length_buckets) if strategy == "dynamic" else None,
    )
    config = Config(
        model=ModelConfig(model=args.model),
        kv=KvConfig(prefix_caching=False, kv_cache_memory_bytes=KV_BYTES),
        backend=BackendConfig(threads=args.threads),
        scheduler=scheduler,
    )
    return start_model(config, resolve(args.model, default_cache_dir()))


def arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start; all zero without a rate."""
    return [at_ns / NS_PER_S for at_ns in poisson(random.Random(seed), num_requests, rate)] if rate else [0.0] * num_requests


def table(medians: dict[str, dict[str, float]]) -> str:
    lines = ["| batching | " + " | ".join(COLUMNS.values()) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for strategy, figures in medians.items():
        cells = [f"{figures[key]:.0%}" if key == "waste" else f"{figures[key]:.3g}" for key in COLUMNS]
        lines.append(f"| {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--workload", choices=WORKLOADS, default="sharegpt")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: all at once")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--static-delay", type=float, default=2.0, help="seconds")
    parser.add_argument("--batch-window", type=float, default=0.02, help="seconds, of dynamic")
    parser.add_argument("--length-buckets", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    runtimes = {strategy: make_runtime(args, strategy) for strategy in STRATEGIES}
    results: dict[str, list[dict[str, float]]] = {strategy: [] for strategy in STRATEGIES}
    try:
        jobs = read_jobs(args.workload, Source(args.traces, runtimes["static"].tokenizer), args.requests)
        replays = {strategy: Replay(runtime, jobs) for strategy, runtime in runtimes.items()}
        gc.collect()
        gc.freeze()  # as the server does
        for replay in replays.values():
            replay.run([0.0] * 2)  # warms the kernels' threads and the pages of the weights
        costs = measure_costs(replays["continuous"], args.batch_size)
        limits = bounds(jobs, args.batch_size, costs)
        print(
            f"{args.workload}: {describe(jobs)}; ", ", ".join(f"{key} {value:.3g}" for key, value in (costs | limits).items())
        )
        for turn in range(args.rounds):
            times = arrivals(args.requests, args.rate, turn)
            for strategy, replay in replays.items():
                figures = replay.run(times)
                results[strategy].append(figures)
                print(f"{strategy:10}", ", ".join(f"{key} {value:.3g}" for key, value in figures.items()), flush=True)
    finally:
        for runtime in runtimes.values():
            runtime.close()
    medians = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()}
    print(table(medians))
    gains = {
        key: [its[key] / mine[key] for its, mine in zip(results["static"], results["continuous"], strict=True)]
        for key in ("seconds", "cpu_s")
    }
    report = {"benchmark": "batching", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "model": args.model}
    report |= {"workload": args.workload, "requests": args.requests, "rate": args.rate, "batch_size": args.batch_size}
    report |= {"rounds": args.rounds, "bounds": {key: round(value, 3) for key, value in (costs | limits).items()}}
    report |= {"static_over_continuous": {key: [round(gain, 3) for gain in each] for key, each in gains.items()}}
    print(json.dumps(report | {"median_by_batching": {k: {c: round(v, 3) for c, v in m.items()} for k, m in medians.items()}}))


if __name__ == "__main__":
    main()
