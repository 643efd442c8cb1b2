"""`penstock monitoring render`: files for Prometheus, Grafana and Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path

import click

from penstock.cli.files import check_folder
from penstock.config.units import MAX_PORT
from penstock.types.errors import PenstockError

_MARK = ".penstock-monitoring"
_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def _host_and_port(ctx: click.Context, param: click.Parameter, target: str) -> str:
    found = _HOST_AND_PORT.fullmatch(target)
    if found is None or not 0 < int(found["port"]) <= MAX_PORT:
        raise click.BadParameter(f"{target!r} is not HOST:PORT, such as 10.0.0.7:8000.", ctx, param)
    return target


@click.group()
def monitoring() -> None:
    """Files for Prometheus, Grafana and Kubernetes."""


@monitoring.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--target",
    default="host.docker.internal:8000",
    callback=_host_and_port,
    show_default=True,
    metavar="HOST:PORT",
    help="Server to scrape.",
)
@click.option("--runbooks", default="runbooks", show_default=True, metavar="URL", help="Runbook address that alerts link to.")
@click.option("--server", metavar="URL", help="Where a browser finds the server. Default: this machine, and the target's port.")
@click.option("--force", is_flag=True, help="Write into a folder with other files, and over them.")
def render(folder: Path, target: str, runbooks: str, server: str | None, force: bool) -> None:
    """Write a dashboard, alerts with runbooks, a compose file and autoscalers to DIR.

    DIR must be new, empty, or one that this command has written before.
    """
    from penstock.obs.boards.render import render as render_files

    check_folder(folder)
    mark = folder / _MARK
    if folder.exists() and any(folder.iterdir()) and not mark.exists() and not force:
        raise PenstockError(f"{folder} has other files.", remedy="Name an empty folder, or give --force to write over them.")
    files = render_files(target, runbooks, server or f"http://127.0.0.1:{target.rpartition(':')[2]}")
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()  # first, so that the command may be run again if it fails
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    click.echo(f"{folder}: {len(files)} files.")
