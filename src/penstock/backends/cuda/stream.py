"""Owns a queue in which a device works, in order, and the marks in it. The executor has one for all its work, and another for
contents that it reads beside a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Until the device has come past it; without the GIL."""
        ...

    def ns_since(self, earlier: Mark) -> int:
        """By the device's clock, between two marks that it has come past."""
        ...


class Stream(Protocol):
    """All work that is queued inside of `entered` happens in order."""

    def entered(self) -> AbstractContextManager[None]: ...

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """All that is queued here from now on happens after the device has come past a mark of another stream."""
        ...

    def pinned(self, num_words: int) -> torch.Tensor:
        """Host memory that the device reads and writes by itself: int32 [num_words]."""
        ...


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, device: torch.device, *, spins: bool, goes_first: bool = False) -> None:
        """With `spins` whoever waits takes a whole CPU, and wakes some tens of microseconds earlier. Work on a stream that
        `goes_first` is begun before what other streams have not begun.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1 if goes_first else 0)
        self._spins = spins

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True, blocking=not self._spins)
        event.record(self._stream)
        return CudaMark(event)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark._event)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)


class CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, CudaMark)
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class HostStream:
    """The interpreter's stream: what is queued is done at once."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def mark(self) -> HostMark:
        return HostMark(time.monotonic_ns())

    def follow(self, mark: Mark) -> None:
        pass

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32)


class HostMark:
    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    def wait(self) -> None:
        pass

    def ns_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, HostMark)
        return self._at_ns - earlier._at_ns


def open_stream(device: torch.device, *, spins: bool, goes_first: bool = False) -> Stream:
    return CudaStream(device, spins=spins, goes_first=goes_first) if device.type == "cuda" else HostStream()
