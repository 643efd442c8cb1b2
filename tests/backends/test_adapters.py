"""Adapters: the reference against merged weights, and the native backend against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.adapter import AdapterFactors, sites
from penstock.models.formats import WeightFormat
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.weights import LoadedModel, WeightTensor
from penstock.types.errors import ExecutorFailure, ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.native_variants import VARIANTS
from support.packed_models import Packing, write_packed_hf
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.random_adapters import random_factors
from support.tiny_models import TinyLlama, write_gguf

TOKENS = tuple(int(i) for i in np.random.default_rng(3).integers(0, 264, 21))
SIZES: dict[str, Any] = {"num_blocks": 400, "block_size": 16, "max_rows": 4, "max_step_tokens": 64, "max_model_len": 64}
PLACED_FROM = 10
"""Blocks below are those of `forward_logits`."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    directory = tmp_path_factory.mktemp("tiny")

    def make(matrix_type: str = "F32", **shape: Any) -> LoadedModel:
        path = directory / f"{matrix_type} {shape}.gguf"
        if not path.exists():
            write_gguf(path, TinyLlama(**shape), matrix_type=matrix_type)
        return load_gguf(path)

    return make


def merged(model: LoadedModel, factors: AdapterFactors) -> LoadedModel:
    """The model with weights W + B A. It has one matrix for each site: it must not be tied."""
    weights = dict(model.weights)
    for site, (a, b) in factors.by_weight.items():
        whole = model.weights[site].dequantize() + ((b @ a).T if site == "embed" else b @ a)
        weights[site] = WeightTensor(site, *whole.shape, WeightFormat.F32, whole.astype(np.float32))
    return replace(model, weights=weights)


def logits_of(executor: ReferenceExecutor | NativeExecutor, factors: AdapterFactors | None = None) -> np.ndarray:
    if factors is None:
        return executor.forward_logits(TOKENS)
    packed = executor.adapter_packer(factors)
    executor.place_adapter(1, packed, range(PLACED_FROM, PLACED_FROM + packed.num_pages))
    logits = executor.forward_logits(TOKENS, adapter=1)
    executor.drop_adapter(1)
    return logits


def reference(model: LoadedModel, **changes: Any) -> ReferenceExecutor:
    settings = SIZES | {"max_adapter_rank": 256, "kv_dtype": KvDtype.BF16} | changes
    return ReferenceExecutor(model, architectures.describe(model.spec), **settings)


def native(model: LoadedModel, **changes: Any) -> NativeExecutor:
    settings = SIZES | {"max_adapter_rank": 256, "kv_dtype": KvDtype.BF16, "num_threads": 2, "poison": True} | changes
    return NativeExecutor(model, architectures.describe(model.spec), **settings)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("rank", [1, 8, 17])
@pytest.mark.parametrize("has_qkv_bias", [False, True])
def test_the_reference_computes_as_with_merged_weights(load: Callable[..., LoadedModel], rank: int, has_qkv_bias: bool) -> None:
    """This holds for every matrix, those of the embedding and of the logits as well."""
    architecture = "qwen2" if has_qkv_bias else "llama"
    model = load(is_tied=False, has_qkv_bias=has_qkv_bias, architecture=architecture)
    factors = random_factors(architectures.describe(model.spec), rank)
    expected = logits_of(reference(merged(model, factors)))
    executor = reference(model)
    assert relative(logits_of(executor, factors), expected) < 2e-3  # of keys and values a few are rounded the other way
    assert relative(logits_of(executor), expected) > 0.15


def test_each_site_counts_by_itself(load: Callable[..., LoadedModel]) -> None:
    model = load(is_tied=False)
    program = architectures.describe(model.spec)
    executor = reference(model)
    base = logits_of(executor)
    for site in sites(program):
        factors = random_factors(program, 4, wanted=lambda name, site=site: name == site)
        logits = logits_of(executor, factors)
        assert relative(logits, logits_of(reference(merged(model, factors)))) < 2e-3, site
        assert relative(logits, base) > 0.01, site


