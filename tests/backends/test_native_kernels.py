"""Kernels against NumPy, one at a time, in every instruction set that this machine can run."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from numpy.typing import NDArray

from penstock.backends.native._native import KvFormat, RowOp, RowOpKind, SourceFormat
from penstock.backends.native.lowering import ACTIVATION_KINDS
from penstock.backends.reference.interpreter import activate, gated
from penstock.backends.reference.kv_cache import rotate, round_rotated, round_to_int8
from penstock.models.weights import WeightFormat, dequantize
from penstock.types.kv_dtype import KEY_GROUP
from penstock.types.model_spec import Activation
from support.backends.native_probe import F32, Probe, bf16, bf16_bytes
from support.native_variants import VARIANTS, WITH_TILES

FORMATS = {
    WeightFormat.Q4_0: (SourceFormat.Q4_0, gguf.GGMLQuantizationType.Q4_0),
    WeightFormat.Q4_1: (SourceFormat.Q4_1, gguf.GGMLQuantizationType.Q4_1),
    WeightFormat.Q8_0: (SourceFormat.Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def quantised_activations(x: F32, *, outlier_ratio: float = 6.0) -> tuple[F32, F32]:
    """Float rows as the integer kernels see them: int8 per group of 32 times a power of two, and the rests of outliers."""
    groups = x.reshape(len(x), -1, 32)
    limit = outlier_ratio * np.sqrt((x.astype(np.float64) ** 2).mean(-1))[:, None, None]
    is_outlier = np.abs(groups) > limit
    largest = np.abs(np.where(is_outlier, 0, groups)).max(-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.maximum(largest / np.float32(127), 2.0**-90)))).astype(np.float32)
    rounded = np.clip(np.rint(groups / scale), -127, 127) * scale
    rest = np.where(is_outlier, groups - rounded, 0)
    return rounded.reshape(x.shape).astype(np.float32), rest.reshape(x.shape).astype(np.float32)


def packed_weights(raw: np.ndarray, fmt: WeightFormat, cols: int) -> tuple[F32, F32]:
    """The two parts of packed weights: d * (q - zero), and per group of 32 the offset in bf16."""
    weight = dequantize(raw, fmt, cols)
    offsets = np.zeros((len(raw), cols // 32), np.float32)
    if fmt is WeightFormat.Q4_1:
        scales = raw.reshape(len(raw), -1, 20)[:, :, :4].copy().view(np.float16).astype(np.float32)
        exact = scales[:, :, 1] + 8 * scales[:, :, 0]
        weight -= np.repeat(exact, 32, axis=1)
        offsets = bf16(exact)
    return weight, offsets


def quantised_product(x: F32, raw: np.ndarray, fmt: WeightFormat, variant: str) -> NDArray[np.float64]:
    """x @ w.T as the kernels compute it, in float64; beside tiles x must be exact in bf16."""
    if variant in WITH_TILES:
        return x.astype(np.float64) @ weights_beside_tiles(raw, fmt, x.shape[1], variant).T
    (seen, rest), (weight, offsets) = quantised_activations(x), packed_weights(raw, fmt, x.shape[1])
    sums = bf16((seen + rest).reshape(len(x), -1, 32).sum(-1))
    return (seen + rest).astype(np.float64) @ weight.T + sums.astype(np.float64) @ offsets.T


def weights_beside_tiles(raw: np.ndarray, fmt: WeightFormat, cols: int, variant: str) -> F32:
    """Each weight as tiles multiply it, in bf16: test_native_formats.py says how far it is from the file's."""
    each = np.eye(cols, dtype=np.float32)
    return linear_probe(each, raw, FORMATS[fmt][0], (len(raw), cols), variant).run(range(cols)).T


def random_rows(rng: np.random.Generator, rows: int, cols: int, *, outliers: bool = False) -> F32:
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    if outliers:
        x[:, ::37] *= 50
    return bf16(x)


def linear_probe(
    x: F32, weight: np.ndarray, source: SourceFormat, shape: tuple[int, int], variant: str, **epilogue: F32
) -> Probe:
    probe = Probe(len(x), shape[0], variant=variant)
    buffer = probe.input(x, epilogue.pop("embedding", None))
    quantised = source != SourceFormat.BF16
    activation = probe.activation(buffer, x.shape[1], is_quantised=quantised)
    bias = probe.engine.add_vector(epilogue["bias"]) if "bias" in epilogue else -1
    residual = probe.input(epilogue["residual"]) if "residual" in epilogue else -1
    probe.flush()
    out = probe.buffer(shape[0])
    matrix = probe.engine.add_matrix(source, *shape, weight)
    probe.engine.add_linear([(matrix, activation, out, bias, residual)], samples=False)
    probe.finish(out)
    return probe


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "cols", "batch"), [(16, 32, 1), (17, 64, 5), (40, 96, 13), (100, 320, 37), (33, 608, 9)])
@pytest.mark.parametrize("outliers", [False, True], ids=["smooth", "outliers"])
def test_quantised_product_is_that_of_its_parts(
    variant: str, fmt: WeightFormat, rows: int, cols: int, batch: int, outliers: bool
) -> None:
    rng = np.random.default_rng(rows * cols + batch)
    x = random_rows(rng, batch, cols, outliers=outliers)
    source, kind = FORMATS[fmt]
    raw = quantize(rng.standard_normal((rows, cols)).astype(np.float32), kind)
    bias, residual = rng.standard_normal(rows).astype(np.float32), random_rows(rng, batch, rows)
    out = linear_probe(x, raw, source, (rows, cols), variant, bias=bias, residual=residual).run(range(batch))
    expected = quantised_product(x, raw, fmt, variant) + bias + residual
    scale = np.abs(x).astype(np.float64) @ np.abs(dequantize(raw, fmt, cols).T)
    assert (np.abs(out - expected) <= 2e-6 * scale + 1e-6).all()
    plain = x.astype(np.float64) @ dequantize(raw, fmt, cols).T + bias + residual
    assert np.abs(out - plain).max() <= 0.02 * scale.max()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("cols", "with_residual"), [(992, False), (992, True), (1536, True)])
def test_rows_of_one_tile_have_outliers_in_columns_of_their_own(
    variant: str, fmt: WeightFormat, cols: int, with_residual: bool
) -> None:
    """More of them in a tile than its list has room for; all panels whole, without a bias."""
    rows, batch, num_outliers = 64, 7, 14
    rng = np.random.default_rng(3)
    x = random_rows(rng, batch, cols)
    for row in x:
        row[rng.choice(cols, num_outliers, replace=False)] = bf16(40 * rng.standard_normal(num_outliers).astype(np.float32))
    source, kind = FORMATS[fmt]
    raw = quantize(rng.standard_normal((rows, cols)).astype(np.float32), kind)
    residual = random_rows(rng, batch, rows)
    epilogue = {"residual": residual} if with_residual else {}
    probe = linear_probe(x, raw, source, (rows, cols), variant, **epilogue)
    together = probe.run(range(batch))
    expected = quantised_product(x, raw, fmt, variant) + (residual if with_residual else 0)
    scale = np.abs(x).astype(np.float64) @ np.abs(dequantize(raw, fmt, cols).T)
    assert (np.abs(together - expected) <= 2e-6 * scale + 1e-6).all()
    alone = linear_probe(x[2:3], raw, source, (rows, cols), variant, **{k: v[2:3] for k, v in epilogue.items()}).run([0])
    assert (alone[0] == together[2]).all()


@pytest.mark.parametrize("size", [1e-20, 1e-27, 1e-35, 1e-36, 1e-37, 1e-38, 1e-39, 0.0])
def test_a_group_of_vanishing_values_does_not_spoil_its_row(variant: str, size: float) -> None:
    """127 / size is beyond float32 from 3.7e-37 down, and an exponent below -126 would spoil the scale of the weights."""
    x = np.ones((1, 64), np.float32)
    x[0, 32:] = bf16(np.full(32, size, np.float32))
    raw = quantize(np.ones((16, 64), np.float32), FORMATS[WeightFormat.Q8_0][1])
    out = linear_probe(x, raw, SourceFormat.Q8_0, (16, 64), variant).run([0])
    assert np.allclose(out, 32.0, rtol=1e-3)


