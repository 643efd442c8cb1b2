"""The table of steps: the work in a step is counted right, and the larger share of a peak is what bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.lab.sizing import ModelSize, size_of, work_of
from penstock.lab.step_table import Peaks, figures_of, roofline_panel, shapes_of, step_lines
from penstock.lab.steps import MeasuredStep
from penstock.models.architectures import describe
from penstock.models.hf import read_hf_spec
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity, StepShape
from support.tiny_models import TinyLlama, write_hf

PEAKS = Peaks(ops_per_s=1e12, read_bytes_per_s=1e10, words="int8, 2 threads, avx512")
DECODE, PROMPT = StepShape(((1, 99),) * 2, 2), StepShape(((64, 10),), 0)


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> ModelSize:
    folder = write_hf(tmp_path_factory.mktemp("models") / "tiny", TinyLlama())
    program = describe(read_hf_spec(folder))
    return size_of(
        program,
        name="tiny",
        kv_dtype=KvDtype.INT8,
        num_weight_bytes=100_000,
        num_read_bytes=90_000,
        is_quantised=True,
    )


def test_the_work_of_a_step(size: ModelSize) -> None:
    ops, num_bytes = work_of(size, DECODE)
    products = 2 * size.num_token_products + 2 * 100 * size.num_attention_products + 2 * size.num_logit_products
    assert ops == 2 * products
    assert num_bytes == 90_000 + 2 * 100 * size.kv_bytes_per_token
    ops, num_bytes = work_of(size, PROMPT)
    pairs = 64 * 10 + 64 * 65 // 2
    assert ops == 2 * (64 * size.num_token_products + pairs * size.num_attention_products)
    assert num_bytes == 90_000 + 74 * size.kv_bytes_per_token


def test_the_larger_share_bounds(size: ModelSize) -> None:
    steps = [MeasuredStep(DECODE, ns, {"linear": ns // 2}, group=3) for ns in (10_000, 20_000, 90_000)]
    steps += [MeasuredStep(PROMPT, 50_000, {"linear": 40_000}, group=1)]
    prompt, decode = figures_of(steps, size, PEAKS)
    assert (prompt.shape, decode.shape) == (PROMPT, DECODE)
    assert decode.duration_ns == 20_000
    assert decode.parts_ns == {"linear": 10_000}
    ops, num_bytes = work_of(size, DECODE)
    assert decode.read_share == pytest.approx(num_bytes / 1e10 / 20e-6)
    assert decode.compute_share == pytest.approx(ops / 1e12 / 20e-6)
    assert decode.intensity == ops / num_bytes
    assert decode.bound == "memory"
    (slow_compute,) = figures_of(steps[:3], size, replace(PEAKS, ops_per_s=1e9))
    assert slow_compute.bound == "compute"
    text = "\n".join(step_lines([prompt, decode], PEAKS))
    assert "1000 GOP/s, 10.0 GB/s (int8, 2 threads, avx512)" in text
    assert "2x1@99" in text
    assert text.count("memory") == 2
    panel = roofline_panel([prompt, decode], PEAKS, "title")
    assert [series.name for series in panel.series] == ["roof", "prompts", "decodes"]


def test_without_peaks_there_is_no_share(size: ModelSize) -> None:
    (figures,) = figures_of([MeasuredStep(DECODE, 10_000)], size, None)
    assert (figures.compute_share, figures.bound) == (None, "")
    assert "share" not in "\n".join(step_lines([figures], None))


def test_shapes_of_the_table_fit() -> None:
    assert len(shapes_of(Capacity(8000, 16, 64, 512, 2048))) == 20
    small = shapes_of(Capacity(20, 16, 4, 64, 256))
    assert small
    assert max(len(shape.rows) for shape in small) <= 4
