"""Replicas that start, drain and leave under load: nothing is lost, first tokens are in time, and their number is steady.

A ramp and a spike run on a machine with a quarter of the default cost model's speed, where one replica serves about 1.6
requests a second: prompts of 50 to 450 tokens, answers of 10 to 110. First tokens are due within 5 s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.lab import arrivals
from penstock.lab.cost_model import CostModel
from penstock.lab.front import Front
from penstock.lab.links import Link
from penstock.lab.records import End
from penstock.lab.scaling import Scaling
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.traces import read_workload
from penstock.lab.transforms import divide_lengths, first, speed
from penstock.lab.workload import Job, Workload
from penstock.replicas import DOWN_S
from penstock.sched.policies.presets import make_policies
from penstock.sched.routing.routers import LeastWork, PrefixAware
from penstock.types.errors import ConfigError, RejectReason
from penstock.types.plan import Capacity
from penstock.types.request import Request

AZURE = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"
S, MS = 1_000_000_000, 1_000_000
START_S, SLO_S, RATE = 10, 5, 1.6
PARTS = ("step_ns", "decode_row_ns", "prefill_token_ns", "decode_read_ns", "prefill_read_ns")
COST = CostModel(**{part: 4 * getattr(CostModel(), part) for part in PARTS})
GROUP = Simulation(
    capacity=Capacity(num_blocks=2049, block_size=16, max_rows=32, max_step_tokens=512, max_model_len=16_384),
    make_policies=make_policies,
    cost=COST,
    make_router=LeastWork,
    scaling=Scaling(least=1, most=6, start_ns=START_S * S),
)
SMALL = replace(
    GROUP,
    capacity=Capacity(num_blocks=129, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=512),
    cost=CostModel(),
    max_tokens=None,
)


def staged(rates: Sequence[tuple[float, float]]) -> Workload:
    """Poisson arrivals at rates in requests of one replica: (load, seconds) of each stage."""
    rng = random.Random(0)
    stages = [(RATE * load, seconds) for load, seconds in rates]
    count = int(0.97 * sum(rate * seconds for rate, seconds in stages))
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=rng.randint(50, 450), num_output_tokens=rng.randint(10, 110)) for _ in range(count)
    ]
    return arrivals.arrive(Workload(name="stages", jobs=jobs), arrivals.stages(rng, count, stages), "stages")


def numbers(outcome: Outcome) -> list[int]:
    assert outcome.scaled is not None
    return [num for _, num, _ in outcome.scaled.wanted]


def num_late(outcome: Outcome, after_s: float) -> int:
    late = [record for record in outcome.records if record.first_ns is None or record.first_ns - record.intended_ns > SLO_S * S]
    return sum(record.intended_ns > after_s * S for record in late)


def check_steady(outcome: Outcome) -> None:
    """A number that has risen stays for the long window, so it can't rise, fall and rise within it."""
    assert outcome.scaled is not None
    changes = [(at_ns, now > was) for (_, was, _), (at_ns, now, _) in pairwise(outcome.scaled.wanted)]
    for (rose_ns, is_up), (fell_ns, is_next_up) in pairwise(changes):
        assert not is_up or is_next_up or fell_ns - rose_ns >= (DOWN_S - 1) * S


def check_whole(outcome: Outcome, num_jobs: int) -> None:
    assert [record.index for record in outcome.records] == list(range(num_jobs))
    assert len({stats.request_id for stats in outcome.ended}) == len(outcome.ended)


def test_a_ramp_is_followed_up_and_down_and_first_tokens_are_in_time() -> None:
    steps = [(1 + 0.2 * step, 15.0) for step in range(19)]
    workload = staged([*steps, *((load, 7.0) for load, _ in reversed(steps)), (0.2, 420.0)])
    outcome = GROUP.run(workload)
    assert numbers(outcome)[0] == 1
    assert max(numbers(outcome)) == 6
    assert numbers(outcome)[-1] == 1
    check_steady(outcome)
    check_whole(outcome, len(workload.jobs))
    assert num_late(outcome, after_s=60) == 0
    assert outcome.scaled is not None
    assert outcome.scaled.replica_ns < 0.8 * 6 * outcome.duration_ns


