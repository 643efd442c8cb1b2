"""The `penstock` command: runs the subcommand, and turns errors into a message and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 stopped as a container's first process.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError
from click.shell_completion import CompletionItem

from penstock import __version__
from penstock.types.errors import DISK_FULL, PenstockError

_COMMANDS = {
    "serve": ("penstock.cli.serve:serve", "Answer HTTP requests: the OpenAI API."),
    "cluster": ("penstock.cli.cluster:cluster", "Run replicas of a model on Ray, behind one server."),
    "chat": ("penstock.cli.chat:chat", "Talk with a model in the terminal."),
    "run": ("penstock.cli.run:run", "Answer one prompt, from the command line or a pipe."),
    "embed": ("penstock.cli.embed:embed", "Turn a file of texts into a file of vectors."),
    "batch": ("penstock.cli.batch:batch", "Answer a file of requests, in the form of OpenAI's batches."),
    "pull": ("penstock.cli.models:pull", "Fetch a model's weights."),
    "pack": ("penstock.cli.pack:pack", "Convert a model's weights once, so that it starts sooner."),
    "models": ("penstock.cli.models:models", "List known models, and which are fetched."),
    "show": ("penstock.cli.show:show", "Say what a model's files are, what is refused, memory and speed here."),
    "simulate": ("penstock.cli.simulate:simulate", "Simulate how a configuration serves traffic, without running a model."),
    "plan": ("penstock.cli.plan:plan", "Size a deployment: the rate that meets SLOs, its limit, replicas, cost."),
    "tune": ("penstock.cli.tune:tune", "Search the settings that suit a workload; write those that are surely better."),
    "route": ("penstock.cli.route:route", "Learn which questions need the large model, and what that saves."),
    "index": ("penstock.cli.index:index", "Index a folder of documents, for a pipeline that answers from them."),
    "top": ("penstock.cli.top:top", "Watch a running server: rates, queue, KV cache, requests."),
    "doctor": ("penstock.cli.doctor:doctor", "Say why a server is slow, and which setting to change."),
    "monitoring": ("penstock.cli.monitoring:monitoring", "Write a dashboard, alerts and autoscalers for Prometheus."),
    "profile": ("penstock.cli.profile:profile", "Show step times, here or in a recording; fit the simulator's costs."),
    "bench": ("penstock.cli.bench:bench", "Measure a server, or a model here, under a workload."),
    "completion": ("penstock.cli.completion:completion", "Print a script for shell completion."),
    "env": ("penstock.cli.env:env", "Show the machine, the instruction set chosen, versions, what is missing."),
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand only when it is used, so that `penstock --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and (alike := get_close_matches(args[0], _COMMANDS, n=1)):
            raise click.UsageError(f"No such command '{args[0]}'. Did you mean '{alike[0]}'?", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=doc) for name, (_, doc) in _COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would report a failure
            return _after_broken_pipe()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, doc) for name, (_, doc) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
def cli() -> None:
    """Penstock serves language models on the machine you have."""


def main(arguments: list[str] | None = None) -> None:
    if os.getpid() == 1:  # the first process of a container
        from penstock.machine import exit_at_signal

        signal.signal(signal.SIGTERM, exit_at_signal)
    _make_streams_usable()
    try:
        code = cli.main(arguments, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _after_broken_pipe()
    except Exception as error:
        code = _explain(error)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _make_streams_usable() -> None:
    """Replace closed standard streams, and let stdout write `?` for characters that its encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in this order each gets its number back
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, errors="replace"))  # noqa: SIM115  (for the whole process)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def _explain(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        _show_usage(error)
        return error.exit_code
    if isinstance(error, click.Abort):
        return 130
    from penstock.cli.options import printable

    told = _told_of_disk(error) if isinstance(error, OSError) else error
    if not isinstance(told, PenstockError) or os.environ.get("PENSTOCK_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"error: {printable(str(told))}", file=sys.stderr)
    return 1


def _told_of_disk(error: OSError) -> Exception:
    """Return the words for a disk that is full or can't be written, where a command has none of its own. Else the error."""
    if error.errno in DISK_FULL:
        what = error.filename or "A file"
        return PenstockError(f"{what} can't be written: the disk is full.", remedy="Free some space, or use another disk.")
    if error.errno in (errno.EACCES, errno.EROFS) and error.filename:
        return PenstockError(
            f"{error.filename} can't be used: {error.strerror}.", remedy="Check its permissions, or name another one."
        )
    return error


def _show_usage(error: click.ClickException) -> None:
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        print(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", file=sys.stderr)
    print(f"error: {error.format_message()}", file=sys.stderr)


def _after_broken_pipe() -> int:
    """Handle a closed pipe (`| head`): keep Python from flushing stdout again, and return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
