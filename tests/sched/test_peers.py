"""The presets `vllm` and `sglang`: each test states one rule of the scheduler that it imitates."""

from __future__ import annotations

import pytest

from penstock.sched.policies.base import VictimView
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.testing.hash_executor import HashModel
from penstock.types.events import Add, Command
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming

CAPACITY = Capacity(num_blocks=200, block_size=16, max_rows=16, max_step_tokens=128, max_model_len=512)
A = tuple(range(100, 140))
PROMPTS = {
    "first": A,
    "longer": (*A, *range(10)),
    "equal": A,
    "two blocks": A[:32],
    "differs at 20": (*A[:20], *range(20)),
    "one token": A[:1],
}
HITS_OF_VLLM = {"first": 0, "longer": 32, "equal": 32, "two blocks": 16, "differs at 20": 16, "one token": 0}
"""Whole blocks that earlier requests have or compute, without the prompt's last token."""


def plans_of(
    preset: str, requests: list[Request], capacity: Capacity, later: Request | None = None, after: int = 2
) -> list[StepPlan]:
    """Return the plans of all steps. `later` comes once there are `after`."""
    core, plans = make_core(capacity, make_policies(preset), enable_prefix_caching=False), list[StepPlan]()
    core.apply([Add(request) for request in requests], 0)
    while (plan := core.begin(len(plans))) is not None:
        plans.append(plan)
        core.finish(
            plan, StepResult(plan.step_id, {row.request_id: (7,) for row in plan.rows if row.samples}, StepTiming(0, 1)), 1
        )
        core.check()
        if later is not None and len(plans) == after:
            core.apply([Add(later)], len(plans))
    return plans


def rows(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: row.query_len for row in plan.rows}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("together", [True, False])
def test_vllm_hits_whole_blocks(depth: int, together: bool) -> None:
    core, executor = make_core(CAPACITY, make_policies("vllm")), HashExecutor(CAPACITY, depth=depth)
    requests = [make_request(name, prompt, max_tokens=4) for name, prompt in PROMPTS.items()]
    later: dict[int, list[Command]] = {}
    for idx, request in enumerate(requests):
        later.setdefault(0 if together else 8 * idx, []).append(Add(request))
    outcomes = run_to_completion(core, executor, later=later)
    assert {request.request_id: request.num_cached_tokens for request in requests} == HITS_OF_VLLM
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=HashModel(), max_model_len=512)
        assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids


def test_vllm_fills_the_step_in_order_of_admission() -> None:
    requests = [make_request(f"r{idx}", length, max_tokens=4) for idx, length in enumerate((100, 150, 50))]
    plans = plans_of("vllm", requests, CAPACITY)
    assert [rows(plan) for plan in plans[:3]] == [
        {"r0": 100, "r1": 28},
        {"r0": 1, "r1": 122, "r2": 5},
        {"r0": 1, "r1": 1, "r2": 45},
    ]


def test_vllm_preempts_the_last_and_admits_nobody_in_that_step() -> None:
    """The two take six of seven blocks, and each needs one more for its 49th token."""
    capacity = Capacity(num_blocks=8, block_size=16, max_rows=4, max_step_tokens=128, max_model_len=96)
    requests = [make_request(f"r{idx}", 48, max_tokens=20) for idx in range(2)]
    plans = plans_of("vllm", requests, capacity, later=make_request("small", 8, max_tokens=2), after=1)
    assert [rows(plan) for plan in plans[:2]] == [{"r0": 48, "r1": 48}, {"r0": 1}]
    joined = [admit.request_id for plan in plans[1:] for admit in plan.admits]
    assert joined == ["r1", "small"], "the preempted request is the head of the queue"


def test_sglang_computes_prompts_alone_and_first() -> None:
    requests = [make_request("r0", 100, max_tokens=6), make_request("r1", 150, max_tokens=6)]
    plans = plans_of("sglang", requests, CAPACITY, later=make_request("late", 20, max_tokens=2))
    assert [rows(plan) for plan in plans[:4]] == [
        {"r0": 100, "r1": 28},
        {"r1": 122},
        {"late": 20},
        {"r0": 1, "r1": 1, "late": 1},
    ]


def test_sglang_retracts_the_shortest_answer_of_the_longest_prompt() -> None:
    """The last that came, and the one with the fewest computed tokens, are others."""
    sizes = {"long answer": (8, 9), "short prompt": (40, 2), "long prompt": (60, 2), "last": (50, 3)}
    requests = [make_request(name, prompt, arrival_ns=idx) for idx, (name, (prompt, _)) in enumerate(sizes.items())]
    for request in requests:
        request.output_token_ids.extend(range(sizes[request.request_id][1]))
    view = VictimView(requests, 1, lambda _: 1, lambda request: request.num_tokens, prefill_ns_per_token=1.0)
    assert make_policies("sglang").victim.choose(view).request_id == "long prompt"
