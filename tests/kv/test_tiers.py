"""Slots and what is in them; when a request waits for a load, and when it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.kv.eviction import EvictionPolicy, LeastRecentlyUsed, LowestPriorityFirst
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.kv.prefix_cache import PrefixIndex
from penstock.kv.tiers import LOAD_TIMEOUT_NS, Load, SlotIndex, Tier
from penstock.testing import make_request
from penstock.types.request import Request

BLOCK = 4


def names(count: int) -> list[bytes]:
    return [bytes([idx]) * 16 for idx in range(count)]


class TestSlots:
    def test_the_least_recently_used_is_overwritten(self) -> None:
        slots = SlotIndex(2)
        a, b, c, _ = names(4)
        for name in (a, b):
            slots.begin_write(name)
            slots.end(name, is_sound=True)
        slots.touch(a)
        assert slots.begin_write(c) is not None
        assert (slots.is_present(a), b in slots) == (True, False)
        assert (slots.is_present(c), c in slots) == (False, True), "it is being written"
        slots.check()

    def test_what_is_moved_is_never_overwritten(self) -> None:
        slots = SlotIndex(1)
        a, b, _, _ = names(4)
        slots.begin_write(a)
        assert slots.begin_write(b) is None
        slots.end(a, is_sound=True)
        slots.begin_read(a)
        assert slots.begin_write(b) is None
        slots.end(a, is_sound=True)
        assert slots.begin_write(b) == 0
        slots.check()

    def test_what_is_not_sound_is_forgotten(self) -> None:
        slots = SlotIndex(1)
        (a,) = names(1)
        slots.begin_write(a)
        slots.end(a, is_sound=False)
        assert a not in slots
        slots.check()

    def test_what_is_forgotten_while_it_moves_is_gone_afterwards(self) -> None:
        slots = SlotIndex(1)
        (a,) = names(1)
        slots.begin_write(a)
        slots.forget(a)
        slots.check()
        slots.end(a, is_sound=True)
        assert a not in slots
        slots.check()

    def test_what_was_there_before_is_found(self) -> None:
        a, b, c, _ = names(4)
        slots = SlotIndex(3)
        slots.restore([(2, a), (0, b), (1, a)])
        slots.check()
        assert slots.is_present(a)
        assert slots.is_present(b)
        assert slots.begin_read(a) == 1
        assert slots.begin_write(c) == 2

    def test_a_tier_has_slots(self) -> None:
        with pytest.raises(ValueError, match="at least one slot"):
            SlotIndex(0)


def spilled_manager(num_tokens: int = 13, eviction: EvictionPolicy | None = None) -> tuple[KVManager, Tier, Request]:
    """A request of `num_tokens` whose blocks, all but the first, were used for others since, and are in the tier."""
    manager = KVManager(num_blocks=8, block_size=BLOCK, tier=Tier(20), eviction=eviction)
    assert manager.tier is not None
    request = make_request("a", num_tokens, priority=5)
    compute(manager, request)
    manager.suspend("a")
    request.num_computed_tokens = 0
    compute(manager, make_request("b", [99] * (4 * BLOCK + 2 * BLOCK)))
    spills = manager.tier.take_spills()
    assert [spill.block_hash for spill in spills] == manager.tables["a"].hashes[:0:-1], "the tail goes first"
    for spill in spills:
        manager.tier.spilled(spill.block_hash, is_sound=True)
    manager.free("b")
    return manager, manager.tier, request


def compute(manager: KVManager, request: Request) -> None:
    manager.allocate(request, manager.lookup_prefix(request), request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request)


def fetch(manager: KVManager, request: Request, now_ns: int = 0, *, max_blocks: int = 100, cost: float = 0.0) -> bool:
    hit = manager.lookup_prefix(request)
    return manager.swapping is not None and manager.swapping.fetch(
        request, hit, max_blocks=max_blocks, compute_ns_per_token=cost, now_ns=now_ns
    )


def arrive(manager: KVManager, loads: Sequence[Load]) -> list[int]:
    """The loads that arrived are placed. Returns the blocks, in the order in which they are written."""
    assert manager.tier is not None
    for load in loads:
        assert manager.tier.loaded(load.block_hash, is_sound=True)
    placed = manager.swapping.place(loads)
    check(manager)
    return [block_id for _, block_id in placed]


class TestFetch:
    def test_what_was_loaded_is_a_prefix_hit(self) -> None:
        manager, tier, request = spilled_manager()
        assert manager.lookup_prefix(request).num_tokens == BLOCK
        assert fetch(manager, request)
        (loads,) = tier.take_loads()
        assert [load.block_hash for load in loads] == manager.tables["a"].hashes[1:3]
        assert fetch(manager, request), "still on its way"
        assert tier.take_loads() == []
        assert len(arrive(manager, loads)) == 2
        check(manager)
        assert manager.lookup_prefix(request).num_tokens == 3 * BLOCK
        assert not fetch(manager, request), "all is there"

    def test_a_load_that_failed_is_not_tried_again(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request)
        first, second = tier.take_loads()[0]
        tier.loaded(first.block_hash, is_sound=False)
        arrive(manager, [second])
        assert not fetch(manager, request)
        assert manager.lookup_prefix(request).num_tokens == BLOCK

    def test_a_load_that_helped_is_followed_by_the_next(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request, max_blocks=1)
        arrive(manager, tier.take_loads()[0])
        assert fetch(manager, request, max_blocks=1)
        assert len(tier.take_loads()) == 1

    def test_a_load_that_was_evicted_again_is_not_repeated(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request)
        for load in tier.take_loads()[0]:
            tier.loaded(load.block_hash, is_sound=True)
        assert not fetch(manager, request)

    def test_nobody_waits_longer_than_the_timeout(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request, 5)
        assert tier.next_timeout_ns(5) == 5 + LOAD_TIMEOUT_NS
        assert fetch(manager, request, LOAD_TIMEOUT_NS)
        assert not fetch(manager, request, 5 + LOAD_TIMEOUT_NS)
        assert tier.next_timeout_ns(5 + LOAD_TIMEOUT_NS) is None
        assert tier.load_ns_per_block == LOAD_TIMEOUT_NS, "it is taken for slow"

    def test_a_prefix_that_comes_in_several_loads_has_one_deadline(self) -> None:
        hashes = [idx.to_bytes(16, "big") for idx in range(20)]
        tier, index = Tier(20, max_load_blocks=2, entries=enumerate(hashes)), PrefixIndex()
        now_ns = num_hit_blocks = 0
        while tier.fetch(
            "a",
            hashes[num_hit_blocks:],
            index,
            num_hit_blocks=num_hit_blocks,
            group=None,
            max_blocks=20,
            compute_ns_per_block=0.0,
            now_ns=now_ns,
        ):
            now_ns += LOAD_TIMEOUT_NS // 4
            for load in tier.take_loads()[0]:
                tier.loaded(load.block_hash, is_sound=True)
                num_hit_blocks += 1
                index.publish_named(num_hit_blocks, load.block_hash)
        assert (now_ns, num_hit_blocks) == (LOAD_TIMEOUT_NS, 8)
        assert tier.load_ns_per_block == 0.0, "nothing was under way: it is not taken for slow"
        tier.end_wait("a")

    def test_what_is_dearer_than_computing_is_not_loaded_until_it_is_forgiven(self) -> None:
        manager, tier, request = spilled_manager()
        tier.load_ns_per_block = 103.0 * BLOCK
        assert not fetch(manager, request, cost=100.0)
        assert not fetch(manager, request, cost=100.0)
        assert fetch(manager, request, cost=100.0)

    @pytest.mark.parametrize(("end", "num_declined"), [("begins", 2), ("is aborted", 0), ("loads it later", 0)])
    def test_what_a_request_computes_though_the_tier_has_it_is_counted_once(self, end: str, num_declined: int) -> None:
        manager, tier, request = spilled_manager()
        tier.load_ns_per_block = 1000.0 * BLOCK
        for _ in range(3):  # it does not begin at once
            assert not fetch(manager, request, cost=100.0)
        if end == "loads it later":
            tier.load_ns_per_block = 0.0
            assert fetch(manager, request, cost=100.0)
            arrive(manager, tier.take_loads()[0])
        if end == "is aborted":
            manager.free("a")
        else:
            manager.allocate(request, manager.lookup_prefix(request), request.num_tokens)
        assert [tier.take_num_declined(), tier.take_num_declined()] == [num_declined, 0]

    def test_what_is_being_spilled_is_waited_for(self) -> None:
        manager = KVManager(num_blocks=8, block_size=BLOCK, tier=Tier(20))
        assert manager.tier is not None
        request = make_request("a", 9)
        compute(manager, request)
        manager.free("a")
        compute(manager, make_request("b", [99] * 7 * BLOCK))
        assert manager.tier.take_spills()
        again = make_request("c", 9)
        assert fetch(manager, again)
        assert not manager.tier.take_loads()
        for block_hash in manager.tables["c"].hashes:
            manager.tier.spilled(block_hash, is_sound=True)
        manager.free("b")
        assert fetch(manager, again), "and loaded once it is there"
        assert manager.tier.take_loads()

    def test_what_could_not_be_begun_is_ordered_again(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request)
        (loads,) = tier.take_loads()
        tier.postpone(loads)
        assert fetch(manager, request)
        assert tier.take_loads() == [loads]
        assert not fetch(manager, request, LOAD_TIMEOUT_NS), "the deadline stays"

    def test_of_what_was_loaded_the_end_is_evicted_first(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request)
        arrive(manager, tier.take_loads()[0])
        compute(manager, make_request("other", [77] * 5 * BLOCK))
        assert manager.lookup_prefix(request).num_tokens == 2 * BLOCK, "seven blocks, of which five were needed"

    @pytest.mark.parametrize("eviction", [LeastRecentlyUsed, LowestPriorityFirst])
    def test_what_is_placed_does_not_evict_what_comes_before_it(self, eviction: type[EvictionPolicy]) -> None:
        manager, tier, request = spilled_manager(eviction=eviction())
        assert fetch(manager, request)
        assert len(arrive(manager, tier.take_loads()[0])) == 2
        assert manager.lookup_prefix(request).num_tokens == 3 * BLOCK

    def test_a_closed_tier_neither_takes_nor_gives(self) -> None:
        manager, tier, request = spilled_manager()
        tier.close()
        assert not fetch(manager, request)
        compute(manager, make_request("c", [98] * 7 * BLOCK))
        assert tier.take_spills() == []

    def test_content_that_is_here_is_not_placed_again(self) -> None:
        manager, tier, request = spilled_manager()
        assert fetch(manager, request)
        (loads,) = tier.take_loads()
        assert len(arrive(manager, loads)) == 2
        assert manager.swapping.place(loads) == []

    def test_without_a_tier_nobody_waits(self) -> None:
        manager = KVManager(num_blocks=8, block_size=BLOCK)
        assert not fetch(manager, make_request("a", 9))


def test_what_the_pool_contains_is_kept_as_far_as_there_are_slots() -> None:
    manager = KVManager(num_blocks=8, block_size=BLOCK, tier=Tier(3))
    compute(manager, make_request("a", 5 * BLOCK))
    table = manager.block_table("a")
    manager.free("a")
    assert manager.swapping.content_to_keep() == list(table[:3])


def test_tails_take_no_place_from_what_is_kept_at_the_end() -> None:
    """Only full blocks are spilled: a tier that holds all of those in the pool gets all of them."""
    manager = KVManager(num_blocks=20, block_size=BLOCK, tier=Tier(3))
    for name in "abc":
        request = make_request(name, [ord(name)] * (BLOCK + 2))
        compute(manager, request)
        manager.publish_tail(request)
        manager.free(name)
    assert manager.pool.num_cached == 6
    kept = manager.swapping.content_to_keep()
    assert [manager.prefix.index.hash_of(block_id) is None for block_id in kept] == [False] * 3
