"""A choice of a workload becomes that workload, in a fixed order; a contradiction is an error that names the flag."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.lab.arrivals import mean_rate, num_arrivals
from penstock.lab.synthetic import NAMED, Lengths
from penstock.lab.workload_choice import WorkloadChoice, make_workload, parse_stages, parse_tenants
from penstock.types.errors import PenstockError

S = 1_000_000_000


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:15:{second:02d},{100 + second},{10 + second}\n" for second in range(10))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return str(path)


@pytest.mark.parametrize(
    ("text", "least", "mean", "most"), [("512", 512, 512, 512), ("100-900", 100, 500, 900), ("512~0.8", 1, 512, 20_000)]
)
def test_lengths_are_drawn_as_they_are_written(text: str, least: int, mean: float, most: int) -> None:
    workload = make_workload(WorkloadChoice(input_tokens=text, requests=5000))
    drawn = [job.num_prompt_tokens for job in workload.jobs]
    assert least <= min(drawn)
    assert max(drawn) <= most
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)
    assert {job.num_output_tokens for job in workload.jobs} == {128}


@pytest.mark.parametrize("text", ["", "0", "9-1", "a", "5~", "5~-1", "1e3", "99999999999", "5-6~1"])
def test_other_lengths_are_errors(text: str) -> None:
    with pytest.raises(PenstockError, match="is not a length in tokens"):
        Lengths.parse(text)


def test_the_mean_rate_counts_a_ramp_and_the_speed() -> None:
    assert WorkloadChoice().mean_rate is None
    assert WorkloadChoice(rate=2.0).mean_rate == 2
    assert WorkloadChoice(rate=2.0, rate_to=20.0).mean_rate == 11
    choice = WorkloadChoice(rate=2.0, rate_to=20.0, speed=3.0, requests=5000)
    assert choice.mean_rate == 33
    assert mean_rate(make_workload(choice)) == pytest.approx(33, rel=0.05)


@pytest.mark.parametrize("name", NAMED)
def test_every_name_makes_a_workload_that_its_seed_repeats(name: str) -> None:
    choice = WorkloadChoice(workload=name, rate=2.0, cancel_share=0.03, tenants="2", seed=5)
    assert make_workload(choice) == make_workload(choice)
    assert len(make_workload(choice).jobs) == 100
    assert make_workload(choice).jobs != make_workload(replace(choice, seed=6)).jobs


def test_the_name_tells_all_that_was_done(trace: str) -> None:
    choice = WorkloadChoice(
        workload=trace,
        requests=8,
        divide_lengths=4,
        max_output_tokens=3,
        rate=3.0,
        cv=4.0,
        speed=2.0,
        tenants="a=7,b=1",
        cancel_share=0.25,
        sessions=2,
        think_time_s=1.5,
    )
    workload = make_workload(choice)
    assert workload.name == (
        "azure.csv, first 8, conversations of 2 turns, lengths / 4, answers <= 3, think time 1.5 s, gamma 3/s with CV 4, "
        "speed 2, tenants by weight (a 7, b 1), 0.25 of the clients go away"
    )
    assert [job.after for job in workload.jobs] == [None, 0, None, 2, None, 4, None, 6]
    assert sum(job.cancelled_after_tokens is not None for job in workload.jobs) == 2


def test_arrivals_of_a_file_stay_unless_others_are_chosen(trace: str) -> None:
    own = [second * S for second in range(10)]
    assert [job.arrival_ns for job in make_workload(WorkloadChoice(workload=trace)).jobs] == own
    assert [job.arrival_ns for job in make_workload(WorkloadChoice(workload=trace, speed=2)).jobs] == [at // 2 for at in own]
    assert {job.arrival_ns for job in make_workload(WorkloadChoice(workload=trace, arrivals="closed")).jobs} == {0}
    assert [job.arrival_ns for job in make_workload(WorkloadChoice(workload=trace, arrivals="constant")).jobs] == own


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rate": 2.0}, "Poisson 2/s"),
        ({"rate": 2.0, "cv": 3.0}, "gamma 2/s with CV 3"),
        ({"rate": 2.0, "rate_to": 9.0}, "ramp 2 to 9/s"),
        ({"rate": 2.0, "burst_s": (1.0, 3.0)}, "bursts of 1 s every 4 s, 2/s"),
        ({"rate": 2.0, "arrivals": "bursts"}, "bursts of 5 s every 20 s, 2/s"),
        ({"stages": ((2.0, 60.0), (10.0, 30.0))}, "Poisson at 2/s for 60 s, 10/s for 30 s"),
    ],
)
def test_options_of_arrivals_imply_their_kind(fields: dict[str, object], words: str) -> None:
    assert make_workload(WorkloadChoice(**fields)).name.endswith(words)  # type: ignore[arg-type]


def test_stages_make_as_many_requests_as_they_last_for() -> None:
    choice = WorkloadChoice(stages=((2.0, 60.0), (10.0, 30.0)))
    assert len(make_workload(choice).jobs) == 420
    talks = make_workload(replace(choice, sessions=5))
    assert len(talks.jobs) == 5 * 420
    assert num_arrivals(talks) == 420, "later turns don't count towards a rate"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload": "nowhere"}, "nowhere is neither a file.*Names are synthetic, short"),
        ({"requests": 0}, "number of requests is 0"),
        ({"arrivals": "sometimes"}, "Unknown arrivals 'sometimes'.*closed, constant"),
        ({"arrivals": "poisson"}, "has no rate.*--rate"),
        ({"arrivals": "poisson", "rate": 1.0, "cv": 2.0}, "--cv is for arrivals 'gamma', not for 'poisson'"),
        ({"cv": 2.0, "rate_to": 2.0, "rate": 1.0}, "--cv is for arrivals 'gamma', not for 'ramp'"),
        ({"arrivals": "ramp", "rate": 1.0}, "need --rate-to"),
        ({"arrivals": "closed", "rate": 1.0}, "no rate of their own"),
        ({"arrivals": "stages"}, "need --stages"),
        ({"rate": -1.0}, "rate is -1.0"),
        ({"speed": 0.0, "rate": 1.0}, "speed is 0.0"),
        ({"speed": 2.0}, "come at once.*--speed"),
        ({"prefix_groups": 2}, "--prefix-groups needs a shared prefix"),
        ({"prefix_tokens": -1}, "at least 1 token"),
        ({"think_time_s": 1.0}, "needs conversations"),
        ({"tenants": "a"}, "'a' is not a tenant with a weight"),
        ({"tenants": "a=1,a=2"}, "'a=2' is not a tenant"),
        ({"tenants": "0"}, "number of tenants is 0"),
        ({"cancel_share": 2.0}, "share of clients"),
        ({"stages": ((1e6, 1e6),)}, "At most 2000000"),
    ],
)
def test_contradictions_are_errors(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        make_workload(WorkloadChoice(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["input_tokens", "output_tokens", "prefix_tokens"])
def test_a_file_has_its_own_lengths(trace: str, field: str) -> None:
    with pytest.raises(PenstockError, match=f"--{field.replace('_', '-')} is for a workload that is made up"):
        make_workload(replace(WorkloadChoice(workload=trace), **{field: "7" if field != "prefix_tokens" else 7}))


def test_a_file_that_is_too_short_is_an_error(trace: str) -> None:
    with pytest.raises(PenstockError, match=r"azure.csv has 10 requests, fewer than 11"):
        make_workload(WorkloadChoice(workload=trace, requests=11))


def test_conversations_of_a_file_stay_its_own(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    said = [{"from": who, "value": "x" * 40} for who in ("human", "gpt", "human", "gpt")]
    path.write_text(json.dumps({"conversations": said}) + "\n")
    workload = make_workload(WorkloadChoice(workload=str(path), sessions=5))
    assert [(job.num_prompt_tokens, job.after) for job in workload.jobs] == [(10, None), (30, 0)]


def test_each_prompt_begins_with_one_of_the_shared_prefixes() -> None:
    workload = make_workload(WorkloadChoice(input_tokens="100", prefix_tokens=300, prefix_groups=4, requests=400))
    assert workload.prefix_block_tokens == 300
    assert {job.num_prompt_tokens for job in workload.jobs} == {400}
    assert {job.prefix for job in workload.jobs} == {(0,), (1,), (2,), (3,)}


def test_the_page_of_workloads_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```\n\nprints\n\n```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]


def test_tenants_and_stages_are_read() -> None:
    assert parse_tenants("a=7,b=0.5") == {"a": 7.0, "b": 0.5}
    assert parse_tenants("2") == {"tenant-1": 1.0, "tenant-2": 1.0}
    assert parse_stages("2x60, 0.5x30") == ((2.0, 60.0), (0.5, 30.0))
    with pytest.raises(PenstockError, match="'2' is not a stage"):
        parse_stages("2")
