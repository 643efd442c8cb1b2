"""A result becomes text, Markdown and HTML: nothing that a server or a user sent gets through unescaped."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from penstock.lab import plots
from penstock.lab.compare import compare_results
from penstock.lab.figures import parse_slos
from penstock.lab.records import End
from penstock.lab.report import MAX_COLUMNS, as_html, as_markdown, as_text, html_of, sections_of, sections_of_compared
from penstock.lab.results import AskedTarget, Load, Result
from support.bench_records import random_records, record, result_of, run_of

EVIL = "<script>alert('x')</script> | [a](http://evil.example) \x1b[31m `b`"


@functools.cache
def hostile() -> Result:
    """Every text that comes from elsewhere is hostile."""
    records = random_records(0, 200, tenants=(EVIL, "b"))
    records.append(record(200, due_ms=5, end=End.REFUSED, http_status=429, error=EVIL, tenant="b"))
    run = run_of(
        records,
        workload=EVIL,
        options={EVIL: EVIL},
        target=AskedTarget(url="http://127.0.0.1:1", model=EVIL, server=EVIL),
        slos=parse_slos(["ttft=150ms", "tpot=25ms"]),
        price_per_hour=2.0,
        begun_at=EVIL,
    )
    return result_of(run)


@functools.cache
def sweep() -> Result:
    some = ((rate, random_records(int(rate), 120)) for rate in (5.0, 10.0, 20.0))
    return result_of(*(run_of(records, load=Load("rate", rate), slos=parse_slos(["ttft=150ms"])) for rate, records in some))


@pytest.mark.parametrize("result", [hostile(), sweep(), result_of(run_of([record()]))], ids=["hostile", "sweep", "one"])
def test_text_is_narrow_and_has_no_control_characters(result: Result) -> None:
    text = as_text(list(sections_of(result)))
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert all(char.isprintable() or char == "\n" for char in text)


def test_text_has_every_figure_with_its_interval() -> None:
    text = as_text(list(sections_of(hostile())))
    for words in (
        "TTFT ms",
        "p99.9",
        "ITL ms",
        "output tok/s",
        "total tok/s",
        "goodput/s",
        "steady part",
        "ttft=150ms",
        "all of them",
        "201 requests in",
        "1 refused",
        "a million output tokens cost",
        "Jain's index among 2 tenants",
        "The client sent",
        "unknown",
        "1 of 201 requests were refused",
    ):
        assert words in text, words
    assert re.search(r"\d–\d", text), "an interval"


def test_every_workload_is_named_as_of_repeats_with_other_seeds() -> None:
    runs = [run_of([record()], workload=f"made up, seed {seed}") for seed in range(7)]
    text = as_text(list(sections_of(result_of(*runs), every_run=False)))
    assert [f"made up, seed {seed}." in text for seed in range(7)] == [True] * 5 + [False] * 2
    assert "And 2 other workloads." in text


def test_options_that_runs_do_not_share_are_those_of_each() -> None:
    own = {"a": {"slo": "x", "rows": 2}, "b": {"slo": "x", "rows": 3}, "c": {"slo": "x"}, "d": {"slo": "x", "rows": 2}}
    runs = [run_of([record()], name=name, options=one, target=AskedTarget(model=name)) for name, one in own.items()]
    text = as_text(list(sections_of(result_of(*runs, *runs), every_run=False)))
    lines = [line for line in text.splitlines() if line.startswith(("Target", "Options"))]
    assert lines == [
        *(f"Target: model {name}." for name in own),
        "Options: slo = x.",
        "Options of a; d: rows = 2.",
        "Options of b: rows = 3.",
    ]


def test_a_simulated_run_is_labelled() -> None:
    run = run_of([record()], how="simulated")
    assert "Simulated: an estimate, not a measurement." in as_text(list(sections_of(result_of(run))))


def test_a_sweep_is_one_table_and_details_on_demand() -> None:
    short = as_text(list(sections_of(sweep(), every_run=False)))
    assert [line.split()[:2] for line in short.splitlines() if line.startswith("rate ")] == [
        ["rate", n] for n in ("5", "10", "20")
    ]
    assert "p99.9" not in short
    assert "`penstock bench report` and `penstock simulate` show" in short, "`bench` prints this too, without that option"
    assert as_text(list(sections_of(sweep()))).count("p99.9") == 3


def test_a_sweep_says_why_figures_of_its_runs_are_doubtful() -> None:
    late = [record(i, due_ms=10 * i, lag_ms=80) for i in range(60)]
    runs = run_of(late, load=Load("rate", 9.0)), run_of(late[:3], load=Load("rate", 5.0), warnings=("Interrupted: a", "b"))
    text = as_text(list(sections_of(result_of(*runs), every_run=False)))
    for words in ("! rate 9: The client fell behind", "! rate 5: Interrupted: a", "! rate 5: b"):
        assert words in text


def test_markdown_escapes_what_is_markdown() -> None:
    text = as_markdown(list(sections_of(hostile())))
    assert "<script" not in text.replace("\\<", "")
    assert "\\[a\\](http" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    for before, after in itertools.pairwise(tables):
        if "---" in after:
            assert columns[tables.index(before)] == columns[tables.index(after)]


class Reader(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]


@pytest.mark.parametrize("result", [hostile(), sweep()], ids=["hostile", "sweep"])
def test_html_loads_nothing_and_escapes_all(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests look at the plots, which take seconds to draw."""
    monkeypatch.setattr(plots.Plot, "png", lambda plot: b"\x89PNG")
    monkeypatch.setattr(plots, "_draw_panel", lambda *given, **how: None)
    page = html_of(result)
    reader = Reader()
    reader.feed(page)
    assert not {"script", "link", "iframe", "object", "a", "form", "base"} & set(reader.tags)
    assert all(value.startswith("data:image/png;base64,") for _, name, value in reader.attributes if name in ("src", "href"))
    assert "img" in reader.tags
    assert not any(name.startswith("on") or name == "srcset" for _, name, _ in reader.attributes)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
    assert "\x1b" not in page
    assert page.count("<table>") == page.count("</table>") > 2


