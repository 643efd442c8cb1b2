"""Staged illnesses: `penstock doctor` names the cause, first or second, and finds nothing where nothing is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.doctor import predictor_of
from penstock.lab.doctor import RULES, Diagnosis, Prediction, RequestTimes, Verdict, diagnose
from penstock.lab.evidence import Evidence
from penstock.types.request import WaitTimes
from support.doctor.illnesses import (
    HEALTHY,
    SEEN,
    UNSEEN,
    greedy_key,
    prompts_before_streams,
    prompts_beside_streams,
    slow_tier,
    small_kv_cache,
    too_few_rows,
    window_too_long,
)
from support.doctor.stage import SECOND_NS, Stage, Workshop, poisson

ILL = {**SEEN, **UNSEEN}


@functools.cache
def evidence_of(stage: Callable[[], Stage | Workshop]) -> Evidence:
    """Return a stage's evidence. Some stages are judged in several ways, and staged once."""
    return stage().evidence


@functools.cache
def diagnosis_of(stage: Callable[[], Stage | Workshop]) -> Diagnosis:
    evidence = evidence_of(stage)
    return diagnose(evidence, predictor_of(evidence).gain)


@pytest.mark.parametrize("name", ILL)
def test_the_cause_is_named(name: str) -> None:
    diagnosis = diagnosis_of(ILL[name])
    assert diagnosis.verdict is Verdict.ILL
    assert name in [finding.rule.name for finding in diagnosis.findings[:2]]


@pytest.mark.parametrize("stage", [too_few_rows, small_kv_cache])
def test_the_simulator_sees_the_gain(stage: Callable[[], Stage]) -> None:
    first = diagnosis_of(stage).findings[0]
    assert first.gain is not None
    assert first.gain.after.mean_s < 0.9 * first.gain.before.mean_s


def test_the_simulator_sees_shorter_gaps() -> None:
    first = diagnosis_of(prompts_beside_streams).findings[0]
    assert first.gain is not None
    assert first.gain.after.gap_s < 0.3 * first.gain.before.gap_s


@pytest.mark.parametrize("setting", [{"speculation_model": "small"}, {"gpu_memory_utilization": 0.8}])
def test_settings_that_are_not_simulated_do_not_hinder_the_simulator(setting: dict[str, object]) -> None:
    evidence = evidence_of(too_few_rows)
    settings = {**evidence.settings, **setting}
    assert predictor_of(replace(evidence, settings=settings)).gain({"max_num_seqs": 8}) is not None


def test_a_guesser_of_ones_own_does_not_hinder_the_simulator(tmp_path: Path) -> None:
    """Its acceptance was observed, so the class itself is not needed."""
    path = tmp_path / "mine.py"
    guess = "    def guess(self, request, most):\n        return ()\n"
    path.write_text(f"from penstock.sched.policies.base import Guesser\nclass Mine(Guesser):\n{guess}")
    evidence = evidence_of(too_few_rows)
    settings = {**evidence.settings, "speculation": f"{path}:Mine"}
    assert predictor_of(replace(evidence, settings=settings)).gain({"max_num_seqs": 8}) is not None


def test_why_a_server_can_not_be_simulated_is_said() -> None:
    evidence = evidence_of(too_few_rows)
    predictor = predictor_of(replace(evidence, settings={**evidence.settings, "policy": "absent:Policy"}))
    assert predictor.gain({"max_num_seqs": 8}) is None
    assert predictor.doubt.startswith("No gain is predicted: ")
    assert "absent" in predictor.doubt


@pytest.mark.parametrize("stage", HEALTHY)
def test_nothing_is_found_on_a_healthy_server(stage: Callable[[], Stage]) -> None:
    diagnosis = stage().diagnose()
    assert [finding.rule.name for finding in diagnosis.findings] == []
    assert diagnosis.verdict is Verdict.HEALTHY


def names(stage: Stage) -> list[str]:
    return [finding.rule.name for finding in stage.diagnose().findings]


def test_a_full_kv_cache_is_not_taken_for_a_reserved_one_when_its_load_has_ended() -> None:
    visitors = poisson(10, 4, prompt=[100, 300], answer=[100, 200])
    assert names(Stage(visitors, blocks=60, until_s=100))[0] == "small KV cache"


def test_many_short_steps_that_leave_streams_out_are_long_ones() -> None:
    evidence = evidence_of(prompts_before_streams)
    assert evidence.plain_step_s < 0.01
    assert [finding.rule.name for finding in diagnosis_of(prompts_before_streams).findings] == ["long steps"]


def test_of_two_keys_with_as_much_load_neither_is_greedy() -> None:
    keys = [poisson(14, 1.5, seed, prompt=50, answer=[60, 120], tenant=f"key {seed}") for seed in (1, 2)]
    stage = Stage([visitor for key in keys for visitor in key], {"max_num_seqs": 1}, until_s=14)
    assert 0.5 < stage.evidence.largest_share < 0.6
    assert names(stage) == ["few rows"]


