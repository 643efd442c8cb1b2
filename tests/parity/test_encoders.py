"""Tiny random encoders through our own loaders and backends, against transformers' answers for the same values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.clock import VirtualClock
from penstock.models import architectures, catalog
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.testing import make_core, make_text, run_to_completion, text_capacity
from penstock.testing.builders import sizes_of
from penstock.types.encoder import ScoreFunction, Task
from penstock.types.errors import ModelError
from penstock.types.events import Add
from support.models.mutated import Changed, mutate, mutations
from support.parity.encoder_cases import ENCODERS, Text, load_states, texts, write_encoder
from support.parity.encoders import BACKENDS
from support.parity.golden import GOLDEN_DIR
from support.parity.tiny import FloatArray, weights_sha256
from support.parity.tiny_mutated import MAX_EXAMPLES
from support.parity.tiny_mutated import MAX_RELATIVE_RMS as MAX_MUTATED_RMS
from support.parity.tiny_runs import MAX_RELATIVE_RMS
from support.parity.tiny_settings import MIN_RELATIVE_RMS, variants, with_float_weights


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Writes and loads a case, once."""
    loaded: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in loaded:
            path = write_encoder(ENCODERS[name], tmp_path_factory.mktemp(name) / "model")
            loaded[name] = load_model(catalog.resolve(str(path), path))
        return loaded[name]

    return get


@contextmanager
def reading(model: LoadedModel, backend: str) -> Iterator[Callable[[list[Text]], list[FloatArray]]]:
    """A function that returns the answers to texts that share steps."""
    capacity = text_capacity(min(64, model.spec.max_model_len), max_step_tokens=64)
    width, numbers, clock = model.spec.result_width, count(), VirtualClock()
    with closing(BACKENDS[backend](model, architectures.describe(model.spec), **sizes_of(capacity))) as executor:
        core = make_core(executor.capacity, enable_prefix_caching=False)

        def read(of: list[Text]) -> list[FloatArray]:
            requests = [make_text(f"r{next(numbers)}", text.token_ids, second_at=text.second_at) for text in of]
            outcomes = run_to_completion(core, executor, *map(Add, requests), clock=clock)
            states = [outcomes[request.request_id].last.states for request in requests]
            return [np.frombuffer(state, "<f4").reshape(-1, width) for state in states]

        yield read


def states_of(model: LoadedModel, of: list[Text], backend: str = "reference") -> list[FloatArray]:
    with reading(model, backend) as read:
        return read(of)


def relative_rms(found: list[FloatArray], expected: list[FloatArray]) -> float:
    """Root mean square of the differences, as a share of the answers' standard deviation."""
    ours, theirs = (np.concatenate(rows).astype(np.float64) for rows in (found, expected))
    assert ours.shape == theirs.shape
    return float(np.sqrt(((ours - theirs) ** 2).mean()) / theirs.std())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_answers_equal_those_of_transformers(load: Callable[[str], LoadedModel], name: str, backend: str) -> None:
    case = ENCODERS[name]
    with np.load(GOLDEN_DIR / "encoders.npz") as data:
        assert str(data[f"{case.golden or name}/weights_sha256"]) == weights_sha256(case)
    model, expected = load(name), load_states(case.golden or name)
    if case.gguf is not None and not case.has_head:  # embeddings of GGUF files have the length 1
        expected = [rows / np.linalg.norm(rows) for rows in expected]
    with reading(model, backend) as read:
        together = read(texts(case))
        alone = [read([text])[0] for text in texts(case)]
    assert relative_rms(together, expected) < MAX_RELATIVE_RMS[backend]
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))
    assert model.encoder is not None
    assert model.encoder.width == expected[0].shape[1]
    assert model.encoder.labels == tuple(case.config["id2label"].values()) if case.has_head else not model.encoder.labels


def test_a_reranker_of_qwen_3_has_one_score_in_each_form_of_its_files(load: Callable[[str], LoadedModel]) -> None:
    """Its GGUF file has rows for `yes` and `no`: the sigmoid of their difference is the share of `yes`."""
    for name in ("qwen3_score", "qwen3_score_gguf"):
        encoder = load(name).encoder
        assert encoder is not None
        assert (encoder.task, encoder.scores) == (Task.RERANK, ScoreFunction.SIGMOID), name


