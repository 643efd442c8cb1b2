"""Adapters on the device: near the reference, and with the same bits whatever rows are computed together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.adapter import AdapterFactors
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.weights import LoadedModel
from penstock.types.errors import ExecutorFailure, ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.interpreted import DEVICE, HAS_DEVICE
from support.packed_models import Packing, write_packed_hf
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.random_adapters import random_factors
from support.tiny_models import TinyLlama, write_gguf

SHAPE = TinyLlama(is_tied=False, num_layers=2, num_heads=2, num_kv_heads=1, hidden_size=64, intermediate_size=96)
TOKENS = tuple(int(i) for i in np.random.default_rng(3).integers(0, 264, 21))
SIZES: dict[str, Any] = {"num_blocks": 400, "block_size": 64, "max_rows": 8, "max_step_tokens": 64, "max_model_len": 64}
PLACED_FROM = 20
"""Blocks below are those of rows."""
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    directory = tmp_path_factory.mktemp("tiny")

    @cache
    def make(matrix_type: str = "F32", shape: TinyLlama = SHAPE) -> LoadedModel:
        path = directory / f"{matrix_type} {hash(shape)}.gguf"
        return load_gguf(write_gguf(path, shape, matrix_type=matrix_type))

    return make


def cuda(model: LoadedModel, **changes: Any) -> CudaExecutor:
    settings = {"max_adapter_rank": 64, "device": DEVICE, "dtype": torch.float32, "poison": True, "use_graphs": HAS_DEVICE}
    return CudaExecutor(model, architectures.describe(model.spec), **(SIZES | settings | changes))


def reference(model: LoadedModel, **changes: Any) -> ReferenceExecutor:
    settings = {"max_adapter_rank": 64, "kv_dtype": KvDtype.BF16, "num_blocks": 3000}
    return ReferenceExecutor(model, architectures.describe(model.spec), **(SIZES | settings | changes))


def logits_of(executor: CudaExecutor | ReferenceExecutor, factors: AdapterFactors | None = None) -> np.ndarray:
    if factors is None:
        return executor.forward_logits(TOKENS)
    packed = executor.adapter_packer(factors)
    executor.place_adapter(1, packed, range(PLACED_FROM, PLACED_FROM + packed.num_pages))
    logits = executor.forward_logits(TOKENS, adapter=1)
    executor.drop_adapter(1)
    return logits


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize(("rank", "matrix_type"), [(1, "F32"), (8, "Q4_0"), (17, "F32"), (64, "Q8_0")])
def test_every_matrix_is_that_of_the_reference(load: Callable[..., LoadedModel], rank: int, matrix_type: str) -> None:
    """The embedding and the output as well."""
    model = load(matrix_type)
    factors = random_factors(architectures.describe(model.spec), rank)
    executor, specification = cuda(model), reference(model)
    base, found = logits_of(specification), logits_of(executor, factors)
    noise = relative(logits_of(executor), base)
    assert relative(found, base) > 0.15
    assert relative(found, logits_of(specification, factors)) < 1.2 * noise + 0.002
    executor.close()


def test_base_rows_keep_the_bits_of_an_executor_without_adapters(load: Callable[..., LoadedModel]) -> None:
    model = load("Q8_0")
    without, with_adapters = cuda(model, max_adapter_rank=0), cuda(model)
    np.testing.assert_array_equal(logits_of(with_adapters), logits_of(without))
    assert without.max_adapter_rank == 0
    with pytest.raises(ValueError, match="computes no adapters"):
        without.place_adapter(1, with_adapters.adapter_packer(AdapterFactors({})), [9])


@pytest.mark.parametrize(
    "changes",
    [{"kv_dtype": KvDtype.INT8}, {"dtype": torch.bfloat16}, {"block_size": 32}],
    ids=["int8", "bf16", "narrow"],
)
def test_pages_of_every_kind_of_cache(load: Callable[..., LoadedModel], changes: dict[str, Any]) -> None:
    """Blocks of int8, whose scales have no factors in them; of bf16; and tiles that are less wide than they may be."""
    model = load()
    factors = random_factors(architectures.describe(model.spec), 17)
    executor, specification = cuda(model, **changes), reference(model, kv_dtype=changes.get("kv_dtype", KvDtype.BF16))
    noise = relative(logits_of(executor), logits_of(specification))
    assert relative(logits_of(executor, factors), logits_of(specification, factors)) < 1.5 * noise + 0.002
    executor.close()


def test_columns_that_are_split_are_added_up(load: Callable[..., LoadedModel]) -> None:
    """The columns of A are several programs' where there are many, and its tiles the narrowest."""
    shape = TinyLlama(is_tied=False, num_layers=1, num_heads=2, num_kv_heads=1, hidden_size=32, intermediate_size=416)
    model = load("F32", shape)
    factors = random_factors(architectures.describe(model.spec), 30, wanted=lambda name: name.endswith(("down", "output")))
    executor = cuda(model, block_size=16)
    assert relative(logits_of(executor, factors), logits_of(reference(model), factors)) < 0.002
    executor.close()


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "gpt2", "mixtral", "cohere"])
def test_other_architectures_take_adapters(architecture: str, tmp_path: Path) -> None:
    """With scaled embeddings and capped logits, biases, transposed matrices, and beside experts."""
    model = load_hf_directory(write_case(CASES[architecture], tmp_path))
    executor, specification = cuda(model), reference(model)
    factors = random_factors(architectures.describe(model.spec), 8, seed=2)
    noise = relative(logits_of(executor), logits_of(specification))
    found, expected = logits_of(executor, factors), logits_of(specification, factors)
    assert relative(expected, logits_of(specification)) > 0.1
    assert relative(found, expected) < 1.5 * noise + 0.002
    executor.close()


