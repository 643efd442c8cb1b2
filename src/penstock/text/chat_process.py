"""A chat template in a process of its own, which the kernel ends at a limit of time or memory. Used by `ChatTemplate` alone.

This is the server's half: it starts the process, asks it and replaces it. The other half, with what they say to each other, is
`chat_environment`. Why there is a process: docs/decisions/chat-templates.md.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from penstock.types.errors import ConfigError, Rejected, RejectReason

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0
_REMEDY = "Correct it, or give another one with --chat-template."
_START = (
    "import json, sys; sys.path[:] = sys.argv[2:]; from penstock.text.chat_environment import serve; "
    "serve(**json.loads(sys.argv[1]))"
)


class TemplateProcess:
    """One template, compiled. Thread-safe: callers wait for each other."""

    def __init__(self, source: str, *, max_chars: int, max_s: float, max_memory_bytes: int) -> None:
        """Raises `ConfigError` if the template is not valid, or reaches a limit already."""
        self._source = source.encode("utf-8", "surrogatepass")
        self._max_s = max_s
        self._max_memory_bytes = max_memory_bytes
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._child = self._start()

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """What the template makes of JSON data. A process that has ended is replaced first.

        Raises `Rejected`: INVALID, naming `messages`, for whatever the template does; UNAVAILABLE if there is no process.
        """
        try:
            question = json.dumps({"variables": variables, "now": now.isoformat()}).encode()
        except RecursionError as error:
            raise _refused("The messages are nested too deeply for the chat template.") from error
        with self._lock:
            if self._child.has_ended():
                try:
                    self._child = self._start()
                except ConfigError as error:
                    raise _unavailable(error.message) from error
            try:
                return self._child.ask(question)
            except _TemplateError as error:
                raise _refused(str(error)) from error
            except _Ended as error:
                self._blame(error)

    def _start(self) -> _Child:
        child = _Child(max_s=self._max_s, max_memory_bytes=self._max_memory_bytes, max_chars=self._max_chars)
        try:
            child.ask(self._source)
        except _TemplateError as error:
            raise ConfigError(str(error), remedy=_REMEDY) from error
        except _Ended as error:
            limit = self._limit(error)
            if limit is None:
                raise ConfigError(f"The process of the chat template ended with status {error.status}.") from error
            raise ConfigError(f"The chat template cannot be compiled: that needs more than {limit}.", remedy=_REMEDY) from error
        return child

    def _blame(self, error: _Ended) -> NoReturn:
        limit = self._limit(error)
        if limit is None:
            _log.warning("the process of the chat template ended with status %d; another is started when needed", error.status)
            raise _unavailable("The process of the chat template ended.") from error
        _log.warning("the chat template needed more than %s for one conversation, which was refused", limit)
        raise _refused(f"The chat template needs more than {limit} for these messages.") from error

    def _limit(self, error: _Ended) -> str | None:
        """The limit that ended the process, if one did."""
        limits = {
            -signal.SIGALRM: f"{self._max_s:g} s",
            errno.ENOMEM: f"{self._max_memory_bytes >> 20} MiB of memory",
        }
        return limits.get(error.status)


class _TemplateError(Exception):
    """What the template, or Jinja2, says against the question."""


class _Ended(Exception):
    """The process has ended instead of answering."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
        """The exit status; of a signal, its number below zero."""


class _Child:
    """A process that runs `chat_environment.serve`. It ends with this object, with this process, or at a limit."""

    def __init__(self, *, max_s: float, max_memory_bytes: int, max_chars: int) -> None:
        """Raises `ConfigError` if no process can be started."""
        limits = json.dumps({"max_s": max_s, "max_memory_bytes": max_memory_bytes, "max_chars": max_chars})
        # The paths are told, so that it needs no `site`: that saves half of its start and a fifth of its memory.
        paths = [*sys.path, str(Path(__file__).parents[2])]
        self._max_answer_bytes = 4 * max_chars + (1 << 16)
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-I", "-S", "-B", "-c", _START, limits, *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Python may need this one to find its own library.
                env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
                process_group=0,  # Ctrl-C in a terminal is for the server, which still answers then
            )
        except OSError as error:
            raise ConfigError(f"The process of the chat template cannot be started: {error.strerror}.") from error
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        weakref.finalize(self, _end, self._process)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: bytes) -> str:
        """The answer's text. Raises `_TemplateError` or `_Ended`."""
        try:
            _write(self._stdin.fileno(), len(question).to_bytes(8) + question)
            text = self._read().decode("utf-8", "surrogatepass")
        except (BrokenPipeError, EOFError):
            raise _Ended(self._process.wait()) from None
        except BaseException:  # Ctrl-C: the answer that is still to come must not be taken for the next one's
            _end(self._process)
            raise
        if text.startswith("-"):
            raise _TemplateError(text[1:])
        return text[1:]

    def _read(self) -> bytes:
        """The next message. Raises `EOFError`."""
        head = self._stdout.read(8)
        num_bytes = int.from_bytes(head)
        if num_bytes > self._max_answer_bytes:
            self._process.kill()
            raise EOFError
        data = self._stdout.read(num_bytes)
        if len(head) < 8 or len(data) < num_bytes:
            raise EOFError
        return data


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes the pipes and takes the exit status
        pass


def _refused(detail: str) -> Rejected:
    return Rejected(RejectReason.INVALID, detail, param="messages")


def _unavailable(detail: str) -> Rejected:
    return Rejected(RejectReason.UNAVAILABLE, detail, retry_after_s=_RETRY_AFTER_S)
