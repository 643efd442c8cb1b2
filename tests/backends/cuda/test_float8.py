"""fp8: rounded to nearest even, never beyond the type; a file's numbers stay exact, every code is widened right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import and_, lshift, rshift

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backends.cuda import float8
from penstock.backends.cuda.kernels import dequantise
from penstock.backends.cuda.kernels.numbers import float8_widening
from penstock.backends.cuda.weights import DenseMatrix, Matrix, QuantisedMatrix, load_matrices
from penstock.models.formats import E4M3_VALUES, Floats, WeightFormat, held_bytes
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError
from support.backends.cuda.float8_weights import float8_blocks, float8_rows
from support.backends.cuda.gemm import activations, dense, expected, product
from support.backends.cuda.weights import load, quantised, values
from support.fp8_models import to_e4m3
from support.interpreted import DEVICE

F32 = NDArray[np.float32]
NUMBERS = np.array(E4M3_VALUES, np.float32)


def rounded(tensor: WeightTensor, dtype: torch.dtype = torch.float32) -> QuantisedMatrix:
    (matrix,) = load_matrices([tensor], dtype, torch.device(DEVICE), round_to_fp8=True)
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def tensor_of(numbers: F32) -> WeightTensor:
    return WeightTensor("w", *numbers.shape, WeightFormat.F32, numbers)


def round_rows(numbers: F32) -> tuple[NDArray[np.uint8], F32]:
    codes, scales = float8.round_rows(torch.from_numpy(numbers).to(DEVICE))
    return codes.cpu().numpy().view(np.uint8), scales.cpu().numpy()


# Rounding


def test_codes_mean_what_torch_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(codes.view(torch.float8_e4m3fn).float().numpy(), NUMBERS, equal_nan=True)


def test_rows_are_rounded_to_the_nearest_number_times_a_power_of_two() -> None:
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal((40, 200)) * 10.0 ** rng.uniform(-30, 30, (40, 1))).astype(np.float32)
    codes, scales = round_rows(numbers)
    assert (np.frexp(scales)[0] == 0.5).all()
    assert np.array_equal(codes, to_e4m3(numbers / scales[:, None]))
    largest = np.abs(numbers).max(axis=1) / scales
    assert ((largest > 224) & (largest <= 448)).all()
    error = np.abs(NUMBERS[codes] * scales[:, None] - numbers)
    assert (error <= np.maximum(np.abs(numbers) * 2.0**-4, scales[:, None] * 2.0**-10)).all()


def test_the_largest_of_a_row_is_never_beyond_the_type() -> None:
    """Where a mantissa is just above that of 448, the scale doubles; just below, numbers round up to 448 at most."""
    edges = np.float32([448, np.nextafter(np.float32(448), np.float32(0)), np.nextafter(np.float32(448), np.float32(999))])
    tops = np.concatenate([edges * np.float32(2.0**power) for power in (-100, -9, 0, 1, 100)])[:, None]
    codes, scales = round_rows(np.concatenate([tops, -tops, tops / 3], axis=1))
    assert not np.isnan(NUMBERS[codes]).any()
    np.testing.assert_allclose(NUMBERS[codes] * scales[:, None], np.concatenate([tops, -tops, tops / 3], axis=1), rtol=2.0**-4)


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite() -> None:
    numbers = np.zeros((3, 64), np.float32)
    numbers[1, 3], numbers[2, 5] = 1e-38, 1e-45
    matrix = rounded(tensor_of(numbers))
    found = values(matrix)
    assert np.isfinite(found).all()
    assert not found[0].any()
    assert found[1, 3] == pytest.approx(1e-38, rel=0.07)
    assert np.abs(found - numbers).max() < 1e-39
    assert np.array_equal(values(rounded(tensor_of(numbers[:1]))), numbers[:1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_finite_number_is_refused(bad: float) -> None:
    numbers = np.ones((300, 32), np.float32)
    numbers[290, 7] = bad
    with pytest.raises(ModelError, match="'w' has a weight that is no finite number"):
        rounded(tensor_of(numbers))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused(code: int) -> None:
    tensor = float8_rows(3, 32)
    tensor.data[2, 31] = code
    with pytest.raises(ModelError, match="no finite number"):
        load(tensor)


# Layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_rounded_is_exact_from_then_on(dtype: torch.dtype) -> None:
    """In every type of activations, looked up and unpacked: scales are powers of two."""
    numbers = np.random.default_rng(1).standard_normal((150, 70)).astype(np.float32)
    matrix = rounded(tensor_of(numbers), dtype)
    codes, scales = round_rows(numbers)
    wanted = NUMBERS[codes] * scales[:, None]
    assert np.array_equal(values(matrix), wanted)
    if dtype is not torch.bfloat16 or DEVICE == "cuda":  # of which the interpreter knows no products
        out = torch.full((22, 70), torch.nan, dtype=dtype, device=DEVICE)
        dequantise.unpack(out, matrix, 128)
        assert np.array_equal(out.float().cpu().numpy(), wanted[128:])


@pytest.mark.parametrize("shape", [(5, 70), (130, 64), (1, 1), (300, 200)])
def test_a_files_numbers_and_scales_of_rows_are_exact(shape: tuple[int, int]) -> None:
    tensor = float8_rows(*shape)
    (matrix,) = load(tensor, dtype=torch.bfloat16)
    assert isinstance(matrix, QuantisedMatrix)
    assert matrix.scales is None
    assert np.array_equal(values(matrix), tensor.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (7, 96)])
def test_scales_of_blocks_lose_no_more_than_half_precision(block: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = float8_blocks(150, 300, *block)
    (matrix,) = load(tensor, dtype=dtype)
    assert isinstance(matrix, QuantisedMatrix)
    assert matrix.group == 32
    wanted = tensor.dequantize()
    largest = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(values(matrix) - wanted) <= np.abs(wanted) * 2.0**-11 + largest * 2.0**-24).all()
    out = torch.full((150, 300), torch.nan, dtype=dtype, device=DEVICE)
    dequantise.unpack(out, matrix, 0)
    np.testing.assert_allclose(out.float().cpu().numpy(), wanted, rtol=1e-3 if dtype is torch.float32 else 3e-3, atol=1e-5)


def test_many_rows_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.cuda.weights.CHUNK_ROWS", 7)
    tensors = [float8_rows(20, 64, seed=1), dense(10, 64), float8_rows(9, 64, seed=2)]
    (matrix,) = load_matrices(tensors, torch.float32, torch.device(DEVICE), round_to_fp8=True)
    codes, scales = round_rows(np.asarray(tensors[1].data, np.float32))
    wanted = [tensors[0].dequantize(), NUMBERS[codes] * scales[:, None], tensors[2].dequantize()]
    assert np.array_equal(values(matrix), np.concatenate(wanted))


def test_layouts_that_differ_are_matrices_of_their_own() -> None:
    tensors = [float8_rows(4, 64), float8_blocks(5, 64, 5, 32), dense(6, 64), quantised(WeightFormat.Q8_0, 7, 2)]
    kept: list[Matrix] = load(*tensors)
    assert [(matrix.num_rows, isinstance(matrix, DenseMatrix)) for matrix in kept] == [
        (4, False),
        (5, False),
        (6, True),
        (7, False),
    ]
    assert [getattr(matrix, "is_float", None) for matrix in kept] == [True, True, None, False]


def test_a_matrix_takes_what_is_planned_for_it() -> None:
    for floats, tensor in ((Floats.AS_STORED, float8_rows(256, 192)), (Floats.FP8, dense(256, 192))):
        assert rounded(tensor).num_bytes == held_bytes(tensor.format, 256, 192, floats) == 256 * (192 + 4)
    (blocks,) = load(float8_blocks(256, 192, 128, 128), dtype=torch.float16)
    wanted = held_bytes(WeightFormat.F8_E4M3, 256, 192, Floats.AS_STORED, has_blocks=True)
    assert blocks.num_bytes == wanted == 256 * (192 + 4 + 2 * 6)


# Products


def test_a_product_with_blocks_is_that_of_the_values() -> None:
    tensors, x = [float8_blocks(130, 256, 128, 128)], activations(17, 256)
    for deterministic in (False, True):
        np.testing.assert_allclose(product(tensors, x, deterministic=deterministic), expected(tensors, x), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["f32", "f16", "bf16"]
)
def test_every_number_is_multiplied_exactly(dtype: torch.dtype) -> None:
    """The smallest, which are subnormal while they are widened, the largest and zeros; one column: nothing is added up."""
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    tensor = float8_rows(len(codes), 1)
    assert tensor.scales is not None
    tensor.scales.values[:] = 0.5
    tensor.data[:, 0] = codes
    for num_tokens in (1, 130):  # the latter unpacked before
        found = product([tensor], np.full((num_tokens, 1), 2.0, np.float32), dtype=dtype)
        assert np.array_equal(found, np.broadcast_to(NUMBERS[codes], found.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens", [1, 60, 300])
def test_blocks_and_rounded_weights_on_the_device(tokens: int, deterministic: bool) -> None:
    blocks, x = float8_blocks(300, 1024, 128, 128), activations(tokens, 1024)
    found, wanted = product([blocks], x, deterministic=deterministic, dtype=torch.bfloat16), expected([blocks], x)
    assert np.sqrt(((found - wanted) ** 2).mean()) < 0.01 * np.sqrt((wanted**2).mean())


def test_rounding_weights_changes_a_product_by_the_precision_of_the_type() -> None:
    """Three bits of mantissa: errors are even within half a step, so 2.6 % of a weight, rms, and of a product."""
    tensor, x = dense(64, 512), activations(8, 512)
    matrix = rounded(tensor)
    found = x @ values(matrix).T
    wanted = x @ tensor.dequantize().T
    relative = np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean())
    assert 0.02 < relative < 0.033


# The assembler's instructions, which the interpreter has not


OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"shl": lshift, "shr": rshift, "and": and_}


def evaluate(ptx: str, word: int) -> int:
    """The one 32-bit register that the instructions make of another: shifts, `and` and `lop3`."""
    registers: dict[str, int] = {"$1": word}

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for name, arguments in re.findall(r"^\s*([a-z0-9.]+)\.b32 (\S.*);", ptx, re.MULTILINE):
        if name == ".reg":
            continue
        out, *given = (part.strip() for part in arguments.split(","))
        a, b, *rest = (read(part) for part in given)
        if name == "lop3":
            c, table = rest
            bits = (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1 for i in range(32))
            registers[out] = sum(bit << i for i, bit in enumerate(bits))
        else:
            registers[out] = OPERATIONS[name](a, b) & 0xFFFFFFFF
    return registers["$0"]


def float_of(bits: int, *, is_half: bool) -> float:
    if is_half:
        return float(np.array([bits], np.uint16).view(np.float16)[0]) * 256
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0]) * 2.0**120


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_the_instructions_widen_every_code_whatever_lies_beside_it(which: int, is_half: bool) -> None:
    ptx = float8_widening(which, is_half)
    for code in range(256):
        if code & 127 == 127:
            continue
        for other in (0x00, 0xFF, 0x5A):
            low = code << 8 | other if which else other << 8 | code
            for word, shift in ((0xA55A << 16 | low, 0), (low << 16 | 0xFFFF, 16)):
                bits = evaluate(ptx, word) >> shift & 0xFFFF
                assert float_of(bits, is_half=is_half) == E4M3_VALUES[code]


def test_the_evaluated_instructions_are_all_there_are() -> None:
    names: Mapping[str, int] = {"shl": 1, "shr": 0, "and": 1, "lop3": 1}
    found = re.findall(r"^\s*([a-z0-9]+)\.b32", float8_widening(0, False), re.MULTILINE)
    assert {name: found.count(name) for name in names} == {"shl": 2, "shr": 0, "and": 1, "lop3": 1}
