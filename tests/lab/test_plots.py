"""Plots are drawn offline, without a display, the same each time; without matplotlib, an error says how to get it."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.lab import plots
from penstock.lab.figures import Samples, parse_slos
from penstock.lab.plots import Axis, Panel, Plot, Series, draw
from penstock.lab.records import End
from penstock.lab.results import Load, Result
from penstock.types.errors import ConfigError
from support.bench_records import random_records, record, result_of, run_of

needs_matplotlib = pytest.mark.skipif(not plots.is_installed(), reason=f"plots are an extra: {plots.INSTALL}")
PNG = b"\x89PNG\r\n\x1a\n"


@functools.cache
def sweep() -> Result:
    some = ((rate, random_records(int(rate), 120, tenants="ab")) for rate in (5.0, 10.0, 20.0))
    slos = parse_slos(["ttft=150ms", "tpot=25ms"])
    return result_of(*(run_of(records, load=Load("rate", rate), slos=slos) for rate, records in some))


def panel(*series: Series, is_log: bool = False) -> Panel:
    return Panel("a panel", Axis("load (requests/s)", is_log=is_log), Axis("TTFT (ms)", is_log=is_log), series, {"SLO": 3.0})


def test_without_matplotlib_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[lab\]'"):
        draw("a plot", [panel(Series("a", [(1, 2)]))])


def test_panels_are_made_without_matplotlib() -> None:
    runs = sweep().runs
    names = [one.title for one in plots.latency_by_load(runs)]
    assert names == ["TTFT", "TPOT", "e2e"]
    ttft = next(plots.latency_by_load(runs))
    assert ttft.limits == {"SLO ttft=150ms": 150.0}
    assert [x for x, _ in ttft.series[0].points] == [5.0, 10.0, 20.0]
    assert ttft.x.label == "rate (requests/s)"
    assert ttft.y.label == "TTFT (ms)"
    titles = [one.title for one in plots.throughput_by_load(runs)]
    assert titles == ["Output tokens", "Requests", "SLO attainment"]
    requests = list(plots.throughput_by_load(runs))[1]
    assert [series.name for series in requests.series] == ["requests/s", "goodput", "as asked"]


def test_a_distribution_rises_to_one() -> None:
    for one in plots.latency_distributions(sweep().runs):
        for series in one.series:
            if not series.name.startswith("SLO"):
                shares = [y for _, y in series.points]
                assert shares == sorted(shares)
                assert math.isclose(shares[-1], 1)


def test_the_timeline_counts_what_is_in_flight() -> None:
    samples = Samples.of([record(i, due_ms=1000 * i, ttft_ms=1500, gaps_ms=(500,)) for i in range(4)])
    flight = next(plots.timeline(samples)).series[0]
    at = dict(flight.points)
    assert at[min(at, key=lambda x: abs(x - 0.5))] == 1
    assert at[min(at, key=lambda x: abs(x - 1.5))] == 2
    assert flight.points[-1][1] == 0


def test_a_roof_has_its_knee() -> None:
    one = plots.roofline("r", peak_gops=400, read_gbs=20, measured={"decode": [(2.0, 35.0)]})
    assert (20, 400) in one.series[0].points
    low, speed = one.series[0].points[0]
    assert math.isclose(speed, low * 20)
    assert low < 2


@needs_matplotlib
@pytest.mark.parametrize(
    "result", [sweep(), result_of(run_of(random_records(0, 50), load=None)), result_of(run_of([record()]))]
)
def test_every_plot_of_a_result_is_drawn(result: Result) -> None:
    drawn = list(plots.plots_of(result))
    assert all(plot.png().startswith(PNG) for plot in drawn)
    assert ("Latency against rate" in [plot.title for plot in drawn]) == (len(result.runs) > 1)


def test_variants_at_one_load_are_not_drawn_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda title, panels: title)
    runs = [run_of([record()], name=f"{rate}, {policy}", load=Load("rate", rate)) for rate in (2, 4) for policy in ("a", "b")]
    titles = list(plots.plots_of(result_of(*runs)))
    assert titles == [
        "Distribution of latencies",
        *(f"Over time, and by length of the prompt, {run.name}" for run in runs),
    ]
    assert "Latency against rate" in list(plots.plots_of(result_of(*runs[::2])))


@needs_matplotlib
def test_a_run_in_which_nothing_ended_well_has_plots() -> None:
    failed = result_of(run_of([record(i, due_ms=i, end=End.FAILED) for i in range(3)]))
    assert all(plot.png().startswith(PNG) for plot in plots.plots_of(failed))


@needs_matplotlib
def test_the_same_plot_has_the_same_bytes_and_names_no_host() -> None:
    def one() -> Plot:
        return draw("a plot", [panel(Series("a", [(1, 2), (2, 3)], intervals=[(1, 3), (2, math.nan)]))])

    assert one().png() == one().png()
    assert one().svg() == one().svg()
    assert b"matplotlib.org" not in one().png() + one().svg()


@needs_matplotlib
@pytest.mark.parametrize("name", ["$\\frac{1}$", "_hidden", "a\nb\x1b[31m", "漢字 \U0001f600", "x" * 500, "<b>&", "%s {0}"])
def test_names_are_taken_as_they_are(name: str) -> None:
    """A tenant or a workload may be called anything."""
    series = [Series(name, [(1.0, 1.0)]), Series("other", [(1.0, 1.0)])]
    one = draw(name, [Panel(name, Axis(name), Axis(name, ticks={1.0: name}), series, {f"limit {name}": 1.0})])
    assert one.png().startswith(PNG)
    assert one.svg()


@needs_matplotlib
def test_numbers_on_logarithmic_axes_are_plain() -> None:
    one = draw("a", [panel(Series("a", [(20.0, 150.0), (50_000.0, 400.0)]), is_log=True)])
    one.png()
    (ax,) = one._figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["100", "1000", "10k"]
    assert {"10", "100"} <= {label.get_text() for label in ax.get_yticklabels()}
    assert not [label for label in ax.get_yticklabels(minor=True) if label.get_text()]


@pytest.mark.parametrize(("low", "high"), [(20, 30), (1, 1000), (0.8, 1.3), (3, 7), (1e-6, 1e9), (140, 420)])
def test_round_numbers_lie_within_the_axis(low: float, high: float) -> None:
    ticks = plots.log_ticks(low, high)
    assert 3 <= len(ticks) <= 16
    assert all(low <= tick <= high for tick in ticks)


def test_numbers_are_short() -> None:
    shown = [plots.short_number(value) for value in (1_500_000, 20_000, 5_000, 0.05, 3e9)]
    assert shown == ["1.5M", "20k", "5000", "0.05", "3G"]


@needs_matplotlib
@pytest.mark.parametrize("style", plots.STYLES)
def test_points_that_an_axis_has_no_place_for_are_left_out(style: str) -> None:
    points = [(0.0, 1.0), (1.0, 0.0), (2.0, 3.0), (math.nan, 1.0), (3.0, math.inf)]
    assert draw("a", [panel(Series("a", points, style), is_log=True)]).png().startswith(PNG)
    assert draw("a", [panel(Series("a", [], style), is_log=True)]).png().startswith(PNG)


@needs_matplotlib
def test_an_unknown_style_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no style 'zigzag'"):
        draw("a", [panel(Series("a", [(1, 1)], "zigzag"))])


@needs_matplotlib
def test_a_plot_is_written_by_its_ending(tmp_path: Path) -> None:
    one = draw("a", [panel(Series("a", [(1, 1)]))])
    one.save(tmp_path / "a.png")
    one.save(tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    with pytest.raises(ConfigError, match=r"written as \.png or \.svg"):
        one.save(tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="can't be written"):
        one.save(tmp_path / "none" / "a.png")


def test_many_points_are_thinned_out() -> None:
    many = [(float(x), float(x)) for x in np.arange(50_000)]
    thin = plots._thinned(many)
    assert len(thin) == 2000
    assert thin[0] == many[0]
    assert thin[-1] == many[-1]
