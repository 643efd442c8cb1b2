"""A step that is planned while one is in flight: what it computes, who is left out, what waits, and whose blocks are kept."""

from __future__ import annotations

import pytest

from penstock.kv.pool_map import BlockState, draw
from penstock.sched.policies.gates import Static
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import make_core, make_request
from penstock.types.events import Abort, Add
from penstock.types.request import FinishReason, RequestStatus
from penstock.types.sampling import BeamParams, SamplingParams
from penstock.types.stats import StepStats
from support.stepwise import CAPACITY, Device, answer, ends_with_stop


@pytest.fixture(params=[0, 1, 2])
def device(request: pytest.FixtureRequest) -> Device:
    """Computes at once, or late."""
    return Device(make_core(CAPACITY), seed=request.param)


def test_rows_go_on_from_tokens_that_nobody_knows_yet(device: Device) -> None:
    request = make_request("a", 6, max_tokens=10)
    assert device.begin(Add(request)) == [("a", 0, 6)]
    assert device.begin() == [("a", 6, 1)]
    assert (request.num_computed_tokens, request.num_inflight_tokens, request.num_tokens) == (0, 7, 6)
    device.finish()
    assert (request.num_computed_tokens, request.num_inflight_tokens, request.num_tokens) == (6, 1, 7)
    assert request.num_pending_samples == 0
    device.run()
    assert device.tokens_of(request) == answer(request)


def test_a_long_prompt_goes_on_in_chunks(device: Device) -> None:
    request = make_request("a", 35, max_tokens=3)
    assert [device.begin(Add(request)), device.begin()] == [[("a", 0, 16)], [("a", 16, 16)]]
    device.finish()
    assert device.begin() == [("a", 32, 3)]
    device.run()
    assert device.tokens_of(request) == answer(request)


def test_who_waits_joins_beside_a_step_in_flight(device: Device) -> None:
    requests = make_request("a", 6, max_tokens=5), make_request("b", [9, 8, 7], max_tokens=5)
    device.begin(Add(requests[0]))
    assert device.begin(Add(requests[1])) == [("a", 6, 1), ("b", 0, 3)]
    device.run()
    assert [device.tokens_of(request) for request in requests] == [answer(request) for request in requests]


