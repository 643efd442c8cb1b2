"""Attention over the paged cache against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.backends.cuda.kernels import attention
from penstock.backends.cuda.kv_cache import KV_DTYPES
from penstock.types.kv_dtype import KvDtype
from support.backends.cuda.paged import F32, Scene, Span
from support.interpreted import DEVICE

MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])


def assert_near(answers: Sequence[F32], expected: Sequence[F32], atol: float = 1e-4) -> None:
    for got, want in zip(answers, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=atol, rtol=atol)


def ends(scene: Scene) -> list[Span]:
    """The last position of each row, as a decode."""
    return [Span(row, length - 1, 1) for row, length in enumerate(scene.lengths)]


class TestDecode:
    @MODES
    @pytest.mark.parametrize("block_size", [4, 16, 64, 80])
    def test_lengths_at_the_edges_of_blocks_and_tiles(self, block_size: int, *, deterministic: bool) -> None:
        scene = Scene([1, 15, 16, 17, 63, 64, 65, 200], block_size)
        spans = ends(scene)
        assert_near(scene.attend(spans, deterministic=deterministic), scene.expected(spans))

    @pytest.mark.parametrize("num_heads", range(1, 9))
    def test_groups_of_query_heads(self, num_heads: int) -> None:
        scene = Scene([70, 3], num_heads=2 * num_heads, num_kv_heads=2)
        assert_near(scene.attend(ends(scene)), scene.expected(ends(scene)))

    def test_one_kv_head_for_more_query_heads_than_a_tile_has_rows(self) -> None:
        scene = Scene([70, 3], num_heads=20, num_kv_heads=1)
        for deterministic in (False, True):
            assert_near(scene.attend(ends(scene), deterministic=deterministic), scene.expected(ends(scene)))

    @pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128])
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_head_dims(self, head_dim: int, kv_dtype: KvDtype) -> None:
        scene = Scene([70], head_dim=head_dim, kv_dtype=kv_dtype)
        assert_near(scene.attend(ends(scene)), scene.expected(ends(scene)))

    @MODES
    @pytest.mark.parametrize("window", [1, 16, 60, 64, 300])
    def test_windows(self, window: int, *, deterministic: bool) -> None:
        scene = Scene([1, 64, 65, 200])
        spans = ends(scene)
        answers = scene.attend(spans, window=window, deterministic=deterministic)
        assert_near(answers, scene.expected(spans, window=window))

    @MODES
    def test_softcap(self, *, deterministic: bool) -> None:
        scene = Scene([1, 200], size=30.0)
        spans = ends(scene)
        answers = scene.attend(spans, softcap=5.0, deterministic=deterministic)
        assert_near(answers, scene.expected(spans, softcap=5.0))

    @MODES
    @pytest.mark.parametrize("softcap", [0.0, 5.0])
    def test_sinks_below_and_above_all_scores(self, softcap: float, *, deterministic: bool) -> None:
        """Merged from parts, written by one program, and in prompts."""
        scene = Scene([1, 1200, 70], num_heads=4, num_kv_heads=2, size=3.0)
        sinks = np.array([-30.0, 0.5, 4.0, 30.0], np.float32)
        for spans in (ends(scene), [Span(0, 0, 1), Span(1, 1199, 1), Span(2, 3, 30)], [Span(1, 1150, 50)]):
            answers = scene.attend(spans, sinks=sinks, softcap=softcap, deterministic=deterministic)
            assert_near(answers, scene.expected(spans, sinks=sinks, softcap=softcap))

    def test_contexts_of_several_deterministic_splits(self) -> None:
        length = 2 * attention.DETERMINISTIC_SPLIT + 33
        scene = Scene([length, 700, 20], num_heads=2, num_kv_heads=1, size=3.0)
        for window in (0, 600):
            answers = scene.attend(ends(scene), deterministic=True, window=window)
            assert_near(answers, scene.expected(ends(scene), window=window))

    @pytest.mark.parametrize("num_multiprocessors", [1, 3, 100])
    def test_however_many_splits_keep_the_device_busy(self, num_multiprocessors: int) -> None:
        """Down to one, which writes its answer by itself, and up to more than are merged at once."""
        scene = Scene([1300, 65, 1], num_heads=2, num_kv_heads=1, size=3.0)
        spans = ends(scene)[:1] if num_multiprocessors == 100 else ends(scene)
        workspace = scene.workspace(deterministic=False, max_rows=40, num_multiprocessors=num_multiprocessors)
        assert_near(scene.attend(spans, workspace=workspace), scene.expected(spans))

    @MODES
    def test_a_grid_for_longer_rows_than_there_are(self, *, deterministic: bool) -> None:
        """A captured graph's: the programs that find nothing to do leave."""
        scene = Scene([1, 130])
        workspace = attention.AttentionWorkspace.allocate(
            max_rows=2, num_heads=4, num_kv_heads=2, head_dim=32, max_model_len=4096, device=DEVICE, deterministic=deterministic
        )
        answers = scene.attend(ends(scene), deterministic=deterministic, max_seq_len=4096, workspace=workspace)
        assert_near(answers, scene.expected(ends(scene)))

    def test_float16(self) -> None:
        scene = Scene([70, 130], dtype=torch.float16)
        assert_near(scene.attend(ends(scene)), scene.expected(ends(scene)), 5e-3)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_bfloat16(self, kv_dtype: KvDtype) -> None:
        scene = Scene([70, 130], dtype=torch.bfloat16, kv_dtype=kv_dtype)
        assert_near(scene.attend(ends(scene)), scene.expected(ends(scene)), 3e-2)


