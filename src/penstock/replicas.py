"""How many servers a load needs: from the signals of one server (`obs/signals.py`), or of a group (`sched/scaling.py`)."""

from __future__ import annotations

import math
from collections import deque

UP_S = 15
DOWN_S = 300
TOLERANCE = 0.1
"""Ignore a load that exceeds a whole number of servers by less than this."""
TARGET_UTILISATION = 0.8
CLEAR_S = 30.0
"""A queue that takes one server this long needs one more server."""


def num_needed(utilisation: float, queue_s: float) -> int:
    """Return how many servers a load needs.

    `utilisation`: share of one server's time that the arriving work takes.
    `queue_s`: time that one server needs for the waiting work.
    """
    return math.ceil(utilisation / TARGET_UTILISATION + queue_s / CLEAR_S - TOLERANCE)


class Replicas:
    """The number of servers that the load needs, smoothed over time.

    It rises to the least number that any of the last `UP_S` seconds needed, and falls to the most that any of the last `DOWN_S`
    seconds needed. Windows and tolerance are those of Kubernetes' HorizontalPodAutoscaler (KEP-853).
    """

    def __init__(self, num: int) -> None:
        """`num`: how many there are, and were needed before the first second."""
        self.desired = num
        self._asked = deque([(-UP_S, num)])
        """(first second, servers needed from then on), ascending, for the last `DOWN_S`."""

    def add(self, second: int, asked: int) -> None:
        """Record how many servers one second's load needs, and update `desired`.

        Call this in the order of time. A second that is left out counts as one with the load of the second before it.
        """
        if self._asked[-1][1] != asked:
            self._asked.append((second, asked))
        while len(self._asked) > 1 and self._asked[1][0] <= second - DOWN_S:
            self._asked.popleft()
        most = max(num for _, num in self._asked)
        if most < self.desired:
            self.desired = most
        elif asked > self.desired:
            self.desired = max(self.desired, self._least_recent(second))

    def _least_recent(self, second: int) -> int:
        """Return the least number needed in the last `UP_S` seconds."""
        least = self._asked[-1][1]
        for at, num in reversed(self._asked):
            least = min(least, num)
            if at <= second - UP_S + 1:
                break
        return least
