"""Plots over two logarithmic axes: nothing is drawn outside of its axes, and what has no place on them is an error."""

import re
from xml.etree import ElementTree

import pytest
from svg_loglog import HEIGHT, LEFT, TOP, WIDTH, Axis, Curve, LogPanel, Look, log_plot, round_log_ticks, short_number

LINE, DASHED = Look("a line", mark="circle"), Look("a bound", is_dashed=True)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.3, 4000.0, [0.1, 1, 10, 100, 1000, 10000]),
        (3.2, 31.0, [2, 5, 10, 20, 50]),
        (1.0, 1.0, [1, 2]),
        (5.0, 5.0, [5, 10]),
        (0.2, 100.0, [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]),
    ],
)
def test_ticks_are_round_and_reach_around_all_values(low, high, ticks):
    assert round_log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_what_has_no_logarithm_is_an_error(value):
    with pytest.raises(ValueError, match="no place"):
        log_plot("title", [LogPanel("a", [Curve("x", LINE, [(1, value)])])], x_axis="x", y_axis="y")


def test_equal_factors_are_equal_lengths():
    axis = Axis.around([1.0, 100.0])
    assert axis.place(10) - axis.place(1) == pytest.approx(axis.place(100) - axis.place(10))
    assert (axis.place(axis.low), axis.place(axis.high)) == (0, 1)


@pytest.mark.parametrize("has_labels", [False, True])
def test_all_points_are_within_their_panel(has_labels):
    points = [(1, 0.7), (8, 3.0), (256, 901.0)]
    labels = {x: f"{x} rows" for x, _ in points} if has_labels else {}
    drawing = log_plot("title", [LogPanel("a", [Curve("x", LINE, points)], x_labels=labels)], x_axis="x", y_axis="y")
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(drawing).iter(f"{SVG}circle")]
    inside = [(x, y) for x, y in circles if LEFT <= x <= LEFT + WIDTH and TOP <= y <= TOP + HEIGHT]
    assert len(inside) == len(points)
    assert len(circles) == len(points) + 1, "and one in the legend"
    assert ("8 rows" in drawing) == has_labels


def test_one_name_is_one_colour_and_its_bound_is_dashed():
    curves = [Curve(name, look, [(1, y), (2, y)]) for name, y in (("few", 1), ("many", 2)) for look in (LINE, DASHED)]
    drawing = log_plot("title", [LogPanel("a", curves)], x_axis="x", y_axis="y")
    lines = [
        (line.get("stroke"), line.get("stroke-dasharray")) for line in ElementTree.fromstring(drawing).iter(f"{SVG}polyline")
    ]
    few, _, many, *_ = (colour for colour, _ in lines)
    assert few != many
    assert lines[:4] == [(few, None), (few, "6 4"), (many, None), (many, "6 4")]


def test_panels_that_are_compared_by_eye_have_the_same_axes():
    panels = [LogPanel(str(y), [Curve("x", LINE, [(1, y), (2, y)])]) for y in (1.0, 80.0)]
    for same_axes in (False, True):
        drawing = log_plot("title", panels, x_axis="x", y_axis="y", same_axes=same_axes)
        assert (len(re.findall(">50</text>", drawing)) == 2) == same_axes


def test_a_fourth_panel_begins_a_row():
    panels = [LogPanel(str(i), [Curve("x", LINE, [(1, 1)])]) for i in range(4)]
    three, four = (ElementTree.fromstring(log_plot("title", panels[:count], x_axis="x", y_axis="y")) for count in (3, 4))
    assert three.get("width") == four.get("width")
    assert float(three.get("height")) < float(four.get("height"))


@pytest.mark.parametrize(("value", "text"), [(0.05, "0.05"), (5000, "5000"), (20000, "20k"), (1500000, "1.5M")])
def test_large_numbers_are_short(value, text):
    assert short_number(value) == text
