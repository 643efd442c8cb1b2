"""The queues of waiting requests: one for background requests, one for all others.

Every operation is O(log n) or better, amortised. A fair order gives each tenant a lane, so that charging a tenant changes one
key, not one for each of its requests.
"""

from __future__ import annotations

from bisect import insort_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from penstock.kv.prefix_cache import Awaited
from penstock.sched.policies.base import BucketView, Order, OrderKey
from penstock.sched.policies.orders import FirstComeFirstServed
from penstock.types.adapter import AdapterRef
from penstock.types.errors import PolicyError
from penstock.types.request import Request, RequestStatus

T = TypeVar("T")

MIN_TO_SWEEP = 64
"""Discarded entries, or idle accounts, below which a sweep does not pay."""


class KeyedHeap(Generic[T]):
    """A priority queue of items with keys; equal keys in order of arrival. Discarding an item is O(1)."""

    def __init__(self) -> None:
        self._entries: list[tuple[OrderKey, int, T]] = []
        self._numbers = count()
        self._dead: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries) - len(self._dead)

    def push(self, key: OrderKey, item: T) -> int:
        """Add an item. Return its number, for `discard`."""
        number = next(self._numbers)
        heappush(self._entries, (key, number, item))
        return number

    def peek(self) -> tuple[OrderKey, int, T] | None:
        """Return (key, number, item) with the smallest key, or None."""
        while self._entries and self._entries[0][1] in self._dead:
            self._dead.remove(heappop(self._entries)[1])
        return self._entries[0] if self._entries else None

    def rekey_first(self, key: OrderKey) -> None:
        _, number, item = self._entries[0]
        heapreplace(self._entries, (key, number, item))

    def discard(self, number: int) -> None:
        if self._entries[0][1] == number:
            heappop(self._entries)
            return
        self._dead.add(number)
        if len(self._dead) > max(MIN_TO_SWEEP, len(self._entries) // 2):
            self._entries = [entry for entry in self._entries if entry[1] not in self._dead]
            heapify(self._entries)
            self._dead.clear()


@dataclass(slots=True)
class Lane:
    name: str
    requests: KeyedHeap[Request] = field(default_factory=KeyedHeap)
    number: int = -1


class Lanes:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._lanes: dict[str, Lane] = {}
        self._by_key: KeyedHeap[Lane] = KeyedHeap()
        self._places: dict[str, tuple[Lane, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def push(self, request: Request, now_ns: int) -> None:
        self._order.queued(request)
        self._put(request, now_ns)

    def hand_over(self, request: Request, other: Lanes, now_ns: int) -> bool:
        """Move a request to another queue without `Order.unqueued` and `queued`. Return False if it is not in this one."""
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
        lane = self._first_lane()
        while lane is not None and (first := lane.requests.peek()) is not None:
            known_key, _, request = first
            key = self._order.key(request, now_ns)
            if key <= known_key:
                if key < known_key:
                    raise self._shrank("key", key, "the request waits")
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
                if key < known_key:
                    raise self._shrank("lane_key", key, "a request of the lane waits")
                return lane
            self._by_key.rekey_first(key)
        return None

    def _shrank(self, method: str, key: OrderKey, meanwhile: str) -> PolicyError:
        what = f"returned {key} from {method}, which is less than before, but must not shrink while {meanwhile}"
        return PolicyError("order", self._order, what)

    def discard(self, request: Request) -> bool:
        """Remove a request. Return False if it is not in this queue."""
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


class Bucket(Lanes):
    """Waiting requests that the gate may let join together."""

    def __init__(self, index: int, order: Order) -> None:
        super().__init__(order)
        self.index = index
        self._queued: OrderedDict[str, int] = OrderedDict()
        """Request id -> when it was queued: the texts of a long list are, piece by piece, long after they arrived. A plain
        dict would scan the entries deleted before its first."""

    def view(self) -> BucketView:
        return BucketView(self.index, len(self), next(iter(self._queued.values())))

    def _put(self, request: Request, now_ns: int) -> None:
        super()._put(request, now_ns)
        self._queued[request.request_id] = now_ns

    def _take(self, request: Request) -> bool:
        is_here = super()._take(request)
        if is_here:
            del self._queued[request.request_id]
        return is_here


@dataclass(frozen=True, slots=True)
class AwaitedAdapter:
    ref: AdapterRef
    kept_until_ns: int
    """Until then a row and blocks are kept for the request."""
    until_ns: int
    """The request is refused if the adapter has not come by then."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A request set aside until a prefix or an adapter is ready."""

    request: Request
    awaited: Awaited | AwaitedAdapter
    num_blocks: int
    """Blocks kept for the request, with a row: all that it does not share with its leader."""


class WaitingQueue:
    """Waiting requests of one class.

    Fresh ones, in buckets, need the gate to join. All others join without it:

    - preempted requests
    - ready requests: the gate started their batch, or the prefix or adapter for which they were set aside is ready
    - requests held back for their long prompts
    - requests set aside until a prefix or an adapter is ready
    """

    def __init__(self, order: Order, bucket_of: Callable[[Request], int]) -> None:
        self.order = order
        self._bucket_of = bucket_of
        self._buckets: dict[int, Bucket] = {}
        self.num_fresh = 0
        self._ready: OrderedDict[str, Request] = OrderedDict()
        self._held = Lanes(order)
        self.num_held_back = 0
        """A count, so that an empty queue costs a step no calls."""
        self._aside: dict[str, Follower] = {}
        self._preempted: list[tuple[OrderKey, Request]] = []

    def __len__(self) -> int:
        return self.num_fresh + self.num_held_back + len(self._preempted) + len(self._ready) + len(self._aside)

    @property
    def num_joining(self) -> int:
        """Number of requests that join without asking the gate."""
        return len(self._preempted) + len(self._ready) + self.num_held_back + len(self._aside)

    @property
    def preempted(self) -> Iterator[Request]:
        return (request for _, request in self._preempted)

    @property
    def aside(self) -> Collection[Follower]:
        """Requests set aside until a prefix or an adapter is ready, in the order of service."""
        return self._aside.values()

    @property
    def adapters_aside(self) -> Iterator[tuple[Follower, AwaitedAdapter]]:
        for follower in self._aside.values():
            if isinstance(follower.awaited, AwaitedAdapter):
                yield follower, follower.awaited

    def views(self) -> tuple[BucketView, ...]:
        """Return the buckets with waiting requests, in ascending order."""
        if not self.num_fresh:
            return ()
        return tuple([bucket.view() for bucket in self._buckets.values() if bucket])

    def push(self, request: Request, now_ns: int) -> None:
        index = self._bucket_of(request)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = Bucket(index, self.order)
            self._buckets = dict(sorted(self._buckets.items()))
        bucket.push(request, now_ns)
        self.num_fresh += 1

    def push_preempted(self, request: Request) -> None:
        """Queue a preempted request by the key that it had on arrival. Among equal keys the last pushed is first."""
        insort_left(self._preempted, (self.order.key(request, request.arrival_ns), request), key=_key)

    def start_batch(self, index: int, count: int, now_ns: int) -> list[Request]:
        """Let up to `count` requests of bucket `index` join, in the order of service. Return them."""
        batch: list[Request] = []
        while len(batch) < count and (request := self.peek(now_ns, index)) is not None:
            self.remove(request)
            batch.append(request)
        self._ready.update((request.request_id, request) for request in batch)
        return batch

    def hold_back(self, request: Request, now_ns: int) -> None:
        """Set a request with a long prompt aside while enough others run. Later requests pass it."""
        bucket = self._buckets.get(self._bucket_of(request))
        if bucket is not None and bucket.hand_over(request, self._held, now_ns):
            self.num_fresh -= 1
        else:
            self.remove(request)
            self._held.push(request, now_ns)
        self.num_held_back += 1

    def peek_preempted(self) -> Request | None:
        return self._preempted[0][1] if self._preempted else None

    def peek_held(self, now_ns: int) -> Request | None:
        return self._held.peek(now_ns) if self.num_held_back else None

    def peek_ready(self) -> Request | None:
        return next(iter(self._ready.values()), None)

    def step_aside(self, follower: Follower) -> None:
        self.remove(follower.request)
        self._aside[follower.request.request_id] = follower

    def resume(self, followers: Sequence[Follower]) -> None:
        """Put requests that were set aside back into the queue, before all requests that passed them."""
        for follower in reversed(followers):
            request = follower.request
            del self._aside[request.request_id]
            if request.status is RequestStatus.PREEMPTED:
                self.push_preempted(request)
            else:
                self._ready[request.request_id] = request
                self._ready.move_to_end(request.request_id, last=False)

    def peek(self, now_ns: int, index: int = 0) -> Request | None:
        bucket = self._buckets.get(index)
        return None if bucket is None else bucket.peek(now_ns)

    def remove(self, request: Request) -> None:
        bucket = self._buckets.get(self._bucket_of(request))
        if bucket is not None and bucket.discard(request):
            self.num_fresh -= 1
        elif self._held.discard(request):
            self.num_held_back -= 1
        elif not (self._ready.pop(request.request_id, None) or self._aside.pop(request.request_id, None)):
            del self._preempted[next(idx for idx, entry in enumerate(self._preempted) if entry[1] is request)]


class Queues:
    """The queue in the order of the policy, and that of background requests: first come, first served."""

    def __init__(self, order: Order, bucket_of: Callable[[Request], int]) -> None:
        self.waiting = WaitingQueue(order, bucket_of)
        self.background = WaitingQueue(FirstComeFirstServed(), bucket_of)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.background)

    @property
    def num_joining(self) -> int:
        return self.waiting.num_joining + self.background.num_joining

    def of(self, request: Request) -> WaitingQueue:
        return self.background if request.background else self.waiting

    @property
    def has_aside(self) -> bool:
        return bool(self.waiting.aside or self.background.aside)

    @property
    def adapters_aside(self) -> Iterator[tuple[Follower, AwaitedAdapter]]:
        yield from self.waiting.adapters_aside
        yield from self.background.adapters_aside


def _key(entry: tuple[OrderKey, Request]) -> OrderKey:
    return entry[0]
