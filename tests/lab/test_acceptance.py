"""Guesses of simulated answers hold as their marks say; answers stay as long as they are, and runs repeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import VirtualClock
from penstock.lab.acceptance import LEAST_MATCH, Acceptance, MarkedGuesser, acceptance_of, marked_answers
from penstock.lab.recording import open_recording
from penstock.lab.records import End
from penstock.lab.simulated_executor import TOKEN_ID, WRONG_TOKEN_ID
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.workload import Job, Workload
from penstock.obs.recording import Recorder
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import make_request
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity, RowPlan, StepPlan
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepCounts, StepStats

CAPACITY = Capacity(num_blocks=65, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=512)
JOBS = [
    Job(arrival_ns=idx * 30_000_000, num_prompt_tokens=20 + idx * 31 % 90, num_output_tokens=1 + idx * 37 % 150)
    for idx in range(24)
]


def run(acceptance: Acceptance | None, **settings: Any) -> tuple[Outcome, Counter[int]]:
    """Also how many rows had so many samples."""
    samples: Counter[int] = Counter()

    def note(plan: StepPlan) -> None:
        samples.update(row.samples for row in plan.rows)

    simulation = Simulation(**{"capacity": CAPACITY, "make_policies": make_policies, "acceptance": acceptance} | settings)
    return simulation.run(Workload(name="jobs of a test", jobs=JOBS), on_plan=note), samples


@pytest.mark.parametrize("max_tokens", [None, 400, 40])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_answers_are_as_long_as_without_guesses_and_take_fewer_steps(chance: float, max_tokens: int | None) -> None:
    plain, _ = run(None, max_tokens=max_tokens)
    outcome, samples = run(Acceptance(chance=chance), max_tokens=max_tokens)
    for one, other in zip(plain.ended, outcome.ended, strict=True):
        assert (one.num_generated_tokens, one.finish_reason) == (other.num_generated_tokens, other.finish_reason)
    assert [one.num_output_tokens for one in plain.records] == [one.num_output_tokens for one in outcome.records]
    assert max(samples) > 1
    assert outcome.num_guesses >= outcome.num_accepted
    if chance:
        assert outcome.num_steps < plain.num_steps
        assert outcome.duration_ns < plain.duration_ns
    else:
        assert outcome.num_accepted == 0 < outcome.num_guesses


def test_with_little_memory_answers_have_their_lengths_and_runs_repeat() -> None:
    def eager() -> Any:
        return make_policies(reserve=Watermark(share=0.0, growth_tokens=0))

    small = replace(CAPACITY, num_blocks=24, max_model_len=300)
    outcome, samples = run(Acceptance(chance=0.8, seed=3), capacity=small, make_policies=eager)
    again, _ = run(Acceptance(chance=0.8, seed=3), capacity=small, make_policies=eager)
    assert [one.num_generated_tokens for one in outcome.ended] == [job.num_output_tokens for job in JOBS]
    assert max(samples) > 1
    assert sum(one.num_preemptions for one in outcome.ended) > 0
    assert (outcome.ended, outcome.duration_ns) == (again.ended, again.duration_ns)


@pytest.mark.parametrize(
    ("policies", "capacity", "acceptance"),
    [
        ({"guesser": "off"}, CAPACITY, Acceptance(chance=1.0)),
        ({"preset": "static"}, CAPACITY, Acceptance(chance=1.0)),
        ({}, replace(CAPACITY, checks_guesses=True, max_scored=64), None),  # tokens are made up, so all would hold
    ],
)
def test_where_a_server_does_not_guess_or_nothing_is_known_there_are_no_guesses(
    policies: dict[str, Any], capacity: Capacity, acceptance: Acceptance | None
) -> None:
    outcome, samples = run(acceptance, capacity=capacity, make_policies=lambda: make_policies(**policies))
    assert max(samples) == 1
    assert outcome.num_guesses == 0


def test_clients_leave_after_as_many_tokens_however_many_come_at_once() -> None:
    job = Job(arrival_ns=0, num_prompt_tokens=20, num_output_tokens=100, cancelled_after_tokens=40)
    simulation = Simulation(capacity=CAPACITY, make_policies=make_policies, acceptance=Acceptance(chance=1.0))
    [record] = simulation.run(Workload(name="one who leaves", jobs=[job])).records
    assert record.end is End.CANCELLED
    assert 40 <= record.num_output_tokens < 60


def test_marks_depend_on_the_request_and_the_seed_alone() -> None:
    one = Acceptance(chance=0.5, seed=1)
    assert one.marks("7", 400)[:90] == one.marks("7", 90)
    assert len({one.marks("7", 90), one.marks("8", 90), Acceptance(chance=0.5, seed=2).marks("7", 90)}) == 3
    assert 150 < one.marks("7", 400).count(b"r") < 250
    assert Acceptance([b"-rrw"]).marks("7", 10) == b"-rrw-rrw-r"


def test_a_run_is_guessed_to_its_end_and_the_longer_it_is_the_surer() -> None:
    guesser = MarkedGuesser(Acceptance([b"--rrrrw"]))
    request = make_request("a", max_tokens=9)
    request.output_token_ids = [TOKEN_ID]
    assert guesser.guess(request, 3) is None
    request.output_token_ids = [TOKEN_ID] * 4
    guess = guesser.guess(request, 4)
    assert guess is not None
    assert (guess.token_ids, guess.num_matched) == ((TOKEN_ID, TOKEN_ID, WRONG_TOKEN_ID, WRONG_TOKEN_ID), LEAST_MATCH + 2)


def record(path: Path, rows: list[tuple[int, int, int, int]]) -> None:
    """An answer of 12 tokens to a prompt of 8, by `rows` of (tokens, tokens before them, samples, guesses that were right)."""
    about: dict[str, Any] = {"model": "", "machine": {}, "config": "", "settings": {}, "depth": 1}
    about["capacity"] = {"num_blocks": 9, "block_size": 4, "max_rows": 1, "max_step_tokens": 9, "max_model_len": 99, "new": 1}
    recorder = Recorder(path, max_bytes=1 << 30, clock=VirtualClock(), block_size=4, about=about)
    recorder.on_queued(make_request("a", 8, max_tokens=12), 0)
    for idx, (query_len, context_len, samples, num_right) in enumerate(rows):
        counts = StepCounts(guesses={"a": (samples - 1, num_right)} if samples > 1 else {})
        row = RowPlan("a", context_len, query_len, (), samples)
        recorder.on_step(StepStats(idx, idx, idx, 1, 0, 8, 8, query_len, planned_ns=idx, rows=[row], counts=counts))
        recorder.on_turn({})
    recorder.on_finish(
        RequestStats(
            request_id="a",
            tenant="",
            arrival_ns=0,
            first_scheduled_ns=1,
            first_token_ns=5,
            ended_ns=20,
            num_prompt_tokens=8,
            num_cached_tokens=0,
            num_generated_tokens=12,
            num_preemptions=0,
            finish_reason=FinishReason.LENGTH,
        )
    )
    recorder.close()


def test_a_recording_tells_which_tokens_were_guessed(tmp_path: Path) -> None:
    rows = [(6, 0, 0, 0), (2, 6, 1, 0), (1, 8, 1, 0), (4, 9, 4, 2), (3, 12, 3, 2), (14, 2, 1, 0), (3, 16, 3, 0), (5, 17, 5, 1)]
    record(tmp_path / "r", rows)
    assert marked_answers(open_recording(tmp_path / "r")) == [b"--rrwrrr-wrw"]
    assert acceptance_of(str(tmp_path / "r")).marks("x", 5) == b"--rrw"


def test_what_tells_nothing_of_guesses_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "r", [(8, 0, 1, 0), (1, 8, 1, 0)])
    with pytest.raises(ConfigError, match="has no guesses"):
        acceptance_of(str(tmp_path / "r"))
    for words in ("1.1", "-0.1", "nan"):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            acceptance_of(words)
    assert acceptance_of("0.25").chance == 0.25
