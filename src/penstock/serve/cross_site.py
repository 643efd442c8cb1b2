"""Pages of other sites, shown by a browser on this machine, can't use a server that asks for no key. A layer of the app.

A browser sends a form, or text, to any address without asking first, localhost included; JSON that is called so only after
a CORS preflight, which this server does not answer. So a POST that a page of another origin sent must say that it is JSON.
A page whose host name is made to resolve to this machine (DNS rebinding) is of the same origin; only a key keeps it out.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.headers import headers_of
from penstock.serve.openai.errors import cross_site

_OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` (W3C Fetch Metadata) for our own pages, and for what the user did without a page."""


class CrossSiteLayer:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = headers_of(scope)
            if _is_of_another_site(headers) and not _is_json(headers):
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


def _is_json(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"
