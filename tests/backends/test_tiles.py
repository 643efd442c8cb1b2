"""Tiles: one operation against exact arithmetic and against the hardware, if it is here, and the products made of them.

The emulated ones run on every machine with AVX-512. They compute what the instructions do (native/kernels/tiles.h), so that the
answers of a machine with AMX can be tested on one without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native import info
from penstock.backends.native._native import (
    RowOpKind,
    emulated_variants,
    tile_product,
    usable_variants,
)
from penstock.backends.native.lowering import ACTIVATION_KINDS, SOURCE_FORMATS
from penstock.models.formats import WeightFormat
from support.backends.format_blocks import random_blocks
from support.backends.native_probe import F32, Probe, bf16, bf16_bytes
from support.native_variants import VARIANTS, WITH_TILES, WITHOUT_TILES

Tile = NDArray[np.uint8]
"""[16, 64]"""
EMULATED = "amx-emulated"
with_tiles = pytest.mark.parametrize("variant", WITH_TILES)
with_hardware = pytest.mark.skipif(
    "amx" not in usable_variants(), reason="this machine has no tiles (AMX), or may not use them"
)


def multiplied(a: Tile, b: Tile, c: Tile, variant: str, rows: int = 16, k: int = 16) -> Tile:
    result = c.copy()
    tile_product(rows, k, a, b, result, variant=variant)
    return result


# One operation


def single(exact: Fraction, zero: float) -> float:
    """The float32 nearest to a number, ties to even; zero for one that is too small to be normal, and `zero` for zero."""
    if exact == 0:
        return zero
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(size / step) * step  # `round` takes ties to even
    sign = -1.0 if exact < 0 else 1.0
    if rounded < Fraction(2) ** -126:
        return math.copysign(0.0, sign)
    return sign * (math.inf if rounded >= Fraction(2) ** 128 else float(rounded))


def multiply_add(x: float, y: float, z: float) -> float:
    """x * y + z with one rounding."""
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        product = math.nan if 0 in (x, y) and (math.isinf(x) or math.isinf(y)) else x * y
        return product + z
    both_negative = math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0
    return single(Fraction(x) * Fraction(y) + Fraction(z), -0.0 if both_negative else 0.0)


def without_denormals(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def exact_sums(a: F32, b: F32, c: F32) -> F32:
    """c + a b by the rule: chains of the even and of the odd columns. a [16, 32], b [32, 16], c [16, 16]"""
    left, right = ([[without_denormals(x) for x in row] for row in part.tolist()] for part in (a, b.T))
    sums = np.empty((16, 16), np.float32)
    for m, n in np.ndindex(16, 16):
        chains = [0.0, 0.0]
        for column, (x, y) in enumerate(zip(left[m], right[n], strict=True)):
            chains[column % 2] = multiply_add(x, y, chains[column % 2])
        product = multiply_add(1.0, chains[0], chains[1])
        sums[m, n] = multiply_add(1.0, without_denormals(float(c[m, n])), product)
    return sums


Numbers = tuple[F32, F32, F32]
"""a [16, 32] and b [32, 16], exact in bf16, and c [16, 16]."""


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


def scaled(rng: np.random.Generator, low: int, high: int, *shape: int) -> F32:
    """Numbers of any exponent from `low` on and below `high`."""
    return np.ldexp(normal(rng, *shape), rng.integers(low, high, shape)).astype(np.float32)


def truncated(x: F32) -> F32:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def any_bits(rng: np.random.Generator) -> Numbers:
    a, b, c = (rng.integers(0, 2**32, shape, np.uint32).view(np.float32) for shape in ((16, 32), (32, 16), (16, 16)))
    return truncated(a), truncated(b), c


def in_octaves(low: int, high: int, c: float = 1.0) -> Callable[[np.random.Generator], Numbers]:
    def numbers(rng: np.random.Generator) -> Numbers:
        with np.errstate(over="ignore"):
            return truncated(scaled(rng, low, high, 16, 32)), truncated(scaled(rng, low, high, 32, 16)), c * normal(rng, 16, 16)

    return numbers


def cancelling(rng: np.random.Generator) -> Numbers:
    """Products that the next one of their chain takes away again, nearly all, and a c that the rest takes away in part."""
    a, b, _ = in_octaves(-4, 4)(rng)
    a[:, 2::4], b[2::4] = -a[:, 0::4], b[0::4]
    a[:, 3::4], b[3::4] = -a[:, 1::4], b[1::4]
    a[:, 6] *= 2.0**-20
    return a, b, -(a.astype(np.float64) @ b).astype(np.float32)


def broken(value: float) -> Callable[[np.random.Generator], Numbers]:
    """Some of them have that value, and others are zero."""

    def numbers(rng: np.random.Generator) -> Numbers:
        a, b, c = in_octaves(-4, 4)(rng)
        for part in (a, b, c):
            part[rng.random(part.shape) < 0.02] = value
            part[rng.random(part.shape) < 0.02] = 0
        a[:2], b[:, :2] = 0, -b[:, :2]
        return a, b, c

    return numbers


def denormal(rng: np.random.Generator) -> Numbers:
    """Denormals times numbers so large that their products would not vanish; products and sums that do."""
    a, b, c = in_octaves(-66, -60, c=2.0**-126)(rng)
    a[:, ::3] = truncated(scaled(rng, -133, -126, 16, 11))
    b[::3] = truncated(scaled(rng, 90, 120, 11, 16))
    return a, b, c


KINDS: dict[str, Callable[[np.random.Generator], Numbers]] = {
    "ordinary": in_octaves(-4, 4),
    "any bits": any_bits,
    "60 octaves": in_octaves(-30, 30),
    "denormal products": in_octaves(-68, -60, c=2.0**-126),
    "denormals": denormal,
    "cancelling": cancelling,
    "overflowing": in_octaves(56, 64, c=2.0**126),
    "infinite": broken(math.inf),
    "no numbers": broken(math.nan),
    "negative zeros": broken(-0.0),
}


def tiles_of(a: F32, b: F32, c: F32) -> tuple[Tile, Tile, Tile]:
    upper = ((part.view(np.uint32) >> 16).astype(np.uint16) for part in (a, b))
    of_a, of_b = upper
    pairs = np.ascontiguousarray(of_b.reshape(16, 2, 16).transpose(0, 2, 1))
    return of_a.view(np.uint8), pairs.reshape(16, 32).view(np.uint8), np.ascontiguousarray(c, np.float32).view(np.uint8)


def same_bits(found: F32, expected: F32) -> bool:
    """Whether all are, or none a number."""
    is_none = np.isnan(expected)
    return np.array_equal(np.isnan(found), is_none) and np.array_equal(
        found.view(np.uint32)[~is_none], expected.view(np.uint32)[~is_none]
    )


@cache
def exact_product(name: str) -> tuple[Numbers, F32]:
    """Numbers of a kind, and their product."""
    numbers = KINDS[name](np.random.default_rng(3))
    with np.errstate(all="ignore"):
        return numbers, exact_sums(*numbers)


@with_tiles
@pytest.mark.parametrize("name", KINDS)
def test_a_product_of_bf16_is_two_chains_of_fused_multiply_adds(variant: str, name: str) -> None:
    (a, b, c), expected = exact_product(name)
    assert same_bits(multiplied(*tiles_of(a, b, c), variant).view(np.float32), expected)
    assert len(np.unique(expected)) > 60 or name in {"any bits", "infinite", "no numbers"}


@with_tiles
def test_what_lies_beyond_a_tile_does_not_count(variant: str) -> None:
    """Fewer rows and columns are the same as zeros in place of the others; rows of c beyond the tile stay as they were."""
    rng = np.random.default_rng(4)
    for rows, k in [(1, 1), (1, 16), (16, 1), (5, 7), (13, 16), (16, 3)]:
        a, b, c = in_octaves(-4, 4)(rng)
        inside = a.copy()
        inside[:, 2 * k :] = 0
        expected = multiplied(*tiles_of(inside, b, c), variant).view(np.float32)
        expected[rows:] = c[rows:]
        a[rows:], a[:, 2 * k :], b[2 * k :] = np.nan, np.nan, np.nan
        found = multiplied(*tiles_of(a, b, c), variant, rows, k).view(np.float32)
        assert same_bits(found, expected), (rows, k)


@with_hardware
@pytest.mark.parametrize("name", KINDS)
def test_the_hardware_has_the_bits_of_the_emulation(name: str) -> None:
    """102,400 sums of each kind."""
    rng = np.random.default_rng(5)
    for _ in range(400):
        tiles = tiles_of(*KINDS[name](rng))
        found, expected = (multiplied(*tiles, v).view(np.float32) for v in ("amx", EMULATED))
        assert same_bits(found, expected)


@with_tiles
def test_a_tile_that_can_not_be_is_refused(variant: str) -> None:
    tile = np.zeros((16, 64), np.uint8)
    for rows, k in ((0, 1), (17, 1), (1, 0), (1, 17)):
        with pytest.raises(ValueError, match="1 to 16 rows"):
            multiplied(tile, tile, tile, variant, rows, k)


@pytest.mark.parametrize("variant", WITHOUT_TILES)
def test_a_variant_without_tiles_says_so(variant: str) -> None:
    tile = np.zeros((16, 64), np.uint8)
    with pytest.raises(ValueError, match=f"'{variant}' has no tiles"):
        multiplied(tile, tile, tile, variant)
    assert not Probe(1, 16, variant=variant).engine.has_tiles


# The choice of a variant


def test_emulated_tiles_are_never_taken_by_default() -> None:
    assert EMULATED not in usable_variants()
    assert info()["variants"] == usable_variants()
    assert Probe(1, 16, variant="").engine.variant == usable_variants()[0]
    assert "portable" in usable_variants()
    for variant in emulated_variants():
        engine = Probe(1, 16, variant=variant).engine
        assert (engine.variant, engine.has_tiles) == (variant, True)


def test_a_variant_that_is_not_there_is_refused_with_those_that_are() -> None:
    unusable = ["sse9", "AVX2", *({"amx", "avx512", EMULATED} - set(VARIANTS))]
    for name in unusable:
        with pytest.raises(ValueError, match=f"'{name}' is unknown.*usable are: {', '.join(usable_variants())}$"):
            Probe(1, 16, variant=name)


# Products


class Product:
    """Rows times a matrix in a format, or times a gate and an up projection, with what is added."""

    def __init__(
        self,
        x: F32,
        fmt: WeightFormat,
        channels: int,
        variant: str,
        *,
        raw_x: NDArray[np.uint8] | None = None,
        gated_by: str = "",
        has_bias: bool = False,
        residual: str = "",
        num_threads: int = 2,
    ) -> None:
        cols, rng = x.shape[1], np.random.default_rng(8)
        self.probe = probe = Probe(len(x), channels, variant=variant, num_threads=num_threads)
        bias = probe.engine.add_vector(normal(rng, channels)) if has_bias else -1
        raws = [self._matrix(rng, fmt, channels, cols) for _ in range(2)]
        added = probe.input(bf16(normal(rng, len(x), channels))) if residual else -1
        is_quantised = fmt is not WeightFormat.BF16
        activation = probe.activation(probe.input(x, raw_x), cols, is_quantised=is_quantised)
        probe.flush()
        matrices = [probe.engine.add_matrix(SOURCE_FORMATS[fmt], channels, cols, raw) for raw in raws]
        out = added if residual == "in place" else probe.buffer(channels)
        if gated_by:
            probe.engine.add_gated(*matrices, activation, out, ACTIVATION_KINDS[gated_by], False)  # type: ignore[index]
        else:
            probe.engine.add_linear([(matrices[0], activation, out, bias, added)], samples=False)
        probe.finish(out)

    @staticmethod
    def _matrix(rng: np.random.Generator, fmt: WeightFormat, channels: int, cols: int) -> NDArray[np.uint8]:
        return bf16_bytes(normal(rng, channels, cols)) if fmt is WeightFormat.BF16 else random_blocks(rng, fmt, channels, cols)

    def run(self, rows: range) -> F32:
        return self.probe.run(rows)


KIND_OF = {
    WeightFormat.Q4_0: "nibbles",
    WeightFormat.Q4_1: "nibbles with an offset",
    WeightFormat.Q8_0: "bytes",
    WeightFormat.Q5_1: "bytes with an offset",
    WeightFormat.IQ4_NL: "nibbles of a table",
    WeightFormat.BF16: "floats",
}
"""A format for every form that weights are packed in."""
EPILOGUES: dict[str, dict] = {
    "plain": {},
    "gated": {"gated_by": "silu"},
    "gated by gelu": {"gated_by": "gelu_tanh"},
    "bias and residual": {"has_bias": True, "residual": "apart"},
}


@with_tiles
@pytest.mark.parametrize("fmt", KIND_OF, ids=KIND_OF.values())
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_row_has_the_same_bits_whatever_rows_come_with_it(variant: str, fmt: WeightFormat, epilogue: str) -> None:
    """One panel, two and five, the last not full; one piece of columns and three; more rows than sums wait for at once."""
    for channels, cols, num_threads in ((16, 32, 1), (30, 320, 2), (77, 608, 3)):
        x = bf16(normal(np.random.default_rng(cols), 300, cols))
        product = Product(x, fmt, channels, variant, num_threads=num_threads, **EPILOGUES[epilogue])
        together = product.run(range(300))
        assert np.isfinite(together).all()
        for num in (*range(1, 41), 63, 255, 256, 257):
            begin = 7 * num % (301 - num)
            found = product.run(range(begin, begin + num))
            assert np.array_equal(found, together[begin : begin + num]), (channels, cols, num)


@with_tiles
@pytest.mark.parametrize(
    ("cols", "rows", "blocks"), [(576, 256, 1), (576, 257, 2), (8960, 64, 1), (8960, 65, 2), (16384, 33, 2)]
)
def test_a_task_has_as_many_rows_as_the_cache_holds(variant: str, cols: int, rows: int, blocks: int) -> None:
    """A task has 256 rows at most, and 1.25 MiB of them in bf16, but 32 rows at least."""
    product = Product(np.ones((rows, cols), np.float32), WeightFormat.Q8_0, 16, variant, num_threads=1)
    product.run(range(rows))
    assert [stage[4] for stage in product.probe.engine.stages if stage[1] == "linear"] == [blocks]


@with_hardware
@pytest.mark.parametrize("fmt", KIND_OF, ids=KIND_OF.values())
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_products_of_the_hardware_have_the_bits_of_the_emulation(fmt: WeightFormat, epilogue: str) -> None:
    for channels, cols, rows in ((77, 608, 300), (48, 1536, 33), (16, 32, 1)):
        x = bf16(normal(np.random.default_rng(cols), rows, cols))
        found, expected = (Product(x, fmt, channels, v, **EPILOGUES[epilogue]).run(range(rows)) for v in ("amx", EMULATED))
        assert np.array_equal(found, expected)


@with_tiles
@pytest.mark.parametrize("fmt", KIND_OF, ids=KIND_OF.values())
def test_a_product_may_replace_what_is_added_to_it(variant: str, fmt: WeightFormat) -> None:
    x = bf16(normal(np.random.default_rng(2), 37, 320))
    with_both = {"has_bias": True, "residual": "apart"}
    apart = Product(x, fmt, 77, variant, **with_both).run(range(37))
    in_place = Product(x, fmt, 77, variant, **with_both | {"residual": "in place"}).run(range(37))
    assert np.array_equal(apart, in_place)


@with_tiles
def test_columns_that_are_no_whole_tile_are_those_of_avx512(variant: str) -> None:
    """A quantised group is a whole one; weights of bf16 need not be."""
    for cols, is_same in ((33, True), (130, True), (64, False)):
        x = bf16(normal(np.random.default_rng(cols), 35, cols))
        for epilogue in EPILOGUES.values():
            found, other = (Product(x, WeightFormat.BF16, 40, v, **epilogue).run(range(35)) for v in (variant, "avx512"))
            assert np.array_equal(found, other) == is_same
            np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)


@with_tiles
@pytest.mark.parametrize("fmt", [WeightFormat.Q4_1, WeightFormat.IQ4_NL, WeightFormat.BF16])
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF], ids=["inf", "-inf", "nan", "-nan"])
def test_a_broken_row_spoils_itself_alone(variant: str, fmt: WeightFormat, bits: int) -> None:
    """Also the rows that two tiles share because their number is odd."""
    x = bf16(normal(np.random.default_rng(1), 35, 96))
    sound = Product(x, fmt, 40, variant).run(range(35))
    for row in (0, 11, 12, 23, 34):
        raw = bf16_bytes(x)
        raw[row].view(np.uint16)[50] = bits
        found = Product(x, fmt, 40, variant, raw_x=raw).run(range(35))
        assert not np.isfinite(found[row]).any()
        assert np.array_equal(np.delete(found, row, 0), np.delete(sound, row, 0))


@with_tiles
@pytest.mark.parametrize("fmt", [WeightFormat.Q8_0, WeightFormat.BF16])
@pytest.mark.parametrize("size", [1e-20, 1e-36, 1e-38, 1e-40, 0.0])
def test_vanishing_values_are_zeros_at_worst(variant: str, fmt: WeightFormat, size: float) -> None:
    x = bf16(normal(np.random.default_rng(1), 3, 64))
    small, plain = bf16(x * np.float32(size)), Product(x, fmt, 40, variant).run(range(3))
    found = Product(small, fmt, 40, variant).run(range(3))
    assert np.isfinite(found).all()
    assert (np.abs(found - plain * np.float64(size)) <= np.abs(plain).max() * size * 2**-6 + 64 * 2.0**-126).all()
    mixed = x.copy()
    mixed[:, 32:] = small[:, 32:]
    half = x.copy()
    half[:, 32:] = 0
    found, expected = (Product(values, fmt, 40, variant).run(range(3)) for values in (mixed, half))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@with_tiles
@pytest.mark.parametrize("fmt", KIND_OF, ids=KIND_OF.values())
def test_a_gated_product_is_that_of_its_parts(variant: str, fmt: WeightFormat) -> None:
    """To float32's rounding: gate and up are the same products as apart."""
    cols, channels, num = 608, 45, 270
    x = bf16(normal(np.random.default_rng(4), num, cols) / 8)
    whole = Product(x, fmt, channels, variant, gated_by="silu").run(range(num))
    rng = np.random.default_rng(8)
    raws = [Product._matrix(rng, fmt, channels, cols) for _ in range(2)]
    probe = Probe(num, channels, variant=variant)
    activation = probe.activation(probe.input(x), cols, is_quantised=fmt is not WeightFormat.BF16)
    probe.flush()
    gate, up, out = (probe.buffer(channels) for _ in range(3))
    for raw, buffer in zip(raws, (gate, up), strict=True):
        matrix = probe.engine.add_matrix(SOURCE_FORMATS[fmt], channels, cols, raw)
        probe.engine.add_linear([(matrix, activation, buffer, -1, -1)], samples=False)
    probe.row(RowOpKind.GATED, out=out, x=gate, y=up, n=ACTIVATION_KINDS["silu"])
    probe.finish(out)
    np.testing.assert_allclose(whole, probe.run(range(num)), rtol=1e-6, atol=1e-9)
