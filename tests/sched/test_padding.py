"""Batches as rectangles: what padding costs, when it ends, and that nobody is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.sched.policies.gates import Dynamic, Static
from penstock.sched.policies.presets import make_policies
from penstock.testing import Driver, HashExecutor, Outcome, expected_tokens, make_core, make_request
from penstock.types.events import Abort, Add
from penstock.types.plan import PaddingId, StepPlan
from penstock.types.request import FinishReason, Request
from penstock.types.stats import RequestStats, StepStats


class Recorder:
    """Keeps the steps' numbers."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_finish(self, stats: RequestStats) -> None: ...


def make_driver(gate: Static | Dynamic, *requests: Request, **options: Any) -> tuple[Driver, Recorder]:
    recorder = Recorder()
    defaults = {"max_model_len": 200, "block_size": 4, "num_blocks": 101}
    core = make_core(policies=make_policies(gate=gate), observer=recorder, **(defaults | options))
    driver = Driver(core, HashExecutor(core.scheduler.capacity))
    core.apply([Add(request) for request in requests], 0)
    return driver, recorder


def finish(driver: Driver) -> dict[str, Outcome]:
    while driver.core.has_work:
        if driver.turn() is None:
            wakeup_ns = driver.core.next_wakeup_ns(driver.clock.now_ns())
            assert wakeup_ns is not None
            driver.clock.advance_to(wakeup_ns)
        driver.core.check()
    return driver.outcomes


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """Rows of padding have an empty name."""
    assert plan is not None
    rows = [(row.request_id, row.context_len, row.query_len) for row in plan.rows]
    return [("" if isinstance(name, PaddingId) else name, context_len, query_len) for name, context_len, query_len in rows]


def test_a_static_batch_computes_a_rectangle() -> None:
    """Three prompts of 3, 8 and 5 tokens, answers of 6, 2 and 4: as many positions as 3 * (8 + 6 - 1)."""
    lengths = {"a": (3, 6), "b": (8, 2), "c": (5, 4)}
    requests = [make_request(name, prompt, max_tokens=answer) for name, (prompt, answer) in lengths.items()]
    driver, recorder = make_driver(Static(3), *requests, enable_prefix_caching=False)
    finish(driver)
    num_real = sum(prompt + answer - 1 for prompt, answer in lengths.values())
    assert [step.counts.num_tokens for step in recorder.steps] == [24, 3, 3, 3, 3, 3]
    assert sum(step.counts.num_padding_tokens for step in recorder.steps) == 3 * (8 + 6 - 1) - num_real
    assert [step.counts.num_rows for step in recorder.steps] == [3, 3, 2, 2, 1, 1], "rows of padding serve nobody"
    assert sum(step.counts.num_sampled_tokens for step in recorder.steps) == 6 + 2 + 4
    executor = driver.executor
    assert isinstance(executor, HashExecutor)
    assert executor.num_padding_tokens == 3 * (8 + 6 - 1) - num_real


def test_the_plans_of_a_batch() -> None:
    requests = [make_request("a", 2, max_tokens=1), make_request("b", 4, max_tokens=3), make_request("c", 1)]
    driver, _ = make_driver(Static(2), *requests)
    assert shape(driver.turn()) == [("a", 0, 2), ("b", 0, 4), ("", 0, 2)]
    assert shape(driver.turn()) == [("b", 4, 1), ("", 2, 1)], "the row of a goes on"
    plan = driver.turn()
    assert shape(plan) == [("b", 5, 1), ("", 3, 1)]
    assert driver.turn() is None, "c waits for a second"
    assert driver.core.next_wakeup_ns(0) == 2_000_000_000
    driver.clock.advance_to(2_000_000_000)
    plan = driver.turn()
    assert shape(plan) == [("c", 0, 1)]
    assert plan is not None
    assert sum(isinstance(name, PaddingId) for name in plan.releases) == 1


def test_a_dynamic_batch_is_padded_to_its_bucket() -> None:
    requests = [make_request("a", 3, max_tokens=2), make_request("b", 5, max_tokens=2), make_request("long", 9, max_tokens=2)]
    driver, recorder = make_driver(Dynamic(2, length_buckets=(8, 16)), *requests, enable_prefix_caching=False)
    finish(driver)
    assert [step.counts.num_tokens for step in recorder.steps] == [16, 2, 16, 1]


def test_padding_stays_within_what_requests_may_have() -> None:
    driver, recorder = make_driver(Dynamic(2, length_buckets=(500,)), make_request("a", 10, max_tokens=1), max_step_tokens=512)
    finish(driver)
    assert [step.counts.num_tokens for step in recorder.steps] == [199]