def test_columns_in_another_order_are_those_of_the_adapter(tmp_path: Path) -> None:
    """A matrix of GPTQ with act-order multiplies its input in another order."""
    shape = TinyLlama(is_tied=False, hidden_size=128, intermediate_size=128, head_dim=32, num_layers=1)
    write_packed_hf(tmp_path, shape, Packing(order="matrix"))
    model = load_hf_directory(tmp_path)
    assert any(tensor.column_order is not None for tensor in model.weights.values())
    executor, specification = cuda(model), reference(model)
    factors = random_factors(architectures.describe(model.spec), 8, wanted=lambda name: name != "embed")
    noise = relative(logits_of(executor), logits_of(specification))
    assert relative(logits_of(executor, factors), logits_of(specification, factors)) < 1.2 * noise + 0.002
    executor.close()


RANKS = {1: 8, 2: 1, 3: 64, 4: 17, 5: 8, 6: 16}
"""Rank of each adapter, by its number. The first layer alone is changed by the fourth, q and v by the fifth, the sixth changes
the logits. Row i has the adapter i % 7."""
PARTS: Mapping[int, Callable[[str], bool]] = {
    4: lambda site: site.startswith("layers.0."),
    5: lambda site: site.endswith((".q", ".v")),
    6: lambda site: site == "output",
}
Answers = dict[int, tuple[int, float]]
"""Token and its logprob, by row."""


