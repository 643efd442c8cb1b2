"""`scaling.py`: a group that scales beside fixed ones."""

from __future__ import annotations

import pytest
import scaling

from penstock.lab.workload import Job, Workload


def test_a_group_that_scales_is_between_the_fixed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SLO_S", 2.5)
    jobs = [Job(arrival_ns=0, num_prompt_tokens=50 + k % 150, num_output_tokens=5 + k % 45) for k in range(1000)]
    workload = scaling.staged(Workload(name="jobs", jobs=jobs), 3.2, [(1.0, 20.0), (2.0, 40.0), (0.2, 80.0)])
    figures = scaling.compare(workload, [1, 4], [5])
    one, four, scaled = figures.values()
    assert one["replica_hours"] < scaled["replica_hours"] < four["replica_hours"]
    assert one["late"] > scaled["late"] > four["late"] == 0
    assert four["served"] == scaled["served"] == len(workload.jobs)
    assert scaled["changes"] > 1
