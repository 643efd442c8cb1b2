"""How does the `itl` budget follow a change of load? Steps around two changes, under a virtual clock.

    python benchmarks/budgets.py

The real scheduler with `--slo-itl 30ms`, beside prompts of 4,000 tokens without end: 8 streams, then 32, then 8. A step costs
what it costs a model of 135M parameters on two cores: 2 ms, 0.4 ms for each decode, 0.2 ms for each token of a prompt and 0.1
us for each token before it. Nothing is computed, so the numbers are exact and do not depend on the machine. For costs and
gains on a workload, use `penstock simulate --vary budget=...` (docs/budgets.md). The last line is one JSON object."""

from __future__ import annotations

import json

from penstock.engine.core import EngineCore
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.presets import make_policies
from penstock.testing import make_core, make_request
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity, StepPlan
from penstock.types.result import StepResult, StepTiming

MS = 1_000_000
CAPACITY = Capacity(num_blocks=8001, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=8192)
LONG_TOKENS = 512
"""Longer prompts count as long."""
NO_TIME = StepTiming(0, 0)
JOIN_STEP, LEAVE_STEP, NUM_STEPS = 120, 240, 360


def cost_ns(plan: StepPlan) -> int:
    total = 2.0 * MS
    for row in plan.rows:
        if row.query_len == 1:
            total += 0.4 * MS
        else:
            total += row.query_len * (0.2 * MS + 100 * (row.context_len + row.query_len / 2))
    return int(total)


def sampled(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, {row.request_id: (7,) for row in plan.rows if row.samples}, NO_TIME)


def change(slo_ms: int = 30) -> list[dict[str, float]]:
    """Every fourth step around the changes: decodes, prefill tokens, duration."""
    budget = HoldLatency(slo_itl_ns=slo_ms * MS, long_prefill_token_threshold=LONG_TOKENS)
    core = make_core(CAPACITY, make_policies(budget=budget), enable_prefix_caching=False)
    core.apply([Add(make_request(f"prompt-{idx}", 4000, max_tokens=1, arrival_ns=idx + 1)) for idx in range(60)], 0)
    _join(core, range(8), 0)
    now_ns, rows = 0, []
    for number in range(NUM_STEPS):
        if number == JOIN_STEP:
            _join(core, range(8, 32), now_ns)
        if number == LEAVE_STEP:
            core.apply([Abort(f"stream-{idx}") for idx in range(8, 32)], now_ns)
        plan = core.begin(now_ns)
        assert plan is not None
        now_ns += cost_ns(plan)
        core.finish(plan, sampled(plan), now_ns)
        num_decodes = sum(row.query_len == 1 for row in plan.rows)
        rows.append(
            {"step": number, "decodes": num_decodes, "prefill": plan.num_tokens - num_decodes, "ms": cost_ns(plan) / MS}
        )
    shown = [*range(8), *range(JOIN_STEP - 2, JOIN_STEP + 10), *range(LEAVE_STEP - 2, LEAVE_STEP + 6)]
    return [{key: round(value, 1) for key, value in rows[number].items()} for number in shown]


def _join(core: EngineCore, numbers: range, now_ns: int) -> None:
    core.apply([Add(make_request(f"stream-{idx}", 2, max_tokens=4000, arrival_ns=0)) for idx in numbers], now_ns)


def main() -> None:
    rows = change()
    for row in rows:
        print(row)
    print(json.dumps({"benchmark": "budgets", "change": rows}))


if __name__ == "__main__":
    main()
