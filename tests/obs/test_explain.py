"""The explanation of a request, against a witness who was there: times, batches, gaps and pauses add up, whatever happens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.obs.explain.explanation import (
    BACKGROUND,
    GRAMMAR,
    INTAKE,
    MODEL,
    ORDER,
    Explanation,
    Route,
    continued,
    explain_intake,
    gap_cause,
    summary,
)
from penstock.obs.explain.journal import MAX_NOTED, Journal
from penstock.obs.explain.lives import Gap, Phase, Prefilled, StepNote
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, make_core, make_request, make_text, text_capacity
from penstock.testing.driver import Driver, LateWorker
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity, RowPlan, Ticket
from penstock.types.request import FinishReason, WaitTimes
from penstock.types.result import StepResult
from penstock.types.sampling import BeamParams, EarlyStopping
from penstock.types.stats import Admission, PlanNews, PreemptReason, PrefixEnd, StepCounts, StepStats, WaitReason
from support.explained import explained
from support.fake_adapters import FakeAdapters, make_adapter
from support.hash_matcher import HashMatcher

CAPACITY = Capacity(num_blocks=33, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=64)
MS = 1_000_000


class Bench:
    """A core with a journal, driven by hand; each step takes a millisecond."""

    def __init__(self, max_ended: int = 100, policies=None, *, caching: bool = True, **arguments) -> None:
        self.journal = Journal(max_ended)
        self.core = make_core(CAPACITY, policies, journal=self.journal, enable_prefix_caching=caching, **arguments)
        self.driver = Driver(self.core, HashExecutor(self.core.scheduler.capacity))

    @property
    def now_ns(self) -> int:
        return self.driver.clock.now_ns()

    def add(self, request_id: str, prompt=8, **fields) -> None:
        """Comes now, and is not planned yet."""
        parent_id = fields.pop("parent_id", "")
        request = make_request(request_id, prompt, arrival_ns=self.now_ns, **fields)
        request.parent_id = parent_id
        self.driver.record(self.core.apply([Add(request)], self.now_ns))

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.driver.turn()

    def run(self) -> None:
        while self.core.has_work:
            self.driver.turn()

    def told(self, request_id: str) -> Explanation:
        told = explained(self.journal, request_id, self.driver.clock.now_ns)
        assert told is not None
        return told


def test_who_ran_at_once_waited_for_nothing() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=5)
    bench.run()
    told = bench.told("a")
    assert (told.phase, told.finish_reason) == (Phase.ENDED, FinishReason.LENGTH)
    assert (told.queue_ns, told.prefill_ns, told.decode_ns) == (0, 1 * MS, 4 * MS)
    assert told.waited_for_ns == {}
    assert (told.num_prefill_steps, told.num_prefill_tokens) == (1, 8)
    assert (told.num_decode_steps, told.num_generated_tokens) == (4, 5)
    assert (told.mean_batch, told.max_batch) == (1.0, 1)


def test_a_single_token_is_told_in_the_singular() -> None:
    bench = Bench()
    bench.add("a", 1, max_tokens=1)
    bench.run()
    assert "Computed its prompt of 1 token in 1.0 ms, 1 step" in summary(bench.told("a"))
    assert summary(bench.told("a")).endswith("1 token.")
    step = StepNote(MS, 2, 1, 1, Prefilled(num_tokens=1, num_prompt_tokens=1))
    assert gap_cause(Gap(MS, step)) == "the step computed 1 token of another request's prompt of 1 token"


def test_the_time_after_a_single_token_is_told() -> None:
    bench = Bench()
    bench.add("a", 1, max_tokens=1)
    bench.run()
    told = replace(bench.told("a"), decode_ns=3000 * MS)
    assert summary(told).endswith("1 token in 3.0 s after the first.")


def test_a_time_limit_that_cut_a_request_is_told() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=50, deadline_ns=bench.now_ns + 5 * MS)
    bench.run()
    assert summary(bench.told("a")).endswith("It was cut, because its time limit passed (deadline).")


def test_a_gap_with_steps_of_others_blames_them_too() -> None:
    assert "in steps without it or between steps" in gap_cause(Gap(9 * MS, StepNote(MS, 2)))


def test_a_wait_for_a_row_is_told_while_it_lasts_and_after() -> None:
    bench = Bench(max_rows=1)
    bench.add("a", 8, max_tokens=5)
    bench.add("b", 8, max_tokens=2)
    bench.steps(3)
    told = bench.told("b")
    assert (told.phase, told.waits_for, told.num_before) == (Phase.WAITING, "rows", 1)
    assert told.waited_for_ns == {"rows": 3 * MS}
    assert "for a free row" in summary(told)
    bench.run()
    assert bench.told("b").waited_for_ns == {"rows": 5 * MS}
    assert bench.told("b").total_ns == 7 * MS


def test_a_wait_for_memory_is_told() -> None:
    bench = Bench(policies=make_policies(reserve="no-evict"), num_blocks=9)
    bench.add("a", 8, max_tokens=20)
    bench.add("b", [9] * 8, max_tokens=20)
    bench.steps(4)
    assert bench.told("b").waited_for_ns == {"memory": 4 * MS}


def test_a_wait_for_a_prefix_is_told() -> None:
    bench = Bench()
    for name in "ab":
        bench.add(name, 12, max_tokens=2)
    bench.steps(1)
    assert bench.told("b").waited_for_ns == {"prefix": MS}
    assert "for another request to compute the same prefix" in summary(bench.told("b"))


def test_a_wait_for_an_adapter_is_told_while_it_is_read_and_while_others_run() -> None:
    worker = LateWorker()
    bench = Bench(adapters=FakeAdapters(worker=worker), max_adapters=1)
    bench.add("a", 8, max_tokens=4)
    bench.add("b", [9] * 8, max_tokens=3, adapter=make_adapter(1))
    bench.steps(2)
    told = bench.told("b")
    assert (told.waits_for, told.waited_for_ns) == ("adapter", {"adapter": 2 * MS})
    assert "Has waited 2.0 ms for its adapter" in summary(told)
    bench.add("c", [7] * 8, max_tokens=2, adapter=make_adapter(2))
    worker.run(4)
    bench.run()
    assert bench.told("b").waited_for_ns == {"adapter": 2 * MS}
    assert bench.told("c").waited_for_ns == {"adapter": 3 * MS}, "while b runs"
    assert "Waited 3.0 ms for its adapter" in summary(bench.told("c"))


def test_a_wait_for_tokens_is_told() -> None:
    bench = Bench()
    bench.add("a", 48, max_tokens=1)
    bench.add("b", 8, max_tokens=1)
    bench.steps(2)
    assert bench.told("b").waited_for_ns == {"tokens": 2 * MS}


def test_time_before_the_queue_is_intake() -> None:
    bench = Bench()
    bench.driver.clock.advance(10 * MS)
    request = make_request("a", 8, arrival_ns=3 * MS, max_tokens=1)
    bench.core.apply([Add(request)], bench.now_ns)
    bench.run()
    assert bench.told("a").waited_for_ns == {INTAKE: 7 * MS}


def test_time_before_its_model_was_loaded_is_told_apart_from_intake() -> None:
    bench = Bench()
    bench.driver.clock.advance(10 * MS)
    request = make_request("a", 8, arrival_ns=3 * MS, max_tokens=1)
    request.waits = WaitTimes(model=5 * MS)
    assert explain_intake(request, bench.now_ns).waited_for_ns == {MODEL: 5 * MS, INTAKE: 2 * MS}
    bench.core.apply([Add(request)], bench.now_ns)
    bench.run()
    told = bench.told("a")
    assert told.waited_for_ns == {MODEL: 5 * MS, INTAKE: 2 * MS}
    assert told.queue_ns == 7 * MS
    assert "Waited 7.0 ms: 5.0 ms for its model to load and 2.0 ms before it was queued." in summary(told)


def test_time_for_its_grammar_is_told_apart_from_intake() -> None:
    request = make_request("a", 8, arrival_ns=2 * MS)
    request.waits = WaitTimes(model=1 * MS, grammar=5 * MS)
    assert explain_intake(request, 10 * MS).waited_for_ns == {MODEL: 1 * MS, GRAMMAR: 5 * MS, INTAKE: 2 * MS}
    bench = Bench()
    bench.driver.clock.advance(10 * MS)
    bench.driver.record(bench.core.apply([Add(request)], bench.now_ns))
    bench.run()
    told = bench.told("a")
    assert told.waited_for_ns == {MODEL: 1 * MS, GRAMMAR: 5 * MS, INTAKE: 2 * MS}
    assert "5.0 ms for its grammar" in summary(told)


class SlowMatcher(HashMatcher):
    """A token takes eight steps."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.driver.executor.model.vocab_size)
        self._clock = bench.driver.clock

    def accept(self, token_ids) -> None:
        self._clock.advance(8 * MS)
        super().accept(token_ids)


