"""How long a thread works, for tests of work that must not grow out of hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRIES = 3


def thread_s(work: Callable[[], object]) -> float:
    """The least CPU time of this thread in three runs, in seconds.

    The least, as a virtual machine charges a thread for time that its host gave to others.
    """
    times_s = []
    with others_are_no_garbage():
        for _ in range(TRIES):
            begin_s = time.thread_time()
            work()
            times_s.append(time.thread_time() - begin_s)
    return min(times_s)


def growth(work: Callable[[int], object], size: int) -> float:
    """The CPU time of `work` for four times this size, over that for this size: some 4 if it is linear, 16 if quadratic."""
    return thread_s(lambda: work(4 * size)) / thread_s(lambda: work(size))


@contextmanager
def others_are_no_garbage() -> Iterator[None]:
    """The garbage collector does not look at what is there already: late in the suite that takes long."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
