"""The environment with torch is made of the CPU build, wherever pip finds one. No pip runs and nothing is fetched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "venv.sh"
MAKES_A_VENV = """#!/bin/sh
mkdir -p "$3/bin"
cp pip "$3/bin/pip"
"""
LISTS_VERSIONS = """#!/bin/sh
if [ "$1" = install ]; then echo "$@" > installed; exit; fi
echo "Available versions: {first}"
i=0
while [ $i -lt 5000 ]; do echo "2.0.$i, more than a pipe holds"; i=$((i + 1)); done
"""


@pytest.mark.parametrize(("first", "asks_pytorch"), [("2.13.0+cpu", False), ("2.13.0", True)])
def test_pytorch_s_index_is_asked_only_if_pip_knows_no_cpu_build(tmp_path: Path, first: str, asks_pytorch: bool) -> None:
    """A reader that ends early would make pip fail after the first of many versions."""
    folder = tmp_path / "tests" / "parity"
    folder.mkdir(parents=True)
    shutil.copy(SCRIPT, folder)
    (folder / "requirements.txt").write_text("torch\n")
    for name, text in {"python": MAKES_A_VENV, "pip": LISTS_VERSIONS.format(first=first)}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    subprocess.run([folder / "venv.sh"], check=True, env={"PATH": "/usr/bin:/bin", "PYTHON": "./python"}, timeout=60)
    assert ("download.pytorch.org" in (tmp_path / "installed").read_text()) is asks_pytorch
    assert (tmp_path / "build" / "parity-venv" / "installed-requirements.txt").is_file()
