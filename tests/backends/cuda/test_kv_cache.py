"""Blocks of the device's cache: copied, taken out and put back, and poisoned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.cuda.kv_cache import KV_DTYPES, PagedKvCache
from penstock.backends.cuda.stream import open_stream
from penstock.backends.cuda.supported import block_bytes
from penstock.models.program import KvShape, Program
from penstock.types.kv_dtype import KvDtype
from support.interpreted import DEVICE

SIZES: dict[str, Any] = {"num_layers": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 40}
pytestmark = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def make(kv_dtype: KvDtype, *, poison: bool = False, num_blocks: int = 6) -> PagedKvCache:
    return PagedKvCache(num_blocks=num_blocks, kv_dtype=kv_dtype, dtype=torch.bfloat16, device=DEVICE, poison=poison, **SIZES)


def parts(cache: PagedKvCache) -> list[torch.Tensor]:
    """All that the layers consist of. [num_blocks, block_size, ...] each"""
    layers = [cache.layer(i) for i in range(SIZES["num_layers"])]
    found = [part for layer in layers for part in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
    return [part for part in found if part is not None]


def fill(cache: PagedKvCache) -> None:
    generator = torch.Generator().manual_seed(3)
    for part in parts(cache):
        part.copy_(torch.randint(-100, 100, part.shape, generator=generator))


def contents(cache: PagedKvCache, block_id: int) -> list[list[float]]:
    return [part[block_id].float().flatten().tolist() for part in parts(cache)]


def test_the_size_of_a_block_is_known_before_there_is_a_cache(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    assert cache.block_bytes == block_bytes(Program((), (), (KvShape(2, 40),) * 3, 7), kv_dtype, 4)


def test_layers_are_apart(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    for i in range(SIZES["num_layers"]):
        cache.layer(i).v.fill_(i)
    assert [cache.layer(i).v.unique().tolist() for i in range(SIZES["num_layers"])] == [[0], [1], [2]]
    assert not any(cache.layer(i).k.any() for i in range(SIZES["num_layers"]))


def test_another_size_is_seen_by_who_has_a_layer(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    fill(cache)
    layer = cache.layer(1)
    cache.resize(9)
    assert cache.layer(1) is layer
    assert layer.k.shape[0] == layer.v.shape[0] == 9
    assert cache.block_bytes == make(kv_dtype).block_bytes
    assert not layer.k.any()
    cache.layer(0).v.fill_(1)
    assert not layer.v.any(), "layers are apart"


def test_copies_go_in_order(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    fill(cache)
    one, five = contents(cache, 1), contents(cache, 5)
    cache.copy_blocks([(1, 2), (2, 3), (5, 1)])
    assert [contents(cache, i) for i in (1, 2, 3, 5)] == [five, one, one, five]


def read_blocks(cache: PagedKvCache, block_ids: list[int], out: list[memoryview]) -> None:
    stream = open_stream(torch.device(DEVICE), spins=False)
    with stream.entered():
        cache.read_blocks(block_ids, out, stream).wait()


def test_what_is_read_is_what_a_block_contained_whatever_is_written_to_it_then(kv_dtype: KvDtype) -> None:
    cache, stream = make(kv_dtype), open_stream(torch.device(DEVICE), spins=False)
    fill(cache)
    two, four = (memoryview(bytearray(cache.block_bytes)) for _ in range(2))
    read_blocks(cache, [2], [two])
    read_blocks(cache, [4], [four])
    found = memoryview(bytearray(cache.block_bytes))
    with stream.entered():
        read = cache.read_blocks([4], [found], stream)
        cache.write_blocks([4], [two])
    assert found == bytes(cache.block_bytes), "nobody has waited for it yet"
    for _ in range(2):
        read.wait()
        assert found == four != two


def test_contents_come_back_in_other_blocks_of_another_cache(kv_dtype: KvDtype) -> None:
    first, second = make(kv_dtype), make(kv_dtype, num_blocks=9)
    fill(first)
    buffers = [bytearray(first.block_bytes) for _ in range(2)]
    read_blocks(first, [4, 2], [memoryview(buffer) for buffer in buffers])
    second.write_blocks([1, 8], [memoryview(bytes(buffer)) for buffer in buffers])
    assert contents(second, 1) == contents(first, 4)
    assert contents(second, 8) == contents(first, 2)
    assert not any(np.any(contents(second, i)[0]) for i in (0, 2, 3, 4, 5, 6, 7))
    again = memoryview(bytearray(first.block_bytes))
    read_blocks(second, [8], [again])
    assert again == buffers[1]
    second.write_blocks([3], [again])
    assert contents(second, 3) == contents(first, 2)


def test_packed_blocks_stay_on_the_device(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    fill(cache)
    packed = cache.pack_blocks([3, 1])
    assert packed.shape == (2, cache.block_bytes)
    assert packed.device.type == torch.device(DEVICE).type
    three = contents(cache, 3)
    cache.unpack_blocks([5], packed[:1])
    assert contents(cache, 5) == three


def test_nothing_to_move_is_no_error(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    cache.write_blocks([], [])
    cache.copy_blocks([])


def holds_kv(cache: PagedKvCache) -> list[list[bool]]:
    """Whether a reader gets numbers from each slot. [num_blocks, block_size]"""
    layer = cache.layer(0)
    keys = layer.k if layer.k_scale is None else layer.k_scale
    values = layer.v if layer.v_scale is None else layer.v_scale
    sound = [part.isfinite().flatten(2).all(2) for part in (keys, values)]
    assert (sound[0] == sound[1]).all()
    return sound[0].tolist()


def test_poison_is_everywhere_but_in_the_null_block(kv_dtype: KvDtype) -> None:
    assert holds_kv(make(kv_dtype, poison=True)) == [[True] * 4] + [[False] * 4] * 5


def test_what_is_kept_is_not_poisoned(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype, poison=True)
    fill(cache)
    cache.forget([3, 5, 1, 0], 6)
    assert holds_kv(cache) == [[True] * 4, [False] * 4, [True] * 4, [True] * 4, [True] * 4, [True, True, False, False]]


def test_without_poison_nothing_is_forgotten(kv_dtype: KvDtype) -> None:
    cache = make(kv_dtype)
    fill(cache)
    before = contents(cache, 1)
    cache.forget([1], 0)
    assert contents(cache, 1) == before
