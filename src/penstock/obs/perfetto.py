"""Turns steps and requests into a trace for https://ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.types.plan import RowPlan
from penstock.types.stats import HOST_PARTS, PLANNING_PARTS, StepStats

EXECUTOR, HOST = 1, 2
WAITS, PREEMPTED = "waits", "preempted"
"""Phases in which a request has no row."""
Event = dict[str, object]


def document(events: Iterable[Event]) -> Iterator[str]:
    """Yield a trace's JSON piece by piece, one for each event."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(events):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


class Tracks:
    """Turns reports, given in order, into trace events. Times are nanoseconds."""

    def __init__(self) -> None:
        self.phases: dict[str, str] = {}

    def begin(self, name: str) -> Iterator[Event]:
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"penstock {name}"}}
        for thread, of_thread in ((EXECUTOR, "executor"), (HOST, "engine thread")):
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": of_thread}}

    def come(self, name: str, at_ns: int, about: Mapping[str, Any], phase: str = WAITS) -> Iterator[Event]:
        yield _phase(name, "request", "b", at_ns) | {"args": about}
        yield _phase(name, phase, "b", at_ns)
        self.phases[name] = phase

    def step(self, stats: StepStats) -> Iterator[Event]:
        yield from _step(stats)
        for row in stats.rows:
            has_waited = self.phases.get(row.request_id) in (WAITS, PREEMPTED)
            yield from self.move(row.request_id, "prefill" if _is_prefill(row) or has_waited else "decodes", stats.planned_ns)

    def move(self, name: str, phase: str, at_ns: int) -> Iterator[Event]:
        """Yield events that begin another phase of a request."""
        if (before := self.phases.get(name)) is not None and before != phase:
            yield _phase(name, before, "e", at_ns)
            yield _phase(name, phase, "b", at_ns)
            self.phases[name] = phase

    def leave(self, name: str, at_ns: int, about: Mapping[str, Any]) -> Iterator[Event]:
        if (phase := self.phases.pop(name, None)) is not None:
            yield _phase(name, phase, "e", at_ns)
            yield _phase(name, "request", "e", at_ns) | {"args": about}


def _is_prefill(row: RowPlan) -> bool:
    """Return whether the row is a prefill: it computes more tokens than it samples."""
    return row.query_len > row.samples


def _step(stats: StepStats) -> Iterator[Event]:
    decodes, prefills = [row for row in stats.rows if not _is_prefill(row)], [row for row in stats.rows if _is_prefill(row)]
    guesses = sum(row.samples - 1 for row in decodes)
    words = (
        f"{len(decodes)} decodes" if decodes else "",
        f"{guesses} guesses" if guesses else "",
        f"{sum(row.query_len for row in prefills)} prompt tokens" if prefills else "",
    )
    parts, planned_ns, ended_ns = stats.parts_ns, stats.planned_ns, stats.ended_ns
    begin_ns = planned_ns + sum(parts.get(part, 0) for part in PLANNING_PARTS)
    execute_ns = min(parts.get("execute", ended_ns - begin_ns), ended_ns - planned_ns)
    args: dict[str, object] = {f"{part}_us": _us(ns) for part, ns in parts.items()}
    args |= {"step": stats.step_id, "prefills": [[row.request_id, row.query_len, row.context_len] for row in prefills[:50]]}
    yield _slice(EXECUTOR, " + ".join(filter(None, words)), ended_ns - execute_ns, execute_ns) | {"args": args}
    at_ns = planned_ns
    for part in HOST_PARTS:
        if part not in PLANNING_PARTS:
            at_ns = max(at_ns, ended_ns)
        if part in parts:
            yield _slice(HOST, part, at_ns, parts[part])
            at_ns += parts[part]
    yield _counter("requests", ended_ns, running=stats.num_running, waiting=stats.num_waiting)
    yield _counter("KV blocks", ended_ns, free=stats.num_blocks_free, cached=stats.num_blocks_cached)


def _slice(thread: int, name: str, begin_ns: int, duration_ns: int) -> Event:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": _us(begin_ns), "dur": _us(duration_ns)}


def _phase(request: str, name: str, kind: str, at_ns: int) -> Event:
    return {"ph": kind, "pid": 1, "cat": "request", "id": request, "name": name, "ts": _us(at_ns)}


def _counter(name: str, at_ns: int, **values: int) -> Event:
    return {"ph": "C", "pid": 1, "name": name, "ts": _us(at_ns), "args": values}


def _us(ns: int) -> float:
    return ns / 1000
