"""What every request passes before its route: an id, a key or the look at its origin, and the limit of its body.

Layers of plain ASGI that `app` stacks, outermost first: `RequestIdLayer`, then `AuthLayer` where keys are set (`CrossSiteLayer`
where none are), then `BodyLimitLayer`. They look at a request's head and count its bytes; they never read a body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve.openai.errors import ApiError, cross_site, internal, invalid, invalid_api_key, request_too_large
from penstock.types.errors import ConfigError

_log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Routes that need no key, and are answered also when too many connections have a request."""
LINGER_S = 2.0
"""So long is what a refused client still sends read and dropped: closing at once would reset the connection before the client
reads its answer."""
ID_HEADER = b"x-request-id"

_HEADERS_KEY, _IDENTITY_KEY, _KEY_NAME_KEY = "penstock.headers", "penstock.request_identity", "penstock.key_name"
"""Where a request's scope holds what was found out about it."""
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ID_RULE = "1 to 128 printable ASCII characters without spaces"
_KEY_NAME_CHARS = 12
_OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` (W3C Fetch Metadata) for our own pages, and for what the user did without a page."""


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Name, in small letters -> value. Of a header that was sent more than once, the first."""
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


class RequestIdLayer:
    def __init__(self, app: ASGIApp, new_request_id: Callable[[], str]) -> None:
        self._app = app
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value.decode("latin-1") for value in values_of(scope, ID_HEADER)]
        is_valid = len(given) == 1 and _VALID_ID.fullmatch(given[0]) is not None
        identity = RequestIdentity(given[0] if is_valid else self._new_request_id(), is_valid)
        scope[_IDENTITY_KEY] = identity
        tagged = _TaggedSend(send, identity)
        if given and not is_valid:
            rule = "was sent more than once" if len(given) > 1 else f"must be {_ID_RULE}"
            await invalid(f"The header X-Request-Id {rule}.", "X-Request-Id").response()(scope, receive, tagged)
            return
        try:
            await self._app(scope, receive, tagged)
        except Exception:
            request_id = identity.request_id
            # Quoted: a line break in an address would begin a line of the log.
            _log.exception("request %s failed: %s %s", request_id, scope["method"], quote(scope["path"]))
            if tagged.is_started:
                raise
            await internal(request_id).response()(scope, receive, tagged)


class _TaggedSend:
    """Adds the header to the response's start; everything else passes through."""

    def __init__(self, send: Send, identity: RequestIdentity) -> None:
        self._send = send
        self._identity = identity
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            message["headers"] = [*message.get("headers", ()), (ID_HEADER, self._identity.request_id.encode())]
        await self._send(message)


def key_name(scope: Scope) -> str:
    """A short, stable name of the key that was sent, safe to log; empty if no key is asked for."""
    name = scope.get(_KEY_NAME_KEY, "")
    assert isinstance(name, str)
    return name


class KeyRing:
    """Compares a key with all known ones in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Raises `ConfigError` for a blank key, which a client would match by sending none, and for one that none can send."""
        if not all(key.strip() for key in keys):
            raise ConfigError("An API key is empty.", remedy="Give --api-key a value.")
        if any(key != key.strip() for key in keys):
            raise ConfigError("An API key begins or ends with white space, which no header can carry.", remedy="Leave it out.")
        # Digests under a secret of this process have equal lengths, so the comparison tells nothing about the keys.
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(key.encode()): _public_name(key) for key in keys}

    def name_of(self, key: bytes) -> str | None:
        """The name of a known key; looks at every key, whichever matches."""
        digest = self._digest(key)
        found: str | None = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


class AuthLayer:
    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope[_KEY_NAME_KEY] = self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> str:
        given = values_of(scope, b"authorization")
        if not given:
            raise invalid_api_key("No API key was sent. Send the header 'Authorization: Bearer <key>'.")
        if len(given) > 1:
            raise invalid_api_key("The header Authorization was sent more than once. Send it once.")
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise invalid_api_key("The header Authorization holds no bearer's key. Send 'Authorization: Bearer <key>'.")
        name = self._keys.name_of(key.strip())
        if name is None:
            raise invalid_api_key("The API key is wrong.")
        return name


def _public_name(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:_KEY_NAME_CHARS]


class CrossSiteLayer:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = headers_of(scope)
            if _is_of_another_site(headers) and not _says_json(headers):
                await cross_site().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_of_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Programs other than browsers send neither header."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITES
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _says_json(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


class BodyLimitLayer:
    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_announced_bytes = _announced_bytes(scope)
        if num_announced_bytes is not None and num_announced_bytes <= self._max_body_bytes:
            await self._app(scope, receive, send)
            return
        is_too_large = num_announced_bytes is not None
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes, is_too_large
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    is_too_large = True
                    raise request_too_large(self._max_body_bytes)
            return message

        async def send_and_linger(message: Message) -> None:
            if is_too_large and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})  # Its length was announced, so the client has it all.
                await _drop_body(receive)
                message = {"type": "http.response.body"}
            await send(message)

        if is_too_large:
            await request_too_large(self._max_body_bytes).response()(scope, receive, send_and_linger)
            return
        await self._app(scope, counted_receive, send_and_linger)


async def _drop_body(receive: Receive) -> None:
    """Read on until the body ends, the client leaves or `LINGER_S` have passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass


def _announced_bytes(scope: Scope) -> int | None:
    """`Content-Length`, or None: the HTTP parser has refused a malformed one, and one beside chunks, already."""
    value = headers_of(scope).get(b"content-length", b"")
    # Digits beyond the twentieth only make it larger than every limit, and Python reads no number of thousands.
    return int(value.lstrip(b"0")[:20] or b"0") if value.isdigit() else None
