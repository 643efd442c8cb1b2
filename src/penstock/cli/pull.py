"""`penstock pull`: fetches and verifies a model's weights, with a progress bar on stderr. Never loads them."""

from __future__ import annotations

import click

from penstock.cli.options import config_file_option, model_argument


@click.command()
@model_argument
@click.option("--cache", envvar="PENSTOCK_CACHE", metavar="PATH", help="Folder for fetched weights.")
@config_file_option
def pull(model: str, cache: str | None) -> None:
    """Fetch MODEL: a catalogue name, or hf:org/repo[:file]. One that is here already is verified."""
    from penstock.cli.start import cache_dir, warn_of_unknown_variables
    from penstock.models import pull as fetching
    from penstock.models.progress import TerminalProgress

    warn_of_unknown_variables()
    with TerminalProgress() as progress:
        source = fetching.pull(model, cache_dir(cache), progress=progress)
    print(source.path)
