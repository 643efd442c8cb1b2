"""Spares a server that fails, and those who wait for it: no more requests for a while, and few second attempts."""

from __future__ import annotations

from penstock.clock import Clock

MAX_FAILURES = 5
"""Failures in a row after which requests are refused."""
REST_NS = 10_000_000_000
"""How long they are. Then one is let through: the next one follows if it succeeds."""
RETRY_SHARE, MAX_RETRIES = 0.1, 10.0
"""Second attempts for each request, and the most that are saved up."""


class Breaker:
    """For one event loop. Each request that `wait_ns` lets through ends with `succeed`, `fail` or `forget`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_failures = 0
        self._open_until_ns: int | None = None
        self._is_probing = False
        self._num_retries = MAX_RETRIES

    @property
    def is_open(self) -> bool:
        return self._open_until_ns is not None

    def wait_ns(self) -> int:
        """Return 0 to let a request through, or how long to wait."""
        if self._open_until_ns is None:
            self._num_retries = min(MAX_RETRIES, self._num_retries + RETRY_SHARE)
            return 0
        rest_ns = self._open_until_ns - self._clock.now_ns()
        if rest_ns > 0 or self._is_probing:
            return max(rest_ns, 1_000_000_000)
        self._is_probing = True
        return 0

    def may_retry(self) -> bool:
        """Return whether a failed request may be sent again, and count that. Not if all of them fail."""
        if self._open_until_ns is not None or self._num_retries < 1:
            return False
        self._num_retries -= 1
        return True

    def succeed(self) -> None:
        self._num_failures, self._open_until_ns, self._is_probing = 0, None, False

    def fail(self) -> None:
        self._num_failures += 1
        if self._is_probing or self._num_failures >= MAX_FAILURES:
            self._open_until_ns, self._is_probing = self._clock.now_ns() + REST_NS, False

    def forget(self) -> None:
        """Count neither: the client left, or the request was wrong."""
        self._is_probing = False
