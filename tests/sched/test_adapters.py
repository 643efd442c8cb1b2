"""Requests with adapters under the hash executor: who joins, who waits for what, and what becomes of pages in the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from penstock.admission.ask import Ask
from penstock.admission.door import Admission, AdmissionLimits
from penstock.kv.exchange import Span
from penstock.sched.adapters import KEPT_NS, LOAD_TIMEOUT_NS
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import (
    Driver,
    HashExecutor,
    HashModel,
    Outcome,
    expected_tokens,
    make_core,
    make_request,
    run_to_completion,
)
from penstock.testing.driver import LateWorker
from penstock.types.adapter import AdapterRef
from penstock.types.errors import Rejected
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.stats import WaitReason
from support.fake_adapters import FakeAdapters, make_adapter
from support.loads import make_load

MODEL = HashModel(vocab_size=100)
CAPACITY = Capacity(num_blocks=65, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=64)
EAGER = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))


def request(name: str, number: int = 0, prompt: int = 8, **fields: object) -> Request:
    """A request with the adapter of this number, 0: with none, and with a prompt that it shares with nobody."""
    fields = {"max_tokens": 4, "cache_salt": name.encode()} | fields
    return make_request(name, prompt, adapter=make_adapter(number) if number else None, **fields)  # type: ignore[arg-type]


def drive(capacity: Capacity = CAPACITY, *, depth: int = 1, **fields: object) -> Driver:
    fields.setdefault("adapters", FakeAdapters())
    core = make_core(capacity, fields.pop("policies", EAGER), **fields)  # type: ignore[arg-type]
    return Driver(core, HashExecutor(capacity, model=MODEL, depth=depth))


def finish(driver: Driver) -> Mapping[str, Outcome]:
    """Turn until nothing is left, with a check of all laws after each."""
    for _ in range(2000):
        if not driver.core.has_work and not driver.stepper.has_flights:
            return driver.outcomes
        driver.turn()
        driver.core.check()
    raise AssertionError("requests are left")


def check_answer(outcome: Outcome, asked: Request) -> None:
    expected = expected_tokens(
        asked.prompt_token_ids, asked.sampling, model=MODEL, max_model_len=CAPACITY.max_model_len, adapter=asked.adapter
    )
    assert tuple(outcome.token_ids) == expected.token_ids
    assert outcome.finish_reason == expected.finish_reason


def running(driver: Driver) -> set[str]:
    return set(driver.core.scheduler.running)


@pytest.mark.parametrize("depth", [1, 2])
def test_each_request_is_answered_with_its_own_adapter(depth: int) -> None:
    driver = drive(depth=depth)
    asked = [request(f"r{idx}", idx % 3, prompt=8) for idx in range(8)]
    driver.turn(*map(Add, asked))
    outcomes = finish(driver)
    for one in asked:
        check_answer(outcomes[one.request_id], one)
    assert len({tuple(outcome.token_ids) for outcome in outcomes.values()}) == 3


def test_prefixes_are_apart_for_each_adapter() -> None:
    driver = drive()
    for name, number in (("a", 1), ("b", 2), ("c", 1), ("d", 0), ("e", 0)):
        driver.turn(Add(request(name, number, prompt=16, cache_salt=b"")))
        finish(driver)
    cached = {name: outcome.last.num_cached_tokens for name, outcome in driver.outcomes.items()}
    assert cached == {"a": 0, "b": 0, "c": 15, "d": 0, "e": 15}


def test_a_server_without_adapters_says_so() -> None:
    driver = drive(adapters=None)
    driver.turn(Add(request("a", 1)))
    assert driver.outcomes["a"].finish_reason is FinishReason.REJECTED
    assert "--lora-modules" in driver.outcomes["a"].last.detail


# pages


def test_an_idle_adapter_stays_until_its_memory_is_wanted() -> None:
    source = FakeAdapters(num_pages=lambda _: 3)
    driver = drive(adapters=source)
    driver.turn(Add(request("a", 1)))
    finish(driver)
    pool, adapters = driver.core.scheduler.kv.pool, driver.core.scheduler.kv.adapters
    assert pool.num_available == driver.core.scheduler.kv.num_total_blocks
    assert not adapters.num_pinned_blocks
    source.forget_all()  # it is in the pool, and need not be in memory
    driver.turn(Add(request("b", 1)))
    finish(driver)
    assert (adapters.num_placements, adapters.num_evictions) == (1, 0)
    source.forget_all()
    driver.turn(
        Add(request("c", prompt=60)), Add(request("d", prompt=59)), Add(request("e", prompt=58)), Add(request("f", prompt=57))
    )
    driver.turn(Add(request("g", 1)))
    finish(driver)
    assert (adapters.num_placements, adapters.num_evictions, source.num_loads) == (2, 1, 2)


def test_blocks_that_are_copied_in_between_steps_may_take_an_idle_adapters_place() -> None:
    driver = drive()
    for name in "ab":
        asked = request(name, 1)
        driver.turn(Add(asked))
        check_answer(finish(driver)[name], asked)
        kv = driver.core.scheduler.kv
        spans = [Span(b"", [bytes([first, idx]) * 8 for idx in range(kv.num_total_blocks)]) for first in range(8)]
        rooms = [kv.exchange.make_room(span) for span in spans]
        assert not kv.adapters.residents
        driver.core.check()
        for room, span in zip(rooms, spans, strict=True):
            kv.exchange.publish(room, span, 0, group=None)
    assert (kv.adapters.num_placements, kv.adapters.num_evictions) == (2, 2)


def test_idle_adapters_preempt_nobody() -> None:
    """And leave room at once: their pages count as available."""
    capacity = Capacity(num_blocks=17, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=64)
    driver = drive(capacity, adapters=FakeAdapters(num_pages=lambda _: 4), enable_prefix_caching=False)
    for number in (1, 2, 3):
        driver.turn(Add(request(f"a{number}", number)))
        finish(driver)
    assert driver.core.scheduler.kv.adapters.residents.keys() == {1, 2, 3}
    asked = request("long", prompt=50, max_tokens=14)
    driver.turn(Add(asked))
    finish(driver)
    check_answer(driver.outcomes["long"], asked)
    assert asked.num_preemptions == 0
    assert not driver.core.scheduler.kv.adapters.residents


@pytest.mark.parametrize("depth", [1, 2])
def test_a_thousand_loads_and_evictions_leave_the_pool_flat(depth: int) -> None:
    capacity = Capacity(num_blocks=33, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=64)
    driver = drive(capacity, depth=depth, adapters=FakeAdapters(num_pages=lambda number: 1 + number % 5, max_in_memory=2))
    for number in range(1, 1001):
        driver.turn(Add(request(f"r{number}", number, max_tokens=1)))
        if number % 4 == 0:
            finish(driver)
    kv = driver.core.scheduler.kv
    assert kv.pool.num_available == kv.num_total_blocks
    assert kv.adapters.num_placements == 1000
    assert len(kv.adapters.residents) == 1000 - kv.adapters.num_evictions < 33
    assert isinstance(driver.executor, HashExecutor)
    assert driver.executor.adapters.keys() == kv.adapters.residents.keys()


def test_an_adapter_that_is_evicted_in_the_step_of_its_placement_is_not_placed() -> None:
    """Its blocks may be the destinations of copies, which come before."""
    kv = make_core(CAPACITY, EAGER, adapters=FakeAdapters()).scheduler.kv
    source = FakeAdapters(num_pages=lambda _: 3)
    source.want(make_adapter(1))
    kv.adapters.pin(1, source.state(1).packed)
    kv.adapters.unpin(1, None)
    kv._take(kv.pool.num_available)
    assert kv.adapters.take_placements() == []
    assert kv.adapters.take_drops() == [], "the executor never heard of it"


def test_a_copy_is_made_before_an_adapter_gets_its_source() -> None:
    """A prefix that ends inside a block is copied, and the adapter's pages take that very block."""
    capacity = Capacity(num_blocks=7, block_size=4, max_rows=1, max_step_tokens=32, max_model_len=20)
    driver = drive(capacity, adapters=FakeAdapters(num_pages=lambda _: 3))
    for name, number, prompt in (("a", 1, 6), ("b", 0, 15), ("c", 1, 6)):
        asked = request(name, number, prompt=prompt, max_tokens=1, cache_salt=b"")
        driver.turn(Add(asked))
        finish(driver)
        check_answer(driver.outcomes[name], asked)
    assert driver.core.scheduler.kv.adapters.num_placements == 2
    assert driver.outcomes["c"].last.num_cached_tokens == 5