@pytest.mark.parametrize("size", [1e-20, 1e-25, 1e-30, 1e-38])
def test_rows_of_nothing_but_vanishing_values_stay_within_their_lists(variant: str, size: float) -> None:
    """Their squares underflow: without a floor every value would be an outlier, more than a row has room for."""
    x = np.full((6, 576), size, np.float32)
    x[3] = 1.0
    raw = quantize(np.ones((16, 576), np.float32), FORMATS[WeightFormat.Q8_0][1])
    out = linear_probe(bf16(x), raw, SourceFormat.Q8_0, (16, 576), variant).run(range(6))
    assert np.allclose(out[3], 576.0, rtol=1e-3)
    assert np.abs(out[[0, 1, 2, 4, 5]]).max() <= 576 * size * 1.02


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_activation_breaks_its_row_and_no_other(variant: str, broken: float) -> None:
    rng = np.random.default_rng(0)
    x = random_rows(rng, 3, 64)
    raw = quantize(rng.standard_normal((16, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0)
    sound = linear_probe(x, raw, SourceFormat.Q4_0, (16, 64), variant).run(range(3))
    matrix = bf16_bytes(x)
    matrix[1, :2] = (0xC1, 0x7F) if np.isnan(broken) else (0x80, 0x7F)
    probe = linear_probe(x, raw, SourceFormat.Q4_0, (16, 64), variant, embedding=matrix)
    out = probe.run(range(3))
    assert not np.isfinite(out[1]).any()
    assert (out[[0, 2]] == sound[[0, 2]]).all()


@pytest.mark.parametrize("exponent", [95, 106, 115])
def test_a_norm_of_huge_weights_breaks_its_rows(variant: str, exponent: int) -> None:
    """Rather than wrap into a plausible small number: rows of this size are right, or none."""
    if variant in WITH_TILES:
        pytest.skip("beside tiles no product reads groups of integers")
    factors = np.full(64, 1e-10, np.float32)
    factors[32:] = 2.0**exponent  # their squares times 1e-30 are finite
    raw = quantize(np.ones((16, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    probe = Probe(2, 16, variant=variant)
    buffer, norm = probe.input(bf16(np.full((2, 64), 2.0**-60, np.float32))), probe.engine.add_vector(factors)
    activation = probe.engine.add_activation(64, True, per_sample=False)
    probe.row(RowOpKind.QUANTIZE, out=activation, x=buffer, weight=norm, value=0.0)
    probe.flush()
    out, matrix = probe.buffer(16), probe.engine.add_matrix(SourceFormat.Q8_0, 16, 64, raw)
    probe.engine.add_linear([(matrix, activation, out, -1, -1)], samples=False)
    probe.finish(out)
    found = probe.run(range(2))
    if exponent < 100:
        assert np.allclose(found, 32 * 2.0**exponent, rtol=0.01)
    else:
        assert not np.isfinite(found).any()


def test_an_outlier_neither_loses_precision_nor_takes_it_from_its_neighbours(variant: str) -> None:
    rng = np.random.default_rng(0)
    x = random_rows(rng, 4, 512)
    x[:, 5] = 1000.0
    x[2, 300] = -900.0
    weight = np.zeros((16, 512), np.float32)
    for row, column in enumerate((6, 5, 300)):  # a neighbour, and the outliers themselves
        weight[row, column] = 1.0
    raw = quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    out = linear_probe(x, raw, SourceFormat.Q8_0, (16, 512), variant).run(range(4))
    read = (
        weights_beside_tiles(raw, WeightFormat.Q8_0, 512, variant)
        if variant in WITH_TILES
        else dequantize(raw, WeightFormat.Q8_0, 512)
    )
    seen = x.astype(np.float64)[:, [6, 5, 300]] * read[:3].max(1)
    assert np.abs(out[:, :3] - seen).max() < 4 / 127


@pytest.mark.parametrize("cols", [32, 96, 576, 1120, 2080])
def test_a_norm_quantised_at_once_is_the_norm_quantised(variant: str, cols: int) -> None:
    """To the bit, for each row whatever is computed with it: all at once, in small pieces, and from its own norm."""
    if variant in WITH_TILES:
        pytest.skip("beside tiles no product reads groups of integers")
    rng = np.random.default_rng(cols)
    x, weight = random_rows(rng, 23, cols), 1 + rng.standard_normal(cols).astype(np.float32) / 4
    x[:, 5] *= 32
    x[::3, cols // 2] *= 16
    raw = quantize(rng.standard_normal((16, cols)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)

    def probe_of(*, at_once: bool) -> Probe:
        probe = Probe(23, 16, variant=variant)
        buffer, norm = probe.input(x), probe.engine.add_vector(weight)
        activation = probe.engine.add_activation(cols, True, per_sample=False)
        if at_once:
            probe.row(RowOpKind.QUANTIZE, out=activation, x=buffer, weight=norm, value=1e-5)
        else:
            normed = probe.buffer(cols)
            probe.row(RowOpKind.RMS_NORM, out=normed, x=buffer, weight=norm, n=cols, value=1e-5)
            probe.row(RowOpKind.QUANTIZE, out=activation, x=normed)
        probe.flush()
        out, matrix = probe.buffer(16), probe.engine.add_matrix(SourceFormat.Q8_0, 16, cols, raw)
        probe.engine.add_linear([(matrix, activation, out, -1, -1)], samples=False)
        probe.finish(out)
        return probe

    whole = probe_of(at_once=True).run(range(23))
    normed = (x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight).astype(np.float32)
    expected = quantised_product(normed, raw, WeightFormat.Q8_0, variant)
    assert np.abs(whole - expected).max() < 1e-3 * np.abs(expected).max()
    assert (probe_of(at_once=False).run(range(23)) == whole).all()
    for rows in (1, 3):
        some = probe_of(at_once=True)
        for begin in range(0, 23, rows):
            tokens = range(begin, min(begin + rows, 23))
            assert (some.run(tokens) == whole[begin : begin + rows]).all(), (rows, begin)


def test_a_group_of_weights_without_a_scale_is_its_offset(variant: str) -> None:
    """d = 0 must not meet the kernels' arithmetic on exponents."""
    x = random_rows(np.random.default_rng(3), 3, 64)
    weight = np.repeat(np.float32([[0.5, 0.0]]), 32, axis=1).repeat(16, axis=0)
    weight[8:] = 0.0
    raw = quantize(weight, gguf.GGMLQuantizationType.Q4_1)
    assert (raw.reshape(16, 2, 20)[:, :, :2] == 0).all()
    out = linear_probe(x, raw, SourceFormat.Q4_1, (16, 64), variant).run(range(3))
    assert np.allclose(out, quantised_product(x, raw, WeightFormat.Q4_1, variant), rtol=1e-5, atol=1e-6)
    assert np.abs(out[:, 8:]).max() == 0.0


def test_weights_that_are_no_numbers_are_refused(variant: str) -> None:
    raw = quantize(np.ones((16, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    raw[3, 1] = 0x7E
    with pytest.raises(ValueError, match="damaged"):
        Probe(1, 16, variant=variant).engine.add_matrix(SourceFormat.Q8_0, 16, 64, raw)


@pytest.mark.parametrize(("rows", "cols", "batch"), [(16, 2, 1), (33, 63, 7), (48, 130, 14), (40, 96, 17), (16, 608, 33)])
def test_bf16_product(variant: str, rows: int, cols: int, batch: int) -> None:
    rng = np.random.default_rng(rows * cols)
    x, weight = random_rows(rng, batch, cols), random_rows(rng, rows, cols)
    out = linear_probe(x, bf16_bytes(weight), SourceFormat.BF16, (rows, cols), variant).run(range(batch))
    assert np.abs(out - x.astype(np.float64) @ weight.T.astype(np.float64)).max() < 1e-4


@pytest.mark.parametrize("cols", [96, 1056])  # an odd number of groups; outliers by column and by row
@pytest.mark.parametrize("fmt", [*FORMATS, WeightFormat.BF16])
def test_a_row_of_a_product_does_not_depend_on_its_batch(variant: str, fmt: WeightFormat, cols: int) -> None:
    rng = np.random.default_rng(7)
    x = random_rows(rng, 131, cols, outliers=True)  # more than one block of rows
    dense = rng.standard_normal((50, cols)).astype(np.float32)
    source, raw = (
        (SourceFormat.BF16, bf16_bytes(dense))
        if fmt is WeightFormat.BF16
        else (FORMATS[fmt][0], quantize(dense, FORMATS[fmt][1]))
    )
    probe = linear_probe(x, raw, source, (50, cols), variant)
    together = probe.run(range(131))
    for size in (1, 2, 3, 11, 12, 13, 25, 97):
        tokens = list(range(size))
        assert (probe.run(tokens) == together[:size]).all(), size
        assert (probe.run(tokens[::-1]) == together[:size][::-1]).all(), size


@pytest.mark.parametrize("fmt", FORMATS)
def test_embedding_a_quantised_row_is_as_exact_as_its_packed_form(variant: str, fmt: WeightFormat) -> None:
    rng = np.random.default_rng(1)
    raw = quantize(rng.standard_normal((37, 64)).astype(np.float32), FORMATS[fmt][1])
    probe = Probe(37, 64, variant=variant)
    out = probe.buffer(64)
    probe.row(RowOpKind.EMBED, out=out, weight=probe.engine.add_matrix(FORMATS[fmt][0], 37, 64, raw), value=0.5)
    probe.finish(out)
    weight, offsets = packed_weights(raw, fmt, 64)
    expected = (weight + np.repeat(offsets, 32, axis=1)) * np.float32(0.5)
    assert np.abs(probe.run(range(37)) - expected).max() <= 2e-7 * np.abs(expected).max()


@pytest.mark.parametrize(("width", "group"), [(16, 16), (37, 37), (96, 96), (96, 24)])
def test_rms_norm(variant: str, width: int, group: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = random_rows(rng, 5, width), rng.standard_normal(group).astype(np.float32)
    probe = Probe(5, width, variant=variant)
    buffer, out = probe.input(x), probe.buffer(width)
    probe.row(RowOpKind.RMS_NORM, out=out, x=buffer, weight=probe.engine.add_vector(weight), n=group, value=1e-5)
    probe.finish(out)
    grouped = x.reshape(5, -1, group).astype(np.float64)
    expected = (grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + 1e-5) * weight).reshape(5, width)
    assert np.abs(probe.run(range(5)) - expected).max() < 1e-5


@pytest.mark.parametrize(("head_dim", "half"), [(16, 8), (64, 32), (80, 40), (64, 16)])
def test_rope_rotates_halves_by_position(variant: str, head_dim: int, half: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = random_rows(rng, 6, 3 * head_dim)
    inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    probe = Probe(6, 3 * head_dim, variant=variant)
    buffer, rope = probe.input(x), probe.engine.add_rope(inv_freq, 1.25)
    probe.row(RowOpKind.ANGLES, weight=rope)
    probe.row(RowOpKind.ROPE, x=buffer, weight=rope, n=3, head_dim=head_dim)
    probe.finish(buffer)
    out = probe.run(range(6), query_lens=[6], context_lens=[7], block_tables=np.array([[1, 2]], np.int32))
    angle = (np.float32(7) + np.arange(6, dtype=np.float32))[:, None, None] * inv_freq
    cos, sin = 1.25 * np.cos(angle), 1.25 * np.sin(angle)
    heads = x.reshape(6, 3, head_dim)
    expected = heads.copy()
    a, b = heads[..., :half], heads[..., half : 2 * half]
    expected[..., :half], expected[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    assert np.abs(out - expected.reshape(6, -1)).max() < 1e-5


@pytest.mark.parametrize(("width", "has_bias"), [(16, True), (37, True), (96, False), (200, True)])
def test_layer_norm(variant: str, width: int, has_bias: bool) -> None:
    """A mean far from zero takes nothing from the variance."""
    rng = np.random.default_rng(width)
    x = bf16(random_rows(rng, 5, width) + np.array([[0], [1], [-64], [300], [0]], np.float32))
    x[4] = 7.0
    weight, bias = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    probe = Probe(5, width, variant=variant)
    buffer, out, vectors = probe.input(x), probe.buffer(width), [probe.engine.add_vector(v) for v in (weight, bias)]
    y = vectors[1] if has_bias else -1
    probe.row(RowOpKind.LAYER_NORM, out=out, x=buffer, y=y, weight=vectors[0], value=1e-5)
    probe.finish(out)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + has_bias * bias
    together = probe.run(range(5))
    assert np.abs(together - expected).max() < 2e-4
    assert np.array_equal(np.concatenate([probe.run([row]) for row in range(5)]), together)


@pytest.mark.parametrize("width", [16, 45])
@pytest.mark.parametrize("name", ACTIVATION_KINDS)
def test_activations(variant: str, name: Activation, width: int) -> None:
    """Activations have their formula's values with a gate and without; what is no number stays none."""
    rng = np.random.default_rng(width)
    gate, up = random_rows(rng, 4, width) * 8, random_rows(rng, 4, width) * 4
    gate[0, :4] = 120.0, -120.0, 0.0, -0.0  # beyond the range of exp
    gate[3, 5] = np.nan
    gated_probe, plain_probe = (Probe(4, width, variant=variant) for _ in range(2))
    raw = (gate.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(4, -1)
    x, y, out = gated_probe.input(gate, raw), gated_probe.input(up), gated_probe.buffer(width)
    gated_probe.row(RowOpKind.GATED, out=out, x=x, y=y, n=ACTIVATION_KINDS[name])
    gated_probe.finish(out)
    wanted, found = gated(gate, up, name), gated_probe.run(range(4))
    assert np.isnan(found[3, 5])
    assert (np.abs(found - wanted) <= 5e-6 + 5e-6 * np.abs(wanted))[~np.isnan(wanted)].all()
    if name != "swiglu_clamped":  # which is of a gate
        x = plain_probe.input(gate, raw)
        plain_probe.row(RowOpKind.ACTIVATE, out=x, x=x, n=ACTIVATION_KINDS[name])
        plain_probe.finish(x)
        active, found = activate(gate, name), plain_probe.run(range(4))
        assert np.isnan(found[3, 5])
        assert (np.abs(found - active) <= 1e-6 + 4e-6 * np.abs(active))[~np.isnan(active)].all()


def test_a_sum_with_a_factor(variant: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (random_rows(rng, 3, 21) for _ in range(2))
    probe = Probe(3, 21, variant=variant)
    x, y = probe.input(a), probe.input(b)
    probe.row(RowOpKind.ADD, out=x, x=x, y=y, value=0.375)
    probe.finish(x)
    assert np.abs(probe.run(range(3)) - (a + np.float32(0.375) * b)).max() < 1e-6


def test_rows_of_a_table_by_position(variant: str) -> None:
    """Beside rows that begin elsewhere; beyond its end there are none."""
    values = random_rows(np.random.default_rng(2), 20, 24)
    table = values.view(np.uint8).reshape(20, -1)
    probe = Probe(7, 24, variant=variant)
    out = probe.buffer(24)
    probe.row(RowOpKind.LOOKUP_POSITION, out=out, weight=probe.engine.add_table(SourceFormat.F32, 20, 24, table), value=1.0)
    probe.finish(out)
    tables = np.array([[1, 2], [3, 0]], np.int32)
    found = probe.run(range(7), query_lens=[5, 2], context_lens=[15, 0], block_tables=tables)
    assert np.array_equal(found, values[[15, 16, 17, 18, 19, 0, 1]])
    with pytest.raises(ValueError, match="position outside the table"):
        probe.run(range(7), query_lens=[5, 2], context_lens=[16, 0], block_tables=tables)


@pytest.mark.parametrize("columns", [1, 3, 16])
def test_a_short_convolution_reads_blocks_of_its_row_alone(variant: str, columns: int) -> None:
    """Those of its context, for which the engine checked that there are blocks; positions might name any."""
    width, rng = 5, np.random.default_rng(4)
    inputs, taps = random_rows(rng, 40, 3 * width), rng.standard_normal((columns + 1, width)).astype(np.float32)
    state = {"num_states": 1, "state_columns": columns, "state_width": width}
    probe = Probe(40, width, variant=variant, num_blocks=5, **state)
    x, out = probe.input(inputs), probe.buffer(width)
    probe.flush()  # a convolution reads other tokens' inputs: as in the lowering, they come from an instruction before
    probe.row(RowOpKind.SHORT_CONV, out=out, x=x, weight=probe.engine.add_vector(taps.reshape(-1)))
    probe.flush()
    probe.row(RowOpKind.KEEP_STATE, x=x)
    probe.finish(out)
    b, c, u = np.split(inputs, 3, axis=1)
    v = np.concatenate([np.zeros((columns, width), np.float32), bf16(b * u)])
    expected = c * sum(taps[tap] * v[tap : tap + 40] for tap in range(columns + 1))
    tables = np.array([[3, 1, 4]], np.int32)
    for moved in (0, 16):
        for begin, end in ((0, 7), (7, 8), (8, 30), (30, 32), (32, 40)):
            run = {"query_lens": [end - begin], "context_lens": [begin], "block_tables": tables}
            assert np.abs(probe.run(range(begin, end), **run, moved=moved) - expected[begin:end]).max() < 1e-5, (moved, begin)
        for block in (1, 3, 4):
            probe.engine.poison_block(block)


def test_queries_that_grow_with_their_position(variant: str) -> None:
    x = random_rows(np.random.default_rng(3), 6, 16)
    inv_freq = (100.0 ** (-np.arange(8) / 8)).astype(np.float32)
    found = []
    for growth in ((), (0.5, 4)):
        probe = Probe(6, 16, variant=variant)
        buffer, rope = probe.input(x), probe.engine.add_rope(inv_freq, 1.25, *growth)
        probe.row(RowOpKind.ANGLES, weight=rope)
        probe.row(RowOpKind.ROPE, x=buffer, weight=rope, n=1, head_dim=16)
        probe.finish(buffer)
        found.append(probe.run(range(6), query_lens=[6], context_lens=[7], block_tables=np.array([[1, 2]], np.int32)))
    expected = found[0] * (1 + 0.5 * np.log1p(np.arange(7, 13) // 4))[:, None]
    assert np.abs(found[1] - expected).max() < 1e-5


@pytest.mark.parametrize("fmt", [*FORMATS, WeightFormat.BF16])
def test_gated_product_is_gate_and_up_in_one(variant: str, fmt: WeightFormat) -> None:
    rng = np.random.default_rng(2)
    x = random_rows(rng, 14, 64)
    dense = rng.standard_normal((2, 40, 64)).astype(np.float32) / 8
    if fmt is WeightFormat.BF16:
        source, raws = SourceFormat.BF16, [bf16_bytes(w) for w in dense]
    else:
        source, raws = FORMATS[fmt][0], [quantize(w, FORMATS[fmt][1]) for w in dense]
    probe = Probe(14, 40, variant=variant)
    buffer = probe.input(x)
    quantised = fmt is not WeightFormat.BF16
    activation = probe.activation(buffer, 64, is_quantised=quantised)
    probe.flush()
    out = probe.buffer(40)
    gate, up = (probe.engine.add_matrix(source, 40, 64, raw) for raw in raws)
    probe.engine.add_gated(gate, up, activation, out, 0, False)
    probe.finish(out)
    products = (
        [quantised_product(x, raw, fmt, variant) for raw in raws]
        if quantised
        else [x.astype(np.float64) @ bf16(w).T.astype(np.float64) for w in dense]
    )
    g, u = products
    found = probe.run(range(14))
    assert np.abs(found - g / (1 + np.exp(-g)) * u).max() < 1e-4
    for few in (1, 2, 3):  # are multiplied by one matrix after the other
        assert probe.run(range(few)).tobytes() == found[:few].tobytes()


def attention_probe(
    q: F32,
    k: F32,
    v: F32,
    variant: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_threads: int = 2,
    kv_format: KvFormat = KvFormat.INT8,
    sinks: F32 | None = None,
    num_latent: int = 0,
    **options: float,
) -> Probe:
    probe = Probe(
        len(q),
        heads * head_dim,
        variant=variant,
        num_threads=num_threads,
        kv_format=kv_format,
        kv_shapes=[(kv_heads, head_dim, num_latent)],
        num_blocks=int(options.get("num_blocks", 60)),
        block_size=int(options.get("block_size", 16)),
    )
    for block in range(1, int(options.get("num_blocks", 60))):
        probe.engine.poison_block(block)
    buffers = [probe.input(x) for x in (q, k, v)]
    probe.row(RowOpKind.KV_WRITE, x=buffers[1], y=buffers[2], n=0)
    probe.flush()
    if options.get("gathered"):
        return finish_gathered(probe, buffers[0], heads, head_dim)
    out = probe.buffer(heads * head_dim)
    if options.get("is_turned"):
        turn(probe, buffers[0], heads, head_dim, samples=False)
    probe.engine.add_attention(
        buffers[0],
        out,
        0,
        heads,
        head_dim**-0.5,
        int(options.get("window", 0)),
        float(options.get("softcap", 0.0)),
        -1 if sinks is None else probe.engine.add_vector(sinks),
        of_samples=bool(options.get("of_samples", False)),
    )
    probe.finish(out)
    return probe


def turn(probe: Probe, q: int, heads: int, head_dim: int, *, samples: bool) -> None:
    rope = probe.engine.add_rope(np.geomspace(1, 1e-2, head_dim // 2).astype(np.float32), 1.0, samples=samples)
    turning = RowOp(RowOpKind.ROPE, x=q, weight=rope, n=heads, head_dim=head_dim)
    probe.engine.add_rows([RowOp(RowOpKind.ANGLES, weight=rope), turning], samples=samples)


def finish_gathered(probe: Probe, q: int, heads: int, head_dim: int) -> Probe:
    """Turn and attend with a row for each sample, as layers do that read the keys and values of others."""
    gathered, out = (probe.engine.add_buffer(heads * head_dim, per_sample=True) for _ in range(2))
    probe.engine.add_rows([RowOp(RowOpKind.GATHER, x=q, out=gathered)], samples=True)
    turn(probe, gathered, heads, head_dim, samples=True)
    probe.engine.add_attention(gathered, out, 0, heads, head_dim**-0.5, 0, 0.0, samples=True)
    probe.engine.set_logits(out)
    return probe


def attention_of(
    q: F32,
    k: F32,
    v: F32,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: F32 | None = None,
) -> F32:
    """Causal attention in float64 of the last `len(q)` positions of a sequence, whose keys and values are all there."""
    qh = q.reshape(len(q), heads, head_dim).astype(np.float64).transpose(1, 0, 2)
    kh, vh = (
        np.repeat(x.reshape(len(x), kv_heads, head_dim).astype(np.float64), heads // kv_heads, axis=1).transpose(1, 0, 2)
        for x in (k, v)
    )
    scores = qh @ kh.transpose(0, 2, 1) * head_dim**-0.5
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))[None, :]
    seen = (distance >= 0) & ((distance < window) if window else True)
    scores = np.where(seen, scores, -np.inf)
    of_sinks = np.full((heads, 1, 1), -np.inf) if sinks is None else sinks[:, None, None].astype(np.float64)
    top = np.maximum(scores.max(-1, keepdims=True), of_sinks)
    p = np.exp(scores - top)
    return (p / (p.sum(-1, keepdims=True) + np.exp(of_sinks - top)) @ vh).transpose(1, 0, 2).reshape(len(q), -1)


def rounded_queries(q: F32, heads: int, head_dim: int) -> F32:
    """A float32 scale for every 32 columns of a head: the largest of them is 127."""
    by_head = q.reshape(len(q), heads, head_dim)
    rounded = np.empty_like(by_head)
    for begin in range(0, head_dim, KEY_GROUP):
        columns = by_head[..., begin : begin + KEY_GROUP]
        scale = np.maximum(np.abs(columns).max(-1, keepdims=True), np.float32(1e-24)) * np.float32(1 / 127)
        rounded[..., begin : begin + KEY_GROUP] = np.rint(columns * (np.float32(1) / scale)) * scale
    return rounded.reshape(q.shape)


def rounded(
    q: F32, k: F32, v: F32, *, heads: int = 1, kv_heads: int = 1, head_dim: int, kv_format: KvFormat
) -> tuple[F32, F32, F32]:
    """The inputs of an attention oracle: with 16 bits all as it is, else queries as they are multiplied and what is stored."""
    if kv_format is KvFormat.INT16:
        return q, k, v
    by_head = (len(k), kv_heads, head_dim)
    if kv_format is KvFormat.INT4:
        turned = rotate(q.reshape(len(q), heads, head_dim)).reshape(q.shape)
        return (
            rotate(rounded_queries(turned, heads, head_dim).reshape(len(q), heads, head_dim)).reshape(q.shape),
            round_rotated(k.reshape(by_head), 32).reshape(k.shape),
            round_rotated(v.reshape(by_head), 16).reshape(v.shape),
        )
    return (
        rounded_queries(q, heads, head_dim),
        round_to_int8(k.reshape(by_head), KEY_GROUP).reshape(k.shape),
        round_to_int8(v.reshape(by_head), head_dim).reshape(v.shape),
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("samples", [[2, 63], [0, 1, 62, 63, 64], [63], [], [40, 41, 42, 47, 55, 63]])
def test_attention_of_samples_alone_is_theirs_among_all(variant: str, num_threads: int, samples: list[int]) -> None:
    """A decode, the ends and middles of prompts, and a long context, which several threads divide."""
    heads, head_dim = 3, 16
    query_lens, context_lens = [1, 2, 61, 1], [20, 0, 7, 400]
    num_tokens, tables = sum(query_lens), np.arange(1, 1 + 4 * 26, dtype=np.int32).reshape(4, 26)
    rng = np.random.default_rng(5)
    q, k, v = (random_rows(rng, 401, width) for width in (heads * head_dim, head_dim, head_dim))
    answers = []
    for mode in ("all", "of_samples", "gathered"):
        shape = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "num_blocks": 105, "is_turned": True, mode: True}
        probe = attention_probe(q, k, v, variant, num_threads=num_threads, **shape)
        for row, context_len in enumerate(context_lens):  # what the step sees
            if context_len:
                ids, table = range(context_len), tables[row : row + 1]
                probe.run(ids, query_lens=[context_len], block_tables=table, samples=[context_len - 1])
        ids = np.concatenate([c + np.arange(n) for n, c in zip(query_lens, context_lens, strict=True)])
        step = {"query_lens": query_lens, "context_lens": context_lens, "block_tables": tables}
        answers.append(probe.run(ids, **step, samples=range(num_tokens) if mode == "all" else samples))
    whole, *others = answers
    assert all((answer == whole[samples]).all() for answer in others)
    assert np.isfinite(whole).all()


KV_FORMATS = pytest.mark.parametrize("kv_format", list(KvFormat), ids=lambda kv_format: kv_format.name.lower())
SHAPES = [(1, 1, 16), (3, 1, 64), (4, 2, 48), (8, 1, 32), (14, 1, 16), (4, 2, 128), (2, 1, 256), (2, 1, 96)]
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "window": {"window": 19},
    "softcap": {"softcap": 5.0},
    "block32": {"block_size": 32},
    "block48": {"block_size": 48},
}
# An option concerns positions and pairs of a query and a head, never the columns of a head.
CASES = [
    (name, kind, *shape)
    for name in OPTIONS
    for kind in KvFormat
    for shape in (SHAPES if name == "plain" else [(8, 1, 32)])
    if kind is not KvFormat.INT4 or shape[-1] % 32 == 0
]
CHUNKS = [*[7] * 12, 64, *[7] * 8, 64, *[7] * 4, 4]
"""Sizes of 300 tokens' chunks: they begin anywhere in a block, and a long one reaches over the end of the first segment."""


def attention_inputs(heads: int, kv_heads: int, head_dim: int) -> list[F32]:
    rng = np.random.default_rng(heads * head_dim)
    return [random_rows(rng, sum(CHUNKS), n * head_dim) for n in (heads, kv_heads, kv_heads)]


@cache
def attention_in_float64(kv_format: KvFormat, heads: int, kv_heads: int, head_dim: int, name: str) -> F32:
    """The values that every variant is to compute of `attention_inputs`."""
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    options = {key: value for key, value in OPTIONS[name].items() if key != "block_size"}
    return attention_of(*rounded(*attention_inputs(**shape), **shape, kv_format=kv_format), **shape, **options)


@pytest.mark.parametrize(("name", "kv_format", "heads", "kv_heads", "head_dim"), CASES)
def test_attention_in_shuffled_blocks_whole_and_in_chunks(
    variant: str, name: str, heads: int, kv_heads: int, head_dim: int, kv_format: KvFormat
) -> None:
    """Longer than one segment of 256; unwritten memory is NaN; chunks of any size give the bits of the whole."""
    q, k, v = attention_inputs(heads, kv_heads, head_dim)
    length = len(q)
    table = (1 + np.random.default_rng(length).permutation(55)).astype(np.int32)[None, :20]
    made = {"kv_format": kv_format, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **OPTIONS[name]}
    whole = attention_probe(q, k, v, variant, **made).run(range(length), query_lens=[length], block_tables=table)
    error = np.abs(whole - attention_in_float64(kv_format, heads, kv_heads, head_dim, name))
    # Weights in bf16 are off by 2^-9 at most, times the spread of the values; those of 8 bits by up to 1/240 of the largest.
    assert error.max() < (2**-8 if kv_format is KvFormat.INT16 else 2**-7) * np.abs(v).max()
    assert error.mean() < (5e-4 if kv_format is KvFormat.INT16 else 1.5e-3)
    probe, begin = attention_probe(q, k, v, variant, **made), 0
    for chunk in CHUNKS:
        tokens = range(begin, begin + chunk)
        part = probe.run(tokens, query_lens=[chunk], context_lens=[begin], block_tables=table)
        assert (part == whole[begin : begin + chunk]).all(), (chunk, begin)
        begin += chunk


SINKS = np.array([-30.0, -1.0, 0.0, 3.0, 6.0, 30.0], np.float32)


@KV_FORMATS
def test_blocks_before_the_window_may_hold_anything(variant: str, kv_format: KvFormat) -> None:
    """Such as an adapter's pages, whose bytes can be infinity in bf16."""
    length, window, shape = 200, 24, {"heads": 4, "kv_heads": 2, "head_dim": 32}
    rng = np.random.default_rng(6)
    q, k, v = (random_rows(rng, length, heads * 32) for heads in (4, 2, 2))
    probe = attention_probe(q, k, v, variant, kv_format=kv_format, window=window, **shape)
    tables = np.arange(1, 14, dtype=np.int32)[None]
    probe.run(range(length - 1), query_lens=[length - 1], context_lens=[0], block_tables=tables)
    last = {"query_lens": [1], "context_lens": [length - 1], "block_tables": tables}
    expected = probe.run([length - 1], **last)
    infinities = np.full(probe.engine.block_bytes // 2, 0x7F80, np.uint16).view(np.uint8)
    for block in tables[0, : (length - window) // 16]:
        probe.engine.write_block(block, infinities)
    assert probe.run([length - 1], **last).tobytes() == expected.tobytes()


@pytest.mark.parametrize("window", [0, 19])
@KV_FORMATS
def test_a_sink_is_one_more_term_of_its_heads_softmax(variant: str, window: int, kv_format: KvFormat) -> None:
    """From one that weighs nothing to one that weighs all, in one segment and in two, whole and in chunks."""
    length, shape = 300, {"heads": 6, "kv_heads": 2, "head_dim": 32, "window": window}
    rng = np.random.default_rng(21)
    q, k, v = (random_rows(rng, length, n * 32) for n in (6, 2, 2))
    table = (1 + rng.permutation(55)).astype(np.int32)[None, :20]
    run = {"query_lens": [length], "block_tables": table}
    made = {"kv_format": kv_format, "sinks": SINKS, **shape}
    whole = attention_probe(q, k, v, variant, **made).run(range(length), **run)
    expected = attention_of(*rounded(q, k, v, heads=6, kv_heads=2, head_dim=32, kv_format=kv_format), **shape, sinks=SINKS)
    assert np.abs(whole - expected).max() < (2**-8 if kv_format is KvFormat.INT16 else 2**-7) * np.abs(v).max()
    assert np.abs(whole - expected).mean() < (5e-4 if kv_format is KvFormat.INT16 else 1.5e-3)
    without = attention_probe(q, k, v, variant, kv_format=kv_format, **shape).run(range(length), **run)
    assert (whole[:, :32] == without[:, :32]).all()
    assert np.abs(whole[:, 32:64] - without[:, 32:64]).max() > 0.05
    probe = attention_probe(q, k, v, variant, **made)
    for begin in range(0, length, 7):
        tokens = range(begin, min(begin + 7, length))
        part = probe.run(tokens, query_lens=[len(tokens)], context_lens=[begin], block_tables=table)
        assert (part == whole[begin : begin + 7]).all()


@KV_FORMATS
def test_a_sink_far_above_or_below_all_scores_breaks_nothing(variant: str, kv_format: KvFormat) -> None:
    """Scores of tens of thousands, and a sink of 1e30: the values get all of the weight, or none."""
    rng = np.random.default_rng(22)
    q, k, v = (random_rows(rng, 40, 64) for _ in range(3))
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 32, "kv_format": kv_format}
    run = {"query_lens": [40], "block_tables": np.arange(1, 4, dtype=np.int32)[None]}
    sinks = np.array([-1e30, 1e30], np.float32)
    for factor in (1.0, 2.0**16):
        found = attention_probe(q * np.float32(factor), k, v, variant, **shape, sinks=sinks).run(range(40), **run)
        without = attention_probe(q * np.float32(factor), k, v, variant, **shape).run(range(40), **run)
        assert (found[:, :32] == without[:, :32]).all()
        assert (found[:, 32:] == 0).all()


@pytest.mark.parametrize(
    ("which", "kv_format"),
    [(which, kind) for which in ("key", "value", "latent") for kind in KvFormat if (which, kind) != ("latent", KvFormat.INT4)],
)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_broken_spoils_what_sees_it_and_nothing_before(
    variant: str, which: str, broken: float, kv_format: KvFormat
) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (random_rows(rng, 60, width) for width in (128, 64, 64))
    table = np.arange(1, 6, dtype=np.int32)[None]
    num_latent = 32 if which == "latent" else 0
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "kv_format": kv_format, "num_latent": num_latent}
    run, sums = {"query_lens": [60], "block_tables": table}, np.arange(128) % 64 < (num_latent or 64)
    sound = attention_probe(q, k, v, variant, **shape).run(range(60), **run)[:, sums]
    (v if which == "value" else k)[20, 7] = broken
    spoilt = attention_probe(q, k, v, variant, **shape).run(range(60), **run)[:, sums]
    assert (spoilt[:20] == sound[:20]).all()
    assert not np.isfinite(spoilt[20:]).any()


def test_attention_scores_of_16_bits_are_finer_than_bf16(variant: str) -> None:
    """Scores of tens, where keys in bf16 alone would cost more than all that is rounded here."""
    length, head_dim, factor = 100, 64, 0.7001
    rng = np.random.default_rng(3)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    k[:, 5] *= 8  # a channel that is larger than the others
    probe = Probe(length, head_dim, variant=variant, kv_shapes=[(1, head_dim)], num_blocks=8, kv_format=KvFormat.INT16)
    buffers = [probe.input(q * 8, scale=factor), probe.input(k, scale=factor), probe.input(v)]
    probe.row(RowOpKind.KV_WRITE, x=buffers[1], y=buffers[2], n=0)
    probe.flush()
    out = probe.buffer(head_dim)
    probe.engine.add_attention(buffers[0], out, 0, 1, head_dim**-0.5, 0, 0.0)
    probe.finish(out)
    table = np.arange(1, 8, dtype=np.int32)[None]
    found = probe.run(range(length), query_lens=[length], block_tables=table)
    f = np.float32(factor)
    expected = attention_of(q * 8 * f, k * f, v, heads=1, kv_heads=1, head_dim=head_dim)
    coarse = attention_of(q * 8 * f, bf16(k * f), v, heads=1, kv_heads=1, head_dim=head_dim)
    assert np.abs(found - expected).max() < 2**-8 * np.abs(v).max()
    assert np.square(found - expected).mean() < np.square(coarse - expected).mean() / 8


@KV_FORMATS
@pytest.mark.parametrize("size", [1, 32, 256])
def test_scores_of_hundreds_and_thousands_keep_their_leaders(variant: str, kv_format: KvFormat, size: float) -> None:
    """A leader's weight is at most one, however large its score: one unit more than a byte holds would make it zero."""
    length, head_dim = 100, 32 if kv_format is KvFormat.INT4 else 16
    rng = np.random.default_rng(7)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q *= np.float32(size)
    v = np.sign(v)  # one scale for all
    probe = attention_probe(q, k, v, variant, heads=1, kv_heads=1, head_dim=head_dim, kv_format=kv_format)
    table = np.arange(1, 8, dtype=np.int32)[None]
    found = probe.run(range(length), query_lens=[length], block_tables=table)
    seen = rounded(q, k, v, head_dim=head_dim, kv_format=kv_format)
    expected = attention_of(*seen, heads=1, kv_heads=1, head_dim=head_dim)
    # A query is rounded, too, for keys of 16 bits to 2^-16 of its length, and a score by as much of itself.
    # Weights of 8 bits are off by up to a step.
    assert (
        np.abs(found - expected).max()
        < {KvFormat.INT16: 2**-8, KvFormat.INT8: 2**-7, KvFormat.INT4: 2**-6}[kv_format] + size * 2e-3
    )


@KV_FORMATS
@pytest.mark.parametrize("size", [1e3, 1e4, 3e4, 1e6, 1e8])
def test_absurd_but_finite_scores_give_the_leaders_value(variant: str, kv_format: KvFormat, size: float) -> None:
    """The leader has the whole weight, however far it is ahead: never nothing, never NaN."""
    length, head_dim = 20, 32
    rng = np.random.default_rng(1)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q, k = bf16(q * np.float32(size)), bf16(k * np.float32(size))
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim}
    probe = attention_probe(q, k, v, variant, kv_format=kv_format, **shape)
    found = probe.run(range(length), query_lens=[length], block_tables=np.arange(1, 4, dtype=np.int32)[None])
    expected = attention_of(*rounded(q, k, v, head_dim=head_dim, kv_format=kv_format), **shape)
    assert np.abs(found - expected).max() < 0.05


@pytest.mark.parametrize("size", [1e8, 1e13, 1e15])
def test_what_is_not_seen_weighs_nothing_however_low_all_scores_are(variant: str, size: float) -> None:
    length, head_dim = 20, 16
    q = np.full((length, head_dim), size, np.float32)
    k = -q * (1 + 0.01 * np.arange(length, dtype=np.float32)[:, None])
    v = np.repeat(np.arange(length, dtype=np.float32)[:, None], head_dim, axis=1)
    q, k, v = bf16(q), bf16(k), bf16(v)
    probe = attention_probe(q, k, v, variant, heads=1, kv_heads=1, head_dim=head_dim)
    found = probe.run(range(length), query_lens=[length], block_tables=np.arange(1, 4, dtype=np.int32)[None])
    assert np.abs(found).max() < 1e-3  # each sees the first position's key as the largest by far: its value is 0


@KV_FORMATS
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-25])
@pytest.mark.parametrize("window", [0, 7])
def test_a_query_of_next_to_nothing_sees_no_future(variant: str, kv_format: KvFormat, size: float, window: int) -> None:
    """All that it sees weighs the same; what it does not see weighs nothing, and chunks give the bits of the whole."""
    length, head_dim, cut = 20, 32, 6
    rng = np.random.default_rng(1)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q[cut - 1] = bf16(q[cut - 1 : cut] * np.float32(size))[0]
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim, "window": window}
    table = np.arange(1, 4, dtype=np.int32)[None]
    found = attention_probe(q, k, v, variant, kv_format=kv_format, **shape).run(
        range(length), query_lens=[length], block_tables=table
    )
    probe = attention_probe(q, k, v, variant, kv_format=kv_format, **shape)
    first = probe.run(range(cut), query_lens=[cut], block_tables=table)
    rest = probe.run(range(cut, length), query_lens=[length - cut], context_lens=[cut], block_tables=table)
    assert (np.concatenate([first, rest]) == found).all()
    expected = attention_of(*rounded(q, k, v, head_dim=head_dim, kv_format=kv_format), **shape)
    assert np.abs(found - expected).max() < 0.02


@KV_FORMATS
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFE000, 0xFFFFE000, 0xFFFFFFFF, 0x7FFF0001])
@pytest.mark.parametrize("is_key", [True, False])
def test_every_nan_breaks_its_position(variant: str, kv_format: KvFormat, bits: int, is_key: bool) -> None:
    """Rounding to bf16 would turn those with large payloads into zeros."""
    length, head_dim, at = 20, 64, 5
    rng = np.random.default_rng(1)
    rows = [random_rows(rng, length, head_dim) for _ in range(3)]
    rows[1 if is_key else 2].view(np.uint32)[at, 7] = bits
    probe = Probe(length, head_dim, variant=variant, kv_shapes=[(1, head_dim)], num_blocks=8, kv_format=kv_format)
    buffers = [probe.engine.add_buffer(head_dim, per_sample=False) for _ in rows]
    for buffer, values in zip(buffers, rows, strict=True):
        table = probe.engine.add_table(SourceFormat.F32, length, head_dim, values.view(np.uint8))
        probe.row(RowOpKind.LOOKUP, out=buffer, weight=table, value=1.0)
    probe.row(RowOpKind.KV_WRITE, x=buffers[1], y=buffers[2], n=0)
    probe.flush()
    out = probe.buffer(head_dim)
    probe.engine.add_attention(buffers[0], out, 0, 1, head_dim**-0.5, 0, 0.0)
    probe.finish(out)
    found = probe.run(range(length), query_lens=[length], block_tables=np.arange(1, 4, dtype=np.int32)[None])
    assert np.isfinite(found[:at]).all()
    assert np.isnan(found[at:]).any(axis=1).all()


@pytest.mark.parametrize("outlier", [1, 30, 1e4])
def test_a_large_value_of_little_weight_costs_the_others_nothing(variant: str, outlier: float) -> None:
    """The scale that a query's weights share is that of the largest weight times its value's size, not of the largest value."""
    length, head_dim = 200, 64
    rng = np.random.default_rng(8)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q[:, 0], k[20, 0] = 8, -32
    v[20] = bf16(v[20:21] * np.float32(outlier))
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim}
    table = np.arange(1, 14, dtype=np.int32)[None]
    found = attention_probe(q, k, v, variant, **shape).run(range(length), query_lens=[length], block_tables=table)
    seen = rounded(q, k, v, head_dim=head_dim, kv_format=KvFormat.INT8)
    error = np.abs(found - attention_of(*seen, **shape))[21:]
    assert error.max() < 0.015
    assert error.mean() < 1.6e-3


@pytest.mark.parametrize("size", [0.01, 0.0])
def test_a_small_value_of_nearly_all_weight_leaves_the_others_their_steps(variant: str, size: float) -> None:
    """As language models have it at the first position."""
    length, head_dim = 200, 64
    rng = np.random.default_rng(8)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q[:, 0], k[0, 0] = 8, 12
    v[0] *= np.float32(size)
    v = bf16(v)
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim}
    table = np.arange(1, 14, dtype=np.int32)[None]
    found = attention_probe(q, k, v, variant, **shape).run(range(length), query_lens=[length], block_tables=table)
    expected = attention_of(*rounded(q, k, v, head_dim=head_dim, kv_format=KvFormat.INT8), **shape)
    assert np.abs(expected[100:]).max() < 0.1  # of values that are larger by far
    assert np.linalg.norm(found[100:] - expected[100:]) < 0.02 * np.linalg.norm(expected[100:])


@pytest.mark.parametrize("weight", [2.5, 5.0, 6.7, 8.0])
def test_many_small_weights_count_for_what_they_are_together(variant: str, weight: float) -> None:
    """Beside a large one none of them may be worth half a step of a byte, but all together a fifth of the answer."""
    length, head_dim, columns = 200, 64, 16
    q, k = np.zeros((2, length, head_dim), np.float32)
    q[:, 0], k[5, 0] = 8, bf16(np.full(1, weight, np.float32))[0]
    v = np.ones((length, head_dim), np.float32)
    v[5, columns:] = -1  # so that it matters which part of the sum is lost
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim}
    table = np.arange(1, 14, dtype=np.int32)[None]
    found = attention_probe(q, k, v, variant, **shape).run(range(length), query_lens=[length], block_tables=table)
    expected = attention_of(*rounded(q, k, v, head_dim=head_dim, kv_format=KvFormat.INT8), **shape)
    assert np.abs(found[20:] - expected[20:]).max() < 0.015


VALUE_SIZES = {
    "alike": lambda rng, length: np.ones(length),
    "of all sizes": lambda rng, length: np.exp(6 * rng.standard_normal(length)),
    "nothing in the first segment": lambda rng, length: (np.arange(length) >= 256).astype(float),
    "nothing at every other position": lambda rng, length: np.arange(length) % 2.0,
    "tiny, then huge": lambda rng, length: np.where(np.arange(length) < 256, 1e-15, 1e20),
}


def int8_scales(v: F32) -> NDArray[np.float64]:
    """Scale of each row in 8 bits: the next bf16 above its largest size / 127."""
    wanted = np.maximum(np.abs(v).max(-1) / np.float32(127), np.float32(1e-24))
    return ((wanted.view(np.uint32) + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("values", "of_queries", "window", "common"),
    [
        *((values, 1, 0, 0) for values in VALUE_SIZES),
        *((values, *scores) for values in ("alike", "of all sizes") for scores in ((30, 0, 0), (1, 300, 0), (1, 0, 1000))),
        ("nothing in the first segment", 1, 300, 0),  # whose end some windows see, and others do not
    ],
)
def test_rounding_costs_at_most_a_step_of_every_weight(
    variant: str, values: str, of_queries: float, window: int, common: float
) -> None:
    """Steps are those of a query's segment: a 239th of its largest product of weight and value scale.

    Where all scores share a large part their own is not exact in float32.
    """
    length, head_dim, segment = 600, 64, 256
    rng = np.random.default_rng(21)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q = bf16(q * np.float32(of_queries))
    if common:
        q[:, 0] = k[:, 0] = common
    v = bf16(v * VALUE_SIZES[values](rng, length).astype(np.float32)[:, None])
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim, "window": window}
    table = np.arange(1, 39, dtype=np.int32)[None]
    found = attention_probe(q, k, v, variant, **shape).run(range(length), query_lens=[length], block_tables=table)
    seen_q, seen_k, seen_v = rounded(q, k, v, head_dim=head_dim, kv_format=KvFormat.INT8)
    scores = seen_q.astype(np.float64) @ seen_k.T.astype(np.float64) * head_dim**-0.5
    distance = np.arange(length)[:, None] - np.arange(length)
    is_seen = (distance >= 0) & (distance < (window or length))
    weights = np.exp(np.where(is_seen, scores, -np.inf) - np.where(is_seen, scores, -np.inf).max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    scales = int8_scales(v)
    allowed = 3e-4 * np.abs(weights @ seen_v) + 1e-28  # of powers of two, of sums, and of what is no number of 32 bits
    for begin in range(0, length, segment):
        part = slice(begin, begin + segment)
        products = weights[:, part] * scales[part]
        off = is_seen[:, part] * products.max(-1, keepdims=True) / 239 + (0.01 if common else 3e-4) * products
        allowed += off @ np.abs(seen_v[part] / scales[part, None])
    error = np.abs(found - weights @ seen_v)
    assert (error <= allowed).all()
    assert (error > allowed / 12).any(), "the bound says nothing"


def test_large_columns_of_a_query_cost_the_others_little(variant: str) -> None:
    """Every 32 columns of a query have a scale of their own, as those of a key do."""
    length, head_dim = 100, 64
    rng = np.random.default_rng(4)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    q[:, :32] *= 64
    k[:, :32] = 0
    shape = {"heads": 1, "kv_heads": 1, "head_dim": head_dim}
    table = np.arange(1, 8, dtype=np.int32)[None]
    found = attention_probe(q, k, v, variant, **shape).run(range(length), query_lens=[length], block_tables=table)
    q[:, :32] = 0
    alone = attention_probe(q, k, v, variant, **shape).run(range(length), query_lens=[length], block_tables=table)
    assert (found == alone).all()


@KV_FORMATS
def test_what_all_keys_share_is_not_stored(variant: str, kv_format: KvFormat) -> None:
    """Columns of hundreds beside others of one: with them taken off, 8 bits are enough for the others."""
    length, head_dim = 100, 64
    rng = np.random.default_rng(3)
    q, k, v = (random_rows(rng, length, head_dim) for _ in range(3))
    shared = np.zeros(head_dim, np.float32)
    shared[[3, 40]] = 256.0
    k = bf16(k) + shared  # no bf16: the input is given without it, and gets it as a product's bias
    expected = attention_of(q, k, v, heads=1, kv_heads=1, head_dim=head_dim)
    error = {}
    for is_centred in (True, False):
        probe = Probe(length, head_dim, variant=variant, kv_shapes=[(1, head_dim)], num_blocks=8, kv_format=kv_format)
        inputs = [probe.input(q), probe.input(bf16(k - shared)), probe.input(v), probe.input(np.tile(shared, (length, 1)))]
        key = probe.buffer(head_dim)
        probe.row(RowOpKind.ADD, out=key, x=inputs[1], y=inputs[3], value=1.0)
        centre = probe.engine.add_vector(shared) if is_centred else -1
        probe.row(RowOpKind.KV_WRITE, x=key, y=inputs[2], n=0, weight=centre)
        probe.flush()
        out = probe.buffer(head_dim)
        probe.engine.add_attention(inputs[0], out, 0, 1, head_dim**-0.5, 0, 0.0)
        probe.finish(out)
        table = np.arange(1, 8, dtype=np.int32)[None]
        found = probe.run(range(length), query_lens=[length], block_tables=table)
        error[is_centred] = np.abs(found - expected).mean()
    assert error[True] < {KvFormat.INT8: 0.01, KvFormat.INT16: 1e-3, KvFormat.INT4: 0.05}[kv_format]
    assert error[True] < error[False] / {KvFormat.INT8: 10, KvFormat.INT16: 1, KvFormat.INT4: 10}[kv_format]


def test_attention_rows_of_a_mixed_step_do_not_see_each_other(variant: str) -> None:
    """A decode row, a chunk and a fresh prompt in one step, against each alone."""
    rng = np.random.default_rng(5)
    q, k, v = (random_rows(rng, 120, n * 16) for n in (3, 1, 1))
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 16}
    tables = np.array([[1, 2, 3], [9, 8, 7], [4, 6, 5]], np.int32)
    lengths, contexts = (40, 33, 20), (39, 16, 0)
    starts = (0, 40, 73)
    expected = []
    probe = attention_probe(q, k, v, variant, **shape)
    for start, length, context, table in zip(starts, lengths, contexts, tables, strict=True):
        alone = attention_probe(q, k, v, variant, **shape)
        whole = alone.run(range(start, start + length), query_lens=[length], block_tables=table[None])
        expected.append(whole[context:])
        if context:
            probe.run(range(start, start + context), query_lens=[context], block_tables=table[None])
    tokens = [t for start, n, c in zip(starts, lengths, contexts, strict=True) for t in range(start + c, start + n)]
    queries = [n - c for n, c in zip(lengths, contexts, strict=True)]
    mixed = probe.run(tokens, query_lens=queries, context_lens=list(contexts), block_tables=tables)
    assert (mixed == np.concatenate(expected)).all()


@pytest.mark.parametrize(("window", "sinks"), [(0, None), (700, None), (0, SINKS)], ids=["plain", "window", "sinks"])
@KV_FORMATS
def test_long_attention_split_over_threads_gives_the_same_bits(
    variant: str, window: int, sinks: F32 | None, kv_format: KvFormat
) -> None:
    """One decode, or a few queries, that see six segments: one thread computes them in turn, several divide them."""
    length, num_blocks, num_queries = 1500, 100, 6
    rng = np.random.default_rng(13)
    q, k, v = (random_rows(rng, length, n * 32) for n in (6, 2, 2))
    table = (1 + rng.permutation(num_blocks - 1)).astype(np.int32)[None]
    # What is stored of a token does not depend on what it sees. With a row for each block it sees little: all of these tokens'
    # attention to each other would take portable kernels seconds.
    num_stored = length - num_queries
    of_blocks = [min(16, num_stored - begin) for begin in range(0, num_stored, 16)]
    results = []
    for num_threads in (1, 2, 3):
        shape = {"heads": 6, "kv_heads": 2, "head_dim": 32, "num_blocks": num_blocks, "window": window}
        probe = attention_probe(q, k, v, variant, num_threads=num_threads, kv_format=kv_format, sinks=sinks, **shape)
        probe.run(range(num_stored), query_lens=of_blocks, block_tables=table[0, : len(of_blocks), None])
        chunk = probe.run(range(num_stored, length - 1), query_lens=[5], context_lens=[num_stored], block_tables=table)
        decode = probe.run([length - 1], query_lens=[1], context_lens=[length - 1], block_tables=table)
        results.append(np.concatenate([chunk, decode]))
    of_q, *stored = rounded(q, k, v, heads=6, kv_heads=2, head_dim=32, kv_format=kv_format)
    expected = attention_of(of_q[num_stored:], *stored, heads=6, kv_heads=2, head_dim=32, window=window, sinks=sinks)
    assert np.abs(results[0] - expected).max() < (2**-8 if kv_format is KvFormat.INT16 else 2**-7) * np.abs(v).max()
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


def test_answers_do_not_depend_on_the_number_of_threads(variant: str) -> None:
    rng = np.random.default_rng(11)
    x, raw = (
        random_rows(rng, 30, 96),
        quantize(rng.standard_normal((200, 96)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0),
    )
    results = []
    for num_threads in (1, 2, 3):
        probe = Probe(30, 200, variant=variant, num_threads=num_threads)
        activation = probe.activation(probe.input(x), 96)
        probe.flush()
        out = probe.buffer(200)
        matrix = probe.engine.add_matrix(SourceFormat.Q4_0, 200, 96, raw)
        probe.engine.add_linear([(matrix, activation, out, -1, -1)], samples=False)
        probe.finish(out)
        results.append(probe.run(range(30)))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()
