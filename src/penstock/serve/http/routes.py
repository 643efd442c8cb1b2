"""Endpoints that take a JSON body: the body is taken in, and errors become answers. `app` wraps them and routes to them.

FastAPI would parse a body of any size on the event loop, check it anew in its own way and answer with errors of its own shape.
So its routes take the request alone, and the bytes of the body are read here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope

from penstock.serve.errors import ApiError, from_rejected, invalid, not_an_object, unsupported_encoding
from penstock.serve.http.checks import headers_of
from penstock.types.errors import Rejected

JsonEndpoint = Callable[[bytes, HttpRequest], Awaitable[Response]]
"""Called with the body, which is not empty and says that it is JSON, and with the request, whose body was read."""


def takes_json(answer: JsonEndpoint) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
    """An endpoint for FastAPI, which reads the body and calls `answer`."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            # Not `http.body()`: FastAPI keeps this request, and would keep the body in it while the answer is streamed.
            data = await _read(http.scope, http.receive)
            return await answer(data, http)
        except (ApiError, Rejected) as error:
            return _refusal(error)

    return endpoint


def _refusal(error: ApiError | Rejected) -> Response:
    # A function that raises what it holds by name makes a circle, of everything that its callers hold.
    error.__traceback__ = None
    return (from_rejected(error) if isinstance(error, Rejected) else error).response()


async def _read(scope: Scope, receive: Receive) -> bytes:
    """The whole body, checked to be there and to be called JSON. Raises `ApiError`, also if the client leaves in the middle."""
    _refuse_encoding(scope)
    data = await _whole_body(receive)
    if not data or not _is_json(scope):
        raise not_an_object()
    return data


async def _whole_body(receive: Receive) -> bytes:
    message = await receive()
    data: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body"):
        return data  # nearly always
    pieces = [data]
    while message["type"] == "http.request" and message.get("more_body"):
        message = await receive()
        pieces.append(message.get("body", b""))
    if message["type"] != "http.request":
        raise invalid("The client left before the body was there.")
    return b"".join(pieces)


def _refuse_encoding(scope: Scope) -> None:
    """Raise a 415 that names `Content-Encoding`: bodies are taken as they are, so that their size is what was announced."""
    value = headers_of(scope).get(b"content-encoding")
    if value is None:
        return
    encoding = value.decode("latin-1")
    if encoding.strip().lower() not in ("", "identity"):
        raise unsupported_encoding(encoding)


def _is_json(scope: Scope) -> bool:
    """A body without a content type is read as JSON; one with another type is refused."""
    content_type = headers_of(scope).get(b"content-type")
    if not content_type or content_type == b"application/json":
        return True
    kind, _, subtype = content_type.decode("latin-1").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))
