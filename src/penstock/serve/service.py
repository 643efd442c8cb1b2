"""From a checked call to running requests: admission, the list of what is in flight, cancelling. One per app.

Called by the endpoints on the event loop. Knows no JSON and writes no response.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.admission import Admission, Ask, Place
from penstock.config import ServerConfig
from penstock.config.keys import isolates_tenants
from penstock.deploy.running import RunningModel
from penstock.engine.bridge import Stream
from penstock.engine.thread import EngineState
from penstock.obs.explain.explanation import Explanation, explain_intake, summary
from penstock.serve.call import CallTerms, Owner
from penstock.types.errors import Rejected
from penstock.types.request import Request, RequestStatus
from penstock.types.sampling import Matcher, SamplingParams

_log = logging.getLogger(__name__)

_CANCELLED = "the request was cancelled"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to be generated: choice `index` of a call."""

    index: int
    prompt_idx: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    matcher: Matcher | None = None
    """If and only if `sampling.follows_grammar`; of this choice alone."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """What runs on behalf of one HTTP request."""

    request_id: str
    owner: Owner
    requests: tuple[Request, ...]
    """One for each choice; the engine's, who writes to them."""

    @property
    def engine_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)


@dataclass(frozen=True, slots=True)
class _Landed:
    """What ran, with no more of it than is needed to ask for it."""

    request_id: str
    owner: Owner
    engine_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of the HTTP requests that had one id."""

    request_id: str
    created_unix_s: int
    choices: list[tuple[int, Explanation]]
    """(index of the choice, what became of it), not empty. If the client used the id more than once, of the last."""
    num_forgotten: int = 0
    """Choices that ended too long ago to be remembered."""

    @property
    def summary(self) -> str:
        """Of the choice that took longest."""
        return summary(max((choice for _, choice in self.choices), key=lambda choice: choice.total_ns))


class _Stay:
    """At the door, from `Service.admit` to the end of the block."""

    __slots__ = ("_admission", "_place")

    def __init__(self, admission: Admission, place: Place) -> None:
        self._admission = admission
        self._place = place

    def __enter__(self) -> Place:
        return self._place

    def __exit__(self, *_exc_info: object) -> None:
        self._admission.leave(self._place)


class Service:
    """Owns which HTTP requests are in flight."""

    def __init__(self, runtime: RunningModel, config: ServerConfig) -> None:
        self.runtime = runtime
        self.config = config
        self._isolates_tenants = isolates_tenants(config, runtime.prefix_sharing)
        self._num_opened = 0
        self._flights: dict[str, list[_Flight]] = {}
        self._landed: deque[_Landed] = deque()
        """The last that ended; as many as the journal remembers requests."""
        self._landed_of: dict[str, list[_Landed]] = {}
        """The same by their ids, the oldest first."""

    def admit(self, ask: Ask) -> _Stay:
        """Hold places in the queue until the block ends, which must submit the call or give up. Raises `Rejected`."""
        runtime = self.runtime
        engine, admission = runtime.engine, runtime.admission
        try:
            place = admission.decide(ask, engine.load(), runtime.clock.now_ns(), refuses_with=engine.state.refuses_with)
        except Rejected as rejected:
            runtime.metrics.count_rejected(rejected.reason)
            raise
        return _Stay(admission, place)

    def open(self, terms: CallTerms, choices: Sequence[Choice], place: Place) -> CallStream:
        """Submit the choices. Close the result, whatever happens."""
        # Clients may use one id for several calls; the engine's ids are ours, and unique.
        self._num_opened += 1
        salt = terms.cache_salt
        if self._isolates_tenants:
            salt = terms.owner.tenant.encode() + b"\0" + salt  # no tenant's name contains a zero byte
        requests = [
            Request(
                request_id=f"{terms.request_id}/{self._num_opened}.{choice.index}",
                prompt_token_ids=choice.prompt_token_ids,
                sampling=choice.sampling,
                arrival_ns=terms.arrival_ns,
                parent_id=f"{terms.request_id}/{self._num_opened}.{choice.prompt_idx}",
                priority=terms.priority,
                deadline_ns=terms.deadline_ns,
                queue_deadline_ns=terms.queue_deadline_ns,
                first_token_deadline_ns=terms.first_token_deadline_ns,
                slo_ttft_ns=terms.slo_ttft_ns or self.runtime.admission.limits.slo_ttft_ns,
                slo_itl_ns=terms.slo_itl_ns or self.runtime.slo_itl_ns,
                tenant=terms.owner.tenant,
                cache_salt=salt,
                matcher=choice.matcher,
            )
            for choice in choices
        ]
        flight = _Flight(terms.request_id, terms.owner, tuple(requests))
        runtime = self.runtime
        runtime.admission.enter(place, requests, runtime.clock.now_ns())
        try:
            stream = runtime.bridge.open(requests)
        except BaseException:
            runtime.admission.forget(flight.engine_ids)
            raise
        self._flights.setdefault(terms.request_id, []).append(flight)
        return CallStream(self, terms, flight, stream)

    def cancel(self, request_id: str, owner: Owner) -> bool:
        """Abort what runs under this id for this owner. False if there is nothing: other owners' requests can't be seen."""
        flights = [flight for flight in self._flights.get(request_id, ()) if flight.owner == owner]
        for flight in flights:
            for engine_id in flight.engine_ids:
                self.runtime.bridge.abort(engine_id, _CANCELLED)
        return bool(flights)

    def explain(self, request_id: str, owner: Owner) -> Callable[[], Told | None]:
        """What became of the last request with this id of this owner; None if there is none, or it is not remembered.

        The result does the work, on any thread.
        """
        flights: list[_Flight | _Landed] = [*self._landed_of.get(request_id, ()), *self._flights.get(request_id, ())]
        flights = [flight for flight in reversed(flights) if flight.owner == owner]
        return lambda: next(filter(None, map(self._tell, flights)), None)

    def explain_running(self, owner: Owner) -> Callable[[], list[Told]]:
        """All requests of this owner that have not ended, in the order in which they came.

        The result does the work, on any thread.
        """
        flights = self._flights_of(owner)
        return lambda: [told for flight in flights if (told := self._tell(flight))]

    def names_of(self, owner: Owner) -> dict[str, tuple[str, int]]:
        """The engine's id -> the client's and the choice's index, of this owner's requests that have not ended."""
        flights = self._flights_of(owner)
        return {name: (flight.request_id, index) for flight in flights for index, name in enumerate(flight.engine_ids)}

    def _flights_of(self, owner: Owner) -> list[_Flight]:
        return [flight for flights in self._flights.values() for flight in flights if flight.owner == owner]

    def _tell(self, flight: _Flight | _Landed) -> Told | None:
        runtime = self.runtime
        if runtime.journal is None:
            return None
        requests = flight.requests if isinstance(flight, _Flight) else ()
        # Seen before the journal is asked: what ends meanwhile is in it.
        live = [request for request in requests if request.status is not RequestStatus.FINISHED]
        known = {told.request_id: told for told in runtime.journal.explain_all(flight.engine_ids, runtime.clock.now_ns)}
        now_ns = runtime.clock.now_ns()
        for request in live:
            if request.request_id not in known:  # the engine has not taken it from its inbox: it is no less on its way
                known[request.request_id] = explain_intake(request, now_ns)
        choices = [(index, known[name]) for index, name in enumerate(flight.engine_ids) if name in known]
        if not choices:
            return None
        age_s = (now_ns - choices[0][1].arrival_ns) // 1_000_000_000
        num_forgotten = len(flight.engine_ids) - len(choices)
        return Told(flight.request_id, runtime.sources.unix_time_s() - age_s, choices, num_forgotten)

    def _log_slow(self, flight: _Flight) -> None:
        limit_s = self.config.slow_request_s
        if limit_s is None:
            return
        elapsed_s = (self.runtime.clock.now_ns() - flight.requests[0].arrival_ns) / 1e9
        if elapsed_s >= limit_s:
            told = self._tell(flight)
            why = (
                told.summary
                if told
                else f"took {elapsed_s:.1f} s; why is not known, as no request is explained (--explained-requests)"
            )
            _log.warning("slow request %s: %s", flight.request_id, why)

    def _remember(self, flight: _Flight) -> None:
        """For whoever asks after its end."""
        journal = self.runtime.journal
        if journal is None:
            return
        landed = _Landed(flight.request_id, flight.owner, flight.engine_ids)
        self._landed.append(landed)
        self._landed_of.setdefault(landed.request_id, []).append(landed)
        if len(self._landed) > journal.max_ended:
            oldest = self._landed.popleft()
            same = self._landed_of[oldest.request_id]
            same.remove(oldest)
            if not same:
                del self._landed_of[oldest.request_id]

    def land(self, flight: _Flight) -> None:
        """Called by `CallStream` when its call has ended."""
        if self.runtime.engine.state is not EngineState.READY:
            # A core that broke may not have told their ends. While it is well it does, on its own thread.
            self.runtime.admission.forget(flight.engine_ids)
        self._remember(flight)
        self._log_slow(flight)
        flights = self._flights[flight.request_id]
        flights.remove(flight)
        if not flights:
            del self._flights[flight.request_id]


class CallStream:
    """The stream of one call, and which of its choices a chunk belongs to.

    As a context manager it closes the call if the block fails; else whoever sends the answer closes it.
    """

    def __init__(self, service: Service, terms: CallTerms, flight: _Flight, stream: Stream) -> None:
        self._service = service
        self.terms = terms
        self._flight = flight
        self._is_closed = False
        self.stream = stream
        self.index_of = {engine_id: index for index, engine_id in enumerate(flight.engine_ids)}
        """Engine's request id -> choice index."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_rest: object) -> None:
        if exc_type is not None:
            self.close()

    def close(self) -> None:
        """Abort what has not finished and forget the call. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.stream.close()
            self._service.land(self._flight)
