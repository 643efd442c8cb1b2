"""Searches settings for a workload in the simulator, and measures their gain on other parts of the workload.

The workload is cut into slices. All candidates serve the same slices, so differences are paired. The search is successive
halving (Jamieson and Talwalkar, AISTATS 2016); each round adds combinations of the best candidates. Gains are measured on other
slices, because the winner of a search is partly lucky on its own slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from statistics import fmean

import numpy as np

from penstock.lab.figures import Samples, Slo
from penstock.lab.intervals import LEVEL, Estimate, Floats, nearest_rank, student_quantile
from penstock.lab.records import Record
from penstock.lab.transforms import cut
from penstock.lab.workload import NS_PER_S, Workload
from penstock.types.errors import ConfigError, PenstockError

MIN_SLICES = 6
NUM_PARENTS = 6
"""Number of top candidates that are combined in pairs for the next round."""
Value = str | int
Settings = tuple[tuple[str, Value], ...]
"""Settings that differ from the default, sorted by key."""
DEFAULT: Settings = ()
Evaluate = Callable[[Settings, Workload], Sequence[Record]]

SPACE: Mapping[str, Sequence[Value]] = {
    "batching": ("dynamic", "static"),
    "batch_window": ("5ms", "50ms", "200ms"),
    "max_batch_size": (4, 8, 16),
    "length_buckets": ("64,256,1024,4096", "256,4096"),
    "budget": ("decode-first", "whole-prompts"),
    "slo_itl": ("20ms", "35ms", "75ms", "100ms", "150ms", "250ms"),
    "max_num_batched_tokens": (64, 128, 256, 1024, 2048),
    "long_prefill_token_threshold": (128, 256, 1024),
    "max_num_seqs": (8, 16, 32, 128),
    "policy": ("sjf", "srpf"),
    "reserve": ("chunk", "prompt", "predicted", "no-evict"),
    "kv_watermark": ("0%", "5%"),
}
NEEDS: Mapping[str, tuple[str, Value]] = {
    "batch_window": ("batching", "dynamic"),
    "max_batch_size": ("batching", "dynamic"),
    "length_buckets": ("batching", "dynamic"),
}
"""Setting -> another setting that it requires."""


class Objective(StrEnum):
    GOODPUT = "goodput"
    """Requests per second that meet every SLO, from the first arrival to the last end."""
    THROUGHPUT = "throughput"
    """Output tokens per second, from the first arrival to the last end."""
    TTFT_MEAN = "ttft_mean"
    TTFT_P99 = "ttft_p99"
    E2E_MEAN = "e2e_mean"

    @property
    def unit(self) -> str:
        return {Objective.GOODPUT: "requests/s", Objective.THROUGHPUT: "output tokens/s"}.get(self, "s")

    @property
    def sign(self) -> int:
        return -1 if self.unit == "s" else 1


def score(records: Sequence[Record], objective: Objective, slos: Sequence[Slo]) -> float:
    """Return the value of the objective, such as goodput, for one run.

    For latencies, a failed request counts as infinite; a cancelled one does not count.
    """
    samples = Samples.of(records)
    if not samples.is_counted.any():
        raise ConfigError("In a slice every client left before its answer ended.", remedy="Lower --cancel-share.")
    span_s = max(1, int(samples.ended_ns.max()) - int(samples.intended_ns.min())) / NS_PER_S
    if objective is Objective.THROUGHPUT:
        return float(samples.num_output_tokens[samples.is_ok].sum()) / span_s
    if objective is Objective.GOODPUT:
        return float(samples.holds_all(slos).sum()) / span_s
    late_ns = samples.latency_ns("e2e" if objective is Objective.E2E_MEAN else "ttft")[samples.is_counted]
    late_s = np.where(late_ns >= 0, late_ns, np.inf) / NS_PER_S
    return nearest_rank(late_s, 0.99) if objective is Objective.TTFT_P99 else float(late_s.mean())


def words(settings: Settings) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings) or "the default"


# The search


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    num_slices: int
    ranking: Sequence[tuple[Settings, float]]


class Trials:
    def __init__(self, evaluate: Evaluate, objective: Objective, slos: Sequence[Slo]) -> None:
        self.refused: set[Settings] = set()
        """Candidates refused as contradictory."""
        self.scores: dict[tuple[Settings, str], float] = {}
        self._evaluate, self._objective, self._slos = evaluate, objective, slos

    def round(self, candidates: Sequence[Settings], slices: Sequence[Workload]) -> Round:
        """Rank the candidates by mean score over the slices. Among equal scores, keep the one with the fewest settings.

        Raises ConfigError if the default settings are refused, or their latency is infinite.
        """
        found: dict[float, Settings] = {}
        for settings in sorted(candidates, key=len):
            try:
                found.setdefault(fmean(self._score(settings, one) for one in slices), settings)
            except ConfigError:
                if settings == DEFAULT:
                    raise
                self.refused.add(settings)
        ranking = sorted(found.items(), reverse=self._objective.sign > 0)
        return Round(num_slices=len(slices), ranking=[(settings, mean) for mean, settings in ranking])

    def _score(self, settings: Settings, one: Workload) -> float:
        key = settings, one.name
        if key not in self.scores:
            self.scores[key] = score(self._evaluate(settings, one), self._objective, self._slos)
        if settings == DEFAULT and math.isinf(self.scores[key]):
            raise ConfigError(
                f"The default settings leave a request of {one.name} unanswered.",
                remedy="If it is too long for the server, cut it with --max-input-tokens and --max-output-tokens.",
            )
        return self.scores[key]


def search(trials: Trials, slices: Sequence[Workload]) -> Sequence[Round]:
    """Search by successive halving. The first round tries each single change of the default settings on one slice.

    Each later round doubles the slices. Its candidates are the default, the better half, and pairwise combinations of the best.
    """
    left = [DEFAULT, *(with_needs({key: value}) for key, values in SPACE.items() for value in values)]
    rounds: list[Round] = []
    num_slices = 1
    while True:
        rounds.append(trials.round(left, slices[:num_slices]))
        if num_slices >= len(slices):
            return rounds
        ranked = [settings for settings, _ in rounds[-1].ranking]
        pairs = [with_needs(dict(second) | dict(first)) for first, second in combinations(ranked[:NUM_PARENTS], 2)]
        left = list(dict.fromkeys([DEFAULT, *ranked[: -(-len(ranked) // 2)], *pairs]))
        num_slices = min(len(slices), 2 * num_slices)


def with_needs(chosen: Mapping[str, Value]) -> Settings:
    needed = dict(NEEDS[key] for key in chosen if key in NEEDS)
    return tuple(sorted((needed | dict(chosen)).items()))


# Comparison with the default


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    settings: Settings
    default: float
    tuned: float
    difference: Estimate
    num_dropped: int = 0
    refusal: str = ""

    @property
    def gain(self) -> Estimate:
        return self.difference.scaled(1 / self.default) if self.default > 0 else Estimate(math.nan)

    @property
    def is_surely_better(self) -> bool:
        return self.difference.low is not None and self.difference.low > 0


def judge(
    evaluate: Evaluate, objective: Objective, slos: Sequence[Slo], few: Sequence[Settings], slices: Sequence[Workload]
) -> list[Comparison]:
    """Compare each candidate in `few` with the default settings, paired by slice.

    All candidates serve a slice before the next slice begins, in alternating order, so that a machine that slows down favours
    none. Intervals are Student's t with Bonferroni's correction. A candidate that fails drops out. Raises PenstockError if the
    default fails.
    """
    if not few:
        return []
    turns = [DEFAULT, *few]
    scores: dict[Settings, list[float]] = {settings: [] for settings in turns}
    refusals: dict[Settings, str] = {}
    for nth, one in enumerate(slices):
        for settings in reversed(turns) if nth % 2 else turns:
            if settings in refusals:
                continue
            try:
                scores[settings].append(score(evaluate(settings, one), objective, slos))
            except PenstockError as error:
                if settings == DEFAULT:
                    raise
                refusals[settings] = str(error)
    default, level = np.array(scores[DEFAULT]), 1 - (1 - LEVEL) / len(few)
    counts = np.isfinite(default)
    mean = float(default[counts].mean()) if counts.any() else math.inf
    found = []
    for settings in few:
        tuned, difference = math.nan, Estimate(math.nan)
        if settings not in refusals and counts.any():
            kept = np.array(scores[settings])[counts]
            tuned, difference = float(kept.mean()), _difference(objective.sign * (kept - default[counts]), level)
        found.append(
            Comparison(
                settings=settings,
                default=mean,
                tuned=tuned,
                difference=difference,
                num_dropped=len(counts) - int(counts.sum()),
                refusal=refusals.get(settings, ""),
            )
        )
    return found


def _difference(gains: Floats, level: float) -> Estimate:
    if not np.isfinite(gains).all():
        return Estimate(math.nan)
    value, count = float(gains.mean()), len(gains)
    if count < MIN_SLICES:
        return Estimate(value)
    half = student_quantile((1 + level) / 2, count - 1) * float(gains.std(ddof=1)) / math.sqrt(count)
    return Estimate(value, value - half, value + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    objective: Objective
    slos: Sequence[Slo]
    workload: str
    unseen: Sequence[Workload]
    rounds: Sequence[Round]
    num_runs: int
    num_refused: int
    simulated: Sequence[Comparison]
    """Best candidates of the search, on other slices."""
    verified: Sequence[Comparison] | None
    """Candidates significantly better in the simulator, compared on the real engine. None before `verify`."""

    @property
    def best(self) -> Comparison | None:
        judged = self.simulated if self.verified is None else self.verified
        return max((one for one in judged if one.is_surely_better), key=lambda one: one.difference.low or 0, default=None)


def tune(
    simulate: Evaluate,
    workload: Workload,
    objective: Objective,
    slos: Sequence[Slo],
    *,
    num_slices: int = 24,
    num_finalists: int = 3,
) -> Tuned:
    """Search on a third of the slices, and compare the best settings on another third. The last third is for `verify`.

    Goodput needs `slos`. Raises ConfigError for too few slices, and for one that every client leaves.
    """
    assert slos or objective is not Objective.GOODPUT
    if num_slices < 3 * MIN_SLICES:
        raise ConfigError(f"{num_slices} slices are too few.", remedy=f"Set --slices to {3 * MIN_SLICES} or more.")
    slices = cut(workload, num_slices)
    trials = Trials(simulate, objective, slos)
    rounds = search(trials, slices[0::3])
    finalists = [settings for settings, _ in rounds[-1].ranking if settings != DEFAULT][:num_finalists]
    simulated = judge(simulate, objective, slos, finalists, slices[1::3])
    return Tuned(
        objective=objective,
        slos=slos,
        workload=workload.name,
        unseen=slices[2::3],
        rounds=rounds,
        num_runs=len(trials.scores),
        num_refused=len(trials.refused),
        simulated=simulated,
        verified=None,
    )


def verify(tuned: Tuned, serve: Evaluate) -> Tuned:
    """Compare settings that are significantly better in the simulator with the default on the real engine.

    Raises PenstockError if the default fails.
    """
    better = [one.settings for one in tuned.simulated if one.is_surely_better]
    return replace(tuned, verified=judge(serve, tuned.objective, tuned.slos, better, tuned.unseen))
