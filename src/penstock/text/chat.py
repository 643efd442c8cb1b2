"""Turns chat messages into the prompt text that a model was trained on. Made once at start, used by `serve` and `cli`.

Templates are Jinja2 programs that come with the model, and nobody has read them: they run in a process of their own, under
limits of time, memory and output. Knows no tokens and no OpenAI content parts: contents are strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.text.chat_process import TemplateProcess
from penstock.types.errors import ConfigError, Rejected, RejectReason

DEFAULT_MAX_CHARS = 8 << 20
DEFAULT_MAX_S = 2.0
"""Of one rendering, and of the compilation."""
DEFAULT_MAX_MEMORY_BYTES = 256 << 20
"""Address space of the template's process, of which Python and Jinja2 take 25 MiB."""
_CONTINUE_MARK = "<|penstock continues here|> "
"""Put behind the last message to find its end in the rendered text. Its last space shows whether the template trims."""


class ChatTemplate:
    """Thread-safe. Has a process of its own, which ends with it."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str | tuple[str, ...]],
        max_chars: int = DEFAULT_MAX_CHARS,
        max_s: float = DEFAULT_MAX_S,
        max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens` are variables of the template (`Tokenizer.special_tokens`); `now` serves `strftime_now`.

        Raises `ConfigError` if the template is not valid Jinja2, with the line, or if the limits do not let it be compiled.
        """
        self.source = source
        self._process = TemplateProcess(source, max_chars=max_chars, max_s=max_s, max_memory_bytes=max_memory_bytes)
        self._now = now
        self._special_tokens = dict(special_tokens)
        self._reserved = frozenset([*special_tokens, "messages", "add_generation_prompt"])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text, to be encoded with `add_special_tokens=False`.

        `continue_final_message` leaves the last message open, so that the model goes on writing it. `variables` are
        further variables of the template (`chat_template_kwargs`, `tools`); plain JSON data.
        Blocks, for up to `max_s` and the renderings before it. Raises `Rejected` if the template refuses the messages,
        fails on them or reaches a limit, and if its process is lost.
        """
        self._check(messages, variables, add_generation_prompt=add_generation_prompt, is_continued=continue_final_message)
        if continue_final_message:
            *others, last = messages
            marked = [*others, {**last, "content": last["content"] + _CONTINUE_MARK}]
            return _cut_at_mark(self._render(marked, variables, add_generation_prompt=False), last["content"])
        return self._render(messages, variables, add_generation_prompt=add_generation_prompt)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        return self._process.render(
            {"tools": None, "documents": None}
            | self._special_tokens
            | dict(variables)
            | {"messages": messages, "add_generation_prompt": add_generation_prompt},
            self._now(),
        )

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Iterable[str],
        *,
        add_generation_prompt: bool,
        is_continued: bool,
    ) -> None:
        if not messages:
            raise _invalid("There are no messages.", "messages")
        taken = self._reserved.intersection(variables)
        if taken:
            names = ", ".join(f"'{name}'" for name in sorted(taken))
            raise _invalid(f"The server sets these template variables itself: {names}.", "chat_template_kwargs")
        if not is_continued:
            return
        if add_generation_prompt:
            raise _invalid(
                "add_generation_prompt and continue_final_message exclude each other: a reply is either begun or continued.",
                "continue_final_message",
            )
        if not isinstance(messages[-1].get("content"), str):
            raise _invalid("continue_final_message needs a last message with text to continue.", "messages")


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template, or a `Rejected` that says what to do for a model that has none."""
    if template is None:
        raise _invalid(
            "This model has no chat template, so messages cannot be turned into a prompt. "
            "Use /v1/completions, or start the server with --chat-template FILE.",
            "messages",
        )
    return template


def read_chat_template(value: str) -> str:
    """What `--chat-template` means: a file's path, or else the template itself. Raises `ConfigError`."""
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"The chat template {value!r} cannot be read: {reason}.",
            remedy="--chat-template takes the path of a Jinja2 file, or the template itself.",
        ) from error


def _cut_at_mark(text: str, content: str) -> str:
    """The text before the mark; white space at the end of the content goes too if the template trims contents."""
    at = text.rfind(_CONTINUE_MARK)
    if at >= 0:
        return text[:at]
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise _invalid("The chat template does not show the last message, so it cannot be continued.", "messages")
    # Of a content that is white space alone the template has left nothing: what stands there is its own.
    return text[:at].rstrip() if content.strip() else text[:at]


def _invalid(detail: str, param: str) -> Rejected:
    return Rejected(RejectReason.INVALID, detail, param=param)
