"""Makes a request wait for a model or adapter that its endpoint needs. `app` wraps every endpoint in `Waits.around`.

If the endpoint raises an error that says what is missing, the request waits for a load, a search on disk or a route's choice,
and the endpoint is called again. Only for the event loop, except `look_up`, which reads the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.calls.call import Terms
from penstock.calls.in_flight import Arrival, InFlight
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import in_daemon
from penstock.deploy.running import ModelState, ServedModel
from penstock.obs.trace_context import Span
from penstock.serve.asking import PipelineOpen, RouteOpen, UpstreamChosen, models_of
from penstock.serve.course import Routed, course_of
from penstock.serve.errors import BUSY_STATUSES, MODEL_NOT_FOUND, ApiError, shorten, status_of, unavailable
from penstock.serve.http.checks import JsonEndpoint, add_header, unless_gone
from penstock.serve.http.entries import entry_of, note_model
from penstock.serve.pipelines import PipelineFiller
from penstock.serve.route_choice import RouteChooser
from penstock.serve.terms import read_terms
from penstock.serve.trials import Unsure
from penstock.types.adapter import AdapterRef
from penstock.types.errors import TENANT_REASONS, ConfigError, ModelAway, NameUnknown, PutOff, Rejected, RejectReason, counted

if TYPE_CHECKING:  # with an HTTP client, which few servers need
    from penstock.serve.upstream import Upstream

_log = logging.getLogger(__name__)

MAX_LOADS = 3
"""Otherwise, models that a route or a pipeline needs together could unload each other forever."""
MAX_LOOK_S = 5.0
"""Time limit of a search on disk. If it passes, the answer is 404 for a model's name, and 503 for an adapter's."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of bodies that wait for one model, or for the folder of adapters: sixteen of the largest bodies."""
MAX_LOOK_THREADS = 4
"""Adapter names searched for at once. A hanging disk blocks this many threads."""
MAX_LOOKS = 1024
"""Most names, and most requests, that wait for the folder of adapters."""


