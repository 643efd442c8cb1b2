"""What do several choices of one prompt cost? `n` = 1, n = 8, and a beam search of 8, in process, on one thread's CPU time.

    python benchmarks/choices.py [--prompt-tokens 1000] [--max-tokens 1] [--n 8] [--repeat 5]

Each call has a new prompt of one length; the three take turns, and times are medians. `computed` counts positions,
generated tokens included; `blocks` is the most held at once; `copy_us` is a block's copy, `staging_us` its transfer to and
from the memory that feeds the disk tier. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from itertools import count

from penstock.backends.native.executor import NativeExecutor
from penstock.engine.core import EngineCore
from penstock.models.architectures import describe
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.testing import make_core, make_request
from penstock.types.events import Add
from penstock.types.sampling import BeamParams

_PROMPTS = count(1)
STAGING_ROUNDS = 20


@dataclass(frozen=True)
class Cost:
    ms: float
    num_computed: int
    num_blocks: int


def serve(
    core: EngineCore, executor: NativeExecutor, num: int, num_prompt_tokens: int, max_tokens: int, *, beams: bool
) -> Cost:
    """One call with a prompt that was never seen."""
    number = next(_PROMPTS)
    prompt = [(idx * idx + 7 * number) % 40000 + 100 for idx in range(num_prompt_tokens)]
    fields = {"beams": BeamParams(width=num), "logprobs": num} if beams else {"temperature": 1.0}
    requests = [make_request(f"{number}.{idx}", prompt, max_tokens=max_tokens, seed=idx, **fields) for idx in range(num)]
    for request in requests:
        request.parent_id = str(number)
    kv, num_computed, num_blocks = core.scheduler.kv, 0, 0
    started_ns = time.process_time_ns()
    core.apply(map(Add, requests), 0)
    while core.has_work:
        plan = core.begin(0)
        assert plan is not None, "there is work"
        num_blocks = max(num_blocks, kv.num_total_blocks - kv.pool.num_available)
        copies = kv.take_block_copies()
        if copies:
            executor.copy_blocks(copies)
        core.finish(plan, executor.collect(executor.submit(plan)), 0)
        num_computed += plan.num_tokens
    return Cost((time.process_time_ns() - started_ns) / 1e6, num_computed, num_blocks)


def copy_us(executor: NativeExecutor, num_blocks: int) -> float:
    pairs = [(block, block + num_blocks) for block in range(1, num_blocks)]
    executor.copy_blocks(pairs)
    started_ns = time.process_time_ns()
    executor.copy_blocks(pairs)
    return (time.process_time_ns() - started_ns) / 1e3 / len(pairs)


def staging_us(executor: NativeExecutor, num_blocks: int) -> dict[str, float]:
    """Time a block's copy out of the pool and back, as for the disk tier: the least of several rounds."""
    size, block_ids = executor.block_bytes, range(1, num_blocks + 1)
    memory = memoryview(bytearray(num_blocks * size))
    buffers = [memory[idx * size : (idx + 1) * size] for idx in range(num_blocks)]
    least: dict[str, float] = {}
    for _ in range(STAGING_ROUNDS):
        for name, act in (("read", executor.read_blocks), ("write", executor.write_blocks)):
            started_ns = time.thread_time_ns()
            act(block_ids, buffers)
            us = (time.thread_time_ns() - started_ns) / 1e3 / num_blocks
            least[name] = round(min(us, least.get(name, us)), 1)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    model = load_model(resolve(args.model, default_cache_dir()))
    executor = NativeExecutor(
        model,
        describe(model.spec),
        num_blocks=2000,
        block_size=16,
        max_rows=64,
        max_step_tokens=512,
        max_model_len=model.spec.max_model_len,
        num_threads=1,
    )
    core = make_core(executor.capacity)
    kinds = {"one": (1, False), "choices": (args.n, False), "beams": (args.n, True)}
    found: dict[str, list[Cost]] = {name: [] for name in kinds}
    for round_idx in range(args.repeat + 1):
        for name, (num, beams) in kinds.items():
            cost = serve(core, executor, num, args.prompt_tokens, args.max_tokens, beams=beams)
            if round_idx:  # the first warms up
                found[name].append(cost)
    report: dict[str, object] = {"benchmark": "choices", "prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens}
    one = found["one"]
    for name, costs in found.items():
        ratio = statistics.median(cost.ms / first.ms for cost, first in zip(costs, one, strict=True))
        ms = statistics.median(cost.ms for cost in costs)
        report[name] = {
            "ms": round(ms, 1),
            "ratio": round(ratio, 3),
            "computed": costs[0].num_computed,
            "blocks": costs[0].num_blocks,
        }
        print(name, report[name])
    report["copy_us"] = round(copy_us(executor, 200), 1)
    report |= {"block_bytes": executor.block_bytes, "staging_us": staging_us(executor, 200)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
