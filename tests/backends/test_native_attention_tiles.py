"""Attention by tiles has the bits of attention by vectors: sums of integers are exact, and all else is the same."""

from __future__ import annotations

import numpy as np
import pytest

from backends.native_probe import F32, bf16
from backends.test_native_kernels import attention_probe, random_rows
from native_variants import WITH_TILES
from penstock.backends.native._native import KvFormat

pytestmark = pytest.mark.parametrize("variant", WITH_TILES)

CONTEXTS = [0, 200, 330, 290, 7, 255]
QUERIES = [90, 40, 1, 3, 21, 2]
"""Rows of one step: prompts whole and in chunks, decodes; some begin or end beside the end of a segment of 256."""
BLOCKS = 26


def answers(variant: str, q: F32, k: F32, v: F32, *, num_threads: int = 2, **options: object) -> F32:
    """The step returns what its tokens get, after their contexts have been written. [tokens, heads * head_dim]"""
    size = len(CONTEXTS) * BLOCKS + 1
    probe = attention_probe(q, k, v, variant, num_threads=num_threads, num_blocks=size, **options)
    tables = 1 + np.random.default_rng(1).permutation(size - 1).reshape(len(CONTEXTS), BLOCKS).astype(np.int32)
    for row, context in enumerate(CONTEXTS):
        if context:
            probe.run(range(context), query_lens=[context], block_tables=tables[row : row + 1], samples=[context - 1])
    ids = np.concatenate([context + np.arange(count) for context, count in zip(CONTEXTS, QUERIES, strict=True)])
    return probe.run(ids, query_lens=QUERIES, context_lens=CONTEXTS, block_tables=tables)


def inputs(heads: int, kv_heads: int, head_dim: int) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(heads * head_dim)
    q, k, v = (random_rows(rng, 340, n * head_dim) for n in (heads, kv_heads, kv_heads))
    return q, k, v


def assert_same_bits(variant: str, q: F32, k: F32, v: F32, **options: object) -> F32:
    by_tiles, by_vectors = (answers(name, q, k, v, **options) for name in (variant, "avx512"))
    assert np.array_equal(by_tiles.view(np.uint32), by_vectors.view(np.uint32))
    return by_tiles


SHAPES = [(1, 1, 16), (3, 1, 64), (14, 2, 32), (8, 1, 48), (4, 2, 80), (10, 1, 128), (6, 2, 112), (2, 1, 256), (1, 1, 512)]
OPTIONS = [{"window": 19}, {"window": 260}, {"softcap": 5.0}, {"block_size": 48}]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_tiles_have_the_bits_of_vectors(variant: str, heads: int, kv_heads: int, head_dim: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    assert np.isfinite(assert_same_bits(variant, *inputs(**shape), **shape)).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (8, 48)])
def test_tiles_have_the_bits_of_vectors_with_options(
    variant: str, heads: int, head_dim: int, options: dict[str, float]
) -> None:
    shape = {"heads": heads, "kv_heads": 1, "head_dim": head_dim}
    assert_same_bits(variant, *inputs(**shape), **shape, **options)


def test_tiles_have_the_bits_of_vectors_with_sinks(variant: str) -> None:
    sinks = np.linspace(-8, 8, 8).astype(np.float32)
    assert_same_bits(variant, *inputs(8, 1, 64), heads=8, kv_heads=1, head_dim=64, sinks=sinks)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_segments_of_a_decode_have_the_same_bits_on_several_threads(variant: str, num_threads: int) -> None:
    """Eight heads of one token are a task, which several threads divide."""
    length, shape = 600, {"heads": 8, "kv_heads": 1, "head_dim": 64, "num_blocks": 40}
    rng = np.random.default_rng(3)
    q, k, v = (random_rows(rng, length, n * 64) for n in (8, 1, 1))
    table, found = np.arange(1, 40, dtype=np.int32)[None], []
    for name in (variant, "avx512"):
        probe = attention_probe(q, k, v, name, num_threads=num_threads, **shape)
        probe.run(range(length - 1), query_lens=[length - 1], block_tables=table, samples=[0])
        found.append(probe.run([length - 1], context_lens=[length - 1], block_tables=table))
    assert np.array_equal(*found)


@pytest.mark.parametrize("size", [1e-25, 1e3, 1e6])
def test_tiles_have_the_bits_of_vectors_whatever_the_size_of_scores(variant: str, size: float) -> None:
    q, k, v = inputs(3, 1, 48)
    q[100:] = bf16(q[100:] * np.float32(size))
    assert_same_bits(variant, q, k, v, heads=3, kv_heads=1, head_dim=48)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_no_number_spoils_the_same_by_tiles(variant: str, which: int) -> None:
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 32}
    rows = inputs(**shape)
    rows[which][60, 5] = np.nan
    by_tiles, by_vectors = (answers(name, *rows, **shape) for name in (variant, "avx512"))
    assert np.array_equal(by_tiles, by_vectors, equal_nan=True)
    assert np.isnan(by_tiles[60]).any()
    assert np.isfinite(by_tiles[:60]).all()


def test_16_bits_are_left_to_vectors(variant: str) -> None:
    assert_same_bits(variant, *inputs(3, 1, 64), heads=3, kv_heads=1, head_dim=64, kv_format=KvFormat.INT16)
