"""How many guesses a step checks, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.sched.guessing import MOST_GUESSES, Record, StepLine
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import HashExecutor, make_core, make_request, run_to_completion
from penstock.testing.driver import Driver
from penstock.types.events import Abort, Add
from penstock.types.plan import Ticket
from penstock.types.request import FinishReason
from penstock.types.result import StepResult
from penstock.types.sampling import BeamParams
from penstock.types.stats import StepCounts
from support.timed_steps import CAPACITY, MODEL, Knowing, Timed, answer_of


class TestPrice:
    def test_guesses_are_made_where_a_position_costs_little(self) -> None:
        assert Timed(1, 20_000_000, 300_000, Knowing()).guesses() == [MOST_GUESSES]

    def test_few_are_made_where_a_position_costs_as_much_as_a_token(self) -> None:
        timed = Timed(4, 0, 1_000_000, Knowing(3))
        for _ in range(40):
            timed.step()
        assert max(timed.guesses()) <= 1, "it is measured within a tenth or so"

    def test_the_more_rows_the_fewer_guesses(self) -> None:
        nums = [sum(Timed(rows, 20_000_000, 1_000_000, Knowing(6)).guesses()) / rows for rows in (1, 4, 16, 32)]
        assert nums == sorted(nums, reverse=True)
        assert nums[0] > 3 * nums[-1]

    def test_longer_matches_get_more_guesses(self) -> None:
        nums = [Timed(2, 20_000_000, 2_000_000, Knowing(num)).guesses()[0] for num in (2, 4, 8, 16)]
        assert nums == sorted(nums)
        assert nums[0] < nums[-1]

    def test_the_first_step_has_none(self) -> None:
        timed = Timed(1, 20_000_000, 300_000, Knowing())
        assert not timed.step().guesses, "nobody knows what a step takes"


def ns_on_a_cpu(num_positions: int) -> float:
    """Flat while memory bounds a step, steep from 10 positions on."""
    return max(28e6, 5e6 + 2.25e6 * num_positions)


class TestStepLine:
    def test_the_slope_is_that_of_steps_like_the_latest(self) -> None:
        line = StepLine()
        for num in [*[1] * 100, *range(1, 32), *[32, 33, 35] * 80]:
            line.learn(num, ns_on_a_cpu(num))
        assert line.position_ns == pytest.approx(2.25e6, rel=0.08), "a line through all would say 1.5e6"
        for num in [1, 4, 7] * 100:
            line.learn(num, ns_on_a_cpu(num))
        assert line.position_ns < 0.1e6

    def test_equal_steps_show_no_slope_and_are_supposed_to_be_flat(self) -> None:
        line = StepLine()
        for _ in range(10):
            line.learn(32, 80e6)
        assert line.position_ns == pytest.approx(80e6 / 64)

    def test_a_steep_slope_is_forgotten_so_that_guesses_are_tried_again(self) -> None:
        line, slopes = StepLine(), []
        for num in [32, 36] * 20 + [32] * 1000:
            line.learn(num, ns_on_a_cpu(num))
            slopes.append(line.position_ns)
        assert slopes[40] == pytest.approx(2.25e6, rel=0.05)
        assert slopes[60] > 2e6, "not at once"
        assert slopes[-1] == pytest.approx(77e6 / 64, rel=0.05)

    def test_a_stalled_step_changes_little(self) -> None:
        line = StepLine()
        for num in [1, 9, 17] * 40:
            line.learn(num, 20e6 + 1e6 * num)
        line.learn(17, 5000e6)
        assert line.position_ns == pytest.approx(1e6, rel=0.25)


class TestRecord:
    def test_as_many_misses_as_expected_change_nothing(self) -> None:
        record = Record()
        assert record.weight(5) == pytest.approx(4.0)
        for _ in range(200):  # a match of 2: one of two guesses is right
            record.learn(2, 1, 1)
            record.learn(2, 1, 0)
        assert record.weight(5) == pytest.approx(4.0)

    def test_a_row_whose_guesses_are_wrong_gets_fewer(self) -> None:
        record, weights = Record(), [Record().weight(4)]
        for _ in range(20):
            record.learn(4, 3, 0)
            weights.append(record.weight(4))
        assert weights == sorted(weights, reverse=True)
        assert weights[-1] < weights[0] / 2

    def test_a_row_whose_guesses_are_right_gets_more(self) -> None:
        record = Record()
        for _ in range(20):
            record.learn(2, 3, 3)
        assert record.weight(2) > 1.5


class TestLimits:
    def test_a_request_gets_no_guess_beyond_its_limit(self) -> None:
        core = make_core(CAPACITY, make_policies(guesser=Knowing()))
        requests = [make_request(f"r{num}", [num + 1], max_tokens=num) for num in range(1, 12)]
        outcomes = run_to_completion(core, HashExecutor(CAPACITY, model=MODEL), *map(Add, requests))
        for request in requests:
            outcome = outcomes[request.request_id]
            assert tuple(outcome.token_ids) == answer_of(request)[: request.sampling.max_tokens]
            assert outcome.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(("field", "most"), [("max_scored", 11), ("max_step_tokens", 16)])
    def test_rows_share_the_room_of_a_step(self, field: str, most: int) -> None:
        timed = Timed(5, 20_000_000, 10_000, Knowing(), replace(CAPACITY, max_rows=6, **{field: most}))
        plans = [timed.step() for _ in range(12)]
        nums = [len(token_ids) for token_ids in plans[-1].guesses.values()]
        assert (sorted(nums), sum(nums)) == ([2, 2, 2, 2, 3], 11)

    def test_guesses_keep_to_the_budget(self) -> None:
        budget = HoldLatency(slo_itl_ns=24_000_000)
        timed = Timed(4, 20_000_000, 200_000, Knowing(), policies=make_policies(guesser=Knowing(), budget=budget))
        plans = [timed.step() for _ in range(30)]
        durations_ns = [20_000_000 + 200_000 * plan.num_tokens for plan in plans[10:]]
        assert max(durations_ns) < 25_000_000
        assert any(plan.guesses for plan in plans[10:])

    def test_those_of_the_background_count_as_its_tokens(self) -> None:
        timed = Timed(3, 20_000_000, 100_000, Knowing(), policies=make_policies(guesser=Knowing(), budget=HoldLatency()))
        for request in timed.requests:
            request.background = True
        counts: list[StepCounts] = []
        for _ in range(12):
            timed.step(counts)
        nums = [sum(num + 1 for num, _ in each.guesses.values()) for each in counts[-2:]]
        assert [each.num_background_tokens for each in counts[-2:]] == nums
        assert min(nums) > 2

    def test_guesses_preempt_nobody_and_leave_others_their_memory(self) -> None:
        capacity = replace(CAPACITY, num_blocks=13)  # 12 that can be used: what they need in the end
        found = []
        for guesser in (Knowing(), "off"):
            core = make_core(capacity, make_policies(guesser=guesser, reserve=Watermark(share=0.0, growth_tokens=0)))
            requests = [make_request(f"r{idx}", [idx + 1] * 3, arrival_ns=idx, max_tokens=12) for idx in range(3)]
            executor = HashExecutor(capacity, model=MODEL)
            outcomes = run_to_completion(core, executor, *map(Add, requests), after_turn=lambda driver: driver.core.check())
            found.append([outcomes[request.request_id].token_ids for request in requests])
            assert [request.num_preemptions for request in requests] == [0, 0, 0]
        assert found[0] == found[1]

    def test_beams_get_none(self) -> None:
        guesser = Knowing()
        core = make_core(CAPACITY, make_policies(guesser=guesser))
        beams = [make_request(f"b{idx}", [1, 2], max_tokens=5, logprobs=4, beams=BeamParams(width=2)) for idx in range(2)]
        for beam in beams:
            beam.parent_id = "b"
        drivers: list[Driver] = []
        run_to_completion(core, HashExecutor(CAPACITY, model=MODEL), *map(Add, beams), after_turn=drivers.append)
        assert len(drivers[0].plans) > 3
        assert not any(plan.guesses for plan in drivers[0].plans)

    @pytest.mark.parametrize("gate", ["static", "dynamic"])
    def test_batches_that_are_fixed_have_none(self, gate: str) -> None:
        core = make_core(CAPACITY, make_policies(gate=gate, guesser=Knowing()))
        drivers: list[Driver] = []
        request = make_request("r", [1], max_tokens=9)
        run_to_completion(core, HashExecutor(CAPACITY, model=MODEL), Add(request), after_turn=drivers.append)
        assert len(drivers[0].plans) >= 9
        assert not any(plan.guesses for plan in drivers[0].plans)


class TestEnds:
    def test_a_stop_token_among_the_guesses_ends_the_answer_there(self) -> None:
        request = make_request("r", [5], max_tokens=100)
        stop = answer_of(request)[9]
        stopped = make_request("r", [5], max_tokens=100, stop_token_ids=(stop,))
        core = make_core(CAPACITY, make_policies(guesser=Knowing()))
        outcomes = run_to_completion(core, HashExecutor(CAPACITY, model=MODEL), Add(stopped))
        first = answer_of(request).index(stop)
        assert tuple(outcomes["r"].token_ids) == answer_of(request)[: first + 1]
        assert outcomes["r"].last.stop_reason == stop

    def test_a_row_that_fails_among_its_guesses_ends_alone(self) -> None:
        class Failing(HashExecutor):
            def collect(self, ticket: Ticket) -> StepResult:
                result = super().collect(ticket)
                if ticket.step_id != 3:
                    return result
                tokens = {name: token_ids for name, token_ids in result.token_ids.items() if name != "r1"}
                return replace(result, token_ids=tokens, failures={"r1": "no logit is a number"})

        drivers: list[Driver] = []
        core = make_core(CAPACITY, make_policies(guesser=Knowing()))
        requests = [make_request(f"r{idx}", [idx + 1], max_tokens=100) for idx in range(3)]
        executor = Failing(CAPACITY, model=MODEL)
        outcomes = run_to_completion(core, executor, *map(Add, requests), after_turn=drivers.append)
        assert "r1" in drivers[0].plans[3].guesses
        assert outcomes["r1"].finish_reason is FinishReason.ERROR
        for request in (requests[0], requests[2]):
            assert tuple(outcomes[request.request_id].token_ids) == answer_of(request)[:100]

    def test_nothing_is_left_of_requests_however_they_end(self) -> None:
        guesser = Knowing()
        core = make_core(CAPACITY, make_policies(guesser=guesser))
        requests = [make_request(f"r{idx}", [idx + 1], max_tokens=40) for idx in range(6)]
        later = {3: [Abort("r1")], 4: [Abort("r2")]}
        executor = HashExecutor(CAPACITY, model=MODEL)
        run_to_completion(core, executor, *map(Add, requests), later=later, after_turn=lambda driver: driver.core.check())
        assert core.scheduler._guessing is not None
        assert not core.scheduler._guessing._records
        assert sorted(guesser.ended_ids) == [request.request_id for request in requests]
        assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks

    def test_steps_become_fewer_and_their_tokens_are_counted(self) -> None:
        nums: list[Sequence[int]] = []
        for guesser in ("off", Knowing()):
            core = make_core(CAPACITY, make_policies(guesser=guesser))
            steps = []

            class Counting:
                def on_step(self, stats, steps=steps) -> None:
                    steps.append(stats.counts)

                def on_finish(self, stats) -> None: ...

            core._observer = Counting()
            run_to_completion(core, HashExecutor(CAPACITY, model=MODEL), Add(make_request("r", [1], max_tokens=100)))
            accepted = sum(num for counts in steps for _, num in counts.guesses.values())
            nums.append((len(steps), sum(counts.num_sampled_tokens for counts in steps), accepted))
        assert nums[0] == (100, 100, 0)
        assert nums[1][0] < 20
        assert nums[1][1:] == (100, 100 - nums[1][0])