def test_the_head_of_a_tied_model_changes_alone(load: Callable[..., LoadedModel]) -> None:
    """Logits multiply the matrix of the embedding, and an adapter of theirs leaves that as it is."""
    model = load(is_tied=True)
    program = architectures.describe(model.spec)
    factors = random_factors(program, 4, wanted=lambda name: name == "output")
    executor = reference(model)
    untied = replace(
        model, weights={**model.weights, "output": model.weights["embed"]}, spec=replace(model.spec, tie_word_embeddings=False)
    )
    assert relative(logits_of(executor, factors), logits_of(reference(merged(untied, factors)))) < 2e-3


CHANGED = {"every matrix": lambda _: True, "q and v": lambda name: name.endswith((".q", ".v"))}


@pytest.mark.parametrize("matrix_type", ["Q8_0", "Q4_1", "Q4_0", "BF16"])
@pytest.mark.parametrize("which", CHANGED)
def test_native_is_near_the_reference(load: Callable[..., LoadedModel], matrix_type: str, which: str) -> None:
    """As near as without an adapter, or nearly: factors are rounded as weights of 8 bits are."""
    model = load(matrix_type, is_tied=False)
    program = architectures.describe(model.spec)
    executor, specification = native(model), reference(model)
    noise = relative(logits_of(executor), logits_of(specification))
    for rank in (1, 4, 8, 16, 17, 64):
        factors = random_factors(program, rank, wanted=CHANGED[which])
        expected = logits_of(specification, factors)
        assert relative(expected, logits_of(specification)) > 0.15
        assert relative(logits_of(executor, factors), expected) < 1.2 * noise + 0.002, rank
    executor.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_near_the_reference(load: Callable[..., LoadedModel], variant: str) -> None:
    """In units of all kinds: a rank of 256 and 1,120 columns are several of each."""
    model = load("Q8_0", is_tied=False, num_layers=1, intermediate_size=1120)
    factors = random_factors(architectures.describe(model.spec), 256, wanted=CHANGED["every matrix"])
    executor, specification = native(model, variant=variant, block_size=64), reference(model, num_blocks=3000)
    noise = relative(logits_of(executor), logits_of(specification))
    assert relative(logits_of(executor, factors), logits_of(specification, factors)) < 1.2 * noise + 0.002
    executor.close()


def test_base_logits_are_the_same_bits_where_adapters_may_come(load: Callable[..., LoadedModel]) -> None:
    model = load("Q4_1")
    without, with_adapters = native(model, max_adapter_rank=0), native(model)
    np.testing.assert_array_equal(logits_of(with_adapters), logits_of(without))
    assert without.max_adapter_rank == 0


def test_factors_fit_a_program_with_their_sites_shapes_and_rank(load: Callable[..., LoadedModel]) -> None:
    program = architectures.describe(load("Q8_0").spec)
    factors = random_factors(program, 4)
    assert factors.fits(program, 4)
    assert not factors.fits(program, 3)
    a, b = factors.by_weight["layers.0.q"]
    for other in ({"layers.0.router": (a, b)}, {"layers.0.q": (a[:, :8], b)}, {"layers.0.q": (a[:3], b)}):
        assert not AdapterFactors(other).fits(program, 4)


def test_what_native_does_not_compute_is_refused(load: Callable[..., LoadedModel]) -> None:
    model = load("Q8_0")
    program = architectures.describe(model.spec)
    pack = native(model, max_adapter_rank=8).adapter_packer
    for wrong in (np.nan, np.inf, 1e7):
        factors = random_factors(program, 4)
        factors.by_weight["layers.0.q"][0][0, 0] = wrong
        with pytest.raises(ModelError, match="no number, or beyond"):
            pack(factors)
    factors = random_factors(program, 4)
    factors.by_weight["layers.0.q"][1][0, 0] = np.inf
    with pytest.raises(ModelError, match="no finite number"):
        pack(factors)
    with pytest.raises(ModelError, match="256 or less"):
        native(model, max_adapter_rank=257)
    small = load("Q8_0", num_layers=1, num_kv_heads=1)
    with pytest.raises(ModelError, match=r"larger than a block.*--block-size"):
        native(small).adapter_packer(random_factors(architectures.describe(small.spec), 256))