class FolderWatch:
    """Scans the folder of models again when a request names an unknown model. For the event loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._turn = asyncio.Lock()
        self._began_s = self._ended_s = 0.0
        """When the last look into the folder began and ended."""

    async def find(self, name: str) -> ServedModel | None:
        """Return the model with this name, or None if it is unknown or was removed from the folder."""
        served = self._deployment.find(name)
        if served is None or served.path is None:
            return served
        await self.look()
        return self._deployment.find(name)

    async def look(self) -> None:
        """Wait for a scan of the folder that begins after this call, for `MAX_LOOK_S` at most. Callers share scans."""
        if not self._deployment.may_grow:
            return
        asked_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_S), self._turn:
                if self._began_s > asked_s:
                    return
                # Wait ten times as long as a look takes, so that unknown names can't keep the disk busy.
                rest_s = 10 * (self._ended_s - self._began_s) - (time.monotonic() - self._ended_s)
                await asyncio.sleep(max(0.0, rest_s))
                self._began_s = time.monotonic()
                try:
                    await in_daemon(self._deployment.look)
                finally:
                    self._ended_s = time.monotonic()


class Waits:
    """Calls an endpoint until it has what it needs: a loaded model, an adapter, a route's choice, a pipeline's sources.

    For the event loop.
    """

    def __init__(
        self,
        deployment: Deployment,
        folder: FolderWatch,
        in_flight: InFlight,
        chooser: RouteChooser,
        filler: PipelineFiller,
        upstreams: Mapping[str, Upstream],
    ) -> None:
        self._upstreams = upstreams
        self._deployment = deployment
        self._folder = folder
        self._in_flight = in_flight
        self._chooser = chooser
        self._filler = filler
        self._looks = _AdapterLooks(deployment)

    def around(self, answer: JsonEndpoint, *, loads: bool) -> JsonEndpoint:
        """Wrap `answer`: when it lacks something that can be loaded, found or chosen, do that, and call it again.

        The call answers 404 if a search on disk found nothing. `loads`: also load models, and wait for that.
        """

        async def answer_when_there(data: bytes, http: HttpRequest) -> Response:
            has_looked, course = not self._deployment.may_grow, course_of(http.scope)
            while True:
                asked_ns = self._deployment.clock.now_ns()
                try:
                    answered = await self._here_or_upstream(answer, data, http)
                    self._report_route(course.routed, http)
                    return answered
                except (ModelAway, NameUnknown, RouteOpen, PipelineOpen) as lack:
                    if not loads and not isinstance(lack, NameUnknown):
                        raise
                    data = await self._supply(lack, data, http, asked_ns)
                except Unsure as error:
                    assert course.routed is not None
                    if self._ask_next(course.routed, str(error), http):
                        course.decided = course.routed
                    else:  # the large model has gone
                        course.routed = replace(course.routed, trial=None)
                    self._count_wait("route", asked_ns, http)
                except (ApiError, Rejected) as error:
                    if self._falls_back(error, http):
                        self._count_wait("route", asked_ns, http)
                    elif isinstance(error, Rejected) or error.code != MODEL_NOT_FOUND or has_looked:
                        raise
                    else:
                        has_looked = True
                        course.arrival_ns = asked_ns if course.arrival_ns is None else course.arrival_ns
                        await self._folder.look()

        return answer_when_there

    async def _here_or_upstream(self, answer: JsonEndpoint, data: bytes, http: HttpRequest) -> Response:
        try:
            return await answer(data, http)
        except UpstreamChosen as chosen:
            name = chosen.name
        return await self._ask_upstream(name, data, http)

    async def _supply(
        self, lack: ModelAway | NameUnknown | RouteOpen | PipelineOpen, data: bytes, http: HttpRequest, asked_ns: int
    ) -> bytes:
        """Load, find or choose what a request lacks, and return its body, which a pipeline changes.

        Raises `ApiError` and `Rejected`, unless the request's route has another model.
        """
        course = course_of(http.scope)
        if course.arrival_ns is None:
            course.arrival_ns = asked_ns
        try:
            try:
                if isinstance(lack, RouteOpen):
                    await self._chooser.choose(lack.route, lack.name, data, http)
                    self._count_wait("route", asked_ns, http)
                elif isinstance(lack, PipelineOpen):
                    filled = await self._filler.fill(lack.pipeline, data, http)
                    course.filled, course.sent, data = lack.pipeline.name, data, filled
                    self._count_wait("pipeline", asked_ns, http)
                elif isinstance(lack, NameUnknown):
                    course.looked_up = lack.name, await unless_gone(http, self._looks.find(lack.name, len(data)))
                else:
                    await self._load(lack.name, data, http)
            except ModelAway as away:  # a helper model, such as the one that embeds the question
                await self._load(away.name, data, http)
        except (ApiError, Rejected) as error:
            # A refusal by a pipeline's helper is not its route model's fault.
            if isinstance(lack, PipelineOpen) or not self._falls_back(error, http):
                raise
            self._count_wait("route", asked_ns, http)
        return data

    def _falls_back(self, error: ApiError | Rejected, http: HttpRequest) -> bool:
        """Choose a route's next model for a request that one of its models refused. Return whether there is one."""
        course = course_of(http.scope)
        routed = course.routed
        if routed is None or not routed.rest or isinstance(error, PutOff):
            return False
        reason = error.reason if isinstance(error, Rejected) else None
        is_too_long = reason is RejectReason.CONTEXT_LENGTH
        if not is_too_long and (status_of(error) not in BUSY_STATUSES or reason in TENANT_REASONS):
            return False
        served = self._deployment.find(routed.model)
        has_room = served is None or served.state in (ModelState.LOADED, ModelState.FAILED)
        if course.is_background and not (is_too_long or has_room):
            return False  # the model makes room for people, or waits for room: the line comes again
        return self._ask_next(routed, f"after={routed.model}", http)

    def _ask_next(self, routed: Routed, why: str, http: HttpRequest) -> bool:
        """Choose the next model of the request's route, and return whether there is one."""
        route = self._deployment.routes[routed.route]
        there = models_of(route, self._deployment, http.scope, routed.asked)
        rest = [name for name in routed.rest if name in there]
        if not rest:
            return False
        course_of(http.scope).routed = replace(routed, model=rest[0], why=why, rest=(*rest[1:],), trial=None, cost=None)
        return True

    def _count_wait(self, name: str, since_ns: int, http: HttpRequest) -> None:
        course, now_ns = course_of(http.scope), self._deployment.clock.now_ns()
        course.waits = course.waits._replace(**{name: getattr(course.waits, name) + now_ns - since_ns})
        if name == "route":
            course.chosen_ns = now_ns
        if (entry := entry_of(http.scope)) is not None:
            entry.spans.append(Span(name=name, began_ns=since_ns, ended_ns=now_ns))

    async def _ask_upstream(self, name: str, data: bytes, http: HttpRequest) -> Response:
        note_model(http.scope, "chat" if http.url.path.endswith("/chat/completions") else "text_completion", name)
        if (entry := entry_of(http.scope)) is not None:
            entry.explain = tuple  # of the small model of a cascade
        terms = read_terms(http.scope, self._deployment.clock.now_ns(), self._in_flight.config, is_priority_scheduled=True)
        course = course_of(http.scope)
        pay = None if course.routed is None or course.routed.bill is None else partial(course.charge, course.routed)
        with course.elsewhere():
            return await self._upstreams[name].answer(data, http, terms, pay)

    def _report_route(self, routed: Routed | None, http: HttpRequest) -> None:
        """Report the route's choice in a header and in the metrics."""
        if routed is not None:
            add_header(http.scope, b"x-route", routed.header)
            if (served := self._deployment.find(routed.model)) is not None:
                served.metrics.count_routed(routed.route)

    async def _load(self, name: str, data: bytes, http: HttpRequest) -> None:
        """Wait until the model is loaded. Returns at once if it is not served any more. Raises `Rejected`."""
        clock, config, course = self._deployment.clock, self._in_flight.config, course_of(http.scope)
        served = await unless_gone(http, self._folder.find(name))
        course.loads[name] += 1
        if course.loads[name] > MAX_LOADS:
            raise unavailable(
                f"This request waited for {name} {MAX_LOADS} times, and it was gone each time before it was used. The memory "
                "may not hold all models that the request needs at once."
            )
        if served is None:  # it was removed: the endpoint, called again, answers 404
            return
        asked_ns, unix_time_s = clock.now_ns(), self._deployment.sources.unix_time_s
        terms = read_terms(http.scope, asked_ns, config, is_priority_scheduled=True)
        request_id, owner, arrival_ns = terms.request_id, terms.owner, terms.arrival_ns
        arrival = Arrival(request_id, owner, arrival_ns, clock, unix_time_s, asked_ns, waits=terms.waits, model=served.name)
        with self._in_flight.arriving(arrival):
            await unless_gone(http, _wait_for_load(self._deployment, served, terms, _wait_limit_ns(terms, config), len(data)))
        self._count_wait("model", asked_ns, http)
        served.metrics.count_model_wait(clock.now_ns() - asked_ns)


