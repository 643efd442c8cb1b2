"""Layers with a state in blocks of its own, in both backends: where it is read, kept and saved, and what changes no bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native import footprint
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models.program import (
    Attention,
    CausalConv,
    Embed,
    GatherRows,
    KvShape,
    KvWrite,
    Linear,
    LinearAttention,
    Logits,
    Op,
    PagedState,
    Program,
)
from penstock.models.weights import LoadedModel, WeightFormat, WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, PaddingId, RowPlan, StateSave, StepPlan
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams
from support.native_variants import VARIANTS

VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 40, 16, 2000, 96
NAN_TOKEN = VOCAB_SIZE - 1
TOKENS = tuple(3 + 11 * i % 30 for i in range(MAX_LEN))
F32 = NDArray[np.float32]
Executor = NativeExecutor | ReferenceExecutor


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of linear attention behind a convolution."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    has_gates: bool = True
    """The delta rule; else Mamba-2, with a skip, bounds of the step, and a bias in the convolution."""
    is_tiled: bool = False

    @property
    def keys_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def width(self) -> int:
        return 2 * self.keys_width + self.num_heads * self.value_dim


SHAPES = {
    "lines of 16": Shape(1, 3, 12, 20),
    "lines of 48": Shape(2, 4, 7, 45, taps=2),
    "lines of 64": Shape(2, 2, 16, 128),
    "lines of 64, not full": Shape(1, 2, 5, 120, taps=8),
    "no gates": Shape(1, 3, 16, 33, has_gates=False),
    "tiled heads": Shape(2, 6, 9, 16, is_tiled=True),
}


def layer(shape: Shape, i: int, rng: np.random.Generator) -> tuple[list[Op], dict[str, int], dict[str, F32]]:
    heads, inner = shape.num_heads, shape.num_heads * shape.value_dim
    names = ("qkv", "mixed", "steps", "gates", "out")
    qkv, mixed, steps, gates, out = (f"{i}.{name}" for name in names)
    widths = dict(zip((qkv, mixed, steps, gates, out), (shape.width, shape.width, heads, heads, inner), strict=True))
    has_gates = shape.has_gates

    def inputs(name: str, weight: str) -> Op:
        """In the first layer numbers that every backend computes alike."""
        return Linear(name, "hidden", weight) if i else Embed(name, weight)

    def matrix(width: int) -> NDArray[np.float64]:
        values = rng.standard_normal((width, 32)) / 4 if i else rng.standard_normal((VOCAB_SIZE, width))
        if not i:
            values[NAN_TOKEN] = np.nan
        return values

    ops: list[Op] = [
        *(inputs(name, f"{name}.w") for name in (qkv, steps, *([gates] if has_gates else []))),
        CausalConv(mixed, qkv, 2 * i, f"{i}.taps", shape.taps, None if has_gates else f"{i}.conv_bias"),
        LinearAttention(
            out,
            mixed,
            2 * i + 1,
            steps,
            f"{i}.step_bias",
            f"{i}.decay",
            heads,
            shape.num_key_heads,
            shape.key_dim,
            shape.value_dim,
            q_at=0,
            k_at=shape.keys_width,
            v_at=2 * shape.keys_width,
            scale=shape.key_dim**-0.5,
            gates=gates if has_gates else None,
            skip=None if has_gates else f"{i}.skip",
            is_normalised=has_gates,
            is_tiled=shape.is_tiled,
            min_step=0.0 if has_gates else 0.2,
            max_step=math.inf if has_gates else 0.9,
        ),
        Linear("hidden", out, f"{i}.down", residual="hidden"),
    ]
    weights = {
        f"{qkv}.w": matrix(shape.width),
        f"{steps}.w": matrix(heads),
        f"{gates}.w": matrix(heads),
        f"{i}.taps": rng.standard_normal((shape.width, shape.taps)) / 2,
        f"{i}.conv_bias": rng.standard_normal(shape.width),
        f"{i}.step_bias": rng.standard_normal(heads),
        f"{i}.decay": -rng.uniform(0.01, 1, heads),
        f"{i}.skip": rng.standard_normal(heads),
        f"{i}.down": rng.standard_normal((32, inner)) / inner**0.5 / (1 if has_gates else 64),
    }
    return ops, widths, weights


class Case:
    """A program of two such layers with attention between them, and its weights."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(5)
        (first, widths, weights), (second, more_widths, more_weights) = (layer(shape, i, rng) for i in range(2))
        attention: list[Op] = [
            *(Linear(name, "hidden", f"{name}.w") for name in "qkv"),
            KvWrite(0, "k", "v"),
            Attention("attended", "q", 0, 1, 1, 16, 0.25),
            Linear("hidden", "attended", "o.w", residual="hidden"),
        ]
        ending: list[Op] = [GatherRows("last", "hidden"), Logits("logits", "last", "output")]
        widths |= more_widths | {"hidden": 32, "last": 32, "q": 16, "k": 16, "v": 16, "attended": 16, "logits": VOCAB_SIZE}
        weights |= more_weights | {f"{name}.w": rng.standard_normal((16, 32)) / 4 for name in "qkv"}
        embed = rng.standard_normal((VOCAB_SIZE, 32))
        embed[NAN_TOKEN] = np.nan
        weights |= {"embed": embed, "o.w": rng.standard_normal((32, 16)), "output": rng.standard_normal((VOCAB_SIZE, 32)) / 8}
        ops = (Embed("hidden", "embed"), *first, *attention, *second, *ending)
        self.program = Program(ops, tuple(widths.items()), (KvShape(1, 16),), VOCAB_SIZE)
        tensors = {
            name: WeightTensor(name, *np.atleast_2d(values).shape, WeightFormat.F32, np.atleast_2d(values).astype(np.float32))
            for name, values in weights.items()
        }
        self.model = cast("LoadedModel", SimpleNamespace(weights=tensors))

    def executor(self, backend: str, **options: Any) -> Executor:
        sizes = {
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_rows": 8,
            "max_step_tokens": 2 * MAX_LEN,
            "max_model_len": MAX_LEN,
            "kv_dtype": KvDtype.BF16,
            "poison": True,
        }
        if backend == "reference":
            return ReferenceExecutor(self.model, self.program, **sizes)
        return NativeExecutor(self.model, self.program, variant=backend, **{"num_threads": 2, **sizes, **options})


