"""`/` and `/page/...`: the page for a browser, from the files in `serve/page`.

The files are listed at import, so no path of a request reaches the disk. They need no key, but their scripts' requests do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Browsers load only from this server, run no inline script, and never turn strings (a model's text) into HTML.
https://www.w3.org/TR/CSP3/, https://www.w3.org/TR/trusted-types/"""

_FOLDER = Path(__file__).parent.parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_NAMES = [path.relative_to(_FOLDER).as_posix() for path in sorted(_FOLDER.rglob("*.*")) if path.suffix in _KINDS]
_FILES = {"/" if name == "index.html" else f"/page/{name}": name for name in _NAMES}
PAGE_PATHS = frozenset(_FILES)
"""The paths of all files."""


@dataclass(frozen=True, slots=True)
class _Content:
    data: bytes
    etag: str
    """A strong ETag, in quotes."""


def page_routes() -> list[Route]:
    """Return a route for each file."""
    return [Route(path, _send) for path in _FILES]


@cache
def _content(name: str) -> _Content:
    data = (_FOLDER / name).read_bytes()
    return _Content(data, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


async def _send(http: HttpRequest) -> Response:
    """Return the file, or 304 if the browser has the current version. Browsers ask each time, so upgrades show at once."""
    name = _FILES[http.url.path]
    content = _content(name)
    headers = {
        "ETag": content.etag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
    if content.etag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(content.data, headers=headers, media_type=_KINDS[Path(name).suffix])
