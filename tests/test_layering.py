"""Who may know whom: the contracts of .importlinter hold, and no room is left out of them."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

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


def _lint(config: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it silences every logger that exists, and tests after this one look at the log."""
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], cache_dir=None))"
    return subprocess.run([sys.executable, "-c", command, config], cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_import_obeys_the_contracts() -> None:
    done = _lint(ROOT / ".importlinter")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in NOT_ROOMS])
def test_every_room_stands_in_the_contracts(room: str) -> None:
    contracts = _contracts()
    if room == "cli":  # It may know all others.
        assert "penstock.cli" in _modules(contracts["importlinter:contract:deploy"], "forbidden_modules")
        return
    own = contracts[f"importlinter:contract:{room}"]
    assert _modules(own, "source_modules") == {f"penstock.{room}"}
    low = _modules(contracts["importlinter:contract:types"], "forbidden_modules") | {"penstock.types"}
    assert f"penstock.{room}" in low, "a new room belongs into the lists of all that may not know it"


def test_a_broken_contract_is_noticed(tmp_path: Path) -> None:
    config = tmp_path / "contracts"
    config.write_text(
        "[importlinter]\nroot_package = penstock\n\n[importlinter:contract:wrong]\nname = wrong\ntype = forbidden\n"
        "source_modules = penstock.kv\nforbidden_modules = penstock.types\n"
    )
    done = _lint(config)
    assert done.returncode != 0
    assert "wrong BROKEN" in done.stdout
