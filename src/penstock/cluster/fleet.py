"""The front's end of the cluster: a `Fleet` takes the place of a single server's engine.

Its thread runs an event loop, which alone touches the replicas and the requests in flight. A request that a replica loses, or
refuses for a reason of its own, goes to another one with the tokens that it has: answers do not depend on where they are
computed, so the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

from penstock.clock import Clock
from penstock.cluster.explanations import TIMEOUT_S, ExplanationQueries
from penstock.cluster.flights import Flight, News, ReplicaEnd, shift_times
from penstock.cluster.link import MAX_BYTES, Link
from penstock.cluster.messages import (
    FORMAT,
    FRONT,
    NONCE_BYTES,
    REPLICA,
    Abort,
    Beat,
    Explained,
    Greeting,
    Hello,
    Report,
    Source,
    Submit,
    Welcome,
    Work,
    decode_hello,
    decode_to_front,
    prove,
    work_of,
)
from penstock.deploy.adapters import Adapters
from penstock.deploy.running import ModelInfo
from penstock.engine.bridge import make_waker
from penstock.engine.core import LATE_DETAILS, next_limit, request_stats
from penstock.engine.outbox import Outbox
from penstock.engine.ports import NullObserver, Observer, OutputChunk, OutputSink, TokenObserver
from penstock.engine.state import SHUTTING_DOWN, EngineState
from penstock.engine.thread import ABORT_GRACE_S, ENGINE_FAILED, ENGINE_STUCK
from penstock.kv.pool_map import PoolMap
from penstock.obs.explain.explanation import Explanation, Route
from penstock.sched.adapters import ADAPTER_NOT_LOADED, LOAD_TIMEOUT_NS
from penstock.sched.routing.dispatcher import Choice, Dispatcher
from penstock.sched.routing.routers import Router
from penstock.sched.scaling import Scaler, Wanted
from penstock.types.errors import PenstockError, RejectReason, counted
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineLoad, ReplicaLoad, ScalingDecision, StepStats, WaitReason

_log = logging.getLogger(__name__)

SILENCE_NS = 5_000_000_000
"""A replica that reports nothing for this long is lost. It reports every second."""
GREETING_NS = 10_000_000_000
"""Time in which a new connection must identify itself."""
SWITCH_S = 0.0005
"""Longest turn of a thread while another waits for the GIL: HTTP's event loop and the fleet's hand over to each other. With
Python's 5 ms, the p99 of the time to first token is 3 ms higher (docs/decisions/cluster.md)."""
MAX_STRANGERS = 64
"""Most connections that have not identified themselves."""
MAX_DECISIONS = 10
"""Most scaling decisions that are kept for `decisions`."""
PATIENCE_NS = 60_000_000_000
"""Longest wait of a request for a replica if the number of replicas is fixed."""
START_PATIENCE_NS = 600_000_000_000
"""The same if a `Scaler` starts replicas."""
MAX_LOSSES = 3
"""A request is ended if this many replicas in a row failed while they had it, because it may be the cause, or refused it."""
LOST, ANSWER = "lost", "answer"
"""Reasons for a move. LOST: the replica died, or ended a request that goes on (see `_goes_on`). ANSWER: decode runs on another
replica than prefill."""
NOT_RESUMED = "the replica that computed it was lost, and the server does not resume answers"
_OF_THE_REPLICA = (RejectReason.UNAVAILABLE, RejectReason.DRAINING)
"""Reject reasons that concern only the replica, so the request moves to another one."""
_OF_A_WAIT = (RejectReason.QUEUE_TIMEOUT, RejectReason.FIRST_TOKEN_TIMEOUT)
"""Reject reasons that no longer apply once any request of the call has begun, maybe at another replica."""


