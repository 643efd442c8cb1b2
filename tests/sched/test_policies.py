"""The policies as values, and the way from names to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.sched.policies.base import AdmissionView, BudgetView, GateDecision, StepLimits, VictimView, loads_back
from penstock.sched.policies.budgets import DecodeFirst, HoldLatency, WholePrompts
from penstock.sched.policies.presets import PRESETS, TABLES, make_policies
from penstock.sched.policies.reserves import FirstChunk, NoEvict, PredictedOutput, Watermark, WholePrompt
from penstock.sched.policies.victims import VICTIMS, Cheapest, LatestArrived, LeastComputed, LowestPriority
from penstock.sched.step_builder import StepBuilder
from penstock.testing import make_request
from penstock.types.errors import ConfigError
from penstock.types.request import Request
from penstock.types.stats import StepCounts


def admission(**fields: Any) -> AdmissionView:
    values = {
        "request": make_request(),
        "running": (),
        "num_chunk_blocks": 2,
        "num_prompt_blocks": 5,
        "num_final_blocks": 9,
        "num_running": 3,
        "num_growth_blocks": 100,
        "num_total_blocks": 1000,
        "block_size": 16,
    }
    return AdmissionView(**(values | fields))


def budget_view(**fields: int) -> BudgetView:
    values = {"max_step_tokens": 512, "num_decodes": 0, "prefill_context_len": 0}
    return BudgetView(**(values | fields), last_step=None)


def step(limits: StepLimits, **counts: int) -> StepBuilder:
    return StepBuilder(0, limits, GateDecision(0), counts=StepCounts(**counts))


def test_prefills_may_fill_the_step() -> None:
    limits = DecodeFirst().limits(budget_view())
    assert limits.max_tokens == 512
    assert step(limits).chunk(1000) == 512


@pytest.mark.parametrize(("num_behind", "chunk"), [(99, 99), (100, 100), (101, 100), (1000, 100)])
def test_chunks_of_long_prefills_are_limited_by_the_threshold(num_behind: int, chunk: int) -> None:
    limits = DecodeFirst(long_prefill_token_threshold=100).limits(budget_view())
    assert step(limits).chunk(num_behind) == chunk


def test_a_chunk_takes_what_decodes_and_others_have_left() -> None:
    limits = DecodeFirst(long_prefill_token_threshold=100).limits(budget_view())
    assert step(limits, num_tokens=450).chunk(1000) == 62


def test_a_prompt_that_must_not_be_split_waits_for_a_step_with_room() -> None:
    limits = WholePrompts().limits(budget_view())
    assert step(limits, num_tokens=100, num_decodes=8).chunk(412) == 412
    assert step(limits, num_tokens=100, num_decodes=8).chunk(413) == 0


def test_a_prompt_that_no_step_has_room_for_is_split_after_all() -> None:
    limits = WholePrompts().limits(budget_view())
    assert step(limits, num_tokens=8, num_decodes=8).chunk(1000) == 504


def test_the_watermark_keeps_a_share_of_the_pool_free() -> None:
    assert Watermark(share=0.01, growth_tokens=0).required_blocks(admission()) == 5 + 10
    assert Watermark(share=0.0001, growth_tokens=0).required_blocks(admission()) == 5 + 1, "rounded up"
    assert Watermark(share=0.0, growth_tokens=0).required_blocks(admission()) == 5


@pytest.mark.parametrize(("growth_tokens", "blocks_each"), [(16, 1), (17, 2), (48, 3)])
def test_the_running_have_room_to_grow(growth_tokens: int, blocks_each: int) -> None:
    assert Watermark(share=0.0, growth_tokens=growth_tokens).required_blocks(admission()) == 5 + 3 * blocks_each


def test_no_more_room_is_kept_than_the_running_can_fill() -> None:
    assert Watermark(share=0.0, growth_tokens=48).required_blocks(admission(num_growth_blocks=4)) == 5 + 4


def test_who_ends_makes_room_for_others_to_grow() -> None:
    assert Watermark(share=0.0, growth_tokens=48).required_blocks(admission(num_peak_blocks=4)) == 5 + 4


@pytest.mark.parametrize(("growth_tokens", "blocks_each"), [(0, 0), (16, 1), (48, 1)])
def test_less_room_is_kept_where_a_preemption_costs_little(growth_tokens: int, blocks_each: int) -> None:
    reserve = Watermark(share=0.0, growth_tokens=growth_tokens, swap_growth_tokens=16)
    assert reserve.required_blocks(admission(swaps=True)) == 5 + 3 * blocks_each


def test_reserves_ask_for_the_first_chunk_the_prompt_or_everything() -> None:
    assert FirstChunk().required_blocks(admission()) == 2
    assert WholePrompt().required_blocks(admission()) == 5
    assert NoEvict().required_blocks(admission(num_growth_blocks=7)) == 9 + 7


def running(prompt: int, generated: int, predicted: int | None, max_tokens: int = 1000) -> Request:
    request = make_request(prompt=prompt, max_tokens=max_tokens)
    request.output_token_ids = [7] * generated
    request.num_tokens = prompt + generated
    request.max_total_tokens = prompt + max_tokens
    request.predicted_new_tokens = predicted
    return request


@pytest.mark.parametrize(
    ("request_", "num_growth_blocks"),
    [
        (running(16, 0, predicted=161), 10),
        (running(16, 16, predicted=161), 9),
        (running(16, 160, predicted=161), 2),
        (running(16, 0, predicted=None, max_tokens=161), 5),
        (running(16, 0, predicted=500, max_tokens=17), 1),
    ],
)
def test_the_predicted_output_is_kept_free(request_: Request, num_growth_blocks: int) -> None:
    """16 tokens are a block; beyond its prediction a reply is expected to have `growth_tokens` more."""
    reserve = PredictedOutput(unknown_share=0.5, growth_tokens=32)
    view = admission(request=request_, num_prompt_blocks=1, num_final_blocks=100)
    assert reserve.required_blocks(view) == 1 + num_growth_blocks
    own = reserve.required_blocks(admission(request=running(16, 0, predicted=1, max_tokens=1), num_prompt_blocks=1))
    view = admission(request=running(16, 0, predicted=1, max_tokens=1), num_prompt_blocks=1, running=[request_])
    assert own == 1
    windowed = admission(request=request_, num_prompt_blocks=1, num_final_blocks=1)
    assert reserve.required_blocks(windowed) == 1, "it never holds more at one time"
    assert reserve.required_blocks(view) == own + num_growth_blocks


def victims(*candidates: Request, freed: dict[str, int] | None = None, num_needed: int = 1) -> VictimView:
    return VictimView(
        candidates=candidates,
        num_needed_blocks=num_needed,
        num_freed_blocks=lambda request: (freed or {})[request.request_id],
        num_lost_tokens=lambda request: request.num_computed_tokens,
        prefill_ns_per_token=1000.0,
    )


def computed(name: str, num_tokens: int, **fields: int) -> Request:
    request = make_request(name, **fields)
    request.num_computed_tokens = num_tokens
    return request


def test_the_victim_is_the_latest_arrived() -> None:
    candidates = [make_request(f"r{arrival}", arrival_ns=arrival) for arrival in (4, 9, 2)]
    assert LatestArrived().choose(victims(*candidates)) is candidates[1]


@pytest.mark.parametrize("name", VICTIMS)
def test_of_equals_the_victim_is_the_last_admitted(name: str) -> None:
    candidates = [make_request(name) for name in "abc"]
    view = victims(*candidates, freed=dict.fromkeys("abc", 1))
    assert make_policies(victim=name).victim.choose(view) is candidates[2]


def test_the_victim_is_of_the_lowest_class() -> None:
    candidates = [make_request("a"), make_request("b", arrival_ns=1), make_request("c", arrival_ns=2)]
    candidates[0].priority = candidates[1].priority = 5
    assert LowestPriority().choose(victims(*candidates)) is candidates[1]


def test_the_victim_is_the_least_computed() -> None:
    candidates = [computed("a", 50), computed("b", 20), computed("c", 30, arrival_ns=1)]
    assert LeastComputed().choose(victims(*candidates)) is candidates[1]


def test_the_cheapest_victim_frees_enough_and_loses_least() -> None:
    candidates = [computed("large", 160), computed("enough", 64), computed("small", 16)]
    freed = {"large": 10, "enough": 4, "small": 1}
    assert Cheapest().choose(victims(*candidates, freed=freed, num_needed=2)) is candidates[1]
    assert Cheapest().choose(victims(*candidates, freed=freed, num_needed=11)) is candidates[2]


def test_who_shares_all_its_blocks_is_no_cheap_victim() -> None:
    candidates = [computed("a", 64), computed("shares", 0)]
    assert Cheapest().choose(victims(*candidates, freed={"a": 4, "shares": 0})) is candidates[0]


@pytest.mark.parametrize(("load_ns", "victim"), [(None, "short"), (2000.0, "short"), (100.0, "whole"), (0.0, "whole")])
def test_with_a_tier_the_cheapest_victim_has_least_behind_its_last_full_block(load_ns: float | None, victim: str) -> None:
    """A token takes 1,000 ns to compute: 40 of them, or 8 and a load of 32, or a load of 64."""
    candidates = [computed("whole", 64), computed("short", 40)]
    view = replace(victims(*candidates, freed={"whole": 4, "short": 3}), load_ns_per_token=load_ns, block_size=16)
    assert Cheapest().choose(view).request_id == victim


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
    with pytest.raises(ConfigError, match=rf"no preset called 'nope'.* Valid: {', '.join(sorted(PRESETS))}"):
        make_policies("nope")


def test_a_setting_goes_to_the_policy_that_is_chosen_by_name() -> None:
    policies = make_policies(budget="itl", settings={"budget": {"slo_itl_ns": 7, "max_long_partial_prefills": None}})
    assert isinstance(policies.budget, HoldLatency)
    assert (policies.budget.slo_itl_ns, policies.budget.max_long_partial_prefills) == (7, 1)


def test_a_setting_that_the_policy_has_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match="The budget 'whole-prompts' has no slo_itl_ns"):
        make_policies(budget="whole-prompts", settings={"budget": {"slo_itl_ns": 7}})


def test_a_preset_s_settings_go_with_its_policy_alone() -> None:
    assert make_policies("sarathi").reserve == Watermark(growth_tokens=0)
    assert make_policies("sarathi", reserve="watermark").reserve == Watermark(growth_tokens=0)
    assert make_policies("penstock", reserve="watermark").reserve == Watermark()


@pytest.mark.parametrize(
    ("load_ns", "prefill_ns", "is_loaded"),
    [(None, 100.0, False), (0.0, 100.0, True), (99.0, 100.0, True), (101.0, 100.0, False), (101.0, 0.0, True)],
)
def test_a_preempted_request_is_loaded_back_if_that_is_faster(
    load_ns: float | None, prefill_ns: float, is_loaded: bool
) -> None:
    assert loads_back(prefill_ns, load_ns) == is_loaded
