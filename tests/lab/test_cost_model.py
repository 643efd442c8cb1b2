"""A step costs the sum of its parts; noise, brackets and range are what they say."""

from __future__ import annotations

import random
import statistics
from dataclasses import fields, replace

import pytest

from penstock.lab.cost_model import NO_COSTS, CostModel, Fitted, Noise, Residuals, shape_of_rows
from penstock.lab.profiling import cost_lines
from penstock.lab.simulated_executor import ModelledTimes
from penstock.lab.step_counts import counts_of
from penstock.types.plan import RowPlan, StepShape

COST = CostModel(step_ns=1e6, decode_row_ns=2e5, prefill_token_ns=1e5, decode_read_ns=100.0, prefill_read_ns=10.0)


def test_all_times_grow_by_a_factor() -> None:
    cost = CostModel(host_step_ns=2e5, host_row_ns=1e4, sample_step_ns=5e4, prefill_context_ns=3.0, token_brackets=((8, 1e5),))
    slow, shape = cost.scaled(1.5), StepShape(((1, 100), (1, 7), (64, 300)), 3)
    assert slow.duration_ns(shape) == pytest.approx(1.5 * cost.duration_ns(shape))
    assert slow.host_ns(3, has_prefill=True) == pytest.approx(1.5 * cost.host_ns(3, has_prefill=True))


def test_every_cost_is_printed() -> None:
    costs = {one.name: 1e6 for one in fields(CostModel) if one.name.endswith("_ns")}
    assert len([*cost_lines(CostModel(**costs))]) == len(costs)


def test_a_step_costs_the_sum_of_its_parts() -> None:
    shape = StepShape(((1, 99), (1, 0), (10, 50)), num_samples=2)
    parts = {
        "step_ns": 1_000_000,
        "decode_row_ns": 400_000,
        "prefill_token_ns": 1_000_000,
        "decode_read_ns": 100 * (100 + 1),
        "prefill_read_ns": 10 * (10 * 50 + 55),
    }
    for name, part_ns in parts.items():
        assert replace(NO_COSTS, **{name: getattr(COST, name)}).duration_ns(shape) == part_ns
    assert COST.duration_ns(shape) == sum(parts.values())


def test_a_position_that_another_row_has_read_costs_less() -> None:
    own = StepShape(((1, 100), (1, 100)), 2)
    common = replace(own, num_repeated=96)
    assert replace(COST, repeated_ns=60.0).duration_ns(common) == COST.duration_ns(own) - 96 * 60
    assert replace(COST, repeated_ns=1e9).duration_ns(common) == 0, "a damaged fit"
    apart = StepShape(((1, 100), (64, 0)), 2, num_repeated=960)
    assert replace(COST, repeated_ns=60.0).duration_ns(apart) == COST.duration_ns(apart), "held by requests without a row"


def test_chunks_read_as_much_as_the_whole_prompt() -> None:
    whole, chunks = (counts_of(StepShape(rows, 1)) for rows in (((64, 0),), ((40, 0), (24, 40))))
    assert whole == chunks._replace(num_rows=1, num_prefill_context=0)
    assert chunks.num_prefill_context == 40


def test_brackets_are_paid_like_a_tax() -> None:
    cost = CostModel(0, 0, 0, 0, 0, token_brackets=((4, 100.0), (10, 10.0)))
    assert [cost.duration_ns(StepShape(((1, 0),) * num, num)) for num in (1, 4, 5, 10, 20)] == [100, 400, 410, 460, 560]
    assert cost.duration_ns(StepShape(((6, 0),), 1)) == 420


def test_noise_is_drawn_from_the_residuals_and_repeats_with_its_seed() -> None:
    cost = CostModel(residuals=(Residuals(5e6, (0.9, 1.0, 1.5)),), host_residuals=(2.0,))
    noise = cost.noise(random.Random(7))
    drawn = [noise.draw(1e6) for _ in range(4000)]
    assert set(drawn) == {0.9, 1.0, 1.5}
    assert statistics.fmean(drawn) == pytest.approx(3.4 / 3, abs=0.02), "the mean is the one that was measured"
    again = cost.noise(random.Random(7))
    assert drawn[:3] == [again.draw(1e6) for _ in range(3)]
    assert cost.host_noise(random.Random(1)).draw(1e6) == 2.0
    assert CostModel().noise(random.Random(1)).draw(1e6) == 1.0