def test_a_request_that_does_not_fit_beside_its_adapter_is_refused() -> None:
    driver = drive(adapters=FakeAdapters(num_pages=lambda _: 60))
    driver.turn(Add(request("a", 1, prompt=30)))
    driver.turn()
    assert driver.outcomes["a"].finish_reason is FinishReason.REJECTED
    assert "takes 60 blocks" in driver.outcomes["a"].last.detail
    small = request("b", 1)
    driver.turn(Add(small))
    finish(driver)
    check_answer(driver.outcomes["b"], small)


def test_what_is_known_never_to_fit_is_refused_before_it_waits() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(num_pages=lambda _: 60, worker=worker), max_rows=1)
    driver.turn(Add(request("first")), Add(request("a", 1, prompt=30)))
    refused = driver.outcomes["a"].last
    assert (refused.finish_reason, refused.reject_reason) == (FinishReason.REJECTED, "never_fits")
    told = "takes 60 blocks of the KV cache and the request may take 9, but there are 64. Ask for fewer tokens"
    assert told in refused.detail
    assert not worker.num_jobs, "nothing is loaded for it"
    assert finish(driver)["first"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("numbers", "num_let_in"), [(range(1, 31), 3), ([1] * 30, 13), ([0] * 30, 17)])
def test_the_door_lets_in_as_many_as_the_pool_holds_beside_their_adapters(numbers: Sequence[int], num_let_in: int) -> None:
    """So nobody loses a place. A request takes three blocks and an adapter ten, of 64, of which a fifth stays free."""
    source = FakeAdapters(num_pages=lambda _: 10)
    capacity = replace(CAPACITY, max_rows=32, max_step_tokens=256)
    door = Admission(AdmissionLimits(slo_ttft_ns=10**18), capacity, adapters=source, max_adapters=32)
    driver = drive(capacity, adapters=source, observer=door)
    asked = [request(f"r{idx}", number) for idx, number in enumerate(numbers)]
    for idx, one in enumerate(asked):
        load = make_load(num_waiting=idx, num_rows_free=32, num_blocks_total=64, num_blocks_free=64)
        ask = Ask(num_token_ids=8, max_new_tokens=4, adapter=one.adapter)
        if idx == num_let_in:
            with pytest.raises(Rejected, match="the KV cache is too full"):
                door.decide(ask, load, 0)
            break
        entering = door.decide(ask, load, 0)
        door.add_requests(entering, [one], 0)
        door.end_entering(entering)
    del asked[num_let_in:]
    driver.turn(*map(Add, asked))
    assert len(running(driver)) == num_let_in
    finish(driver)
    assert sum(one.num_preemptions for one in asked) == 0


