"""Passes the events of an upstream's answer on, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.serve.errors import ApiError, internal
from penstock.serve.events import EventReader, Garbage
from penstock.serve.http.checks import identity_of, unless_gone
from penstock.serve.http.entries import entry_of
from penstock.serve.streams import DONE, STREAM_HEADERS, Writer, whole_lines
from penstock.serve.upstream_exchange import Exchange

_log = logging.getLogger(__name__)

KEEPALIVE_S = 10.0
END_TIMEOUT_S = 1.0
"""Time for the end of the body after the last event. Then the connection can be used again."""


class UpstreamStream(Response):
    def __init__(self, exchange: Exchange, response: httpx2.Response) -> None:
        super().__init__()
        self._exchange = exchange
        self._response = response
        self._pieces: AsyncIterator[bytes] = response.aiter_raw()
        self._reader = EventReader()
        self._events: list[bytes] = []
        """Events received but not yet sent to the client."""
        self._has_begun = self._is_done = False
        self._ended: dict[object, bool] = {}
        """Index of a choice -> whether it has said why it ended: some servers close without a last event."""
        self._usage: dict[str, Any] = {}
        """The last event with a usage."""
        self._held = contextlib.ExitStack()

    def hold(self, held: contextlib.ExitStack) -> None:
        """Close this at the end of the stream."""
        self._held = held

    async def begin(self) -> None:
        """Wait for the first event with data. Raises Garbage and the HTTP client's errors."""
        if not self._response.headers.get("content-type", "").startswith("text/event-stream"):
            raise Garbage("it sent no stream")
        while not self._has_begun:
            if not await self._read() and not self._has_begun:
                raise Garbage("it closed the connection without an answer")
        self._exchange.turn.works()

    async def _read(self) -> bool:
        """Wait for the next events, and return whether some may follow."""
        piece = await anext(self._pieces, None)
        if piece is None:
            return False
        for event in self._reader.push(piece):
            if event.data is not None:
                self._look(event.data)
            self._has_begun |= event.data is not None or event.is_done
            self._is_done = event.is_done
            if self._has_begun:
                self._events.append(event.raw)
            if self._is_done:
                break
        return not self._is_done

    def _look(self, data: dict[str, Any]) -> None:
        self._exchange.look(data)
        choices = data.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise Garbage("it sent an event without choices")
        for choice in choices:
            self._ended[str(choice.get("index"))] = bool(choice.get("finish_reason"))
        if data.get("usage"):
            self._usage = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(HttpRequest(scope, receive), send)
            if self._is_done:
                await self._finish()
        finally:
            try:
                await self._response.aclose()
            finally:
                self._held.close()

    async def _answer(self, http: HttpRequest, send: Send) -> None:
        headers = [(b"content-type", Writer.media_type), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            end = await unless_gone(http, self._pass_on(http, send))
        except ApiError:  # the client has left
            end = b""
        except Exception:
            request_id = identity_of(http.scope).request_id
            _log.exception("request %s failed while it was streamed", request_id)
            end = self._fail(internal(request_id), http)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _pass_on(self, http: HttpRequest, send: Send) -> bytes:
        """Send all events but for the last bytes, which are returned."""
        exchange = self._exchange
        try:
            async with asyncio.timeout(exchange.left_s(has_begun=True)):
                goes_on = not self._is_done
                while goes_on:
                    if data := self._rest():
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    goes_on = await self._read_patiently(send)
            if not self._is_done and not (self._ended and all(self._ended.values())):
                raise Garbage("it closed the connection before the end")
        except TimeoutError:
            return self._fail(exchange.was_late("The deadline passed while the answer was being streamed."), http)
        except (Garbage, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            return self._fail(exchange.failed(error), http)
        exchange.succeeded(self._usage)
        return self._rest() + (b"" if self._is_done else DONE)

    async def _read_patiently(self, send: Send) -> bool:
        """Do the same as `_read`, and send keepalives while it takes long."""
        reading = asyncio.ensure_future(self._read())
        try:
            while not (await asyncio.wait({reading}, timeout=KEEPALIVE_S))[0]:
                await send({"type": "http.response.body", "body": b": keepalive\n\n", "more_body": True})
            return reading.result()
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})

    async def _finish(self) -> None:
        """Read the end of the body."""
        with contextlib.suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError):
            async with asyncio.timeout(END_TIMEOUT_S):
                async for _ in self._pieces:
                    pass

    def _fail(self, error: ApiError, http: HttpRequest) -> bytes:
        """Note the error that ends the stream, and return the last bytes."""
        if (entry := entry_of(http.scope)) is not None:
            entry.error = error.code
        return self._rest() + b"data: %s\n\n" % error.body()

    def _rest(self) -> bytes:
        events, self._events = self._events, []
        return whole_lines(b"".join(events))
