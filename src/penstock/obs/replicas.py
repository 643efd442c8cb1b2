"""How many servers like this one would carry the load: a pure value with hysteresis. Fed once per second by `signals`.

Up when every second of the last `UP_S` asked for more, to the least of what they asked; down when no second of the last
`DOWN_S` asked for as many, to the most of what they asked. So a peak does not start a server and a pause does not end one.
These are the two stabilisation windows of Kubernetes' HorizontalPodAutoscaler (KEP-853), with its tolerance of a tenth.
"""

from __future__ import annotations

import math
from collections import deque

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
        """Of the last `UP_S`, if there are as many."""
        least: int | None = None
        for at, num in reversed(self._asked):
            least = num if least is None else min(least, num)
            if at <= second - UP_S + 1:
                return least
        return 1