def test_steps_that_it_sat_out_for_its_masks_are_told() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=30)
    bench.add("b", 9, max_tokens=3, matcher=SlowMatcher(bench))
    bench.steps(10)
    told = bench.told("b")
    assert (told.phase, told.num_generated_tokens, told.num_sat_out_steps) == (Phase.DECODE, 2, 7)
    bench.run()
    told, other = bench.told("b"), bench.told("a")
    assert (told.num_generated_tokens, told.num_decode_steps) == (3, 2)
    assert told.num_sat_out_steps == 27  # until the other had ended: each token takes eighty tenths of a step
    assert told.sat_out_ns == told.decode_ns - 2 * MS - 8 * MS  # its own steps, and the first token
    assert told.longest_gap.gap_ns == told.sat_out_ns + 1 * MS
    assert gap_cause(told.longest_gap) == "it sat out steps, because a mask of its grammar was slow"
    assert f"It sat out 27 steps ({told.sat_out_ns // MS} ms): its grammar masks were slow" in summary(told)
    assert (other.num_sat_out_steps, other.num_decode_steps) == (0, 29)


def test_who_is_passed_waits_for_the_order_from_its_turn_on() -> None:
    bench = Bench(policies=make_policies(order="sjf"), max_rows=1)
    bench.add("first", 8, max_tokens=3, predicted_new_tokens=3)
    bench.steps()
    bench.add("long", 8, max_tokens=9, predicted_new_tokens=9)
    for name in ("s1", "s2"):
        bench.add(name, 8, max_tokens=2, predicted_new_tokens=2)
    bench.run()
    told = bench.told("long")
    assert told.num_passed_by == 2
    assert told.waited_for_ns == {"rows": 2 * MS, ORDER: 4 * MS}
    assert bench.told("s2").num_passed_by == 0
    assert "2 that came later went first" in summary(told)


