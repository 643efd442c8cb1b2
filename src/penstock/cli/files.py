"""Writes the files that commands are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.lab.plots import Plot


def check_writable(path: Path) -> None:
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path} can't be written.", remedy="Name a file in a folder that exists.")


def write_text(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}.", remedy="Name a file in a folder that exists."
        ) from error


def write_plots(folder: Path, drawn: Sequence[Plot]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} can't be made: {error.strerror}.") from error
    for number, plot in enumerate(drawn, start=1):
        name = "-".join("".join(char if char.isalnum() else " " for char in plot.title.lower()).split())
        plot.save(folder / f"{number:02d}-{name}.png")
