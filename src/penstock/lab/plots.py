"""Plots by matplotlib, from the extra `penstock[lab]`. `draw` makes a `Plot` of panels, series and axes, which are values.

Colours are Okabe and Ito's (Color Universal Design, 2008), which colour-blind people can tell apart; each series also has its
own mark. No display is needed. The same values and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.lab.figures import NS_PER_MS, Samples, tokens_upto, whole_window
from penstock.lab.intervals import Estimate, Floats
from penstock.lab.results import LOAD_UNITS, Result, Run, has_variants
from penstock.lab.workload import NS_PER_S
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'penstock[lab]'"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
MAX_LABEL_CHARS, MAX_TICK_CHARS = 60, 16
PER_ROW = 3
MAX_LEGEND_ENTRIES = 12
STYLES = ("line", "marks", "both", "steps", "dashed", "dotted")
_SETTINGS = {
    "font.family": "DejaVu Sans",  # It comes with matplotlib.
    "font.size": 9.0,
    "text.parse_math": False,  # A dollar in a name is a dollar.
    "svg.hashsalt": "penstock",
    "svg.fonttype": "none",  # Text that can be searched.
    "axes.unicode_minus": False,
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    is_log: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Position -> label. Empty lets matplotlib choose."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    """Name in the legend. If empty, the series is black and not in the legend."""
    points: Sequence[tuple[float, float]]
    style: str = "both"
    """One of `STYLES`; `both` is a line with marks."""
    intervals: Sequence[tuple[float, float]] = ()
    """(low, high) of each point, drawn as a band; NaN where unknown."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    limits: Mapping[str, float] = field(default_factory=dict)


class Plot:
    def __init__(self, figure: Figure, title: str) -> None:
        self._figure = figure
        self.title = title

    def png(self) -> bytes:
        return self._written("png")

    def svg(self) -> bytes:
        return self._written("svg")

    def save(self, path: Path) -> None:
        check_ending(path)
        content = self._written(path.suffix.lower()[1:])
        try:
            path.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}.") from error

    def _written(self, kind: str) -> bytes:
        into = io.BytesIO()
        # Leave out the date and the version, so that the same plot has the same bytes.
        metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None, "Format": None, "Type": None}
        with _drawing():
            self._figure.savefig(into, format=kind, dpi=110, metadata=metadata)
        return into.getvalue()


def check_ending(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"A plot is written as .png or .svg, not as {path.name!r}.")


def is_installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(title: str, panels: Sequence[Panel]) -> Plot:
    """Draw panels, three in a row, as one plot. Raises ConfigError without matplotlib."""
    figure, axes = _begin(title, len(panels))
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series if series.name))
    looks = {name: (COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]) for i, name in enumerate(names)}
    with _drawing():
        for panel, ax in zip(panels, axes, strict=True):
            _draw_panel(ax, panel, looks)
    return Plot(figure, title)


def roofline(title: str, *, peak_gops: float, read_gbs: float, measured: Mapping[str, Sequence[tuple[float, float]]]) -> Panel:
    knee = peak_gops / read_gbs
    intensities = [x for points in measured.values() for x, _ in points]
    low, high = min([knee / 8, *intensities]) / 1.5, max([knee * 8, *intensities]) * 1.5
    roof = Series("roof", [(low, low * read_gbs), (knee, peak_gops), (high, peak_gops)], "line")
    found = [Series(name, points, "marks") for name, points in measured.items()]
    return Panel(title, Axis("operations per byte", is_log=True), Axis("GOP/s", is_log=True), [roof, *found])