def test_who_left_the_queue_passed_nobody_by() -> None:
    bench = Bench(max_rows=1)
    bench.add("a", 8, max_tokens=4)
    for name in ("b", "c", "d"):
        bench.add(name, 8, max_tokens=1)
    bench.steps()
    bench.driver.turn(Abort("b"))
    bench.run()
    assert [bench.told(name).num_passed_by for name in "abcd"] == [0, 0, 0, 0]
    left = bench.told("b")
    assert (left.phase, left.finish_reason, left.waited_for_ns) == (Phase.ENDED, FinishReason.ABORT, {"rows": 1 * MS})
    assert bench.told("d").num_before == 3


def test_who_left_the_queue_is_not_counted_as_waiting_before_others() -> None:
    bench = Bench(policies=make_policies(order="sjf"), max_rows=1)
    bench.add("first", 8, max_tokens=3, predicted_new_tokens=3)
    bench.add("leaves", 8, max_tokens=9, predicted_new_tokens=9)
    bench.add("long", 8, max_tokens=9, predicted_new_tokens=9)
    bench.add("short", 8, max_tokens=2, predicted_new_tokens=2)
    bench.driver.turn(Abort("leaves"))
    bench.run()
    assert bench.told("long").num_passed_by == 1
    assert bench.told("long").waited_for_ns == {"rows": 2 * MS, ORDER: 3 * MS}


def test_who_came_earlier_and_was_queued_later_does_not_pass() -> None:
    bench = Bench(max_rows=1)
    bench.add("first", 8, max_tokens=3)
    bench.driver.clock.advance(5 * MS)
    for name, arrival_ns in (("late", 3 * MS), ("early", 1 * MS)):
        bench.core.apply([Add(make_request(name, 8, arrival_ns=arrival_ns, max_tokens=3))], bench.now_ns)
    bench.run()
    assert [bench.told(name).num_passed_by for name in ("first", "late", "early")] == [0, 0, 0]
    assert bench.told("late").queue_ns > bench.told("early").queue_ns
    assert ORDER not in bench.told("late").waited_for_ns


def test_who_lets_others_pass_since_another_computes_its_prompt_waits_for_that() -> None:
    bench = Bench(max_step_tokens=64)
    for name in ("a", "b"):
        bench.add(name, 13, max_tokens=1)
    bench.add("c", [90], max_tokens=1)
    bench.run()
    told = bench.told("b")
    assert told.waited_for_ns == {"prefix": 1 * MS}
    assert (told.num_hit_tokens, told.num_passed_by) == (12, 1)
    assert "for another request to compute the same prefix" in summary(told)


def test_a_long_prompt_that_is_held_back_waits_for_tokens_not_for_the_order() -> None:
    bench = Bench(policies=make_policies(budget="itl", settings={"budget": {"long_prefill_token_threshold": 8}}))
    for name in ("long-1", "long-2"):
        bench.add(name, [ord(name[-1]) + idx for idx in range(40)], max_tokens=1)
    for idx in range(3):
        bench.add(f"short-{idx}", [200 + idx], max_tokens=1)
    bench.run()
    told = bench.told("long-2")
    assert told.num_passed_by > 0
    assert set(told.waited_for_ns) == {"tokens"}


def test_an_answer_of_two_replicas_counts_what_both_did_for_it() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=5)
    bench.run()
    told = bench.told("a")
    first = replace(told, num_forced_tokens=4, num_guesses=3, num_accepted=2, num_sat_out_steps=1, sat_out_ns=MS, rested_ns=MS)
    last = replace(told, num_forced_tokens=1, num_guesses=3, num_accepted=3, rested_ns=MS, route=Route("two", 0, 0, 0))
    whole = continued(first, last)
    assert (whole.num_decode_steps, whole.num_forced_tokens, whole.num_guesses, whole.num_accepted) == (8, 5, 6, 5)
    assert (whole.num_sat_out_steps, whole.sat_out_ns, whole.rested_ns) == (1, MS, 2 * MS)


