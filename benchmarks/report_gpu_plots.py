"""The plots of the GPU benchmarks: what was measured and, in the same plot, the bound that the peaks of the same run set.

Called by `report_gpu.py` with results of one GPU. Measures nothing; different runs never share a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.lab.plots import Axis, Panel, Series, draw

Result = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Look:
    """How series of one kind are drawn. Colours say what a series is of."""

    kind: str
    style: str
    mark: str = ""


ROOF = Look("roof: the peaks of the same run", "line")
HALF = Look("half of it", "dashed")
BOUND = Look("bound, by the peaks of the same run", "dashed")
MEASURED = Look("measured", "both", "o")
LAYER = Look("all products of a layer, more tokens to the right", "both", "o")
PRODUCT = Look("one of them, or the logits", "marks", ".")
OF_KV = {"bf16": Look("keys and values in bf16", "marks", "o"), "int8": Look("in int8", "marks", "s")}
FLASHINFER = Look("FlashInfer, bf16", "marks", "^")
DECODES = Look("decodes, more rows to the right", "both", "o")
PROMPTS = Look("prompts", "marks", "s")
MEDIAN_GAP = Look("median", "both", "D")
LONG_GAP = Look("99th percentile", "both", "^")

INTENSITY = Axis("operations per byte", is_log=True)
SPEED = Axis("10^12 operations per second", is_log=True)


def curve(name: str, look: Look, points: Sequence[Point]) -> Series:
    return Series(name, points, look.style, mark=look.mark, kind=look.kind)


def gemm_roofline(title: str, results: Sequence[Result]) -> str:
    """Products, by the number of tokens and the format of the weights; not those of the deterministic mode."""
    panels = []
    for result in results:
        products = [product for product in result["products"] if product["mode"] == "default"]
        for model in dict.fromkeys(product["model"] for product in products):
            curves = _gemm_curves([product for product in products if product["model"] == model])
            panels.append(_roofline(model, result, list(curves)))
    return _plot(title, _on_the_same_axes(panels))


def _gemm_curves(products: Sequence[Result]) -> Iterator[Series]:
    for kind in dict.fromkeys(product["kind"] for product in products):
        by_tokens = [product["by_tokens"] for product in products if product["kind"] == kind]
        of_layer = [p["by_tokens"] for p in products if p["kind"] == kind and p["product"] != "logits"]
        yield curve(kind, PRODUCT, [_at(figures) for found in by_tokens for figures in found.values()])
        if of_layer:
            yield curve(kind, LAYER, [_sum(found[count] for found in of_layer) for count in of_layer[0]])


def _sum(figures: Iterable[Result]) -> Point:
    """The sum of parts that are computed one after the other."""
    work = [(one["operations"], one["bytes"], one["us"]) for one in figures]
    operations, num_bytes, us = (sum(column) for column in zip(*work, strict=True))
    return operations / num_bytes, operations / us / 1e6


def attention_roofline(title: str, results: Sequence[Result]) -> str:
    """Attention of a layer, by what the step's rows do; of the default mode and the first size of blocks."""
    panels = []
    for result in results:
        first = result["cases"][0]["block_size"]
        cases = [case for case in result["cases"] if case["mode"] == "default" and case["block_size"] == first]
        for model in dict.fromkeys(case["model"] for case in cases):
            curves = [one for case in cases if case["model"] == model for one in _attention_curves(case)]
            panels.append(_roofline(model, result, curves))
    return _plot(title, _on_the_same_axes(panels))


def _attention_curves(case: Result) -> Iterator[Series]:
    yield curve(case["name"], OF_KV[case["kind"]], [_at(case["attention"])])
    if "flashinfer auto" in case:
        yield curve(case["name"], FLASHINFER, [_at(case["flashinfer auto"])])


def step_times(title: str, results: Sequence[Result]) -> str:
    """Decodes: time on the device by the number of rows, of each context."""
    panels = []
    for name, _, steps in _shapes(results):
        decodes = [step for step in steps if step["query_len"] == 1]
        curves = [
            curve(f"after {context_len} positions", look, _by_rows(decodes, context_len, key))
            for context_len in dict.fromkeys(step["context_len"] for step in decodes)
            for look, key in ((MEASURED, "device_ms"), (BOUND, "bound_ms"))
        ]
        if curves:
            rows = Axis("rows that decode", is_log=True, ticks={step["rows"]: str(step["rows"]) for step in decodes})
            panels.append(Panel(name, rows, Axis("a step on the GPU (ms)", is_log=True), curves))
    return _plot(title, panels)


def _by_rows(decodes: Sequence[Result], context_len: int, key: str) -> list[Point]:
    return sorted((step["rows"], step[key]) for step in decodes if step["context_len"] == context_len)


