"""`penstock chat`: as a process through a pipe and on a terminal; turns and history with a session that is a fake."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.chat import Conversation
from penstock.inprocess import CompletionOutput, RequestMetrics, RequestOutput
from penstock.types.errors import PenstockError, Rejected, RejectReason

Penstock = Callable[..., subprocess.CompletedProcess[str]]
FAST = ("--backend", "reference", "--temperature", "0")


def _said(text: str) -> RequestOutput:
    """An answer that was stopped where it is."""
    one = CompletionOutput(index=0, text=text, new_text=text, token_ids=[1], cumulative_logprob=None, logprobs=None)
    times = RequestMetrics(arrival_time_s=0.0, first_token_time_s=0.005, last_token_time_s=0.005)
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], outputs=[one], finished=False, num_cached_tokens=0, metrics=times
    )


class FakeSession:
    """Remembers what it was asked; answers with the number of messages, or as told."""

    def __init__(self) -> None:
        self.asked: list[list[Mapping[str, Any]]] = []
        self.answer: RequestOutput | None = None
        self.is_silent = False
        self.failures: list[BaseException] = []

    def ask_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.asked.append(list(messages))
        self.answer = None if self.is_silent else _said(str(len(messages)))
        if self.failures:
            raise self.failures.pop()


def _talk_with(session: FakeSession, lines: list[str], system: str | None = None, *, is_typed: bool = True) -> None:
    Conversation(session, system, has_stats=False, is_typed=is_typed).hold(iter(lines))  # type: ignore[arg-type]


def _hold(lines: list[str], system: str | None = None, failures: Sequence[BaseException] = ()) -> list[list[str]]:
    """Contents of the messages of each question."""
    session = FakeSession()
    session.failures = list(failures)
    _talk_with(session, lines, system)
    return [[message["content"] for message in messages] for messages in session.asked]


def test_each_turn_sees_the_ones_before() -> None:
    assert _hold(["a\n", "\n", "b\n"]) == [["a"], ["a", "1", "b"]]


def test_reset_keeps_the_system_message_alone() -> None:
    assert _hold(["a", "/reset", "b"], system="be brief") == [["be brief", "a"], ["be brief", "b"]]


def test_exit_ends_it_and_unknown_commands_are_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert _hold(["/what", "/exit", "a"]) == []
    assert "/reset" in capsys.readouterr().err


def test_a_turn_that_failed_is_not_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    assert _hold(["a", "b"], failures=[PenstockError("too long")]) == [["a"], ["b"]]
    assert "error: too long" in capsys.readouterr().err


def test_an_interrupted_answer_is_remembered_as_far_as_it_came() -> None:
    assert _hold(["a", "b"], failures=[KeyboardInterrupt()]) == [["a"], ["a", "1", "b"]]


def test_an_answer_that_was_interrupted_before_it_began_leaves_no_turn() -> None:
    session = FakeSession()
    session.is_silent, session.failures = True, [KeyboardInterrupt()]
    _talk_with(session, ["a", "b"])
    assert [len(messages) for messages in session.asked] == [1, 1]


def test_in_a_pipe_an_interrupt_ends_the_conversation() -> None:
    session = FakeSession()
    session.failures = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        _talk_with(session, ["a", "b"], is_typed=False)
    assert len(session.asked) == 1


def test_what_has_grown_too_long_can_be_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    _hold(["a"], failures=[Rejected(RejectReason.CONTEXT_LENGTH, "too long")])
    assert "/reset" in capsys.readouterr().err


def test_in_a_pipe_each_line_is_a_turn(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("chat", tiny_model, *FAST, "--max-tokens", "4", "--stats", stdin="in the\nthe\n/exit\nnever\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("tokens; the first after") == 2
    assert ">>>" not in result.stdout
    first = penstock("chat", tiny_model, *FAST, "--max-tokens", "4", stdin="in the\n")
    assert result.stdout.startswith(first.stdout)


def test_what_is_too_long_for_the_model_does_not_end_the_conversation(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("chat", tiny_model, *FAST, "--max-tokens", "4", stdin="x" * 600 + "\nin the\n")
    assert result.returncode == 1, "a script must not take this for answers to all"
    assert "tiny takes 512" in result.stderr
    assert result.stdout.strip()


def test_on_a_terminal_ctrl_c_stops_the_answer_and_returns_to_the_prompt(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from support.tiny_models import TinyLlama, write_gguf

    model = write_gguf(tmp_path_factory.mktemp("models") / "endless.gguf", TinyLlama(max_model_len=100_000))
    terminal, inside = pty.openpty()
    # A session of its own makes the terminal the controlling one, so that Ctrl-C becomes a signal.
    starter = "import fcntl, os, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\nos.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "penstock", "chat", str(model), *FAST]
    with subprocess.Popen(
        [sys.executable, "-c", starter, *command],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**environment, "TERM": "dumb"},
        start_new_session=True,
    ) as process:
        os.close(inside)
        try:
            _talk(Screen(terminal))
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    os.close(terminal)


class Screen:
    """A terminal's output, read in the order in which it came."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._unread = b""

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def wait_for(self, wanted: bytes) -> None:
        """Read up to `wanted`, and no further."""
        while wanted not in self._unread:
            self._read_more()
        self._unread = self._unread.partition(wanted)[2]

    def wait_for_bytes(self, num_bytes: int) -> None:
        while len(self._unread) < num_bytes:
            self._read_more()

    def wait_for_end(self) -> None:
        # Linux reports the end as an error of the terminal.
        with contextlib.suppress(OSError):
            while os.read(self._terminal, 4096):
                pass

    def _read_more(self) -> None:
        is_ready, _, _ = select.select([self._terminal], [], [], 30)
        assert is_ready, f"nothing more came after {self._unread[-500:]!r}"
        self._unread += os.read(self._terminal, 4096)


def _talk(screen: Screen) -> None:
    screen.wait_for(b">>> ")
    screen.type(b"in the\n")
    screen.wait_for(b"in the")
    screen.wait_for_bytes(200)  # More than echo and control sequences: the answer has begun.
    screen.type(b"\x03")
    screen.wait_for(b"[stopped]")
    screen.wait_for(b">>> ")
    screen.type(b"/exit\n")
    screen.wait_for_end()
