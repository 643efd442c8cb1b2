"""The comparison of orders, small and over made-up lengths: what docs/orders.md claims of the real ones holds here too."""

import random
from dataclasses import replace

import policies
import predicted_lengths
import pytest

from penstock.lab.workload import Job


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """Fewer requests, with shorter answers, than in the benchmarks. Those with deadlines are less patient, too."""
    rng = random.Random(0)
    trace = [
        Job(arrival_ns=0, num_prompt_tokens=rng.randint(20, 600), num_output_tokens=1 + min(130, int(rng.expovariate(1 / 20))))
        for _ in range(500)
    ]
    short = [replace(job, num_prompt_tokens=1 + job.num_prompt_tokens // 20) for job in trace]
    outputs = [(1 + min(150, int(rng.expovariate(1 / mean))), label) for label, mean in ((0, 10), (1, 43), (2, 83)) * 400]
    rng.shuffle(outputs)
    monkeypatch.setattr(policies, "read_azure", lambda traces: trace)
    monkeypatch.setattr(predicted_lengths, "read_azure", lambda traces: short)
    monkeypatch.setattr(predicted_lengths, "read_predictions", lambda traces, skip, count: outputs[skip : skip + count])
    monkeypatch.setattr(policies, "NUM_JOBS", 250)
    monkeypatch.setattr(predicted_lengths, "NUM_JOBS", 400)
    monkeypatch.setattr(policies, "SPAN_S", 70.0)
    monkeypatch.setattr(policies, "PATIENCE_S", (2.5, 15.0))
    monkeypatch.setattr(policies, "EDF_LOADS", (0.7, 1.3))
    monkeypatch.setattr(predicted_lengths, "LOADS", (1.3,))


def test_a_lower_class_hardly_delays_a_higher_one():
    report = policies.run_priority(None)
    for budget in ("decode-first", "itl"):
        alone, fcfs, priority = (report[budget][name]["ttft_p99_s"] for name in ("alone", "fcfs", "priority"))
        assert priority < 2.5 * alone < fcfs


def test_edf_meets_as_many_deadlines_at_any_load_and_more_under_load():
    low, high = policies.run_edf(None)["attainment"]
    assert low["edf"] >= low["fcfs"]
    assert high["edf"] > high["fcfs"] + 0.05


def test_imperfect_predictions_are_worth_half_of_perfect_ones():
    (row,) = predicted_lengths.run(None)["one_tenant"]
    assert row["oracle"] < 0.9 * row["fcfs"]
    assert row["file_share_of_gain"] >= 0.5