CASES = {name: Case(shape) for name, shape in SHAPES.items()}
BACKENDS = ["reference", *VARIANTS]
WITH_ALL = pytest.mark.parametrize("backend", BACKENDS)
WITH_SHAPES = pytest.mark.parametrize("shape", SHAPES)


@dataclass(frozen=True, slots=True)
class Row:
    """A row that is admitted: its blocks, and those of its state."""

    name: str
    blocks: tuple[int, ...]
    state: tuple[int, ...]


class Steps:
    """Steps of one executor, with blocks that nobody else has."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._ids = itertools.count()
        self._blocks = itertools.count(1)
        self._computed: dict[str, int] = {}

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._blocks, count))

    def take_state(self) -> tuple[int, ...]:
        return self.take(self.executor.capacity.num_state_blocks)

    def admit(
        self,
        end: int,
        *,
        after: Row | None = None,
        computed: int = 0,
        source: tuple[int, ...] = (),
        tokens: Sequence[int] = TOKENS,
    ) -> tuple[Row, AdmitRow]:
        """A row of the first `end` tokens; with `after` it has a copy of that row's keys and values up to `computed`."""
        row = Row(f"{next(self._ids)}", self.take(MAX_LEN // BLOCK_SIZE), self.take_state())
        if after is not None:
            self.executor.copy_blocks(list(zip(after.blocks, row.blocks, strict=True)))
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        admitted = AdmitRow(row.name, tuple(tokens[:end]), end, row.blocks, computed, sampling)
        self._computed[row.name] = computed
        return row, replace(admitted, state_block_ids=row.state, state_source=source)

    def plan(
        self, admits: Sequence[AdmitRow], rows: Sequence[tuple[Row, int, bool]], saves: Sequence[StateSave] = ()
    ) -> StepPlan:
        """A step of some rows, each with its number of tokens and whether it samples."""
        planned = []
        for row, count, samples in rows:
            planned.append(RowPlan(row.name, self._computed[row.name], count, (), samples))
            self._computed[row.name] += count
        return StepPlan(next(self._ids), 0, tuple(admits), tuple(planned), (), saves=tuple(saves))

    def run(self, plan: StepPlan) -> StepResult:
        return self.executor.collect(self.executor.submit(plan))

    def release(self, *names: str) -> None:
        self.run(StepPlan(next(self._ids), 0, (), (), names))

    def answer(
        self,
        end: int,
        *chunks: int,
        after: Row | None = None,
        computed: int = 0,
        source: tuple[int, ...] = (),
        saves: Sequence[tuple[int, tuple[int, ...]]] = (),
    ) -> tuple[float, bytes, Row]:
        """The sampled token's log-probability and the state after some chunks of tokens and the rest, of a row alone."""
        row, admitted = self.admit(end, after=after, computed=computed, source=source)
        sizes = (*chunks, end - computed - sum(chunks))
        admits, begin = [admitted], computed
        for i, size in enumerate(sizes):
            wanted = [StateSave(row.name, at, blocks) for at, blocks in saves if begin < at <= begin + size]
            result = self.run(self.plan(admits, [(row, size, i + 1 == len(sizes))], wanted))
            admits, begin = [], begin + size
        self.release(row.name)
        return result.logprobs[row.name][0].logprob, self.content(row.state), row

    def content(self, block_ids: Sequence[int]) -> bytes:
        contents = [bytearray(self.executor.block_bytes) for _ in block_ids]
        self.executor.read_blocks(block_ids, [memoryview(content) for content in contents])
        return b"".join(contents)


def matrices_of(content: bytes, state: PagedState, num_blocks: int) -> list[F32]:
    """The state as the native backend lays it out: lines of panels, whole ones in each block (native/recurrence.h)."""
    line = footprint.state_line(state)
    blocks = np.frombuffer(content, np.uint8).reshape(num_blocks, -1)
    lines = blocks[:, : blocks.shape[1] // (4 * line) * 4 * line].reshape(-1, 4 * line).view(np.float32)
    found, at = [], 0
    for count, rows, columns in state.matrices:
        panels = -(-columns // line)
        part = lines[at : at + count * panels * rows].reshape(count, panels, rows, line)
        found.append(part.transpose(0, 2, 1, 3).reshape(count, rows, -1)[..., :columns])
        at += count * panels * rows
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@WITH_SHAPES
def test_logits_and_state_are_those_of_the_reference(shape: str, variant: str) -> None:
    case = CASES[shape]
    reference, native = case.executor("reference"), case.executor(variant)
    found, expected = (executor.forward_logits(TOKENS) for executor in (native, reference))
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    state = case.program.paged_state
    assert state is not None
    num_blocks = native.capacity.num_state_blocks
    steps = Steps(native)
    _, content, _ = steps.answer(30)
    other = Steps(reference)
    _, _, row = other.answer(30)
    numbers = other.executor._read_state(row.state)
    for index, (own, wanted) in enumerate(zip(matrices_of(content, state, num_blocks), numbers, strict=True)):
        tolerance = (1e-5 if index < 2 else 0.05) * np.abs(wanted).max()  # products round their inputs
        np.testing.assert_allclose(own, wanted, atol=tolerance, err_msg=f"operation {index}")


@WITH_ALL
@WITH_SHAPES
def test_chunks_change_no_bit(shape: str, backend: str) -> None:
    steps = Steps(CASES[shape].executor(backend))
    whole = steps.answer(40)[:2]
    assert len({steps.answer(end)[0] for end in (38, 39, 40)}) == 3
    for chunks in ((1,) * 39, (17,), (1, 2, 3, 30), (38, 1), (20, 1, 1, 1)):
        assert steps.answer(40, *chunks)[:2] == whole, chunks


@WITH_ALL
@WITH_SHAPES
def test_a_row_goes_on_from_what_was_saved(shape: str, backend: str) -> None:
    steps = Steps(CASES[shape].executor(backend))
    expected = steps.answer(40)[:2]
    inside, twice, at_end = steps.take_state(), steps.take_state(), steps.take_state()
    logprob, content, row = steps.answer(33, saves=[(3, steps.take_state()), (20, inside), (20, twice), (33, at_end)])
    assert (logprob, content) == steps.answer(33)[:2], "saving changes nothing"
    assert steps.content(inside) == steps.content(twice) == steps.answer(20)[1]
    assert steps.content(at_end) == content
    for _ in range(2):
        assert steps.answer(40, after=row, computed=20, source=inside)[:2] == expected
        assert steps.answer(40, 5, 1, after=row, computed=33, source=at_end)[:2] == expected
    again, admitted = steps.admit(40, after=row, computed=33)
    steps.executor.copy_blocks(list(zip(at_end, again.state, strict=True)))
    result = steps.run(steps.plan([replace(admitted, state_source=again.state)], [(again, 7, True)]))
    assert (result.logprobs[again.name][0].logprob, steps.content(again.state)) == expected, (
        "a state may be read where it is kept"
    )


@WITH_ALL
def test_rows_of_a_step_do_not_see_each_other(backend: str) -> None:
    for shape in SHAPES:
        steps = Steps(CASES[shape].executor(backend))
        ends = (40, 1, 17, 90, 23)
        alone = {end: steps.answer(end)[:2] for end in ends}
        saved = steps.take_state()
        _, _, first = steps.answer(22, saves=[(22, saved)])
        made = [steps.admit(end) for end in ends[:-1]]
        made.append(steps.admit(23, after=first, computed=22, source=saved))
        bad = steps.admit(9, tokens=(NAN_TOKEN,) * 9)
        mid = steps.take_state()
        rows = [(row, end, True) for (row, _), end in zip(made, ends, strict=True)]
        rows[-1] = (made[-1][0], 1, True)
        plan = steps.plan(
            [admitted for _, admitted in (bad, *made)],
            [(bad[0], 9, True), *rows],
            [StateSave(made[3][0].name, 17, mid), StateSave(bad[0].name, 9, steps.take_state())],
        )
        result = steps.run(plan)
        assert set(result.failures) == {bad[0].name}
        for (row, _), end in zip(made, ends, strict=True):
            assert (result.logprobs[row.name][0].logprob, steps.content(row.state)) == alone[end]
        assert steps.content(mid) == alone[17][1]


@WITH_ALL
def test_padding_keeps_nothing(backend: str) -> None:
    steps = Steps(CASES["lines of 16"].executor(backend))
    expected = steps.answer(5)[:2]
    row, admitted = steps.admit(5)
    padding = [PaddingId("a"), PaddingId("b")]
    sampling = SamplingParams(temperature=0.0)
    admits = [AdmitRow(name, TOKENS[:4], 4, (0,), 0, sampling) for name in padding]
    before = steps.content(range(1, NUM_BLOCKS))
    rows = (RowPlan("a", 0, 0, (), False),)[:0]
    rows += tuple(RowPlan(name, 0, 3, (), False) for name in padding)
    plan = replace(steps.plan([*admits, admitted], [(row, 5, True)]))
    plan.rows = (rows[0], *plan.rows, rows[1])
    result = steps.run(plan)
    assert (result.logprobs[row.name][0].logprob, steps.content(row.state)) == expected
    after = steps.content(range(1, NUM_BLOCKS))
    size, own = steps.executor.block_bytes, {*row.state, *row.blocks}
    for block in range(1, NUM_BLOCKS):
        part = slice((block - 1) * size, block * size)
        assert block in own or before[part] == after[part]
    steps.run(StepPlan(99, 0, (), tuple(RowPlan(name, 3, 1, (), True) for name in padding), ()))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_change_no_bit(num_threads: int) -> None:
    for shape in SHAPES:
        wanted = [Steps(CASES[shape].executor("")).answer(40, *chunks)[:2] for chunks in ((), (39,))]
        executor = CASES[shape].executor("", num_threads=num_threads)
        assert isinstance(executor, NativeExecutor)
        executor._engine.use_all_members()
        steps = Steps(executor)
        assert [steps.answer(40, *chunks)[:2] for chunks in ((), (39,))] == wanted
        names = {stage.instruction for stage in executor.stages}
        assert {"convolution", "linear attention"} <= names


@WITH_SHAPES
def test_variants_with_vectors_agree_in_every_bit(shape: str) -> None:
    """Compare the first layer, before the products, whose sums differ."""
    vectors = [variant for variant in VARIANTS if variant != "portable"]
    case = CASES[shape]
    state = case.program.paged_state
    assert state is not None
    found = {variant: Steps(case.executor(variant)) for variant in vectors}
    contents = {
        variant: matrices_of(steps.answer(37)[1], state, steps.executor.capacity.num_state_blocks)
        for variant, steps in found.items()
    }
    assert len({tuple(matrix.tobytes() for matrix in matrices[:2]) for matrices in contents.values()}) == 1


Change = Callable[[AdmitRow, Steps], AdmitRow]
WRONG: dict[str, tuple[Change, str]] = {
    "no blocks": (lambda row, _: replace(row, state_block_ids=()), "too few or too many blocks for its state"),
    "too few": (
        lambda row, _: replace(row, state_block_ids=row.state_block_ids[1:]),
        "too few or too many blocks for its state",
    ),
    "the null block": (
        lambda row, _: replace(row, state_block_ids=(0, *row.state_block_ids[1:])),
        "does not exist, or the null",
    ),
    "no such block": (lambda row, _: replace(row, state_block_ids=(NUM_BLOCKS, *row.state_block_ids[1:])), "does not exist"),
    "a short source": (lambda row, _: replace(row, state_source=row.state_block_ids[1:]), "from too few or too many blocks"),
    "a wrong source": (lambda row, _: replace(row, state_source=(-1, *row.state_block_ids[1:])), "does not exist"),
    "no source": (lambda row, _: replace(row, num_computed_tokens=3), "goes on without a state"),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_with_wrong_blocks_are_refused(what: str) -> None:
    change, complaint = WRONG[what]
    steps = Steps(CASES["lines of 16"].executor(""))
    row, admitted = steps.admit(9)
    with pytest.raises(ValueError, match=f"request '{row.name}' .*{complaint}"):
        steps.run(steps.plan([change(admitted, steps)], [(row, 9, True)]))


@pytest.mark.parametrize(
    ("position", "name", "drops", "complaint"),
    [
        (10, "", 0, "at a position that the step does not compute"),
        (0, "", 0, "at a position that the step does not compute"),
        (5, "", 1, "too few or too many blocks"),
        (5, "other", 0, "never admitted"),
        (2, "", 0, "another order"),
    ],
)
def test_wrong_saves_are_refused(position: int, name: str, drops: int, complaint: str) -> None:
    steps = Steps(CASES["lines of 16"].executor(""))
    row, admitted = steps.admit(9)
    saves = [StateSave(row.name, 4, steps.take_state()), StateSave(name or row.name, position, steps.take_state()[drops:])]
    with pytest.raises(ValueError, match=complaint):
        steps.run(steps.plan([admitted], [(row, 9, True)], saves))


def test_memory_is_planned_as_it_is_used() -> None:
    for case in CASES.values():
        executor, state = case.executor(""), case.program.paged_state
        assert executor.capacity.num_state_blocks == footprint.num_state_blocks(state, executor.block_bytes)
    assert footprint.num_state_blocks(None, 0) == 0
    with pytest.raises(ModelError, match=r"a block of 100 bytes has no room for 256 bytes .* Set a larger --block-size"):
        footprint.num_state_blocks(PagedState(((2, 128, 128),)), 100)


def test_a_line_wastes_little() -> None:
    assert [footprint.state_line(PagedState(((1, 4, columns),))) for columns in (64, 8192, 80, 96, 20, 45)] == [
        64,
        64,
        16,
        48,
        32,
        48,
    ]


def test_a_convolution_that_reads_too_much_is_refused() -> None:
    with pytest.raises(ModelError, match="can't compute CausalConv over more than 8 positions"):
        Case(replace(SHAPES["lines of 16"], taps=9)).executor("")