def test_an_answer_of_two_replicas_tells_of_the_resumes_batches_and_gaps_of_both() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=5)
    bench.run()
    told = bench.told("a")
    assert (told.num_prefill_steps, told.num_decode_steps) == (1, 4)
    first = replace(
        told, num_resume_steps=5, num_resume_tokens=50, mean_batch=20.0, max_batch=30, longest_gap=Gap(9 * MS, None)
    )
    last = replace(told, num_resume_steps=2, num_resume_tokens=20, longest_gap=Gap(MS, None), route=Route("two", 0, 0, 0))
    whole = continued(first, last)
    assert (whole.num_resume_steps, whole.num_resume_tokens) == (5 + 1 + 2, 50 + 8 + 20)
    assert (whole.max_batch, whole.longest_gap) == (30, Gap(9 * MS, None))
    assert whole.mean_batch == (20 * 10 + 1 * 7) / 17


def test_the_longest_gap_names_the_prompt_that_made_it() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=12)
    bench.steps(3)
    bench.add("b", [60 + idx for idx in range(14)], max_tokens=1)
    bench.driver.clock.advance(5 * MS)  # the step before it took longer
    bench.run()
    told = bench.told("a")
    assert told.longest_gap is not None
    assert told.longest_gap.gap_ns == 6 * MS
    assert told.longest_gap.step is not None
    assert told.longest_gap.step.largest is not None
    assert told.longest_gap.step.largest.num_prompt_tokens == 14
    assert (told.max_batch, round(told.mean_batch * 12)) == (2, 13)
    assert (told.decode_with_prompts_ns, told.num_steps_with_prompts) == (6 * MS, 1)


def test_time_that_the_machine_was_another_models_is_told() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=3)
    collect = bench.driver.executor.collect

    def wait_and_collect(ticket: Ticket) -> StepResult:
        result = collect(ticket)
        bench.driver.clock.advance(4 * MS)
        result.timing = replace(result.timing, waited_ns=4 * MS)
        return result

    bench.steps()
    bench.driver.executor.collect = wait_and_collect
    bench.steps()
    bench.driver.executor.collect = collect
    bench.run()
    told = bench.told("a")
    assert told.other_models_ns == 4 * MS
    assert "For 4.0 ms of that, another model used the machine." in summary(told)
    assert told.longest_gap is not None
    assert gap_cause(told.longest_gap) == "another model used the machine for 4.0 ms of it"


class TestPauses:
    @pytest.fixture
    def bench(self) -> Bench:
        """Two that outgrow the memory: one is preempted and comes back."""
        bench = Bench(policies=make_policies(reserve="chunk"), num_blocks=9)
        for name in ("a", "b"):
            bench.add(name, [ord(name) + idx for idx in range(8)], max_tokens=16)
        bench.run()
        return bench

    def test_a_pause_is_told_with_its_cause_and_cost(self, bench: Bench) -> None:
        told = bench.told("b") if bench.told("b").pauses else bench.told("a")
        [pause] = told.pauses
        assert pause.reason is PreemptReason.MEMORY
        assert pause.is_over
        assert pause.waited_for_ns == {"memory": pause.waited_ns}
        assert told.longest_gap is not None
        assert told.longest_gap.is_preemption
        assert told.longest_gap.gap_ns > pause.waited_ns
        assert told.num_generated_tokens == 16
        assert told.num_prefill_tokens == 8
        assert told.num_resume_tokens > pause.num_lost_tokens > 0
        assert "was preempted because others needed its memory" in summary(told)