class Rows:
    """An executor with all adapters, and rows of it: row i has a text of its own."""

    def __init__(self, executor: CudaExecutor | ReferenceExecutor, model: LoadedModel) -> None:
        self.executor = executor
        self._ids: Iterator[int] = itertools.count()
        program = architectures.describe(model.spec)
        at = PLACED_FROM
        for number, rank in RANKS.items():
            factors = random_factors(program, rank, seed=number, wanted=PARTS.get(number, lambda _: True))
            packed = executor.adapter_packer(factors)
            blocks = list(range(at, at + packed.num_pages))
            executor.place_adapter(number, packed, blocks[::-1])  # pages lie anywhere
            at += packed.num_pages

    def run(self, rows: Sequence[int], *, chunk: int = 64, is_base: bool = False) -> Answers:
        """The answers to rows that are computed together, `chunk` tokens of each at a time, and then one more token of each."""
        names = {row: f"{row} in {next(self._ids)}" for row in rows}
        lengths = {row: 4 + 5 * (row % 3) for row in rows}
        admits = []
        for place, row in enumerate(rows):
            tokens = tuple(10 + (7 * row + 3 * t + t * t // 11) % 250 for t in range(lengths[row]))
            sampling = SamplingParams(temperature=0.0, logprobs=0)
            adapter = 0 if is_base else row % 7
            admits.append(AdmitRow(names[row], tokens, len(tokens), (1 + place,), 0, sampling, adapter=adapter))
        done = dict.fromkeys(rows, 0)
        while any(done[row] < lengths[row] for row in rows):
            plans, left = [], 64
            for row in rows:
                if count := min(chunk, lengths[row] - done[row], left):
                    plans.append(RowPlan(names[row], done[row], count, (), done[row] + count == lengths[row]))
                    done[row] += count
                    left -= count
            self._step(admits, plans)
            admits = []
        found = self._step([], [RowPlan(names[row], lengths[row], 1, (), True) for row in rows])
        self._step([], [], list(names.values()))
        return {row: found[name] for row, name in names.items()}

    def _step(
        self, admits: Sequence[AdmitRow], rows: Sequence[RowPlan], releases: Sequence[str] = ()
    ) -> dict[str, tuple[int, float]]:
        plan = StepPlan(next(self._ids), 0, tuple(admits), tuple(rows), tuple(releases))
        result = self.executor.collect(self.executor.submit(plan))
        assert not result.failures
        return {name: (tokens[0], result.logprobs[name][0].logprob) for name, tokens in result.token_ids.items()}


def assert_near(found: Answers, expected: Answers) -> None:
    assert {row: token for row, (token, _) in found.items()} == {row: token for row, (token, _) in expected.items()}
    np.testing.assert_allclose([x for _, x in found.values()], [x for _, x in expected.values()], **CLOSE)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_any_adapters_share_a_step(load: Callable[..., LoadedModel], deterministic: bool) -> None:
    """And of the base; in one step, in chunks, next to their like or not."""
    model = load()
    rows, specification = Rows(cuda(model, deterministic=deterministic), model), Rows(reference(model), model)
    expected = specification.run(range(8))
    assert len({logprob for _, logprob in expected.values()}) == 8
    together = rows.run(range(8))
    assert_near(together, expected)
    if deterministic:
        assert rows.run([7, 0, 1, 3, 2, 4, 6, 5], chunk=6) == together
        assert {row: rows.run([row])[row] for row in (0, 3)} == {row: together[row] for row in (0, 3)}
    rows.executor.close()


def test_decodes_of_the_base_are_graphs_and_those_of_adapters_are_not(load: Callable[..., LoadedModel]) -> None:
    model = load()
    executor = cuda(model, use_graphs=True)
    rows, without = Rows(executor, model), cuda(model, use_graphs=False)
    before = executor.num_graphs_left
    expected = rows.run([1, 2])
    assert executor.num_graphs_left == before
    assert_near(rows.run([1, 2], is_base=True), Rows(without, model).run([1, 2], is_base=True))
    assert executor.num_graphs_left == before - 1
    assert_near(rows.run([1, 2]), expected)
    executor.close()


def test_a_dropped_adapter_leaves_nothing_behind(load: Callable[..., LoadedModel]) -> None:
    """Another one in its blocks is another one; a row of one that is not there is refused."""
    model = load()
    program = architectures.describe(model.spec)
    rows = Rows(cuda(model), model)
    executor = rows.executor
    executor.drop_adapter(1)
    executor.drop_adapter(1)
    packed = executor.adapter_packer(random_factors(program, 8, seed=77))
    blocks = range(PLACED_FROM, PLACED_FROM + packed.num_pages)
    with pytest.raises(ValueError, match="adapter 1, which is not placed"):
        rows.run([1])
    executor = cuda(model)  # a broken plan left the other one undefined
    executor.place_adapter(1, packed, blocks)
    with pytest.raises(ValueError, match="placed already"):
        executor.place_adapter(1, packed, blocks)
    with pytest.raises(ValueError, match="another number of pages"):
        executor.place_adapter(2, packed, range(PLACED_FROM, PLACED_FROM + packed.num_pages + 1))
    with pytest.raises(ValueError, match="another executor"):
        executor.place_adapter(2, cuda(model, block_size=32).adapter_packer(random_factors(program, 8)), blocks)
    with pytest.raises(ValueError, match="no block 0"):
        executor.place_adapter(2, packed, [0] * packed.num_pages)
    executor.drop_adapter(1)
    with pytest.raises(ExecutorFailure, match="adapter 1 was dropped"):
        executor.forward_logits(TOKENS, adapter=1)
    executor.close()


def test_what_is_not_computed_is_refused(load: Callable[..., LoadedModel]) -> None:
    model = load()
    program = architectures.describe(model.spec)
    pack = cuda(model, max_adapter_rank=8).adapter_packer
    factors = random_factors(program, 4)
    factors.by_weight["layers.0.q"][0][0, 0] = np.nan
    with pytest.raises(ModelError, match=r"'layers.0.q' is no finite number"):
        pack(factors)
    with pytest.raises(ModelError, match=r"take 512 bytes.*smallest part.*--block-size"):
        cuda(model, block_size=8)


def test_a_low_rank_takes_little_room(load: Callable[..., LoadedModel]) -> None:
    """Only columns' last tiles and the last page have room left."""
    model = load("F32", TinyLlama(is_tied=False, hidden_size=128, intermediate_size=256, head_dim=32, num_layers=3))
    program = architectures.describe(model.spec)
    executor = cuda(model)
    for rank in (1, 4, 8, 16, 32, 64):
        factors = random_factors(program, rank, wanted=lambda name: name != "output")
        num_bytes = sum(4 * rank * (-(-len(b) // 64) + -(-a.shape[1] // 64)) * 64 for a, b in factors.by_weight.values())
        assert executor.adapter_packer(factors).num_pages == -(-num_bytes // executor.block_bytes), rank
    assert executor.adapter_packer(AdapterFactors({})).num_pages == 1
    executor.close()