class _AdapterLooks:
    """Searches the folders of adapters for unknown names, in threads. Call it from the event loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._looks: dict[str, asyncio.Task[tuple[ServedModel, AdapterRef] | None]] = {}
        """Adapter name -> the search for it, which may still wait for a thread."""
        self._turns = asyncio.Semaphore(MAX_LOOK_THREADS)
        self._num_asking = 0
        self._num_asking_bytes = 0

    async def find(self, name: str, num_bytes: int) -> tuple[ServedModel, AdapterRef] | None:
        """Return the adapter on disk with this name, or None. Callers share a search. `num_bytes`: size of the body.

        Raises 503 if too many requests wait, or if the search takes too long.
        """
        is_under_way = name in self._looks
        num_names = len(self._looks) + (not is_under_way)
        if max(self._num_asking + 1, num_names) > MAX_LOOKS or self._num_asking_bytes + num_bytes > MAX_WAITING_BYTES:
            raise unavailable("Too many requests are waiting for a search of the adapter folder. Its disk may be slow.")
        self._num_asking += 1
        self._num_asking_bytes += num_bytes
        try:
            async with asyncio.timeout(MAX_LOOK_S):
                found = await asyncio.shield(self._look(name))
                if found is None and is_under_way:  # the file may be newer than that search
                    found = await asyncio.shield(self._look(name))
                return found
        except TimeoutError:
            message = (
                f"The adapter folder could not be searched for {shorten(name)!r} within {MAX_LOOK_S:g} s. Its disk may be slow."
            )
            raise unavailable(message, MAX_LOOK_S) from None
        finally:
            self._num_asking -= 1
            self._num_asking_bytes -= num_bytes

    def _look(self, name: str) -> asyncio.Task[tuple[ServedModel, AdapterRef] | None]:
        """Return the running search for the name, or start one. A search goes on even if all callers have left."""
        task = self._looks.get(name)
        if task is None:
            task = self._looks[name] = asyncio.create_task(self._ask(name))
            task.add_done_callback(lambda _: self._looks.pop(name))
        return task

    async def _ask(self, name: str) -> tuple[ServedModel, AdapterRef] | None:
        async with self._turns:
            return await in_daemon(partial(look_up, name, self._deployment))


async def _wait_for_load(deployment: Deployment, served: ServedModel, terms: Terms, limit_ns: int, num_bytes: int) -> None:
    """Wait until the model is loaded. `num_bytes`: size of the request's body.

    Raises `Rejected` if too many requests wait for the model, or if loading takes longer than the request may wait.
    """
    key, place, detail = terms.owner.key, (_account(terms), num_bytes), f"The model {served.name} is being loaded."
    if (refusal := _no_place(served, terms, num_bytes)) is not None:
        raise _refused(served, key, *refusal, deployment.expected_wait_s(served))
    patience_s = (limit_ns - deployment.clock.now_ns()) / 1e9
    future = deployment.want(served, is_background=terms.background)  # load it even if this request can't wait so long
    expected_s = 0.0 if future.done() else deployment.expected_wait_s(served)
    if expected_s > patience_s:
        raise _refused(served, key, RejectReason.UNAVAILABLE, detail, expected_s)
    served.waiting.append(place)
    try:
        async with asyncio.timeout(max(0.0, patience_s)):
            await asyncio.shield(asyncio.wrap_future(future))
    except TimeoutError:
        raise _refused(served, key, RejectReason.UNAVAILABLE, detail, deployment.expected_wait_s(served)) from None
    except Rejected as rejected:
        if not terms.background:  # which comes again
            served.metrics.count_rejected(rejected.reason, key)
        raise
    finally:
        served.waiting.remove(place)


def _account(terms: Terms) -> tuple[str, bool] | None:
    """Return the request's tenant and whether it has limits of its own, as in `Tenants`. None for a line of a batch."""
    return None if terms.background else (terms.owner.tenant, terms.limits is not None)


