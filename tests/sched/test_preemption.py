"""The cost of preemption when memory is short: work is not lost over and over, and every request ends."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched import running
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import RESERVES
from penstock.sched.policies.victims import VICTIMS
from penstock.sched.running import RESUME_GROWTH_TOKENS, peak_growth_tokens
from penstock.testing import make_core, make_request
from penstock.types.events import Add
from penstock.types.plan import Capacity
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming

CHECK_STEPS = 8
"""Every so many steps the core is checked, which takes longer than a step."""
BLOCK_SIZE = 16
NUM_REQUESTS = 48
NUM_ROWS = 12
MAX_TOKENS = 256


@dataclass(frozen=True)
class Run:
    requests: list[Request]
    num_steps: int
    num_computed: int

    @property
    def tax(self) -> float:
        """Positions computed for each one that was needed, less one."""
        return self.num_computed / sum(request.num_tokens - 1 for request in self.requests) - 1

    @property
    def max_preemptions(self) -> int:
        return max(request.num_preemptions for request in self.requests)


def run(policies: Policies, memory: float) -> Run:
    """Replies that end before their limit, over a pool that holds a share of what `NUM_ROWS` mean requests need."""
    rng = random.Random(0)
    lengths = [(rng.randint(4, 200), rng.randint(2, MAX_TOKENS)) for _ in range(NUM_REQUESTS)]
    num_needed = NUM_ROWS * sum(prompt + reply for prompt, reply in lengths) // NUM_REQUESTS // BLOCK_SIZE
    num_blocks = 1 + max(int(num_needed * memory), (200 + MAX_TOKENS) // BLOCK_SIZE)
    core = make_core(Capacity(num_blocks, BLOCK_SIZE, NUM_ROWS, 128, 512), policies, enable_prefix_caching=False)
    ends = {f"r{idx}": reply for idx, (_, reply) in enumerate(lengths)}
    requests = [
        make_request(f"r{idx}", prompt, max_tokens=MAX_TOKENS, arrival_ns=idx, stop_token_ids=(1,))
        for idx, (prompt, _) in enumerate(lengths)
    ]
    core.apply([Add(request) for request in requests], 0)
    by_id = {request.request_id: request for request in requests}
    num_steps = num_computed = 0
    while core.has_work:
        plan = core.begin(num_steps)
        assert plan is not None
        num_steps += 1
        num_computed += plan.num_tokens
        tokens = {
            row.request_id: (int(len(by_id[row.request_id].output_token_ids) + 1 == ends[row.request_id]),)
            for row in plan.rows
            if row.samples
        }
        core.finish(plan, StepResult(plan.step_id, tokens, StepTiming(0, 0)), num_steps)
        if num_steps % CHECK_STEPS == 0:
            core.check()
    core.check()
    return Run(requests, num_steps, num_computed)


def reserve_victim_and_memory() -> Iterator[tuple[str, str, float]]:
    """In the least memory, each pair of policies is tried. `no-evict` has no victims: see the last test."""
    reserves = [reserve for reserve in RESERVES if reserve != "no-evict"]
    yield from product(reserves, VICTIMS, [0.25])
    yield from zip(cycle(reserves), VICTIMS, repeat(0.5))


@pytest.mark.parametrize(("reserve", "victim", "memory"), list(reserve_victim_and_memory()))
def test_work_is_not_lost_over_and_over(reserve: str, victim: str, memory: float) -> None:
    """Each preemption doubles the room that the request waits for, until it is all that anybody can need."""
    result = run(make_policies(reserve=reserve, victim=victim), memory)
    # SGLang's choice takes the longest prompt of equal answers, the dearest to compute again.
    assert result.tax < (0.6 if victim == "least-output" else 0.5)
    assert result.max_preemptions <= 2 + math.log2(MAX_TOKENS / RESUME_GROWTH_TOKENS)
    assert all(request.num_preemptions == 0 for request in result.requests if request.arrival_ns == 0)


def test_without_room_to_resume_work_is_lost_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the law the test above fails."""
    monkeypatch.setattr(running, "blocks_to_resume", lambda view: 0)
    assert run(make_policies(reserve="chunk"), 0.25).tax > 2


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=8))
def test_growth_is_at_its_peak_when_somebody_is_about_to_end(lengths: list[tuple[int, int]]) -> None:
    """Step by step: (tokens that a request has, tokens to its limit)."""
    requests = [make_request(f"r{idx}", num_tokens) for idx, (num_tokens, _) in enumerate(lengths)]
    for request, (num_tokens, num_left) in zip(requests, lengths, strict=True):
        request.max_total_tokens = num_tokens + num_left
    held = [sum(now + step for now, left in lengths if left >= step) for step in range(31)]
    assert peak_growth_tokens(requests) == max(held) - held[0]


@pytest.mark.parametrize("memory", [0.5, 0.25])
def test_who_finds_room_for_everything_is_never_preempted(memory: float) -> None:
    result = run(make_policies(reserve="no-evict"), memory)
    assert result.max_preemptions == 0
    assert result.tax < 0.5
