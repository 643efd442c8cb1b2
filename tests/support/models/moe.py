"""Helpers that `models/test_moe.py` shares with other tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.models import catalog
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from support.parity.tiny import TinyCase, write_case
from support.parity.tiny_cases import CASES


def load(case: TinyCase, directory: Path) -> LoadedModel:
    path = write_case(case, directory / "model")
    return load_model(catalog.resolve(str(path), path))


def changed(name: str, **changes: Any) -> TinyCase:
    """A case with other settings in config.json, or in its GGUF file."""
    case = CASES[name]
    if case.gguf is None:
        return replace(case, config={**case.config, **changes})
    metadata = {**case.gguf.metadata, **changes}
    return replace(case, gguf=replace(case.gguf, metadata={key: value for key, value in metadata.items() if value is not None}))