def test_columns_in_another_order_are_those_of_the_adapter(tmp_path: Path) -> None:
    """A matrix of GPTQ with act-order multiplies its input in another order."""
    shape = TinyLlama(is_tied=False, hidden_size=128, intermediate_size=128, head_dim=32)
    write_packed_hf(tmp_path, shape, Packing(order="matrix"))
    model = load_hf_directory(tmp_path)
    assert any(tensor.column_order is not None for tensor in model.weights.values())
    executor, specification = native(model), reference(model)
    factors = random_factors(architectures.describe(model.spec), 8)
    noise = relative(logits_of(executor), logits_of(specification))
    assert relative(logits_of(executor, factors), logits_of(specification, factors)) < 1.2 * noise + 0.002
    executor.close()


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "gpt2", "glm4", "lfm2", "falcon_refined_web", "mixtral", "cohere"])
def test_other_architectures_take_adapters(architecture: str, tmp_path: Path) -> None:
    """With scaled embeddings and capped logits, one LayerNorm for two branches, short convolutions, and beside experts."""
    model = load_hf_directory(write_case(CASES[architecture], tmp_path))
    executor, specification = native(model), reference(model)
    # Of another seed some token is between two experts of the mixture, and rounding chooses.
    factors = random_factors(architectures.describe(model.spec), 8, seed=2)
    noise = relative(logits_of(executor), logits_of(specification))
    found, expected = logits_of(executor, factors), logits_of(specification, factors)
    assert relative(expected, logits_of(specification)) > 0.1
    assert relative(found, expected) < 1.5 * noise + 0.002
    executor.close()


def test_rows_of_a_step_have_their_own_adapters_in_the_reference(load: Callable[..., LoadedModel]) -> None:
    """Their first tokens are those of the whole text's logits; nobody may have an adapter that was dropped."""
    model = load(is_tied=False)
    program = architectures.describe(model.spec)
    executor = reference(model, poison=True)
    at, numbers = 100, (0, 1, 2)
    for number in numbers[1:]:
        packed = executor.adapter_packer(random_factors(program, 4, seed=number, strength=0.5))
        executor.place_adapter(number, packed, range(at, at + packed.num_pages))
        at += packed.num_pages
    sampling = SamplingParams(temperature=0.0)
    admits = tuple(
        AdmitRow(f"{number}", TOKENS, len(TOKENS), (1 + 2 * number, 2 + 2 * number), 0, sampling, adapter=number)
        for number in numbers
    )
    rows = tuple(RowPlan(f"{number}", 0, len(TOKENS), (), True) for number in numbers)
    result = executor.collect(executor.submit(StepPlan(0, 0, admits, rows, ())))
    expected = {f"{number}": int(executor.forward_logits(TOKENS, adapter=number)[-1].argmax()) for number in numbers}
    assert {name: tokens[0] for name, tokens in result.token_ids.items()} == expected
    assert len(set(expected.values())) > 1
    executor.drop_adapter(2)
    executor.drop_adapter(2)
    with pytest.raises(ExecutorFailure, match="adapter 2 was dropped"):
        executor.submit(StepPlan(1, 0, (), (RowPlan("2", len(TOKENS), 1, (), True),), ()))
    again = replace(admits[2], request_id="again")
    with pytest.raises(ValueError, match="adapter 2, which is not placed"):
        executor.submit(StepPlan(2, 0, (again,), (RowPlan("again", 0, len(TOKENS), (), True),), ()))
    with pytest.raises(ValueError, match="placed already"):
        executor.place_adapter(1, packed, range(300, 300 + packed.num_pages))
    with pytest.raises(ValueError, match="another number of pages"):
        executor.place_adapter(3, packed, range(300, 301))
