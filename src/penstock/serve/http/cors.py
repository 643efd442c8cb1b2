"""Lets pages of other origins read answers (`--allowed-origins`; https://fetch.spec.whatwg.org/#http-cors-protocol).

`Cors` adds headers for browsers. It refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.types import Message

from penstock.types.errors import ConfigError

_METHODS = b"GET, POST, DELETE"
_EXPOSED = (
    b"X-Request-Id, Request-Id, Server-Timing, Retry-After, Retry-After-Ms, X-Should-Retry, X-Tools-Left-Out, X-Route, "
    b"X-Sources, X-Check"
)
"""Headers that a page may read in addition to the usual ones."""
_MAX_AGE_S = 600
"""For this time, a browser reuses the answer to a preflight."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TOKENS = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, \t-]{1,4096}")
"""A list of headers' names (RFC 9110, 5.6.2)."""

_HOST = re.compile(rb"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?P<port>:[0-9]{1,5})?")
_ORIGIN = re.compile(rb"https?://" + _HOST.pattern)

Headers = list[tuple[bytes, bytes]]


class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: like `https://example.org:8443` or `app://name`; or a host (and port) for http and https; or `*`.

        Raises `ConfigError` for values that no browser would send.
        """
        self._takes_any = "*" in origins
        hosts = [origin.strip().lower() for origin in origins if _HOST.fullmatch(origin.strip().lower().encode())]
        self._hosts = frozenset(host.encode() for host in hosts if host != "null")
        self._origins = frozenset(
            _checked(origin) for origin in origins if origin != "*" and origin.strip().lower().encode() not in self._hosts
        )

    def headers(self, request: Mapping[bytes, bytes]) -> Headers:
        """Return headers to add to the answer. `request`: the request's headers."""
        # Caches must keep the answers to different origins apart.
        found: Headers = [] if self._takes_any else [(b"vary", b"Origin")]
        if self.allows(request):
            found.append((b"access-control-allow-origin", b"*" if self._takes_any else request[b"origin"]))
            if not self._takes_any:
                found.append((b"access-control-allow-credentials", b"true"))
            found.append((b"access-control-expose-headers", _EXPOSED))
        return found

    def preflight(self, method: str, request: Mapping[bytes, bytes]) -> Message | None:
        """Return the head of the answer to an allowed origin's preflight. None for other requests.

        Preflights have no key. All requested headers are allowed by name, because `*` would not include Authorization.
        """
        if method != "OPTIONS" or b"access-control-request-method" not in request or not self.allows(request):
            return None
        headers = [
            (b"content-length", b"0"),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
            (b"vary", b"Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]
        asked = request.get(b"access-control-request-headers", b"")
        if _TOKENS.fullmatch(asked):
            headers.append((b"access-control-allow-headers", asked))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def allows(self, request: Mapping[bytes, bytes]) -> bool:
        """Return whether a page of an allowed origin sent the request. `request`: the request's headers."""
        origin = request.get(b"origin")
        if origin is None:
            return False
        if self._takes_any or origin.lower() in self._origins:  # hosts of an app's scheme keep their capitals
            return True
        parts = _ORIGIN.fullmatch(origin)
        return parts is not None and not self._hosts.isdisjoint((parts["host"], parts["host"] + (parts["port"] or b"")))


def _checked(origin: str) -> bytes:
    """Return an origin in lowercase, without the scheme's default port."""
    remedy = "Give one --allowed-origins for each: https://example.org, localhost:3000 or localhost. * allows any origin."
    try:
        parts = urlsplit(origin.strip())
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        parts, port, host = urlsplit(""), None, ""
    is_whole = parts.scheme not in ("", "file", "ftp") and host.isascii() and parts.path in ("", "/")
    if not host or not is_whole or parts.query or parts.fragment or "@" in parts.netloc or "*" in host:
        raise ConfigError(f"{origin!r} is not the origin of a page (--allowed-origins).", remedy=remedy)
    host = f"[{host}]" if ":" in host else host
    is_default = port in (None, _DEFAULT_PORTS.get(parts.scheme))
    return f"{parts.scheme}://{host}{'' if is_default else f':{port}'}".encode()