# loads


def test_an_adapter_that_loads_lets_others_pass_and_is_first_after() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(worker=worker), max_rows=2)
    driver.turn(Add(request("a", 1)), Add(request("b")), Add(request("c")))
    assert running(driver) == {"b"}, "one row is kept"
    assert driver.core.scheduler.news.set_aside == [("a", WaitReason.ADAPTER)]
    driver.turn()
    assert running(driver) == {"b"}
    worker.run(2)
    driver.turn()
    assert running(driver) == {"a", "b"}
    finish(driver)
    assert list(driver.outcomes) == ["b", "a", "c"]


def test_an_adapter_that_can_not_be_had_is_told_with_its_cause() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(worker=worker, failing=[1]))
    driver.turn(Add(request("a", 1)), Add(request("b")))
    worker.run(2)
    finish(driver)
    assert driver.outcomes["a"].finish_reason is FinishReason.REJECTED
    assert driver.outcomes["a"].last.detail == "adapter 1 is broken, as it was told to be"
    assert driver.outcomes["b"].finish_reason is FinishReason.LENGTH


def test_an_adapter_that_does_not_come_is_given_up() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(worker=worker))
    driver.turn(Add(request("a", 1)))
    assert driver.was_idle
    assert driver.core.next_wakeup_ns(driver.clock.now_ns()) == KEPT_NS
    driver.clock.advance(KEPT_NS)
    driver.turn()
    assert driver.core.next_wakeup_ns(driver.clock.now_ns()) == LOAD_TIMEOUT_NS
    driver.clock.advance_to(LOAD_TIMEOUT_NS)
    driver.turn()
    assert driver.outcomes["a"].finish_reason is FinishReason.REJECTED
    assert driver.outcomes["a"].last.reject_reason == "unavailable"


