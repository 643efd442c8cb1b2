"""The process that compiles and renders a chat template: a Jinja2 sandbox under limits that the kernel enforces.

`chat` runs it and asks through pipes. It imports nothing else of Penstock. It offers what transformers' `apply_chat_template`
does: trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now` and `{% generation %}`.

A message is its length (eight bytes, big-endian) and its content. The first question is the template, each later one a JSON
object with `variables` and `now`, an ISO 8601 time. An answer is `+` and the text, or `-` and the error, in UTF-8. At a limit
the process ends: for CPU time by SIGPROF, for wall-clock time by SIGALRM, for memory with status ENOMEM.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RANGE_ITEMS = 100_000
"""Most items of all `range` calls of one rendering."""
MAX_ERROR_CHARS = 1000
"""Longest error message. A template can put anything into one."""


def serve(*, max_s: float, max_wait_s: float, max_memory_bytes: int, max_chars: int) -> None:
    """Compile and render a chat template for the parent process, until the pipe is closed.

    Each question may take `max_s` of CPU time and `max_wait_s` by the clock. `max_memory_bytes` limits the address space.
    """
    # A service manager sends SIGTERM to every process of a server, which still answers the requests that it has admitted.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the server is gone
    for number in (signal.SIGPROF, signal.SIGALRM):  # whoever started the server may have ignored or blocked them
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    _set_limit(resource.RLIMIT_AS, max_memory_bytes)
    _set_limit(resource.RLIMIT_CORE, 0)
    template: _Template | None = None
    while (question := _read()) is not None:
        # A signal ends the process whatever it does, even in one call that takes minutes. CPU time is what is limited, so that
        # a busy machine refuses no template; the limit by the clock is for a template that waits.
        signal.setitimer(signal.ITIMER_PROF, max_s)
        signal.setitimer(signal.ITIMER_REAL, max_wait_s)
        try:
            try:
                if template is None:
                    template, text = _Template(question.decode("utf-8", "surrogatepass"), max_chars), "+"
                else:
                    text = "+" + template.render(question)
            except _Refused as error:
                text = "-" + str(error)[:MAX_ERROR_CHARS]
            answer = text.encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(errno.ENOMEM)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(len(answer).to_bytes(8) + answer)
        sys.stdout.buffer.flush()


def _set_limit(kind: int, most: int) -> None:
    _, allowed = resource.getrlimit(kind)
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(kind, (most, most))


def _read() -> bytes | None:
    head = sys.stdin.buffer.read(8)
    data = sys.stdin.buffer.read(int.from_bytes(head))
    return data if len(head) == 8 and len(data) == int.from_bytes(head) else None


class _Refused(Exception):
    """The template is invalid, or rendering it failed."""


class _Raised(jinja2.TemplateError):
    """The template called `raise_exception`. Any other error is a bug in the template."""


class _Template:
    def __init__(self, source: str, max_chars: int) -> None:
        """Compile a template. Raises `_Refused` if it is not valid."""
        self._max_chars = max_chars
        try:
            self._template = _make_environment(max_chars).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise _Refused(f"The chat template is not valid Jinja2: line {error.lineno}: {error.message}.") from error
        except RecursionError as error:
            raise _Refused("The chat template is nested too deeply.") from error
        except SyntaxError as error:  # from compiling Jinja2's generated code: too many nested loops, for example
            raise _Refused(f"The chat template cannot be compiled: {error.msg}.") from error

    def render(self, question: bytes) -> str:
        """Return the text for a question: JSON with `variables` and `now`. Errors, except `MemoryError`, raise `_Refused`."""
        try:
            fields = json.loads(question)
            return self._collect(fields["variables"], datetime.fromisoformat(fields["now"]))
        except (_Refused, MemoryError):
            raise
        except _Raised as error:
            raise _Refused(f"The chat template refuses these messages: {error.message or 'it gives no reason'}") from error
        except RecursionError as error:
            raise _Refused("The messages are nested too deeply for the chat template.") from error
        except Exception as error:  # a template can fail in as many ways as Python code
            raise _Refused(f"The chat template fails on these messages: {type(error).__name__}: {error}") from error

    def _collect(self, variables: Mapping[str, Any], now: datetime) -> str:
        def strftime_now(pattern: str) -> str:
            return now.strftime(pattern)

        parts: list[str] = []
        num_chars = 0
        # As llama.cpp has them: days without a time, so that cached prefixes last until midnight.
        days = {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
        for part in self._template.generate({"strftime_now": strftime_now, **days, **variables, "range": _Range()}):
            num_chars += len(part)
            if num_chars > self._max_chars:
                raise _Refused(f"The chat template renders these messages to more than {self._max_chars} characters.")
            parts.append(part)
        return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, which also refuses to build huge texts or numbers by multiplication. Jinja2 limits only a `range`."""

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
    """`range` for templates, with a limit on all steps of a rendering, even in nested loops."""

    __slots__ = ("_num_left",)

    def __init__(self) -> None:
        self._num_left = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        items = range(*bounds)
        # At least one per call: an empty range in an endless nest of loops costs time as well.
        self._num_left -= max(len(items), 1)
        if self._num_left < 0:
            raise jinja2.exceptions.SecurityError(f"more than {MAX_RANGE_ITEMS} iterations over range()")
        return items


class _Namespace(Namespace):
    """`namespace` for templates. Refuses private names, through which a template could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # self is positional, as in Jinja2: `namespace(self=1)` must work
        self, *rest = args
        Namespace.__init__(self, *rest, **attributes)
        for name in dict(*rest, **attributes):
            _check_public(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks the assistant's part for training. Here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _make_environment(max_chars: int) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.max_chars = max_chars
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Unlike Jinja2's own, it does not escape HTML and keeps the order of keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    """The function `dict` of templates. The class itself would show them its attributes."""
    return dict(*args, **items)


def _check_public(name: str) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the private name {name!r}")
