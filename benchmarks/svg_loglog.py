"""Draws panels of curves over two logarithmic axes as SVG text, of which a roofline is one.

Called by `report_gpu_plots.py`; knows nothing of benchmarks. Colours say what a curve is of, looks what kind of figure it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from svg import COLOURS, INK, document, draw_line, draw_text

GREY = "#555555"
LEFT, TOP, WIDTH, HEIGHT, GAP = 64.0, 92.0, 330.0, 270.0, 84.0
"""Size and place of a panel."""
BELOW = 92.0
"""A panel, until the next row of them."""
PER_ROW = 3


@dataclass(frozen=True, slots=True)
class Look:
    """How curves of one kind are drawn; the legend has its name."""

    name: str
    is_joined: bool = True
    is_dashed: bool = False
    mark: str = ""
    """"circle", "ring", "square", "triangle", "dot" or none."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y), both positive. Curves of one name have one colour; one without a name is black, and not in the legend."""

    name: str
    look: Look
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LogPanel:
    title: str
    curves: Sequence[Curve]
    note: str = ""
    """Below the title."""
    x_labels: Mapping[float, str] = field(default_factory=dict)
    """Where the horizontal axis has its numbers; round ones if there are none."""

    @property
    def points(self) -> list[tuple[float, float]]:
        return [point for curve in self.curves for point in curve.points]


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis from `low` to `high`, and where it has numbers."""

    ticks: Sequence[float]
    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """To round numbers below and above all values."""
        ticks = round_log_ticks(min(values), max(values))
        return cls(ticks, ticks[0], ticks[-1])

    @classmethod
    def at(cls, values: Sequence[float]) -> Axis:
        """With these alone, and room at both ends."""
        return cls(sorted(values), min(values) / 1.25, max(values) * 1.25)

    def place(self, value: float) -> float:
        """From 0 at `low` to 1 at `high`."""
        return math.log(value / self.low) / math.log(self.high / self.low)


def round_log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from at most `low` to at least `high`; with 2 and 5 times them where there would be few."""
    if not 0 < low <= high < math.inf:
        raise ValueError(f"a logarithmic axis has no place for {low:g} to {high:g}")
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first >= 4:
        return [10.0**power for power in range(first, last + 1)]
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    begin = max(i for i, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min(i for i, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return ticks[begin : max(end, begin + 1) + 1]


def short_number(value: float) -> str:
    """1500000 -> 1.5M, 20000 -> 20k, 0.05 -> 0.05"""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def log_plot(title: str, panels: Sequence[LogPanel], *, x_axis: str, y_axis: str, same_axes: bool = False) -> str:
    """Panels side by side, three in a row, each with axes of its own unless they are to be compared by eye.

    Raises ValueError for a point that is not positive.
    """
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves if curve.name))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)} | {"": INK}
    looks = list(dict.fromkeys(curve.look for panel in panels for curve in panel.curves))
    num_columns = min(PER_ROW, len(panels))
    everywhere = [point for panel in panels for point in panel.points]
    parts = [draw_text(16, 24, title, size=15, weight="bold"), draw_text(16, 44, f"{y_axis}, by {x_axis}", fill=GREY)]
    for i, panel in enumerate(panels):
        left, top = LEFT + i % PER_ROW * (WIDTH + GAP), TOP + i // PER_ROW * (HEIGHT + BELOW)
        points = everywhere if same_axes else panel.points
        x = Axis.at(list(panel.x_labels)) if panel.x_labels else Axis.around([x for x, _ in points])
        parts += _Drawing(left, top, x, Axis.around([y for _, y in points])).panel(panel, colour)
    bottom = TOP + -(-len(panels) // PER_ROW) * (HEIGHT + BELOW) - BELOW + 44
    parts += _colour_legend(names, colour, bottom)
    parts += _look_legend(looks, bottom + (22 if names else 0))
    return document(max(LEFT + num_columns * (WIDTH + GAP), 16 + _legend_width(names, looks)), bottom + 46, parts)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """One panel, at its place."""

    left: float
    top: float
    x: Axis
    y: Axis

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.left + self.x.place(point[0]) * WIDTH, self.top + (1 - self.y.place(point[1])) * HEIGHT

    def panel(self, panel: LogPanel, colour: Mapping[str, str]) -> Iterator[str]:
        yield draw_text(self.left, self.top - 24, panel.title, weight="bold")
        yield draw_text(self.left, self.top - 9, panel.note, size=11, fill=GREY)
        for tick in self.y.ticks:
            at = self.at((self.x.low, tick))[1]
            yield draw_line(self.left, at, self.left + WIDTH, at)
            yield draw_text(self.left - 6, at + 4, short_number(tick), anchor="end", fill=GREY)
        for tick in self.x.ticks:
            at = self.at((tick, self.y.low))[0]
            yield draw_line(at, self.top, at, self.top + HEIGHT)
            label = panel.x_labels.get(tick, short_number(tick))
            yield draw_text(at, self.top + HEIGHT + 18, label, anchor="middle", fill=GREY)
        for curve in panel.curves:
            yield from _strokes([self.at(point) for point in curve.points], curve.look, colour[curve.name])


def _strokes(points: Sequence[tuple[float, float]], look: Look, colour: str) -> Iterator[str]:
    if look.is_joined and len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = " stroke-dasharray='6 4'" if look.is_dashed else ""
        yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'{dashes}/>"
    elif look.is_joined and not look.mark:
        yield from (draw_line(x - 12, y, x + 12, y, colour) for x, y in points)
    yield from (_mark(look.mark, x, y, colour) for x, y in points if look.mark)


def _mark(mark: str, x: float, y: float, colour: str) -> str:
    if mark == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>"
    if mark == "dot":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{colour}' fill-opacity='0.45'/>"
    if mark == "ring":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='white' stroke='{colour}' stroke-width='1.6'/>"
    if mark == "square":
        return f"<rect x='{x - 3.2:.1f}' y='{y - 3.2:.1f}' width='6.4' height='6.4' fill='{colour}'/>"
    if mark == "triangle":
        return f"<path d='M {x:.1f} {y - 4.5:.1f} l 4.2 7.6 h -8.4 z' fill='{colour}'/>"
    raise ValueError(f"there is no mark {mark!r}")


def _colour_legend(names: Sequence[str], colour: Mapping[str, str], y: float) -> Iterator[str]:
    x = LEFT
    for name in names:
        yield f"<rect x='{x:.1f}' y='{y - 10:.1f}' width='12' height='12' fill='{colour[name]}'/>"
        yield draw_text(x + 17, y, name)
        x += _entry_width(name)


def _look_legend(looks: Sequence[Look], y: float) -> Iterator[str]:
    x = LEFT
    for look in looks:
        ends = [(x, y - 4), (x + 14, y - 4), (x + 28, y - 4)] if look.is_joined else [(x + 14, y - 4)]
        yield from _strokes(ends, Look(look.name, look.is_joined, look.is_dashed), INK)
        if look.mark:
            yield _mark(look.mark, x + 14, y - 4, INK)
        yield draw_text(x + 36, y, look.name)
        x += 20 + _entry_width(look.name)


def _entry_width(name: str) -> float:
    return 34 + 7.0 * len(name)


def _legend_width(names: Sequence[str], looks: Sequence[Look]) -> float:
    return LEFT + max(sum(map(_entry_width, names)), sum(20 + _entry_width(look.name) for look in looks))
