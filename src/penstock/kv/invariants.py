"""The invariants of KV memory, checked by tests after every operation and by the engine when idle."""

from __future__ import annotations

from collections import Counter

from penstock.kv.block_pool import NULL_BLOCK_ID
from penstock.kv.eviction import BACKGROUND
from penstock.kv.manager import KVManager
from penstock.types.adapter import BASE


def check(manager: KVManager) -> None:
    _check_free_list(manager)
    _check_groups(manager)
    _check_references(manager)
    _check_index(manager)
    _check_aliasing(manager)
    if manager.tier is not None:
        manager.tier.slots.check()
    _check_coming(manager)


def _check_free_list(manager: KVManager) -> None:
    pool = manager.pool
    counts, _ = pool.snapshot()
    free = pool.free_block_ids()
    assert len(free) == len(set(free)) == pool.num_available, "the free list and its length differ"
    assert NULL_BLOCK_ID not in free, "the null block is in the free list"
    num_held = len(counts) - counts.count(0)
    assert len(free) + num_held == manager.num_total_blocks, "free + held is not the total"
    num_shared = num_held - counts.count(1)
    num_repeats = sum(counts) - num_held
    assert num_repeats == pool.num_repeats, f"{num_repeats} references are repeats, {pool.num_repeats} are counted"
    assert num_shared == pool.num_shared, f"{num_shared} blocks are shared, {pool.num_shared} are counted"
    assert not any(map(counts.__getitem__, free)), "a held block is in the free list"


def _check_groups(manager: KVManager) -> None:
    pool = manager.pool
    groups = pool.groups()
    for name, block_ids in groups.items():
        assert block_ids, f"group {name!r} has no blocks"
        assert all(pool.group_of(block_id) == name for block_id in block_ids), f"a block of group {name!r} is of another"
    groups.pop(BACKGROUND, None)
    assert not groups or manager.eviction.choose() in groups, "a group without blocks would lose one"


def _check_references(manager: KVManager) -> None:
    held = Counter(manager.exchange.held)
    for request_id, table in (*manager.tables.items(), *manager.fenced):
        assert len(set(table.held)) == len(table.held), f"{request_id!r} holds a block twice"
        released = table.block_ids[: table.num_released]
        assert released == [NULL_BLOCK_ID] * table.num_released, f"{request_id!r} has released other blocks than it counts"
        assert table.num_released <= table.num_full, f"{request_id!r} has released a block that was not full"
        held.update(table.held)
        held.update(table.state_block_ids)
        assert len(table.state) in (0, manager.num_state_blocks), f"{request_id!r} has a part of a state"
    manager.states.check()
    assert NULL_BLOCK_ID not in held, "the null block is in a table"
    pins: Counter[int] = Counter()
    for request_id, table in (*manager.tables.items(), *manager.fenced):
        if table.adapter != BASE:
            assert table.block_ids or request_id in manager.num_slots, f"{request_id!r} has an adapter and does not run"
            pins[table.adapter] += 1
    manager.adapters.check(pins)
    for number in pins:
        held.update(manager.adapters.residents[number].block_ids)
    counts, _ = manager.pool.snapshot()
    assert all(0 < block_id < len(counts) for block_id in held), "a block that the pool does not have is held"
    expected = [0] * len(counts)
    for block_id, num_held in held.items():
        expected[block_id] = num_held
    if counts != expected:
        wrong = next(block_id for block_id, count in enumerate(counts) if count != expected[block_id])
        raise AssertionError(f"block {wrong} is held {expected[wrong]} times and counts {counts[wrong]}")


def _check_index(manager: KVManager) -> None:
    published = [block_id for _, block_id in manager.prefix.index.items()]
    assert len(set(published)) == len(published), "a block is published under two hashes"
    manager.prefix.index.check()
    free, (_, cached) = set(manager.pool.free_block_ids()), manager.pool.snapshot()
    contents = [free & owner.block_ids for owner in (manager.prefix.index, manager.adapters, manager.states)]
    with_content = set().union(*contents)
    assert len(with_content) == sum(map(len, contents)), "a free block has several contents of published, adapter and state"
    odd = with_content ^ cached
    assert not odd, f"free blocks {odd} are kept without content, or have some and are not"


def _check_aliasing(manager: KVManager) -> None:
    for request_id, table in manager.tables.items():
        num_slots = manager.num_slots.get(request_id, 0)
        assert num_slots in (0, len(table.block_ids) * manager.block_size), f"{request_id!r} may write beyond its blocks"
        assert table.num_full <= len(table.block_ids), f"{request_id!r} has more full blocks than blocks"
        if num_slots:
            own = table.block_ids[table.num_full :]
            shared = [block_id for block_id in own if manager.pool.ref_count(block_id) > 1]
            assert not shared, f"{request_id!r} may write to blocks {shared}, which others hold"
    assert manager.num_slots.keys() <= manager.tables.keys(), "a right to write outlived its table"


def _check_coming(manager: KVManager) -> None:
    tables = manager.tables
    for key, leader in manager.prefix.leaders.items():
        table = tables[leader.request_id]
        assert table.block_ids, f"{leader.request_id!r} does not run, and others wait for it"
        assert table.leads == key, f"{leader.request_id!r} does not compute what others wait for"
        assert leader.num_behind > 1, f"{leader.request_id!r} has computed its prompt, and others wait for it"
        assert key.startswith(table.parent(table.num_full)), f"{leader.request_id!r} has computed what others wait for"
    for key, request in manager.prefix.promises.items():
        table = tables[request.request_id]
        assert table.promise == key, f"{request.request_id!r} does not save what others wait for"
        assert table.block_ids, f"{request.request_id!r} does not run, and others wait for its state"
    leading = {request_id for request_id, table in tables.items() if table.leads}
    assert leading == {leader.request_id for leader in manager.prefix.leaders.values()}, "a leader is not known as one"
