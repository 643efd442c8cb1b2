"""The checks of a request before its endpoint: id, key or origin, and body.

`RequestChecks` wraps the routes; only `NotedRequests` is outside it. It adds the request's id to every answer, and turns
uncaught exceptions into 500. `takes_json` makes an endpoint that gets the whole body as bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.keys import ApiKey, unnamed
from penstock.serve.errors import (
    ApiError,
    ErrorWords,
    as_api_error,
    cancelled,
    internal,
    invalid,
    invalid_api_key,
    not_an_object,
    request_too_large,
    shorten,
    unavailable,
)
from penstock.serve.http.cors import Cors, Headers
from penstock.types.errors import Rejected

_log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key, and are answered even when too many connections are busy."""
_BODIES_BYTES = 1 << 28
"""Bytes of incomplete bodies at which those with more than their share are refused."""
UPLOAD_PATH = "/v1/files"
"""Bodies there are written to the disk as they come."""
ID_HEADER = b"x-request-id"

JsonEndpoint = Callable[[bytes, HttpRequest], Awaitable[Response]]
"""Takes the body's bytes and the request, and returns the response."""

_HEADERS_KEY, _IDENTITY_KEY, _TRUSTS_TENANT_KEY = "penstock.headers", "penstock.request_identity", "penstock.trusts_tenant"
_WORDS_KEY, _ANSWER_HEADERS_KEY = "penstock.error_words", "penstock.answer_headers"
"""Keys of a scope for facts about the request."""
SENDER_KEY = "penstock.sender"
"""Key of a scope: the `Sender` of a request, there from the start if the server sends it itself. No client can set it."""
CLIENT_LEFT = "the client closed the connection"
_Result = TypeVar("_Result")
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ID_RULE = "1 to 128 printable ASCII characters without spaces"
_OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` (W3C Fetch Metadata) for our own pages, and for requests without a page."""


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Return the headers by name, in lowercase. A repeated header has its first value."""
    table: dict[bytes, bytes] | None = scope.get(_HEADERS_KEY)
    if table is None:
        table = scope[_HEADERS_KEY] = dict(reversed(scope["headers"]))
    return table


def values_of(scope: Scope, name: bytes) -> Sequence[bytes]:
    """Return all values of a header. `name`: in lowercase."""
    table = headers_of(scope)
    if name not in table:
        return ()
    headers = scope["headers"]
    if len(table) == len(headers):
        return (table[name],)
    return [value for other, value in headers if other == name]


@dataclass(frozen=True, slots=True)
class Wording:
    """The form of one API's errors, and the paths and clients that get it."""

    words: ErrorWords
    paths: str = ""
    """Paths with errors in this form, separated by spaces. `/api/` means all paths below it; only a first segment can be so."""
    client_header: bytes = b""
    """A header that all clients of this API send, in lowercase. Requests with it get this form on other paths, too."""
    id_header: bytes = b""
    """Header for the request's id in answers to requests with `client_header`."""

    def owns(self, path: str) -> bool:
        """Return whether errors at this path have this form."""
        paths = self.paths.split()
        return path in paths or path[: path.find("/", 1) + 1] in paths


@dataclass(frozen=True, slots=True)
class Sender:
    """The rights of a request, by its key."""

    key: ApiKey | None = None
    is_admin: bool = False
    key_name: str = ""


@dataclass(slots=True)
class RequestIdentity:
    request_id: str
    is_from_header: bool
    is_own: bool = False
    """The server has sent the header itself."""

    def adopt(self, request_id: str) -> None:
        """Replace the request's id by the body's. Raises 400 if that is malformed, or if X-Request-Id has another id."""
        if not _VALID_ID.fullmatch(request_id):
            raise invalid(f"'request_id' must be {_ID_RULE}.", "request_id")
        if self.is_from_header and not self.is_own and request_id != self.request_id:
            raise invalid("'request_id' and the header X-Request-Id differ; give one of them.", "request_id")
        self.request_id = request_id


def identity_of(scope: Scope) -> RequestIdentity:
    identity: RequestIdentity = scope[_IDENTITY_KEY]
    return identity


def add_header(scope: Scope, name: bytes, value: bytes) -> None:
    """Add a header to the answer, which may be an error. `name`: in lowercase."""
    scope[_ANSWER_HEADERS_KEY].append((name, value))


def added_header(scope: Scope, name: bytes) -> str:
    """Return the value of a header that `add_header` has added, or an empty text."""
    return next((value.decode("latin-1") for known, value in scope[_ANSWER_HEADERS_KEY] if known == name), "")


def key_name(scope: Scope) -> str:
    """Return the name of the request's key, which is safe to log. Empty if the server has no keys."""
    sender: Sender | None = scope.get(SENDER_KEY)
    return "" if sender is None else sender.key_name


def is_admin(scope: Scope) -> bool:
    """Return whether the request may load and unload models: it has an admin key, or no key is needed."""
    sender: Sender = scope[SENDER_KEY]
    return sender.is_admin


def trusts_tenant(scope: Scope) -> bool:
    """Return whether the header X-Tenant counts although the request has a key."""
    return bool(scope.get(_TRUSTS_TENANT_KEY, False))


def require_admin(scope: Scope) -> None:
    """Raise 401 or 403 unless `is_admin`."""
    if not is_admin(scope):
        if not key_name(scope):
            raise invalid_api_key("This request needs an admin key. Send the header 'Authorization: Bearer <key>'.")
        message = "This request needs an admin key (--admin-api-key). The key that was sent is not one."
        raise ApiError(403, message, code="admin_key_required", error_type="permission_error")


class RequestChecks:
    def __init__(
        self,
        app: ASGIApp,
        *,
        new_request_id: Callable[[], str],
        keys: KeyRing | None,
        admin_keys: KeyRing | None = None,
        cors: Cors | None = None,
        trusts_tenant: bool = False,
        more_open_paths: frozenset[str] = frozenset(),
        wordings: Sequence[Wording] = (),
        max_body_bytes: int,
        max_upload_bytes: int = 0,
    ) -> None:
        """Wrap the app in the checks.

        - `keys`: None if no key is needed. Then requests from pages of other sites are refused, unless `cors` allows them.
        - `admin_keys`: keys that allow everything. If None, requests are an admin's only if no key is needed.
        - `cors`: None if pages of other origins may read nothing.
        - `trusts_tenant`: whether clients with a key may name another tenant.
        - `more_open_paths`: further paths to read without a key.
        - `wordings`: forms of errors. All other paths get OpenAI's form.
        """
        self._app = app
        self._new_request_id = new_request_id
        self._keys = keys
        self._admin_keys = admin_keys
        self._cors = cors
        self._trusts_tenant = trusts_tenant
        self._open_paths = OPEN_PATHS | more_open_paths
        self._words_of_path = {path: wording.words for wording in wordings for path in wording.paths.split()}
        self._of_clients = [wording for wording in wordings if wording.client_header]
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes
        self._bodies = _IncompleteBodies(max(_BODIES_BYTES, 2 * max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = scope[_IDENTITY_KEY] = self._identify(scope)
        scope[_WORDS_KEY] = self._find_words(scope)
        scope[_TRUSTS_TENANT_KEY] = self._trusts_tenant
        if scope["path"] == UPLOAD_PATH:
            messages = _LimitedMessages(identity, receive, send, self._max_upload_bytes, "--jobs-bytes")
        else:
            messages = _LimitedMessages(identity, receive, send, self._max_body_bytes, "--max-body-size", self._bodies)
        if self._cors is not None:
            messages.more_headers = self._cors.headers(headers_of(scope))
            if preflight := self._cors.preflight(scope["method"], headers_of(scope)):
                await messages.send(preflight)
                await messages.send({"type": "http.response.body"})
                return
        for wording in self._of_clients:
            if wording.client_header in headers_of(scope):
                messages.more_headers.append((wording.id_header, identity.request_id.encode()))
        scope[_ANSWER_HEADERS_KEY] = messages.more_headers
        try:
            self._check_head(scope, identity)
            messages.check_length(_announced_bytes(scope))
        except ApiError as error:
            await error.response(words_of(scope))(scope, messages.receive, messages.send)
            return
        try:
            await self._app(scope, messages.receive, messages.send)
        except Exception:
            # Quoted: a line break in an address would begin a line of the log.
            _log.exception("request %s failed: %s %s", identity.request_id, scope["method"], quote(scope["path"]))
            if messages.has_begun:
                raise
            await internal(identity.request_id).response(words_of(scope))(scope, messages.receive, messages.send)
        finally:
            self._bodies.count(messages, 0)

    def _find_words(self, scope: Scope) -> ErrorWords | None:
        path, found = scope["path"], self._words_of_path
        if words := found.get(path) or found.get(path[: path.find("/", 1) + 1]):
            return words
        headers = headers_of(scope)
        return next((wording.words for wording in self._of_clients if wording.client_header in headers), None)

    def _identify(self, scope: Scope) -> RequestIdentity:
        given = values_of(scope, ID_HEADER)
        if len(given) == 1 and _VALID_ID.fullmatch(request_id := given[0].decode("latin-1")):
            return RequestIdentity(request_id, is_from_header=True, is_own=SENDER_KEY in scope)
        return RequestIdentity(self._new_request_id(), is_from_header=False)

    def _check_head(self, scope: Scope, identity: RequestIdentity) -> None:
        """Check the request's id and sender, and note the sender. Raises `ApiError`."""
        if not identity.is_from_header and (given := values_of(scope, ID_HEADER)):
            rule = "was sent more than once" if len(given) > 1 else f"must be {_ID_RULE}"
            raise invalid(f"The header X-Request-Id {rule}.", "X-Request-Id")
        if SENDER_KEY not in scope:
            scope[SENDER_KEY] = self._find_sender(scope)

    def _find_sender(self, scope: Scope) -> Sender:
        """Return the rights of a client's request by its key. Raises `ApiError` for a wrong key or origin."""
        if self._keys is None and (self._cors is None or not self._cors.allows(headers_of(scope))):
            _keep_other_sites_out(scope)
        if self._admin_keys is not None:
            with suppress(ApiError):  # other keys are refused below, if one is needed
                return Sender(is_admin=True, key_name=_sent_key(scope, self._admin_keys).name)
        if self._keys is None:
            return Sender(is_admin=self._admin_keys is None)
        # GET / is the page, but POST / generates text.
        if scope["path"] in self._open_paths and scope["method"] in ("GET", "HEAD"):
            return Sender()
        key = _sent_key(scope, self._keys)
        return Sender(key, key_name=key.name)


class _LimitedMessages:
    """Wraps ASGI's `receive` and `send`: limits the body's bytes, and adds headers to the answer."""

    def __init__(
        self,
        identity: RequestIdentity,
        receive: Receive,
        send: Send,
        max_body_bytes: int,
        setting: str,
        bodies: _IncompleteBodies | None = None,
    ) -> None:
        self._identity = identity
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._setting = setting
        self._bodies = bodies
        self._num_body_bytes = 0
        self.has_begun = False
        """Whether the head of the answer was sent."""
        self.more_headers: Headers = []

    def check_length(self, num_body_bytes: int) -> None:
        """Raise `ApiError` if a body of this length is too large."""
        if num_body_bytes > self._max_body_bytes:
            raise request_too_large(self._max_body_bytes, self._setting)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_body_bytes += len(message.get("body", b""))
            self.check_length(self._num_body_bytes)
            if self._bodies is not None:
                self._bodies.count(self, self._num_body_bytes if message.get("more_body", False) else 0)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            own = (ID_HEADER, self._identity.request_id.encode())
            message["headers"] = [*message.get("headers", ()), own, *self.more_headers]
        await self._send(message)


class _IncompleteBodies:
    """Limits the bytes of incomplete bodies that the app has begun to read, however many clients send them, and however slowly.

    Beyond `max_bytes`, a body that grows beyond an equal share of them is refused. Smaller ones never are. Shares shrink as
    more bodies come, so N of them may have `max_bytes` * (1 + ln N) until each sends its next piece or times out: 2.5 GiB
    instead of 256 MiB for 8,192 connections.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes: dict[_LimitedMessages, int] = {}
        self._sum_bytes = 0

    def count(self, messages: _LimitedMessages, num_bytes: int) -> None:
        """Count the body of a request: 0 bytes once it ended or was left. Raises 503."""
        self._sum_bytes += num_bytes - self._num_bytes.pop(messages, 0)
        if num_bytes:
            self._num_bytes[messages] = num_bytes
            if self._sum_bytes > self._max_bytes and num_bytes > self._max_bytes // len(self._num_bytes):
                raise unavailable("The server is receiving too many large bodies. Send this one again.")


class KeyRing:
    """The known keys, compared in constant time."""

    def __init__(self, keys: Sequence[ApiKey | str]) -> None:
        """Raise `ConfigError` for a key that no client can send."""
        self.use([unnamed(key) if isinstance(key, str) else key for key in keys])

    def use(self, keys: Sequence[ApiKey]) -> None:
        """Replace the known keys."""
        self.keys = tuple(keys)

    def find(self, key: bytes) -> ApiKey | None:
        """Return the known key, or None. Compares all keys, so that the time does not depend on the match."""
        digest = hashlib.sha256(key).digest()
        found: ApiKey | None = None
        for known in self.keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found

    def named(self, name: str) -> ApiKey | None:
        """Return the key of this name, or None."""
        return next((key for key in self.keys if key.name == name), None)


def key_of(scope: Scope) -> ApiKey | None:
    """Return the request's key with its limits, or None without keys or for an admin key."""
    sender: Sender = scope[SENDER_KEY]
    return sender.key


def _sent_key(scope: Scope, keys: KeyRing) -> ApiKey:
    """Return the request's key. Raise `ApiError` if it is missing, malformed or unknown."""
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
            raise invalid_api_key("The header Authorization has no bearer token. Send 'Authorization: Bearer <key>'.")
    found = keys.find(key.strip())
    if found is None:
        raise invalid_api_key("The API key is wrong.")
    return found


def _keep_other_sites_out(scope: Scope) -> None:
    """Raise 403 for a POST from a page of another origin, unless it is declared as JSON.

    A browser sends forms and plain text to any address, even localhost, without asking first. It sends JSON only after a CORS
    preflight, which this server answers only for `--allowed-origins`. DNS rebinding gives a page the same origin, so that only
    a key keeps the page out.
    """
    headers = headers_of(scope)
    is_json = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"
    if scope["method"] == "POST" and not is_json and _is_of_another_site(headers):
        message = (
            "Refused: a page of another site sent this without the content type application/json, and this server requires no "
            "API key."
        )
        raise ApiError(403, message, code="cross_site_request", error_type="permission_error")


def _is_of_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a page of another site sent the request. Only browsers send Sec-Fetch-Site and Origin."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITES
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _announced_bytes(scope: Scope) -> int:
    """Return `Content-Length`, or 0. The HTTP parser has refused malformed ones."""
    value = headers_of(scope).get(b"content-length", b"")
    # 20 digits exceed every limit, and Python refuses to parse thousands of digits.
    return int(value.lstrip(b"0")[:20] or b"0") if value.isdigit() else 0


def takes_json(answer: JsonEndpoint, *, of_any_type: bool = False) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
    """Return an endpoint that reads the body and calls `answer`.

    `of_any_type`: ignore the content type, for APIs with users who send JSON by plain `curl -d`.
    """

    async def endpoint(http: HttpRequest) -> Response:
        try:
            # Not `http.body()`: that would keep the body in the request while the answer is streamed.
            data = await _read(http.scope, http.receive, of_any_type=of_any_type)
            return await answer(data, http)
        except (ApiError, Rejected) as error:
            return as_api_error(error).response(words_of(http.scope))

    return endpoint


def words_of(scope: Scope) -> ErrorWords | None:
    """Return the function that writes this request's errors in its API's form. None: OpenAI's form."""
    words: ErrorWords | None = scope.get(_WORDS_KEY)
    return words


def use_words(scope: Scope, words: ErrorWords) -> None:
    """Set the form of this request's errors. Called if its body or headers belong to another API on the same path."""
    scope[_WORDS_KEY] = words


async def _read(scope: Scope, receive: Receive, *, of_any_type: bool) -> bytes:
    """Return the whole body. Raise `ApiError` if it is empty or not declared as JSON, or if the client leaves."""
    _refuse_encoding(scope)
    data, has_more = bytearray(), True  # a list of tiny pieces would take many times their bytes
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            raise invalid("The client disconnected before it had sent the whole body.")
        data += message.get("body", b"")
        has_more = message.get("more_body", False)
    if not data:
        raise not_an_object()
    if not of_any_type and not _is_json(scope):
        told = shorten(headers_of(scope)[b"content-type"].decode("latin-1"))
        raise invalid(f"The body has the content type {told!r}. Send JSON with the header 'Content-Type: application/json'.")
    return bytes(data)


def _refuse_encoding(scope: Scope) -> None:
    """Raise a 415 for a compressed body, because decompressing could exceed the size limit."""
    encoding = headers_of(scope).get(b"content-encoding", b"").decode("latin-1")
    if encoding.strip().lower() not in ("", "identity"):
        # RFC 9110, 12.5.3: `Accept-Encoding` in a 415 says what the server takes.
        raise ApiError(
            415,
            f"The body has Content-Encoding {shorten(encoding)!r}, which is not supported: send it uncompressed.",
            code="unsupported_encoding",
            param="Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        )


def _is_json(scope: Scope) -> bool:
    """Return whether the content type is JSON or missing."""
    content_type = headers_of(scope).get(b"content-type")
    if not content_type or content_type == b"application/json":
        return True
    kind, _, subtype = content_type.decode("latin-1").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))


# While a request is answered


@contextmanager
def client_watch(http: HttpRequest, on_gone: Callable[[], object]) -> Iterator[None]:
    """Call `on_gone` if the client leaves before the block ends. Nothing else may call `receive` in the block."""
    task = asyncio.create_task(_wait_for_end(http.receive, on_gone))
    try:
        yield
    finally:
        task.cancel()


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`. If the client leaves, cancel `work` and raise 499."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def give_up() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    try:
        with client_watch(http, give_up):
            return await work
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise cancelled(CLIENT_LEFT) from None
        raise


async def _wait_for_end(receive: Receive, on_gone: Callable[[], object]) -> None:
    has_left = False
    while not has_left:
        with suppress(ApiError):  # nobody reads the rest of the body, and it is too large
            has_left = (await receive())["type"] == "http.disconnect"
    on_gone()
