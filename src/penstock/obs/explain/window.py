"""A trace of what a journal hears for some seconds: `GET /debug/trace`.

Reports are kept as they come, and turned into events when the window is closed, off the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.obs.explain.explanation import END_WORDS
from penstock.obs.explain.lives import Life, Phase
from penstock.obs.perfetto import PREEMPTED, WAITS, Event, Tracks
from penstock.types.stats import PlanNews, RequestStats, StepStats

MAX_ROWS = 1 << 18
"""Most rows of steps that are kept, of about 128 bytes: 33 MB. Other reports count as one."""
NOBODY = -1
_PHASES = {Phase.WAITING: WAITS, Phase.PREFILL: "prefill", Phase.DECODE: "decodes", Phase.PAUSED: PREEMPTED}


@dataclass(frozen=True, slots=True)
class _Row:
    id: int
    query_len: int
    context_len: int
    samples: int

    @property
    def is_decode(self) -> bool:
        return self.query_len <= self.samples


@dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    planned_ns: int
    ended_ns: int
    rows: Sequence[_Row]
    parts_ns: Mapping[str, int]
    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int


class Window:
    """For the journal, with its lock held. `events` and `is_cut` are for after the window was closed."""

    def __init__(self, now_ns: int, lives: Iterable[Life], *, max_rows: int = MAX_ROWS) -> None:
        """`lives`: those of the requests in flight."""
        self._began_ns = now_ns
        self._num_rows_left = max_rows
        self._numbers: dict[str, int] = {}
        self._tracks = Tracks()
        self._noted: list[tuple[Callable[..., Iterator[Event]], tuple[Any, ...]]] = []
        for life in lives:
            self._come(life, _PHASES.get(life.phase, WAITS))

    @property
    def is_cut(self) -> bool:
        """Whether there was more than there is room for."""
        return self._num_rows_left < 0

    def queued(self, life: Life) -> None:
        self._come(life, WAITS)

    def _come(self, life: Life, phase: str) -> None:
        number = self._numbers[life.request_id] = len(self._numbers)
        about = {"id": life.request_id, "prompt": life.num_prompt_tokens}
        self._note(1, self._tracks.come, number, max(self._began_ns, life.arrival_ns), about, phase)

    def planned(self, news: PlanNews) -> None:
        for one in news.preemptions:
            self._note(1, self._tracks.move, self._numbers.get(one.request_id, NOBODY), PREEMPTED, news.planned_ns)

    def step(self, stats: StepStats) -> None:
        self._note(1 + len(stats.rows), self._step, stats)

    def finish(self, stats: RequestStats) -> None:
        number = self._numbers.get(stats.request_id, NOBODY)
        about = {
            "reason": END_WORDS[stats.finish_reason],
            "output": stats.num_generated_tokens,
            "cached": stats.num_cached_tokens,
        }
        self._note(1, self._tracks.leave, number, stats.ended_ns, about)

    def _note(self, num_rows: int, tell: Callable[..., Iterator[Event]], *arguments: Any) -> None:
        if self._num_rows_left >= 0:
            self._num_rows_left -= num_rows
            if self._num_rows_left >= 0:
                self._noted.append((tell, arguments))

    def events(self, model: str) -> Iterator[Event]:
        yield from self._tracks.begin(model)
        for tell, arguments in self._noted:
            yield from tell(*arguments)

    def _step(self, stats: StepStats) -> Iterator[Event]:
        numbers = self._numbers
        rows = [_Row(numbers.get(row.request_id, NOBODY), row.query_len, row.context_len, row.samples) for row in stats.rows]
        counts = (stats.num_running, stats.num_waiting, stats.num_blocks_free, stats.num_blocks_cached)
        yield from self._tracks.step(_Step(stats.step_id, stats.planned_ns, stats.ended_ns, rows, stats.parts_ns, *counts))
