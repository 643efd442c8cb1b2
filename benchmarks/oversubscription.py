"""What is left of the throughput when the KV cache holds a half or a quarter of what is needed, without and with a disk tier?

    python benchmarks/oversubscription.py [--requests 64] [--rows 32] [--repeat 3] [--threads N] [--narrow 8 16]

The real model in this process, without HTTP: `--requests` ShareGPT jobs, all there at the start, at most `--rows` at a time,
greedy. `unconstrained` is a pool in which everybody finds room; the most that is ever held in it, divided by two and by
four, is the pool of the others. `--narrow` adds pools with room for all in which only so many run at a time.

All are served at the same time, but their engines work in turn, `SLICE_S` each, and the turn is always of the one that has
generated the least: so what else happens on the machine, and how fast it is at that moment, is the same for all. Each is timed
while it has the turn. `--repeat` times; medians are reported, and the range: tokens per second divided by those of the
unconstrained pool, by the clock and by the CPU time of the whole process; positions computed again after a preemption, divided
by the positions needed; rows in a step; whether each answer is, token by token, the unconstrained one.
The prefix cache is off, so that it is the tier that is measured. Needs the default model and the traces. The last line printed
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from workloads import DEFAULT_TRACES, WORKLOADS, Source, describe, read_jobs

from penstock import machine
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import start_model
from penstock.deploy.running import RunningModel
from penstock.lab.workload import Job
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

MAX_MODEL_LEN = 1024
DISK_BYTES = 2 << 30
FACTORS = (2, 4)
SLICE_S = 0.1
UNCONSTRAINED = "unconstrained"


class Contestant:
    """A model with a pool of one size. The counts are those of the last run."""

    def __init__(
        self, args: argparse.Namespace, *, num_blocks: int, block_bytes: int, folder: str | None = None, rows: int | None = None
    ) -> None:
        kv = KvConfig(
            kv_cache_memory_bytes=num_blocks * block_bytes,
            prefix_caching=args.prefix_caching,
            kv_disk_size_bytes=0 if folder is None else DISK_BYTES,
            kv_disk_path=folder,
        )
        config = Config(
            model=ModelConfig(model=args.model, max_model_len=MAX_MODEL_LEN),
            kv=kv,
            scheduler=SchedulerConfig(max_num_seqs=rows or args.rows),
            backend=BackendConfig(threads=args.threads),
        )
        self.runtime: RunningModel = start_model(config, resolve(args.model, default_cache_dir()))
        self.answers: list[list[int]] = []
        self.seconds = self.cpu_seconds = 0.0
        self.is_over = True
        self.num_steps = self.max_held_blocks = 0
        self.step_ended: Callable[[], None] = lambda: None
        """Called on the engine's thread."""
        self._num_runs = 0
        self._before = (0, 0)
        metrics = self.runtime.metrics
        count = metrics.on_turn

        def on_turn(parts_ns: Mapping[str, int]) -> None:
            count(parts_ns)
            self.num_steps += 1
            self.step_ended()

        metrics.on_turn = on_turn  # type: ignore[method-assign]

    @property
    def num_generated(self) -> int:
        return sum(map(len, self.answers))

    def submit(self, jobs: Sequence[Job]) -> list[asyncio.Task[None]]:
        """Begin to serve all of them; one task each, which ends with its answer."""
        runtime = self.runtime
        self._num_runs += 1
        self._before = self._counts()
        self.answers = [[] for _ in jobs]
        self.seconds = self.cpu_seconds = 0.0
        self.num_steps = self.max_held_blocks = 0
        self.is_over = False
        requests = [
            Request(
                f"{self._num_runs}-{idx}",
                tuple(runtime.tokenizer.encode(job.prompt, add_special_tokens=True)),
                SamplingParams(temperature=0.0, max_tokens=job.num_output_tokens),
                runtime.clock.now_ns(),
            )
            for idx, job in enumerate(jobs)
        ]
        return [asyncio.create_task(self._ask(request, tokens)) for request, tokens in zip(requests, self.answers, strict=True)]

    async def _ask(self, request: Request, tokens: list[int]) -> None:
        with self.runtime.bridge.open([request]) as stream:
            while chunks := await stream.next_chunks():
                for chunk in chunks:
                    tokens += chunk.token_ids
                self.max_held_blocks = max(self.max_held_blocks, self.runtime.engine.load().num_blocks_held)
                if chunks[-1].finish_reason is not None:
                    break
        if len(tokens) != request.sampling.max_tokens:
            raise RuntimeError(f"{len(tokens)} tokens instead of {request.sampling.max_tokens}: {chunks[-1].detail}")

    def figures(self, beside: Contestant, num_needed: int) -> dict[str, float]:
        num_recomputed, num_preemptions = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        return {
            "throughput": beside.seconds / self.seconds,
            "throughput_by_cpu": beside.cpu_seconds / self.cpu_seconds,
            "computed_twice": num_recomputed / num_needed,
            "preemptions": num_preemptions,
            "steps": self.num_steps,
            "rows": self.num_generated / self.num_steps,
            "wrong_answers": sum(a != b for a, b in zip(beside.answers, self.answers, strict=True)),
            "blocks": self.runtime.engine.load().num_blocks_total,
        }

    def _counts(self) -> tuple[int, int]:
        metrics = self.runtime.metrics
        with metrics.lock:
            metrics.settle()
        return metrics.num_recomputed_tokens, metrics.num_preemptions


