"""Converts a recording to a trace for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.lab.recording import Arrival, Departure, Recording, Restart, StepDone
from penstock.obs.perfetto import Event, Tracks, document
from penstock.types.errors import PenstockError


def write_trace(recording: Recording, path: Path) -> int:
    """Write the trace, and return the number of its events. Raises PenstockError."""
    num_pieces = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            for piece in document(_events(recording)):
                file.write(piece)
                num_pieces += 1
    except OSError as error:
        raise PenstockError(f"{path} can't be written: {error}.", remedy="Name another file.") from None
    return num_pieces - 2


def _events(recording: Recording) -> Iterator[Event]:
    tracks = Tracks()
    yield from tracks.begin(recording.header.model)
    for event in recording.events():
        match event:
            case Arrival() if not event.is_repeated:
                yield from tracks.come(event.id, event.arrival_ns, {"prompt": event.num_prompt_tokens})
            case StepDone():
                yield from tracks.step(event)
            case Departure():
                about = {
                    "reason": event.reason.name.lower(),
                    "output": event.num_output_tokens,
                    "cached": event.num_cached_tokens,
                }
                yield from tracks.leave(event.id, event.at_ns, about)
            case Restart():
                tracks.forget()