class TestCallsOfTexts:
    """A list is told as one, and makes nobody forgotten."""

    def make(self, max_ended: int = 5) -> Driver:
        self.journal = Journal(max_ended)
        self.journal.speaks_for_calls = True
        core = make_core(text_capacity(), make_policies("texts"), journal=self.journal, enable_prefix_caching=False)
        return Driver(core, HashExecutor(core.scheduler.capacity))

    def texts(self, call: str, num: int, *, first: int = 0) -> list[Add]:
        requests = [make_text(f"{call}.{idx}", 20) for idx in range(first, first + num)]
        for request in requests:
            request.parent_id = call
        return [Add(request) for request in requests]

    def run(self, driver: Driver) -> None:
        while driver.core.has_work:
            driver.turn()

    def told(self, driver: Driver, name: str) -> Explanation:
        told = explained(self.journal, name, driver.clock.now_ns)
        assert told is not None
        assert told.request_id == name
        return told

    def test_a_list_speaks_through_one_text_at_a_time(self) -> None:
        driver = self.make()
        driver.turn(*self.texts("list", 300), *self.texts("single", 1))
        assert self.told(driver, "list").phase is Phase.WAITING
        self.run(driver)
        told = self.told(driver, "list")
        assert told.num_prefill_steps == 1
        assert told.total_ns == driver.clock.now_ns()  # the last of them
        num_ms = told.total_ns // MS
        waited = f"Waited {num_ms - 1} ms for room for its prompt in a step."
        assert summary(told).startswith(f"Took {num_ms} ms in all. {waited}")
        assert self.told(driver, "single").total_ns == MS

    def test_a_list_takes_the_place_of_one_request(self) -> None:
        driver = self.make(max_ended=3)
        for call, num in (("first", 1), ("list", 200), ("last", 1)):
            driver.turn(*self.texts(call, num))
            self.run(driver)
        assert [self.told(driver, call).phase for call in ("first", "list", "last")] == [Phase.ENDED] * 3

    def test_the_text_that_ended_last_is_remembered(self) -> None:
        driver = self.make()
        for idx in range(3):  # a list comes by and by
            driver.turn(*self.texts("list", 1, first=idx))
            self.run(driver)
        assert self.told(driver, "list").total_ns == 3 * MS

    def test_nothing_is_kept_of_texts_that_were_cancelled(self) -> None:
        driver = self.make()
        driver.turn(*self.texts("list", 50))
        driver.turn(*(Abort(f"list.{idx}") for idx in range(50)))
        self.run(driver)
        assert self.told(driver, "list").phase is Phase.ENDED
        assert not self.journal._watched
        assert not self.journal._calls
        assert not self.journal._unwatched
        assert not self.journal._lives_by_call


class TestPrefixes:
    def told_stop(self, bench: Bench, request_id: str):
        bench.run()
        told = bench.told(request_id)
        assert told.stop is not None
        return told.num_hit_tokens, told.stop.reason, told.stop.position

    def test_all_that_can_be_found(self) -> None:
        bench = Bench()
        bench.add("a", 13, max_tokens=1)
        bench.run()
        bench.add("b", 13, max_tokens=1)
        assert self.told_stop(bench, "b") == (12, PrefixEnd.WHOLE, 12)

    def test_never_seen(self) -> None:
        bench = Bench()
        bench.add("a", 13, max_tokens=1)
        assert self.told_stop(bench, "a") == (0, PrefixEnd.UNSEEN, 0)

    @pytest.mark.parametrize("num_common", [1, 3, 4, 6, 8, 10])
    def test_the_first_token_that_differs(self, num_common: int) -> None:
        bench = Bench()
        bench.add("a", 13, max_tokens=1)
        bench.run()
        bench.add("b", [*range(1, num_common + 1), *[99] * (13 - num_common)], max_tokens=1)
        assert self.told_stop(bench, "b") == (num_common, PrefixEnd.DIFFERS, num_common)
        assert f"token {num_common} differs from the cache" in summary(bench.told("b"))
        assert f"; {'1 was' if num_common == 1 else f'{num_common} were'} in the cache (" in summary(bench.told("b"))

    @pytest.mark.parametrize(("changed", "num_same"), [((2,), 11), ((2, 3), 10), ((9,), 4), ((1, 5), 3), ((2, 4), 1)])
    def test_tokens_that_are_the_same_again_are_counted(self, changed: tuple[int, ...], num_same: int) -> None:
        """Up to another difference in a later block. Blocks have 4 tokens."""
        bench = Bench()
        bench.add("a", 14, max_tokens=1)
        bench.run()
        bench.add("b", [99 if idx in changed else idx + 1 for idx in range(14)], max_tokens=1)
        bench.run()
        stop = bench.told("b").stop
        assert stop is not None
        assert (stop.reason, stop.position, stop.num_same_after) == (PrefixEnd.DIFFERS, changed[0], num_same)

    @pytest.mark.parametrize("num_common", [13, 16, 18])
    def test_a_history_without_the_answer_that_was_generated(self, num_common: int) -> None:
        bench = Bench()
        bench.add("a", 13, max_tokens=9)
        bench.run()
        said = [*range(1, 14), *bench.driver.outcomes["a"].token_ids]
        bench.add("b", [*said[:num_common], *[99] * 9], max_tokens=1)
        assert self.told_stop(bench, "b") == (num_common, PrefixEnd.ANSWER, num_common)
        assert f"from token {num_common} on, the history differs from an answer" in summary(bench.told("b"))

    @pytest.mark.parametrize("num_cached", [8, 10])
    def test_nothing_was_seen_behind_what_is_cached(self, num_cached: int) -> None:
        bench = Bench()
        bench.add("a", num_cached, max_tokens=1)
        bench.run()
        bench.add("b", 13, max_tokens=1)
        assert self.told_stop(bench, "b") == (num_cached, PrefixEnd.UNSEEN, num_cached)

    def test_caching_off(self) -> None:
        bench = Bench(caching=False)
        bench.add("a", 13, max_tokens=1)
        assert self.told_stop(bench, "a") == (0, PrefixEnd.OFF, 0)

    def test_another_salt_is_told_to_the_same_tenant_alone(self) -> None:
        bench = Bench()
        bench.add("a", 13, max_tokens=1, tenant="t", cache_salt=b"one")
        bench.run()
        bench.add("b", 13, max_tokens=1, tenant="t", cache_salt=b"two")
        assert self.told_stop(bench, "b") == (0, PrefixEnd.SALT, 0)
        bench.add("c", 13, max_tokens=1, tenant="u", cache_salt=b"three")
        assert self.told_stop(bench, "c") == (0, PrefixEnd.UNSEEN, 0)

    def test_evicted_and_how_long_ago(self) -> None:
        bench = Bench(num_blocks=9, max_model_len=32)
        bench.add("a", 17, max_tokens=1)
        bench.run()
        evicted_at_ns = bench.now_ns
        bench.add("other", [40 + idx for idx in range(28)], max_tokens=1)
        bench.run()
        bench.add("b", 17, max_tokens=1)
        hit, reason, position = self.told_stop(bench, "b")
        assert reason is PrefixEnd.EVICTED
        assert hit == position < 16
        told = bench.told("b")
        assert told.evicted_ago_ns is not None
        assert 0 < told.evicted_ago_ns <= told.arrival_ns + told.queue_ns - evicted_at_ns
        assert "was evicted" in summary(told)


