"""Products of integers with one scale for each row of weights and activations: against NumPy, in every variant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native._native import RowOpKind, SourceFormat, usable_variants
from support.backends.native_probe import Probe, bf16
from support.native_variants import VARIANTS

F32 = NDArray[np.float32]
NUM_ROWS = 29


def random(rows: int, cols: int, seed: int = 0) -> F32:
    return bf16(np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32))


def multiply(
    x: F32,
    w: F32,
    variant: str,
    *,
    has_zero: bool = False,
    has_gelu: bool = False,
    rows: list[int] | None = None,
    apart: Sequence[int] = (),
) -> F32:
    """x @ w.T + bias, or its GELU, of some rows, or all, with the bias 0, 0.01, 0.02 and so on. [rows, len(w)]"""
    probe = Probe(len(x), len(w), variant=variant)
    values, out = probe.input(x), probe.buffer(len(w))
    activation = probe.engine.add_activation(x.shape[1], True, per_sample=False, by_row=True)
    matrix = probe.engine.add_matrix(SourceFormat.F32, *w.shape, w.view(np.uint8), by_row=True, apart=apart)
    probe.row(RowOpKind.ROUND, out=activation, x=values, weight=matrix if apart else -1, n=int(has_zero))
    probe.flush()
    bias = probe.engine.add_vector(np.arange(len(w), dtype=np.float32) / 100)
    probe.engine.add_linear([(matrix, activation, out, bias, -1)], False, has_gelu)
    probe.finish(out)
    return probe.run(range(len(x)) if rows is None else rows)


def rounded(x: F32, *, has_zero: bool = False) -> NDArray[np.float64]:
    """The numbers that `round_rows` makes of rows: in float32, so that no tie is rounded to the other side."""
    sizes = np.abs(x)
    if has_zero:
        low, high = np.maximum(-x, 0).max(1, keepdims=True), np.maximum(x, 0).max(1, keepdims=True)
        scale = (low + high) / np.float32(255)
    else:
        limit = np.float32(6) * np.sqrt((sizes**2).mean(1, keepdims=True))
        bound = np.where(sizes > limit, np.float32(0), sizes).max(1, keepdims=True)
        scale = np.maximum(bound / np.float32(127), sizes.max(1, keepdims=True) / np.float32(32767))
    inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
    zero = np.rint(low * inverse) - np.float32(128) if has_zero else np.float32(0)
    shifted = (x.astype(np.float64) * inverse + zero).astype(np.float32)  # one rounding
    return (np.rint(shifted).astype(np.float64) - zero) * scale


def rounded_weights(w: F32) -> NDArray[np.float64]:
    scale = np.abs(w).max(1, keepdims=True) / np.float32(127)
    return np.rint(w * (np.float32(1) / scale)).astype(np.float64) * scale


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("cols", "channels"), [(32, 16), (96, 5), (384, 70), (1120, 33)])
@pytest.mark.parametrize("has_zero", [False, True])
def test_products_are_those_of_the_rounded_numbers(variant: str, cols: int, channels: int, has_zero: bool) -> None:
    x, w = random(NUM_ROWS, cols), random(channels, cols, 1)
    x[3::4, cols // 3] = 80.0  # outliers where there are columns enough
    x[5, 7] = -6016.0
    x[9] = 0.0
    if has_zero:
        x = np.maximum(x, bf16(np.float32([-0.17]))[0])
    expected = rounded(x, has_zero=has_zero) @ rounded_weights(w).T + np.arange(channels) / 100
    found = multiply(x, w, variant, has_zero=has_zero)
    size = np.abs(expected).max(1, keepdims=True)
    assert (np.abs(found - expected) / size).max() < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_outliers_leave_the_other_columns_their_precision(variant: str) -> None:
    x, w = random(NUM_ROWS, 384), random(48, 384, 1)
    x[:, [5, 200]] = [90.0, -120.0]
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + np.arange(48) / 100
    error = multiply(x, w, variant) - exact
    assert np.sqrt((error**2).mean() / exact.var()) < 0.01


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("has_zero", [False, True])
def test_the_largest_weights_by_a_rows_least_integer(variant: str, has_zero: bool) -> None:
    """Weights are never below -127, but integers of rows are -128: outliers, or the least number of a row with a zero."""
    w = np.full((70, 384), 127, np.float32)
    w[1::3] = -127
    w[2::3, ::2] = -127
    x = np.full((7, 384), -128 if has_zero else 127, np.float32)
    if has_zero:
        x[:, 200] = 127  # so that the scale is 1, and the zero is 0
        x[5] += 128  # here the zero is -128, the integer of 0
    else:
        x[1::2] = -127
        x[:, 4:6] = [-1024, -1000]  # two of the same four, whose scale is that of the others
        x[3:5, 11] = 1016
    sums = x.astype(np.int64) @ w.T.astype(np.int64)
    expected = (sums + np.arange(70, dtype=np.float32) / np.float32(100)).astype(np.float32)
    assert np.array_equal(multiply(x, w, variant, has_zero=has_zero), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("has_zero", [False, True])
def test_columns_apart_are_multiplied_as_floats(variant: str, has_zero: bool) -> None:
    """They may be as large as they like: the other columns' rounding does not notice."""
    x, w = random(NUM_ROWS, 384), random(70, 384, 1)
    apart = [0, 5, 101, 383]
    x[:, apart], w[:, apart] = 1024 * x[:, apart], 1024 * w[:, apart]
    x[2, apart], w[7, apart] = 0, 0
    small_x, small_w = x.copy(), w.copy()
    small_x[:, apart], small_w[:, apart] = 0, 0
    of_floats = x[:, apart].astype(np.float64) @ w[:, apart].T.astype(np.float64)
    of_integers = rounded(small_x, has_zero=has_zero) @ rounded_weights(small_w).T + np.arange(70) / 100
    found = multiply(x, w, variant, has_zero=has_zero, apart=apart)
    np.testing.assert_allclose(found, of_integers + of_floats, rtol=0, atol=1e-6 * np.abs(of_floats).max())
    np.testing.assert_allclose(found[2], of_integers[2], rtol=0, atol=1e-6 * np.abs(of_integers[2]).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_gelu_of_a_product(variant: str) -> None:
    from math import erf

    x, w = random(NUM_ROWS, 64), random(20, 64, 1)
    sums = multiply(x, w, variant).astype(np.float64)
    expected = sums * (1 + np.vectorize(erf)(sums / np.sqrt(2))) / 2
    assert np.abs(sums).max() > 20
    np.testing.assert_allclose(multiply(x, w, variant, has_gelu=True), expected, rtol=0, atol=1.5e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("apart", [[], [1, 2, 64, 383]])
def test_a_rows_bits_are_the_same_alone_and_beside_others(variant: str, apart: list[int]) -> None:
    x, w = random(NUM_ROWS, 384), random(112, 384, 1)
    x[::3, 40] = 77.0
    expected = multiply(x, w, variant, has_gelu=True, apart=apart)
    for rows in ([0], [6], [3, 4], [1, 9, 2], list(range(5)), list(range(6, 13)), list(range(28, 10, -1))):
        found = multiply(x, w, variant, has_gelu=True, rows=rows, apart=apart)
        assert found.tobytes() == expected[rows].tobytes()
    if variant != "portable":  # which has no fused operations
        assert expected.tobytes() == multiply(x, w, usable_variants()[-2], has_gelu=True, apart=apart).tobytes()


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("apart", [[], [0, 1, 2, 63], [3, 4, 5, 6]])
def test_a_row_with_no_number_spoils_itself_alone(variant: str, has_zero: bool, apart: list[int]) -> None:
    x, w = random(NUM_ROWS, 64), random(20, 64, 1)
    clean = multiply(x, w, variant, has_zero=has_zero, apart=apart)
    x[4, 3], x[8, 63], x[9, 0] = np.nan, np.inf, -np.inf
    found = multiply(x, w, variant, has_zero=has_zero, apart=apart)
    assert np.isnan(found[[4, 8, 9]]).all()
    others = np.delete(np.arange(NUM_ROWS), [4, 8, 9])
    assert found[others].tobytes() == clean[others].tobytes()


def test_what_has_no_such_form_is_refused() -> None:
    engine = Probe(4, 4, variant=VARIANTS[0]).engine
    for fmt, rows, cols in ((SourceFormat.F32, 4, 40), (SourceFormat.F32, 1, 8224), (SourceFormat.Q8_0, 4, 32)):
        with pytest.raises(ValueError, match="needs float weights, a multiple of 32 columns"):
            engine.add_matrix(fmt, rows, cols, by_row=True)
    w = random(4, 32)
    w[2, 9] = np.inf
    with pytest.raises(ValueError, match="no finite number"):
        engine.add_matrix(SourceFormat.F32, 4, 32, w.view(np.uint8), by_row=True)
    for apart, message in (([0], "four columns"), ([0, 1, 2, 32], "not one of"), ([0, 1, 2, -1], "not one of")):
        with pytest.raises(ValueError, match=message):
            engine.add_matrix(SourceFormat.F32, 4, 32, by_row=True, apart=apart)
    with pytest.raises(ValueError, match="only matrices `by_row`"):
        engine.add_matrix(SourceFormat.F32, 4, 32, apart=[0, 1, 2, 3])
    plain = engine.add_matrix(SourceFormat.F32, 4, 32)
    with pytest.raises(ValueError, match="lack activations"):
        engine.add_linear([(plain, 0, 0, -1, -1)], False, has_gelu=True)
