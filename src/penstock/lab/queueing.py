"""Queueing in formulas: how long requests wait for a server that is busy a given share of the time. Pure arithmetic.

`plan` calls it to show what to expect before anything is simulated, and tests compare the simulator with it.

A server of continuous batches is taken for `k` servers, one per row of a full batch, each of which takes the time that a
request has in a full batch. The model is M/G/k: arrivals are Poisson, service times have any distribution. Nobody knows its
wait exactly; the approximation is Lee and Longton's (Operational Research Quarterly 10, 1959): the wait of M/M/k, which Erlang
gave in 1917, times (1 + cv^2) / 2, where cv is the standard deviation of service times over their mean. It is exact for k = 1
(Pollaczek and Khinchine) and for exponential times.

It fails
- near utilisation 1, where a recorded hour is too short for the mean that it promises;
- for arrivals in bursts, whose wait is longer;
- below a full batch, where rows are faster than it assumes, so that it promises too long a wait;
- for waits behind prompts, which share steps: `plan` takes prompts for a queue of their own, M/G/1;
- where memory is short and requests are preempted.

Rates are per second, times in seconds.
"""

from __future__ import annotations

import math


def erlang_b(num_servers: int, load: float) -> float:
    """Share of arrivals that find all servers busy where nobody waits. `load` = rate x mean service time, in servers."""
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = load * blocked / (servers + load * blocked)
    return blocked


def erlang_c(num_servers: int, load: float) -> float:
    """Share of arrivals of M/M/k that wait. Raises ValueError unless 0 <= load < num_servers."""
    _check(num_servers, load)
    blocked = erlang_b(num_servers, load)
    return blocked / (1 - load / num_servers * (1 - blocked))


def mean_wait(num_servers: int, rate: float, service_s: float, cv: float) -> float:
    """Mean time in the queue of M/G/k. It is an approximation, but for k = 1 and for cv = 1.

    Raises ValueError if the servers can't keep up.
    """
    load = rate * service_s
    waits = erlang_c(num_servers, load)
    return waits * service_s / (num_servers - load) * (1 + cv**2) / 2


def wait_quantile(share: float, num_servers: int, rate: float, service_s: float, cv: float) -> float:
    """Time in the queue that `share` of the arrivals do not exceed, of M/G/k as `mean_wait`.

    Waits of those that wait are taken for exponential, which is exact for M/M/k. Raises ValueError as `mean_wait`.
    """
    load = rate * service_s
    waits = erlang_c(num_servers, load)
    if waits <= 1 - share:
        return 0.0
    return mean_wait(num_servers, rate, service_s, cv) / waits * math.log(waits / (1 - share))


def _check(num_servers: int, load: float) -> None:
    if num_servers < 1:
        raise ValueError(f"there are {num_servers} servers, and must be at least 1")
    if not 0 <= load < num_servers:
        raise ValueError(f"a load of {load:g} servers can't be served by {num_servers}: the queue grows without bound")
