"""Several observers in the place of one. Made by the composition root; never looks at what it passes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.types.request import Request
from penstock.types.stats import RequestStats, StepStats


class StepObserver(Protocol):
    """The engine's `Observer`, spelled here since this room knows the vocabulary only."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, stats: RequestStats) -> None: ...


class ObserverGroup:
    """Tells each of its observers, in order."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self._observers = tuple(observers)

    def on_step(self, stats: StepStats) -> None:
        for observer in self._observers:
            observer.on_step(stats)

    def on_finish(self, stats: RequestStats) -> None:
        for observer in self._observers:
            observer.on_finish(stats)


class Tokens(Protocol):
    """The engine's `TokenObserver`."""

    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None: ...

    def on_itl(self, request: Request, num_gaps: int, num_late: int) -> None: ...


class TokenObserverGroup:
    """Tells each of its token observers, in order."""

    def __init__(self, observers: Sequence[Tokens]) -> None:
        self._observers = tuple(observers)

    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        for observer in self._observers:
            observer.on_tokens(first, gaps_ns)

    def on_itl(self, request: Request, num_gaps: int, num_late: int) -> None:
        for observer in self._observers:
            observer.on_itl(request, num_gaps, num_late)
