"""Request bodies: from the bytes that a client sent to the checked body of a route. Called by the routes, before the endpoints.

Knows no model and no tokenizer. Whatever the bytes are, the event loop is not held up: large bodies are read in a thread,
and what would keep the interpreter's lock for long (very many objects, very many findings) is refused early.
"""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.types import Scope

from penstock.serve.headers import headers_of
from penstock.serve.off_loop import OffLoop
from penstock.serve.openai.errors import from_finding, invalid, unsupported_encoding
from penstock.serve.openai.schemas import Body
from penstock.serve.openai.unsupported import refuse_unsupported

_Body = TypeVar("_Body", bound=Body)

_INLINE_MAX_BYTES = 1 << 16
"""Bodies up to here are parsed and checked within a millisecond or two."""

MAX_CONTAINERS = 100_000
"""Objects and lists in one body. Text and token ids are not counted, so only what is no request has more: the parser would
spend most of a second on the two millions that fit into 4 MiB, and nothing else in the process could run meanwhile."""


async def read_body(data: bytes, body_type: type[_Body], off_loop: OffLoop) -> _Body:
    """The body, every field of it checked. Raises 400 for the first thing that is wrong.

    Raises `Rejected` if too many are being read.
    """
    if len(data) <= _INLINE_MAX_BYTES:
        return parse_body(data, body_type)
    return await off_loop.run(len(data), lambda: parse_body(data, body_type), limit=_INLINE_MAX_BYTES)


def parse_body(data: bytes, body_type: type[_Body]) -> _Body:
    """As `read_body`, at once."""
    value = _load(data)
    try:
        body = body_type.model_validate(value)
    except ValidationError as error:
        raise from_finding(error.errors(include_url=False)[0]) from None
    refuse_unsupported(body)
    return body


def refuse_encoding(scope: Scope) -> None:
    """Raise a 415 that names `Content-Encoding`: bodies are taken as they are, so that their size is what was announced."""
    value = headers_of(scope).get(b"content-encoding")
    if value is None:
        return
    encoding = value.decode("latin-1")
    if encoding.strip().lower() not in ("", "identity"):
        raise unsupported_encoding(encoding)


def _load(data: bytes) -> Any:
    if _has_too_many_containers(data):
        raise invalid(f"The body has more than {MAX_CONTAINERS} objects and lists.")
    try:
        # Faster than the standard library, and strict about NaN, surrogates and depth.
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.") from error


def _has_too_many_containers(data: bytes) -> bool:
    if _num_openers(data) <= MAX_CONTAINERS:
        return False
    # Brackets within strings are text: look again without strings.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _num_openers(b"".join(unescaped.split(b'"')[::2])) > MAX_CONTAINERS


def _num_openers(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")
