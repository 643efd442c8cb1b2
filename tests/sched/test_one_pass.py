"""Models that read texts and write none: each text whole, in one step, answered once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.sched.policies.gates import Static
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.sched.scheduler import Scheduler
from penstock.testing import (
    Driver,
    HashExecutor,
    Outcome,
    expected_state,
    make_core,
    make_text,
    run_to_completion,
    text_capacity,
)
from penstock.types.errors import RejectReason
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity, PaddingId
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import BeamParams


def make_driver(depth: int = 1, capacity: Capacity | None = None, **policies: Any) -> Driver:
    core = make_core(capacity or text_capacity(), make_policies(**policies), enable_prefix_caching=False)
    return Driver(core, HashExecutor(core.scheduler.capacity, depth=depth))


def finish(driver: Driver, *commands: Command, later: dict[int, list[Command]] | None = None) -> dict[str, Outcome]:
    check = driver.core.check
    return run_to_completion(driver.core, driver.executor, *commands, later=later, after_turn=lambda _: check())


def texts(num: int, longest: int = 64, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 7, rng.randint(1, longest), longest]) for _ in range(num)]
    found = [
        make_text(f"r{idx}", [rng.randrange(1000) for _ in range(length)], second_at=rng.randrange(length))
        for idx, length in enumerate(lengths)
    ]
    for idx, request in enumerate(found):
        request.tenant, request.priority = "ab"[idx % 2], idx % 3
    return found


def assert_answered(outcomes: dict[str, Outcome], requests: list[Request]) -> None:
    for request in requests:
        (event,) = outcomes[request.request_id].events
        assert event.finish_reason is FinishReason.STOP
        assert event.states == expected_state(request.prompt_token_ids, request.second_at)
        assert not event.token_ids


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "policies",
    [
        *({"preset": name} for name in ("penstock", "static", "dynamic", "orca", "vllm", "sarathi", "sglang")),
        *({seam: name} for seam in ("gate", "order", "budget", "reserve", "victim", "predictor") for name in TABLES[seam]),
    ],
    ids=lambda policies: "-".join(policies.values()),
)
def test_each_text_is_answered_once_under_every_policy(policies: dict[str, str], depth: int) -> None:
    """The hash executor refuses a text that is split, computed twice or not released."""
    requests = texts(60)
    adds = [Add(request) for request in requests]
    outcomes = finish(make_driver(depth, **policies), *adds[:40], later={2: adds[40:]})
    assert_answered(outcomes, requests)


def test_texts_are_packed_into_steps_whole() -> None:
    driver = make_driver()
    driver.core.apply([Add(make_text(f"r{idx}", length)) for idx, length in enumerate((60, 60, 9, 64, 1))], 0)
    plans = []
    while (plan := driver.turn()) is not None:
        plans.append([row.query_len for row in plan.rows])
    assert plans == [[60, 60], [9, 64, 1]]


def test_a_text_of_the_greatest_length_is_read_and_a_longer_one_refused() -> None:
    longest, longer, none = make_text("longest", 64), make_text("longer", 65), make_text("none", 0)
    outcomes = finish(make_driver(), Add(longest), Add(longer), Add(none))
    assert_answered(outcomes, [longest])
    assert outcomes["longer"].last.reject_reason == RejectReason.CONTEXT_LENGTH
    assert "The text has 65 tokens, and the model reads 64 at most" in outcomes["longer"].last.detail
    assert outcomes["none"].last.reject_reason == RejectReason.INVALID


def test_nobody_asks_a_reader_of_texts_for_a_search() -> None:
    event = finish(make_driver(), Add(make_text(beams=BeamParams(width=1))))["r0"].last
    assert event.finish_reason is FinishReason.REJECTED
    assert "writes none" in event.detail


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_is_cancelled_while_it_is_read_leaves_nothing_behind(depth: int) -> None:
    requests = texts(12)
    driver = make_driver(depth)
    aborts: list[Command] = [Abort("r0"), Abort("r11")]  # the first of the step in flight, and one that waits
    outcomes = finish(driver, *(Add(request) for request in requests), later={1: aborts})
    ended = {request.request_id: outcomes[request.request_id].finish_reason for request in requests}
    assert ended.pop("r0") is (FinishReason.STOP if depth == 1 else FinishReason.ABORT)
    assert ended.pop("r11") is FinishReason.ABORT
    assert set(ended.values()) == {FinishReason.STOP}
    assert not driver.core.scheduler.kv.tables


def test_a_batch_is_padded_to_its_longest_text_and_ends_with_its_step() -> None:
    driver = make_driver(gate=Static(3), capacity=text_capacity(max_step_tokens=192))
    plan = driver.turn(*(Add(make_text(f"r{idx}", length)) for idx, length in enumerate((3, 8, 5))))
    assert plan is not None
    assert sorted(row.query_len for row in plan.rows if isinstance(row.request_id, PaddingId)) == [3, 5]
    assert plan.num_tokens == 24
    assert driver.turn() is None
    assert not driver.core.has_work


def test_what_a_reader_of_texts_has_no_use_for_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no prefix cache"):
        Scheduler(text_capacity(), make_policies())
    with pytest.raises(ValueError, match="texts of 64 tokens need a step"):
        Capacity(17, 64, 8, 63, 64, is_one_pass=True)
