"""Overload in virtual time with the server's own defaults: the door admits until the target is nearly used, and no further."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.lab.arrivals import arrive, gamma
from penstock.lab.pacing import Pace
from penstock.lab.records import End, Record
from penstock.lab.simulation import Simulation
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity
from virtual_overload.town import jobs

SLO_S = 2.0
CAPACITY = Capacity(num_blocks=5564, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=8192)
NUM_JOBS = 400


def workload(seed: int = 0) -> Workload:
    lengths = jobs(random.Random(seed))
    return Workload(
        name="conversations",
        jobs=[
            Job(
                arrival_ns=0,
                num_prompt_tokens=job.num_prompt_tokens,
                num_output_tokens=job.num_new_tokens,
                tenant="ab"[nth % 2],
            )
            for nth, job in zip(range(NUM_JOBS), lengths, strict=False)
        ],
    )


def run(slo_s: float | None, work: Workload, users: int | None = None) -> Sequence[Record]:
    limits = AdmissionLimits(slo_ttft_ns=None if slo_s is None else int(slo_s * 1e9), max_queue=10**6)
    simulation = Simulation(capacity=CAPACITY, make_policies=make_policies, limits=limits, max_tokens=None)
    return simulation.run(work, pace=Pace(concurrency=users)).records


def ttfts_s(records: Sequence[Record]) -> list[float]:
    return sorted((one.first_ns - one.intended_ns) / 1e9 for one in records if one.first_ns is not None)


def goodput(records: Sequence[Record], slo_s: float) -> float:
    """Requests per second whose first token came in time, from the first arrival to the last end."""
    seconds = (max(one.ended_ns for one in records) - min(one.intended_ns for one in records)) / 1e9
    return sum(ttft <= slo_s for ttft in ttfts_s(records)) / seconds


@pytest.fixture(scope="module")
def closed_loop() -> float:
    """Requests per second of 32 clients, each of which waits for its answer."""
    return goodput(run(None, workload(), users=32), math.inf)


@pytest.mark.parametrize("cv", [1.0, 4.0], ids=["poisson", "gamma-cv4"])
@pytest.mark.parametrize("load", [1.5, 2.0, 4.0])
def test_an_overloaded_door_uses_the_target_and_keeps_it(closed_loop: float, load: float, cv: float) -> None:
    times_ns = gamma(random.Random(1), NUM_JOBS, load * closed_loop, cv)
    records = run(SLO_S, arrive(workload(), times_ns, "overload"))
    ttfts = ttfts_s(records)
    refused = [one for one in records if one.end is not End.OK]
    assert 0.7 * SLO_S <= ttfts[math.ceil(0.99 * len(ttfts)) - 1] <= SLO_S
    least = {1.0: 1.1 if load == 2.0 else 1.0, 4.0: 0.9}[cv]  # bursts leave the server idle at times
    assert goodput(records, SLO_S) >= least * closed_loop
    assert refused
    assert {one.error for one in refused} == {"queue_delay"}
    shares = [sum(one.end is End.OK and one.tenant == name for one in records) for name in "ab"]
    assert min(shares) >= 0.8 * max(shares), "every tenant is served"
