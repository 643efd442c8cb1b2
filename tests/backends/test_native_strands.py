"""Rows of a step that go through the layers in strands: nobody's answer tells of it, and steps are divided where it pays."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native._native import RowOp, RowOpKind, SourceFormat, emulated_variants, usable_variants
from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.weights import LoadedModel
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.backends.native_probe import Probe
from support.native_variants import ONE_OF_EACH, WITHOUT_TILES
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 32
MAX_ROWS = 48
MAX_STEP_TOKENS = 512
VOCAB_SIZE = 264

Answers = dict[str, tuple[int, float]]
"""Token and its logprob, by row."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return load_gguf(write_gguf(path, TinyLlama(num_layers=6, max_model_len=512), matrix_type="Q4_0"))


class Steps:
    """An executor, and a step of given shapes at a time: what `context_len` tells is computed before.

    The token at a position of the i-th row is the same in all steps, so whole blocks of its context are computed once.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_threads: int,
        *,
        all_take_part: bool = False,
        max_rows: int = MAX_ROWS,
        blocks_per_row: int = BLOCKS_PER_ROW,
        variant: str = "",
    ) -> None:
        """`all_take_part`: every thread, also where a step of a small model has work for a few."""
        self._blocks_per_row = blocks_per_row
        self.executor = NativeExecutor(
            model,
            architectures.describe(model.spec),
            num_blocks=1 + max_rows * blocks_per_row,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            max_step_tokens=MAX_STEP_TOKENS,
            max_model_len=blocks_per_row * BLOCK_SIZE,
            num_threads=num_threads,
            variant=variant,
            poison=True,
        )
        if all_take_part:
            self.executor._engine.use_all_members()
        self._ids: Iterator[int] = itertools.count()
        self._num_kept: dict[int, int] = {}  # tokens in whole blocks of the i-th row's context

    def run(self, *shapes: tuple[int, int]) -> Answers:
        """One step of rows of (context_len, query_len), after steps that compute what they see."""
        names = [f"{next(self._ids)}" for _ in shapes]
        for i, (name, (context_len, query_len)) in enumerate(zip(names, shapes, strict=True)):
            first = 1 + i * self._blocks_per_row
            blocks = tuple(range(first, first + -(-(context_len + query_len) // BLOCK_SIZE)))
            tokens = tuple(10 + (7 * i + 3 * t + t * t // 11) % 250 for t in range(context_len + query_len))
            sampling = SamplingParams(temperature=0.0, logprobs=0)
            in_whole_blocks = context_len // BLOCK_SIZE * BLOCK_SIZE
            kept = min(self._num_kept.get(i, 0), in_whole_blocks)
            self._num_kept[i] = in_whole_blocks
            admit = AdmitRow(name, tokens, len(tokens), blocks, kept, sampling)
            self._step([admit], [])
            for begin in range(kept, context_len, MAX_STEP_TOKENS):
                self._step([], [RowPlan(name, begin, min(MAX_STEP_TOKENS, context_len - begin), (), False)])
        rows = [RowPlan(name, context, query, (), True) for name, (context, query) in zip(names, shapes, strict=True)]
        answers = self._step([], rows)
        self.num_strands, self.num_members = self.executor.num_strands, self.executor.num_members
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
    num_tokens = sum(query_len for _, query_len in SHAPES[name])
    pays = num_tokens >= 2 * 128 or not variant.startswith("amx")  # tiles widen all weights again for each strand
    for num_threads in (2, 3, 5):
        steps = Steps(model, num_threads, variant=variant)
        for _ in range(5 if variant in emulated_variants() else 10):
            assert steps.run(*SHAPES[name]) == expected
            assert pays == (steps.num_strands > 1)
            assert steps.num_strands <= num_threads
        steps.executor.close()


SHORT_SHAPES = {
    "decodes and a prompt": [*[(3 + 9 * i % 40, 1) for i in range(31)], (0, 150)],
    "a few tokens that see much": [(290, 30)],
    "prompts": [(0, 61), (17, 90), (0, 23), (60, 77)],
}
"""Shapes like those above with short contexts, since portable kernels take about a millisecond for a token."""


@pytest.mark.parametrize("name", SHORT_SHAPES)
def test_an_answer_of_portable_kernels_does_not_either(tmp_path: Path, name: str) -> None:
    """ThreadSanitizer sees all that these read and write (`make test-races`); masked stores, as of AVX-512, it does not see."""
    shape = TinyLlama(num_layers=3, max_model_len=512)
    model = load_gguf(write_gguf(tmp_path / "tiny.gguf", shape, matrix_type="Q4_0"))
    expected = Steps(model, 1, variant="portable").run(*SHORT_SHAPES[name])
    for num_threads in (2, 5):
        steps = Steps(model, num_threads, variant="portable")
        for _ in range(3):
            assert steps.run(*SHORT_SHAPES[name]) == expected
        assert steps.num_strands > 1
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
    steps = Steps(model, num_threads, variant=WITHOUT_TILES[0])
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
        steps = Steps(model, num_threads, variant=WITHOUT_TILES[0])  # products by tiles fetch nothing
        steps.run(*[(context, 1) for context in contexts])
        assert steps.num_strands == num_threads
        for layer in range(6):
            fetched = [block for strand in range(num_threads) for block in steps.executor.fetched_blocks(strand, layer)]
            assert fetched == list(itertools.chain(*blocks_of_row))
        steps.executor.close()


def test_nothing_is_fetched_where_it_does_not_pay(model: LoadedModel) -> None:
    """Products of few rows wait for memory themselves, and of threads that share a strand nobody knows who reads what."""
    for num_threads, num_rows in ((1, 11), (2, 15), (4, 30)):
        steps = Steps(model, num_threads, variant=WITHOUT_TILES[0])
        steps.run(*[(40, 1)] * num_rows)
        assert not any(steps.executor.fetched_blocks(strand, 3) for strand in range(steps.num_strands))
        steps.executor.close()


def test_a_layer_that_no_cache_holds_is_read_once_for_a_block_of_rows(tmp_path: Path) -> None:
    """However many threads there are: all of it lies between the first strand and the last."""
    shape = TinyLlama(num_layers=3, hidden_size=512, intermediate_size=4096, max_model_len=512)
    large = load_gguf(write_gguf(tmp_path / "large.gguf", shape, matrix_type="F16"))
    for num_threads in (2, 4):
        steps = Steps(large, num_threads, variant=WITHOUT_TILES[0])
        for num_tokens, expected in ((48, 1), (188, 1), (200, 2)):
            steps.run(*[(0, num_tokens // 4)] * 4)
            assert steps.num_strands == expected
        steps.executor.close()


def test_layers_of_samples_alone_make_no_other_layer_small() -> None:
    """A layer of 12 MiB stays in one strand, also if a later one only reads its keys and values."""
    probe = Probe(24, 16, variant=WITHOUT_TILES[0])
    x, narrow = (probe.input(np.zeros((24, width), np.float32)) for width in (2048, 16))
    wide = probe.activation(x, 2048, is_quantised=False)
    probe.row(RowOpKind.KV_WRITE, x=narrow, y=narrow, n=0)
    probe.flush()
    matrix = probe.engine.add_matrix(SourceFormat.BF16, 3072, 2048, np.zeros((3072, 4096), np.uint8))
    probe.engine.add_linear([(matrix, wide, probe.buffer(3072), -1, -1)], samples=False)
    gathered, out = (probe.engine.add_buffer(16, per_sample=True) for _ in range(2))
    probe.engine.add_rows([RowOp(RowOpKind.GATHER, x=narrow, out=gathered)], samples=True)
    for _ in range(2):
        probe.engine.add_attention(gathered, out, 0, 1, 1.0, 0, 0.0, samples=True)
    probe.engine.set_logits(out)
    probe.run(range(24), query_lens=[24], block_tables=np.array([[1, 2]], np.int32), samples=[23])
    assert probe.engine.num_strands == 1


def test_a_row_that_costs_as_much_as_all_others_leaves_the_step_whole(tmp_path: Path) -> None:
    """Its thread would work on alone when all others are done, and nobody could take a part of its attention."""
    shape = TinyLlama(num_heads=16, max_model_len=512)
    steps = Steps(load_gguf(write_gguf(tmp_path / "tiny.gguf", shape, matrix_type="Q4_0")), 2, variant=WITHOUT_TILES[0])
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
        steps = Steps(model, num_threads, variant=WITHOUT_TILES[0])
        for name, shapes in SHAPES.items():
            for _ in range(repeats):
                answers = steps.run(*shapes)
                assert answers == alone.setdefault(name, answers), name
                assert steps.num_strands == 1 or len(shapes) > 1
                assert steps.num_strands > 1 or num_threads == 1 or name != "decodes"
        steps.executor.close()


MANY_THREADS = [3, 4, 7, 8, 16, 32, 64] if "PENSTOCK_ALL_THREADS" in os.environ else [3, 64]
"""On whatever cores there are: what the threads compute must not depend on who gets a core when. All take half a minute."""
WIDE_SHAPES = {
    "1 row": [(40, 1)],
    "2 rows": [(40, 1), (130, 1)],
    "8 rows": DECODES[:8],
    "32 rows": [*DECODES, (3, 1)],
    "a short prompt": [(0, 7)],
    "a prompt": [(0, 330)],
    "a full step": [(0, 512)],
    "prompts beside rows": [*DECODES[:9], (30, 201), (0, 64), *DECODES[10:14]],
}
LONG_SHAPES = {
    "a row after much": [(2001, 1)],  # whose attention is split into segments of 256
    "tokens after much": [(1500, 37)],
    "rows after much and little": [(2001, 1), (9, 1), (1200, 3)],
}
LONG = {"max_rows": 3, "blocks_per_row": 128}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Two layers of many panels, so that there are tasks for many threads."""
    shape = TinyLlama(
        num_layers=2, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, max_model_len=4096
    )
    return load_gguf(write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", shape, matrix_type="Q4_0"))


@pytest.fixture(scope="module")
def alone(wide: LoadedModel) -> dict[str, Answers]:
    """The answers of one thread."""
    steps, long_steps = Steps(wide, 1), Steps(wide, 1, **LONG)
    answers = {name: steps.run(*shapes) for name, shapes in WIDE_SHAPES.items()}
    return answers | {name: long_steps.run(*shapes) for name, shapes in LONG_SHAPES.items()}


@pytest.mark.parametrize("num_threads", MANY_THREADS)
def test_many_threads_answer_as_one_does(wide: LoadedModel, alone: dict[str, Answers], num_threads: int) -> None:
    """Whether all take part, which brings the most trouble, or as many as pay."""
    for all_take_part in (True, False):
        for cases, room in ((WIDE_SHAPES, {}), (LONG_SHAPES, LONG)):
            steps = Steps(wide, num_threads, all_take_part=all_take_part, **room)
            for name, shapes in cases.items():
                assert steps.run(*shapes) == alone[name], (name, all_take_part)
                assert num_threads == steps.num_members or not all_take_part
                assert max(2, steps.num_strands) <= steps.num_members <= num_threads
            steps.executor.close()


def sleeps_of_threads() -> dict[int, tuple[bool, int]]:
    """By thread of this process: whether it sleeps, and how often it has gone to sleep."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        told = dict(line.split(":", 1) for line in text.splitlines())
        found[int(task.name)] = told["State"].split()[0] == "S", int(told["voluntary_ctxt_switches"])
    return found


def test_threads_that_take_no_part_in_a_step_sleep_on(wide: LoadedModel) -> None:
    """But for those of the group with the last one that does, and two that see to pages."""
    others = set(sleeps_of_threads())
    steps = Steps(wide, 64)
    give_up = time.monotonic() + 30.0
    while not all(is_asleep for thread, (is_asleep, _) in sleeps_of_threads().items() if thread not in others):
        assert time.monotonic() < give_up
    before = sleeps_of_threads()
    for _ in range(20):
        steps.run((0, 1))
    after = sleeps_of_threads()
    woken = [thread for thread in after if thread not in others and after[thread] != before.get(thread)]
    assert steps.num_members < 32
    assert len(woken) <= 2 * steps.num_members + 2
    steps.executor.close()


PLANS = [
    # step, threads; threads that take part, strands, tasks from one attention to the next
    ("1 row", 1, 1, 1, [3, 1, 2, 1, 2, 1, 2, 1, 4, 1]),
    ("8 rows", 1, 1, 1, [8, 2, 6, 2, 6, 2, 6, 2, 8, 2]),
    ("32 rows", 1, 1, 1, [8, 8, 6, 8, 6, 8, 6, 8, 8, 8]),
    ("a full step", 1, 1, 1, [8, 7, 6, 7, 6, 7, 6, 7, 18, 7]),
    ("1 row", 2, 2, 1, [3, 1, 4, 1, 4, 1, 4, 1, 5, 1]),
    ("8 rows", 2, 2, 1, [12, 2, 18, 2, 12, 2, 18, 2, 15, 2]),
    ("32 rows", 2, 2, 2, [8, 4, 6, 4, 6, 4, 6, 4, 8, 4]),
    ("a full step", 2, 2, 2, [8, 7, 4, 7, 4, 7, 4, 7, 12, 7]),
    # Beyond two: products of few panels are divided by rows as well, and of what is computed quickly a few threads do all.
    ("8 rows", 8, 8, 1, [24, 8, 36, 8, 48, 8, 36, 8, 30, 8]),
    ("1 row", 64, 12, 1, [3, 1, 36, 1, 24, 1, 36, 1, 30, 1]),
    ("a full step", 64, 64, 16, [9, 12, 18, 12, 24, 12, 18, 12, 30, 12]),
]


@pytest.mark.skipif("avx512" not in usable_variants(), reason="each instruction set has its own tiles")
@pytest.mark.parametrize(("name", "num_threads", "members", "strands", "tasks"), PLANS)
def test_a_layer_is_divided_as_it_was_measured(
    wide: LoadedModel, name: str, num_threads: int, members: int, strands: int, tasks: list[int]
) -> None:
    """With one thread and with two, another plan is worth another measurement (`benchmarks/step.py`)."""
    steps = Steps(wide, num_threads, variant="avx512")
    steps.run(*WIDE_SHAPES[name])
    own = [stage for stage in steps.executor.stages if stage.strand == 0]
    first, after = (i for i, stage in enumerate(own) if stage.instruction == "attention")
    assert [stage.num_tasks for stage in own[first:after]] == tasks
    assert (steps.num_members, steps.num_strands) == (members, strands)
    steps.executor.close()
