"""Blocks that only background requests have held go first, and blocks that others want stay where these left them."""

from __future__ import annotations

from penstock.kv.adapters import AdapterPages
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import root_hash
from penstock.kv.eviction import BACKGROUND, TenantFair
from penstock.kv.exchange import Span
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.kv.tiers import Tier
from penstock.testing import make_request
from penstock.testing.hash_executor import HashAdapter

BLOCK = 4


def compute(kv: KVManager, name: str, prompt: list[int], *, background: bool = True, ends: bool = True) -> None:
    """Let a request come, compute its prompt, and end."""
    request = make_request(name, prompt, background=background)
    kv.allocate(request, kv.lookup_prefix(request), len(prompt))
    request.num_computed_tokens = len(prompt)
    kv.publish_last(request)
    kv.publish(request)
    if ends:
        kv.free(name)
    check(kv)
    if kv.tier is not None:
        for spill in kv.tier.take_spills():
            kv.tier.spilled(spill.block_hash, is_sound=True)


def test_a_block_of_a_tenant_stays_in_its_group() -> None:
    pool = BlockPool(6, TenantFair())
    shared, *others = pool.allocate(5)
    pool.release(shared, keep=True, group="a")
    for block_id in others:
        pool.release(block_id, keep=True, group="b")
    pool.hold(shared)
    pool.release(shared, keep=True, group=BACKGROUND)
    assert pool.group_of(shared) == "a"
    assert pool.allocate(3) == others[:3], "the tenant with the most blocks loses some, as without the background request"


def test_no_block_is_wanted_by_others_where_only_background_requests_ran() -> None:
    """They share whole blocks, copy from the middle of one, and give them to another replica."""
    kv = KVManager(60, BLOCK)
    for idx in range(4):
        compute(kv, f"line-{idx}", [7] * 10 + [10 + idx] * 9, ends=False)
    offered = kv.exchange.offer(Span.of(root_hash(b""), [7] * 8, BLOCK, has_tail=False))
    assert kv.pending_copies
    assert len(offered) == 2
    kv.exchange.release(offered)
    for name in list(kv.tables):
        kv.free(name)
    kept = [block_id for block_id in kv.pool.free_block_ids() if kv.pool.is_kept(block_id)]
    assert len(kept) == 10
    assert {kv.pool.group_of(block_id) for block_id in kept} == {BACKGROUND}


def test_what_the_tier_loads_for_them_is_wanted_by_nobody_else() -> None:
    tier = Tier(20)
    kv = KVManager(9, BLOCK, tier=tier)
    prompt = list(range(100, 116))
    compute(kv, "chat", prompt, background=False)
    compute(kv, "other", list(range(200, 232)), background=False)
    line = make_request("line", [*prompt, 1], background=True)
    assert kv.swapping is not None
    assert kv.swapping.fetch(line, kv.lookup_prefix(line), max_blocks=8, compute_ns_per_token=0.0, now_ns=0)
    (loads,) = tier.take_loads()
    placed = kv.swapping.place(loads)
    assert len(placed) == 4
    assert {kv.pool.group_of(block_id) for _, block_id in placed} == {BACKGROUND}


def test_a_job_takes_no_slot_of_the_tier() -> None:
    tier = Tier(4)
    kv = KVManager(9, BLOCK, tier=tier)
    compute(kv, "chat", list(range(100, 116)), background=False)
    compute(kv, "other", list(range(200, 232)), background=False)
    compute(kv, "line-0", list(range(300, 332)))
    before = list(tier.slots._present)
    compute(kv, "line-1", list(range(400, 432)))
    compute(kv, "chat-2", list(range(500, 516)), background=False)
    assert len(before) == 4
    assert list(tier.slots._present) == before, "what was lost since had been computed for lines"
    assert kv.swapping is not None
    assert len(kv.swapping.content_to_keep()) == 4, "at the end the chat's blocks alone are worth a slot"


def test_an_adapter_belongs_to_the_last_who_is_not_of_the_background() -> None:
    pool = BlockPool(6, TenantFair())
    pages = AdapterPages(pool, pool.allocate)
    pages.pin(1, HashAdapter(1, 2))
    pages.pin(1)
    pages.unpin(1, "a")
    pages.unpin(1, BACKGROUND)
    assert pool.group_size("a") == 2
    pages.pin(1)
    pages.unpin(1, BACKGROUND)
    assert pool.group_size("a") == 2