def test_steps_of_another_length_have_other_noise() -> None:
    cost = CostModel(residuals=(Residuals(1e6, (3.0,)), Residuals(8e6, (2.0,)), Residuals(64e6, (1.1,))))
    noise = cost.noise(random.Random(7))
    assert [noise.draw(modelled_ns) for modelled_ns in (1e3, 1e6, 1.1e6, 8e6, 9e6, 64e6, 1e9)] == [
        3.0,
        3.0,
        2.0,
        2.0,
        1.1,
        1.1,
        1.1,
    ]


def test_steps_after_a_long_one_find_cold_caches_and_warm_them() -> None:
    cost = CostModel(step_ns=7e6, decode_row_ns=0, prefill_token_ns=1e6, decode_read_ns=0, prefill_read_ns=0, cold_ns=1e6)
    times = ModelledTimes(cost)
    long, decode, many = (counts_of(StepShape(rows, 1)) for rows in (((70, 0),), ((1, 9),), ((1, 9),) * 32))
    assert [times.step_ns(counts) for counts in (decode, decode, long, decode, decode, many)] == [
        7_000_000,
        7_200_000,  # 7 of 35 ms
        77_000_000 + round(1e6 * 7.2 / 35 * 16 / 70),
        8_000_000,
        7_750_000,
        7_000_000 + round(1e6 * 0.75**2 / 2),
    ]


def test_the_host_takes_longer_for_prompts() -> None:
    cost = CostModel(host_step_ns=100, host_row_ns=10, host_prefill_ns=1000)
    times = ModelledTimes(cost)
    assert times.host_ns(counts_of(StepShape(((1, 9),) * 3, 3))) == 130
    assert times.host_ns(counts_of(StepShape(((1, 9), (5, 0)), 2))) == 1120
    assert times.host_ns(counts_of(StepShape(((1, 9), (5, 0)), 6))) == 120, "four of the five tokens are guesses"


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_lasts_as_long_as_it_was_seen_to(correlation: float) -> None:
    noise = Noise([Residuals(1e6, tuple([idx / 1000 for idx in range(1001)]))], correlation, random.Random(3))
    drawn = [noise.draw(1e6) for _ in range(20_000)]
    assert statistics.correlation(drawn, drawn[1:] + drawn[:1]) == pytest.approx(correlation, abs=0.05)  # values are ranks
    assert statistics.fmean(drawn) == pytest.approx(0.5, abs=0.05)
    assert statistics.quantiles(drawn, n=100)[98] == pytest.approx(0.99, abs=0.02)


def test_a_step_outside_of_the_fitted_range_is_told() -> None:
    fitted = Fitted(max_rows=8, max_decodes=8, max_prefill_tokens=64, max_context_len=1000)
    cost = CostModel(fitted=fitted)
    assert cost.outside(counts_of(StepShape(((1, 999),) * 8, 8))) == ()
    assert cost.outside(counts_of(StepShape(((1, 1000),) + ((1, 5),) * 8, 9))) == (
        "9 rows > 8",
        "9 decodes > 8",
        "1001 tokens of context > 1000",
    )
    assert cost.outside(counts_of(StepShape(((65, 0),), 1))) == ("65 prefill tokens > 64",)
    assert CostModel().outside(counts_of(StepShape(((65, 10**6),), 1))) == ()


def test_a_step_has_the_shape_of_its_rows() -> None:
    rows = (RowPlan("a", 7, 1, (), True), RowPlan("b", 0, 5, (1,), False))
    assert shape_of_rows(rows) == StepShape(((1, 7), (5, 0)), num_samples=1)
