"""Is the difference between two results more than noise? Called by `penstock bench compare`; measures nothing itself.

Figures are compared as ratios, at each load that both results have.

- Fewer than three runs on a side: a block bootstrap. The requests in the order of their jobs, or the time of the run for rates,
  are cut into up to 32 blocks, and blocks are drawn with replacement (E. Carlstein, Annals of Statistics 14, 1986). The spread
  of the logarithm of the ratio over the draws is its standard error. Where both sides ran the same jobs, latencies draw the
  same blocks on both, so what the jobs have in common cancels. The machine's other work and all else that differs from one run
  to the next is not seen; a note says so.
- Arms of an A/B test that chance made: the larger of two spreads. Requests that are drawn one by one spread as the chance does
  that put them into arms, however the load drifts (J. Neyman, Journal of the Royal Statistical Society 97, 1934). Blocks that
  are cut at the same instants in both arms, and drawn together, also see that requests of one user come together.
- Three runs or more on both sides: B. L. Welch's test on the logarithms of the runs' figures (Biometrika 34, 1947).

With many figures, some differ by chance. A difference counts as one only if it holds after S. Holm's correction for all that
were tested (Scandinavian Journal of Statistics 6, 1979), which keeps the chance of any false one below 5 %. The intervals
shown are the plain ones of 95 %. Where no difference showed, the smallest is told that would show four times in five.

Randomness comes of a seed: the same files and the same seed give the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from penstock.lab.figures import (
    BUCKET_RATIO,
    LATENCIES,
    NS_PER_S,
    QUANTILES,
    Samples,
    make_rates,
    num_independent_batches,
    steady_window,
    tokens_upto,
    whole_window,
)
from penstock.lab.intervals import (
    LEVEL,
    Bools,
    Estimate,
    Floats,
    Ints,
    binomial_ranks,
    effective_draws,
    student_quantile,
    student_tail,
)
from penstock.lab.results import Load, Result, Run
from penstock.types.errors import ConfigError

NUM_DRAWS = 2000
NUM_BLOCKS = 32
MIN_BLOCKS = 8
MIN_REPEATS = 3
POWER = 0.8
COMPARED_QUANTILES = ("p50", "p90", "p99")
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_per_s")
_MAX_BINS = 2048
_DRAWS_IN_BLOCK = 2
_MIN_IN_BLOCK = 2
"""Answered requests of an arm in a block, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of both sides."""

    figure: str
    """`ttft p99`, `output_tokens_per_s`"""
    is_rate: bool
    """A rate is better when it is higher, a latency when it is lower."""
    before: float
    after: float
    change: Estimate | None
    """after / before - 1, with the interval of this figure alone; None where the runs are too small to say."""
    chance: float = 1.0
    """The chance of such a difference, or a larger one, if there is none in truth; for this figure alone."""
    smallest: float = math.inf
    """The smallest change that these runs would show four times in five, after the correction."""
    is_more_than_noise: bool = False
    """After the correction for all figures that were tested."""

    @property
    def is_worse(self) -> bool:
        return self.change is not None and (self.change.value < 0) == self.is_rate and self.change.value != 0

    @property
    def words(self) -> str:
        """The numbers in words: `faster by 12 % [9, 15]`."""
        if self.change is None or self.change.low is None or self.change.high is None:
            return "too few requests to say"
        verbs = ("higher", "lower") if self.is_rate else ("slower", "faster")
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
    """Two results at one load."""

    load: Load | None
    num_runs: tuple[int, int]
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two results at every load that both have."""

    comparisons: Sequence[Comparison]
    notes: Sequence[str]
    """All that a reader should know before the figures are believed."""

    @property
    def has_tested(self) -> bool:
        """Whether both sides had requests enough to compare any figure."""
        return any(difference.change is not None for one in self.comparisons for difference in one.differences)

    def worse(self, by: float) -> list[tuple[Load | None, Difference]]:
        """The figures that are worse by more than this share, where that is more than noise."""
        return [
            (one.load, difference)
            for one in self.comparisons
            for difference in one.differences
            if difference.is_more_than_noise and difference.is_worse and _worsening(difference) > by
        ]


def compare_results(
    before: Result,
    afters: Sequence[Result],
    *,
    any_workload: bool = False,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    has_rates: bool = True,
    is_by_chance: bool = False,
) -> list[Compared]:
    """Compare each of `afters` with `before`, at each load that both have; the correction is for all of them together.

    `has_rates`: False where the sides were not asked as much, as the arms of an A/B test, so that their rates say nothing.
    `is_by_chance`: both sides are of one run, and chance put each request on its side. Both have one run, and no rate.

    Raises ConfigError if no load is common, or if the workloads differ and not any will do.
    """
    compared = [
        _compared(before, after, any_workload, [seed, i], num_draws, has_rates, is_by_chance) for i, after in enumerate(afters)
    ]
    corrected = iter(_after_holm([one for each in compared for one in each.comparisons]))
    return [replace(each, comparisons=[next(corrected) for _ in each.comparisons]) for each in compared]


