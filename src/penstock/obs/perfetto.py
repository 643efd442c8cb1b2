"""Turns steps and requests into a trace for https://ui.perfetto.dev or chrome://tracing: steps, host work, requests, load.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

EXECUTOR, HOST = 1, 2
WAITS, PREEMPTED = "waits", "preempted"
"""Phases in which a request has no row."""
MAX_TOLD_PREFILLS = 50
Event = dict[str, object]


class Row(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def query_len(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def is_decode(self) -> bool: ...


class Step(Protocol):
    @property
    def step_id(self) -> int: ...

    @property
    def planned_ns(self) -> int: ...

    @property
    def ended_ns(self) -> int: ...

    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def parts_ns(self) -> Mapping[str, int]: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_blocks_free(self) -> int: ...

    @property
    def num_blocks_cached(self) -> int: ...


def document(events: Iterable[Event]) -> Iterator[str]:
    """Yield a trace's JSON in pieces, one for each event after the first piece."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(events):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


class Tracks:
    """The events of a trace, from what happens in order. Times are nanoseconds, and requests are numbers."""

    def __init__(self) -> None:
        self._phases: dict[int, str] = {}

    def begin(self, name: str) -> Iterator[Event]:
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"penstock {name}"}}
        for thread, of_thread in ((EXECUTOR, "executor"), (HOST, "engine thread")):
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": of_thread}}

    def come(self, number: int, at_ns: int, about: Mapping[str, Any], phase: str = WAITS) -> Iterator[Event]:
        """Yield the beginning of a request."""
        yield _phase(number, "request", "b", at_ns) | {"args": dict(about)}
        yield _phase(number, phase, "b", at_ns)
        self._phases[number] = phase

    def step(self, step: Step) -> Iterator[Event]:
        yield from _step(step)
        for row in step.rows:
            before = self._phases.get(row.id)
            if before is None:
                continue
            now = "decodes" if row.is_decode and before not in (WAITS, PREEMPTED) else "prefill"
            yield from self.move(row.id, now, step.planned_ns)

    def move(self, number: int, phase: str, at_ns: int) -> Iterator[Event]:
        """Yield the beginning of another phase of a request."""
        if (before := self._phases.get(number)) is not None and before != phase:
            yield _phase(number, before, "e", at_ns)
            yield _phase(number, phase, "b", at_ns)
            self._phases[number] = phase

    def leave(self, number: int, at_ns: int, about: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the end of a request."""
        if (phase := self._phases.pop(number, None)) is not None:
            yield _phase(number, phase, "e", at_ns)
            yield _phase(number, "request", "e", at_ns) | {"args": dict(about)}

    def forget(self) -> None:
        """Forget all requests: the engine was restarted."""
        self._phases.clear()


def _step(step: Step) -> Iterator[Event]:
    decodes = [row for row in step.rows if row.is_decode]
    guesses = sum(row.samples - 1 for row in decodes)
    prefills = [row for row in step.rows if not row.is_decode]
    name = " + ".join(
        words
        for words in (
            f"{len(decodes)} decodes" if decodes else "",
            f"{guesses} guesses" if guesses else "",
            f"{sum(row.query_len for row in prefills)} prompt tokens" if prefills else "",
        )
        if words
    )
    parts = step.parts_ns
    begin_ns = step.planned_ns + parts.get("schedule", 0)
    execute_ns = min(parts.get("execute", step.ended_ns - begin_ns), step.ended_ns - step.planned_ns)
    args: dict[str, object] = {f"{part}_us": _us(ns) for part, ns in parts.items()}
    args["step"] = step.step_id
    args["prefills"] = [[row.id, row.query_len, row.context_len] for row in prefills[:MAX_TOLD_PREFILLS]]
    yield _slice(EXECUTOR, name, step.ended_ns - execute_ns, execute_ns) | {"args": args}
    yield _slice(HOST, "schedule", step.planned_ns, parts.get("schedule", 0))
    at_ns = step.ended_ns
    for part in ("commit", "grammar", "output"):
        if part in parts:
            yield _slice(HOST, part, at_ns, parts[part])
            at_ns += parts[part]
    yield _counter("requests", step.ended_ns, running=step.num_running, waiting=step.num_waiting)
    yield _counter("KV blocks", step.ended_ns, free=step.num_blocks_free, cached=step.num_blocks_cached)


def _slice(thread: int, name: str, begin_ns: int, duration_ns: int) -> Event:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": _us(begin_ns), "dur": _us(duration_ns)}


def _phase(number: int, name: str, kind: str, at_ns: int) -> Event:
    return {"ph": kind, "pid": 1, "cat": "request", "id": number, "name": name, "ts": _us(at_ns)}


def _counter(name: str, at_ns: int, **values: int) -> Event:
    return {"ph": "C", "pid": 1, "name": name, "ts": _us(at_ns), "args": values}


def _us(ns: int) -> float:
    return ns / 1000
