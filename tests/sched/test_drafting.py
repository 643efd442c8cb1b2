"""How many tokens a small model drafts, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.sched.drafting import Drafted
from penstock.sched.policies.base import Guess, Guesser
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.presets import make_policies
from penstock.testing import make_request
from penstock.testing.hash_executor import mix
from penstock.types.request import Request
from penstock.types.stats import StepCounts
from support.timed_steps import CAPACITY, MODEL, Knowing, Timed, answer_of


class Small:
    """Knows the answers, but for about one token in `wrong_period`, and gives each token the same probability."""

    def __init__(
        self, probability: float = 0.9, wrong_period: int = 1000, fixed_ns: int = 500_000, each_ns: int = 10_000
    ) -> None:
        self.probability, self.wrong_period = probability, wrong_period
        self.fixed_ns, self.each_ns = fixed_ns, each_ns
        self.num_read: dict[str, int] = {}
        self.num_drafts: dict[str, int] = {}
        self.reads: list[int] = []
        self.num_drafted = self.num_steps = 0

    def num_behind(self, request: Request) -> int:
        self.num_read[request.request_id] = min(self.num_read.get(request.request_id, 0), request.num_tokens - 1)
        return request.num_tokens - self.num_read[request.request_id]

    def read(self, chunks: Sequence[tuple[Request, int]]) -> Drafted:
        self.reads.append(sum(num for _, num in chunks))
        for request, num in chunks:
            self.num_read[request.request_id] += num
            self.num_drafts[request.request_id] = 0
        whole = [request for request, _ in chunks if self.num_read[request.request_id] == request.num_tokens]
        return self._step(whole, sum(num for _, num in chunks))

    def go_on(self, requests: Sequence[Request]) -> Drafted:
        return self._step(requests, len(requests))

    def _step(self, requests: Sequence[Request], num_tokens: int) -> Drafted:
        guesses = {}
        for request in requests:
            place = len(request.output_token_ids) + self.num_drafts[request.request_id]
            self.num_drafts[request.request_id] += 1
            wrong = mix(7, place) % self.wrong_period == 0
            guesses[request.request_id] = (answer_of(request)[place] + wrong) % MODEL.vocab_size, self.probability
        self.num_drafted += len(guesses)
        self.num_steps += 1
        return Drafted(guesses, self.fixed_ns + self.each_ns * num_tokens)

    def ended(self, request_id: str) -> None:
        self.num_read.pop(request_id, None)


class Failing(Small):
    """Once `has_failed`, its rows fail, so nothing stays read."""

    has_failed = False

    def read(self, chunks: Sequence[tuple[Request, int]]) -> Drafted:
        drafted = super().read(chunks)
        if not self.has_failed:
            return drafted
        for request, _ in chunks:
            self.ended(request.request_id)
        return Drafted({}, drafted.duration_ns)


def timed_with(
    small: Small | None,
    num_rows: int = 1,
    fixed_ns: int = 20_000_000,
    each_ns: int = 500_000,
    guesser: Guesser | str = "off",
    slo_itl_ns: int = 0,
) -> Timed:
    """The scheduler has seen steps of many sizes."""
    policies = make_policies(guesser=guesser, budget=HoldLatency(slo_itl_ns=slo_itl_ns))
    timed = Timed(num_rows, fixed_ns, each_ns, guesser, policies=policies, drafter=small)
    if timed.scheduler._guessing is not None:
        for num in [*range(1, 40)] * 3:
            timed.scheduler._guessing._line.learn(num, fixed_ns + each_ns * num)
    return timed


def ns_a_token(timed: Timed, least: int = 100) -> float:
    """Run until a request has at least so many tokens. Return the time for a token of the batch."""
    while all(len(request.output_token_ids) < least for request in timed.requests):
        timed.step()
    return timed.now_ns / sum(len(request.output_token_ids) for request in timed.requests)


def gain(small: Small, num_rows: int = 1, fixed_ns: int = 20_000_000, each_ns: int = 500_000) -> float:
    """Time for a token without the small model over that with it."""
    plain, with_small = [ns_a_token(timed_with(one, num_rows, fixed_ns, each_ns)) for one in (None, small)]
    return plain / with_small


class TestPrice:
    def test_right_drafts_gain_much_where_they_cost_little(self) -> None:
        assert gain(Small()) > 5.0

    def test_none_are_made_where_the_small_model_takes_as_long_as_the_large_one(self) -> None:
        small = Small(fixed_ns=20_000_000)
        assert gain(small) > 0.97
        assert 1 <= small.num_drafted <= 4, "then it is known"

    def test_the_less_probable_they_are_the_fewer_are_drafted(self) -> None:
        nums = []
        for wrong_period in (2, 3, 10):
            small = Small(1 - 1 / wrong_period, wrong_period)
            timed = timed_with(small)
            nums.append(max(len(timed.step().guesses.get("r0", ())) for _ in range(9)))
        assert nums == sorted(nums)
        assert nums[0] < nums[2] / 2

    def test_rows_are_drafted_together(self) -> None:
        small = Small()
        assert gain(small, 8) > 1.5
        assert small.num_drafted > 6 * small.num_steps

    def test_its_time_is_not_taken_for_that_of_checking(self) -> None:
        timed = timed_with(Small(fixed_ns=3_000_000), 2)
        num_tokens = [timed.step().num_tokens for _ in range(8)]
        assert max(num_tokens) > 8
        assert timed.scheduler._guessing is not None
        line = timed.scheduler._guessing._line
        for num in num_tokens[1:]:
            assert line.fixed_ns + num * line.position_ns == pytest.approx(20_000_000 + num * 500_000, rel=0.1)

    @pytest.mark.parametrize("num_rows", [1, 4, 16])
    def test_sure_drafts_that_are_always_wrong_cost_little(self, num_rows: int) -> None:
        assert gain(Small(0.8, 1), num_rows) > 0.95

    def test_drafts_that_are_impossible_cost_little(self) -> None:
        assert gain(Small(0.0, 1)) > 0.97

    @pytest.mark.parametrize(("num_rows", "wrong_period"), [(1, 2), (4, 2), (16, 2), (16, 5), (30, 3)])
    def test_drafts_that_are_sometimes_right_do_not_cost_more_than_they_give(self, num_rows: int, wrong_period: int) -> None:
        small = Small(1 - 1 / wrong_period, wrong_period, fixed_ns=1_000_000)
        assert gain(small, num_rows, each_ns=1_000_000) > 0.98


def test_guesses_are_counted_by_who_made_them() -> None:
    for small, guesser, source in ((Small(), "off", "draft"), (None, Knowing(), "own"), (Small(0.1), Knowing(), "own")):
        timed, counts = timed_with(small, 2, guesser=guesser), list[StepCounts]()
        for _ in range(6):
            timed.step(counts)
        assert counts[-1].guess_sources == dict.fromkeys(counts[-1].guesses, source)
        assert counts[-1].guesses
    assert make_policies().guesser.source == "suffix"


class TestTrials:
    """Requests one after another, with drafts that are not worth their time at first."""

    @staticmethod
    def answer(timed: Timed, num: int, num_prompt: int) -> None:
        for _ in range(num):
            request = make_request(f"next-{timed.now_ns}", [*range(30)] * (num_prompt // 30) + [1], max_tokens=60)
            timed.requests = [request]
            timed.scheduler.add(request, timed.now_ns)
            while request.finish_reason is None:
                timed.step()

    @pytest.mark.parametrize("fixed_ms", [1, 4, 8])
    @pytest.mark.parametrize("num_prompt", [0, 30, 120])
    def test_drafts_that_become_good_are_made_again(self, num_prompt: int, fixed_ms: int) -> None:
        small = Small(0.1, 1, fixed_ns=fixed_ms * 1_000_000, each_ns=50_000)
        timed = timed_with(small, 0)
        self.answer(timed, 20, num_prompt)
        small.probability, small.wrong_period = 0.9, 1000
        self.answer(timed, 20, num_prompt)
        before = small.num_drafted
        self.answer(timed, 1, num_prompt)
        assert small.num_drafted - before > 40

    def test_one_that_needs_several_steps_is_read_to_its_end(self) -> None:
        small = Small(0.1, 1, fixed_ns=4_000_000, each_ns=300_000)
        timed = timed_with(small, 0)
        self.answer(timed, 20, 120)
        before, num_reads, began_ns = small.num_drafted, len(small.reads), timed.now_ns
        self.answer(timed, 60, 120)
        assert small.num_drafted > before
        reads = small.reads[num_reads:]
        assert 16 <= max(reads) < 20
        assert 4_000_000 * len(reads) + 300_000 * sum(reads) < 0.015 * (timed.now_ns - began_ns)

    def test_rows_that_fail_in_the_small_model_cost_little(self) -> None:
        small = Failing(0.1, 1, fixed_ns=4_000_000, each_ns=300_000)
        timed = timed_with(small, 0)
        self.answer(timed, 20, 120)
        small.has_failed, num_reads, began_ns = True, len(small.reads), timed.now_ns
        self.answer(timed, 60, 120)
        reads = small.reads[num_reads:]
        assert reads
        assert 4_000_000 * len(reads) + 300_000 * sum(reads) < 0.015 * (timed.now_ns - began_ns)


class TestTarget:
    @pytest.mark.parametrize(
        ("slo_ms", "each_ms", "has_drafts"), [(40, 1, True), (28, 1, True), (23, 1, False), (40, 15, False)]
    )
    def test_drafts_and_checking_them_keep_to_the_target_for_gaps(self, slo_ms: int, each_ms: int, has_drafts: bool) -> None:
        small = Small(fixed_ns=each_ms * 1_000_000)
        timed, gaps_ns = timed_with(small, 4, slo_itl_ns=slo_ms * 1_000_000), []
        for num in range(12):
            before_ns = timed.now_ns
            timed.step()
            gaps_ns += [timed.now_ns - before_ns] if num > 3 else []  # it must first learn how long drafts take
        assert max(gaps_ns) <= max(slo_ms, 23) * 1_000_000, "a step without drafts takes 22 ms"
        assert (small.num_drafted > 20) is has_drafts

    def test_a_long_prompt_is_read_within_the_target(self) -> None:
        small = Small(each_ns=100_000)
        timed, gaps_ns = timed_with(small, 2, slo_itl_ns=28_000_000), []
        long = timed.requests[1]
        long.prompt_token_ids = tuple([*range(30)] * 5)
        long.num_tokens, long.max_total_tokens = len(long.prompt_token_ids), 195
        while len(timed.requests[0].output_token_ids) < 60 and len(long.output_token_ids) < 40:
            before_ns = timed.now_ns
            plan = timed.step()
            if plan.num_tokens < 20:  # not the prompt of the large model
                gaps_ns.append(timed.now_ns - before_ns)
        assert small.num_read["r1"] >= 150
        assert max(gaps_ns[2:]) <= 28_000_000

    def test_the_time_of_drafts_is_not_taken_for_that_of_steps(self) -> None:
        timed = timed_with(Small(fixed_ns=3_000_000), 2)
        for _ in range(8):
            plan = timed.step()
        record = timed.scheduler._last_step
        assert timed.scheduler.drafting_ns
        assert record is not None
        assert record.duration_ns == 20_000_000 + 500_000 * plan.num_tokens


class TestRows:
    def test_one_with_a_better_match_is_not_drafted(self) -> None:
        small = Small(0.5, 2)
        timed = timed_with(small, guesser=Knowing(30))
        assert max(timed.guesses()) > 4
        assert not small.num_drafted

    def test_one_with_a_worse_match_is(self) -> None:
        class Wrong(Knowing):
            def guess(self, request: Request, most: int) -> Guess | None:
                guess = super().guess(request, most)
                return guess and Guess([token_id + 1 for token_id in guess.token_ids], 2)

        small = Small()
        ns_a_token(timed_with(small, guesser=Wrong()))
        assert small.num_drafted > 50

    def test_a_row_whose_drafts_are_wrong_gets_fewer_of_them(self) -> None:
        class HalfOfThem(Small):
            def _step(self, requests: Sequence[Request], num_tokens: int) -> Drafted:
                step = super()._step(requests, num_tokens)
                guesses = {name: (token_id + (name == "r0"), chance) for name, (token_id, chance) in step.guesses.items()}
                return Drafted(guesses, step.duration_ns)

        timed = timed_with(HalfOfThem(), 2)
        plans = [timed.step() for _ in range(9)]
        nums = [sum(len(plan.guesses.get(name, ())) for plan in plans) for name in ("r0", "r1")]
        assert nums[0] < nums[1] / 3

    def test_a_long_prompt_is_read_in_parts_that_delay_others_little(self) -> None:
        small = Small(0.6, 2, each_ns=100_000)
        timed = timed_with(small, 3)
        for long in timed.requests[1:]:
            long.prompt_token_ids = tuple([*range(30)] * 5)
            long.num_tokens, long.max_total_tokens = len(long.prompt_token_ids), 195
        ns_a_token(timed, 25)
        assert min(small.num_read["r1"], small.num_read["r2"]) >= 150
        first = next(idx for idx, num in enumerate(small.reads) if num > 16)
        assert 16 < max(small.reads[first + 1 :]) < 80, "it was not known before what reading takes"

    def test_no_more_is_read_than_a_step_can_hold(self) -> None:
        small = Small(each_ns=1_000)
        timed = timed_with(small, 3)
        for long in timed.requests:
            long.prompt_token_ids = tuple([*range(30)] * 5)
            long.num_tokens, long.max_total_tokens = len(long.prompt_token_ids), 195
        ns_a_token(timed, 25)
        assert max(small.reads) == CAPACITY.max_step_tokens

    def test_nothing_is_left_of_requests_that_ended(self) -> None:
        small = Small()
        timed = timed_with(small, 3)
        while timed.scheduler.num_running or timed.scheduler.num_waiting:
            timed.step()
        guessing = timed.scheduler._guessing
        assert guessing is not None
        assert guessing._drafting is not None
        assert not guessing._drafting._records
        assert not small.num_read
