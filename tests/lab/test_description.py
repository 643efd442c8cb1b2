"""The description of a workload, as data and as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.lab.description import describe
from penstock.lab.workload import Job, Workload

S = 1_000_000_000


@pytest.fixture
def workload() -> Workload:
    lengths = [(32, 4, "a"), (48, 4, "b"), (64, 8, "a"), (100, 8, "a")]
    prefixes = [(1, 2), (1, 2, 3), (1, 2, 4, 5), (1, 9, 4)]
    jobs = [
        Job(arrival_ns=at_s * S, num_prompt_tokens=prompt, num_output_tokens=output, tenant=tenant, prefix=prefix)
        for at_s, (prompt, output, tenant), prefix in zip((1, 2, 3, 9), lengths, prefixes, strict=True)
    ]
    follow_up = Job(arrival_ns=0, num_prompt_tokens=120, num_output_tokens=2, tenant="a", after=3, cancelled_after_tokens=1)
    return Workload(name="four", jobs=[*jobs, follow_up], prefix_block_tokens=16)


def test_data(workload: Workload) -> None:
    what = describe(workload)
    assert (what.num_requests, what.num_conversations, what.num_follow_ups, what.num_cancelled) == (5, 1, 1, 1)
    assert (what.prompt_tokens.p50, what.prompt_tokens.p90, what.prompt_tokens.max) == (64, 120, 120)
    assert (what.output_tokens.mean, what.output_tokens.p50, what.output_tokens.p99) == (5.2, 4, 8)
    assert (what.total_prompt_tokens, what.total_output_tokens) == (364, 26)
    assert what.duration_s == 9
    assert what.rate == 3 / 8
    assert what.gap_cv == pytest.approx((50 / 9) ** 0.5 / (8 / 3))
    assert what.requests_by_tenant == {"a": 4, "b": 1}
    assert what.tokens_by_tenant == {"a": 338, "b": 52}


def test_a_perfect_cache_finds_full_blocks_from_the_begin_on_and_all_that_was_said(workload: Workload) -> None:
    found = 0 + 32 + 32 + 16 + 108
    assert describe(workload).prefix_share == pytest.approx(found / 364)


def test_text(workload: Workload) -> None:
    assert describe(workload).text() == (
        "four\n"
        "  5 requests, 364 prompt tokens, 26 output tokens\n"
        "  tokens       mean      p50      p90      p99      max\n"
        "  prompt         73       64      120      120      120\n"
        "  output          5        4        8        8        8\n"
        "  arrivals: 0.375 per second for 9.0 s, gaps with CV 0.88\n"
        "  1 conversation of more than one turn, with 1 follow-up turn\n"
        "  a perfect prefix cache would find 51.6% of the prompts' tokens\n"
        "  1 client will go away before the end of the answer\n"
        "  tenants: a has 4 requests and 87% of the tokens; b has 1 requests and 13% of the tokens"
    )


def test_all_at_once_has_no_rate() -> None:
    what = describe(Workload(name="w", jobs=[Job(arrival_ns=0, num_prompt_tokens=1, num_output_tokens=1)] * 3))
    assert (what.rate, what.gap_cv, what.prefix_share) == (None, None, 0)
    assert what.text().endswith("arrivals: all at once")
    with pytest.raises(ValueError, match="has no jobs"):
        describe(Workload(name="w", jobs=[]))


def test_few_of_many_tenants_are_shown() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=1 + nth, num_output_tokens=1, tenant=f"t{nth}") for nth in range(20)]
    last = describe(Workload(name="w", jobs=jobs)).text().splitlines()[-1]
    assert last.startswith("  tenants: t19 has 1 requests")
    assert last.endswith("; 12 more")


def test_the_page_of_workloads_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```\n\nprints\n\n```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]
