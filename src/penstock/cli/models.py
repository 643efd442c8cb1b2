"""`penstock models` and `penstock pull`: list known and fetched models, and fetch one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.options import config_file_option, model_argument, warn_of_unknown_variables
from penstock.config.units import format_size

if TYPE_CHECKING:
    from penstock.models.catalog import ModelListing


@click.command()
@click.option("--cache", envvar="PENSTOCK_CACHE", metavar="PATH", help="Folder for fetched weights.")
@config_file_option
def models(cache: str | None) -> None:
    """List known models, and which of them are fetched."""
    from penstock.models.cache import cache_dir
    from penstock.models.catalog import list_models

    warn_of_unknown_variables()
    rows = [_row(listing) for listing in list_models(cache_dir(cache))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, size, state, description in rows:
        print(f"{name:{widths[0]}}  {size:>{widths[1]}}  {state:{widths[2]}}  {description}".rstrip())


def _row(listing: ModelListing) -> tuple[str, str, str, str]:
    entry = listing.entry
    also = f"also: {', '.join(entry.aliases)}" if entry and entry.aliases else ""
    facts = [entry.description, entry.license, also] if entry else []
    state = str(listing.path) if listing.is_present else "not fetched"
    return listing.name, format_size(listing.size_bytes), state, "  ".join(filter(None, facts))


@click.command()
@model_argument
@click.option("--cache", envvar="PENSTOCK_CACHE", metavar="PATH", help="Folder for fetched weights.")
@config_file_option
def pull(model: str, cache: str | None) -> None:
    """Fetch MODEL: a catalogue name, or hf:org/repo[:file].

    One of the catalogue that is here already is verified, one of the hub is updated.
    """
    from penstock.models.cache import cache_dir
    from penstock.models.progress import TerminalProgress
    from penstock.models.pull import pull as fetch

    warn_of_unknown_variables()
    source = fetch(model, cache_dir(cache), progress=TerminalProgress())
    print(source.path)
