"""`penstock top`: a live view of a running server. Asks its routes for operators; changes nothing there."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import click

from penstock.config.units import parse_duration
from penstock.types.errors import PenstockError

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
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
    from penstock.cli.top_view import Look, render

    interval_s = _interval_s(interval)
    reader = _Reader(url.rstrip("/"), api_key)
    is_live = sys.stdout.isatty() and not once
    has_colour = is_live and "NO_COLOR" not in os.environ
    before = reader.read()
    if not is_live:
        time.sleep(interval_s)
        print("\n".join(render(before, reader.read(), Look(width=110, height=1000))))
        return
    with suppress(KeyboardInterrupt):
        try:
            sys.stdout.write(_ENTER)
            while True:
                now = reader.read()
                width, height = shutil.get_terminal_size()
                lines = render(before, now, Look(width=width, height=height, has_colour=has_colour))
                sys.stdout.write(_CLEAR + "\n".join(lines))
                sys.stdout.flush()
                before = now
                time.sleep(interval_s)
        finally:
            sys.stdout.write(_LEAVE)


def _interval_s(text: str) -> float:
    try:
        interval_s = parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="'--interval'") from None
    if interval_s < 0.1:
        raise click.BadParameter("less than 100ms would be a load of its own.", param_hint="'--interval'")
    return interval_s


class _Reader:
    """Asks one server. Raises PenstockError, with a remedy, if it does not answer."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{url!r} does not begin with http:// or https://.", param_hint="'URL'")
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key.split()[0]}"} if api_key else {}
        self._model = str(self._json("/v1/models")["data"][0]["id"])

    def read(self) -> Any:
        from penstock.cli.top_view import Snapshot

        return Snapshot(
            url=self._url,
            model=self._model,
            at_s=time.monotonic(),
            load=self._json("/load"),
            pool=self._json("/kv"),
            requests=self._json("/v1/requests")["data"],
            totals=counters(self._get("/metrics").decode()),
        )

    def _json(self, path: str) -> Any:
        return json.loads(self._get(path))

    def _get(self, path: str) -> bytes:
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        try:
            with urlopen(Request(self._url + path, headers=self._headers), timeout=_TIMEOUT_S) as answer:  # noqa: S310  # checked
                body: bytes = answer.read()
                return body
        except HTTPError as error:
            error.close()
            remedy = "Give --api-key." if error.code == 401 else "Is it a Penstock server, and of this version?"
            raise PenstockError(f"{self._url}{path} answered {error.code}.", remedy=remedy) from error
        except OSError as error:
            raise PenstockError(
                f"{self._url} does not answer: {error}.", remedy="Is `penstock serve` running there?"
            ) from error


def counters(text: str) -> dict[str, float]:
    """Prometheus' text: series that end in _total, summed over their labels."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name.endswith("_total"):
            totals[name] += float(line.rpartition(" ")[2])
    return dict(totals)
