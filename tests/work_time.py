"""How long a thread works, for tests of work that must not grow out of hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

TRIES = 3


def thread_s(work: Callable[[], object]) -> float:
    """The least CPU time of this thread in three runs, in seconds.

    Without the garbage collector, which looks at what the whole suite has left, for most of a second at its end. The least, as
    a virtual machine charges a thread for time that its host gave to others.
    """
    times_s = []
    is_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(TRIES):
            begin_s = time.thread_time()
            work()
            times_s.append(time.thread_time() - begin_s)
    finally:
        if is_on:
            gc.enable()
    return min(times_s)