def _compared(
    before: Result,
    after: Result,
    any_workload: bool,
    seed: Sequence[int],
    num_draws: int,
    has_rates: bool,
    is_by_chance: bool,
) -> Compared:
    """Without the correction."""
    sides = (_by_load(before), _by_load(after))
    common = [load for load in sides[0] if load in sides[1]]
    if not common:
        has = [", ".join(sorted(str(load or "no load named") for load in side)) for side in sides]
        raise ConfigError(f"The results have no load in common: {has[0]} and {has[1]}.", remedy="Run both at the same loads.")
    notes = list(_notes(before, after))
    names = [sorted({run.workload for run in result.runs}) for result in (before, after)]
    if names[0] != names[1]:
        words = f"The workloads differ: {', '.join(names[0])!r} and {', '.join(names[1])!r}."
        if not any_workload:
            raise ConfigError(words, remedy="Run the same workload, or give --any-workload to compare them all the same.")
        notes.append(f"{words} What differs may be their doing.")
    if alone := [str(load) for load in {*sides[0], *sides[1]} if load not in common]:
        notes.append(f"Only one of the results has {', '.join(sorted(alone))}; that is left out.")
    comparisons = []
    for position, load in enumerate(common):
        rng = np.random.default_rng([*seed, position])
        pair = (sides[0][load], sides[1][load])
        differences = [one for one in _differences(*pair, rng, num_draws, is_by_chance) if has_rates or not one.is_rate]
        comparisons.append(Comparison(load=load, num_runs=(len(pair[0]), len(pair[1])), differences=differences))
    if any(min(one.num_runs) < MIN_REPEATS for one in comparisons):
        notes.append(
            f"With fewer than {MIN_REPEATS} runs on a side, what differs from one run to the next is not in the intervals."
        )
    return Compared(comparisons=comparisons, notes=notes)


def _by_load(result: Result) -> dict[Load | None, list[Run]]:
    runs: dict[Load | None, list[Run]] = {}
    for run in result.runs:
        runs.setdefault(run.load, []).append(run)
    return runs


def _notes(before: Result, after: Result) -> Iterator[str]:
    if before.machine.cpu != after.machine.cpu or before.machine.num_cpus != after.machine.num_cpus:
        yield "The machines differ."
    if {run.target.model for run in before.runs} != {run.target.model for run in after.runs}:
        yield "The models differ."
    if not _has_equal_slos(before.runs, after.runs) and all(run.slos for run in (*before.runs, *after.runs)):
        yield "The SLOs differ, so goodput is not compared."
    if {run.how for run in before.runs} != {run.how for run in after.runs}:
        hows = [" and ".join(sorted({run.how for run in result.runs})) for result in (before, after)]
        yield f"One side is {hows[0]}, the other {hows[1]}."
    for name, result in (("first", before), ("second", after)):
        num_bad = sum(run.figures.num_by_end["refused"] + run.figures.num_by_end["failed"] for run in result.runs)
        if num_bad:
            yield f"In the {name} result, {num_bad} requests were refused or failed. Latencies are of the others alone."


def _has_equal_slos(before: Sequence[Run], after: Sequence[Run]) -> bool:
    return len({frozenset(run.slos) for run in (*before, *after)}) == 1


def _differences(
    before: Sequence[Run], after: Sequence[Run], rng: np.random.Generator, num_draws: int, is_by_chance: bool
) -> Iterator[Difference]:
    has_repeats = min(len(before), len(after)) >= MIN_REPEATS
    draws: Mapping[str, tuple[float, float]] = {}
    if is_by_chance:
        draws = _draw_arms(before[0].samples, after[0].samples, rng, num_draws)
    elif not has_repeats:
        draws = _draw_all(before, after, rng, num_draws)
    found = [[_values_of(run) for run in side] for side in (before, after)]
    for name in dict.fromkeys(name for of_run in found[0] for name in of_run):
        values = [[of_run.get(name) for of_run in side] for side in found]
        known = [[value.value for value in side if value is not None] for side in values]
        if [len(side) for side in known] != [len(before), len(after)] or min(map(min, known)) <= 0:
            continue  # One side has no such figure, or none that a ratio can be made of.
        if name == "goodput_per_s" and not _has_equal_slos(before, after):
            continue
        means = [side[0] if len(side) == 1 else math.exp(float(np.mean(np.log(side)))) for side in known]
        shell = Difference(figure=name, is_rate=name in RATES, before=means[0], after=means[1], change=None)
        ratio = math.log(means[1] / means[0])
        if has_repeats:
            yield _by_repeats(shell, ratio, known)
        elif name in draws and (is_by_chance or all(value is not None and value.is_known for side in values for value in side)):
            spread, degrees = draws[name]
            yield _judged(shell, ratio, spread, degrees)
        else:
            yield shell


