"""Blocks on their way to another pool, or from one: nobody else takes them, and they are found once they are filled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.kv.block_table import root_hash
from penstock.kv.eviction import LowestPriorityFirst
from penstock.kv.exchange import Room, Span
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.kv.pool_map import BlockState, draw
from penstock.kv.tiers import Tier
from penstock.testing import make_request
from penstock.types.request import Request

BLOCK = 4


def span_of(request: Request, *, has_tail: bool = False) -> Span:
    return Span.of(root_hash(b""), request.prompt_token_ids[:-1], BLOCK, has_tail=has_tail)


def cached(manager: KVManager, request: Request) -> None:
    """Leave a prompt in the cache."""
    manager.allocate(request, manager.lookup_prefix(request), request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request)
    manager.free(request.request_id)


def publish(manager: KVManager, room: Room, span: Span, num_filled: int) -> None:
    manager.exchange.publish(room, span, num_filled, group=None)
    check(manager)


def num_found(manager: KVManager, request: Request) -> int:
    found = manager.lookup_prefix(request).num_tokens
    manager.free(request.request_id)
    return found


def test_what_is_offered_stays_until_it_is_given_back() -> None:
    manager, request = KVManager(9, BLOCK), make_request("a", 13)
    cached(manager, request)
    offered = manager.exchange.offer(replace(span_of(request), hashes=[*span_of(request).hashes, bytes(16)]))
    check(manager)
    assert len(offered) == 3
    cached(manager, make_request("b", range(100, 120)))  # takes all others
    assert num_found(manager, request) == 12
    manager.exchange.release(offered)
    check(manager)
    assert not manager.exchange.held
    cached(manager, make_request("c", range(200, 220)))
    assert num_found(manager, request) == 12, "it was used last"
    cached(manager, make_request("d", range(300, 320)))
    assert num_found(manager, request) < 12


def test_a_gap_ends_an_offer() -> None:
    manager, request = KVManager(9, BLOCK), make_request("a", 13)
    cached(manager, request)
    hashes = span_of(request).hashes
    assert manager.exchange.offer(Span(b"", [bytes(16), *hashes])) == []
    assert len(manager.exchange.offer(Span(b"", [*hashes[:2], bytes(16), hashes[2]]))) == 2


@pytest.mark.parametrize("num_filled", [0, 1, 4])
def test_what_was_filled_is_found(num_filled: int) -> None:
    manager, request = KVManager(20, BLOCK), make_request("a", 17)
    room = manager.exchange.make_room(span_of(request))
    check(manager)
    assert (len(room.found), len(room.block_ids)) == (0, 4)
    publish(manager, room, span_of(request), num_filled)
    assert num_found(manager, request) == num_filled * BLOCK
    assert (manager.pool.num_available, manager.pool.num_cached) == (19, num_filled)


def test_what_is_there_is_kept_and_not_filled_again() -> None:
    manager, short, long = KVManager(8, BLOCK), make_request("a", 9), make_request("b", 17)
    cached(manager, short)
    room = manager.exchange.make_room(span_of(long))
    assert (len(room.found), len(room.block_ids)) == (2, 2)
    manager.exchange.make_room(span_of(make_request("c", range(50, 70))))
    check(manager)
    publish(manager, room, span_of(long), 2)
    assert num_found(manager, long) == 16


def test_a_filled_block_goes_on_as_one_that_was_computed() -> None:
    """A hit may end inside it, since its tokens are known."""
    manager, request = KVManager(20, BLOCK), make_request("a", 17)
    room = manager.exchange.make_room(span_of(request))
    publish(manager, room, span_of(request), 4)
    assert num_found(manager, make_request("b", [*range(1, 11), 99, 98])) == 10


def test_half_of_what_is_free_is_left_to_running_requests() -> None:
    manager, request = KVManager(9, BLOCK), make_request("a", 41)
    room = manager.exchange.make_room(span_of(request))
    assert len(room.block_ids) == 4
    assert manager.pool.num_available == 4
    publish(manager, room, span_of(request), 4)
    assert num_found(manager, request) == 16


def test_what_came_by_another_way_meanwhile_stays() -> None:
    manager, request = KVManager(20, BLOCK), make_request("a", 17)
    room = manager.exchange.make_room(span_of(request))
    cached(manager, make_request("b", 17))
    publish(manager, room, span_of(request), 4)
    assert num_found(manager, request) == 16
    assert manager.pool.num_cached == 4


def test_what_is_lost_for_it_is_not_spilled() -> None:
    """Its block may be overwritten before the engine's thread could copy it."""
    tier = Tier(8)
    manager, request = KVManager(5, BLOCK, tier=tier), make_request("a", 17)
    cached(manager, make_request("b", range(50, 63)))
    room = manager.exchange.make_room(span_of(request))
    assert room.block_ids
    assert tier.take_spills() == []
    publish(manager, room, span_of(request), 0)


