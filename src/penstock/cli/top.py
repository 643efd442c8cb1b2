"""`penstock top`: a live view of a running server, as a command. Owns the terminal meanwhile; `top_reader` asks the server."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from penstock.config.units import parse_duration
from penstock.types.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cli.top_reader import Reader
    from penstock.cli.top_view import Look, Snapshot

DEFAULT_URL = "http://127.0.0.1:8000"
_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's other screen, without a cursor; and back."""


@click.command()
@click.argument("url", default=DEFAULT_URL)
@click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key that the server asks for.")
@click.option("--interval", default="1s", show_default=True, metavar="DURATION", help="Time between two looks.")
@click.option("--once", is_flag=True, help="Show it once, as plain text. So it does if its output is no terminal.")
def top(url: str, api_key: str | None, interval: str, *, once: bool) -> None:
    """Watch the server at URL: its rates, its queue, its KV cache as a map of blocks, your requests."""
    from penstock.cli.start import warn_of_unknown_variables
    from penstock.cli.top_reader import Reader
    from penstock.cli.top_view import Look

    warn_of_unknown_variables()
    interval_s = _interval_s(interval)
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not begin with http:// or https://.", param_hint="'URL'")
    reader = Reader(url.rstrip("/"), _one_key(api_key))
    if sys.stdout.isatty() and not once:
        _show_live(reader, interval_s)
        return
    before = reader.read()
    time.sleep(interval_s)
    print("\n".join(_lines(before, reader.read(), Look(width=110, height=1000))))


def _show_live(reader: Reader, interval_s: float) -> None:
    """Until it is interrupted."""
    from penstock.cli.top_view import Look

    has_colour = "NO_COLOR" not in os.environ
    before = reader.read()
    usual = signal.signal(signal.SIGTERM, _end)
    with suppress(KeyboardInterrupt):
        try:
            sys.stdout.write(_ENTER)
            while True:
                now = reader.read()
                width, height = shutil.get_terminal_size()
                lines = _lines(before, now, Look(width=width, height=height, has_colour=has_colour))
                sys.stdout.write(_CLEAR + "\n".join(lines))
                sys.stdout.flush()
                before = now
                time.sleep(interval_s)
        finally:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            signal.signal(signal.SIGTERM, usual)


def _lines(before: Snapshot, now: Snapshot, look: Look) -> list[str]:
    from penstock.cli.top_view import render

    try:
        return render(before, now, look)
    except (LookupError, TypeError, ValueError) as error:
        raise PenstockError(
            f"{now.url} says what can't be shown: {error!r}.", remedy="Is it a Penstock server, and of this version?"
        ) from error


def _one_key(api_key: str | None) -> str | None:
    """The environment may hold several, as `serve` reads it; each of them opens the server."""
    source = click.get_current_context().get_parameter_source("api_key")
    if api_key is None or source is not ParameterSource.ENVIRONMENT:
        return api_key
    return next(iter(api_key.split()), api_key)


def _end(number: int, _frame: object) -> NoReturn:
    """By way of `finally`, which gives the terminal back."""
    sys.exit(128 + number)


def _interval_s(text: str) -> float:
    try:
        interval_s = parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="'--interval'") from None
    if interval_s < 0.1:
        raise click.BadParameter("less than 100ms would be a load of its own.", param_hint="'--interval'")
    return interval_s
