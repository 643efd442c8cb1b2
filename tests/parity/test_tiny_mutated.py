"""Settings that somebody changed in a model's files: refused with cause and remedy, or computed alike by two backends.

A file that loads may be of another model than the weights were made for. But native and reference have to agree on what it is:
a setting that one of them misreads, or a size that makes a kernel read elsewhere, shows here.
`HYPOTHESIS_PROFILE=thorough` tries more, in an order of its own each time.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.models import catalog
from penstock.models.load import load_model
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from support.models.mutated import Changed, mutate, mutations
from support.parity.tiny import FloatArray, case_token_ids, write_case
from support.parity.tiny_cases import CASES
from support.parity.tiny_mutated import MAX_EXAMPLES, MAX_RELATIVE_RMS
from support.parity.tiny_runs import make

NUM_TOKENS = 12
DIRECTORIES = [name for name, case in CASES.items() if case.gguf is None]
GGUFS = {name: case.gguf.architecture for name, case in CASES.items() if case.gguf is not None}
few = settings(max_examples=MAX_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def logits_or_refusal(path: Path, backend: str, token_ids: list[int]) -> FloatArray | ModelError:
    try:
        with closing(make(load_model(catalog.resolve(str(path), path)), backend, KvDtype.BF16, NUM_TOKENS)) as executor:
            return executor.forward_logits(token_ids)
    except ModelError as error:
        return error


def is_refused_or_computed_alike(path: Path, token_ids: list[int]) -> None:
    """The law of this file."""
    reference = logits_or_refusal(path, "reference", token_ids)
    native = logits_or_refusal(path, "native", token_ids)
    for answer in (reference, native):
        if isinstance(answer, ModelError):
            assert answer.message
            assert answer.remedy
            assert len(str(answer)) < 10_000
    if isinstance(native, ModelError) or isinstance(reference, ModelError):
        assert isinstance(native, ModelError), f"only the reference refuses it: {reference}"
    elif np.isfinite(reference).all() and (std := float(reference.astype(np.float64).std())) > 1e-3:
        shares = (native.astype(np.float64) - reference) / std  # the squares of large logits have no float32
        assert np.sqrt((shares**2).mean()) < MAX_RELATIVE_RMS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The path of each case's files."""
    return {name: write_case(case, tmp_path_factory.mktemp("mutated") / "model") for name, case in CASES.items()}


@pytest.mark.parametrize("name", DIRECTORIES)
@few
@given(data=st.data())
def test_config_json(files: dict[str, Path], name: str, data: st.DataObject) -> None:
    file = files[name] / "config.json"
    tree = json.loads(file.read_text())
    with Changed(file, mutate(tree, data.draw(mutations(tree)))):
        is_refused_or_computed_alike(files[name], case_token_ids(CASES[name])[:NUM_TOKENS])


@pytest.mark.parametrize("name", GGUFS)
@few
@given(data=st.data())
def test_metadata_of_gguf(files: dict[str, Path], name: str, data: st.DataObject) -> None:
    """Numbers of the architecture's own keys, overwritten where they stand."""
    file = files[name]
    good = file.read_bytes()
    keys = [found.start() for found in re.finditer(re.escape(f"{GGUFS[name]}.".encode()), good)]
    overwritten = bytearray(good)
    for _ in range(data.draw(st.integers(1, 2))):
        begin = data.draw(st.sampled_from(keys))
        value = begin + int.from_bytes(good[begin - 8 : begin], "little") + 4  # after the key: its type, then its value
        number = data.draw(st.sampled_from((0, 1, 2, 3, 5, 7, 8, 16, 255, 2**31 - 1, 2**31, 2**32 - 1, 0x3F800000, 0x7F800000)))
        overwritten[value : value + 4] = number.to_bytes(4, "little")
    with Changed(file, bytes(overwritten)):
        is_refused_or_computed_alike(file, case_token_ids(CASES[name])[:NUM_TOKENS])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("granite", "attention_multiplier", 1e-40), ("granite", "embedding_multiplier", 1e30), ("granite", "rope_theta", 1e-40)],
)
def test_values_that_once_got_through(files: dict[str, Path], name: str, key: str, value: float) -> None:
    """Numbers that float32 has, but not what follows from them."""
    file = files[name] / "config.json"
    tree = {**json.loads(file.read_text()), "rope_parameters": None, key: value}
    with (
        Changed(file, json.dumps(tree).encode()),
        pytest.raises(ModelError, match=r"too large or not a number|too large") as refused,
    ):
        load_model(catalog.resolve(str(files[name]), files[name]))
    assert refused.value.remedy
