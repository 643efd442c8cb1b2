"""Outputs that can't be written are refused before the work, not after it."""

from __future__ import annotations

import errno
import os
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import profile
from penstock.cli.files import check_folder, check_writable, write_text
from penstock.cli.main import cli
from penstock.lab import plots
from penstock.lab.cost_model import CostModel
from penstock.lab.fitting import Fit
from penstock.types.errors import ConfigError, PenstockError

needs_matplotlib = pytest.mark.skipif(not plots.is_installed(), reason=f"plots are an extra: {plots.INSTALL}")
_IMPORTERS = (
    *("llm", "lab.acceptance", "lab.traces", "cli.batch", "cli.bench", "cli.doctor", "cli.plan", "cli.profile", "cli.route"),
    *("cli.simulate", "cli.simulated_routes", "cli.top", "cli.tune"),
)
"""Modules with names that a test takes away: imported only then, they would lack them for all later tests."""
SIMULATE = ("simulate", "--blocks", "400", "--workload", "short", "--requests", "40")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)


def test_a_file_is_written_in_a_folder_that_exists() -> None:
    check_writable(Path("a.txt"))
    check_writable(Path("b.txt"))
    for path in ("absent/b.txt", "a.txt/b.txt"):
        with pytest.raises(ConfigError, match="can't be written"):
            check_writable(Path(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write every file")
def test_the_file_itself_counts_if_it_exists(tmp_path: Path) -> None:
    Path("a.txt").chmod(0o400)
    with pytest.raises(ConfigError, match="can't be written"):
        check_writable(Path("a.txt"))
    Path("b.txt").touch()
    tmp_path.chmod(0o500)
    check_writable(Path("b.txt"))


def test_the_remedy_of_a_file_fits_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"absent/b.txt can't be written: No such file or directory\. Name a file in a folder"
    ):
        write_text(Path("absent/b.txt"), "")

    def fail(*_args: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ConfigError, match=r"b.txt can't be written: No space left on device\. Free some space"):
        write_text(Path("b.txt"), "")


def test_a_folder_may_have_to_be_made() -> None:
    check_folder(Path("one/two"))
    check_folder(Path())
    for path in ("a.txt", "a.txt/one/two"):
        with pytest.raises(ConfigError, match="can't be written"):
            check_folder(Path(path))


@pytest.mark.parametrize(
    "words",
    [
        (*SIMULATE, "--json", "absent/a.json"),
        (*SIMULATE, "--html", "absent/a.html"),
        pytest.param((*SIMULATE, "--plots", "a.txt/plots"), marks=needs_matplotlib),
        pytest.param(("plan", "--plots", "a.txt/plots"), marks=needs_matplotlib),
        pytest.param(("bench", "--plots", "a.txt/plots"), marks=needs_matplotlib),
        ("bench", "--html", "absent/a.html"),
        ("profile", "--fit", "absent/a.json"),
        ("profile", "--plot", "absent/a.png"),
        pytest.param(("profile", "--plot", "a.pdf"), marks=needs_matplotlib),
        pytest.param(("profile", "--backend", "reference", "--plot", "a.png"), marks=needs_matplotlib),
        ("profile", "--from", "a.txt", "--trace", "absent/a.json"),
        ("route", "fit", "a.txt", "-o", "absent/a.json"),
        ("route", "eval", "a.txt", "--confidence", "sure", "--scores", "absent/a.jsonl"),
        ("batch", "run", "a.txt", "-o", "a.txt/a.jsonl"),
    ],
    ids=" ".join,
)
def test_the_output_is_checked_before_anything_is_done(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _IMPORTERS:
        import_module(f"penstock.{name}")
    for place in (
        "deploy.factory.locate",
        "lab.recording.open_recording",
        "lab.simulation.Simulation.run",
        "lab.target.Questions",
        "routes.answers.read_answers",
        "lab.workload_choice.make_workload",
    ):
        monkeypatch.setattr(f"penstock.{place}", None)
    done = CliRunner().invoke(cli, words)
    with pytest.raises(ConfigError, match=r"can't be written|written as|no roofline can be drawn"):
        raise done.exception or AssertionError
    assert not done.stdout


def test_a_fit_that_can_not_be_written_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fitted = Fit(cost=CostModel(), left_out={}, num_steps=9)
    with pytest.raises(PenstockError, match="can't be written"):
        profile._save(Path("absent/a.json"), fitted, "profile", "tiny", {}, notes={})
    assert "9 steps" in capsys.readouterr().out
