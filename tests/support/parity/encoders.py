"""Helpers that `parity/test_encoders.py` shares with other tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor

BACKENDS: Mapping[str, Callable[..., Any]] = {"reference": ReferenceExecutor, "native": NativeExecutor}
