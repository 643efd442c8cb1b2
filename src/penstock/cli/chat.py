"""`penstock chat`: a conversation in the terminal. From a pipe, each line is a message."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from penstock.cli.options import EPILOG, GroupedCommand, model_argument
from penstock.cli.talk import CUT_OFF, Session, check_text, stats_line, talk_options
from penstock.types.errors import PenstockError, Rejected, RejectReason

PROMPT = ">>> "
HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."


@click.command(cls=GroupedCommand, epilog=EPILOG)
@model_argument
@talk_options
def chat(**values: Any) -> None:
    """Talk with MODEL. /reset forgets the conversation, /exit ends it.

    From a pipe, each line is a message; the exit status is 1 if one of them got no answer.
    """
    check_text("--system", values["system"])
    is_typed = sys.stdin.isatty()
    with Session(values) as session:
        conversation = Conversation(session, values["system"], has_stats=values["stats"], is_typed=is_typed)
        conversation.hold(_typed_lines() if is_typed else _piped_lines())
    if conversation.has_failed and not is_typed:
        sys.exit(1)


class Conversation:
    def __init__(self, session: Session, system: str | None, *, has_stats: bool, is_typed: bool) -> None:
        """`is_typed`: an interrupt ends the answer, and not the conversation."""
        self._session = session
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)
        self._has_stats, self._is_typed = has_stats, is_typed
        self.has_failed = False
        """Whether a message got no answer."""

    def hold(self, lines: Iterator[str]) -> None:
        """Answer each line, or obey it if it begins with a slash, until the input ends or a line is /exit."""
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit", "/bye"):
                return
            if text == "/reset":
                self._messages = list(self._beginning)
                print("The conversation is forgotten.", file=sys.stderr)
            elif text.startswith("/"):
                print(HELP, file=sys.stderr)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        """Answer one message. If typed, an interrupt keeps the text so far in the conversation."""
        question = {"role": "user", "content": text}
        try:
            self._session.ask_chat([*self._messages, question])
        except KeyboardInterrupt:
            if not self._is_typed:
                raise
            print(" [stopped]", file=sys.stderr)
        except PenstockError as error:
            self.has_failed = True
            print(f"error: {error}", file=sys.stderr)
            if isinstance(error, Rejected) and error.reason is RejectReason.CONTEXT_LENGTH:
                print("/reset forgets the conversation.", file=sys.stderr)
            return
        print(flush=True)
        answer = self._session.answer
        if answer is None:  # it was interrupted before it began
            return
        self._messages += [question, {"role": "assistant", "content": answer.outputs[0].text}]
        if answer.outputs[0].finish_reason == "length":
            print(CUT_OFF, file=sys.stderr)
        if self._has_stats and answer.finished:
            print(stats_line(answer), file=sys.stderr)


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise PenstockError(f"Line {number} of what came through the pipe is not UTF-8 text.") from None


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # Some Pythons lack readline; then there is no line editing.
        import readline  # noqa: F401  # importing it gives `input` history and line editing
    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n" + HELP, file=sys.stderr)
