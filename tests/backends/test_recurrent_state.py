"""Recurrent state in KV blocks, in both backends that compute it: it moves with its block, and goes on behind its end alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.backends.native import footprint
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.config import Config, KvConfig
from penstock.deploy.blueprint import Compute
from penstock.deploy.checks import check_state
from penstock.deploy.resolve import decide
from penstock.models import architectures
from penstock.models.hf import load_hf_directory
from penstock.models.weights import LoadedModel
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ShortConvSpec
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.native_variants import VARIANTS
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES

BLOCK_SIZE = 16
TOKENS = tuple(3 + 11 * i % 250 for i in range(60))
Executor = NativeExecutor | ReferenceExecutor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Layers with a convolution, also the first and the last one, and a kernel whose columns do not divide a block."""
    case = CASES["lfm2_old_config"]
    config = {**case.config, "max_position_embeddings": 512}
    return load_hf_directory(write_case(replace(case, config=config), tmp_path_factory.mktemp("lfm2")))


BACKENDS: dict[str, Callable[..., Executor]] = {
    "reference": ReferenceExecutor,
    **{
        variant: lambda *args, _variant=variant, **options: NativeExecutor(*args, variant=_variant, **options)
        for variant in VARIANTS
    },
}


class Rows:
    """Steps of one executor, a row at a time."""

    def __init__(self, model: LoadedModel, backend: str, *, num_rows: int = 8) -> None:
        sizes = {"num_blocks": 40 * num_rows, "block_size": BLOCK_SIZE, "max_rows": num_rows}
        limits = {"max_step_tokens": 512, "max_model_len": 512}
        self.executor = BACKENDS[backend](model, architectures.describe(model.spec), **sizes, **limits, poison=True)
        self._ids = itertools.count()

    def answer(self, blocks: tuple[int, ...], num_computed: int, *chunks: int) -> float | None:
        """The log-probability of what is sampled after chunks of `TOKENS` behind so many; None if nothing is a number."""
        name, end = f"{next(self._ids)}", num_computed + sum(chunks)
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        admits, context_len = [AdmitRow(name, TOKENS[:end], end, blocks, num_computed, sampling)], num_computed
        for chunk in chunks:
            row = RowPlan(name, context_len, chunk, (), context_len + chunk == end)
            result = self.executor.collect(self.executor.submit(StepPlan(next(self._ids), 0, tuple(admits), (row,), ())))
            admits, context_len = [], context_len + chunk
        self.executor.collect(self.executor.submit(StepPlan(next(self._ids), 0, (), (), (name,))))
        return None if result.failures else result.logprobs[name][0].logprob


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_moves_with_its_block(model: LoadedModel, backend: str) -> None:
    rows = Rows(model, backend)
    whole = {end: rows.answer((1, 2, 3), 0, end) for end in (17, 33, 40)}
    assert len(set(whole.values())) == 3
    rows.answer((4, 5, 6), 0, 39)
    rows.executor.copy_blocks([(4, 7), (5, 8), (6, 9)])
    assert rows.answer((7, 8, 9), 39, 1) == whole[40], "a fork"
    contents = [bytearray(rows.executor.block_bytes) for _ in range(2)]
    rows.executor.read_blocks((4, 5), [memoryview(content) for content in contents])
    rows.executor.write_blocks((10, 11), [memoryview(content) for content in contents])
    assert rows.answer((10, 11, 12), 32, 8) == whole[40], "from a tier"
    assert rows.answer((10, 11, 12), 32, 1) == whole[33]
    assert rows.answer((4, 13, 14), 16, 1) == whole[17], "a hit on one block"
    assert rows.answer((4, 13, 14), 16, 17) == whole[33]
    assert rows.answer((4, 13, 14), 16, 3, 20, 1) == whole[40]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_a_block_there_is_none(model: LoadedModel, backend: str) -> None:
    """Why no hit may end there: the answer would be another one."""
    rows = Rows(model, backend)
    whole = rows.answer((1, 2, 3), 0, 21)
    rows.answer((4, 5, 6), 0, 30)
    assert rows.answer((4, 5, 6), 20, 1) != whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_block_held_before_is_not_read(model: LoadedModel, backend: str) -> None:
    """Blocks that a row begins are poisoned, and so is one that was never written."""
    rows = Rows(model, backend)
    whole = rows.answer((1, 2, 3), 0, 34)
    assert rows.answer((20, 21, 22), 16, 1) is None
    for chunks in ((34,), (1,) * 34, (15, 1, 1, 17), (16, 16, 2)):
        assert rows.answer((3, 2, 1), 0, *chunks) == whole


@pytest.mark.parametrize("kv_dtype", [KvDtype.INT8, KvDtype.BF16])
def test_a_block_takes_what_was_planned_for_it(model: LoadedModel, kv_dtype: KvDtype) -> None:
    program = architectures.describe(model.spec)
    sizes = {"num_blocks": 4, "block_size": 32, "max_rows": 2, "max_step_tokens": 32, "max_model_len": 64}
    assert NativeExecutor(model, program, **sizes, kv_dtype=kv_dtype).block_bytes == footprint.block_bytes(
        model.spec, kv_dtype, 32
    )


def blocks_of(size: int) -> Compute:
    return decide(Config(kv=KvConfig(block_size=size)))


def test_a_block_that_is_too_small_is_refused_before_a_weight_is_read(model: LoadedModel) -> None:
    check_state(blocks_of(3), model)
    with pytest.raises(ConfigError, match=r"block_size 2 is too small .* its state covers 3 positions") as refused:
        check_state(blocks_of(2), model)
    assert refused.value.remedy == "Set --block-size to 16."
    layers = tuple(replace(layer, mixer=ShortConvSpec(kernel=18)) for layer in model.spec.layers)
    with pytest.raises(ConfigError, match=r"block_size 16 .* 17 positions. Set --block-size to 32."):
        check_state(blocks_of(16), replace(model, spec=replace(model.spec, layers=layers)))
