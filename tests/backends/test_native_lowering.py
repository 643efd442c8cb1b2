"""Operations that the lowering makes one instruction: only operations that may run in any order, as the team runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from penstock.backends.native._native import Engine, RowOp, RowOpKind, SourceFormat
from penstock.backends.native.lowering import lower
from penstock.models.formats import held_bytes
from penstock.models.program import (
    Act,
    Add,
    Attention,
    Embed,
    EmbedPositions,
    Experts,
    GatedActivation,
    GatherRows,
    KvShape,
    KvWrite,
    Linear,
    Logits,
    Op,
    Program,
    RMSNorm,
    Rope,
    ShortConv,
    Softcap,
)
from penstock.models.weights import BlockScales, WeightFormat, WeightTensor
from penstock.types.errors import ModelError

NAMES = ("x", "y", "z", "h")
MATRIX = WeightTensor("w", 32, 32, WeightFormat.BF16, np.zeros((32, 32), np.uint16))


class Recorder:
    """An engine that only remembers which linear operations came together."""

    has_tiles = False

    def __init__(self) -> None:
        self.linears: list[int] = []
        self.num_gated = 0
        self.sites: list[int] = []

    def add_linear(
        self, ops: Sequence[tuple[int, ...]], on_samples: bool, *, sites: Sequence[int] = (), has_gelu: bool = False
    ) -> None:
        self.linears.append(len(ops))
        self.sites += sites

    def add_gated(self, *ids: int) -> None:
        self.num_gated += 1
        self.sites += (site for site in ids[6:] if site >= 0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


def lowered(*ops: Op, recorder: Recorder | None = None, has_adapters: bool = False) -> Recorder:
    recorder = recorder or Recorder()
    program = Program(
        kv_shapes=(KvShape(1, 16),),
        vocab_size=32,
        buffers=tuple((name, 32) for name in NAMES),
        ops=(*(Embed(name, "w") for name in NAMES), *ops),
    )
    lower(program, {"w": MATRIX}, cast(Engine, recorder), num_positions=64, has_adapters=has_adapters)
    return recorder


def test_linears_that_read_the_same_run_together() -> None:
    assert lowered(Linear("y", "x", "w"), Linear("z", "x", "w", residual="h")).linears == [2]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Linear("y", "x", "w"), Linear("z", "x", "w", residual="y")),
        (Linear("y", "x", "w", residual="z"), Linear("z", "x", "w")),
        (Linear("y", "x", "w"), Linear("y", "x", "w", residual="h")),
        (Linear("x", "x", "w"), Linear("y", "x", "w")),
        (Linear("y", "x", "w"), Linear("x", "x", "w")),
    ],
    ids=["reads what was written", "writes what was read", "writes the same", "reads the new input", "writes the input"],
)
def test_a_linear_that_depends_on_the_one_before_waits_for_it(first: Linear, second: Linear) -> None:
    assert lowered(first, second).linears == [1, 1]


def test_gate_up_and_activation_are_one() -> None:
    assert lowered(Linear("y", "x", "w"), Linear("z", "x", "w"), GatedActivation("y", "y", "z", "silu")).num_gated == 1


def test_an_activation_that_products_lack_runs_on_their_rows() -> None:
    found = lowered(Linear("y", "x", "w"), Linear("z", "x", "w"), GatedActivation("y", "y", "z", "relu2"))
    assert (found.num_gated, found.linears) == (0, [2])


@pytest.mark.parametrize(("gate", "up"), [("x", "y"), ("y", "y")], ids=["gate replaces the input", "up replaces the gate"])
def test_a_gate_that_the_up_projection_needs_done_is_not_one_with_it(gate: str, up: str) -> None:
    found = lowered(Linear(gate, "x", "w"), Linear(up, "x", "w"), GatedActivation("z", gate, up, "silu"))
    assert (found.num_gated, found.linears) == (0, [1, 1])


@pytest.mark.parametrize(
    ("ops", "has_apart"),
    [
        ([Linear("y", "x", "v"), Act("z", "y", "gelu"), Linear("x", "z", "u", residual="x")], True),
        ([Linear("y", "x", "v"), GatedActivation("z", "y", "x", "silu"), Linear("x", "z", "u")], True),
        ([Linear("y", "x", "v"), Act("z", "y", "gelu"), Linear("x", "z", "u"), Linear("y", "z", "v")], False),
        ([Act("y", "x", "gelu"), Linear("z", "y", "u"), Linear("y", "h", "u")], False),
        ([Act("y", "x", "gelu"), Linear("y", "h", "v"), Linear("z", "y", "u")], False),
    ],
    ids=["after a GELU", "after a gate", "of two readers", "also elsewhere", "overwritten before"],
)
def test_the_largest_columns_behind_an_activation_stay_floats(ops: list[Op], has_apart: bool) -> None:
    """Which columns round the input is said by the matrix, so no other may multiply the same rounded copy."""
    packed: dict[int, list[int]] = {}

    class Packing(Recorder):
        def add_matrix(self, fmt: SourceFormat, rows: int, cols: int, by_row: bool = False, apart: Sequence[int] = ()) -> int:
            packed[rows] = list(apart)
            return rows

    values = np.random.default_rng(1).standard_normal((48, 32)).astype(np.float32)
    values[7, [4, 9]], values[20, [30, 2]] = [9, -8], [-11, 7]
    weights = {
        "w": MATRIX,
        "v": WeightTensor("v", 32, 32, WeightFormat.F32, values[:32]),
        "u": WeightTensor("u", 48, 32, WeightFormat.F32, values),
    }
    program = Program(
        kv_shapes=(KvShape(1, 16),),
        vocab_size=32,
        buffers=tuple((name, 48 if name == "x" else 32) for name in NAMES),
        ops=(*(Embed(name, "w") for name in NAMES), *ops),
    )
    lower(program, weights, cast(Engine, Packing()), num_positions=64, rounds_floats=True)
    assert packed[48] == ([2, 4, 9, 30] if has_apart else [])


class WhereEmbedded(Recorder):
    """Which matrices were packed, and which are only looked up in their file."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[str] = []

    def add_matrix(self, *args: object) -> int:
        self.added.append("matrix")
        return 0

    def add_table(self, *args: object) -> int:
        self.added.append("table")
        return 0


