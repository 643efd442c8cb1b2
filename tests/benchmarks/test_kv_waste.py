"""Slots without a token, counted by hand."""

import kv_waste
import pytest
from kv_waste import WasteMeter, measure

from penstock.lab.workload import Job
from penstock.testing import make_request, make_scheduler
from penstock.types.result import StepResult, StepTiming


def test_a_slot_that_a_step_writes_has_its_token_during_that_step():
    scheduler = make_scheduler(block_size=16)
    scheduler.add(make_request("a", 20, max_tokens=5), 0)
    meter = WasteMeter()
    plan = scheduler.schedule(0)
    meter.add(scheduler, 10)
    assert meter.waste == 12 / 32, "two blocks hold 20 tokens"
    scheduler.commit(plan, StepResult(plan.step_id, {"a": (7,)}, StepTiming(0, 0)), 1)
    scheduler.schedule(1)
    meter.add(scheduler, 30)
    assert meter.waste == pytest.approx((12 * 10 + 11 * 30) / (32 * 40)), "21 tokens, for three times as long"


def test_a_shared_block_counts_once():
    scheduler = make_scheduler(block_size=16)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 20, max_tokens=5), 0)
        plan = scheduler.schedule(0)
        scheduler.commit(plan, StepResult(plan.step_id, {row.request_id: (7,) for row in plan.rows}, StepTiming(0, 0)), 1)
    meter = WasteMeter()
    meter.add(scheduler, 1)
    table_a, table_b = (scheduler.kv.block_table(name) for name in ("a", "b"))
    assert table_a[0] == table_b[0]
    assert meter.held == 3 * 16


def test_smaller_blocks_waste_less():
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=100 + 7 * idx, num_output_tokens=20, prompt_token_ids=(idx,) * (100 + 7 * idx))
        for idx in range(8)
    ]
    small, large = (kv_waste.measure(jobs, size, 4) for size in (16, 64))
    assert 0.01 < small < large / 2
    assert measure(jobs, 1, 4) == 0.0
