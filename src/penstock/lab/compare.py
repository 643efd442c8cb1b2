"""Compares results of `penstock bench`: finds figures that differ by more than noise.

Figures are compared as ratios. The standard error of a ratio's logarithm comes from the spread between runs (Welch; Student for
pairs of runs), from the figures' own intervals (Zou and Donner, 2008) or, for the same jobs, from a paired block bootstrap
(Carlstein, 1986). Holm's correction (1979) keeps the chance of any false difference below 5 %. docs/bench-results.md describes
the method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from penstock.config.units import figure
from penstock.lab.figures import BUCKET_RATIO, LATENCIES, QUANTILES, make_rates, make_share
from penstock.lab.intervals import LEVEL, Estimate, effective_draws, student_quantile, student_tail
from penstock.lab.results import Result, Run, has_variants
from penstock.types.errors import ConfigError

NUM_BLOCKS = 32
MIN_BLOCKS = 8
MIN_REPEATS = 3
COMPARED_QUANTILES = ("p50", "p90", "p99")
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_per_s")
SHARES = ("answered", "within_slos")
"""Shares of the requests. Latencies and rates cover answered requests alone, so they can improve while others are refused."""
_OF_SLOS = ("goodput_per_s", "within_slos")
_DRAWS_IN_BLOCK = 2
"""Mean number of independent samples in a block of jobs, so that neighbouring blocks are almost independent."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Uncertainty of a compared figure: the standard error of the logarithm of after / before, and its degrees of freedom."""

    error: float
    degrees: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    figure: str
    """Name of the figure, such as `ttft p99` or `output_tokens_per_s`."""
    is_higher_better: bool
    before: float
    after: float
    change: Estimate | None
    """after / before - 1, with its interval, or None if the runs are too small."""
    chance: float = 1.0
    """p-value: chance of a difference this large if the two sides are equal, for this figure alone."""
    spread: Spread | None = None
    smallest: float = math.inf
    """Smallest change that runs of this size detect with a probability of 80 %, after Holm's correction."""
    is_more_than_noise: bool = False
    """Whether the difference is significant after Holm's correction for all tested figures."""

    @property
    def worsening(self) -> float:
        """Share by which the figure is worse; below 0 if it is better."""
        change = 0.0 if self.change is None else self.change.value
        return -change if self.is_higher_better else change

    @property
    def words(self) -> str:
        if self.change is None and 0 in (self.before, self.after):
            return "not compared, since one side is 0"
        if self.change is None or self.change.low is None or self.change.high is None:
            return "too few requests to say"
        verbs = ("higher", "lower") if self.is_higher_better else ("slower", "faster")
        low, high = sorted(end if self.change.value > 0 else -end for end in (self.change.low, self.change.high))
        shown = f"{verbs[self.change.value < 0]} by {_percent(abs(self.change.value))} % [{_percent(low)}, {_percent(high)}]"
        if self.is_more_than_noise:
            return shown
        if self.chance < 1 - LEVEL:
            return f"perhaps {shown}; not sure among so many figures"
        if not math.isfinite(self.smallest):
            return "no difference that these runs could show"
        return f"no difference that these runs could show; they would show {_percent(self.smallest)} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    load: str
    """The load. If a result has several variants at a load, the variant's name precedes it."""
    num_runs: tuple[int, int]
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    comparisons: Sequence[Comparison]
    notes: Sequence[str]

    def is_unknown(self, by: float) -> bool:
        """Return whether no latency and no rate was tested, or the share answered is lower by more than `by`, but untested.

        It is untested if the failures come in a row, as after a crash: then they may have had one cause.
        """
        differences = [difference for one in self.comparisons for difference in one.differences]
        return all(one.change is None or one.figure in SHARES for one in differences) or any(
            one.figure == "answered" and one.change is None and one.after < one.before * (1 - by) for one in differences
        )

    def worse(self, by: float) -> list[tuple[str, Difference]]:
        """Return figures, with their loads, that are worse beyond noise and by more than the share `by`."""
        return [
            (one.load, difference)
            for one in self.comparisons
            for difference in one.differences
            if difference.is_more_than_noise and difference.worsening > by
        ]


def compare_results(before: Result, afters: Sequence[Result], *, any_workload: bool = False) -> list[Compared]:
    """Compare `before` with each result in `afters`, at each load that both have. Holm's correction covers all tests together.

    Raises ConfigError if no load is common, or if the workloads differ and `any_workload` is false.
    """
    compared = [_compared(before, after, any_workload) for after in afters]
    corrected = iter(_after_holm([one for each in compared for one in each.comparisons]))
    return [replace(each, comparisons=[next(corrected) for _ in each.comparisons]) for each in compared]


