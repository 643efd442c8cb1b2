"""How fast places become free: measured from the engine's steps and ends, for whoever announces a time. Kept by `door`.

The rate is (requests that ended) / (time), over the last `window_s` seconds, counting only the time during which others
waited or were turned away. That condition matters: on an idle server requests end as rarely as they arrive, which says
nothing about how fast it could work; and requests that start at once in a fresh batch say nothing about how fast places
become free. While a queue stands, each end frees the place into which one of the waiting moves.

    busy time  1 s buckets, a ring   |....|####|####|##..|    # = somebody waited
    ends                                    3    4    1       -> 8 requests in 2.5 s: 3.2 requests per second
"""

from __future__ import annotations

from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats

_BUCKET_NS = 1_000_000_000
_MIN_BUSY_S = 1.0
"""Shorter observations give no rate."""
_REFUSAL_NS = 1_000_000_000
"""How long one refusal says that others want in."""


class DrainMeter:
    """An observer of the engine (the one writer, on the engine thread); `note_refusal` belongs to the event loop.

    Readers on other threads read single integers and may see the newest step half counted.
    """

    def __init__(self, window_s: int = 30) -> None:
        if window_s < 1:
            raise ValueError(f"window_s ({window_s}) must be at least 1")
        self._window = _BusyWindow(window_s)
        self._was_busy = False
        self._last_ns: int | None = None
        self._refused_until_ns = 0

    def rate(self, now_ns: int) -> float:
        """Requests per second that left while others waited; 0 if nobody waited within the window."""
        num_ended, busy_s = self._window.totals(now_ns)
        return num_ended / busy_s if busy_s >= _MIN_BUSY_S else 0.0

    def ns_per_request(self, now_ns: int, forecast_ns: float, weight: int) -> int | None:
        """Time from one end to the next while others wait, on average; None if nothing is known.

        `forecast_ns`: what is to be expected by other signs, 0 if there are none. It counts like `weight` ends that were
        seen: rows that were filled together end together, and until then nothing ends.
        """
        num_ended, busy_s = self._window.totals(now_ns)
        if not forecast_ns:
            return int(busy_s * 1e9 / max(1, num_ended)) if busy_s >= _MIN_BUSY_S else None
        return int((busy_s * 1e9 + weight * forecast_ns) / (num_ended + weight))

    def note_refusal(self, now_ns: int) -> None:
        self._refused_until_ns = now_ns + _REFUSAL_NS

    def on_step(self, stats: StepStats) -> None:
        """Count the time since the last step as busy if requests were waiting then."""
        if self._was_busy and self._last_ns is not None:
            self._window.add_busy(self._last_ns, stats.ended_ns)
        self._last_ns = stats.ended_ns
        self._was_busy = stats.num_waiting > 0 or stats.ended_ns < self._refused_until_ns

    def on_finish(self, stats: RequestStats) -> None:
        """Count one that held a place; a refused request never did."""
        if self._was_busy and stats.finish_reason is not FinishReason.REJECTED:
            self._window.add_end(stats.ended_ns)


class _BusyWindow:
    """Busy time and ends of the last `num_buckets` seconds, in buckets of one second that are re-used in turn."""

    def __init__(self, num_buckets: int) -> None:
        self._epochs = [-1] * num_buckets
        """Which second (now_ns // 1e9) each bucket holds; -1 for none."""
        self._newest = -1
        """Of them."""
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
        if self._newest <= oldest:  # nobody has waited for long
            return 0, 0.0
        num_ended = busy_ns = 0
        for epoch, num_bucket_ended, bucket_busy_ns in zip(self._epochs, self._num_ended, self._busy_ns, strict=True):
            if epoch > oldest:
                num_ended += num_bucket_ended
                busy_ns += bucket_busy_ns
        return num_ended, busy_ns / 1e9

    def _bucket(self, epoch: int) -> int:
        idx = epoch % len(self._epochs)
        if self._epochs[idx] != epoch:
            self._busy_ns[idx] = self._num_ended[idx] = 0
            self._epochs[idx] = epoch
            self._newest = max(self._newest, epoch)
        return idx
