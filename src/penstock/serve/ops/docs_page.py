"""`/docs`: the OpenAPI document as a page with one row per route.

The page works without the internet: it loads nothing from other hosts and runs no script.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Forbids the page to load anything (https://www.w3.org/TR/CSP3/)."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; color-scheme: light dark }}
td {{ padding: .3em 1em .3em 0; vertical-align: top }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{description} What each route takes: <a href="openapi.json">openapi.json</a>, for programs that read OpenAPI.</p>
<table>
{rows}
</table>
</body>
</html>
"""


def docs_page(document: Mapping[str, Any]) -> HTMLResponse:
    """Return the page of an OpenAPI 3.1 document, with its paths, methods and summaries."""
    rows = [
        f"<tr><td>{escape(method.upper())}</td><td><code>{escape(path)}</code></td><td>{escape(operation['summary'])}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    info = document["info"]
    page = _PAGE.format(
        title=escape(f"{info['title']} {info['version']}"), description=escape(info["description"]), rows="\n".join(rows)
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})
