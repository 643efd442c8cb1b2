"""Each setting of the tiny models' specs matters: changed, it moves the logits far more than the comparison allows.

So a reader that forgets a setting, or takes its default, fails `test_tiny.py`. Sizes and missing tensors are the
loaders' business. The fields of a spec are looked up here: a new one is tested without a line, or the test asks for one.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures, catalog
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.types.kv_dtype import KvDtype
from support.parity.tiny import FloatArray, case_token_ids, write_case
from support.parity.tiny_cases import CASES
from support.parity.tiny_settings import (
    MIN_RELATIVE_RMS,
    variants,
    with_float_weights,
)

SHORT = 20
"""Tokens of the text by which nearly every setting shows. The few others need all of it, which takes twice as long."""


def logits_of(model: LoadedModel, token_ids: list[int]) -> FloatArray:
    executor = ReferenceExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=32,
        block_size=16,
        max_rows=4,
        max_step_tokens=256,
        max_model_len=model.spec.max_model_len,
        kv_dtype=KvDtype.BF16,
    )
    with closing(executor):
        return executor.forward_logits(token_ids)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.golden])
def test_each_setting_changes_the_logits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = with_float_weights(load_model(catalog.resolve(str(write_case(case, tmp_path / name)), tmp_path)))
    whole = case_token_ids(case)
    texts = [(token_ids, logits_of(model, token_ids)) for token_ids in (whole[:SHORT], whole)]
    moved: dict[str, float] = {}
    for setting, spec in variants(model.spec):
        for token_ids, expected in texts:
            error = logits_of(replace(model, spec=spec), token_ids) - expected
            moved[setting] = float(np.sqrt((error**2).mean()) / expected.std())
            if moved[setting] > MIN_RELATIVE_RMS:
                break
    assert len(moved) > 5
    assert {setting: rms for setting, rms in moved.items() if not rms > MIN_RELATIVE_RMS} == {}
