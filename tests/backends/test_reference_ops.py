"""Every operation of the interpreter against its formula, written out for one number at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference.interpreter import PRODUCT_TILE, Interpreter, RowRun, gated, product
from penstock.backends.reference.kv_cache import KvCache, rotate, round_rotated, round_to_bf16, round_to_int8
from penstock.models.program import (
    Act,
    Add,
    Attention,
    Columns,
    Embed,
    EmbedPositions,
    EmbedTypes,
    Experts,
    FirstRows,
    GatedActivation,
    GatherRows,
    KvShape,
    KvWrite,
    LayerNorm,
    Linear,
    Logits,
    MeanRows,
    Program,
    Relative,
    RMSNorm,
    Rope,
    Scale,
    ShortConv,
    Softcap,
    States,
    StateShape,
    TextAttention,
)
from penstock.models.relative import rows_of
from penstock.models.weights import WeightFormat, WeightTensor
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import Mask, RelativeSpec

NUM_TOKENS = 5
HEAD_DIM = 8
NUM_KV_HEADS = 2
KV_SHAPES = (KvShape(NUM_KV_HEADS, HEAD_DIM),) * 2
RNG = np.random.default_rng(11)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def tensor(array: np.ndarray) -> WeightTensor:
    matrix = np.atleast_2d(array).astype(np.float32)
    return WeightTensor("w", *matrix.shape, WeightFormat.F32, matrix)


def make_cache(**changes: Any) -> KvCache:
    sizes = {"shapes": KV_SHAPES, "num_blocks": 6, "block_size": 4, "dtype": KvDtype.BF16}
    return KvCache(**sizes | changes)


def make_row(context_len: int = 0, num_tokens: int = NUM_TOKENS, cache: KvCache | None = None, **buffers: np.ndarray) -> RowRun:
    block_table = np.array([3, 1, 5, 2], np.int32)
    positions = context_len + np.arange(num_tokens)
    return RowRun(
        cache=cache or make_cache(),
        token_ids=np.arange(num_tokens, dtype=np.int32),
        context_len=context_len,
        slots=block_table[positions // 4].astype(np.int64) * 4 + positions % 4,
        block_table=block_table,
        gathered=np.array([num_tokens - 1]),
        buffers={**buffers, "end": np.ones((num_tokens, 1), np.float32)},
    )


def run(row: RowRun, *ops: Any, **weights: np.ndarray) -> RowRun:
    """The row after `ops`, and a `Logits` that every program ends in."""
    program = Program((*ops, Logits("logits", "end", "one")), (), KV_SHAPES, 1)
    tensors = {name: tensor(array) for name, array in weights.items()}
    Interpreter(program, {**tensors, "one": tensor(np.ones((1, 1)))}).run(row)
    return row


def assert_close(actual: np.ndarray, expected: Any) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.array(expected), rtol=2e-5, atol=2e-6)


def test_embed_looks_rows_up_and_scales_them():
    table = values(9, 6)
    row = run(make_row(), Embed("x", "table", scale=3.0), table=table)
    assert_close(row.buffers["x"], [[float(v) * 3 for v in table[i]] for i in range(NUM_TOKENS)])


def test_positions_are_looked_up_by_their_number_in_the_text():
    x, table = values(NUM_TOKENS, 6), values(20, 6)
    row = run(make_row(9, x=x.copy()), EmbedPositions("x", "x", "table", 20), table=table)
    assert_close(row.buffers["x"], x + table[9 : 9 + NUM_TOKENS])


@pytest.mark.parametrize(("group", "weight_size"), [(0, 12), (4, 4), (4, 12)])
def test_rms_norm(group: int, weight_size: int):
    x, weight = values(NUM_TOKENS, 12), values(weight_size)
    row = run(make_row(x=x), RMSNorm("y", "x", "w", 1e-3, group), w=weight)
    size = group or 12
    expected = np.empty((NUM_TOKENS, 12))
    for t in range(NUM_TOKENS):
        for c in range(12):
            members = [float(v) for v in x[t, c // size * size : c // size * size + size]]
            mean_square = sum(v * v for v in members) / size
            expected[t, c] = float(x[t, c]) / math.sqrt(mean_square + 1e-3) * float(weight[c % weight_size])
    assert_close(row.buffers["y"], expected)


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(has_bias: bool):
    x, weight, bias = values(NUM_TOKENS, 12), values(12), values(12) if has_bias else np.zeros(12)
    row = run(make_row(x=x), LayerNorm("y", "x", "w", "b" if has_bias else None, 1e-3), w=weight, b=bias)
    expected = []
    for line in x.astype(float):
        mean = sum(line) / 12
        variance = sum((v - mean) ** 2 for v in line) / 12
        expected.append([(v - mean) / math.sqrt(variance + 1e-3) * w + b for v, w, b in zip(line, weight, bias, strict=True)])
    assert_close(row.buffers["y"], expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("residual", [None, "r", "y"])
def test_linear(has_bias: bool, residual: str | None):
    x, weight, bias, r = values(NUM_TOKENS, 7), values(3, 7), values(3), values(NUM_TOKENS, 3)
    op = Linear("y", "x", "w", bias="b" if has_bias else None, residual=residual)
    row = run(make_row(x=x, r=r, y=r.copy()), op, w=weight, b=bias)
    expected = np.zeros((NUM_TOKENS, 3))
    for t in range(NUM_TOKENS):
        for o in range(3):
            expected[t, o] = sum(float(x[t, i]) * float(weight[o, i]) for i in range(7))
            expected[t, o] += float(bias[o]) if has_bias else 0.0
            expected[t, o] += float(r[t, o]) if residual else 0.0
    assert_close(row.buffers["y"], expected)


def test_linear_takes_weights_of_any_format():
    bits = (values(3, 32).view(np.uint32) >> 16).astype(np.uint16)
    weight = WeightTensor("w", 3, 32, WeightFormat.BF16, bits)
    program = Program((Logits("logits", "x", "w"),), (), KV_SHAPES, 3)
    x = values(NUM_TOKENS, 32)
    result = Interpreter(program, {"w": weight}).run(make_row(x=x))
    assert_close(result, x @ (bits.astype(np.uint32) << 16).view(np.float32).T)


@pytest.mark.parametrize("context_len", [0, 9])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rope_turns_pairs_as_complex_numbers(context_len: int, factor: float):
    inv_freq = (1.0, 0.1, 0.003)  # turns 6 of the 8 columns
    x = values(NUM_TOKENS, 2 * HEAD_DIM)
    row = run(make_row(context_len, x=x.copy()), Rope("x", 2, HEAD_DIM, inv_freq, factor))
    expected = x.astype(float)
    for t in range(NUM_TOKENS):
        for head in range(2):
            for i, freq in enumerate(inv_freq):
                a, b = head * HEAD_DIM + i, head * HEAD_DIM + i + 3
                turned = complex(x[t, a], x[t, b]) * factor * np.exp(1j * (context_len + t) * freq)
                expected[t, a], expected[t, b] = turned.real, turned.imag
    assert_close(row.buffers["x"], expected)


def test_rope_keeps_precision_far_out():
    row = run(make_row(11, x=np.ones((NUM_TOKENS, HEAD_DIM), np.float32)), Rope("x", 1, HEAD_DIM, (10000.0,)))
    angle = 11 * 10000.0
    assert row.buffers["x"][0, 0] == pytest.approx(math.cos(angle) - math.sin(angle), abs=1e-6)


def test_kv_write_stores_int8_keys_by_group_and_values_by_head():
    cache = make_cache(dtype=KvDtype.INT8, shapes=(KvShape(NUM_KV_HEADS, 48),) * 2)
    k, v = values(NUM_TOKENS, NUM_KV_HEADS, 48), values(NUM_TOKENS, NUM_KV_HEADS, 48)
    k[:, :, 40] *= 100
    cache.write(1, np.arange(4, 4 + NUM_TOKENS), k, v)
    keys, stored_values = cache.read(1, np.array([1, 2], np.int32), NUM_TOKENS)
    for stored, exact, group in ((keys[..., :32], k[..., :32], 32), (keys[..., 32:], k[..., 32:], 16), (stored_values, v, 48)):
        largest = np.abs(exact).max(-1, keepdims=True)
        # Half of a scale; bf16 rounds that up by 2^-7 at most.
        assert (np.abs(stored - exact) <= largest / 127 * (1 + 2**-7) / 2).all(), group
        bits = (largest / np.float32(127)).view(np.uint32)
        integers = stored / ((bits + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
        assert np.array_equal(integers, np.rint(integers))
        assert np.abs(integers).max() <= 127


@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize("num_levels", [16, 32])
def test_int4_is_odd_integers_of_a_rotated_head_times_one_scale_of_a_byte(head_dim, num_levels):
    x = values(NUM_TOKENS, NUM_KV_HEADS, head_dim)
    x[:, :, 7] *= 100
    turned, stored = rotate(x), rotate(round_rotated(x, num_levels))
    assert rotate(turned) == pytest.approx(x, abs=1e-4)
    assert np.linalg.norm(turned, axis=-1) == pytest.approx(np.linalg.norm(x, axis=-1), rel=1e-6)
    largest = np.abs(turned).max(-1, keepdims=True)
    wanted = largest / np.float32(num_levels - 1)
    exponent = np.floor(np.log2(wanted)).astype(int) - 3  # of the last bit of the mantissa
    scale = np.ldexp(np.ceil(np.ldexp(wanted, -exponent)), exponent)
    integers = stored / scale
    assert np.abs(integers - np.rint(integers)).max() < 1e-3
    assert (np.rint(integers) % 2 == 1).all()
    assert np.abs(integers).max() < num_levels
    assert (np.abs(stored - turned) <= scale * 1.001).all()


def test_int4_of_what_is_broken_is_nan_and_of_zeros_next_to_zero():
    x = np.zeros((3, 64), np.float32)
    x[1, 3], x[2, 40] = np.nan, np.inf
    rounded = round_rotated(x, 32)
    assert np.abs(rounded[0]).max() < 2**-17
    assert np.isnan(rounded[1:]).all()


def test_int8_of_zeros_is_zero_and_of_what_is_broken_is_nan():
    x = np.zeros((3, 64), np.float32)
    x[1, 3], x[2, 40] = np.nan, np.inf
    rounded = round_to_int8(x, 32)
    assert not rounded[0].any()
    assert np.isnan(rounded[1, :32]).all()
    assert not rounded[1, 32:].any()
    assert np.isnan(rounded[2, 32:]).all()


def test_kv_write_stores_bf16_at_the_slots_of_its_layer_only():
    cache = make_cache()
    k, v = values(NUM_TOKENS, NUM_KV_HEADS * HEAD_DIM), values(NUM_TOKENS, NUM_KV_HEADS * HEAD_DIM)
    row = run(make_row(2, cache=cache, k=k, v=v), KvWrite(1, "k", "v"))
    keys, stored_values = cache.read(1, row.block_table, 2 + NUM_TOKENS)
    assert np.array_equal(keys[2:].reshape(NUM_TOKENS, -1), round_to_bf16(k))
    assert np.array_equal(stored_values[2:].reshape(NUM_TOKENS, -1), round_to_bf16(v))
    assert not keys[:2].any()
    assert not cache.read(0, row.block_table, 7)[0].any()


@pytest.mark.parametrize(
    ("context_len", "num_heads", "window", "softcap"),
    [(0, 4, 0, 0.0), (9, 4, 0, 0.0), (9, 2, 0, 0.0), (9, 6, 3, 0.0), (9, 4, 1, 0.0), (9, 4, 0, 2.0), (2, 4, 4, 1.5)],
)
def test_attention(context_len: int, num_heads: int, window: int, softcap: float):
    cache = make_cache()
    seq_len, width = context_len + NUM_TOKENS, NUM_KV_HEADS * HEAD_DIM
    keys, cached_values = round_to_bf16(values(seq_len, width)), round_to_bf16(values(seq_len, width))
    run(make_row(0, seq_len, cache, k=keys, v=cached_values), KvWrite(1, "k", "v"))
    q = values(NUM_TOKENS, num_heads * HEAD_DIM)
    op = Attention("y", "q", 1, num_heads, NUM_KV_HEADS, HEAD_DIM, 0.3, window=window, softcap=softcap)
    actual = run(make_row(context_len, cache=cache, q=q), op).buffers["y"]
    expected = np.zeros_like(q, dtype=float)
    for t in range(NUM_TOKENS):
        position = context_len + t
        seen = range(max(0, position + 1 - window) if window else 0, position + 1)
        for head in range(num_heads):
            mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            kv_head = head // (num_heads // NUM_KV_HEADS)
            theirs = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
            scores = [0.3 * float(q[t, mine].astype(float) @ keys[s, theirs].astype(float)) for s in seen]
            scores = [softcap * math.tanh(s / softcap) for s in scores] if softcap else scores
            total = sum(math.exp(s) for s in scores)
            for s, score in zip(seen, scores, strict=True):
                expected[t, mine] += math.exp(score) / total * cached_values[s, theirs]
    assert_close(actual, expected)


def test_a_sink_takes_its_share_of_a_softmax_and_gives_nothing():
    cache, sinks = make_cache(), np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    k, v, q = (values(NUM_TOKENS, heads * HEAD_DIM) for heads in (NUM_KV_HEADS, NUM_KV_HEADS, 4))
    sizes = {"num_heads": 4, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "scale": 0.3}
    plain, with_sinks = Attention("y", "q", 0, **sizes), Attention("z", "q", 0, **sizes, sinks="s")
    row = run(make_row(cache=cache, q=q, k=k, v=v), KvWrite(0, "k", "v"), plain, with_sinks, s=sinks)
    keys = round_to_bf16(k).reshape(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    scores = 0.3 * np.einsum("thd,shd->ths", q.reshape(NUM_TOKENS, 4, HEAD_DIM), np.repeat(keys, 2, axis=1))
    total = (np.exp(scores) * np.tri(NUM_TOKENS)[:, None]).sum(-1)
    kept = np.repeat(total / (total + np.exp(sinks)), HEAD_DIM, axis=1)
    assert_close(row.buffers["z"], row.buffers["y"] * kept)


WIDTH = 6


def short_conv(op: ShortConv, inputs: np.ndarray, chunks: list[int], weights: dict[str, np.ndarray]) -> np.ndarray:
    """The results of a text that is computed in chunks of so many tokens."""
    cache, results, context_len = make_cache(state=StateShape(2, op.kernel - 1, WIDTH), poison=True), [], 0
    for num_tokens in chunks:
        row = make_row(context_len, num_tokens, cache, x=inputs[context_len : context_len + num_tokens])
        cache.forget([block for block in (3, 1, 5, 2) if block * 4 in row.slots], 0)  # blocks that the chunk begins
        results.append(run(row, op, **weights).buffers["y"])
        context_len += num_tokens
    return np.concatenate(results)


@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_short_conv(kernel: int, has_bias: bool):
    num_tokens = 14
    inputs, weight, bias = values(num_tokens, 3 * WIDTH), values(WIDTH, kernel), values(WIDTH)
    op = ShortConv("y", "x", 1, "w", kernel, "bias" if has_bias else None)
    b, c, u = np.split(inputs, 3, axis=1)
    v = round_to_bf16(b * u).astype(float)
    expected = np.zeros((num_tokens, WIDTH))
    for t in range(num_tokens):
        for column in range(WIDTH):
            taps = [(i, t - kernel + 1 + i) for i in range(kernel)]
            total = sum(float(weight[column, i]) * v[at, column] for i, at in taps if at >= 0)
            expected[t, column] = float(c[t, column]) * (total + has_bias * float(bias[column]))
    whole = short_conv(op, inputs, [num_tokens], {"w": weight, "bias": bias})
    assert_close(whole, expected)
    for chunks in ([1] * 14, [3, 3, 3, 3, 2], [4, 4, 4, 2], [5, 1, 8], [13, 1]):
        assert np.array_equal(short_conv(op, inputs, chunks, {"w": weight, "bias": bias}), whole), chunks


def test_a_state_inside_a_block_is_gone():
    """A token that goes on before the last one of its block gets another result: no hit may end there."""
    inputs, weights = values(8, 3 * WIDTH), {"w": values(WIDTH, 3)}
    op, cache = ShortConv("y", "x", 0, "w", 3), make_cache(state=StateShape(1, 2, WIDTH))
    whole = run(make_row(0, 7, cache, x=inputs[:7]), op, **weights).buffers["y"]
    inside = run(make_row(6, 1, cache, x=inputs[6:7]), op, **weights).buffers["y"]
    assert not np.allclose(inside, whole[6], rtol=1e-3)
    behind = run(make_row(4, 1, cache, x=inputs[4:5]), op, **weights).buffers["y"]
    assert np.array_equal(behind[0], whole[4]), "behind the end of a block it is still there"


def test_a_block_has_place_for_its_state():
    with pytest.raises(ValueError, match="blocks of 4 positions can't hold 5 columns"):
        make_cache(state=StateShape(1, 5, WIDTH))


def test_queries_may_grow_with_their_position():
    x = values(NUM_TOKENS, 2 * HEAD_DIM)
    turned = run(make_row(9, x=x.copy()), Rope("x", 2, HEAD_DIM, (0.5, 0.1))).buffers["x"]
    grown = run(make_row(9, x=x.copy()), Rope("x", 2, HEAD_DIM, (0.5, 0.1), growth=0.1, growth_len=4)).buffers["x"]
    assert_close(grown, [[(1 + 0.1 * math.log(1 + (9 + t) // 4)) * float(v) for v in turned[t]] for t in range(NUM_TOKENS)])


SILU = lambda x: x / (1 + math.exp(-x))  # noqa: E731
GELU = lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # noqa: E731
FORMULAS = {
    "silu": SILU,
    "gelu_tanh": GELU,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_quick": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "elu": lambda x: x if x > 0 else math.expm1(x),
}


@pytest.mark.parametrize(("name", "formula"), FORMULAS.items())
def test_activations_with_and_without_a_gate(name: Any, formula: Any):
    x, up = values(NUM_TOKENS, 6) * 4, values(NUM_TOKENS, 6)
    activated = np.array([[formula(float(v)) for v in line] for line in x])
    row = run(make_row(x=x, up=up), Act("a", "x", name), GatedActivation("g", "x", "up", name))
    assert_close(row.buffers["a"], activated)
    assert_close(row.buffers["g"], activated * up)


@pytest.mark.parametrize("name", sorted(FORMULAS.keys() - {"relu2", "elu"}))
def test_activations_of_huge_inputs(name: Any):
    row = run(make_row(num_tokens=1, x=np.array([[-1e4, 1e4]], np.float32)), Act("y", "x", name))
    assert row.buffers["y"].tolist() == [[0.0, 1e4]]


def test_the_clamped_gate_cuts_large_numbers_and_adds_one_to_its_partner():
    gate, up = np.array([[2.0, 9.0, -9.0, 2.0]], np.float32), np.array([[3.0, 9.0, -9.0, -1.0]], np.float32)
    row = run(make_row(num_tokens=1, gate=gate, up=up), GatedActivation("y", "gate", "up", "swiglu_clamped"))
    quick = FORMULAS["gelu_quick"]
    assert_close(row.buffers["y"], [[4 * quick(2.0), 8 * quick(7.0), -6 * quick(-9.0), 0.0]])


def test_add_and_softcap():
    a, b = values(NUM_TOKENS, 6), values(NUM_TOKENS, 6)
    row = run(make_row(a=a, b=b), Add("y", "a", "b"), Add("z", "a", "b"), Softcap("z", 0.5), Add("f", "a", "b", factor=0.25))
    assert_close(row.buffers["y"], a + b)
    assert_close(row.buffers["f"], a + b / 4)
    assert_close(row.buffers["z"], [[0.5 * math.tanh(float(v) / 0.5) for v in line] for line in a + b])


@pytest.mark.parametrize("gathered", [[], [4], [0, 1, 2, 3, 4]])
def test_gather_rows_and_logits(gathered: list[int]):
    x, weight = values(NUM_TOKENS, 6), values(11, 6)
    row = replace(make_row(x=x), gathered=np.array(gathered, np.int64))
    ops = (GatherRows("last", "x"), Logits("y", "last", "w", scale=0.5), Softcap("y", 3.0))
    program = Program(ops, (), KV_SHAPES, 11)
    result = Interpreter(program, {"w": tensor(weight)}).run(row)
    assert result.shape == (len(gathered), 11)
    assert_close(result, 3 * np.tanh(x[gathered].astype(float) @ weight.T * 0.5 / 3))


@pytest.mark.parametrize("split", range(1, 3 * PRODUCT_TILE))
def test_a_product_has_the_same_bits_however_it_is_cut(split: int):
    x, weight = values(3 * PRODUCT_TILE, 96), values(40, 96)
    whole = product(x, weight, 5)
    parts = [product(x[:split], weight, 5), product(x[split:], weight, 5 + split)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F800000),
        (0x3F808000, 0x3F800000),  # half-way to an odd neighbour: down
        (0x3F818000, 0x3F820000),  # half-way from an odd one: up
        (0x3F808001, 0x3F810000),
        (0xBF818000, 0xBF820000),
        (0x7F7FFFFF, 0x7F800000),  # beyond the largest: infinity
        (0x80000000, 0x80000000),
    ],
)
def test_bf16_rounds_to_nearest_even(bits: int, expected: int):
    x = np.array([bits], np.uint32).view(np.float32)
    assert round_to_bf16(x).view(np.uint32).tolist() == [expected]


def test_bf16_keeps_nan():
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(round_to_bf16(x)).all()


def test_copied_block_holds_the_same_in_every_layer():
    cache = make_cache()
    k = values(4, NUM_KV_HEADS * HEAD_DIM)
    run(make_row(0, 4, cache, k=k, v=k), KvWrite(0, "k", "v"), KvWrite(1, "k", "v"))
    cache.copy_block(3, 4)
    for layer in (0, 1):
        for array in cache.read(layer, np.array([4], np.int32), 4):
            assert np.array_equal(array.reshape(4, -1), round_to_bf16(k))


def test_forgotten_slots_are_nan_only_with_poison():
    for poison in (True, False):
        cache = make_cache(poison=poison)
        k = np.ones((8, NUM_KV_HEADS * HEAD_DIM), np.float32)
        run(make_row(0, 8, cache, k=k, v=k), KvWrite(0, "k", "v"))
        cache.forget([3, 1], 5)
        keys, _ = cache.read(0, np.array([3, 1], np.int32), 8)
        assert np.isnan(keys).any(axis=(1, 2)).tolist() == [False] * 5 + [poison] * 3


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"is_renormalised": False},
    "sigmoid": {"scoring": "sigmoid", "is_renormalised": False, "share_factor": 2.5},
    "sigmoid, chosen by a bias": {"scoring": "sigmoid", "selection_bias": "s", "share_factor": 1.5},
    "router with a bias": {"router_bias": "rb"},
    "biases": {"gate_bias": "gb", "up_bias": "ub", "down_bias": "db"},
    "no gates": {"gate": None, "up_bias": "ub"},
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_experts_are_the_few_that_the_router_scores_highest(per_token: int, router: str):
    num_experts, inner, fields = 3, 5, ROUTERS[router]
    x, w = values(NUM_TOKENS, 6), {"r": values(num_experts, 6), "rb": values(num_experts), "s": values(num_experts) * 3}
    w |= {name: values(num_experts, inner, 6) for name in "gu"} | {"d": values(num_experts, 4, inner)}
    w |= {"gb": values(num_experts, inner), "ub": values(num_experts, inner), "db": values(num_experts, 4)}
    op = replace(Experts("y", "x", "r", "g", "u", "d", num_experts, per_token, inner, "silu"), **fields)
    row = run(make_row(x=x), op, **{name: v.reshape(-1, v.shape[-1]) if v.ndim == 3 else v for name, v in w.items()})
    w = {name: v.astype(float) if name in "rgud" or name in fields.values() else v * 0.0 for name, v in w.items()}
    expected = np.zeros((NUM_TOKENS, 4))
    for t, token in enumerate(x.astype(float)):
        raw = w["r"] @ token + w["rb"]
        scores = 1 / (1 + np.exp(-raw)) if fields.get("scoring") == "sigmoid" else np.exp(raw) / np.exp(raw).sum()
        chosen = sorted(range(num_experts), key=lambda e: -(scores + w["s"])[e])[:per_token]
        total = sum(scores[chosen]) if fields.get("is_renormalised", True) else 1.0
        for e in chosen:
            ups = w["u"][e] @ token + w["ub"][e]
            gates = [SILU(v) for v in w["g"][e] @ token + w["gb"][e]]
            hidden = [SILU(v) for v in ups] if op.gate is None else np.array(gates) * ups
            expected[t] += fields.get("share_factor", 1.0) * scores[e] / total * (w["d"][e] @ hidden + w["db"][e])
    assert_close(row.buffers["y"], expected)


def test_equal_scores_choose_the_first_experts():
    ones, experts = np.ones((4, 6)), np.arange(4.0)
    op = Experts("y", "x", "r", "g", "u", "d", 4, 2, 1, "silu")
    row = run(make_row(x=np.ones((NUM_TOKENS, 6), np.float32)), op, r=ones, g=ones, u=ones, d=experts[:, None])
    assert_close(row.buffers["y"], np.full((NUM_TOKENS, 1), SILU(6.0) * 6.0 * 0.5))  # of experts 0 and 1


@pytest.mark.parametrize("is_normalised", [False, True])
def test_a_program_may_end_in_pooled_states(is_normalised: bool):
    """As embeddings of texts do: the mean over a row's tokens, of length one."""
    x = values(NUM_TOKENS, 6)
    program = Program((MeanRows("mean", "x"), States("mean", is_normalised)), (), KV_SHAPES, 11)
    expected = x.astype(float).mean(axis=0, keepdims=True)
    assert_close(
        Interpreter(program, {}).run(make_row(x=x)), expected / np.linalg.norm(expected) if is_normalised else expected
    )


