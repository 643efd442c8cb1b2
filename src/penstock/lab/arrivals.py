"""Random arrival times for the requests of a workload, such as Poisson arrivals, bursts or a ramp.

Instants are nanoseconds from the start of the run, and rates are requests per second. Only the first turn of a conversation has
an arrival time: each later turn is sent after the one before it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle, islice
from operator import add
from random import Random

from penstock.config.units import figure
from penstock.lab.transforms import at_instants
from penstock.lab.workload import NS_PER_S, Workload, whole_ns
from penstock.types.errors import ConfigError

MAX_CYCLES = 10_000_000
"""How often stages may repeat."""


def arrive(workload: Workload, instants_ns: Sequence[int], words: str) -> Workload:
    """Return the workload with other arrival times: one for each job that is not a later turn of a conversation.

    Deadlines and cancellations move with their job. `words` are added to the workload's name.
    """
    instants = iter(instants_ns)
    jobs = []
    for job in workload.jobs:
        if job.after is None:
            job = at_instants(job, partial(add, next(instants) - job.arrival_ns))
        jobs.append(job)
    return replace(workload, jobs=jobs, name=f"{workload.name}, {words}")


def num_arrivals(workload: Workload) -> int:
    return sum(job.after is None for job in workload.jobs)


def rate_unit(workload: Workload) -> str:
    return "requests/s" if num_arrivals(workload) == len(workload.jobs) else "conversations/s"


def mean_rate(workload: Workload) -> float | None:
    instants = [job.arrival_ns for job in workload.jobs if job.after is None]
    span_ns = max(instants) - min(instants) if instants else 0
    return (len(instants) - 1) * NS_PER_S / span_ns if span_ns else None


def constant(count: int, rate: float) -> list[int]:
    _check_rate(rate)
    return [whole_ns(idx * NS_PER_S / rate) for idx in range(count)]


def poisson(rng: Random, count: int, rate: float) -> list[int]:
    return gamma(rng, count, rate, cv=1.0)


def gamma(rng: Random, count: int, rate: float, cv: float) -> list[int]:
    """Return arrivals with gamma-distributed gaps. `cv` is the gaps' standard deviation over their mean; above 1 is bursty."""
    _check_rate(rate)
    if not 0.001 <= cv <= 1000:
        raise ConfigError(
            f"The coefficient of variation of the gaps is {cv}.", remedy="Set it from 0.001 to 1000; 1 is Poisson."
        )
    shape = 1 / cv**2
    gaps = (rng.gammavariate(shape, 1 / (shape * rate)) for _ in range(count))
    return [whole_ns(at_s * NS_PER_S) for at_s in accumulate(gaps)]


def ramp(rng: Random, count: int, first_rate: float, last_rate: float) -> list[int]:
    """Return Poisson arrivals at a rate that changes linearly in time from `first_rate` to `last_rate`."""
    _check_rate(first_rate)
    _check_rate(last_rate)
    growth = (last_rate**2 - first_rate**2) / (2 * count) if count else 0.0
    instants = []
    for units in _unit_instants(rng, count):
        if units < count:  # the instant at which the integral of the rate is `units`
            at_s = 2 * units / (first_rate + math.sqrt(first_rate**2 + 2 * growth * units))
        else:
            at_s = 2 * count / (first_rate + last_rate) + (units - count) / last_rate
        instants.append(whole_ns(at_s * NS_PER_S))
    return instants


def stages(rng: Random, count: int, rates: Sequence[tuple[float, float]]) -> list[int]:
    """Return Poisson arrivals whose rate changes in stages. `rates`: (requests per second, seconds) of each; they repeat."""
    for rate, seconds in rates:
        if not (rate >= 0 and seconds > 0 and math.isfinite(rate) and math.isfinite(seconds)):
            raise ConfigError(f"A stage has rate {rate} for {seconds} s.", remedy="Rates are at least 0, and times above 0.")
    if not any(rate for rate, _ in rates):
        raise ConfigError("No stage has a rate.", remedy="Give at least one a rate above 0.")
    per_cycle = sum(rate * seconds for rate, seconds in rates)
    if per_cycle * MAX_CYCLES < count:
        raise ConfigError(
            f"All stages together have {figure(per_cycle)} of {count} requests.",
            remedy="Make them longer, or their rates higher.",
        )
    instants = []
    begin_s = units_before = 0.0
    coming = cycle(rates)
    rate, seconds = next(coming)
    for units in _unit_instants(rng, count):
        while units >= units_before + rate * seconds:
            units_before += rate * seconds
            begin_s += seconds
            rate, seconds = next(coming)
        instants.append(whole_ns((begin_s + (units - units_before) / rate) * NS_PER_S))
    return instants


def bursts(rng: Random, count: int, rate: float, on_s: float, off_s: float) -> list[int]:
    """Return Poisson arrivals for `on_s` seconds, none for `off_s` seconds, and so on. `rate` is the mean over both phases."""
    _check_rate(rate)
    if not (on_s > 0 and off_s >= 0):
        raise ConfigError(
            f"Bursts last {on_s} s with {off_s} s between them.", remedy="Set the first above 0, the second to 0 or more."
        )
    return stages(rng, count, [(rate * (on_s + off_s) / on_s, on_s), (0.0, off_s)] if off_s else [(rate, on_s)])


def _unit_instants(rng: Random, count: int) -> Iterator[float]:
    return islice(accumulate(iter(lambda: rng.expovariate(1.0), None)), count)


def _check_rate(rate: float) -> None:
    if not 1e-9 <= rate <= 1e9:
        raise ConfigError(f"The rate is {rate} requests per second.", remedy="Set it from 1e-9 to 1e9.")
