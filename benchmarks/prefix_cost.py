"""What does the prefix cache cost when it never finds anything? The real engine with it and without it, in turn.

    python benchmarks/prefix_cost.py                                    # 32 tokens in and out, 32 rows, a minute
    python benchmarks/prefix_cost.py --prompt 16 --reply 1

Prompts share nothing, and short ones cost most: each full block is hashed and indexed, and the least recently used block is
reused first, so an allocated block has left the processor's caches. Two schedulers, each with half
of one executor's blocks, serve rounds of such requests in turn; a round's cost is the CPU time of the one thread that does
everything, bookkeeping and kernels.

`cost` is the median over rounds of the time with the cache over that without, less 1, and its quartiles. `core` is more
precise, and ignores processor caches: the time that the prefix cache adds in the core (admit, plan, commit), over a round's
time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.testing import make_core, make_request
from penstock.types.events import Add
from penstock.types.plan import StepPlan
from penstock.types.request import Request

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 512


@dataclass(slots=True)
class Spent:
    """Nanoseconds of CPU time for a round of requests."""

    total_ns: int
    core_ns: int


class Half:
    """A scheduler for half of the executor's rows and blocks, unaware of the other half."""

    def __init__(self, executor: NativeExecutor, half: int, *, enable_prefix_caching: bool) -> None:
        whole = executor.capacity
        num_blocks = (whole.num_blocks - 1) // 2
        capacity = replace(whole, num_blocks=1 + num_blocks, max_rows=whole.max_rows // 2)
        self.core = make_core(capacity, enable_prefix_caching=enable_prefix_caching)
        self._executor = executor
        self._first_block = half * num_blocks

    def serve(self, requests: Sequence[Request]) -> Spent:
        """All of them, to their ends."""
        begin_ns = time.thread_time_ns()
        self.core.apply([Add(request) for request in requests], 0)
        total_ns = core_ns = time.thread_time_ns() - begin_ns
        while self.core.has_work:
            begin_ns = time.thread_time_ns()
            plan = self.core.begin(0)
            assert plan is not None, "there is work"
            assert not self.core.scheduler.kv.take_block_copies(), "part of a prompt was found"
            planned_ns = time.thread_time_ns()
            plan = self._in_half(plan)
            submitted_ns = time.thread_time_ns()
            result = self._executor.collect(self._executor.submit(plan))
            computed_ns = time.thread_time_ns()
            self.core.finish(plan, result, 0)
            step_ns = planned_ns - begin_ns + time.thread_time_ns() - computed_ns
            core_ns += step_ns
            total_ns += step_ns + computed_ns - submitted_ns
        return Spent(total_ns, core_ns)

    def _in_half(self, plan: StepPlan) -> StepPlan:
        first = self._first_block
        admits = (replace(admit, block_ids=tuple(first + block for block in admit.block_ids)) for admit in plan.admits)
        rows = (replace(row, new_block_ids=tuple(first + block for block in row.new_block_ids)) for row in plan.rows)
        return replace(plan, admits=tuple(admits), rows=tuple(rows))


def make_requests(numbers: Sequence[int], num_prompt: int, num_reply: int, vocab_size: int) -> list[Request]:
    """One for each number. Prompts of numbers less than the vocabulary apart differ in their first token."""
    prompts = {number: [(number + 31 * k * k) % vocab_size for k in range(num_prompt)] for number in numbers}
    return [make_request(f"r{number}", prompts[number], max_tokens=num_reply, arrival_ns=number) for number in numbers]


def summarise(with_cache: Sequence[Spent], without: Sequence[Spent]) -> dict[str, float]:
    """The figures of rounds that were served side by side."""
    usual_ns = statistics.median(spent.total_ns for spent in without)
    pairs = list(zip(with_cache, without, strict=True))
    low, middle, high = statistics.quantiles((on.total_ns / off.total_ns - 1 for on, off in pairs), n=4)
    added_ns = statistics.median(on.core_ns - off.core_ns for on, off in pairs)
    figures = {"round_ms": usual_ns / 1e6, "cost": middle, "cost_low": low, "cost_high": high, "core": added_ns / usual_ns}
    return {"rounds": len(without)} | {name: round(value, 5) for name, value in figures.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--reply", type=int, default=32, help="tokens")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=50.0, help="of CPU time, in all rounds")
    parser.add_argument("--blocks", type=int, default=2048, help="of each pool")
    args = parser.parse_args(words)
    model = load_model(resolve(args.model, default_cache_dir()))
    executor = NativeExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=1 + 2 * args.blocks,
        block_size=BLOCK_SIZE,
        max_rows=2 * args.rows,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=args.prompt + args.reply + BLOCK_SIZE,
        num_threads=1,
    )
    on, off = (Half(executor, half, enable_prefix_caching=half == 0) for half in (0, 1))
    numbers = count()

    def requests(num_requests: int) -> list[Request]:
        return make_requests(list(islice(numbers, num_requests)), args.prompt, args.reply, model.spec.vocab_size)

    num_fill = -(-args.blocks // -(-(args.prompt + args.reply - 1) // BLOCK_SIZE))  # the last token is never computed
    for half in (on, off):
        half.serve(requests(num_fill))  # from now on every allocated block is a reused one
    spent: dict[Half, list[Spent]] = {on: [], off: []}
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < args.seconds or len(spent[on]) < 5:
        for half in (on, off) if len(spent[on]) % 2 else (off, on):
            asked = requests(args.rows)
            gc.collect()
            spent[half].append(half.serve(asked))
            assert not any(request.num_cached_tokens for request in asked), "a prompt was found"
    report = {"benchmark": "prefix_cost", "model": model.name, "variant": executor.variant}
    report |= {"prompt": args.prompt, "reply": args.reply, "rows": args.rows, "blocks": args.blocks}
    print(json.dumps(report | summarise(spent[on], spent[off])))
    executor.close()


if __name__ == "__main__":
    main()