def _compared(before: Result, after: Result, any_workload: bool) -> Compared:
    are_named = has_variants(before.runs) or has_variants(after.runs)
    sides = (_by_load(before, are_named=are_named), _by_load(after, are_named=are_named))
    common = [load for load in sides[0] if load in sides[1]]
    if not common:
        has = [", ".join(sorted(load or "no load named" for load in side)) for side in sides]
        what = "variant and load" if are_named else "load"
        remedy = "Run both at the same loads, and with the same --vary, if any."
        raise ConfigError(f"The results have no {what} in common: {has[0]} and {has[1]}.", remedy=remedy)
    notes = list(_notes(before, after))
    names = [sorted({run.workload for run in result.runs}) for result in (before, after)]
    if names[0] != names[1]:
        words = f"The workloads differ: {', '.join(names[0])!r} and {', '.join(names[1])!r}."
        if not any_workload:
            raise ConfigError(words, remedy="Run the same workload, or give --any-workload to compare them anyway.")
        notes.append(f"{words} The differences may come from that.")
    if alone := {*sides[0], *sides[1]} - {*common}:
        notes.append(f"Only one of the results has {', '.join(sorted(alone))}; skipped.")
    comparisons = []
    for load in common:
        pair = (sides[0][load], sides[1][load])
        differences = list(_differences(*pair))
        comparisons.append(Comparison(load=load, num_runs=(len(pair[0]), len(pair[1])), differences=differences))
    if any(len({run.figures.steady is None for side in sides for run in side[load]}) > 1 for load in common):
        notes.append("Where only some runs have a steady part, rates are those of whole runs, with ramp-up and drain.")
    if any(min(one.num_runs) < MIN_REPEATS for one in comparisons):
        notes.append(f"With fewer than {MIN_REPEATS} runs on a side, the intervals do not include variation between runs.")
    return Compared(comparisons=comparisons, notes=notes)


def _by_load(result: Result, *, are_named: bool) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    for run in sorted(result.runs, key=lambda run: run.seed or 0):  # so that the n-th runs of both sides have the same seed
        words = [run.name if are_named else "", str(run.load or "")]
        runs.setdefault(" at ".join(filter(None, words)), []).append(run)
    return runs


def _notes(before: Result, after: Result) -> Iterator[str]:
    if before.machine.cpu != after.machine.cpu or before.machine.num_cpus != after.machine.num_cpus:
        yield "The machines differ."
    if {run.target.model for run in before.runs} != {run.target.model for run in after.runs}:
        yield "The models differ."
    if not _has_equal_slos(before.runs, after.runs) and all(run.slos for run in (*before.runs, *after.runs)):
        yield "The SLOs differ, so goodput and the share within them are not compared."
    if {run.how for run in before.runs} != {run.how for run in after.runs}:
        hows = [" and ".join(sorted({run.how for run in result.runs})) for result in (before, after)]
        yield f"One side is {hows[0]}, the other {hows[1]}."
    for name, result in (("first", before), ("second", after)):
        num_bad = sum(run.figures.num_by_end["refused"] + run.figures.num_by_end["failed"] for run in result.runs)
        if num_bad:
            yield f"In the {name} result, {num_bad} requests were refused or failed. Latencies cover only the others."
        if any(run.warnings for run in result.runs):
            yield f"Figures of the {name} result are doubtful: `penstock bench report` says why."


def _has_equal_slos(before: Sequence[Run], after: Sequence[Run]) -> bool:
    return len({frozenset(run.slos) for run in (*before, *after)}) == 1