@pytest.mark.parametrize("by", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize("seed", range(3))
def test_who_reaches_a_limit_in_the_step_in_flight_is_not_computed_again(seed: int, by: str) -> None:
    device = Device(make_core(CAPACITY, max_step_tokens=64), seed=seed)
    num_prompt, max_tokens = (6, 2) if by == "max_tokens" else (58, 50)
    request, other = make_request("a", [7] * num_prompt, max_tokens=max_tokens), make_request("b", [9], max_tokens=20)
    device.begin(Add(request))
    assert device.begin(Add(other)) == [("a", num_prompt, 1), ("b", 0, 1)]
    device.finish()
    assert device.begin() == [("b", 1, 1)]
    (ended, _) = device.finish()
    assert ended.finish_reason is FinishReason.LENGTH
    device.run()
    assert device.executor.num_computed_tokens == request.num_tokens - 1 + other.num_tokens - 1


def test_a_stop_token_makes_the_next_row_void(device: Device) -> None:
    request = ends_with_stop(1)
    device.begin(Add(request))
    assert device.begin() == [("a", 6, 1)]
    (event,) = device.finish()
    assert event.finish_reason is FinishReason.STOP
    assert device.finish() == []
    assert not device.core.has_work


def test_blocks_are_fenced_until_the_void_row_is_collected(device: Device) -> None:
    request = ends_with_stop(1)
    num_total = device.num_available
    device.begin(Add(request))
    device.begin()
    device.finish()
    kv = device.core.scheduler.kv
    assert not kv.tables
    assert [request_id for request_id, _ in kv.fenced] == ["a"]
    assert device.num_available == num_total - 2
    drawn = draw(kv, ())
    assert drawn.states[BlockState.HELD] == 2
    assert sum(drawn.states.values()) == CAPACITY.num_blocks
    assert [(owner.request_id, owner.num_blocks, owner.num_tokens) for owner in drawn.owners] == [("a", 2, 0)]
    device.finish()
    assert device.num_available == num_total
    assert not kv.fenced


def test_what_is_fenced_is_given_to_nobody() -> None:
    """Without the fence, `c` would get blocks to which the row of `a` in flight still writes."""
    device = Device(make_core(CAPACITY, num_blocks=9, enable_prefix_caching=False))
    requests = ends_with_stop(1, "a", 7), make_request("c", [9] * 8, max_tokens=4)
    device.begin(Add(requests[0]))
    assert device.begin() == [("a", 7, 1)]
    device.finish()
    assert device.num_available == 6
    assert device.begin(Add(requests[1])) == [("c", 0, 8)]
    in_flight = {block_id for _, table in device.core.scheduler.kv.fenced for block_id in table.block_ids}
    (admit,) = device.flights[-1][0].admits
    assert not in_flight & set(admit.block_ids)
    device.run()
    assert device.tokens_of(requests[1]) == answer(requests[1])


def test_an_abort_with_two_steps_in_flight_keeps_the_blocks_until_the_second_is_collected(device: Device) -> None:
    num_total = device.num_available
    device.begin(Add(make_request("a", 6, max_tokens=10)))
    device.begin()
    device.events += device.core.apply([Abort("a")], device.now_ns)
    device.core.check()
    num_left = device.num_available
    assert num_left < num_total
    assert device.finish() == []
    assert device.num_available == num_left
    assert device.finish() == []
    assert device.num_available == num_total
    assert [event.finish_reason for event in device.events] == [FinishReason.ABORT]


@pytest.mark.parametrize("num_prompt", [5, 6])
def test_an_id_that_comes_again_is_not_taken_for_the_one_that_ended(device: Device, num_prompt: int) -> None:
    first = ends_with_stop(2)
    second = make_request("a", [7] * num_prompt, max_tokens=6)
    device.begin(Add(first))
    device.begin()
    device.finish()
    assert device.begin() == [("a", 7, 1)]
    assert device.finish()[0].finish_reason is FinishReason.STOP
    assert device.tokens_of(first) == answer(first)
    device.events.clear()
    assert device.begin(Add(second)) == [("a", 0, num_prompt)]
    assert device.finish() == []  # the row of the first
    assert second.num_computed_tokens == 0
    device.run()
    assert device.tokens_of(second) == answer(second)


def test_an_id_that_ends_and_comes_again_twice(device: Device) -> None:
    """Each under way in one of the steps in flight."""
    requests = [make_request("a", [7 + idx] * 5, max_tokens=6) for idx in range(3)]
    device.begin(Add(requests[0]))
    assert device.begin(Abort("a"), Add(requests[1])) == [("a", 0, 5)]
    device.finish()
    assert device.begin(Abort("a"), Add(requests[2])) == [("a", 0, 5)]
    device.finish()
    device.run()
    assert device.tokens_of(requests[2]) == answer(requests[2])
    assert [event.finish_reason for event in device.events if event.finish_reason is not None] == [
        FinishReason.ABORT,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]


def test_who_lacks_memory_waits_for_the_step_in_flight() -> None:
    core = make_core(CAPACITY, make_policies(reserve=Watermark(share=0.0, growth_tokens=0)), num_blocks=6, max_model_len=20)
    device = Device(core)
    requests = [make_request(name, [idx + 4] * 7, max_tokens=8, arrival_ns=idx) for idx, name in enumerate("ab")]
    device.begin(*map(Add, requests))
    device.begin()
    device.finish()
    assert device.begin() is None  # both need a third block, and one is free
    device.finish()
    assert device.begin() is not None
    assert [request.status for request in requests] == [RequestStatus.RUNNING, RequestStatus.PREEMPTED]
    device.run()
    assert [device.tokens_of(request) for request in requests] == [answer(request) for request in requests]


def test_beams_wait_for_the_step_in_flight() -> None:
    device = Device(make_core(CAPACITY))
    sampling = SamplingParams(temperature=0.0, max_tokens=4, beams=BeamParams(width=2), logprobs=2)
    search = [make_request(f"b{idx}", [9] * 5, sampling=sampling) for idx in range(2)]
    for request in search:
        request.parent_id = "b"
    device.begin(Add(make_request("a", 5, max_tokens=9)))
    assert device.begin(*map(Add, search)) == [("a", 5, 1), ("b0", 0, 5)], "a search may begin beside one"
    device.finish()
    assert device.begin() is None
    device.run()
    assert sorted(event.request_id for event in device.events if event.finish_reason is not None) == ["a", "b0", "b1"]


def test_batches_wait_for_the_step_in_flight() -> None:
    device = Device(make_core(CAPACITY, make_policies(gate=Static(1))))
    request = make_request("a", 5, max_tokens=4)
    assert device.begin(Add(request)) == [("a", 0, 5)]
    assert device.begin() is None
    device.run()
    assert device.tokens_of(request) == answer(request)


def test_a_prompt_that_the_step_in_flight_computes_is_not_computed_again(device: Device) -> None:
    first, second = make_request("a", 14, max_tokens=4), make_request("b", 14, max_tokens=4)
    device.begin(Add(first))
    assert device.begin(Add(second)) == [("a", 14, 1)]
    device.finish()
    rows = device.begin()
    assert rows is not None
    assert ("b", 13, 1) in rows
    device.run()
    assert second.num_cached_tokens == 13
    assert device.tokens_of(second) == answer(second)


def test_a_longer_prompt_does_not_look_at_tokens_that_are_not_known(device: Device) -> None:
    """It begins like the one in flight, and goes on where that samples."""
    first, second = make_request("a", 10, max_tokens=4), make_request("b", 16, max_tokens=4)
    device.begin(Add(first))
    device.begin(Add(second))
    device.run()
    assert [device.tokens_of(request) for request in (first, second)] == [answer(first), answer(second)]


def test_a_step_in_flight_does_not_count_the_time_of_the_one_before() -> None:
    told: list[StepStats] = []

    class Observer:
        def on_step(self, stats: StepStats) -> None:
            told.append(stats)

        def on_finish(self, stats: object) -> None: ...

    device = Device(make_core(CAPACITY, observer=Observer()))
    device.begin(Add(make_request("a", 6, max_tokens=9)))
    device.begin()
    device.now_ns = 100
    device.finish()
    device.now_ns = 200
    device.finish()
    assert [(stats.started_ns, stats.ended_ns) for stats in told] == [(1, 101), (101, 201)]


def test_steps_are_finished_in_the_order_in_which_they_began(device: Device) -> None:
    device.begin(Add(make_request("a", 6, max_tokens=9)))
    device.begin()
    device.executor.collect(device.flights[0][1])
    plan, ticket = device.flights[1]
    with pytest.raises(ValueError, match="not the oldest"):
        device.core.finish(plan, device.executor.collect(ticket), 0)


def test_a_failure_with_two_steps_in_flight_ends_everybody_and_frees_all(device: Device) -> None:
    num_total = device.num_available
    device.begin(Add(make_request("a", 6, max_tokens=9)))
    device.begin(Add(make_request("b", [9], max_tokens=9)))
    device.core.apply([Abort("b")], 0)
    events = device.core.fail_all("broken", 0)
    assert [(event.request_id, event.finish_reason) for event in events] == [("a", FinishReason.ERROR)]
    device.core.check()
    assert device.num_available == num_total
