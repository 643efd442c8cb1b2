"""Properties of attention that only a device can show: bf16 on tensor cores, bits of compiled kernels, and captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch

from penstock.backends.cuda.kernels.attention import paged_attention
from penstock.backends.cuda.kv_cache import KV_DTYPES
from penstock.types.kv_dtype import KvDtype
from support.backends.cuda.paged import LAYER, Scene, Span
from support.interpreted import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kv_dtype", KV_DTYPES)]
LENGTH = 1700


def make_scene(kv_dtype: KvDtype) -> Scene:
    """A scene with the heads of Llama-3.1-8B."""
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return Scene([LENGTH, 64, 700], kv_dtype=kv_dtype, dtype=torch.bfloat16, size=2.0, **sizes)


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_of_every_kind_are_near_the_reference(kv_dtype: KvDtype, *, deterministic: bool) -> None:
    scene = make_scene(kv_dtype)
    decodes = [Span(0, LENGTH - 1, 1), Span(1, 63, 1), Span(2, 511, 1)]
    for spans in (decodes, [*decodes, Span(2, 600, 100)], [Span(0, LENGTH - 40, 40)], [Span(1, 0, 64), Span(2, 0, 130)]):
        answers = scene.attend(spans, deterministic=deterministic)
        for got, want in zip(answers, scene.expected(spans), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-2, rtol=2e-2)


def test_deterministic_bits_do_not_depend_on_the_step(kv_dtype: KvDtype) -> None:
    scene = make_scene(kv_dtype)
    attend = partial(scene.attend, deterministic=True)
    (whole,) = attend([Span(0, 0, LENGTH)])
    for context_len, query_len in ((0, 1), (0, 63), (500, 40), (511, 2), (512, 513), (1023, 2)):
        (chunk,) = attend([Span(0, context_len, query_len)])
        np.testing.assert_array_equal(chunk, whole[context_len : context_len + query_len])
    spots = [0, 63, 64, 511, 512, 1024, LENGTH - 1]
    beside = attend([*(Span(0, spot, 1) for spot in spots), Span(2, 100, 300)])
    for spot, got in zip(spots, beside, strict=False):
        (alone,) = attend([Span(0, spot, 1)])
        np.testing.assert_array_equal(alone[0], whole[spot])
        np.testing.assert_array_equal(got[0], whole[spot])


def captured(run: Callable[[], None]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_decode_answers_for_what_lies_in_its_arrays(kv_dtype: KvDtype, *, deterministic: bool) -> None:
    scene = make_scene(kv_dtype)
    first = [Span(1, 10, 1), Span(2, 20, 1), Span(0, 1, 1)]
    second = [Span(0, LENGTH - 1, 1), Span(1, 63, 1), Span(2, 650, 1)]
    step = scene.step(first, max_seq_len=2048)
    q = torch.zeros((3, 32 * 128), dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(q)
    attend = partial(
        paged_attention,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        scale=scene.scale,
        window=0,
        softcap=0.0,
        workspace=scene.workspace(deterministic=deterministic),
        deterministic=deterministic,
    )
    replay = captured(lambda: attend(out, q, scene.cache.layer(LAYER), step))
    new = scene.step(second, max_seq_len=2048)
    for name in (field.name for field in fields(step)):
        if isinstance(old := getattr(step, name), torch.Tensor):
            old.copy_(getattr(new, name))
    q.copy_(torch.from_numpy(np.concatenate([scene.queries[s.row][s.context_len].reshape(1, -1) for s in second])))
    replay()
    wanted = scene.attend(second, deterministic=deterministic, max_seq_len=2048)
    np.testing.assert_array_equal(out.float().cpu().numpy().reshape(3, 32, 128), np.concatenate(wanted))
