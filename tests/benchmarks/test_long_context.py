"""The benchmark of long prompts."""

from contextlib import nullcontext
from types import SimpleNamespace

import long_context
import pytest
from sessions import LoadError

from penstock.lab.records import Record
from penstock.lab.workload import Job

JOB = Job(arrival_ns=0, num_prompt_tokens=32_000, num_output_tokens=3, prompt="...")


def measured(monkeypatch, num_prompt_tokens):
    record = Record(
        index=0,
        intended_ns=0,
        sent_ns=1_000_000_000,
        first_ns=3_000_000_000,
        ended_ns=3_100_000_000,
        gaps_ns=[40_000_000, 60_000_000],
        num_prompt_tokens=num_prompt_tokens,
    )
    session = SimpleNamespace(replay=lambda jobs, concurrency: SimpleNamespace(records=[record]))
    monkeypatch.setattr(long_context, "running", lambda contender, log: nullcontext(session))
    monkeypatch.setattr(long_context, "warm_up", lambda *_: None)
    return long_context.measure(None, JOB, [JOB], None)


def test_a_prompt_has_a_time_and_so_has_a_token(monkeypatch):
    assert measured(monkeypatch, 31_990) == [(2.0, 50.0)]


def test_a_server_that_cuts_a_prompt_is_refused(monkeypatch):
    with pytest.raises(LoadError, match="it read 8192 of a prompt's 32000 tokens"):
        measured(monkeypatch, 8192)
