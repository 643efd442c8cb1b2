"""The tables that the GPU benchmarks print, as docs/notes/gpu-figures.md has them. Measures and hides nothing: a share above 1
is shown as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from printed import percent

Result = Mapping[str, Any]
"""A benchmark's JSON object, or a part of it."""
PEAKS = {"copy_gbs": "GB/s copied", "matrix_tflops": "TFLOP/s of bf16 products"}
VERSIONS = ("torch", "triton", "transformers", "flashinfer")


def show(result: Result, tables: Callable[[Result], Mapping[str, Sequence[str]]]) -> None:
    """Print the paragraphs of each part under its title, and then, in any case, the JSON object in one line."""
    try:
        for title, paragraphs in tables(result).items():
            print(f"\n### {title}, {result['gpu'] or 'no GPU'}", origin(result), *paragraphs, sep="\n\n")
    finally:
        print(f"\n{json.dumps(result)}")


def origin(result: Result) -> str:
    """Return when, on what, with what and by which command a result was measured, and the peaks then."""
    versions = ", ".join(f"{name} {result[name]}" for name in VERSIONS if result.get(name))
    peaks = ", ".join(
        f"{figure(p['best'])} (median {figure(p['median'])}) {PEAKS[name]}" for name, p in result["peaks"].items()
    )
    told = f"{result['date']}, {result['gpu'] or 'no GPU'}, Penstock {result['penstock']}, {versions}: `{result['command']}`."
    warning = " A self-test: its times mean nothing." if result["is_self_test"] else ""
    return f"{told} Peaks in the same run, best and median: {peaks}.{warning}"


def above_the_bound(shares: Iterable[tuple[str, float]]) -> list[str]:
    """Return a paragraph that names what took less time than the bound, or none."""
    found = [f"{name} ({percent(share)})" for name, share in shares if share > 1]
    cause = "reading is faster than the copy that measures the peak, or a cache had bytes that the bound counts"
    return [f"**Above the bound:** {', '.join(found)}; {cause}."] if found else []


def by_model(found: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Yield (title, results) of each model and mode, in their order."""
    for model, mode in dict.fromkeys((one["model"], one["mode"]) for one in found):
        title = model if mode == "default" else f"{model}, {mode}"
        yield title, [one for one in found if (one["model"], one["mode"]) == (model, mode)]


def figure(value: float) -> str:
    """Return a figure of four significant digits, never as a power of ten where it is large."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def bound_by(figures: Result) -> str:
    return "matrix units" if figures["matrix_share"] > figures["bandwidth_share"] else "memory"
