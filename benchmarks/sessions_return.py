"""A session comes back after its KV was evicted: how long until its first token, computed again or loaded from the disk tier?

    python benchmarks/sessions_return.py [--tokens 256 512 960] [--repeat 7] [--threads N]

The real model in this process, without HTTP and with one request at a time. Between two visits another prompt takes the whole
pool. Medians of milliseconds from the request to its first token, and of the CPU time of the process. The last line
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time

from penstock import machine
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig
from penstock.deploy.factory import start_model
from penstock.deploy.running import RunningModel
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

MAX_MODEL_LEN = 1024
POOL_BYTES = 12_800_000
"""As many blocks as the longest request has."""
DISK_BYTES = 1 << 30


def open_runtime(args: argparse.Namespace, folder: str | None) -> RunningModel:
    kv = KvConfig(kv_cache_memory_bytes=POOL_BYTES, kv_disk_size_bytes=0 if folder is None else DISK_BYTES, kv_disk_path=folder)
    config = Config(
        model=ModelConfig(model=args.model, max_model_len=MAX_MODEL_LEN), kv=kv, backend=BackendConfig(threads=args.threads)
    )
    return start_model(config, resolve(args.model, default_cache_dir()))


async def visit(runtime: RunningModel, name: str, prompt: tuple[int, ...]) -> tuple[float, float]:
    """Milliseconds to the first token, and of CPU."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    request = Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=1), runtime.clock.now_ns())
    with runtime.bridge.open([request]) as stream:
        while (await stream.next_chunks())[-1].finish_reason is None:
            pass
    return (time.perf_counter() - start_s) * 1e3, (time.process_time() - cpu_s) * 1e3


async def measure(args: argparse.Namespace, runtimes: dict[str, RunningModel]) -> dict[str, dict[str, dict[str, float]]]:
    generator = random.Random(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(10, 40_000) for _ in range(count))

    results: dict[str, dict[str, dict[str, float]]] = {}
    for num_tokens in args.tokens:
        session = draw(num_tokens)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runtimes}
        for turn in range(args.repeat + 1):
            for name, runtime in runtimes.items():
                await visit(runtime, f"other-{num_tokens}-{turn}", draw(MAX_MODEL_LEN - 1))
                times[name].append(await visit(runtime, f"session-{num_tokens}-{turn}", session))
        results[str(num_tokens)] = {
            name: {
                "ms": round(statistics.median(ms for ms, _ in runs[1:]), 2),
                "cpu_ms": round(statistics.median(cpu_ms for _, cpu_ms in runs[1:]), 2),
            }
            for name, runs in times.items()
        }
        print(num_tokens, results[str(num_tokens)], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 960])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runtimes = {"computed": open_runtime(args, None), "loaded": open_runtime(args, folder)}
        try:
            results = asyncio.run(measure(args, runtimes))
        finally:
            for runtime in runtimes.values():
                runtime.close()
    report = {"benchmark": "sessions_return", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "model": args.model}
    print(json.dumps(report | {"by_tokens": results}))


if __name__ == "__main__":
    main()
