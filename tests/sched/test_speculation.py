"""Rows that get several tokens in one step: answers are those of one token at a time, in fewer steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from penstock.engine.core import EngineCore
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.sched.scheduler import Scheduler
from penstock.testing import Driver, HashExecutor, HashMatcher, Outcome, expected_tokens, make_request
from penstock.types.events import Add
from penstock.types.plan import Capacity, RowPlan, StepPlan
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult, StepTiming
from penstock.types.sampling import BeamParams
from stepwise import EOS, MODEL

CAPACITY = Capacity(num_blocks=60, block_size=4, max_rows=6, max_step_tokens=24, max_model_len=80)
NO_TIME = StepTiming(0, 0)


@dataclass(frozen=True)
class UpTo:
    """A speculation by which each row may get so many tokens."""

    num_tokens: int

    def max_samples(self, request: Request) -> int:
        return self.num_tokens


def make(num_tokens: int, capacity: Capacity = CAPACITY, *, seed: int = 0, depth: int = 1) -> Driver:
    policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
    scheduler = Scheduler(capacity, policies, speculation=UpTo(num_tokens) if num_tokens > 1 else None)
    return Driver(EngineCore(scheduler), HashExecutor(capacity, model=MODEL, seed=seed, depth=depth))


def mixed_requests() -> list[Request]:
    """Some end by a stop token, some by a limit; they share prefixes, and lengths of prompts differ."""
    return [
        make_request(
            f"r{idx}",
            [7] * (idx % 5 + 2) + [10 + idx % 3] * (idx % 7),
            arrival_ns=idx,
            max_tokens=5 + 9 * idx % 40,
            stop_token_ids=(EOS,) if idx % 3 else (),
            min_tokens=idx % 4,
            logprobs=2 if idx % 2 else None,
        )
        for idx in range(14)
    ]


def answer(request: Request, capacity: Capacity = CAPACITY) -> tuple[int, ...]:
    return expected_tokens(
        request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=capacity.max_model_len
    ).token_ids


def finish(driver: Driver, requests: list[Request]) -> dict[str, Outcome]:
    driver.turn(*map(Add, requests))
    while driver.core.has_work:
        driver.turn()
        driver.core.check()
    return driver.outcomes


def row_of(plan: StepPlan | None) -> RowPlan:
    assert plan is not None
    (row,) = plan.rows
    return row


@pytest.mark.parametrize("num_blocks", [17, 60])
@pytest.mark.parametrize("num_tokens", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_one_token_at_a_time(num_tokens: int, seed: int, num_blocks: int) -> None:
    """Also where requests are preempted, and blocks with wrong guesses are shared, evicted and written again."""
    capacity = Capacity(num_blocks, 4, 6, 24, 80)
    driver, plain = make(num_tokens, capacity, seed=seed), make(1, capacity, seed=seed)
    requests, others = mixed_requests(), mixed_requests()
    outcomes, plain_outcomes = finish(driver, requests), finish(plain, others)
    for request in requests:
        told, wanted = outcomes[request.request_id], plain_outcomes[request.request_id]
        assert tuple(told.token_ids) == tuple(wanted.token_ids) == answer(request, capacity)
        assert (told.finish_reason, told.last.stop_reason) == (wanted.finish_reason, wanted.last.stop_reason)
        entries = [entry for event in told.events for entry in event.logprobs]
        assert entries == [entry for event in wanted.events for entry in event.logprobs]
    if num_blocks == CAPACITY.num_blocks:
        assert len(driver.plans) < 0.8 * len(plain.plans)
    else:
        assert max(request.num_preemptions for request in (*requests, *others)) > 0
    kv = driver.core.scheduler.kv
    assert kv.pool.num_available == kv.num_total_blocks


def begun(request: Request, num_tokens: int, capacity: Capacity = CAPACITY) -> EngineCore:
    """A core in which a request has its first token."""
    core = make(num_tokens, capacity).core
    core.apply([Add(request)], 0)
    plan = core.begin(0)
    row = row_of(plan)
    assert plan is not None
    assert row.samples == 1, "a prompt's last row gets one"
    core.finish(plan, StepResult(0, {"a": (11,)}, NO_TIME), 1)
    return core


def test_a_row_has_blocks_for_all_that_it_may_get() -> None:
    core = begun(make_request("a", 6, max_tokens=30), 7)
    plan = core.begin(1)
    row = row_of(plan)
    assert plan is not None
    assert (row.context_len, row.query_len, row.samples, len(row.new_block_ids)) == (6, 1, 7, 2)
    assert plan.num_tokens == 7
    (event,) = core.finish(plan, StepResult(1, {"a": (12, 13, 14)}, NO_TIME), 2)
    assert event.token_ids == (12, 13, 14)
    row = row_of(core.begin(2))
    assert (row.context_len, row.query_len, row.samples, row.new_block_ids) == (9, 1, 7, ()), (
        "it kept the blocks of wrong guesses"
    )
    core.check()


def test_what_comes_after_the_end_of_a_request_is_left_out() -> None:
    request = make_request("a", 6, max_tokens=30, stop_token_ids=(EOS,))
    core = begun(request, 7)
    plan = core.begin(1)
    assert plan is not None
    (event,) = core.finish(plan, StepResult(1, {"a": (12, EOS, 14, 15)}, NO_TIME), 2)
    assert (event.token_ids, event.finish_reason, event.stop_reason) == ((12, EOS), FinishReason.STOP, EOS)
    assert request.output_token_ids == [11, 12, EOS]
    core.check()
    assert not core.has_work


def test_a_stop_token_counts_after_min_tokens_only() -> None:
    core = begun(make_request("a", 6, max_tokens=30, stop_token_ids=(EOS,), min_tokens=3), 7)
    plan = core.begin(1)
    assert plan is not None
    (event,) = core.finish(plan, StepResult(1, {"a": (EOS, 12, EOS, 14)}, NO_TIME), 2)
    assert event.token_ids == (EOS, 12, EOS)


def test_no_row_may_get_more_than_its_request() -> None:
    core = begun(make_request("a", 6, max_tokens=4), 7)
    plan = core.begin(1)
    assert row_of(plan).samples == 3
    assert plan is not None
    (event,) = core.finish(plan, StepResult(1, {"a": (12, 13, 14)}, NO_TIME), 2)
    assert event.finish_reason is FinishReason.LENGTH


def test_every_decode_has_its_token_before_another_has_two() -> None:
    driver = make(7, Capacity(60, 4, 6, 8, 80))
    requests = [make_request(f"r{idx}", [idx], max_tokens=30) for idx in range(5)]
    driver.turn(*map(Add, requests))
    plan = driver.turn()
    assert plan is not None
    assert [row.samples for row in plan.rows] == [4, 1, 1, 1, 1]
    assert plan.num_tokens == 8


@pytest.mark.parametrize("token_ids", [(), (1, 2, 3, 4)])
def test_more_or_fewer_tokens_than_planned_are_an_error(token_ids: tuple[int, ...]) -> None:
    core = begun(make_request("a", 6, max_tokens=30), 3)
    plan = core.begin(1)
    assert plan is not None
    with pytest.raises(ValueError, match=f"got {len(token_ids)} tokens, of 1 to 3"):
        core.finish(plan, StepResult(1, {"a": token_ids}, NO_TIME), 2)


def test_grammars_and_beams_get_one_at_a_time() -> None:
    driver = make(7)
    beams = BeamParams(width=2)
    search = [make_request(f"b{idx}", [5, 6], max_tokens=6, beams=beams, logprobs=2) for idx in range(2)]
    for request in search:
        request.parent_id = "b"
    matcher = HashMatcher(MODEL.vocab_size)
    follower = make_request("g", [8, 9], max_tokens=6, matcher=matcher)
    driver.turn(*map(Add, [*search, follower]))
    while driver.core.has_work:
        plan = driver.turn()
        assert plan is not None
        assert max(row.samples for row in plan.rows) == 1
        driver.core.check()


def test_recurrent_state_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="a model with recurrent state can't speculate"):
        make(3, replace(CAPACITY, has_state=True))


def test_no_step_is_planned_ahead() -> None:
    driver = make(3, depth=2)
    driver.core.apply([Add(make_request("a", 6, max_tokens=8))], 0)
    assert driver.core.begin(0) is not None
    assert driver.core.begin(0) is None, "nobody knows how many tokens the row gets"
