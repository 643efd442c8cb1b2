"""How much of the KV cache that requests hold has no token in it? By block size, over a run.

    python benchmarks/kv_waste.py [--block-sizes 16 32 64] [--requests 400] [--rows 32]

First turns of ShareGPT (--traces), counted with the model's tokenizer: as they are (conversations of at most 2,048 tokens), and
cut as the workload `sharegpt` of the other benchmarks is (prompts of 512, replies of 200). All are there at the start, and
`rows` run at a time through the real scheduler and KV manager; waste is weighted by step time, which the cost model
gives. Waste is slots held without a token, over slots held; a slot that a step writes has its token during that
step, and a block that several requests hold counts once, as in `penstock_kv_waste_ratio`. The last line is one JSON object. The
numbers do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from workloads import (
    DEFAULT_TRACES,
    MAX_CONVERSATION_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_REPLY_TOKENS,
    Source,
    read_jobs,
    read_tokenizer,
)

from penstock.engine.core import EngineCore
from penstock.kv.pool_map import waste_ratio
from penstock.lab.cost_model import CostModel
from penstock.lab.simulated_executor import EOS_TOKEN_ID, TOKEN_ID, ModelledTimes, SimulatedExecutor
from penstock.lab.workload import Job
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.testing.builders import make_request
from penstock.types.events import Add
from penstock.types.plan import Capacity

MAX_STEP_TOKENS = 512
WORKLOADS = {
    "whole": (MAX_CONVERSATION_TOKENS, MAX_CONVERSATION_TOKENS),
    "sharegpt": (MAX_PROMPT_TOKENS, MAX_REPLY_TOKENS),
}
"""Name -> most prompt and reply tokens."""


class WasteMeter:
    """Slots that requests hold, and those without a token, each integrated over time in nanoseconds."""

    def __init__(self) -> None:
        self.held = 0
        self.empty = 0.0

    def add(self, scheduler: Scheduler, duration_ns: int) -> None:
        kv = scheduler.kv
        held = kv.block_size * (kv.num_total_blocks - kv.pool.num_available) * duration_ns
        self.held += held
        self.empty += held * waste_ratio(kv, scheduler.running.values())

    @property
    def waste(self) -> float:
        return self.empty / self.held


def measure(jobs: Sequence[Job], block_size: int, num_rows: int) -> float:
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    num_blocks = 1 + num_rows * (longest // block_size + 1)
    capacity = Capacity(num_blocks, block_size, num_rows, MAX_STEP_TOKENS, longest)
    scheduler = Scheduler(capacity, make_policies())
    core = EngineCore(scheduler)
    executor = SimulatedExecutor(
        capacity, ModelledTimes(CostModel()), {str(idx): job.num_output_tokens for idx, job in enumerate(jobs)}
    )
    stops = {"max_tokens": longest, "stop_token_ids": (EOS_TOKEN_ID,)}
    prompts = [job.prompt_token_ids or (TOKEN_ID,) * job.num_prompt_tokens for job in jobs]
    core.apply([Add(make_request(str(idx), prompt, **stops)) for idx, prompt in enumerate(prompts)], 0)
    meter, now_ns = WasteMeter(), 0
    while (plan := core.begin(now_ns)) is not None:
        ticket = executor.submit(plan)
        assert ticket.ready_ns is not None, "a simulated step knows when it is done"
        meter.add(scheduler, ticket.ready_ns - now_ns)
        now_ns = ticket.ready_ns
        core.finish(plan, executor.collect(ticket), now_ns)
    return meter.waste


def read_lengths(source: Source, count: int) -> list[Job]:
    """No two prompts share a token: what is shared is full, and would make the waste smaller."""
    return [
        Job(
            arrival_ns=0,
            num_prompt_tokens=text.num_prompt_tokens,
            num_output_tokens=text.num_output_tokens,
            prompt_token_ids=(idx,) * text.num_prompt_tokens,
        )
        for idx, text in enumerate(read_jobs("sharegpt", source, count))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="model whose tokenizer counts")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 64])
    args = parser.parse_args()
    tokenizer = read_tokenizer(resolve(args.tokenizer, default_cache_dir()).path)
    rows: list[dict[str, object]] = []
    for name, (max_prompt, max_reply) in WORKLOADS.items():
        jobs = read_lengths(Source(args.traces, tokenizer, max_prompt, max_reply), args.requests)
        mean = sum(job.num_prompt_tokens + job.num_output_tokens for job in jobs) // len(jobs)
        for size in args.block_sizes:
            row = {"workload": name, "mean_tokens": mean, "block_size": size, "waste": round(measure(jobs, size, args.rows), 4)}
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    print(json.dumps({"benchmark": "kv_waste", "requests": args.requests, "rows": args.rows, "runs": rows}))


if __name__ == "__main__":
    main()