def _differences(before: Sequence[Run], after: Sequence[Run]) -> Iterator[Difference]:
    has_repeats = min(len(before), len(after)) >= MIN_REPEATS
    is_paired = _is_paired(before, after)
    has_pairs = is_paired and len({run.seed for run in before}) == len(before)
    paired = list(map(_paired_spreads, before, after)) if is_paired and not has_repeats else []
    is_steady = all(run.figures.steady for run in (*before, *after))
    found = [[_values_of(run, is_steady=is_steady) for run in side] for side in (before, after)]
    for name in dict.fromkeys(name for of_run in found[0] for name in of_run):
        if not all(name in of_run for side in found for of_run in side):
            continue
        if name in _OF_SLOS and not _has_equal_slos(before, after):
            continue
        values = [[of_run[name] for of_run in side] for side in found]
        if min(one.value for side in values for one in side) <= 0:  # a ratio needs positive values
            if name in (*RATES, *SHARES) and any(one.value for side in values for one in side):
                yield _beside_zero(name, (before, after), values, has_repeats=has_repeats)
            continue
        logs = [[math.log(one.value) for one in side] for side in values]
        means = [math.fsum(side) / len(side) for side in logs]
        spread: Spread | None
        if has_repeats:
            spread = _spread_of_pairs(logs) if has_pairs else _spread_of_repeats(logs)
        elif paired and all(name in of_run for of_run in paired) and all(one.is_known for side in values for one in side):
            spread = _mean_spread([of_run[name] for of_run in paired])
        else:
            spread = _spread_of_intervals(values)
        if spread and name.startswith("itl"):
            spread = replace(spread, error=max(spread.error, math.log(BUCKET_RATIO) / 2))
        if spread and name in SHARES:  # repeats in which as many requests failed look certain, and are not
            spread = max(spread, _spread_of_intervals(values) or spread, key=lambda one: one.error)
            spread = spread if spread.error else None
        named = Difference(
            figure=name,
            is_higher_better=name in (*RATES, *SHARES),
            before=math.exp(means[0]),
            after=math.exp(means[1]),
            change=None,
        )
        yield named if spread is None else _judged(named, means[1] - means[0], spread)


def _beside_zero(
    name: str, runs: Sequence[Sequence[Run]], values: Sequence[Sequence[Estimate]], *, has_repeats: bool
) -> Difference:
    """Compare rates or shares that include a 0. A fall to 0 is tested if the values before are surely above 0.

    The runs after it must have at least as many requests: few of them may have had bad luck.
    """
    means = [math.fsum(one.value for one in side) / len(side) for side in values]
    named = Difference(figure=name, is_higher_better=True, before=means[0], after=means[1], change=None)
    was_above = all(one.value > 0 if has_repeats else (one.low or 0) > 0 for one in values[0])
    num_before, num_after = (sum(len(run.samples) for run in side) for side in runs)
    if means[1] or not was_above or num_after < num_before:
        return named
    num_good = sum(int(run.samples.holds_all(run.slos if name in _OF_SLOS else ()).sum()) for run in runs[0])
    # If the sides are equal, each good request is at least as likely to be on the other one.
    return replace(named, change=Estimate(-1.0, -1.0, -1.0), chance=2.0 ** (1 - num_good))


def _values_of(run: Run, *, is_steady: bool) -> dict[str, Estimate]:
    """Return the figures of a run by name. `is_steady`: take rates of its steady part, which all compared runs have."""
    figures = run.figures
    found: dict[str, Estimate] = {}
    for name, latency in figures.latency_ms.items():
        found[f"{name} mean"] = latency.mean
        found |= {f"{name} {quantile}": latency.quantiles[quantile] for quantile in COMPARED_QUANTILES}
    window, rates = figures.steady if is_steady and figures.steady else (figures.window, figures.rates)
    found |= {name: getattr(rates, name) for name in rates.__slots__}
    if run.samples.is_counted.any():
        found["answered"] = make_share(run.samples, run.samples.is_ok)
        if run.slos:
            found["within_slos"] = make_share(run.samples, run.samples.holds_all(run.slos))
    if run.slos:
        found["goodput_per_s"] = make_rates(run.samples, window, run.samples.holds_all(run.slos)).requests_per_s
    return found


def _spread_of_repeats(logs: Sequence[Sequence[float]]) -> Spread:
    variances = [float(np.var(side, ddof=1)) / len(side) for side in logs]
    total = sum(variances)
    parts = sum(variance**2 / (len(side) - 1) for variance, side in zip(variances, logs, strict=True))
    return Spread(math.sqrt(total), total**2 / parts if parts else sum(map(len, logs)) - 2)


def _spread_of_pairs(logs: Sequence[Sequence[float]]) -> Spread:
    changes = np.subtract(logs[1], logs[0])
    return Spread(float(np.std(changes, ddof=1)) / math.sqrt(len(changes)), len(changes) - 1)


