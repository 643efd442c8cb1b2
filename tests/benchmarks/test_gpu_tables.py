"""The tables that the GPU benchmarks print: they have the figures of the JSON object, and hide no share above the bound."""

import copy
import sys

import gpu_attention
import gpu_gemm
import gpu_serve
import gpu_step
import pytest
from gpu_shapes import SHAPES
from gpu_tables import PEAKS, figure, origin

TABLES = {"gpu_gemm": gpu_gemm.tables, "gpu_attention": gpu_attention.tables, "gpu_step": gpu_step.tables}


def text_of(parts):
    return "\n\n".join(paragraph for paragraphs in parts.values() for paragraph in paragraphs)


def figures_of(value):
    """All objects of a result that have a share of the bound of their own work."""
    if isinstance(value, dict):
        if {"share", "operations", "bytes"} <= set(value):
            yield value
        for inner in value.values():
            yield from figures_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from figures_of(inner)


def with_shares_times(result, factor):
    """The result of the same times on a device whose peaks are so much lower."""
    changed = copy.deepcopy(result)
    for figures in figures_of(changed):
        for name in ("share", "bandwidth_share", "matrix_share"):
            figures[name] *= factor
    return changed


@pytest.mark.parametrize("name", ["gpu_peaks", "gpu_gemm", "gpu_attention", "gpu_step", "gpu_serve"])
def test_tables_are_printed_before_the_result_with_what_they_are_of(name, self_tested, self_tested_lines):
    result, lines = self_tested(name), self_tested_lines(name)
    titles = [idx for idx, line in enumerate(lines) if line.startswith("### ")]
    assert titles
    for idx in titles:
        assert lines[idx + 2] == origin(result)
    for told in (
        result["date"],
        f"`python benchmarks/{name}.py --self-test`",
        f"torch {result['torch']}",
        "times mean nothing",
    ):
        assert told in origin(result)
    for peak in result["peaks"].values():
        assert f"{figure(peak['best'])} (median {figure(peak['median'])})" in origin(result)
    assert "A self-test" not in origin(result | {"is_self_test": False})
    assert "NVIDIA X100" in origin(result | {"gpu": "NVIDIA X100"})


@pytest.mark.parametrize("name", TABLES)
def test_a_share_is_the_bound_of_its_work_at_the_best_peaks_over_the_time(name, self_tested):
    result = self_tested(name)
    gbs, tflops = (result["peaks"][peak]["best"] for peak in PEAKS)
    found = list(figures_of(result))
    assert found
    for figures in found:
        seconds = figures["us"] / 1e6 if "us" in figures else figures["device_ms"] / 1e3
        bound_s = max(figures["operations"] / tflops / 1e12, figures["bytes"] / gbs / 1e9)
        assert figures["share"] == pytest.approx(bound_s / seconds, rel=0.005)
        assert figures["share"] == max(figures["bandwidth_share"], figures["matrix_share"])


def test_serving_is_as_near_to_its_bound_as_its_time_to_the_least(self_tested):
    found = self_tested("gpu_serve")["shapes"]["tiny"]
    assert found["penstock"]["share"] == pytest.approx(found["bound"]["seconds"] / found["penstock"]["seconds"], rel=0.005)
    assert found["penstock"]["attention"] == "decode Triton, prefill Triton"
    rates = [found[who]["output_tokens_per_s"] for who in ("penstock", "bound")]
    assert found["penstock"]["share"] == pytest.approx(rates[0] / rates[1], rel=0.005)


@pytest.mark.parametrize("name", TABLES)
def test_a_share_above_1_is_shown_and_told(name, self_tested):
    result = self_tested(name)
    largest = max(figures["share"] for figures in figures_of(result))
    text = text_of(TABLES[name](with_shares_times(result, 3.0 / largest)))
    assert "**Above the bound:**" in text
    assert "(300 %)" in text
    assert "**Above the bound:**" not in text_of(TABLES[name](with_shares_times(result, 0.9 / largest)))


@pytest.mark.parametrize("who", ["flashinfer auto", "rotate and write"])
def test_no_share_of_the_table_of_attention_is_above_1_untold(who, self_tested):
    """Also of what stands beside our attention."""
    result = self_tested("gpu_attention")
    case = result["cases"][0]
    case[who] = case["attention"] | {"share": 1.25}
    (told,) = (line for line in text_of(gpu_attention.tables(result)).splitlines() if line.startswith("**Above the bound:**"))
    assert f"{who} (125 %)" in told


def test_it_is_told_whose_attention_was_measured(self_tested):
    assert "Attention of decodes: Triton, prompts: Triton." in text_of(gpu_step.tables(self_tested("gpu_step")))
    text = text_of(gpu_serve.tables(self_tested("gpu_serve")))
    assert "Attention of Penstock, bf16: decode Triton, prefill Triton." in text


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (("--format", "F8_E4M3"), "tiny, F8_E4M3"),
        (("--sampling", "nucleus", "penalties"), "tiny, BF16, nucleus, penalties"),
        (("--deterministic", "--no-graphs"), "tiny, BF16, deterministic, no graphs"),
    ],
)
def test_the_title_of_steps_names_unusual_settings(words, title, self_tested):
    assert list(gpu_step.tables(self_tested("gpu_step", "--depths", "2", *words))) == [title]


def test_serving_beside_transformers_has_the_ratio_and_both_gaps(self_tested, monkeypatch):
    """The peer is a second Penstock, which needs no transformers; the benchmark's own code makes the figures."""
    alone = self_tested("gpu_serve")
    assert "Without transformers: left out." in text_of(gpu_serve.tables(alone))

    class Peer(gpu_serve.Penstock):
        def __init__(self, shape, jobs):
            super().__init__(gpu_serve.make_executor(shape, jobs, args))

    monkeypatch.setattr(sys, "argv", ["gpu_serve.py", "--self-test"])
    monkeypatch.setattr(gpu_serve, "Transformers", Peer)
    args = gpu_serve.read_arguments()
    peaks = gpu_serve.GpuPeaks(gpu_serve.DeviceClock(args.device))
    shape = SHAPES["tiny"]
    jobs = gpu_serve.make_jobs(shape, args)
    found = gpu_serve.compare(shape, jobs, args, peaks, has_peer=True)
    gpu_serve.add_bound(found, shape, jobs, args, peaks)
    assert "share" not in found["transformers"], "it chooses how many rows it has at a time, on which the bound depends"
    text = text_of(gpu_serve.tables(alone | {"shapes": {"tiny": found}, "no_peer": None}))
    ratio = found["penstock"]["output_tokens_per_s"] / found["transformers"]["output_tokens_per_s"]
    assert f"**{figure(gpu_serve.rounded(ratio))} times transformers.**" in text
    assert "| transformers, bf16 | " in text
    first = found["penstock"]["first"]
    assert f"| {figure(first['output_tokens_per_s'])}, {figure(first['itl_p99_ms'])} |" in text
