"""A row's adapter is its own affair: whatever rows are computed with it, its answer has the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.weights import LoadedModel
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.native_variants import ONE_OF_EACH, VARIANTS
from support.random_adapters import random_factors
from support.tiny_models import TinyLlama, write_gguf

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 8
MAX_ROWS = 32
FIRST_PAGE = 1 + MAX_ROWS * BLOCKS_PER_ROW
NUM_PAGES = 1500
RANKS = {1: 8, 2: 8, 3: 4, 4: 16, 5: 1, 6: 17, 7: 64, 8: 8, 9: 30}
"""Rank of each adapter, by its number. The fifth changes q and v alone, the eighth gate and down, the ninth the logits."""
PARTS = {5: (".q", ".v"), 8: (".gate", ".down"), 9: ("output",)}

Answers = dict[int, tuple[int, float]]
"""Token and its logprob, by row."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, LoadedModel]:
    shape = TinyLlama(num_layers=3, intermediate_size=800, is_tied=False)
    directory = tmp_path_factory.mktemp("tiny")
    return {kind: load_gguf(write_gguf(directory / f"{kind}.gguf", shape, matrix_type=kind)) for kind in ("Q4_0", "BF16")}


def changed_by(ends: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda site: site.endswith(ends)


class Rows:
    """An executor with all adapters, and rows of it: row i has a text of its own, and the adapter i % 10."""

    def __init__(self, model: LoadedModel, *, num_threads: int = 2, variant: str = "", has_adapters: bool = True) -> None:
        program = architectures.describe(model.spec)
        self.executor = NativeExecutor(
            model,
            program,
            num_blocks=FIRST_PAGE + NUM_PAGES,
            block_size=BLOCK_SIZE,
            max_rows=MAX_ROWS,
            max_step_tokens=512,
            max_model_len=BLOCKS_PER_ROW * BLOCK_SIZE,
            num_threads=num_threads,
            variant=variant,
            poison=True,
            max_adapter_rank=64 if has_adapters else 0,
        )
        self._ids: Iterator[int] = itertools.count()
        at = FIRST_PAGE
        for number, rank in RANKS.items() if has_adapters else ():
            ends = PARTS.get(number, ("",))
            factors = random_factors(
                program, rank, seed=number, wanted=lambda name, e=ends: name != "embed" and name.endswith(e)
            )
            packed = self.executor.adapter_packer(factors)
            # Pages lie anywhere.
            blocks = list(range(at, at + packed.num_pages))
            self.executor.place_adapter(number, packed, blocks[::-1])
            at += packed.num_pages

    def run(
        self,
        rows: Sequence[int],
        *,
        num_tokens: int = 40,
        chunk: int = 64,
        base_alone: bool = False,
        bare: Callable[[int], bool] = lambda _: False,
    ) -> Answers:
        """The answers to rows that are computed together, `chunk` tokens of each at a time, and then one more token of each.

        Rows that are `bare` tell the likeliest token alone, with 0 for its logprob.
        """
        names = {row: f"{row} in {next(self._ids)}" for row in rows}
        lengths = {row: num_tokens + row % 5 for row in rows}
        admits = []
        for place, row in enumerate(rows):
            tokens = tuple(10 + (7 * row + 3 * t + t * t // 11) % 250 for t in range(lengths[row]))
            blocks = tuple(range(1 + place * BLOCKS_PER_ROW, 1 + (place + 1) * BLOCKS_PER_ROW))
            sampling = SamplingParams(temperature=0.0, logprobs=None if bare(row) else 0)
            admits.append(AdmitRow(names[row], tokens, len(tokens), blocks, 0, sampling, adapter=0 if base_alone else row % 10))
        done, found = dict.fromkeys(rows, 0), {}
        while any(done[row] < lengths[row] for row in rows):
            plans, left = [], 512
            for row in rows:
                count = min(chunk, lengths[row] - done[row], left)
                if count:
                    plans.append(RowPlan(names[row], done[row], count, (), done[row] + count == lengths[row]))
                    done[row] += count
                    left -= count
            self._step(admits, plans)
            admits = []
        plans = [RowPlan(names[row], lengths[row], 1, (), True) for row in rows]
        found = self._step([], plans)
        self._step([], [], list(names.values()))
        return {row: found[name] for row, name in names.items()}

    def _step(
        self, admits: Sequence[AdmitRow], rows: Sequence[RowPlan], releases: Sequence[str] = ()
    ) -> dict[str, tuple[int, float]]:
        plan = StepPlan(next(self._ids), 0, tuple(admits), tuple(rows), tuple(releases))
        result = self.executor.collect(self.executor.submit(plan))
        assert not result.failures
        logprobs = {name: entries[0].logprob for name, entries in result.logprobs.items()}
        return {name: (tokens[0], logprobs.get(name, 0.0)) for name, tokens in result.token_ids.items()}


@pytest.mark.parametrize(("kind", "num_threads"), [("Q4_0", 1), ("Q4_0", 2), ("Q4_0", 16), ("BF16", 2)])
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_a_row_alone_is_the_row_among_others(
    models: Mapping[str, LoadedModel], variant: str, kind: str, num_threads: int
) -> None:
    """Among rows without an adapter, of the same one and of nine others, in any order and in chunks."""
    rows = Rows(models[kind], num_threads=num_threads, variant=variant)
    rows.executor._engine.use_all_members()
    alone = {row: rows.run([row])[row] for row in range(MAX_ROWS)}
    together = rows.run(range(MAX_ROWS))
    assert together == alone
    by_adapter = sorted(range(MAX_ROWS), key=lambda row: row % 10)
    assert rows.run(by_adapter) == alone
    assert rows.run(by_adapter, chunk=7) == alone
    tokens = {row: token for row, (token, _) in alone.items()}
    for bare in (lambda _: True, lambda row: row % 3 == 0):  # only the likeliest logit is kept of some rows
        found = rows.run(range(MAX_ROWS), bare=bare)
        assert {row: token for row, (token, _) in found.items()} == tokens
    has_strands = num_threads > 1 and not variant.startswith("amx")  # with tiles they have 128 tokens or more
    assert (rows.executor.num_strands > 1) == has_strands
    rows.executor.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_base_rows_keep_the_bits_of_an_engine_without_adapters(models: Mapping[str, LoadedModel], variant: str) -> None:
    """Also where their product with a gate is divided for others' sake; and a row's adapter tells."""
    rows, without = Rows(models["Q4_0"], variant=variant), Rows(models["Q4_0"], variant=variant, has_adapters=False)
    base = without.run(range(MAX_ROWS), num_tokens=4, base_alone=True)
    mixed = rows.run(range(MAX_ROWS), num_tokens=4)
    assert all(mixed[row] == base[row] for row in range(0, MAX_ROWS, 10))
    assert all(mixed[row] != base[row] for row in range(MAX_ROWS) if row % 10)
    assert rows.run(range(MAX_ROWS), num_tokens=4, base_alone=True) == base


def test_a_dropped_adapter_leaves_nothing_behind(models: Mapping[str, LoadedModel]) -> None:
    """Another one in its blocks is another one; a row of one that is not there is refused."""
    rows, again = Rows(models["Q4_0"]), Rows(models["Q4_0"])
    expected = rows.run([1])
    program = architectures.describe(models["Q4_0"].spec)
    packer = again.executor.adapter_packer
    again.executor.drop_adapter(1)
    again.executor.drop_adapter(1)
    with pytest.raises(ValueError, match="adapter 1, which is not placed"):
        again.run([1])
    again.executor.close()
    rows.executor.drop_adapter(1)
    packed = packer(random_factors(program, 8, seed=77))
    rows.executor.place_adapter(1, packed, range(FIRST_PAGE, FIRST_PAGE + packed.num_pages))
    assert rows.run([1]) != expected
    with pytest.raises(ValueError, match="placed already"):
        rows.executor.place_adapter(1, packed, range(FIRST_PAGE, FIRST_PAGE + packed.num_pages))
    with pytest.raises(ValueError, match="another number of pages"):
        rows.executor.place_adapter(11, packed, range(FIRST_PAGE, FIRST_PAGE + packed.num_pages + 1))
    with pytest.raises(ValueError, match="no such block"):
        rows.executor.place_adapter(11, packed, [0] * packed.num_pages)
