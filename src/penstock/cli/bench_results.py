"""`penstock bench compare` and `penstock bench report`: show saved results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from penstock.cli.files import write_plots, write_text
from penstock.cli.options import FILE, FOLDER
from penstock.config.units import parse_share
from penstock.lab import plots, report
from penstock.lab.compare import Compared, compare_results
from penstock.lab.results import Result
from penstock.types.errors import PenstockError, counted


@click.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE, nargs=-1, required=True)
@click.option("--any-workload", is_flag=True, help="Compare though the workloads differ.")
@click.option(
    "--fail-if-worse",
    metavar="SHARE",
    help="Exit with 1 if a figure is worse by more than this, as 5%, and not by noise, or if none can be compared.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown.")
def compare(
    before: Path,
    after: tuple[Path, ...],
    fail_if_worse: str | None,
    *,
    any_workload: bool,
    markdown: bool,
) -> None:
    """Show which figures of AFTER differ from BEFORE by more than noise. Both are files of `penstock bench`."""
    from penstock.lab.result_files import read_result

    limit = None if fail_if_worse is None else _share(fail_if_worse)
    first, others = read_result(before), [read_result(path) for path in after]
    all_compared = compare_results(first, others, any_workload=any_workload)
    for path, compared in zip(after, all_compared, strict=True):
        sections = list(report.sections_of_compared(compared, str(before), str(path)))
        click.echo(report.as_markdown(sections) if markdown else report.as_text(sections))
    _fail_if_worse(all_compared, limit, fail_if_worse)


def _fail_if_worse(all_compared: Sequence[Compared], limit: float | None, asked: str | None) -> None:
    if limit is None:
        return
    worse = (found for compared in all_compared for found in compared.worse(limit))
    names = [f"{one.figure} ({one.words}{f', at {load}' if load else ''})" for load, one in worse]
    if names:
        raise PenstockError(f"{counted(len(names), 'figure')} worse by more than {asked}: {', '.join(names)}.")
    if any(compared.is_unknown(limit) for compared in all_compared):
        raise PenstockError(
            f"It is unknown whether a figure is worse by more than {asked}: too few requests were answered on a side.",
            remedy="Send more requests, and check why those sent were not answered.",
        )


@click.command("report")
@click.argument("file", type=FILE)
@click.option("--every-run", is_flag=True, help="Show the figures of each run, where there are several.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--html", type=FILE, metavar="FILE", help="Write one HTML file that opens offline.")
@click.option("--plots", "folder", type=FOLDER, metavar="FOLDER", help="Write the plots as PNG.")
def show_report(file: Path, html: Path | None, folder: Path | None, *, every_run: bool, markdown: bool) -> None:
    """Show a result of `penstock bench` again: as a table, as Markdown, as HTML or as plots."""
    from penstock.lab.result_files import read_result

    result = read_result(file)
    sections = list(report.sections_of(result, every_run=every_run))
    click.echo(report.as_markdown(sections) if markdown else report.as_text(sections))
    write_files(result, html=html, folder=folder)


def write_files(result: Result, *, html: Path | None, folder: Path | None) -> None:
    """Write a result's HTML report and plots, if requested. Raises ConfigError if one can't be written or drawn."""
    if html is not None:
        write_text(html, report.html_of(result))
    if folder is not None:
        write_plots(folder, list(plots.plots_of(result)))


def _share(text: str) -> float:
    try:
        share = parse_share(text)
        if share >= 1 and "%" not in text:
            raise ValueError(f"{text!r} means {share:.0%}; for {text} % write {text}%")
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="'--fail-if-worse'") from error
    return share
