"""Requests wait here for their model to be loaded, and are read again when it is there. Nothing of them was sent before.

`app` puts `when_loaded` around every endpoint that takes a body, and where a model is named `FolderWatch.when_found`, for one
that may have been put into the folder of models meanwhile, and `AdapterLooks.when_looked_up`, for an adapter that nobody has
asked for yet. A request of a loaded model, and of an adapter that is known, passes at no cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

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

_Answer = TypeVar("_Answer")
_Endpoint = Callable[[bytes, HttpRequest], Awaitable[_Answer]]
"""A function that answers a request and its body, which is empty where the route takes none."""
MAX_LOOK_S = 5.0
"""A disk that takes longer has nothing new."""
LOOK_SHARE = 10
"""Looks are so many times as far apart as one takes, so that names which do not exist can't fill the time."""
MAX_WAITING_BYTES = 64 << 20
"""Bodies of the requests that wait for one model, or for the folder of adapters: sixteen of the largest."""
MAX_LOOK_THREADS = 4
"""Names that the folder of adapters is asked for at once. A disk that hangs keeps so many threads."""
MAX_LOOKS = 1024
"""Names, and requests, that wait for the folder of adapters."""


def when_loaded(deployment: Deployment, folder: FolderWatch, in_flight: InFlight, answer: JsonEndpoint) -> JsonEndpoint:
    """An endpoint that answers as `answer` does, after its model was loaded if it is away."""

    async def answer_when_loaded(data: bytes, http: HttpRequest) -> Response:
        while True:
            try:
                return await answer(data, http)
            except ModelAway as away:
                name = away.name
            served = await unless_gone(http, folder.find(name))
            if served is None:  # it was taken from the folder
                raise model_not_found(name, deployment.names)
            asked_ns = deployment.clock.now_ns()
            arrival_ns = http.scope.setdefault(ARRIVAL_KEY, asked_ns)
            limit_ns = _limit_ns(http.scope, arrival_ns, in_flight.config)
            owner, request_id = read_owner(http.scope, in_flight.config), identity_of(http.scope).request_id
            unix_time_s = deployment.sources.unix_time_s
            with in_flight.arriving(Arrival(request_id, owner, arrival_ns, deployment.clock, unix_time_s, asked_ns)):
                await unless_gone(http, _loaded(deployment, served, limit_ns, len(data)))
            http.scope[LOADED_KEY] = now_ns = deployment.clock.now_ns()
            served.metrics.count_model_wait(now_ns - asked_ns)

    return answer_when_loaded


class FolderWatch:
    """Looks into the folder of models, off the event loop, when somebody asks for what is not known. Belongs to the loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._turn = asyncio.Lock()
        self._began_s = self._ended_s = 0.0
        """The last look."""

    def when_found(self, answer: _Endpoint[_Answer]) -> _Endpoint[_Answer]:
        """An endpoint that answers as `answer` does, after another look if that says 404 for a model's name."""
        if not self._deployment.may_grow:
            return answer

        async def answer_when_found(data: bytes, http: HttpRequest) -> _Answer:
            try:
                return await answer(data, http)
            except ApiError as error:
                if error.code != MODEL_NOT_FOUND:
                    raise
            await self.look()
            return await answer(data, http)

        return answer_when_found

    async def find(self, name: str) -> ServedModel | None:
        """The model with this name, unless somebody has taken it from the folder."""
        served = self._deployment.find(name)
        if served is None or served.path is None:
            return served
        await self.look()
        return self._deployment.find(name)

    async def look(self) -> None:
        """Return after a look that began later than this call, or `MAX_LOOK_S`. Many callers share one look."""
        if not self._deployment.may_grow:
            return
        asked_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_S), self._turn:
                if self._began_s > asked_s:
                    return
                rest_s = LOOK_SHARE * (self._ended_s - self._began_s) - (asked_s - self._ended_s)
                await asyncio.sleep(max(0.0, rest_s))
                self._began_s = time.monotonic()
                try:
                    await asyncio.to_thread(self._deployment.look)
                finally:
                    self._ended_s = time.monotonic()


class AdapterLooks:
    """Asks the folders of adapters, off the event loop, for names that are not known. Belongs to the loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._looks: dict[str, asyncio.Task[tuple[ServedModel, AdapterRef] | None]] = {}
        """By the name; those that wait for a thread among them."""
        self._turns = asyncio.Semaphore(MAX_LOOK_THREADS)
        self._num_asking = 0
        self._num_asking_bytes = 0

    def when_looked_up(self, answer: _Endpoint[_Answer]) -> _Endpoint[_Answer]:
        """An endpoint that answers as `answer` does, after a look if only the disk can tell whether it knows a name."""
        if not self._deployment.may_grow and all(one.adapters is None for one in self._deployment.served):
            return answer

        async def answer_when_looked_up(data: bytes, http: HttpRequest) -> _Answer:
            try:
                return await answer(data, http)
            except NameUnknown as unknown:
                name = unknown.name
            http.scope.setdefault(ARRIVAL_KEY, self._deployment.clock.now_ns())
            http.scope[LOOKED_UP_KEY] = name, await unless_gone(http, self._find(name, len(data)))
            return await answer(data, http)

        return answer_when_looked_up

    async def _find(self, name: str, num_bytes: int) -> tuple[ServedModel, AdapterRef] | None:
        """The adapter that the disk has for a name. Callers share one look. Raises 503: too many wait, or it takes too long.

        `num_bytes`: of the body, which waits, too.
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
            message = f"The disk has not told within {MAX_LOOK_S:g} s whether there is an adapter {shorten(name)!r}."
            raise unavailable(message, MAX_LOOK_S) from None
        finally:
            self._num_asking -= 1
            self._num_asking_bytes -= num_bytes

    def _look(self, name: str) -> asyncio.Task[tuple[ServedModel, AdapterRef] | None]:
        """The look that is under way, or another one. It goes on if nobody waits for it any more."""
        task = self._looks.get(name)
        if task is None:
            task = self._looks[name] = asyncio.create_task(self._ask(name))
            task.add_done_callback(lambda _: self._looks.pop(name))
        return task

    async def _ask(self, name: str) -> tuple[ServedModel, AdapterRef] | None:
        async with self._turns:
            told: Future[tuple[ServedModel, AdapterRef] | None] = Future()
            # A daemon of its own: if the disk hangs, the process ends without it, and no other work lacks a thread.
            threading.Thread(target=self._run, args=(name, told), name="adapter-look", daemon=True).start()
            return await asyncio.wrap_future(told)

    def _run(self, name: str, told: Future[tuple[ServedModel, AdapterRef] | None]) -> None:
        if not told.set_running_or_notify_cancel():
            return
        try:
            told.set_result(look_up(name, self._deployment))
        except Exception as error:  # the task raises it
            told.set_exception(error)


async def _loaded(deployment: Deployment, served: ServedModel, limit_ns: int, num_bytes: int) -> RunningModel:
    """The model when it is there. Raises `Rejected`: too many wait for it, or it takes longer than the request may wait.

    `num_bytes`: of the body, which waits, too.
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
    """The instant up to which a request may wait: a limit of its own, or the server's. Raises 400 for a malformed one."""
    terms = read_terms(scope, arrival_ns, config, is_priority_scheduled=True)
    return min([arrival_ns + int(config.load_timeout_s * 1e9), *(at_ns for at_ns, _ in terms.time_limits)])


def _refused(served: ServedModel, reason: RejectReason, detail: str, retry_after_s: float) -> Rejected:
    served.metrics.count_rejected(reason)
    return Rejected(reason, detail, retry_after_s=retry_after_s)
