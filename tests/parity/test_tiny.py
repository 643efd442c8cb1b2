"""Tiny random models through our own loaders and backends, against transformers' logits of the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.models import catalog

from .executors import open_executor
from .golden import GOLDEN_DIR
from .tiny import CASES, case_token_ids, kept_positions, weights_sha256, write_case

MAX_RELATIVE_RMS = {"reference": 1e-3, "native": 0.05}
"""Largest root mean square of the differences, as a share of the logits' standard deviation. Measured: reference at most 1e-4;
native, which rounds activations, 0.007 with bf16
weights and 0.022 with quantised ones; rope frequencies that are 20 % off, or a wrong scale or epsilon, give 0.27 and more."""


@pytest.mark.parametrize("name", CASES)
def test_golden_logits_belong_to_the_weights(name: str) -> None:
    with np.load(GOLDEN_DIR / "tiny.npz") as golden:
        assert str(golden[f"{name}/weights_sha256"]) == weights_sha256(CASES[name]), "run make_tiny_golden again"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", MAX_RELATIVE_RMS)
def test_logits_are_those_of_transformers(backend: str, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = catalog.resolve(str(write_case(case, tmp_path / name)), tmp_path)
    with open_executor(backend, source, num_tokens=case.num_tokens) as executor:
        logits = executor.forward_logits(case_token_ids(case))[kept_positions(case)]
    with np.load(GOLDEN_DIR / "tiny.npz") as data:
        golden = data[f"{name}/logits"]
    rms = float(np.sqrt(((logits - golden) ** 2).mean()))
    assert rms < MAX_RELATIVE_RMS[backend] * golden.std()
