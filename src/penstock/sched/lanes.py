"""Requests in the order of service: owns those that never ran, in lanes. Called by the waiting queue; never looks at memory.

Every operation is O(log n) or better, amortised; there is no work per waiting request and step. That is why requests
that share an account wait in a lane of their own: when the account grows, one key changes and not all of theirs.

    lanes by key      (tenant A: 310)  (tenant B: 350)
    within the lane   a3  a7  a8       b1  b9
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.sched.keyed_heap import KeyedHeap
from penstock.sched.policies.base import Order
from penstock.types.request import Request


@dataclass(slots=True)
class Lane:
    """Those who wait in one lane; somebody does."""

    name: str
    requests: KeyedHeap[Request] = field(default_factory=KeyedHeap)
    number: int = -1
    """By which the lane can be discarded."""


class Lanes:
    """A queue by an order's keys."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lanes: dict[str, Lane] = {}
        self._by_key: KeyedHeap[Lane] = KeyedHeap()
        self._places: dict[str, tuple[Lane, int]] = {}
        """request_id -> its lane, and its number there."""

    def __len__(self) -> int:
        return len(self._places)

    def push(self, request: Request, now_ns: int) -> None:
        self._order.queued(request)
        self._put(request, now_ns)

    def hand_over(self, request: Request, other: Lanes, now_ns: int) -> bool:
        """Let a request wait in another queue from now on, without a word to the order; False if it is not here."""
        if not self._take(request):
            return False
        other._put(request, now_ns)
        return True

    def _put(self, request: Request, now_ns: int) -> None:
        name = self._order.lane(request)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
            lane.number = self._by_key.push(self._order.lane_key(name), lane)
        self._places[request.request_id] = lane, lane.requests.push(self._order.key(request, now_ns), request)

    def peek(self, now_ns: int) -> Request | None:
        """Who is next; None if nobody waits."""
        lane = self._first_lane()
        while lane is not None and (first := lane.requests.peek()) is not None:
            known_key, _, request = first
            key = self._order.key(request, now_ns)
            if key <= known_key:
                return request
            lane.requests.rekey_first(key)
        return None

    def _first_lane(self) -> Lane | None:
        if len(self._lanes) < 2:  # most orders have one
            return next(iter(self._lanes.values()), None)
        while (first := self._by_key.peek()) is not None:
            known_key, _, lane = first
            key = self._order.lane_key(lane.name)
            if key <= known_key:
                return lane
            self._by_key.rekey_first(key)
        return None

    def discard(self, request: Request) -> bool:
        """Take a request out; False if it is not here."""
        if not self._take(request):
            return False
        self._order.unqueued(request)
        return True

    def _take(self, request: Request) -> bool:
        place = self._places.pop(request.request_id, None)
        if place is None:
            return False
        lane, number = place
        lane.requests.discard(number)
        if not len(lane.requests):
            del self._lanes[lane.name]
            self._by_key.discard(lane.number)
        return True
