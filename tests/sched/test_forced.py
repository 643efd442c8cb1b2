"""Tokens that a grammar forces: they are computed together, by a decode that is several tokens behind."""

from __future__ import annotations

import pytest

from penstock.engine.core import EngineCore
from penstock.sched import progress
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.sched.running import MAX_FORCED_TOKENS
from penstock.sched.scheduler import MAX_FORCED_AT_ONCE, Scheduler
from penstock.testing import Driver, HashExecutor, HashModel, make_request
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import Request
from penstock.types.stats import StepStats
from support.hash_matcher import HashMatcher

CAPACITY = Capacity(num_blocks=100, block_size=4, max_rows=4, max_step_tokens=40, max_model_len=160)
MODEL = HashModel(vocab_size=90)
POLICIES = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))


class Constant(HashMatcher):
    """Forces token 7 `num_tokens` times after the first token, and nothing behind them."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(MODEL.vocab_size)
        self._num_left = num_tokens

    def forced(self) -> list[int]:
        return [7] * (self._num_left if self.token_ids else 0)

    def allowed(self) -> list[int]:
        return [7] if self.token_ids and self._num_left else list(range(MODEL.vocab_size))

    def accept(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            assert token_id in self.allowed()
            self._num_left -= bool(self.token_ids and self._num_left)
            self.token_ids.append(token_id)


class Counts:
    """Remembers the counts of steps."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_finish(self, stats: object) -> None:
        del stats


def make(capacity: Capacity = CAPACITY) -> tuple[Driver, Counts]:
    counts = Counts()
    core = EngineCore(Scheduler(capacity, POLICIES), observer=counts)
    return Driver(core, HashExecutor(capacity, model=MODEL)), counts


def rows(plan: StepPlan | None) -> list[tuple[str, int, int, int]]:
    assert plan is not None
    return [(row.request_id, row.context_len, row.query_len, int(row.samples)) for row in plan.rows]


def test_they_are_computed_with_the_token_before_them_and_the_row_samples_behind_them() -> None:
    driver, counts = make()
    request = make_request("a", 5, max_tokens=30, matcher=Constant(6))
    assert rows(driver.turn(Add(request))) == [("a", 0, 5, 1)]
    assert (request.num_tokens, request.num_computed_tokens) == (12, 5)
    plan = driver.turn()
    (event,) = driver.outcomes["a"].events[:1]
    assert event.token_ids[1:] == (7,) * 6
    assert rows(plan) == [("a", 5, 7, 1)]
    assert plan is not None
    assert (plan.releases, [admit.token_ids for admit in plan.admits]) == (
        ("a",),
        [(*request.prompt_token_ids, *event.token_ids)],
    )
    plan = driver.turn()
    assert rows(plan) == [("a", 12, 1, 1)]
    assert plan is not None
    assert not plan.admits
    told = [(stats.counts.num_sampled_tokens, stats.counts.forced, stats.counts.num_decodes) for stats in counts.steps]
    assert told == [(7, {"a": 6}, 0), (1, {}, 7), (1, {}, 1)]
    driver.core.check()


def test_many_are_computed_in_several_steps_as_others_wait_for_theirs() -> None:
    driver, _ = make()
    driver.turn(Add(make_request("a", 5, max_tokens=60, matcher=Constant(40))))
    size = 1 + MAX_FORCED_TOKENS
    assert [rows(driver.turn()) for _ in range(3)] == [
        [("a", 5, size, 0)],
        [("a", 5 + size, size, 0)],
        [("a", 5 + 2 * size, 41 - 2 * size, 1)],
    ]


def test_they_leave_half_of_a_step_to_prompts() -> None:
    """They are a decode's and come first, and each running request has a token in every step; but a grammar may force many."""
    driver, _ = make()
    driver.turn(*(Add(make_request(name, [ord(name) % 90] * 5, max_tokens=40, matcher=Constant(30))) for name in "abc"))
    plan = rows(driver.turn(Add(make_request("long", 60, max_tokens=5))))
    assert plan[:3] == [("a", 5, 16, 0), ("b", 5, 4, 0), ("c", 5, 1, 0)]
    assert plan[3:] == [("long", 0, 19, 0)]


@pytest.mark.parametrize("max_step_tokens", [4, 7, 20])
def test_each_has_a_token_of_a_step_that_is_too_small_for_all(max_step_tokens: int) -> None:
    capacity = Capacity(100, 4, 4, max_step_tokens, 160)
    driver, _ = make(capacity)
    requests = [make_request(name, 4, max_tokens=30, matcher=Constant(9)) for name in "abcd"]
    driver.turn(*map(Add, requests))
    while not all(map(has_jumped, requests)):
        driver.turn()
    plan = rows(driver.turn())
    assert [name for name, _, _, _ in plan] == list("abcd")
    assert sum(query_len for _, _, query_len, _ in plan) <= max_step_tokens
    while driver.core.has_work:
        driver.turn()
        driver.core.check()
    assert [driver.outcomes[name].token_ids[1:10] for name in "abcd"] == [[7] * 9] * 4


def test_between_two_steps_some_are_appended_and_the_next_ones_later() -> None:
    """A constant in a grammar may have more than all rows should wait for."""
    num_forced = 2 * MAX_FORCED_AT_ONCE + 40
    driver, counts = make(Capacity(300, 4, 4, 40, 1000))
    driver.turn(Add(make_request("a", 5, max_tokens=num_forced + 9, matcher=Constant(num_forced))))
    while driver.core.has_work:
        driver.turn()
    forced = [stats.counts.forced["a"] for stats in counts.steps if stats.counts.forced]
    assert forced == [MAX_FORCED_AT_ONCE, MAX_FORCED_AT_ONCE, 38]  # the first behind each run is sampled
    assert driver.outcomes["a"].token_ids[1 : 1 + num_forced] == [7] * num_forced


def test_what_was_sampled_behind_them_is_a_prefill_after_a_preemption() -> None:
    """Its first blocks are found again: it is behind by far more than was forced."""
    driver, _ = make()
    request = make_request("a", 5, max_tokens=150, matcher=Constant(3))
    driver.turn(Add(request))
    while request.num_tokens < 100:
        driver.turn()
    assert has_jumped(request)
    progress.preempt(request)
    request.num_computed_tokens = 40
    assert not request.is_jumping


def has_jumped(request: Request) -> bool:
    return bool(request.forced_from)
