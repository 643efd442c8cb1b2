"""What do HTTP and streaming cost? The same workload over HTTP and through the engine without it, in turn, in one run.

In process, requests go to the bridge that the server uses, too, and chunks of text come back on an event loop: all that
the server does but connections, JSON and events. Two copies of the model are loaded; the one that does not measure sleeps.
`ratio` is the throughput over HTTP divided by that in process, of neighbouring runs; the median is reported. Beside it the CPU
time per token of the server's HTTP thread, of all its threads, and of the client (Linux only).

    python benchmarks/inprocess.py

Needs the default model in the cache (`penstock pull`) and the traces. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from sessions import SERVED_NAME, Contender, ServerSession, running, warm_up
from workloads import DEFAULT_TRACES, WORKLOADS, Source, describe, read_jobs

from penstock import machine
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig
from penstock.deploy.factory import start_model
from penstock.lab.workload import Job
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel


class InProcess:
    """A closed loop through the bridge."""

    def __init__(self, runtime: RunningModel) -> None:
        self._runtime = runtime
        self._ids = count()

    def replay(self, jobs: Sequence[Job], concurrency: int) -> float:
        """Seconds for all jobs in order, `concurrency` at a time."""
        return asyncio.run(self._replay(jobs, concurrency))

    async def _replay(self, jobs: Sequence[Job], concurrency: int) -> float:
        left = iter(jobs)

        async def client() -> None:
            for job in left:
                await self._ask(job)

        start_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return time.perf_counter() - start_s

    async def _ask(self, job: Job) -> None:
        runtime, texts = self._runtime, [""]
        prompt = tuple(runtime.tokenizer.encode(job.prompt, add_special_tokens=True))
        sampling = SamplingParams(temperature=0.0, max_tokens=job.num_output_tokens)
        request = Request(f"request-{next(self._ids)}", prompt, sampling, runtime.clock.now_ns())

        with runtime.bridge.open([request]) as stream:
            while chunks := await stream.next_chunks():
                texts += [chunk.text for chunk in chunks]
                last = chunks[-1]
        if last.num_generated_tokens != job.num_output_tokens:
            raise RuntimeError(f"{last.num_generated_tokens} tokens instead of {job.num_output_tokens}: {last.detail}")


def thread_cpu_s(pid: int, thread: int) -> float:
    """CPU time of one thread so far."""
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def over_http(session: ServerSession, jobs: Sequence[Job], concurrency: int) -> dict[str, float]:
    pid = session.process.pid
    http_s, all_s = thread_cpu_s(pid, pid), session.cpu_s()
    run = session.replay(jobs, concurrency)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    return {
        "http_tokens_per_s": num_tokens * 1e9 / run.duration_ns,
        "http_thread_us_per_token": (thread_cpu_s(pid, pid) - http_s) / num_tokens * 1e6,
        "server_us_per_token": (session.cpu_s() - all_s) / num_tokens * 1e6,
        "client_us_per_token": run.client_cpu_s / num_tokens * 1e6,
    }


def measure(args: argparse.Namespace, session: ServerSession, engine: InProcess, jobs: Sequence[Job]) -> dict[str, list[dict]]:
    results: dict[str, list[dict[str, float]]] = {}
    for concurrency in args.concurrency:
        engine.replay(jobs[:concurrency], concurrency)
        warm_up(session, jobs, concurrency)
    for turn in range(args.repeat):
        for concurrency, num_jobs in zip(args.concurrency, args.requests, strict=True):
            chosen = jobs[:num_jobs]
            num_tokens = sum(job.num_output_tokens for job in chosen)
            # Who is first changes from turn to turn, so that a drift of the machine favours neither.
            if turn % 2:
                seconds, figures = engine.replay(chosen, concurrency), over_http(session, chosen, concurrency)
            else:
                figures, seconds = over_http(session, chosen, concurrency), engine.replay(chosen, concurrency)
            figures["inprocess_tokens_per_s"] = num_tokens / seconds
            figures["ratio"] = figures["http_tokens_per_s"] / figures["inprocess_tokens_per_s"]
            results.setdefault(str(concurrency), []).append(figures)
            print(f"concurrency {concurrency}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
    return results


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--workload", choices=WORKLOADS, default="sharegpt")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--requests", type=int, nargs="+", default=[96, 32, 8], help="for each concurrency")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, help="that compute, on both sides")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    config = Config(
        model=ModelConfig(model=args.model),
        kv=KvConfig(prefix_caching=False),
        backend=BackendConfig(threads=args.threads),
    )
    threads = ["--threads", str(args.threads)] if args.threads else []
    command = [sys.executable, "-m", "penstock", "serve", args.model, "--no-prefix-caching", "--port", "{port}", *threads]
    server = Contender("penstock", [*command, "--served-model-name", SERVED_NAME], health="/ready")
    runtime = start_model(config, resolve(args.model, default_cache_dir()))
    gc.collect()
    gc.freeze()  # as the server does
    try:
        jobs = read_jobs(args.workload, Source(args.traces, runtime.tokenizer), max(args.requests))
        print(f"{args.workload}: {describe(jobs)}")
        with tempfile.NamedTemporaryFile() as log, running(server, Path(log.name)) as session:
            assert isinstance(session, ServerSession)
            results = measure(args, session, InProcess(runtime), jobs)
    finally:
        runtime.close()
    medians = {c: {k: round(statistics.median(r[k] for r in runs), 3) for k in runs[0]} for c, runs in results.items()}
    spread = {c: [round(pick(r["ratio"] for r in runs), 3) for pick in (min, max)] for c, runs in results.items()}
    report = {"benchmark": "inprocess", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name()}
    report |= {"model": args.model, "workload": args.workload, "repeat": args.repeat}
    print(json.dumps(report | {"median_by_concurrency": medians, "ratio_range": spread}))


if __name__ == "__main__":
    main()
