"""Formats a result, or a comparison of two, as text for a terminal, Markdown, or one HTML page that opens offline.

`sections_of` and `sections_of_compared` make sections of notes and tables; `as_text`, `as_markdown` and `as_html` render them.
"""

from __future__ import annotations

import base64
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from penstock.lab import plots
from penstock.lab.compare import Compared
from penstock.lab.figures import ENDS, QUANTILES, Distribution, Figures
from penstock.lab.intervals import Estimate
from penstock.lab.results import Result, Run
from penstock.types.errors import counted

MAX_COLUMNS = 100
MAX_CELL_CHARS = 200
MAX_WORKLOADS = 5
UNKNOWN_INTERVAL = "unknown"
SHOWN_NAMES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "goodput_per_s": "goodput/s",
    "answered": "share answered",
    "within_slos": "share within SLOs",
}
_MAY_LOAD = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
body { color: #1b1b1b; background: #fff }
table { border-collapse: collapse; margin: 0.6em 0 1.4em; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.8em; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left }
td.words, th.words { text-align: left }
small { color: #666; display: block }
p.warning { border-left: 4px solid #D55E00; padding: 0.3em 0.8em; background: #fdf3ec }
img { max-width: 100% }
"""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    """The first column is text, the others are numbers."""
    words_last: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = ()


def sections_of(result: Result, *, every_run: bool = True) -> Iterator[Section]:
    first, several = result.runs[0], len(result.runs) > 1
    workloads = list(dict.fromkeys(run.workload for run in result.runs))
    notes = [f"Workload: {workload}." for workload in workloads[:MAX_WORKLOADS]]
    notes += [f"And {counted(len(workloads) - MAX_WORKLOADS, 'other workload')}."] if len(workloads) > MAX_WORKLOADS else []
    seeds = list(dict.fromkeys(str(run.seed) for run in result.runs if run.seed is not None))
    notes += [f"Seed: {', '.join(seeds[:MAX_WORKLOADS])}{', ...' if len(seeds) > MAX_WORKLOADS else ''}."] if seeds else []
    if any(run.how == "simulated" for run in result.runs):
        notes.append("Simulated: an estimate, not a measurement.")
    targets = [run.target for run in result.runs]
    told = [", ".join(filter(None, [one.model and f"model {one.model}", one.server, one.url])) for one in targets]
    notes += [f"Target: {target}." for target in dict.fromkeys(told) if target]
    on = result.machine
    begun = f" Begun at {first.begun_at}." if first.begun_at else ""
    notes.append(f"Client's machine: {on.cpu or 'unknown CPU'}, {on.num_cpus} CPUs.{begun}")
    options = [{f"{name} = {value}": None for name, value in run.options.items()} for run in result.runs]
    shared = [text for text in options[0] if all(text in one for one in options)]
    notes += [f"Options: {', '.join(shared)}."] if shared else []
    names_of: dict[str, list[str]] = {}
    for position, (run, one) in enumerate(zip(result.runs, options, strict=True)):
        names_of.setdefault(", ".join(text for text in one if text not in shared), []).append(plots.run_name(run, position))
    notes += [f"Options of {'; '.join(dict.fromkeys(names))}: {rest}." for rest, names in names_of.items() if rest]
    shows_runs = every_run or not several
    intervals = "`penstock bench report` and `penstock simulate` show their intervals with --every-run."
    if shows_runs:
        intervals = f"Below each figure is its 95 % interval, or {UNKNOWN_INTERVAL} if the sample is too small."
    notes.append(f"Latencies count from the intended arrival. {intervals}")
    warnings = [
        f"{plots.run_name(run, position)}: {warning}"
        for position, run in enumerate(result.runs if not shows_runs else ())
        for warning in (*run.warnings, *run.figures.warnings)
    ]
    yield Section("Benchmark", notes, [_overview(result.runs)] if several else [], list(dict.fromkeys(warnings)))
    if not shows_runs:
        return
    for position, run in enumerate(result.runs):
        yield _section_of_run(run, plots.run_name(run, position) if several else "Figures")


def sections_of_compared(compared: Compared, before: str, after: str) -> Iterator[Section]:
    num_tested = sum(one.change is not None for each in compared.comparisons for one in each.differences)
    notes = [f"Before: {before}. After: {after}."]
    if num_tested:
        notes.append(
            f"{num_tested} figures were tested, and a difference is shown as such if it is significant after correction. "
            "Square brackets have uncorrected 95 % intervals."
        )
    yield Section("Comparison", notes, warnings=compared.notes)
    for each in compared.comparisons:
        rows = [
            (Cell(_figure_name(one.figure)), Cell(_number(one.before)), Cell(_number(one.after)), Cell(one.words))
            for one in each.differences
        ]
        title = f"{each.load or 'All requests'}, {each.num_runs[0]} and {each.num_runs[1]} runs"
        yield Section(title, tables=[Table(("latencies in ms", "before", "after", "difference"), rows, words_last=True)])


def as_text(sections: Sequence[Section]) -> str:
    lines: list[str] = []
    for section in sections:
        lines += ["", *textwrap.wrap(_printable(section.title), MAX_COLUMNS), "-" * min(MAX_COLUMNS, len(section.title))]
        for note in section.notes:
            lines += textwrap.wrap(_printable(note), MAX_COLUMNS, subsequent_indent="  ")
        for table in section.tables:
            lines += ["", *_text_table(table)]
        for warning in section.warnings:
            lines += textwrap.wrap(f"! {_printable(warning)}", MAX_COLUMNS, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in lines[1:]) + "\n"


def as_markdown(sections: Sequence[Section]) -> str:
    parts: list[str] = []
    for section in sections:
        parts.append(f"### {_markdown(section.title)}")
        parts += ["\n".join(f"{_markdown(note)}  " for note in section.notes)] if section.notes else []
        for table in section.tables:
            head = "| " + " | ".join(map(_markdown, table.head)) + " |"
            last = "---" if table.words_last else "--:"
            line = "| --- |" + " --: |" * (len(table.head) - 2) + f" {last} |"
            rows = [
                "| " + " | ".join(_markdown(f"{cell.text} {cell.below}".strip()) for cell in row) + " |" for row in table.rows
            ]
            parts.append("\n".join([head, line, *rows]))
        parts += [f"**Note:** {_markdown(warning)}" for warning in section.warnings]
    return "\n\n".join(parts) + "\n"


def as_html(title: str, sections: Sequence[Section], drawn: Sequence[plots.Plot] | None) -> str:
    """Return an HTML page without external resources. If `drawn` is None, the page says how to install matplotlib."""
    body = [f"<h1>{escape(_printable(title))}</h1>"]
    for section in sections:
        body.append(f"<h2>{escape(_printable(section.title))}</h2>")
        body += [f'<p class="warning">{escape(_printable(warning))}</p>' for warning in section.warnings]
        body += [f"<p>{escape(_printable(note))}</p>" for note in section.notes]
        body += [_html_table(table) for table in section.tables]
    if drawn is None or drawn:
        body.append("<h2>Plots</h2>")
    if drawn is None:
        body.append(f"<p>Plots need matplotlib, which is not installed: <code>{escape(plots.INSTALL)}</code></p>")
    for plot in drawn or ():
        image, words = base64.b64encode(plot.png()).decode(), escape(_printable(plot.title), quote=True)
        body.append(f'<p><img alt="{words}" src="data:image/png;base64,{image}"></p>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_MAY_LOAD}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(_printable(title))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def html_of(result: Result) -> str:
    drawn = list(plots.plots_of(result)) if plots.is_installed() else None
    return as_html(f"Penstock bench: {result.runs[0].workload}", list(sections_of(result)), drawn)


def _overview(runs: Sequence[Run]) -> Table:
    has_slos = any(run.figures.goodput for run in runs)
    head = ("load", "req/s", "out tok/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "e2e p50", "p99 ms", "not ok")
    rows = []
    for position, run in enumerate(runs):
        figures = run.figures
        texts = [plots.run_name(run, position)]
        texts += [_number(one.value) for one in (figures.rates.requests_per_s, figures.rates.output_tokens_per_s)]
        texts += [
            _number(figures.latency_ms[name].quantiles[quantile].value) if name in figures.latency_ms else ""
            for name in ("ttft", "tpot", "e2e")
            for quantile in ("p50", "p99")
        ]
        texts.append(str(figures.num_requests - figures.num_by_end["ok"]))
        if has_slos:
            texts.append("" if figures.goodput is None else _share(figures.goodput.attainment.value))
        rows.append(tuple(map(Cell, texts)))
    return Table((*head, "SLOs") if has_slos else head, rows)


def _section_of_run(run: Run, title: str) -> Section:
    figures = run.figures
    told = ", ".join(f"{figures.num_by_end[end]} {end}" for end in ENDS if figures.num_by_end[end])
    notes = [f"{figures.num_requests} requests in {_number(figures.window.duration_s)} s: {told}."]
    cached = (
        "" if figures.prefix_cache_share is None else f", {_share(figures.prefix_cache_share)} of them from the prefix cache"
    )
    notes.append(f"{figures.num_prompt_tokens} prompt tokens{cached}; {figures.num_output_tokens} output tokens.")
    if figures.steady is not None:
        notes.append(f"The steady part is {figures.steady[0].words}.")
    if figures.cost is not None:
        output, total = figures.cost.per_million_output_tokens, figures.cost.per_million_total_tokens
        notes.append(
            f"At {figures.cost.price_per_hour:g} per hour, a million output tokens cost {_with_interval(output)}, "
            f"a million tokens in all {_with_interval(total)}."
        )
    if figures.lag_ms is not None:
        late = figures.lag_ms
        notes.append(
            f"The client sent {_number(late.quantiles['p99'].value)} ms late at p99, {_number(late.max_ms)} ms at most."
        )
    if figures.fairness is not None:
        notes.append(
            f"Jain's index among {figures.num_tenants} tenants: {figures.fairness.of_speed:.3f} of the speed they see, "
            f"{figures.fairness.of_tokens:.3f} of the tokens they got."
        )
    notes += run.notes
    tables = [_latency_table(figures), _rate_table(figures)]
    if figures.goodput is not None:
        attained = {**figures.goodput.attainment_by_slo, "all of them": figures.goodput.attainment}
        rows = [(Cell(name), _estimate(one, _share)) for name, one in attained.items()]
        tables.append(Table(("SLO", "requests within the limit"), rows))
    if figures.reasons:
        rows = [(Cell(reason), Cell(str(count))) for reason, count in figures.reasons.items()]
        tables.append(Table(("refused or failed", "requests"), rows))
    if figures.tenants:
        tables.append(_tenant_table(figures))
    return Section(title, notes, tables, (*run.warnings, *figures.warnings))


def _latency_table(figures: Figures) -> Table:
    rows = [_latency_row(name, found) for name, found in figures.latency_ms.items()]
    return Table(("latency", "mean", *QUANTILES, "max", "count"), rows)


def _latency_row(name: str, found: Distribution) -> tuple[Cell, ...]:
    is_long = found.max_ms >= 10_000
    factor = 1e-3 if is_long else 1.0
    cells = [_estimate(one.scaled(factor)) for one in (found.mean, *found.quantiles.values())]
    shown = f"{plots.shown_name(name)} {'s' if is_long else 'ms'}"
    return (Cell(shown), *cells, Cell(_number(found.max_ms * factor)), Cell(str(found.count)))


def _rate_table(figures: Figures) -> Table:
    whole, steady = figures.rates, None if figures.steady is None else figures.steady[1]
    rows = [
        (Cell(SHOWN_NAMES[name]), _estimate(getattr(whole, name)), *([_estimate(getattr(steady, name))] if steady else []))
        for name in whole.__slots__
    ]
    if figures.goodput is not None:
        rows.append((Cell("goodput/s"), _estimate(figures.goodput.requests_per_s), *([Cell("")] if steady else [])))
    return Table(("throughput", "whole run", *(["steady part"] if steady else [])), rows)


def _tenant_table(figures: Figures) -> Table:
    head = ("tenant", "requests", "not ok", "TTFT p50", "p99 ms", "TPOT p50 ms", "e2e p50", "p99 ms", "out tok/s", "SLOs")
    rows = []
    for name, one in figures.tenants.items():
        latencies = [
            Cell(_number(one.latency_ms[latency].quantiles[quantile].value)) if latency in one.latency_ms else Cell("")
            for latency, quantile in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("e2e", "p50"), ("e2e", "p99"))
        ]
        counts = [Cell(str(one.num_requests)), Cell(str(one.num_requests - one.num_by_end["ok"]))]
        attained = Cell("" if one.goodput is None else _share(one.goodput.attainment.value))
        rows.append((Cell(name or "(none)"), *counts, *latencies, Cell(_number(one.rates.output_tokens_per_s.value)), attained))
    if figures.num_tenants > len(figures.tenants):
        rows.append((Cell(f"and {figures.num_tenants - len(figures.tenants)} smaller ones"), *[Cell("")] * (len(head) - 1)))
    return Table(head, rows)


def _estimate(estimate: Estimate, shown: Callable[[float], str] | None = None) -> Cell:
    shown = shown or _number
    if estimate.low is None or estimate.high is None:
        return Cell(shown(estimate.value), UNKNOWN_INTERVAL)
    return Cell(shown(estimate.value), f"{shown(estimate.low)}–{shown(estimate.high)}")


def _with_interval(estimate: Estimate) -> str:
    cell = _estimate(estimate)
    return f"{cell.text} ({cell.below})"


def _figure_name(figure: str) -> str:
    name, _, rest = figure.partition(" ")
    return SHOWN_NAMES.get(figure, f"{plots.shown_name(name)} {rest}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "infinite"
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(digits, 9)}f}" if digits > 0 else f"{value:.0f}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _printable(text: str) -> str:
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return shown if len(shown) <= 20 * MAX_CELL_CHARS else f"{shown[: 20 * MAX_CELL_CHARS - 1]}…"


def _clipped(text: str, width: int) -> str:
    """Cut a long text in the middle: names of variants often begin alike, and end differently."""
    if len(text) <= width:
        return text
    num_last = max(0, width - 1) // 2
    return f"{text[: max(0, width - 1 - num_last)]}…{text[len(text) - num_last :]}"


def _text_table(table: Table) -> Iterator[str]:
    lines = [tuple(map(_printable, table.head))]
    for row in table.rows:
        lines.append(tuple(_printable(cell.text) for cell in row))
        if any(cell.below for cell in row):
            lines.append(tuple(_printable(cell.below) for cell in row))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > MAX_COLUMNS:
        widths[widths.index(max(widths))] -= 1
    last = len(widths) - 1
    for line in lines:
        cells = [_clipped(text, width) for text, width in zip(line, widths, strict=True)]
        yield "  ".join(
            text.ljust(width) if i == 0 or (i == last and table.words_last) else text.rjust(width)
            for i, (text, width) in enumerate(zip(cells, widths, strict=True))
        )


def _markdown(text: str) -> str:
    shown = _clipped(_printable(text), 20 * MAX_CELL_CHARS)
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#!&" else char for char in shown)


def _html_table(table: Table) -> str:
    def cell(kind: str, position: int, text: str, below: str = "") -> str:
        words = ' class="words"' if table.words_last and position == len(table.head) - 1 else ""
        small = f"<small>{escape(_printable(below))}</small>" if below else ""
        return f"<{kind}{words}>{escape(_clipped(_printable(text), MAX_CELL_CHARS))}{small}</{kind}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(table.head))
    rows = ["".join(cell("td", i, one.text, one.below) for i, one in enumerate(row)) for row in table.rows]
    return "<table>\n<tr>" + head + "</tr>\n" + "".join(f"<tr>{row}</tr>\n" for row in rows) + "</table>"
