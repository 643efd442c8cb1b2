"""Beam search of the whole engine, over a model, against transformers', of which `make_beam_golden.py` wrote what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.models import catalog
from support.parity.beam_cases import NUM_CASES, TINY, load
from support.parity.beams import search
from support.parity.executors import find_model, open_executor
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES

CLEAR_MARGIN = 1e-3
"""Sums of log-probabilities: the tiny model is computed as by transformers but for the order of sums."""
MIN_COMMON_SHARE = 0.7
"""Share of the default model's hypotheses that both have. Native kernels round activations to 8 bits, which moves a sum of
twelve log-probabilities
by more than most margins of these searches; `full_beams.py` compares without that."""


def test_the_golden_searches_are_as_many_as_they_should_be() -> None:
    for name in ("tiny", "default"):
        cases = load(name)
        assert len(cases) == NUM_CASES
        assert {len(case.hypotheses) for case in cases} == {2, 3, 4, 5}
    assert sum(case.margin > CLEAR_MARGIN for case in load("tiny")) >= 15


@pytest.mark.parametrize("together", [True, False])
def test_a_tiny_models_hypotheses_are_those_of_transformers(tmp_path: Path, together: bool) -> None:
    cases = load("tiny")
    source = catalog.resolve(str(write_case(CASES[TINY], tmp_path / TINY)), tmp_path)
    with open_executor("reference", source, num_tokens=2000) as executor:
        found = search(executor, cases, together=together)
    for case, hypotheses in zip(cases, found, strict=True):
        if case.margin > CLEAR_MARGIN:
            assert hypotheses == case.hypotheses


@pytest.mark.model
def test_most_hypotheses_of_the_default_model_are_those_of_transformers() -> None:
    cases = load("default")
    with open_executor("native", find_model(), num_tokens=4000) as executor:
        found = search(executor, cases)
    common = [hypothesis in case.hypotheses for case, own in zip(cases, found, strict=True) for hypothesis in own]
    assert sum(common) > MIN_COMMON_SHARE * len(common)
