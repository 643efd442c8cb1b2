"""`routing.py`: what a router finds beside one cache, and the parts of a decision's time."""

from __future__ import annotations

import pytest
import routing

from penstock.lab.workload import Job, Workload


@pytest.fixture
def conversations() -> Workload:
    """Twenty conversations of four turns."""
    jobs: list[Job] = []
    for turn in range(4):
        for number in range(20):
            after = len(jobs) - 20 if turn else None
            arrival_ns = 0 if turn else number * 1_000_000
            jobs.append(Job(arrival_ns=arrival_ns, num_prompt_tokens=100 * (turn + 1), num_output_tokens=20, after=after))
    return Workload(name="conversations", jobs=jobs)


def test_a_router_that_knows_prefixes_is_nearer_to_one_cache(conversations: Workload) -> None:
    figures = routing.compare(conversations, ["least-work", "prefix"], num_replicas=3, num_blocks=300, load=0.5)
    assert list(figures) == ["one cache", "least-work, apart", "least-work", "prefix, apart", "prefix"]
    assert all(one["served"] == 80 for one in figures.values())
    assert figures["least-work, apart"]["found"] < 0.8 * figures["prefix, apart"]["found"]
    assert figures["least-work"]["found"] > 1.2 * figures["least-work, apart"]["found"]
    assert figures["prefix"]["found"] <= figures["one cache"]["found"] + 0.01


def test_a_decision_is_timed_with_its_hashes_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DECISION_PROMPTS", 20), ("DECISION_BLOCKS", 30), ("NUM_DECISIONS", 50)):
        monkeypatch.setattr(routing, name, value)
    figures = routing.time_decisions()
    assert 0 < figures["decision_us"] <= figures["decision_p99_us"]
    assert figures["decision_us"] < figures["with_hashes_us"]
    assert figures["megabytes"] > 0.03, "600 blocks"
