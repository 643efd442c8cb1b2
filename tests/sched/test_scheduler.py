"""The scheduler's plans, step by step. Requests run on the hash executor, which checks every plan."""

from __future__ import annotations

import pytest

from penstock.sched.policies.base import GateDecision, GateView
from penstock.sched.policies.budgets import DecodeFirst, WholePrompts
from penstock.sched.policies.gates import Continuous
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request
from penstock.types.events import Abort, Add
from penstock.types.plan import StepPlan
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import WaitReason

NO_WATERMARK = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))


def make_driver(*requests: Request, **options: object) -> Driver:
    """A driver whose core has the requests already."""
    core = make_core(**{"max_model_len": 200, "block_size": 4, "num_blocks": 101} | options)  # type: ignore[arg-type]
    driver = Driver(core, HashExecutor(core.scheduler.capacity))
    core.apply([Add(request) for request in requests], 0)
    return driver


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(row.request_id, row.context_len, row.query_len) for row in plan.rows]


def finish(driver: Driver) -> None:
    while driver.core.has_work:
        driver.turn()
        driver.core.check()


class TestBudget:
    def test_decodes_go_before_running_prefills_before_new_ones(self) -> None:
        first, long, new = make_request("first", 4), make_request("long", 30), make_request("new", 20)
        driver = make_driver(first, max_step_tokens=12, enable_prefix_caching=False)
        assert shape(driver.turn()) == [("first", 0, 4)]
        assert shape(driver.turn(Add(long))) == [("first", 4, 1), ("long", 0, 11)]
        assert shape(driver.turn(Add(new))) == [("first", 5, 1), ("long", 11, 11)]
        assert shape(driver.turn()) == [("first", 6, 1), ("long", 22, 8), ("new", 0, 3)]
        assert shape(driver.turn()) == [("first", 7, 1), ("long", 30, 1), ("new", 3, 10)]

    def test_only_the_chunk_that_catches_up_samples(self) -> None:
        driver = make_driver(make_request("r", 10), max_step_tokens=4)
        samples = [plan.rows[0].samples for plan in (driver.turn(), driver.turn(), driver.turn(), driver.turn()) if plan]
        assert samples == [False, False, True, True]

    def test_the_threshold_caps_a_chunk_and_lets_others_in(self) -> None:
        policies = make_policies(budget=DecodeFirst(long_prefill_token_threshold=4))
        requests = make_request("a", 10), make_request("b", [9] * 3)
        driver = make_driver(*requests, max_step_tokens=16, policies=policies)
        assert shape(driver.turn()) == [("a", 0, 4), ("b", 0, 3)]
        assert shape(driver.turn()) == [("b", 3, 1), ("a", 4, 4)]

    def test_short_prompts_pass_a_long_one_that_waits_for_another(self) -> None:
        policies = make_policies(budget=DecodeFirst(long_prefill_token_threshold=8, max_long_partial_prefills=1))
        sizes = {"long": 24, "longer": 30, "short": 4}
        requests = [make_request(*each) for each in sizes.items()]
        driver = make_driver(*requests, max_step_tokens=16, policies=policies, enable_prefix_caching=False)
        plans = [shape(driver.turn()) for _ in range(5)]
        assert plans[0] == [("long", 0, 8), ("short", 0, 4)]
        assert [row for row in plans[1] if row[2] > 1] == [("long", 8, 8)]
        assert [row for row in plans[2] if row[2] > 1] == [("long", 16, 8), ("longer", 0, 7)]
        finish(driver)

    def test_a_request_that_was_held_back_can_be_aborted(self) -> None:
        policies = make_policies(budget=DecodeFirst(long_prefill_token_threshold=8, max_long_partial_prefills=1))
        driver = make_driver(make_request("a", 40), make_request("b", 40), max_step_tokens=16, policies=policies)
        driver.turn()
        driver.core.apply([Abort("b")], 0)
        finish(driver)
        assert driver.core.num_waiting == 0

    def test_whole_prompts_wait_for_a_step_with_room(self) -> None:
        sizes = {"a": 10, "b": 10, "c": 40}
        requests = [make_request(*each) for each in sizes.items()]
        policies = make_policies(budget=WholePrompts())
        driver = make_driver(*requests, max_step_tokens=16, policies=policies, enable_prefix_caching=False)
        assert shape(driver.turn()) == [("a", 0, 10)]
        assert shape(driver.turn()) == [("a", 10, 1), ("b", 0, 10)]
        assert shape(driver.turn()) == [("a", 11, 1), ("b", 10, 1), ("c", 0, 14)]
        finish(driver)

    def test_no_more_run_than_a_step_has_tokens(self) -> None:
        """Else a decode could be left out of a step, for ever."""
        driver = make_driver(*(make_request(f"r{idx}", 1) for idx in range(5)), max_step_tokens=2, max_rows=4)
        for _ in range(4):
            assert len(shape(driver.turn())) == 2
        finish(driver)

    def test_a_step_is_described_by_its_difference(self) -> None:
        driver = make_driver(make_request("r", 6, max_tokens=4))
        plans = [driver.turn() for _ in range(4)]
        assert [len(plan.admits) for plan in plans if plan] == [1, 0, 0, 0]
        assert [len(plan.rows[0].new_block_ids) for plan in plans if plan] == [0, 0, 0, 1]


