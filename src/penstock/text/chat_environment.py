"""The Jinja2 sandbox in which chat templates run. Used by `ChatTemplate` alone, and imported only with the first one.

What templates may use follows transformers' `apply_chat_template`, which model authors write them for: trimmed blocks,
loop controls, `tojson`, `raise_exception`, `strftime_now` and `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock.types.errors import ConfigError, Rejected, RejectReason

MAX_RANGE_ITEMS = 100_000
"""Loop rounds that all `range` calls of one rendering may give together."""


class Renderer:
    """One compiled template. Thread-safe."""

    def __init__(self, source: str, *, max_chars: int, now: Callable[[], datetime]) -> None:
        """Raises `ConfigError` if the template is not valid."""
        self._max_chars = max_chars
        try:
            self._template = _make_environment(max_chars, now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is not valid Jinja2: line {error.lineno}: {error.message}.",
                remedy="Correct it, or give another one with --chat-template.",
            ) from error
        except RecursionError as error:
            raise ConfigError("The chat template is nested too deeply.") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises `Rejected` naming `messages`, whatever goes wrong: the template is data, and so is what it is given."""
        try:
            return self._collect(variables)
        except Rejected:
            raise
        except jinja2.TemplateError as error:
            raise _refused(f"The chat template refuses these messages: {error.message or 'it gives no reason'}") from error
        except RecursionError as error:
            raise _refused("The messages are nested too deeply for the chat template.") from error
        except Exception as error:  # a template can fail in as many ways as Python code
            raise _refused(f"The chat template fails on these messages: {type(error).__name__}: {error}") from error

    def _collect(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate({**variables, "range": _Range()}):
            num_chars += len(part)
            if num_chars > self._max_chars:
                raise _refused(f"The chat template makes more than {self._max_chars} characters of these messages.")
            parts.append(part)
        return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses to multiply its way to a huge string or number; Jinja2 only bounds a single `range`."""

    intercepted_binops = frozenset(["*", "**"])
    max_chars: int

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("chat templates cannot raise to a power")
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(count, int) and len(value) * count > self.max_chars:
                raise jinja2.exceptions.SecurityError("a repeated value is too long")
        return super().call_binop(context, operator, left, right)


class _Range:
    """`range` with a budget per rendering, so that nested loops are bounded as well."""

    __slots__ = ("_num_left",)

    def __init__(self) -> None:
        self._num_left = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        items = range(*bounds)
        # At least one per call: an empty range in an endless nest of loops costs time as well.
        self._num_left -= max(len(items), 1)
        if self._num_left < 0:
            raise jinja2.exceptions.SecurityError(f"more than {MAX_RANGE_ITEMS} rounds of loops over range()")
        return items


class _Namespace(Namespace):
    """Refuses private names, which could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # self is positional, as in Jinja2: `namespace(self=1)` must work
        self, *rest = args
        Namespace.__init__(self, *rest, **attributes)
        for name in dict(*rest, **attributes):
            _check_public(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _make_environment(max_chars: int, now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.max_chars = max_chars
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja2's own filter it doesn't escape HTML and keeps the order of keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    """A function instead of the class, whose attributes a template has no use for."""
    return dict(*args, **items)


def _check_public(name: str) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the private name {name!r}")


def _refused(detail: str) -> Rejected:
    return Rejected(RejectReason.INVALID, detail, param="messages")
