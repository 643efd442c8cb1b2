"""Makes requests wait for a load of their model, or for a search on disk for their model or adapter.

`app` wraps every endpoint in `Waits.around`. If the endpoint raises that something is missing, the request waits, and the
endpoint is called again. A request for a loaded model and a known adapter does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.calls.in_flight import Arrival, InFlight
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel
from penstock.deploy.served import ServedModel
from penstock.serve.asking import ARRIVAL_KEY, LOADED_KEY, LOOKED_UP_KEY, look_up, read_owner, read_terms
from penstock.serve.errors import MODEL_NOT_FOUND, ApiError, model_not_found, shorten, unavailable
from penstock.serve.http.checks import JsonEndpoint, identity_of
from penstock.serve.http.exchange import unless_gone
from penstock.types.adapter import AdapterRef
from penstock.types.errors import ModelAway, NameUnknown, Rejected, RejectReason

MAX_LOOK_S = 5.0
"""After this time, a search on disk counts as finding nothing."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of bodies that wait for one model, or for the folder of adapters: sixteen of the largest bodies."""
MAX_LOOK_THREADS = 4
"""Adapter names searched for at once. A hanging disk blocks this many threads."""
MAX_LOOKS = 1024
"""Most names, and most requests, that wait for the folder of adapters."""


class FolderWatch:
    """Looks for new models in the folder of models when a request names an unknown one. For the event loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._turn = asyncio.Lock()
        self._began_s = self._ended_s = 0.0
        """When the last look into the folder began and ended."""

    async def find(self, name: str) -> ServedModel | None:
        """Return the model with this name, or None if it was removed from the folder."""
        served = self._deployment.find(name)
        if served is None or served.path is None:
            return served
        await self.look()
        return self._deployment.find(name)

    async def look(self) -> None:
        """Wait for a look into the folder that begins after this call, for `MAX_LOOK_S` at most. Callers share looks."""
        if not self._deployment.may_grow:
            return
        asked_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_S), self._turn:
                if self._began_s > asked_s:
                    return
                # Looks are ten times as far apart as one takes, so that names which do not exist can't fill the time.
                rest_s = 10 * (self._ended_s - self._began_s) - (asked_s - self._ended_s)
                await asyncio.sleep(max(0.0, rest_s))
                self._began_s = time.monotonic()
                try:
                    await asyncio.to_thread(self._deployment.look)
                finally:
                    self._ended_s = time.monotonic()


class Waits:
    """Makes requests wait for missing models and adapters. For the event loop."""

    def __init__(self, deployment: Deployment, folder: FolderWatch, in_flight: InFlight) -> None:
        self._deployment = deployment
        self._folder = folder
        self._in_flight = in_flight
        self._looks = _AdapterLooks(deployment)

    def around(self, answer: JsonEndpoint, *, loads: bool) -> JsonEndpoint:
        """Wrap `answer` so that it is retried after a missing model or adapter was found. `loads`: also load models."""

        async def answer_when_there(data: bytes, http: HttpRequest) -> Response:
            has_looked = not self._deployment.may_grow
            while True:
                away = unknown = None
                try:
                    return await answer(data, http)
                except ModelAway as error:
                    if not loads:
                        raise
                    away = error.name
                except NameUnknown as error:
                    unknown = error.name
                except ApiError as error:
                    if error.code != MODEL_NOT_FOUND or has_looked:
                        raise
                if away is not None:
                    await self._load(away, data, http)
                elif unknown is not None:
                    http.scope.setdefault(ARRIVAL_KEY, self._deployment.clock.now_ns())
                    http.scope[LOOKED_UP_KEY] = unknown, await unless_gone(http, self._looks.find(unknown, len(data)))
                else:
                    has_looked = True
                    await self._folder.look()

        return answer_when_there

    async def _load(self, name: str, data: bytes, http: HttpRequest) -> None:
        """Wait until the model is loaded. Raises `Rejected`, or 404 if the model was removed from the folder."""
        clock, config = self._deployment.clock, self._in_flight.config
        served = await unless_gone(http, self._folder.find(name))
        if served is None:
            raise model_not_found(name, self._deployment.names)
        asked_ns = clock.now_ns()
        arrival_ns = http.scope.setdefault(ARRIVAL_KEY, asked_ns)
        limit_ns = _limit_ns(http.scope, arrival_ns, config)
        owner, request_id = read_owner(http.scope, config), identity_of(http.scope).request_id
        unix_time_s = self._deployment.sources.unix_time_s
        with self._in_flight.arriving(Arrival(request_id, owner, arrival_ns, clock, unix_time_s, asked_ns)):
            await unless_gone(http, _loaded(self._deployment, served, limit_ns, len(data)))
        http.scope[LOADED_KEY] = now_ns = clock.now_ns()
        served.metrics.count_model_wait(now_ns - asked_ns)


class _AdapterLooks:
    """Searches the folders of adapters for unknown names, in threads."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._looks: dict[str, asyncio.Task[tuple[ServedModel, AdapterRef] | None]] = {}
        """Searches by name, including those that wait for a thread."""
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
            raise unavailable("Too many requests wait for the folder of adapters. Its disk may be slow.")
        self._num_asking += 1
        self._num_asking_bytes += num_bytes
        try:
            async with asyncio.timeout(MAX_LOOK_S):
                found = await asyncio.shield(self._look(name))
                if found is None and is_under_way:  # it may have been put there after that look
                    found = await asyncio.shield(self._look(name))
                return found
        except TimeoutError:
            message = f"The disk did not say within {MAX_LOOK_S:g} s whether there is an adapter {shorten(name)!r}."
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
            found: Future[tuple[ServedModel, AdapterRef] | None] = Future()
            # A daemon of its own: if the disk hangs, the process ends without it, and no other work lacks a thread.
            threading.Thread(target=self._run, args=(name, found), name="adapter-look", daemon=True).start()
            return await asyncio.wrap_future(found)

    def _run(self, name: str, found: Future[tuple[ServedModel, AdapterRef] | None]) -> None:
        if not found.set_running_or_notify_cancel():
            return
        try:
            found.set_result(look_up(name, self._deployment))
        except Exception as error:  # the task raises it
            found.set_exception(error)


