"""The sections of docs/performance.md: what a benchmark's JSON object looks like as Markdown tables, and as a plot.

Called by `report.py` with all results of one benchmark. A section says when, where and with what spread. Never measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.lab.plots import Axis, Panel, Series, bars, draw

Result = Mapping[str, Any]
Plots = dict[str, str]
"""File name -> SVG."""

KERNEL_ROWS = ("1", "2", "4", "8", "16", "32", "64", "128", "512")
PLOTTED_KIND = "q4_1"
NOT_FIGURES = ("benchmark", "date", "cpu", "threads", "clock")
COMMON = "first characters of a reply like ours"
STEP_PARTS = ("rows", "linear", "attention", "sampling")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def where(result: Result) -> str:
    """One sentence: when and on what."""
    threads = result.get("threads", result.get("cpus"))
    on = [str(result["cpu"])] if result.get("cpu") else []
    on += [f"{threads} thread{'s' * (threads > 1)}"] if threads else []
    on += [str(result["clock"])] if "clock" in result else []
    return ", ".join([str(result["date"]), *on])


def peaks_line(peaks: Mapping[str, Mapping[str, float]]) -> str:
    units = {"read": "GB/s"}
    shown = (f"{name} {p['best']:.0f} (median {p['median']:.0f}) {units.get(name, 'GOP/s')}" for name, p in peaks.items())
    return "Peaks in the same run, best and median: " + ", ".join(shown) + "."


def peaks(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        rows = [
            [variant, *(f"{figures[n]['best']:.0f} ({figures[n]['median']:.0f})" for n in ("int8", "bf16", "float32", "read"))]
            for variant, figures in result["peaks"].items()
        ]
        parts.append(
            f"{where(result)}; best (median).\n\n" + table(["", "int8 GOP/s", "bf16 GOP/s", "float32 GOP/s", "DRAM GB/s"], rows)
        )
    return "\n\n".join(parts), {}


def step(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        parts_known = [part for part in STEP_PARTS if part in result["steps"][0]]
        rows = []
        for s in result["steps"]:
            name = f"{s['batch']} x {s['query_len']} after {s['context_len']}"
            bound = "memory" if s["read_share"] >= s["compute_share"] else "multiply-adds"
            share = f"**{percent(s['share'])}** ({percent(s['best_share'])})"
            rows.append([name, f"{s['ms']:.2f} ({s['min_ms']:.2f})", *(f"{s[p]:.2f}" for p in parts_known), bound, share])
        head = [
            "rows x tokens",
            "ms (fastest)",
            *(f"{part} ms" for part in parts_known),
            "bound by",
            "share of the bound (best)",
        ]
        kv = f", keys and values in {result['kv_cache_dtype']}" if "kv_cache_dtype" in result else ""
        told = f"{where(result)}{kv}. {peaks_line(result['peaks'])}"
        parts.append(f"### {result['model']}, {result['variant']}\n\n{told}\n\n{table(head, rows)}")
    return "\n\n".join(parts), {}


def kernels(results: Sequence[Result]) -> tuple[str, Plots]:
    parts: list[str] = []
    plots: Plots = {}
    for variant, runs in _by_variant(results).items():
        products = [(where(run), product) for run in runs for product in run["variants"][variant]["products"]]
        attention = [(where(run), found) for run in runs for found in run["variants"][variant]["attention"]]
        models = list(dict.fromkeys(found["model"] for _, found in products + attention))
        for model in models:
            found = [(origin, product) for origin, product in products if product["model"] == model]
            of_model = [(origin, a) for origin, a in attention if a["model"] == model]
            origins = "; ".join(dict.fromkeys(origin for origin, _ in found + of_model))
            tables = [_product_table([product for _, product in found])] if found else []
            tables += [_attention_table(a, variant) for _, a in of_model]
            parts.append("\n\n".join([f"### {model}, {variant}", f"{origins}.", *tables]))
        panels = list(_kernel_panels([product for _, product in products], models))
        if panels:
            name = f"kernels-{variant}.svg"
            title = f"Products with {PLOTTED_KIND} weights, {variant}"
            plots[name] = draw(title, panels).svg().decode()
            parts.append(f"### All rows, {variant}\n\n![Share of the bound by number of rows, {variant}](performance/{name})")
    return "\n\n".join(parts), plots


def _by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each variant; a run may have several, and a variant several runs, each of other shapes."""
    found: dict[str, list[Result]] = {}
    for result in results:
        for variant in result["variants"]:
            found.setdefault(variant, []).append(result)
    return found


def _product_table(products: Sequence[Result]) -> str:
    columns = [m for m in KERNEL_ROWS if any(m in product["rows"] for product in products)]
    rows = []
    for product in products:
        by_rows, worst = product["rows"], product["worst_neighbours"]
        cells = [f"{100 * by_rows[m]['share']:.0f}" if m in by_rows else "" for m in columns]
        fewest, most = min(by_rows, key=int), max(by_rows, key=int)
        speeds = [f"{by_rows[fewest]['us']:.1f} ({fewest})", f"{by_rows[most]['gops']:.0f} ({most})"]
        pair = " to ".join(map(str, worst["rows"]))
        rows.append([f"{product['shape']} {product['kind']}", *cells, *speeds, f"{worst['ratio']:.2f} ({pair})"])
    return table(["% of the bound", *columns, "us (fewest rows)", "GOP/s (most rows)", "worst neighbours"], rows)


