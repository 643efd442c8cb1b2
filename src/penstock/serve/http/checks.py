"""The checks that a request passes before its endpoint: its id, its key or its origin, and its body.

`RequestChecks` is the outermost layer of the app, in plain ASGI. It reads a request's head and counts the bytes of its body.
Every answer carries the request's id. A failure that nothing else caught becomes a 500 here, with its cause in the log only.

`takes_json` makes an endpoint that reads its body whole, as bytes. Their meaning is left to the endpoint: it parses large
bodies off the event loop, and answers with errors in the shape of its API.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.keys import ApiKey, unnamed
from penstock.serve.errors import (
    ApiError,
    ErrorWords,
    as_api_error,
    internal,
    invalid,
    invalid_api_key,
    not_an_object,
    request_too_large,
    shorten,
)
from penstock.serve.http.cors import Cors, Headers
from penstock.types.errors import Rejected

_log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Routes that need no key, and are answered also when too many connections have a request."""
LINGER_S = 2.0
"""Time for which a refused client's further bytes are read and dropped. Closing at once would reset the connection before the
client reads its answer."""
ID_HEADER = b"x-request-id"

JsonEndpoint = Callable[[bytes, HttpRequest], Awaitable[Response]]
"""Called with the body, which is not empty and says that it is JSON, and with the request, whose body was read."""