def test_a_spike_is_served_in_time_after_a_minute() -> None:
    workload = staged([(0.6, 30.0), (2.5, 90.0), (0.3, 300.0)])
    outcome = GROUP.run(workload)
    assert numbers(outcome)[:2] == [1, 2]
    check_steady(outcome)
    check_whole(outcome, len(workload.jobs))
    assert num_late(outcome, after_s=0) > 0, "the spike is more than one replica can do"
    assert num_late(outcome, after_s=90) == 0


@pytest.mark.skipif(not AZURE.is_file(), reason="the public traces are not beside the checkout")
@pytest.mark.parametrize("num_requests", [500, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_production_trace_never_flaps(num_requests: int) -> None:
    workload = speed(divide_lengths(first(read_workload(AZURE), num_requests), 4), 0.5)
    outcome = GROUP.run(workload)
    check_steady(outcome)
    check_whole(outcome, len(workload.jobs))
    assert max(numbers(outcome)) > 1
    assert num_late(outcome, after_s=120) < 0.01 * len(workload.jobs), "it begins at twice what one replica can do"


def of(*jobs: Job) -> Workload:
    return Workload(name="jobs of a test", jobs=jobs)


def job(at_s: float, num_output_tokens: int = 5, **words: Any) -> Job:
    return Job(arrival_ns=round(at_s * S), num_prompt_tokens=40, num_output_tokens=num_output_tokens, **words)


NONE = replace(SMALL, num_replicas=0, scaling=Scaling(least=0, most=2, start_ns=START_S * S))


def test_from_zero_the_first_request_waits_for_one_start() -> None:
    outcome = NONE.run(of(job(100.3), job(103), job(800)))
    first_s = [((record.first_ns or 0) - record.intended_ns) / S for record in outcome.records]
    assert START_S < first_s[0] < START_S + 1
    assert START_S - 2.7 < first_s[1] < START_S - 1.7
    assert START_S < first_s[2] < START_S + 1, "the replica has left"
    assert numbers(outcome) == [0, 1, 0, 1]
    assert outcome.scaled is not None
    there_s = outcome.scaled.replica_ns / S
    assert there_s == pytest.approx((110.3 + DOWN_S - 100.3) + (outcome.duration_ns / S - 800), abs=3)
    assert list(outcome.timelines) == ["replica 0"]


def test_a_client_that_leaves_before_there_is_a_replica_has_left() -> None:
    outcome = NONE.run(of(job(1, cancelled_ns=3 * S), job(2)))
    gone, served = outcome.records
    assert (gone.end, gone.ended_ns, gone.first_ns) == (End.CANCELLED, 3 * S, None)
    assert served.end is End.OK
    assert [stats.request_id for stats in outcome.ended] == ["1"]


@pytest.mark.parametrize(
    ("timeout", "deadline_s", "reason"),
    [
        ("queue_timeout_ns", None, RejectReason.QUEUE_TIMEOUT),
        ("first_token_timeout_ns", None, RejectReason.FIRST_TOKEN_TIMEOUT),
        ("", 3, RejectReason.DEADLINE),
    ],
)
def test_a_request_that_waits_for_the_first_replica_ends_at_its_limit(
    timeout: str, deadline_s: int | None, reason: RejectReason
) -> None:
    group = replace(NONE, **{timeout: 2 * S}) if timeout else NONE
    deadline_ns = None if deadline_s is None else deadline_s * S
    late, served = group.run(of(job(1, deadline_ns=deadline_ns), job(9.9 if timeout else 2))).records
    assert (late.end, late.error, late.ended_ns, late.first_ns) == (End.FAILED, str(reason), 3 * S, None)
    assert served.end is End.OK


def test_as_many_wait_for_the_first_replica_as_fit_its_rows_and_queue() -> None:
    group = replace(NONE, limits=AdmissionLimits(max_queue=2))
    assert group.capacity.max_rows == 4
    jobs = of(*(job(1) for _ in range(10)))
    records = group.run(jobs).records
    assert Counter(record.end for record in records) == {End.OK: 6, End.REFUSED: 4}
    assert {record.ended_ns for record in records if record.end is End.REFUSED} == {S}
    assert {record.end for record in replace(group, max_returns=9).run(jobs).records} == {End.OK}


def test_a_replica_that_drains_gets_nothing_and_ends_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take longer than the next request is away."""
    choices: list[tuple[int, list[int]]] = []
    choose = Front.choose

    def noted(front: Front, request: Request, index: int, now_ns: int, draining: list[int]) -> int:
        number = choose(front, request, index, now_ns, draining)
        choices.append((number, list(draining)))
        return number

    monkeypatch.setattr(Front, "choose", noted)
    jobs = [job(at_s, num_output_tokens=60) for at_s in (*range(60), *range(60, 480, 4))]
    outcome = replace(SMALL, cost=replace(COST, step_ns=400.0 * MS)).run(of(*jobs))
    check_whole(outcome, len(jobs))
    assert {record.end for record in outcome.records} == {End.OK}
    assert min(numbers(outcome)[numbers(outcome).index(max(numbers(outcome))) :]) < max(numbers(outcome))
    assert sum(bool(draining) for _, draining in choices) > 1
    assert all(number not in draining for number, draining in choices)


@pytest.mark.parametrize("make_router", [LeastWork, PrefixAware])
def test_every_request_ends_once_whatever_clients_and_replicas_do(make_router: Any) -> None:
    """Two bursts with silence between, so that replicas come and leave; clients leave, are refused or late."""
    num_in_burst = 400
    starts_ns = [burst * 500 * S + k * 40 * MS for burst in range(2) for k in range(num_in_burst)]
    jobs = [
        Job(
            arrival_ns=start_ns,
            num_prompt_tokens=40 + k % 90,
            num_output_tokens=1 + k % 60,
            prefix=(k % 7,),
            cancelled_ns=start_ns + k % 90 * 40 * MS if k % 5 == 0 else None,
            deadline_ns=start_ns + 1500 * MS if k % 6 == 1 else None,
        )
        for k, start_ns in enumerate(starts_ns)
    ]
    some = replace(
        NONE, limits=AdmissionLimits(max_queue=40), make_router=make_router, scaling=Scaling(least=0, most=4, start_ns=2 * S)
    )
    workload = Workload(name="bursts", jobs=jobs, prefix_block_tokens=32)
    outcome = some.run(workload)
    check_whole(outcome, len(jobs))
    ends = Counter(record.end for record in outcome.records)
    assert min(ends[end] for end in (End.OK, End.CANCELLED, End.REFUSED, End.FAILED)) > 5
    assert numbers(outcome).count(0) == 2, "at the start, and after the first burst"
    assert max(numbers(outcome)) > 1
    assert some.run(workload).records == outcome.records, "runs repeat"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_replicas": 3}, "3 initial replicas are outside"),
        ({"num_prefill_replicas": 1, "link": Link(bytes_per_token=1, bytes_per_s=1.0)}, "Prefill replicas don't scale"),
    ],
)
def test_what_can_not_scale_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(NONE, **changes)


@pytest.mark.parametrize(("least", "most", "start_ns"), [(2, 1, 0), (0, 0, 0), (-1, 1, 0), (1, 2, -1)])
def test_what_is_no_group_is_refused(least: int, most: int, start_ns: int) -> None:
    with pytest.raises(ConfigError, match="Invalid scaling"):
        Scaling(least=least, most=most, start_ns=start_ns)
