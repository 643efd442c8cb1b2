"""`compare` and `report` on files: what they print, write, and with which code they end."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.bench_results import compare, show_report
from penstock.lab import plots
from penstock.lab.records import End
from penstock.lab.results import write_result
from penstock.types.errors import ConfigError, PenstockError
from support.bench_records import random_records, result_of, run_of


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, slower in zip(paths, (1.0, 1.2), strict=True):
        write_result(result_of(run_of(random_records(1, 300, slower=slower), seed=1)), path)
    return str(paths[0]), str(paths[1])


def called(command: object, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)  # type: ignore[arg-type]


def test_compare_prints_words(files: tuple[str, str]) -> None:
    result = called(compare, *files)
    assert result.exit_code == 0
    assert "slower by 20 % [" in result.output
    assert "Before: " in called(compare, *files, "--markdown").output


def test_compare_fails_only_where_it_is_worse(files: tuple[str, str]) -> None:
    worse = called(compare, *files, "--fail-if-worse", "5%")
    assert worse.exit_code == 1
    assert isinstance(worse.exception, PenstockError)
    assert "worse by more than 5%: " in str(worse.exception)
    assert called(compare, *files, "--fail-if-worse", "50%").exit_code == 0
    assert called(compare, *files[::-1], "--fail-if-worse", "5%").exit_code == 0


def test_a_side_that_answers_nobody_does_not_pass(files: tuple[str, str], tmp_path: Path) -> None:
    records, path = random_records(1, 300), str(tmp_path / "refused.json")
    for record in records:
        record.end, record.first_ns = End.REFUSED, None
    write_result(result_of(run_of(records, seed=1)), tmp_path / "refused.json")
    refused = called(compare, files[0], path, "--fail-if-worse", "5%")
    assert refused.exit_code == 1
    assert "requests_per_s (lower by 100 % [100, 100], at rate 20)" in str(refused.exception)
    refused = called(compare, path, path, "--fail-if-worse", "5%")
    assert refused.exit_code == 1
    assert "too few requests were answered on a side" in str(refused.exception)


def test_a_wrong_share_is_wrong_usage(files: tuple[str, str]) -> None:
    result = called(compare, *files, "--fail-if-worse", "much")
    assert result.exit_code == 2
    assert "'much' is not a share" in result.output
    result = called(compare, *files, "--fail-if-worse", "5")
    assert result.exit_code == 2
    assert "'5' means 500%; for 5 % write 5%." in result.output
    assert called(compare, *files, "--fail-if-worse", "500%").exit_code == 0


def test_compare_needs_two_files(files: tuple[str, str]) -> None:
    assert called(compare, files[0]).exit_code == 2
    assert isinstance(called(compare, files[0], "none.json").exception, ConfigError)


def test_several_are_compared_with_the_first(files: tuple[str, str]) -> None:
    assert called(compare, files[0], files[1], files[0]).output.count("Comparison\n") == 2


def test_report_prints_and_writes(files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    result = called(show_report, files[0], "--html", str(page))
    assert result.exit_code == 0
    assert "TTFT ms" in result.output
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "| latency |" in called(show_report, files[0], "--markdown").output
    monkeypatch.setattr(plots, "is_installed", lambda: False)  # they were drawn once
    assert isinstance(called(show_report, files[0], "--html", str(tmp_path / "none" / "a.html")).exception, ConfigError)


def test_plots_without_matplotlib_are_an_error_with_the_remedy(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = called(show_report, files[0], "--plots", str(tmp_path / "plots"))
    assert isinstance(result.exception, ConfigError)
    assert plots.INSTALL in str(result.exception)
    assert "TTFT ms" in result.output, "the table comes all the same"


@pytest.mark.skipif(not plots.is_installed(), reason=f"plots are an extra: {plots.INSTALL}")
def test_plots_are_written(files: tuple[str, str], tmp_path: Path) -> None:
    assert called(show_report, files[0], "--plots", str(tmp_path / "plots")).exit_code == 0
    assert [path.name for path in sorted((tmp_path / "plots").iterdir())] == [
        "01-distribution-of-latencies.png",
        "02-over-time-and-by-length-of-the-prompt.png",
    ]
