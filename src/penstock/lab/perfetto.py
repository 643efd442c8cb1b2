"""Converts a recording to a trace for https://ui.perfetto.dev or chrome://tracing: steps, host work, requests, load.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from penstock.lab.recording import Arrival, Departure, Recording, Restart, StepDone
from penstock.obs.recording import NOBODY
from penstock.types.errors import PenstockError

EXECUTOR, HOST = 1, 2


def write_trace(recording: Recording, path: Path) -> int:
    num_events = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for event in _events(recording):
                file.write((",\n" if num_events else "") + json.dumps(event, separators=(",", ":")))
                num_events += 1
            file.write("\n]}\n")
    except OSError as error:
        raise PenstockError(f"{path} can't be written: {error}.", remedy="Name another file.") from None
    return num_events


def _events(recording: Recording) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"penstock {recording.header.model}"}}
    for thread, name in ((EXECUTOR, "executor"), (HOST, "engine thread")):
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
    phases: dict[int, str] = {}
    for event in recording.events():
        match event:
            case Arrival() if not event.is_repeated:
                yield _phase(event.id, "request", "b", event.arrival_ns) | {"args": {"prompt": event.num_prompt_tokens}}
                yield _phase(event.id, "waits", "b", event.arrival_ns)
                phases[event.id] = "waits"
            case StepDone():
                yield from _step(event)
                yield from _move(event, phases)
            case Departure() if event.id in phases:
                yield _phase(event.id, phases.pop(event.id), "e", event.at_ns)
                args = {
                    "reason": event.reason.name.lower(),
                    "output": event.num_output_tokens,
                    "cached": event.num_cached_tokens,
                }
                yield _phase(event.id, "request", "e", event.at_ns) | {"args": args}
            case Restart():
                phases.clear()


def _step(step: StepDone) -> Iterator[dict[str, object]]:
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
    args["prefills"] = [[row.id, row.query_len, row.context_len] for row in prefills[:50]]
    yield _slice(EXECUTOR, name, step.ended_ns - execute_ns, execute_ns) | {"args": args}
    yield _slice(HOST, "schedule", step.planned_ns, parts.get("schedule", 0))
    at_ns = step.ended_ns
    for part in ("commit", "grammar", "output"):
        if part in parts:
            yield _slice(HOST, part, at_ns, parts[part])
            at_ns += parts[part]
    yield _counter("requests", step.ended_ns, running=step.num_running, waiting=step.num_waiting)
    yield _counter("KV blocks", step.ended_ns, free=step.num_blocks_free, cached=step.num_blocks_cached)


def _move(step: StepDone, phases: dict[int, str]) -> Iterator[dict[str, object]]:
    for row in step.rows:
        before = phases.get(row.id)
        if row.id == NOBODY or before is None:
            continue
        now = "decodes" if row.is_decode and before != "waits" else "prefill"
        if before != now:
            yield _phase(row.id, before, "e", step.planned_ns)
            yield _phase(row.id, now, "b", step.planned_ns)
            phases[row.id] = now


def _slice(thread: int, name: str, begin_ns: int, duration_ns: int) -> dict[str, object]:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": _us(begin_ns), "dur": _us(duration_ns)}


def _phase(number: int, name: str, kind: str, at_ns: int) -> dict[str, object]:
    return {"ph": kind, "pid": 1, "cat": "request", "id": number, "name": name, "ts": _us(at_ns)}


def _counter(name: str, at_ns: int, **values: int) -> dict[str, object]:
    return {"ph": "C", "pid": 1, "name": name, "ts": _us(at_ns), "args": values}


def _us(ns: int) -> float:
    return ns / 1000
