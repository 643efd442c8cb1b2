"""The free list, its order and its counts; against a list and a dict that do the same slowly."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv.block_pool import NULL_BLOCK_ID, BlockPool
from penstock.kv.eviction import BACKGROUND


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_available == 0


def test_asking_for_too_many_takes_none() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 available"):
        pool.allocate(4)
    assert pool.num_available == 3


def test_a_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1)
    pool.hold(block_id)
    pool.release(block_id, keep=False)
    assert pool.num_available == 1
    pool.release(block_id, keep=False)
    assert pool.num_available == 2


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1)
    pool.release(block_id, keep=True)
    with pytest.raises(ValueError, match="freed twice"):
        pool.release(block_id, keep=True)


def test_the_null_block_can_not_be_held() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(3).hold(NULL_BLOCK_ID)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_needs_a_block_to_give(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="null block and at least one more"):
        BlockPool(num_blocks)


def test_blocks_without_content_are_used_before_any_with() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.release(first, keep=True)
    pool.release(second, keep=False)
    pool.release(third, keep=True)
    assert pool.allocate(3) == [second, first, third]


def test_content_is_lost_in_the_order_of_release() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    for block_id in (blocks[3], blocks[0], blocks[4]):
        pool.release(block_id, keep=True)
    pool.hold(blocks[0])  # revived: out of the middle
    assert pool.allocate(2) == [blocks[3], blocks[4]]


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(1, num_blocks))
        self.kept: set[int] = set()
        self.counts = dict.fromkeys(range(1, num_blocks), 0)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(ValueError, match="available"):
                self.pool.allocate(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == taken
        for block_id in taken:
            self.counts[block_id] = 1
        self.kept.difference_update(taken)

    @precondition(lambda self: self.kept or any(self.counts.values()))
    @rule(pick=st.integers(0, 100))
    def hold(self, pick: int) -> None:
        with_content = [block_id for block_id, count in self.counts.items() if count or block_id in self.kept]
        block_id = with_content[pick % len(with_content)]
        self.pool.hold(block_id)
        if self.counts[block_id] == 0:
            self.free.remove(block_id)
            self.kept.discard(block_id)
        self.counts[block_id] += 1

    @precondition(lambda self: any(self.counts.values()))
    @rule(pick=st.integers(0, 100), keep=st.booleans())
    def release(self, pick: int, keep: bool) -> None:
        held = [block_id for block_id, count in self.counts.items() if count]
        block_id = held[pick % len(held)]
        self.pool.release(block_id, keep=keep)
        self.counts[block_id] -= 1
        if self.counts[block_id] == 0:
            self.free.insert(len(self.free) if keep else 0, block_id)
            if keep:
                self.kept.add(block_id)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert list(self.pool.free_block_ids()) == self.free
        assert self.pool.num_available == len(self.free)
        assert self.pool.num_cached == len(self.kept)
        for block_id, count in self.counts.items():
            assert self.pool.ref_count(block_id) == count
            assert self.pool.is_kept(block_id) == (block_id in self.kept)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("rests", [False, True])
def test_blocks_of_the_background_are_lost_before_all_others(rests: bool) -> None:
    pool = BlockPool(7)
    others, lines = pool.allocate(3), pool.allocate(3)
    for block_id in others:
        pool.release(block_id, keep=True, rests=rests)
    for block_id in lines:
        pool.release(block_id, keep=True, group=BACKGROUND)
    assert pool.allocate(2) == lines[:2], "though they were freed last"
    assert pool.allocate(2) == [lines[2], others[0]]


def test_a_block_that_others_have_held_is_kept_like_theirs() -> None:
    pool = BlockPool(4)
    shared, own, other = pool.allocate(3)
    pool.release(shared, keep=True, group=BACKGROUND)
    pool.hold(shared)  # found by a request that is not of the background
    pool.hold(shared)
    pool.release(shared, keep=True)
    pool.release(other, keep=True)
    pool.release(shared, keep=True, group=BACKGROUND)
    pool.release(own, keep=True, group=BACKGROUND)
    assert pool.allocate(3) == [own, other, shared]
    pool.release(shared, keep=True, group=BACKGROUND)
    pool.release(other, keep=True)
    assert pool.allocate(1) == [shared], "its content was lost, and with it the mark"
