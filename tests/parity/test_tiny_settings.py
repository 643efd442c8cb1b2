"""Each setting of the tiny models' specs matters: changed, it moves the logits far more than the comparison allows.

So a reader that forgets a setting, or takes its default, fails `test_tiny.py`. Sizes and missing tensors are the
loaders' business. The fields of a spec are looked up here: a new one is tested without a line, or the test asks for one.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures, catalog
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.types import model_spec
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ModelSpec, PlainMlp, Rotation

from .test_tiny import MAX_RELATIVE_RMS
from .tiny import FloatArray, case_token_ids, write_case
from .tiny_cases import CASES

MIN_RELATIVE_RMS = 10 * MAX_RELATIVE_RMS["reference"]
KEPT = frozenset({"architecture", "max_model_len", "tie_word_embeddings", "layers", "ending"})
"""Fields that say nothing of a number, or which the weights that are there decide; layers are changed one by one, and endings
in `test_encoders.py`."""
SIZES = frozenset(
    {"vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "num_experts", "kernel"}
    | {"num_types", "first_position", "num_distances"}
)
MEANT_FOR: Mapping[bool, frozenset[str]] = {
    True: frozenset({"mask"}),
    False: frozenset({"softcap", "logit_softcap", "logit_scale"}),
}
"""Fields that matter to encoders alone, and to others alone."""
IF_ABSENT: Mapping[str, Any] = {
    "scale": 0.3,
    "window": 5,
    "softcap": 1.0,
    "logit_softcap": 2.0,
    "rotation": Rotation(inv_freq=(1.0, 0.3, 0.1, 0.03)),
    "query_growth": 0.5,
}
"""Values that matter where a model does without: their default is None or 0."""
NOTHING_WITHOUT = {"growth_len": "query_growth"}
"""Settings that mean nothing while another one is 0."""


def settings(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, a copy in which it is another one) for each setting of a dataclass, or of those inside."""
    kinds = typing.get_type_hints(type(value), vars(model_spec))
    for field in fields(value):
        found = getattr(value, field.name)
        if field.name in KEPT | SIZES or field.name.startswith("has_"):
            continue
        if field.name in NOTHING_WITHOUT and not getattr(value, NOTHING_WITHOUT[field.name]):
            continue
        if is_dataclass(found) and not isinstance(found, type):
            for name, changed in settings(found):
                yield f"{field.name}.{name}", replace(value, **{field.name: changed})
        else:
            for changed in other_values(field.name, found, kinds[field.name]):
                if not (isinstance(value, PlainMlp) and changed == "swiglu_clamped"):  # which is of a gate
                    yield field.name, replace(value, **{field.name: changed})


def other_values(name: str, value: Any, kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is typing.Literal:
        yield from (choice for choice in typing.get_args(kind) if choice != value)
    elif isinstance(value, bool):
        yield not value
    elif value:
        match value:
            case tuple():
                yield tuple(1.3 * item for item in value)
            case int():
                yield value + 1
            case float():
                yield 1.3 * value
            case _:
                raise AssertionError(f"say here how {name} may be changed")
    else:
        yield IF_ABSENT[name]


def variants(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """The spec with one setting changed, of the model or of one layer."""
    found = list(settings(spec))
    for number, layer in enumerate(spec.layers):
        for name, changed in settings(layer):
            layers = (*spec.layers[:number], changed, *spec.layers[number + 1 :])
            found.append((f"layers.{number}.{name}", replace(spec, layers=layers)))
    meaningless = MEANT_FOR[spec.ending is None]
    yield from ((name, changed) for name, changed in found if name.rpartition(".")[2] not in meaningless)


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
    model = load_model(catalog.resolve(str(write_case(case, tmp_path / name)), tmp_path))
    token_ids = case_token_ids(case)
    expected = logits_of(model, token_ids)
    moved: dict[str, float] = {}
    for setting, spec in variants(model.spec):
        error = logits_of(replace(model, spec=spec), token_ids) - expected
        moved[setting] = float(np.sqrt((error**2).mean()) / expected.std())
    assert len(moved) > 10
    assert {setting: rms for setting, rms in moved.items() if not rms > MIN_RELATIVE_RMS} == {}
