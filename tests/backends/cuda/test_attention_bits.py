"""Deterministic attention: a query's answer is the same, bit by bit, in whatever company it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.cuda.kernels import attention
from penstock.types.kv_dtype import KvDtype
from support.backends.cuda.paged import F32, Scene, Span

LENGTH = 2 * attention.DETERMINISTIC_SPLIT + 70
SPOTS = (0, 63, 64, 500, 511, 512, 513, 1023, 1024, LENGTH - 1)


@pytest.fixture(scope="module", params=[(KvDtype.BF16, 0, 3), (KvDtype.INT8, 0, 2), (KvDtype.BF16, 530, 2)], ids=str)
def whole(request: pytest.FixtureRequest) -> tuple[Scene, int, F32]:
    kv_dtype, window, num_heads = request.param
    scene = Scene([LENGTH, 90], num_heads=num_heads, num_kv_heads=1, kv_dtype=kv_dtype, size=3.0)
    (answer,) = scene.attend([Span(0, 0, LENGTH)], deterministic=True, window=window)
    return scene, window, answer


def test_decodes_are_the_whole(whole: tuple[Scene, int, F32]) -> None:
    scene, window, answer = whole
    for spot in SPOTS:
        (alone,) = scene.attend([Span(0, spot, 1)], deterministic=True, window=window)
        np.testing.assert_array_equal(alone[0], answer[spot])


def test_decodes_in_a_batch_are_the_whole(whole: tuple[Scene, int, F32]) -> None:
    """There are fewer programs than parts of the longest, so that some compute two."""
    scene, window, answer = whole
    spans = [Span(0, spot, 1) for spot in SPOTS]
    workspace = scene.workspace(deterministic=True, max_rows=len(spans), num_multiprocessors=1)
    answers = scene.attend(spans, deterministic=True, window=window, workspace=workspace)
    for spot, got in zip(SPOTS, answers, strict=True):
        np.testing.assert_array_equal(got[0], answer[spot])


def test_decodes_with_sinks_are_the_whole() -> None:
    scene = Scene([600, 90], num_heads=2, num_kv_heads=1, size=3.0)
    sinks = np.array([-2.0, 5.0], np.float32)
    (whole,) = scene.attend([Span(0, 500, 100)], deterministic=True, sinks=sinks)
    answers = scene.attend([Span(0, 599, 1), Span(1, 89, 1), Span(0, 511, 1)], deterministic=True, sinks=sinks)
    np.testing.assert_array_equal(answers[0][0], whole[99])
    np.testing.assert_array_equal(answers[2][0], whole[11])


@pytest.mark.parametrize("chunk", [(450, 130), (1000, 94), (511, 2), (3, 40)])
def test_a_chunk_beside_others_is_the_whole(whole: tuple[Scene, int, F32], chunk: tuple[int, int]) -> None:
    scene, window, answer = whole
    context_len, query_len = chunk
    spans = [Span(1, 89, 1), Span(0, context_len, query_len), Span(1, 30, 20), Span(0, 1024, 1)]
    answers = scene.attend(spans, deterministic=True, window=window)
    np.testing.assert_array_equal(answers[1], answer[context_len : context_len + query_len])
    np.testing.assert_array_equal(answers[3][0], answer[1024])


def test_what_comes_after_a_query_is_not_read(whole: tuple[Scene, int, F32]) -> None:
    """Stale slots of its last block are NaN here, as they are before a later step writes them."""
    scene, window, answer = whole
    kv_dtype = scene.kv_dtype
    short = Scene([LENGTH, 90], num_heads=scene.num_heads, num_kv_heads=1, kv_dtype=kv_dtype, size=3.0)
    for spot in (63, 600):
        first_stale = spot // short.block_size
        short.cache.forget(short.tables[0, first_stale:].tolist(), spot % short.block_size + 1)
    (got,) = short.attend([Span(0, 63, 1)], deterministic=True, window=window)
    np.testing.assert_array_equal(got[0], answer[63])


def test_a_workspace_that_is_too_small_changes_nothing(whole: tuple[Scene, int, F32]) -> None:
    scene, window, answer = whole
    small = scene.workspace(deterministic=True, num_parts=2 * scene.num_heads)
    answers = scene.attend([Span(0, 1060, 1), Span(1, 80, 1)], deterministic=True, window=window, workspace=small)
    np.testing.assert_array_equal(answers[0][0], answer[1060])