def test_those_who_wait_for_a_disk_that_hangs_keep_rows_from_others_for_a_second_alone() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(worker=worker), max_rows=2)
    driver.turn(*[Add(request(f"r{number}", number)) for number in (1, 2, 3)], Add(request("base")))
    assert running(driver) == set()
    assert driver.core.next_wakeup_ns(driver.clock.now_ns()) == KEPT_NS
    driver.clock.advance(KEPT_NS)
    driver.turn()
    assert running(driver) == {"base"}
    worker.run(2)
    driver.turn()
    assert running(driver) == {"base", "r1"}, "it is the next, though its place was not kept"
    worker.run(worker.num_jobs)
    finish(driver)
    assert {outcome.finish_reason for outcome in driver.outcomes.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_step_asks_once_for_an_adapter_that_many_wait_for(order: str) -> None:
    class Counting(FakeAdapters):
        num_wants = 0

        def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
            self.num_wants += is_urgent
            super().want(ref, is_urgent=is_urgent)

    source = Counting(worker=LateWorker())
    driver = drive(adapters=source, policies=make_policies(order=order), max_rows=2)
    driver.turn(*[Add(request(f"r{idx}", 1 + idx % 2)) for idx in range(20)], Add(request("base", max_tokens=30)))
    driver.clock.advance(KEPT_NS)
    while not running(driver):
        driver.turn()
    assert len(driver.core.scheduler._queues.waiting.aside) == 20
    source.num_wants = 0
    driver.turn()
    assert source.num_wants == 2


def test_an_adapter_that_comes_while_the_engine_sleeps_is_seen_when_it_is_woken() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(worker=worker))
    driver.turn(Add(request("a", 1)))
    assert driver.core.next_wakeup_ns(driver.clock.now_ns()) is not None
    worker.run(2)
    driver.clock.advance(LOAD_TIMEOUT_NS)
    finish(driver)
    assert driver.outcomes["a"].finish_reason is FinishReason.LENGTH


def test_a_request_that_is_cancelled_while_its_adapter_loads_leaves_nothing() -> None:
    worker = LateWorker()
    driver = drive(adapters=FakeAdapters(worker=worker), max_rows=1)
    driver.turn(Add(request("a", 1)), Add(request("b")))
    driver.turn(Abort("a"))
    assert running(driver) == {"b"}
    worker.run(2)
    finish(driver)
    assert not driver.core.scheduler.kv.adapters.residents


def test_a_preempted_request_waits_for_its_adapter_anew() -> None:
    worker = LateWorker()
    source = FakeAdapters(worker=worker, num_pages=lambda _: 3)
    capacity = Capacity(num_blocks=11, block_size=4, max_rows=2, max_step_tokens=32, max_model_len=32)
    driver = drive(capacity, adapters=source, enable_prefix_caching=False)
    asked = [request("a", prompt=12, max_tokens=20), request("b", 1, prompt=7, max_tokens=15, arrival_ns=1)]
    worker.run(2)
    driver.turn(*map(Add, asked))
    worker.run(2)
    while not asked[1].num_preemptions:
        driver.turn()
    source.forget_all()
    for _ in range(100):
        if not driver.core.has_work:
            break
        driver.turn()
        worker.run()
        driver.core.check()
    for one in asked:
        expected = expected_tokens(one.prompt_token_ids, one.sampling, model=MODEL, max_model_len=32, adapter=one.adapter)
        assert tuple(driver.outcomes[one.request_id].token_ids) == expected.token_ids
    assert source.num_loads == 2


# adapters in a step


def test_as_many_adapters_run_as_may() -> None:
    """And nobody passes who waits for one of them to end."""
    driver = drive(max_adapters=2)
    asked = [request(f"r{idx}", number, max_tokens=3) for idx, number in enumerate((1, 2, 1, 3, 1, 0, 4))]
    driver.turn(*map(Add, asked))
    assert running(driver) == {"r0", "r1", "r2"}
    assert driver.core.scheduler.news.waits_for is WaitReason.ADAPTER
    first_tokens: list[str] = []
    while driver.core.has_work:
        driver.turn()
        assert driver.core.scheduler.kv.adapters.num_pinned <= 2
        driver.core.check()
        first_tokens += [one for one in driver.outcomes if one not in first_tokens]
    assert first_tokens == [one.request_id for one in asked]
    for one in asked:
        check_answer(driver.outcomes[one.request_id], one)


def test_decodes_of_one_adapter_lie_side_by_side() -> None:
    driver = drive(replace(CAPACITY, max_rows=8, max_step_tokens=128))
    driver.turn(*[Add(request(f"r{idx}", number, max_tokens=5)) for idx, number in enumerate((2, 1, 0, 2, 1, 0))])
    driver.turn()
    assert [row.request_id for row in driver.plans[-1].rows] == ["r2", "r5", "r1", "r4", "r0", "r3"]
    finish(driver)


def test_a_failure_wakes_an_engine_that_has_nothing_else_to_do() -> None:
    worker = LateWorker()
    source = FakeAdapters(worker=worker, failing=[1])
    core = make_core(CAPACITY, EAGER, adapters=source)
    outcomes = run_to_completion(core, HashExecutor(CAPACITY, model=MODEL), Add(request("a", 1)), worker=worker)
    assert outcomes["a"].finish_reason is FinishReason.REJECTED
