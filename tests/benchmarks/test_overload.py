"""The load of `overload.py`: its prompts, its arrivals, and the verdict on what happened."""

import argparse

import pytest
from overload import arrivals, judge, own_jobs

from penstock.lab.records import End, Record, Sent
from penstock.lab.workload import Job


def job(prompt):
    return Job(arrival_ns=0, num_prompt_tokens=1, num_output_tokens=1, prompt=prompt)


def test_the_prompts_are_all_different():
    jobs = own_jobs([job("a"), job("b")], 10)
    assert len({job.prompt for job in jobs}) == 10
    assert not {job.prompt for job in own_jobs([job("a")], 10, first=10)} & {job.prompt for job in own_jobs([job("a")], 10)}


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_arrivals_come_at_the_rate_and_as_irregularly_as_asked(cv):
    times = [at_ns / 1e9 for at_ns in arrivals(3, 50.0, 400.0, cv)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[-1] < 400
    assert len(times) / 400 == pytest.approx(50, rel=0.1)
    assert variance**0.5 / mean == pytest.approx(cv, rel=0.15)


def record(*, sent_s=1.0, first_s=None, ended_s=10.0, end=End.OK, waits_s=()):
    return Record(
        index=0,
        intended_ns=0,
        sent_ns=round(sent_s * 1e9),
        first_ns=None if first_s is None else round(first_s * 1e9),
        ended_ns=round(ended_s * 1e9),
        end=end,
        waits_ns=[round(wait_s * 1e9) for wait_s in waits_s],
    )


def test_a_verdict_counts_answers_in_time_and_those_who_got_in_when_they_came_back():
    records = [
        record(first_s=2.0, ended_s=8.0),
        record(first_s=5.0, ended_s=9.0),  # too late
        record(first_s=2.0, ended_s=3.0),  # while the rows were filling
        record(sent_s=4.0, first_s=4.5, ended_s=8.0, waits_s=[2.0]),
        record(sent_s=6.0, first_s=6.5, ended_s=8.0, waits_s=[2.0, 2.0]),
    ]
    cut_off = [
        record(end=End.CANCELLED),  # after 9 s without a token
        record(sent_s=10.0, end=End.CANCELLED, waits_s=[60.0]),  # still away
    ]
    args = argparse.Namespace(seconds=10.0, slo_ttft=2.0)
    verdict = judge("poisson", "door", Sent(records=records, unfinished=cut_off, duration_ns=10**10), 1.2, args)
    assert verdict.goodput == pytest.approx(3 / 5)
    assert verdict.goodput_share == pytest.approx(0.5)
    assert verdict.ttft_p99_s == 9.0
    assert (verdict.clients, verdict.refused, verdict.returned, verdict.returned_admitted_share) == (7, 3, 2, 0.5)
    assert (verdict.retry_after_p50_s, verdict.retry_after_max_s, verdict.errors) == (2.0, 60.0, 0)
