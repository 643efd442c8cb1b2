"""The load as an autoscaler needs it: sustained, not of this moment. Told by the engine thread and the door, read by `/load`
and `/metrics`; decides nothing about requests.

Each state lasts from one step to the next, and is spread over seconds; the values are means over the last `WINDOW_S`. The load
in servers is

    max(utilisation, arrivals / drain rate) / TARGET + queue / (drain rate x CLEAR_S)

where a call that comes back as told is no new arrival. `Replicas` keeps it from swinging: up when every second of the last
`UP_S` asked for more, to the least of what they asked; down when no second of the last `DOWN_S` asked for as many, to the most
of what they asked. So a peak does not start a server and a pause does not end one. These are the two stabilisation windows of
Kubernetes' HorizontalPodAutoscaler (KEP-853), with its tolerance of a tenth.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.types.request import FinishReason
from penstock.types.stats import EngineLoad, RequestStats, StepStats, WaitReason

UP_S = 15
DOWN_S = 300
TOLERANCE = 0.1
"""A server too many or too few by less than this is none."""


class Replicas:
    def __init__(self) -> None:
        self.desired = 1
        self._asked: deque[tuple[int, int]] = deque()
        """(second, servers) from when on so many were asked for, over the last `DOWN_S`; ascending."""

    def add(self, second: int, load: float) -> None:
        """In that second the load was worth so many servers. Seconds ascend; those left out were like the one before."""
        asked = max(1, math.ceil(load - TOLERANCE))
        if not self._asked or self._asked[-1][1] != asked:
            self._asked.append((second, asked))
        while len(self._asked) > 1 and self._asked[1][0] <= second - DOWN_S:
            self._asked.popleft()
        most = max(num for _, num in self._asked)
        if most < self.desired:
            self.desired = most
        elif asked > self.desired:
            self.desired = max(self.desired, self._least_of_late(second))

    def _least_of_late(self, second: int) -> int:
        """The least of the last `UP_S`, if there are as many."""
        least: int | None = None
        for at, num in reversed(self._asked):
            least = num if least is None else min(least, num)
            if at <= second - UP_S + 1:
                return least
        return 1


WINDOW_S = 30
MIN_WINDOW_S = 5
"""Over which calls are counted at least: one call in the first moments is not several per second."""
REPLICA_WINDOW_S = 5
"""The window of `desired_replicas`: it has windows of its own behind."""
TARGET_UTILISATION = 0.8
CLEAR_S = 30.0
"""A queue that takes so long to drain is worth one more server."""
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedLoad:
    """Means over the last `WINDOW_S` seconds, or over as many as there were."""

    queue_depth: float = 0.0
    """Requests that waited."""
    utilisation: float = 0.0
    """Share of the rows or of the KV blocks that was used, whichever is larger; 1 while somebody waited."""
    kv_headroom: float = 1.0
    """Share of the KV blocks that nobody held."""
    arrivals_per_s: float = 0.0
    """Calls, refused ones among them; one that comes back as told counts once."""
    drain_rate: float = 0.0
    """Requests per second that ended while others waited; 0: nobody waited."""
    queue_delay_s: float = 0.0
    """Time that the queue takes to drain; 0 if nobody waited."""
    desired_replicas: int = 1


@dataclass(slots=True)
class _Second:
    epoch: int = -1
    num_ns: int = 0
    """Observed."""
    waiting_ns: int = 0
    """Integrals of the state over time."""
    used_ns: float = 0.0
    free_ns: float = 0.0
    num_calls: int = 0


class Signals:
    """An `Observer` of the engine. For any thread."""

    def __init__(self, num_rows: int, drain_rate: Callable[[int], float]) -> None:
        """`num_rows`: as many requests as may run at once. `drain_rate`: requests per second, at an instant."""
        self._num_rows = num_rows
        self._drain_rate = drain_rate
        self._lock = threading.Lock()
        self._replicas = Replicas()
        self._seconds = [_Second() for _ in range(WINDOW_S + 1)]
        self._at_ns: int | None = None
        self._num_waiting = 0
        self._num_there = 0
        """The number of requests that wait or run."""
        self._used = 0.0
        self._free = 1.0

    def on_step(self, stats: StepStats) -> None:
        with self._lock:
            self._advance(stats.ended_ns)
            num_held = stats.num_blocks_total - stats.num_blocks_free - stats.num_blocks_cached
            self._set(stats.num_waiting, stats.num_running, num_held, stats.num_blocks_total)
            if stats.counts.waits_for is not WaitReason.NOTHING:
                self._used = 1.0

    def on_finish(self, stats: RequestStats) -> None:
        """Only matters for the last to leave between two steps, cancelled perhaps: no step follows that would tell."""
        with self._lock:
            if stats.finish_reason is not FinishReason.REJECTED:
                self._num_there = max(0, self._num_there - 1)
            if not self._num_there:
                self._advance(stats.ended_ns)
                self._set(0, 0, 0, 1)

    def on_call(self, now_ns: int) -> None:
        """A call came to the door that was not told to come back now."""
        with self._lock:
            self._advance(now_ns)
            self._second(now_ns // _SECOND_NS).num_calls += 1

    def read(self, load: EngineLoad, now_ns: int) -> SustainedLoad:
        with self._lock:
            self._advance(now_ns)
            self._set(load.num_waiting, load.num_running, load.num_blocks_held, load.num_blocks_total)
            depth, used, free, calls = self._means(now_ns // _SECOND_NS, WINDOW_S)
            drain_rate = self._drain_rate(now_ns)
            return SustainedLoad(
                queue_depth=depth,
                utilisation=used,
                kv_headroom=free,
                arrivals_per_s=calls,
                drain_rate=drain_rate,
                queue_delay_s=depth / drain_rate if drain_rate else 0.0,
                desired_replicas=self._replicas.desired,
            )

    def _set(self, num_waiting: int, num_running: int, num_held: int, num_blocks: int) -> None:
        held = num_held / num_blocks if num_blocks else 0.0
        self._num_waiting = num_waiting
        self._num_there = num_waiting + num_running
        self._used = max(held, num_running / self._num_rows)
        self._free = 1.0 - held

    def _advance(self, now_ns: int) -> None:
        """The state has lasted until now. Time further back than every window is left out."""
        if self._at_ns is None:
            self._at_ns = now_ns
        at_ns = max(self._at_ns, now_ns - (DOWN_S + WINDOW_S) * _SECOND_NS)
        # In long idleness every second is like the one before, as soon as the windows hold nothing else: these are left out.
        idle_epoch = at_ns // _SECOND_NS + REPLICA_WINDOW_S
        while at_ns < now_ns:
            epoch = at_ns // _SECOND_NS
            until_ns = min(now_ns, (epoch + 1) * _SECOND_NS)
            self._add(self._second(epoch), until_ns - at_ns)
            at_ns = until_ns
            if at_ns % _SECOND_NS == 0:
                self._replicas.add(epoch, self._load_in_servers(epoch, at_ns))
                if not self._num_there and epoch >= idle_epoch:
                    at_ns = max(at_ns, (now_ns // _SECOND_NS - WINDOW_S) * _SECOND_NS)
        self._at_ns = max(self._at_ns, now_ns)

    def _add(self, second: _Second, num_ns: int) -> None:
        second.num_ns += num_ns
        second.waiting_ns += self._num_waiting * num_ns
        second.used_ns += self._used * num_ns
        second.free_ns += self._free * num_ns

    def _second(self, epoch: int) -> _Second:
        idx = epoch % len(self._seconds)
        if self._seconds[idx].epoch != epoch:
            self._seconds[idx] = _Second(epoch)
        return self._seconds[idx]

    def _means(self, epoch: int, num_seconds: int) -> tuple[float, float, float, float]:
        """(queue depth, utilisation, free share of the blocks, calls per second) of the seconds up to this one."""
        seconds = [second for second in self._seconds if epoch - num_seconds < second.epoch <= epoch]
        num_ns = sum(second.num_ns for second in seconds)
        if not num_ns:
            return float(self._num_waiting), self._used, self._free, 0.0
        return (
            sum(second.waiting_ns for second in seconds) / num_ns,
            sum(second.used_ns for second in seconds) / num_ns,
            sum(second.free_ns for second in seconds) / num_ns,
            sum(second.num_calls for second in seconds) * _SECOND_NS / max(num_ns, MIN_WINDOW_S * _SECOND_NS),
        )

    def _load_in_servers(self, epoch: int, now_ns: int) -> float:
        depth, used, _, calls = self._means(epoch, REPLICA_WINDOW_S)
        drain_rate = self._drain_rate(now_ns)
        if not drain_rate:
            return used / TARGET_UTILISATION
        return max(used, calls / drain_rate) / TARGET_UTILISATION + depth / (drain_rate * CLEAR_S)
