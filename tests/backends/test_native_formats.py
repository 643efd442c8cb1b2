"""Every format of weights, repacked: the native backend computes with what `dequantize` says, as exactly as promised."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native._native import RowOpKind, SourceFormat
from penstock.backends.native.lowering import SOURCE_FORMATS
from penstock.models.formats import BLOCKS, Floats, WeightFormat, dequantize, grouped_integers, held_bytes, stored_bytes
from support.backends.format_blocks import SPOILABLE, random_blocks, spoiled
from support.backends.native_probe import F32, Probe, bf16, bf16_bytes
from support.native_variants import VARIANTS, WITH_TILES

EXACT = {
    WeightFormat.Q4_0,
    WeightFormat.Q5_0,
    WeightFormat.Q8_0,
    WeightFormat.IQ4_NL,
    WeightFormat.Q1_0,
    WeightFormat.Q2_0,
    WeightFormat.TQ1_0,
    WeightFormat.TQ2_0,
    WeightFormat.MXFP4,
}
CODES = {
    WeightFormat.IQ1_S: 9,
    WeightFormat.IQ2_XXS: 43,
    WeightFormat.IQ3_XXS: 62,
    WeightFormat.IQ3_S: 15,
    WeightFormat.IQ4_XS: 127,
}
"""Exact but for the product of two scales, which is rounded to f16; the largest integer of each."""
JOINED = {WeightFormat.IQ1_M: 14, WeightFormat.IQ2_XS: 2, WeightFormat.IQ2_S: 2, WeightFormat.NVFP4: 8}
"""Two scales of 16 columns become one: this part of the larger one."""
REQUANTISED = {WeightFormat.Q2_K, WeightFormat.Q3_K}
"""To 8 bits: their scales are of 16 columns."""
NUM_BLOCKS = (1, 2, 3)


def embedded(raw: NDArray[np.uint8], fmt: WeightFormat, cols: int, variant: str) -> F32:
    """The rows as the engine has them."""
    probe = Probe(len(raw), cols, variant=variant)
    out = probe.buffer(cols)
    probe.row(RowOpKind.EMBED, out=out, weight=probe.engine.add_matrix(SOURCE_FORMATS[fmt], len(raw), cols, raw), value=1.0)
    probe.finish(out)
    return probe.run(range(len(raw)))


def tolerance(raw: NDArray[np.uint8], values: F32, fmt: WeightFormat) -> F32:
    """How far a repacked weight may be from the file's, by group of 32. [groups, 1]"""
    largest = np.abs(values.reshape(-1, 32)).max(-1, keepdims=True)
    if fmt in EXACT:
        return largest * np.float32(2e-7) + np.float32(1e-7)  # the latter for a scale of zero
    if fmt in CODES:
        return largest * np.float32(2**-11) + np.float32(CODES[fmt] * 2**-24)  # the latter if the scale is subnormal or zero
    if fmt in JOINED:  # half a step; of all of one, a 2^11th by the rounding of the scale
        steps = np.abs(grouped_integers(raw, fmt, values.shape[1]).scales).reshape(-1, 2).max(-1, keepdims=True) / JOINED[fmt]
        return steps * np.float32(0.5001) + largest * np.float32(2**-11) + np.float32(127 * 2**-25)
    if fmt is WeightFormat.Q6_K:  # an eighth of the step of the larger half
        blocks = raw.reshape(-1, 210)
        d = np.abs(blocks[:, 208:].copy().view(np.float16).astype(np.float32))
        steps = d * np.abs(blocks[:, 192:208].view(np.int8).astype(np.float32))
        return steps.reshape(-1, 2).max(-1, keepdims=True) / 8 * 1.05 + largest * np.float32(2**-11) + np.float32(1e-7)
    if fmt in REQUANTISED:  # half a step of 127, and its rounding to f16
        return largest * np.float32(1.05 / 254 + 2**-11) + np.float32(127 * 2**-25)  # the latter if it is subnormal
    return largest * np.float32(2**-8) + np.float32(1e-7)


@pytest.mark.parametrize("fmt", BLOCKS)
def test_rows_that_are_looked_up_in_the_file_are_those_of_the_file(fmt: WeightFormat) -> None:
    rows, cols = 9, 2 * BLOCKS[fmt][0]
    raw = random_blocks(np.random.default_rng(5), fmt, rows, cols)
    wanted = 3 * dequantize(raw, fmt, cols)
    found = looked_up(SOURCE_FORMATS[fmt], raw, cols, scale=3.0)
    is_rounded = fmt is WeightFormat.Q6_K or fmt in REQUANTISED or fmt in JOINED
    allowed = 3 * tolerance(raw, wanted / 3, fmt) if is_rounded else np.float32(1e-6)
    assert (np.abs(found - wanted).reshape(-1, 32) <= allowed).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("cols", [64, 300, 777])
