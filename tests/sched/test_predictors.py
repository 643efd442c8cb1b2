"""Predictors: lengths that are learned from outputs, how sure they say they are, and how much they remember."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.policies.predictors import MAX_WEIGHT, LengthCurve, NoPredictions, OnlinePredictor
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, HashModel, make_core, make_request, make_scheduler, run_to_completion
from penstock.types.events import Abort, Add
from penstock.types.request import FinishReason, Request

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "length_predictions_3class.csv"
MANY = 10**6

observations = st.lists(st.tuples(st.integers(1, 10**7), st.booleans()), min_size=1, max_size=80)


def curve_of(*lengths: int, cut_at: int = MANY) -> LengthCurve:
    curve = LengthCurve()
    for length in lengths:
        curve.observe(min(length, cut_at), is_whole=length <= cut_at)
    return curve


def drawn(count: int, mean: float, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [1 + int(rng.expovariate(1 / mean)) for _ in range(count)]


class TestLengthCurve:
    @given(seen=observations, limits=st.lists(st.integers(1, 10**6), min_size=2, max_size=2).map(sorted))
    def test_a_mean_grows_with_the_limit_and_stays_below_it(self, seen: list[tuple[int, bool]], limits: list[int]) -> None:
        curve = LengthCurve()
        for length, is_whole in seen:
            curve.observe(length, is_whole=is_whole)
        low, high = (curve.mean(limit) for limit in limits)
        assert 0 < low <= high * (1 + 1e-9)
        assert high <= limits[1] * (1 + 1e-9)

    @given(lengths=st.lists(st.integers(1, 4000), min_size=16, max_size=100))
    def test_whole_outputs_give_their_mean(self, lengths: list[int]) -> None:
        mean = sum(lengths) / len(lengths)
        assert curve_of(*lengths).mean(MANY) == pytest.approx(mean, rel=0.16, abs=1)  # as wide as a bin

    def test_outputs_cut_short_do_not_make_it_shorter(self) -> None:
        """Half of them are cut; their plain mean would be 139 instead of 200."""
        lengths = drawn(1000, 200)
        cut = [1 + int(random.Random(idx).expovariate(1 / 200)) for idx in range(1000)]
        curve = LengthCurve()
        for length, limit in zip(lengths, cut, strict=True):
            curve.observe(min(length, limit), is_whole=length <= limit)
        assert curve.mean(MANY) == pytest.approx(200, rel=0.1)
        assert sum(map(min, lengths, cut)) / 1000 < 140

    def test_a_limit_below_the_usual_length_is_what_to_expect(self) -> None:
        curve = curve_of(*drawn(500, 300))
        expected = sum(min(length, 100) for length in drawn(500, 300)) / 500
        assert curve.mean(100) == pytest.approx(expected, rel=0.05)

    def test_if_all_were_cut_at_16_the_limit_is_expected_up_to_there_and_more_beyond(self) -> None:
        curve = curve_of(*[1000] * 50, cut_at=16)
        assert curve.mean(16) == pytest.approx(16)
        assert curve.mean(MANY) > 256

    def test_a_change_is_followed(self) -> None:
        curve = curve_of(*[20] * 5000, *[400] * int(MAX_WEIGHT))
        assert curve.mean(MANY) > 250

    def test_it_does_not_grow(self) -> None:
        assert curve_of(*[20] * 5000).weight < MAX_WEIGHT


def ended(
    length: int, prompt: int = 10, tenant: str = "", *, limit: int = 2000, reason: FinishReason = FinishReason.STOP
) -> Request:
    request = make_request("r", prompt, tenant=tenant, max_tokens=limit)
    request.output_token_ids += range(length)
    request.finish_reason = reason
    return request


def asked(prompt: int = 10, tenant: str = "", limit: int = 2000) -> Request:
    request = make_request("q", prompt, tenant=tenant, max_tokens=limit)
    request.max_total_tokens = prompt + limit
    return request


class TestOnlinePredictor:
    def test_it_says_nothing_before_it_has_seen_enough(self) -> None:
        predictor = OnlinePredictor(min_observations=3)
        for _ in range(2):
            predictor.ended(ended(100))
            assert predictor.predict(asked()) is None
        predictor.ended(ended(100))
        assert predictor.predict(asked()) == pytest.approx(100, rel=0.16)

    def test_tenants_and_prompt_lengths_are_told_apart(self) -> None:
        predictor = OnlinePredictor()
        kinds = {("a", 10): 20, ("a", 1000): 300, ("b", 10): 700}
        for (tenant, prompt), length in kinds.items():
            for _ in range(16):
                predictor.ended(ended(length, prompt, tenant))
        for (tenant, prompt), length in kinds.items():
            prediction = predictor.predict(asked(prompt, tenant))
            assert prediction == pytest.approx(length, rel=0.16)

    def test_what_is_not_known_of_a_tenant_is_taken_from_all(self) -> None:
        predictor = OnlinePredictor()
        for _ in range(16):
            predictor.ended(ended(20, 10, "a"))
            predictor.ended(ended(500, 1000, "b"))
        new, known = predictor.predict(asked(10, "new")), predictor.predict(asked(1000, "a"))
        assert new == pytest.approx(20, rel=0.16), "its prompt is like that of another tenant"
        assert known == pytest.approx(20, rel=0.16), "its own short answers count more"

    @pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ERROR])
    def test_what_was_cut_short_is_only_a_lower_bound(self, reason: FinishReason) -> None:
        predictor = OnlinePredictor()
        for _ in range(20):
            predictor.ended(ended(200))
            predictor.ended(ended(10, reason=reason))
        prediction = predictor.predict(asked())
        assert prediction == pytest.approx(200, rel=0.16)

    def test_who_gave_up_in_the_queue_tells_nothing(self) -> None:
        predictor = OnlinePredictor(min_observations=1)
        predictor.ended(ended(0, reason=FinishReason.ABORT))
        assert predictor.predict(asked()) is None

    def test_the_request_s_own_limit_counts(self) -> None:
        predictor = OnlinePredictor()
        for _ in range(16):
            predictor.ended(ended(500))
        assert predictor.predict(asked(limit=40)) == 40

    def test_of_many_tenants_the_least_recently_seen_are_forgotten(self) -> None:
        predictor = OnlinePredictor(min_observations=1, max_tenants=3)
        for tenant in ("a", "b", "c", "a", "d"):
            predictor.ended(ended(100, tenant=tenant))
        assert list(predictor._tenants) == ["c", "a", "d"]


@pytest.mark.skipif(not TRACE.is_file(), reason="the trace of real lengths is not here")
def test_on_real_outputs_the_mean_is_right_over_thousands() -> None:
    """Outputs of a chat model. The class that a proxy model took each for, one of three, stands in the place of the tenant."""
    with TRACE.open(encoding="utf-8", newline="") as file:
        rows = [
            (row["predicted_length"], int(row["output_token_length"])) for row in itertools.islice(csv.DictReader(file), 6000)
        ]
    predictor = OnlinePredictor()
    num_predicted, num_true, means = 0, 0, dict.fromkeys("012", 0)
    for idx, (label, length) in enumerate(rows):
        if idx >= 1000:
            prediction = predictor.predict(asked(tenant=label))
            assert prediction is not None
            num_predicted, num_true = num_predicted + prediction, num_true + length
            means[label] = prediction
        predictor.ended(ended(length, tenant=label))
    assert num_predicted == pytest.approx(num_true, rel=0.05)
    assert means["0"] * 2 < means["1"] < means["2"]


class TestScheduler:
    def test_a_request_is_predicted_from_those_that_ended_before(self) -> None:
        executor = HashExecutor(model=HashModel(eos_token_id=3, eos_period=30))
        core = make_core(executor.capacity)
        first = [make_request(f"r{idx}", [idx + 5, 9], max_tokens=2000, stop_token_ids=(3,)) for idx in range(60)]
        run_to_completion(core, executor, *(Add(request) for request in first))
        mean = sum(len(request.output_token_ids) for request in first) / len(first)
        later = make_request("later", 2, max_tokens=2000)
        core.apply([Add(later)], 0)
        assert later.predicted_new_tokens == pytest.approx(mean, rel=0.2)
        assert first[0].predicted_new_tokens is None, "nothing was known when it was queued"

    def test_who_makes_the_request_may_know_better(self) -> None:
        class Wrong(NoPredictions):
            def predict(self, request: Request) -> None:
                raise AssertionError("not asked")

        scheduler = make_scheduler(policies=make_policies(predictor=Wrong()))
        request = make_request("r", predicted_new_tokens=7)
        assert scheduler.add(request, 0) is None
        assert request.predicted_new_tokens == 7

    def test_every_end_is_told_once(self) -> None:
        class Listener(NoPredictions):
            def __init__(self) -> None:
                self.heard: list[tuple[str, FinishReason | None]] = []

            def ended(self, request: Request) -> None:
                self.heard.append((request.request_id, request.finish_reason))

        listener = Listener()
        executor = HashExecutor()
        core = make_core(executor.capacity, make_policies(predictor=listener), max_rows=1)
        commands = [Add(make_request("a", max_tokens=3)), Add(make_request("b")), Add(make_request("c", 5000))]
        run_to_completion(core, executor, *commands, later={1: [Abort("b")]})
        assert listener.heard == [("b", FinishReason.ABORT), ("a", FinishReason.LENGTH)], "c was refused and never queued"
