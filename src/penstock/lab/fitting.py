"""Fits a cost model to measured steps, and measures its error on steps left out. Used by `penstock profile --fit`.

Each part of a step that the executor times (linear, attention, sampling, the rest) has its own costs. The fit minimises
relative errors by least squares with Huber's weights for outliers (1964). Costs are not negative (Lawson and Hanson, 1974,
chapter 23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.lab.cost_model import CostModel, Fitted, Residuals, cold_share
from penstock.lab.step_counts import Counts, counts_of
from penstock.lab.steps import MeasuredStep

Floats = NDArray[np.float64]

BRACKETS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
TOTAL, HOST, OTHER = "execute", "host", "other"

_UNITS: Mapping[str, Callable[[Counts], float]] = {
    "step_ns": lambda _: 1,
    "decode_row_ns": lambda counts: counts.num_decodes,
    "prefill_token_ns": lambda counts: counts.num_prefill_tokens,
    "decode_read_ns": lambda counts: counts.num_decode_reads,
    "narrow_read_ns": lambda counts: counts.num_narrow_reads,
    "prefill_read_ns": lambda counts: counts.num_prefill_reads,
    "prefill_context_ns": lambda counts: counts.num_prefill_context,
    "repeated_ns": lambda counts: -counts.num_repeated_reads,  # saved
    "sample_ns": lambda counts: counts.num_samples,
    "sample_step_ns": lambda counts: counts.num_samples > 0,
}
_COSTS_OF: Mapping[str, tuple[str, ...]] = {
    "linear": ("step_ns", "brackets", "decode_read_ns", "repeated_ns", "sample_ns", "sample_step_ns", "cold_ns"),
    "attention": (
        "step_ns",
        "decode_row_ns",
        "prefill_token_ns",
        "decode_read_ns",
        "narrow_read_ns",
        "prefill_read_ns",
        "prefill_context_ns",
        "repeated_ns",
    ),
    "rows": ("step_ns", "brackets", "decode_row_ns", "prefill_token_ns"),
    "sampling": ("sample_step_ns", "sample_ns"),
    OTHER: ("step_ns", "decode_row_ns", "prefill_token_ns"),
    TOTAL: (*_UNITS, "brackets", "cold_ns"),
}
"""Part of a step -> costs that it can have. If the executor reports no parts, `TOTAL` is the only one."""
_COSTS_BEYOND = ("base", "step_ns", "sample_ns")
"""Costs fitted on top of a `base` model: a factor on its time, and the CPU time of HTTP and text."""
_OWN_PARTS = ("linear", "attention", "rows", "sampling")
_HOST_COSTS = ("host_step_ns", "host_row_ns", "host_prefill_ns")
_TEXT_COSTS = ("text_ns", "text_token_ns")
_MIN_TEXTS = 10
"""Fewer requests, such as the first one and another, would give a line that no third one is near."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Summary of a cost model's relative errors, |model - measured| / measured, over medians of similar steps."""

    median: float
    p90: float
    largest: float
    signed_mean: float
    num: int


@dataclass(frozen=True, slots=True)
class Fit:
    cost: CostModel
    left_out: Mapping[str, Errors]
    """Part -> errors by cross-validation: each group of steps is predicted by a fit to the others."""
    num_steps: int


