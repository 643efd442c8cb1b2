"""The policies of an A/B test: each decides for the requests of both arms as the policy of the request's own arm would. Made by
`deploy`, where a test is on; without one, nothing of this exists.

Only decisions about one request at a time can be split so. All else is decided for a step, or for memory, that both arms share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count

from penstock.sched.policies.base import (
    AdmissionView,
    Order,
    OrderKey,
    Policies,
    Prediction,
    Predictor,
    Reserve,
    StepRecord,
)
from penstock.types.errors import ConfigError
from penstock.types.plan import RowPlan
from penstock.types.request import ARM_A, ARM_B, Request, RequestStatus

ORDERS_BY_ARM = ("fcfs", "sjf", "srpf", "edf")
"""Orders that `OrderByArm` can split: they have one lane, rank nobody and pause nobody."""


class ReserveByArm(Reserve):
    """Each request must find the memory that its arm's reserve asks for."""

    def __init__(self, a: Reserve, b: Reserve) -> None:
        self._a, self._b = a, b

    def required_blocks(self, view: AdmissionView) -> int:
        return (self._b if view.request.arm == ARM_B else self._a).required_blocks(view)


class PredictorByArm(Predictor):
    """Both predictors see all requests, so each knows what it would know alone; a request gets its arm's prediction."""

    def __init__(self, a: Predictor, b: Predictor) -> None:
        self._a, self._b = a, b

    def predict(self, request: Request) -> Prediction | None:
        a, b = self._a.predict(request), self._b.predict(request)
        return b if request.arm == ARM_B else a

    def ended(self, request: Request) -> None:
        self._a.ended(request)
        self._b.ended(request)


class OrderByArm(Order):
    """Which arm is next goes by the order of queueing; which of its requests, by the arm's own order.

    Each request brings its arm a slot, and whichever request of the arm leaves the queue takes the arm's first slot with it.
    So neither arm takes turns from the other, whatever their orders are: an arm under `fcfs` has the turns that it has alone.
    """

    def __init__(self, a: Order, b: Order) -> None:
        self._orders = {ARM_A: a, ARM_B: b}
        self._slots: dict[str, deque[int]] = {ARM_A: deque(), ARM_B: deque()}
        """Arm -> numbers of its slots, ascending; as many as its requests that wait."""
        self._numbers = count()

    def lane(self, request: Request) -> str:
        return request.arm or ARM_A

    def lane_key(self, lane: str) -> OrderKey:
        return (self._slots[lane][0],)

    def key(self, request: Request, now_ns: int) -> OrderKey:
        if request.status is RequestStatus.PREEMPTED:  # these stand in one line, and keys of two orders can't be compared
            return (request.arrival_ns,)
        return self._order_of(request).key(request, now_ns)

    def queued(self, request: Request) -> None:
        self._slots[self.lane(request)].append(next(self._numbers))
        self._order_of(request).queued(request)

    def unqueued(self, request: Request) -> None:
        self._slots[self.lane(request)].popleft()
        self._order_of(request).unqueued(request)

    def admitted(self, request: Request) -> None:
        self._order_of(request).admitted(request)

    def left(self, request: Request) -> None:
        self._order_of(request).left(request)

    def served(
        self,
        rows: Sequence[RowPlan],
        requests: Mapping[str, Request],
        last_step: StepRecord | None,
        num_decodes: int = 0,
    ) -> None:
        for order in self._orders.values():
            order.served(rows, requests, last_step, num_decodes)

    def _order_of(self, request: Request) -> Order:
        return self._orders[self.lane(request)]


def policies_by_arm(a: Policies, b: Policies) -> Policies:
    """The policies of `a`, with those that decide about one request, and differ in `b`, split by arm.

    Raises ConfigError for two orders of which one can't be split.
    """
    words = {seam: f"{words}; arm B: {b.words[seam]}" if b.words[seam] != words else words for seam, words in a.words.items()}

    def differs(seam: str) -> bool:
        return a.words[seam] != b.words[seam]

    for order in (a.order, b.order):
        if differs("order") and (order.has_ranks or type(order).lane is not Order.lane):
            raise ConfigError(
                f"The arms have the orders {a.words['order']} and {b.words['order']}, and {type(order).__name__} weighs the "
                "requests of both against each other.",
                remedy=f"Set --policy to one of {', '.join(ORDERS_BY_ARM)} in both arms.",
            )
    return Policies(
        gate=a.gate,
        order=OrderByArm(a.order, b.order) if differs("order") else a.order,
        budget=a.budget,
        reserve=ReserveByArm(a.reserve, b.reserve) if differs("reserve") else a.reserve,
        victim=a.victim,
        predictor=PredictorByArm(a.predictor, b.predictor) if differs("predictor") else a.predictor,
        eviction=a.eviction,
        words=words,
    )
