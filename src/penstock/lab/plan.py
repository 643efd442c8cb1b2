"""The size of a deployment: the highest rate that holds the SLOs, what binds there, replicas, cost. Called by `cli.plan`.

Searches in the simulator; the arithmetic is `sizing`'s, and the queues' formulas are `queueing`'s.

    Candidate       a server that could be, on a machine that could be
    Trial           one run of the workload at one rate
    highest_rate    bisection over the rate
    find_binding    what would help: each resource doubled, or even arrivals, one at a time, by a coarser bisection
    find_fleet      the fewest replicas behind a router that hold the SLOs at a wanted rate
    Bill            what their tokens cost

The highest rate is a statement about this workload: its lengths, its order and the shape of its arrivals, whose gaps are all
stretched or squeezed alike. A run is as long as the workload; where it is short for the requests in it, a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.lab import queueing
from penstock.lab.arrivals import NS_PER_S, arrive, constant, mean_rate, num_arrivals, poisson
from penstock.lab.cluster import Cluster
from penstock.lab.figures import Samples, Slo
from penstock.lab.hardware import Hardware
from penstock.lab.intervals import Estimate, share_estimate
from penstock.lab.records import End
from penstock.lab.routers import RoundRobin, Router, find_router
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.sizing import (
    BatchPoint,
    Lengths,
    Line,
    ModelSize,
    Speeds,
    arithmetic,
    batch_point,
    batch_table,
    fullest_batch,
    lengths_of,
    roofline,
    with_more_bandwidth,
    with_more_compute,
)
from penstock.lab.transforms import every, repeat, speed
from penstock.lab.workload import Workload
from penstock.types.errors import ConfigError

DEFAULT_GOAL = 0.99
"""Share of the requests that must hold every SLO."""
TOLERANCE = 0.02
"""The highest rate is known within this share of itself."""
LEAST_SHARE = 0.01
"""Share of the saturated rate at which the search begins: if the SLOs fail there, no rate holds them."""
STEP = 1.12
"""Ratio of two rates at which it is asked what binds."""
NUM_STEPS = 9
"""Such rates, the highest one being the first: up to 2.5 times it."""
_NEAR_STEPS = 3
"""A resource that is so many steps behind the best one is not asked how far chance may have a part in it."""
UTILISATIONS = (0.5, 0.7, 0.8, 0.9, 0.95)
MIN_SPANS = 10
"""A run should last so many times as long as its requests, else queues have no time to grow."""
LEAST_RUN_S = 30.0
"""A shorter workload is repeated until it lasts so long on a server that is full,"""
MOST_REQUESTS, MOST_TOKENS, MOST_STEPS = 1_000, 40_000, 5_000
"""but not beyond so many requests, output tokens, or steps of a full batch: about half a second a run."""
SATURATED = 0.95
"""Share of the saturated rate above which queues of a longer run would be longer."""
MOST_FLEET_REQUESTS, MOST_FLEET_TOKENS = 100_000, 100_000
"""A run of several replicas repeats the workload up to so many requests, and so many output tokens, or `MOST_TOKENS` for each
replica that it takes to keep up, if those are more. Where it has more than `MOST_FLEET_TOKENS`, it is of one group of them."""
LEAST_GROUP, MOST_GROUP, MOST_REPLICAS = 4, 16, 256
"""Replicas of such a group, as if they had no more to do than keep up; and of all groups together, at most."""
_FILLS, _MOST_SATURATED_TOKENS = 16, 400_000
"""A saturated server is timed over so many times the requests of a full batch: in fewer, prompts computed at the begin have
too large a part. But not beyond so many output tokens: some seconds."""
_MIDDLE = (0.1, 0.9)
"""Shares of the requests between whose ends a saturated server is timed."""


class Resource(StrEnum):
    """A thing that a server can have too little of."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    MEMORY = "memory"
    """For keys and values."""
    ROWS = "rows"
    """Requests in one step (`--max-num-seqs`)."""
    QUEUE = "queue"
    """Arrivals in bursts: it waits, though on average there is enough of everything."""