def fit(
    steps: Sequence[MeasuredStep],
    *,
    are_in_order: bool = False,
    base: CostModel | None = None,
    texts: Sequence[tuple[int, int]] = (),
) -> Fit:
    """Fit a cost model to measured steps. `are_in_order`: each step ran right after the one before it, so noise can correlate.

    `texts`: as from `steps.texts_of`; with fewer than ten, texts take as long as in `base`, or no time.

    `base`: a fit to more kinds of steps. Its proportions stay: only a factor and extra costs per step and sample are fitted.
    The host's time and the noise come from `steps`.

    Raises ValueError if there are too few steps or groups to separate the costs, or if a step took no time.
    """
    names = sorted({step.group for step in steps})
    num_costs = len(_UNITS) - (not any(step.shape.num_repeated for step in steps))  # tables of steps have no common prefixes
    if len(steps) < num_costs or len(names) < 2:
        raise ValueError(f"{len(steps)} steps in {len(names)} groups can't tell {num_costs} costs apart")
    if min(step.execute_ns for step in steps) <= 0:
        raise ValueError("a step that took no time has no relative error")
    table = _Table(steps, base)
    cost = table.fit(np.ones(len(steps), dtype=bool))
    predicted = table.predict(cost)
    left_out = {part: np.full(len(steps), np.nan) for part in predicted}
    for name in names:
        is_out = table.groups == name
        for part, values in table.predict(table.fit(~is_out)).items():
            left_out[part][is_out] = values[is_out]
    raw, modelled = table.raw[table.is_step], predicted[TOTAL][table.is_step]
    has_host = ~np.isnan(table.measured[HOST])
    host = table.measured[HOST][has_host] / np.maximum(predicted[HOST][has_host], 1.0)
    most = Counts(*np.max(np.array(table.counts)[table.is_step], axis=0).tolist())
    model = replace(
        table.model(cost),
        **_texts(texts),
        residuals=_residuals(raw / modelled, modelled),
        residual_correlation=_correlation(raw / modelled) if are_in_order else 0.0,
        host_residuals=_means(host) if has_host.any() else (),
        fitted=Fitted(
            max_rows=most.num_rows,
            max_decodes=most.num_decodes,
            max_prefill_tokens=most.num_prefill_tokens,
            max_context_len=most.max_context_len,
        )
        if base is None
        else base.fitted,
    )
    return Fit(model, table.errors(left_out), len(steps))


_Cost = Mapping[str, Mapping[str, float]]


