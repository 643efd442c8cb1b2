"""The meaning of the quantised formats, against the `gguf` package, which is written by the format's authors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from penstock.models.formats import BLOCKS, WeightFormat, dequantize, stored_bytes

BY_HAND = (WeightFormat.Q1_0, WeightFormat.Q2_0)
"""Formats that the package does not decode."""


@pytest.mark.parametrize("fmt", [fmt for fmt in BLOCKS if fmt not in BY_HAND])
def test_blocks_of_any_bytes_mean_what_the_package_says(fmt: WeightFormat) -> None:
    kind = gguf.GGMLQuantizationType[fmt.name]
    cols, num_bytes = BLOCKS[fmt]
    assert gguf.GGML_QUANT_SIZES[kind] == (cols, num_bytes)
    raw = np.random.default_rng(1).integers(0, 256, (7, 3 * num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some scales are infinite
        wanted = gguf.quants.dequantize(raw, kind)
    values = dequantize(raw, fmt, 3 * cols)
    assert values.shape == (7, 3 * cols)
    assert np.array_equal(values, wanted, equal_nan=True)
    assert stored_bytes(fmt, 7, 3 * cols) == raw.nbytes


@pytest.mark.parametrize("fmt", BY_HAND)
def test_bits_and_pairs_of_bits_mean_what_ggml_says(fmt: WeightFormat) -> None:
    """Source: `dequantize_row_q1_0` and `dequantize_row_q2_0` in ggml-quants.c."""
    cols, num_bytes = BLOCKS[fmt]
    raw = np.random.default_rng(1).integers(0, 256, (5, 2 * num_bytes), dtype=np.uint8)
    raw.reshape(-1, num_bytes)[:, :2] = np.linspace(-1, 2, 10, dtype=np.float16)[:, None].view(np.uint8)
    wanted = []
    for block in raw.reshape(-1, num_bytes):
        d = float(block[:2].copy().view(np.float16)[0])
        for j in range(cols):
            if fmt is WeightFormat.Q1_0:
                wanted.append(d if block[2 + j // 8] >> (j % 8) & 1 else -d)
            else:
                wanted.append((int(block[2 + j // 4] >> (j % 4 * 2) & 3) - 1) * d)
    assert np.array_equal(dequantize(raw, fmt, 2 * cols).reshape(-1), wanted)
    assert stored_bytes(fmt, 5, 2 * cols) == raw.nbytes


@pytest.mark.parametrize(("fmt", "num_bytes"), [(WeightFormat.F32, 24), (WeightFormat.BF16, 12)])
def test_floats(fmt: WeightFormat, num_bytes: int) -> None:
    values = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.5]], np.float32)
    raw = values if fmt is WeightFormat.F32 else (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(dequantize(raw, fmt, 3), values)
    assert stored_bytes(fmt, 2, 3) == num_bytes
