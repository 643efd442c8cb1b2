"""Which job is next, and when it was due."""

import random

import pytest

from penstock.lab.pacing import Pace, Pacer, WarmUp
from penstock.lab.workload import Job, Workload


def job(arrival_ns=0, after=None):
    return Job(arrival_ns=arrival_ns, num_prompt_tokens=1, num_output_tokens=1, after=after)


def pacer(jobs, **pace):
    return Pacer(Workload(name="test", jobs=jobs), Pace(**pace))


def taken(pacing, now_ns):
    """All that can be taken now."""
    found = []
    while (one := pacing.take(now_ns)) is not None:
        found.append(one)
    return found


def test_an_open_loop_sends_each_job_when_it_is_due_however_late_it_is():
    pacing = pacer([job(10), job(20), job(30)])
    assert pacing.next_ns() == 10
    assert taken(pacing, 9) == []
    assert taken(pacing, 25) == [(0, 10), (1, 20)]
    assert not pacing.is_over
    assert taken(pacing, 99) == [(2, 30)]
    assert pacing.next_ns() is None
    for index in range(3):
        assert not pacing.is_over
        pacing.end(index, 100)
    assert pacing.is_over


def test_a_cap_lets_jobs_wait_and_they_keep_the_instant_at_which_they_were_due():
    pacing = pacer([job(10), job(20), job(30)], max_concurrency=2)
    assert taken(pacing, 50) == [(0, 10), (1, 20)]
    assert pacing.next_ns() is None, "nothing but an end can change that"
    pacing.end(1, 60)
    assert taken(pacing, 60) == [(2, 30)]


def test_a_closed_loop_has_as_many_users_and_each_goes_on_at_once():
    pacing = pacer([job(99)] * 5, concurrency=2)
    assert taken(pacing, 0) == [(0, 0), (1, 0)]
    pacing.end(1, 7)
    assert taken(pacing, 9) == [(2, 7)], "due since the user is free, whatever the client did meanwhile"
    pacing.fail(0, 11)
    pacing.end(2, 12)
    assert taken(pacing, 12) == [(3, 11), (4, 12)]
    assert not pacing.is_over


def test_more_users_than_jobs():
    pacing = pacer([job()], concurrency=10)
    assert taken(pacing, 0) == [(0, 0)]
    pacing.end(0, 1)
    assert pacing.is_over


def test_a_turn_comes_after_the_answer_and_the_thinking():
    pacing = pacer([job(10), job(5, after=0), job(12)])
    assert taken(pacing, 10) == [(0, 10)]
    assert pacing.continues(0)
    assert taken(pacing, 99) == [(2, 12)]
    assert pacing.end(0, 100) == 1
    assert pacing.next_ns() == 105
    assert taken(pacing, 105) == [(1, 105)]
    assert not pacing.continues(1)


def test_a_user_of_a_closed_loop_stays_with_a_conversation_and_thinks():
    pacing = pacer([job(), job(50, after=0), job(50, after=1), job()], concurrency=1)
    assert taken(pacing, 0) == [(0, 0)]
    pacing.end(0, 10)
    assert taken(pacing, 20) == []
    assert pacing.next_ns() == 60
    assert taken(pacing, 60) == [(1, 60)]
    pacing.end(1, 70)
    assert taken(pacing, 120) == [(2, 120)]
    pacing.end(2, 130)
    assert taken(pacing, 130) == [(3, 130)]


def test_a_turn_without_an_answer_takes_all_that_follow_with_it():
    jobs = [job(), job(1, after=0), job(1, after=1), job(1, after=0), job()]
    pacing = pacer(jobs, concurrency=1)
    assert taken(pacing, 0) == [(0, 0)]
    assert sorted(pacing.fail(0, 5)) == [1, 2, 3]
    assert taken(pacing, 5) == [(4, 5)], "the user goes on with the next conversation"
    pacing.end(4, 6)
    assert pacing.is_over


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_sent_once_or_lost_whatever_happens(seed):
    rng = random.Random(seed)
    jobs, now_ns = [], 0
    for index in range(60):
        now_ns += rng.randint(0, 5)
        after = rng.randrange(index) if index and rng.random() < 0.5 else None
        jobs.append(job(rng.randint(0, 9) if after is not None else now_ns, after))
    pace = rng.choice([{}, {"max_concurrency": 3}, {"concurrency": 4}])
    pacing = pacer(jobs, **pace)
    seen, running, ended_ns, at_ns = [], [], {}, 0
    while not pacing.is_over:
        for index, due_ns in taken(pacing, at_ns):
            assert due_ns <= at_ns
            if (before := jobs[index].after) is not None:
                assert due_ns == ended_ns[before] + jobs[index].arrival_ns
            elif "concurrency" not in pace:
                assert due_ns == jobs[index].arrival_ns
            seen.append(index)
            running.append(index)
        assert len(running) <= pace.get("max_concurrency", 99)
        at_ns += 1
        if running and rng.random() < 0.6:
            index = running.pop(rng.randrange(len(running)))
            ended_ns[index] = at_ns
            if rng.random() < 0.2:
                seen += pacing.fail(index, at_ns)
            else:
                pacing.end(index, at_ns)
    assert sorted(seen) == list(range(60))


def test_a_warm_up_is_by_number_or_by_time():
    assert [WarmUp(num_jobs=2).covers(index, 10**9) for index in range(3)] == [True, True, False]
    assert [WarmUp(seconds=1.5).covers(0, at) for at in (0, 1_499_999_999, 1_500_000_000)] == [True, True, False]
    assert not WarmUp().covers(0, 0)


def test_so_many_jobs_of_the_background_are_in_flight_as_long_as_others_are_left():
    line = Job(arrival_ns=0, num_prompt_tokens=1, num_output_tokens=1, background=True)
    pacing = pacer([job(10), *[line] * 5], background=2)
    assert taken(pacing, 0) == [(1, 0), (2, 0)]
    assert pacing.next_ns() == 10
    pacing.end(1, 7)
    assert taken(pacing, 7) == [(3, 7)]
    assert taken(pacing, 10) == [(0, 10)]
    pacing.end(2, 20)
    assert taken(pacing, 20) == [(4, 20)]
    pacing.end(0, 30)
    pacing.end(3, 31)
    assert taken(pacing, 31) == [], "the last is not begun for its own sake"
    assert not pacing.is_over
    pacing.end(4, 40)
    assert pacing.is_over