def test_a_program_may_end_in_the_scores_of_a_classification_head():
    x, head, bias = values(NUM_TOKENS, 6), values(3, 6), values(3)
    program = Program((GatherRows("last", "x"), Linear("scores", "last", "w", bias="b"), States("scores")), (), KV_SHAPES, 11)
    result = Interpreter(program, {"w": tensor(head), "b": tensor(bias)}).run(make_row(x=x))
    assert_close(result, x[-1:].astype(float) @ head.T + bias)


def test_types_are_those_of_a_pairs_texts():
    x, table = values(NUM_TOKENS, 6), values(2, 6)
    row = make_row(x=x.copy())
    assert_close(run(row, EmbedTypes("y", "x", "table"), table=table).buffers["y"], x + table[0])
    row = replace(make_row(x=x.copy()), second_at=3)
    assert_close(run(row, EmbedTypes("y", "x", "table"), table=table).buffers["y"], x + table[[0, 0, 0, 1, 1]])
    row = replace(make_row(x=x.copy()), second_at=3)
    assert_close(run(row, EmbedTypes("y", "x", "table", 1), table=table[:1]).buffers["y"], x + table[0])


def test_learned_positions_may_begin_behind_the_table():
    x, table = values(NUM_TOKENS, 6), values(20, 6)
    row = run(make_row(x=x.copy()), EmbedPositions("x", "x", "table", 18, first=2), table=table)
    assert_close(row.buffers["x"], x + table[2 : 2 + NUM_TOKENS])