class Fleet:
    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        router: Router,
        clock: Clock,
        sink: OutputSink,
        has_prefix_caching: bool = True,
        resumes: bool = True,
        slo_itl_ns: int | None = None,
    ) -> None:
        """`listener`: the socket for replicas, closed with the fleet. `secret`: shared with the replicas.

        `resumes`: if a replica is lost, another one continues its unfinished answers. Otherwise they end with an error.
        `slo_itl_ns`: inter-token latency target. If set, prefill and decode may be disaggregated.
        """
        self._listener, self._secret, self._router, self.clock = listener, secret, router, clock
        self._has_prefix_caching, self._resumes, self._slo_itl_ns = has_prefix_caching, resumes, slo_itl_ns
        self._sink = sink
        self._observer: Observer = NullObserver()
        self._token_observer: TokenObserver = NullObserver()
        self._outbox = Outbox(sink, self._observer)
        self._adapters: Adapters | None = None
        self._predict: Callable[[Request], int] = lambda request: request.sampling.max_tokens
        self.on_size: Callable[[int], None] = lambda _: None
        """Called with the number of replicas whenever it changes."""

        self.max_ended = 0
        """How many ended requests can still be explained: the fleet remembers their replicas."""

        self._lock = threading.Lock()
        self._state = EngineState.STARTING
        self._num_holds = 0
        self._was_cut_short = False
        self._is_over = False
        """The thread has ended, so new requests are refused."""
        self._pool = EngineLoad()
        self.model: ModelInfo | None = None
        """Facts of the model, from the first replica that connected. None before."""
        self._has_ended = threading.Event()
        self.num_moved = dict.fromkeys((LOST, ANSWER), 0)
        """Reason of a move -> number of requests that moved to another replica."""

        # Used only on the fleet's thread:
        self._loop = asyncio.new_event_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = make_waker(self._loop, self._poll)
        self._replicas: dict[Link, ReplicaEnd] = {}
        self._by_number: dict[int, ReplicaEnd] = {}
        self._flights: dict[str, Flight] = {}
        self._dispatcher: Dispatcher | None = None
        self._num_sent = 0
        self._queries = ExplanationQueries(self._loop, self._flights)
        self._scaler: Scaler | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._on_wanted: Callable[[int], None] = lambda _: None
        self._is_at_zero = False
        """The scaler wanted 0 replicas, and none has become ready since. Requests wait for one to start."""
        self._wanted = Wanted(0, "")
        self._decisions: deque[tuple[int, Wanted]] = deque(maxlen=MAX_DECISIONS)
        """(instant, wanted number with its reason) of the last changes."""
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-fleet", daemon=True)

    # For any thread.

    def start(self) -> None:
        """Start the thread, and set the process's GIL switch interval to `SWITCH_S`."""
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def use_adapters(self, adapters: Adapters) -> None:
        """Set the registry in which requests find their adapters, before the first request."""
        self._adapters = adapters
        adapters.listen(lambda: self._post(lambda: self._dispatch(self._waiting())))

    def observe(self, observer: Observer, token_observer: TokenObserver, predict: Callable[[Request], int]) -> None:
        """Set the observers of steps, tokens and ends, before the first request. `predict` returns the expected length of an
        answer."""
        self._observer, self._token_observer, self._predict = observer, token_observer, predict
        self._outbox = Outbox(self._sink, observer)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def num_replicas(self) -> int:
        """Replicas that take requests."""
        return sum([replica.is_ready for replica in list(self._by_number.values())])

    def submit(self, *requests: Request) -> None:
        """Send requests to replicas, those with one prompt to the same one. As `Engine.submit`."""
        self._outbox.add(requests)
        with self._lock:
            if not self._is_over:
                self._post(lambda: self._take(requests))
                return
        self._outbox.refuse(requests, RejectReason.UNAVAILABLE, self.clock.now_ns())

    def abort(self, request_id: str, detail: str = "cancelled") -> None:
        self._post(lambda: self._abort(request_id, detail))

    def load(self) -> EngineLoad:
        """Return how busy all replicas are together."""
        num_in_flight, num_prompt_tokens = self._outbox.counts()
        pool = self._pool
        return pool._replace(num_waiting=max(0, num_in_flight - pool.num_running), num_prompt_tokens=num_prompt_tokens)

    def replicas(self) -> list[ReplicaLoad]:
        """Return the replicas that are connected, by name."""
        now_ns, dispatcher = self.clock.now_ns(), self._dispatcher
        if dispatcher is None:
            return []
        found = [
            ReplicaLoad(
                replica.name,
                replica.link.peer,
                replica.load,
                len(replica.flights),
                dispatcher.work_of(replica.number),
                now_ns - replica.heard_ns,
                replica.num_copied_tokens,
                replica.is_ready,
            )
            for replica in list(self._by_number.values())
        ]
        return sorted(found, key=lambda one: one.name)

    def decisions(self) -> list[ScalingDecision]:
        """Return the current decision, then the last changes, newest first. Empty if the number of replicas is fixed."""
        now_ns = self.clock.now_ns()
        found = [] if self._scaler is None else [(now_ns, self._wanted), *reversed(list(self._decisions))]
        return [ScalingDecision(now_ns - at_ns, wanted.num, wanted.reason) for at_ns, wanted in found]

    def explain_all(self, request_ids: Iterable[str], read_clock: Callable[[], int]) -> list[Explanation]:
        """Ask replicas for the explanations of requests, as a `History`. Waits up to a second, so not for an event loop."""
        del read_clock
        answer: Future[list[Explanation]] = Future()
        with self._lock:
            if self._is_over:
                return []
            self._post(lambda: self._queries.ask(list(request_ids), self._links(), answer))
        try:
            return answer.result(TIMEOUT_S)
        except TimeoutError:
            return []

    def pool_map(self) -> PoolMap:
        raise TimeoutError("each replica has a pool of its own")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make a drain wait until the `with` block ends, as `Engine.held`."""
        with self._lock:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holds -= 1
            self._post(self._end_if_drained)

    def drain(self) -> None:
        """Refuse new requests, and finish the others."""
        with self._lock:
            if self._state not in (EngineState.STOPPED, EngineState.FAILED):
                self._state = EngineState.DRAINING
        self._post(self._end_if_drained)

    def close(self, timeout_s: float, detail: str = SHUTTING_DOWN) -> bool:
        """Drain for up to `timeout_s`, abort the remaining requests, and close the links. Replicas then dial the next front.

        Returns whether every request ended by itself. Idempotent.
        """
        self.drain()
        if self._thread.is_alive():
            if not self._has_ended.wait(timeout_s):
                for request_id in self._outbox.cut_short():
                    self._was_cut_short = True
                    self.abort(request_id, detail)
                with self._lock:
                    self._was_cut_short |= self._num_holds > 0
                    self._num_holds = 0
                self._post(self._end_if_drained)
                self._has_ended.wait(ABORT_GRACE_S)
            self._post(self._closing.set)
            self._thread.join(ABORT_GRACE_S)
        self._state = EngineState.STOPPED
        return not self._was_cut_short

    def scale(self, scaler: Scaler, num: int, on_wanted: Callable[[int], None]) -> None:
        """Let `scaler` choose the number of replicas each second, and whenever a request finds no ready replica.

        Replaces an earlier scaler. `num`: the number wanted so far. `on_wanted` is called with each new number, on the fleet's
        thread, and must not block.
        """
        self._post(lambda: self._begin_to_scale(scaler, num, on_wanted))

    # The fleet's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException:
            _log.critical("the front's thread failed", exc_info=True)
            self._state = EngineState.FAILED
        finally:
            with self._lock:
                self._is_over = True
            self._poll()
            self._end_all()
            with suppress(Exception):
                self._loop.close()

    async def _serve(self) -> None:
        server = await self._loop.create_server(self._greet, sock=self._listener)
        beat = self._loop.create_task(self._beat())
        await self._closing.wait()
        for task in (beat, self._scaling):
            if task is not None:
                task.cancel()
        server.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
        own = asyncio.current_task()
        await asyncio.gather(*[task for task in asyncio.all_tasks() if task is not own], return_exceptions=True)
        for replica in list(self._replicas.values()):
            replica.link.close("the front ends")
        await asyncio.sleep(0)  # the links are closed meanwhile

    def _post(self, job: Callable[[], None]) -> None:
        self._inbox.append(job)
        with suppress(RuntimeError, OSError):  # the loop is closed, and all requests have ended
            self._wake()

    def _poll(self) -> None:
        while self._inbox:
            job = self._inbox.popleft()
            try:
                job()
            except Exception:  # another request's job must not be lost with it
                _log.exception("the front failed in a job")

    async def _beat(self) -> None:
        """Send a beat to replicas, drop silent ones, and end requests that have waited too long."""
        now_ns = self.clock.now_ns()
        while True:
            await asyncio.sleep(SILENCE_NS / 10e9)
            looked_ns, now_ns = now_ns, self.clock.now_ns()
            if now_ns - looked_ns > SILENCE_NS / 2:  # this process was stalled, and has not read the replicas' reports
                for replica in self._replicas.values():
                    replica.heard_ns = now_ns
            try:
                self._look_after_replicas(now_ns)
                self._look_after_waiting(now_ns)
            except Exception:  # without beats, replicas would leave
                _log.exception("the front failed in its beat")

    def _look_after_replicas(self, now_ns: int) -> None:
        for replica in list(self._replicas.values()):
            if replica.name and now_ns - replica.heard_ns > SILENCE_NS:
                replica.link.close(f"it has reported nothing for {SILENCE_NS / 1e9:g} s")
            elif not replica.name and now_ns - replica.since_ns > GREETING_NS:
                replica.link.close("it did not say who it is")
            elif replica.name:
                replica.link.send(Beat())

    def _look_after_waiting(self, now_ns: int) -> None:
        patience_ns = PATIENCE_NS if self._scaler is None else START_PATIENCE_NS
        num_replicas = self.num_replicas
        for flight in self._waiting():
            if flight.is_suspect and num_replicas:
                flight.since_ns = now_ns  # it waits for its turn, and not for a replica
            limit = next_limit(flight.request)
            if limit is not None and now_ns > limit[0]:
                self._end(flight, FinishReason.ABORT, LATE_DETAILS[limit[1]], limit[1])
            elif not flight.has_adapter and now_ns - flight.since_ns > LOAD_TIMEOUT_NS:
                self._end(flight, FinishReason.REJECTED, ADAPTER_NOT_LOADED, RejectReason.UNAVAILABLE)
            elif now_ns - flight.since_ns > patience_ns:
                told = f"no replica became available within {patience_ns / 1e9:g} s"
                self._end(flight, FinishReason.ERROR, told, RejectReason.UNAVAILABLE)

    # How many replicas there should be.

    def _begin_to_scale(self, scaler: Scaler, num: int, on_wanted: Callable[[int], None]) -> None:
        self._scaler, self._wanted, self._on_wanted = scaler, Wanted(num, "As at the start."), on_wanted
        if self._scaling is not None:
            self._scaling.cancel()
        self._scaling = self._loop.create_task(self._scale_each_second())

    async def _scale_each_second(self) -> None:
        while self._state is not EngineState.DRAINING:
            try:
                self._scale()
            except Exception:
                _log.exception("the number of replicas could not be decided; this is tried again")
            await asyncio.sleep(1.0)

    def _scale(self) -> None:
        if self._scaler is None or self._dispatcher is None:
            return
        now_ns = self.clock.now_ns()
        num_unsent = len(self._waiting())
        wanted = self._scaler.decide(now_ns, self._dispatcher.group_load(self._loads(), num_unsent))
        before, self._wanted = self._wanted, wanted
        if before.num != wanted.num:
            self._decisions.append((now_ns, wanted))
            _log.info("%s wanted: %s", counted(wanted.num, "replica"), wanted.reason)
            self._on_wanted(wanted.num)
            if not wanted.num:
                self._is_at_zero = True
                self._update_state()

    # Replicas.

    def _greet(self) -> Link:
        """Make the link of a new connection. If too many are unidentified, close the oldest of them."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        link = Link(self._on_message, self._on_lost, Greeting(FORMAT, nonce))
        strangers = [one for one in self._replicas.values() if not (one.name or one.link.is_closing)]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].link.close("too many others have dialled")
        self._replicas[link] = ReplicaEnd(link, self.clock.now_ns(), nonce)
        return link

    def _on_message(self, link: Link, data: bytes) -> None:
        replica = self._replicas[link]
        if not replica.name:
            self._welcome(replica, decode_hello(data))
            return
        match decode_to_front(data):
            case Report() as report:
                self._take_report(replica, report)
            case Explained() as explained:
                self._queries.take_answer(replica.name, explained, self.clock.now_ns() - explained.sent_ns)
            case message:
                link.close(f"an unexpected {type(message).__name__}")

    def _welcome(self, replica: ReplicaEnd, hello: Hello) -> None:
        link = replica.link
        if not secrets.compare_digest(hello.proof, prove(self._secret, REPLICA, replica.nonce)):
            link.close("it does not know the cluster's secret")
            return
        if self.model is not None and hello.model.fingerprint != self.model.fingerprint:
            link.close(f"its answers would differ: {hello.model.fingerprint} instead of {self.model.fingerprint}")
            return
        if (before := self._links().get(hello.name)) is not None:  # the replica lost its link before the front noticed
            before.close("it has come back")
        if self._dispatcher is None:
            block_size = hello.model.capacity.block_size
            self._dispatcher = Dispatcher(
                self._router,
                0,
                block_size,
                has_prefix_caching=self._has_prefix_caching,
                slo_itl_ns=self._slo_itl_ns if self._resumes else None,
            )
        link.max_bytes = MAX_BYTES
        link.send(Welcome(prove(self._secret, FRONT, hello.nonce)))
        replica.name, replica.blocks_port, replica.heard_ns = hello.name, hello.blocks_port, self.clock.now_ns()
        replica.number = self._dispatcher.join(gives=bool(replica.blocks_port))
        self._by_number[replica.number] = replica
        _log.info("replica %s has come from %s", replica.name, link.peer)
        self.model = self.model or hello.model
        self._update_state()

    def _set_ready(self, replica: ReplicaEnd, is_ready: bool) -> None:
        replica.is_ready = is_ready
        self._is_at_zero &= not is_ready
        takes = "takes requests" if is_ready else "takes no more requests"
        _log.info("replica %s %s: %s in all", replica.name, takes, counted(self.num_replicas, "replica"))
        self._update_state()
        if is_ready:
            self._dispatch(self._waiting())

    def _on_lost(self, link: Link, cause: str) -> None:
        replica = self._replicas.pop(link)
        if not replica.name:
            _log.warning("a replica at %s was not taken: %s", link.peer, cause)
            return
        lost = counted(len(replica.flights), "request")
        is_expected = self._state is EngineState.DRAINING or not (replica.is_ready or replica.flights)
        level = logging.INFO if is_expected else logging.WARNING
        _log.log(level, "replica %s was lost with %s: %s", replica.name, lost, cause)
        assert self._dispatcher is not None, "it has joined"
        flights = list(replica.flights.values())
        for flight in flights:
            flight.count_loss(replica.name, f"it was lost: {cause}")
            self._detach(flight)
        self._dispatcher.leave(replica.number)
        del self._by_number[replica.number]
        self._update_state()
        self._move(flights)

    def _update_state(self) -> None:
        with self._lock:
            if self._state in (EngineState.STARTING, EngineState.READY, EngineState.RESTARTING):
                # Requests wait, and the fleet counts as ready, while connected replicas restart or the first one starts.
                is_ready = bool(self._by_number) or self._is_at_zero
                self._state = EngineState.READY if is_ready else EngineState.RESTARTING
        self._sum_loads()
        self.on_size(self.num_replicas)

    def _sum_loads(self) -> None:
        loads = [replica.load for replica in self._by_number.values() if replica.is_ready]
        if not loads and self._scaler is not None and self.model is not None:  # assume one idle replica: a request starts it
            capacity = self.model.capacity
            num_blocks = capacity.num_blocks - 1
            loads = [EngineLoad(num_blocks_total=num_blocks, num_blocks_free=num_blocks, num_rows_free=capacity.max_rows)]
        waits_for = [load.waits_for for load in loads]
        self._pool = EngineLoad(
            num_running=sum([load.num_running for load in loads]),
            num_waiting=sum([load.num_waiting for load in loads]),
            waits_for=WaitReason.NOTHING if WaitReason.NOTHING in waits_for or not waits_for else waits_for[0],
            num_blocks_total=sum([load.num_blocks_total for load in loads]),
            num_blocks_free=sum([load.num_blocks_free for load in loads]),
            num_blocks_cached=sum([load.num_blocks_cached for load in loads]),
            num_blocks_shared=sum([load.num_blocks_shared for load in loads]),
            num_rows_free=sum([load.num_rows_free for load in loads]),
            num_background=sum([load.num_background for load in loads]),
            num_blocks_background=sum([load.num_blocks_background for load in loads]),
        )

    # Requests: sent, moved, ended.

    def _take(self, requests: Sequence[Request]) -> None:
        if self._state is EngineState.STOPPED or (self._state is EngineState.DRAINING and not self._num_holds):
            self._outbox.refuse(requests, RejectReason.DRAINING, self.clock.now_ns())
            return
        flights = [Flight(request) for request in requests]
        self._flights |= {flight.request.request_id: flight for flight in flights}
        self._dispatch(flights)

    def _dispatch(self, flights: Iterable[Flight]) -> None:
        """Send requests to replicas, background requests last. All choices of one prompt go to the same replica."""
        groups: dict[tuple[str, int], list[Flight]] = {}
        for flight in flights:
            request = flight.request
            groups.setdefault((request.parent_id or request.request_id, id(request.prompt_token_ids)), []).append(flight)
        # A background suspect may take long, and people's suspects would wait for it.
        for group in sorted(groups.values(), key=lambda group: group[0].request.background):
            self._send(group)

    def _send(self, group: Sequence[Flight]) -> None:
        now_ns, first = self.clock.now_ns(), group[0].request
        dispatcher = self._dispatcher
        for flight in group:
            flight.since_ns = flight.since_ns or now_ns
        if self._await_adapter(group):
            return
        is_suspect = any(flight.is_suspect for flight in group)
        unready = self._unready_for({flight.request.request_id for flight in group}, is_suspect=is_suspect)
        if dispatcher is None or len(unready) == len(self._by_number):
            self._scale()
            return
        failed = {name for flight in group for name in flight.failed_at}
        others = self._by_number.items() if failed else ()
        tried = unready.union(number for number, replica in others if replica.name in failed)
        self._num_sent += 1
        try:
            choice = dispatcher.choose(
                first,
                dispatcher.names_of(first),
                self._loads(),
                index=self._num_sent,
                now_ns=now_ns,
                num_new_tokens=self._num_new_tokens(first),
                num_adapter_blocks=self._num_adapter_blocks(first),
                but_not=unready if len(tried) == len(self._by_number) else tried,
            )
        except PenstockError as error:
            _log.error("%s", error)
            for flight in group:
                self._end(flight, FinishReason.ERROR, "the router failed; the server's log says why", RejectReason.UNAVAILABLE)
            return
        replica, source = self._by_number[choice.replica], self._source(choice)
        if is_suspect:
            replica.suspects = group
        for flight in group:
            flight.since_ns = 0
            self._assign(flight, replica, choice.num_held_tokens, choice.num_tokens_ahead, choice.fewest_tokens_ahead)
            if flight is not group[0]:
                dispatcher.also(flight.request, replica.number, self._num_new_tokens(flight.request))
        works = [self._work_of(flight.request) for flight in group]
        replica.link.send(Submit(now_ns, first.prompt_token_ids, works, source))

    def _assign(self, flight: Flight, replica: ReplicaEnd, num_held: int, num_ahead: int, fewest_ahead: int) -> None:
        """Give a request to a replica, and remember that for explanations."""
        request_id = flight.request.request_id
        flight.replica, replica.flights[request_id] = replica, flight
        before = () if flight.route is None else (*flight.route.before, flight.route.replica)
        flight.route = Route(replica.name, num_held, num_ahead, fewest_ahead, before)

    def _hand_over(self, flight: Flight) -> None:
        """Move a request to another replica after its first token, if the dispatcher disaggregates prefill and decode."""
        request, giver, dispatcher = flight.request, flight.replica, self._dispatcher
        assert dispatcher is not None, "it was sent"
        assert giver is not None, "it was sent"
        sampling = request.sampling
        # Beams share KV within one engine, a scored prompt can't use a cache, and the other replica may have a suspect already.
        stays = sampling.beams is not None or sampling.prompt_logprobs is not None or flight.is_suspect
        if self._slo_itl_ns is None or flight.abort_detail is not None or stays:
            return
        work = {number: dispatcher.work_of(number, with_background=request.background) for number in dispatcher.numbers}
        if (number := dispatcher.hand_over(request.request_id, self._unready_for({request.request_id}))) is None:
            return
        self.num_moved[ANSWER] += 1
        giver.leaving.add(request.request_id)
        giver.link.send(Abort(request.request_id, "it goes on at another replica"))
        del giver.flights[request.request_id]
        replica = self._by_number[number]
        self._assign(flight, replica, 0, work[number], min(work.values()))
        source = Source(giver.link.host, giver.blocks_port, request.num_prompt_tokens, has_request=True)
        replica.link.send(Submit(self.clock.now_ns(), request.prompt_token_ids, [self._work_of(request)], source))

    def _await_adapter(self, group: Sequence[Flight]) -> bool:
        """Return False if the requests' adapter was read. Otherwise read it, or end the requests if that has failed."""
        ref = group[0].request.adapter
        if ref is None or group[0].has_adapter:
            return False
        assert self._adapters is not None, "the adapter is of this registry"
        state = self._adapters.state(ref.number)
        if not state.failure:
            self._adapters.want(ref, is_urgent=True)
        for flight in group if state.failure else ():
            self._end(flight, FinishReason.REJECTED, state.failure, state.reason)
        return True

    def _num_adapter_blocks(self, request: Request) -> int:
        """Return how many KV blocks the adapter of a request takes at a replica."""
        ref, adapters = request.adapter, self._adapters
        return 0 if ref is None or adapters is None else adapters.outlook(ref.number).num_pages

    def _work_of(self, request: Request) -> Work:
        ref, adapters = request.adapter, self._adapters
        return work_of(request, "" if ref is None or adapters is None else str(adapters.path(ref)))

    def _unready_for(self, request_ids: set[str], *, is_suspect: bool = False) -> set[int]:
        """Return the replicas that can't take these requests now.

        A replica takes none of them until it is ready and has ended them all, and no suspect while it has another.
        """
        return {
            number
            for number, replica in self._by_number.items()
            if not replica.is_ready or replica.leaving & request_ids or (is_suspect and replica.has_suspect)
        }

    def _source(self, choice: Choice) -> Source | None:
        """Return where the chosen replica may fetch KV of the prompt, or None."""
        if choice.source is None:
            return None
        giver = self._by_number[choice.source]
        return Source(giver.link.host, giver.blocks_port, choice.num_source_tokens)

    def _waiting(self) -> list[Flight]:
        """Return the requests that have no replica."""
        return [flight for flight in self._flights.values() if flight.replica is None]

    def _links(self) -> dict[str, Link]:
        return {replica.name: replica.link for replica in self._by_number.values()}

    def _loads(self) -> Sequence[EngineLoad]:
        """Return the loads of replicas, indexed by replica number. Unused numbers have an empty load."""
        by_number = self._by_number
        most = max(by_number, default=-1)
        return [by_number[number].load if number in by_number else EngineLoad() for number in range(most + 1)]

    def _num_new_tokens(self, request: Request) -> int:
        return max(1, self._predict(request) - len(request.output_token_ids))

    def _detach(self, flight: Flight) -> None:
        """Detach a request from its replica, if it has one."""
        replica, request_id = flight.replica, flight.request.request_id
        if replica is not None:
            flight.replica = None
            del replica.flights[request_id]
            assert self._dispatcher is not None, "it was sent"
            self._dispatcher.on_end(request_id)

    def _remove(self, flight: Flight) -> None:
        """Note that a request has ended."""
        self._detach(flight)
        del self._flights[flight.request.request_id]
        self._queries.keep(flight, self.max_ended)

    def _move(self, flights: Iterable[Flight]) -> None:
        """Send requests whose replica was lost to others. End those that were aborted, failed too often or can't be resumed."""
        moving: list[Flight] = []
        for flight in flights:
            if flight.abort_detail is not None:
                self._end(flight, FinishReason.ABORT, flight.abort_detail)
            elif MAX_LOSSES in (flight.num_failures, len(flight.failed_at) - flight.num_failures):
                verb = "failed with" if flight.num_failures == MAX_LOSSES else "refused"
                told = f"{MAX_LOSSES} replicas {verb} it, the last one: {flight.last_loss}"
                self._end(flight, FinishReason.ERROR, told, None if flight.num_failures else RejectReason.UNAVAILABLE)
            elif flight.request.output_token_ids and not self._resumes:
                self._end(flight, FinishReason.ERROR, NOT_RESUMED, RejectReason.UNAVAILABLE)
            else:
                moving.append(flight)
        self.num_moved[LOST] += len(moving)
        self._dispatch(moving)

    def _abort(self, request_id: str, detail: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        if flight.replica is None:
            self._end(flight, FinishReason.ABORT, detail)
        else:
            flight.abort_detail = detail
            flight.replica.link.send(Abort(request_id, detail))

    def _end(self, flight: Flight, reason: FinishReason, detail: str, because: RejectReason | None = None) -> None:
        """End a request at the front, without a replica."""
        self._remove(flight)
        now_ns = self.clock.now_ns()
        chunk = flight.end_at(now_ns, reason, detail, because)
        self._observer.on_finish(request_stats(flight.request, now_ns, chunk.reject_reason))
        self._outbox.deliver([chunk])
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._state is EngineState.DRAINING and not self._flights and not self._num_holds:
            self._has_ended.set()

    def _end_all(self) -> None:
        for flight in list(self._flights.values()):
            with suppress(Exception):
                self._end(flight, FinishReason.ABORT, SHUTTING_DOWN, RejectReason.DRAINING)
        self._has_ended.set()

    # Reports of replicas.

    def _take_report(self, replica: ReplicaEnd, report: Report) -> None:
        assert self._dispatcher is not None, "it has joined"
        now_ns = self.clock.now_ns()
        shift_ns = now_ns - report.sent_ns
        replica.load, replica.heard_ns, replica.num_copied_tokens = report.load, now_ns, report.num_copied_tokens
        self._sum_loads()
        self._dispatcher.hear(replica.number, report.changes)
        if replica.is_ready is not report.is_ready:
            self._set_ready(replica, report.is_ready)
        for stats in report.ended:
            if (flight := replica.flights.get(stats.request_id)) is not None:
                flight.stats = stats
        left = {chunk.request_id for chunk in report.chunks if chunk.finish_reason is not None} & replica.leaving
        news, moving = News(), list[Flight]()
        for chunk in report.chunks:
            flight = replica.flights.get(chunk.request_id)
            if flight is None:  # it ended here, or was sent elsewhere
                continue
            if chunk.finish_reason is not None and _goes_on(flight.request, chunk.reject_reason):
                self._take_refusal(flight, chunk)
                moving.append(flight)
                continue
            shift_times(chunk, shift_ns, ("at_ns", "first_scheduled_ns", "first_token_ns"))
            if (scores := report.scores.get(chunk.request_id)) is not None:
                flight.request.prompt_logprobs[:] = scores
            self._take_chunk(flight, chunk, news)
        try:
            self._observe([self._pooled(step, shift_ns) for step in report.steps], news)
        finally:
            self._outbox.deliver(news.chunks)  # even after an error: the requests already count these tokens as delivered
        self._move(moving)
        for flight in news.first:
            if flight.replica is replica:
                self._hand_over(flight)
        is_free = bool(replica.suspects) and not replica.has_suspect
        if is_free:
            replica.suspects = ()
        if left or is_free:
            replica.leaving -= left
            self._dispatch(self._waiting())
        if news.ended:
            self._end_if_drained()

    def _take_refusal(self, flight: Flight, chunk: OutputChunk) -> None:
        """Take a request back from a replica that ended it, to send it again (see `_goes_on`)."""
        assert flight.replica is not None, "it was sent"
        if chunk.reject_reason == RejectReason.UNAVAILABLE:
            is_refusal, ref = chunk.detail not in (ENGINE_FAILED, ENGINE_STUCK), flight.request.adapter
            flight.count_loss(flight.replica.name, chunk.detail, is_refusal=is_refusal)
            if is_refusal and ref is not None and self._adapters is not None:
                self._adapters.doubt(ref)
        elif chunk.reject_reason in _OF_A_WAIT:
            flight.request.queue_deadline_ns = flight.request.first_token_deadline_ns = None
        self._detach(flight)

    def _take_chunk(self, flight: Flight, chunk: OutputChunk, news: News) -> None:
        assert self._dispatcher is not None, "it has joined"
        gap_ns = flight.note(chunk)
        if chunk.token_ids or chunk.states:
            if gap_ns is None:
                news.first.append(flight)
            elif not flight.request.background:  # nobody waits for its tokens
                news.gaps_ns.append(gap_ns)
            self._dispatcher.on_tokens(chunk.request_id, len(chunk.token_ids))
        news.chunks.append(chunk)
        if chunk.finish_reason is not None:
            self._remove(flight)
            news.ended.append((chunk, flight))

    def _observe(self, steps: Sequence[StepStats], news: News) -> None:
        assert self._dispatcher is not None, "it has joined"
        for step in steps:
            self._dispatcher.on_step(step)
            self._observer.on_step(step)
        if news.first or news.gaps_ns:
            self._token_observer.on_tokens([flight.request for flight in news.first], news.gaps_ns)
        for chunk, flight in news.ended:
            if flight.num_gaps:
                self._token_observer.on_itl(flight.num_gaps, flight.num_late)
            self._observer.on_finish(flight.stats_at(chunk))

    def _pooled(self, stats: StepStats, shift_ns: int) -> StepStats:
        """Return a replica's step with the queue and block counts of all replicas together."""
        pool = self._pool
        return replace(
            stats,
            started_ns=stats.started_ns + shift_ns,
            ended_ns=stats.ended_ns + shift_ns,
            planned_ns=stats.planned_ns + shift_ns,
            num_running=pool.num_running,
            num_waiting=pool.num_waiting,
            counts=replace(stats.counts, waits_for=pool.waits_for, waited_for=pool.waits_for),
            num_blocks_total=pool.num_blocks_total,
            num_blocks_free=pool.num_blocks_free,
            num_blocks_cached=pool.num_blocks_cached,
            num_blocks_background=pool.num_blocks_background,
        )


def _goes_on(request: Request, reject_reason: str) -> bool:
    """Return whether the front sends a request again that a replica ended for this reason."""
    if reject_reason in _OF_A_WAIT:
        return any(one.first_token_ns is not None for one in request.call)
    return reject_reason in _OF_THE_REPLICA