def _no_place(served: ServedModel, terms: Terms, num_bytes: int) -> tuple[RejectReason, str] | None:
    """Return why the request can't wait for the model to be loaded, or None.

    A named tenant has half of the places and bytes, and at most as many places as it may have concurrent requests.
    """
    mine, sizes = _account(terms), [size for _, size in served.waiting]
    own = [] if mine is None else [size for account, size in served.waiting if account == mine]
    most = (terms.limits or served.tenant_limits).max_concurrent
    if most is not None and len(own) >= most:
        detail = f"the tenant has {counted(len(own), 'request')} already, at most {most} may run or wait"
        return RejectReason.TENANT_CONCURRENCY, detail
    if terms.owner.tenant and own and (2 * len(own) >= served.max_waiting or 2 * (sum(own) + num_bytes) > MAX_WAITING_BYTES):
        waits = counted(len(own), "request of the tenant is", "requests of the tenant are")
        return RejectReason.QUEUE_FULL, f"{waits} already waiting for {served.name} to be loaded, which is its share"
    if len(sizes) >= served.max_waiting or sum(sizes) + num_bytes > MAX_WAITING_BYTES:
        return RejectReason.QUEUE_FULL, f"{len(sizes)} requests are already waiting for {served.name} to be loaded"
    return None


def _wait_limit_ns(terms: Terms, config: ServerConfig) -> int:
    """Return the time until which a request may wait for a load.

    It is the earliest of the request's time limits, the server's, and `--load-timeout`.
    """
    return min([terms.queued_ns + int(config.load_timeout_s * 1e9), *(at_ns for at_ns, _, _ in terms.time_limits)])


def _refused(served: ServedModel, key: str, reason: RejectReason, detail: str, retry_after_s: float) -> Rejected:
    served.metrics.count_rejected(reason, key)
    return Rejected(reason, detail, retry_after_s=retry_after_s)


def look_up(name: str, deployment: Deployment) -> tuple[ServedModel, AdapterRef] | None:
    """Search the folders of adapters for this name. Return the adapter with its model, or None. Reads the disk.

    Raises 503 if that fails, or if there are too many names.
    """
    owner = deployment.adapter_owner(name)
    for served in deployment.served if owner is None else (owner,):
        try:
            adapter = served.adapters.find(name) if served.adapters is not None and served.is_there else None
        except ConfigError as error:  # too many names
            raise unavailable(str(error)) from None
        except OSError as error:
            _log.warning("the adapter folder can't be searched for %r: %s", name, error)
            raise unavailable(f"The adapter folder can't be read: {error.strerror}.") from None
        if adapter is not None:
            return served, adapter
    return None
