"""`scaling.py`: a group that scales beside fixed ones."""

from __future__ import annotations

import scaling

from penstock.lab.workload import Job, Workload


def test_a_group_that_scales_is_between_the_fixed_ones() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=100 + k % 300, num_output_tokens=10 + k % 90) for k in range(1000)]
    workload = scaling.staged(Workload(name="jobs", jobs=jobs), 1.6, [(1.0, 60.0), (2.0, 120.0), (0.2, 320.0)])
    figures = scaling.compare(workload, [1, 4], [10])
    one, four, scaled = figures.values()
    assert one["replica_hours"] < scaled["replica_hours"] < four["replica_hours"]
    assert one["late"] > scaled["late"] > four["late"] == 0
    assert four["served"] == scaled["served"] == len(workload.jobs)
    assert scaled["changes"] > 1
