"""The waiting queue: owns the requests that are not running, in the order of service. Called by the scheduler; never looks at
memory.

Preempted requests come before all others, by arrival, whatever the order policy: they were served before. Then those
who were called to a batch, as they were called. All others wait for the gate, each in its bucket.
Every operation is O(log n) or better, amortised; there is no work per waiting request and step.
"""

from __future__ import annotations

from bisect import insort_left
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from penstock.sched.policies.base import BucketView, Order, OrderKey
from penstock.types.request import Request

T = TypeVar("T")

MIN_DEAD_TO_SWEEP = 64
"""Below this many discarded entries a sweep isn't worth its loop."""


class KeyedHeap(Generic[T]):
    """A heap of items by key, equals in the order of arrival; items (compared by identity) may be discarded in O(1)."""

    def __init__(self) -> None:
        self._entries: list[tuple[OrderKey, int, T]] = []
        self._numbers = count()
        self._dead: set[int] = set()
        """Numbers of entries that were discarded and not yet removed."""

    def __len__(self) -> int:
        return len(self._entries) - len(self._dead)

    def push(self, key: OrderKey, item: T) -> int:
        """Returns a number by which the item can be discarded."""
        number = next(self._numbers)
        heappush(self._entries, (key, number, item))
        return number

    def peek(self) -> tuple[OrderKey, int, T] | None:
        """(key, number, item) of the smallest; None if empty."""
        while self._entries and self._entries[0][1] in self._dead:
            self._dead.remove(heappop(self._entries)[1])
        return self._entries[0] if self._entries else None

    def rekey_first(self, key: OrderKey) -> None:
        """Give the item that `peek` returned another key."""
        _, number, item = self._entries[0]
        heapreplace(self._entries, (key, number, item))

    def discard(self, number: int) -> None:
        """Drop an item that is still in the heap."""
        self._dead.add(number)
        if len(self._dead) > max(MIN_DEAD_TO_SWEEP, len(self._entries) // 2):
            self._entries = [entry for entry in self._entries if entry[1] not in self._dead]
            heapify(self._entries)
            self._dead.clear()


class Bucket:
    """Requests that wait for the gate and may join together: by the order of service, and by age."""

    def __init__(self, index: int, order: Order) -> None:
        self.index = index
        self._order = order
        self._heap: KeyedHeap[Request] = KeyedHeap()
        self._entries: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """request_id -> (number in the heap, arrival), as they were queued. A plain dict would look for its first entry among
        all that left before it."""

    def __len__(self) -> int:
        return len(self._entries)

    def view(self) -> BucketView:
        """Raises StopIteration if nobody waits."""
        _, oldest_ns = next(iter(self._entries.values()))
        return BucketView(self.index, len(self._entries), oldest_ns)

    def push(self, request: Request, now_ns: int) -> None:
        number = self._heap.push(self._order.key(request, now_ns), request)
        self._entries[request.request_id] = (number, request.arrival_ns)

    def peek(self, now_ns: int) -> Request | None:
        """Who is next; None if nobody waits."""
        while (first := self._heap.peek()) is not None:
            known_key, _, request = first
            key = self._order.key(request, now_ns)
            if key <= known_key:
                return request
            self._heap.rekey_first(key)
        return None

    def discard(self, request_id: str) -> bool:
        """Take a request out; False if it is not here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self._heap.discard(entry[0])
        return True


class WaitingQueue:
    """Requests that wait for their first admission, or for the next after a preemption."""

    def __init__(self, order: Order, bucket_of: Callable[[Request], int]) -> None:
        self._order = order
        self._bucket_of = bucket_of
        self._buckets: dict[int, Bucket] = {}
        """Ascending."""
        self._num_fresh = 0
        """In the buckets."""
        self._called: OrderedDict[str, Request] = OrderedDict()
        self._held: OrderedDict[str, Request] = OrderedDict()
        self._preempted: list[Request] = []

    def __len__(self) -> int:
        return self._num_fresh + self.num_joining

    @property
    def num_joining(self) -> int:
        """Who joins without asking the gate: the preempted, those who were called and those who were held back."""
        return len(self._preempted) + len(self._called) + len(self._held)

    @property
    def num_held_back(self) -> int:
        return len(self._held)

    def views(self) -> tuple[BucketView, ...]:
        """The buckets in which somebody waits, ascending."""
        if not self._num_fresh:
            return ()
        return tuple([bucket.view() for bucket in self._buckets.values() if bucket])

    def push(self, request: Request, now_ns: int) -> None:
        """A request that never ran."""
        index = self._bucket_of(request)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = Bucket(index, self._order)
            self._buckets = dict(sorted(self._buckets.items()))
        bucket.push(request, now_ns)
        self._num_fresh += 1

    def push_preempted(self, request: Request) -> None:
        """A request that ran. Of equal arrivals the last pushed goes first, since the last admitted is preempted first."""
        insort_left(self._preempted, request, key=_arrival)

    def call(self, index: int, count: int, now_ns: int) -> list[Request]:
        """The next `count` of a bucket, or as many as there are, shall join; in the order of service."""
        called: list[Request] = []
        while len(called) < count and (request := self.peek(now_ns, index)) is not None:
            self.remove(request)
            called.append(request)
        self._called.update((request.request_id, request) for request in called)
        return called

    def hold_back(self, request: Request) -> None:
        """Its turn had come, but it is a long prefill and there are enough: it lets others pass until it is asked for again."""
        self.remove(request)
        self._held[request.request_id] = request

    def peek_joining(self, *, with_held: bool = True) -> Request | None:
        """Who is next of those who don't ask the gate; None if there is none."""
        if self._preempted:
            return self._preempted[0]
        held = next(iter(self._held.values()), None) if with_held else None
        return held or next(iter(self._called.values()), None)

    def peek(self, now_ns: int, index: int = 0) -> Request | None:
        """Who is next in a bucket; None if nobody waits there."""
        bucket = self._buckets.get(index)
        return None if bucket is None else bucket.peek(now_ns)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        bucket = self._buckets.get(self._bucket_of(request))
        if bucket is not None and bucket.discard(request.request_id):
            self._num_fresh -= 1
        elif not (self._called.pop(request.request_id, None) or self._held.pop(request.request_id, None)):
            self._preempted.remove(request)


def _arrival(request: Request) -> int:
    return request.arrival_ns
