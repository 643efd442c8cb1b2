"""The executors that a backend makes for a model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from penstock.config import Backend
from penstock.deploy.executor import EXECUTORS


def executor_class(backend: Backend) -> Any:
    module, _, name = EXECUTORS[backend].partition(":")
    return getattr(import_module(module), name)


def noted_executors(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[Any]:
    """Return a list to which each executor that is made from now on is added."""
    made, kind = list[Any](), executor_class(backend)
    make = kind.__init__

    def note(executor: Any, *args: Any, **named: Any) -> None:
        make(executor, *args, **named)
        made.append(executor)

    monkeypatch.setattr(kind, "__init__", note)
    return made