class Race:
    """Contestants that take turns. The engine of one that has not got the turn waits at the end of its step."""

    def __init__(self, contestants: Sequence[Contestant]) -> None:
        self._contestants = contestants
        self._changed = threading.Condition()
        self._holder: Contestant | None = None
        self._is_starting = False
        self._began_s = self._began_cpu_s = 0.0
        for contestant in contestants:
            contestant.step_ended = partial(self._step_ended, contestant)

    async def run(self, jobs: Sequence[Job]) -> None:
        async with asyncio.TaskGroup() as group:
            self._is_starting = True
            for contestant in self._contestants:
                self._give(contestant)
                group.create_task(self._serve(contestant, jobs))
                while self._holder is contestant:  # noqa: ASYNC110  # its first step, of which no event tells
                    await asyncio.sleep(0.001)
            self._is_starting = False
            self._give(self._contestants[0])

    async def _serve(self, contestant: Contestant, jobs: Sequence[Job]) -> None:
        await asyncio.gather(*contestant.submit(jobs))
        with self._changed:
            contestant.is_over = True
            if self._holder is contestant:
                self._take_back()
            self._changed.notify_all()

    def _give(self, contestant: Contestant) -> None:
        with self._changed:
            self._holder = contestant
            self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
            self._changed.notify_all()

    def _step_ended(self, contestant: Contestant) -> None:
        """On the engine's thread."""
        with self._changed:
            is_long = time.perf_counter() - self._began_s >= SLICE_S
            if self._holder is contestant and (is_long or self._is_starting):
                self._take_back()
            self._changed.wait_for(lambda: self._holder is contestant or contestant.is_over)

    def _take_back(self) -> None:
        """From whoever has the turn; the next is the one that has come least far. With the lock held."""
        assert self._holder is not None, "somebody has the turn"
        self._holder.seconds += time.perf_counter() - self._began_s
        self._holder.cpu_seconds += time.process_time() - self._began_cpu_s
        self._holder = None
        others = [contestant for contestant in self._contestants if not contestant.is_over]
        if others and not self._is_starting:
            self._give(min(others, key=lambda contestant: contestant.num_generated))


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
    parser.add_argument("--factors", type=int, nargs="*", default=FACTORS)
    parser.add_argument("--narrow", type=int, nargs="*", default=())
    parser.add_argument("--disk-only", action="store_true", help="leave out the pools without a disk tier")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    block_bytes, num_blocks = 200_000, args.rows * MAX_MODEL_LEN // 16 + 1
    free = Contestant(args, num_blocks=num_blocks, block_bytes=block_bytes)
    jobs = read_jobs(args.workload, Source(args.traces, free.runtime.tokenizer), args.requests)
    print(f"{args.workload}: {describe(jobs)}")
    asyncio.run(Race([free]).run(jobs))
    num_held = free.max_held_blocks
    num_needed = sum(job.num_prompt_tokens + job.num_output_tokens - 1 for job in jobs)
    pools = {factor: -(-num_held // factor) + 1 for factor in args.factors}
    print(f"at most {num_held} blocks held; {num_needed} positions needed; pools {pools}", flush=True)
    report: dict[str, object] = {"benchmark": "oversubscription", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name()}
    report |= {"model": args.model, "workload": args.workload, "requests": args.requests, "rows": args.rows}
    with tempfile.TemporaryDirectory() as folder:
        contestants = {UNCONSTRAINED: free}
        for rows in args.narrow:
            contestants[f"{rows} rows"] = Contestant(args, num_blocks=num_blocks, block_bytes=block_bytes, rows=rows)
        for factor in args.factors:
            small = {"num_blocks": pools[factor], "block_bytes": 16 * 12_060}
            if not args.disk_only:
                contestants[f"{factor}x"] = Contestant(args, **small)
            contestants[f"{factor}x disk"] = Contestant(args, **small, folder=f"{folder}/{factor}")
        results: dict[str, list[dict[str, float]]] = {}
        race = Race(list(contestants.values()))
        for _ in range(args.repeat):
            asyncio.run(race.run(jobs))
            print(f"{UNCONSTRAINED}: {free.num_generated / free.seconds:.0f} tokens/s", flush=True)
            for name, contestant in contestants.items():
                figures = contestant.figures(free, num_needed)
                results.setdefault(name, []).append(figures)
                print(name, ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)
        for contestant in contestants.values():
            contestant.runtime.close()
    del results[UNCONSTRAINED]
    summaries = {name: {key: _summary([run[key] for run in runs]) for key in runs[0]} for name, runs in results.items()}
    print(json.dumps(report | {"median_least_most": summaries}))


def _summary(values: Sequence[float]) -> tuple[float, float, float]:
    return round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)


if __name__ == "__main__":
    main()
