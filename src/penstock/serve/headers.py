"""Looks up a request's headers by name. Used by the layers and the endpoints, a dozen names for each request, most not there.

ASGI has them as a list of pairs with names in small letters; here they are put into a table once. Never judges a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Scope

_SCOPE_KEY = "penstock.headers"


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Name, in small letters -> value. Of a header that was sent more than once, the first."""
    table: dict[bytes, bytes] | None = scope.get(_SCOPE_KEY)
    if table is None:
        table = scope[_SCOPE_KEY] = dict(reversed(scope["headers"]))
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
