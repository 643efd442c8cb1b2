"""Checks and writes the files that commands are asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.types.errors import ConfigError, unwritable

if TYPE_CHECKING:
    from penstock.lab.plots import Plot


def output_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Click callback of an option for a file to write. Raises ConfigError now: the work may take hours."""
    del ctx, param
    if path is not None:
        check_writable(path)
    return path


def plots_folder(ctx: click.Context, param: click.Parameter, folder: Path | None) -> Path | None:
    """Click callback of an option for a folder of plots. Raises ConfigError now if they can't be drawn or written."""
    from penstock.lab import plots

    del ctx, param
    if folder is not None:
        plots.require()
        check_folder(folder)
    return folder


def check_writable(path: Path) -> None:
    parent = path.absolute().parent
    if not os.access(path if os.access(path, os.F_OK) else parent, os.W_OK) or not parent.is_dir():
        raise ConfigError(f"{path} can't be written.", remedy="Name a file in a folder that exists.")


def check_folder(folder: Path, *, remedy: str = "Name another one.") -> None:
    """Raise ConfigError if the folder can't be made, or can't be written."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.access(one, os.F_OK))
    if not os.access(place, os.W_OK) or not place.is_dir():
        raise ConfigError(f"The folder {folder} can't be written.", remedy=remedy)


def check_regular(path: Path) -> None:
    """Raise ConfigError if a file can't be read twice: a pipe, or a device."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file.", remedy="Write its lines to a file: they are read more than once.")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error


def write_plots(folder: Path, drawn: Sequence[Plot]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} can't be made: {error.strerror}.") from error
    for number, plot in enumerate(drawn, start=1):
        name = "-".join("".join(char if char.isalnum() else " " for char in plot.title.lower()).split())
        plot.save(folder / f"{number:02d}-{name}.png")
