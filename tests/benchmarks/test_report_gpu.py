"""The page's figures of a GPU are those that its benchmarks print, with the roof of the same run; others are refused.

Results are what the benchmarks print in their self-tests, as if a GPU had printed it; none is written by hand.
"""

import copy
import json
import sys
from xml.etree import ElementTree

import gpu_serve
import pytest
import report
import report_gpu
import report_gpu_plots
from gpu_shapes import SHAPES

pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'penstock[lab]'")

GPU = "NVIDIA X100"
BENCHMARKS = sorted(report_gpu.SECTIONS)
NUM_PLOTS = {"gpu_peaks": 0, "gpu_gemm": 1, "gpu_attention": 1, "gpu_step": 2, "gpu_serve": 1}


@pytest.fixture
def measured(self_tested):
    """A result by the benchmark's name, as if it were of a GPU."""
    return lambda name, *words: self_tested(name, *words) | {"gpu": GPU, "is_self_test": False}


@pytest.fixture
def panels(monkeypatch):
    """The panels of all plots that are drawn after they were asked for."""
    found = []

    class Nothing:
        def svg(self):
            return b"<svg/>"

    def draw(title, drawn):
        found.extend(drawn)
        return Nothing()

    monkeypatch.setattr(report_gpu_plots, "draw", draw)
    return found


def write_page(tmp_path, results):
    """report.py with these results; the page it leaves behind."""
    page = tmp_path / "gpu.md"
    page.write_text("".join(f"<!-- begin {name} -->\nNot measured yet.\n<!-- end {name} -->\n" for name in BENCHMARKS))
    paths = []
    for i, result in enumerate(results):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text("some lines\n" + json.dumps(result) + "\n")
    try:
        report.main([*map(str, paths), "--page", str(page)])
    finally:
        text = page.read_text()
    return text


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


def with_peaks_divided(result, factor):
    """The result of the same times on a device whose peaks are so much lower."""
    changed = copy.deepcopy(result)
    for peak in changed["peaks"].values():
        peak["best"] /= factor
    for figures in figures_of(changed):
        for name in ("share", "bandwidth_share", "matrix_share"):
            figures[name] *= factor
    return changed


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_self_test_is_never_written_to_the_page(name, self_tested, tmp_path):
    for result in (self_tested(name), self_tested(name) | {"gpu": GPU}):
        with pytest.raises(SystemExit, match=r"0\.txt: no figures of a GPU: it is of --self-test"):
            write_page(tmp_path, [result])
        assert (tmp_path / "gpu.md").read_text().count("Not measured yet.") == len(BENCHMARKS)
        assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_result_without_the_name_of_a_gpu_is_refused(name, measured, tmp_path):
    with pytest.raises(SystemExit, match="does not name the GPU"):
        write_page(tmp_path, [measured(name) | {"gpu": None}])


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("peak", report_gpu.PEAKS)
def test_a_result_without_a_peak_is_refused(name, peak, measured, tmp_path):
    result = measured(name)
    for peaks in ({}, {other: found for other, found in result["peaks"].items() if other != peak}):
        with pytest.raises(SystemExit, match="it has no peak"):
            write_page(tmp_path, [result | {"peaks": peaks}])
    result["peaks"][peak]["best"] = 0.0
    with pytest.raises(SystemExit, match=peak):
        write_page(tmp_path, [result])


def test_a_result_of_a_benchmark_as_it_was_before_is_refused(measured):
    older = measured("gpu_gemm")
    del older["is_self_test"]
    assert "another version" in report_gpu.why_no_figures(older)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_measurement_becomes_tables_and_plots(name, measured, tmp_path):
    result = measured(name)
    page = write_page(tmp_path, [result])
    section = page.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]
    assert "Not measured yet." not in section
    assert page.count("Not measured yet.") == len(BENCHMARKS) - 1
    for told in (GPU, result["date"], f"`python benchmarks/{name}.py --self-test`", f"torch {result['torch']}"):
        assert told in section
    for peak in result["peaks"].values():
        assert f"{report_gpu.figure(peak['best'])} (median {report_gpu.figure(peak['median'])})" in section
    plots = list((tmp_path / "figures").iterdir())
    assert len(plots) == NUM_PLOTS[name]
    for plot in plots:
        assert GPU in "".join(ElementTree.parse(plot).getroot().itertext())
        assert f"(figures/{plot.name})" in section