def test_a_tail_fills_a_part_of_a_block() -> None:
    manager, request = KVManager(20, BLOCK), make_request("a", 16)
    span = span_of(request, has_tail=True)
    room = manager.exchange.make_room(span)
    assert len(room.block_ids) == 4
    publish(manager, room, span, 4)
    assert num_found(manager, request) == 15
    offered = manager.exchange.offer(span)
    assert offered == room.block_ids
    manager.exchange.release(offered)
    other = span_of(make_request("b", [*range(1, 15), 99, 98]), has_tail=True)
    assert len(manager.exchange.offer(other)) == 3, "its tail goes on in another way"
    again = manager.exchange.make_room(span)
    assert (again.found, again.block_ids) == (room.block_ids, [])
    publish(manager, again, span, 0)
    assert span.after(4).num_blocks == span.first(0).num_blocks == 0
    assert [span.after(count).num_blocks for count in range(4)] == [4, 3, 2, 1]
    assert [span.first(count).num_blocks for count in range(5)] == [0, 1, 2, 3, 4]


def test_what_is_offered_stays_in_its_group() -> None:
    """Blocks without a group are evicted first."""
    manager = KVManager(9, BLOCK, eviction=LowestPriorityFirst())
    request = make_request("a", 13, priority=3)
    cached(manager, request)
    groups = manager.pool.groups()
    assert sum(map(len, groups.values())) == 3
    for _ in range(2):
        first, second = (manager.exchange.offer(span_of(request)) for _ in range(2))
        manager.exchange.release(first)
        check(manager)
        manager.exchange.release(second)
        check(manager)
    assert {name: set(ids) for name, ids in manager.pool.groups().items()} == {name: set(ids) for name, ids in groups.items()}


def test_no_room_is_made_while_a_copy_may_need_a_free_block() -> None:
    manager = KVManager(20, BLOCK)
    first, second = make_request("a", 11), make_request("b", [*range(1, 11), 99])
    manager.allocate(first, manager.lookup_prefix(first), 11)
    first.num_computed_tokens = 11
    manager.publish(first)
    manager.publish_tail(first)
    manager.free("a")
    manager.allocate(second, manager.lookup_prefix(second), 11)
    other = span_of(make_request("c", range(50, 70)))
    assert manager.exchange.make_room(other).block_ids == []
    assert manager.take_block_copies()
    assert manager.exchange.make_room(other).block_ids == [], "its executor has not made it yet"
    manager.copies_made()
    room = manager.exchange.make_room(other)
    assert len(room.block_ids) == 4
    publish(manager, room, other, 4)


def test_what_a_request_gives_back_meanwhile_goes_to_its_group() -> None:
    manager, request = KVManager(9, BLOCK, eviction=LowestPriorityFirst()), make_request("a", 13, priority=3)
    manager.allocate(request, manager.lookup_prefix(request), 13)
    request.num_computed_tokens = 13
    manager.publish(request)
    offered = manager.exchange.offer(span_of(request))
    manager.free("a")
    manager.exchange.release(offered)
    check(manager)
    assert sum(map(len, manager.pool.groups().values())) == 3


def test_the_map_of_the_pool_does_not_show_what_is_on_its_way_as_free() -> None:
    manager, request = KVManager(9, BLOCK), make_request("a", 13)
    cached(manager, request)
    offered = manager.exchange.offer(span_of(request))
    room = manager.exchange.make_room(span_of(make_request("b", range(100, 109))))
    states = draw(manager, ()).states
    assert states[BlockState.SHARED] == len(offered) + len(room.block_ids) == 5
    assert states[BlockState.FREE] + states[BlockState.CACHED] == manager.pool.num_available
