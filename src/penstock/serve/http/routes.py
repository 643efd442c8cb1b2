"""Answers the routes that take a JSON body: reads it, checks it and calls the endpoint. The innermost layer of the app.

FastAPI has the same routes in its table, writes the OpenAPI document from them and answers all others. It would find out anew
for every request what an endpoint is called with, which costs several times what the endpoints do themselves; here every one
is called with the checked body and the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi.routing import APIRoute
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.deploy.off_loop import OffLoop
from penstock.serve.http.checks import headers_of
from penstock.serve.openai.bodies import IgnoredParameters, read_body, refuse_encoding
from penstock.serve.openai.errors import ApiError, from_rejected, invalid, not_an_object
from penstock.serve.openai.schemas import Body
from penstock.types.errors import Rejected

Endpoint = Callable[[Body, HttpRequest], Awaitable[Response]]


class JsonRequest(HttpRequest):
    """A request whose body has been read."""

    def __init__(self, scope: Scope, receive: Receive, data: bytes) -> None:
        super().__init__(scope, receive)
        self._data = data

    async def body(self) -> bytes:
        return self._data


class JsonRoutesLayer:
    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute], off_loop: OffLoop, ignored: IgnoredParameters | None) -> None:
        """Takes those of the routes that have a body, each with one method, POST, and a path without parameters.

        `ignored`: of `read_body`.
        """
        self._app = app
        self._endpoints: dict[str, tuple[type[Body], Endpoint]] = {
            route.path: (_body_type(route), route.endpoint) for route in routes if route.body_field is not None
        }
        self._off_loop = off_loop
        self._ignored = ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        response = await self._answer(scope, receive, *found)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, body_type: type[Body], endpoint: Endpoint) -> Response:
        """A function of its own, so that nothing holds the body while the answer is streamed."""
        try:
            refuse_encoding(scope)
            data = await _read(receive)
            if not data or not _is_json(scope):
                raise not_an_object()
            body = await read_body(data, body_type, self._off_loop, self._ignored)
            return await endpoint(body, JsonRequest(scope, receive, data))
        except (ApiError, Rejected) as error:
            return _refusal(error)


def _refusal(error: ApiError | Rejected) -> Response:
    # A function that raises what it holds by name makes a circle, of everything that its callers hold.
    error.__traceback__ = None
    return (from_rejected(error) if isinstance(error, Rejected) else error).response()


def _body_type(route: APIRoute) -> type[Body]:
    assert route.methods == {"POST"}
    assert not route.param_convertors
    assert route.body_field is not None
    body_type = route.body_field.field_info.annotation
    assert isinstance(body_type, type)
    assert issubclass(body_type, Body)
    return body_type


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


def _is_json(scope: Scope) -> bool:
    """A body without a content type is read as JSON; one with another type is refused."""
    content_type = headers_of(scope).get(b"content-type")
    if not content_type or content_type == b"application/json":
        return True
    kind, _, subtype = content_type.decode("latin-1").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))