_HEADERS_KEY, _IDENTITY_KEY = "penstock.headers", "penstock.request_identity"
_KEY_KEY, _KEY_NAME_KEY, _IS_ADMIN_KEY = "penstock.key", "penstock.key_name", "penstock.is_admin"
_WORDS_KEY, _ANSWER_HEADERS_KEY = "penstock.error_words", "penstock.answer_headers"
"""Keys of a request's scope, under which the checks leave their findings."""
ENTRY_KEY = "penstock.access_entry"
"""The same for what the access log tells of it, where there is one."""
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ID_RULE = "1 to 128 printable ASCII characters without spaces"
_OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` (W3C Fetch Metadata) for our own pages, and for what the user did without a page."""


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Name, in small letters -> value. A header that was sent more than once has its first value.

    ASGI has a list of pairs. A request is asked for a dozen names, most of them not there, so the table is made once.
    """
    table: dict[bytes, bytes] | None = scope.get(_HEADERS_KEY)
    if table is None:
        table = scope[_HEADERS_KEY] = dict(reversed(scope["headers"]))
    return table


def values_of(scope: Scope, name: bytes) -> Sequence[bytes]:
    """All values that a header was sent with. `name`: in small letters."""
    table = headers_of(scope)
    if name not in table:
        return ()
    headers = scope["headers"]
    if len(table) == len(headers):
        return (table[name],)
    return [value for other, value in headers if other == name]


@dataclass(frozen=True, slots=True)
class Wording:
    """How an API spells errors, and for which requests."""

    words: ErrorWords
    paths: str = ""
    """With spaces between. One that ends with a slash stands for all paths below it."""
    client_header: bytes = b""
    """A header of every request of this API's clients, in small letters: errors of other paths are spelled so for them, too."""
    id_header: bytes = b""
    """The header in which clients with `client_header` look for the request's id."""

    def owns(self, path: str) -> bool:
        """Return whether errors at this path are spelled so."""
        paths = self.paths.split()
        return path in paths or path[: path.find("/", 1) + 1] in paths


@dataclass(slots=True)
class RequestIdentity:
    request_id: str
    is_from_header: bool

    def adopt(self, request_id: str) -> None:
        """Use the id that the body gives. Raises 400 if it is malformed, or if the header said another."""
        if not _VALID_ID.fullmatch(request_id):
            raise invalid(f"'request_id' must be {_ID_RULE}.", "request_id")
        if self.is_from_header and request_id != self.request_id:
            raise invalid("'request_id' and the header X-Request-Id differ; give one of them.", "request_id")
        self.request_id = request_id


def identity_of(scope: Scope) -> RequestIdentity:
    identity = scope[_IDENTITY_KEY]
    assert isinstance(identity, RequestIdentity)
    return identity


def request_id_of(scope: Scope) -> str:
    """The id that the answer was given; empty before the checks."""
    identity = scope.get(_IDENTITY_KEY)
    return identity.request_id if isinstance(identity, RequestIdentity) else ""


def add_header(scope: Scope, name: bytes, value: bytes) -> None:
    """Add a header to the answer, whatever the answer is. `name`: in small letters."""
    scope[_ANSWER_HEADERS_KEY].append((name, value))


def key_name(scope: Scope) -> str:
    """A short, stable name of the key that was sent, safe to log. Empty if the server asks for none."""
    name = scope.get(_KEY_NAME_KEY, "")
    assert isinstance(name, str)
    return name


def is_admin(scope: Scope) -> bool:
    """True if the request may change what is served: its key is an admin's, or no key is asked of anybody."""
    return bool(scope[_IS_ADMIN_KEY])


def require_admin(scope: Scope) -> None:
    """Raise 401 or 403 unless the request may change what is served."""
    if not is_admin(scope):
        if not key_name(scope):
            raise invalid_api_key("This needs an admin's key. Send the header 'Authorization: Bearer <key>'.")
        message = "This needs an admin's key: one that the server was started with as --admin-api-key."
        raise ApiError(403, message, code="admin_key_required", error_type="permission_error")


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request, as the access log tells of it. None: not known, or there is none."""

    client: str
    method: str
    path: str
    """As it was sent, without the query, which may hold a secret."""
    ended_unix_s: float = 0.0
    key: str = ""
    """Name of the API key."""
    status: int | None = None
    num_bytes: int = 0
    """Bytes of the answer's body that were handed to the connection."""
    duration_s: float | None = None
    """From the end of the request's head to the end of its answer."""
    ttft_s: float | None = None
    model: str | None = None
    """Its name in the answer, or its first one."""
    count_tokens: Callable[[], tuple[int, int]] | None = None
    """Says how many tokens the prompts and the answers have."""
    request_id: str = ""
    client_left: bool = False
    """It closed its connection before it had the answer."""


def entry_of(scope: Scope) -> Entry | None:
    """The entry that a request fills; None if there is no access log."""
    entry: Entry | None = scope.get(ENTRY_KEY)
    return entry


class RequestChecks:
    def __init__(
        self,
        app: ASGIApp,
        *,
        new_request_id: Callable[[], str],
        keys: KeyRing | None,
        admin_keys: KeyRing | None = None,
        cors: Cors | None = None,
        more_open_paths: frozenset[str] = frozenset(),
        wordings: Sequence[Wording] = (),
        max_body_bytes: int,
    ) -> None:
        """`keys`: None if the server asks for none. Then pages of other sites are kept out instead.

        `admin_keys` open everything; with None whoever needs no key may do all, and else nobody what admins do.
        `cors`: None if pages of other origins may read nothing. `more_open_paths`: paths beside `OPEN_PATHS` that can be
        read without a key.
        `wordings`: how the APIs spell errors; OpenAI's way is for all other paths.
        """
        self._app = app
        self._new_request_id = new_request_id
        self._keys = keys
        self._admin_keys = admin_keys
        self._cors = cors
        self._open_paths = OPEN_PATHS | more_open_paths
        self._words_of_path = {path: wording.words for wording in wordings for path in wording.paths.split()}
        self._of_clients = [wording for wording in wordings if wording.client_header]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = scope[_IDENTITY_KEY] = self._identify(scope)
        scope[_WORDS_KEY] = self._find_words(scope)
        exchange = _Exchange(identity, receive, send, self._max_body_bytes)
        if self._cors is not None:
            exchange.more_headers = self._cors.headers(headers_of(scope))
            if preflight := self._cors.preflight(scope["method"], headers_of(scope)):
                await exchange.send(preflight)
                await exchange.send({"type": "http.response.body"})
                return
        for wording in self._of_clients:
            if wording.client_header in headers_of(scope):
                exchange.more_headers.append((wording.id_header, identity.request_id.encode()))
        scope[_ANSWER_HEADERS_KEY] = exchange.more_headers
        try:
            self._check_head(scope, identity)
            exchange.check_length(_announced_bytes(scope))
        except ApiError as error:
            await error.response(words_of(scope))(scope, exchange.receive, exchange.send)
            return
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            # Quoted: a line break in an address would begin a line of the log.
            _log.exception("request %s failed: %s %s", identity.request_id, scope["method"], quote(scope["path"]))
            if exchange.has_begun:
                raise
            await internal(identity.request_id).response(words_of(scope))(scope, exchange.receive, exchange.send)

    def _find_words(self, scope: Scope) -> ErrorWords | None:
        path, found = scope["path"], self._words_of_path
        if words := found.get(path) or found.get(path[: path.find("/", 1) + 1]):
            return words
        headers = headers_of(scope)
        return next((wording.words for wording in self._of_clients if wording.client_header in headers), None)

    def _identify(self, scope: Scope) -> RequestIdentity:
        given = values_of(scope, ID_HEADER)
        if len(given) == 1 and _VALID_ID.fullmatch(request_id := given[0].decode("latin-1")):
            return RequestIdentity(request_id, is_from_header=True)
        return RequestIdentity(self._new_request_id(), is_from_header=False)

    def _check_head(self, scope: Scope, identity: RequestIdentity) -> None:
        """Raises `ApiError`."""
        if not identity.is_from_header and (given := values_of(scope, ID_HEADER)):
            rule = "was sent more than once" if len(given) > 1 else f"must be {_ID_RULE}"
            raise invalid(f"The header X-Request-Id {rule}.", "X-Request-Id")
        if self._keys is None:
            _keep_other_sites_out(scope)
        if self._admin_keys is None:
            scope[_IS_ADMIN_KEY] = self._keys is None
        else:
            self._look_for_admin(scope, self._admin_keys)
        # POST / asks the model something, where GET / is the page.
        is_open = scope["path"] in self._open_paths and scope["method"] in ("GET", "HEAD")
        if self._keys is not None and not is_open and not scope[_IS_ADMIN_KEY]:
            key = scope[_KEY_KEY] = _sent_key(scope, self._keys)
            scope[_KEY_NAME_KEY] = key.name

    def _look_for_admin(self, scope: Scope, admin_keys: KeyRing) -> None:
        """Take note of whether the key is an admin's. A malformed one is told by the check of all keys, if there is one."""
        scope[_IS_ADMIN_KEY] = False
        with suppress(ApiError):
            scope[_KEY_NAME_KEY] = _sent_key(scope, admin_keys).name
            scope[_IS_ADMIN_KEY] = True


class _Exchange:
    """A request and its answer on the way between server and app. Adds the id to the answer, and counts the request's body."""

    __slots__ = (
        "_identity",
        "_is_too_large",
        "_max_body_bytes",
        "_num_body_bytes",
        "_receive",
        "_send",
        "has_begun",
        "more_headers",
    )

    def __init__(self, identity: RequestIdentity, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self._identity = identity
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        self._is_too_large = False
        self.has_begun = False
        """The head of the answer was sent."""
        self.more_headers: Headers = []
        """Headers that the answer has besides, whatever it is."""

    def check_length(self, num_body_bytes: int) -> None:
        """Raises `ApiError` if a body of this length is too large."""
        if num_body_bytes > self._max_body_bytes:
            self._is_too_large = True
            raise request_too_large(self._max_body_bytes)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_body_bytes += len(message.get("body", b""))
            self.check_length(self._num_body_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            own = (ID_HEADER, self._identity.request_id.encode())
            message["headers"] = [*message.get("headers", ()), own, *self.more_headers]
        elif self._is_too_large and not message.get("more_body"):
            # Closing resets a connection with unread bytes, and a client that still sends would see that instead of the answer.
            # So the answer goes out, whose length was announced, and what still comes is dropped for a while.
            await self._send({**message, "more_body": True})
            await self._drop_body()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drop_body(self) -> None:
        """Read on until the body ends, the client leaves or `LINGER_S` have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await self._receive()).get("more_body"):
                    pass


class KeyRing:
    """Compares a key with all known ones in constant time."""

    def __init__(self, keys: Sequence[ApiKey | str]) -> None:
        """Raises `ConfigError` for a key that no client can send."""
        # Digests under a secret of this process have equal lengths, so the comparison tells nothing about the keys.
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}
        self.use([unnamed(key) if isinstance(key, str) else key for key in keys])

    def use(self, keys: Sequence[ApiKey]) -> None:
        """Know these keys from now on, and no others."""
        self._keys = {self._seal(key.digest): key for key in keys}

    @property
    def keys(self) -> Collection[ApiKey]:
        """The keys that are known now."""
        return self._keys.values()

    def find(self, key: bytes) -> ApiKey | None:
        """A known key; looks at every key, whichever matches."""
        digest = self._seal(hashlib.sha256(key).digest())
        found: ApiKey | None = None
        for known, one in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = one
        return found

    def _seal(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def key_of(scope: Scope) -> ApiKey | None:
    """The key that was sent, with its limits; None if the server asks for none, or an admin's was sent."""
    key: ApiKey | None = scope.get(_KEY_KEY)
    return key


def _sent_key(scope: Scope, keys: KeyRing) -> ApiKey:
    """The known key that was sent. Raises `ApiError`."""
    name, given = "Authorization", values_of(scope, b"authorization")
    if not given:
        name, given = "X-Api-Key", values_of(scope, b"x-api-key")  # Anthropic's clients send theirs so
    if not given:
        raise invalid_api_key("No API key was sent. Send the header 'Authorization: Bearer <key>' or 'X-Api-Key: <key>'.")
    if len(given) > 1:
        raise invalid_api_key(f"The header {name} was sent more than once. Send it once.")
    key = given[0]
    if name == "Authorization":
        scheme, _, key = key.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise invalid_api_key("The header Authorization holds no bearer's key. Send 'Authorization: Bearer <key>'.")
    found = keys.find(key.strip())
    if found is None:
        raise invalid_api_key("The API key is wrong.")
    return found


def _keep_other_sites_out(scope: Scope) -> None:
    """Raises 403 for a POST that a page of another origin sent and that does not say that it is JSON.

    A browser sends a form, or text, to any address without asking first, also to localhost. It sends JSON only after a CORS
    preflight, which this server answers to pages of `--allowed-origins` alone. A page whose host name resolves to this machine
    (DNS rebinding) has the same origin; only a key keeps it out.
    """
    if scope["method"] == "POST":
        headers = headers_of(scope)
        if _is_of_another_site(headers) and not _says_json(headers):
            message = (
                "A page of another site sent this, and not as application/json: it is refused, as the server asks for no key."
            )
            raise ApiError(403, message, code="cross_site_request", error_type="permission_error")


def _is_of_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Programs other than browsers send neither header."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITES
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _says_json(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


def _announced_bytes(scope: Scope) -> int:
    """`Content-Length`, or 0 without it. The HTTP parser has refused a malformed one, and one beside chunks, already."""
    value = headers_of(scope).get(b"content-length", b"")
    # Digits beyond the twentieth only make it larger than every limit, and Python reads no number of thousands.
    return int(value.lstrip(b"0")[:20] or b"0") if value.isdigit() else 0


def takes_json(answer: JsonEndpoint, *, of_any_type: bool = False) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
    """An endpoint of a route, which reads the body and calls `answer`.

    `of_any_type`: the body is JSON whatever its content type says, as to servers whose users send it by `curl -d` alone.
    """

    async def endpoint(http: HttpRequest) -> Response:
        try:
            # Not `http.body()`: the route keeps this request, and would keep the body in it while the answer is streamed.
            data = await _read(http.scope, http.receive, of_any_type=of_any_type)
            return await answer(data, http)
        except (ApiError, Rejected) as error:
            return as_api_error(error).response(words_of(http.scope))

    return endpoint


def words_of(scope: Scope) -> ErrorWords | None:
    """Return how errors of this request are spelled, or None for OpenAI's way."""
    words: ErrorWords | None = scope.get(_WORDS_KEY)
    return words


def use_words(scope: Scope, words: ErrorWords) -> None:
    """Spell errors of this request so from now on: it turned out to be another API's than its path suggests."""
    scope[_WORDS_KEY] = words


async def _read(scope: Scope, receive: Receive, *, of_any_type: bool) -> bytes:
    """The whole body, checked to be there and to be called JSON. Raises `ApiError`, also if the client leaves in the middle."""
    _refuse_encoding(scope)
    data = await _whole_body(receive)
    if not data:
        raise not_an_object()
    if not of_any_type and not _is_json(scope):
        told = shorten(headers_of(scope)[b"content-type"].decode("latin-1"))
        raise invalid(f"The body came as {told!r}. Send JSON with the header 'Content-Type: application/json'.")
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
        # RFC 9110, 12.5.3: `Accept-Encoding` in a 415 says what would have been taken.
        raise ApiError(
            415,
            f"The body has Content-Encoding {shorten(encoding)!r}, which is not supported: send it uncompressed.",
            code="unsupported_encoding",
            param="Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        )


def _is_json(scope: Scope) -> bool:
    """A body without a content type is read as JSON; one with another type is refused."""
    content_type = headers_of(scope).get(b"content-type")
    if not content_type or content_type == b"application/json":
        return True
    kind, _, subtype = content_type.decode("latin-1").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))