@pytest.mark.parametrize("name", ["gpu_gemm", "gpu_attention", "gpu_step"])
def test_a_share_is_the_bound_of_its_work_at_the_best_peaks_over_the_time(name, measured):
    result = measured(name)
    gbs, tflops = (result["peaks"][peak]["best"] for peak in report_gpu.PEAKS)
    found = list(figures_of(result))
    assert found
    for figures in found:
        seconds = figures["us"] / 1e6 if "us" in figures else figures["device_ms"] / 1e3
        bound_s = max(figures["operations"] / tflops / 1e12, figures["bytes"] / gbs / 1e9)
        assert figures["share"] == pytest.approx(bound_s / seconds, rel=0.005)
        assert figures["share"] == max(figures["bandwidth_share"], figures["matrix_share"])


def test_serving_is_as_near_to_its_bound_as_its_time_to_the_least(measured):
    found = measured("gpu_serve")["shapes"]["tiny"]
    assert found["penstock"]["share"] == pytest.approx(found["bound"]["seconds"] / found["penstock"]["seconds"], rel=0.005)
    assert found["penstock"]["attention"] == "decode Triton, prefill Triton"
    rates = [found[who]["output_tokens_per_s"] for who in ("penstock", "bound")]
    assert found["penstock"]["share"] == pytest.approx(rates[0] / rates[1], rel=0.005)


@pytest.mark.parametrize("name", ["gpu_gemm", "gpu_attention", "gpu_step"])
def test_how_far_a_point_is_below_the_roof_is_its_share(name, measured, panels):
    """Each share of the tables is a point of the plot, and each point has its share."""
    result = measured(name)
    report_gpu.SECTIONS[name]([result])
    gbs, tflops = (result["peaks"][peak]["best"] for peak in report_gpu.PEAKS)
    (panel,) = (panel for panel in panels if panel.series[0].kind == report_gpu_plots.ROOF.kind)
    drawn = [
        point for curve in panel.series if curve.name and curve.kind != report_gpu_plots.LAYER.kind for point in curve.points
    ]
    shares = sorted(y / min(x * gbs / 1e3, tflops) for x, y in drawn)
    assert shares == pytest.approx(sorted(plotted_shares(name, result)), rel=0.005)
    corners = panel.series[0].points
    assert [y for _, y in corners] == pytest.approx([min(x * gbs / 1e3, tflops) for x, _ in corners])
    assert corners[0][0] < min(x for x, _ in drawn)
    assert corners[-1][0] > max(x for x, _ in drawn)
    assert all(panel.x.low < x < panel.x.high and panel.y.low < y < panel.y.high for x, y in drawn)


def plotted_shares(name, result):
    if name == "gpu_gemm":
        return [
            figures["share"]
            for product in result["products"]
            if product["mode"] == "default"
            for figures in product["by_tokens"].values()
        ]
    if name == "gpu_attention":
        return [case["attention"]["share"] for case in result["cases"] if case["mode"] == "default"]
    return [step["share"] for step in result["steps"] if step["depth"] == 2]


def test_the_products_of_a_layer_are_one_point_of_what_they_take_together(measured, panels):
    result = measured("gpu_gemm")
    report_gpu.gpu_gemm([result])
    curves = [curve for curve in panels[0].series if curve.kind == report_gpu_plots.LAYER.kind]
    of_layer = {
        product["kind"]: product["by_tokens"]
        for product in result["products"]
        if product["mode"] == "default" and product["product"] == "o"  # the tiny model has no other, but logits
    }
    assert {curve.name: len(curve.points) for curve in curves} == dict.fromkeys(of_layer, 2)
    for curve in curves:
        figures = of_layer[curve.name].values()
        assert [y for _, y in curve.points] == pytest.approx([one["tflops"] for one in figures], rel=0.005)


def test_a_decodes_time_stands_above_its_bound_in_the_same_plot(measured, panels):
    result = measured("gpu_step")
    report_gpu.gpu_step([result])
    (step,) = (step for step in result["steps"] if step["depth"] == 2 and step["query_len"] == 1)
    curves = {curve.kind: curve for curve in panels[0].series}
    assert curves[report_gpu_plots.MEASURED.kind].points == [(2, step["device_ms"])]
    assert curves[report_gpu_plots.BOUND.kind].points == [(2, step["bound_ms"])]
    assert {curve.name for curve in curves.values()} == {"after 3 positions"}


@pytest.mark.parametrize("name", ["gpu_gemm", "gpu_attention", "gpu_step"])
def test_a_share_above_1_is_shown_and_told(name, measured, panels):
    result = measured(name)
    largest = max(figures["share"] for figures in figures_of(result))
    above = with_peaks_divided(result, 3.0 / largest)
    text, _ = report_gpu.SECTIONS[name]([above])
    assert "**Above the bound:**" in text
    assert "(300 %)" in text
    below = with_peaks_divided(result, 0.9 / largest)
    text, _ = report_gpu.SECTIONS[name]([below])
    assert "**Above the bound:**" not in text


