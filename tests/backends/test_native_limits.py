"""Products of the largest integers that weights and activations have: kernels with sums of 16 bits have no room for more."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native._native import usable_variants
from penstock.backends.native.lowering import SOURCE_FORMATS
from penstock.models.formats import WeightFormat, dequantize
from support.backends.native_probe import F32, Probe, bf16
from support.native_variants import VARIANTS, WITHOUT_TILES

EXTREMES = {
    WeightFormat.Q4_0: ([1], 16, 0x00, 0xFF),
    WeightFormat.Q4_1: ([1, 0], 16, 0x00, 0xFF),
    WeightFormat.IQ4_NL: ([1], 16, 0x00, 0xFF),
    WeightFormat.Q8_0: ([1], 32, 0x80, 0x7F),
}
"""The f16 numbers of a block of 32 columns, how many bytes follow, and the bytes of the least and of the largest weight."""
CHANNELS = 40  # whole panels of 16, and a part of one
HUGE = bf16(np.float32([1e10]))[0]


def blocks(numbers: list[float], data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a file's rows of blocks with these numbers and bytes. [channels, bytes of a row]"""
    head = np.broadcast_to(np.array(numbers, np.float16).view(np.uint8), (*data.shape[:2], 2 * len(numbers)))
    return np.concatenate([head, data], axis=-1).reshape(len(data), -1)


def extreme_weights(fmt: WeightFormat, groups: int) -> NDArray[np.uint8]:
    """Return rows of the largest weight alone; every other row has the least one instead."""
    numbers, num_bytes, least, largest = EXTREMES[fmt]
    data = np.full((CHANNELS, groups, num_bytes), largest, np.uint8)
    data[1::2] = least
    return blocks(numbers, data)


def multiply(x: F32, raw: NDArray[np.uint8], fmt: WeightFormat, variant: str) -> F32:
    """Return x @ w.T, after a check that each row has the same bits alone. [rows, channels]"""
    probe = Probe(len(x), len(raw), variant=variant)
    activation = probe.activation(probe.input(x), x.shape[1])
    probe.flush()
    out, matrix = probe.buffer(len(raw)), probe.engine.add_matrix(SOURCE_FORMATS[fmt], len(raw), x.shape[1], raw)
    probe.engine.add_linear([(matrix, activation, out, -1, -1)], samples=False)
    probe.finish(out)
    found = probe.run(range(len(x)))
    assert all(probe.run([row]).tobytes() == found[row].tobytes() for row in range(len(x)))
    return found


@pytest.mark.parametrize("fmt", EXTREMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_weights_by_the_largest_activations(variant: str, fmt: WeightFormat) -> None:
    x = np.full((7, 96), 127, np.float32)  # more rows than a tile, and an odd number of groups
    x[1] = -127
    x[2:4, 32:64] = [[-127], [0]]
    x[4:6, ::2] = [[-127], [0]]
    x[6, 3::4] = -127
    raw = extreme_weights(fmt, 3)
    weights = dequantize(raw, fmt, 96).astype(np.int64)
    assert [weights.min(), weights.max()] == {"q4_0": [-8, 7], "q4_1": [0, 15], "iq4_nl": [-127, 113], "q8_0": [-128, 127]}[fmt]
    assert np.array_equal(multiply(x, raw, fmt, variant), x.astype(np.int64) @ weights.T)


@pytest.mark.parametrize("fmt", [WeightFormat.Q8_0, WeightFormat.IQ4_NL])
@pytest.mark.parametrize("variant", WITHOUT_TILES)
def test_the_integer_of_a_huge_outlier_is_127_or_its_negative(variant: str, fmt: WeightFormat) -> None:
    """The rests of two outliers cancel, so the result shows the integer of the one that is among ones, which become 64."""
    x = np.zeros((8, 160), np.float32)
    x[:5, 9] = [HUGE, -HUGE, HUGE, HUGE, -HUGE]
    x[2:5, 130] = -x[2:5, 9]
    x[3:5, :32] += x[3:5, :32] == 0
    x[5:] = x[2:5, ::-1]  # the last group is on its own, the first ones are rounded four at a time
    raw = extreme_weights(fmt, 5)
    weights = dequantize(raw, fmt, 160)[:, 0]
    found = multiply(x, raw, fmt, variant)
    assert np.array_equal(found[:2], np.float32([HUGE, -HUGE])[:, None] * weights)
    assert not found[[2, 5]].any()  # 127 and -127 times the smallest scale
    assert np.array_equal(found[[3, 4, 6, 7]] / weights * 64 - 31 * 64, np.outer([127, -127] * 2, np.ones(CHANNELS)))


@pytest.mark.parametrize("fmt", [WeightFormat.Q8_0, WeightFormat.IQ4_NL])
def test_rows_with_huge_outliers_have_the_same_bits_in_the_variants_of_avx_and_of_neon(fmt: WeightFormat) -> None:
    rng, (_, num_bytes, least, largest) = np.random.default_rng(4), EXTREMES[fmt]
    data = rng.integers(0, 256, (CHANNELS, 5, num_bytes), np.uint8)
    data[:, :, 9] = rng.choice([least, largest], (CHANNELS, 1))  # the outliers' own weights: their rests cancel
    x = bf16(rng.standard_normal((7, 160)).astype(np.float32))
    x[::2, 32:64] = x[1, :32] = 0
    x[:, 9] = HUGE * np.float32([1, 1, 1, 1, -1, -1, -1])
    x[:, 137] = -x[:, 9]
    variants = [name for name in usable_variants() if name.startswith(("avx", "neon"))]
    assert len({multiply(x, blocks([0.5], data), fmt, name).tobytes() for name in variants}) <= 1
