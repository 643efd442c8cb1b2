"""The description of an API: its routes, its form of errors, and the routes that it refuses. `app` mounts a list of these.

Each API is a folder with an `Api` in its module `routes`. If several APIs share a path, all but one of their routes there
must have a condition, `when`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from starlette.requests import Request as HttpRequest

from penstock.calls.in_flight import InFlight
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.serve.answering import Made, call_endpoint
from penstock.serve.asking import Asked, Reader
from penstock.serve.bodies import Body, load_json
from penstock.serve.cards import FactsCache
from penstock.serve.errors import openai_words
from penstock.serve.http.checks import Wording, headers_of
from penstock.serve.own_requests import OwnRequests
from penstock.serve.paging import Parameter
from penstock.serve.texts.endpoint import Answer, TextsEndpoint
from penstock.serve.waiting import FolderWatch

if TYPE_CHECKING:  # with an HTTP client or a database, which few servers need
    from penstock.serve.jobs.runner import BatchRunner
    from penstock.serve.upstream import Upstream

_Body = TypeVar("_Body", bound=Body)
JSON = "application/json"
When = Callable[[bytes, HttpRequest], Awaitable[bool]]
"""Takes the body and the request, and returns whether the request belongs to a route."""


def has_header(name: bytes) -> When:
    """Return a condition that is true for requests with this header. `name`: in lowercase."""

    async def has_header(_data: bytes, http: HttpRequest) -> bool:
        return name in headers_of(http.scope)

    return has_header


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Calls at the start and the end of serving, on the event loop and in order."""

    starts: list[Callable[[], None]] = field(default_factory=list)
    stops: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called at the beginning of the shutdown, before waiting for running requests."""
    closes: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called after all models are closed."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The shared objects that the APIs' routes use."""

    deployment: Deployment
    config: ServerConfig
    in_flight: InFlight
    reader: Reader
    texts: TextsEndpoint
    folder: FolderWatch
    facts: FactsCache
    upstreams: Mapping[str, Upstream]
    lifetime: Lifetime
    own: OwnRequests
    batches: BatchRunner | None = None
    """None if the server keeps no files."""
    count_traces: Callable[[], Mapping[str, int]] | None = None
    """None if no collector is named."""

    def call_route(
        self,
        at: str,
        summary: str,
        body: type[_Body],
        read: Callable[[_Body, Asked], Made],
        returns: Any,
        streams: Any = None,
    ) -> Route:
        """Return a route that generates text. `read`: see `call_endpoint`. The rest is as in `Route`."""
        return Route(at, summary, call_endpoint(body, read, self.reader, self.in_flight), body, returns, streams)

    def texts_route(
        self,
        at: str,
        summary: str,
        body: type[_Body],
        read: Callable[[_Body, Asked], Answer],
        returns: Any,
        *,
        when: When | None = None,
    ) -> Route:
        """Return a route of encoders. `read`: see `TextsEndpoint.answers`. The rest is as in `Route`."""
        return Route(at, summary, self.texts.answers(body, read), body, returns, when=when)

    def has_field(self, name: str) -> When:
        """Return a condition that is true for bodies with this field."""

        async def has_field(data: bytes, http: HttpRequest) -> bool:
            def look() -> bool:
                value = load_json(data)
                return isinstance(value, dict) and name in value

            is_likely = f'"{name}"'.encode() in data
            return is_likely and await self.reader.parse(data, look, http.scope)

        return has_field


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint: a method on one or more paths. The docstring of `answer` describes it in the OpenAPI document."""

    at: str
    """`GET /v1/models /models`. Parameters stand in braces, as in Starlette's routes: `/v1/models/{model_id:path}`."""
    summary: str
    answer: Callable[..., Awaitable[Any]]
    """Called with the body's bytes and the request, or, without a `body`, with the request. Returns a response or JSON data."""
    body: Any = None
    """The type of its JSON body, or a union of types."""
    returns: Any = Any
    """The type of its answer, or of one line if `media_type` is that of lines."""
    streams: Any = None
    """The type of one event or line of a stream, if the route can stream."""
    query: Sequence[str | Parameter[Any]] = ()
    """Optional query parameters. Those of which only a name is given may be any text."""
    more_statuses: Mapping[int, str] = field(default_factory=dict)
    """Meanings of further statuses. Those below 300 have the same type of answer."""
    when: When | None = None
    """The condition for this route, if another API has the same path."""
    media_type: str = JSON
    """The media type of its answer."""
    form: Any = None
    """The type of its body, if that is a form (multipart/form-data). `answer` reads it."""

    def __post_init__(self) -> None:
        assert not isinstance(self.query, str), f"query is {self.query!r}: give a list of names, not one text"

    @property
    def body_types(self) -> Sequence[Any]:
        """Return the types of the body: the members of a union, or the one type."""
        return () if self.body is None else get_args(self.body) or (self.body,)


@dataclass(frozen=True, slots=True)
class Refused:
    """A route of the original API that this server answers only with an error, such as 501. A `Route` there comes first."""

    at: str
    """A method and a path."""
    reason: str
    status: int = 501
    code: str = "not_implemented"


def without_folder(*routes: str) -> list[Refused]:
    """Return what answers at the routes of files and batches, if the server has no folder for them."""
    reason = "This server does not store files or batches. To enable them, start it with --jobs-dir FOLDER."
    return [Refused(at, reason, code="not_enabled") for at in routes]


OPENAI_WORDING = Wording(openai_words)


@dataclass(frozen=True, slots=True)
class Api:
    name: str
    routes: Callable[[Parts], Sequence[Route]]
    wording: Wording = OPENAI_WORDING
    stream_type: str = "text/event-stream"
    """The media type of streams: events, or lines of JSON."""
    stream_end: str = ""
    """The data of a stream's last event, if it is not JSON."""
    takes_any_type: bool = False
    """Read bodies at the paths of `wording` as JSON, whatever their content type: plain `curl -d` sends another."""
    refused: Sequence[Refused] = ()
