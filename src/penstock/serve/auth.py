"""API keys: every route but `/health` and `/ready` needs one, if any are set. Keeps digests, never the keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.headers import values_of
from penstock.serve.openai.errors import ApiError, invalid_api_key
from penstock.types.errors import ConfigError

OPEN_PATHS = frozenset({"/health", "/ready"})
_SCOPE_KEY = "penstock.key_name"
_KEY_NAME_CHARS = 12


def key_name(scope: Scope) -> str:
    """A short, stable name of the key that was sent, safe to log; empty if no key is asked for."""
    name = scope.get(_SCOPE_KEY, "")
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
                scope[_SCOPE_KEY] = self._check(scope)
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