class _Table:
    def __init__(self, steps: Sequence[MeasuredStep], base: CostModel | None) -> None:
        self._base = base
        self.counts = [counts_of(step.shape) for step in steps]
        self.groups = np.array([step.group for step in steps])
        self.is_step = np.array([not step.is_for_host for step in steps])
        self._edges, units = units_of(self.counts)
        units["cold_ns"] = np.array(
            [cold_share(step.coldness, one.num_tokens) for step, one in zip(steps, self.counts, strict=True)]
        )
        if base is not None:
            cold = base.cold_ns * units["cold_ns"]
            units["base"] = np.array([base.counted_ns(one) for one in self.counts], dtype=float) + cold
        self._units = units
        self._num_rows = np.array([one.num_rows for one in self.counts], dtype=float)
        # Divide by the slowness of the reference steps beside it, to get the time at the machine's usual speed.
        slowness = np.array([step.slowness for step in steps])
        self.raw = np.array([step.execute_ns for step in steps], dtype=float)
        total = self.raw / slowness
        self.measured: dict[str, Floats] = {TOTAL: total}
        own = [name for name in _OWN_PARTS if base is None and all(name in step.parts_ns for step in steps)]
        for name in own:
            self.measured[name] = np.array([step.parts_ns[name] for step in steps], dtype=float) / slowness
        self.parts = [*own, OTHER] if own else [TOTAL]
        if own:
            self.measured[OTHER] = total - sum(self.measured[name] for name in own)
        self._has_prefill = np.array([float(one.has_prompts) for one in self.counts])
        self.measured[HOST] = np.array([np.nan if step.host_ns is None else float(step.host_ns) for step in steps])

    def fit(self, is_used: NDArray[np.bool_]) -> _Cost:
        # Errors are relative to the whole step: a short part needs no good model.
        is_fitted = is_used & self.is_step
        whole = self.measured[TOTAL][is_fitted]
        cost: dict[str, Mapping[str, float]] = {}
        for part in self.parts:
            names = self._names(part)
            matrix = np.stack([self._units[name][is_fitted] for name in names], axis=1)
            solution = _robust(matrix, self.measured[part][is_fitted], whole)
            costs = dict(zip(names, solution.tolist(), strict=True))
            if "repeated_ns" in costs:  # no saving is larger than what is saved from
                costs["repeated_ns"] = min(costs["repeated_ns"], costs["decode_read_ns"])
            cost[part] = costs
        host = self.measured[HOST]
        is_known = is_used & ~np.isnan(host)
        if is_known.any():
            # Medians of similar steps: single steps differ by far more than the host's time for a row.
            kinds = np.stack([np.ones(len(host)), self._num_rows, self._has_prefill], axis=1)
            alike, kind_of = np.unique(kinds[is_known], axis=0, return_inverse=True)
            medians = np.array([np.median(host[is_known][kind_of == kind]) for kind in range(len(alike))])
            solution = _robust(alike, medians, np.maximum(medians, 1.0))
            cost[HOST] = dict(zip(_HOST_COSTS, solution.tolist(), strict=True))
        return cost

    def predict(self, cost: _Cost) -> dict[str, Floats]:
        """Return the modelled nanoseconds of each step, for each part of a step and for `TOTAL`."""
        predicted = {
            part: np.sum([self._units[name] * cost_ns for name, cost_ns in cost[part].items()], axis=0) for part in self.parts
        }
        predicted[TOTAL] = np.maximum(1.0, np.sum([predicted[part] for part in self.parts], axis=0))
        step_ns, row_ns, prefill_ns = (cost.get(HOST, {}).get(name, 0.0) for name in _HOST_COSTS)
        predicted[HOST] = step_ns + row_ns * self._num_rows + prefill_ns * self._has_prefill
        return predicted

    def model(self, cost: _Cost) -> CostModel:
        if self._base is not None:
            found = cost[TOTAL]
            scaled = self._base.scaled(found["base"])
            besides: dict[str, Any] = {name: getattr(scaled, name) + found[name] for name in ("step_ns", "sample_ns")}
            besides |= {name: getattr(self._base, name) for name in (*_HOST_COSTS, *_TEXT_COSTS)} | dict(cost.get(HOST, {}))
            return replace(scaled, **besides)
        totals: dict[str, float] = {}
        for part in cost.values():
            for name, cost_ns in part.items():
                totals[name] = totals.get(name, 0.0) + cost_ns
        slopes = [totals.pop(f"bracket {idx}", 0.0) for idx in range(len(self._edges))]
        brackets = tuple([(int(edge), slope) for edge, slope in zip(self._edges, slopes, strict=True)])
        costs: dict[str, Any] = {**dict.fromkeys((*_UNITS, "cold_ns"), 0.0), **totals}
        return CostModel(**costs, token_brackets=brackets if any(slopes) else ())

    def errors(self, predicted: Mapping[str, Floats]) -> dict[str, Errors]:
        cells: dict[tuple[int, int, int], list[int]] = {}
        for idx, (group, counts) in enumerate(zip(self.groups.tolist(), self.counts, strict=True)):
            cells.setdefault((group, counts.num_rows, counts.num_prefill_tokens), []).append(idx)
        found: dict[str, list[float]] = {}
        for indices in cells.values():
            whole = float(np.median(self.measured[TOTAL][indices]))
            for part, values in predicted.items():
                if part != HOST and not self.is_step[indices[0]]:
                    continue
                measured = float(np.median(self.measured[part][indices]))
                # Relative errors of a part below a tenth of the step are meaningless; a host's time may be unknown (NaN) or 0.
                if measured > (0.0 if part == HOST else 0.1 * whole):
                    found.setdefault(part, []).append(float(np.median(values[indices])) / measured - 1)
        return {part: _errors(np.array(values)) for part, values in found.items()}

    def _names(self, part: str) -> list[str]:
        names: list[str] = []
        for name in _COSTS_OF[part] if self._base is None else _COSTS_BEYOND:
            names += [f"bracket {idx}" for idx in range(len(self._edges))] if name == "brackets" else [name]
        return names


def units_of(counts: Sequence[Counts]) -> tuple[tuple[float, ...], dict[str, Floats]]:
    """Return the upper ends of the brackets, and each step's units per cost: cost -> number [num_steps]."""
    units = {name: np.array([unit(one) for one in counts], dtype=float) for name, unit in _UNITS.items()}
    num_tokens = np.array([one.num_tokens for one in counts], dtype=float)
    edges = _edges(num_tokens)
    for idx, (begin, end) in enumerate(pairwise((0.0, *edges))):
        units[f"bracket {idx}"] = np.clip(num_tokens, begin, end) - begin
    return edges, units


