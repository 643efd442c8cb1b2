"""Against transformers: tiny models' logits anywhere, the default model's greedy text on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.models import catalog
from support.interpreted import HAS_DEVICE
from support.parity.compare import compare_greedy, summarise_greedy
from support.parity.executors import ParityExecutor, find_model, open_executor
from support.parity.free_running import free_running_mismatch, generate_greedily
from support.parity.golden import load_greedy
from support.parity.tiny import case_token_ids, kept_positions, load_golden, write_case
from support.parity.tiny_cases import CASES

MAX_RELATIVE_RMS = 0.05 if HAS_DEVICE else 1e-3
"""Share of the logits' standard deviation, as in parity/test_tiny.py: bf16 on a device, float32 in the interpreter."""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "cuda" not in (case.refused_by or {})])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    golden = load_golden(case.golden or name)
    source = catalog.resolve(str(write_case(case, tmp_path / name)), tmp_path)
    with open_executor("cuda", source, num_tokens=case.num_tokens) as executor:
        logits = executor.forward_logits(case_token_ids(case))[kept_positions(case)]
    rms = float(np.sqrt(((logits - golden.logits) ** 2).mean()))
    assert rms < MAX_RELATIVE_RMS * golden.std


@pytest.fixture(scope="module")
def default_model() -> Iterator[ParityExecutor]:
    source = find_model()
    if not source.is_present:
        pytest.skip(f"{source.path} is missing: `penstock pull {source.name}` fetches it")
    with open_executor("cuda", source, num_tokens=sum(len(case.text.token_ids) for case in load_greedy())) as executor:
        yield executor


@pytest.mark.gpu
@pytest.mark.model
def test_the_default_model_chooses_transformers_token_at_every_clear_step(default_model: ParityExecutor) -> None:
    assert summarise_greedy([compare_greedy(default_model, case) for case in load_greedy()]).mismatches == ()


@pytest.mark.gpu
@pytest.mark.model
def test_its_text_follows_transformers_to_the_first_unclear_step(default_model: ParityExecutor) -> None:
    """All rows in one batch, so from captured graphs."""
    cases = load_greedy()
    pairs = zip(cases, generate_greedily(default_model, cases), strict=True)
    assert [line for case, ids in pairs if (line := free_running_mismatch(case, ids))] == []