def _attention_table(attention: Result, variant: str) -> str:
    rows = [
        [
            f"{c['rows']} x {c['query_len']} after {c['context_len']}",
            f"{c['us']:.0f}",
            f"{c['gops']:.0f}",
            f"{c['gbs']:.1f}",
            percent(c["share"]),
        ]
        for c in attention["cases"]
    ]
    head = [f"attention, {attention['model']}, {variant}", "us a layer", "GOP/s", "GB/s", "share of the bound"]
    return table(head, rows)


def _kernel_panels(products: Sequence[Result], models: Sequence[str]) -> Iterator[Panel]:
    for model in models:
        series = [
            Series(p["shape"], [(int(m), 100 * figures["share"]) for m, figures in p["rows"].items()])
            for p in products
            if p["model"] == model and p["kind"] == PLOTTED_KIND and len(p["rows"]) > 1
        ]
        if series:
            yield Panel(model, Axis("rows computed together", is_log=True), Axis("share of the bound (%)", low=0.0), series)


def peers(results: Sequence[Result]) -> tuple[str, Plots]:
    parts: list[str] = []
    plots: Plots = {}
    for result in results:
        loads, contenders = list(result["loads"]), result["contenders"]
        workload = result["workload"]["name"]
        title = ", ".join(filter(None, [result["model"], workload, result.get("title")]))
        numbers = {c.get("num_rounds", result["repeat"]) for c in contenders.values()}
        spread = "medians of {} and their range".format(
            f"{result['repeat']} round{'s' * (result['repeat'] > 1)}" if len(numbers) <= 1 else "n rounds"
        )
        rows = [
            [shown, *_rates(c, loads), c["ready_s"], c["resident_mb"], c["installed_mb"]]
            for name, c in contenders.items()
            for shown in [name if len(numbers) == 1 else f"{name} (n={c['num_rounds']})"]
        ]
        head = ["output tokens/s", *(f"c={c}" for c in loads), "ready s", "resident MB", "installed MB"]
        text = [f"### {title}", f"{where(result)}; {spread}.", table(head, rows)]
        if result["times_peer"]:
            common = result.get("common_start_chars", {})
            ratios = [
                [name, *(f"{quotients[c]:.2f}" for c in loads), common.get(name, "")]
                for name, quotients in result["times_peer"].items()
            ]
            text.append(table(["Penstock's throughput over that of", *(f"c={c}" for c in loads), COMMON], ratios))
        text += [f"Left out: {name}, {reason}." for name, reason in result["left_out"].items()]
        if contenders:
            plot = (
                "peers-"
                + "".join(ch if ch.isalnum() else "-" for ch in title.lower().replace(".gguf", "").replace(", ", "-"))
                + ".svg"
            )
            groups = {
                f"{c} at a time": {n: r["by_concurrency"][c]["output_tokens_per_s"] for n, r in contenders.items()}
                for c in loads
            }
            plots[plot] = bars(title, Axis("output tokens/s"), groups).svg().decode()
            text.append(f"![Output tokens per second of each server, {title}](performance/{plot})")
        parts.append("\n\n".join(text))
    return "\n\n".join(parts), plots


def _rates(contender: Result, loads: Sequence[str]) -> list[str]:
    shown = []
    for concurrency in loads:
        figures = contender["by_concurrency"][concurrency]
        rounds = figures.get("rounds", [figures["output_tokens_per_s"]])
        shown.append(f"{figures['output_tokens_per_s']:.0f} ({min(rounds):.0f} to {max(rounds):.0f})")
    return shown


def by_concurrency(results: Sequence[Result]) -> tuple[str, Plots]:
    """The section of a benchmark whose figures are medians at each concurrency: `inprocess`."""
    parts = []
    for result in results:
        medians = result["median_by_concurrency"]
        names = list(dict.fromkeys(name for figures in medians.values() for name in figures))
        rows = [[name, *(medians[c].get(name, "") for c in medians)] for name in names]
        ranges = {name: result[name] for name in result if name.endswith("_range")}
        rows += [[name, *(" to ".join(map(str, found.get(c, ()))) for c in medians)] for name, found in ranges.items()]
        title = ", ".join(str(result[key]) for key in ("model", "workload") if key in result)
        head = ["", *(f"c={c}" for c in medians)]
        parts.append(f"### {title}\n\n{where(result)}; medians of {result['repeat']}.\n\n{table(head, rows)}")
    return "\n\n".join(parts), {}


def streaming(results: Sequence[Result]) -> tuple[str, Plots]:
    parts = []
    for result in results:
        by_streams = result["by_streams"]
        names = next(iter(by_streams.values()))
        rows = [[name, *(figures[name] for figures in by_streams.values())] for name in names]
        head = ["streams", *by_streams]
        parts.append(f"{where(result)}; a step takes {result['step_ms']:g} ms.\n\n{table(head, rows)}")
    return "\n\n".join(parts), {}


def flat(results: Sequence[Result]) -> tuple[str, Plots]:
    """The section of a benchmark with a handful of figures: all of them, by name."""
    parts = []
    for result in results:
        rows = [[name, value] for name, value in _flatten(result) if name not in NOT_FIGURES]
        parts.append(f"{where(result)}.\n\n{table(['', ''], rows)}")
    return "\n\n".join(parts), {}


def _flatten(value: Result, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flatten(inner, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", inner


SECTIONS = {
    "peers": peers,
    "inprocess": by_concurrency,
    "streaming": streaming,
    "step": step,
    "kernels": kernels,
    "peaks": peaks,
    "startup": flat,
    "scheduler": flat,
    "pipeline": flat,
}
