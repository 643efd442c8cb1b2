"""Step times from tables of kernel times: dense products and attention summed over layers, plus work done once per step.

Between entries times are interpolated linearly. Beyond a table's edge the time grows with the work, as if the kernel kept the
share of the machine's peak that it had at the edge. `kernel_import` reads such tables.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod

from penstock.lab.step_counts import Counts


@dataclass(frozen=True, slots=True)
class Grid:
    """Values at all points of a grid: `values` has the last axis innermost, and each axis ascends."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(self.axes) or len(self.values) != prod(len(axis) for axis in self.axes):
            raise ValueError("a grid's values are not as many as its points")
        if not all(low < high for axis in self.axes for low, high in itertools.pairwise(axis)):
            raise ValueError("an axis of a grid does not ascend")

    def at(self, *point: float) -> float:
        """Return the linear interpolation at `point`, or at the nearest point of the grid's edge."""
        corners = [(0, 1.0)]
        for axis, value in zip(self.axes, point, strict=True):
            size = len(axis)
            high = bisect_right(axis, value)
            if high == 0 or high == size:
                idx, share = max(0, high - 1), 0.0
            else:
                idx, low = high - 1, axis[high - 1]
                share = (value - low) / (axis[high] - low)
            if share:
                corners = [
                    corner
                    for start, weight in corners
                    for corner in ((start * size + idx, weight * (1 - share)), (start * size + idx + 1, weight * share))
                ]
            else:
                corners = [(start * size + idx, weight) for start, weight in corners]
        values = self.values
        return sum([values[idx] * weight for idx, weight in corners])

    def bin(self, *point: float) -> float:
        """Return the value of the bin that holds `point`: axes are upper ends of bins, and the last bin has no end."""
        idx = 0
        for axis, value in zip(self.axes, point, strict=True):
            idx = idx * len(axis) + min(bisect_left(axis, value), len(axis) - 1)
        return self.values[idx]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Times of a layer's mixture of experts, by (tokens, distinct experts)."""

    ns: Grid
    num_experts: int
    num_experts_per_token: int

    def layer_ns(self, num_tokens: int) -> float:
        """Return the time with the expected number of distinct experts, if tokens choose experts uniformly."""
        missed = (1 - self.num_experts_per_token / self.num_experts) ** num_tokens
        return _grown(self.ns, _products, num_tokens, self.num_experts * (1 - missed))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """Kernel times of one model on one machine, in nanoseconds."""

    num_layers: int
    layer_tokens: Grid
    """Dense kernels of a layer, by tokens of the step."""
    step_tokens: Grid
    """Kernels outside of layers, by tokens of the step."""
    step_rows: Grid
    """Logits and sampling, by rows of the step."""
    decodes: Grid
    """Attention of a layer without prompts, by (decodes, positions that each reads)."""
    prefills: Grid
    """Attention of one prompt's chunk, by (tokens, positions before)."""
    mixtures: Grid | None = None
    """Attention of a chunk beside decodes, by (tokens, positions before, decodes, positions that each reads). Such a step runs
    another kernel than one without prompts, so times between the two are not interpolated. None: the sum of both alone."""
    skews: Grid | None = None
    """For decodes of uneven lengths: where their time lies between that at their mean length (0) and that at their longest (1).
    Bins of (tokens of the chunk, decodes, share, longest, positions before the chunk), where the share is (mean - shortest) /
    (longest - shortest)."""
    experts: Experts | None = None
    reduce_ns: float = 0.0
    """All-reduce time of a layer on several GPUs, plus `reduce_token_ns` for each token of the step."""
    reduce_token_ns: float = 0.0
    compute_factor: float = 1.0
    """Compute speed relative to the machine of the tables. `read_factor`: the same for its memory."""
    read_factor: float = 1.0

    def __post_init__(self) -> None:
        curves, planes = (self.layer_tokens, self.step_tokens, self.step_rows), (self.decodes, self.prefills)
        numbers = (
            (1, curves),
            (2, planes),
            (4, () if self.mixtures is None else (self.mixtures,)),
            (5, () if self.skews is None else (self.skews,)),
        )
        if any(len(grid.axes) != number for number, grids in numbers for grid in grids):
            raise ValueError("a table of kernels has another number of axes")
        experts = () if self.experts is None else (self.experts.ns,)
        ends = [grid.axes[0][-1] for grid in (*curves, *planes, *experts)] + [self.decodes.axes[1][-1], self.num_layers]
        if not all(0 < end < inf for end in (*ends, self.compute_factor, self.read_factor)):
            raise ValueError("a table of kernels ends at 0, or a factor or the number of layers is not above 0")
        if len(self.prefills.axes[1]) < 2:
            raise ValueError("the table of attention has only one number of positions before a chunk")

    def slowed(self, factor: float) -> KernelTables:
        """Return tables with which every step takes `factor` times as long."""
        return replace(
            self,
            reduce_ns=factor * self.reduce_ns,
            reduce_token_ns=factor * self.reduce_token_ns,
            compute_factor=self.compute_factor / factor,
            read_factor=self.read_factor / factor,
        )

    def times(self) -> list[float]:
        tables = [self.layer_tokens, self.step_tokens, self.step_rows, self.decodes, self.prefills]
        tables += [table for table in (self.mixtures, None if self.experts is None else self.experts.ns) if table is not None]
        return [*[ns for table in tables for ns in table.values], self.reduce_ns, self.reduce_token_ns]

    @property
    def max_tokens(self) -> int:
        return int(self.layer_tokens.axes[0][-1])

    @property
    def max_decodes(self) -> int:
        return int(self.decodes.axes[0][-1])

    @property
    def max_context_len(self) -> int:
        return int(self.decodes.axes[1][-1])

    def step_ns(self, counts: Counts) -> float:
        num_tokens = counts.num_tokens
        layer_ns = self._dense_ns(self.layer_tokens, num_tokens) + self._attention_ns(counts)
        if self.experts is not None:
            layer_ns += self._shared(self.experts.layer_ns(1), self.experts.layer_ns(num_tokens))
        layer_ns += self.reduce_ns + self.reduce_token_ns * num_tokens
        once_ns = self._dense_ns(self.step_tokens, num_tokens) + self._dense_ns(self.step_rows, counts.num_rows)
        return self.num_layers * layer_ns + once_ns

    def _dense_ns(self, table: Grid, number: int) -> float:
        return self._shared(table.values[0], _grown(table, _products, number))

    def _shared(self, least_ns: float, ns: float) -> float:
        """Return a time scaled by both speed factors: `least_ns` of it counts as reading, the rest as arithmetic."""
        if self.compute_factor == self.read_factor == 1.0:
            return ns
        return min(least_ns, ns) / self.read_factor + max(0.0, ns - least_ns) / self.compute_factor

    def _attention_ns(self, counts: Counts) -> float:
        if not counts.num_decodes:
            return self._shared(self.prefills.values[0], self._chunk_ns(counts, 0, 0.0))
        mean = counts.num_decode_reads / counts.num_decodes
        ns = self._at_lengths_ns(counts, mean)
        if self.skews is not None and counts.max_decode_reads > counts.min_decode_reads:
            share = (mean - counts.min_decode_reads) / (counts.max_decode_reads - counts.min_decode_reads)
            bins = (counts.num_prefill_tokens, counts.num_decodes, share, counts.max_decode_reads, counts.num_prefill_context)
            ns += self.skews.bin(*bins) * max(0.0, self._at_lengths_ns(counts, counts.max_decode_reads) - ns)
        if self.compute_factor == self.read_factor == 1.0:
            return ns
        return self._shared(self._decodes_ns(counts.num_decodes, mean), ns)

    def _at_lengths_ns(self, counts: Counts, num_reads: float) -> float:
        if not counts.num_prefill_tokens:
            return self._decodes_ns(counts.num_decodes, num_reads)
        if self.mixtures is None:
            return self._chunk_ns(counts, 0, 0.0) + self._decodes_ns(counts.num_decodes, num_reads)
        return self._chunk_ns(counts, counts.num_decodes, num_reads)

    def _decodes_ns(self, num_decodes: int, num_reads: float) -> float:
        return _grown(self.decodes, _reads, num_decodes, num_reads)

    def _chunk_ns(self, counts: Counts, num_decodes: int, num_reads: float) -> float:
        """Return the time of the step's chunks, treated as one chunk with as many tokens and query-key pairs.

        Several prompts have fewer pairs than one of their summed length, so that chunk's context can be negative. Time is
        linear in its pairs, so it is extrapolated.
        """
        num_tokens = counts.num_prefill_tokens
        context = counts.num_prefill_reads / num_tokens - (num_tokens + 1) / 2

        def at(context_len: float) -> float:
            if num_decodes and self.mixtures is not None:
                return _grown(self.mixtures, _pairs, num_tokens, context_len, num_decodes, num_reads)
            return _grown(self.prefills, _pairs, num_tokens, context_len)

        if context >= 0:
            return at(context)
        contexts = self.prefills.axes[1]
        other = contexts[min(bisect_left(contexts, num_tokens), len(contexts) - 1)]
        none_ns = at(0.0)
        least_ns = self._decodes_ns(num_decodes, num_reads) if num_decodes else self.prefills.values[0]
        return max(min(least_ns, none_ns), none_ns + context * (at(other) - none_ns) / other)


def _grown(table: Grid, work: Callable[..., float], *point: float) -> float:
    """Return a table's time at `point`. Beyond the table's edge it grows with the work."""
    ns = table.at(*point)
    for axis, value in zip(table.axes, point, strict=True):
        if value > axis[-1]:
            inside = [min(value, axis[-1]) for axis, value in zip(table.axes, point, strict=True)]
            return ns * max(1.0, work(*point) / work(*inside))
    return ns


def _products(num_tokens: float, *_: float) -> float:
    return num_tokens


def _reads(num_decodes: float, num_reads: float) -> float:
    return num_decodes * num_reads


def _pairs(num_tokens: float, context_len: float, num_decodes: float = 0, num_reads: float = 0) -> float:
    return num_tokens * (context_len + num_tokens / 2) + num_decodes * num_reads
