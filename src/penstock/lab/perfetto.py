"""Converts a recording to a trace for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.lab.recording import Arrival, Departure, Recording, Restart, StepDone
from penstock.obs.perfetto import Event, Tracks, document
from penstock.types.errors import PenstockError
from penstock.types.plan import RowPlan
from penstock.types.stats import StepStats


def write_trace(recording: Recording, path: Path) -> int:
    """Write the trace, and return the number of its events. Raises PenstockError."""
    try:
        with path.open("w", encoding="utf-8") as file:
            num_pieces = sum(file.write(piece) > 0 for piece in document(_events(recording)))
            return num_pieces - 2  # the first and the last piece are brackets
    except OSError as error:
        raise PenstockError(f"{path} can't be written: {error}.", remedy="Name another file.") from None


def _events(recording: Recording) -> Iterator[Event]:
    tracks = Tracks()
    yield from tracks.begin(recording.header.model)
    for event in recording.events():
        match event:
            case Arrival() if not event.is_repeated:
                yield from tracks.come(str(event.id), event.arrival_ns, {"prompt": event.num_prompt_tokens})
            case StepDone():
                yield from tracks.step(_stats(event))
            case Departure():
                about = {"output": event.num_output_tokens, "cached": event.num_cached_tokens}
                yield from tracks.leave(str(event.id), event.at_ns, {"reason": event.reason.name.lower()} | about)
            case Restart():
                tracks.phases.clear()


def _stats(step: StepDone) -> StepStats:
    rows = [RowPlan(str(row.id), row.context_len, row.query_len, (), row.samples) for row in step.rows]
    counts = (step.num_running, step.num_waiting, 0, step.num_blocks_free, step.num_blocks_cached)
    times = (step.planned_ns, step.ended_ns)
    return StepStats(step.step_id, *times, *counts, parts_ns=step.parts_ns, planned_ns=step.planned_ns, rows=rows)
