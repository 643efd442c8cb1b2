"""The command itself: help, exit codes, errors in words."""

from __future__ import annotations

import errno
import io
import subprocess
import sys

import pytest

from penstock import __version__
from penstock.cli import main as command
from penstock.types.errors import ModelError


def _exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("serve", "chat", "run", "pull", "models", "env"):
        assert f"\n  {name} " in text


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code([]) == 2
    assert "Usage" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("name", ["serve", "chat", "run", "pull", "models", "env"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code([name, "--help"]) == 0
    assert "--cache" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nope"], ["serve", "--nope"], ["serve", "--port", "x"], ["models", "extra"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(arguments) == 2
    assert "error: " in capsys.readouterr().err


def test_a_misspelt_command_is_told_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["serv"]) == 2
    assert "error: No such command 'serv'. Did you mean 'serve'?" in capsys.readouterr().err


def test_our_errors_are_one_line_and_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    assert _exit_code(["pull", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: There is no model called 'no-such-model'.")
    assert "smollm2:135m" in error
    assert "Traceback" not in error


def test_debugging_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert _exit_code(["pull", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert ModelError.__name__ in error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space"), "A file can't be written: the disk is full. Free some space"),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), "/a/b can't be used: Read-only file system. Check its"),
    ],
)
def test_a_disk_that_can_t_be_written_is_no_bug(
    error: OSError, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise error

    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    monkeypatch.setattr(command.cli, "main", fail)
    assert _exit_code(["env"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_an_error_of_permission_without_a_file_shows_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(command.cli, "main", fail)
    assert _exit_code(["env"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_shows_its_traceback_anyway(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.catalog.list_models", lambda folder: 1 // 0)
    assert _exit_code(["models"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom penstock.cli.main import cli\ncli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'starlette', 'asyncio', 'tokenizers', 'jinja2'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_a_containers_first_process_ends_at_sigterm() -> None:
    """The kernel keeps a signal without a handler from such a process."""
    script = """
import os, signal
from penstock.cli import main as command
own, os.getpid = os.getpid(), lambda: 1
command.cli.main = lambda *_, **__: os.kill(own, signal.SIGTERM)
command.main([])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the locale C
def test_characters_that_the_terminal_lacks_are_replaced(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1", errors))
    monkeypatch.setattr(command.cli, "main", lambda *_, **__: print("für ▁▃"))
    assert _exit_code([]) == 0
    assert written.getvalue() == "für ??\n".encode("latin-1")


def test_a_command_needs_no_open_streams() -> None:
    """Another file with the number of a closed stream would get what is written to that, such as the log."""
    script = """
import sys
from penstock.cli import main as command

def run(*_, **__):
    print(sys.stdin.read(), "\\udcff", file=sys.stderr)
    return int([stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)] != [0, 1, 2])

command.cli.main = run
command.main([])
"""
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, script]
    assert subprocess.run(words, check=False, timeout=60).returncode == 0