class TestPrefill:
    @MODES
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_chunks_after_contexts_of_any_length(self, kv_dtype: KvDtype, *, deterministic: bool) -> None:
        scene = Scene([1, 17, 64, 65, 150], kv_dtype=kv_dtype, num_heads=6)
        spans = [Span(0, 0, 1), Span(1, 0, 17), Span(2, 63, 1), Span(3, 2, 63), Span(4, 70, 80)]
        assert_near(scene.attend(spans, deterministic=deterministic), scene.expected(spans))

    @pytest.mark.parametrize("num_heads", range(1, 9))
    def test_groups_of_query_heads(self, num_heads: int) -> None:
        """Also those that do not divide a tile."""
        scene = Scene([90], num_heads=num_heads, num_kv_heads=1)
        spans = [Span(0, 20, 70)]
        assert_near(scene.attend(spans), scene.expected(spans))

    @MODES
    @pytest.mark.parametrize("window", [1, 20, 64, 100])
    def test_windows(self, window: int, *, deterministic: bool) -> None:
        scene = Scene([150, 40])
        spans = [Span(0, 30, 120), Span(1, 0, 40)]
        answers = scene.attend(spans, window=window, deterministic=deterministic)
        assert_near(answers, scene.expected(spans, window=window))

    @MODES
    def test_softcap(self, *, deterministic: bool) -> None:
        scene = Scene([100], size=30.0)
        spans = [Span(0, 10, 90)]
        answers = scene.attend(spans, softcap=5.0, deterministic=deterministic)
        assert_near(answers, scene.expected(spans, softcap=5.0))

    @pytest.mark.parametrize("window", [0, 1030])
    def test_few_queries_after_a_long_context_are_computed_in_parts(self, window: int) -> None:
        """Also beside a decode, whose parts lie in the same workspace."""
        scene = Scene([1500, 40], num_heads=3, num_kv_heads=1, size=3.0)
        spans = [Span(1, 39, 1), Span(0, 1490, 10), Span(1, 20, 19)]
        workspace = scene.workspace(deterministic=False, max_rows=400, num_multiprocessors=7)
        assert_near(scene.attend(spans, workspace=workspace, window=window), scene.expected(spans, window=window))

    def test_an_empty_row_and_a_row_of_the_null_block(self) -> None:
        """Padding: what it computes has no meaning, and nobody else's answer changes."""
        scene = Scene([40, 20])
        scene.tables[1] = 0
        spans = [Span(0, 10, 0), Span(1, 0, 20), Span(0, 10, 30), Span(1, 19, 1)]
        assert_near(scene.attend(spans)[2:3], scene.expected([Span(0, 10, 30)]))

    def test_float16(self) -> None:
        scene = Scene([100], dtype=torch.float16)
        spans = [Span(0, 10, 90)]
        assert_near(scene.attend(spans), scene.expected(spans), 5e-3)


def test_poison_in_sight_is_seen() -> None:
    """The tests above would notice a stale read."""
    scene = Scene([40])
    scene.cache.forget([int(scene.tables[0, 1])], 5)
    (answer,) = scene.attend([Span(0, 39, 1)])
    assert np.isnan(answer).all()


@pytest.mark.parametrize("seed", range(16))
def test_any_step_of_any_shape(seed: int) -> None:
    """Rows of every kind beside each other, some of them twice at different places."""
    rng = np.random.default_rng(seed)
    num_kv_heads = int(rng.integers(1, 3))
    scene = Scene(
        [int(length) for length in rng.integers(1, 150, rng.integers(1, 4))],
        block_size=int(rng.choice([3, 16, 32, 64, 128])),
        num_heads=num_kv_heads * int(rng.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([16, 24, 64])),
        kv_dtype=KV_DTYPES[rng.integers(2)],
        size=float(rng.choice([0.1, 5.0])),
    )
    spans = []
    for row in rng.integers(0, len(scene.lengths), rng.integers(1, 5)).tolist():
        context_len = int(rng.integers(0, scene.lengths[row]))
        longest = scene.lengths[row] - context_len
        spans.append(Span(row, context_len, 1 if rng.random() < 0.5 else int(rng.integers(1, longest + 1))))
    window, softcap = int(rng.choice([0, 0, 10, 70])), float(rng.choice([0, 0, 4]))
    answers = scene.attend(spans, deterministic=bool(seed % 2), window=window, softcap=softcap)
    assert_near(answers, scene.expected(spans, window=window, softcap=softcap))


def test_a_decodes_programs_are_those_of_its_longest_row_and_of_the_device() -> None:
    """Two programs of each multiprocessor's sixteen for each of two KV heads of one row; there are two multiprocessors."""
    sizes = {"num_heads": 4, "num_kv_heads": 2}
    for deterministic, expected in ((False, (8, 16, 2, 2, 2)), (True, (2, 8, 2, 2, 0))):
        workspace = attention.AttentionWorkspace.allocate(
            **sizes, max_rows=8, head_dim=64, max_model_len=4096, device="cpu", deterministic=deterministic
        )
        found = tuple(
            attention.decode_programs(
                workspace, num_rows=num_rows, max_seq_len=max_seq_len, **sizes, deterministic=deterministic
            )
            for num_rows, max_seq_len in ((1, 1024), (1, 4096), (8, 1024), (8, 4096), (8, 8192))
        )
        assert found == expected
