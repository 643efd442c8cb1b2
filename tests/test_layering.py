"""Who may know whom: the contracts of .importlinter hold, and no room is left out of them."""

from __future__ import annotations

import configparser
import logging.config
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import penstock

ROOT = Path(__file__).parent.parent
ROOMS = sorted(
    path.stem for path in Path(penstock.__file__).parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
)
NOT_ROOMS = {"__init__", "__main__"}


def _contracts() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser


def _modules(section: configparser.SectionProxy, option: str) -> set[str]:
    return set(section[option].split())


def test_every_import_obeys_the_contracts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    # It would configure logging, and so silence every logger that exists: tests after this one look at the log.
    monkeypatch.setattr(logging.config, "dictConfig", lambda config: None)
    status = lint_imports(config_filename=".importlinter", cache_dir=None)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in NOT_ROOMS])
def test_every_room_stands_in_the_contracts(room: str) -> None:
    contracts = _contracts()
    if room == "cli":  # It may know all others.
        assert "penstock.cli" in _modules(contracts["importlinter:contract:build"], "forbidden_modules")
        return
    own = contracts[f"importlinter:contract:{room}"]
    assert _modules(own, "source_modules") == {f"penstock.{room}"}
    low = _modules(contracts["importlinter:contract:types"], "forbidden_modules") | {"penstock.types"}
    assert f"penstock.{room}" in low, "a new room belongs into the lists of all that may not know it"


def test_a_broken_contract_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = tmp_path / "contracts"
    config.write_text(
        "[importlinter]\nroot_package = penstock\n\n[importlinter:contract:wrong]\nname = wrong\ntype = forbidden\n"
        "source_modules = penstock.kv\nforbidden_modules = penstock.types\n"
    )
    assert lint_imports(config_filename=str(config), cache_dir=None) != EXIT_STATUS_SUCCESS
