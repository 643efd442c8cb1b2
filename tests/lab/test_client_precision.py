"""The HTTP client as an instrument: it agrees with another client, and is no bottleneck itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from penstock.lab.client import send
from penstock.lab.pacing import Pace
from penstock.lab.records import End
from penstock.lab.target import Target
from penstock.lab.workload import Job, Workload
from support.lab import independent_client

STUB = Path(__file__).with_name("stub_server.py")
PROMPT = "word " * 100


@pytest.fixture
def stub():
    """Starts a stub with these delays in milliseconds, in a process of its own; gives its URL."""
    processes = []

    def start(*delays_ms):
        words = [sys.executable, str(STUB), *map(str, delays_ms)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def workload(count, num_output_tokens, gap_ns=0):
    jobs = [
        Job(arrival_ns=k * gap_ns, num_prompt_tokens=100, num_output_tokens=num_output_tokens, prompt=PROMPT)
        for k in range(count)
    ]
    return Workload(name="test", jobs=jobs)


def measure(url, count, num_output_tokens, concurrency):
    sent = send(workload(count, num_output_tokens), Target(url=url, model="m"), pace=Pace(concurrency=concurrency))
    assert all(record.end is End.OK for record in sent.records)
    return {
        "ttft": median((record.first_ns - record.sent_ns) / 1e9 for record in sent.records),
        "e2e": median((record.ended_ns - record.sent_ns) / 1e9 for record in sent.records),
        "tpot": median(sum(record.gaps_ns) / 1e9 / (record.num_output_tokens - 1) for record in sent.records),
        "tokens_per_s": sum(record.num_output_tokens for record in sent.records) / (sent.duration_ns / 1e9),
    }


@pytest.mark.slow
def test_it_agrees_with_an_independent_client_within_three_percent(stub):
    """The stub's first token comes after 100 ms, the others 20 ms apart. A busy machine may delay a run: the best of eight."""
    url = stub(100, 20)
    worst = {}
    for _ in range(8):
        theirs = independent_client.measure(url, "m", [(PROMPT, 11)] * 16, 4)
        ours = measure(url, 16, 11, 4)
        assert ours["ttft"] >= 0.1
        assert ours["tpot"] >= 0.019
        worst = {name: abs(ours[name] / theirs[name] - 1) for name in theirs}
        if max(worst.values()) <= 0.03:
            return
    pytest.fail(f"they differ by {worst}")


def test_two_thousand_requests_per_second_are_less_than_a_core(stub):
    """CPU time, so other programs on the machine disturb little. docs/bench.md has the exact figure."""
    sent = send(workload(5000, 4), Target(url=stub(), model="m"), pace=Pace(concurrency=32))
    assert all(record.end is End.OK for record in sent.records)
    assert sent.client_cpu_s / len(sent.records) < 500e-6