def plots_of(result: Result) -> Iterator[Plot]:
    loads = [run for run in result.runs if run.load is not None]
    kinds = dict.fromkeys(run.load.kind for run in loads if run.load is not None)
    for kind in kinds:
        of_kind = [run for run in loads if run.load is not None and run.load.kind == kind]
        if len({run.load for run in of_kind}) > 1 and not has_variants(of_kind):
            yield draw(f"Latency against {kind}", list(latency_by_load(of_kind)))
            yield draw(f"Throughput against {kind}", list(throughput_by_load(of_kind)))
    yield draw("Distribution of latencies", list(latency_distributions(result.runs)))
    for position, run in enumerate(result.runs[:4]):
        words = f", {run_name(run, position)}" if len(result.runs) > 1 else ""
        panels = [*timeline(run.samples), *ttft_by_prompt(run.samples)]
        yield draw(f"Over time, and by length of the prompt{words}", panels)


def latency_distributions(runs: Sequence[Run]) -> Iterator[Panel]:
    for name in ("ttft", "tpot", "itl", "e2e"):
        series = []
        for position, run in enumerate(runs[: len(COLOURS)]):
            points = _gap_shares(run.samples) if name == "itl" else _shares(run.samples.latency_ns(name))
            if points:
                series.append(Series(run_name(run, position), points, "line"))
        if series:
            limits = {str(slo): slo.limit_ns / NS_PER_MS for slo in runs[0].slos if slo.metric == name}
            marks = [Series(f"SLO {text}", [(limit, 0.0), (limit, 1.0)], "dashed") for text, limit in limits.items()]
            x = Axis(f"{shown_name(name)} (ms)", is_log=True)
            yield Panel(shown_name(name), x, Axis("share of all", low=0.0, high=1.02), [*series, *marks])


def latency_by_load(runs: Sequence[Run]) -> Iterator[Panel]:
    for name in ("ttft", "tpot", "e2e"):
        series = [
            _over_load(
                runs,
                quantile,
                [run.figures.latency_ms[name].quantiles[quantile] if name in run.figures.latency_ms else None for run in runs],
            )
            for quantile in ("p50", "p99")
        ]
        series = [one for one in series if one.points]
        if series:
            limits = {f"SLO {slo}": slo.limit_ns / NS_PER_MS for slo in runs[0].slos if slo.metric == name}
            yield Panel(shown_name(name), _load_axis(runs), Axis(f"{shown_name(name)} (ms)", is_log=True), series, limits)


def throughput_by_load(runs: Sequence[Run]) -> Iterator[Panel]:
    tokens = _over_load(runs, "output tokens/s", [run.figures.rates.output_tokens_per_s for run in runs])
    yield Panel("Output tokens", _load_axis(runs), Axis("output tokens/s", low=0.0), [tokens])
    series = [_over_load(runs, "requests/s", [run.figures.rates.requests_per_s for run in runs])]
    goodput = [run.figures.goodput.requests_per_s if run.figures.goodput else None for run in runs]
    if any(goodput):
        series.append(_over_load(runs, "goodput", goodput))
    if runs[0].load is not None and runs[0].load.kind == "rate":
        loads = sorted({run.load.value for run in runs if run.load is not None})
        series.append(Series("as asked", [(load, load) for load in loads], "dotted"))
    yield Panel("Requests", _load_axis(runs), Axis("requests/s", low=0.0), series)
    attained = [run.figures.goodput.attainment.scaled(100) if run.figures.goodput else None for run in runs]
    if any(attained):
        series = [_over_load(runs, "meet every SLO", attained)]
        yield Panel("SLO attainment", _load_axis(runs), Axis("requests that meet every SLO (%)", low=0.0, high=102.0), series)


