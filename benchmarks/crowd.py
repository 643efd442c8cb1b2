"""An open loop against a URL: clients come when they come, whatever the server does; who is sent away comes back as told.

The load of `overload.py`. As in `load.py`, one thread takes bytes and notes when they came; of the bytes only the status and
`Retry-After` are read while it measures. Every client's body is its own, so that no prompt is cached and each return is known.
"""

from __future__ import annotations

import heapq
import random
import re
import selectors
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from load import Exchange, Job, request_bytes

_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([0-9]+)\r\n", re.IGNORECASE)
_MAX_WAIT_S = 0.5


@dataclass(slots=True)
class Client:
    """One caller, from its first call to its answer. Times are seconds since the beginning."""

    job: Job
    due_s: float
    """When it calls next; at first, when it comes."""
    refusals_s: list[float] = field(default_factory=list)
    """When it was sent away, by arrival of the answer."""
    waits_s: list[float] = field(default_factory=list)
    """The answer that it got each time."""
    called_s: float = 0.0
    """The call that was answered, or is being answered."""
    first_token_s: float | None = None
    ended_s: float | None = None
    status: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.called_s


def arrivals(seed: int, rate: float, seconds: float, cv: float) -> Iterator[float]:
    """Instants with gamma-distributed gaps of this coefficient of variation; 1 is Poisson."""
    rng = random.Random(seed)
    shape = 1 / cv**2
    at_s = rng.gammavariate(shape, 1 / (rate * shape))
    while at_s < seconds:
        yield at_s
        at_s += rng.gammavariate(shape, 1 / (rate * shape))


def own_jobs(jobs: Sequence[Job], count: int, first: int = 0) -> list[Job]:
    """`count` jobs, those given again and again, each with a beginning of its own."""
    picked = (jobs[idx % len(jobs)] for idx in range(first, first + count))
    return [replace(job, prompt=f"{first + idx}. {job.prompt}") for idx, job in enumerate(picked)]


class Crowd:
    """The clients that are under way, over non-blocking connections."""

    def __init__(self, url: str, address: tuple[str, int], model: str, *, returns: bool, closed: int = 0) -> None:
        """`returns`: who is sent away comes back. `closed`: only so many at a time, as in a closed loop; 0: an open one."""
        self._url, self._address, self._model = url, address, model
        self._returns = returns
        self._closed = closed
        self._selector = selectors.DefaultSelector()
        self._waiting: list[tuple[float, int, Client]] = []
        self._num_open = 0
        self._begun_s = 0.0

    def run(self, clients: Sequence[Client], until_s: float) -> float:
        """Until all have their answers or the time is over, when the rest are cut off. Returns the seconds that it took."""
        self._waiting = [(client.due_s, idx, client) for idx, client in enumerate(clients)]
        heapq.heapify(self._waiting)
        self._begun_s = time.perf_counter()
        try:
            while (self._waiting or self._num_open) and self._now_s() < until_s:
                self._call_those_due()
                for key, _ in self._selector.select(self._wait_s()):
                    self._go_on(*key.data)
            return self._now_s()
        finally:
            for key in list(self._selector.get_map().values()):
                key.data[0].connection.close()
            self._selector.close()

    def _now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    @property
    def _is_full(self) -> bool:
        return 0 < self._closed <= self._num_open

    def _wait_s(self) -> float:
        """Until the next one calls. Those who are due and may not call yet are no reason to look again at once: that would
        take a core from the server."""
        if not self._waiting or self._is_full:
            return _MAX_WAIT_S
        return max(0.0, min(_MAX_WAIT_S, self._waiting[0][0] - self._now_s()))

    def _call_those_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._now_s() and not self._is_full:
            client = heapq.heappop(self._waiting)[2]
            exchange = Exchange(self._address, request_bytes(self._url, self._model, client.job))
            client.called_s = self._now_s()
            self._selector.register(exchange.connection, selectors.EVENT_WRITE, (exchange, client))
            self._num_open += 1

    def _go_on(self, exchange: Exchange, client: Client) -> None:
        if exchange.unsent:
            if exchange.send():
                self._selector.modify(exchange.connection, selectors.EVENT_READ, (exchange, client))
            return
        is_over = exchange.receive()
        if client.first_token_s is None and exchange.pieces and b"data: " in exchange.pieces[-1]:
            client.first_token_s = exchange.times_s[-1] - self._begun_s
        if is_over:
            self._selector.unregister(exchange.connection)
            exchange.connection.close()
            self._num_open -= 1
            self._end(exchange, client)

    def _end(self, exchange: Exchange, client: Client) -> None:
        data = b"".join(exchange.pieces)
        client.status = int(data[9:12] or 0)
        if client.status != 429:
            client.ended_s = self._now_s()
            return
        found = _RETRY_AFTER.search(data)
        wait_s = float(found[1]) if found else float("nan")
        client.refusals_s.append(self._now_s())
        client.waits_s.append(wait_s)
        if self._returns and found:
            client.due_s = self._now_s() + wait_s
            heapq.heappush(self._waiting, (client.due_s, id(client), client))
