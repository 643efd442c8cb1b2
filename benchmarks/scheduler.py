"""What does one step of scheduling cost on the host? Plan and commit, with 256 running and 1,000 waiting requests.

    python benchmarks/scheduler.py [--steps 400] [--running 256] [--waiting 1000] [--order fcfs] [--eviction lru] [--journal]

Three situations: `decode` (all rows full, nobody can join), `no_memory` (a row is free, but not the memory for the
next request, which is therefore looked up in every step) and `churn` (replies of 32 tokens: eight requests end and
eight join in each step). `--journal` records everything that `GET /v1/requests/{id}` reports.
Median microseconds a step: `begin` plans it and `finish` commits it. The mean CPU time includes garbage collection
and other occasional work.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from printed import origin, table

from penstock.kv.eviction import EVICTIONS
from penstock.obs.explain.journal import Journal
from penstock.sched.policies.base import AdmissionView
from penstock.sched.policies.orders import ORDERS
from penstock.sched.policies.presets import make_policies
from penstock.testing import make_core, make_request
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan
from penstock.types.result import StepResult, StepTiming

NO_TIME = StepTiming(0, 0)
PROMPT_TOKENS = 100
MAX_TOKENS = 3000
CHURN_TOKENS = 32
BLOCK_SIZE = 16
MAX_STEP_TOKENS = 8192
NUM_TENANTS = 9


def main() -> None:
    arguments = _parse()
    lines = [_summary(name, list(_measure(name, arguments))) for name in ("decode", "no_memory", "churn")]
    print(origin())
    print(table(["us a step", "begin", "finish", "both", "p90", "least", "mean CPU time"], lines))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Host cost of one scheduling step.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--order", choices=tuple(ORDERS), default="fcfs")
    parser.add_argument("--eviction", choices=tuple(EVICTIONS), default="lru")
    parser.add_argument("--journal", action="store_true")
    return parser.parse_args()


def _measure(situation: str, arguments: argparse.Namespace) -> Iterator[tuple[float, float, float]]:
    """(begin, finish, CPU time of both) in microseconds of each step, after all rows have been filled."""
    running, is_churn = arguments.running, situation == "churn"
    num_warm_up = PROMPT_TOKENS * running // MAX_STEP_TOKENS + 2 * CHURN_TOKENS
    num_steps = num_warm_up + arguments.steps
    capacity = _capacity(running + (situation == "no_memory"), running)
    journal = Journal(1000) if arguments.journal else None
    core = make_core(
        capacity,
        make_policies(order=arguments.order, eviction=arguments.eviction, reserve=NotForMore(running)),
        journal=journal,
    )
    requests = [
        make_request(
            f"request-{idx}",
            [idx, *range(1, PROMPT_TOKENS)],
            arrival_ns=idx,
            tenant=str(idx % NUM_TENANTS),
            priority=idx % 3,
            # The first replies end one after another, so that later steps lose and gain equally many requests.
            max_tokens=min(CHURN_TOKENS, 1 + idx * CHURN_TOKENS // running) if is_churn else MAX_TOKENS,
        )
        for idx in range(running + arguments.waiting + is_churn * 2 * num_steps * running // CHURN_TOKENS)
    ]
    core.apply([Add(request) for request in requests], 0)
    for step in range(num_steps):
        started, cpu_ns = time.perf_counter_ns(), -time.thread_time_ns()
        plan = core.begin(step)
        planned, cpu_ns = time.perf_counter_ns(), cpu_ns + time.thread_time_ns()
        assert plan is not None
        result = StepResult(plan.step_id, _tokens(plan), NO_TIME)
        computed, cpu_ns = time.perf_counter_ns(), cpu_ns - time.thread_time_ns()
        core.finish(plan, result, step)
        ended, cpu_ns = time.perf_counter_ns(), cpu_ns + time.thread_time_ns()
        if step >= num_warm_up:
            yield (planned - started) / 1e3, (ended - computed) / 1e3, cpu_ns / 1e3
    assert core.num_waiting >= arguments.waiting


def _capacity(max_rows: int, running: int) -> Capacity:
    max_model_len = PROMPT_TOKENS + MAX_TOKENS
    return Capacity(
        num_blocks=1 + running * -(-max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_rows=max_rows,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True)
class NotForMore:
    """A reserve that admits up to `max_running` requests."""

    max_running: int

    def required_blocks(self, view: AdmissionView) -> int:
        return 0 if view.num_running < self.max_running else view.num_total_blocks + 1


def _tokens(plan: StepPlan) -> dict[str, tuple[int, ...]]:
    return {row.request_id: (7,) for row in plan.rows if row.samples}


def _summary(name: str, steps: list[tuple[float, float, float]]) -> list[str]:
    gc.collect()
    begin, finish, cpu = zip(*steps, strict=True)
    totals = [sum(step[:2]) for step in steps]
    figures = [*map(statistics.median, (begin, finish, totals)), statistics.quantiles(totals, n=10)[-1], min(totals)]
    return [name, *(f"{us:.1f}" for us in (*figures, statistics.fmean(cpu)))]


if __name__ == "__main__":
    main()
