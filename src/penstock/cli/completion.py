"""`penstock completion SHELL`: prints the script that lets a shell complete commands, options and values."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from penstock.types.errors import PenstockError

SHELLS = ("bash", "zsh", "fish")
_PROGRAM, _VARIABLE = "penstock", "_PENSTOCK_COMPLETE"
"""Environment variable by which click recognises a completion request."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print the script of SHELL, by default of the one in use.

    \b
    bash: eval "$(penstock completion bash)"     in ~/.bashrc; bash 4.4 or later
    zsh:  eval "$(penstock completion zsh)"      in ~/.zshrc, after compinit
    fish: penstock completion fish | source      in ~/.config/fish/config.fish
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise PenstockError(f"The shell {name!r} is not known.", remedy=f"Name one: {', '.join(SHELLS)}.")
    found = get_completion_class(name)
    assert found is not None, "click knows these shells"
    maker = found(click.Command(_PROGRAM), {}, _PROGRAM, _VARIABLE)
    # Not `maker.source()`, which runs bash to look at its version.
    click.echo(maker.source_template % maker.source_vars())
