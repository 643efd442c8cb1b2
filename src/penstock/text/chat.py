"""Turns chat messages into the prompt text that a model was trained on.

Chat templates are untrusted Jinja2 programs, so they run in a process with limits on time and memory
(docs/decisions/chat-templates.md). This file starts and replaces that process; `chat_environment` runs in it.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from penstock.text.builtin_templates import BUILTIN_TEMPLATES
from penstock.types.errors import ConfigError, Rejected, RejectReason, wrong

_log = logging.getLogger(__name__)

MAX_NAMES = 20
"""Most template names in an error message."""
_WAIT_FACTOR = 30
"""Wall-clock limit as a multiple of the CPU limit. It is high because a busy machine may run the process rarely."""
_CONTINUE_MARK = "<|penstock continues here|> "
"""Appended to the last message to find its end in the rendered text. The final space shows whether the template trims."""
_DOUBLED_CALL = r"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}"
_REMEDY = "Correct it, or give another one with --chat-template."
_START = (
    "import json, sys; sys.path[:] = sys.argv[2:]; from penstock.text.chat_environment import serve; "
    "serve(**json.loads(sys.argv[1]))"
)


class ChatTemplate:
    """A chat template in a process of its own, which ends when this object does. Thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str | tuple[str, ...]],
        max_chars: int = 8 << 20,
        max_s: float = 2.0,
        max_memory_bytes: int = 256 << 20,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens` are variables of the template (`Tokenizer.special_tokens`). `now` is the clock of `strftime_now`.

        A rendering makes at most `max_chars`. Compilation and each rendering take at most `max_s` of CPU time. The process has
        an address space of `max_memory_bytes`; Python and Jinja2 take 25 MiB of it.

        Raises `ConfigError` if the template is not valid Jinja2, with the line, or reaches a limit when it is compiled.
        """
        self.source = source
        self.now = now
        """The template's clock."""
        self._max_s = max_s
        self._max_memory_bytes = max_memory_bytes
        self._max_chars = max_chars
        self._lock = threading.Lock()
        """Callers wait for each other."""
        self._child = self._start()
        self._special_tokens = dict(special_tokens)
        self._reserved = frozenset([*special_tokens, "messages", "add_generation_prompt"])
        self._reads_functions = "functions" in source  # few do

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt text, to be encoded with `add_special_tokens=False`.

        `now` is the time for `strftime_now`, or None for the present. `continue_final_message` leaves the last message open, so
        that the model goes on writing it. `variables` are JSON data for the template (`chat_template_kwargs`, `tools`). Blocks
        for at most 30 * `max_s`, and for the renderings before it.
        Raises `Rejected` if the template refuses the messages, fails on them or reaches a limit, or if its process ends.
        """
        self._check(messages, variables, add_generation_prompt=add_generation_prompt, is_continued=continue_final_message)
        if continue_final_message:
            *others, last = messages
            marked = [*others, {**last, "content": last["content"] + _CONTINUE_MARK}]
            return _cut_at_mark(self._render(marked, now, variables, add_generation_prompt=False), last["content"])
        return self._render(messages, now, variables, add_generation_prompt=add_generation_prompt)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        given = (
            {"tools": None, "documents": None}
            | (_functions(variables) if self._reads_functions else {})
            | self._special_tokens
            | dict(variables)
            | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        )
        question = json.dumps({"variables": given, "now": (now or self.now()).isoformat()}).encode()
        with self._lock:
            if self._child.has_ended():
                try:
                    self._child = self._start()
                except ConfigError as error:
                    raise _unavailable(error.message) from error
            try:
                return self._child.ask(question)
            except _TemplateError as error:
                raise wrong(str(error), "messages") from error
            except _Ended as error:
                self._blame(error)

    @property
    def pid(self) -> int:
        """Id of the current process, for logs and signals."""
        return self._child.pid

    def _start(self) -> _Child:
        child = _Child(max_s=self._max_s, max_memory_bytes=self._max_memory_bytes, max_chars=self._max_chars)
        try:
            child.ask(self.source.encode("utf-8", "surrogatepass"))
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
            _log.warning(
                "process %d of the chat template ended with status %d; the next is started later", self.pid, error.status
            )
            raise _unavailable("The process of the chat template ended.") from error
        _log.warning("the chat template needed more than %s for one conversation, which was refused", limit)
        raise wrong(f"The chat template needs more than {limit} for these messages.", "messages") from error

    def _limit(self, error: _Ended) -> str | None:
        limits = {
            -signal.SIGPROF: f"{self._max_s:g} s",
            -signal.SIGALRM: f"{_WAIT_FACTOR * self._max_s:g} s by the clock",
            errno.ENOMEM: f"{self._max_memory_bytes >> 20} MiB of memory",
        }
        return limits.get(error.status)

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Iterable[str],
        *,
        add_generation_prompt: bool,
        is_continued: bool,
    ) -> None:
        if not messages:
            raise wrong("There are no messages.", "messages")
        taken = self._reserved.intersection(variables)
        if taken:
            names = ", ".join(f"'{name}'" for name in sorted(taken))
            raise wrong(f"The server sets these template variables itself: {names}.", "chat_template_kwargs")
        if not is_continued:
            return
        if add_generation_prompt:
            raise wrong(
                "add_generation_prompt and continue_final_message exclude each other: a reply is either begun or continued.",
                "continue_final_message",
            )
        if not isinstance(messages[-1].get("content"), str):
            raise wrong("continue_final_message needs a last message with text to continue.", "messages")


def _functions(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable `functions`: the tools as JSON text, which some templates read instead of `tools`."""
    tools = variables.get("tools")
    return {"functions": json.dumps(tools, ensure_ascii=False, indent=2)} if tools else {}


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return the template itself. If it is None, raises `Rejected` with a remedy."""
    if template is None:
        raise wrong(
            "This model has no chat template, or only named ones, so messages cannot be turned into a prompt. "
            "Use /v1/completions, or start the server with --chat-template, which takes a name, a file or a template.",
            "messages",
        )
    return template


def choose_chat_template(value: str | None, named: Mapping[str, str]) -> str | None:
    """Return the source of the chat template, or None. Raises `ConfigError`.

    `value` (`--chat-template`) is a name in `named` (the templates of the model's files), the name of a built-in template, a
    template, or a path. Without a value, `default` in `named` is taken, and `tool_use` for requests with tools.
    """
    named = {name: _with_single_braces(source) for name, source in named.items()}
    if value is None:
        plain, with_tools = named.get("default"), named.get("tool_use")
        return plain if plain is None or with_tools is None else _either(with_tools, plain)
    if value in named:
        return named[value]
    if value in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[value]
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"The chat template {value!r} cannot be read: {reason}.",
            remedy="--chat-template takes the path of a Jinja2 file, the template itself, a built-in one "
            f"({', '.join(BUILTIN_TEMPLATES)}), or a name that the model has for "
            f"one: {', '.join(sorted(named)[:MAX_NAMES]) or 'it has none'}.",
        ) from error


def _with_single_braces(source: str) -> str:
    """Correct Qwen2.5-Coder's template: its example of a tool call has doubled braces, which the model would copy."""
    if _DOUBLED_CALL not in source:
        return source
    _log.info("The chat template shows tool calls in doubled braces; the model is shown single ones.")
    return source.replace(_DOUBLED_CALL, _DOUBLED_CALL[1:-1])


def _either(with_tools: str, plain: str) -> str:
    """Return a template that renders `with_tools` if there are tools, else `plain`.

    Jinja2 drops a line break at the end of a template and after a tag, hence the suffix and the empty expressions.
    """
    with_tools, plain = (source.removesuffix("\n") for source in (with_tools, plain))
    return f"{{% if tools %}}{{{{ '' }}}}{with_tools}{{% else %}}{{{{ '' }}}}{plain}{{% endif %}}"


def _cut_at_mark(text: str, content: str) -> str:
    """Return the rendered text before `_CONTINUE_MARK`, which follows the last message. Trims it if the template trims
    contents.
    """
    at = text.rfind(_CONTINUE_MARK)
    if at >= 0:
        return text[:at]
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise wrong("The chat template does not show the last message, so it cannot be continued.", "messages")
    # A content of white space is trimmed away, so the white space before the mark is the template's.
    return text[:at].rstrip() if content.strip() else text[:at]


class _TemplateError(Exception):
    """The template, or Jinja2, refused or failed."""


class _Ended(Exception):
    """The template's process ended instead of answering."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
        """The exit status, or minus the number of the signal."""


def _environment() -> dict[str, str]:
    # Without its own setting a free-threaded Python reserves 1 GiB at its start, to which no later limit applies.
    return {
        "MIMALLOC_ARENA_RESERVE": "0",
        # Python may need this one to find its own library.
        **{name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
    }


class _Child:
    """A process that runs `chat_environment.serve`. It ends at a limit, or when this object or the server does."""

    def __init__(self, *, max_s: float, max_memory_bytes: int, max_chars: int) -> None:
        limits = json.dumps(
            {
                "max_s": max_s,
                "max_wait_s": _WAIT_FACTOR * max_s,
                "max_memory_bytes": max_memory_bytes,
                "max_chars": max_chars,
            }
        )
        # With the paths given it needs no `site`, which saves half of its start and a fifth of its memory.
        paths = [*sys.path, str(Path(__file__).parents[2])]
        self._max_answer_bytes = 4 * max_chars + (1 << 16)
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-I", "-S", "-B", "-c", _START, limits, *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                process_group=0,  # Ctrl-C in a terminal is for the server, which still answers then
            )
        except OSError as error:
            raise ConfigError(f"The process of the chat template cannot be started: {error.strerror}.") from error
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: bytes) -> str:
        """Send a message to the process and return its answer. Raises `_TemplateError` or `_Ended`."""
        try:
            _write(self._stdin.fileno(), len(question).to_bytes(8) + question)
            text = self._read().decode("utf-8", "surrogatepass")
        except (BrokenPipeError, EOFError):
            raise _Ended(self._process.wait()) from None
        except BaseException:  # Ctrl-C: the next question must not get this one's answer
            _end(self._process)
            raise
        if text.startswith("-"):
            raise _TemplateError(text[1:])
        return text[1:]

    def _read(self) -> bytes:
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
    with process:  # closes the pipes and reaps the process
        pass


def _unavailable(detail: str) -> Rejected:
    return Rejected(RejectReason.UNAVAILABLE, detail, retry_after_s=5.0)