class TestMemory:
    def test_only_the_last_that_ended_are_remembered(self) -> None:
        bench = Bench(max_ended=3)
        for idx in range(10):
            bench.add(f"r{idx}", 4, max_tokens=2)
        bench.run()
        known = [idx for idx in range(10) if explained(bench.journal, f"r{idx}", bench.driver.clock.now_ns)]
        assert known == [7, 8, 9]

    def test_long_answers_outlive_the_steps_that_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.obs.explain.journal.MAX_STEPS", 8)
        monkeypatch.setattr("penstock.obs.explain.lives.MAX_STEPS", 8)
        bench = Bench()
        bench.add("a", 8, max_tokens=40)
        bench.add("b", 8, max_tokens=20)
        bench.run()
        assert (bench.told("a").num_decode_steps, bench.told("b").num_decode_steps) == (39, 19)
        assert bench.told("a").mean_batch == (20 * 2 + 20) / 40
        assert bench.journal._log.next - bench.journal._log.first <= 8

    def test_a_reader_never_holds_up_the_engine(self) -> None:
        bench = Bench()
        bench.add("a", 8, max_tokens=50)
        with bench.journal._lock:
            bench.run()  # would block for ever
        assert len(bench.journal._noted) >= 50
        assert bench.told("a").num_generated_tokens == 50
        assert not bench.journal._noted

    def test_what_is_told_is_worked_through_now_and_then(self) -> None:
        bench = Bench()
        bench.add("a", 8, max_tokens=50)
        bench.add("b", 8, max_tokens=50)
        for _ in range(40):
            bench.steps(2)
            assert len(bench.journal._noted) < MAX_NOTED


@pytest.mark.parametrize("num_blocks", [200, 17])
def test_all_beams_of_a_search_begin_pause_and_end(num_blocks: int) -> None:
    bench = Bench(num_blocks=num_blocks, max_step_tokens=32, policies=make_policies(reserve="chunk"))
    beams = BeamParams(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER, num_logprobs=None)
    for idx in range(3):
        request = make_request(f"b{idx}", 6, max_tokens=12, beams=beams, logprobs=4)
        request.parent_id = "b"
        bench.core.apply([Add(request)], bench.now_ns)
    bench.add("other", [50 + idx for idx in range(9)], max_tokens=30)
    for _ in range(40):
        bench.steps()
        told = bench.journal.explain_all(("b0", "b1", "b2"), bench.driver.clock.now_ns)
        assert len({choice.phase in (Phase.WAITING, Phase.PAUSED) for choice in told}) == 1
    for choice in told:
        assert choice.phase is Phase.ENDED
        assert choice.queue_ns == 0
        assert choice.num_generated_tokens == 12
        assert choice.queue_ns + choice.prefill_ns + choice.decode_ns == choice.total_ns
    assert len({len(choice.pauses) for choice in told}) == 1


def add_search(bench: Bench, width: int, prompt=7, max_tokens: int = 12) -> list[str]:
    """The ids of its requests."""
    beams = BeamParams(width=width, length_penalty=1.0, early_stopping=EarlyStopping.NEVER, num_logprobs=None)
    for idx in range(width):
        bench.add(f"b{idx}", prompt, max_tokens=max_tokens, beams=beams, logprobs=width + 1, parent_id="b")
    return [f"b{idx}" for idx in range(width)]