@pytest.mark.parametrize("who", ["flashinfer auto", "rotate and write"])
def test_no_share_of_the_table_of_attention_is_above_1_untold(who, measured):
    """Also of what stands beside our attention."""
    result = measured("gpu_attention")
    case = result["cases"][0]
    case[who] = case["attention"] | {"share": 1.25}
    text, _ = report_gpu.gpu_attention([result])
    (told,) = (line for line in text.splitlines() if line.startswith("**Above the bound:**"))
    assert f"{who} (125 %)" in told


@pytest.mark.parametrize("name", ["gpu_gemm", "gpu_attention", "gpu_step"])
def test_a_point_above_the_roof_is_drawn_above_it(name, measured, panels):
    result = measured(name)
    result = with_peaks_divided(result, 3.0 / max(plotted_shares(name, result)))
    report_gpu.SECTIONS[name]([result])
    gbs, tflops = (result["peaks"][peak]["best"] for peak in report_gpu.PEAKS)
    (panel,) = (panel for panel in panels if panel.series[0].kind == report_gpu_plots.ROOF.kind)
    assert max(y / min(x * gbs / 1e3, tflops) for curve in panel.series for x, y in curve.points) == pytest.approx(3, rel=0.01)


def test_it_is_told_whose_attention_was_measured(measured):
    text, _ = report_gpu.gpu_step([measured("gpu_step")])
    assert "Attention of decodes: Triton, prompts: Triton." in text
    text, _ = report_gpu.gpu_serve([measured("gpu_serve")])
    assert "Attention of Penstock, bf16: decode Triton, prefill Triton." in text


def test_two_results_of_the_same_are_refused(measured):
    result = measured("gpu_step")
    with pytest.raises(SystemExit, match="several results for tiny, BF16, NVIDIA X100"):
        report_gpu.gpu_step([result, result])
    others = [("--format", "F8_E4M3"), ("--sampling", "nucleus", "penalties"), ("--deterministic", "--no-graphs")]
    text, plots = report_gpu.gpu_step([result, *(measured("gpu_step", "--depths", "2", *words) for words in others)])
    for title in ("tiny, F8_E4M3", "tiny, BF16, nucleus, penalties", "tiny, BF16, deterministic, no graphs"):
        assert f"### {title}, NVIDIA X100\n" in text
    assert len(plots) == 2


def test_gpus_have_plots_of_their_own(measured):
    _, plots = report_gpu.gpu_gemm([measured("gpu_gemm"), measured("gpu_gemm") | {"gpu": "NVIDIA Y200"}])
    assert sorted(plots) == ["gpu-gemm-nvidia-x100.svg", "gpu-gemm-nvidia-y200.svg"]


def test_serving_beside_transformers_has_the_ratio_and_both_gaps(self_tested, measured, monkeypatch, panels):
    """The peer is a second Penstock, which needs no transformers; the benchmark's own code makes the figures."""
    alone = measured("gpu_serve")
    assert "Without transformers: left out." in report_gpu.gpu_serve([alone])[0]

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
    beside = alone | {"shapes": {"tiny": found}, "no_peer": None, "peaks": peaks.summary()}
    text, _ = report_gpu.gpu_serve([beside])
    ratio = found["penstock"]["output_tokens_per_s"] / found["transformers"]["output_tokens_per_s"]
    assert f"**{report_gpu.figure(gpu_serve.rounded(ratio))} times transformers.**" in text
    assert "| transformers, bf16 | " in text
    first = found["penstock"]["first"]
    assert f"| {report_gpu.figure(first['output_tokens_per_s'])}, {report_gpu.figure(first['itl_p99_ms'])} |" in text
    speeds, gaps = panels[-2:]
    assert {(curve.name, curve.kind) for curve in speeds.series} == {
        ("Penstock, bf16", report_gpu_plots.MEASURED.kind),
        ("Penstock, bf16", report_gpu_plots.BOUND.kind),
        ("transformers, bf16", report_gpu_plots.MEASURED.kind),
    }
    assert {curve.name: curve.points for curve in gaps.series if curve.kind == report_gpu_plots.LONG_GAP.kind} == {
        "Penstock, bf16": [(shape.num_weights, found["penstock"]["itl_p99_ms"])],
        "transformers, bf16": [(shape.num_weights, found["transformers"]["itl_p99_ms"])],
    }