def timeline(samples: Samples) -> Iterator[Panel]:
    window = whole_window(samples)
    at_ns = np.linspace(window.begin_ns, window.end_ns, 401)
    seconds = (at_ns - window.begin_ns) / NS_PER_S
    sent, ended = np.sort(samples.sent_ns), np.sort(samples.ended_ns)
    in_flight = np.searchsorted(sent, at_ns, side="right") - np.searchsorted(ended, at_ns, side="right")
    x = Axis("time since the begin (s)")
    flight = Series("in flight", _points(seconds, in_flight.astype(np.float64)), "steps")
    yield Panel("Concurrency", x, Axis("requests in flight", low=0.0), [flight])
    edges_ns = np.linspace(window.begin_ns, window.end_ns, 41)
    width_s = max(window.duration_s / 40, 1e-9)
    middles = (edges_ns[:-1] - window.begin_ns) / NS_PER_S + width_s / 2
    due = np.histogram(samples.intended_ns, edges_ns)[0] / width_s
    done = np.histogram(samples.ended_ns[samples.is_ok], edges_ns)[0] / width_s
    rates = [Series("due", _points(middles, due), "line"), Series("ended well", _points(middles, done), "line")]
    yield Panel("Rate", x, Axis("requests/s", low=0.0), rates)
    output = np.diff(tokens_upto(samples.rows(samples.is_ok, samples.gaps), edges_ns)[0]) / width_s
    if output.any():
        yield Panel("Tokens", x, Axis("output tokens/s", low=0.0), [Series("output tokens", _points(middles, output), "line")])


def ttft_by_prompt(samples: Samples) -> Iterator[Panel]:
    ttft_ns = samples.latency_ns("ttft")
    known = np.flatnonzero((ttft_ns > 0) & (samples.num_prompt_tokens > 0))
    if len(known):
        points = _points(samples.num_prompt_tokens[known].astype(np.float64), ttft_ns[known] / NS_PER_MS)
        y = Axis("TTFT (ms)", is_log=True)
        yield Panel("TTFT by prompt", Axis("prompt tokens", is_log=True), y, [Series("requests", points, "marks")])


def run_name(run: Run, position: int) -> str:
    return run.name or (str(run.load) if run.load is not None else f"run {position + 1}")


def shown_name(name: str) -> str:
    return name if name in ("e2e", "queue") else name.upper()


