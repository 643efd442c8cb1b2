"""How much of a prefix is loaded from the tier: what others leave room for, and not a block more."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv.block_table import extend_chain, root_hash
from penstock.kv.tiers import Tier
from penstock.sched.policies.budgets import DecodeFirst
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import FirstChunk
from penstock.sched.scheduler import Scheduler
from penstock.testing import make_request, make_scheduler
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming
from penstock.types.stats import WaitReason

BLOCK = 4
CHUNK = 2 * BLOCK
NO_TIME = StepTiming(0, 0)


def late_request(num_blocks: int) -> Request:
    """So many whole blocks of its prompt can be loaded; one more token has to be computed."""
    return make_request("late", range(1000, 1000 + num_blocks * BLOCK + 1), max_tokens=2)


def scheduler_above(request: Request, num_blocks: int, *, num_absent: int = 0) -> tuple[Scheduler, Tier]:
    """With so many blocks to give out, and a tier with all of the request but the first. Prompts are computed by two blocks."""
    hashes, _ = extend_chain(root_hash(b""), request.prompt_token_ids[:-1], BLOCK)
    tier = Tier(100, entries=list(enumerate(hashes[num_absent:])))
    policies = make_policies(budget=DecodeFirst(long_prefill_token_threshold=CHUNK), reserve=FirstChunk())
    scheduler = make_scheduler(
        policies=policies,
        tier=tier,
        num_blocks=1 + num_blocks,
        block_size=BLOCK,
        max_rows=8,
        max_step_tokens=64,
        max_model_len=200,
    )
    return scheduler, tier


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        assert scheduler.add(request, 0) is None


def step(scheduler: Scheduler) -> Sequence[str]:
    """Returns whose rows were computed."""
    plan = scheduler.schedule(0)
    if plan is None:
        return ()
    token_ids = {row.request_id: (7,) for row in plan.rows if row.samples}
    scheduler.commit(plan, StepResult(plan.step_id, token_ids, NO_TIME), 0)
    scheduler.check()
    return [row.request_id for row in plan.rows]


def num_loading(tier: Tier) -> int:
    return sum(map(len, tier.take_loads()))


def test_what_a_running_prefill_lacks_and_decodes_will_take_is_left_to_them() -> None:
    late = late_request(num_blocks=12)
    scheduler, tier = scheduler_above(late, num_blocks=20)
    add(scheduler, make_request("early", 10 * BLOCK, max_tokens=2))
    step(scheduler)
    add(scheduler, late)
    assert step(scheduler) == ["early"]
    assert scheduler.news.waits_for is WaitReason.LOADING
    # Of its prompt it holds 4 blocks and lacks 6; whoever runs takes 1 while a load is under way.
    assert num_loading(tier) == 20 - 4 - 6 - 1


def test_what_the_pool_has_of_the_prefix_already_is_no_room_for_the_rest() -> None:
    late = late_request(num_blocks=12)
    scheduler, tier = scheduler_above(late, num_blocks=13, num_absent=5)
    add(scheduler, make_request("before", late.prompt_token_ids[: 5 * BLOCK + 1], max_tokens=1))
    while scheduler.num_running + scheduler.num_waiting:
        step(scheduler)
    add(scheduler, make_request("x", [1, 2], max_tokens=9), make_request("y", [3, 4], max_tokens=9))
    step(scheduler)
    add(scheduler, late)
    assert step(scheduler) == ["x", "y"]
    assert scheduler.news.waits_for is WaitReason.LOADING
    # Those two hold a block each and take 2 more; 5 are free, and to be held when the request is admitted.
    assert num_loading(tier) == 13 - 2 - 2 - 5


def test_where_others_leave_no_room_nothing_is_loaded() -> None:
    late = late_request(num_blocks=3)
    scheduler, tier = scheduler_above(late, num_blocks=7)
    add(scheduler, *[make_request(name, [idx, idx], max_tokens=9) for idx, name in enumerate("abcd")])
    step(scheduler)
    add(scheduler, late)
    assert "late" in step(scheduler), "it has room for its first chunk, and computes instead"
    assert num_loading(tier) == 0


def test_a_prompt_that_was_found_does_not_make_tokens_seem_dear() -> None:
    """Its last token alone is computed, and the step takes as long as any. To load a block takes longer than to compute it."""
    late = late_request(num_blocks=12)
    scheduler, tier = scheduler_above(late, num_blocks=60)
    tier.load_ns_per_block = 2000.0 * BLOCK
    now_ns = 0
    for name, duration_ns in (("first", 40_000), ("found", 20_000)):
        add(scheduler, make_request(name, 40, max_tokens=1))
        while (plan := scheduler.schedule(now_ns)) is not None:
            now_ns += duration_ns * plan.num_tokens // 40 if name == "first" else duration_ns
            token_ids = {row.request_id: (7,) for row in plan.rows if row.samples}
            scheduler.commit(plan, StepResult(plan.step_id, token_ids, NO_TIME), now_ns)
    add(scheduler, late)
    plan = scheduler.schedule(now_ns)
    assert plan is not None
    assert [row.request_id for row in plan.rows] == ["late"]
    assert num_loading(tier) == 0
