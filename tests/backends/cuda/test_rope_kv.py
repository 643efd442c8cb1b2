"""Rotation and the write to the paged cache against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.cuda.kernels.rope_kv import kv_write, rope, rope_q_k_and_write, rope_table
from penstock.backends.cuda.kv_cache import KV_DTYPES, PagedKvCache
from penstock.backends.cuda.step import StepTensors
from penstock.backends.reference.kv_cache import KvCache
from penstock.models.program import KvShape
from penstock.types.kv_dtype import KEY_GROUP, KvDtype
from support.backends.cuda.paged import F32, quantise
from support.interpreted import DEVICE

RNG = np.random.default_rng(5)
POSITIONS = np.array([0, 1, 300, 7], np.int32)
SLOTS = np.array([21, 4, 63, 22], np.int64)
BLOCK_SIZE, NUM_BLOCKS, NUM_POSITIONS = 16, 4, 301


def values(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(DEVICE)


def frequencies(half: int) -> tuple[float, ...]:
    return tuple(10000.0 ** (-i / half) for i in range(half))


def rotated(x: F32, inv_freq: tuple[float, ...], factor: float) -> F32:
    """x [num_tokens, num_heads, head_dim] at `POSITIONS`, by the formula of `program.Rope`."""
    half = len(inv_freq)
    angles = np.outer(POSITIONS.astype(np.float64), inv_freq)[:, None]
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]]
    return np.concatenate(parts, -1).astype(np.float32)


def make_cache(num_kv_heads: int, head_dim: int, kv_dtype: KvDtype) -> PagedKvCache:
    return PagedKvCache(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
        dtype=torch.float32,
        device=DEVICE,
    )


def kept(cache: PagedKvCache) -> tuple[F32, F32]:
    """Keys and values at `SLOTS`, as numbers."""
    layer = cache.layer(0)
    k, v = (part.float().cpu().numpy().reshape(-1, *part.shape[2:])[SLOTS] for part in (layer.k, layer.v))
    if layer.k_scale is not None and layer.v_scale is not None:
        scales = [part.float().cpu().numpy().reshape(-1, *part.shape[2:])[SLOTS] for part in (layer.k_scale, layer.v_scale)]
        k, v = k * np.repeat(scales[0], KEY_GROUP, -1)[..., : k.shape[-1]], v * scales[1][..., None]
    return k, v


def reference(k: F32, v: F32, kv_dtype: KvDtype) -> tuple[F32, F32]:
    """The values of k and v in the reference's cache."""
    cache = KvCache(
        shapes=(KvShape(k.shape[1], k.shape[2]),),
        num_blocks=1,
        block_size=len(k),
        dtype=kv_dtype,
    )
    cache.write(0, np.arange(len(k)), k, v)
    return cache.read(0, np.zeros(1, np.int32), len(k))


def step() -> StepTensors:
    empty = tensor(np.zeros(0, np.int32))
    return StepTensors(
        token_ids=empty,
        positions=tensor(POSITIONS),
        row_of_token=empty,
        slot_mapping=tensor(SLOTS),
        query_start_loc=empty,
        context_lens=empty,
        block_tables=empty,
        sample_tokens=empty,
        num_tokens=4,
        num_rows=4,
        num_samples=0,
        max_query_len=1,
        max_seq_len=301,
    )


@pytest.mark.parametrize(("head_dim", "half"), [(32, 16), (64, 32), (40, 20), (32, 8), (8, 4), (6, 3)])
@pytest.mark.parametrize("num_heads", [1, 3, 11])
def test_rope_rotates_pairs_and_leaves_the_other_columns(head_dim: int, half: int, num_heads: int) -> None:
    x = values(4, num_heads, head_dim)
    table = rope_table(frequencies(half), 1.25, NUM_POSITIONS, DEVICE)
    wide = torch.full((4, num_heads * head_dim + 5), 9.0, device=DEVICE)
    wide[:, 5:] = tensor(x.reshape(4, -1))
    rope(wide[:, 5:], tensor(POSITIONS), table, num_heads, head_dim)
    expected = rotated(x, frequencies(half), 1.25).reshape(4, -1)
    np.testing.assert_allclose(wide[:, 5:].cpu().numpy(), expected, atol=1e-5)
    assert (wide[:, :5] == 9).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 40, 8])
def test_what_is_written_is_what_the_reference_keeps(kv_dtype: KvDtype, head_dim: int) -> None:
    k, v = values(4, 3, head_dim) * 50, values(4, 3, head_dim)
    k[0, 0], v[1, 2], v[2, 0, 1] = 0, 0, 1e-30
    cache = make_cache(3, head_dim, kv_dtype)
    kv_write(tensor(k.reshape(4, -1)), tensor(v.reshape(4, -1)), cache.layer(0), tensor(SLOTS))
    for got, want in zip(kept(cache), reference(k, v, kv_dtype), strict=True):
        np.testing.assert_array_equal(got, want)


