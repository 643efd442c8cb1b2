"""What do packed weights (`penstock pack`) cost a step, and what do they save a second process?

- Steps of one token on one thread, of weights that were converted and of mapped ones in turn: the least CPU time of each.
- Starts of `penstock serve` with and without the file, in turn: the median time until it is ready, and CPU time until then.
- The proportional set size (PSS) of two servers that answered a request: what the second one adds.

    penstock pack qwen2.5-coder:1.5b && python benchmarks/packed.py --model qwen2.5-coder:1.5b

Linux only (/proc).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from printed import origin, table
from sessions import ServerSession, serving
from usage import cpu_s

from penstock.backends.native.executor import NativeExecutor
from penstock.config.components import config_from
from penstock.deploy.resolve import packed_weights
from penstock.lab.workload import Job
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.models.packed_file import PackedFile

SETTLE_S = 5.0
JOB = Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=8, prompt="The capital of France is")


def step_ms(model: str, num_steps: int) -> tuple[float, float]:
    """The least CPU time of a step with converted weights and with mapped ones."""
    source = resolve(model, default_cache_dir())

    def make(packed: PackedFile | None = None) -> NativeExecutor:
        loaded = load_model(source)
        sizes = {"num_blocks": 8, "block_size": 16, "max_rows": 1, "max_step_tokens": 16, "max_model_len": 64}
        return NativeExecutor(loaded, architectures.describe(loaded.spec), **sizes, num_threads=1, packed=packed)

    with packed_weights(config_from({"model": model}), source.path).open() as file:
        executors = [make(), make(file)]
    with closing(executors[0]), closing(executors[1]):
        while executors[0].small_page_bytes:  # it waits for huge pages, too
            time.sleep(0.1)
        least = [float("inf")] * 2
        for _ in range(num_steps):
            for index, executor in enumerate(executors):
                began = time.thread_time()
                executor.forward_logits([5])
                least[index] = min(least[index], 1e3 * (time.thread_time() - began))
    return least[0], least[1]


def memory_mib(session: ServerSession) -> dict[str, float]:
    lines = Path(f"/proc/{session.process.pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) / 1024 for name, value in (line.split(":") for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="in the cache, and packed")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--starts", type=int, default=9)
    args = parser.parse_args()
    converted_ms, mapped_ms = step_ms(args.model, args.steps)
    rows: list[list[object]] = [["a step, ms of CPU time", f"{converted_ms:.2f}", f"{mapped_ms:.2f}"]]
    ready: tuple[list[float], list[float]] = ([], [])
    used: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as bare:  # a cache without packed weights
        for name in ("models", "hub", "kernels"):
            if (default_cache_dir() / name).exists():
                (Path(bare) / name).symlink_to(default_cache_dir() / name)
        for _ in range(args.starts):
            for index, environ in enumerate(({"PENSTOCK_CACHE": bare}, dict[str, str]())):
                with serving(args.model, environ=environ) as session:
                    ready[index].append(session.ready_s)
                    used[index].append(cpu_s(session.process.pid))
    rows.append(["ready, s", *(f"{statistics.median(found):.2f}" for found in ready)])
    rows.append(["CPU time until then, s", *(f"{statistics.median(found):.2f}" for found in used)])
    with ExitStack() as stack:
        first = stack.enter_context(serving(args.model))
        first.replay([JOB], 1)
        time.sleep(SETTLE_S)
        alone = memory_mib(first)
        second = stack.enter_context(serving(args.model))
        second.replay([JOB], 1)
        time.sleep(SETTLE_S)
        both = [memory_mib(one) for one in (first, second)]
    for name in ("Pss", "Pss_File", "Pss_Anon"):
        rows.append(
            [
                f"{name} of one, and what a second adds, MiB",
                *(f"{value:.0f}" for value in (alone[name], sum(one[name] for one in both) - alone[name])),
            ]
        )
    rows.append(["of a file, in huge pages, MiB", "", f"{alone['FilePmdMapped']:.0f}"])
    print(origin(args.model, f"least of {args.steps} steps, median of {args.starts} starts"))
    print(table(["", "converted", "mapped"], rows))


if __name__ == "__main__":
    main()
