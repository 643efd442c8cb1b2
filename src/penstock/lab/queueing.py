"""Queueing in formulas: how long requests wait for a server of a given load. Rates are per second, times in seconds.

A server of continuous batches is taken for M/G/k: one server per row of a full batch, each as slow as a request in a full
batch. The wait is Lee and Longton's approximation (Operational Research Quarterly 10, 1959): that of M/M/k times (1 + cv^2) /
2, exact for k = 1 and for exponential times. docs/plan.md says where it fails.
"""

from __future__ import annotations

import math


def erlang_b(num_servers: int, load: float) -> float:
    """Return the share of arrivals that find all servers busy if nobody waits. `load` = rate x mean service time, in
    servers."""
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = load * blocked / (servers + load * blocked)
    return blocked


def erlang_c(num_servers: int, load: float) -> float:
    _check(num_servers, load)
    blocked = erlang_b(num_servers, load)
    return blocked / (1 - load / num_servers * (1 - blocked))


def mean_wait(num_servers: int, rate: float, service_s: float, cv: float) -> float:
    load = rate * service_s
    waits = erlang_c(num_servers, load)
    return waits * service_s / (num_servers - load) * (1 + cv**2) / 2


def wait_quantile(share: float, num_servers: int, rate: float, service_s: float, cv: float) -> float:
    """Return the time in the queue that `share` of the arrivals do not exceed, with exponential waits of those that wait.

    Raises ValueError as `mean_wait`.
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
