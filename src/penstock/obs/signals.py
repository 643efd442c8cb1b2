"""The server's recent load, for autoscalers. Reported by the engine thread and admission, read by `/load` and `/metrics`.

Background requests do not count: they need no more servers.
Values are means over the last `WINDOW_S` seconds. A retry at the time that `Retry-After` gave does not count as an arrival.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock.replicas import DOWN_S, Replicas, num_needed
from penstock.types.request import FinishReason
from penstock.types.stats import EngineLoad, RequestStats, StepStats, WaitReason

WINDOW_S = 30
MIN_WINDOW_S = 5
"""Least time over which calls are averaged, so that one call at the start does not look like several per second."""
REPLICA_WINDOW_S = 5
"""Window of `desired_replicas`. It is shorter, since `Replicas` steadies the number."""
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedLoad:
    """Means of the load over the last `WINDOW_S` seconds, or since the start."""

    queue_depth: float = 0.0
    """Waiting requests."""
    utilisation: float = 0.0
    """The larger of the shares of rows and KV blocks in use; 1 while requests wait."""
    kv_headroom: float = 1.0
    """Share of the KV blocks not held by requests."""
    arrivals_per_s: float = 0.0
    """Calls, including refused ones. A retry at the time that `Retry-After` gave does not count."""
    drain_rate: float = 0.0
    """Requests per second that ended while others waited; 0 if none waited."""
    queue_delay_s: float = 0.0
    """Time to drain the queue; 0 if no request waited. If none ended, depth times seconds with a queue."""
    desired_replicas: int = 1


@dataclass(slots=True)
class _Second:
    """Sums of load times duration, over the observed part of one second."""

    epoch: int = -1
    num_ns: int = 0
    waiting_ns: int = 0
    used_ns: float = 0.0
    free_ns: float = 0.0
    num_calls: int = 0
    num_requests: int = 0
    """Requests of the calls."""


class Signals:
    """Measures the recent load. A thread-safe `Observer` of the engine."""

    def __init__(self, num_rows: int, drain_rate: Callable[[int], float]) -> None:
        """`num_rows` is the most requests that run at once.

        `drain_rate` takes the time now in ns. It returns how many requests per second ended while others waited, or 0.
        """
        self.num_rows = num_rows
        self._drain_rate = drain_rate
        self._lock = threading.Lock()
        self._replicas = Replicas(1)
        self._seconds = [_Second() for _ in range(WINDOW_S + 1)]
        self._at_ns: int | None = None
        self._num_waiting = 0
        self._num_there = 0
        """Waiting and running requests."""
        self._used = 0.0
        self._free = 1.0

    def on_step(self, stats: StepStats) -> None:
        with self._lock:
            self._advance(stats.ended_ns)
            num_held = stats.num_blocks_total - stats.num_blocks_free - stats.num_blocks_cached - stats.num_blocks_background
            self._set(stats.num_waiting, stats.num_running, num_held, stats.num_blocks_total)
            if stats.counts.waits_for is not WaitReason.NOTHING:
                self._used = 1.0

    def on_finish(self, stats: RequestStats) -> None:
        """Set the load to 0 when the last request ends: no step follows that would report it."""
        if stats.background:
            return
        with self._lock:
            if stats.finish_reason is not FinishReason.REJECTED:
                self._num_there = max(0, self._num_there - 1)
            if not self._num_there:
                self._advance(stats.ended_ns)
                self._set(0, 0, 0, 1)

    def on_call(self, now_ns: int, num_requests: int) -> None:
        """Count a client's call and its requests. Callers leave out retries at the time that `Retry-After` gave."""
        with self._lock:
            self._advance(now_ns)
            second = self._second(now_ns // _SECOND_NS)
            second.num_calls += 1
            second.num_requests += num_requests

    def read(self, load: EngineLoad, now_ns: int) -> SustainedLoad:
        with self._lock:
            self._advance(now_ns)
            num_held = load.num_blocks_held - load.num_blocks_background
            self._set(load.num_waiting, load.num_running, num_held, load.num_blocks_total)
            depth, used, free, calls, _ = self._means(now_ns // _SECOND_NS, WINDOW_S)
            drain_rate = self._drain_rate(now_ns)
            return SustainedLoad(
                queue_depth=depth,
                utilisation=used,
                kv_headroom=free,
                arrivals_per_s=calls,
                drain_rate=drain_rate,
                queue_delay_s=depth / drain_rate if drain_rate else depth * self._queued_s(now_ns // _SECOND_NS),
                desired_replicas=self._replicas.desired,
            )

    def _set(self, num_waiting: int, num_running: int, num_held: int, num_blocks: int) -> None:
        held = num_held / num_blocks if num_blocks else 0.0
        self._num_waiting = num_waiting
        self._num_there = num_waiting + num_running
        self._used = max(held, num_running / self.num_rows)
        self._free = 1.0 - held

    def _advance(self, now_ns: int) -> None:
        """Add the time since the last call to the sums of its seconds, with the load that was set last.

        Update the desired replicas after each full second. Time longer ago than `DOWN_S + WINDOW_S` is not added.
        """
        if self._at_ns is None:
            self._at_ns = now_ns
        at_ns = max(self._at_ns, now_ns - (DOWN_S + WINDOW_S) * _SECOND_NS)
        # When idle for long, every second is like the one before: skip to the last window.
        idle_epoch = at_ns // _SECOND_NS + REPLICA_WINDOW_S
        while at_ns < now_ns:
            epoch = at_ns // _SECOND_NS
            until_ns = min(now_ns, (epoch + 1) * _SECOND_NS)
            self._add(self._second(epoch), until_ns - at_ns)
            at_ns = until_ns
            if at_ns % _SECOND_NS == 0:
                self._replicas.add(epoch, self._num_needed(epoch, at_ns))
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

    def _means(self, epoch: int, num_seconds: int) -> tuple[float, float, float, float, float]:
        """Return mean (queue depth, utilisation, free share of the blocks, calls per second, requests per second) of the last
        `num_seconds` up to `epoch`."""
        seconds = [second for second in self._seconds if epoch - num_seconds < second.epoch <= epoch]
        num_ns = sum(second.num_ns for second in seconds)
        if not num_ns:
            return float(self._num_waiting), self._used, self._free, 0.0, 0.0
        call_ns = max(num_ns, MIN_WINDOW_S * _SECOND_NS)
        return (
            sum(second.waiting_ns for second in seconds) / num_ns,
            sum(second.used_ns for second in seconds) / num_ns,
            sum(second.free_ns for second in seconds) / num_ns,
            sum(second.num_calls for second in seconds) * _SECOND_NS / call_ns,
            sum(second.num_requests for second in seconds) * _SECOND_NS / call_ns,
        )

    def _queued_s(self, epoch: int) -> int:
        """Return in how many seconds of the window requests waited."""
        return sum(second.waiting_ns > 0 for second in self._seconds if epoch - WINDOW_S < second.epoch)

    def _num_needed(self, epoch: int, now_ns: int) -> int:
        """Return how many servers one second's load needs: its utilisation, or requests / drain rate if they need more."""
        depth, used, _, _, requests = self._means(epoch, REPLICA_WINDOW_S)
        drain_rate = self._drain_rate(now_ns)
        if not drain_rate:
            return max(1, num_needed(used, 0.0))
        return max(1, num_needed(max(used, requests / drain_rate), depth / drain_rate))
