"""Makes endpoints for encoders, which read a body, compute its texts and write the results.

An API provides a function from its body to an `Answer`: the call, and a function from the results to JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.calls.in_flight import InFlight, count_ttft
from penstock.deploy.off_loop import LARGE_SIZE
from penstock.deploy.running import RunningModel
from penstock.serve.answering import note_call
from penstock.serve.asking import Asked, Reader
from penstock.serve.bodies import Body, parse_body
from penstock.serve.http.checks import JsonEndpoint, unless_gone
from penstock.serve.http.entries import TokenCounts, entry_of, note_model
from penstock.serve.streams import counting_misses
from penstock.serve.texts.call import TextResults, TextsCall
from penstock.serve.texts.desk import Desk, run
from penstock.serve.texts.tokens import work_size
from penstock.serve.texts.write import write_json
from penstock.types.encoder import Task


@dataclass(frozen=True, slots=True)
class Answer:
    call: TextsCall
    write: Callable[[TextResults], Any]
    """Returns the answer as JSON data, perhaps with NumPy arrays. May run on any thread."""


_Body = TypeVar("_Body", bound=Body)
_Read = Callable[[_Body, Asked], Answer]
"""Reads the body of an API. Raises `ApiError`."""


class TextsEndpoint:
    """Makes endpoints for all APIs of encoders. They share one `Desk` per model."""

    def __init__(self, reader: Reader, in_flight: InFlight) -> None:
        self._reader = reader
        self._in_flight = in_flight
        self._desks: WeakKeyDictionary[RunningModel, Desk] = WeakKeyDictionary()
        """Desks of loaded encoders. Weak keys let an encoder be unloaded."""
        for running in reader.deployment.running:
            if running.model.encoder is not None:
                self.desk(running)

    def answers(self, body_type: type[_Body], read: _Read[_Body]) -> JsonEndpoint:
        """Return the endpoint of a route. `read` makes a call from its body."""

        @wraps(read)
        async def answer(data: bytes, http: HttpRequest) -> Response:
            def make() -> Answer:
                body = parse_body(data, body_type, self._reader.ignored)
                return read(body, Asked(self._reader, data, http.scope))

            made = await self._reader.parse(data, make, http.scope)
            return await self._respond(made, http)

        return answer

    def desk(self, running: RunningModel) -> Desk:
        if running not in self._desks:
            self._desks[running] = Desk(
                running.bridge,
                running.metrics,
                isolates_tenants=self._in_flight.isolates_tenants(running),
                max_cache_bytes=self._reader.config.embedding_cache_bytes,
            )
        return self._desks[running]

    async def _respond(self, answer: Answer, http: HttpRequest) -> Response:
        call = answer.call
        entry = entry_of(http.scope)
        note_model(http.scope, _operation(call), call.running.name)
        work = run(call, self.desk(call.running), self._in_flight, partial(note_call, http.scope, self._in_flight))
        with counting_misses(call.running, call.terms):
            results = await unless_gone(http, work)
        count_ttft(call.running, call.terms, results.first_ns - call.terms.arrival_ns)
        if entry is not None:
            num_tokens = results.num_tokens
            entry.count_tokens = lambda: TokenCounts(num_tokens, 0)
        if _size(call, results) <= 1 << 16:  # 25 vectors of 384 numbers: a millisecond on the event loop
            content = write_json(answer.write(results))
        else:  # the size counts only numbers here: it limits what other calls may send
            num_bytes = max(results.num_bytes, LARGE_SIZE + 1)
            content = await call.running.off_loop.finish(num_bytes, lambda: write_json(answer.write(results)))
        headers = {"Server-Timing": results.server_timing} if results.server_timing else None
        return Response(content, media_type="application/json", headers=headers)


def _operation(call: TextsCall) -> str:
    encoder = call.running.model.encoder
    return "embeddings" if encoder is None or encoder.task is Task.EMBED else encoder.task.value


def _size(call: TextsCall, results: TextResults) -> int:
    """Return the work of writing an answer in bytes: its numbers, labels and returned texts."""
    encoder = call.running.model.encoder
    num_labels = 1 if encoder is None else max(1, len(encoder.labels))
    # A vector, or a label with its score, takes as long as 1,024 bytes of numbers beside its own.
    return results.num_bytes + 1024 * num_labels * len(results.results) + work_size(call)