RESOURCE_WORDS: Mapping[Resource, str] = {
    Resource.ROWS: "twice the rows of a step",
    Resource.MEMORY: "twice the KV cache",
    Resource.QUEUE: "arrivals at even gaps",
    Resource.BANDWIDTH: "twice the memory bandwidth",
    Resource.COMPUTE: "multiply-adds twice as fast",
}
"""In the order of what they cost: settings, then patience, then machines."""
ADVICE: Mapping[Resource, str] = {
    Resource.COMPUTE: "more cores or a faster machine, a smaller model, or shorter prompts",
    Resource.BANDWIDTH: "a machine with more bandwidth, weights or KV of fewer bits, or a smaller model",
    Resource.MEMORY: "more --kv-cache-memory, --kv-cache-dtype int8, or shorter requests",
    Resource.ROWS: "a higher --max-num-seqs",
    Resource.QUEUE: "a looser TTFT, or more replicas than the mean rate needs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A server that could be, as the simulator runs it."""

    simulation: Simulation
    size: ModelSize
    rates: Speeds
    """Those of the roofline."""
    is_fitted: bool
    """The simulation's cost model comes from a file; else it is `roofline(size, rates)`."""
    doubts: Sequence[str] = ()
    """Sentences on what is assumed about model, memory and step times."""

    def run(self, workload: Workload) -> Outcome:
        return self.simulation.run(workload)

    def doubled(self, resource: Resource) -> Candidate:
        """The same with twice as much of one resource; of `QUEUE` there is none, and the candidate stays as it is."""
        simulation, capacity, cost = self.simulation, self.simulation.capacity, self.simulation.cost
        match resource:
            case Resource.COMPUTE:
                rates = replace(self.rates, ops_per_s=2 * self.rates.ops_per_s)
                cost = with_more_compute(cost, 2.0) if self.is_fitted else roofline(self.size, rates)
            case Resource.BANDWIDTH:
                rates = replace(self.rates, read_bytes_per_s=2 * self.rates.read_bytes_per_s)
                cost = with_more_bandwidth(cost, 2.0) if self.is_fitted else roofline(self.size, rates)
            case Resource.MEMORY:
                capacity = replace(capacity, num_blocks=2 * capacity.num_blocks - 1)
            case Resource.ROWS:
                capacity = replace(capacity, max_rows=2 * capacity.max_rows)
            case Resource.QUEUE:
                pass
        return replace(self, simulation=replace(simulation, capacity=capacity, cost=cost))


# Trials


class Trial(NamedTuple):
    """One run at one rate."""

    rate: float
    """Arrivals per second; infinity: all at once."""
    num_requests: int
    """All but those whose client went away."""
    num_good: int
    """Requests that held every SLO."""
    goal: float
    stress: float
    """The least x such that the share `goal` of the requests would hold SLOs whose limits are x times as long. 1: just held."""
    by_slo: Mapping[str, float]
    """SLO -> the same for this one alone."""
    duration_s: float
    mean_e2e_s: float
    kv_share: float
    """Share of the KV cache that requests held, on average over the run and the replicas."""
    mean_running: float
    """Requests that ran, on average over the run, in all replicas together."""
    num_outside: int
    """Steps outside of the range to which the cost model was fitted."""
    num_steps: int
    attainment: Estimate
    """Share of the requests that held every SLO."""

    @property
    def holds(self) -> bool:
        return self.num_good >= self.goal * self.num_requests

    @property
    def nearly_holds(self) -> bool:
        """As `holds`, where one standard deviation of the requests that may fail, each by chance, may fail besides."""
        return self.num_good >= self.goal * self.num_requests - math.sqrt(self.num_requests * self.goal * (1 - self.goal))

    @property
    def worst_slo(self) -> str:
        return max(self.by_slo, key=lambda name: self.by_slo[name])


def make_trial(outcome: Outcome, rate: float, slos: Sequence[Slo], goal: float) -> Trial:
    """The figures of one run that the search needs. Raises ConfigError if no request is left to count."""
    samples = Samples.of(outcome.records)
    counted = samples.end != list(End).index(End.CANCELLED)
    if not counted.any():
        raise ConfigError("The clients of all requests went away.", remedy="Lower --cancel-share.")
    ratios = {str(slo): _ratios(samples, slo)[counted] for slo in slos}
    worst = np.maximum.reduce(list(ratios.values()))
    means = [timeline.means(max(1, outcome.duration_ns)) for timeline in outcome.timelines.values()]
    seconds = (samples.ended_ns - samples.intended_ns)[counted] / NS_PER_S
    return Trial(
        rate=rate,
        num_requests=len(worst),
        num_good=int((worst <= 1).sum()),
        goal=goal,
        stress=_quantile(worst, goal),
        by_slo={name: _quantile(values, goal) for name, values in ratios.items()},
        duration_s=outcome.duration_ns / NS_PER_S,
        mean_e2e_s=float(seconds.mean()),
        kv_share=fmean(held for _, _, held in means),
        mean_running=sum(running for running, _, _ in means),
        num_outside=outcome.num_outside,
        num_steps=outcome.num_steps,
        attainment=share_estimate(worst <= 1, seconds),
    )


def _ratios(samples: Samples, slo: Slo) -> NDArray[np.float64]:
    """Latency over limit; infinity for a request that failed, or has not what the SLO is of, and 0 where it holds for free."""
    values = samples.longest_gap_ns if slo.metric == "itl" else samples.latency_ns(slo.metric)
    ratios = np.maximum(values, 0) / slo.limit_ns
    return np.where(samples.holds(slo), np.minimum(ratios, 1.0), np.where(values > slo.limit_ns, ratios, np.inf))


def _quantile(values: NDArray[np.float64], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return float(np.sort(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)])


def at_rate(workload: Workload, rate: float, seed: int) -> Workload:
    """The workload at another mean rate: all gaps times one factor, think times left alone; Poisson if all came at once.

    The same seed gives the same arrivals but for that factor, so that two rates differ in nothing else. A rate of infinity
    is all at once.
    """
    if math.isinf(rate):
        return arrive(workload, [0] * num_arrivals(workload), "all at once")
    own_rate = mean_rate(workload)
    if own_rate is not None:
        return _with_think_times_of(speed(workload, rate / own_rate), workload)
    rng = Random(seed)  # noqa: S311  # repeatable on purpose
    return arrive(workload, poisson(rng, num_arrivals(workload), rate), f"{rate:.3g} requests/s, Poisson")


def _with_think_times_of(changed: Workload, workload: Workload) -> Workload:
    """Users do not think faster because there are more of them."""
    jobs = [
        new if old.after is None else replace(new, arrival_ns=old.arrival_ns)
        for new, old in zip(changed.jobs, workload.jobs, strict=True)
    ]
    return replace(changed, jobs=jobs)


def long_enough(workload: Workload, full: BatchPoint, *, least_run_s: float = LEAST_RUN_S) -> Workload:
    """The workload, repeated until it lasts so long at the rate of a full batch; a queue needs time to grow."""
    num_tokens = sum(job.num_output_tokens for job in workload.jobs)
    wanted = math.ceil(least_run_s * full.rate / num_arrivals(workload))
    most_tokens = min(MOST_TOKENS, MOST_STEPS * full.num_rows)
    times = min(wanted, most_tokens // num_tokens, MOST_REQUESTS // len(workload.jobs))
    return repeat(workload, times) if times > 1 else workload


# The search


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The outcome of a bisection over the rate."""

    best: Trial | None
    """The highest rate that held; None: not even the lowest did."""
    failed: Trial | None
    """The lowest rate that failed; None: the server is saturated before the SLOs fail."""
    saturated_rate: float
    """Requests per second of a server that always has enough of them."""
    trials: Sequence[Trial]

    @property
    def rate(self) -> float:
        """Requests per second; 0 if no rate holds."""
        return self.best.rate if self.best else 0.0


def highest_rate(attempt: Callable[[float], Trial], saturated_rate: float, *, tolerance: float = TOLERANCE) -> Search:
    """Bisection on a logarithmic scale between `LEAST_SHARE` of the saturated rate and all of it.

    `attempt` runs the workload at a rate. The search takes it that a lower rate is never worse, which holds up to the noise of
    single requests; the answer is a rate that was tried and held, next to one that was tried and failed.
    """
    trials = [attempt(saturated_rate)]
    if trials[0].holds:
        return Search(best=trials[0], failed=None, saturated_rate=saturated_rate, trials=trials)
    failed = trials[0]
    best = attempt(LEAST_SHARE * saturated_rate)
    trials.append(best)
    if not best.holds:
        return Search(best=None, failed=best, saturated_rate=saturated_rate, trials=trials)
    while failed.rate > best.rate * (1 + tolerance):
        trial = attempt(math.sqrt(best.rate * failed.rate))
        trials.append(trial)
        best, failed = (trial, failed) if trial.holds else (best, trial)
    return Search(best=best, failed=failed, saturated_rate=saturated_rate, trials=trials)


def saturated_rate(outcome: Outcome, workload: Workload) -> float:
    """Arrivals per second that a server keeps up with, from a run in which all requests came at once.

    Counted between a tenth and nine tenths of the ends, so that neither the begin, when all prompts are computed, nor the tail
    with its last few rows has a part; or over the whole run where that is more.
    """
    ends = sorted(record.ended_ns for record in outcome.records)
    low, high = (int(share * (len(ends) - 1)) for share in _MIDDLE)
    requests_per_s = len(ends) / max(1, ends[-1]) * NS_PER_S
    if ends[high] > ends[low]:
        requests_per_s = max(requests_per_s, (high - low) / (ends[high] - ends[low]) * NS_PER_S)
    return requests_per_s * num_arrivals(workload) / len(workload.jobs)


def search(candidate: Candidate, workload: Workload, slos: Sequence[Slo], *, goal: float, seed: int) -> Search:
    """The highest rate at which the candidate holds the SLOs for the share `goal` of the workload's requests."""

    def attempt(rate: float) -> Trial:
        return make_trial(candidate.run(at_rate(workload, rate, seed)), rate, slos, goal)

    return highest_rate(attempt, find_saturated_rate(candidate, workload))


def find_saturated_rate(candidate: Candidate, workload: Workload) -> float:
    """Arrivals per second that the candidate keeps up with, from a run in which all requests come at once.

    A short workload is repeated. Where that would be too long, the rate is that of a full batch at most; cached prefixes may
    make the true one higher.
    """
    simulation, num_jobs = candidate.simulation, len(workload.jobs)
    full = fullest_batch(simulation.cost, lengths_of(workload.jobs), simulation.capacity)
    wanted = math.ceil(_FILLS * full.num_rows / num_jobs)
    times = max(1, min(wanted, _MOST_SATURATED_TOKENS // sum(job.num_output_tokens for job in workload.jobs)))
    longer = repeat(workload, times) if times > 1 else workload
    rate = saturated_rate(candidate.run(at_rate(longer, math.inf, 0)), longer)
    return rate if times >= wanted else min(rate, full.rate * num_arrivals(workload) / num_jobs)


# What binds


class Gain(NamedTuple):
    """How many times as high the highest rate would be: for the goal, and where as many more requests may fail as chance alone
    makes fail."""

    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The answer to: what would help? Rates are tried in steps of `STEP`, so that gains are known to 12 %."""

    before: float
    """Multiple of the highest rate that held in these steps: 1, or more where the server was saturated or requests are few; 0:
    no rate holds."""
    gains: Mapping[Resource, Gain]
    """Resource -> the gain with twice as much of it; where no rate holds, more than 0 if one would."""

    @property
    def resources(self) -> Sequence[Resource]:
        """Those that bind, in the order of what they cost: the one that helps most, and others whose gain is not surely less,
        as it overlaps or is one step below. None: no one alone helps."""
        top = max(self.gains.values(), key=lambda gain: (gain.most, gain.least))
        floor = 1.0 if self.before else 0.0
        bound = max(floor, top.least / STEP * (1 - 1e-9))
        return [one for one in RESOURCE_WORDS if self.gains[one].most > floor and self.gains[one].most >= bound]

    @property
    def is_known(self) -> bool:
        """The requests are enough for a rate at which the SLOs fail."""
        return self.before < STEP ** (NUM_STEPS - 1) * (1 - 1e-9)

    @property
    def is_clear(self) -> bool:
        """One resource binds, and its gain is more than chance."""
        return len(self.resources) == 1 and self.gains[self.resources[0]].least > (1.0 if self.before else 0.0)

    @property
    def words(self) -> str:
        """Those that bind, in a few words."""
        if not self.is_known:
            return "unknown"
        names = " or ".join(filter(None, (", ".join(self.resources[:-1]), *self.resources[-1:]))) or "nothing alone"
        return names if self.is_clear or len(self.resources) != 1 else f"perhaps {names}"

    @property
    def reason(self) -> str:
        """Some sentences."""
        if not self.is_known:
            return "The requests are too few to tell: even 2.5 times the rate that the server keeps up with breaks no SLO."
        told = [f"{words}: {self._words(resource)}" for resource, words in RESOURCE_WORDS.items()]
        if not self.resources:
            return f"Twice as much of any one of them does not raise the rate ({'; '.join(told)})."
        if not self.before:
            return f"No rate holds; one would with {' or with '.join(RESOURCE_WORDS[one] for one in self.resources)}."
        doubt = "" if self.is_clear else "Which one is not clear: their gains differ by no more than chance, or one step. "
        if len(self.resources) == 1 and doubt:
            doubt = "That is not clear: the gain may be chance. "
        return f"{doubt}The highest rate would be, with {'; with '.join(told)}."

    def _words(self, resource: Resource) -> str:
        gain = self.gains[resource]
        if not gain.most:
            return "none"
        more = " or more" if (self.before or 1.0) * gain.most >= STEP ** (NUM_STEPS - 1) * (1 - 1e-9) else ""
        shown = [f"{value:.2g}" for value in gain]
        if shown == ["1", "1"]:
            return "the same"
        return f"{shown[0] if shown[0] == shown[1] else ' to '.join(shown)} times as high{more}"


def find_binding(
    candidate: Candidate, workload: Workload, slos: Sequence[Slo], found: Search, *, goal: float, seed: int
) -> Binding:
    """The resources whose doubling raises the highest rate most.

    Only one thing is changed at a time, so two that bind together show as none that helps.
    """
    rate = found.rate or (found.failed.rate if found.failed else found.saturated_rate)
    trials: dict[tuple[Resource | None, int], Trial] = {}

    def attempt(resource: Resource | None, step: int) -> Trial:
        if (resource, step) not in trials:
            tried = rate * STEP**step
            server = candidate if resource is None else candidate.doubled(resource)
            jobs = at_rate(workload, tried, seed)
            if resource is Resource.QUEUE:
                jobs = arrive(jobs, constant(num_arrivals(jobs), tried), "even gaps")
            trials[resource, step] = make_trial(server.run(jobs), tried, slos, goal)
        return trials[resource, step]

    def multiple(resource: Resource | None, *, is_lenient: bool) -> float:
        def holds(step: int) -> bool:
            trial = attempt(resource, step)
            return trial.nearly_holds if is_lenient else trial.holds

        low = 0 if found.best is not None or holds(0) else -1  # held at the highest rate, and so with more of something
        high = NUM_STEPS if low == 0 and holds(1) else 1
        low = min(1, high - 1) if low == 0 else low
        while low >= 0 and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return STEP**low if low >= 0 else 0.0

    # The same steps with nothing doubled: what chance lets through there is no gain.
    before = multiple(None, is_lenient=False)
    after = {resource: multiple(resource, is_lenient=False) for resource in Resource}
    gains = {resource: Gain(value / (before or 1.0), value / (before or 1.0)) for resource, value in after.items()}
    if before:
        least = max(before, max(after.values()) / STEP**_NEAR_STEPS) * (1 + 1e-9)
        nearly = multiple(None, is_lenient=True)
        for resource, value in after.items():
            if value >= least:
                gain, other = value / before, multiple(resource, is_lenient=True) / nearly
                gains[resource] = Gain(min(gain, other), max(gain, other))
    return Binding(before=before, gains=gains)


def times_words(stress: float) -> str:
    """`1.31 x`"""
    return "beyond" if math.isinf(stress) else f"{stress:.2f} x"


# Replicas and cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The fewest replicas that hold the SLOs at a rate."""

    rate: float
    """Requests per second, of all replicas together."""
    headroom: float
    """Share of the replicas' rate that stays free: they hold the SLOs at `rate` / (1 - headroom)."""
    num_groups: int
    """Equal groups of replicas, to which requests go in turn; one was simulated, with its share of them. 1: all were."""
    num_in_group: int
    load: float
    """`rate` over what the replicas keep up with at all."""
    held: Trial | None
    """One group; None: the rate with the headroom is not above the highest one of a single replica."""
    failed: Trial | None
    """One group with a replica less; None: it was not tried, as so few do not keep up, or are the one of the search."""

    @property
    def num_replicas(self) -> int:
        return self.num_groups * self.num_in_group


def find_fleet(
    candidate: Candidate,
    workload: Workload,
    slos: Sequence[Slo],
    rate: float,
    found: Search,
    *,
    goal: float = DEFAULT_GOAL,
    headroom: float = 0.0,
    seed: int = 0,
    make_router: Callable[[], Router] = RoundRobin,
    least_run_s: float = LEAST_RUN_S,
) -> Fleet | None:
    """The fewest replicas behind a router that hold the SLOs at a rate, in runs of the workload at that rate; None if
    `MOST_REPLICAS` do not.

    Dividing by the highest rate of one replica would ask for too many: at a lower rate its bursts are as large, only stretched,
    while several replicas share each. `found`: the search with one replica. Raises ConfigError for a rate with which so many do
    not keep up.
    """
    planned = rate / (1 - headroom)
    if planned <= found.rate:
        return Fleet(
            rate=rate,
            headroom=headroom,
            num_groups=1,
            num_in_group=1,
            load=rate / found.saturated_rate,
            held=None,
            failed=None,
        )
    if planned > MOST_REPLICAS * found.saturated_rate:
        raise ConfigError(
            f"With {planned:.3g} requests/s not even {MOST_REPLICAS} of these servers keep up.",
            remedy="Plan for a part of that rate (--rate), and multiply.",
        )
    num_groups, jobs = _dealt(workload, planned, found, least_run_s)
    share = planned / num_groups
    least = max(2, math.ceil(share / found.saturated_rate - 1e-9))
    jobs = at_rate(jobs, share, seed)

    def attempt(num_replicas: int) -> Trial:
        cluster = Cluster(
            settings=candidate.simulation,
            num_replicas=num_replicas,
            make_router=make_router,
            max_tokens=candidate.simulation.max_tokens,
            max_returns=candidate.simulation.max_returns,
            seed=candidate.simulation.seed,
        )
        return make_trial(cluster.run(jobs), share, slos, goal)

    fewest = fewest_replicas(attempt, least, MOST_REPLICAS // num_groups)
    if fewest is None:
        return None
    num_in_group, held, failed = fewest
    return Fleet(
        rate=rate,
        headroom=headroom,
        num_groups=num_groups,
        num_in_group=num_in_group,
        load=rate / (num_groups * num_in_group * found.saturated_rate),
        held=held,
        failed=failed,
    )


def _dealt(workload: Workload, rate: float, found: Search, least_run_s: float) -> tuple[int, Workload]:
    """Groups of replicas, and the requests that one of them gets.

    The workload is repeated until it lasts at that rate about as long as with one replica, or as a queue needs to grow.
    """
    count, tried = num_arrivals(workload), found.best or found.failed
    wanted_s = max(least_run_s, MIN_SPANS * tried.mean_e2e_s if tried else 0.0)
    if found.best is not None:
        wanted_s = min(wanted_s, count / found.best.rate)
    num_tokens, least = sum(job.num_output_tokens for job in workload.jobs), rate / found.saturated_rate
    most_tokens = max(MOST_FLEET_TOKENS, math.ceil(least) * MOST_TOKENS)
    times = max(1, min(round(wanted_s * rate / count), MOST_FLEET_REQUESTS // len(workload.jobs), most_tokens // num_tokens))
    most = max(1, int(least / LEAST_GROUP))
    near = min(most, max(1, math.ceil(least / MOST_GROUP), times * num_tokens // MOST_FLEET_TOKENS))
    # With a common divisor a group would be sent the same requests in each repeat.
    numbers = (*range(near, most + 1), *range(near, 0, -1))
    num_groups = next(number for number in numbers if times == 1 or math.gcd(number, count) == 1)
    longer = repeat(workload, times) if times > 1 else workload
    return num_groups, every(longer, num_groups) if num_groups > 1 else longer


def fewest_replicas(
    attempt: Callable[[int], Trial], least: int, most: int = MOST_REPLICAS
) -> tuple[int, Trial, Trial | None] | None:
    """The fewest from `least` on that hold, with their trial and the failed one of a replica less; None if `most` fail.

    Steps of doubling size, then bisection: few trials where the number is near to `least`, as it is without bursts.
    """
    low, high, step, failed = least - 1, least, 1, None
    while not (held := attempt(high)).holds:
        if high >= most:
            return None
        low, failed = high, held
        high, step = min(most, high + step), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        trial = attempt(middle)
        if trial.holds:
            high, held = middle, trial
        else:
            low, failed = middle, trial
    return high, held, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The cost of tokens. Replicas are paid for whether they have work or not."""

    price_per_hour: float
    """Price of all replicas."""
    price_per_million_output_tokens: float
    price_per_million_tokens: float
    """Price of tokens of prompts and answers together."""


def make_bill(rate: float, num_replicas: int, lengths: Lengths, *, price_per_hour: float) -> Bill:
    """`rate`: requests per second, of all replicas together; `price_per_hour`: of one replica."""
    total = price_per_hour * num_replicas
    per_million = total / 3600 / rate * 1e6
    return Bill(
        price_per_hour=total,
        price_per_million_output_tokens=per_million / lengths.mean_output,
        price_per_million_tokens=per_million / (lengths.mean_prompt + lengths.mean_output),
    )


# Queues


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Waits by the formulas of `queueing`, at one utilisation."""

    utilisation: float
    """Share of the rate of a full batch."""
    rate: float
    num_rows: int
    """Requests in the server on average, by Little's law."""
    tpot_ns: float
    row_s: float
    """Mean wait for a row of the batch: M/G/k."""
    p99_row_s: float
    prompt_s: float
    """Mean wait behind other prompts: M/G/1; infinite if prompts come faster than one after another they are computed."""


def queue_table(candidate: Candidate, lengths: Lengths) -> Sequence[Wait]:
    """Waits of Poisson arrivals by formulas, at some utilisations of the full batch. The plan itself goes by the simulation."""
    capacity, cost = candidate.simulation.capacity, candidate.simulation.cost
    top = fullest_batch(cost, lengths, capacity)
    service_s = top.num_rows / top.rate
    table = []
    for utilisation in UTILISATIONS:
        rate = utilisation * top.rate
        num_rows = next(
            rows
            for rows in range(1, top.num_rows + 1)
            if rows == top.num_rows or batch_point(rows, cost, lengths, capacity).rate >= rate
        )
        point = batch_point(num_rows, cost, lengths, capacity)
        prompt_s = point.prompt_ns / NS_PER_S
        queue = (top.num_rows, rate, service_s, lengths.output_cv)
        table.append(
            Wait(
                utilisation=utilisation,
                rate=rate,
                num_rows=num_rows,
                tpot_ns=point.tpot_ns,
                row_s=queueing.mean_wait(*queue),
                p99_row_s=queueing.wait_quantile(0.99, *queue),
                prompt_s=math.inf if rate * prompt_s >= 1 else queueing.mean_wait(1, rate, prompt_s, lengths.prompt_cv),
            )
        )
    return table


# What is not known


def warnings(candidate: Candidate, workload: Workload, found: Search | None, fleet: Fleet | None) -> Sequence[str]:
    """Everything that makes the answer less than certain, in sentences."""
    told = list(candidate.doubts)
    if found is None:
        return told
    best = found.best
    if best is not None and best.num_outside:
        told.append(
            f"{best.num_outside / best.num_steps:.0%} of the steps lie outside of the range that the cost model was fitted to: "
            "their times are extrapolated."
        )
    for trial in (best, fleet.held if fleet else None):
        if trial is not None and trial.duration_s < MIN_SPANS * trial.mean_e2e_s:
            told.append(
                f"The run at {trial.rate:.3g} requests/s lasts {trial.duration_s:.3g} s, and a request "
                f"{trial.mean_e2e_s:.3g} s: queues have hardly time to grow. Take more requests."
            )
    if best is not None and best.rate > SATURATED * found.saturated_rate:
        told.append(
            f"At {best.rate:.3g} requests/s the server is all but saturated: in a longer run its queue would be longer. "
            "Give --headroom 10%, or more requests."
        )
    if best is not None and best.num_requests * (1 - best.goal) < 5:
        told.append(
            f"{best.num_requests} requests are few for a goal of {best.goal:.4g}: "
            f"it is decided by {math.floor(best.num_requests * (1 - best.goal))} of them. Take more requests."
        )
    if mean_rate(workload) is None:
        told.append("The workload has no arrivals of its own: they are taken for Poisson. Real traffic is burstier.")
    return told


# All of it, for one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A deployment on one machine."""

    hardware: Hardware
    candidate: Candidate
    lengths: Lengths
    workload: str
    """Its name."""
    own_rate: float | None
    """The workload's arrivals per second; None: all come at once."""
    slos: Sequence[Slo]
    goal: float
    lines: Sequence[Line]
    batches: Sequence[BatchPoint]
    waits: Sequence[Wait]
    search: Search | None
    """None: there is no SLO to hold."""
    binding: Binding | None
    router: str
    """Its name, which says how requests are shared among replicas."""
    fleet: Fleet | None
    """None: no rate was wanted that some replicas hold."""
    bill: Bill | None
    """None: there is no fleet, or no price."""
    warnings: Sequence[str]


def plan(
    candidate: Candidate,
    hardware: Hardware,
    workload: Workload,
    slos: Sequence[Slo],
    *,
    goal: float = DEFAULT_GOAL,
    rate: float | None = None,
    headroom: float = 0.0,
    router: str = "round-robin",
    price_per_hour: float | None = None,
    seed: int = 0,
    least_run_s: float = LEAST_RUN_S,
) -> Sized:
    """The arithmetic, and with SLOs the highest rate, what binds there, and the bill.

    `rate`: requests per second that are to be served; None: those of the workload, or else as many as one replica can.
    `router`: as `find_router` takes it.
    """
    make_router = find_router(router)
    if not 0 < goal <= 1:
        raise ConfigError(f"The goal is {goal:g}.", remedy="Set it above 0 and to 1 at most, such as 99%.")
    if not 0 <= headroom < 1:
        raise ConfigError(f"The headroom is {headroom:g}.", remedy="Set it from 0 to less than 1, such as 20%.")
    capacity, cost = candidate.simulation.capacity, candidate.simulation.cost
    lengths = lengths_of(workload.jobs)
    too_long = lengths.longest - capacity.max_model_len
    if too_long > 0:
        raise ConfigError(
            f"The longest request has {lengths.longest} tokens, and this server takes {capacity.max_model_len}.",
            remedy="Shorten the workload (--max-input-tokens, --divide-lengths), or give more memory or another model.",
        )
    tpot_limit_ns = next((slo.limit_ns for slo in slos if slo.metric in ("tpot", "itl")), None)
    served = long_enough(workload, fullest_batch(cost, lengths, capacity), least_run_s=least_run_s)
    found = search(candidate, served, slos, goal=goal, seed=seed) if slos else None
    binding = find_binding(candidate, served, slos, found, goal=goal, seed=seed) if found else None
    fleet = bill = None
    wanted = rate or mean_rate(workload) or (found.rate if found else 0.0)
    # Where no rate holds but for even arrivals, bursts are to blame, and replicas share those.
    if found and binding and wanted and (found.best or binding.gains[Resource.QUEUE].most):
        fleet = find_fleet(
            candidate,
            served,
            slos,
            wanted,
            found,
            goal=goal,
            headroom=headroom,
            seed=seed,
            make_router=make_router,
            least_run_s=least_run_s,
        )
    price = hardware.price_per_hour if price_per_hour is None else price_per_hour
    if fleet is not None and price is not None:
        bill = make_bill(fleet.rate, fleet.num_replicas, lengths, price_per_hour=price)
    return Sized(
        hardware=hardware,
        candidate=candidate,
        lengths=lengths,
        workload=workload.name,
        own_rate=mean_rate(workload),
        slos=slos,
        goal=goal,
        lines=arithmetic(candidate.size, capacity, lengths, cost, candidate.rates, tpot_limit_ns=tpot_limit_ns),
        batches=batch_table(cost, lengths, capacity),
        waits=queue_table(candidate, lengths),
        search=found,
        binding=binding,
        router=router,
        fleet=fleet,
        bill=bill,
        warnings=warnings(candidate, workload, found, fleet),
    )
