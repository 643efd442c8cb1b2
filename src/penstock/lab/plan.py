"""The size of a deployment: the highest rate that holds the SLOs, what binds there, replicas, cost. Called by `cli.plan`.

Searches in the simulator; the arithmetic is `sizing`'s, and the queues' formulas are `queueing`'s.

    Candidate       a server that could be, on a machine that could be
    Trial           one run of the workload at one rate
    highest_rate    bisection over the rate
    find_binding    what would help: each resource doubled, and even arrivals, one at a time, by a coarser bisection
    Bill            replicas, headroom and cost of a rate

The highest rate is a statement about this workload: its lengths, its order and the shape of its arrivals, whose gaps are all
stretched or squeezed alike. A run is as long as the workload; where it is short for the requests in it, a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.lab import queueing
from penstock.lab.arrivals import NS_PER_S, arrive, constant, mean_rate, num_arrivals, poisson
from penstock.lab.figures import Samples, Slo
from penstock.lab.hardware import Hardware
from penstock.lab.intervals import Estimate, share_estimate
from penstock.lab.records import End
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
from penstock.lab.transforms import repeat, speed
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
UTILISATIONS = (0.5, 0.7, 0.8, 0.9, 0.95)
MIN_SPANS = 10
"""A run should last so many times as long as its requests, else queues have no time to grow."""
LEAST_RUN_S = 30.0
"""A shorter workload is repeated until it lasts so long on a server that is full,"""
MOST_REQUESTS, MOST_TOKENS, MOST_STEPS = 1_000, 40_000, 5_000
"""but not beyond so many requests, output tokens, or steps of a full batch: about half a second a run."""
SATURATED = 0.95
"""Share of the saturated rate above which queues of a longer run would be longer."""
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
    """Share of the KV cache that requests held, on average over the run."""
    mean_running: float
    num_outside: int
    """Steps outside of the range to which the cost model was fitted."""
    num_steps: int
    attainment: Estimate
    """Share of the requests that held every SLO."""

    @property
    def holds(self) -> bool:
        return self.num_good >= self.goal * self.num_requests

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
    (timeline,) = outcome.timelines.values()
    seconds = (samples.ended_ns - samples.intended_ns)[counted] / NS_PER_S
    running, _, held = timeline.means(max(1, outcome.duration_ns))
    return Trial(
        rate=rate,
        num_requests=len(worst),
        num_good=int((worst <= 1).sum()),
        goal=goal,
        stress=_quantile(worst, goal),
        by_slo={name: _quantile(values, goal) for name, values in ratios.items()},
        duration_s=outcome.duration_ns / NS_PER_S,
        mean_e2e_s=float(seconds.mean()),
        kv_share=held,
        mean_running=running,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The answer to: what would help? Gains are in steps of `STEP`, so they are known to 12 %."""

    rate: float
    """Requests per second that 1 stands for: the highest rate, or one that fails if none holds."""
    before: float
    """Multiple of it that held when it was asked as for the others: 1, or more where the server was saturated; 0: none."""
    after: Mapping[Resource, float]
    """Resource -> the multiple with twice as much of it."""

    @property
    def resource(self) -> Resource | None:
        """The one that binds: of those that help most, the cheapest to have more of. None: no one alone helps."""
        most = max(self.after.values())
        if most <= self.before:
            return None
        return next(resource for resource in RESOURCE_WORDS if self.after[resource] >= most)

    @property
    def alike(self) -> Sequence[Resource]:
        """Others that help as much as the one that binds."""
        resource = self.resource
        if resource is None:
            return ()
        return [other for other in RESOURCE_WORDS if other is not resource and self.after[other] >= self.after[resource]]

    @property
    def reason(self) -> str:
        """One sentence."""
        if self.before >= STEP ** (NUM_STEPS - 1):
            return "The requests are too few to tell: even 2.5 times the rate that the server keeps up with breaks no SLO."
        told = [f"{words}: {self._words(resource)}" for resource, words in RESOURCE_WORDS.items()]
        if self.resource is None:
            return f"Twice as much of any one of them does not raise the rate ({'; '.join(told)})."
        if not self.before:
            return f"No rate holds; one would with {RESOURCE_WORDS[self.resource]}."
        return f"The highest rate would be, with {'; with '.join(told)}."

    def _words(self, resource: Resource) -> str:
        multiple = self.after[resource]
        if not multiple:
            return "none"
        gain = multiple / self.before if self.before else multiple
        more = " or more" if multiple >= STEP ** (NUM_STEPS - 1) else ""
        return "the same" if gain == 1 else f"{gain:.2g} times as high{more}"


