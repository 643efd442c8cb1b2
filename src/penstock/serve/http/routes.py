"""Answers the routes that take a JSON body: takes the body in and calls the endpoint. The innermost layer of the app.

FastAPI has the same routes in its table, writes the OpenAPI document from them and answers all others. It would find out anew
for every request what an endpoint is called with, which costs several times what the endpoints do themselves; here every one
is called with the body and the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.http.checks import headers_of
from penstock.serve.openai.errors import ApiError, from_rejected, invalid, not_an_object, unsupported_encoding
from penstock.types.errors import Rejected

JsonEndpoint = Callable[[bytes, HttpRequest], Awaitable[Response]]
"""Called with the body, which is not empty and says that it is JSON, and with the request, whose body was read."""


class JsonRoutesLayer:
    def __init__(self, app: ASGIApp, routes: Mapping[str, JsonEndpoint]) -> None:
        """`routes`: endpoints by their paths; the method is POST."""
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await self._answer(scope, receive, endpoint)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, endpoint: JsonEndpoint) -> Response:
        """A function of its own, so that nothing holds the body while the answer is streamed."""
        try:
            _refuse_encoding(scope)
            data = await _read(receive)
            if not data or not _is_json(scope):
                raise not_an_object()
            return await endpoint(data, HttpRequest(scope, receive))
        except (ApiError, Rejected) as error:
            return _refusal(error)


def _refusal(error: ApiError | Rejected) -> Response:
    # A function that raises what it holds by name makes a circle, of everything that its callers hold.
    error.__traceback__ = None
    return (from_rejected(error) if isinstance(error, Rejected) else error).response()


async def _read(receive: Receive) -> bytes:
    """The whole body. Raises `ApiError` if the client leaves before, which nobody gets to read."""
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