def test_the_golden_file_has_the_cases_and_no_others() -> None:
    with np.load(GOLDEN_DIR / "encoders.npz") as data:
        stored = {key.split("/")[0] for key in data.files}
    assert stored == {name for name, case in ENCODERS.items() if not case.golden}, "run make_encoder_golden"


def settings_of(model: LoadedModel) -> Iterator[tuple[str, LoadedModel]]:
    """The model with one setting of its spec changed, by the setting."""
    spec, ending = model.spec, model.spec.ending
    assert ending is not None
    for setting, changed in variants(spec):
        yield setting, replace(model, spec=changed)
    yield "normalised", replace(model, spec=replace(spec, ending=replace(ending, is_normalised=not ending.is_normalised)))
    for pooling in {"first", "last", "mean"} - {ending.pooling} if ending.pooling not in ("each", "sparse") else ():
        yield pooling, replace(model, spec=replace(spec, ending=replace(ending, pooling=pooling)))
    for number, dense in enumerate(ending.dense):
        others = (*ending.dense[:number], replace(dense, activation="relu"), *ending.dense[number + 1 :])
        yield f"dense.{number}", replace(model, spec=replace(spec, ending=replace(ending, dense=others)))


@pytest.mark.parametrize("name", [name for name, case in ENCODERS.items() if not case.golden and case.is_mutated])
def test_each_setting_changes_the_answers(load: Callable[[str], LoadedModel], name: str) -> None:
    """A reader that forgets one would fail the comparison with transformers."""
    model, of = with_float_weights(load(name)), texts(ENCODERS[name])[:2]
    expected = states_of(model, of)
    moved = {setting: relative_rms(states_of(other, of), expected) for setting, other in settings_of(model)}
    assert len(moved) > 10
    assert {setting: rms for setting, rms in moved.items() if not rms > MIN_RELATIVE_RMS} == {}


MUTATED = (
    "albert",
    "bert_dense",
    "bert_late",
    "bert_sparse",
    "bert_classes",
    "deberta",
    "electra_classes",
    "gte_old_names",
    "embedding_gemma",
    "eurobert_classes",
    "jina_3",
    "mpnet",
    "modernbert",
    "nomic_bert_old_names",
    "nomic_bert_experts",
    "privacy_filter",
    "qwen3_embedding",
    "mistral_both_ways",
    "qwen3_score",
    "xlm_roberta_xl",
)
FILES = ("config.json", "modules.json", "1_Pooling/config.json", "1_SpladePooling/config.json", "2_Dense/config.json")


def answers_or_refusal(path: Path, backend: str, of: list[Text]) -> list[FloatArray] | ModelError:
    try:
        model = load_model(catalog.resolve(str(path), path), max_weight_bytes=1 << 27)
        if model.encoder is None:
            return []
        return states_of(model, of, backend)
    except ModelError as error:
        return error


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each case whose files are changed."""
    return {name: write_encoder(ENCODERS[name], tmp_path_factory.mktemp("mutated") / name) for name in MUTATED}


@pytest.mark.parametrize("name", MUTATED)
@settings(max_examples=MAX_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_changed_settings_are_refused_or_computed_alike(files: dict[str, Path], name: str, data: st.DataObject) -> None:
    """A directory of settings that nobody chose is refused with cause and remedy, or two backends agree on what it means."""
    file = data.draw(st.sampled_from([files[name] / file for file in FILES if (files[name] / file).is_file()]))
    tree = json.loads(file.read_text())
    of = [Text(text.token_ids[:12], min(text.second_at, 6)) for text in texts(ENCODERS[name])]
    with Changed(file, mutate(tree, data.draw(mutations(tree)))):
        reference, native = (answers_or_refusal(files[name], backend, of) for backend in BACKENDS)
    for answer in (reference, native):
        if isinstance(answer, ModelError):
            assert answer.message
            assert answer.remedy
            assert len(str(answer)) < 10_000
    if isinstance(native, ModelError) or isinstance(reference, ModelError):
        assert isinstance(native, ModelError), f"only the reference refuses it: {reference}"
    elif reference and np.isfinite(np.concatenate(reference)).all() and np.concatenate(reference).std() > 1e-3:
        assert relative_rms(native, reference) < MAX_MUTATED_RMS
