"""What does the prefix cache cost when it never finds anything? The real engine with it and without it, step by step in turn.

    python benchmarks/prefix_cost.py                                    # 32 tokens in and out, 32 rows, a minute
    python benchmarks/prefix_cost.py --prompt 16 --reply 1

Prompts that have nothing in common, the shorter the dearer: for each block that fills a hash is made and an entry; and what was
kept is overwritten last, so that a block which is given out has left the processor's caches. Two schedulers, each with half
of one executor's blocks, serve rounds of the same requests, a step of the one and a step of the other; a step's cost is the CPU
time of the one thread that does everything, books and kernels.

`cost` is the sum of the medians of each step of a round with the cache, over that without, less 1; `cost_low` and `cost_high`
are the least and the largest of five such figures, each from a fifth of the rounds. `books` is finer, and leaves out what the
caches of the processor do: what the prefix cache adds in the core (admit, plan, commit), over the time of a round. The last
line is one JSON object.
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
from penstock.engine.core import EngineCore
from penstock.models import architectures
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.types.events import Add
from penstock.types.plan import StepPlan
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 512


@dataclass(slots=True)
class StepTime:
    """Nanoseconds of CPU time."""

    total_ns: int
    books_ns: int


class Half:
    """A scheduler with one half of the executor's rows and blocks, of which it knows nothing."""

    def __init__(self, executor: NativeExecutor, half: int, *, enable_prefix_caching: bool) -> None:
        whole = executor.capacity
        num_blocks = (whole.num_blocks - 1) // 2
        capacity = replace(whole, num_blocks=1 + num_blocks, max_rows=whole.max_rows // 2)
        self.core = EngineCore(Scheduler(capacity, make_policies(), enable_prefix_caching=enable_prefix_caching))
        self._executor = executor
        self._first_block = half * num_blocks

    def add(self, requests: Sequence[Request]) -> StepTime:
        begin_ns = time.thread_time_ns()
        self.core.apply([Add(request) for request in requests], 0)
        spent_ns = time.thread_time_ns() - begin_ns
        return StepTime(spent_ns, spent_ns)

    def step(self) -> StepTime | None:
        """None if nothing is left to do."""
        begin_ns = time.thread_time_ns()
        plan = self.core.begin(0)
        copies = self.core.take_block_copies()
        planned_ns = time.thread_time_ns()
        if plan is None:
            return None
        assert not copies, "part of a prompt was found"
        plan = self._in_half(plan)
        submitted_ns = time.thread_time_ns()
        result = self._executor.collect(self._executor.submit(plan))
        computed_ns = time.thread_time_ns()
        self.core.finish(plan, result, 0)
        books_ns = planned_ns - begin_ns + time.thread_time_ns() - computed_ns
        return StepTime(books_ns + computed_ns - submitted_ns, books_ns)

    def _in_half(self, plan: StepPlan) -> StepPlan:
        first = self._first_block
        admits = (replace(admit, block_ids=tuple(first + block for block in admit.block_ids)) for admit in plan.admits)
        rows = (replace(row, new_block_ids=tuple(first + block for block in row.new_block_ids)) for row in plan.rows)
        return replace(plan, admits=tuple(admits), rows=tuple(rows))


def make_requests(numbers: Sequence[int], num_prompt: int, num_reply: int, vocab_size: int) -> list[Request]:
    """One for each number. Prompts of numbers less than the vocabulary apart differ in their first token."""
    sampling = SamplingParams(max_tokens=num_reply, temperature=0.0)

    def prompt(number: int) -> tuple[int, ...]:
        return tuple((number + 31 * k * k) % vocab_size for k in range(num_prompt))

    return [Request(f"r{number}", prompt(number), sampling, arrival_ns=number) for number in numbers]


def run_round(halves: Sequence[Half], requests: Sequence[Sequence[Request]]) -> list[list[StepTime]]:
    """Both halves serve their requests, a step each in turn. The times of each half, step by step."""
    gc.collect()
    times = [[half.add(own)] for half, own in zip(halves, requests, strict=True)]
    while True:
        steps = [half.step() for half in halves]
        if None in steps:
            assert not any(steps), "the halves had different steps"
            return times
        for own, step in zip(times, steps, strict=True):
            assert step is not None
            own.append(step)


def round_ns(rounds: Sequence[Sequence[StepTime]]) -> float:
    """The time of a round, from the median of each of its steps."""
    return sum(statistics.median(step.total_ns for step in steps) for steps in zip(*rounds, strict=True))


def summarise(with_cache: Sequence[Sequence[StepTime]], without: Sequence[Sequence[StepTime]]) -> dict[str, float]:
    usual_ns = round_ns(without)
    parts = [round_ns(with_cache[k::5]) / round_ns(without[k::5]) - 1 for k in range(5)]
    books = [[sum(step.books_ns for step in steps) for steps in rounds] for rounds in (with_cache, without)]
    added_ns = statistics.median(a - b for a, b in zip(*books, strict=True))
    return {
        "rounds": len(without),
        "steps": len(without[0]),
        "round_ms": round(usual_ns / 1e6, 1),
        "cost": round(round_ns(with_cache) / usual_ns - 1, 4),
        "cost_low": round(min(parts), 4),
        "cost_high": round(max(parts), 4),
        "books_without": round(statistics.median(books[1]) / usual_ns, 4),
        "books": round(added_ns / usual_ns, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--reply", type=int, default=32, help="tokens")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=50.0, help="of CPU time, in all rounds")
    parser.add_argument("--blocks", type=int, default=2048, help="of each pool")
    args = parser.parse_args()
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
    run_round((on, off), (requests(num_fill), requests(num_fill)))  # from now on each new block is one that had content
    rounds: tuple[list[list[StepTime]], list[list[StepTime]]] = ([], [])
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < args.seconds or len(rounds[0]) < 5:
        own = (requests(args.rows), requests(args.rows))
        times = run_round((on, off), own) if len(rounds[0]) % 2 else run_round((off, on), own)[::-1]
        for kept, new in zip(rounds, times, strict=True):
            kept.append(new)
        assert not any(request.num_cached_tokens for request in (*own[0], *own[1])), "a prompt was found"
    report = {"benchmark": "prefix_cost", "model": model.name, "variant": executor.variant}
    report |= {"prompt": args.prompt, "reply": args.reply, "rows": args.rows, "blocks": args.blocks}
    print(json.dumps(report | summarise(*rounds)))
    executor.close()


if __name__ == "__main__":
    main()
