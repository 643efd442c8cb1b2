"""The figures of docs/notes/gpu-figures.md: what the GPU benchmarks' JSON objects look like as Markdown tables and plots.

Called by `report.py` with all results of one benchmark, once `why_no_figures` has accepted each. Measures and hides
nothing: a share above 1 is shown as such.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import report_gpu_plots as plots
from printed import percent, table
from report_gpu_plots import Result

PEAKS = {"copy_gbs": "GB/s copied", "matrix_tflops": "TFLOP/s of bf16 products"}
VERSIONS = ("torch", "triton", "transformers", "flashinfer")
Plots = dict[str, str]
"""File name -> SVG."""
Drawings = Mapping[str, tuple[str, Callable[[str, Sequence[Result]], str]]]
"""By the end of a file's name: the plot's title, and who draws it."""


def why_no_figures(result: Result) -> str | None:
    """Return why a result is not a GPU measurement, to follow its file's name, or None."""
    if "is_self_test" not in result:
        return "another version of the benchmark printed it; measure again"
    if result["is_self_test"]:
        return "it is of --self-test, whose times mean nothing; measure without it, on a machine with an NVIDIA GPU"
    if not result.get("gpu"):
        return "it does not name the GPU that it was measured on; measure on a machine with one"
    for name in PEAKS:
        if not result.get("peaks", {}).get(name, {}).get("best", 0) > 0:
            return f"it has no peak {name!r}, without which there are no shares; measure again"
    return None


def origin(result: Result) -> str:
    """When, on what, with what, by which command, and the peaks then."""
    versions = ", ".join(f"{name} {result[name]}" for name in VERSIONS if result.get(name))
    shown = (f"{figure(p['best'])} (median {figure(p['median'])}) {PEAKS[name]}" for name, p in result["peaks"].items())
    told = f"{result['date']}, {result['gpu']}, Penstock {result['penstock']}, {versions}: `{result['command']}`."
    return f"{told} Peaks in the same run, best and median: {', '.join(shown)}."


def above_the_bound(shares: Iterable[tuple[str, float]]) -> list[str]:
    """A paragraph that names what took less time than the bound; none if nothing did."""
    found = [f"{name} ({percent(share)})" for name, share in shares if share > 1]
    cause = "reading is faster than the copy that measures the peak, or a cache had bytes that the bound counts"
    return [f"**Above the bound:** {', '.join(found)}; {cause}."] if found else []


