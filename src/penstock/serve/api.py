"""An API of the server as one value: its routes, its spelling of errors, and what it refuses. `app` mounts a list of them.

Each API is a folder whose `routes` has that value. Routes of several APIs may share a path: each but one then says `when` a
request belongs to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from starlette.requests import Request as HttpRequest

from penstock.calls.in_flight import InFlight
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import OffLoop
from penstock.serve.asking import CallEndpoint, Reader
from penstock.serve.bodies import INLINE_MAX_BYTES, IgnoredParameters, load_json
from penstock.serve.cards import ModelCards
from penstock.serve.errors import openai_words
from penstock.serve.http.checks import Wording, headers_of
from penstock.serve.loading import FolderWatch
from penstock.serve.texts.endpoint import TextsEndpoint

PlainText = Annotated[str, "text/plain"]
When = Callable[[bytes, HttpRequest], Awaitable[bool]]
"""Whether a request belongs to a route, by its body and its headers."""


def has_header(name: bytes) -> When:
    """Return a condition that holds for requests with this header. `name`: in small letters."""

    async def has_header(_data: bytes, http: HttpRequest) -> bool:
        return name in headers_of(http.scope)

    return has_header


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a server that routes are made of."""

    deployment: Deployment
    config: ServerConfig
    in_flight: InFlight
    ignored: IgnoredParameters | None
    """As for `parse_body`."""
    reader: Reader
    calls: CallEndpoint
    texts: TextsEndpoint
    folder: FolderWatch
    cards: ModelCards

    @property
    def off_loop(self) -> OffLoop:
        """Threads for work on large bodies before their model is known."""
        return self.deployment.off_loop

    def has_field(self, name: str) -> When:
        """Return a condition that holds for bodies with this field."""

        async def has_field(data: bytes, _http: HttpRequest) -> bool:
            def look() -> bool:
                value = load_json(data)
                return isinstance(value, dict) and name in value

            is_likely = f'"{name}"'.encode() in data
            return is_likely and await self.off_loop.run(len(data), look, limit=INLINE_MAX_BYTES)

        return has_field


@dataclass(frozen=True, slots=True)
class Route:
    """A method of one or more paths. The docstring of `answer` describes it in the OpenAPI document."""

    at: str
    """`GET /v1/models /models`. Parameters stand in braces, as in Starlette's routes: `/v1/models/{model_id:path}`."""
    summary: str
    answer: Callable[..., Awaitable[Any]]
    """Called with the body's bytes and the request, or, without a `body`, with the request. Returns a response or JSON data."""
    body: Any = None
    """The type of its JSON body, or a union of types."""
    returns: Any = Any
    """The type of its JSON answer, or `PlainText`."""
    streams: Any = None
    """The type of the data of a stream's event or line, if it can stream."""
    query: str = ""
    """Names of its optional parameters, with spaces between."""
    more_statuses: Mapping[int, str] = field(default_factory=dict)
    """Statuses beside those of all routes, and what they mean. Those below 300 have the same answer."""
    when: When | None = None
    """If another API has the same path: which requests belong to this one."""

    @property
    def body_types(self) -> Sequence[Any]:
        """The types of the union that `body` is, or `body` itself."""
        return () if self.body is None else get_args(self.body) or (self.body,)


@dataclass(frozen=True, slots=True)
class Refused:
    """A route of an API that this server does not have."""

    at: str
    """A method and a path."""
    reason: str
    status: int = 501
    code: str = "not_implemented"


OPENAI_WORDING = Wording(openai_words)


@dataclass(frozen=True, slots=True)
class Api:
    name: str
    routes: Callable[[Parts], Sequence[Route]]
    wording: Wording = OPENAI_WORDING
    stream_type: str = "text/event-stream"
    """The media type of streams: events, or lines of JSON."""
    stream_end: str = ""
    """The data of the event that ends a whole stream, if it is no JSON."""
    takes_any_type: bool = False
    """Bodies at the paths of `wording` are JSON whatever their content type says: users send them by `curl -d` alone."""
    refused: Sequence[Refused] = ()
