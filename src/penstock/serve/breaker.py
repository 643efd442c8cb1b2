"""A circuit breaker: after failures in a row, requests to a server are refused for a while. It also limits retries."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.clock import Clock

MAX_FAILURES = 5
"""Failures in a row after which requests are refused for `REST_NS`."""
REST_NS = 10_000_000_000
RETRY_SHARE, MAX_RETRIES = 0.1, 10.0
"""Second attempts that each request adds, and the most that are saved up."""


class Breaker:
    """Open after failures. After a rest, it lets one request at a time through, to see whether the server works again.

    For one event loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_failures = 0
        self._open_until_ns: int | None = None
        self._probe: Turn | None = None
        self._num_retries = MAX_RETRIES

    @property
    def is_open(self) -> bool:
        return self._open_until_ns is not None

    def begin(self) -> Turn | int:
        """Return a turn for a request, or how long to wait in ns."""
        turn = Turn(self)
        if self._open_until_ns is None:
            self._num_retries = min(MAX_RETRIES, self._num_retries + RETRY_SHARE)
            return turn
        rest_ns = self._open_until_ns - self._clock.now_ns()
        if rest_ns > 0 or self._probe is not None:
            return max(rest_ns, 1_000_000_000)
        self._probe = turn
        return turn

    def may_retry(self) -> bool:
        """Return whether a failed request may be sent again, and count it. An open breaker allows none."""
        if self.is_open or self._num_retries < 1:
            return False
        self._num_retries -= 1
        return True

    def _reset(self, num_failures: int) -> None:
        self._num_failures, self._open_until_ns, self._probe = num_failures, None, None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request that the breaker has let through. The caller closes it."""

    breaker: Breaker

    def works(self) -> None:
        """The server begins to answer. Close the breaker, but let the next failure reopen it."""
        if self is self.breaker._probe:
            self.breaker._reset(MAX_FAILURES - 1)

    def succeed(self) -> None:
        """The server has answered."""
        if self is self.breaker._probe or not self.breaker.is_open:
            self.breaker._reset(0)

    def fail(self) -> None:
        breaker = self.breaker
        if self is breaker._probe or not breaker.is_open:
            breaker._num_failures += 1
            if self is breaker._probe or breaker._num_failures >= MAX_FAILURES:
                breaker._open_until_ns, breaker._probe = breaker._clock.now_ns() + REST_NS, None

    def close(self) -> None:
        """The request has ended, well or not."""
        if self is self.breaker._probe:
            self.breaker._probe = None
