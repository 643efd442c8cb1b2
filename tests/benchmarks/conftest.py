"""Lets the tests import the benchmarks' modules, which are scripts beside each other and no package."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.interpreted import MISSING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def self_tested_lines():
    """The lines that a GPU's benchmark prints with --self-test, by its name and other arguments. It has no packages but those
    that such a machine needs to have, and runs once."""
    if MISSING:
        pytest.skip(f"{MISSING} is not installed")

    @functools.cache
    def run(name, *words):
        script = [str(Path(__file__).with_name("bare_python.py")), f"benchmarks/{name}.py", "--self-test", *words]
        done = subprocess.run([sys.executable, *script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture(scope="session")
def self_tested(self_tested_lines):
    """The last of these lines: a JSON object."""
    return lambda name, *words: json.loads(self_tested_lines(name, *words)[-1])
