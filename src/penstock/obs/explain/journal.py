"""Remembers what happened to requests in flight and to the last that ended. The engine thread reports, the HTTP thread reads.

Reports are queued, and processed in batches or when the journal is read. The engine thread never waits for a reader.

A call may have many texts: only its last queued request is watched, so that the call pushes no other request out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.obs.explain.explanation import Explanation, explain
from penstock.obs.explain.lives import (
    MAX_STEPS,
    Gap,
    Life,
    Pause,
    Phase,
    Prefilled,
    Span,
    StepLog,
    StepNote,
    Ticket,
    Turn,
    Turns,
)
from penstock.obs.explain.window import Window
from penstock.obs.waits import WaitMark, Waits
from penstock.types.plan import RowPlan
from penstock.types.request import Request
from penstock.types.stats import Admission, PlanNews, Preemption, RequestStats, StepStats

MAX_NOTED = 64
"""Most reports queued, unless the journal is being read."""


class History(Protocol):
    """Explains requests in flight and the last that ended."""

    @property
    def max_ended(self) -> int: ...

    def explain_all(self, request_ids: Iterable[str], read_clock: Callable[[], int]) -> list[Explanation]:
        """Return the explanations of those requests that are remembered. It may wait for another process."""
        ...


class Journal:
    """A `RequestJournal` of the engine, from which requests are explained. Reading is thread-safe."""

    def __init__(self, max_ended: int) -> None:
        """`max_ended` requests are remembered after their end."""
        self.speaks_for_calls = False
        """Requests of a call (`parent_id`) are explained as one, under the call's id. Set before the engine starts."""
        self._coming: dict[str, tuple[Request, int]] = {}
        """Call id -> (its last request queued since the last `on_news`, when). Only the engine thread uses this and the next
        three fields."""
        self._watched: set[str] = set()
        """Calls with a watched request."""
        self._calls: dict[str, str] = {}
        """Id of a watched request -> its call."""
        self._unwatched: set[str] = set()
        """Ids of requests in flight that are not watched, since another of their call is."""
        self._lock = threading.Lock()
        self._window: Window | None = None
        self._noted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.max_ended = max_ended
        self._lives: dict[str, Life] = {}
        self._lives_by_call: dict[str, Life] = {}
        """Call id -> the life of its watched request."""
        self._ended: OrderedDict[str, Life] = OrderedDict()
        self._searches: defaultdict[str, list[Life]] = defaultdict(list)
        """The beams of each running search."""
        self._sitting_out: dict[str, tuple[Life, bool]] = {}
        """Requests that had no row in the last step, and whether a grammar was the reason since their last token."""
        self._last_pieces: list[tuple[Life, int]] = []
        """Requests with one prompt token left, and how often they were preempted. The next step computes it like a decode."""
        self._waits = Waits()
        self._turns = Turns(), Turns()
        """The queue of requests that are not background, and the background's."""
        self._log = StepLog()
        self._last_step = 0
        """The engine's number of the last step."""

    # For the engine thread.

    def on_queued(self, request: Request, now_ns: int) -> None:
        call_id = request.parent_id if self.speaks_for_calls else ""
        if not call_id:
            self._come(request, now_ns)
        elif call_id in self._watched:
            self._unwatched.add(request.request_id)
        else:
            earlier = self._coming.get(call_id)
            if earlier is not None:
                self._unwatched.add(earlier[0].request_id)
            self._coming[call_id] = request, now_ns

    def _watch(self) -> None:
        for call_id, (request, now_ns) in self._coming.items():
            self._watched.add(call_id)
            self._calls[request.request_id] = call_id
            self._come(request, now_ns, call_id)
        self._coming.clear()

    def _come(self, request: Request, now_ns: int, call_id: str = "") -> None:
        search_id = "" if request.sampling.beams is None else request.parent_id
        life = Life(request.request_id, request.arrival_ns, request.num_prompt_tokens, search_id)
        life.call_id = call_id
        life.is_background = request.background
        life.waits = request.waits
        self._note(self._queue, life, now_ns)

    def on_news(self, news: PlanNews) -> None:
        if self._coming:
            self._watch()
        self._note(self._plan, news)

    def on_step(self, stats: StepStats) -> None:
        self._note(self._step, stats)

    def on_finish(self, stats: RequestStats) -> None:
        if stats.request_id in self._unwatched:
            self._unwatched.remove(stats.request_id)
            return
        if self._coming:
            self._watch()
        if stats.request_id in self._calls:
            self._watched.remove(self._calls.pop(stats.request_id))
        self._note(self._finish, stats)

    def _note(self, write: Callable[..., None], *arguments: Any) -> None:
        self._noted.append((write, arguments))
        if len(self._noted) >= MAX_NOTED and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    # For any thread.

    def explain_all(self, request_ids: Iterable[str], read_clock: Callable[[], int]) -> list[Explanation]:
        """Return the explanations of those requests and calls that are remembered, all as of one instant."""
        with self._lock:
            self._settle()
            now_ns = read_clock()
            lives = [self._lives.get(name) or self._lives_by_call.get(name) or self._ended.get(name) for name in request_ids]
            return [self._explain(life, now_ns) for life in lives if life is not None]

    def _explain(self, life: Life, now_ns: int) -> Explanation:
        now = self._waits.mark(now_ns)
        turn = life.turn if life.began is not None or life.ticket is None or life.end else self._turn(life, life.ticket)
        decodes = Span()
        decodes.add(life.decodes)
        if life.end is None and life.first_step is not None:
            life.last_step = self._last_step
        if life.phase is Phase.DECODE:
            decodes.add(self._log.span(life.decodes_from, self._log.next))
        return explain(life, now, turn, decodes, self._waits.reason)

    @contextmanager
    def watched(self, read_clock: Callable[[], int]) -> Iterator[Window]:
        """Yield a window that is open until the block ends. One at a time."""
        with self._lock:
            self._settle()
            assert self._window is None, "one at a time"
            window = self._window = Window(read_clock(), self._lives.values())
        try:
            yield window
        finally:
            with self._lock:
                self._settle()
                self._window = None

    # With the lock held, on either thread.

    def _turn(self, life: Life, ticket: Ticket) -> Turn:
        """Return a request's turn. It is unknown for a request that stands for a call of several texts."""
        return Turn() if life.call_id else self._turns[life.is_background].turn_of(ticket)

    def _settle(self) -> None:
        noted = self._noted
        while noted:
            write, arguments = noted.popleft()
            write(*arguments)

    def _queue(self, life: Life, now_ns: int) -> None:
        self._lives[life.request_id] = life
        if life.call_id:
            self._lives_by_call[life.call_id] = life
        life.ticket = self._turns[life.is_background].come(life.arrival_ns)
        life.num_before = life.ticket.num_before
        if life.search_id:
            beams = self._searches[life.search_id]
            life.num_before -= sum(beam.arrival_ns <= life.arrival_ns for beam in beams)  # they start together
            beams.append(life)
        life.queued = self._waits.mark(now_ns)
        if self._window is not None:
            self._window.come(life)

    def _plan(self, news: PlanNews) -> None:
        now = self._waits.mark(news.planned_ns)
        for preemption in news.preemptions:
            self._pause(preemption, now)
        for admission in news.admissions:
            self._begin(admission, now)
        for request_id, reason in news.set_aside:
            life = self._lives.get(request_id)
            if life is not None and life.aside is None and life.began is None:
                life.aside, life.aside_for = now, reason
        self._waits.lack(news.waits_for, news.planned_ns)
        if self._window is not None:
            self._window.plan(news)

    def _step(self, stats: StepStats) -> None:
        if self._window is not None:
            self._window.step(stats)
        number = self._log.next
        if self._sitting_out or stats.counts.sat_out or stats.counts.rested:
            self._sit_out(stats, number)
        self._log.append(self._step_note(stats), stats.ended_ns)
        self._last_step = stats.step_id
        last_pieces, self._last_pieces = self._last_pieces, []
        for life, num_pauses in last_pieces:
            if life.phase is Phase.PREFILL and len(life.pauses) == num_pauses:
                self._prefill(life.request_id, life.num_target_tokens - 1, 1, stats, number)
        for row in stats.counts.prefills:
            if row.request_id in stats.void:
                continue
            self._prefill(row.request_id, row.context_len, row.query_len, stats, number)
        for request_id, num_forced in stats.counts.forced.items():
            if request_id in self._lives:
                self._lives[request_id].num_forced_tokens += num_forced
        for request_id, (num_guesses, num_accepted) in stats.counts.guesses.items():
            if request_id in self._lives:
                self._lives[request_id].num_guesses += num_guesses
                self._lives[request_id].num_accepted += num_accepted
        if self._log.is_full:
            self._forget_steps()

    def _sit_out(self, stats: StepStats, number: int) -> None:
        """Record requests that sat out the step, and those that no longer do. Call this before the step is in the log."""
        went_on, self._sitting_out = self._sitting_out, {}
        counts, last_ended_ns = stats.counts, self._log.last_ended_ns
        step_ns = stats.ended_ns - last_ended_ns
        for request_id in (*stats.counts.sat_out, *stats.counts.rested):
            known = went_on.pop(request_id, None)
            life, was_grammar = known or (self._lives.get(request_id), False)
            if life is None or life.phase is not Phase.DECODE:
                continue
            is_grammar = request_id in stats.counts.sat_out
            self._sitting_out[request_id] = life, was_grammar or is_grammar
            self._close_decodes(life, number)
            life.decodes_from = number + 1
            if is_grammar:
                life.num_sat_out_steps += 1
                life.sat_out_ns += step_ns
            elif life.is_background or counts.num_background_tokens == counts.num_tokens:
                life.rested_ns += step_ns
            else:  # the step was for prompts alone
                life.decodes.prompts_ns += step_ns
            if life.last_token_ns is None:
                life.last_token_ns = last_ended_ns
        for life, was_grammar in went_on.values():
            if life.phase is Phase.DECODE and life.last_token_ns is not None:
                gap_ns = stats.ended_ns - life.last_token_ns
                life.decodes.note_gap(Gap(gap_ns, self._step_note(stats), has_sat_out=was_grammar))
                life.last_token_ns = None

    def _step_note(self, stats: StepStats) -> StepNote:
        duration_ns = stats.ended_ns - stats.started_ns
        if not stats.counts.prefills:
            return StepNote(duration_ns, stats.counts.num_rows, waited_ns=stats.waited_ns)
        row = max(stats.counts.prefills, key=_query_len)
        life = self._lives.get(row.request_id)
        largest = Prefilled(row.query_len, life.num_prompt_tokens if life else 0)
        num_tokens = sum(map(_query_len, stats.counts.prefills))
        num_prefills = len(stats.counts.prefills)
        return StepNote(duration_ns, stats.counts.num_rows, num_tokens, num_prefills, largest, stats.waited_ns)

    def _begin(self, admission: Admission, now: WaitMark) -> None:
        life = self._lives.get(admission.request_id)
        if life is None:
            return
        life.phase = Phase.PREFILL
        life.num_target_tokens = admission.num_tokens
        if life.began is None and life.ticket is not None:
            turn = self._turns[life.is_background].admit(life.ticket, now)
            life.began, life.turn = now, turn if not life.call_id else life.turn
            life.num_hit_tokens, life.stop = admission.num_hit_tokens, admission.stop
        elif life.pauses and life.pauses[-1].ended is None:
            life.pauses[-1].ended, life.pauses[-1].num_found_tokens = now, admission.num_hit_tokens

    def _prefill(self, request_id: str, context_len: int, query_len: int, stats: StepStats, number: int) -> None:
        life = self._lives.get(request_id)
        if life is None or life.phase is not Phase.PREFILL:  # a decode that was repeated because its blocks were copied
            return
        if life.first_step is None:
            life.first_step = stats.step_id
        if life.first_token_ns is None:
            life.num_prefill_steps += 1
            life.num_prefill_tokens += query_len
        else:
            life.num_resume_steps += 1
            life.num_resume_tokens += query_len
        prefills = life.prefills
        prefills.num_steps += 1
        prefills.num_rows += stats.counts.num_rows
        if stats.counts.num_rows > prefills.max_rows:
            prefills.max_rows = stats.counts.num_rows
        prefills.waited_ns += stats.waited_ns
        num_behind = life.num_target_tokens - context_len - query_len
        if num_behind > 1:
            return
        if num_behind:
            self._last_pieces.append((life, len(life.pauses)))
            return
        # One beam computes the prompt, or what a preemption lost, and the others are forked from it.
        for member in self._searches[life.search_id] if life.search_id else (life,):
            if member.phase is Phase.PREFILL:
                self._begin_decodes(member, stats, number)

    def _begin_decodes(self, life: Life, stats: StepStats, number: int) -> None:
        life.phase, life.decodes_from = Phase.DECODE, number + 1
        life.num_first_tokens += 1
        if life.first_token_ns is None:
            life.first_token_ns = stats.ended_ns
        if life.last_token_ns is not None:
            gap_ns = stats.ended_ns - life.last_token_ns
            life.decodes.note_gap(Gap(gap_ns, self._step_note(stats), is_preemption=True))
            life.last_token_ns = None

    def _pause(self, preemption: Preemption, now: WaitMark) -> None:
        life = self._lives.get(preemption.request_id)
        if life is None:
            return
        self._close_decodes(life, self._log.next)
        if life.phase is Phase.DECODE and life.last_token_ns is None:
            life.last_token_ns = self._log.last_ended_ns
        life.phase = Phase.PAUSED
        life.pauses.append(Pause(preemption.reason, now, preemption.num_computed_tokens, preemption.is_swap))

    def _close_decodes(self, life: Life, stop: int) -> None:
        if life.phase is Phase.DECODE:
            life.decodes.add(self._log.span(life.decodes_from, stop))
            life.decodes_from = stop

    def _finish(self, stats: RequestStats) -> None:
        if self._window is not None:
            self._window.finish(stats)
        life = self._lives.get(stats.request_id)
        if life is None:  # refused, and never queued
            life = Life(stats.request_id, stats.arrival_ns, stats.num_prompt_tokens)
            life.waits = stats.waits
            self._keep(life, stats)
        else:
            self._end(life, stats, self._log.next)

    def _end(self, life: Life, stats: RequestStats, stop: int) -> None:
        if life.first_step is not None:
            life.last_step = self._last_step
        self._close_decodes(life, stop)
        if life.began is None and life.ticket is not None:
            life.turn = self._turn(life, life.ticket)
            self._turns[life.is_background].leave(life.ticket)
        self._lives.pop(life.request_id, None)
        if life.call_id:
            del self._lives_by_call[life.call_id]
        if life.search_id:
            beams = self._searches[life.search_id]
            beams.remove(life)
            if not beams:
                del self._searches[life.search_id]
        self._keep(life, stats)

    def _keep(self, life: Life, stats: RequestStats) -> None:
        if stats.background:  # else a job would push out those that people ask about
            return
        life.end = stats
        was_waiting = life.phase in (Phase.WAITING, Phase.PAUSED)
        life.left = self._waits.mark(stats.ended_ns) if was_waiting else WaitMark(stats.ended_ns, ())
        life.phase = Phase.ENDED
        name = life.call_id or life.request_id
        self._ended[name] = life
        self._ended.move_to_end(name)
        while len(self._ended) > self.max_ended:
            self._ended.popitem(last=False)

    def _forget_steps(self) -> None:
        """Add the older half of the steps to the requests' totals and drop them."""
        cut = self._log.first + MAX_STEPS // 2
        for life in self._lives.values():
            if life.decodes_from < cut:
                self._close_decodes(life, cut)
        self._log.forget_before(cut)


def _query_len(row: RowPlan) -> int:
    return row.query_len
