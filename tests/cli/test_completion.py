"""Completion in a shell: bash itself runs the script, and the words come from the parser."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.completion import SHELLS
from penstock.cli.main import _COMMANDS, cli
from penstock.types.errors import PenstockError

IN_BASH = """
source "$SCRIPT"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
compopt() { :; }  # bash has it only while it completes at a prompt
_penstock_completion penstock
printf '%s\\n' "${COMPREPLY[@]}"
complete -p penstock
"""


def script(shell: str) -> str:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the command as a program, and with bash's script."""
    program = tmp_path / "penstock"
    program.write_text(f"#!{sys.executable}\nfrom penstock.cli.main import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(script("bash"))
    return tmp_path


def completed(folder: Path, *words: str) -> list[str]:
    """The words that bash offers for the last one, and its own line about the completion."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SCRIPT": str(folder / "script")}
    run = subprocess.run(
        [bash, "--norc", "-c", IN_BASH, "bash", "penstock", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stderr == ""
    *offered, registered = run.stdout.splitlines()
    assert registered.endswith("-F _penstock_completion penstock")
    return [word for word in offered if word]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ser"], ["serve"]),
        (["serve", "--ssl-"], ["--ssl-certfile", "--ssl-keyfile"]),
        (["serve", "--log-format", ""], ["text", "json"]),
        (["serve", "--policy", "s"], ["sjf", "srpf"]),
        (["serve", "smoll"], ["smollm2:135m"]),
        (["run", "--model", "gemma3:270"], ["gemma3:270m"]),
        (["completion", ""], list(SHELLS)),
        (["bench", "--endpoint", "c"], ["completions", "chat"]),
    ],
)
def test_bash_completes_what_the_parser_takes(folder: Path, words: list[str], expected: list[str]) -> None:
    assert completed(folder, *words) == expected


def test_commands_are_offered_without_importing_them(folder: Path) -> None:
    assert completed(folder, "") == list(_COMMANDS)
    code = (
        "import sys; from penstock.cli.main import main\ntry: main()\nfinally: assert 'penstock.cli.serve' not in sys.modules"
    )
    environment = {**os.environ, "_PENSTOCK_COMPLETE": "bash_complete", "COMP_WORDS": "penstock ", "COMP_CWORD": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "plain,serve" in run.stdout


@pytest.mark.parametrize(
    ("shell", "variables", "offered"),
    [
        ("zsh", {"COMP_WORDS": "penstock ser", "COMP_CWORD": "1"}, "plain\nserve\nAnswer HTTP requests"),
        ("fish", {"COMP_WORDS": "penstock ser", "COMP_CWORD": "ser"}, "plain,serve\tAnswer HTTP requests"),
    ],
)
def test_the_other_shells_are_answered_too(folder: Path, shell: str, variables: dict[str, str], offered: str) -> None:
    """Their scripts are checked by the shells themselves where these are installed."""
    environment = {**os.environ, **variables, "_PENSTOCK_COMPLETE": f"{shell}_complete"}
    run = subprocess.run([str(folder / "penstock")], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert offered in run.stdout.replace("plain\tserve", "plain,serve")
    text = script(shell)
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in text
    if path := shutil.which(shell):
        subprocess.run([path, "--no-execute" if shell == "fish" else "-n"], input=text, text=True, check=True, timeout=60)


def test_the_shell_in_use_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert CliRunner().invoke(cli, ["completion"]).stdout == script("fish")
    monkeypatch.setenv("SHELL", "/bin/csh")
    assert isinstance(CliRunner().invoke(cli, ["completion"]).exception, PenstockError)
