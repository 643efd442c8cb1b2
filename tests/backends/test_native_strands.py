"""Rows of a step that go through the layers in strands: nobody's answer tells of it, and steps are divided where it pays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from native_variants import ONE_OF_EACH
from parity.tiny import write_case
from parity.tiny_cases import CASES
from penstock.backends.native._native import emulated_variants
from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.weights import LoadedModel
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from tiny_models import TinyLlama, write_gguf

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 32
MAX_ROWS = 48
VOCAB_SIZE = 264

Answers = dict[str, tuple[int, float]]
"""Token and its logprob, by row."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return load_gguf(write_gguf(path, TinyLlama(num_layers=6, max_model_len=512), matrix_type="Q4_0"))


class Steps:
    """An executor, and a step of given shapes at a time: what `context_len` tells is computed before."""

    def __init__(self, model: LoadedModel, num_threads: int, *, variant: str = "") -> None:
        self.executor = NativeExecutor(
            model,
            architectures.describe(model.spec),
            num_blocks=1 + MAX_ROWS * BLOCKS_PER_ROW,
            block_size=BLOCK_SIZE,
            max_rows=MAX_ROWS,
            max_step_tokens=512,
            max_model_len=BLOCKS_PER_ROW * BLOCK_SIZE,
            num_threads=num_threads,
            variant=variant,
            poison=True,
        )
        self._ids: Iterator[int] = itertools.count()

    def run(self, *shapes: tuple[int, int]) -> Answers:
        """One step of rows of (context_len, query_len), after steps that compute what they see."""
        names = [f"{next(self._ids)}" for _ in shapes]
        for i, (name, (context_len, query_len)) in enumerate(zip(names, shapes, strict=True)):
            first = 1 + i * BLOCKS_PER_ROW
            blocks = tuple(range(first, first + -(-(context_len + query_len) // BLOCK_SIZE)))
            tokens = tuple(10 + (7 * i + 3 * t + t * t // 11) % 250 for t in range(context_len + query_len))
            sampling = SamplingParams(temperature=0.0, logprobs=0)
            admit = AdmitRow(name, tokens, len(tokens), blocks, 0, sampling)
            self._step([admit], [RowPlan(name, 0, context_len, (), False)] if context_len else [])
        rows = [RowPlan(name, context, query, (), True) for name, (context, query) in zip(names, shapes, strict=True)]
        answers = self._step([], rows)
        self.num_strands = self.executor.num_strands
        self._step([], [], names)
        return {str(i): answers[name] for i, name in enumerate(names)}

    def _step(self, admits: list[AdmitRow], rows: list[RowPlan], releases: list[str] | None = None) -> Answers:
        plan = StepPlan(next(self._ids), 0, tuple(admits), tuple(rows), tuple(releases or ()))
        result = self.executor.collect(self.executor.submit(plan))
        assert not result.failures, "a row has read what was not written yet"
        return {name: (entries[0].token_id, entries[0].logprob) for name, entries in result.logprobs.items()}


DECODES = [(40 + 9 * i % 230, 1) for i in range(31)]
SHAPES = {
    "decodes": DECODES,
    "decodes and a prompt": [*DECODES, (0, 150)],
    "a prompt between decodes": [*DECODES[:10], (30, 201), *DECODES[10:20]],
    "one prompt": [(0, 330)],
    "the rest of a prompt": [(200, 131)],
    "a few tokens that see much": [(450, 30)],  # several threads share a strand, and divide its attention
    "prompts": [(0, 61), (17, 90), (0, 23), (100, 77)],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_an_answer_does_not_tell_of_strands(model: LoadedModel, variant: str, name: str) -> None:
    """Also with more threads than cores, whose strands get in each other's way; what is read before it was written is NaN."""
    alone = Steps(model, 1, variant=variant)
    expected = alone.run(*SHAPES[name])
    assert alone.num_strands == 1
    assert len({token for token, _ in expected.values()}) > 1 or len(expected) == 1, "rows must not all be alike"
    for num_threads in (2, 3, 5):
        steps = Steps(model, num_threads, variant=variant)
        for _ in range(5 if variant in emulated_variants() else 20):
            assert steps.run(*SHAPES[name]) == expected
            assert 1 < steps.num_strands <= num_threads
        steps.executor.close()


@pytest.mark.parametrize(
    ("shapes", "num_threads", "expected"),
    [
        ([(40, 1)] * 15, 2, 1),  # too few to read the weights twice
        ([(40, 1)] * 16, 2, 2),
        ([(40, 1)] * 30, 4, 3),  # two threads share a strand
        ([(40, 1)] * 27, 3, 2),  # of three, in whole tiles of rows, one would have 12
        ([(0, 300)], 2, 2),
    ],
)
def test_a_step_is_divided_where_it_pays(
    model: LoadedModel, shapes: list[tuple[int, int]], num_threads: int, expected: int
) -> None:
    steps = Steps(model, num_threads)
    steps.run(*shapes)
    assert steps.num_strands == expected


@pytest.mark.parametrize("num_rows", [16, 32])
def test_products_fetch_what_the_next_attention_reads(model: LoadedModel, num_rows: int) -> None:
    """Each block of the strand's rows once, in order, whichever layer it is; those that the step begins are in the cache.

    Also where each of two strands has fewer rows than one alone would need.
    """
    contexts = [40, 16, 0, 33] * (num_rows // 4)
    blocks_of_row = [[1 + row * BLOCKS_PER_ROW + i for i in range(-(-context // 16))] for row, context in enumerate(contexts)]
    for num_threads in (1, 2):
        steps = Steps(model, num_threads)
        steps.run(*[(context, 1) for context in contexts])
        assert steps.num_strands == num_threads
        for layer in range(6):
            fetched = [block for strand in range(num_threads) for block in steps.executor.fetched_blocks(strand, layer)]
            assert fetched == list(itertools.chain(*blocks_of_row))
        steps.executor.close()


def test_nothing_is_fetched_where_it_does_not_pay(model: LoadedModel) -> None:
    """Products of few rows wait for memory themselves, and of threads that share a strand nobody knows who reads what."""
    for num_threads, num_rows in ((1, 11), (2, 15), (4, 30)):
        steps = Steps(model, num_threads)
        steps.run(*[(40, 1)] * num_rows)
        assert not any(steps.executor.fetched_blocks(strand, 3) for strand in range(steps.num_strands))
        steps.executor.close()


@pytest.mark.parametrize("num_threads", [2, 4])
def test_a_layer_that_no_cache_holds_is_read_once_for_a_block_of_rows(tmp_path: Path, num_threads: int) -> None:
    """However many threads there are: all of it lies between the first strand and the last."""
    shape = TinyLlama(num_layers=3, hidden_size=512, intermediate_size=4096, max_model_len=512)
    steps = Steps(load_gguf(write_gguf(tmp_path / "wide.gguf", shape, matrix_type="F16")), num_threads)
    for num_tokens, expected in ((48, 1), (188, 1), (200, 2)):
        steps.run(*[(0, num_tokens // 4)] * 4)
        assert steps.num_strands == expected


def test_a_row_that_costs_as_much_as_all_others_leaves_the_step_whole(tmp_path: Path) -> None:
    """Its thread would work on alone when all others are done, and nobody could take a part of its attention."""
    shape = TinyLlama(num_heads=16, max_model_len=512)
    steps = Steps(load_gguf(write_gguf(tmp_path / "tiny.gguf", shape, matrix_type="Q4_0")), 2)
    short = [(1, 1)] * 12
    steps.run(*short, (510, 1), *short)
    assert steps.num_strands == 1
    steps.run(*short, (1, 1), *short)
    assert steps.num_strands == 2


def test_a_row_with_recurrent_state_is_not_cut(tmp_path: Path) -> None:
    """A token finds the inputs of those before it in the step's buffers, which another strand may have filled again."""
    case = CASES["lfm2"]
    path = write_case(replace(case, config={**case.config, "max_position_embeddings": 512}), tmp_path / "lfm2")
    model, alone = load_hf_directory(path), dict[str, Answers]()
    for num_threads, repeats in ((1, 1), (2, 5), (3, 5), (5, 5)):
        steps = Steps(model, num_threads)
        for name, shapes in SHAPES.items():
            for _ in range(repeats):
                answers = steps.run(*shapes)
                assert answers == alone.setdefault(name, answers), name
                assert steps.num_strands == 1 or len(shapes) > 1
                assert steps.num_strands > 1 or num_threads == 1 or name != "decodes"
        steps.executor.close()
