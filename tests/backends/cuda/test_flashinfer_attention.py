"""The arguments of FlashInfer and their order, by a fake that computes as its documentation says: every kind of step gives the
reference's answers. And, on a device, by the real one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.cuda.attention import AttentionShape, RowLens
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.flashinfer_attention import (
    HEAD_DIMS,
    LEAST_WORKSPACE_BYTES,
    FlashInferAttention,
    import_package,
    is_installed,
    why_unfit,
    workspace_bytes,
)
from penstock.backends.cuda.kernels.page_indices import PAGES_AT_ONCE, page_indices
from penstock.backends.cuda.stream import open_stream
from penstock.models.architectures import describe
from penstock.models.gguf import load_gguf
from support.backends.cuda import fake_flashinfer
from support.backends.cuda.paged import F32, LAYER, Scene, Span
from support.interpreted import DEVICE, HAS_DEVICE
from support.tiny_models import TinyLlama, write_gguf

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SHAPE = AttentionShape(8, 2, 64, 0.125)
STREAM = open_stream(torch.device(DEVICE), spins=True)


def open_attention(scene: Scene, package: object, *, graph_rows: Sequence[int] = (4, 8)) -> FlashInferAttention:
    shape = AttentionShape(scene.num_heads, scene.num_kv_heads, scene.head_dim, scene.scale)
    return FlashInferAttention(
        package,
        shape,
        dtype=scene.dtype,
        block_size=scene.block_size,
        max_rows=8,
        max_blocks=scene.tables.shape[1],
        graph_rows=graph_rows,
        stream=STREAM,
        device=torch.device(DEVICE),
    )


def attend(
    attention: FlashInferAttention, scene: Scene, spans: Sequence[Span], *, num_padded: int = 0
) -> tuple[list[F32], list[F32]]:
    """Its answers to each span, and the reference's. `num_padded` > 0: as a captured decode of so many rows."""
    step = scene.step(spans)
    lens = [
        np.array([span.context_len for span in spans], np.int32),
        np.cumsum([0, *(s.query_len for s in spans)], dtype=np.int32),
    ]
    rows = RowLens.padded(lens[1], lens[0], num_padded or len(spans))
    num_padding = rows.num_rows - len(spans)
    step.block_tables = torch.nn.functional.pad(step.block_tables, (0, 0, 0, num_padding))
    step.num_rows, step.num_tokens = step.num_rows + num_padding, step.num_tokens + num_padding
    attention.plan(rows, is_captured=num_padded > 0)
    width = scene.num_heads * scene.head_dim
    wide = torch.zeros((step.num_tokens, width + 16), dtype=scene.dtype, device=DEVICE)
    q = np.concatenate([scene.queries[s.row][s.context_len :][: s.query_len] for s in spans])
    wide[: len(q), :width] = torch.from_numpy(q.reshape(len(q), -1))
    out = torch.full((step.num_tokens, width), torch.nan, dtype=scene.dtype, device=DEVICE)
    attention.begin(step)
    shape = AttentionShape(scene.num_heads, scene.num_kv_heads, scene.head_dim, scene.scale)
    attention.attend(out, wide[:, :width], scene.cache.layer(LAYER), step, shape)
    assert out.isfinite().all(), "padding reads the null block, which is no poison"
    answers = out[: len(q)].float().cpu().numpy().reshape(len(q), scene.num_heads, scene.head_dim)
    return np.split(answers, np.cumsum([s.query_len for s in spans])[:-1]), scene.expected(spans)


