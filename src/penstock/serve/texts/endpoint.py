"""A face as an endpoint: reads a body, has the texts run, and writes their numbers. The faces differ in two functions.

`Answer` is what a face makes of a body: the call, and a function from the results to JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.calls.in_flight import InFlight
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import LARGE_SIZE, OffLoop
from penstock.deploy.running import RunningModel
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.http.checks import JsonEndpoint, entry_of
from penstock.serve.http.connection import unless_gone
from penstock.serve.texts.call import TextResults, TextsCall
from penstock.serve.texts.desk import Desk
from penstock.serve.texts.run import run
from penstock.serve.texts.tokens import work_size
from penstock.serve.texts.write import write_json

INLINE_MAX_ANSWER_SIZE = 1 << 16
"""Answers up to here, 25 vectors of 384, are written within a millisecond, so the event loop does it."""
ITEM_SIZE = 1024
"""A vector, or a label with its score, takes as long as so many bytes of numbers beside its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    call: TextsCall
    write: Callable[[TextResults], Any]
    """The answer as JSON data, in which NumPy's arrays may be. May run on any thread."""


Read = Callable[[Any, bytes, Scope], Answer]
"""A face: from the JSON value of a body, its bytes and the request's headers. Raises `ApiError`."""


def by_field(name: str, with_it: JsonEndpoint, without: JsonEndpoint, off_loop: OffLoop) -> JsonEndpoint:
    """An endpoint of a path that two APIs have: a body with this field belongs to the first."""

    async def choose(data: bytes, http: HttpRequest) -> Response:
        """Answer a body of either API."""
        is_there = f'"{name}"'.encode() in data and await off_loop.run(
            len(data), lambda: _has_field(data, name), limit=INLINE_MAX_BYTES
        )
        return await (with_it if is_there else without)(data, http)

    return choose


def _has_field(data: bytes, name: str) -> bool:
    value = load_json(data)
    return isinstance(value, dict) and name in value


class TextsEndpoint:
    """Answers the bodies of all faces. Has the desk of each model."""

    def __init__(self, deployment: Deployment, config: ServerConfig, in_flight: InFlight) -> None:
        self._off_loop = deployment.off_loop
        self._config = config
        self._in_flight = in_flight
        self._desks: WeakKeyDictionary[RunningModel, Desk] = WeakKeyDictionary()
        """The desk of each encoder that is loaded; it has no reference to that."""
        for running in deployment.running:
            if running.model.encoder is not None:
                self._desk(running)

    async def answer(self, data: bytes, http: HttpRequest, read: Read) -> Response:
        """Answer a body as `read` reads it. Raises `ApiError` and `Rejected`."""
        answer = await self._off_loop.run(len(data), lambda: read(load_json(data), data, http.scope), limit=INLINE_MAX_BYTES)
        return await self._respond(answer, http)

    def _desk(self, running: RunningModel) -> Desk:
        if running not in self._desks:
            self._desks[running] = Desk(
                running.bridge,
                running.metrics,
                isolates_tenants=self._in_flight.isolates_tenants(running),
                max_cache_bytes=self._config.embedding_cache_bytes,
            )
        return self._desks[running]

    async def _respond(self, answer: Answer, http: HttpRequest) -> Response:
        call = answer.call
        entry = entry_of(http.scope)
        if entry is not None:
            entry.model = call.running.name
        results = await unless_gone(http, run(call, self._desk(call.running), self._in_flight))
        if entry is not None:
            num_tokens = results.num_tokens
            entry.count_tokens = lambda: (num_tokens, 0)
        if _size(call, results) <= INLINE_MAX_ANSWER_SIZE:
            content = write_json(answer.write(results))
        else:  # its time is no memory: others' long texts are refused for the bytes that are in flight
            num_bytes = max(results.num_bytes, LARGE_SIZE + 1)
            content = await call.running.off_loop.finish(num_bytes, lambda: write_json(answer.write(results)))
        headers = {"Server-Timing": results.server_timing} if results.server_timing else None
        return Response(content, media_type="application/json", headers=headers)


def _size(call: TextsCall, results: TextResults) -> int:
    """The work of writing an answer, in bytes: its numbers, its items, and the texts, which some faces tell back."""
    encoder = call.running.model.encoder
    num_labels = 1 if encoder is None else max(1, len(encoder.labels))
    return results.num_bytes + ITEM_SIZE * num_labels * len(results.results) + work_size(call)
