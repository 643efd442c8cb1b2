"""A trace of a journal's reports over some seconds, turned into events off the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.obs.explain.explanation import END_WORDS
from penstock.obs.explain.lives import Life, Phase
from penstock.obs.perfetto import PREEMPTED, WAITS, Event, Tracks
from penstock.types.stats import PlanNews, RequestStats, StepStats

MAX_ROWS = 1 << 18
"""Most rows kept, of about 128 bytes each: 33 MB. A report counts as its rows plus `_REPORT_ROWS`."""
_REPORT_ROWS = 8
_PHASES = {Phase.WAITING: WAITS, Phase.PREFILL: "prefill", Phase.DECODE: "decodes", Phase.PAUSED: PREEMPTED}


class Window:
    """Collects the journal's reports, under its lock. Read `events` and `is_cut` after the journal has detached it."""

    def __init__(self, now_ns: int, lives: Iterable[Life], *, max_rows: int = MAX_ROWS) -> None:
        """`lives`: the requests in flight."""
        self._began_ns, self._num_rows_left = now_ns, max_rows
        self._tracks = Tracks()
        self._noted: list[tuple[Callable[..., Iterator[Event]], tuple[Any, ...]]] = []
        for life in lives:
            self.come(life)

    @property
    def is_cut(self) -> bool:
        """Whether reports were dropped for lack of room."""
        return self._num_rows_left < 0

    def come(self, life: Life) -> None:
        about, at_ns = {"prompt": life.num_prompt_tokens}, max(self._began_ns, life.arrival_ns)
        self._note(self._tracks.come, life.request_id, at_ns, about, _PHASES[life.phase])

    def plan(self, news: PlanNews) -> None:
        for one in news.preemptions:
            self._note(self._tracks.move, one.request_id, PREEMPTED, news.planned_ns)

    def step(self, stats: StepStats) -> None:
        self._note(self._tracks.step, stats, num_rows=len(stats.rows))

    def finish(self, stats: RequestStats) -> None:
        about = {"output": stats.num_generated_tokens, "cached": stats.num_cached_tokens}
        reason = {"reason": END_WORDS[stats.finish_reason]}
        self._note(self._tracks.leave, stats.request_id, stats.ended_ns, reason | about)

    def _note(self, tell: Callable[..., Iterator[Event]], *arguments: Any, num_rows: int = 0) -> None:
        if self._num_rows_left >= 0:
            self._num_rows_left -= _REPORT_ROWS + num_rows
            if self._num_rows_left >= 0:
                self._noted.append((tell, arguments))

    def events(self, model: str) -> Iterator[Event]:
        yield from self._tracks.begin(model)
        for tell, arguments in self._noted:
            yield from tell(*arguments)