def _values_of(run: Run) -> dict[str, Estimate]:
    """The figures that are compared, by their names; rates are of the steady part where there is one."""
    figures = run.figures
    found: dict[str, Estimate] = {}
    for name, latency in figures.latencies.items():
        found[f"{name} mean"] = latency.mean
        found |= {f"{name} {quantile}": latency.quantiles[quantile] for quantile in COMPARED_QUANTILES}
    window, rates = figures.steady or (figures.window, figures.rates)
    found |= {name: getattr(rates, name) for name in rates.__slots__}
    if run.slos:
        found["goodput_per_s"] = make_rates(run.samples, window, run.samples.holds_all(run.slos)).requests_per_s
    return found


def _by_repeats(shell: Difference, ratio: float, known: Sequence[Sequence[float]]) -> Difference:
    """Welch's test."""
    variances = [float(np.var(np.log(side), ddof=1)) / len(side) for side in known]
    total = sum(variances)
    parts = sum(variance**2 / (len(side) - 1) for variance, side in zip(variances, known, strict=True))
    return _judged(shell, ratio, math.sqrt(total), total**2 / parts if parts else float(sum(map(len, known)) - 2))


def _judged(shell: Difference, ratio: float, spread: float, degrees: float) -> Difference:
    """`spread` is the standard error of the logarithm `ratio`. `smallest` still lacks the correction."""
    half = student_quantile((1 + LEVEL) / 2, degrees) * spread
    change = Estimate(*(math.expm1(value) for value in (ratio, ratio - half, ratio + half)))
    chance = student_tail(ratio / spread, degrees) if spread else float(ratio == 0)
    return replace(shell, change=change, chance=chance, smallest=spread)


def _draw_all(
    before: Sequence[Run], after: Sequence[Run], rng: np.random.Generator, num_draws: int
) -> Mapping[str, tuple[float, float]]:
    """Figure -> the standard error of the logarithm of its ratio, and the degrees of freedom."""
    is_paired = _is_paired(before, after)
    num_blocks = [[_num_blocks(run.samples) for run in runs] for runs in (before, after)]
    if is_paired:
        num_blocks = [[min(pair) for pair in zip(*num_blocks, strict=True)]] * 2
    sides: list[dict[str, tuple[Floats, int]]] = []
    for runs, of_runs in zip((before, after), num_blocks, strict=True):
        if not sides or not is_paired:
            weights = _weights(rng, num_draws, sum(of_runs))
        samples = [run.samples for run in runs]
        found = dict(_draws_of_latencies(samples, of_runs, weights))
        found |= dict(_draws_of_gaps(samples, of_runs, rng, num_draws))
        found |= dict(_draws_of_rates(runs, rng, num_draws))
        sides.append(found)
    errors: dict[str, tuple[float, float]] = {}
    for name in sides[0].keys() & sides[1].keys():
        (first, num_first), (second, num_second) = sides[0][name], sides[1][name]
        if min(num_first, num_second) < MIN_BLOCKS or min(np.nanmin(first), np.nanmin(second)) <= 0:
            continue
        together = is_paired and not name.startswith("itl") and name not in RATES
        degrees = num_first - 1 if together else num_first + num_second - 2
        # Draws of a handful of blocks spread a little less than the blocks' means do.
        error = _spread(first, second) * math.sqrt(1 + 2 / max(1.0, degrees))
        errors[name] = (max(error, math.log(BUCKET_RATIO) / 2) if name.startswith("itl") else error, float(degrees))
    return errors


def _spread(first: Floats, second: Floats) -> float:
    """The standard deviation over the draws of the logarithm of the ratio."""
    return float(np.nanstd(np.log(second) - np.log(first), ddof=1))


