"""Blocks on their way to another pool, or from one: nobody else takes them, and they are found once they are filled."""

from __future__ import annotations

import pytest

from penstock.kv.block_table import extend_chain, root_hash
from penstock.kv.exchange import Room
from penstock.kv.invariants import check
from penstock.kv.manager import KVManager
from penstock.kv.tiers import Tier
from penstock.testing import make_request
from penstock.types.request import Request

BLOCK = 4


def chain(request: Request) -> tuple[list[bytes], list[bytes]]:
    return extend_chain(root_hash(b""), request.prompt_token_ids[:-1], BLOCK)


def cached(manager: KVManager, request: Request) -> None:
    """Leave a prompt in the cache."""
    manager.allocate(request, manager.lookup_prefix(request), request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request)
    manager.free(request.request_id)


def publish(manager: KVManager, room: Room, request: Request, num_filled: int) -> None:
    manager.exchange.publish(room, *chain(request), num_filled, parent=root_hash(b""), group=None)
    check(manager)


def num_found(manager: KVManager, request: Request) -> int:
    found = manager.lookup_prefix(request).num_tokens
    manager.free(request.request_id)
    return found


def test_what_is_offered_stays_until_it_is_given_back() -> None:
    manager, request = KVManager(9, BLOCK), make_request("a", 13)
    cached(manager, request)
    offered = manager.exchange.offer([*chain(request)[0], bytes(16)])
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
    hashes = chain(request)[0]
    assert manager.exchange.offer([bytes(16), *hashes]) == []
    assert len(manager.exchange.offer([*hashes[:2], bytes(16), hashes[2]])) == 2


@pytest.mark.parametrize("num_filled", [0, 1, 4])
def test_what_was_filled_is_found(num_filled: int) -> None:
    manager, request = KVManager(20, BLOCK), make_request("a", 17)
    room = manager.exchange.make_room(chain(request)[0])
    check(manager)
    assert (len(room.found), len(room.block_ids)) == (0, 4)
    publish(manager, room, request, num_filled)
    assert num_found(manager, request) == num_filled * BLOCK
    assert (manager.pool.num_available, manager.pool.num_cached) == (19, num_filled)


def test_what_is_there_is_kept_and_not_filled_again() -> None:
    manager, short, long = KVManager(8, BLOCK), make_request("a", 9), make_request("b", 17)
    cached(manager, short)
    room = manager.exchange.make_room(chain(long)[0])
    assert (len(room.found), len(room.block_ids)) == (2, 2)
    manager.exchange.make_room(chain(make_request("c", range(50, 70)))[0])
    check(manager)
    publish(manager, room, long, 2)
    assert num_found(manager, long) == 16


def test_a_filled_block_goes_on_as_one_that_was_computed() -> None:
    """A hit may end inside it, since its tokens are known."""
    manager, request = KVManager(20, BLOCK), make_request("a", 17)
    room = manager.exchange.make_room(chain(request)[0])
    publish(manager, room, request, 4)
    assert num_found(manager, make_request("b", [*range(1, 11), 99, 98])) == 10


def test_half_of_what_is_free_is_left_to_running_requests() -> None:
    manager, request = KVManager(9, BLOCK), make_request("a", 41)
    room = manager.exchange.make_room(chain(request)[0])
    assert len(room.block_ids) == 4
    assert manager.pool.num_available == 4
    publish(manager, room, request, 4)
    assert num_found(manager, request) == 16


def test_what_came_by_another_way_meanwhile_stays() -> None:
    manager, request = KVManager(20, BLOCK), make_request("a", 17)
    room = manager.exchange.make_room(chain(request)[0])
    cached(manager, make_request("b", 17))
    publish(manager, room, request, 4)
    assert num_found(manager, request) == 16
    assert manager.pool.num_cached == 4


def test_what_is_lost_for_it_is_not_spilled() -> None:
    """Its block may be overwritten before the engine's thread could copy it."""
    tier = Tier(8)
    manager, request = KVManager(5, BLOCK, tier=tier), make_request("a", 17)
    cached(manager, make_request("b", range(50, 63)))
    room = manager.exchange.make_room(chain(request)[0])
    assert room.block_ids
    assert tier.take_spills() == []
    publish(manager, room, request, 0)
