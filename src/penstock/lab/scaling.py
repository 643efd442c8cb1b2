"""Replicas of a simulation that start, drain and leave: as many as a `Scaler` wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.admission.door import DEFAULT_RETRY_AFTER_S
from penstock.clock import VirtualClock
from penstock.engine.core import LATE_DETAILS, next_limit
from penstock.lab.front import Front
from penstock.lab.traffic import Call, Traffic
from penstock.lab.workload import NS_PER_S
from penstock.sched.scaling import Scaler
from penstock.types.errors import ConfigError, Rejected, RejectReason
from penstock.types.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    least: int
    most: int
    start_ns: int = 30 * NS_PER_S
    """Time from the decision to start a replica until it takes requests."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or not self.most or self.start_ns < 0:
            raise ConfigError(
                f"Invalid scaling: {self.least} to {self.most} replicas with a start time of {self.start_ns / NS_PER_S:g} s.",
                remedy="Set 0 <= least <= most, a most of 1 or more, and a time of 0 or more.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    wanted: Sequence[tuple[int, int, str]]
    """(instant, wanted replicas, why) at the start and at each change."""
    replica_ns: int
    """Time of all replicas together, from the decision to start one until it has left."""


class Crew:
    """Starts and drains the replicas behind a front. Calls wait here while no replica takes requests."""

    def __init__(
        self, scaling: Scaling, front: Front, clock: VirtualClock, traffic: Traffic, *, max_held: int | None = None
    ) -> None:
        """`max_held`: most calls that wait here, or None without admission control."""
        self.draining: list[int] = []
        self._front, self._clock, self._traffic = front, clock, traffic
        self._start_ns, self._max_held = scaling.start_ns, max_held
        self._since_ns = dict.fromkeys(front.dispatcher.numbers, 0)
        """Number of a replica -> when it was started."""
        self._starting: deque[int] = deque()
        """When it was decided to start each of the replicas that are still starting."""
        self._left_ns = 0
        self._unsent: dict[str, Call] = {}
        self._scaler = Scaler(scaling.least, scaling.most, len(self._since_ns))
        self._wanted: list[tuple[int, int, str]] = []
        self._each_second()

    def hold(self, call: Call) -> bool:
        """If no replica takes requests, keep the call until one does or it is late. Return whether the call is kept.

        Raises `Rejected` if too many calls wait.
        """
        if self._serving():
            return False
        if self._max_held is not None and len(self._unsent) >= self._max_held:
            detail = f"the queue is full: at most {self._max_held} may wait for the first replica"
            raise Rejected(RejectReason.QUEUE_FULL, detail, retry_after_s=DEFAULT_RETRY_AFTER_S)
        request = call.request
        self._unsent[request.request_id] = call
        if (limit := next_limit(request)) is not None:
            at_ns, reason = limit
            self._traffic.agenda.note(max(at_ns, self._clock.now_ns()), lambda: self._end_late(call, request, reason))
        self._scale()
        return True

    def _end_late(self, call: Call, request: Request, reason: RejectReason) -> None:
        if call.request is request and self._unsent.pop(request.request_id, None) is not None:
            self._traffic.reject(call, Rejected(reason, LATE_DETAILS[reason]))

    def abort(self, call: Call) -> bool:
        """End the call if it is kept here. Return whether it was."""
        if self._unsent.pop(call.request.request_id, None) is None:
            return False
        self._traffic.end_cancelled(call)
        return True

    def outcome(self) -> Scaled:
        now_ns = self._clock.now_ns()
        there_ns = sum(now_ns - since_ns for since_ns in (*self._since_ns.values(), *self._starting))
        return Scaled(wanted=self._wanted, replica_ns=self._left_ns + there_ns)

    def _serving(self) -> list[int]:
        return [number for number in self._front.dispatcher.numbers if number not in self.draining]

    def _each_second(self) -> None:
        """Remove drained replicas, scale, and schedule the next call."""
        for number in [number for number in self.draining if not self._front.servers[number].num_in_flight]:
            self.draining.remove(number)
            self._front.dispatcher.leave(number)
            self._left_ns += self._clock.now_ns() - self._since_ns.pop(number)
        self._scale()
        self._traffic.agenda.note(self._clock.now_ns() + NS_PER_S, self._each_second)

    def _scale(self) -> None:
        """Start replicas, or drain those with the fewest requests. A draining replica is reused before a new one starts."""
        front, now_ns = self._front, self._clock.now_ns()
        wanted = self._scaler.decide(now_ns, front.dispatcher.group_load(front.loads, len(self._unsent)))
        if not self._wanted or self._wanted[-1][1] != wanted.num:
            self._wanted.append((now_ns, wanted.num, wanted.reason))
        serving = self._serving()
        for _ in range(wanted.num - len(serving) - len(self._starting)):
            if self.draining:
                self.draining.pop()
            else:
                self._starting.append(now_ns)
                self._traffic.agenda.note(now_ns + self._start_ns, self._begin)
        serving.sort(key=lambda number: (front.servers[number].num_in_flight, -number))
        self.draining += serving[: max(0, len(serving) - wanted.num)]
        self._send()

    def _begin(self) -> None:
        self._since_ns[self._front.join()] = self._starting.popleft()
        self._send()

    def _send(self) -> None:
        if self._unsent and self._serving():
            calls, self._unsent = self._unsent, {}
            for call in calls.values():
                self._traffic.submit(call)