def assert_near(pair: tuple[list[F32], list[F32]]) -> None:
    for found, wanted in zip(*pair, strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> object:
    return fake_flashinfer.install(monkeypatch)


@pytest.mark.skipif(HAS_DEVICE, reason="the stand-in computes on the CPU")
class TestWithTheStandIn:
    @pytest.mark.parametrize("block_size", [16, 5])
    @pytest.mark.parametrize("heads", [(4, 2, 32), (6, 1, 16), (3, 3, 64)])
    def test_every_kind_of_step_gives_the_references_answers(
        self, heads: tuple[int, int, int], block_size: int, fake: object
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        scene = Scene([40, 7, 33], block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        attention = open_attention(scene, fake)
        for spans in (
            [Span(0, 39, 1), Span(1, 0, 1), Span(2, 15, 1)],  # decodes, the first position among them
            [Span(2, 0, 33)],  # a prompt
            [Span(0, 13, 20)],  # a chunk of one
            [Span(1, 6, 1), Span(0, 16, 16), Span(2, 0, 5), Span(2, 32, 1)],  # decodes beside chunks
        ):
            assert_near(attend(attention, scene, spans))

    def test_a_captured_decode_is_padded_with_rows_of_the_null_block(self, fake: object) -> None:
        scene = Scene([40, 7, 33])
        attention = open_attention(scene, fake)
        spans = [Span(0, 39, 1), Span(1, 3, 1), Span(2, 16, 1)]
        for num_padded in (4, 8, 4):
            assert_near(attend(attention, scene, spans, num_padded=num_padded))

    def test_plans_of_all_sizes_share_their_memory(self, fake: object) -> None:
        """Each step is planned before it runs, so what another size left there does not matter."""
        scene = Scene([40, 7, 33])
        attention = open_attention(scene, fake)
        long, short = [Span(0, 39, 1), Span(2, 31, 1)], [Span(1, 2, 1), Span(0, 1, 1)]
        for spans, num_padded in ((long, 4), (short, 8), (long, 0), (short, 4), ([Span(0, 5, 30)], 0), (long, 8)):
            assert_near(attend(attention, scene, spans, num_padded=num_padded))

    def test_a_plan_waits_until_the_one_before_has_been_copied(self, fake: object) -> None:
        scene = Scene([40, 7, 33])
        attention = open_attention(scene, fake)
        attention.plan(RowLens(np.array([0, 1], np.int32), np.array([3], np.int32)), is_captured=False)
        waited: list[np.ndarray] = []

        class Mark:
            def wait(self) -> None:
                waited.append(attention._host.numpy().copy())

        before = attention._host.numpy().copy()
        attention._copied = Mark()  # type: ignore[assignment]
        attention.plan(RowLens(np.array([0, 1, 2], np.int32), np.array([30, 6], np.int32)), is_captured=False)
        np.testing.assert_array_equal(waited, [before])


def test_padding_has_one_query_after_nothing() -> None:
    rows = RowLens.padded(np.array([0, 1, 2], np.int32), np.array([7, 9], np.int32), 4)
    assert (rows.query_starts.tolist(), rows.context_lens.tolist()) == ([0, 1, 2, 3, 4], [7, 9, 0, 0])
    assert rows.seq_lens.tolist() == [8, 10, 1, 1]


@pytest.mark.parametrize("counts", [[1], [0, 3, 1], [5, PAGES_AT_ONCE + 3, 2 * PAGES_AT_ONCE, 1]])
def test_pages_of_rows_follow_each_other(counts: list[int]) -> None:
    tables = torch.arange(len(counts) * 3000, dtype=torch.int32, device=DEVICE).view(len(counts), 3000)
    indptr = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=DEVICE)
    out = torch.full((sum(counts) + 2,), -1, dtype=torch.int32, device=DEVICE)
    page_indices(out, tables, indptr, len(counts))
    wanted = torch.cat([*(tables[row, :count] for row, count in enumerate(counts)), out.new_full((2,), -1)])
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deterministic": True}, "deterministic mode"),
        ({"is_int8_kv": True}, "int8"),
        ({"dtype": torch.float32}, "computes in float32"),
        ({"shapes": [SHAPE, AttentionShape(8, 2, 64, 0.25)]}, "layers differs"),
        ({"shapes": [AttentionShape(8, 2, 64, 0.125, window=100)]}, "a window"),
        ({"shapes": [AttentionShape(8, 2, 64, 0.125, softcap=30.0)]}, "a soft cap"),
        ({"shapes": [AttentionShape(8, 2, 64, 0.125, has_sinks=True)]}, "or sinks"),
        ({"shapes": [AttentionShape(8, 2, 80, 0.125)]}, "heads have 80 columns"),
        ({"shapes": []}, "reads texts"),
    ],
)
def test_what_does_not_suit_is_named(changes: dict[str, object], words: str) -> None:
    suits = {"shapes": [SHAPE], "dtype": torch.bfloat16, "is_int8_kv": False, "deterministic": False}
    assert why_unfit(**suits) is None  # type: ignore[arg-type]
    assert words in str(why_unfit(**suits | changes))  # type: ignore[arg-type]


def test_the_workspace_grows_with_heads_and_rows() -> None:
    """A batch of 256 rows of 64 heads, cut twice in tiles of 16: 512 * 16 / 8 queries of 64 * 129 numbers."""
    assert workspace_bytes(SHAPE, max_rows=8, num_multiprocessors=132) == LEAST_WORKSPACE_BYTES
    large = workspace_bytes(AttentionShape(128, 8, 128, 0.1), max_rows=1024, num_multiprocessors=132)
    assert large >= 2 * 1024 * 16 // 16 * 128 * 129 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not is_installed(), reason="the package flashinfer-python is not installed")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_the_real_one_gives_the_references_answers(heads: tuple[int, int], head_dim: int) -> None:
    package = import_package()
    if isinstance(package, str):
        pytest.skip(package)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    with STREAM.entered():
        scene = Scene([1700, 64, 700], dtype=torch.bfloat16, **sizes)
        for part in (scene.cache.layer(LAYER).k, scene.cache.layer(LAYER).v):
            part.nan_to_num_(nan=9.0)  # it may multiply what it masks by nothing; that is wrong of NaN alone
        attention = open_attention(scene, package)
        decodes = [Span(0, 1699, 1), Span(1, 3, 1), Span(2, 512, 1)]
        for spans, num_padded in ((decodes, 0), (decodes, 4), ([Span(0, 1000, 300)], 0), ([*decodes, Span(2, 0, 130)], 0)):
            for found, wanted in zip(*attend(attention, scene, spans, num_padded=num_padded), strict=True):
                np.testing.assert_allclose(found, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not is_installed(), reason="the package flashinfer-python is not installed")
@pytest.mark.parametrize("use_graphs", [True, False])
def test_the_real_one_passes_its_trials(use_graphs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Captured, padded and planned again; a start that asks for it would end with what is wrong."""
    caplog.set_level(logging.DEBUG)
    tiny = TinyLlama(num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64)
    model = load_gguf(write_gguf(tmp_path / "tiny.gguf", tiny, matrix_type="F16"))
    sizes = {"num_blocks": 3000, "block_size": 16, "max_rows": 40, "max_step_tokens": 512, "max_model_len": tiny.max_model_len}
    executor = CudaExecutor(model, describe(model.spec), attention="flashinfer", use_graphs=use_graphs, **sizes)
    executor.choose_attention()
    executor.close()
    for kind in ("decode", "prefill"):
        assert f"attention of {kind} steps: FlashInfer" in caplog.text
