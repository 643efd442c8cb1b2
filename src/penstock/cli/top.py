"""`penstock top`: shows a running server live. It polls the server's metrics and operator routes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn, cast
from urllib.parse import quote

import click

from penstock.cli.options import client_tls, is_given, tls_options, warn_of_unknown_variables
from penstock.config.units import format_size, parse_duration
from penstock.lab.evidence import series_of
from penstock.lab.target import Questions, Target
from penstock.types.errors import PenstockError

_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
OTHER_SERVER = "Is it a Penstock server, and of this version?"
_OWNER_COLOURS = (33, 208, 40, 201, 226, 51, 196, 141, 118, 214, 45, 203)
_OWNER_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_GLYPHS = {"free": ".", "cached": ":", "shared": "+", "adapter": "@", "null": ".", "held": "#"}
_STATE_COLOURS = {"free": 238, "cached": 67, "shared": 255, "adapter": 99}
_FULL = "█"
_STATES = ("decode", "prefill", "paused", "waiting", "ended")
"""States of requests, in the order shown."""
_MAX_MAP_ROWS = 8
_NAME_WIDTH = 20
_SILENT_S = 2.0
"""Replicas report every second."""


@click.command()
@click.argument("url", required=False)
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", help="Port of a server on this machine, instead of the URL."
)
@click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key that the server requires.")
@click.option("--model", metavar="NAME", help="Model whose rates and KV cache are shown, of several.  [default: the first]")
@click.option("--interval", default="1s", show_default=True, metavar="DURATION", help="Time between two updates.")
@click.option("--once", is_flag=True, help="Print once as plain text; implied without a terminal.")
@tls_options
def top(
    url: str | None,
    port: int | None,
    api_key: str | None,
    model: str | None,
    interval: str,
    cafile: str | None,
    *,
    once: bool,
    insecure: bool,
) -> None:
    """Watch the server at URL: its models, their rates and queues, the KV cache as a map of blocks, your requests.

    URL is http://127.0.0.1:8000 unless given; https with --cafile or --insecure.
    """
    warn_of_unknown_variables()
    interval_s = _interval_s(interval)
    reader = reader_of(url, port, api_key, model, cafile, insecure=insecure)
    if sys.stdout.isatty() and not once:
        _show_live(reader, interval_s)
        return
    before = reader.read()
    time.sleep(interval_s)
    print("\n".join(_lines(before, reader.read(), Look(width=110, height=1000))))


def reader_of(
    url: str | None, port: int | None, api_key: str | None, model: str | None, cafile: str | None, *, insecure: bool
) -> Reader:
    """Return a reader of the server that these options of a command name."""
    return Reader(target_of(url, port, api_key, cafile, insecure=insecure), model)


def target_of(url: str | None, port: int | None, api_key: str | None, cafile: str | None, *, insecure: bool) -> Target:
    if url is None:
        url = f"{'https' if insecure or cafile is not None else 'http'}://127.0.0.1:{port or 8000}"
    elif port is not None:
        raise click.UsageError("Give the URL or --port, not both: a URL contains its port, as in http://host:8000.")
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not begin with http:// or https://.", param_hint="'URL'")
    # Like `serve`, accept several keys in the environment. Each of them is valid.
    key = api_key if api_key is None or is_given("api_key") else next(iter(api_key.split()), api_key)
    return Target(url=url.rstrip("/"), api_key=key, tls=client_tls(cafile, insecure=insecure))


def _show_live(reader: Reader, interval_s: float) -> None:
    has_colour = "NO_COLOR" not in os.environ
    before = reader.read()
    usual = signal.signal(signal.SIGTERM, _end)
    with suppress(KeyboardInterrupt):
        try:
            sys.stdout.write(_ENTER)
            time.sleep(min(interval_s, 1.0))  # a rate needs some time between its two looks
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
    try:
        return render(before, now, look)
    except (LookupError, TypeError, ValueError) as error:
        raise PenstockError(f"{now.url} sent an answer that can't be shown: {error!r}.", remedy=OTHER_SERVER) from error


def _end(number: int, _frame: object) -> NoReturn:
    """Handle a signal: exit through the `finally` that restores the terminal."""
    sys.exit(128 + number)


def _interval_s(text: str) -> float:
    try:
        interval_s = parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="'--interval'") from None
    if interval_s < 0.1:
        raise click.BadParameter("less than 100ms would load the server.", param_hint="'--interval'")
    return interval_s


# Data from the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    url: str
    model: str
    at_s: float
    load: Mapping[str, Any]
    pool: Mapping[str, Any] | None
    """None if the model is not loaded."""
    requests: Sequence[Mapping[str, Any]]
    totals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Model -> name in Prometheus -> counter."""
    models: Sequence[Mapping[str, Any]] = ()
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    width: int = 80
    height: int = 24
    has_colour: bool = False