def test_all_beams_decode_from_the_step_that_computed_their_prompt() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=32)
    names = add_search(bench, 3)
    bench.steps(4)
    for name in names:
        told = bench.told(name)
        assert (told.phase, told.prefill_ns, told.decode_ns) == (Phase.DECODE, 1 * MS, 3 * MS)
        assert (told.num_generated_tokens, told.num_decode_steps) == (4, 3)
    bench.run()
    for name in names:
        told = bench.told(name)
        assert (told.prefill_ns, told.decode_ns, told.decode_with_prompts_ns) == (1 * MS, 11 * MS, 0)
        assert (told.num_generated_tokens, told.num_decode_steps, told.max_batch) == (12, 11, 3)
        assert "after the first, 1.0 ms each" in summary(told)


def test_steps_of_the_background_are_told_apart() -> None:
    journal = Journal(10)
    journal.on_queued(make_request("a", 8), 0)
    journal.on_news(PlanNews(0, WaitReason.NOTHING, [Admission("a", 8, 0)], ()))
    prompt, decode, rested = [RowPlan("a", 0, 8, (), 1)], StepCounts(num_rows=1), StepCounts(num_rows=2, rested=["a"])
    steps = [(1, StepCounts(num_rows=1, prefills=prompt)), (2, decode), (7, rested), (9, rested), (10, decode)]
    began = 0
    for number, (ended, counts) in enumerate(steps):
        journal.on_step(StepStats(number, began * MS, ended * MS, 1, 0, 64, 60, 0, counts=counts))
        began = ended
    told = explained(journal, "a", lambda: 10 * MS)
    assert told is not None
    assert (told.decode_ns, told.num_decode_steps, told.rested_ns, told.num_sat_out_steps) == (9 * MS, 2, 7 * MS, 0)
    sat_out = StepCounts(num_rows=2, sat_out=["a"])
    for ended, counts in ((11, sat_out), (12, decode), (30, rested), (31, decode)):
        journal.on_step(StepStats(ended, began * MS, ended * MS, 1, 0, 64, 60, 0, counts=counts))
        began = ended
    told = explained(journal, "a", lambda: 31 * MS)
    assert told is not None
    assert (told.num_sat_out_steps, told.longest_gap.gap_ns, told.longest_gap.has_sat_out) == (1, 19 * MS, False)


def test_lines_of_a_batch_wait_in_a_queue_of_their_own() -> None:
    bench = Bench(max_rows=1)
    bench.add("first", 8, max_tokens=8)
    bench.steps()
    for name in ("line", "person", "next line"):
        bench.add(name, 8, max_tokens=2, background="line" in name)
    bench.steps(3)
    assert [bench.told(name).num_before for name in ("line", "person", "next line")] == [0, 0, 1]
    assert [bench.told(name).waited_for_ns for name in ("line", "person")] == [{BACKGROUND: 3 * MS}, {WaitReason.ROWS: 3 * MS}]
    assert bench.told("line").waits_for == BACKGROUND


def test_a_line_that_rests_beside_others_waits_for_no_prompt() -> None:
    journal = Journal(10)
    journal.on_queued(make_request("line", 8, background=True), 0)
    journal.on_news(PlanNews(0, WaitReason.NOTHING, [Admission("line", 8, 0)], ()))
    prompt = StepCounts(num_rows=1, num_tokens=8, num_background_tokens=8, prefills=[RowPlan("line", 0, 8, (), 1)])
    decodes = StepCounts(num_rows=2, num_tokens=2, num_background_tokens=1, rested=["line"])
    for number, counts in enumerate([prompt, decodes, decodes]):
        journal.on_step(StepStats(number, number * MS, (number + 1) * MS, 2, 0, 64, 60, 0, counts=counts))
    told = explained(journal, "line", lambda: 3 * MS)
    assert told is not None
    assert (told.decode_with_prompts_ns, told.rested_ns) == (0, 2 * MS)


def test_steps_for_prompts_alone_are_none_of_the_background() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=16, policies=make_policies(budget="prefill-first"))
    bench.add("a", 8, max_tokens=9)
    bench.steps(3)
    bench.add("b", 40, max_tokens=2)
    bench.run()
    told = bench.told("a")
    assert (told.num_decode_steps, told.num_steps_with_prompts, told.num_sat_out_steps) == (8, 0, 0)
    assert (told.decode_ns, told.decode_with_prompts_ns, told.rested_ns) == (10 * MS, 2 * MS, 0)