async def _loaded(deployment: Deployment, served: ServedModel, limit_ns: int, num_bytes: int) -> RunningModel:
    """Wait for the model to be loaded, and return it. `num_bytes`: size of the request's body.

    Raises `Rejected` if too many requests wait for the model, or if loading takes longer than the request may wait.
    """
    if served.num_waiting >= served.max_waiting or served.num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
        detail = f"{served.num_waiting} requests wait for {served.name} to be loaded already"
        raise _refused(served, RejectReason.QUEUE_FULL, detail, deployment.expected_wait_s(served))
    patience_s = (limit_ns - deployment.clock.now_ns()) / 1e9
    future = deployment.want(served)  # loaded also if this request does not wait so long: others will ask
    expected_s = 0.0 if future.done() else deployment.expected_wait_s(served)
    if expected_s > patience_s:
        raise _refused(served, RejectReason.UNAVAILABLE, f"The model {served.name} is being loaded.", expected_s)
    served.num_waiting += 1
    served.num_waiting_bytes += num_bytes
    try:
        async with asyncio.timeout(max(0.0, patience_s)):
            return await asyncio.shield(asyncio.wrap_future(future))
    except TimeoutError:
        expected_s = deployment.expected_wait_s(served)
        raise _refused(served, RejectReason.UNAVAILABLE, f"The model {served.name} is being loaded.", expected_s) from None
    finally:
        served.num_waiting -= 1
        served.num_waiting_bytes -= num_bytes


def _limit_ns(scope: Scope, arrival_ns: int, config: ServerConfig) -> int:
    """Return the time until which a request may wait: its own limit or the server's, if earlier. Raises 400."""
    terms = read_terms(scope, arrival_ns, config, is_priority_scheduled=True)
    return min([arrival_ns + int(config.load_timeout_s * 1e9), *(at_ns for at_ns, _ in terms.time_limits)])


def _refused(served: ServedModel, reason: RejectReason, detail: str, retry_after_s: float) -> Rejected:
    served.metrics.count_rejected(reason)
    return Rejected(reason, detail, retry_after_s=retry_after_s)
