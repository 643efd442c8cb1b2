"""Arguments with which a function or class is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def recorded(monkeypatch: pytest.MonkeyPatch, path: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a list to which the arguments of each call from now on are added."""
    module, _, name = path.rpartition(".")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    original: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)

    def record(*args: Any, **named: Any) -> Any:
        calls.append((args, named))
        return original(*args, **named)

    monkeypatch.setattr(path, record)
    return calls
