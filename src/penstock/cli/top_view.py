"""A server's state as lines for a terminal: what `penstock top` shows. Gets numbers and returns text; asks nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_OWNER_COLOURS = (33, 208, 40, 201, 226, 51, 196, 141, 118, 214, 45, 203)
_OWNER_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_GLYPHS = {"free": ".", "cached": ":", "shared": "+", "null": ".", "held": "#"}
_STATE_COLOURS = {"free": 238, "cached": 67, "shared": 255}
_FULL = "█"
_STATES = ("decode", "prefill", "paused", "waiting", "ended")
"""In the order in which requests are listed."""
_MAX_MAP_ROWS = 8
_NAME_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the server said, at one moment; JSON as it came."""

    url: str
    model: str
    at_s: float
    load: Mapping[str, Any]
    pool: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]]
    """The caller's own, explained."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Counters by their Prometheus names, summed over labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    width: int = 80
    height: int = 24
    has_colour: bool = False


def render(before: Snapshot, now: Snapshot, look: Look) -> list[str]:
    """The whole view, at most `look.height` lines; rates are those between the two."""
    head = [line[: look.width] for line in _head(before, now)]
    lines = [*head, "", *_pool(now.pool, look), ""]
    return lines + list(_requests(now, look, max(1, look.height - len(lines))))


def _head(before: Snapshot, now: Snapshot) -> Iterator[str]:
    load = now.load
    yield f"{now.model} at {now.url}"
    waiting_for = f" for {load['waiting_for']}" if load["requests_waiting"] and load["waiting_for"] else ""
    late = load["sustained"]
    yield (
        f"running {load['requests_running']}   waiting {load['requests_waiting']}{waiting_for}   "
        f"busy {late['utilisation']:.0%} of the last {late['window_s']} s   queue delay {late['queue_delay_s']:.1f} s"
    )
    elapsed_s = max(now.at_s - before.at_s, 1e-9)

    def rate(name: str) -> float:
        return max(0.0, now.totals.get(name, 0.0) - before.totals.get(name, 0.0)) / elapsed_s

    asked, found = rate("penstock_prefix_cache_queries_total"), rate("penstock_prefix_cache_hits_total")
    yield (
        f"per second: {rate('penstock_generation_tokens_total'):,.0f} tokens out   "
        f"{rate('penstock_prompt_tokens_total'):,.0f} in ({found / asked if asked else 0.0:.0%} from the cache)   "
        f"{rate('penstock_request_success_total'):.1f} requests   {rate('penstock_preemptions_total'):.1f} preempted"
    )


def _pool(pool: Mapping[str, Any], look: Look) -> Iterator[str]:
    total = max(1, pool["blocks"] - pool["states"]["null"])
    shares = "   ".join(
        f"{_glyph(state, look)} {state} {pool['states'][state] / total:.0%}" for state in ("held", "shared", "cached", "free")
    )
    yield f"KV {total:,} blocks of {pool['block_size']}:   {shares}   waste {pool['waste_ratio']:.1%}"
    for row in _rows(pool, look):
        yield "".join(_cell(state, owner, look) for state, owner in row)


def _rows(pool: Mapping[str, Any], look: Look) -> Iterator[list[tuple[str, int]]]:
    """(state, owner) of each cell: of its blocks the most frequent that are not free, as few as they may be."""
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
        return _coloured(_FULL if state in ("held", "shared") else _GLYPHS[state], colour)
    return _OWNER_LETTERS[owner % len(_OWNER_LETTERS)] if state == "held" else _GLYPHS[state]


def _glyph(state: str, look: Look) -> str:
    return "a-z" if state == "held" and not look.has_colour else _cell(state, 0, look)


def _requests(now: Snapshot, look: Look, num_lines: int) -> Iterator[str]:
    rows = [(call, choice) for call in now.requests for choice in call["choices"]]
    rows.sort(key=lambda row: _STATES.index(row[1]["state"]))
    if not rows:
        yield _none_told(now)[: look.width]
        return
    numbers = {(owner["request"], owner["choice"]): idx for idx, owner in enumerate(now.pool["owners"]) if owner["request"]}
    titles = f"{'state':8} {'for':>7} {'waited':>7} {'prompt':>7} {'cached':>7} {'out':>6}  waited for"
    yield f"  {'request':{_NAME_WIDTH}} {titles}"[: look.width]
    shown = rows if len(rows) < num_lines else rows[: max(0, num_lines - 2)]
    for call, choice in shown:
        owner = numbers.get((call["id"], choice["index"]))
        mark = " " if owner is None else _cell("held", owner, look)
        yield f"{mark} {_cut(_request(call, choice), look.width - 2)}"
    if len(shown) < len(rows):
        yield f"  and {len(rows) - len(shown)} more"


def _none_told(now: Snapshot) -> str:
    if any(owner["request"] for owner in now.pool["owners"]):
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
