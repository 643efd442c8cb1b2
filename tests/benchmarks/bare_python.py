"""Runs a script as where Python has NumPy, torch and triton alone: what else Penstock depends on can't be imported, nor what it
has built. As a program: `bare_python.py SCRIPT ARGUMENT...`; called by tests of the GPU benchmarks.
"""

from __future__ import annotations

import importlib.abc
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ABSENT = ("gguf", "tokenizers", "jinja2", "starlette", "pydantic", "httptools", "msgspec", "prometheus_client")
ABSENT += ("click", "tqdm", "matplotlib", "penstock.backends.native._native", "penstock._float_text")


class Absence(importlib.abc.MetaPathFinder):
    """Finds what is absent first, and says that it is not there."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in ABSENT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Absence())
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
