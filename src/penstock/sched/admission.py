"""Whether a new request may join the queue, decided before any costly work. Asked by the server; never queues anything itself.

A refusal carries an honest `Retry-After`: how long the queue takes to shrink enough, at the rate at which it was seen to
drain. The rate is (requests that ended) / (time), over the last `window_s` seconds, counting only the time during
which others were waiting. That condition matters: on an idle server requests end as rarely as they arrive, which says
nothing about how fast it could work; and requests that start at once in a fresh batch say nothing about how fast places
become free. While a queue stands, each end frees the place into which one of the waiting moves.

    busy time  1 s buckets, a ring   |....|####|####|##..|    # = somebody waited
    ends                                    3    4    1       -> 8 requests in 2.5 s: 3.2 requests per second
"""

from __future__ import annotations

from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0
DEFAULT_RETRY_AFTER_S = 10.0
"""Announced when the queue is full and nothing was measured yet, and the least that is announced while nothing ends."""
RESTART_RETRY_AFTER_S = 5.0
"""Announced while starting, draining or failed: about the time that a restart takes."""

_BUCKET_NS = 1_000_000_000
_MIN_BUSY_S = 1.0
"""Shorter observations give no rate."""

_UNAVAILABLE_DETAILS = {
    RejectReason.DRAINING: "the server is shutting down",
    RejectReason.UNAVAILABLE: "the engine is not running",
}


class Admission:
    """A bounded queue's gate, and the meter behind its `Retry-After`.

    It is an `Observer` of the engine (the one writer, on the engine thread); other threads call `decide` and
    `drain_rate`, which read single integers and may see the newest step half counted.
    """

    def __init__(self, max_queue: int, *, window_s: int = 30) -> None:
        """`max_queue` >= 1: requests that may wait at the same time."""
        if max_queue < 1 or window_s < 1:
            raise ValueError(f"max_queue ({max_queue}) and window_s ({window_s}) must be at least 1")
        self._max_queue = max_queue
        self._window = _BusyWindow(window_s)
        self._was_busy = False
        self._last_ns: int | None = None

    def decide(self, num_waiting: int, now_ns: int, *, refuses_with: RejectReason | None = None) -> Rejected | None:
        """None if a request may join `num_waiting` others, else the refusal.

        `refuses_with`: the reason, DRAINING or UNAVAILABLE, for which the engine takes no requests at all.
        """
        if refuses_with is not None:
            return Rejected(refuses_with, _UNAVAILABLE_DETAILS[refuses_with], retry_after_s=RESTART_RETRY_AFTER_S)
        if num_waiting < self._max_queue:
            return None
        detail = f"the queue is full: {num_waiting} requests are waiting, at most {self._max_queue} may"
        return Rejected(RejectReason.QUEUE_FULL, detail, retry_after_s=self.retry_after_s(num_waiting, now_ns))

    def retry_after_s(self, num_waiting: int, now_ns: int) -> float:
        """Seconds until one more than the excess over `max_queue` will have left, within [MIN, MAX]_RETRY_AFTER_S."""
        num_to_leave = num_waiting - self._max_queue + 1
        num_ended, busy_s = self._window.totals(now_ns)
        if busy_s < _MIN_BUSY_S:
            seconds = DEFAULT_RETRY_AFTER_S
        elif num_ended == 0:
            # Nothing ended in busy_s seconds: one more such spell for each is the least to expect.
            seconds = max(DEFAULT_RETRY_AFTER_S, num_to_leave * busy_s)
        else:
            seconds = num_to_leave * busy_s / num_ended
        return min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def drain_rate(self, now_ns: int) -> float:
        """Requests per second that left while others waited; 0 if nobody waited within the window."""
        num_ended, busy_s = self._window.totals(now_ns)
        return num_ended / busy_s if busy_s >= _MIN_BUSY_S else 0.0

    def on_step(self, stats: StepStats) -> None:
        """Count the time since the last step as busy if requests were waiting then."""
        self._advance(stats.ended_ns)
        self._was_busy = stats.num_waiting > 0

    def on_finish(self, stats: RequestStats) -> None:
        """Count one that held a place; a refused request never did."""
        if self._was_busy and stats.finish_reason is not FinishReason.REJECTED:
            self._window.add_end(stats.ended_ns)

    def _advance(self, now_ns: int) -> None:
        if self._was_busy and self._last_ns is not None:
            self._window.add_busy(self._last_ns, now_ns)
        self._last_ns = now_ns


class _BusyWindow:
    """Busy time and ends of the last `num_buckets` seconds, in buckets of one second that are re-used in turn."""

    def __init__(self, num_buckets: int) -> None:
        self._epochs = [-1] * num_buckets
        """Which second (now_ns // 1e9) each bucket holds; -1 for none."""
        self._busy_ns = [0] * num_buckets
        self._num_ended = [0] * num_buckets

    def add_end(self, at_ns: int) -> None:
        self._num_ended[self._bucket(at_ns // _BUCKET_NS)] += 1

    def add_busy(self, start_ns: int, end_ns: int) -> None:
        """Spread [start_ns, end_ns) over the buckets it touches."""
        oldest = end_ns // _BUCKET_NS - len(self._epochs) + 1
        start_ns = max(start_ns, oldest * _BUCKET_NS)
        while start_ns < end_ns:
            epoch = start_ns // _BUCKET_NS
            until_ns = min(end_ns, (epoch + 1) * _BUCKET_NS)
            self._busy_ns[self._bucket(epoch)] += until_ns - start_ns
            start_ns = until_ns

    def totals(self, now_ns: int) -> tuple[int, float]:
        """(requests that ended, busy seconds) within the window that ends at `now_ns`."""
        oldest = now_ns // _BUCKET_NS - len(self._epochs)
        live = [idx for idx, epoch in enumerate(self._epochs) if epoch > oldest]
        return sum(self._num_ended[idx] for idx in live), sum(self._busy_ns[idx] for idx in live) / 1e9

    def _bucket(self, epoch: int) -> int:
        idx = epoch % len(self._epochs)
        if self._epochs[idx] != epoch:
            self._busy_ns[idx] = self._num_ended[idx] = 0
            self._epochs[idx] = epoch
        return idx
