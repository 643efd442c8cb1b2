"""The policies as values, and the way from names to them."""

from __future__ import annotations

import pytest

from penstock.sched.draft import StepDraft
from penstock.sched.policies.base import AdmissionView, BucketView, BudgetView, GateView
from penstock.sched.policies.budgets import DecodeFirst, WholePrompts
from penstock.sched.policies.gates import Continuous
from penstock.sched.policies.presets import PRESETS, TABLES, make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.sched.policies.victims import LatestArrived
from penstock.testing import make_request
from penstock.types.errors import ConfigError


def admission(**fields: int) -> AdmissionView:
    values = {
        "num_chunk_blocks": 2,
        "num_prompt_blocks": 5,
        "num_final_blocks": 9,
        "num_running": 3,
        "num_growth_blocks": 100,
        "num_preemptions": 0,
        "num_total_blocks": 1000,
        "block_size": 16,
    }
    return AdmissionView(**(values | fields))


def test_the_continuous_gate_is_open_for_every_free_row() -> None:
    view = GateView(now_ns=0, num_running=3, num_joining=0, max_rows=8, buckets=(BucketView(0, num_waiting=9, oldest_ns=0),))
    decision = Continuous().decide(view)
    assert (decision.max_admissions, decision.wakeup_ns) == (5, None)


def budget_view(**fields: int) -> BudgetView:
    values = {"max_step_tokens": 512, "num_decodes": 0, "num_prefills": 0, "num_joining": 0}
    return BudgetView(**(values | fields), last_step=None)


def test_prefills_may_fill_the_step() -> None:
    limits = DecodeFirst().limits(budget_view())
    assert limits.max_tokens == 512
    assert StepDraft(limits).chunk(1000) == 512


@pytest.mark.parametrize(("num_behind", "chunk"), [(99, 99), (100, 100), (101, 100), (1000, 100)])
def test_chunks_of_long_prefills_are_limited_by_the_threshold(num_behind: int, chunk: int) -> None:
    limits = DecodeFirst(long_prefill_token_threshold=100).limits(budget_view())
    assert StepDraft(limits).chunk(num_behind) == chunk


def test_a_chunk_takes_what_decodes_and_others_have_left() -> None:
    draft = StepDraft(DecodeFirst(long_prefill_token_threshold=100).limits(budget_view()), num_tokens=450)
    assert draft.chunk(1000) == 62


def test_a_prompt_that_must_not_be_split_waits_for_a_step_with_room() -> None:
    limits = WholePrompts().limits(budget_view())
    assert StepDraft(limits, num_tokens=100, num_decodes=8).chunk(412) == 412
    assert StepDraft(limits, num_tokens=100, num_decodes=8).chunk(413) == 0


def test_a_prompt_that_no_step_has_room_for_is_split_after_all() -> None:
    limits = WholePrompts().limits(budget_view())
    assert StepDraft(limits, num_tokens=8, num_decodes=8).chunk(1000) == 504


def test_the_watermark_keeps_a_share_of_the_pool_free() -> None:
    assert Watermark(share=0.01, growth_tokens=0).required_blocks(admission()) == 5 + 10
    assert Watermark(share=0.0001, growth_tokens=0).required_blocks(admission()) == 5 + 1, "rounded up"
    assert Watermark(share=0.0, growth_tokens=0).required_blocks(admission()) == 5


def test_the_watermark_can_ask_for_the_first_chunk_only() -> None:
    assert Watermark(share=0.0, growth_tokens=0, is_whole_prompt=False).required_blocks(admission()) == 2


@pytest.mark.parametrize(("growth_tokens", "blocks_each"), [(16, 1), (17, 2), (48, 3)])
def test_the_running_have_room_to_grow(growth_tokens: int, blocks_each: int) -> None:
    assert Watermark(share=0.0, growth_tokens=growth_tokens).required_blocks(admission()) == 5 + 3 * blocks_each


def test_no_more_room_is_kept_than_the_running_can_fill() -> None:
    assert Watermark(share=0.0, growth_tokens=48).required_blocks(admission(num_growth_blocks=4)) == 5 + 4


def test_the_victim_is_the_latest_arrived() -> None:
    running = [make_request(f"r{arrival}", arrival_ns=arrival) for arrival in (4, 9, 2)]
    assert LatestArrived().choose(running).request is running[1]


def test_of_equal_arrivals_the_victim_is_the_last_admitted() -> None:
    running = [make_request(name) for name in "abc"]
    assert LatestArrived().choose(running).request is running[2]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_made(preset: str) -> None:
    assert make_policies(preset)


@pytest.mark.parametrize(("seam", "name"), [(seam, name) for seam, table in TABLES.items() for name in table])
def test_every_name_can_be_made(seam: str, name: str) -> None:
    assert make_policies(**{seam: name})  # type: ignore[arg-type]


def test_a_value_can_replace_a_name() -> None:
    reserve = Watermark(share=0.5)
    assert make_policies(reserve=reserve).reserve is reserve


@pytest.mark.parametrize("seam", TABLES)
def test_an_unknown_name_is_answered_with_the_valid_ones(seam: str) -> None:
    with pytest.raises(ConfigError, match=rf"no {seam} called 'nope'.* Valid: {', '.join(sorted(TABLES[seam]))}"):
        make_policies(**{seam: "nope"})  # type: ignore[arg-type]


def test_an_unknown_preset_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"no preset called 'nope'.* Valid: penstock"):
        make_policies("nope")
