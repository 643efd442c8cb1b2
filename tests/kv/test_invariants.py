"""The checker itself: each law, when broken, is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.kv.eviction import TenantFair
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.testing import make_request


def break_free_list(manager: KVManager) -> None:
    manager.pool._empty.pop()


def lose_a_block(manager: KVManager) -> None:
    manager.pool.allocate(1)


def drop_a_table(manager: KVManager) -> None:
    del manager.tables["a"]


def alias_a_block(manager: KVManager) -> None:
    table = manager.tables["b"]
    manager.pool.release(table.block_ids[-1], keep=False)
    table.block_ids[-1] = manager.tables["a"].block_ids[-1]
    manager.pool.hold(table.block_ids[-1])


def hold_a_block_twice(manager: KVManager) -> None:
    table = manager.tables["a"]
    table.block_ids.append(table.block_ids[0])
    manager.pool.hold(table.block_ids[0])


def hold_the_null_block(manager: KVManager) -> None:
    manager.tables["a"].block_ids.append(0)


def give_back_what_is_not_counted(manager: KVManager) -> None:
    table = manager.tables["a"]
    manager.pool.release(table.block_ids[0], keep=True)
    table.block_ids[0] = 0


def give_back_what_is_not_full(manager: KVManager) -> None:
    table = manager.tables["a"]
    for block_id in table.block_ids:
        manager.pool.release(block_id, keep=block_id in manager.prefix.index.block_ids)
    table.num_released, table.block_ids = len(table.block_ids), [0] * len(table.block_ids)


def forget_content(manager: KVManager) -> None:
    manager.free("a")
    manager.free("b")
    block_id = next(block_id for _, block_id in manager.prefix.index.items())
    manager.prefix.index.forget([block_id])


def lose_a_published_content(manager: KVManager) -> None:
    manager.prefix.index._contents.popitem()


def know_a_block_by_another_hash(manager: KVManager) -> None:
    index = manager.prefix.index
    block_hash, block_id = next(iter(index.items()))
    del index._block_ids[block_hash]
    index._block_ids[block_hash[:4]] = block_id


def put_a_child_elsewhere(manager: KVManager) -> None:
    children = manager.prefix.index._children
    key, found = next(iter(children.items()))
    del children[key]
    children[key[:-4]] = found


def hold_a_block_that_is_not_there(manager: KVManager) -> None:
    manager.tables["a"].block_ids.append(manager.pool.num_blocks)


def lose_a_group_s_block(manager: KVManager) -> None:
    manager.free("a")
    manager.pool._group_of.popitem()


def name_a_group_without_blocks(manager: KVManager) -> None:
    manager.free("a")
    manager.eviction.resized("nobody", 1000)


@pytest.mark.parametrize(
    "sabotage",
    [
        break_free_list,
        lose_a_block,
        drop_a_table,
        alias_a_block,
        hold_a_block_twice,
        hold_the_null_block,
        give_back_what_is_not_counted,
        give_back_what_is_not_full,
        forget_content,
        lose_a_published_content,
        know_a_block_by_another_hash,
        put_a_child_elsewhere,
        hold_a_block_that_is_not_there,
        lose_a_group_s_block,
        name_a_group_without_blocks,
    ],
)
def test_a_broken_law_is_noticed(sabotage: Callable[[KVManager], None]) -> None:
    manager = KVManager(12, 4, eviction=TenantFair())
    for name, first in (("a", 1), ("b", 2)):
        request = make_request(name, [first] * 6)
        manager.allocate(request, manager.lookup_prefix(request), 6)
        request.num_computed_tokens = 6
        manager.publish(request)
    check(manager)
    sabotage(manager)
    with pytest.raises(AssertionError):
        check(manager)