def _draw_arms(a: Samples, b: Samples, rng: np.random.Generator, num_draws: int) -> Mapping[str, tuple[float, float]]:
    """As `_draw_all`, of latencies. A figure for which an arm has too few requests is left out."""
    instants = np.sort(np.concatenate([a.intended_ns, b.intended_ns]))
    errors: dict[str, tuple[float, float]] = {}
    for name in LATENCIES:
        if name == "itl":
            continue
        latencies = [arm.latency_ns(name) for arm in (a, b)]
        sizes = [int((values >= 0).sum()) for values in latencies]
        num_blocks = min(NUM_BLOCKS, min(sizes) // _MIN_IN_BLOCK)
        if num_blocks < MIN_BLOCKS:
            continue
        edges = instants[len(instants) * np.arange(1, num_blocks) // num_blocks]
        weights = _weights(rng, num_draws, num_blocks)
        by_block: list[dict[str, tuple[Floats, int]]] = []
        by_one: list[dict[str, Floats]] = []
        for arm, values in zip((a, b), latencies, strict=True):
            known = values >= 0
            block = np.searchsorted(edges, arm.intended_ns, side="right").astype(np.int64)
            numbers, counts = _histogram(values[known], block[known], num_blocks)
            of_all = counts.sum(axis=0)
            drawn = rng.multinomial(of_all.sum(), of_all / of_all.sum(), num_draws).astype(np.float64)
            by_block.append(dict(_draws_of_counts(name, numbers, counts, weights)))
            by_one.append(dict(_figures_of(name, numbers, drawn)))
        for figure, (draws, num_of_a) in by_block[0].items():
            other, num_of_b = by_block[1][figure]
            share = QUANTILES.get(figure.split()[1])
            has_enough = share is None or binomial_ranks(min(sizes), share) is not None
            if not has_enough or min(num_of_a, num_of_b) < MIN_BLOCKS or min(np.nanmin(draws), np.nanmin(other)) <= 0:
                continue
            degrees = min(num_of_a, num_of_b) - 1
            error = _spread(draws, other) * math.sqrt(1 + 2 / degrees)
            errors[figure] = (max(error, _spread(by_one[0][figure], by_one[1][figure])), float(degrees))
    return errors


def _is_paired(before: Sequence[Run], after: Sequence[Run]) -> bool:
    """Whether run by run both sides had the same jobs."""
    if len(before) != len(after):
        return False
    return all(
        one.workload == other.workload
        and one.seed == other.seed
        and one.seed is not None
        and np.array_equal(np.sort(one.samples.index), np.sort(other.samples.index))
        for one, other in zip(before, after, strict=True)
    )


def _weights(rng: np.random.Generator, num_draws: int, num_blocks: int) -> Floats:
    """[draws, blocks]: how often each draw has each block."""
    return rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), num_draws).astype(np.float64)


def _num_blocks(samples: Samples) -> int:
    """Blocks so long that one says little of the next: each counts as two independent draws of the slowest latency."""
    draws = [float(len(samples))]
    for name in ("ttft", "e2e"):
        values = samples.latency_ns(name)
        if (values >= 0).any():
            draws.append(effective_draws(values[values >= 0].astype(np.float64)).count / _DRAWS_IN_BLOCK)
    return max(1, min(NUM_BLOCKS, int(min(draws))))


