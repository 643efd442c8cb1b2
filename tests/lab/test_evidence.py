"""The evidence of `penstock doctor`: series of one model, growth between two scrapes, parts of a request's time."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.lab.evidence import Evidence, Scrape, Visit, visits_of

PAGE = """# HELP penstock_x A counter.
penstock_x_total{model="a",kind="in"} 3.0
penstock_x_total{model="a",kind="out"} 4.0
penstock_x_total{model="b \\"c\\"",kind="in"} 50.0
penstock_cpu_seconds_total{state="waiting"} 7.0
"""


def choice(**fields: Any) -> dict[str, Any]:
    times = {"total": 1000.0, "queue": 400.0, "prefill": 100.0, "decode": 500.0, "other_models": 0.0}
    decode = {"steps": 9, "accepted_tokens": 0, "with_prompts_ms": 90.0, "with_prompts_steps": 1, "rested_ms": 50.0}
    return {
        "finish_reason": "stop",
        "prompt_tokens": 20,
        "completion_tokens": 10,
        "time_ms": times,
        "waited": {"for_ms": {"rows": 300.0, "intake": 100.0}},
        "prefix": {"hit_tokens": 4, "stopped_at": 4, "because": "differs", "same_after": 8},
        "prefill": {"steps": 2, "tokens": 16},
        "resume": {"steps": 0, "tokens": 0},
        "decode": decode,
        "sat_out": {"steps": 0, "ms": 10.0},
        "batch": {"mean": 2.0, "max": 3},
        "preemptions": [{"after_ms": 500.0, "waited_ms": 40.0}],
        **fields,
    }


def test_series_of_other_models_do_not_count() -> None:
    scrape = Scrape(PAGE, "a")
    assert scrape.sum("x_total") == 7
    assert scrape.sum("x_total", kind="in") == 3
    assert dict(scrape.by("x_total", "kind")) == {"in": 3, "out": 4}
    assert Scrape(PAGE, 'b "c"').sum("x_total") == 50
    assert scrape.sum("cpu_seconds_total", state="waiting") == 7, "of the whole server"


def test_a_page_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="html"):
        Scrape("<html>", "a")


def test_the_parts_of_a_request_are_its_time() -> None:
    visit = Visit.of(choice(), age_s=3)
    parts = {name: part_s for name, part_s in visit.parts_s.items() if part_s}
    assert parts == pytest.approx(
        {"rows": 0.3, "intake": 0.1, "prefill": 0.1, "preempted": 0.04, "sat out": 0.01, "background": 0.05, "decode": 0.4}
    )
    assert sum(parts.values()) == pytest.approx(visit.total_s)
    assert (visit.num_hit_tokens, visit.prefix_end, visit.num_same_after) == (4, "differs", 8)


def test_a_pause_before_the_first_token_counts_once() -> None:
    rounded = {"after_ms": 499.999, "waited_ms": 40.0}  # it began with the first token
    pauses = [{"after_ms": 410.0, "waited_ms": 80.0}, rounded]
    visit = Visit.of(choice(preemptions=pauses), age_s=3)
    assert [visit.parts_s[part] for part in ("prefill", "preempted", "decode")] == pytest.approx([0.02, 0.12, 0.4])
    assert sum(visit.parts_s.values()) == pytest.approx(visit.total_s)


def test_requests_of_other_models_and_of_long_ago_are_left_out() -> None:
    calls = [
        {"model": "a", "age_ms": 5000.0, "choices": [choice()]},
        {"model": "b", "age_ms": 5000.0, "choices": [choice()]},
        {"model": "a", "age_ms": 900_000.0, "choices": [choice()]},
        {"model": "a", "age_ms": 900.0, "choices": [choice(finish_reason="refused")]},
    ]
    assert [one.age_s for one in visits_of(calls, "a", within_s=60)] == [5]


def test_what_grew_between_two_scrapes_is_the_evidence() -> None:
    def page(step_s: float, ended: int, refused: int, invalid: int, declined: int) -> Scrape:
        lines = [
            f'penstock_step_seconds_sum{{model="a",part="total"}} {step_s}',
            f'penstock_e2e_request_latency_seconds_count{{model="a"}} {ended}',
            f'penstock_requests_rejected_total{{model="a",reason="queue_full"}} {refused}',
            f'penstock_requests_rejected_total{{model="a",reason="invalid"}} {invalid}',
            f'penstock_kv_disk_declined_blocks_total{{model="a"}} {declined}',
            f'penstock_prompt_tokens_total{{model="a",source="computed"}} {100 * ended}',
        ]
        return Scrape("\n".join(lines), "a")

    visits = [Visit.of(choice(), age_s=3)] * 4
    pages, capacity = (page(100, 7, 2, 1, 30), page(106, 27, 7, 9, 55)), {"block_size": 16}
    evidence = Evidence.of(visits, *pages, 10.0, settings={}, capacity=capacity)
    assert evidence.declined == 25 * 16 / 2000
    assert (evidence.busy, evidence.num_ended, evidence.num_refused, evidence.num_calls) == (0.6, 20, 5, 25)
    assert evidence.plain_step_s == pytest.approx((0.4 - 0.09) / 8)
    assert evidence.total_s == 4


@pytest.mark.parametrize(("own", "share"), [("victim", 1.0), ("flood", 0.0), ("", 0.0)])
def test_a_key_that_gets_no_tokens_at_all_is_behind_the_one_that_has_them(own: str, share: float) -> None:
    page = Scrape('penstock_tenant_tokens_total{model="a",tenant="flood",kind="generation"} 100', "a")
    evidence = Evidence.of([], Scrape("", "a"), page, 10.0, settings={}, capacity={}, own_tenant=own)
    assert (evidence.largest_tenant, evidence.largest_share) == ("flood", share)


def test_the_steps_of_replicas_are_computed_side_by_side() -> None:
    pages = [Scrape(f'penstock_step_seconds_sum{{part="total"}} {sum_s}\npenstock_replicas 4', "a") for sum_s in (0, 10)]
    assert Evidence.of([], *pages, 10.0, settings={}, capacity={}).busy == 0.25


@pytest.mark.parametrize(("others_s", "share"), [(0, 0.0), (1, 0.1), (90, 0.5)])
def test_waits_for_a_cpu_are_those_for_others_only_as_far_as_others_had_it(others_s: int, share: float) -> None:
    """Threads of one server wait for each other, too."""
    seconds = {"running": 9, "waiting": 9, "others": others_s}
    series = [f'penstock_cpu_seconds_total{{state="{state}"}} {spent}' for state, spent in seconds.items()]
    page = Scrape("\n".join([*series, 'penstock_step_seconds_sum{part="total"} 1']), "a")
    assert Evidence.of([], Scrape("", "a"), page, 10.0, settings={}, capacity={}).cpu_wait == pytest.approx(share)