def _spread_of_intervals(values: Sequence[Sequence[Estimate]]) -> Spread | None:
    variance = 0.0
    for side in values:
        for one in side:
            if one.low is None or one.high is None or one.low <= 0:
                return None
            error = math.log(one.high / one.low) / 2 / NormalDist().inv_cdf((1 + LEVEL) / 2)
            variance += (error / len(side)) ** 2
    return Spread(math.sqrt(variance))


def _is_paired(before: Sequence[Run], after: Sequence[Run]) -> bool:
    if len(before) != len(after):
        return False
    return all(
        one.workload == other.workload
        and one.seed == other.seed
        and one.seed is not None
        and np.array_equal(np.sort(one.samples.index), np.sort(other.samples.index))
        for one, other in zip(before, after, strict=True)
    )


def _paired_spreads(before: Run, after: Run) -> Mapping[str, Spread]:
    """Return the spread of each latency figure, by a bootstrap that draws the same blocks of jobs on both sides."""
    rng = np.random.default_rng(0)
    shares = [QUANTILES[quantile] for quantile in COMPARED_QUANTILES]
    found: dict[str, Spread] = {}
    for name in LATENCIES:
        if name == "itl":
            continue
        jobs = np.stack([run.samples.latency_ns(name)[np.argsort(run.samples.index)] for run in (before, after)])
        jobs = jobs[:, (jobs >= 0).all(axis=0)].astype(np.float64)
        num_jobs = jobs.shape[1]
        num_blocks = int(min(effective_draws(side).count for side in jobs) / _DRAWS_IN_BLOCK) if num_jobs else 0
        if num_blocks < MIN_BLOCKS:
            continue
        num_blocks = min(NUM_BLOCKS, num_blocks)
        blocks = np.array_split(np.arange(num_jobs), num_blocks)
        figures = np.empty((400, 1 + len(shares), 2))
        for draw in figures:
            drawn = jobs[:, np.concatenate([blocks[i] for i in rng.integers(num_blocks, size=num_blocks)])]
            draw[:] = [drawn.mean(axis=1), *np.quantile(drawn, shares, axis=1)]
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.std(np.log(figures[..., 1] / figures[..., 0]), axis=0, ddof=1)
        # Resampled blocks vary a little less than the blocks themselves.
        errors *= math.sqrt(1 + 2 / (num_blocks - 1))
        names = (f"{name} {figure}" for figure in ("mean", *COMPARED_QUANTILES))
        found |= {
            figure: Spread(error, num_blocks - 1)
            for figure, error in zip(names, errors.tolist(), strict=True)
            if math.isfinite(error)
        }
    return found


def _mean_spread(spreads: Sequence[Spread]) -> Spread:
    error = math.sqrt(math.fsum(one.error**2 for one in spreads)) / len(spreads)
    return Spread(error, math.fsum(one.degrees for one in spreads))


def _judged(named: Difference, ratio: float, spread: Spread) -> Difference:
    """Return `named`, which only names a figure, with its change, p-value and spread. `ratio` is a logarithm."""
    half = student_quantile((1 + LEVEL) / 2, spread.degrees) * spread.error
    change = Estimate(*(math.expm1(value) for value in (ratio, ratio - half, ratio + half)))
    chance = student_tail(ratio / spread.error, spread.degrees) if spread.error else float(ratio == 0)
    return replace(named, change=change, chance=chance, spread=spread)


def _after_holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    tested = sorted(
        (difference.chance, i, j)
        for i, one in enumerate(comparisons)
        for j, difference in enumerate(one.differences)
        if difference.change is not None
    )
    shown: set[tuple[int, int]] = set()
    for rank, (chance, i, j) in enumerate(tested):
        if chance > (1 - LEVEL) / (len(tested) - rank):
            break
        shown.add((i, j))
    share = 1 - (1 - LEVEL) / 2 / max(1, len(tested))
    return [
        replace(
            one,
            differences=[
                replace(difference, is_more_than_noise=(i, j) in shown, smallest=_smallest(difference.spread, share))
                for j, difference in enumerate(one.differences)
            ],
        )
        for i, one in enumerate(comparisons)
    ]


def _smallest(spread: Spread | None, share: float) -> float:
    """Return the smallest change found with a power of 80 %, or infinity. A test's critical value is its quantile `share`."""
    if spread is None:
        return math.inf
    ratio = spread.error * (student_quantile(share, spread.degrees) + student_quantile(0.8, spread.degrees))
    return math.expm1(ratio) if ratio < 10 else math.inf  # expm1 overflows from 710 on


def _percent(share: float) -> str:
    return figure(100 * share, digits=2)