class TestOrder:
    def test_requests_start_as_they_arrived(self) -> None:
        requests = [make_request(f"r{arrival}", 2, arrival_ns=arrival) for arrival in (3, 1, 2)]
        driver = make_driver(*requests, max_rows=1)
        finish(driver)
        assert list(driver.outcomes) == ["r1", "r2", "r3"]

    def test_nobody_overtakes_a_request_that_waits_for_memory(self) -> None:
        running, large, small = (make_request(name, size, max_tokens=8) for name, size in (("a", 20), ("b", 24), ("c", 2)))
        driver = make_driver(running, large, small, num_blocks=9, max_step_tokens=64, enable_prefix_caching=False)
        assert shape(driver.turn()) == [("a", 0, 20)]
        finish(driver)
        firsts = [request.first_scheduled_ns for request in (running, large, small)]
        assert firsts == sorted(firsts)

    def test_a_waiting_request_starts_when_a_row_is_free(self) -> None:
        driver = make_driver(make_request("a", 2, max_tokens=2), make_request("b", 2), max_rows=1)
        assert [shape(driver.turn())[0][0] for _ in range(3)] == ["a", "a", "b"]

    @pytest.mark.parametrize(
        ("limits", "reason"),
        [
            ({"max_rows": 4}, WaitReason.NOTHING),
            ({"max_rows": 1}, WaitReason.ROWS),
            ({"max_step_tokens": 16}, WaitReason.TOKENS),
            ({"num_blocks": 11, "max_step_tokens": 64}, WaitReason.MEMORY),
        ],
    )
    def test_a_step_says_what_those_who_wait_lack(self, limits: dict[str, int], reason: WaitReason) -> None:
        driver = make_driver(make_request("a", [3] * 16, max_tokens=8), make_request("b", [9] * 24, max_tokens=8), **limits)
        driver.turn()
        assert driver.core.scheduler.news.waits_for is reason
        finish(driver)
        assert driver.core.scheduler.news.waits_for is WaitReason.NOTHING


class TestGate:
    def test_a_closed_gate_admits_nobody_and_says_when_to_ask_again(self) -> None:
        class Window(Continuous):
            def decide(self, view: GateView) -> GateDecision:
                (bucket,) = view.buckets
                wakeup_ns = bucket.oldest_ns + 5_000_000
                return GateDecision(0, wakeup_ns) if view.now_ns < wakeup_ns else GateDecision(1)

        driver = make_driver(make_request("a", [1, 2]), make_request("b", [3, 4]), policies=make_policies(gate=Window()))
        assert driver.turn() is None
        assert driver.core.next_wakeup_ns(0) == 5_000_000
        driver.clock.advance_to(5_000_000)
        assert shape(driver.turn()) == [("a", 0, 2)]
        assert shape(driver.turn()) == [("a", 2, 1), ("b", 0, 2)]
        assert driver.core.next_wakeup_ns(0) is None


class TestMemory:
    @pytest.mark.parametrize(("num_usable_blocks", "num_admitted"), [(6, 2), (5, 1)])
    def test_an_admission_must_find_the_whole_prompt_and_the_watermark(self, num_usable_blocks: int, num_admitted: int) -> None:
        """Two prompts of two blocks; a quarter of the pool, rounded up to two blocks, is to stay free."""
        requests = make_request("a", 8, max_tokens=4), make_request("b", [9] * 8, max_tokens=4)
        policies = make_policies(reserve=Watermark(share=0.25, growth_tokens=0))
        driver = make_driver(*requests, num_blocks=1 + num_usable_blocks, policies=policies)
        assert len(shape(driver.turn())) == num_admitted
        finish(driver)

    def test_the_only_request_ignores_the_watermark(self) -> None:
        policies = make_policies(reserve=Watermark(share=0.9))
        driver = make_driver(make_request("a", 30, max_tokens=10), num_blocks=11, policies=policies)
        finish(driver)
        assert len(driver.outcomes["a"].token_ids) == 10

    def test_no_room_is_kept_for_requests_that_can_not_grow(self) -> None:
        """Six requests of two blocks each, when complete, in a pool of twelve: all run at once, and nobody is preempted."""
        requests = [make_request(f"r{idx}", [idx + 1] * 5, max_tokens=4) for idx in range(6)]
        policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=32))
        driver = make_driver(*requests, num_blocks=13, policies=policies)
        assert len(shape(driver.turn())) == 6
        finish(driver)
        assert not any(request.num_preemptions for request in requests)

    def test_blocks_promised_to_a_running_prefill_are_not_given_away(self) -> None:
        """ "a" holds a chunk only, but will need nearly the whole pool; "b" would fit into what is free now."""
        first, second = make_request("a", 32, max_tokens=1), make_request("b", [9] * 6, max_tokens=1)
        policies = make_policies(
            budget=DecodeFirst(long_prefill_token_threshold=8), reserve=Watermark(share=0.0, growth_tokens=0)
        )
        driver = make_driver(first, second, num_blocks=10, max_step_tokens=32, policies=policies)
        assert shape(driver.turn()) == [("a", 0, 8)]
        finish(driver)
        assert first.num_preemptions == second.num_preemptions == 0

    def test_a_prefix_in_use_costs_nothing(self) -> None:
        prompt = list(range(1, 30))
        first, second = make_request("a", prompt, max_tokens=20), make_request("b", prompt, max_tokens=2)
        driver = make_driver(first, num_blocks=14, policies=NO_WATERMARK)
        driver.turn()
        plan = driver.turn(Add(second))
        assert shape(plan)[1] == ("b", 28, 1)
        assert second.num_cached_tokens == 28