def test_padding_comes_before_its_prompt_in_chunks_of_the_budget() -> None:
    requests = [make_request("a", 20, max_tokens=1), make_request("b", 5, max_tokens=1)]
    driver, _ = make_driver(Static(2), *requests, max_step_tokens=8, enable_prefix_caching=False)
    plans = [shape(driver.turn()) for _ in range(6)]
    assert plans[:2] == [[("a", 0, 8)], [("a", 8, 8)]]
    assert plans[2] == [("a", 16, 4), ("", 0, 4)]
    assert plans[3] == [("", 4, 7), ("", 20, 1)], "the row of a takes its token first"
    assert plans[4] == [("b", 0, 3), ("", 11, 4), ("", 21, 1)]
    assert plans[5] == [("b", 3, 2), ("", 22, 1)]


def test_a_row_of_padding_at_the_longest_length_begins_again() -> None:
    requests = [make_request("a", 18, max_tokens=1), make_request("b", 2, max_tokens=17)]
    driver, _ = make_driver(Static(2), *requests, max_model_len=20)
    outcomes = finish(driver)
    assert len(outcomes["b"].token_ids) == 17


def test_a_cancelled_request_leaves_its_row_to_the_batch() -> None:
    requests = [make_request("a", 2, max_tokens=9), make_request("b", 2, max_tokens=3)]
    driver, _ = make_driver(Static(2), *requests)
    driver.turn()
    assert shape(driver.turn(Abort("a"))) == [("b", 2, 1), ("", 2, 1)]
    assert finish(driver)["b"].finish_reason is FinishReason.LENGTH


def test_who_is_cancelled_before_it_begins_has_no_row() -> None:
    requests = [make_request("a", 8, max_tokens=3), make_request("b", 3, max_tokens=3)]
    driver, _ = make_driver(Static(2), *requests, max_step_tokens=10)
    assert shape(driver.turn()) == [("a", 0, 8), ("", 0, 2)]
    assert shape(driver.turn(Abort("b"))) == [("a", 8, 1)]
    finish(driver)


def test_a_batch_survives_a_lack_of_memory() -> None:
    requests = [make_request(f"r{idx}", [idx + 1] * 6, max_tokens=20, arrival_ns=idx) for idx in range(4)]
    driver, recorder = make_driver(Static(4), *requests, num_blocks=11, max_rows=8)
    outcomes = finish(driver)
    assert sum(step.counts.num_preemptions for step in recorder.steps) > 0
    for request in requests:
        expected = expected_tokens(
            request.prompt_token_ids, request.sampling, model=HashExecutor().model, max_model_len=200
        ).token_ids
        assert tuple(outcomes[request.request_id].token_ids) == expected


def test_ids_of_padding_are_values_and_equal_no_request() -> None:
    assert PaddingId("a") == PaddingId("a") != PaddingId("b")
    text, padding = "a", PaddingId("a")
    assert text != padding
    assert padding != text
    rows: dict[str, int] = {"a": 1, PaddingId("a"): 2}
    assert (rows["a"], rows[PaddingId("a")], len(rows)) == (1, 2, 2)


def test_a_users_id_may_read_like_that_of_padding() -> None:
    """Both rows are there at one time, and each has its own tokens."""
    lengths = {"a": (2, 1), "padding 0 of a": (4, 5)}
    requests = [make_request(name, prompt, max_tokens=answer) for name, (prompt, answer) in lengths.items()]
    driver, _ = make_driver(Static(2), *requests)
    outcomes = finish(driver)
    names = [row.request_id for plan in driver.plans for row in plan.rows]
    assert len([name for name in names if str.__eq__(name, "padding 0 of a")]) > names.count("padding 0 of a") > 0
    for request in requests:
        expected = expected_tokens(
            request.prompt_token_ids, request.sampling, model=HashExecutor().model, max_model_len=200
        ).token_ids
        assert tuple(outcomes[request.request_id].token_ids) == expected


def test_under_a_steady_stream_of_short_prompts_a_long_one_starts_with_the_next_batch() -> None:
    """Two short prompts come in every step, so their bucket is always full."""
    driver, _ = make_driver(Dynamic(2, max_queue_delay_ns=10_000_000, length_buckets=(4, 100)))
    long = make_request("long", 20, max_tokens=2, arrival_ns=0)
    driver.turn(Add(long))
    for turn in range(40):
        now_ns = driver.clock.now_ns()
        driver.turn(*(Add(make_request(f"s{turn}-{idx}", 2, max_tokens=4, arrival_ns=now_ns)) for idx in range(2)))
    assert long.first_scheduled_ns is not None
    assert long.first_scheduled_ns <= 10_000_000 + 4 * 1_000_000


@pytest.mark.parametrize("gate", [Static(2), Dynamic(2)])
def test_without_a_batch_there_is_no_padding(gate: Static | Dynamic) -> None:
    driver, _ = make_driver(gate, make_request("a", 2, max_tokens=2))
    finish(driver)
    driver.turn()
    driver.core.check()
    assert not driver.core.scheduler._padding.is_active
