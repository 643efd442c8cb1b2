"""`penstock models`: one line per model that can be named, fetched or not. Fetches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.options import config_file_option
from penstock.config.units import format_size

if TYPE_CHECKING:
    from penstock.models.catalog import ModelListing


@click.command()
@click.option("--cache", envvar="PENSTOCK_CACHE", metavar="PATH", help="Folder for fetched weights.")
@config_file_option
def models(cache: str | None) -> None:
    """List the models that are known, and those that are here."""
    from penstock.cli.start import cache_dir, warn_of_unknown_variables
    from penstock.models.catalog import list_models

    warn_of_unknown_variables()
    rows = [_row(listing) for listing in list_models(cache_dir(cache))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, size, state, description in rows:
        print(f"{name:{widths[0]}}  {size:>{widths[1]}}  {state:{widths[2]}}  {description}".rstrip())


def _row(listing: ModelListing) -> tuple[str, str, str, str]:
    facts = [listing.description, listing.license, f"also: {', '.join(listing.aliases)}" if listing.aliases else ""]
    state = str(listing.path) if listing.is_present else "not fetched"
    return listing.name, format_size(listing.size_bytes), state, "  ".join(filter(None, facts))
