"""A face as an endpoint: reads a body, has the texts run, and writes their numbers. The faces differ in two functions.

`Answer` is what a face makes of a body: the call, and a function from the results to JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.config import ServerConfig
from penstock.deploy.off_loop import OffLoop
from penstock.deploy.running import Deployment
from penstock.serve.http.checks import JsonEndpoint
from penstock.serve.http.connection import unless_gone
from penstock.serve.openai.in_flight import InFlight
from penstock.serve.openai.schemas import INLINE_MAX_BYTES, load_json
from penstock.serve.texts.call import TextResults, TextsCall
from penstock.serve.texts.desk import Desk
from penstock.serve.texts.run import run

INLINE_MAX_ANSWER_BYTES = 1 << 16
"""Numbers up to here, 42 vectors of 384, are written within a millisecond, so the event loop does it."""


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
        self._off_loop = deployment.default.off_loop
        self._in_flight = in_flight
        self._desks: dict[str, Desk] = {
            running.name: Desk(
                running,
                isolates_tenants=in_flight.isolates_tenants(running),
                max_cache_bytes=config.embedding_cache_bytes,
            )
            for running in deployment.models
            if running.model.encoder is not None
        }
        for desk in self._desks.values():
            desk.running.metrics.read_shared_texts = desk.count_shared

    async def answer(self, data: bytes, http: HttpRequest, read: Read) -> Response:
        """Answer a body as `read` reads it. Raises `ApiError` and `Rejected`."""
        answer = await self._off_loop.run(len(data), lambda: read(load_json(data), data, http.scope), limit=INLINE_MAX_BYTES)
        return await self._respond(answer, http)

    async def _respond(self, answer: Answer, http: HttpRequest) -> Response:
        call = answer.call
        results = await unless_gone(http, run(call, self._desks[call.running.name], self._in_flight))
        size = results.num_bytes
        content = (
            _json(answer, results)
            if size <= INLINE_MAX_ANSWER_BYTES
            else await call.running.off_loop.finish(size, lambda: _json(answer, results))
        )
        headers = {"Server-Timing": results.server_timing} if results.server_timing else None
        return Response(content, media_type="application/json", headers=headers)


def _json(answer: Answer, results: TextResults) -> bytes:
    return orjson.dumps(answer.write(results), option=orjson.OPT_SERIALIZE_NUMPY)