@pytest.mark.parametrize(("output", "added"), [("w", ["matrix"]), ("v", ["table", "matrix"])])
def test_an_embedding_is_packed_only_if_a_product_reads_it(output: str, added: list[str]) -> None:
    recorder = WhereEmbedded()
    ops = (Embed("x", "w"), Logits("y", "x", output))
    program = Program(kv_shapes=(KvShape(1, 16),), vocab_size=32, buffers=tuple((name, 32) for name in NAMES), ops=ops)
    lower(program, {"w": MATRIX, "v": MATRIX}, cast(Engine, recorder), num_positions=64)
    assert recorder.added == added


class WhichRowOps(Recorder):
    """The operations on rows, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[RowOpKind] = []

    def add_rows(self, ops: Sequence[RowOpKind], on_samples: bool) -> None:
        self.kinds += ops


NORM, TO_INTEGERS, TO_BF16 = RowOpKind.RMS_NORM, RowOpKind.QUANTIZE, RowOpKind.TO_BF16


@pytest.mark.parametrize(
    ("group", "readers", "kinds", "kinds_with_tiles"),
    [
        (0, (Linear("z", "y", "q"), Linear("h", "y", "q")), [TO_INTEGERS], [NORM, TO_BF16]),
        (0, (Linear("y", "y", "q"), Add("y", "y", "x")), [TO_INTEGERS, RowOpKind.ADD], [NORM, TO_BF16, RowOpKind.ADD]),
        (16, (Linear("z", "y", "q"),), [NORM, TO_INTEGERS], [NORM, TO_BF16]),
        (0, (Linear("z", "y", "w"),), [NORM, TO_BF16], [NORM, TO_BF16]),
        (0, (Linear("z", "y", "q"), Linear("h", "y", "w")), [NORM, TO_INTEGERS, TO_BF16], [NORM, TO_BF16]),
        (0, (Linear("z", "y", "q"), Add("h", "y", "x")), [NORM, TO_INTEGERS, RowOpKind.ADD], [NORM, TO_BF16, RowOpKind.ADD]),
        (0, (Linear("z", "y", "q", residual="y"),), [NORM, TO_INTEGERS], [NORM, TO_BF16]),
    ],
    ids=[
        *("quantised products", "read after it changed", "norm of groups", "bf16 product", "quantised and bf16 products"),
        *("read as it is", "residual"),
    ],
)
@pytest.mark.parametrize("has_tiles", [False, True])
def test_a_norm_is_quantised_at_once_if_only_products_of_integers_read_it(
    group: int,
    readers: Sequence[Op],
    kinds: list[RowOpKind],
    kinds_with_tiles: list[RowOpKind],
    has_tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside tiles there are none: one conversion to bf16 serves weights of every kind."""
    monkeypatch.setattr("penstock.backends.native.lowering.RowOp", lambda kind, **fields: kind)
    recorder = WhichRowOps()
    recorder.has_tiles = has_tiles
    norm = RMSNorm("y", "x", "n", eps=1e-5, group=group)
    program = Program(
        kv_shapes=(KvShape(1, 16),),
        vocab_size=32,
        buffers=tuple((name, 32) for name in NAMES),
        ops=(Embed("x", "w"), norm, *readers),
    )
    weights = {
        "w": MATRIX,
        "q": WeightTensor("q", 32, 32, WeightFormat.Q8_0, np.zeros((32, 34), np.uint8)),
        "n": WeightTensor("n", 1, 32, WeightFormat.F32, np.zeros((1, 32), np.float32)),
    }
    lower(program, weights, cast(Engine, recorder), num_positions=64)
    found = [kind for kind in recorder.kinds if kind not in (RowOpKind.EMBED, RowOpKind.LOOKUP)]
    assert found == (kinds_with_tiles if has_tiles else kinds)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_without_adapters_no_instruction_knows_of_them(has_adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, the first half of their product comes behind the input's conversion."""
    monkeypatch.setattr("penstock.backends.native.lowering.RowOp", lambda kind, **fields: kind)
    recorder = WhichRowOps()
    gated = (Linear("y", "x", "w"), Linear("z", "x", "w"), GatedActivation("y", "y", "z", "silu"))
    lowered(Linear("x", "y", "w"), *gated, recorder=recorder, has_adapters=has_adapters)
    kinds = recorder.kinds[recorder.kinds.index(RowOpKind.TO_BF16) :]
    shrink = [RowOpKind.SHRINK] * has_adapters
    assert kinds == [RowOpKind.TO_BF16, *shrink, RowOpKind.TO_BF16, *shrink, *shrink]
    assert len(recorder.sites) == (3 if has_adapters else 0)
    assert (RowOpKind.ADAPT_EMBEDDING in recorder.kinds) == has_adapters


def test_only_the_last_layer_attends_for_samples_alone() -> None:
    class Attending(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.of_samples: list[bool] = []

        def add_attention(self, *fields: float) -> None:
            of_samples, samples = fields[-2:]
            self.of_samples.append(bool(of_samples))
            assert not samples, "no attention reads what was gathered"

    def attend(layer: int) -> Attention:
        return Attention("y", "x", layer, num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0)

    def lowered_attentions(*ops: Op) -> list[bool]:
        recorder = Attending()
        sizes = {"kv_shapes": (KvShape(1, 16),) * 2, "vocab_size": 32}
        program = Program(ops=(Embed("x", "w"), *ops), buffers=tuple((name, 32) for name in NAMES), **sizes)
        lower(program, {"w": MATRIX}, cast(Engine, recorder), num_positions=64)
        return recorder.of_samples

    gathered = (GatherRows("h", "y"), Linear("z", "h", "w"))
    assert lowered_attentions(attend(0), Linear("x", "y", "w"), attend(1), *gathered) == [False, True]
    assert lowered_attentions(attend(0), Linear("x", "y", "w"), attend(1), Linear("z", "y", "w"), *gathered) == [False, False]
    assert lowered_attentions(attend(0), attend(1), Linear("z", "y", "w", residual="y")) == [True, False]


def lower_fp8(codes: np.ndarray, row_scales: np.ndarray, engine: Recorder) -> None:
    program = Program(
        kv_shapes=(KvShape(1, 16),),
        vocab_size=32,
        buffers=(("x", 32), ("y", 32)),
        ops=(Embed("x", "w"), Linear("y", "x", "v")),
    )
    scales = BlockScales(row_scales[:, None], 1, 32)
    weights = {"w": MATRIX, "v": WeightTensor("v", 32, 32, WeightFormat.F8_E4M3, codes, scales)}
    lower(program, weights, cast(Engine, engine), num_positions=64)


def test_every_byte_of_a_packed_matrix_is_told_when_it_is_packed() -> None:
    told: list[int] = []

    class Packs(Recorder):
        def pack_rows(self, matrix: int, first_row: int, data: np.ndarray) -> None:
            assert sum(told) == first_row * 128

    rows = (1 << 23) // 32 + 40  # two parts
    program = Program(
        kv_shapes=(KvShape(1, 16),),
        vocab_size=rows,
        buffers=(("x", 32), ("y", rows)),
        ops=(Embed("x", "w"), Linear("y", "x", "w")),
    )
    weight = WeightTensor("w", rows, 32, WeightFormat.F32, np.zeros((rows, 32), np.float32))
    lower(program, {"w": weight}, cast(Engine, Packs()), num_positions=64, on_packed=told.append)
    assert (len(told), sum(told)) == (2, weight.num_bytes)


def test_every_byte_of_packed_experts_is_told() -> None:
    """Two experts have 20 rows each in gate and up, which are not whole panels, and 32 in down."""
    told: list[int] = []
    op = Experts("y", "x", "r", "g", "u", "d", num_experts=2, num_experts_per_token=1, intermediate_size=20, activation="silu")
    shapes = {"w": (32, 32), "r": (2, 32), "g": (40, 32), "u": (40, 32), "d": (64, 20)}
    weights = {
        name: WeightTensor(name, *shape, WeightFormat.F32, np.zeros(shape, np.float32)) for name, shape in shapes.items()
    }
    program = Program((Embed("x", "w"), op), (("x", 32), ("y", 32)), (KvShape(1, 16),), 32)
    lower(program, weights, cast(Engine, Recorder()), num_positions=64, on_packed=told.append)
    assert sum(told) == sum(weights[name].num_bytes for name in "gud")


def test_a_short_convolution_waits_until_the_inputs_of_all_tokens_are_there() -> None:
    """It reads those of other tokens; and their state is kept when all have read the one before."""

    class Rows(Recorder):
        def add_rows(self, rows: Sequence[RowOp], samples: bool) -> None:
            sizes.append(len(rows))

    sizes: list[int] = []
    program = Program(
        (Embed("x", "e"), Act("x", "x", "relu"), ShortConv("y", "x", 0, "w", 3)), (("x", 96), ("y", 32)), (KvShape(1, 16),), 32
    )
    shapes = {"e": (32, 96), "w": (32, 3)}
    weights = {
        name: WeightTensor(name, *shape, WeightFormat.F32, np.zeros(shape, np.float32)) for name, shape in shapes.items()
    }
    lower(program, weights, cast(Engine, Rows()), num_positions=64)
    assert sizes == [2, 1, 1]


def test_fp8_is_widened_with_its_scales() -> None:
    """It is packed as bf16, and so are its bytes counted."""
    given: list[tuple[SourceFormat, np.ndarray]] = []

    class Given(Recorder):
        def add_matrix(self, fmt: SourceFormat, rows: int, cols: int) -> int:
            self.fmt = fmt
            return 0

        def pack_rows(self, matrix: int, first_row: int, data: np.ndarray) -> None:
            given.append((self.fmt, data.view(np.float32).copy()))

    codes = np.full((32, 32), 0x38, np.uint8)
    codes[5, 7] = 0xC0  # -2
    lower_fp8(codes, np.arange(1, 33, dtype=np.float32), Given())
    ((fmt, values),) = given
    assert fmt == SourceFormat.F32
    assert values[5, 7] == -12
    assert (values[31] == 32).all()
    assert held_bytes(WeightFormat.F8_E4M3, 32, 32) == held_bytes(WeightFormat.BF16, 32, 32)


@pytest.mark.parametrize(("code", "scale"), [(0x7F, 1.0), (0xFF, 1.0), (0x7E, 1e38)])
def test_fp8_that_is_no_finite_number_is_refused(code: int, scale: float) -> None:
    codes = np.full((32, 32), 0x38, np.uint8)
    codes[31, 30] = code
    with pytest.raises(ModelError, match="'v' has a weight that is not finite"):
        lower_fp8(codes, np.full(32, scale, np.float32), Recorder())


def test_a_matrix_is_handed_over_in_parts_of_whole_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted weights are in memory a part at a time."""
    monkeypatch.setattr("penstock.models.weights._PART_VALUES", 40 * 32)
    handed: list[tuple[int, int]] = []

    class Handed(Recorder):
        def pack_rows(self, matrix: int, first_row: int, data: np.ndarray) -> None:
            handed.append((first_row, len(data)))

    ops = (Embed("x", "w"), Logits("y", "x", "w"))
    program = Program(kv_shapes=(KvShape(1, 16),), vocab_size=70, buffers=(("x", 32), ("y", 70)), ops=ops)
    matrix = WeightTensor("w", 70, 32, WeightFormat.BF16, np.zeros((70, 32), np.uint16))
    lower(program, {"w": matrix}, cast(Engine, Handed()), num_positions=64)
    assert handed == [(0, 32), (32, 32), (64, 6)]


def test_what_keys_lack_is_padded_as_they_are() -> None:
    vectors: list[np.ndarray] = []

    class Vectors(Recorder):
        def add_vector(self, values: np.ndarray) -> int:
            vectors.append(values)
            return 0

    ops = (Embed("x", "w"), Embed("y", "w"), KvWrite(0, "x", "y", "b", (0.0,) * 4))
    program = Program(kv_shapes=(KvShape(4, 8),), vocab_size=32, buffers=(("x", 32), ("y", 32)), ops=ops)
    bias = np.arange(1, 33, dtype=np.float32)[None]
    weights = {"w": MATRIX, "b": WeightTensor("b", 1, 32, WeightFormat.F32, bias)}
    lower(program, weights, cast(Engine, Vectors()), num_positions=64)
    heads = vectors[0].reshape(4, 16)
    assert np.array_equal(heads[:, :8].reshape(-1), bias[0])
    assert not heads[:, 8:].any()


@pytest.mark.parametrize(
    ("op", "complaint"),
    [
        (Softcap("x", 30.0), "can't compute Softcap of anything but logits"),
        (EmbedPositions("x", "x", "w", 32), "64 tokens have more positions than the 32 that were learned"),
        (Rope("x", 2, 16, (1.0,), growth=0.1), r"can't compute Rope\.growth of columns that do not turn"),
        (Act("y", "x", "swiglu_clamped"), "can't compute Act with swiglu_clamped"),
    ],
)
def test_operations_that_the_engine_lacks_are_refused_by_name(op: Op, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        lowered(op)
    assert caught.value.remedy