@pytest.mark.parametrize("distances", [0, 2])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("mask", ["all", "causal"])
def test_attention_within_a_text(mask: Mask, window: int, distances: int):
    q, k, v = values(NUM_TOKENS, 32), values(NUM_TOKENS, 16), values(NUM_TOKENS, 16)
    biases = values(4, 2 * distances + 1)
    op = TextAttention("y", "q", "k", "v", 4, 2, 8, 0.5, mask, window, "d" if distances else None, distances)
    row = replace(make_row(q=q, k=k, v=v), cache=None)
    program = Program((op, States("y")), (), KV_SHAPES, 11)
    actual = Interpreter(program, {"d": tensor(biases)}).run(row)
    expected = np.zeros((NUM_TOKENS, 32))
    for i in range(NUM_TOKENS):
        for head in range(4):
            own, shared = slice(head * 8, head * 8 + 8), slice(head // 2 * 8, head // 2 * 8 + 8)
            seen = [j for j in range(NUM_TOKENS) if (not window or abs(i - j) < window) and (mask == "all" or j <= i)]
            scores = [0.5 * float(q[i, own].astype(float) @ k[j, shared]) for j in seen]
            if distances:
                scores = [score + biases[head, 2 + min(max(j - i, -2), 2)] for score, j in zip(scores, seen, strict=True)]
            shares = np.exp(scores) / np.exp(scores).sum()
            expected[i, own] = sum(share * v[j, shared].astype(float) for share, j in zip(shares, seen, strict=True))
    assert_close(actual, expected)


def test_disentangled_attention_has_keys_and_queries_of_distances_and_may_have_sinks():
    q, k, v = values(NUM_TOKENS, 16), values(NUM_TOKENS, 16), values(NUM_TOKENS, 16)
    weights = {"table": values(6, 16), "norm": values(1, 16), "shift": values(1, 16)}
    weights |= {"wk": values(16, 16), "wq": values(16, 16), "bk": values(1, 16), "bq": values(1, 16)}
    rows = rows_of(RelativeSpec(span=3), NUM_TOKENS)
    assert rows.tolist() == [min(max(3 - distance, 0), 5) for distance in range(1 - NUM_TOKENS, NUM_TOKENS)]
    relative = Relative(RelativeSpec(span=3), "table", "norm", "shift", "wk", "bk", "wq", "bq", 0.1)
    weights["sinks"] = values(1, 2)
    op = TextAttention("y", "q", "k", "v", 2, 2, 8, 0.5, relative=relative, sinks="sinks")
    program = Program((op, States("y")), (), KV_SHAPES, 11)
    actual = Interpreter(program, {name: tensor(found) for name, found in weights.items()}).run(
        replace(make_row(q=q, k=k, v=v), cache=None)
    )
    table = weights["table"].astype(float)
    table = (table - table.mean(1, keepdims=True)) / np.sqrt(table.var(1, keepdims=True) + 0.1)
    table = table * weights["norm"] + weights["shift"]
    far_k, far_q = table @ weights["wk"].T + weights["bk"], table @ weights["wq"].T + weights["bq"]
    expected = np.zeros((NUM_TOKENS, 16))
    for i in range(NUM_TOKENS):
        for own, sink in zip((slice(0, 8), slice(8, 16)), weights["sinks"][0], strict=True):
            at = [rows[NUM_TOKENS - 1 + j - i] for j in range(NUM_TOKENS)]
            scores = k[:, own] @ q[i, own] + far_k[at][:, own] @ q[i, own] + (far_q[at][:, own] * k[:, own]).sum(1)
            shares = np.exp(0.5 * scores) / (np.exp(0.5 * scores).sum() + np.exp(sink))
            expected[i, own] = shares @ v[:, own]
    assert_close(actual, expected)


def test_the_first_token_may_be_the_texts_answer():
    x = values(NUM_TOKENS, 6)
    program = Program((FirstRows("first", "x"), States("first")), (), KV_SHAPES, 11)
    assert_close(Interpreter(program, {}).run(make_row(x=x)), x[:1])


def test_no_mean_of_a_part_of_a_text():
    program = Program((MeanRows("mean", "x"), States("mean")), (), KV_SHAPES, 11)
    with pytest.raises(ValueError, match="one step"):
        Interpreter(program, {}).run(make_row(context_len=1, x=values(NUM_TOKENS, 6)))


def test_a_norm_without_a_weight_only_divides():
    x = values(NUM_TOKENS, 12)
    row = run(make_row(x=x), RMSNorm("y", "x", None, 0.1, 6))
    groups = x.reshape(NUM_TOKENS, 2, 6)
    assert_close(row.buffers["y"], (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 0.1)).reshape(x.shape))