def test_floats_are_packed_as_bf16_to_nearest_even(dtype: type[np.floating], cols: int) -> None:
    numbers = np.random.default_rng(cols).normal(size=(37, cols)).astype(dtype)
    if dtype is np.float16:
        numbers.reshape(-1)[:3] = [6e-8, -65504, 0]  # the smallest subnormal, the largest
    else:
        numbers.reshape(-1).view(np.uint32)[:4] = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF]  # two of them ties
    found = looked_at(SourceFormat[np.dtype(dtype).name.replace("loat", "").upper()], numbers.view(np.uint8), cols)
    assert np.array_equal(found, bf16(numbers.astype(np.float32)))


def test_every_half_is_packed_as_its_bf16() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    found = looked_at(SourceFormat.F16, halves.view(np.uint8), 256)
    with np.errstate(invalid="ignore"):  # signalling NaNs, which NumPy tells of on Arm
        wanted = halves.astype(np.float32)
    finite = np.isfinite(wanted)
    assert np.array_equal(found[finite], bf16(wanted)[finite])
    assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True)


def looked_at(source: SourceFormat, raw: NDArray[np.uint8], cols: int) -> F32:
    """All rows of a packed matrix."""
    probe = Probe(len(raw), cols, variant=VARIANTS[0])
    out = probe.buffer(cols)
    probe.row(RowOpKind.EMBED, out=out, weight=probe.engine.add_matrix(source, len(raw), cols, raw), value=1.0)
    probe.finish(out)
    return probe.run(range(len(raw)))


def test_floats_that_are_looked_up_are_exact() -> None:
    values = bf16(np.random.default_rng(6).normal(size=(5, 33)).astype(np.float32))
    halves, singles = values.astype(np.float16), values * np.float32(1.0001)
    assert np.array_equal(looked_up(SourceFormat.BF16, bf16_bytes(values), 33, scale=1.0), values)
    assert np.array_equal(looked_up(SourceFormat.F16, halves.view(np.uint8), 33, scale=1.0), halves.astype(np.float32))
    assert np.array_equal(looked_up(SourceFormat.F32, singles.view(np.uint8), 33, scale=2.0), 2 * singles)


def looked_up(source: SourceFormat, raw: NDArray[np.uint8], cols: int, *, scale: float) -> F32:
    """All rows of a table, the last one first, in order."""
    probe = Probe(len(raw), cols, variant=VARIANTS[0])
    out = probe.buffer(cols)
    table = probe.engine.add_table(source, len(raw), cols, raw.copy())  # kept alive by the engine alone
    probe.row(RowOpKind.LOOKUP, out=out, weight=table, value=scale)
    probe.finish(out)
    return probe.run(range(len(raw))[::-1])[::-1]


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_repacked_weights_are_those_of_the_file(variant: str, fmt: WeightFormat) -> None:
    for rows, num_blocks in zip((16, 5, 37), NUM_BLOCKS, strict=True):
        cols = num_blocks * BLOCKS[fmt][0]
        raw = random_blocks(np.random.default_rng(rows), fmt, rows, cols)
        wanted = dequantize(raw, fmt, cols)
        error = np.abs(embedded(raw, fmt, cols, variant) - wanted).reshape(-1, 32)
        allowed = tolerance(raw, wanted, fmt)
        assert (error <= allowed).all(), (error / allowed).max()


def test_of_two_scales_of_sixteen_columns_the_larger_stays_exact() -> None:
    raw = random_blocks(np.random.default_rng(3), WeightFormat.Q6_K, 64, 512, zeros=False)
    wanted = dequantize(raw, WeightFormat.Q6_K, 512).reshape(-1, 2, 16)
    scales = np.abs(raw.reshape(-1, 210)[:, 192:208].view(np.int8).astype(np.int32)).reshape(-1, 2)
    error = np.abs(embedded(raw, WeightFormat.Q6_K, 512, VARIANTS[0]).reshape(-1, 2, 16) - wanted)
    exact = np.take_along_axis(error, scales.argmax(1)[:, None, None], axis=1)
    assert exact.max() <= np.abs(wanted).max() * 2**-11
    assert np.sqrt((error**2).mean()) < 0.005 * np.sqrt((wanted**2).mean())


