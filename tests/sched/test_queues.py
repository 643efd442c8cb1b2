"""The waiting queue and the heap beneath it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.policies.base import BucketView, Order, OrderKey
from penstock.sched.policies.fair import FairShares
from penstock.sched.policies.orders import FirstComeFirstServed, PriorityClasses
from penstock.sched.queue import KeyedHeap, WaitingQueue
from penstock.testing import make_request
from penstock.types.plan import RowPlan
from penstock.types.request import Request


def make_queue(order: Order | None = None, *, bucket_len: int = 1000) -> WaitingQueue:
    """Bucket k takes prompts of k * bucket_len tokens and more."""
    return WaitingQueue(order or FirstComeFirstServed(), lambda request: request.num_prompt_tokens // bucket_len)


def first(queue: WaitingQueue) -> Request | None:
    return queue.peek_preempted() or queue.peek_held(0) or queue.peek_ready() or queue.peek(0)


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (request := first(queue)) is not None:
        queue.remove(request)
        names.append(request.request_id)
    return names


class TestKeyedHeap:
    @given(keys=st.lists(st.integers(0, 5), max_size=300), data=st.data())
    def test_what_is_not_discarded_comes_out_in_order(self, keys: list[int], data: st.DataObject) -> None:
        heap: KeyedHeap[int] = KeyedHeap()
        numbers = [heap.push((key,), item) for item, key in enumerate(keys)]
        discarded = data.draw(st.sets(st.sampled_from(range(len(keys))))) if keys else set()
        for item in sorted(discarded):
            heap.discard(numbers[item])
        expected = sorted((key, item) for item, key in enumerate(keys) if item not in discarded)
        assert len(heap) == len(expected)
        got = []
        while (first := heap.peek()) is not None:
            got.append((first[0][0], first[2]))
            heap.discard(first[1])
        assert got == expected
        assert len(heap) == 0

    def test_discarded_items_do_not_pile_up(self) -> None:
        heap: KeyedHeap[bytearray] = KeyedHeap()
        heap.push((0,), bytearray())
        for _ in range(1000):
            heap.discard(heap.push((1,), bytearray()))
        assert len(heap) == 1
        assert len(heap._entries) < 200


class TestWaitingQueue:
    def test_first_come_first_served(self) -> None:
        queue = make_queue()
        for name, arrival_ns in (("c", 3), ("a", 1), ("b1", 2), ("b2", 2)):
            queue.push(make_request(name, arrival_ns=arrival_ns), 10)
        assert drain(queue) == ["a", "b1", "b2", "c"]

    def test_the_preempted_come_first_in_order_of_arrival(self) -> None:
        queue = make_queue()
        queue.push(make_request("new", arrival_ns=0), 0)
        for name, arrival_ns in (("late", 9), ("early", 5)):
            queue.push_preempted(make_request(name, arrival_ns=arrival_ns))
        assert len(queue) == 3
        assert drain(queue) == ["early", "late", "new"]

    def test_of_equal_arrivals_the_one_preempted_last_returns_first(self) -> None:
        queue = make_queue()
        for name in ("admitted last", "admitted first"):
            queue.push_preempted(make_request(name))
        assert drain(queue) == ["admitted first", "admitted last"]

    def test_a_request_can_leave_from_anywhere(self) -> None:
        queue = make_queue()
        requests = [make_request(f"r{idx}", arrival_ns=idx) for idx in range(4)]
        for request in requests[:3]:
            queue.push(request, 0)
        queue.push_preempted(requests[3])
        queue.remove(requests[1])
        queue.remove(requests[3])
        assert drain(queue) == ["r0", "r2"]

    def test_a_key_that_grew_is_asked_again_before_it_counts(self) -> None:
        """An order that keeps accounts: a tenant that was served meanwhile steps back."""

        class ByAccount(Order):
            def __init__(self) -> None:
                self.served_tokens = {"": 0}

            def key(self, request: Request, now_ns: int) -> OrderKey:
                return (self.served_tokens.get(request.request_id[0], 0), request.arrival_ns)

        order = ByAccount()
        queue = make_queue(order)
        for idx, name in enumerate(("a1", "a2", "b1", "b2")):
            queue.push(make_request(name, arrival_ns=idx), 0)
        order.served_tokens["a"] = 100
        assert drain(queue) == ["b1", "b2", "a1", "a2"]

    def test_a_bucket_tells_how_many_wait_and_since_when(self) -> None:
        queue = make_queue(bucket_len=10)
        for name, num_tokens, arrival_ns, queued_ns in (("long", 25, 3, 4), ("a", 3, 2, 5), ("b", 9, 1, 6)):
            queue.push(make_request(name, num_tokens, arrival_ns=arrival_ns), queued_ns)
        assert queue.views() == (BucketView(0, 2, oldest_ns=5), BucketView(2, 1, oldest_ns=4)), "a list's texts arrive early"
        first = queue.peek(0)
        assert first is not None
        assert first.request_id == "b", "who is next is the order's business, who is oldest is not"
        queue.remove(first)
        assert queue.views() == (BucketView(0, 1, oldest_ns=5), BucketView(2, 1, oldest_ns=4))
        assert len(queue) == 2

    def test_a_started_batch_joins_in_order_after_the_preempted(self) -> None:
        queue = make_queue(bucket_len=10)
        for idx, num_tokens in enumerate((3, 12, 4, 5)):
            queue.push(make_request(f"r{idx}", num_tokens, arrival_ns=idx), idx)
        assert [request.request_id for request in queue.start_batch(0, 2, 5)] == ["r0", "r2"]
        preempted = make_request("preempted", 15, arrival_ns=9)
        queue.push_preempted(preempted)
        assert (len(queue), queue.num_joining) == (5, 3)
        assert queue.views() == (BucketView(0, 1, oldest_ns=3), BucketView(1, 1, oldest_ns=1))
        assert queue.peek_preempted() is preempted
        assert drain(queue) == ["preempted", "r0", "r2", "r3"]

    def test_who_is_held_back_has_not_come_again(self) -> None:
        """Else its tenant would be lifted to those that were served while it waited."""
        order = FairShares(max_credit_tokens=0)
        queue = make_queue(order)
        served, patient = make_request("served", 8, tenant="served"), make_request("patient", 8, tenant="patient")
        queue.push(patient, 0)
        queue.push(served, 0)
        queue.remove(served)
        order.admitted(served)
        served.num_inflight_tokens = 8
        order.served([RowPlan("served", 0, 8, (), True)], {"served": served}, None)
        queue.push(make_request("more", 8, tenant="served", arrival_ns=1), 1)
        accounts = order._accounts
        before = accounts["patient"].counter
        queue.hold_back(patient, 1)
        assert accounts["patient"].counter == before < accounts["served"].counter
        assert drain(queue) == ["patient", "more"]

    def test_the_held_back_join_in_the_order_of_service(self) -> None:
        queue = make_queue(PriorityClasses())
        for name, priority in (("low", 2), ("high", 0), ("middle", 1)):
            request = make_request(name, priority=priority)
            queue.push(request, 0)
            queue.hold_back(request, 0)
        assert (queue.num_held_back, queue.peek_preempted(), queue.peek_ready()) == (3, None, None)
        assert drain(queue) == ["high", "middle", "low"]

    def test_a_ready_request_can_leave(self) -> None:
        queue = make_queue()
        requests = [make_request(f"r{idx}", arrival_ns=idx) for idx in range(3)]
        for request in requests:
            queue.push(request, 5)
        queue.start_batch(0, 9, 5)
        queue.remove(requests[1])
        assert queue.views() == ()
        assert drain(queue) == ["r0", "r2"]

    def test_a_lane_whose_account_grew_steps_back_with_all_who_wait_in_it(self) -> None:
        class ByLane(Order):
            def __init__(self) -> None:
                self.served_tokens = {"a": 0, "b": 50}

            def key(self, request: Request, now_ns: int) -> OrderKey:
                return (request.arrival_ns,)

            def lane(self, request: Request) -> str:
                return request.tenant

            def lane_key(self, lane: str) -> OrderKey:
                return (self.served_tokens[lane],)

        order = ByLane()
        queue = make_queue(order)
        for idx, name in enumerate(("b1", "a1", "a2", "b2", "a3")):
            queue.push(make_request(name, arrival_ns=idx, tenant=name[0]), 0)
        first = queue.peek(0)
        assert first is not None
        assert first.request_id == "a1"
        queue.remove(first)
        order.served_tokens["a"] = 100
        assert drain(queue) == ["b1", "b2", "a2", "a3"]
        assert len(queue) == 0
