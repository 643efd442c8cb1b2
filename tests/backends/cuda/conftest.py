"""Every module of this folder is skipped where torch or triton is missing; tests marked `gpu` are where there is no device."""

from __future__ import annotations

from pathlib import Path
from typing import Never

import pytest

from support.interpreted import HAS_DEVICE, MISSING


class SkippedModule(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> Never:
        pytest.skip(f"{MISSING} is not installed")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and not HAS_DEVICE:
            item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU"))
