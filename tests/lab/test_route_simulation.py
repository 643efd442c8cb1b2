"""Routes in the simulation: the decisions are the recorded scores', held tokens count, and models share one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.admission.door import AdmissionLimits
from penstock.backends.native._native import Account, Turns
from penstock.lab.cost_model import CostModel
from penstock.lab.distant import Distant
from penstock.lab.pacing import Pace
from penstock.lab.records import End
from penstock.lab.route_simulation import JUDGE_TOKENS, Judged, RouteOutcome, RouteSimulation, Strategy
from penstock.lab.virtual_server import ServerSettings
from penstock.lab.workload import Job, Workload
from penstock.routes.learned import Cascade, Fit, LearnedRoute
from penstock.routes.scores import Answer, Question
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

MS = 1_000_000
CAPACITY = Capacity(num_blocks=257, block_size=16, max_rows=8, max_step_tokens=256, max_model_len=512)
FAST, SLOW = 2 * MS, 10 * MS
"""Time of a step of each model."""
WINDOW = 4


def steps_of(step_ns: int) -> CostModel:
    return CostModel(step_ns=step_ns, decode_row_ns=0, prefill_token_ns=0, decode_read_ns=0, prefill_read_ns=0)


def settings(step_ns: int, **changes: object) -> ServerSettings:
    return ServerSettings(capacity=CAPACITY, make_policies=make_policies, cost=steps_of(step_ns), **changes)


def simulation(**changes: object) -> RouteSimulation:
    usual = {
        "kinds": {"small": "weak", "large": "strong"},
        "here": {"small": settings(FAST), "large": settings(SLOW)},
        "make_turns": Turns,
        "make_account": lambda _: Account(1.0),
    }
    return RouteSimulation(**(usual | changes))


def question(gain: float, start_gain: float | None = None, weak: float = 0.0, num_weak: int = 10) -> Question:
    return Question(
        weak=Answer(20, num_weak, weak),
        strong=Answer(30, 5, 1.0),
        gain=gain,
        start_gain=start_gain,
        prefix="",
        num_prefix_tokens=0,
    )


def route(margin: float | None = None) -> LearnedRoute:
    fit = Fit(np.zeros(2), np.ones(2), np.zeros(4), np.zeros(4))
    cascade = None if margin is None else Cascade("small", WINDOW, margin, fit)
    return LearnedRoute(embedder="vectors", by_question=fit, cascade=cascade, thresholds=(0.0,) * 21)


BY_QUESTION = Strategy(name="by question", models=("small", "large"), learned=route(), threshold=0.25)
CASCADE = Strategy(name="cascade", models=("small", "large"), learned=route(0.1), threshold=0.25)


def run(
    strategy: Strategy,
    *questions: Question,
    gap_ms: int = 1000,
    pace: Pace | None = None,
    jobs: dict | None = None,
    **changes: object,
) -> RouteOutcome:
    made = [
        Job(arrival_ns=gap_ms * MS * idx, num_prompt_tokens=30, num_output_tokens=10, **(jobs or {}))
        for idx in range(len(questions))
    ]
    workload = Workload(name="questions", jobs=made, prefix_block_tokens=16)
    return simulation(**changes).run(strategy, questions, workload, pace=pace or Pace())


def ttft_ms(outcome: RouteOutcome) -> list[float]:
    return [(one.first_ns - one.intended_ns) / MS for one in outcome.records]


def test_the_gain_of_the_question_decides() -> None:
    outcome = run(BY_QUESTION, question(0.3), question(0.2, weak=0.5))
    assert outcome.answerers == {0: "large", 1: "small"}
    assert outcome.quality == 0.75
    assert ttft_ms(outcome) == [10, 2]
    assert [one.num_output_tokens for one in outcome.records] == [5, 10]


def test_first_tokens_are_held_back_until_they_have_decided() -> None:
    kept, left, sure, unsure = question(0.3, 0.2), question(0.2, 0.3), question(0.1, 0.9), question(0.4, 0.0)
    outcome = run(CASCADE, kept, left, sure, unsure)
    assert outcome.answerers == {0: "small", 1: "large", 2: "small", 3: "large"}
    assert outcome.num_begun == 2
    first, second, third, fourth = ttft_ms(outcome)
    assert (first, third, fourth) == (WINDOW * 2, 2, 10)
    # The weak model's next step has begun, and after it the turn is kept for that model for a moment.
    assert WINDOW * 2 + 10 <= second <= WINDOW * 2 + 2 + 2 + 10
    assert [one.num_output_tokens for one in outcome.records] == [10, 5, 10, 5]
    assert list(outcome.records[0].gaps_ns[: WINDOW - 1]) == [0] * (WINDOW - 1)
    assert sum(outcome.records[0].gaps_ns) == (10 - WINDOW) * FAST


def test_an_answer_that_ends_within_the_window_is_judged_too() -> None:
    outcome = run(CASCADE, question(0.2, 0.0, num_weak=2), question(0.2, 0.9, num_weak=2))
    assert outcome.answerers == {0: "small", 1: "large"}
    assert [one.end for one in outcome.records] == [End.OK, End.OK]


def test_a_question_waits_for_its_vector_and_those_that_come_meanwhile_are_embedded_together() -> None:
    outcome = run(BY_QUESTION, *[question(0.2)] * 3, gap_ms=1, embed_ns=6 * MS)
    assert outcome.used_ns[""] == 18 * MS
    first, second, third = ttft_ms(outcome)
    assert first >= 6 + 2
    assert second == third + 1  # embedded in one step, and answered in one


def test_a_model_that_refuses_gives_way() -> None:
    limits = AdmissionLimits(max_queue=1)
    here = {"small": settings(FAST), "large": settings(SLOW, limits=limits)}
    here["large"] = replace(here["large"], capacity=replace(CAPACITY, max_rows=1))
    strategy = Strategy(name="fallback", models=("large", "small"))
    outcome = run(strategy, *[question(0.0)] * 6, gap_ms=0, here=here)
    assert {one.end for one in outcome.records} == {End.OK}
    by = list(outcome.answerers.values())
    assert by.count("large") >= 1
    assert by.count("small") >= 3
    alone = run(Strategy(name="alone", models=("large",)), *[question(0.0)] * 6, gap_ms=0, here=here)
    assert sum(one.end is End.REFUSED for one in alone.records) == by.count("small")


def test_models_take_turns_on_one_machine() -> None:
    """Two long answers of both models at once: neither has the machine for more than its half until one has ended."""
    both = [replace(question(0.3), strong=Answer(30, 40, 1.0)), question(0.2, num_weak=200)]
    outcome = run(BY_QUESTION, *both, gap_ms=0)
    large, small = outcome.records
    assert outcome.used_ns["large"] >= 40 * SLOW
    assert outcome.used_ns["small"] >= 200 * FAST
    assert outcome.duration_ns >= 40 * SLOW + 200 * FAST
    assert max(large.ended_ns, small.ended_ns) <= 1.05 * (40 * SLOW + 200 * FAST)
    assert min(large.ended_ns, small.ended_ns) >= 0.9 * (40 * SLOW + 200 * FAST)


def test_an_upstream_has_a_latency_and_a_rate_and_the_weak_model_after_it() -> None:
    far = Distant(latency_ns=300 * MS, token_ns=20 * MS, max_concurrent=1)
    outcome = run(BY_QUESTION, *[question(0.3)] * 2, gap_ms=1, here={"small": settings(FAST)}, elsewhere={"large": far})
    assert outcome.answerers == {0: "large", 1: "small"}
    assert ttft_ms(outcome) == [300, 2]
    assert outcome.records[0].ended_ns == (300 + 4 * 20) * MS
    assert outcome.used_ns == {"": 0, "small": 10 * FAST}


def test_a_pipeline_embeds_searches_and_answers() -> None:
    strategy = Strategy(name="pipeline", models=("large",), search_ns=7 * MS)
    outcome = run(strategy, question(0.0), kinds={"large": "strong"}, here={"large": settings(SLOW)}, embed_ns=6 * MS)
    assert ttft_ms(outcome) == [6 + 7 + 10]


STAGES = (1, 4, 7, 9, 13, 20)
"""Milliseconds: in the embedding, the search, the window, and answers."""


@pytest.mark.parametrize("at_ms", STAGES)
@pytest.mark.parametrize("way", ["leaves", "deadline"])
def test_clients_leave_and_deadlines_pass_at_any_stage(at_ms: int, way: str) -> None:
    key = {"leaves": "cancelled_ns", "deadline": "deadline_ns"}[way]
    strategies: Sequence[Strategy] = (CASCADE, BY_QUESTION, replace(BY_QUESTION, learned=None, search_ns=3 * MS))
    for strategy in strategies:
        outcome = run(strategy, question(0.3, 0.3), jobs={key: at_ms * MS}, embed_ns=3 * MS)
        [record] = outcome.records
        assert record.end is {"leaves": End.CANCELLED, "deadline": End.FAILED}[way]
        assert record.http_status == {"leaves": 0, "deadline": 408}[way]
        assert outcome.answerers == {}


def test_runs_repeat() -> None:
    questions = [question(idx % 7 / 10, idx % 5 / 10) for idx in range(40)]
    outcomes = [run(CASCADE, *questions, gap_ms=3, embed_ns=MS) for _ in range(2)]
    assert [one.ended_ns for one in outcomes[0].records] == [one.ended_ns for one in outcomes[1].records]
    assert outcomes[0].used_ns == outcomes[1].used_ns


def sure(confidence: float, **fields: object) -> Question:
    return replace(question(0.0, **fields), confidence=confidence)


def by(**fields: object) -> Strategy:
    return Strategy(name="judged", models=("small", "large"), judged=Judged(least=0.5, **fields))


def test_whole_answers_are_held_back_and_samples_share_steps() -> None:
    outcome = run(by(samples=3), sure(0.5, weak=0.5), sure(0.4))
    assert outcome.answerers == {0: "small", 1: "large"}
    assert (outcome.quality, outcome.num_begun) == (0.75, 6)
    kept, left = ttft_ms(outcome)
    assert 10 * 2 <= kept <= 11 * 2, "a step for each token, of all samples; the first one's prompt is computed before"
    assert kept + 10 <= left <= kept + 2 + 10
    assert [one.num_output_tokens for one in outcome.records] == [10, 5]


def test_a_verifier_reads_the_answer_before_it_is_kept() -> None:
    plain, asked = (run(by(judge=judge), sure(0.9), sure(0.1)) for judge in (None, "large"))
    assert plain.answerers == asked.answerers == {0: "small", 1: "large"}
    assert asked.used_ns["large"] == plain.used_ns["large"] + 2 * 2 * SLOW, "two steps for each verdict"
    assert ttft_ms(asked)[0] >= ttft_ms(plain)[0] + 2 * 10


def test_a_verdict_finds_the_answer_of_its_own_model_in_the_cache() -> None:
    """The server asks for it in the next turn of the conversation."""
    slow_prompts = replace(settings(FAST), cost=replace(steps_of(FAST), prefill_token_ns=MS))
    here = {"small": slow_prompts, "large": settings(SLOW)}
    long = replace(sure(0.9), weak=Answer(300, 10, 1.0))
    outcome = run(by(judge="small"), long, here=here)
    assert outcome.used_ns["small"] < (300 + 10 + JUDGE_TOKENS + 30) * MS + 20 * FAST


def test_an_ensemble_answers_at_once_and_keeps_one() -> None:
    outcome = run(by(both=True, judge="small"), sure(0.9, weak=0.5), sure(0.1))
    assert outcome.answerers == {0: "small", 1: "large"}
    assert outcome.quality == 0.75
    alone = run(by(samples=1), sure(0.1))
    assert ttft_ms(outcome)[1] > ttft_ms(alone)[0] - 10, "the judge waits for both"


def test_a_model_that_refuses_is_left_out_of_those_that_are_judged() -> None:
    here = {"small": settings(FAST), "large": settings(SLOW, limits=AdmissionLimits(max_queue=1))}
    here["large"] = replace(here["large"], capacity=replace(CAPACITY, max_rows=1))
    outcome = run(by(both=True, judge="large"), *[sure(0.1)] * 6, gap_ms=0, here=here)
    assert {one.end for one in outcome.records} == {End.OK}
    assert {*outcome.answerers.values()} == {"small", "large"}
    small = {"small": here["large"], "large": settings(SLOW)}
    outcome = run(by(samples=2), *[sure(0.9)] * 6, gap_ms=0, here=small)
    assert {one.end for one in outcome.records} == {End.OK}
    assert {*outcome.answerers.values()} == {"small", "large"}


def test_a_busy_verifier_sends_the_question_on_and_a_busy_judge_keeps_the_first_answer() -> None:
    """The server does so too; the recorded confidence does not count then."""
    here = {"small": settings(FAST), "large": settings(SLOW, limits=AdmissionLimits(max_queue=1))}
    here["large"] = replace(here["large"], capacity=replace(CAPACITY, max_rows=1))
    verified = run(by(judge="large"), *[sure(1.0)] * 8, gap_ms=0, here=here)
    assert "refused" in {one.end.value for one in verified.records}, "the large model is busy for answers, too"
    judged = run(by(both=True, judge="large"), *[sure(0.0)] * 8, gap_ms=0, here=here)
    assert {one.end for one in judged.records} == {End.OK}
    assert [*judged.answerers.values()].count("small") > 4


def test_where_the_strong_model_is_far_and_refuses_the_weak_one_answers() -> None:
    far = Distant(latency_ns=300 * MS, token_ns=20 * MS, max_concurrent=1)
    changes = {"here": {"small": settings(FAST)}, "elsewhere": {"large": far}}
    outcome = run(by(samples=2), *[sure(0.1)] * 2, gap_ms=1, **changes)
    assert outcome.answerers == {0: "large", 1: "small"}


@pytest.mark.parametrize("cancel_ms", [3, 15, 25, 45, 65])
@pytest.mark.parametrize("fields", [{"samples": 3}, {"judge": "large"}, {"both": True, "judge": "large"}], ids=str)
def test_a_client_that_leaves_while_answers_are_judged_ends_them(fields: dict, cancel_ms: int) -> None:
    [left] = run(by(**fields), sure(0.1), jobs={"cancelled_ns": cancel_ms * MS}).records
    assert (left.end, left.http_status) == (End.CANCELLED, 0)
    [late] = run(by(**fields), sure(0.1), jobs={"deadline_ns": cancel_ms * MS}).records
    assert (late.end, late.http_status) == (End.FAILED, 408)


def test_a_client_that_leaves_ends_the_judged_answers_of_an_upstream() -> None:
    far = Distant(latency_ns=300 * MS, token_ns=20 * MS, max_concurrent=2)
    changes = {"here": {"large": settings(SLOW)}, "elsewhere": {"small": far}}
    [left] = run(by(samples=2), sure(0.1), jobs={"cancelled_ns": 3 * MS}, **changes).records
    assert left.end is End.CANCELLED
