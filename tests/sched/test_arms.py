"""Policies of an A/B test: a request is decided about as its arm says, and neither arm takes turns from the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.sched.policies.arms import OrderByArm, PredictorByArm, ReserveByArm, policies_by_arm
from penstock.sched.policies.base import Policies, Prediction, Predictor
from penstock.sched.policies.orders import EarliestDeadlineFirst, FirstComeFirstServed, ShortestJobFirst
from penstock.sched.policies.presets import make_policies
from penstock.sched.queue import Lanes
from penstock.testing.builders import make_core, make_request
from penstock.testing.driver import Driver, run_to_completion
from penstock.testing.hash_executor import HashExecutor
from penstock.types.errors import ConfigError
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request

CAPACITY = Capacity(num_blocks=41, block_size=4, max_rows=8, max_step_tokens=32, max_model_len=120)


def request_of(name: str, arm: str, **fields: Any) -> Request:
    request = make_request(name, **fields)
    request.arm = arm
    return request


def served(lanes: Lanes) -> list[str]:
    names = []
    while (request := lanes.peek(0)) is not None:
        lanes.discard(request)
        names.append(request.request_id)
    return names


def queue_of(order: OrderByArm, *requests: Request) -> Lanes:
    lanes = Lanes(order)
    for request in requests:
        lanes.push(request, 0)
    return lanes


def jobs() -> list[Request]:
    """A and B by turns; the later, the shorter."""
    return [
        request_of(f"{arm}{nth}", arm, arrival_ns=nth, predicted_new_tokens=1000 // (nth + 1))
        for nth in range(4)
        for arm in ("A", "B")
    ]


def test_each_arm_keeps_its_turns_and_orders_its_own_requests() -> None:
    lanes = queue_of(OrderByArm(FirstComeFirstServed(), ShortestJobFirst()), *jobs())
    assert served(lanes) == ["A0", "B3", "A1", "B2", "A2", "B1", "A3", "B0"]


def test_the_arms_can_be_either_way_round() -> None:
    lanes = queue_of(OrderByArm(ShortestJobFirst(), FirstComeFirstServed()), *jobs())
    assert served(lanes) == ["A3", "B0", "A2", "B1", "A1", "B2", "A0", "B3"]


def test_equal_orders_are_the_order_of_queueing() -> None:
    lanes = queue_of(OrderByArm(FirstComeFirstServed(), FirstComeFirstServed()), *jobs())
    assert served(lanes) == [request.request_id for request in jobs()]


def test_who_gives_up_leaves_no_turn_behind() -> None:
    requests = jobs()
    lanes = queue_of(OrderByArm(FirstComeFirstServed(), ShortestJobFirst()), *requests)
    for request in requests[2:6]:  # A1 B1 A2 B2
        assert lanes.discard(request)
    assert sorted(served(lanes)) == ["A0", "A3", "B0", "B3"]
    lanes.push(request_of("B9", "B"), 0)
    assert served(lanes) == ["B9"]


def test_requests_without_an_arm_are_arm_a() -> None:
    lanes = queue_of(OrderByArm(FirstComeFirstServed(), ShortestJobFirst()), make_request("r0"), request_of("B0", "B"))
    assert served(lanes) == ["r0", "B0"]


def policies(a: dict[str, Any], b: dict[str, Any]) -> Policies:
    return policies_by_arm(make_policies(**a), make_policies(**b))


def test_what_is_equal_is_not_split() -> None:
    one = make_policies()
    assert policies_by_arm(one, make_policies()) == one
    split = policies({}, {"reserve": "no-evict", "order": "sjf", "predictor": "none"})
    assert [type(split.reserve), type(split.order), type(split.predictor)] == [ReserveByArm, OrderByArm, PredictorByArm]
    assert split.words["reserve"] == "watermark; arm B: no-evict"


def first_steps(found: Policies, arms: str) -> dict[str, int]:
    """Request -> the step in which it began, of requests that all come at once, and fill the memory if all go on."""
    driver = Driver(make_core(CAPACITY, found), HashExecutor(CAPACITY))
    requests = [request_of(f"r{idx}", arm, prompt=8, max_tokens=60) for idx, arm in enumerate(arms)]
    began: dict[str, int] = {}
    plan = driver.turn(*map(Add, requests))
    for step in range(5000):
        if plan is not None:
            for row in plan.rows:
                began.setdefault(row.request_id, step)
        if not driver.core.has_work:
            return began
        plan = driver.turn()
    raise AssertionError("it never ended")


def test_each_arm_has_its_own_reserve() -> None:
    """`no-evict` keeps a request waiting until none can be preempted; `chunk` lets it in at once."""
    eager, careful = {"reserve": "chunk"}, {"reserve": "no-evict"}
    found = policies(eager, careful)
    assert first_steps(found, "AAAA") == first_steps(make_policies(**eager), "AAAA")
    assert first_steps(found, "BBBB") == first_steps(make_policies(**careful), "AAAA")
    assert max(first_steps(found, "AAAA").values()) < 3
    mixed = first_steps(found, "AAAB")
    assert max(mixed[f"r{idx}"] for idx in range(3)) < 3
    assert mixed["r3"] > 20


@pytest.mark.parametrize("order", ["sjf", "srpf", "edf"])
def test_answers_are_the_same_in_either_arm(order: str) -> None:
    """With preemptions, long prompts held back and requests that give up, none is lost and none is served twice."""

    def answers(arm_of: str, found: Policies) -> dict[str, tuple[int, ...]]:
        requests = [
            request_of(
                f"r{idx}",
                arm_of[idx % len(arm_of)],
                prompt=[7 + (idx * pos) % 23 for pos in range(3 + idx * 7 % 40)],
                max_tokens=5 + idx * 11 % 40,
                arrival_ns=idx,
                deadline_ns=10**12 + idx * 1000 if idx % 2 else None,
            )
            for idx in range(30)
        ]
        later = {turn: [Add(requests[turn])] for turn in range(1, 30)} | {30: [Abort("r29")]}
        outcomes = run_to_completion(make_core(CAPACITY, found), HashExecutor(CAPACITY), Add(requests[0]), later=later)
        assert len(outcomes) == 30
        return {
            name: tuple(outcome.token_ids)
            for name, outcome in outcomes.items()
            if outcome.finish_reason is not FinishReason.ABORT
        }

    eager = {"reserve": "chunk", "predictor": "none"}
    alone = answers("A", make_policies(**eager))
    split = answers("AB", policies(eager, {"reserve": "watermark", "order": order}))
    common = alone.keys() & split.keys()
    assert len(common) >= 29
    assert all(alone[name] == split[name] for name in common)


def test_a_deadline_in_one_arm_does_not_pass_a_request_of_the_other_that_was_preempted() -> None:
    """Keys of two orders are never compared."""
    order = OrderByArm(FirstComeFirstServed(), EarliestDeadlineFirst())
    early, late = request_of("A", "A", arrival_ns=5), request_of("B", "B", arrival_ns=9, deadline_ns=1)
    for request in (early, late):
        request.status = request.status.PREEMPTED
    assert order.key(early, 10) < order.key(late, 10)


class Counting(Predictor):
    def __init__(self, tokens: int) -> None:
        self.tokens, self.asked, self.told = tokens, 0, 0

    def predict(self, request: Request) -> Prediction | None:
        self.asked += 1
        return Prediction(self.tokens, 1, self.tokens, 1)

    def ended(self, request: Request) -> None:
        self.told += 1


def test_both_predictors_learn_from_all_and_each_answers_for_its_own() -> None:
    a, b = Counting(11), Counting(22)
    split = replace(make_policies(), predictor=PredictorByArm(a, b))
    requests = [request_of(f"{arm}{nth}", arm, max_tokens=3) for nth in range(3) for arm in ("A", "B", "")]
    run_to_completion(make_core(CAPACITY, split), HashExecutor(CAPACITY), *map(Add, requests))
    assert {request.arm: request.predicted_new_tokens for request in requests} == {"A": 11, "B": 22, "": 11}
    assert (a.asked, a.told, b.asked, b.told) == (9, 9, 9, 9)


@pytest.mark.parametrize("order", ["calls", "fair", "priority"])
def test_orders_that_weigh_all_requests_are_not_split(order: str) -> None:
    """Texts have such an order without asking for it."""
    for a, b in (("fcfs", order), (order, "fcfs")):
        with pytest.raises(ConfigError, match="weighs the requests of both against each other"):
            policies_by_arm(make_policies(order=a), make_policies(order=b))
    assert policies_by_arm(make_policies(order=order), make_policies(order=order)).order.has_ranks is (order != "calls")