def find_binding(
    candidate: Candidate, workload: Workload, slos: Sequence[Slo], found: Search, *, goal: float, seed: int
) -> Binding:
    """The resource whose doubling raises the highest rate most.

    Only one thing is changed at a time, so two that bind together show as none that helps.
    """
    rate = found.rate or (found.failed.rate if found.failed else found.saturated_rate)

    def multiple(resource: Resource | None) -> float:
        server = candidate if resource is None else candidate.doubled(resource)

        def holds(step: int) -> bool:
            tried = rate * STEP**step
            jobs = at_rate(workload, tried, seed)
            if resource is Resource.QUEUE:
                jobs = arrive(jobs, constant(num_arrivals(jobs), tried), "even gaps")
            return make_trial(server.run(jobs), tried, slos, goal).holds

        low = 0 if found.best is not None or holds(0) else -1  # held at the highest rate, and so with more of something
        high = NUM_STEPS if low == 0 and holds(1) else 1
        low = min(1, high - 1) if low == 0 else low
        while low >= 0 and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return STEP**low if low >= 0 else 0.0

    is_known = found.best is not None and found.failed is not None
    before = 1.0 if is_known else multiple(None)
    return Binding(rate=rate, before=before, after={resource: multiple(resource) for resource in Resource})


def times_words(stress: float) -> str:
    """`1.31 x`"""
    return "beyond" if math.isinf(stress) else f"{stress:.2f} x"


# Replicas and cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The replicas for a rate, and what their tokens cost. A replica gets an even share of the requests."""

    rate: float
    """Requests per second, of all replicas together."""
    num_replicas: int
    headroom: float
    """Share of each replica's highest rate that stays free."""
    price_per_hour: float | None
    """Price of all replicas."""
    price_per_million_output_tokens: float | None
    price_per_million_tokens: float | None
    """Price of tokens of prompts and answers together."""


def make_bill(
    rate: float, highest: float, lengths: Lengths, *, price_per_hour: float | None, headroom: float = 0.0
) -> Bill | None:
    """Replicas whose highest rate is `highest`, of which each keeps at least the share `headroom` free; None if no rate holds.

    `price_per_hour`: of one replica, paid whether it has work or not.
    """
    if highest <= 0:
        return None
    num_replicas = max(1, math.ceil(rate / (highest * (1 - headroom)) - 1e-9))
    total = None if price_per_hour is None else price_per_hour * num_replicas
    per_request = None if total is None else total / 3600 / rate * 1e6
    return Bill(
        rate=rate,
        num_replicas=num_replicas,
        headroom=1 - rate / (num_replicas * highest),
        price_per_hour=total,
        price_per_million_output_tokens=None if per_request is None else per_request / lengths.mean_output,
        price_per_million_tokens=None if per_request is None else per_request / (lengths.mean_prompt + lengths.mean_output),
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


def warnings(candidate: Candidate, workload: Workload, found: Search | None) -> Sequence[str]:
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
    if best is not None and best.duration_s < MIN_SPANS * best.mean_e2e_s:
        told.append(
            f"The run at {best.rate:.3g} requests/s lasts {best.duration_s:.3g} s, and a request {best.mean_e2e_s:.3g} s: "
            "queues have hardly time to grow. Take more requests."
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
    bill: Bill | None
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
    price_per_hour: float | None = None,
    seed: int = 0,
    least_run_s: float = LEAST_RUN_S,
) -> Sized:
    """The arithmetic, and with SLOs the highest rate, what binds there, and the bill.

    `rate`: requests per second that are to be served; None: those of the workload, or else as many as one replica can.
    """
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
    bill = None
    if found is not None and found.best is not None:
        wanted = rate or mean_rate(workload) or found.rate
        price = hardware.price_per_hour if price_per_hour is None else price_per_hour
        bill = make_bill(wanted, found.rate, lengths, price_per_hour=price, headroom=headroom)
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
        bill=bill,
        warnings=warnings(candidate, workload, found),
    )
