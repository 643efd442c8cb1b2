"""The fit finds costs again, is not led astray by outliers, and is judged by what it has not seen."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.lab.cost_model import CostModel, cold_share
from penstock.lab.fitting import Fit, fit, nonnegative
from penstock.lab.step_counts import counts_of
from penstock.lab.steps import MeasuredStep
from penstock.types.plan import StepShape
from support.lab.fitting import COST, shapes, steps


@functools.cache
def fitted_steps() -> Fit:
    """Return the fit to the usual steps, which takes half a second."""
    return fit(steps())


def misses(cost: CostModel) -> list[float]:
    """Errors for shapes that nobody has seen."""
    return [abs(cost.duration_ns(shape) / COST.duration_ns(shape) - 1) for shape in shapes(100, seed=9)]


def test_times_of_other_steps_are_told() -> None:
    fitted = fitted_steps()
    assert float(np.median(misses(fitted.cost))) < 0.01
    assert max(misses(fitted.cost)) < 0.06
    assert fitted.cost.host_step_ns == pytest.approx(COST.host_step_ns, rel=0.1)
    assert fitted.cost.host_row_ns == pytest.approx(COST.host_row_ns, rel=0.1)
    assert fitted.cost.host_prefill_ns == pytest.approx(COST.host_prefill_ns, rel=0.1)
    assert fitted.left_out["execute"].median < 0.02
    assert fitted.left_out["host"].median < 0.08
    assert fitted.num_steps == 300


def test_reads_in_steps_of_few_tokens_have_a_price_of_their_own() -> None:
    cost = replace(COST, narrow_read_ns=80.0)
    measured = [MeasuredStep(shape, cost.duration_ns(shape), group=idx % 20) for idx, shape in enumerate(shapes(200))]
    fitted = fit(measured).cost
    assert fitted.narrow_read_ns == pytest.approx(80, rel=0.1)
    assert fitted.decode_read_ns == pytest.approx(100, rel=0.1)


def test_positions_that_several_rows_read_have_a_price_of_their_own() -> None:
    cost, rng = replace(COST, repeated_ns=60.0), random.Random(5)
    common = [replace(shape, num_repeated=rng.choice((0, 50, 400)) * (len(shape.rows) - 1)) for shape in shapes(200)]
    fitted = fit([MeasuredStep(shape, cost.duration_ns(shape), group=idx % 20) for idx, shape in enumerate(common)]).cost
    assert fitted.repeated_ns == pytest.approx(60, rel=0.1)
    assert fitted_steps().cost.repeated_ns == 0, "no step has any"


def test_the_time_of_texts_grows_with_their_tokens() -> None:
    texts = [(num, 1_000_000 + 1_500 * num) for num in range(10, 3000, 100)]
    texts[7] = texts[7][0], 90_000_000
    fitted = fit(steps(), texts=texts).cost
    assert [fitted.prompt_ns(num) for num in (0, 2000)] == pytest.approx([1_000_000, 4_000_000], rel=0.02)
    assert fit(steps(), texts=texts[:9]).cost.prompt_ns(2000) == fitted_steps().cost.prompt_ns(2000) == 0, "too few, and none"
    onto = replace(COST, residuals=(), text_ns=7.0)
    assert fit(steps(noise=0.0), base=onto.scaled(0.5)).cost.text_ns == 3.5, "the base's, though steps take twice as long"


def test_a_fit_onto_another_keeps_its_proportions_and_its_range() -> None:
    """A server is a tenth slower than a profile, takes more for each step and token, and had short contexts only."""
    base = replace(fit(steps(noise=0.0)).cost, residuals=())
    slower = replace(base.scaled(1.1), step_ns=1.1 * base.step_ns + 2e5, sample_ns=1.1 * base.sample_ns + 4e4)
    served = [shape for shape in shapes(400, seed=3) if max(context_len for _, context_len in shape.rows) < 1000]
    measured = [
        MeasuredStep(shape, slower.duration_ns(shape), host_ns=70_000, group=idx % 20) for idx, shape in enumerate(served)
    ]
    fitted = fit(measured, base=base)
    far = StepShape(((1, 8000),) * 4, 4)
    assert fitted.cost.duration_ns(far) == pytest.approx(slower.duration_ns(far), rel=0.01)
    assert fitted.cost.host_ns(1, has_prefill=False) == pytest.approx(70_000, rel=0.01), "the recording's"
    assert fitted.cost.fitted == base.fitted
    assert fitted.left_out["execute"].p90 < 0.01
    assert fitted.cost.residuals, "the noise is the recording's too"


@pytest.mark.parametrize("host_ns", [None, 0])
def test_steps_without_host_time_are_fitted_without_an_error_of_it(host_ns: int | None) -> None:
    fitted = fit([replace(step, host_ns=host_ns) for step in steps()])
    assert "host" not in fitted.left_out
    assert fitted.cost.host_step_ns == 0
    assert fitted.left_out["execute"].median < 0.02


def test_outliers_do_not_lead_it_astray() -> None:
    rng = random.Random(4)
    spoilt = [replace(step, execute_ns=4 * step.execute_ns) if rng.random() < 0.08 else step for step in steps()]
    assert float(np.median(misses(fit(spoilt).cost))) < 0.02


def test_no_part_costs_less_than_nothing() -> None:
    falling = [MeasuredStep(shape, 1_000_000 - 10 * len(shape.rows), group=idx) for idx, shape in enumerate(shapes(50))]
    cost = fit(falling).cost
    costs = [cost.step_ns, cost.decode_row_ns, cost.prefill_token_ns, cost.decode_read_ns, cost.prefill_read_ns, cost.sample_ns]
    assert min(*costs, *(token_ns for _, token_ns in cost.token_brackets)) >= 0


def test_each_part_pays_for_its_own_work() -> None:
    """Attention that costs much per position is not taken for products of long rows."""

    def measured(idx: int, shape: StepShape) -> MeasuredStep:
        counts = counts_of(shape)
        parts = {
            "linear": 2_000_000 + 50_000 * counts.num_tokens,
            "attention": 700 * counts.num_decode_reads + 90 * counts.num_prefill_reads,
            "sampling": 40_000 * counts.num_samples,
        }
        return MeasuredStep(shape, sum(parts.values()) + 100_000 + 3_000 * counts.num_rows, parts, group=idx % 20)

    fitted = fit([measured(idx, shape) for idx, shape in enumerate(shapes(150))])
    assert fitted.cost.decode_read_ns == pytest.approx(700, rel=0.02)
    assert fitted.cost.prefill_read_ns == pytest.approx(90, rel=0.02)
    assert {"linear", "attention", "execute"} <= fitted.left_out.keys()
    assert fitted.left_out["linear"].median < 0.01
    assert fitted.left_out["attention"].median < 0.01


def test_a_group_is_judged_by_a_model_that_has_not_seen_it() -> None:
    """The only steps with 40 rows take twice as long: a fit that has not seen them is wrong by about half."""
    usual = [step for step in steps(noise=0.0) if len(step.shape.rows) < 40]
    strange = [step for step in steps(noise=0.0) if len(step.shape.rows) == 40]
    spoilt = usual + [replace(step, execute_ns=2 * step.execute_ns, group=99) for step in strange]
    fitted = fit(spoilt)
    assert 0.4 < fitted.left_out["execute"].largest < 0.8


def test_noise_is_kept() -> None:
    fitted = fit(steps(noise=0.2, count=2000), are_in_order=True)
    assert len(fitted.cost.residuals) > 2, "some steps take 1 ms, others 100"
    for residuals in fitted.cost.residuals:
        assert list(residuals.ratios) == sorted(residuals.ratios)
        assert residuals.ratios[0] == pytest.approx(0.8, abs=0.08)
        assert residuals.ratios[-1] == pytest.approx(1.2, abs=0.08)
    assert fitted.cost.residual_correlation < 0.1


def test_a_stall_is_noise_of_the_steps_that_it_hits() -> None:
    """Stalls of 2 ms in one step of ten make short steps far longer in the mean, and long ones hardly."""
    rng = random.Random(4)
    stalled = [replace(step, execute_ns=step.execute_ns + 2_000_000 * (rng.random() < 0.1)) for step in steps(count=2000)]
    cost = fit(stalled).cost
    means = [float(np.mean(residuals.ratios)) for residuals in cost.residuals]
    assert means[0] > 1.05
    assert means[-1] < 1.02
    ratio = sum(step.execute_ns for step in stalled) / sum(
        cost.duration_ns(step.shape)
        * float(
            np.mean(next((r for r in cost.residuals if r.up_to_ns >= cost.duration_ns(step.shape)), cost.residuals[-1]).ratios)
        )
        for step in stalled
    )
    assert ratio == pytest.approx(1, abs=0.01), "the time of all steps together is right"


def test_the_noise_of_a_few_long_steps_is_kept() -> None:
    short = [
        MeasuredStep(StepShape(((1, 10 + idx % 7),), 1), 3_000_000 + 10_000 * (idx % 5), group=idx % 9) for idx in range(200)
    ]
    long = [MeasuredStep(StepShape(((400, idx % 7),), 1), 200_000_000 * (1 + idx % 2), group=idx % 9) for idx in range(20)]
    cost = fit(short + long).cost
    assert cost.residuals[-1].up_to_ns > 200e6
    assert max(cost.residuals[-1].ratios) > 1.2, "long steps differ by a factor of 2"


def test_what_a_long_step_leaves_cold_is_told() -> None:
    measured = []
    for idx, step in enumerate(steps()):
        coldness = 0.75 ** (idx % 7)
        num_tokens = sum(query_len for query_len, _ in step.shape.rows)
        cold_ns = round(3e6 * cold_share(coldness, num_tokens))
        measured.append(replace(step, coldness=coldness, execute_ns=step.execute_ns + cold_ns))
    assert fit(measured).cost.cold_ns == pytest.approx(3e6, rel=0.1)
    assert fitted_steps().cost.cold_ns == 0


def test_noise_that_lasts_is_told() -> None:
    slow = [
        replace(step, execute_ns=round(step.execute_ns * (1.3 if idx // 50 % 2 else 1))) for idx, step in enumerate(steps())
    ]
    assert fit(slow, are_in_order=True).cost.residual_correlation > 0.5
    assert fit(slow).cost.residual_correlation == 0


def test_the_range_is_told() -> None:
    cost = fitted_steps().cost
    fitted = cost.fitted
    assert fitted is not None
    assert fitted.max_rows == 40
    assert 1500 < fitted.max_context_len <= 2200
    assert counts_of(StepShape(((1, 5000),), 1)).max_context_len == 5001
    assert cost.outside(counts_of(StepShape(((1, 5000),), 1)))


@pytest.mark.parametrize("count", [0, 3])
def test_too_few_steps_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} steps in {count} groups can't tell 9 costs apart"):
        fit([MeasuredStep(shape, 1, group=idx) for idx, shape in enumerate(shapes(count))])


@pytest.mark.parametrize("duration_ns", [0, -1])
def test_a_step_that_took_no_time_is_refused(duration_ns: int) -> None:
    with pytest.raises(ValueError, match="took no time"):
        fit([MeasuredStep(shape, duration_ns if idx == 7 else 10**6, group=idx) for idx, shape in enumerate(shapes(20))])


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_without_negative_parts(seed: int) -> None:
    """Against all sets of parts that are not zero."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 4)), rng.normal(size=12)
    found = nonnegative(matrix, target)
    assert found.min() >= 0
    best = float(np.linalg.norm(target))
    for mask in range(1, 16):
        free = [idx for idx in range(4) if mask >> idx & 1]
        solution = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if solution.min() >= 0:
            best = min(best, float(np.linalg.norm(matrix[:, free] @ solution - target)))
    assert float(np.linalg.norm(matrix @ found - target)) == pytest.approx(best, rel=1e-6)