def test_numbers_beyond_float32_warn_nobody():
    """A file's factors can make them."""
    row = run(make_row(x=values(NUM_TOKENS, 12)), Scale("y", "x", 1e30), RMSNorm("z", "y", None, 0.1))
    assert not row.buffers["z"].any()


def test_scale_multiplies_by_a_factor_and_by_the_one_number_of_a_weight():
    x = values(NUM_TOKENS, 6)
    row = run(make_row(x=x), Scale("y", "x", 0.5), Scale("z", "x", 0.5, "s"), s=np.array([-3.0]))
    assert_close(row.buffers["y"], 0.5 * x)
    assert_close(row.buffers["z"], -1.5 * x)


def test_columns_are_a_part_of_each_row():
    x = values(NUM_TOKENS, 7)
    program = Program((Columns("y", "x", 2), Logits("logits", "y", "w")), (("x", 7), ("y", 4)), KV_SHAPES, 3)
    row = make_row(x=x)
    Interpreter(program, {"w": tensor(values(3, 4))}).run(row)
    assert_close(row.buffers["y"], x[:, 2:6])


def test_a_router_may_read_another_buffer_and_experts_may_scale_their_shares():
    x, routed, scale = values(1, 4), values(1, 4), np.array([0.5, -2.0, 3.0])
    weights = {"r": values(3, 4), "g": values(6, 4), "u": values(6, 4), "d": values(12, 2)}
    row = make_row(num_tokens=1, x=x, routed=routed)
    op = Experts("y", "x", "r", "g", "u", "d", 3, 1, 2, "silu", router_x="routed", share_scale="s")
    run(row, op, **weights, s=scale)
    expert = int(np.argmax(routed @ weights["r"].T))
    gate, up, down = (weights[name].reshape(3, -1, weights[name].shape[1])[expert] for name in "gud")
    assert_close(row.buffers["y"], scale[expert] * (gated(x @ gate.T, x @ up.T, "silu") @ down.T))


def test_the_bias_of_a_sum_of_experts_is_added_once_whatever_their_shares():
    x, bias = values(3, 4), values(4)
    weights = {"r": values(3, 4), "u": values(6, 4), "d": values(12, 2), "b": bias}
    op = Experts("y", "x", "r", None, "u", "d", 3, 2, 2, "gelu", is_renormalised=False)
    without, found = make_row(num_tokens=3, x=x), make_row(num_tokens=3, x=x)
    run(without, op, **weights)
    run(found, replace(op, sum_bias="b"), **weights)
    assert_close(found.buffers["y"] - without.buffers["y"], np.tile(bias, (3, 1)))
