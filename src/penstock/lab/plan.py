"""Sizes a deployment: the highest rate that meets the SLOs, the resource that limits it, the replicas and their cost.

`cli.plan` calls `plan`. The searches run in the simulator; `sizing` has the arithmetic. The highest rate is valid for this
workload only. docs/plan.md explains every search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from random import Random
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config.units import figure
from penstock.lab.arrivals import arrive, constant, mean_rate, num_arrivals, poisson, rate_unit
from penstock.lab.figures import Samples, Slo
from penstock.lab.hardware import Hardware
from penstock.lab.intervals import Estimate, nearest_rank, share_estimate
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.sizing import (
    BatchPoint,
    LengthSummary,
    ModelSize,
    Speeds,
    batch_table,
    fullest_batch,
    lengths_of,
    roofline,
    with_more_bandwidth,
    with_more_compute,
)
from penstock.lab.transforms import every, repeat
from penstock.lab.workload import NS_PER_S, Workload
from penstock.sched.routing.routers import find_router
from penstock.types.errors import ConfigError

LEAST_SHARE = 0.01
"""Lowest rate tried, as a share of the saturated rate. If it misses the SLOs, the plan says that no rate meets them."""
STEP = 1.12
"""Ratio of neighbouring rates in the search for the limiting resource."""
NUM_STEPS = 9
"""Number of rates in that search, from the highest rate to 2.5 times as much."""
MIN_SPANS = 10
"""A run should last at least this many mean request times, so that queues have time to grow."""
MOST_REQUESTS, MOST_TOKENS, MOST_STEPS = 1_000, 40_000, 5_000
"""Limits of a repeated workload: requests, output tokens, steps of a full batch. They keep a run near half a second."""
MOST_FLEET_REQUESTS, MOST_FLEET_TOKENS = 100_000, 100_000
"""Limits of a run with several replicas. The limit of tokens is `MOST_TOKENS` for each replica if that is more."""
LEAST_GROUP, MOST_GROUP, MOST_REPLICAS = 4, 16, 256
"""Fewest and most replicas of a simulated group, if each ran at the saturated rate. Most replicas of all groups together."""
OUTLOOK_REPLICAS = 4
"""With slower steps, at most this many times the planned replicas are tried."""
_FILLS, _MOST_SATURATED_TOKENS = 16, 400_000
"""Full batches and most output tokens of the run that times a saturated server. In the first batch all prompts arrive at
once, so one batch is not enough."""


class Resource(StrEnum):
    """A limit of a server that can bound its rate, such as memory."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    MEMORY = "memory"
    ROWS = "rows"
    """Requests in one step (`--max-num-seqs`)."""
    QUEUE = "queue"
    """Waiting in bursts of arrivals, although the server is fast enough on average."""


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
    """Whether the cost model comes from a file instead of the roofline."""
    step_source: str = ""
    """Kind of the step times, such as `estimated`."""
    step_error: float = 1.0
    """Factor by which steps may be slower or faster than modelled. The plan is repeated with both; 1 leaves that out."""
    doubts: Sequence[str] = ()
    """Warnings for the report about assumptions on model, memory and step times."""

    def slowed(self, factor: float) -> Candidate:
        """Return the candidate with steps that take `factor` times as long."""
        cost = self.simulation.cost
        return replace(self, simulation=replace(self.simulation, cost=cost.scaled(factor)))

    def doubled(self, resource: Resource) -> Candidate:
        """Return the candidate with twice as much of one resource. `Resource.QUEUE` changes the arrivals, not the candidate."""
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
    """Share of the requests that must meet every SLO."""
    rate: float | None = None
    """Arrivals per second to serve. None takes the workload's own rate, or else the highest rate of one replica."""
    headroom: float = 0.0
    """Share of the replicas' rate that stays free: they are sized for `rate` / (1 - headroom)."""
    router: str = "round-robin"
    price_per_hour: float | None = None
    speed: float = 1.0
    """Factor by which the times of the workload were divided, for the report."""
    seed: int = 0
    least_run_s: float = 30.0
    """Repeat the workload until it lasts this long on a full server."""


# Trials


