"""`penstock chat`: as a process through a pipe and on a terminal; turns and history with a session that is a fake."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.chat import Conversation
from penstock.cli.session import Answer
from penstock.types.errors import PenstockError

Penstock = Callable[..., subprocess.CompletedProcess[str]]
FAST = ("--backend", "reference", "--temperature", "0")


class FakeSession:
    """Remembers what it was asked; answers with the number of messages, or as told."""

    def __init__(self) -> None:
        self.asked: list[list[Mapping[str, Any]]] = []
        self.answer = Answer()
        self.failures: list[BaseException] = []

    def ask_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.asked.append(list(messages))
        self.answer = Answer(text=str(len(messages)))
        if self.failures:
            raise self.failures.pop()


def _hold(lines: list[str], system: str | None = None, failures: Sequence[BaseException] = ()) -> list[list[str]]:
    """Contents of the messages of each question."""
    session = FakeSession()
    session.failures = list(failures)
    Conversation(session, system, has_stats=False).hold(iter(lines))  # type: ignore[arg-type]
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


def test_in_a_pipe_each_line_is_a_turn(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("chat", tiny_model, *FAST, "--max-tokens", "4", "--stats", stdin="in the\nthe\n/exit\nnever\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("tokens; the first after") == 2
    assert ">>>" not in result.stdout
    first = penstock("chat", tiny_model, *FAST, "--max-tokens", "4", stdin="in the\n")
    assert result.stdout.startswith(first.stdout)


def test_what_is_too_long_for_the_model_does_not_end_the_conversation(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("chat", tiny_model, *FAST, "--max-tokens", "4", stdin="x" * 600 + "\nin the\n")
    assert result.returncode == 0
    assert "tiny takes 512" in result.stderr
    assert result.stdout.strip()


def test_on_a_terminal_ctrl_c_stops_the_answer_and_returns_to_the_prompt(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from penstock.testing.tiny_models import TinyLlama, write_gguf

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
        _read_until(terminal, b">>> ")
        os.write(terminal, b"in the\n")
        _read_until(terminal, b"in the")
        _read_bytes(terminal, 200)  # More than echo and control sequences: the answer has begun.
        os.write(terminal, b"\x03")
        _read_until(terminal, b"[stopped]")
        _read_until(terminal, b">>> ")
        os.write(terminal, b"/exit\n")
        while _read(terminal):
            pass
        assert process.wait(timeout=60) == 0
    os.close(terminal)


def _read(terminal: int) -> bytes:
    """Empty at the end, which Linux reports as an error of the terminal."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def _read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        part = _read(terminal)
        assert part, f"the terminal was closed after {seen[-500:]!r}"
        seen += part


def _read_bytes(terminal: int, num_bytes: int) -> None:
    while num_bytes > 0:
        part = _read(terminal)
        assert part, "the terminal was closed"
        num_bytes -= len(part)
