"""What does a long prompt do to those who are being answered? Latency between tokens of 32 streams, with and without it.

Streams decode in the real engine, in process; a prompt of 4,000 tokens arrives. Gaps between the tokens of the streams are
collected before it arrives (`alone`) and from then to its first token (`beside`). Each round does so once for each budget:
`decode-first` (the controller off), `itl` as it is by default (50 ms, or twice a step without prefills), and `itl` with
`--slo-itl`, by default twice the p99 alone, as measured first. Rounds alternate; medians over the rounds are reported.

    python benchmarks/long_prompt.py
    python benchmarks/long_prompt.py --rounds 1 --slo-itl 40
    python benchmarks/long_prompt.py --rounds 1 --cpu-time
    python benchmarks/long_prompt.py --streams 1 --prompt-tokens 8100 --max-tokens 4000 --steps 40 --busy 4

With `--cpu-time` the scheduler drives the backend directly, on one thread, and all times are CPU times of the process: for
machines on which others work, too. With `--busy N` the prompt comes while N other processes compute without end: `decode-first`
then says what share of the cores is left, and `itl` is to be compared with it.

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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from penstock import machine
from penstock.backends.native.executor import NativeExecutor
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import start_model
from penstock.deploy.policies import build_policies
from penstock.engine.core import EngineCore
from penstock.models import architectures
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.sched.scheduler import Scheduler
from penstock.types.events import Abort, Add
from penstock.types.kv_dtype import KvDtype
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel
    from penstock.models.weights import LoadedModel

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

    def __init__(self, runtime: RunningModel, seed: int) -> None:
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


class CpuTimed:
    """The scheduler and the backend without engine, threads or clock: time is what the process has computed."""

    def __init__(self, args: argparse.Namespace, model: LoadedModel, scheduler: SchedulerConfig) -> None:
        self._args = args
        self._executor = NativeExecutor(
            model,
            architectures.describe(model.spec),
            num_blocks=KV_BYTES // 16 // model.spec.kv_bytes_per_token(KvDtype.INT8),
            block_size=16,
            max_rows=64,
            max_step_tokens=512,
            max_model_len=8192,
            kv_dtype=KvDtype.INT8,
            num_threads=1,
        )
        policies = build_policies(Config(scheduler=scheduler))
        self._core = EngineCore(Scheduler(self._executor.capacity, policies, enable_prefix_caching=False))
        self._streams: dict[str, Stream] = {}

    def measure(self, seed: int) -> dict[str, float]:
        args, rng = self._args, random.Random(seed)
        for idx in range(args.streams):
            self._add(f"stream-{seed}-{idx}", rng, args.stream_prompt_tokens, args.max_tokens)
        streams = list(self._streams.values())
        self._run(lambda: min(len(stream.times_ns) for stream in streams) >= args.steps // 4)
        start_ns = time.process_time_ns()
        self._run(lambda: min(len(stream.times_ns) for stream in streams) >= args.steps + args.steps // 4)
        arrival_ns = time.process_time_ns()
        self._add(f"long-{seed}", rng, args.prompt_tokens, 1)
        long = self._streams[f"long-{seed}"]
        self._run(lambda: bool(long.times_ns))
        self._core.apply([Abort(request_id) for request_id in self._streams], time.process_time_ns())
        self._streams.clear()
        return summary(streams, start_ns, arrival_ns, long.times_ns[0])

    def _add(self, request_id: str, rng: random.Random, num_prompt_tokens: int, max_tokens: int) -> None:
        prompt = tuple(rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_prompt_tokens))
        now_ns = time.process_time_ns()
        request = Request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), now_ns)
        self._streams[request_id] = Stream()
        self._core.apply([Add(request)], now_ns)

    def _run(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            plan = self._core.begin(time.process_time_ns())
            assert plan is not None
            result = self._executor.collect(self._executor.submit(plan))
            now_ns = time.process_time_ns()
            for event in self._core.finish(plan, result, now_ns):
                self._streams[event.request_id].times_ns.append(now_ns)


async def measure(runtime: RunningModel, args: argparse.Namespace, seed: int) -> dict[str, float]:
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
    return summary(streams, start_ns, arrival_ns, end_ns)


def summary(streams: Sequence[Stream], start_ns: int, arrival_ns: int, end_ns: int) -> dict[str, float]:
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
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, without the engine")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the cores busy meanwhile")
    return parser.parse_args()


def make_runtime(args: argparse.Namespace, scheduler: SchedulerConfig) -> RunningModel:
    config = Config(
        model=ModelConfig(model=args.model),
        kv=KvConfig(prefix_caching=False, kv_cache_memory_bytes=KV_BYTES),
        backend=BackendConfig(threads=args.threads),
        scheduler=scheduler,
    )
    return start_model(config, resolve(args.model, default_cache_dir()))


def rounds(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """(budget, figures), each budget once per round; before that the latency to hold, as ("slo_itl", {"ms": ...})."""
    with ExitStack() as stack:
        measures = {name: _measure_with(args, budget, stack) for name, budget in BUDGETS.items()}
        if not args.slo_itl:
            measures["decode-first"](-2)  # the first after a pause is slower, and would set too easy a target
        slo_ms = args.slo_itl or 2 * measures["decode-first"](-1)["p99_alone"]
        yield "slo_itl", {"ms": slo_ms}
        held = SchedulerConfig(budget="itl", slo_itl_s=slo_ms / 1e3)
        measures["itl with slo_itl"] = _measure_with(args, held, stack)
        gc.collect()
        gc.freeze()  # as the server does
        for turn in range(args.rounds):
            for name, measure_once in measures.items():
                yield name, measure_once(turn)


BUDGETS = {"decode-first": SchedulerConfig(budget="decode-first"), "itl": SchedulerConfig(budget="itl")}


def _measure_with(args: argparse.Namespace, scheduler: SchedulerConfig, stack: ExitStack) -> Callable[[int], dict[str, float]]:
    """Measures once, with the prompts of a seed."""
    if args.cpu_time:
        model = load_model(resolve(args.model, default_cache_dir()))
        return CpuTimed(args, model, scheduler).measure
    runtime = make_runtime(args, scheduler)
    stack.callback(runtime.close)
    return lambda seed: asyncio.run(measure(runtime, args, seed))


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    args = read_arguments()
    results: dict[str, list[dict[str, float]]] = {}
    with busy_cores(args.busy):
        for name, figures in rounds(args):
            results.setdefault(name, []).append(figures)
            print(f"{name:22}", ", ".join(f"{key} {value:.1f}" for key, value in figures.items()), flush=True)
    slo_ms = results.pop("slo_itl")[0]["ms"]
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]} for name, runs in results.items()
    }
    report = {"benchmark": "long_prompt", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "model": args.model}
    report |= {
        "streams": args.streams,
        "prompt_tokens": args.prompt_tokens,
        "rounds": args.rounds,
        "cpu_time": args.cpu_time,
        "busy": args.busy,
        "slo_itl": round(slo_ms, 1),
    }
    print(json.dumps(report | {"median_by_budget": medians}))


if __name__ == "__main__":
    main()