class Reader:
    """HTTP client for the routes of one server. Raises PenstockError for an unexpected answer."""

    def __init__(self, target: Target, model: str | None) -> None:
        self._target, self._url = target, target.url
        try:
            self.names = [str(line["name"]) for line in self.get_json("/load")["models"]]
            self.model = model or self.names[0]
        except (LookupError, TypeError) as error:
            raise PenstockError(f"{self._url}/load names no model.", remedy=OTHER_SERVER) from error
        if self.model not in self.names:
            raise PenstockError(f"{self._url} serves no {self.model}.", remedy=f"It serves: {', '.join(self.names)}.")

    def load(self, model: str | None = None) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", self.get_json(f"/load?model={quote(model or self.model, safe='')}"))

    def read(self) -> Snapshot:
        of_model = f"?model={quote(self.model, safe='')}"
        try:
            all_models = self.get_json("/load")
            return Snapshot(
                url=self._url,
                model=self.model,
                at_s=time.monotonic(),
                load=self.load(),
                pool=self.get_json("/kv" + of_model, can_be_away=True),
                requests=self.get_json("/v1/requests")["data"],
                totals=counters(self.metrics()),
                models=all_models["models"],
                memory=all_models["memory"],
            )
        except (LookupError, TypeError, ValueError) as error:
            cause = f"{self._url} sent an answer that can't be shown: {error!r}."
            raise PenstockError(cause, remedy=OTHER_SERVER) from error

    def metrics(self) -> str:
        return self.get("/metrics").decode()

    def get_json(self, path: str, *, can_be_away: bool = False) -> Any:
        body = self.get(path, can_be_away=can_be_away)
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise PenstockError(f"{self._url}{path} is not JSON.", remedy=OTHER_SERVER) from error

    def get(self, path: str, *, can_be_away: bool = False) -> bytes:
        with Questions(self._target, timeout_s=10) as questions:
            status, body = questions.ask("GET", path)
        if status == 503 and can_be_away:
            return b""
        if status != 200:
            remedies = {401: "Give --api-key.", 503: "Ask again when it is ready."}
            raise PenstockError(f"{self._url}{path} answered {status}.", remedy=remedies.get(status, OTHER_SERVER))
        return body


def counters(text: str) -> dict[str, dict[str, float]]:
    """Return, for each model, the counters that end in _total, summed over other labels. Raises ValueError."""
    totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, labels, value in series_of(text):
        if name.endswith("_total"):
            totals[labels.get("model", "")][name] += value
    return {model: dict(values) for model, values in totals.items()}


# The view


def render(before: Snapshot, now: Snapshot, look: Look) -> list[str]:
    """Return the screen's lines: at most `look.height`, unless the part above the requests takes as many.

    Rates are between the two snapshots.
    """
    head = [line[: look.width] for line in (*_head(before, now), *_models(before, now))]
    if "replicas" in now.load:
        body: Iterable[str] = (line[: look.width] for line in replica_lines(now.load["replicas"]))
    else:
        body = ["The model is not loaded."] if now.pool is None else _pool(now.pool, look)
    lines = [*head, "", *body, ""]
    return lines + list(_requests(now, look, max(1, look.height - len(lines))))


