"""The core's promises: every request ends once, at once and honestly."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.core import DEADLINE_EXCEEDED
from penstock.engine.ports import NullObserver
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import (
    Driver,
    HashExecutor,
    HashModel,
    expected_tokens,
    make_core,
    make_request,
    run_to_completion,
)
from penstock.types.errors import RejectReason
from penstock.types.events import Abort, Add, Command, Drain, Stop, TokenEvent
from penstock.types.request import FinishReason
from penstock.types.result import StepResult, StepTiming
from penstock.types.stats import RequestStats, StepStats
from support.failing_executor import FailingExecutor, RowFailingExecutor


class Recorder(NullObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.finished: list[RequestStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_finish(self, stats: RequestStats) -> None:
        self.finished.append(stats)


def make_driver(*, model: HashModel | None = None, **options: Any) -> Driver:
    core = make_core(**options)
    return Driver(core, HashExecutor(core.scheduler.capacity, model=model))


def only(events: list[TokenEvent]) -> TokenEvent:
    (event,) = events
    return event


class TestEnds:
    def test_max_tokens_ends_with_length(self) -> None:
        driver = make_driver()
        outcome = run_to_completion(driver.core, driver.executor, Add(make_request(max_tokens=5)))["r0"]
        assert len(outcome.token_ids) == 5
        assert outcome.finish_reason is FinishReason.LENGTH
        assert outcome.last.stop_reason is None

    def test_max_model_len_ends_with_length(self) -> None:
        driver = make_driver(max_model_len=12)
        outcome = run_to_completion(driver.core, driver.executor, Add(make_request(prompt=8, max_tokens=100)))["r0"]
        assert len(outcome.token_ids) == 4
        assert outcome.finish_reason is FinishReason.LENGTH

    def test_a_stop_token_ends_with_stop_and_is_told(self) -> None:
        model = HashModel(eos_token_id=7, eos_period=3)
        driver = make_driver(model=model)
        request = make_request(max_tokens=500, stop_token_ids=(7,))
        outcome = run_to_completion(driver.core, driver.executor, Add(request))["r0"]
        assert outcome.token_ids[-1] == 7
        assert 7 not in outcome.token_ids[:-1]
        assert (outcome.finish_reason, outcome.last.stop_reason) == (FinishReason.STOP, 7)

    def test_a_stop_token_on_the_last_place_is_a_stop(self) -> None:
        model = HashModel(eos_token_id=7, eos_period=1)
        driver = make_driver(model=model)
        request = make_request(max_tokens=1, stop_token_ids=(7,))
        assert run_to_completion(driver.core, driver.executor, Add(request))["r0"].finish_reason is FinishReason.STOP

    def test_no_stop_before_min_tokens(self) -> None:
        """Even if an executor samples one: the scheduler checks for itself."""
        core = make_core()
        core.apply([Add(make_request(stop_token_ids=(7,), min_tokens=2, max_tokens=9))], 0)
        for num_generated in (1, 2, 3):
            plan = core.begin(0)
            assert plan is not None
            event = only(core.finish(plan, StepResult(plan.step_id, {"r0": (7,)}, StepTiming(0, 0)), 0))
            assert (event.finish_reason is FinishReason.STOP) == (num_generated == 3)

    def test_the_finish_event_carries_the_last_token(self) -> None:
        driver = make_driver()
        outcome = run_to_completion(driver.core, driver.executor, Add(make_request(max_tokens=3)))["r0"]
        assert [len(event.token_ids) for event in outcome.events] == [1, 1, 1]
        assert [event.finish_reason for event in outcome.events] == [None, None, FinishReason.LENGTH]

    def test_logprobs_are_handed_on(self) -> None:
        driver = make_driver()
        requests = make_request("asks", max_tokens=2, logprobs=3), make_request("asks not", max_tokens=2)
        outcomes = run_to_completion(driver.core, driver.executor, *map(Add, requests))
        for event in outcomes["asks"].events:
            assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
        assert all(event.logprobs == () for event in outcomes["asks not"].events)


class TestAbortAndStop:
    @pytest.mark.parametrize("num_turns", [0, 1, 3])
    def test_an_abort_ends_at_once_and_frees_the_blocks(self, num_turns: int) -> None:
        driver = make_driver()
        driver.core.apply([Add(make_request())], 0)
        for _ in range(num_turns):
            driver.turn()
        event = only(driver.core.apply([Abort("r0", "client gone")], 5))
        assert (event.finish_reason, event.detail, event.token_ids, event.at_ns) == (FinishReason.ABORT, "client gone", (), 5)
        kv = driver.core.scheduler.kv
        assert kv.pool.num_available == kv.num_total_blocks
        assert not driver.core.has_work
        driver.core.check()

    def test_the_executor_forgets_with_the_next_plan(self) -> None:
        driver = make_driver()
        driver.turn(Add(make_request("a")))
        assert driver.turn(Abort("a")) is None, "releases alone are no reason for a step"
        plan = driver.turn(Add(make_request("b")))
        assert plan is not None
        assert plan.releases == ("a",)

    def test_a_request_that_never_ran_is_not_released(self) -> None:
        driver = make_driver()
        driver.turn(Add(make_request("a")), Abort("a"))
        plan = driver.turn(Add(make_request("b")))
        assert plan is not None
        assert plan.releases == ()

    @pytest.mark.parametrize("command", [Abort("r0"), Stop("r0", "###")])
    def test_a_request_may_end_while_its_row_is_in_flight(self, command: Command) -> None:
        driver = make_driver()
        core, executor = driver.core, driver.executor
        requests = [make_request(f"r{idx}", max_tokens=4) for idx in range(2)]
        core.apply(map(Add, requests), 0)
        plan = core.begin(0)
        assert plan is not None
        result = executor.collect(executor.submit(plan))
        assert only(core.apply([command], 0)).request_id == "r0"
        events = core.finish(plan, result, 1)
        assert [event.request_id for event in events] == ["r1"], "the row of the ended request is void"
        core.check()
        outcomes = run_to_completion(core, executor)
        assert "r0" not in outcomes

    def test_a_name_can_be_used_again_while_its_old_row_is_in_flight(self) -> None:
        driver = make_driver()
        core, executor = driver.core, driver.executor
        core.apply([Add(make_request("r0", 8))], 0)
        plan = core.begin(0)
        assert plan is not None
        result = executor.collect(executor.submit(plan))
        successor = make_request("r0", [9, 8, 7], max_tokens=4)
        core.apply([Abort("r0"), Add(successor)], 0)
        assert core.finish(plan, result, 0) == []
        outcome = run_to_completion(core, executor)["r0"]
        expected = expected_tokens([9, 8, 7], successor.sampling, model=HashModel(), max_model_len=4096)
        assert tuple(outcome.token_ids) == expected.token_ids

    def test_a_stop_names_its_string(self) -> None:
        driver = make_driver()
        driver.turn(Add(make_request()))
        event = only(driver.core.apply([Stop("r0", "###")], 0))
        assert (event.finish_reason, event.stop_reason) == (FinishReason.STOP, "###")

    @pytest.mark.parametrize("command", [Abort("nobody"), Stop("nobody", "###")])
    def test_unknown_and_ended_requests_are_ignored(self, command: Command) -> None:
        assert make_core().apply([command], 0) == []


class TestRefusals:
    def test_what_can_never_fit_is_refused_at_once_with_the_numbers(self) -> None:
        core = make_core(num_blocks=5, block_size=4)
        event = only(core.apply([Add(make_request(prompt=10, max_tokens=8))], 3))
        assert (event.finish_reason, event.reject_reason) == (FinishReason.REJECTED, RejectReason.NEVER_FITS)
        assert "18" in event.detail
        assert "17" in event.detail
        assert not core.has_work

    def test_a_prompt_that_is_too_long_is_refused(self) -> None:
        event = only(make_core(max_model_len=10).apply([Add(make_request(prompt=10))], 0))
        assert event.reject_reason == RejectReason.CONTEXT_LENGTH

    def test_what_just_fits_finishes_alone(self) -> None:
        driver = make_driver(num_blocks=5, block_size=4)
        outcome = run_to_completion(driver.core, driver.executor, Add(make_request(prompt=10, max_tokens=7)))["r0"]
        assert len(outcome.token_ids) == 7

    def test_a_name_in_use_is_a_bug(self) -> None:
        core = make_core()
        core.apply([Add(make_request("a"))], 0)
        with pytest.raises(ValueError, match="'a' was added already"):
            core.apply([Add(make_request("a"))], 0)

    def test_draining_refuses_the_new_and_finishes_the_old(self) -> None:
        driver = make_driver()
        old, new = make_request("old", max_tokens=3), make_request("new")
        outcomes = run_to_completion(driver.core, driver.executor, Add(old), Drain(), Add(new))
        assert len(outcomes["old"].token_ids) == 3
        assert outcomes["new"].finish_reason is FinishReason.REJECTED
        assert outcomes["new"].last.reject_reason == RejectReason.DRAINING


class TestDeadlines:
    def test_a_waiting_request_ends_at_its_deadline(self) -> None:
        driver = make_driver(max_rows=1)
        requests = make_request("a", max_tokens=50), make_request("b", deadline_ns=3_000_000)
        outcomes = run_to_completion(driver.core, driver.executor, *map(Add, requests))
        last = outcomes["b"].last
        assert (last.finish_reason, last.detail) == (FinishReason.ABORT, DEADLINE_EXCEEDED)
        assert last.reject_reason == RejectReason.DEADLINE
        assert last.at_ns == 3_000_000
        assert len(outcomes["a"].token_ids) == 50

    def test_a_running_request_ends_at_its_deadline(self) -> None:
        driver = make_driver()
        outcome = run_to_completion(driver.core, driver.executor, Add(make_request(max_tokens=50, deadline_ns=3_000_000)))["r0"]
        assert outcome.finish_reason is FinishReason.ABORT
        assert len(outcome.token_ids) == 2, "the third step ended at the deadline, which comes before its tokens"

    def test_the_next_wake_up_is_the_earliest_deadline_of_those_that_live(self) -> None:
        core = make_core()
        assert core.next_wakeup_ns(0) is None
        core.apply([Add(make_request(f"r{at}", deadline_ns=at)) for at in (30, 10, 20)], 0)
        assert core.next_wakeup_ns(0) == 10
        core.apply([Abort("r10")], 0)
        assert core.next_wakeup_ns(0) == 20
        assert [event.request_id for event in core.apply([], 30)] == ["r20", "r30"]
        assert core.next_wakeup_ns(0) is None

    def test_a_deadline_that_has_passed_on_arrival_is_an_end_too(self) -> None:
        event = only(make_core().apply([Add(make_request(deadline_ns=5))], 6))
        assert event.reject_reason == RejectReason.DEADLINE

    def test_a_request_in_time_is_left_alone(self) -> None:
        driver = make_driver()
        outcome = run_to_completion(driver.core, driver.executor, Add(make_request(max_tokens=3, deadline_ns=10**12)))["r0"]
        assert outcome.finish_reason is FinishReason.LENGTH
        assert driver.core.next_wakeup_ns(0) is None


class TestFailure:
    @pytest.mark.parametrize("is_in_submit", [True, False])
    def test_when_the_executor_fails_every_request_hears_of_it(self, is_in_submit: bool) -> None:
        core = make_core(max_rows=2)
        executor = FailingExecutor(HashExecutor(core.scheduler.capacity), fail_at_step=2, is_in_submit=is_in_submit)
        outcomes = run_to_completion(core, executor, *(Add(make_request(f"r{idx}")) for idx in range(4)))
        assert [len(outcome.token_ids) for outcome in outcomes.values()] == [2, 2, 0, 0]
        for outcome in outcomes.values():
            assert outcome.finish_reason is FinishReason.ERROR
            assert "failed" in outcome.last.detail
        core.check()

    def test_a_row_that_fails_ends_its_request_and_no_other(self) -> None:
        recorder = Recorder()
        core = make_core(observer=recorder)
        requests = [make_request(f"r{idx}", 5 + idx, max_tokens=6) for idx in range(3)]
        executor = RowFailingExecutor(HashExecutor(core.scheduler.capacity), request_ids=frozenset({"r1"}), fail_at_step=2)
        outcomes = run_to_completion(core, executor, *map(Add, requests))
        assert [outcome.finish_reason for outcome in outcomes.values()] == [
            FinishReason.LENGTH,
            FinishReason.ERROR,
            FinishReason.LENGTH,
        ]
        for request in requests:
            model = HashModel()
            expected = expected_tokens(request.prompt_token_ids, request.sampling, model=model, max_model_len=4096).token_ids
            assert tuple(outcomes[request.request_id].token_ids) == tuple(expected)[: 2 if request.request_id == "r1" else None]
        assert "no usable logit" in outcomes["r1"].last.detail
        assert sum(stats.counts.num_sampled_tokens for stats in recorder.steps) == 6 + 2 + 6
        core.check()

    def test_a_failed_row_of_a_request_that_was_aborted_counts_for_nothing(self) -> None:
        recorder = Recorder()
        core = make_core(observer=recorder)
        executor = RowFailingExecutor(HashExecutor(core.scheduler.capacity), request_ids=frozenset({"r0"}), fail_at_step=0)
        core.apply([Add(make_request("r0"))], 0)
        plan = core.begin(0)
        assert plan is not None
        result = executor.collect(executor.submit(plan))
        core.apply([Abort("r0")], 0)
        assert core.finish(plan, result, 0) == []
        assert [stats.counts.num_sampled_tokens for stats in recorder.steps] == [0]

    def test_after_a_failure_nothing_is_accepted(self) -> None:
        core = make_core()
        core.fail_all("broken", 0)
        event = only(core.apply([Add(make_request())], 0))
        assert (event.finish_reason, event.reject_reason) == (FinishReason.REJECTED, RejectReason.UNAVAILABLE)

    def test_a_result_of_another_step_is_a_bug(self) -> None:
        core = make_core()
        core.apply([Add(make_request())], 0)
        plan = core.begin(0)
        assert plan is not None
        with pytest.raises(ValueError, match="result of step 9"):
            core.finish(plan, StepResult(9, {}, StepTiming(0, 0)), 0)

    def test_a_row_without_its_token_is_a_bug(self) -> None:
        core = make_core()
        core.apply([Add(make_request())], 0)
        plan = core.begin(0)
        assert plan is not None
        with pytest.raises(KeyError):
            core.finish(plan, StepResult(plan.step_id, {}, StepTiming(0, 0)), 0)


class TestObserver:
    def test_steps_are_told_with_their_counts(self) -> None:
        recorder = Recorder()
        driver = make_driver(observer=recorder, block_size=4, num_blocks=21)
        requests = make_request("a", 10, max_tokens=2), make_request("b", 10, arrival_ns=1, max_tokens=2)
        driver.turn(Add(requests[0]))
        driver.turn(Add(requests[1]))
        driver.turn()
        first, second, third = recorder.steps
        assert (first.step_id, first.counts.num_rows, first.counts.num_tokens, first.counts.num_sampled_tokens) == (0, 1, 10, 1)
        assert (first.counts.num_prefix_query_tokens, first.counts.num_prefix_hit_tokens) == (10, 0)
        assert (second.counts.num_prefix_query_tokens, second.counts.num_prefix_hit_tokens) == (10, 9)
        assert (second.counts.num_rows, second.counts.num_tokens, second.num_running, second.num_waiting) == (2, 2, 1, 0)
        assert (third.num_blocks_total, third.num_blocks_free, third.num_blocks_cached) == (20, 17, 3)
        assert first.parts_ns["execute"] == first.ended_ns - first.started_ns == 1_000_000

    def test_preemptions_are_told(self) -> None:
        recorder = Recorder()
        policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
        driver = make_driver(policies=policies, observer=recorder, block_size=4, num_blocks=15)
        requests = [make_request(f"r{idx}", [idx + 1] * 4, arrival_ns=idx, max_tokens=37) for idx in range(3)]
        run_to_completion(driver.core, driver.executor, *map(Add, requests))
        total = sum(stats.counts.num_preemptions for stats in recorder.steps)
        assert total == sum(request.num_preemptions for request in requests) > 0

    @pytest.mark.parametrize("max_step_tokens", [512, 7])
    def test_what_preemptions_cost_is_told(self, max_step_tokens: int) -> None:
        """All positions computed, but those that each request needs once."""
        recorder = Recorder()
        policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
        options = {"block_size": 4, "num_blocks": 15, "max_step_tokens": max_step_tokens, "enable_prefix_caching": False}
        driver = make_driver(policies=policies, observer=recorder, **options)
        requests = [make_request(f"r{idx}", [idx + 1] * 4, arrival_ns=idx, max_tokens=37) for idx in range(3)]
        run_to_completion(driver.core, driver.executor, *map(Add, requests))
        num_needed = sum(request.num_tokens - 1 for request in requests)
        num_recomputed = sum(stats.counts.num_recomputed_tokens for stats in recorder.steps)
        assert num_recomputed == driver.executor.num_computed_tokens - num_needed > 0

    def test_every_request_is_told_once_however_it_ended(self) -> None:
        recorder = Recorder()
        driver = make_driver(observer=recorder, max_model_len=100)
        requests = [make_request("long", 200), make_request("cut", 5), make_request("done", 5, max_tokens=3)]
        driver.turn(*map(Add, requests))
        driver.turn(Abort("cut"))
        driver.turn()
        by_id = {stats.request_id: stats for stats in recorder.finished}
        assert len(by_id) == len(recorder.finished) == 3
        assert by_id["long"].finish_reason is FinishReason.REJECTED
        assert by_id["long"].reject_reason == RejectReason.CONTEXT_LENGTH
        assert (by_id["cut"].finish_reason, by_id["cut"].num_generated_tokens) == (FinishReason.ABORT, 1)
        done = by_id["done"]
        assert (done.num_prompt_tokens, done.num_generated_tokens) == (5, 3)
        assert (done.first_scheduled_ns, done.first_token_ns, done.ended_ns) == (0, 1_000_000, 3_000_000)


class TestPrefixSharing:
    def test_equal_prompts_one_after_another_hit(self) -> None:
        driver = make_driver(block_size=4)
        first, second = make_request("a", 30, max_tokens=1), make_request("b", 30, max_tokens=1)
        run_to_completion(driver.core, driver.executor, Add(first))
        computed = driver.executor.num_computed_tokens
        outcome = run_to_completion(driver.core, driver.executor, Add(second))["b"]
        assert outcome.last.num_cached_tokens == second.num_cached_tokens == 29
        assert driver.executor.num_computed_tokens - computed == 1

    def test_equal_prompts_of_other_salts_do_not(self) -> None:
        driver = make_driver(block_size=4)
        run_to_completion(driver.core, driver.executor, Add(make_request("a", 30)))
        for name, salt in (("b", b"salt"), ("c", b"pepper")):
            request = make_request(name, 30, cache_salt=salt)
            run_to_completion(driver.core, driver.executor, Add(request))
            assert request.num_cached_tokens == 0

    def test_a_conversation_finds_its_last_answer(self) -> None:
        driver = make_driver(block_size=4)
        first = make_request("a", 9, max_tokens=8)
        outcome = run_to_completion(driver.core, driver.executor, Add(first))["a"]
        follow_up = make_request("b", [*first.prompt_token_ids, *outcome.token_ids, 5, 5])
        run_to_completion(driver.core, driver.executor, Add(follow_up))
        assert follow_up.num_cached_tokens == 16
