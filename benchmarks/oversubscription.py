"""What is left of the throughput when the KV cache holds a half or a quarter of what is needed, without and with a disk tier?

    python benchmarks/oversubscription.py [--requests 64] [--rows 32] [--repeat 3] [--threads N]

The real model in this process, without HTTP: `--requests` ShareGPT jobs, all there at the start, at most `--rows` at a time,
greedy. `unconstrained` is a pool in which everybody finds room; the most that is ever held in it, divided by two and by
four, is the pool of the others. All run in turn, `--repeat` times, medians are reported: tokens per second divided by those of
the unconstrained run beside it, by the clock and by the CPU time of the whole process; positions computed again after
a preemption divided by the positions needed; whether each answer is, token by token, the unconstrained one.
The prefix cache is off, so that it is the tier that is measured. Needs the default model and the traces. The last line printed
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load import Job
from workloads import DEFAULT_TRACES, WORKLOADS, Source, describe, read_jobs

from penstock import machine
from penstock.build import build_runtime
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.serve.runtime import Runtime
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

MAX_MODEL_LEN = 1024
DISK_BYTES = 2 << 30
FACTORS = (2, 4)


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all jobs."""

    answers: list[list[int]]
    seconds: float
    cpu_seconds: float
    num_recomputed: int
    num_preemptions: int
    max_held_blocks: int
    disk: dict[str, float]


class Contestant:
    """A model with a pool of one size."""

    def __init__(self, args: argparse.Namespace, *, num_blocks: int, block_bytes: int, folder: str | None) -> None:
        kv = KvConfig(
            kv_cache_memory_bytes=num_blocks * block_bytes,
            prefix_caching=args.prefix_caching,
            kv_disk_size_bytes=0 if folder is None else DISK_BYTES,
            kv_disk_path=folder,
        )
        config = Config(
            model=ModelConfig(model=args.model, max_model_len=MAX_MODEL_LEN),
            kv=kv,
            scheduler=SchedulerConfig(max_num_seqs=args.rows),
            backend=BackendConfig(threads=args.threads),
        )
        self.runtime: Runtime = build_runtime(config, resolve(args.model, default_cache_dir()))
        self._num_runs = 0

    def run(self, jobs: Sequence[Job]) -> Run:
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: Sequence[Job]) -> Run:
        runtime, metrics = self.runtime, self.runtime.metrics
        self._num_runs += 1
        held = [0]
        before = (metrics.num_recomputed_tokens, metrics.num_preemptions)
        prompts = [tuple(runtime.tokenizer.encode(job.prompt, add_special_tokens=True)) for job in jobs]
        start_s, cpu_s = time.perf_counter(), time.process_time()
        requests = [
            Request(
                f"{self._num_runs}-{idx}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=job.max_tokens),
                runtime.clock.now_ns(),
            )
            for idx, (prompt, job) in enumerate(zip(prompts, jobs, strict=True))
        ]
        answers = await asyncio.gather(*(self._ask(request, held) for request in requests))
        seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - cpu_s
        with metrics.lock:
            metrics.settle()
        tier = metrics.tier
        disk = {"spilled": tier.num_spilled_blocks, "loaded": tier.num_loaded_blocks, "dropped": tier.num_dropped_blocks}
        disk |= {f"failed_{reason}": count for reason, count in tier.failures.items()}
        num_recomputed, num_preemptions = metrics.num_recomputed_tokens - before[0], metrics.num_preemptions - before[1]
        return Run(answers, seconds, cpu_seconds, num_recomputed, num_preemptions, held[0], disk)

    async def _ask(self, request: Request, held: list[int]) -> list[int]:
        tokens: list[int] = []
        with self.runtime.bridge.open([request]) as stream:
            while chunks := await stream.next_chunks():
                for chunk in chunks:
                    tokens += chunk.token_ids
                held[0] = max(held[0], self.runtime.engine.load().num_blocks_held)
                if chunks[-1].finish_reason is not None:
                    break
        if len(tokens) != request.sampling.max_tokens:
            raise RuntimeError(f"{len(tokens)} tokens instead of {request.sampling.max_tokens}: {chunks[-1].detail}")
        return tokens


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--workload", choices=WORKLOADS, default="sharegpt")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--factors", type=int, nargs="+", default=FACTORS)
    parser.add_argument("--disk-only", action="store_true", help="leave out the pools without a disk tier")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    free = Contestant(args, num_blocks=args.rows * MAX_MODEL_LEN // 16 + 1, block_bytes=200_000, folder=None)
    jobs = read_jobs(args.workload, Source(args.traces, free.runtime.tokenizer), args.requests)
    print(f"{args.workload}: {describe(jobs)}")
    first = free.run(jobs)
    block_bytes = free.runtime.engine.load().num_blocks_total and 16 * 12_060
    num_needed = sum(job.num_prompt_tokens + job.max_tokens - 1 for job in jobs)
    pools = {factor: -(-first.max_held_blocks // factor) + 1 for factor in args.factors}
    print(f"at most {first.max_held_blocks} blocks held; {num_needed} positions needed; pools {pools}", flush=True)
    report: dict[str, object] = {"benchmark": "oversubscription", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name()}
    report |= {"model": args.model, "workload": args.workload, "requests": args.requests, "rows": args.rows}
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            f"{factor}x{' disk' if has_disk else ''}": Contestant(
                args, num_blocks=pools[factor], block_bytes=block_bytes, folder=f"{folder}/{factor}" if has_disk else None
            )
            for factor in args.factors
            for has_disk in ((True,) if args.disk_only else (False, True))
        }
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.repeat):
            beside = free.run(jobs)
            print(f"unconstrained: {sum(map(len, beside.answers)) / beside.seconds:.0f} tokens/s", flush=True)
            for name, contestant in contestants.items():
                run = contestant.run(jobs)
                figures = {
                    "throughput": beside.seconds / run.seconds,
                    "throughput_by_cpu": beside.cpu_seconds / run.cpu_seconds,
                    "computed_twice": run.num_recomputed / num_needed,
                    "preemptions": run.num_preemptions,
                    "wrong_answers": sum(a != b for a, b in zip(first.answers, run.answers, strict=True)),
                    "blocks": contestant.runtime.engine.load().num_blocks_total,
                }
                results.setdefault(name, []).append(figures)
                print(name, ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), run.disk, flush=True)
        for contestant in (free, *contestants.values()):
            contestant.runtime.close()
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]} for name, runs in results.items()
    }
    print(json.dumps(report | {"medians": medians}))


if __name__ == "__main__":
    main()