class Trial(NamedTuple):
    rate: float
    """Arrivals per second."""
    num_requests: int
    num_good: int
    goal: float
    stress: float
    """Factor on all limits that would just meet the goal. Above 1, the SLOs are missed."""
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
        return self.num_good >= self.goal * self.num_requests - 1e-9  # 0.07 * 100 is above 7

    @property
    def nearly_holds(self) -> bool:
        """Whether the SLOs are met if slightly more requests may fail: by one standard deviation of a binomial count."""
        return self.num_good >= self.goal * self.num_requests - math.sqrt(self.num_requests * self.goal * (1 - self.goal))

    @property
    def worst_slo(self) -> str:
        return max(self.by_slo, key=lambda name: self.by_slo[name])


def make_trial(outcome: Outcome, rate: float, asked: Requirements) -> Trial:
    samples = Samples.of(outcome.records)
    counted = samples.is_counted
    if not counted.any():
        raise ConfigError("Every client left before its answer ended, so no request counts.", remedy="Lower --cancel-share.")
    ratios = {str(slo): _ratios(samples, slo)[counted] for slo in asked.slos}
    worst = np.maximum.reduce(list(ratios.values()))
    means = [timeline.means(max(1, outcome.duration_ns)) for timeline in outcome.timelines.values()]
    seconds = (samples.ended_ns - samples.intended_ns)[counted] / NS_PER_S
    return Trial(
        rate=rate,
        num_requests=len(worst),
        num_good=int((worst <= 1).sum()),
        goal=asked.goal,
        stress=nearest_rank(worst, asked.goal),
        by_slo={name: nearest_rank(values, asked.goal) for name, values in ratios.items()},
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


def at_rate(workload: Workload, rate: float, seed: int) -> Workload:
    """Return the workload at another mean rate. All gaps between arrivals are scaled by one factor.

    Think times stay, and so does the time from an arrival to its deadline. If all jobs arrive at once, draw Poisson arrivals.
    With the same seed, two rates give the same arrivals but for the scale.
    """
    own_rate = mean_rate(workload)
    if own_rate is not None:
        instants = [round(job.arrival_ns / (rate / own_rate)) for job in workload.jobs if job.after is None]
        return arrive(workload, instants, f"{figure(rate)} {rate_unit(workload)}")
    rng = Random(f"arrivals {seed}")  # noqa: S311  # repeatable on purpose
    return arrive(workload, poisson(rng, num_arrivals(workload), rate), f"{figure(rate)} {rate_unit(workload)}, Poisson")


def at_even_gaps(workload: Workload, rate: float) -> Workload:
    return arrive(workload, constant(num_arrivals(workload), rate), f"{figure(rate)} {rate_unit(workload)} at even gaps")


def long_enough(workload: Workload, full: BatchPoint, least_run_s: float) -> Workload:
    """Return the workload, repeated so that it lasts `least_run_s` at the rate of a full batch.

    `MOST_REQUESTS`, `MOST_TOKENS` and `MOST_STEPS` limit the repeats.
    """
    num_tokens = sum(job.num_output_tokens for job in workload.jobs)
    wanted = math.ceil(least_run_s * full.rate / len(workload.jobs))
    most_tokens = min(MOST_TOKENS, MOST_STEPS * full.num_rows)
    return repeat(workload, max(1, min(wanted, most_tokens // num_tokens, MOST_REQUESTS // len(workload.jobs))))


# The search


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    saturated_rate: float
    trials: Sequence[Trial]

    @property
    def best(self) -> Trial | None:
        """The trial at the highest rate that met the SLOs, or None if even the lowest missed them."""
        return max((trial for trial in self.trials if trial.holds), key=lambda trial: trial.rate, default=None)

    @property
    def failed(self) -> Trial | None:
        """The trial at the lowest rate that missed the SLOs, or None if they are met up to saturation."""
        return min((trial for trial in self.trials if not trial.holds), key=lambda trial: trial.rate, default=None)

    @property
    def rate(self) -> float:
        return self.best.rate if self.best else 0.0


def highest_rate(attempt: Callable[[float], Trial], saturated_rate: float) -> Search:
    """Search for the highest rate that meets the SLOs, to 2 %, between `LEAST_SHARE` of the saturated rate and all of it.

    `attempt` runs the workload at a rate. The bisection assumes that a lower rate is never worse, which holds up to noise.
    """
    trials = [failed := attempt(saturated_rate)]
    if not failed.holds:
        trials.append(best := attempt(LEAST_SHARE * saturated_rate))
        while best.holds and failed.rate > best.rate * 1.02:
            trials.append(trial := attempt(math.sqrt(best.rate * failed.rate)))
            best, failed = (trial, failed) if trial.holds else (best, trial)
    return Search(saturated_rate=saturated_rate, trials=trials)


def saturated_rate(outcome: Outcome, workload: Workload) -> float:
    """Return the arrivals per second that a server keeps up with, given a run in which all requests arrived at once.

    That is the rate of completions, without the first and the last tenth of them, or over the whole run if that is higher.
    """
    ends = sorted(record.ended_ns for record in outcome.records)
    low, high = (int(share * (len(ends) - 1)) for share in (0.1, 0.9))
    requests_per_s = len(ends) / max(1, ends[-1]) * NS_PER_S
    if ends[high] > ends[low]:
        requests_per_s = max(requests_per_s, (high - low) / (ends[high] - ends[low]) * NS_PER_S)
    return requests_per_s * num_arrivals(workload) / len(workload.jobs)


def search(candidate: Candidate, workload: Workload, asked: Requirements) -> Search:
    return highest_rate(_attempt(candidate, workload, asked), find_saturated_rate(candidate, workload))


def _attempt(candidate: Candidate, workload: Workload, asked: Requirements) -> Callable[[float], Trial]:
    return lambda rate: make_trial(candidate.simulation.run(at_rate(workload, rate, asked.seed)), rate, asked)


def find_saturated_rate(candidate: Candidate, workload: Workload) -> float:
    """Run all requests at once, and return the arrivals per second that the candidate keeps up with.

    A short workload is repeated. If that would take too long, the result is at most the rate of a full batch; the true rate
    may be higher with cached prefixes.
    """
    simulation, num_jobs = candidate.simulation, len(workload.jobs)
    full = fullest_batch(simulation.cost, lengths_of(workload.jobs), simulation.capacity)
    wanted = math.ceil(_FILLS * full.num_rows / num_jobs)
    times = max(1, min(wanted, _MOST_SATURATED_TOKENS // sum(job.num_output_tokens for job in workload.jobs)))
    longer = repeat(workload, times)
    rate = saturated_rate(simulation.saturate(longer), longer)
    return rate if times >= wanted else min(rate, full.rate * num_arrivals(workload) / num_jobs)


# The limiting resource


class Gain(NamedTuple):
    """Factor by which the highest rate grows with more of a resource, as a range: of a strict search and of a lenient one.

    The lenient search accepts trials that have `nearly_holds`.
    """

    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Gain of doubling each resource, and the resources that limit the rate. Gains are exact to a factor of `STEP`."""

    before: float
    """Multiple of the highest rate that still meets the SLOs with nothing doubled: usually 1. More if the server was saturated
    or there are few requests; 0 if no rate meets them."""
    gains: Mapping[Resource, Gain]
    """Resource -> gain with twice as much of it. If `before` is 0, a gain above 0 means that some rate would meet the SLOs."""

    @property
    def resources(self) -> Sequence[Resource]:
        top = max(self.gains.values(), key=lambda gain: (gain.most, gain.least))
        floor = 1.0 if self.before else 0.0
        bound = max(floor, top.least / STEP * (1 - 1e-9))
        return [one for one in REMEDIES if self.gains[one].most > floor and self.gains[one].most >= bound]

    @property
    def is_known(self) -> bool:
        """Whether the search tried a rate so high that the SLOs were missed. Otherwise nothing was seen to limit the rate."""
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
            return f"No rate meets the SLOs; one would with {' or with '.join(REMEDIES[one][0] for one in self.resources)}."
        doubt = ""
        if not self.is_clear and len(self.resources) == 1:
            doubt = "That is uncertain: the gain may be chance. "
        elif not self.is_clear:
            doubt = "Which one is not clear: their gains differ by no more than chance, or one step. "
        return f"{doubt}The highest rate would be, with {'; with '.join(gains)}."

    def _gain_words(self, resource: Resource) -> str:
        gain = self.gains[resource]
        if not gain.most:
            return "none"
        shown = list(dict.fromkeys(figure(value, digits=2) for value in gain))
        more = " or more" if _is_top((self.before or 1.0) * gain.most) else ""
        return "the same" if shown == ["1"] else f"{' to '.join(shown)} times as high{more}"


def _is_top(multiple: float) -> bool:
    return multiple >= STEP ** (NUM_STEPS - 1) * (1 - 1e-9)


def find_binding(candidate: Candidate, workload: Workload, asked: Requirements, found: Search) -> Binding:
    """Find the resource that limits the rate: double one at a time, and see which raises the highest rate most.

    If two resources limit the rate together, doubling either one shows no gain.
    """
    rate = found.rate or (found.failed.rate if found.failed else found.saturated_rate)

    @cache
    def attempt(resource: Resource | None, step: int) -> Trial:
        tried = rate * STEP**step
        server = candidate if resource is None else candidate.doubled(resource)
        jobs = at_even_gaps(workload, tried) if resource is Resource.QUEUE else at_rate(workload, tried, asked.seed)
        return make_trial(server.simulation.run(jobs), tried, asked)

    def multiple(resource: Resource | None, *, is_lenient: bool) -> float:
        def holds(step: int) -> bool:
            trial = attempt(resource, step)
            return trial.nearly_holds if is_lenient else trial.holds

        # If the highest rate met the SLOs, it also does with more of something.
        if found.best is None and not holds(0):
            return 0.0
        if not holds(1):
            return 1.0
        low, high = 1, NUM_STEPS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return STEP**low

    # Search with nothing doubled, too: a rate that holds by chance there is not a gain.
    before = multiple(None, is_lenient=False)
    after = {resource: multiple(resource, is_lenient=False) for resource in Resource}
    gains = {resource: Gain(value / (before or 1.0), value / (before or 1.0)) for resource, value in after.items()}
    if before:
        # Search leniently only for resources that help and are at most three steps behind the best one.
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
    """Equal groups of replicas. Requests go to the groups in turn, and one group was simulated."""
    num_in_group: int
    load: float
    """`rate` divided by the rate that all replicas keep up with."""
    held: Trial | None
    failed: Trial | None
    """Trial of one group with one replica fewer. None if that would not keep up, or the group has one replica."""

    @property
    def num_replicas(self) -> int:
        return self.num_groups * self.num_in_group


def find_fleet(
    candidate: Candidate,
    workload: Workload,
    asked: Requirements,
    found: Search,
    rate: float,
    *,
    most: int = MOST_REPLICAS,
) -> Fleet | None:
    """Find the fewest replicas behind a router that meet the SLOs at `rate`, or None if `most` miss them.

    Dividing `rate` by the highest rate of one replica would give too many, because replicas share each burst. `found` is the
    search with one replica. Raises ConfigError if `MOST_REPLICAS` can't keep up with the rate.
    """
    if found.best is None and not (rate and _meets_at_even_gaps(candidate, workload, asked, found)):
        return None
    planned, num_groups = rate / (1 - asked.headroom), 1
    fewest: tuple[int, Trial | None, Trial | None] | None = (1, None, None)
    if planned > MOST_REPLICAS * found.saturated_rate:
        raise ConfigError(
            f"At {figure(planned)} {rate_unit(workload)} not even {MOST_REPLICAS} of these servers keep up.",
            remedy="Plan for a part of that rate (--rate), and multiply.",
        )
    if planned > found.rate:
        num_groups, jobs = _dealt(workload, planned, found, asked.least_run_s)
        share = planned / num_groups
        jobs, simulation = at_rate(jobs, share, asked.seed), candidate.simulation
        make_router = find_router(asked.router)

        def attempt(num_replicas: int) -> Trial:
            replicas = replace(simulation, num_replicas=num_replicas, make_router=make_router)
            return make_trial(replicas.run(jobs), share, asked)

        least = max(2, math.ceil(share / found.saturated_rate - 1e-9))
        fewest = fewest_replicas(attempt, least, min(most, MOST_REPLICAS) // num_groups)
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


def _meets_at_even_gaps(candidate: Candidate, workload: Workload, asked: Requirements, found: Search) -> bool:
    """Return whether only bursts keep one server from meeting the SLOs. Replicas share bursts; nothing else gets faster."""
    rate = LEAST_SHARE * found.saturated_rate
    return make_trial(candidate.simulation.run(at_even_gaps(workload, rate)), rate, asked).holds


def _dealt(workload: Workload, rate: float, found: Search, least_run_s: float) -> tuple[int, Workload]:
    """Divide the replicas into equal groups, so that simulating one is enough. Return their number, and one group's requests.

    The workload is first repeated, so that at `rate` it lasts long enough for queues to grow.
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
    # If the number of groups and `count` had a common divisor, each repeat would deal a group the same requests.
    numbers = (*range(near, most + 1), *range(near, 0, -1))
    num_groups = next(number for number in numbers if times == 1 or math.gcd(number, count) == 1)
    longer = repeat(workload, times)
    return num_groups, every(longer, num_groups) if num_groups > 1 else longer


def fewest_replicas(
    attempt: Callable[[int], Trial], least: int, most: int = MOST_REPLICAS
) -> tuple[int, Trial, Trial | None] | None:
    """Find the fewest replicas that meet the SLOs. Return their number, trial, and the failed trial with one fewer, if run.

    Return None if `most` replicas fail. The search goes up from `least` in doubling steps, then bisects: the answer is usually
    near `least`.
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
    """Cost of a deployment per hour and per million tokens. Idle replicas cost the same."""

    price_per_hour: float
    price_per_million_output_tokens: float
    price_per_million_tokens: float


def make_bill(rate: float, num_replicas: int, lengths: LengthSummary, *, price_per_hour: float) -> Bill:
    """Return what `rate` requests per second cost. Each turn of a conversation is a request."""
    total = price_per_hour * num_replicas
    per_million = total / 3600 / rate * 1e6
    return Bill(
        price_per_hour=total,
        price_per_million_output_tokens=per_million / lengths.mean_output,
        price_per_million_tokens=per_million / (lengths.mean_prompt + lengths.mean_output),
    )


# Warnings


def warnings(workload: Workload, found: Search, fleet: Fleet | None) -> Iterator[str]:
    best, unit = found.best, rate_unit(workload)
    if best is not None and best.num_outside:
        yield (
            f"{best.num_outside / best.num_steps:.0%} of the steps lie outside of the range that the cost model was fitted to: "
            "their times are extrapolated."
        )
    for trial in (best, fleet.held if fleet else None):
        if trial is not None and trial.duration_s < MIN_SPANS * trial.mean_e2e_s:
            yield (
                f"The run at {figure(trial.rate)} {unit} lasts {figure(trial.duration_s)} s, and a request "
                f"{figure(trial.mean_e2e_s)} s: too short for queues to build up. Take more requests."
            )
    if best is not None and best.rate > 0.95 * found.saturated_rate:
        yield (
            f"At {figure(best.rate)} {unit} the server is all but saturated: in a longer run its queue would be longer. "
            "Give --headroom 10%, or more requests."
        )
    if best is not None and best.num_requests * (1 - best.goal) < 5:
        yield (
            f"{best.num_requests} requests are few for a goal of {best.goal:.4g}: "
            f"it is decided by {math.floor(best.num_requests * (1 - best.goal))} of them. Take more requests."
        )
    if mean_rate(workload) is None:
        yield "The workload has no arrival times, so Poisson arrivals are assumed. Real traffic is burstier."


# All of it, for one machine


class Outlook(NamedTuple):
    """The plan with slower or faster steps."""

    rate: float
    num_replicas: int | None
    """None if no number was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    hardware: Hardware
    candidate: Candidate
    workload: Workload
    asked: Requirements
    search: Search | None = None
    """None without SLOs, like the next three."""
    binding: Binding | None = None
    fleet: Fleet | None = None
    bill: Bill | None = None
    outlooks: Sequence[Outlook] = ()
    """Answers with slower and with faster steps, by `Candidate.step_error`."""
    rivals: Mapping[str, Sized] = field(default_factory=dict)
    """Preset -> a plan with its policies on the same hardware, with the same step times."""
    warnings: Sequence[str] = ()

    @property
    def lengths(self) -> LengthSummary:
        return lengths_of(self.workload.jobs)

    @property
    def rates(self) -> tuple[float, float]:
        """The lowest and the highest of the highest rates, over the outlooks."""
        rates = [self.search.rate if self.search else 0.0, *(outlook.rate for outlook in self.outlooks)]
        return min(rates), max(rates)

    @property
    def replicas(self) -> tuple[int, int | None] | None:
        """The fewest and the most replicas over the outlooks. None for the most if slower steps need more than was tried."""
        if self.fleet is None:
            return None
        numbers = [outlook.num_replicas for outlook in self.outlooks]
        known = [self.fleet.num_replicas, *(number for number in numbers if number is not None)]
        return min(known), None if None in numbers else max(known)

    @property
    def batches(self) -> Sequence[BatchPoint]:
        simulation = self.candidate.simulation
        return batch_table(simulation.cost, self.lengths, simulation.capacity)


def plan(candidate: Candidate, hardware: Hardware, workload: Workload, asked: Requirements, *, is_brief: bool = False) -> Sized:
    """Size a deployment. Without SLOs, leave out the rate, its limiting resource, replicas and bill. Raises ConfigError.

    A brief plan leaves out the limiting resource and other step times.
    """
    served = _checked(candidate, workload, asked)
    sized = Sized(hardware=hardware, candidate=candidate, workload=workload, asked=asked, warnings=candidate.doubts)
    if not asked.slos:
        return sized
    found = search(candidate, served, asked)
    fleet = find_fleet(candidate, served, asked, found, asked.rate or mean_rate(workload) or found.rate)
    sized = replace(sized, search=found, fleet=fleet, bill=_bill(hardware, workload, asked, fleet))
    if is_brief:
        return sized
    binding = find_binding(candidate, served, asked, found)
    doubts = [*candidate.doubts, *warnings(workload, found, fleet)]
    error = candidate.step_error
    slow_and_fast = (error, 1 / error) if error > 1 else ()
    outlooks = [find_outlook(candidate, served, asked, found, fleet, slowness) for slowness in slow_and_fast]
    return replace(sized, binding=binding, outlooks=outlooks, warnings=doubts)


def find_outlook(
    candidate: Candidate, workload: Workload, asked: Requirements, found: Search, fleet: Fleet | None, slowness: float
) -> Outlook:
    """Search again with steps that take `slowness` times as long. `found`, `fleet`: with steps as modelled."""
    other, number = candidate.slowed(slowness), None
    # A saturated server is never idle, so its rate changes as its steps do.
    again = highest_rate(_attempt(other, workload, asked), found.saturated_rate / slowness)
    if fleet is not None and fleet.rate / (1 - asked.headroom) <= MOST_REPLICAS * again.saturated_rate:
        most = OUTLOOK_REPLICAS * fleet.num_replicas
        needed = find_fleet(other, workload, asked, again, fleet.rate, most=most)
        number = needed.num_replicas if needed else None
    return Outlook(again.rate, number)


def p99_ttft_ns(sized: Sized, rate: float) -> float:
    """Return the p99 of the time to the first token of one replica at `rate`."""
    served = _checked(sized.candidate, sized.workload, sized.asked)
    outcome = sized.candidate.simulation.run(at_rate(served, rate, sized.asked.seed))
    samples = Samples.of(outcome.records)
    return nearest_rank(samples.latency_ns("ttft")[samples.is_ok].astype(np.float64), 0.99)


def _checked(candidate: Candidate, workload: Workload, asked: Requirements) -> Workload:
    """Return the workload, long enough for the searches. Raises ConfigError for requirements that can't be met."""
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
    return long_enough(workload, fullest_batch(candidate.simulation.cost, lengths, capacity), asked.least_run_s)


def _bill(hardware: Hardware, workload: Workload, asked: Requirements, fleet: Fleet | None) -> Bill | None:
    price = hardware.price_per_hour if asked.price_per_hour is None else asked.price_per_hour
    if fleet is None or price is None:
        return None
    requests_per_s = fleet.rate * len(workload.jobs) / num_arrivals(workload)
    # Clients who leave get only the tokens until then.
    received = [replace(job, num_output_tokens=job.cancelled_after_tokens or job.num_output_tokens) for job in workload.jobs]
    return make_bill(requests_per_s, fleet.num_replicas, lengths_of(received), price_per_hour=price)
