"""Table of step times for `penstock profile`: parts of a step, arithmetic intensity, and shares of the machine's peaks.

By the roofline (Williams, Waterman and Patterson, CACM 52(4), 2009), a step takes at least the time of its operations at peak
speed, and at least the time of its reads. The longer one bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.lab.plots import Panel, roofline
from penstock.lab.sizing import ModelSize, work_of
from penstock.lab.steps import MeasuredStep, fits
from penstock.types.plan import Capacity, StepShape

TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64)
TABLE_TOKENS = (32, 128, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    ops_per_s: float
    read_bytes_per_s: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A row of the table: median times of the steps of one shape, in nanoseconds."""

    shape: StepShape
    duration_ns: float
    parts_ns: Mapping[str, float]
    num_ops: float
    num_bytes: float
    compute_share: float | None
    read_share: float | None

    @property
    def intensity(self) -> float:
        return self.num_ops / self.num_bytes

    @property
    def bound(self) -> str:
        if self.compute_share is None or self.read_share is None:
            return ""
        return "compute" if self.compute_share > self.read_share else "memory"


def figures_of(steps: Sequence[MeasuredStep], size: ModelSize, peaks: Peaks | None) -> list[StepFigures]:
    groups: dict[int, list[MeasuredStep]] = {}
    for step in steps:
        groups.setdefault(step.group, []).append(step)
    found = []
    for _, group in sorted(groups.items()):
        shape = group[0].shape
        duration_ns = median(step.execute_ns for step in group)
        num_ops, num_bytes = work_of(size, shape)
        found.append(
            StepFigures(
                shape=shape,
                duration_ns=duration_ns,
                parts_ns={part: median(step.parts_ns[part] for step in group) for part in group[0].parts_ns},
                num_ops=num_ops,
                num_bytes=num_bytes,
                compute_share=None if peaks is None else num_ops / peaks.ops_per_s * 1e9 / duration_ns,
                read_share=None if peaks is None else num_bytes / peaks.read_bytes_per_s * 1e9 / duration_ns,
            )
        )
    return found


def step_lines(figures: Sequence[StepFigures], peaks: Peaks | None) -> Iterator[str]:
    parts = [part for part in ("linear", "attention", "sampling", "rows") if all(part in one.parts_ns for one in figures)]
    if peaks is not None:
        words = f"{peaks.ops_per_s / 1e9:.0f} GOP/s, {peaks.read_bytes_per_s / 1e9:.1f} GB/s"
        knee = peaks.ops_per_s / peaks.read_bytes_per_s
        yield f"Peaks now: {words} ({peaks.words}); the knee of the roofline is at {knee:.0f} operations per byte."
    header = f"{'step':>14}{'ms':>9}" + "".join(f"{part:>11}" for part in parts) + f"{'ops/byte':>10}{'GOP/s':>8}{'GB/s':>7}"
    yield header + ("" if peaks is None else f"{'share of peak':>15}  bound by")
    for one in figures:
        line = f"{_shape_words(one.shape):>14}{one.duration_ns / 1e6:9.2f}"
        line += "".join(f"{one.parts_ns[part] / one.duration_ns:11.0%}" for part in parts)
        line += f"{one.intensity:10.1f}{one.num_ops / one.duration_ns:8.0f}{one.num_bytes / one.duration_ns:7.1f}"
        if one.compute_share is not None and one.read_share is not None:
            line += f"{max(one.compute_share, one.read_share):15.0%}  {one.bound}"
        yield line


def roofline_panel(figures: Sequence[StepFigures], peaks: Peaks, title: str) -> Panel:
    measured: dict[str, list[tuple[float, float]]] = {}
    for one in figures:
        name = "decodes" if one.shape.rows[0][0] == 1 else "prompts"
        measured.setdefault(name, []).append((one.intensity, one.num_ops / one.duration_ns))
    return roofline(title, peak_gops=peaks.ops_per_s / 1e9, read_gbs=peaks.read_bytes_per_s / 1e9, measured=measured)


def shapes_of(capacity: Capacity) -> list[StepShape]:
    """Return the step shapes to show: decode batches of growing size at two context lengths, and chunks of prompts."""
    shapes = [StepShape(((1, context_len),) * num_rows, num_rows) for context_len in (128, 1024) for num_rows in TABLE_ROWS]
    shapes += [StepShape(((num_tokens, context_len),), 1) for context_len in (0, 1024) for num_tokens in TABLE_TOKENS]
    return [shape for shape in shapes if fits(shape, capacity)]


def _shape_words(shape: StepShape) -> str:
    """Format a shape as `32x1@256`: 32 rows, each with 1 token after 256 positions."""
    query_len, context_len = shape.rows[0]
    return f"{len(shape.rows)}x{query_len}@{context_len}"
