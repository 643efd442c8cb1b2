"""Wakes the event loop from the engine thread, once per step, without letting go of the interpreter's lock.

asyncio's own `call_soon_threadsafe` writes to a socket, and gives up the lock for that moment. The loop's thread, just woken,
takes it and works off the whole step's tokens before the engine thread may go on: half a millisecond in which no kernel runs.
With the lock kept, the engine thread starts its next step first, and gives the lock away for as long as the kernels take.

Linux has the means (`eventfd`, and ctypes' `PyDLL`, whose calls keep the lock); elsewhere it is `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Waker(Protocol):
    def wake(self) -> None:
        """Have the function called soon on the loop, at least once after this call. For any thread.

        May raise RuntimeError if the loop is closed.
        """
        ...


def make_waker(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> Waker:
    """For one loop and one function."""
    with contextlib.suppress(AttributeError, ImportError, NotImplementedError, OSError):
        return EventWaker(loop, function)
    return LoopWaker(loop, function)


class LoopWaker:
    """By the loop's own means."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        self._loop = loop
        self._function = function

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._function)


class EventWaker:
    """By an `eventfd` that the loop watches until it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Raises AttributeError, ImportError, NotImplementedError or OSError where that can't be."""
        import ctypes

        self._write = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._function = function
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the last reference and no sooner: a late wake must not write to what gets the number next.
        weakref.finalize(self, os.close, self._event).atexit = False
        loop.add_reader(self._event, self._on_event)

    def wake(self) -> None:
        self._write(self._event, 1)

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._function()