def replica_lines(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of a cluster's replicas, as `/load` reports them."""
    lines = [f"{'replica':{_NAME_WIDTH}}  {'running':>7}  {'waiting':>7}  {'tokens left':>11}  {'KV held':>7}  address"]
    for one in replicas:
        held = 1 - one["kv_blocks_free"] / one["kv_blocks"] if one["kv_blocks"] else 0.0
        away = "" if one["ready"] else ", takes no requests"
        silent = f", silent for {one['silent_s']:.1f} s" if one["silent_s"] > _SILENT_S else ""
        lines.append(
            f"{one['name'][:_NAME_WIDTH]:{_NAME_WIDTH}}  {one['requests_running']:7}  {one['requests_waiting']:7}  "
            f"{one['tokens_left']:11}  {held:7.0%}  {one['address']}{away}{silent}"
        )
    return lines if replicas else ["No replicas"]


def _head(before: Snapshot, now: Snapshot) -> Iterator[str]:
    load = now.load
    yield f"{now.model} at {now.url}"
    waiting_for = f" for {load['waiting_for']}" if load["requests_waiting"] and load["waiting_for"] else ""
    late = load["sustained"]
    yield (
        f"running {load['requests_running']}   waiting {load['requests_waiting']}{waiting_for}   "
        f"{late['utilisation']:.0%} full over the last {late['window_s']} s   queue delay {late['queue_delay_s']:.1f} s"
    )

    def rate(name: str) -> float:
        return _rate(before, now, now.model, name)

    asked, found = rate("penstock_prefix_cache_queries_total"), rate("penstock_prefix_cache_hits_total")
    cached = f" ({found / asked:.0%} from the cache)" if asked else ""
    yield (
        f"per second: {rate('penstock_generation_tokens_total'):,.0f} tokens out   "
        f"{rate('penstock_prompt_tokens_total'):,.0f} in{cached}   "
        f"{rate('penstock_request_success_total'):.1f} requests   {rate('penstock_preemptions_total'):.1f} preempted"
    )
    if adapters := load.get("adapters"):
        yield (
            f"adapters: {adapters['running']} run   {adapters['kv_cache']} in the KV cache   {adapters['memory']} in memory   "
            f"per second: {rate('penstock_adapter_loads_total'):.1f} read   "
            f"{rate('penstock_adapter_placements_total'):.1f} put into the cache"
        )


def _rate(before: Snapshot, now: Snapshot, model: str, name: str) -> float:
    grown = now.totals.get(model, {}).get(name, 0.0) - before.totals.get(model, {}).get(name, 0.0)
    return max(0.0, grown) / max(now.at_s - before.at_s, 1e-9)


def _models(before: Snapshot, now: Snapshot) -> Iterator[str]:
    if len(now.models) < 2:
        return
    free, limit = (format_size(now.memory[name]) for name in ("free_bytes", "limit_bytes"))
    yield ""
    titles = f"{'state':8} {'running':>7} {'waiting':>7} {'tok/s':>7} {'CPU':>5}  memory, {free} of {limit} free"
    yield f"{'model':{_NAME_WIDTH}} {titles}"
    for line in now.models:
        name, waiting = str(line["name"]), line["requests_waiting"] + line["requests_waiting_for_load"]
        # Steps on a GPU, and those of the reference backend, take no turns at the CPU.
        has_turns = now.totals.get(name, {}).get("penstock_machine_seconds_total", 0.0) > 0
        cpu = f"{_rate(before, now, name, 'penstock_machine_seconds_total'):.0%}" if has_turns else "-"
        yield (
            f"{_cut(name, _NAME_WIDTH):{_NAME_WIDTH}} {line['state']:8} {line['requests_running']:7} {waiting:7} "
            f"{_rate(before, now, name, 'penstock_generation_tokens_total'):7,.0f} "
            f"{cpu:>5}  {_memory(line['memory_bytes'])}"
        )


def _memory(parts: Mapping[str, int]) -> str:
    told = ", ".join(f"{part} {format_size(size)}" for part, size in parts.items() if size and part != "reserve")
    return f"{format_size(sum(parts.values()))} ({told})" if told else "-"


def _pool(pool: Mapping[str, Any], look: Look) -> Iterator[str]:
    total = max(1, pool["blocks"] - pool["states"]["null"])
    states = ("held", "shared", *("adapter",) * bool(pool["states"].get("adapter")), "cached", "free")
    shares = "   ".join(f"{_glyph(state, look)} {state} {pool['states'][state] / total:.0%}" for state in states)
    yield f"KV {total:,} blocks of {pool['block_size']}:   {shares}   waste {pool['waste_ratio']:.1%}"
    for row in _rows(pool, look):
        yield "".join(_cell(state, owner, look) for state, owner in row)


def _rows(pool: Mapping[str, Any], look: Look) -> Iterator[list[tuple[str, int]]]:
    """Yield the rows of the map of KV blocks. A cell stands for several blocks: the most frequent (state, owner) in use."""
    kinds: list[tuple[str, int]] = []
    for state, count, *owner in pool["map"]:
        kinds += [(state, owner[0] if owner else -1)] * count
    width = max(10, look.width)
    num_cells = min(len(kinds), width * _MAX_MAP_ROWS)
    edges = [idx * len(kinds) // num_cells for idx in range(num_cells + 1)]
    cells = [_most_frequent(kinds[start:stop]) for start, stop in pairwise(edges)]
    for start in range(0, num_cells, width):
        yield cells[start : start + width]


def _most_frequent(kinds: Sequence[tuple[str, int]]) -> tuple[str, int]:
    counts = Counter(kind for kind in kinds if kind[0] not in ("free", "null"))
    return counts.most_common(1)[0][0] if counts else ("free", -1)


def _cell(state: str, owner: int, look: Look) -> str:
    if look.has_colour:
        colour = _OWNER_COLOURS[owner % len(_OWNER_COLOURS)] if state == "held" else _STATE_COLOURS.get(state, 238)
        return _coloured(_FULL if state in ("held", "shared", "adapter") else _GLYPHS[state], colour)
    return _OWNER_LETTERS[owner % len(_OWNER_LETTERS)] if state == "held" else _GLYPHS[state]


def _glyph(state: str, look: Look) -> str:
    return "a-z" if state == "held" and not look.has_colour else _cell(state, 0, look)


def _requests(now: Snapshot, look: Look, num_lines: int) -> Iterator[str]:
    rows = [(call, choice) for call in now.requests for choice in call["choices"]]
    rows.sort(key=lambda row: _STATES.index(row[1]["state"]))
    if not rows:
        yield _why_no_requests(now)[: look.width]
        return
    owners = () if now.pool is None else now.pool["owners"]
    numbers = {(owner["request"], owner["choice"]): idx for idx, owner in enumerate(owners) if owner["request"]}
    titles = f"{'state':8} {'for':>7} {'waited':>7} {'prompt':>7} {'cached':>7} {'out':>6}  waited for"
    yield f"  {'request':{_NAME_WIDTH}} {titles}"[: look.width]
    shown = rows if len(rows) < num_lines else rows[: max(0, num_lines - 2)]
    for call, choice in shown:
        owner = numbers.get((call["id"], choice["index"]))
        mark = " " if owner is None else _cell("held", owner, look)
        yield f"{mark} {_cut(_request(call, choice), look.width - 2)}"
    if len(shown) < len(rows):
        yield f"  and {len(rows) - len(shown)} more"


def _why_no_requests(now: Snapshot) -> str:
    if now.pool is not None and any(owner["request"] for owner in now.pool["owners"]):
        return "Your requests are not explained (--explained-requests 0), or have just ended."
    return "You have no requests in flight."


def _request(call: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    times = choice["time_ms"]
    name = _cut(call["id"], _NAME_WIDTH)
    cached = (choice["prefix"] or {}).get("hit_tokens", 0)
    parts = sorted(choice["waited"]["for_ms"].items(), key=lambda part: -part[1])
    why = ", ".join(f"{reason} {_seconds(part_ms)}" for reason, part_ms in parts if part_ms >= 1)
    return (
        f"{name:{_NAME_WIDTH}} {choice['state']:8} {_seconds(times['total']):>7} {_seconds(times['queue']):>7} "
        f"{choice['prompt_tokens']:7} {cached:7} {choice['completion_tokens']:6}  {why}"
    ).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _seconds(num_ms: float) -> str:
    return f"{num_ms / 1e3:.1f} s" if num_ms < 1e6 else f"{num_ms / 1e3:.0f} s"


def _coloured(text: str, colour: int) -> str:
    return f"\x1b[38;5;{colour}m{text}\x1b[0m"
