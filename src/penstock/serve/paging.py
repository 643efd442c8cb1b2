"""Query parameters of lists that come in pages, and such a page in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from starlette.requests import Request as HttpRequest
from typing_extensions import TypedDict

from penstock.serve.errors import invalid

_Listed = TypeVar("_Listed", bound=Mapping[str, Any])


class Page(TypedDict, Generic[_Listed]):
    object: Literal["list"]
    data: list[_Listed]
    first_id: str | None
    last_id: str | None
    has_more: bool


def read_count(http: HttpRequest, name: str, default: int, low: int, high: int) -> int:
    """Return the query parameter `name`, a number from `low` to `high`, or the default without it. Raises 400."""
    text = http.query_params.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise invalid(f"'{name}' must be an integer from {low} to {high}.", name)
    return int(text)


def page_of(http: HttpRequest, default: int, most: int) -> tuple[int, str | None]:
    """Return the length of a page, and the id before it. Raises 400."""
    return read_count(http, "limit", default, 1, most), http.query_params.get("after")


def is_ascending(http: HttpRequest) -> bool:
    """Return whether `order` is `asc`. The default is `desc`. Raises 400."""
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("'order' must be 'asc' or 'desc'.", "order")
    return order == "asc"


def listed(data: list[_Listed], limit: int) -> Page[_Listed]:
    """Return a page of a list. `data` has one more than the page if others follow."""
    page = data[:limit]
    ids = [str(one["id"]) for one in page]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": len(data) > limit,
    }
