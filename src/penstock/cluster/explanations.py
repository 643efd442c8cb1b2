"""Collects explanations of requests from the replicas that had them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from penstock.cluster.flights import Flight
from penstock.cluster.link import Link
from penstock.cluster.messages import Explain, Explained
from penstock.obs.explain.explanation import Explanation, Route, continued

TIMEOUT_S = 1.0
"""Time limit of a caller's wait."""
ANSWER_S = 0.8
"""Time after which replicas that have not answered are left out."""


@dataclass(slots=True, eq=False)
class _Query:
    answer: Future[list[Explanation]]
    num_left: int
    """Replicas that have not answered yet."""
    found: dict[tuple[str, str], Explanation] = field(default_factory=dict)
    """(request id, replica name) -> that replica's explanation."""


class ExplanationQueries:
    """Not thread-safe: used on the fleet's event loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, flights: Mapping[str, Flight]) -> None:
        """`flights`: unfinished requests by id."""
        self._loop, self._flights = loop, flights
        self._ended: OrderedDict[str, Route] = OrderedDict()
        """Id of an ended request -> its last replica and the earlier ones. The oldest end is first."""
        self._open: dict[int, _Query] = {}
        self._num_asked = 0

    def keep(self, flight: Flight, max_ended: int) -> None:
        """Remember the route of a request that has ended. Keep the last `max_ended` of them."""
        request = flight.request
        if flight.route is None or request.background:  # the lines of a batch would push out requests that people ask about
            return
        self._ended[request.request_id] = flight.route
        self._ended.move_to_end(request.request_id)
        while len(self._ended) > max_ended:
            self._ended.popitem(last=False)

    def _route(self, request_id: str) -> Route | None:
        flight = self._flights.get(request_id)
        return self._ended.get(request_id) if flight is None else flight.route

    def ask(self, request_ids: Sequence[str], links: Mapping[str, Link], answer: Future[list[Explanation]]) -> None:
        """Ask the replicas that had these requests. `links`: name of a replica -> its link."""
        asked: dict[str, list[str]] = {}
        for request_id in request_ids:
            if (route := self._route(request_id)) is None:
                continue
            for name in {route.replica, *route.before} & links.keys():
                asked.setdefault(name, []).append(request_id)
        if not asked:
            answer.set_result([])
            return
        query = _Query(answer, len(asked))
        numbers: list[int] = []
        for name, ids in asked.items():
            self._num_asked += 1
            numbers.append(self._num_asked)
            self._open[self._num_asked] = query
            links[name].send(Explain(self._num_asked, ids))
        self._loop.call_later(ANSWER_S, self._give_up, numbers, query)

    def take_answer(self, replica: str, explained: Explained, shift_ns: int) -> None:
        """Store one replica's explanations. `shift_ns`: this clock minus the replica's."""
        query = self._open.pop(explained.number, None)
        if query is None:  # it came too late
            return
        for one in explained.explanations:
            route, fetch = self._route(one.request_id), explained.fetches.get(one.request_id)
            if route is not None and fetch is not None:
                route = replace(route, num_fetched_tokens=fetch.num_tokens, fetch_ns=fetch.duration_ns)
            query.found[one.request_id, replica] = replace(one, arrival_ns=one.arrival_ns + shift_ns, route=route)
        query.num_left -= 1
        if not query.num_left:
            query.answer.set_result(list(self._combined(query.found)))

    def _give_up(self, numbers: Sequence[int], query: _Query) -> None:
        """Answer with the explanations received so far, unless every replica has answered."""
        for number in numbers:
            self._open.pop(number, None)
        if not query.answer.done():
            query.answer.set_result(list(self._combined(query.found)))

    def _combined(self, found: Mapping[tuple[str, str], Explanation]) -> Iterator[Explanation]:
        """Yield one explanation per request: the last replica's, joined to that of the replica that made the first token."""
        for (request_id, replica), last in found.items():
            route = self._route(request_id)
            if route is None or route.replica != replica:
                continue
            earlier = [found[request_id, name] for name in route.before if name != replica and (request_id, name) in found]
            first = next((one for one in earlier if one.num_generated_tokens), None)
            yield last if first is None else continued(first, last)
