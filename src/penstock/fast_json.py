"""JSON as bytes, by msgspec: many times faster than the standard library, and strict.

NaN and the infinities are written as `null`, and refused when they are read. msgspec leaves a free-threaded Python's GIL off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from penstock._float_text import text_of_floats

DecodeError = json.JSONDecodeError
Raw = msgspec.Raw
"""JSON that is written as it is."""

_AT_BYTE = re.compile(r" \(byte (\d+)\)$")
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_SURROGATES, _LOW = range(0xD800, 0xE000), range(0xDC00, 0xE000)

MAX_CONTAINERS = 100_000
"""Most objects and lists in a client's JSON. Parsing the two million that fit into 4 MiB takes most of a second."""
MAX_ELEMENTS = 2**18
"""Most elements of its lists and objects, such as token ids. Parsing this many token ids blocks the process for tens of ms,
and as many long numbers for more than a second."""


def dumps(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value as JSON without white space. It may hold dataclasses, enums, `Raw` and NumPy arrays.

    `default` converts objects of other types, here also arrays.
    """
    return _encode(value) if default is None else msgspec.json.encode(value, enc_hook=default)


def loads(data: bytes | str) -> Any:
    """Return the value of JSON. Raises `DecodeError`, with line and column, if it is not JSON, or too deep for the stack."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _located(data, error) from None


def excess(data: bytes) -> str:
    """Return what JSON has too much of to be parsed in a short time, or "". It is not parsed for that."""
    if _is_more(data, b"{[", MAX_CONTAINERS):
        return f"more than {MAX_CONTAINERS} objects and lists"
    if _is_more(data, b",", MAX_ELEMENTS):
        return f"more than {MAX_ELEMENTS} token ids, or other elements of lists and objects"
    return ""


def _is_more(data: bytes, marks: bytes, limit: int) -> bool:
    """Return whether JSON has more than `limit` of the characters `marks` outside of strings, without parsing it."""
    if _count(data, marks) <= limit:
        return False
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _count(b"".join(unescaped.split(b'"')[::2]), marks) > limit


def _count(data: bytes, marks: bytes) -> int:
    return sum([data.count(mark) for mark in marks])


def is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested in more than `most` levels."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return False
    return bool(level)


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # of a class of its own
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's, which this file does not import
        is_written = value.dtype == "float32" and value.ndim in (1, 2) and value.flags.c_contiguous
        return Raw(text_of_floats(value)) if is_written else value.tolist()
    raise TypeError(f"{type(value).__name__} can't be written as JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_decode = msgspec.json.Decoder().decode


def _located(data: bytes | str, error: Exception) -> DecodeError:
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    if isinstance(error, RecursionError):
        return DecodeError("nested too deeply", text, 0)
    if text.startswith("\ufeff"):
        return DecodeError("a byte order mark (BOM) before the value", text, 0)
    if isinstance(data, bytes):
        try:
            data.decode()
        except UnicodeDecodeError as wrong:  # msgspec's words for it depend on its version, and do not tell the place
            return DecodeError(f"byte 0x{data[wrong.start]:02x} is not UTF-8", text, len(data[: wrong.start].decode()))
    if (at := _half_surrogate(text)) is not None:
        return DecodeError("half of a surrogate pair", text, at)
    message, found = str(error).removeprefix("JSON is malformed: "), _AT_BYTE.search(str(error))
    if found is None:
        is_cut = "truncated" in message
        return DecodeError("unexpected end" if is_cut else message.partition(" - at ")[0], text, len(text) if is_cut else 0)
    before = text.encode()[: int(found[1])]
    return DecodeError(_AT_BYTE.sub("", message), text, len(before.decode("utf-8", "ignore")))


def _half_surrogate(text: str) -> int | None:
    """Return the index of the first escape that is half of a surrogate pair without the other half, or None."""
    high: re.Match[str] | None = None
    for escape in _ESCAPES.finditer(text):
        code = int(escape[1], 16) if escape[1] else 0
        if high is not None:
            if code not in _LOW or escape.start() != high.end():
                return high.start()
            high = None
        elif code in _LOW:
            return escape.start()
        elif code in _SURROGATES:
            high = escape
    return None if high is None else high.start()