def figure(value: float) -> str:
    """A figure of four significant digits, never as a power of ten where it is large."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def bound_by(figures: Result) -> str:
    return "matrix units" if figures["matrix_share"] > figures["bandwidth_share"] else "memory"


def section(parts: Sequence[tuple[str, str]], drawings: Drawings, results: Sequence[Result]) -> tuple[str, Plots]:
    """(title, text) of each part, and before them plots of each GPU. Raises SystemExit for two parts with one title."""
    titles = [title for title, _ in parts]
    if twice := [title for title in dict.fromkeys(titles) if titles.count(title) > 1]:
        raise SystemExit(f"there are several results for {' and '.join(twice)}; leave all but one out.")
    texts, drawn = [], {}
    for gpu in dict.fromkeys(result["gpu"] for result in results):
        of_gpu = [result for result in results if result["gpu"] == gpu]
        for end, (title, draw) in drawings.items():
            if drawing := draw(f"{title}, {gpu}", of_gpu):
                name = "".join(ch if ch.isalnum() else "-" for ch in f"gpu {end} {gpu}".lower()) + ".svg"
                drawn[name] = drawing
                texts.append(f"### {title}, {gpu}\n\n![{title}, {gpu}](figures/{name})")
    return "\n\n".join([*texts, *(f"### {title}\n\n{_filled(text)}" for title, text in parts)]), drawn


def _filled(text: str) -> str:
    """Wrap paragraphs at 120 columns, and leave tables as they are."""
    fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(part if part.startswith("|") else fill(part) for part in text.split("\n\n"))


def gpu_peaks(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        copies, products = (result["peaks"][name] for name in PEAKS)
        ridge = f"Work with less than {1e3 * products['best'] / copies['best']:.0f} operations per byte is bound by memory."
        parts.append((result["gpu"], f"{origin(result)} {ridge}"))
    return section(parts, {}, results)


def gpu_gemm(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        for model, mode, products in _by_model(result["products"]):
            shares = (
                (f"{product['product']} {product['kind']} x {count}", figures["share"])
                for product in products
                for count, figures in product["by_tokens"].items()
            )
            text = "\n\n".join([origin(result), *above_the_bound(shares), _gemm_table(products)])
            parts.append((_title(model, mode, result), text))
    return section(parts, {"gemm": ("Products under the roofline", plots.gemm_roofline)}, results)


def _by_model(found: Sequence[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    """(model, mode, those of both), in their order."""
    for model, mode in dict.fromkeys((one["model"], one["mode"]) for one in found):
        yield model, mode, [one for one in found if (one["model"], one["mode"]) == (model, mode)]


def _title(model: str, mode: str, result: Result) -> str:
    return ", ".join([model, *([mode] if mode != "default" else []), result["gpu"]])


def _gemm_table(products: Sequence[Result]) -> str:
    counts = list(products[0]["by_tokens"])
    rows = []
    for product in products:
        by_tokens = product["by_tokens"]
        shares = [100 * by_tokens[count]["share"] for count in counts]
        is_bold = [bound_by(by_tokens[count]) != "memory" for count in counts]
        cells = [f"**{share:.0f}**" if bold else f"{share:.0f}" for share, bold in zip(shares, is_bold, strict=True)]
        spread = max((figures["us_range"][1] - figures["us_range"][0]) / figures["us"] for figures in by_tokens.values())
        speeds = [figure(by_tokens[counts[0]]["us"]), figure(by_tokens[counts[-1]]["tflops"])]
        rows.append([f"{product['product']} {product['kind']}", *cells, *speeds, percent(spread)])
    ends = [f"us ({counts[0]})", f"TFLOP/s ({counts[-1]})"]
    return table(["% of the bound", *counts, *ends, "widest spread"], rows)


def gpu_attention(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        for model, mode, cases in _by_model(result["cases"]):
            rows = [_attention_row(case) for case in cases]
            head = ["attention of a layer", "keys and values", "us (range)", "GB/s", "TFLOP/s", "bound by"]
            head += ["share of the bound", "FlashInfer's", "rotate and write"]
            named = zip(rows, cases, strict=True)
            shares = [share for row, case in named for share in _attention_shares(" ".join(row[:2]), case)]
            text = "\n\n".join([origin(result), *above_the_bound(shares), table(head, rows)])
            parts.append((_title(model, mode, result), text))
    return section(parts, {"attention": ("Attention under the roofline", plots.attention_roofline)}, results)


def _attention_shares(name: str, case: Result) -> list[tuple[str, float]]:
    """(name, share) of all that was measured of a case: also of what stands beside our attention."""
    measured = [(who, found["share"]) for who, found in case.items() if isinstance(found, Mapping)]
    return [(name if who == "attention" else f"{name}, {who}", share) for who, share in measured]


def _attention_row(case: Result) -> list[str]:
    counts = ((case["decodes"], 1), (case["prefills"], case["query_len"]))
    kinds = [f"{rows} x {query_len}" for rows, query_len in counts if rows]
    ours, writes = case["attention"], case["rotate and write"]
    flashinfer = (f"{percent(case[who]['share'])} ({who.split()[1]})" for who in case if who.startswith("flashinfer "))
    return [
        f"{case['name']}, {' and '.join(kinds)} after {case['context_len']}",
        f"{case['kind']}, blocks of {case['block_size']}",
        f"{figure(ours['us'])} ({figure(ours['us_range'][0])} to {figure(ours['us_range'][1])})",
        figure(ours["gbs"]),
        figure(ours["tflops"]),
        bound_by(ours),
        f"**{percent(ours['share'])}**",
        ", ".join(flashinfer),
        f"{figure(writes['us'])} us, {percent(writes['share'])}",
    ]


def gpu_step(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        for shape, fmt in dict.fromkeys((step["shape"], step["format"]) for step in result["steps"]):
            steps = [step for step in result["steps"] if (step["shape"], step["format"]) == (shape, fmt)]
            shares = ((f"{step['step']} with {step['depth']} in flight", step["share"]) for step in steps)
            names = dict.fromkeys((("prompts", "decodes")[step["query_len"] == 1], step["attention"]) for step in steps)
            told = f"Attention of {', '.join(f'{kind}: {name}' for kind, name in names)}."
            text = "\n\n".join([f"{origin(result)} {told}", *above_the_bound(shares), _step_table(steps)])
            parts.append((f"{plots.steps_title(result, steps)}, {result['gpu']}", text))
    drawings: Drawings = {
        "step-times": ("Steps that decode, by rows and context", plots.step_times),
        "steps": ("Whole steps under the roofline", plots.step_roofline),
    }
    return section(parts, drawings, results)


def _step_table(steps: Sequence[Result]) -> str:
    """A line for each step; times on the device are those with the most steps in flight."""
    depths = sorted({step["depth"] for step in steps})
    by_step: dict[tuple[str, str], dict[int, Result]] = {}
    for step in steps:
        by_step.setdefault((step["step"], step["sampling"]), {})[step["depth"]] = step
    rows = []
    for (_, sampling), by_depth in by_step.items():
        step = by_depth[max(by_depth)]
        cells = [f"{figure(by_depth[d]['step_ms'])}, {percent(by_depth[d]['gap'])}" if d in by_depth else "" for d in depths]
        rows.append(
            [
                step["step"] if sampling == "greedy" else f"{step['step']}, {sampling}",
                figure(step["device_ms"]),
                figure(step["bound_ms"]),
                bound_by(step),
                f"**{percent(step['share'])}**",
                *cells,
                figure(step["tokens_per_s"]),
                figure(step["host_ms"]),
            ]
        )
    head = ["rows x tokens @ context", "ms on the GPU", "bound ms", "bound by", "share of the bound"]
    head += [f"ms a step, gap; {depth} in flight" for depth in depths]
    return table([*head, f"tokens/s, {depths[-1]} in flight", "ms of the host"], rows)


def gpu_serve(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        for name, found in result["shapes"].items():
            runs = {plots.contender(who, result): found[who] for who in ("penstock", "transformers") if who in found}
            rows = [_serve_row(who, run) for who, run in runs.items()]
            told_of = "; ".join(f"{who}: {run['attention']}" for who, run in runs.items())
            head = [
                "",
                "output tokens/s (range)",
                "share of the bound",
                "ITL, median ms",
                "ITL, 99 % ms",
                "s",
                "first run: tokens/s, ITL, 99 % ms",
            ]
            told = [f"{result['requests']} requests of ShareGPT's lengths, at most {result['rows']} at a time."]
            told += [f"Medians of {result['repeat']}. The bound is {figure(found['bound']['output_tokens_per_s'])} tokens/s."]
            if "times_transformers" in found:
                told += [f"**{figure(found['times_transformers'])} times transformers.**"]
            else:
                told += [f"Without transformers: {result['no_peer']}."]
            told += [f"Attention of {told_of}."]
            shares = ((who, run["share"]) for who, run in runs.items() if "share" in run)
            text = "\n\n".join([origin(result), " ".join(told), *above_the_bound(shares), table(head, rows)])
            how = plots.contender("penstock", result).removeprefix("Penstock, ")
            parts.append((f"{name} like {found['like']}, {how}, {result['gpu']}", text))
    return section(parts, {"serve": ("Tokens and gaps, by size of the model", plots.serve_speeds)}, results)


def _serve_row(who: str, run: Result) -> list[str]:
    low, high = run["output_tokens_per_s_range"]
    return [
        who,
        f"{figure(run['output_tokens_per_s'])} ({figure(low)} to {figure(high)})",
        percent(run["share"]) if "share" in run else "",
        figure(run["itl_p50_ms"]),
        figure(run["itl_p99_ms"]),
        figure(run["seconds"]),
        f"{figure(run['first']['output_tokens_per_s'])}, {figure(run['first']['itl_p99_ms'])}",
    ]


SECTIONS: dict[str, Callable[[Sequence[Result]], tuple[str, Plots]]] = {
    "gpu_serve": gpu_serve,
    "gpu_step": gpu_step,
    "gpu_attention": gpu_attention,
    "gpu_gemm": gpu_gemm,
    "gpu_peaks": gpu_peaks,
}