def test_only_the_slots_of_the_step_are_written() -> None:
    cache = make_cache(2, 32, KvDtype.INT8)
    kv_write(tensor(values(4, 64)), tensor(values(4, 64)), cache.layer(0), tensor(SLOTS))
    layer = cache.layer(0)
    for part in (layer.k, layer.v, layer.k_scale, layer.v_scale):
        assert part is not None
        written = part.float().cpu().numpy().reshape(NUM_BLOCKS * BLOCK_SIZE, -1).any(1)
        assert np.flatnonzero(written).tolist() == sorted(SLOTS.tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_what_is_no_number_is_none(bad: float) -> None:
    k, v = values(4, 1, 64), values(4, 1, 64)
    k[1, 0, 40] = v[2, 0, 3] = bad
    cache = make_cache(1, 64, KvDtype.INT8)
    kv_write(tensor(k.reshape(4, -1)), tensor(v.reshape(4, -1)), cache.layer(0), tensor(SLOTS))
    got_k, got_v = kept(cache)
    np.testing.assert_array_equal(np.isnan(got_k[:, 0]), np.arange(64) // KEY_GROUP + 2 * np.arange(4)[:, None] == 3)
    np.testing.assert_array_equal(np.isnan(got_v[:, 0]).all(1), [False, False, True, False])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (40, 20), (32, 8)])
def test_all_in_one_is_rope_and_write(kv_dtype: KvDtype, num_heads: int, num_kv_heads: int, head_dim: int, half: int) -> None:
    """Here q, k and v are columns of one matrix. A centre is taken off the rotated key."""
    q, k, v = (values(4, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    centre = 10 * values(num_kv_heads, head_dim) if kv_dtype is KvDtype.INT8 else None
    matrix = tensor(np.concatenate([x.reshape(4, -1) for x in (q, k, v)], 1))
    parts = matrix.split([x.shape[1] * head_dim for x in (q, k, v)], 1)
    cache = make_cache(num_kv_heads, head_dim, kv_dtype)
    rope_q_k_and_write(
        *parts,
        cache.layer(0),
        step(),
        rope_table(frequencies(half), 1.25, NUM_POSITIONS, DEVICE),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        centre=None if centre is None else tensor(centre.reshape(-1)),
    )
    wanted_q, wanted_k = (rotated(x, frequencies(half), 1.25) for x in (q, k))
    np.testing.assert_allclose(parts[0].cpu().numpy(), wanted_q.reshape(4, -1), atol=1e-5)
    np.testing.assert_array_equal(parts[1].cpu().numpy(), k.reshape(4, -1))
    wanted = reference(wanted_k if centre is None else wanted_k - centre, v, kv_dtype)
    step_size = 2.0**-8 * np.abs(wanted[0]).max() if kv_dtype is KvDtype.BF16 else quantise(wanted[0], KEY_GROUP)[1].max()
    np.testing.assert_allclose(kept(cache)[0], wanted[0], atol=1.01 * step_size)  # a rounding may fall the other way
    assert (kept(cache)[0] == wanted[0]).mean() > 0.97
    np.testing.assert_array_equal(kept(cache)[1], wanted[1])


def test_tables_of_far_positions_are_exact() -> None:
    table = rope_table((1.0, 0.37), 2.0, 100_001, "cpu").numpy()
    angles = 100_000 * np.array([1.0, 0.37])
    np.testing.assert_allclose(table[-1], 2 * np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_through(dtype: torch.dtype) -> None:
    cache = PagedKvCache(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=32,
        kv_dtype=KvDtype.BF16,
        dtype=dtype,
        device=DEVICE,
    )
    q, k, v = (values(4, 1, 32) for _ in range(3))
    parts = [tensor(x.reshape(4, -1)).to(dtype) for x in (q, k, v)]
    table = rope_table(frequencies(16), 1.0, NUM_POSITIONS, DEVICE)
    rope_q_k_and_write(*parts, cache.layer(0), step(), table, num_heads=1, num_kv_heads=1)
    np.testing.assert_allclose(parts[0].float().cpu().numpy(), rotated(q, frequencies(16), 1.0)[:, 0], atol=0.05)
    np.testing.assert_allclose(kept(cache)[0], rotated(k, frequencies(16), 1.0), atol=0.05)
    np.testing.assert_allclose(kept(cache)[1], v, atol=0.05)


def test_keys_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="int8 and bf16 keys and values, not with int4"):
        make_cache(1, 64, KvDtype.INT4)
