"""Each order serves whom it says, and nobody starves under any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sched.policies.base import Order, StepRecord
from penstock.sched.policies.fair import FairShares
from penstock.sched.policies.orders import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    PriorityClasses,
    ShortestJobFirst,
    ShortestPrefillFirst,
    delay_ns,
)
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.sched.queue import WaitingQueue
from penstock.testing import Driver, HashExecutor, make_core, make_request, run_to_completion
from penstock.testing.driver import STEP_NS
from penstock.types.events import Add
from penstock.types.plan import Capacity, RowPlan
from penstock.types.request import Request, RequestStatus

S = 1_000_000_000
PATIENCE = 6 * STEP_NS
CAPACITY = Capacity(num_blocks=13, block_size=4, max_rows=3, max_step_tokens=16, max_model_len=40)


def drain(order: Order, *requests: Request, now_ns: int = 0) -> list[str]:
    queue = WaitingQueue(order, lambda request: 0)
    for request in requests:
        queue.push(request, request.arrival_ns)
    names = []
    while (request := queue.peek(now_ns)) is not None:  # type: ignore[assignment]
        queue.remove(request)
        names.append(request.request_id)
    return names


class TestShortestJobFirst:
    def test_fewest_predicted_tokens_first(self) -> None:
        requests = [make_request(str(n), predicted_new_tokens=n, max_tokens=999) for n in (300, 7, 90)]
        assert drain(ShortestJobFirst(), *requests) == ["7", "90", "300"]

    def test_without_a_prediction_the_assumed_length_or_the_limit_counts(self) -> None:
        requests = [
            make_request("assumed 256", max_tokens=4000),
            make_request("predicted 255", predicted_new_tokens=255, max_tokens=4000),
            make_request("limit 10", max_tokens=10),
        ]
        assert drain(ShortestJobFirst(), *requests) == ["limit 10", "predicted 255", "assumed 256"]

    def test_a_long_job_has_aged_past_short_ones_that_come_five_minutes_later(self) -> None:
        long = make_request("long", predicted_new_tokens=10**6, max_tokens=10**6)
        short = [make_request(f"{at} s", predicted_new_tokens=1, arrival_ns=at * S) for at in (298, 300)]
        assert drain(ShortestJobFirst(), long, *short) == ["298 s", "long", "300 s"]


@given(sizes=st.lists(st.integers(0, 10**7), min_size=2, max_size=2).map(sorted), half=st.integers(1, 10**4))
def test_ageing_delays_grow_with_the_size_and_have_a_limit(sizes: list[int], half: int) -> None:
    small, large = (delay_ns(size, half, S) for size in sizes)
    assert 0 <= small <= large < S
    assert delay_ns(half, half, S) == S // 2


def test_the_shortest_prefill_is_first() -> None:
    requests = [make_request(str(n), n) for n in (30, 5, 12)]
    assert drain(ShortestPrefillFirst(), *requests) == ["5", "12", "30"]


class TestEarliestDeadlineFirst:
    def test_by_deadline_and_those_without_a_minute_after_their_arrival(self) -> None:
        requests = [
            make_request("none"),
            make_request("none, older", arrival_ns=-S),
            make_request("59.5 s", deadline_ns=59 * S + S // 2),
            make_request("in an hour", deadline_ns=3600 * S),
            make_request("1 s", deadline_ns=S),
        ]
        assert drain(EarliestDeadlineFirst(), *requests) == ["1 s", "none, older", "59.5 s", "none", "in an hour"]

    def test_what_will_be_too_late_gives_way_to_what_will_not(self) -> None:
        order = EarliestDeadlineFirst()
        order.served((), {}, StepRecord(num_decodes=1, num_prefill_tokens=0, duration_ns=S // 10))
        lost = make_request("21 tokens in 2 s", deadline_ns=2 * S, predicted_new_tokens=21)
        urgent = make_request("19 tokens in 2 s", deadline_ns=2 * S, predicted_new_tokens=19)
        easy = make_request("9 s", deadline_ns=9 * S)
        assert drain(order, lost, urgent, easy) == ["19 tokens in 2 s", "9 s", "21 tokens in 2 s"]

    def test_guesses_that_hold_save_an_answer_steps(self) -> None:
        order = EarliestDeadlineFirst()
        for _ in range(60):
            rows = (RowPlan("other", context_len=20, query_len=2, new_block_ids=(), samples=2),)
            order.served(rows, {}, StepRecord(num_decodes=2, num_prefill_tokens=0, duration_ns=S // 10), num_decodes=1)
            order.gained(make_request("other"), 1)
        lost = make_request("41 tokens in 2 s", deadline_ns=2 * S, predicted_new_tokens=41)
        urgent = make_request("39 tokens in 2 s", deadline_ns=2 * S, predicted_new_tokens=39)
        easy = make_request("9 s", deadline_ns=9 * S)
        assert drain(order, lost, urgent, easy) == ["39 tokens in 2 s", "9 s", "41 tokens in 2 s"]

    def test_a_prompt_that_takes_too_long_gives_way_too(self) -> None:
        """A step of 50 ms, or of 150 ms with 100 tokens of prompts, that is 1 ms a token."""
        order = EarliestDeadlineFirst()
        for num_prefill_tokens, duration_ns in ((0, S // 20), (100, 3 * S // 20)):
            order.served((), {}, StepRecord(num_decodes=1, num_prefill_tokens=num_prefill_tokens, duration_ns=duration_ns))
        lost = make_request("2,000 tokens", 2000, deadline_ns=2 * S)
        urgent = make_request("1,000 tokens", 1000, deadline_ns=2 * S)
        easy = make_request("9 s", deadline_ns=9 * S)
        assert drain(order, lost, urgent, easy) == ["1,000 tokens", "9 s", "2,000 tokens"]

    def test_time_that_passes_in_the_queue_counts(self) -> None:
        order = EarliestDeadlineFirst()
        order.served((), {}, StepRecord(num_decodes=1, num_prefill_tokens=0, duration_ns=S // 10))
        urgent = make_request("urgent", deadline_ns=2 * S, predicted_new_tokens=10)
        easy = make_request("easy", deadline_ns=9 * S)
        assert drain(order, urgent, easy, now_ns=S) == ["urgent", "easy"]
        assert drain(order, urgent, easy, now_ns=S + 1) == ["easy", "urgent"]

    def test_a_slow_step_before_it_came_condemns_nobody(self) -> None:
        order = EarliestDeadlineFirst()
        order.served((), {}, StepRecord(num_decodes=0, num_prefill_tokens=2048, duration_ns=3 * S))
        queue = WaitingQueue(order, lambda request: 0)
        queue.push(make_request("urgent", deadline_ns=20 * S, predicted_new_tokens=100), 0)
        queue.push(make_request("easy", deadline_ns=60 * S), 0)
        for _ in range(60):
            order.served((), {}, StepRecord(num_decodes=8, num_prefill_tokens=0, duration_ns=S // 50))
        assert queue.peek(S).request_id == "urgent"  # type: ignore[union-attr]

    def test_a_key_only_grows_while_its_request_waits(self) -> None:
        order = EarliestDeadlineFirst()
        request = make_request("r", deadline_ns=20 * S, predicted_new_tokens=100)
        queue = WaitingQueue(order, lambda request: 0)
        queue.push(request, 0)
        keys = []
        for duration_ns in (S // 50, 3 * S, *[S // 50] * 60):
            order.served((), {}, StepRecord(num_decodes=1, num_prefill_tokens=0, duration_ns=duration_ns))
            keys.append(order.key(request, S))
        assert keys == sorted(keys)
        assert keys[0] < keys[-1], "lost after the slow step"
        queue.remove(request)
        assert not order._verdicts, "nothing is kept of those who wait no more"


class TestPriorityClasses:
    def test_lower_numbers_first_and_by_arrival_within_a_class(self) -> None:
        requests = [make_request(f"{p}@{at}", priority=p, arrival_ns=at) for p, at in ((1, 0), (0, 2), (-3, 3), (0, 1))]
        assert drain(PriorityClasses(), *requests) == ["-3@3", "0@1", "0@2", "1@0"]

    def test_a_low_class_has_aged_past_a_high_one_that_comes_late(self) -> None:
        low = make_request("low", priority=2)
        high = [make_request(f"high, {at} s", priority=0, arrival_ns=at * S) for at in (119, 121)]
        assert drain(PriorityClasses(), low, *high) == ["high, 119 s", "low", "high, 121 s"]

    def test_the_numbers_have_a_limit(self) -> None:
        low = make_request("low", priority=2**31 - 1)
        high = make_request("high", priority=-(2**31), arrival_ns=40 * 60 * S + 1)
        assert drain(PriorityClasses(), low, high) == ["low", "high"]

    @pytest.mark.parametrize(("order", "first"), [("priority", "new"), ("fcfs", "low")])
    def test_a_preempted_low_class_does_not_overtake_a_waiting_high_one(self, order: str, first: str) -> None:
        core = make_core(CAPACITY, make_policies(order=order, reserve=Watermark(0.0, 0)), max_rows=2)
        driver = Driver(core, HashExecutor(CAPACITY))
        old, low = make_request("old", 10, max_tokens=24), make_request("low", 12, max_tokens=24, priority=5, arrival_ns=1)
        driver.turn(Add(old), Add(low))
        while low.status is not RequestStatus.PREEMPTED:
            assert driver.turn() is not None
        driver.turn(Add(make_request("new", 6, max_tokens=2, arrival_ns=driver.clock.now_ns())))
        while not driver.plans[-1].admits:
            driver.turn()
        assert driver.plans[-1].admits[0].request_id == first


@dataclass(frozen=True)
class Arrival:
    turn: int
    prompt: int
    max_tokens: int
    priority: int
    tenant: str
    predicted: int | None
    patience: int | None

    def request(self, name: str) -> Request:
        arrival_ns = self.turn * STEP_NS
        return make_request(
            name,
            self.prompt,
            max_tokens=self.max_tokens,
            arrival_ns=arrival_ns,
            priority=self.priority,
            tenant=self.tenant,
            predicted_new_tokens=self.predicted,
            deadline_ns=None if self.patience is None else arrival_ns + self.patience * STEP_NS,
        )


arrivals = st.lists(
    st.builds(
        Arrival,
        turn=st.integers(0, 40),
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 9),
        priority=st.sampled_from([-1, 0, 0, 3]),
        tenant=st.sampled_from("abc"),
        predicted=st.one_of(st.none(), st.integers(1, 500)),
        patience=st.one_of(st.none(), st.none(), st.integers(1, 60)),
    ),
    min_size=2,
    max_size=30,
)


half = settings(max_examples=settings.default.max_examples // 2)
"""Half of the usual examples: each is a whole run."""


def serve(order: Order, script: Sequence[Arrival]) -> list[Request]:
    requests = [arrival.request(f"r{idx}") for idx, arrival in enumerate(script)]
    later: dict[int, list[Add]] = {}
    for arrival, request in zip(script, requests, strict=True):
        later.setdefault(arrival.turn, []).append(Add(request))
    core = make_core(CAPACITY, make_policies(order=order), enable_prefix_caching=False)
    # Steps may be fewer than turns, so a late request may be added after its arrival; never before.
    run_to_completion(core, HashExecutor(CAPACITY), later=later, after_turn=lambda driver: driver.core.check())
    return requests


@pytest.mark.parametrize(
    ("order", "bound_ns"),
    [
        (FirstComeFirstServed(), 0),
        (ShortestJobFirst(max_delay_ns=PATIENCE), PATIENCE),
        (ShortestPrefillFirst(max_delay_ns=PATIENCE, half_size_tokens=9), PATIENCE),
        (PriorityClasses(class_delay_ns=PATIENCE // 4), PATIENCE),  # of classes -1 and 3
    ],
    ids=lambda value: type(value).__name__,
)
@half
@given(script=arrivals)
def test_nobody_is_overtaken_by_who_came_so_much_later(order: Order, bound_ns: int, script: list[Arrival]) -> None:
    check_overtaking(serve(order, script), bound_ns)


@half
@given(script=arrivals)
def test_deadlines_overtake_those_without_for_a_limited_time(script: list[Arrival]) -> None:
    requests = serve(EarliestDeadlineFirst(max_slack_ns=PATIENCE), script)
    assert all(r.first_scheduled_ns is not None for r in requests if r.deadline_ns is None), "nobody without one is left"
    check_overtaking(requests, PATIENCE)


@half
@given(script=arrivals)
def test_within_a_tenant_nobody_is_overtaken(script: list[Arrival]) -> None:
    requests = serve(FairShares(), script)
    for tenant in "abc":
        check_overtaking([request for request in requests if request.tenant == tenant], 0)


def check_overtaking(requests: list[Request], bound_ns: int) -> None:
    """Checks requests without a deadline alone: the others may be given up."""
    for victim in requests:
        for other in requests:
            is_later = other.arrival_ns >= victim.arrival_ns + max(1, bound_ns)
            if victim.deadline_ns is None and is_later and other.first_scheduled_ns is not None:
                assert victim.first_scheduled_ns is not None
                assert victim.first_scheduled_ns <= other.first_scheduled_ns


@pytest.mark.parametrize("order", [ShortestJobFirst(max_delay_ns=PATIENCE), PriorityClasses(class_delay_ns=PATIENCE)])
def test_an_endless_stream_of_preferred_ones_does_not_starve_the_other(order: Order) -> None:
    """Three of them come per turn, more than three rows can serve."""
    stream = [Arrival(turn, 8, 4, priority=0, tenant="", predicted=1, patience=None) for turn in range(30) for _ in range(3)]
    other = Arrival(1, 8, 8, priority=1, tenant="", predicted=10**6, patience=None)
    requests = serve(order, [*stream[:6], other, *stream[6:]])
    arrival_ns, started_ns = requests[6].arrival_ns, requests[6].first_scheduled_ns
    overtaking = [
        request for request in requests if arrival_ns < request.arrival_ns and request.first_scheduled_ns < started_ns
    ]
    assert overtaking, "it is not first come, first served"
    assert max(request.arrival_ns for request in overtaking) < arrival_ns + PATIENCE
    assert sum(request.first_scheduled_ns > started_ns for request in requests) > 50, (
        "it does not wait for the end of the stream"
    )