@pytest.mark.parametrize("fmt", JOINED)
def test_of_two_scales_that_become_one_the_larger_stays_exact_and_equal_ones_do(fmt: WeightFormat) -> None:
    cols = 4 * BLOCKS[fmt][0]
    raw = random_blocks(np.random.default_rng(3), fmt, 64, cols, zeros=False)
    scales = np.abs(grouped_integers(raw, fmt, cols).scales).reshape(-1, 2)
    wanted = dequantize(raw, fmt, cols).reshape(-1, 2, 16)
    error = np.abs(embedded(raw, fmt, cols, VARIANTS[0]).reshape(-1, 2, 16) - wanted).max(-1)
    rounded = np.abs(wanted).max((1, 2)) * np.float32(2**-11) + np.float32(127 * 2**-25)  # the latter if it is subnormal
    assert (np.take_along_axis(error, scales.argmax(1)[:, None], 1)[:, 0] <= rounded).all()
    equal = scales[:, 0] == scales[:, 1]
    assert 0 < equal.sum() < len(equal)
    assert (error[equal].max(1) <= rounded[equal]).all()


@pytest.mark.parametrize("fmt", SPOILABLE)
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_no_number_is_refused(fmt: WeightFormat, broken: float) -> None:
    raw = random_blocks(np.random.default_rng(1), fmt, 20, 2 * BLOCKS[fmt][0])
    if fmt in (WeightFormat.Q4_K, WeightFormat.Q5_K):
        raw[19, 4:16] = 255
    if fmt is WeightFormat.Q6_K:
        raw[19, 192:208] = 1
    damaged = list(spoiled(raw[19], fmt, broken))
    assert damaged
    for raw[19] in damaged:
        with pytest.raises(ValueError, match="no finite number"):
            embedded(raw, fmt, 2 * BLOCKS[fmt][0], VARIANTS[0])


