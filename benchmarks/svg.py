"""Draws two kinds of plot as SVG text, without a plotting library: groups of bars, and shares over a logarithmic axis.

Called by `report.py`; knows nothing of benchmarks. Colours differ in lightness, too; a legend names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f5fbf", "#e08214", "#3a9d5d", "#8c510a", "#7b5ea7", "#666666")
INK, FAINT = "#222222", "#dddddd"
FONT = "font-family='Helvetica,Arial,sans-serif'"


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one horizontal axis: of each series its (x, y) points, x ascending and positive."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def draw_text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = INK, weight: str = "normal"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{fill}' font-weight='{weight}' {FONT}>"
        f"{escape(text)}</text>"
    )


def draw_line(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'/>"


def document(width: float, height: float, parts: Sequence[str]) -> str:
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size}>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *parts, "</svg>\n"])


def round_ticks(highest: float) -> list[float]:
    """About five round numbers from 0 to at least `highest`."""
    power = 10.0 ** math.floor(math.log10(highest / 4)) if highest > 0 else 1.0
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 5 >= highest)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def grouped_bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """One group of bars for each key, one bar in it for each series; the value stands above its bar."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    left, top, height, bar, gap = 60.0, 64.0, 260.0, 46.0, 34.0
    width = left + len(groups) * (len(names) * bar + gap) + 16
    ticks = round_ticks(max(value for bars in groups.values() for value in bars.values()))
    scale = height / ticks[-1]
    parts = [draw_text(16, 24, title, size=15, weight="bold"), draw_text(16, 44, unit, fill="#555555")]
    for tick in ticks:
        y = top + height - tick * scale
        parts += [draw_line(left, y, width - 16, y), draw_text(left - 6, y + 4, f"{tick:g}", anchor="end", fill="#555555")]
    x = left + gap / 2
    for group, bars in groups.items():
        for i, name in enumerate(names):
            if name not in bars:
                continue
            tall = bars[name] * scale
            at, y = x + i * bar, top + height - tall
            parts.append(
                f"<rect x='{at + 2:.1f}' y='{y:.1f}' width='{bar - 4:.1f}' height='{tall:.1f}' fill='{colour[name]}'/>"
            )
            parts.append(draw_text(at + bar / 2, y - 4, f"{bars[name]:.0f}", size=11, anchor="middle"))
        parts.append(draw_text(x + len(names) * bar / 2, top + height + 18, group, anchor="middle"))
        x += len(names) * bar + gap
    return document(width, top + height + 58, [*parts, *legend(colour, left, top + height + 42)])


def legend(colours: Mapping[str, str], x: float, y: float) -> list[str]:
    parts = []
    for name, colour in colours.items():
        parts += [f"<rect x='{x:.1f}' y='{y - 10:.1f}' width='12' height='12' fill='{colour}'/>", draw_text(x + 17, y, name)]
        x += 34 + 7 * len(name)
    return parts


def share_lines(title: str, axis: str, panels: Sequence[Panel]) -> str:
    """Panels side by side of shares between 0 and 1, drawn in per cent over a logarithmic axis."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    left, top, height, wide, gap = 52.0, 86.0, 260.0, 330.0, 60.0
    width = left + len(panels) * (wide + gap)
    parts = [draw_text(16, 24, title, size=15, weight="bold"), draw_text(16, 44, axis, fill="#555555")]
    for i, panel in enumerate(panels):
        parts += _panel(panel, colour, left + i * (wide + gap), top, wide, height)
    return document(width, top + height + 58, [*parts, *legend(colour, left, top + height + 44)])


def _panel(panel: Panel, colour: Mapping[str, str], left: float, top: float, width: float, height: float) -> list[str]:
    xs = sorted({x for points in panel.series.values() for x, _ in points})
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    highest = max(1.0, *(y for points in panel.series.values() for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (math.log2(x) - low) / max(1e-9, high - low) * width, top + height * (1 - y / highest)

    parts = [draw_text(left, top - 10, panel.title, weight="bold")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(xs[0], share)[1]
        parts += [draw_line(left, y, left + width, y), draw_text(left - 6, y + 4, f"{share:.0%}", anchor="end", fill="#555555")]
    for x in (x for x in xs if math.log2(x).is_integer()):
        parts.append(draw_text(place(x, 0)[0], top + height + 18, f"{x:g}", anchor="middle", fill="#555555"))
    for name, points in panel.series.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour[name]}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{colour[name]}'/>" for x, y in (place(*p) for p in points)]
    return parts