def _points(xs: Floats, ys: Floats) -> list[tuple[float, float]]:
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _shares(values_ns: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[tuple[float, float]]:
    ordered = np.sort(values_ns[values_ns > 0]) / NS_PER_MS
    return _points(ordered, (np.arange(len(ordered)) + 1.0) / max(1, len(ordered)))


def _gap_shares(samples: Samples) -> list[tuple[float, float]]:
    totals = samples.gaps.counts.sum(axis=0)
    return _points(samples.gaps.values_ns / NS_PER_MS, np.cumsum(totals) / max(1, int(totals.sum())))


def _over_load(runs: Sequence[Run], name: str, values: Sequence[Estimate | None]) -> Series:
    found = sorted(
        (run.load.value, value.value, value.low, value.high)
        for run, value in zip(runs, values, strict=True)
        if run.load is not None and value is not None and math.isfinite(value.value)
    )
    intervals = [(math.nan if low is None else low, math.nan if high is None else high) for _, _, low, high in found]
    return Series(name, [(load, value) for load, value, _, _ in found], "both", intervals)


def _load_axis(runs: Sequence[Run]) -> Axis:
    kind = next((run.load.kind for run in runs if run.load is not None), "load")
    return Axis(f"{kind} ({LOAD_UNITS[kind]})" if kind in LOAD_UNITS else kind)


def _begin(title: str, num_panels: int) -> tuple[Figure, list[Axes]]:
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows, num_columns = -(-num_panels // PER_ROW), min(PER_ROW, max(1, num_panels))
    with _drawing():
        figure = Figure(figsize=(4.6 * num_columns, 3.6 * max(1, num_rows) + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_label(title), fontweight="bold")
        axes = [figure.add_subplot(max(1, num_rows), num_columns, i + 1) for i in range(num_panels)]
        for ax in axes:
            ax.grid(visible=True, color="#dddddd", linewidth=0.6)
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def require() -> ModuleType:
    """Import matplotlib. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("Plots need matplotlib, which is not installed.", remedy=f"Install it: {INSTALL}") from error


@contextmanager
def _drawing() -> Iterator[None]:
    """Use our settings instead of the user's, and silence warnings about missing letters and long names."""
    matplotlib = require()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        warnings.filterwarnings("ignore", message="constrained_layout not applied.*")
        yield


def _strokes(series: Series, mark: str) -> dict[str, Any]:
    if series.style not in STYLES:
        raise ValueError(f"there is no style {series.style!r}")
    return {
        "linestyle": {"marks": "none", "dashed": "--", "dotted": ":"}.get(series.style, "-"),
        "marker": mark if series.style in ("marks", "both") else "",
        "drawstyle": "steps-post" if series.style == "steps" else "default",
    }


def _draw_panel(ax: Axes, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    handles: dict[str, Artist] = {}
    is_empty = True
    for series in panel.series:
        points = [point for point in _thinned(series.points) if _fits(point, panel)]
        is_empty = is_empty and not points
        colour, mark = looks.get(series.name, ("#000000", "o"))
        xs, ys = [x for x, _ in points], [y for _, y in points]
        (handle,) = ax.plot(
            xs,
            ys,
            color=colour,
            linewidth=1.6,
            markersize=4.5 if len(points) < 100 else 2.5,
            alpha=1.0 if len(points) < 100 or series.style != "marks" else 0.5,
            **_strokes(series, mark),
        )
        handles.setdefault(series.name, handle)
        if series.intervals and len(points) == len(series.points) == len(series.intervals):
            ax.fill_between(
                xs,
                [low for low, _ in series.intervals],
                [high for _, high in series.intervals],
                color=colour,
                alpha=0.18,
                linewidth=0,
            )
    for (name, limit), style in zip(panel.limits.items(), cycle(["--", "-.", ":"])):  # cycle is endless
        handles[name] = ax.axhline(limit, color="#555555", linestyle=style, linewidth=1.2)
    for axis, drawn, set_scale, set_limits in (
        (panel.x, ax.xaxis, ax.set_xscale, ax.set_xlim),
        (panel.y, ax.yaxis, ax.set_yscale, ax.set_ylim),
    ):
        is_log = axis.is_log and not is_empty  # Without a point, a logarithmic axis has no limits.
        if is_log:
            set_scale("log")
        if axis.low is not None or axis.high is not None:
            set_limits(axis.low, axis.high)
        if axis.ticks:
            drawn.set_ticks(list(axis.ticks), [_label(text, MAX_TICK_CHARS) for text in axis.ticks.values()])
        elif is_log:
            low, high = drawn.get_view_interval()
            drawn.set_ticks(ticks := log_ticks(low, high), [short_number(tick) for tick in ticks])
        if is_log:
            drawn.set_ticks([], minor=True)
            set_limits(*drawn.get_view_interval())
        drawn.set_label_text(_label(axis.label))
    ax.set_title(_label(panel.title), fontsize=9)
    if 1 < len(handles) <= MAX_LEGEND_ENTRIES:
        ax.legend(list(handles.values()), [_label(name) for name in handles], fontsize=7)


def log_ticks(low: float, high: float) -> list[float]:
    """Return about three to ten round numbers between `low` and `high`, 0 < `low` < `high`, as ticks of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
        found = [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]
        if len(found) >= 3:
            break
    return found


def short_number(value: float) -> str:
    """Format a number for a tick: 1500000 -> 1.5M, 20000 -> 20k, 0.05 -> 0.05."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    chosen = np.linspace(0, len(points) - 1, min(len(points), 2000)).round().astype(int)
    return [points[i] for i in chosen.tolist()]


def _fits(point: tuple[float, float], panel: Panel) -> bool:
    return all(
        math.isfinite(value) and (value > 0 or not axis.is_log) for value, axis in zip(point, (panel.x, panel.y), strict=True)
    )


def _label(text: str, max_chars: int = MAX_LABEL_CHARS) -> str:
    """Shorten a label to one line. matplotlib hides labels that begin with an underscore, so put a space before it."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    shown = shown if len(shown) <= max_chars else f"{shown[: max_chars - 1]}…"
    return f" {shown}" if shown.startswith("_") else shown
