"""What does a long prompt do to those who are being answered? Latency between tokens of 32 streams, with and without it.

Streams decode in the real engine, in process; a prompt of 4,000 tokens arrives. Gaps between the tokens of the streams are
collected before it arrives (`alone`) and from then to its first token (`beside`). Each round does so once for each budget:
`decode-first` (the controller off), `itl` as it is by default (50 ms, or twice a step without prefills), and `itl` with
`--slo-itl`, by default twice the p99 alone, as measured first. Rounds alternate; medians over the rounds are reported.

    python benchmarks/long_prompt.py
    python benchmarks/long_prompt.py --rounds 1 --slo-itl 40

Needs the default model in the cache (`penstock pull`). `ratio` is the p99 beside the prompt over that alone; the last line
printed is one JSON object, times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from penstock import machine
from penstock.build import build_runtime
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.serve.runtime import Runtime

KV_BYTES = 1 << 30
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40000
"""Prompts are made of tokens drawn from between these."""


@dataclass(slots=True)
class Stream:
    """When the tokens of one answer came."""

    times_ns: list[int] = field(default_factory=list)

    def gaps_ms(self, start_ns: int, end_ns: int) -> list[float]:
        """Between tokens of which the later came within [start, end)."""
        pairs = zip(self.times_ns, self.times_ns[1:], strict=False)
        return [(after - before) / 1e6 for before, after in pairs if start_ns <= after < end_ns]


class Client:
    """Streams of one engine."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self._runtime = runtime
        self._rng = random.Random(seed)
        self._ids = count()

    async def ask(self, num_prompt_tokens: int, max_tokens: int, stream: Stream) -> None:
        prompt = tuple(self._rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(f"request-{next(self._ids)}", prompt, sampling, self._runtime.clock.now_ns())
        with self._runtime.bridge.open([request]) as answer:
            while chunks := await answer.next_chunks():
                stream.times_ns += [time.perf_counter_ns()] * sum(len(chunk.token_ids) for chunk in chunks)
                if chunks[-1].finish_reason is not None:
                    return


async def measure(runtime: Runtime, args: argparse.Namespace, seed: int) -> dict[str, float]:
    client = Client(runtime, seed)
    streams = [Stream() for _ in range(args.streams)]
    tasks = [asyncio.create_task(client.ask(args.stream_prompt_tokens, args.max_tokens, stream)) for stream in streams]
    await _until(lambda: min(len(stream.times_ns) for stream in streams) >= args.steps // 4)
    start_ns = time.perf_counter_ns()
    await _until(lambda: min(len(stream.times_ns) for stream in streams) >= args.steps + args.steps // 4)
    arrival_ns = time.perf_counter_ns()
    long = Stream()
    await client.ask(args.prompt_tokens, 1, long)
    end_ns = long.times_ns[0]
    if any(task.done() for task in tasks):
        raise RuntimeError("a stream ended before the long prompt was computed: raise --max-tokens")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await _until(lambda: not runtime.engine.load().num_running)
    alone = [gap for stream in streams for gap in stream.gaps_ms(start_ns, arrival_ns)]
    beside = [gap for stream in streams for gap in stream.gaps_ms(arrival_ns, end_ns + 1)]
    p99_alone, p99_beside = _p99(alone), _p99(beside)
    return {
        "p50_alone": statistics.median(alone),
        "p99_alone": p99_alone,
        "p50_beside": statistics.median(beside),
        "p99_beside": p99_beside,
        "max_beside": max(beside),
        "ttft": (end_ns - arrival_ns) / 1e6,
        "ratio": p99_beside / p99_alone,
    }


async def _until(is_met: Callable[[], bool]) -> None:
    while not is_met():  # noqa: ASYNC110 - an event would be set for every token
        await asyncio.sleep(0.01)


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-prompt-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=1500, help="of a stream; it must outlast the long prompt")
    parser.add_argument("--steps", type=int, default=120, help="observed before the prompt arrives")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slo-itl", type=float, help="milliseconds; otherwise twice the p99 without the prompt")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def make_runtime(args: argparse.Namespace, scheduler: SchedulerConfig) -> Runtime:
    config = Config(
        model=ModelConfig(model=args.model),
        kv=KvConfig(prefix_caching=False, kv_cache_memory_bytes=KV_BYTES),
        backend=BackendConfig(threads=args.threads),
        scheduler=scheduler,
    )
    return build_runtime(config, resolve(args.model, default_cache_dir()))


def main() -> None:
    args = read_arguments()
    runtimes = {
        "decode-first": make_runtime(args, SchedulerConfig(budget="decode-first")),
        "itl": make_runtime(args, SchedulerConfig(budget="itl")),
    }
    slo_ms = args.slo_itl or 2 * asyncio.run(measure(runtimes["decode-first"], args, -1))["p99_alone"]
    runtimes["itl with slo_itl"] = make_runtime(args, SchedulerConfig(budget="itl", slo_itl_s=slo_ms / 1e3))
    gc.collect()
    gc.freeze()  # as the server does
    print(f"slo_itl {slo_ms:.1f} ms")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runtimes}
    try:
        for turn in range(args.rounds):
            for name, runtime in runtimes.items():
                figures = asyncio.run(measure(runtime, args, turn))
                results[name].append(figures)
                print(f"{name:22}", ", ".join(f"{key} {value:.1f}" for key, value in figures.items()), flush=True)
    finally:
        for runtime in runtimes.values():
            runtime.close()
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]} for name, runs in results.items()
    }
    report = {"benchmark": "long_prompt", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "model": args.model}
    report |= {"streams": args.streams, "prompt_tokens": args.prompt_tokens, "rounds": args.rounds, "slo_itl": round(slo_ms, 1)}
    print(json.dumps(report | {"median_by_budget": medians}))


if __name__ == "__main__":
    main()
