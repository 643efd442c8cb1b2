"""What is left of the throughput when the KV cache holds a half or a quarter of what is needed, and what does a tier bring?

    python benchmarks/memory_pressure.py [--requests 400] [--rows 32] [--two-threads]

Requests of log-normal lengths (prompts around 130 tokens, replies around 160; seeded) are all there at the start. The pool has
a half and a quarter of the most that they hold where there is room for all. The real scheduler, KV manager and transfers run
in virtual time; the lab's cost model says how long a step takes. Blocks from the tier arrive by the next step. The prefix cache
is off.
`penstock simulate --vary reserve=... --vary victim=...` compares everything but the tier (docs/budgets.md).

`throughput` is the time of the run with room for all, over this one's. `full` is the share of the pool that requests hold while
others wait for memory. `bound` is the throughput if the pool were full in every step and nothing was computed twice: what the
requests hold over all their steps, in blocks, divided by the pool is the least number of steps. A row costs the same in
every step, so all that a small pool costs is more steps, which read the weights again. `--two-threads` takes two threads'
costs. The numbers do not depend on the machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product

from penstock.clock import VirtualClock
from penstock.engine.transfers import Transfers
from penstock.kv.tiers import Tier
from penstock.lab.cost_model import CostModel
from penstock.lab.simulated_executor import EOS_TOKEN_ID, ModelledTimes, SimulatedExecutor
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import RESERVES
from penstock.storage.host_memory import HostMemory
from penstock.testing import make_core, make_request
from penstock.testing.driver import LateWorker
from penstock.types.events import Add
from penstock.types.plan import Capacity
from penstock.types.stats import RequestStats, StepStats, WaitReason

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
TIER_SLOTS = 100_000
TWO_THREADS = CostModel(
    step_ns=2_700_000, decode_row_ns=210_000, prefill_token_ns=170_000, decode_read_ns=330, prefill_read_ns=140
)
"""Row and token costs are half of one thread's; the step's cost fits README's figures for 1, 8 and 32 clients."""


def oversubscribed(lengths: list[tuple[int, int]], rows: int, cost: CostModel) -> list[dict[str, float | str]]:
    """By reserve, without and with a tier below the pool."""
    free = _run_virtually(lengths, rows * MAX_MODEL_LEN // BLOCK_SIZE, rows, make_policies(), cost, has_tier=False)
    num_block_steps = sum(-(-(prompt + k) // BLOCK_SIZE) for prompt, reply in lengths for k in range(1, reply))
    report: list[dict[str, float | str]] = []
    for factor, reserve, has_tier in product((2, 4), RESERVES, (False, True)):
        num_blocks = -(-int(free["held_blocks"]) // factor)
        run = _run_virtually(lengths, num_blocks, rows, make_policies(reserve=reserve), cost, has_tier=has_tier)
        row: dict[str, float | str] = {"oversubscribed": factor, "reserve": reserve, "tier": has_tier}
        num_more_steps = num_block_steps / num_blocks - free["steps"]
        bound = free["seconds"] / (free["seconds"] + max(0, num_more_steps) * cost.step_ns / 1e9)
        row |= {"throughput": round(free["seconds"] / run["seconds"], 3), "bound": round(bound, 3)} | run
        print(row)
        report.append(row)
    return report


class _LastStep:
    """Keeps the counts of the last step."""

    def on_step(self, stats: StepStats) -> None:
        self.counts = stats.counts

    def on_finish(self, stats: RequestStats) -> None:
        del stats


def _run_virtually(
    lengths: list[tuple[int, int]], num_blocks: int, rows: int, policies: Policies, cost: CostModel, *, has_tier: bool
) -> dict[str, float]:
    capacity = Capacity(1 + num_blocks, BLOCK_SIZE, max_rows=rows, max_step_tokens=512, max_model_len=MAX_MODEL_LEN)
    step = _LastStep()
    tier = Tier(TIER_SLOTS) if has_tier else None
    core = make_core(capacity, policies, observer=step, enable_prefix_caching=False, tier=tier)
    executor = SimulatedExecutor(capacity, ModelledTimes(cost), {f"r{idx}": reply for idx, (_, reply) in enumerate(lengths)})
    clock, worker, kv = VirtualClock(), LateWorker(), core.scheduler.kv
    store = HostMemory(TIER_SLOTS, content_bytes=executor.block_bytes)
    transfers = Transfers(kv, executor, store, clock=clock, worker=worker) if has_tier else None
    requests = [
        make_request(f"r{idx}", prompt, max_tokens=reply, arrival_ns=idx, stop_token_ids=(EOS_TOKEN_ID,))
        for idx, (prompt, reply) in enumerate(lengths)
    ]
    core.apply([Add(request) for request in requests], 0)
    num_held = num_recomputed = num_steps = num_rows = 0
    short_ns = held_ns = 0
    while core.has_work:
        if transfers is not None:
            transfers.arrive()
        plan = core.begin(clock.now_ns())
        if transfers is not None:
            transfers.depart()
            worker.turn()
        if plan is None:
            continue
        num_held_now = kv.num_total_blocks - kv.pool.num_available
        num_held = max(num_held, num_held_now)
        num_steps, num_rows = num_steps + 1, num_rows + len(plan.rows)
        ticket = executor.submit(plan)
        clock.advance_to(ticket.ready_ns or 0)
        core.finish(plan, executor.collect(ticket), clock.now_ns())
        counts = step.counts
        num_recomputed += counts.num_recomputed_tokens
        if counts.waits_for in (WaitReason.MEMORY, WaitReason.LOADING):
            short_ns += clock.now_ns() - plan.now_ns
            held_ns += num_held_now * (clock.now_ns() - plan.now_ns)
    return {
        "computed_twice": round(num_recomputed / sum(prompt + reply - 1 for prompt, reply in lengths), 4),
        "preemptions": sum(request.num_preemptions for request in requests),
        "held_blocks": num_held,
        "full": round(held_ns / max(1, short_ns) / num_blocks, 3),
        "steps": num_steps,
        "rows": round(num_rows / num_steps, 1),
        "seconds": round(clock.now_ns() / 1e9, 3),
    }


def _lengths(num_requests: int) -> list[tuple[int, int]]:
    """(prompt, reply) in tokens."""
    rng = random.Random(0)
    return [
        (min(512, max(4, int(rng.lognormvariate(4.2, 1.2)))), min(512, max(2, int(rng.lognormvariate(4.7, 0.9)))))
        for _ in range(num_requests)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--two-threads", action="store_true")
    args = parser.parse_args()
    runs = oversubscribed(_lengths(args.requests), args.rows, TWO_THREADS if args.two_threads else CostModel())
    print(json.dumps({"benchmark": "memory_pressure", "requests": args.requests, "rows": args.rows, "runs": runs}))


if __name__ == "__main__":
    main()