def test_a_wait_that_no_rule_explains_is_not_health() -> None:
    told = Stage(poisson(40, 1, prompt=100, answer=20, waits=WaitTimes(pipeline=SECOND_NS))).diagnose()
    assert told.verdict is Verdict.UNKNOWN
    assert not told.findings
    assert "pipeline" in told.summary


def test_clients_do_not_keep_the_server_waiting_for_more_than_all_of_the_time() -> None:
    """A stream that goes on counts for its client's wait, and not yet for the time of requests."""
    stage = Stage(poisson(40, 1, prompt=50, answer=5), client_wait_s=30)
    assert 0.9 < stage.evidence.client_wait < 1


def test_refused_clients_are_not_said_to_come_back_early() -> None:
    stage = Stage(poisson(10, 30, prompt=[100, 300], answer=[100, 200]), {"max_queue": 8}, until_s=10)
    assert stage.evidence.num_refused > 2 * stage.evidence.num_ended
    assert "refusals" in names(stage)


def test_refusals_that_a_keys_own_limit_asks_for_are_no_illness() -> None:
    stage = Stage(poisson(40, 1, prompt=100, answer=50))
    for _ in range(200):
        stage.metrics.count_rejected("tenant_requests", "scraper")
    assert stage.diagnose().verdict is Verdict.HEALTHY


def test_a_tier_is_slow_if_computing_would_take_less() -> None:
    [rule] = [rule for rule in RULES if rule.name == "slow tier"]
    evidence = evidence_of(slow_tier)
    loading_s = evidence.parts_s["loading"]
    assert rule.lost_s(evidence) == loading_s > 0

    def with_prompts_that_take(seconds: float) -> float:
        visits = [replace(one, parts_s={**one.parts_s, "prefill": seconds}) for one in evidence.visits]
        return rule.lost_s(replace(evidence, visits=visits))

    assert with_prompts_that_take(0.001) == loading_s
    assert with_prompts_that_take(10.0) == 0


def test_a_tier_that_is_slower_than_computing_is_named() -> None:
    """It is real in benchmarks/incidents.py alone: the staged executor computes a prompt in no time."""
    evidence = Stage(poisson(40, 4, prompt=[300, 600], answer=[5, 20]), until_s=20).evidence
    assert "tier of no use" not in [one.rule.name for one in diagnose(evidence).findings]
    found = diagnose(replace(evidence, declined=0.7)).findings[0]
    assert found.rule.name == "tier of no use"
    assert 0.2 < found.share < 0.7


@pytest.mark.parametrize(
    ("after", "is_advised"),
    [
        (RequestTimes(1.0, 1.0, 1.0), False),
        (RequestTimes(1.0, 1.0, 0.5), True),
        (RequestTimes(1.2, 1.0, 0.5), False),
        (RequestTimes(1.0, 0.5, 1.0), True),
        (RequestTimes(1.2, 0.5, 1.0), False),
    ],
)
def test_a_setting_without_a_gain_is_not_advised(after: RequestTimes, is_advised: bool) -> None:
    gain = Prediction(RequestTimes(1.0, 1.0, 1.0), after)
    found = diagnose(evidence_of(window_too_long), lambda _: gain).findings[0]
    assert found.rule.name == "batch window"
    assert (bool(found.change), found.gain) == ((True, gain) if is_advised else (False, None))


def greedy(**changes: object) -> list[str]:
    return [one.rule.name for one in diagnose(replace(evidence_of(greedy_key), **changes)).findings]


def test_the_key_that_asks_is_not_told_that_it_is_greedy() -> None:
    """Nobody else waits behind it, as far as it can see: it has too few rows."""
    assert greedy()[0] == "greedy key"
    assert greedy(own_tenant="people")[0] == "greedy key"
    assert greedy(own_tenant="scraper")[0] == "few rows"


def test_who_sees_too_few_requests_learns_which_key_has_the_tokens() -> None:
    seen = replace(evidence_of(greedy_key), own_tenant="people", visits=[], num_now=1)
    assert "scraper had 9" in diagnose(seen).summary
    assert "scraper" not in diagnose(replace(seen, own_tenant="scraper")).summary
    assert "scraper" not in diagnose(replace(seen, num_now=0)).summary, "nobody waits behind it"


@pytest.mark.parametrize("sight", [{"num_now": 4}, {"num_refused": 500, "num_calls": 500}])
def test_a_background_hides_nobody_who_waits_or_is_refused(sight: dict[str, float]) -> None:
    evidence = replace(evidence_of(greedy_key), visits=[], num_background=3, num_ended=0, num_refused=0, num_now=0, num_calls=0)
    assert diagnose(evidence).verdict is Verdict.HEALTHY
    assert diagnose(replace(evidence, **sight)).verdict is Verdict.UNKNOWN
