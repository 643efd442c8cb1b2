"""From the bytes that a client sent to a body of which every field is checked by itself. Called by readers, on any thread.

Knows no model. A body that would keep the interpreter's lock for long (very many objects, very many findings) is refused early.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from penstock.serve.errors import from_finding, invalid
from penstock.serve.openai.schemas import Body
from penstock.types.errors import counted

_log = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=Body)

INLINE_MAX_BYTES = 1 << 15
"""Bodies up to here are read within a few milliseconds, so the event loop may do it."""

MAX_CONTAINERS = 100_000
"""Objects and lists in one body. Text and token ids are not counted, so only what is no request has more: the parser would
spend most of a second on the two millions that fit into 4 MiB, and nothing else in the process could run meanwhile."""

MAX_LOGGED_NAMES, MAX_LOGGED_CHARS = 100, 64
"""Limits of what is logged about ignored parameters: clients choose the names, and could fill the log and the memory."""


class IgnoredParameters:
    """The names that were ignored so far under `--ignore-unknown-parameters`. Each is logged once, by whichever thread."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._logged) == MAX_LOGGED_NAMES:
                return
            shown = name[:MAX_LOGGED_CHARS]
            with self._lock:
                if shown in self._logged or len(self._logged) == MAX_LOGGED_NAMES:
                    continue
                self._logged.add(shown)
                is_last = len(self._logged) == MAX_LOGGED_NAMES
            _log.warning("the parameter %r is ignored (--ignore-unknown-parameters)", shown)
            if is_last:
                _log.warning("names of further parameters that are ignored are not logged")


def parse_body(data: bytes, body_type: type[_Body], ignored: IgnoredParameters | None = None) -> _Body:
    """The body. Raises 400 for the first thing that is wrong.

    `ignored` takes note of unknown fields and of unsupported hints; without it they are wrong.
    """
    value = _load(data)
    if ignored is not None and isinstance(value, dict):
        unknown = [name for name in value if name not in body_type.field_names]
        for name in unknown:
            del value[name]
        ignored.note(unknown)
    try:
        body = body_type.model_validate(value)
    except ValidationError as error:
        raise from_finding(error.errors(include_url=False)[0]) from None
    hints = _refuse_unsupported(body, ignores_hints=ignored is not None)
    if ignored is not None:
        ignored.note(hints)
    return body


def _refuse_unsupported(body: Body, *, prefix: str = "", ignores_hints: bool = False) -> list[str]:
    """Raise a 400 that names a field which asks for something that is not there yet. Descends into nested bodies.

    With `ignores_hints` those of the body itself are not refused. Returns their names.
    """
    hints: list[str] = []
    unsupported = body.unsupported
    for name in sorted(body.model_fields_set):  # few, and the others ask for nothing
        value = getattr(body, name)
        if value is None:
            continue
        param = f"{prefix}{name}"
        if isinstance(value, Body):
            _refuse_unsupported(value, prefix=f"{param}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, item in enumerate(value):
                _refuse_unsupported(item, prefix=f"{param}[{index}].")
        elif name in unsupported:
            field = unsupported[name]
            if ignores_hints and field.is_hint and not field.is_neutral(value):
                hints.append(name)
            else:
                field.refuse(value, param)
    return hints


def _load(data: bytes) -> Any:
    if _has_too_many_containers(data):
        raise invalid(f"The body has more than {MAX_CONTAINERS} objects and lists.")
    try:
        # Faster than the standard library, and strict about NaN, surrogates and depth.
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(_why_no_json(data, error)) from error


def _why_no_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        before = data[: wrong.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        byte = data[wrong.start]
        return (
            f"The body is not UTF-8, as JSON has to be: byte 0x{byte:02x} after {counted(wrong.start, 'byte')}, "
            f"line {line} column {column}."
        )
    if "surrogate" in error.msg:
        place = f"line {error.lineno} column {error.colno}"
        return f"The body is not valid JSON: a \\u escape is half a surrogate pair, without the other half: {place}."
    return f"The body is not valid JSON: {error}."


def _has_too_many_containers(data: bytes) -> bool:
    if _num_openers(data) <= MAX_CONTAINERS:
        return False
    # Brackets within strings are text: look again without strings.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _num_openers(b"".join(unescaped.split(b'"')[::2])) > MAX_CONTAINERS


def _num_openers(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")
