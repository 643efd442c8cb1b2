"""Formulas for queueing times. Rates are per second, times in seconds.

A server with continuous batching is modelled as M/G/k: each row of a full batch is one of k servers. The wait is Lee and
Longton's approximation (Operational Research Quarterly 10, 1959): the wait in M/M/k times (1 + cv^2) / 2, which is exact for
k = 1 and for exponential service times. docs/plan.md says where it fails.
"""

from __future__ import annotations

import math


def erlang_b(num_servers: int, load: float) -> float:
    """Return the share of arrivals that find all servers busy and leave (Erlang B). `load` = rate x mean service time."""
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = load * blocked / (servers + load * blocked)
    return blocked


def erlang_c(num_servers: int, load: float) -> float:
    if num_servers < 1:
        raise ValueError(f"there are {num_servers} servers, and must be at least 1")
    if not 0 <= load < num_servers:
        raise ValueError(f"a load of {load:g} servers can't be served by {num_servers}: the queue grows without bound")
    blocked = erlang_b(num_servers, load)
    return blocked / (1 - load / num_servers * (1 - blocked))


def mean_wait(num_servers: int, rate: float, service_s: float, cv: float) -> float:
    load = rate * service_s
    waits = erlang_c(num_servers, load)
    return waits * service_s / (num_servers - load) * (1 + cv**2) / 2


def wait_quantile(share: float, num_servers: int, rate: float, service_s: float, cv: float) -> float:
    """Return the wait in seconds that the share `share` of requests does not exceed, if waits above 0 are exponential.

    Raises ValueError if the load is not below `num_servers`.
    """
    load = rate * service_s
    waits = erlang_c(num_servers, load)
    if waits <= 1 - share:
        return 0.0
    return mean_wait(num_servers, rate, service_s, cv) / waits * math.log(waits / (1 - share))
