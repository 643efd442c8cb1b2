"""Queues of device work (CUDA streams), with marks to wait for. One is for steps, one to read KV blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Mark(Protocol):
    def wait(self) -> None:
        """Wait until the device has done the work before this mark. Releases the GIL."""
        ...

    def ns_since(self, earlier: Mark) -> int:
        """Return the device's nanoseconds from `earlier` to this mark. It must have passed both."""
        ...


class Stream(Protocol):
    """A queue of device work. Work issued inside `entered` runs in order."""

    def entered(self) -> AbstractContextManager[None]: ...

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Delay later work in this stream until the device passes another stream's mark."""
        ...

    def pinned(self, num_words: int) -> torch.Tensor:
        """Return pinned host memory, int32 [num_words]."""
        ...


class CudaStream:
    def __init__(self, device: torch.device, *, spins: bool, goes_first: bool = False) -> None:
        """Open a stream.

        `spins`: waiting keeps a CPU busy, but ends tens of microseconds earlier. `goes_first`: priority over other streams.
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
    """A stand-in for `CudaStream` without a GPU. Work runs at once."""

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