def step_roofline(title: str, results: Sequence[Result]) -> str:
    """Whole steps: decodes of each context, and prompts."""
    panels = []
    for name, result, steps in _shapes(results):
        decodes = [step for step in steps if step["query_len"] == 1]
        contexts = dict.fromkeys(step["context_len"] for step in decodes)
        curves = [
            curve(f"after {length} positions", DECODES, sorted(_at(step) for step in decodes if step["context_len"] == length))
            for length in contexts
        ]
        prompts = [_at(step) for step in steps if step["query_len"] > 1]
        panels.append(_roofline(name, result, [*curves, *([curve("prompts", PROMPTS, prompts)] if prompts else [])]))
    return _plot(title, _on_the_same_axes(panels))


def _shapes(results: Sequence[Result]) -> Iterator[tuple[str, Result, list[Result]]]:
    """(panel's title, its result, steps) of each shape: the most in flight, and the first way to sample."""
    for result in results:
        depth, sampling = max(step["depth"] for step in result["steps"]), result["steps"][0]["sampling"]
        chosen = [step for step in result["steps"] if step["depth"] == depth and step["sampling"] == sampling]
        for shape, fmt in dict.fromkeys((step["shape"], step["format"]) for step in chosen):
            steps = [step for step in chosen if (step["shape"], step["format"]) == (shape, fmt)]
            yield steps_title(result, steps), result, steps


def steps_title(result: Result, steps: Sequence[Result]) -> str:
    """The title of steps of one shape and format: their unusual settings."""
    samplings = list(dict.fromkeys(step["sampling"] for step in steps))
    told = [steps[0]["shape"], steps[0]["format"], *(["deterministic"] if result["deterministic"] else [])]
    told += [] if result["graphs"] else ["no graphs"]
    return ", ".join([*told, *([] if "greedy" in samplings else samplings)])


def serve_speeds(title: str, results: Sequence[Result]) -> str:
    """Throughput beside its bound, and the gaps between tokens, by the size of the model."""
    runs = [
        (who, result, found)
        for result in results
        for found in result["shapes"].values()
        for who in ("penstock", "transformers")
    ]
    names = {found["num_weights"]: name for result in results for name, found in result["shapes"].items()}
    sizes = Axis("size of the model", is_log=True, ticks=names)
    speeds: dict[tuple[str, Look], list[Point]] = {}
    gaps: dict[tuple[str, Look], list[Point]] = {}
    for who, result, found in runs:
        if who not in found:
            continue
        name, size = contender(who, result), found["num_weights"]
        speeds.setdefault((name, MEASURED), []).append((size, found[who]["output_tokens_per_s"]))
        if who == "penstock":
            speeds.setdefault((name, BOUND), []).append((size, found["bound"]["output_tokens_per_s"]))
        for look, key in ((MEDIAN_GAP, "itl_p50_ms"), (LONG_GAP, "itl_p99_ms")):
            gaps.setdefault((name, look), []).append((size, found[who][key]))
    panels = [
        Panel(told, sizes, Axis(unit, is_log=True), [curve(*key, sorted(points)) for key, points in of.items()])
        for told, unit, of in (("throughput", "output tokens/s", speeds), ("gaps between tokens of a request", "ms", gaps))
    ]
    return _plot(title, panels)


def contender(who: str, result: Result) -> str:
    """By the formats that it computes with."""
    if who == "transformers":
        return "transformers, bf16"
    told = ["Penstock", result["format"], *(["int8 KV"] if result["kv_cache_dtype"] == "int8" else [])]
    return ", ".join([*told, *(["deterministic"] if result["deterministic"] else [])])


def _at(figures: Result) -> Point:
    return figures["operations"] / figures["bytes"], figures["tflops"]


def _roofline(title: str, result: Result, curves: list[Series]) -> Panel:
    """With the roof over all its points, to the right of where it is flat."""
    gbs, tflops = result["peaks"]["copy_gbs"]["best"], result["peaks"]["matrix_tflops"]["best"]
    ridge = 1e3 * tflops / gbs
    intensities = [x for one in curves for x, _ in one.points]
    ends = sorted([min(*intensities, ridge) / 2, ridge, 2 * max(*intensities, ridge)])
    roof = [(x, min(x * gbs / 1e3, tflops)) for x in ends]
    bounds = [curve("", ROOF, roof), curve("", HALF, [(x, y / 2) for x, y in roof])]
    return Panel(title, INTENSITY, SPEED, [*bounds, *curves], note=f"{gbs:,.4g} GB/s, {tflops:,.4g} TFLOP/s in bf16")


def _on_the_same_axes(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels with equal axes, wide enough for all points, so that they can be compared by eye."""
    points = [point for panel in panels for series in panel.series for point in series.points]
    if not points:
        return list(panels)
    (low_x, high_x), (low_y, high_y) = ((min(values) / 1.2, max(values) * 1.2) for values in zip(*points, strict=True))
    return [
        replace(panel, x=replace(panel.x, low=low_x, high=high_x), y=replace(panel.y, low=low_y, high=high_y))
        for panel in panels
    ]


def _plot(title: str, panels: Sequence[Panel]) -> str:
    """SVG; nothing without panels."""
    return draw(title, panels).svg().decode() if panels else ""
