"""The size of a deployment: the highest rate that holds the SLOs, what binds there, replicas and cost.

`cli.plan` calls it. The searches run in the simulator; `sizing` has the arithmetic, `queueing` the formulas of waits. The
highest rate is a statement about this workload: its lengths, its order and the shape of its arrivals. docs/plan.md explains
every search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.lab import queueing
from penstock.lab.arrivals import arrive, constant, mean_rate, num_arrivals, poisson
from penstock.lab.figures import Samples, Slo
from penstock.lab.hardware import Hardware
from penstock.lab.intervals import Estimate, share_estimate
from penstock.lab.records import End
from penstock.lab.routers import find_router
from penstock.lab.simulation import Cluster, Outcome, Simulation
from penstock.lab.sizing import (
    BatchPoint,
    Lengths,
    ModelSize,
    Speeds,
    batch_point,
    batch_table,
    fullest_batch,
    lengths_of,
    roofline,
    with_more_bandwidth,
    with_more_compute,
)
from penstock.lab.transforms import at_instants, every, repeat
from penstock.lab.workload import NS_PER_S, Workload
from penstock.types.errors import ConfigError

LEAST_SHARE = 0.01
"""The search begins at this share of the saturated rate. If the SLOs fail there, no rate holds them."""
STEP = 1.12
"""Ratio of neighbouring rates in the search for what binds."""
NUM_STEPS = 9
"""Rates in that search, from the highest rate up to 2.5 times it."""
UTILISATIONS = (0.5, 0.7, 0.8, 0.9, 0.95)
MIN_SPANS = 10
"""A run should last this many times as long as a request, so that queues have time to grow."""
MOST_REQUESTS, MOST_TOKENS, MOST_STEPS = 1_000, 40_000, 5_000
"""Limits of the repeated workload: requests, output tokens, steps of a full batch. A run takes about half a second."""
MOST_FLEET_REQUESTS, MOST_FLEET_TOKENS = 100_000, 100_000
"""Limits of a run of several replicas; tokens are `MOST_TOKENS` for each, if that is more. Beyond, one group of them runs."""
LEAST_GROUP, MOST_GROUP, MOST_REPLICAS = 4, 16, 256
"""Replicas of a group at the rate that they just keep up with, and of all groups together."""
_FILLS, _MOST_SATURATED_TOKENS = 16, 400_000
"""A saturated server is timed over this many full batches, as the prompts of the first one come all at once. The limit of the
output tokens keeps that to seconds."""


class Resource(StrEnum):
    """A thing that a server can have too little of."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    MEMORY = "memory"
    ROWS = "rows"
    """Requests in one step (`--max-num-seqs`)."""
    QUEUE = "queue"
    """Arrivals come in bursts and wait, although the server is fast enough on average."""