def test_html_without_matplotlib_has_tables_and_says_how_to_get_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "is_installed", lambda: False)
    page = html_of(hostile())
    assert "<table>" in page
    assert "<img" not in page
    assert "pip install &#x27;penstock[lab]&#x27;" in page


def test_html_names_no_host_of_its_own() -> None:
    page = as_html("a", list(sections_of(result_of(run_of([record()])))), None)
    assert "http" not in page.replace("http-equiv", "")


def test_a_comparison_is_a_table_of_words() -> None:
    before = result_of(run_of(random_records(1, 300), seed=1))
    after = result_of(run_of(random_records(1, 300, slower=1.2), seed=1))
    (compared,) = compare_results(before, [after])
    sections = list(sections_of_compared(compared, "a.json", EVIL))
    text = as_text(sections)
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert re.search(r"TTFT p50 .* slower by 20 % \[", text)
    assert "figures were tested" in text
    assert "With fewer than 3 runs" in text
    assert "<script" not in as_html("c", sections, None)


def test_sections_say_where_nothing_ended_well() -> None:
    failed = result_of(run_of([record(i, end=End.FAILED, error="no such model") for i in range(3)], price_per_hour=1.0))
    text = as_text(list(sections_of(failed)))
    assert "3 requests in" in text
    assert "3 failed" in text
    assert "no such model" in text
    assert "infinite" in text


def test_long_names_that_begin_alike_can_be_told_apart() -> None:
    names = ("policy=./my_policy.py:LongFirst", "policy=./my_policy.py:ShortPromptsFirst")
    text = as_text(list(sections_of(result_of(*(run_of(random_records(0, 120), name=name) for name in names)))))
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("policy=")]
    assert rows[0].endswith("ngFirst")
    assert rows[1].endswith("tsFirst")


def test_long_names_are_clipped() -> None:
    run = run_of(random_records(0, 60, tenants=("x" * 500, "y")))
    text = as_text(list(sections_of(result_of(run))))
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    html = as_html("t", list(sections_of(result_of(replace(run, workload="w" * 100_000)))), None)
    assert len(html) < 60_000


def test_an_overloaded_server_s_attainment_has_no_interval_and_is_told() -> None:
    """Each request waits longer than the one before, so one run says nothing of the next."""
    records = [record(index, due_ms=10 * index, ttft_ms=20.0 * index) for index in range(200)]
    text = as_text(list(sections_of(result_of(run_of(records, slos=parse_slos(["ttft=2s"]))))))
    told = text[text.index("requests within the limit") :].splitlines()[1:3]
    assert [line.split()[-1] for line in told] == ["%", "unknown"]