def _draws_of_latencies(
    runs: Sequence[Samples], num_blocks: Sequence[int], weights: Floats
) -> Iterator[tuple[str, tuple[Floats, int]]]:
    """The mean and the quantiles of each latency in every draw, with the number of blocks. Blocks are by the jobs' indices."""
    blocks, offset = [], 0
    for samples, num_of_run in zip(runs, num_blocks, strict=True):
        ranks = np.empty(len(samples), np.int64)
        ranks[np.argsort(samples.index, kind="stable")] = np.arange(len(samples))
        blocks.append(offset + ranks * num_of_run // len(samples))
        offset += num_of_run
    block = np.concatenate(blocks)
    for name in LATENCIES:
        if name == "itl":
            continue
        values = np.concatenate([samples.latency_ns(name) for samples in runs])
        known: Bools = values >= 0
        if not known.any():
            continue
        numbers, counts = _histogram(values[known], block[known], offset)
        yield from _draws_of_counts(name, numbers, counts, weights)


def _histogram(values: Ints, block: Ints, num_blocks: int) -> tuple[Floats, Ints]:
    """Values [bins], ascending, and counts [blocks, bins]; of many values, each becomes the next lower of 2,048 quantiles."""
    numbers = np.unique(values)
    if len(numbers) > _MAX_BINS:
        numbers = np.unique(np.quantile(values, np.linspace(0, 1, _MAX_BINS), method="inverted_cdf"))
    counts = np.zeros((num_blocks, len(numbers)), np.int64)
    np.add.at(counts, (block, np.searchsorted(numbers, values, side="right") - 1), 1)
    return numbers.astype(np.float64), counts


def _draws_of_counts(name: str, values: Floats, counts: Ints, weights: Floats) -> Iterator[tuple[str, tuple[Floats, int]]]:
    num_blocks = int((counts.sum(axis=1) > 0).sum())
    for figure, draws in _figures_of(name, values, weights @ counts.astype(np.float64)):
        yield figure, (draws, num_blocks)


def _figures_of(name: str, values: Floats, drawn: Floats) -> Iterator[tuple[str, Floats]]:
    """The mean and the quantiles of each draw, NaN for an empty one. `drawn`: [draws, bins], how often each has each value."""
    totals = drawn.sum(axis=1)
    totals[totals == 0] = np.nan
    yield f"{name} mean", drawn @ values / totals
    upto = np.cumsum(drawn, axis=1)
    for quantile in COMPARED_QUANTILES:
        reached = upto >= (QUANTILES[quantile] * totals)[:, None] - 1e-9
        yield f"{name} {quantile}", np.where(np.isnan(totals), np.nan, values[np.argmax(reached, axis=1)])


def _draws_of_gaps(
    runs: Sequence[Samples], num_blocks: Sequence[int], rng: np.random.Generator, num_draws: int
) -> Iterator[tuple[str, tuple[Floats, int]]]:
    buckets = np.unique(np.concatenate([samples.gaps.buckets for samples in runs]))
    if not len(buckets):
        return
    counts, values, offset = np.zeros((sum(num_blocks), len(buckets)), np.int64), np.zeros(len(buckets)), 0
    for samples, num_of_run in zip(runs, num_blocks, strict=True):
        at, num_groups = np.searchsorted(buckets, samples.gaps.buckets), len(samples.gaps.counts)
        for group, row in enumerate(samples.gaps.counts):
            counts[offset + group * num_of_run // num_groups, at] += row
        values[at] = samples.gaps.values_ns
        offset += num_of_run
    yield from _draws_of_counts("itl", values, counts, _weights(rng, num_draws, sum(num_blocks)))


def _draws_of_rates(runs: Sequence[Run], rng: np.random.Generator, num_draws: int) -> Iterator[tuple[str, tuple[Floats, int]]]:
    """Rates in every draw of blocks of time, within the steady part where there is one."""
    parts: dict[str, list[Floats]] = {name: [] for name in RATES}
    seconds: list[Floats] = []
    num_blocks = 0
    for run in runs:
        samples = run.samples
        window = steady_window(samples) or whole_window(samples)
        num_of_run = min(NUM_BLOCKS, max(1, num_independent_batches(samples.rows(samples.is_ok, samples.gaps), window)))
        num_blocks += num_of_run
        edges = np.linspace(window.begin_ns, window.end_ns, num_of_run + 1)
        seconds.append(np.diff(edges) / NS_PER_S)
        edges[0] -= 1
        output, prompt, ended = (np.diff(upto) for upto in tokens_upto(samples.rows(samples.is_ok, samples.gaps), edges))
        of_name = {"requests_per_s": ended, "output_tokens_per_s": output, "total_tokens_per_s": output + prompt}
        if run.slos:
            good = samples.rows(samples.holds_all(run.slos), samples.gaps)
            of_name["goodput_per_s"] = np.diff(tokens_upto(good, edges)[2])
        for name, blocks in of_name.items():
            parts[name].append(blocks)
    weights = _weights(rng, num_draws, num_blocks)
    lasted = weights @ np.concatenate(seconds)
    if lasted.min() <= 0:
        return
    for name, found in parts.items():
        if len(found) == len(runs):
            yield name, (weights @ np.concatenate(found) / lasted, num_blocks)


def _after_holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Decide which differences are more than noise, over all that was tested."""
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
    factor = _detection_factor(len(tested))
    return [
        replace(
            one,
            differences=[
                replace(difference, is_more_than_noise=(i, j) in shown, smallest=math.expm1(difference.smallest * factor))
                for j, difference in enumerate(one.differences)
            ],
        )
        for i, one in enumerate(comparisons)
    ]


def _detection_factor(num_tested: int) -> float:
    """How many standard errors a difference must have to be shown four times in five; normal, as an orientation."""
    normal = NormalDist()
    return normal.inv_cdf(1 - (1 - LEVEL) / 2 / max(1, num_tested)) + normal.inv_cdf(POWER)


def _worsening(difference: Difference) -> float:
    """How much worse, as a share: 0.05 for a latency that rose by 5 %, or a rate that fell by 5 %."""
    assert difference.change is not None
    return -difference.change.value if difference.is_rate else difference.change.value


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if abs(share) < 0.995 else f"{100 * share:.0f}"