def _texts(texts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    if len(texts) < _MIN_TEXTS:
        return {}
    num_tokens, measured = np.array(texts, dtype=float).T
    matrix = np.stack([np.ones(len(texts)), num_tokens], axis=1)
    usual = np.full(len(texts), max(1.0, float(measured.mean())))  # relative errors would mean nothing for times near 0
    return dict(zip(_TEXT_COSTS, _robust(matrix, measured, usual).tolist(), strict=True))


def _edges(num_tokens: Floats) -> tuple[float, ...]:
    most, begin, edges = float(num_tokens.max()), 1.0, []
    for edge in BRACKETS:
        if edge < most and ((num_tokens > begin) & (num_tokens <= edge)).any():
            edges.append(float(edge))
            begin = float(edge)
    return (*edges, most)


def _errors(errors: Floats) -> Errors:
    sizes = np.abs(errors)
    return Errors(
        median=float(np.median(sizes)),
        p90=float(np.quantile(sizes, 0.9)),
        largest=float(sizes.max()),
        signed_mean=float(errors.mean()),
        num=len(errors),
    )


def _robust(matrix: Floats, measured: Floats, scale: Floats) -> Floats:
    """Return non-negative costs [num_costs] for which `matrix` @ costs is near `measured`, in units of `scale`."""
    rows, target = matrix / scale[:, None], measured / scale
    weights = np.ones(len(target))
    solution = np.zeros(matrix.shape[1])
    for _ in range(8):
        root = np.sqrt(weights)
        solution = nonnegative(rows * root[:, None], target * root)
        errors = np.abs(rows @ solution - target)
        spread = 1.4826 * float(np.median(errors)) + 1e-12
        # Errors beyond 1.5 standard deviations count less.
        weights = np.minimum(1.0, 1.5 * spread / np.maximum(errors, 1e-300))
    return solution


def nonnegative(matrix: Floats, target: Floats) -> Floats:
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    num = scaled.shape[1]
    gram, goal = scaled.T @ scaled, scaled.T @ target
    solution, is_free = np.zeros(num), np.zeros(num, dtype=bool)
    for _ in range(10 * num):
        gradient = goal - gram @ solution
        gradient[is_free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-12 * max(1.0, float(np.abs(goal).max())):
            break
        is_free[best] = True
        while is_free.any():
            trial = np.zeros(num)
            free = np.flatnonzero(is_free)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], goal[free], rcond=None)[0]
            if trial[free].min() > 0:
                solution = trial
                break
            is_below = is_free & (trial <= 0)
            steps = solution[is_below] / np.maximum(solution[is_below] - trial[is_below], 1e-300)
            solution = solution + float(steps.min()) * (trial - solution)
            is_free &= solution > 1e-15
            solution[~is_free] = 0.0
    return solution / np.where(norms > 0, norms, 1.0)


def _residuals(ratios: Floats, modelled_ns: Floats) -> tuple[Residuals, ...]:
    """Return measured / modelled time for each octave of modelled time. Octaves with few steps join a neighbour."""
    octaves = np.floor(np.log2(np.maximum(modelled_ns, 1.0)))
    ends: list[float] = []
    begin = -np.inf
    for octave in np.unique(octaves):
        if ((octaves > begin) & (octaves <= octave)).sum() >= 50:
            ends.append(octave)
            begin = octave
    ends[-1:] = [octaves.max()]
    bounds = pairwise((-np.inf, *ends))
    return tuple(
        [Residuals(float(2 ** (end + 1)), _means(ratios[(octaves > begin) & (octaves <= end)])) for begin, end in bounds]
    )


def _means(values: Floats) -> tuple[float, ...]:
    shares = np.array_split(np.sort(values), min(100, len(values)))
    return tuple([round(float(share.mean()), 5) for share in shares])


def _correlation(values: Floats) -> float:
    if len(values) < 100:
        return 0.0
    ranks = np.argsort(np.argsort(values)).astype(float)
    found = float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1])
    return round(min(0.99, max(0.0, found)), 3) if np.isfinite(found) else 0.0