def test_beams_of_one_search_are_not_told_as_waiting_before_each_other() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=32)
    bench.add("early", [90], max_tokens=3)
    names = add_search(bench, 4)
    bench.add("late", [91], max_tokens=3)
    bench.steps()
    assert [bench.told(name).num_before for name in ["early", *names, "late"]] == [0, 1, 1, 1, 1, 5]
    assert "1 was already waiting when it came" in summary(bench.told("b3"))
    bench.run()
    told = [bench.told(name) for name in names]
    assert [(beam.num_before, beam.num_passed_by) for beam in told] == [(1, 0)] * 4


def test_forks_are_no_prompts() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=32, max_rows=8)
    add_search(bench, 4, max_tokens=30)
    bench.add("plain", [77, 78, 79], max_tokens=25)
    bench.run()
    told = bench.told("plain")
    assert told.decode_with_prompts_ns == 0
    assert told.longest_gap is not None
    assert told.longest_gap.step is not None
    assert told.longest_gap.step.num_prefills == 0


def test_the_clock_is_read_when_all_has_been_worked_through() -> None:
    bench = Bench()
    bench.add("a", 8, max_tokens=5)

    def read_clock() -> int:
        assert not bench.journal._noted
        assert bench.journal._lock.locked()
        return bench.now_ns

    bench.run()
    assert explained(bench.journal, "a", read_clock) is not None


def test_a_refused_request_is_told() -> None:
    bench = Bench()
    bench.add("long", 70, max_tokens=1)
    told = bench.told("long")
    assert (told.phase, told.finish_reason, told.total_ns) == (Phase.ENDED, FinishReason.REJECTED, 0)
    assert "refused (context_length)" in summary(told)


@dataclass
class Witness:
    """Sees every step, and counts per request and step what the journal does not."""

    rows: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tokens_ns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def see(self, driver: Driver, plan) -> None:
        names = {row.request_id for row in plan.rows}
        for row in plan.rows:
            self.rows[row.request_id].append(len(names))
            if row.samples:
                self.tokens_ns[row.request_id].append(driver.clock.now_ns())


@settings(max_examples=settings.default.max_examples // 2)
@given(
    data=st.data(),
    order=st.sampled_from(["fcfs", "sjf", "srpf", "priority", "fair"]),
    reserve=st.sampled_from(["chunk", "watermark", "no-evict"]),
    num_blocks=st.integers(17, 60),
    step_tokens=st.integers(4, 24),
)
def test_everything_adds_up(data: st.DataObject, order: str, reserve: str, num_blocks: int, step_tokens: int) -> None:
    bench = Bench(policies=make_policies(order=order, reserve=reserve), num_blocks=num_blocks, max_step_tokens=step_tokens)
    witness, names = Witness(), []
    for turn in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 3))):
            name = f"r{len(names)}"
            names.append(name)
            prompt = data.draw(st.integers(1, 30))
            bench.add(
                name,
                prompt,
                max_tokens=data.draw(st.integers(1, 30)),
                priority=data.draw(st.integers(0, 2)) if order == "priority" else 0,
                tenant=data.draw(st.sampled_from("xy")),
            )
        bench.driver.clock.advance(data.draw(st.integers(0, 3)) * MS)
        aborts = [Abort(names[-1])] if names and turn % 5 == 4 else []
        if plan := bench.driver.turn(*aborts):
            witness.see(bench.driver, plan)
        _check_all(bench, names)
    while bench.core.has_work:
        if plan := bench.driver.turn():
            witness.see(bench.driver, plan)
    _check_all(bench, names)
    for name in names:
        _check_with_witness(bench, witness, name)


def _check_all(bench: Bench, names: list[str]) -> None:
    for told in bench.journal.explain_all(names, bench.driver.clock.now_ns):
        assert told.queue_ns + told.prefill_ns + told.decode_ns == told.total_ns
        assert sum(told.waited_for_ns.values()) == told.queue_ns
        for pause in told.pauses:
            assert sum(pause.waited_for_ns.values()) == pause.waited_ns
        request = bench.core._requests.get(told.request_id)
        assert (request is None) == (told.phase is Phase.ENDED)
        if request is not None:
            assert len(request.output_token_ids) == told.num_generated_tokens
            assert request.num_preemptions == len(told.pauses)
            assert (request.first_token_ns is None) == (told.num_generated_tokens == 0)
        assert summary(told)


def _check_with_witness(bench: Bench, witness: Witness, name: str) -> None:
    told = bench.told(name)
    rows, tokens_ns = witness.rows[name], witness.tokens_ns[name]
    assert told.num_prefill_steps + told.num_resume_steps + told.num_decode_steps == len(rows)
    assert told.num_generated_tokens == len(tokens_ns)
    assert told.max_batch == max(rows, default=0)
    assert round(told.mean_batch * len(rows)) == sum(rows)
    gaps = [late - early for early, late in itertools.pairwise(tokens_ns)]
    assert (told.longest_gap.gap_ns if told.longest_gap else 0) == max(gaps, default=0)