REMEDIES: Mapping[Resource, tuple[str, str]] = {
    Resource.ROWS: ("twice the rows of a step", "a higher --max-num-seqs"),
    Resource.MEMORY: ("twice the KV cache", "more --kv-cache-memory, --kv-cache-dtype int8, or shorter requests"),
    Resource.QUEUE: ("arrivals at even gaps", "a looser TTFT, or more replicas than the mean rate needs"),
    Resource.BANDWIDTH: (
        "twice the memory bandwidth",
        "a machine with more bandwidth, weights or KV of fewer bits, or a smaller model",
    ),
    Resource.COMPUTE: (
        "multiply-adds twice as fast",
        "more cores or a faster machine, a smaller model, or shorter prompts",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    simulation: Simulation
    size: ModelSize
    rates: Speeds
    is_fitted: bool
    """The simulation's cost model comes from a file, not from the roofline."""
    doubts: Sequence[str] = ()
    """Sentences on what is assumed about model, memory and step times."""

    def run(self, workload: Workload) -> Outcome:
        return self.simulation.run(workload)

    def doubled(self, resource: Resource) -> Candidate:
        """Return the same server with twice as much of one resource. `QUEUE` changes nothing."""
        simulation, rates = self.simulation, self.rates
        capacity, cost = simulation.capacity, simulation.cost
        match resource:
            case Resource.COMPUTE:
                cost, rates = with_more_compute(cost, 2.0), replace(rates, ops_per_s=2 * rates.ops_per_s)
            case Resource.BANDWIDTH:
                cost, rates = with_more_bandwidth(cost, 2.0), replace(rates, read_bytes_per_s=2 * rates.read_bytes_per_s)
            case Resource.MEMORY:
                capacity = replace(capacity, num_blocks=2 * capacity.num_blocks - 1)
            case Resource.ROWS:
                capacity = replace(capacity, max_rows=2 * capacity.max_rows)
        if rates != self.rates and not self.is_fitted:
            cost = roofline(self.size, rates)
        return replace(self, simulation=replace(simulation, capacity=capacity, cost=cost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    slos: Sequence[Slo] = ()
    goal: float = 0.99
    """Share of the requests that must hold every SLO."""
    rate: float | None = None
    """Requests per second to serve. None takes the workload's, or else what one replica can serve."""
    headroom: float = 0.0
    """Share of the replicas' rate that stays free: they hold the SLOs at `rate` / (1 - headroom)."""
    router: str = "round-robin"
    price_per_hour: float | None = None
    seed: int = 0
    least_run_s: float = 30.0
    """A shorter workload is repeated until it lasts this long on a full server."""


# Trials


class Trial(NamedTuple):
    rate: float
    """Arrivals per second; infinity means all at once."""
    num_requests: int
    num_good: int
    goal: float
    stress: float
    """The factor by which the limits would have to be longer for the goal to be just met; below 1 there is room."""
    by_slo: Mapping[str, float]
    duration_s: float
    mean_e2e_s: float
    kv_share: float
    """Mean share of the KV cache that requests held, over time and replicas."""
    mean_running: float
    """Mean number of running requests over time, in all replicas together."""
    num_outside: int
    num_steps: int
    attainment: Estimate

    @property
    def holds(self) -> bool:
        return self.num_good >= self.goal * self.num_requests

    @property
    def nearly_holds(self) -> bool:
        """Whether it holds if one standard deviation of the failures is taken for chance."""
        return self.num_good >= self.goal * self.num_requests - math.sqrt(self.num_requests * self.goal * (1 - self.goal))

    @property
    def worst_slo(self) -> str:
        return max(self.by_slo, key=lambda name: self.by_slo[name])


def make_trial(outcome: Outcome, rate: float, asked: Requirements) -> Trial:
    samples = Samples.of(outcome.records)
    counted = samples.end != list(End).index(End.CANCELLED)
    if not counted.any():
        raise ConfigError("The clients of all requests went away.", remedy="Lower --cancel-share.")
    ratios = {str(slo): _ratios(samples, slo)[counted] for slo in asked.slos}
    worst = np.maximum.reduce(list(ratios.values()))
    means = [timeline.means(max(1, outcome.duration_ns)) for timeline in outcome.timelines.values()]
    seconds = (samples.ended_ns - samples.intended_ns)[counted] / NS_PER_S
    return Trial(
        rate=rate,
        num_requests=len(worst),
        num_good=int((worst <= 1).sum()),
        goal=asked.goal,
        stress=_quantile(worst, asked.goal),
        by_slo={name: _quantile(values, asked.goal) for name, values in ratios.items()},
        duration_s=outcome.duration_ns / NS_PER_S,
        mean_e2e_s=float(seconds.mean()),
        kv_share=fmean(held for _, _, held in means),
        mean_running=sum(running for running, _, _ in means),
        num_outside=outcome.num_outside,
        num_steps=outcome.num_steps,
        attainment=share_estimate(worst <= 1, seconds),
    )


def _ratios(samples: Samples, slo: Slo) -> NDArray[np.float64]:
    values = samples.longest_gap_ns if slo.metric == "itl" else samples.latency_ns(slo.metric)
    ratios = np.maximum(values, 0) / slo.limit_ns
    return np.where(samples.holds(slo), np.minimum(ratios, 1.0), np.where(values > slo.limit_ns, ratios, np.inf))


def _quantile(values: NDArray[np.float64], share: float) -> float:
    return float(np.sort(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)])


def at_rate(workload: Workload, rate: float, seed: int) -> Workload:
    """Return the workload at another mean rate. Think times stay, all other gaps are scaled by one factor.

    Arrivals are Poisson if all came at once. The same seed gives the same arrivals but for the factor, so two rates differ in
    nothing else. A rate of infinity is all at once.
    """
    if math.isinf(rate):
        return arrive(workload, [0] * num_arrivals(workload), "all at once")
    own_rate = mean_rate(workload)
    if own_rate is not None:
        jobs = [at_instants(job, lambda at_ns: round(at_ns / (rate / own_rate))) for job in workload.jobs]
        return replace(workload, jobs=jobs, name=f"{workload.name}, {rate:.3g} requests/s")
    rng = Random(seed)  # noqa: S311  # repeatable on purpose
    return arrive(workload, poisson(rng, num_arrivals(workload), rate), f"{rate:.3g} requests/s, Poisson")


def long_enough(workload: Workload, full: BatchPoint, least_run_s: float) -> Workload:
    """Return the workload, repeated until it lasts this long at the rate of a full batch. A queue needs time to grow."""
    num_tokens = sum(job.num_output_tokens for job in workload.jobs)
    wanted = math.ceil(least_run_s * full.rate / num_arrivals(workload))
    most_tokens = min(MOST_TOKENS, MOST_STEPS * full.num_rows)
    return repeat(workload, max(1, min(wanted, most_tokens // num_tokens, MOST_REQUESTS // len(workload.jobs))))


# The search


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    saturated_rate: float
    trials: Sequence[Trial]

    @property
    def best(self) -> Trial | None:
        """The highest rate that held, or None if not even the lowest did."""
        return max((trial for trial in self.trials if trial.holds), key=lambda trial: trial.rate, default=None)

    @property
    def failed(self) -> Trial | None:
        """The lowest rate that failed, or None if the server is saturated before the SLOs fail."""
        return min((trial for trial in self.trials if not trial.holds), key=lambda trial: trial.rate, default=None)

    @property
    def rate(self) -> float:
        return self.best.rate if self.best else 0.0


def highest_rate(attempt: Callable[[float], Trial], saturated_rate: float) -> Search:
    """Find the highest rate that holds, to 2 %, between `LEAST_SHARE` of the saturated rate and all of it.

    `attempt` runs the workload at a rate. The bisection assumes that a lower rate is never worse, which is true but for the
    noise of single requests.
    """
    trials = [failed := attempt(saturated_rate)]
    if not failed.holds:
        trials.append(best := attempt(LEAST_SHARE * saturated_rate))
        while best.holds and failed.rate > best.rate * 1.02:
            trials.append(trial := attempt(math.sqrt(best.rate * failed.rate)))
            best, failed = (trial, failed) if trial.holds else (best, trial)
    return Search(saturated_rate=saturated_rate, trials=trials)


def saturated_rate(outcome: Outcome, workload: Workload) -> float:
    """Return the arrivals per second that a server keeps up with, from a run in which all requests came at once.

    They are counted between a tenth and nine tenths of the ends, where neither the first prompts nor the last few rows have a
    part; or over the whole run if that gives more.
    """
    ends = sorted(record.ended_ns for record in outcome.records)
    low, high = (int(share * (len(ends) - 1)) for share in (0.1, 0.9))
    requests_per_s = len(ends) / max(1, ends[-1]) * NS_PER_S
    if ends[high] > ends[low]:
        requests_per_s = max(requests_per_s, (high - low) / (ends[high] - ends[low]) * NS_PER_S)
    return requests_per_s * num_arrivals(workload) / len(workload.jobs)


def search(candidate: Candidate, workload: Workload, asked: Requirements) -> Search:

    def attempt(rate: float) -> Trial:
        return make_trial(candidate.run(at_rate(workload, rate, asked.seed)), rate, asked)

    return highest_rate(attempt, find_saturated_rate(candidate, workload))


def find_saturated_rate(candidate: Candidate, workload: Workload) -> float:
    """Return the arrivals per second that the candidate keeps up with, from a run in which all requests come at once.

    A short workload is repeated. Where that would take too long, the rate is at most that of a full batch; cached prefixes may
    make the true one higher.
    """
    simulation, num_jobs = candidate.simulation, len(workload.jobs)
    full = fullest_batch(simulation.cost, lengths_of(workload.jobs), simulation.capacity)
    wanted = math.ceil(_FILLS * full.num_rows / num_jobs)
    times = max(1, min(wanted, _MOST_SATURATED_TOKENS // sum(job.num_output_tokens for job in workload.jobs)))
    longer = repeat(workload, times)
    rate = saturated_rate(candidate.run(at_rate(longer, math.inf, 0)), longer)
    return rate if times >= wanted else min(rate, full.rate * num_arrivals(workload) / num_jobs)


# What binds


class Gain(NamedTuple):
    """By what factor the highest rate grows: by strict and by lenient counts, where chance failures are forgiven."""

    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Limits that bind, and the gain of raising each. Rates are tried in steps of `STEP`, so gains are known to 12 %."""

    before: float
    """The multiple of the highest rate that held in these steps: 1, more where the server was saturated or requests are few,
    or 0 if no rate holds."""
    gains: Mapping[Resource, Gain]
    """Resource -> the gain with twice as much of it. Where no rate holds, it is above 0 if one would."""

    @property
    def resources(self) -> Sequence[Resource]:
        top = max(self.gains.values(), key=lambda gain: (gain.most, gain.least))
        floor = 1.0 if self.before else 0.0
        bound = max(floor, top.least / STEP * (1 - 1e-9))
        return [one for one in REMEDIES if self.gains[one].most > floor and self.gains[one].most >= bound]

    @property
    def is_known(self) -> bool:
        """Whether the requests are enough to find a rate at which the SLOs fail."""
        return not _is_top(self.before)

    @property
    def is_clear(self) -> bool:
        return len(self.resources) == 1 and self.gains[self.resources[0]].least > (1.0 if self.before else 0.0)

    @property
    def words(self) -> str:
        if not self.is_known:
            return "unknown"
        names = " or ".join(filter(None, (", ".join(self.resources[:-1]), *self.resources[-1:]))) or "nothing alone"
        return names if self.is_clear or len(self.resources) != 1 else f"perhaps {names}"

    @property
    def reason(self) -> str:
        if not self.is_known:
            return "The requests are too few to tell: even 2.5 times the rate that the server keeps up with breaks no SLO."
        gains = [f"{words}: {self._gain_words(resource)}" for resource, (words, _) in REMEDIES.items()]
        if not self.resources:
            return f"Twice as much of any one of them does not raise the rate ({'; '.join(gains)})."
        if not self.before:
            return f"No rate holds; one would with {' or with '.join(REMEDIES[one][0] for one in self.resources)}."
        doubt = ""
        if not self.is_clear and len(self.resources) == 1:
            doubt = "That is not clear: the gain may be chance. "
        elif not self.is_clear:
            doubt = "Which one is not clear: their gains differ by no more than chance, or one step. "
        return f"{doubt}The highest rate would be, with {'; with '.join(gains)}."

    def _gain_words(self, resource: Resource) -> str:
        gain = self.gains[resource]
        if not gain.most:
            return "none"
        shown = list(dict.fromkeys(f"{value:.2g}" for value in gain))
        more = " or more" if _is_top((self.before or 1.0) * gain.most) else ""
        return "the same" if shown == ["1"] else f"{' to '.join(shown)} times as high{more}"


def _is_top(multiple: float) -> bool:
    return multiple >= STEP ** (NUM_STEPS - 1) * (1 - 1e-9)


def find_binding(candidate: Candidate, workload: Workload, asked: Requirements, found: Search) -> Binding:
    """Find the resources whose doubling raises the highest rate most.

    Only one thing is changed at a time, so two that bind together show as none that helps.
    """
    rate = found.rate or (found.failed.rate if found.failed else found.saturated_rate)
    trials: dict[tuple[Resource | None, int], Trial] = {}

    def attempt(resource: Resource | None, step: int) -> Trial:
        if (resource, step) not in trials:
            tried = rate * STEP**step
            server = candidate if resource is None else candidate.doubled(resource)
            jobs = at_rate(workload, tried, asked.seed)
            if resource is Resource.QUEUE:
                jobs = arrive(jobs, constant(num_arrivals(jobs), tried), "even gaps")
            trials[resource, step] = make_trial(server.run(jobs), tried, asked)
        return trials[resource, step]

    def multiple(resource: Resource | None, *, is_lenient: bool) -> float:
        def holds(step: int) -> bool:
            trial = attempt(resource, step)
            return trial.nearly_holds if is_lenient else trial.holds

        # The highest rate held, so it holds with more of something.
        if found.best is None and not holds(0):
            return 0.0
        if not holds(1):
            return 1.0
        low, high = 1, NUM_STEPS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return STEP**low

    # The same steps with nothing doubled: a rate that holds by chance there is no gain.
    before = multiple(None, is_lenient=False)
    after = {resource: multiple(resource, is_lenient=False) for resource in Resource}
    gains = {resource: Gain(value / (before or 1.0), value / (before or 1.0)) for resource, value in after.items()}
    if before:
        # The lenient search is for resources that help and are at most three steps behind the best one.
        least = max(before, max(after.values()) / STEP**3) * (1 + 1e-9)
        nearly = multiple(None, is_lenient=True)
        for resource, value in after.items():
            if value >= least:
                gain, other = value / before, multiple(resource, is_lenient=True) / nearly
                gains[resource] = Gain(min(gain, other), max(gain, other))
    return Binding(before=before, gains=gains)


# Replicas and cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    rate: float
    num_groups: int
    """Equal groups of replicas that get requests in turn. One of them was simulated."""
    num_in_group: int
    load: float
    """`rate` over the rate that the replicas keep up with."""
    held: Trial | None
    failed: Trial | None
    """One group with a replica less, or None if that was not tried: so few do not keep up, or it is one replica."""

    @property
    def num_replicas(self) -> int:
        return self.num_groups * self.num_in_group


def find_fleet(candidate: Candidate, workload: Workload, asked: Requirements, found: Search, rate: float) -> Fleet | None:
    """Find the fewest replicas behind a router that hold the SLOs at a rate, or None if `MOST_REPLICAS` do not.

    Dividing by the highest rate of one replica would ask for too many: one replica takes each burst whole, several share it.
    `found` is the search with one replica. Raises ConfigError for a rate that `MOST_REPLICAS` do not keep up with.
    """
    planned, num_groups = rate / (1 - asked.headroom), 1
    fewest: tuple[int, Trial | None, Trial | None] | None = (1, None, None)
    if planned > MOST_REPLICAS * found.saturated_rate:
        raise ConfigError(
            f"With {planned:.3g} requests/s not even {MOST_REPLICAS} of these servers keep up.",
            remedy="Plan for a part of that rate (--rate), and multiply.",
        )
    if planned > found.rate:
        num_groups, jobs = _dealt(workload, planned, found, asked.least_run_s)
        share = planned / num_groups
        jobs, simulation = at_rate(jobs, share, asked.seed), candidate.simulation

        def attempt(num_replicas: int) -> Trial:
            cluster = Cluster(
                settings=simulation,
                num_replicas=num_replicas,
                make_router=find_router(asked.router),
                max_tokens=simulation.max_tokens,
                max_returns=simulation.max_returns,
                seed=simulation.seed,
            )
            return make_trial(cluster.run(jobs), share, asked)

        least = max(2, math.ceil(share / found.saturated_rate - 1e-9))
        fewest = fewest_replicas(attempt, least, MOST_REPLICAS // num_groups)
    if fewest is None:
        return None
    num_in_group, held, failed = fewest
    return Fleet(
        rate=rate,
        num_groups=num_groups,
        num_in_group=num_in_group,
        load=rate / (num_groups * num_in_group * found.saturated_rate),
        held=held,
        failed=failed,
    )


def _dealt(workload: Workload, rate: float, found: Search, least_run_s: float) -> tuple[int, Workload]:
    """Return the number of groups of replicas, and the requests that one of them gets.

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
    longer = repeat(workload, times)
    return num_groups, every(longer, num_groups) if num_groups > 1 else longer


def fewest_replicas(
    attempt: Callable[[int], Trial], least: int, most: int = MOST_REPLICAS
) -> tuple[int, Trial, Trial | None] | None:
    """Return the fewest replicas from `least` on that hold, their trial, and the failed one of a replica less, if tried.

    None if `most` fail. Steps of doubling size, then bisection: the number is near `least` unless arrivals come in bursts.
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
    price_per_million_output_tokens: float
    price_per_million_tokens: float


def make_bill(rate: float, num_replicas: int, lengths: Lengths, *, price_per_hour: float) -> Bill:
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
    utilisation: float
    rate: float
    num_rows: int
    """Requests in the server on average, by Little's law."""
    tpot_ns: float
    row_s: float
    """Mean wait for a row of the batch: M/G/k."""
    p99_row_s: float
    prompt_s: float


def queue_table(candidate: Candidate, lengths: Lengths) -> Sequence[Wait]:
    """Return the waits of Poisson arrivals by formulas. The plan itself uses the simulation."""
    capacity, cost = candidate.simulation.capacity, candidate.simulation.cost
    top = fullest_batch(cost, lengths, capacity)
    points = [batch_point(rows, cost, lengths, capacity) for rows in range(1, top.num_rows + 1)]
    table = []
    for utilisation in UTILISATIONS:
        rate = utilisation * top.rate
        point = next((point for point in points if point.rate >= rate), points[-1])
        prompt_s = point.prompt_ns / NS_PER_S
        queue = (top.num_rows, rate, top.num_rows / top.rate, lengths.output_cv)
        table.append(
            Wait(
                utilisation=utilisation,
                rate=rate,
                num_rows=point.num_rows,
                tpot_ns=point.tpot_ns,
                row_s=queueing.mean_wait(*queue),
                p99_row_s=queueing.wait_quantile(0.99, *queue),
                prompt_s=math.inf if rate * prompt_s >= 1 else queueing.mean_wait(1, rate, prompt_s, lengths.prompt_cv),
            )
        )
    return table


# What is not known


def warnings(workload: Workload, found: Search, fleet: Fleet | None) -> Iterator[str]:
    best = found.best
    if best is not None and best.num_outside:
        yield (
            f"{best.num_outside / best.num_steps:.0%} of the steps lie outside of the range that the cost model was fitted to: "
            "their times are extrapolated."
        )
    for trial in (best, fleet.held if fleet else None):
        if trial is not None and trial.duration_s < MIN_SPANS * trial.mean_e2e_s:
            yield (
                f"The run at {trial.rate:.3g} requests/s lasts {trial.duration_s:.3g} s, and a request "
                f"{trial.mean_e2e_s:.3g} s: queues have hardly time to grow. Take more requests."
            )
    if best is not None and best.rate > 0.95 * found.saturated_rate:
        yield (
            f"At {best.rate:.3g} requests/s the server is all but saturated: in a longer run its queue would be longer. "
            "Give --headroom 10%, or more requests."
        )
    if best is not None and best.num_requests * (1 - best.goal) < 5:
        yield (
            f"{best.num_requests} requests are few for a goal of {best.goal:.4g}: "
            f"it is decided by {math.floor(best.num_requests * (1 - best.goal))} of them. Take more requests."
        )
    if mean_rate(workload) is None:
        yield "The workload has no arrivals of its own: they are taken for Poisson. Real traffic is burstier."


# All of it, for one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    hardware: Hardware
    candidate: Candidate
    workload: Workload
    asked: Requirements
    search: Search | None = None
    """None without SLOs, as are the next three."""
    binding: Binding | None = None
    fleet: Fleet | None = None
    bill: Bill | None = None
    warnings: Sequence[str] = ()

    @property
    def lengths(self) -> Lengths:
        return lengths_of(self.workload.jobs)

    @property
    def batches(self) -> Sequence[BatchPoint]:
        simulation = self.candidate.simulation
        return batch_table(simulation.cost, self.lengths, simulation.capacity)


def plan(candidate: Candidate, hardware: Hardware, workload: Workload, asked: Requirements) -> Sized:
    """Size a deployment. With SLOs: the highest rate, what binds there, replicas and the bill. Raises ConfigError."""
    find_router(asked.router)
    if not 0 < asked.goal <= 1:
        raise ConfigError(f"The goal is {asked.goal:g}.", remedy="Set it above 0 and to 1 at most, such as 99%.")
    if not 0 <= asked.headroom < 1:
        raise ConfigError(f"The headroom is {asked.headroom:g}.", remedy="Set it from 0 to less than 1, such as 20%.")
    capacity, lengths = candidate.simulation.capacity, lengths_of(workload.jobs)
    if lengths.longest > capacity.max_model_len:
        raise ConfigError(
            f"The longest request has {lengths.longest} tokens, and this server takes {capacity.max_model_len}.",
            remedy="Shorten the workload (--max-input-tokens, --divide-lengths), or give more memory or another model.",
        )
    sized = Sized(hardware=hardware, candidate=candidate, workload=workload, asked=asked, warnings=candidate.doubts)
    if not asked.slos:
        return sized
    fleet = bill = None
    served = long_enough(workload, fullest_batch(candidate.simulation.cost, lengths, capacity), asked.least_run_s)
    found = search(candidate, served, asked)
    binding = find_binding(candidate, served, asked, found)
    wanted = asked.rate or mean_rate(workload) or found.rate
    # If no rate holds except with even arrivals, bursts are to blame, and replicas share those.
    if wanted and (found.best or binding.gains[Resource.QUEUE].most):
        fleet = find_fleet(candidate, served, asked, found, wanted)
    price = hardware.price_per_hour if asked.price_per_hour is None else asked.price_per_hour
    if fleet is not None and price is not None:
        bill = make_bill(fleet.rate, fleet.num_replicas, lengths, price_per_hour=price)
    doubts = [*candidate.doubts, *warnings(workload, found, fleet)]
    return replace(sized, search=found, binding=binding, fleet=fleet, bill=bill, warnings=doubts)
