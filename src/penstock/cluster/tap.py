"""Collects what a replica's engine reports, for the front."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from penstock.engine.blocks import Blocks
from penstock.kv.changes import ChangeLog, Changes
from penstock.sched.scheduler import Scheduler
from penstock.types.stats import RequestStats, StepStats

_Item = TypeVar("_Item")


class Tap:
    """An `Observer` of successive engines. The engine's thread adds reports, and the event loop takes them."""

    def __init__(self) -> None:
        self._log = ChangeLog()
        self._steps: deque[StepStats] = deque()
        self._ended: deque[RequestStats] = deque()
        self._changes: deque[Changes | None] = deque()
        """Changes of the prefix cache. None marks a new engine with an empty cache."""
        self.blocks: Blocks | None = None
        """Blocks of the latest engine, or None before the first one."""
        self.held: set[int] = set()
        """Names of the blocks in the cache, as of the last `take`."""

    def watch(self, scheduler: Scheduler, blocks: Blocks) -> None:
        """Report the prefix cache of a new engine, which is not started yet."""
        self.blocks = blocks
        self._changes.append(None)
        self._log = scheduler.kv.prefix.index.log = ChangeLog()

    def on_step(self, stats: StepStats) -> None:
        self._steps.append(stats)
        self._changes.append(self._log.take())

    def on_finish(self, stats: RequestStats) -> None:
        self._ended.append(stats)

    def take(self) -> tuple[list[StepStats], list[RequestStats], Changes]:
        """Return what was reported since the last call: steps, ended requests, and changes of the cache."""
        steps = [_slim(stats) for stats in _drain(self._steps)]
        ended = list(_drain(self._ended))
        is_cached: dict[int, bool] = {}
        for changes in _drain(self._changes):
            added, removed = ((), tuple(self.held)) if changes is None else changes
            self.held.update(added)
            self.held.difference_update(removed)
            is_cached |= dict.fromkeys(added, True) | dict.fromkeys(removed, False)
        now_cached = [name for name, is_there in is_cached.items() if is_there]
        now_gone = [name for name, is_there in is_cached.items() if not is_there]
        return steps, ended, Changes(now_cached, now_gone)


def _drain(queue: deque[_Item]) -> Iterator[_Item]:
    while queue:
        yield queue.popleft()


def _slim(stats: StepStats) -> StepStats:
    prefills = stats.counts.prefills[:1]  # the front's metrics count steps with prompts apart
    return replace(stats, rows=(), void=(), counts=replace(stats.counts, prefills=prefills))
