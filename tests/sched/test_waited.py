"""Models that share a machine: a step's wait for others teaches nothing, and steps are as short as they are told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.sched.policies.base import Budget, BudgetView, StepLimits
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.testing import make_request
from penstock.types.plan import Capacity, StepPlan
from penstock.types.result import StepResult, StepTiming

MS = 1_000_000
CAPACITY = Capacity(num_blocks=2001, block_size=16, max_rows=32, max_step_tokens=512, max_model_len=8192)


def work_ns(plan: StepPlan) -> int:
    return 2 * MS + sum(row.query_len for row in plan.rows) * MS // 5


class Asked(Budget):
    num_asked = 0

    def limits(self, view: BudgetView) -> StepLimits:
        self.num_asked += 1
        return StepLimits(view.max_step_tokens)


def test_the_budget_is_asked_though_all_rows_sit_out() -> None:
    """It learns from each step, and one of them has a row after all."""
    budget = Asked()
    scheduler = Scheduler(CAPACITY, make_policies(budget=budget))
    scheduler.add(make_request("one", 2, max_tokens=40), 0)
    for now_ns in range(1, 7):
        plan = scheduler.schedule(now_ns, ({"one"}, ()))
        assert plan is not None
        assert len(plan.rows) == 1
        tokens = {row.request_id: (7,) for row in plan.rows}
        scheduler.commit(plan, StepResult(plan.step_id, tokens, StepTiming(0, 0)), now_ns)
    assert budget.num_asked == 6


def run(
    budget: HoldLatency | str, wait_ns: Callable[[], int] = lambda: 0, most_ns: int = 0, *, num_decodes: int = 8
) -> tuple[list[StepPlan], float]:
    """The plans of long prompts beside decodes, and the pace of prompts that was learnt."""
    policies = make_policies(budget=budget)
    scheduler = Scheduler(CAPACITY, policies, enable_prefix_caching=False, most_step_ns=lambda: most_ns)
    for idx in range(num_decodes):
        scheduler.add(make_request(f"stream-{idx}", 2, max_tokens=4000), 0)
    for idx in range(12):
        scheduler.add(make_request(f"prompt-{idx}", 3000, max_tokens=1, arrival_ns=1), 1)
    now_ns, plans = 1, []
    for _ in range(60):
        plan = scheduler.schedule(now_ns)
        assert plan is not None
        waited_ns = wait_ns()
        now_ns += waited_ns + work_ns(plan)
        tokens = {row.request_id: (7,) for row in plan.rows if row.samples}
        scheduler.commit(plan, StepResult(plan.step_id, tokens, StepTiming(0, 0, waited_ns=waited_ns)), now_ns)
        plans.append(replace(plan, now_ns=0))
    return plans, scheduler._running.prefill_ns_per_token


@pytest.mark.parametrize("num_decodes", [0, 8])
@pytest.mark.parametrize("slo_ms", [0, 26])
def test_plans_and_pace_are_those_without_the_wait(slo_ms: int, num_decodes: int) -> None:
    rng = random.Random(1)
    wanted = run(HoldLatency(slo_itl_ns=slo_ms * MS), num_decodes=num_decodes)
    found = run(HoldLatency(slo_itl_ns=slo_ms * MS), lambda: rng.randrange(40 * MS), num_decodes=num_decodes)
    assert found == wanted


@pytest.mark.parametrize("num_decodes", [0, 8])
def test_steps_keep_the_time_that_they_are_told(num_decodes: int) -> None:
    plans, _ = run(HoldLatency(), most_ns=20 * MS, num_decodes=num_decodes)
    durations_ns = sorted(work_ns(plan) for plan in plans[10:])
    assert durations_ns[-3] <= 22 * MS
    assert durations_ns[len(durations_ns) // 2] >= 16 * MS
    alone, _ = run(HoldLatency(), num_decodes=num_decodes)
    assert max(map(work_ns, alone[10:])) >= 40 * MS


def test_a_lower_target_of_the_user_is_kept() -> None:
    plans, _ = run(HoldLatency(slo_itl_ns=10 * MS), most_ns=20 * MS)
    assert sorted(map(work_ns, plans[10:]))[-3] <= 11 * MS


def test_prompts_do_not_starve_where_a_step_can_not_be_so_short() -> None:
    budget = HoldLatency()
    plans, _ = run(budget, most_ns=MS)
    least = budget.limits(BudgetView(512, 8, 0, None, most_ns=MS)).max_tokens - 8
    assert least >= budget.min_chunk_tokens
    assert all(plan.num_tokens > 8 for plan in plans[:30])


def test_other_budgets_do_what_the_user_asked_for() -> None:
    assert run("decode-first", most_ns=20 * MS) == run("decode-first")