class TestPreemption:
    def make_crowded(self, caching: bool = True) -> tuple[Driver, list[Request]]:
        """Three requests that grow to 10 blocks each; the pool has 14."""
        requests = [make_request(f"r{idx}", [10 + idx] * 4, arrival_ns=idx, max_tokens=37) for idx in range(3)]
        driver = make_driver(*requests, num_blocks=15, policies=NO_WATERMARK, enable_prefix_caching=caching)
        return driver, requests

    @pytest.mark.parametrize("caching", [True, False])
    def test_all_finish_with_the_right_answer(self, caching: bool) -> None:
        driver, requests = self.make_crowded(caching)
        finish(driver)
        assert sum(request.num_preemptions for request in requests) > 0
        for request in requests:
            capacity = driver.core.scheduler.capacity
            expected = expected_tokens(
                request.prompt_token_ids, request.sampling, model=driver.executor.model, max_model_len=capacity.max_model_len
            )
            assert tuple(driver.outcomes[request.request_id].token_ids) == expected.token_ids

    def test_the_oldest_is_never_preempted(self) -> None:
        driver, requests = self.make_crowded()
        finish(driver)
        assert requests[0].num_preemptions == 0

    def test_the_executor_forgets_the_victim_and_gets_it_back_in_full(self) -> None:
        driver, requests = self.make_crowded()
        while requests[2].status is not RequestStatus.PREEMPTED:
            plan = driver.turn()
        assert plan is not None
        assert plan.releases == ("r2",)
        assert "r2" not in [row[0] for row in shape(plan)]
        known = requests[2].num_tokens
        while requests[2].status is RequestStatus.PREEMPTED:
            plan = driver.turn()
        assert plan is not None
        (admit,) = (admit for admit in plan.admits if admit.request_id == "r2")
        assert len(admit.token_ids) == known
        assert admit.num_prompt_tokens == 4

    def test_with_a_cache_most_of_the_work_is_not_done_again(self) -> None:
        computed = []
        for caching in (True, False):
            driver, _ = self.make_crowded(caching)
            finish(driver)
            computed.append(driver.executor.num_computed_tokens)
        assert computed[0] < computed[1]

    def test_new_requests_wait_until_the_preempted_are_back(self) -> None:
        driver, requests = self.make_crowded()
        while requests[2].status is not RequestStatus.PREEMPTED:
            driver.turn()
        newcomer = make_request("new", 1, max_tokens=1)
        driver.core.apply([Add(newcomer)], driver.clock.now_ns())
        while newcomer.first_scheduled_ns is None:
            driver.turn()
            assert newcomer.first_scheduled_ns is None or requests[2].status is not RequestStatus.PREEMPTED
        finish(driver)

    def test_cached_tokens_are_those_of_the_first_admission(self) -> None:
        driver, requests = self.make_crowded()
        finish(driver)
        assert [request.num_cached_tokens for request in requests] == [0, 0, 0]

    def test_a_step_does_not_both_preempt_and_admit(self) -> None:
        driver, requests = self.make_crowded()
        driver.core.apply([Add(make_request("new", 1))], 0)
        preempted = 0
        while driver.core.has_work:
            plan = driver.turn()
            now = sum(request.num_preemptions for request in requests)
            assert plan is not None
            assert now == preempted or not plan.admits
            preempted = now


class TestCopyOnWrite:
    def test_a_row_whose_last_block_was_shared_is_sent_again(self) -> None:
        """As a fork of the request would cause: the row gets a copy of its block, and the executor the new table."""
        request = make_request("a", 6, max_tokens=6)
        driver = make_driver(request)
        driver.turn()
        kv = driver.core.scheduler.kv
        shared = kv.block_table("a")
        kv.fork("a", "other", 6)
        plan = driver.turn()
        assert plan is not None
        assert plan.releases == ("a",)
        (admit,) = plan.admits
        assert admit.num_computed_tokens == 6
        assert admit.block_ids[0] == shared[0]
        assert admit.block_ids[1] != shared[1]
        kv.free("other")
        finish(driver)
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=driver.executor.model, max_model_len=200)
        assert tuple(driver.outcomes["a"].token_ids) == expected.token_ids
