"""Matrices on the device hold what the file says, in every format, alone and stacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.backends.cuda.kernels import dequantise
from penstock.backends.cuda.weights import CENTRES, DenseMatrix, QuantisedMatrix
from penstock.models.formats import BLOCKS, WeightFormat, grouped_integers
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError
from support.backends.cuda.weights import load, quantised, values
from support.backends.format_blocks import SPOILABLE, spoiled
from support.interpreted import DEVICE

FOUR_BITS = {"Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K"}
HAS_OFFSET = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"}


@pytest.mark.parametrize("fmt", BLOCKS)
def test_quantised_rows_are_exactly_those_of_the_file(fmt: WeightFormat) -> None:
    tensor = quantised(fmt, 5, 3)
    (matrix,) = load(tensor)
    assert isinstance(matrix, QuantisedMatrix)
    assert matrix.bits == (4 if fmt.name in FOUR_BITS else 8)
    assert (matrix.offsets is not None) == (fmt.name in HAS_OFFSET)
    np.testing.assert_allclose(values(matrix), tensor.dequantize(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", BLOCKS)
def test_nothing_but_scales_is_rounded(fmt: WeightFormat, dtype: torch.dtype) -> None:
    tensor = quantised(fmt, 3, 2)
    (matrix,) = load(tensor, dtype=dtype)
    assert isinstance(matrix, QuantisedMatrix)
    assert matrix.scales.dtype is torch.float16
    parts = grouped_integers(tensor.data, fmt, tensor.num_cols)
    error = np.abs(values(matrix) - tensor.dequantize()).reshape(*parts.scales.shape, parts.group)
    centre = CENTRES.get(fmt, 0)
    integers = np.abs(parts.integers.astype(np.int32) - centre).reshape(error.shape)
    offsets = np.zeros_like(parts.scales) if parts.offsets is None else np.abs(parts.offsets + centre * parts.scales)
    step, tiny = 2.0**-11, 2.0**-25
    assert (error <= integers * (np.abs(parts.scales) * step + tiny)[..., None] + (offsets * step + tiny)[..., None]).all()


def test_a_matrix_takes_little_more_than_in_the_file() -> None:
    for fmt, bits in ((WeightFormat.Q4_0, 4.5), (WeightFormat.Q4_K, 5), (WeightFormat.Q8_0, 8.5), (WeightFormat.Q6_K, 9)):
        tensor = quantised(fmt, 256, 2)
        (matrix,) = load(tensor, dtype=torch.float16)
        assert matrix.num_bytes * 8 == bits * tensor.num_rows * tensor.num_cols


@pytest.mark.parametrize("fmt", [WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q6_K, WeightFormat.Q5_1])
def test_rows_are_unpacked_from_any_tile_on(fmt: WeightFormat) -> None:
    tensor = quantised(fmt, 150, 3)
    (matrix,) = load(tensor)
    assert isinstance(matrix, QuantisedMatrix)
    for first, count in ((0, 150), (0, 3), (128, 22), (128, 1)):
        out = torch.full((count, tensor.num_cols), torch.nan, device=DEVICE)
        dequantise.unpack(out, matrix, first)
        np.testing.assert_allclose(out.cpu().numpy(), tensor.dequantize()[first : first + count], rtol=1e-6, atol=1e-7)


def test_matrices_of_one_layout_are_stacked_and_others_follow() -> None:
    kinds = (WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.Q5_1, WeightFormat.Q4_0)
    tensors = [quantised(fmt, 7 + i, 2, seed=i) for i, fmt in enumerate(kinds)]
    matrices = load(*tensors)
    assert [matrix.num_rows for matrix in matrices] == [7 + 8, 9 + 10, 11]
    found = np.concatenate([values(matrix) for matrix in matrices])
    np.testing.assert_allclose(found, np.concatenate([t.dequantize() for t in tensors]), rtol=1e-5, atol=1e-6)


def test_floats_of_all_kinds_become_one_matrix() -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    tensors = [
        WeightTensor("a", 3, 6, WeightFormat.F32, numbers),
        WeightTensor("b", 3, 6, WeightFormat.F16, numbers.astype(np.float16)),
        WeightTensor("c", 3, 6, WeightFormat.BF16, bits),
    ]
    (matrix,) = load(*tensors)
    assert isinstance(matrix, DenseMatrix)
    assert np.array_equal(values(matrix), np.concatenate([t.dequantize() for t in tensors]))
    (narrow,) = load(tensors[2], dtype=torch.bfloat16)
    assert np.array_equal(narrow.values.cpu().view(torch.int16).numpy().view(np.uint16), bits)


def test_an_embedding_is_scaled() -> None:
    tensor = quantised(WeightFormat.Q8_0, 9, 1)
    (matrix,) = load(tensor)
    out = torch.full((4, 32), torch.nan, device=DEVICE)
    dequantise.look_up(out, matrix, torch.tensor([8, 0, 3, 3], dtype=torch.int32, device=DEVICE), 3.0)
    np.testing.assert_allclose(out.cpu().numpy(), 3 * tensor.dequantize()[[8, 0, 3, 3]], rtol=1e-6)


@pytest.mark.parametrize("fmt", BLOCKS)
def test_formats_with_offsets_have_a_centre(fmt: WeightFormat) -> None:
    assert (fmt in CENTRES) == (fmt.name in HAS_OFFSET)


@pytest.mark.parametrize("fmt", SPOILABLE)
def test_a_scale_that_is_no_number_is_refused(fmt: WeightFormat) -> None:
    tensor = quantised(fmt, 20, 2)
    for broken in (np.inf, np.nan):
        damaged = tensor.data.copy()
        damaged[19] = next(spoiled(np.full_like(damaged[19], 255), fmt, broken))
        with pytest.raises(ModelError, match="no finite number"):
            load(WeightTensor("w", 20, tensor.num_cols, fmt, damaged))