def test_scales_of_mxfp4_that_half_precision_lacks() -> None:
    exponents = np.array([1, 90, 103, 104, 105, 128, 143], np.uint8)
    raw = np.full((len(exponents), 17), 0x77, np.uint8)  # columns of 12 times the scale
    raw[:, 0] = exponents
    found = embedded(raw, WeightFormat.MXFP4, 32, VARIANTS[0])
    assert found[:, 0].tolist() == [0, 0, 0, 12 * 2**-24, 12 * 2**-23, 12, 12 * 2**15]
    for too_large in (144, 255):
        raw[3, 0] = too_large
        with pytest.raises(ValueError, match="no finite number"):
            embedded(raw, WeightFormat.MXFP4, 32, VARIANTS[0])


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_bytes_are_blocks(fmt: WeightFormat, variant: str) -> None:
    """They are read as weights, or refused for their scales: every code is in its codebook or table."""
    cols = 3 * BLOCKS[fmt][0]
    raw = np.random.default_rng(9).integers(0, 256, (32, stored_bytes(fmt, 1, cols)), np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantize(raw, fmt, cols)
    try:
        found = embedded(raw, fmt, cols, variant)
    except ValueError:
        largest_half = 65504
        assert not np.isfinite(wanted).all() or np.abs(grouped_integers(raw, fmt, cols).scales).max() > largest_half
    else:
        assert (np.abs(found - wanted).reshape(-1, 32) <= tolerance(raw, wanted, fmt)).all()


def test_a_gpu_has_8_bits_where_the_native_backend_has_codes() -> None:
    for fmt in (WeightFormat.IQ4_XS, WeightFormat.IQ2_XXS):
        in_codes, in_bytes = held_bytes(fmt, 32, 256), held_bytes(fmt, 32, 256, Floats.AS_STORED)
        assert in_bytes - in_codes == 32 * 256 // 2
    assert held_bytes(WeightFormat.TQ2_0, 32, 256) == held_bytes(WeightFormat.TQ2_0, 32, 256, Floats.AS_STORED)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("broken", [np.inf, np.nan])
@pytest.mark.parametrize("fmt", SPOILABLE)
def test_a_damaged_row_of_a_table_spoils_only_what_is_computed_from_it(fmt: WeightFormat, broken: float, variant: str) -> None:
    rng, cols, rows = np.random.default_rng(4), 2 * BLOCKS[fmt][0], 20
    sound, matrix = random_blocks(rng, fmt, rows, cols), random_blocks(rng, fmt, 16, cols, zeros=False)
    wanted = multiplied(sound, matrix, fmt, cols, variant)
    assert np.isfinite(wanted).all()
    for row in spoiled(sound[7], fmt, broken):
        damaged = sound.copy()
        damaged[7] = row
        found = multiplied(damaged, matrix, fmt, cols, variant)
        assert np.isnan(found[7]).all()
        assert np.array_equal(np.delete(found, 7, 0), np.delete(wanted, 7, 0))


def multiplied(table: NDArray[np.uint8], matrix: NDArray[np.uint8], fmt: WeightFormat, cols: int, variant: str) -> F32:
    """The product of every row that is looked up, after a norm, with the matrix. [rows, matrix rows]"""
    probe = Probe(len(table), len(matrix), variant=variant)
    engine, x, out = probe.engine, probe.buffer(cols), probe.buffer(len(matrix))
    probe.row(RowOpKind.LOOKUP, out=x, weight=engine.add_table(SOURCE_FORMATS[fmt], len(table), cols, table), value=1.0)
    probe.row(RowOpKind.RMS_NORM, out=x, x=x, weight=engine.add_vector(np.ones(cols, np.float32)), n=cols, value=1e-5)
    activation = probe.activation(x, cols)
    probe.flush()
    engine.add_linear(
        [(engine.add_matrix(SOURCE_FORMATS[fmt], len(matrix), cols, matrix), activation, out, -1, -1)], samples=False
    )
    probe.finish(out)
    return probe.run(range(len(table)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFF8001, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("where", ["table", "norm"])
def test_a_float_that_is_no_number_is_none_in_a_product_with_bf16(variant: str, bits: int, where: str) -> None:
    """Its bits do not matter: rounding them to bf16 as they are would make some zeros, and the answer a plausible one."""
    rng = np.random.default_rng(8)
    table, norm = rng.normal(size=(3, 64)).astype(np.float32), np.ones(64, np.float32)
    (table[1] if where == "table" else norm).view(np.uint32)[:] = bits
    probe = Probe(3, 16, variant=variant)
    engine, x, out = probe.engine, probe.buffer(64), probe.buffer(16)
    probe.row(RowOpKind.LOOKUP, out=x, weight=engine.add_table(SourceFormat.F32, 3, 64, table.view(np.uint8)), value=1.0)
    probe.row(RowOpKind.RMS_NORM, out=x, x=x, weight=engine.add_vector(norm), n=64, value=1e-5)
    activation = probe.activation(x, 64, is_quantised=False)
    probe.flush()
    matrix = engine.add_matrix(SourceFormat.BF16, 16, 64, bf16_bytes(rng.normal(size=(16, 64)).astype(np.float32)))
    engine.add_linear([(matrix, activation, out, -1, -1)], samples=False)
    probe.finish(out)
    assert np.isnan(probe.run(range(3))).all(axis=1).tolist() == [where == "norm", True, where == "norm"]


@pytest.mark.parametrize("fmt", SOURCE_FORMATS)
def test_a_matrix_takes_as_much_memory_as_was_planned(fmt: WeightFormat) -> None:
    engine = Probe(1, 16, variant="").engine
    for rows in (2, 16, 37):
        for num_blocks in NUM_BLOCKS:
            cols = num_blocks * BLOCKS[fmt][0] if fmt in BLOCKS else 31 + num_blocks
            before = engine.weight_bytes
            raw = np.zeros((rows, stored_bytes(fmt, 1, cols)), np.uint8)
            engine.add_matrix(SOURCE_FORMATS[fmt], rows, cols, raw)
            assert held_bytes(fmt, rows, cols) == engine.weight_bytes - before


@pytest.mark.parametrize("fmt", SOURCE_FORMATS)
def test_a_matrix_that_comes_in_parts_is_the_same(fmt: WeightFormat) -> None:
    cols = 2 * BLOCKS[fmt][0] if fmt in BLOCKS else 33
    rng = np.random.default_rng(4)
    row_bytes = stored_bytes(fmt, 1, cols)
    raw = random_blocks(rng, fmt, 70, cols) if fmt in BLOCKS else rng.integers(0, 64, (70, row_bytes), np.uint8)
    probe = Probe(70, cols, variant="")
    matrix = probe.engine.add_matrix(SOURCE_FORMATS[fmt], 70, cols)
    for begin, end in ((48, 70), (0, 16), (16, 48)):
        probe.engine.pack_rows(matrix, begin, raw[begin:end])
    out = probe.buffer(cols)
    probe.row(RowOpKind.EMBED, out=out, weight=matrix, value=1.0)
    probe.finish(out)
    assert np.array_equal(probe.run(range(70)), looked_at(SOURCE_FORMATS[fmt], raw, cols), equal_nan=True)


@pytest.mark.parametrize(("begin", "num_rows"), [(8, 16), (0, 8), (32, 16), (-16, 16), (48, 1), (0, 0)])
def test_parts_that_are_no_panels_of_the_matrix_are_refused(begin: int, num_rows: int) -> None:
    engine = Probe(1, 16, variant="").engine
    matrix = engine.add_matrix(SourceFormat.BF16, 40, 8)
    with pytest.raises(ValueError, match="multiple of 16"):
        engine.pack_rows(matrix, begin, np.zeros((num_rows, 16), np.uint8))


@pytest.mark.parametrize("fmt", BLOCKS)
def test_rows_of_half_a_block_are_refused(fmt: WeightFormat) -> None:
    engine = Probe(1, 16, variant="").engine
    width, num_bytes = BLOCKS[fmt]
    with pytest.raises(ValueError, match=rf"{width // 2} columns are not a multiple of the format's block of {width}"):
        engine.add_matrix(SOURCE_FORMATS[fmt], 2, width // 2, np.zeros((2, num_bytes // 2), np.uint8))
    with pytest.raises(ValueError, match=rf"expected {2 * num_bytes} bytes of data, got {2 * (num_bytes - 1)}"):
        engine.add_matrix(SOURCE_FORMATS[fmt], 2, width, np.zeros((2, num_bytes - 1), np.uint8))


def test_every_format_has_a_source_format() -> None:
    assert {fmt.name for fmt in SOURCE_FORMATS} == {kind.name for kind in SourceFormat}
    assert set(WeightFormat) - set(SOURCE_FORMATS) == {WeightFormat.F8_E4M3}, "which becomes float32 first"


def product(x: F32, raw: NDArray[np.uint8], fmt: WeightFormat, variant: str) -> F32:
    """x @ w.T of inputs that are exact in bf16."""
    (batch, cols), rows = x.shape, len(raw)
    probe = Probe(batch, rows, variant=variant)
    activation = probe.activation(probe.input(x), cols)
    probe.flush()
    out = probe.buffer(rows)
    matrix = probe.engine.add_matrix(SOURCE_FORMATS[fmt], rows, cols, raw)
    probe.engine.add_linear([(matrix, activation, out, -1, -1)], samples=False)
    probe.finish(out)
    return probe.run(range(batch))


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_with_every_format_is_that_of_its_values(variant: str, fmt: WeightFormat) -> None:
    """The rounding of activations to integers shows, or that of weights to bf16; a wrong order of columns gives 1."""
    rng = np.random.default_rng(2)
    rows, cols, batch = 37, 2 * BLOCKS[fmt][0], 9
    x = bf16(rng.standard_normal((batch, cols)).astype(np.float32))
    raw = random_blocks(rng, fmt, rows, cols)
    values = embedded(raw, fmt, cols, variant) if variant in WITH_TILES else dequantize(raw, fmt, cols)
    wanted = x.astype(np.float64) @ values.T.astype(np.float64)
    size = np.sqrt((x**2).astype(np.float64) @ (values**2).T.astype(np.float64)) + 1e-3
    error = (product(x, raw, fmt, variant) - wanted) / size
    assert np.sqrt((error**2).mean()) < (0.003 if variant in WITH_TILES else 0.02)


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("variant", WITH_TILES)
def test_weights_beside_tiles_are_bf16_and_on_average_as_large_as_before(variant: str, fmt: WeightFormat) -> None:
    """Rows that are 1 at one column give each of them.

    Truncation takes up to a 128th of a number; a 370th, which it takes on average, was added before. Each number was a sum in
    float32 of others up to a hundred times the group's largest. Without an offset, zero stays zero.
    """
    for rows, num_blocks in zip((16, 5, 37), NUM_BLOCKS, strict=True):
        cols = num_blocks * BLOCKS[fmt][0]
        raw = random_blocks(np.random.default_rng(rows), fmt, rows, cols)
        packed = embedded(raw, fmt, cols, variant)
        found = product(np.eye(cols, dtype=np.float32), raw, fmt, variant).T
        assert np.array_equal(bf16(found), found)
        if grouped_integers(raw, fmt, cols).offsets is None:
            assert not found[packed == 0].any()
        off = np.repeat(np.abs(packed.reshape(-1, 32)).max(-1), 32).reshape(packed.shape) * 2.0**-17
        grown = np.sign(packed) * found.astype(np.float64) / (1 + 1 / 370)
        assert (grown <= np.abs(packed) + off).all()
        assert (grown >= np.abs(packed) * (1 - 2**-7) - off).all()
        if found.size > 5000:
            assert abs((found * packed).sum() / (packed * packed).sum() - 1) < 0.001
