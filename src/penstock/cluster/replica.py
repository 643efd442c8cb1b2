"""A replica's end of the cluster: it dials the front, runs the requests that come, and reports what happens to them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from penstock.cluster.link import MAX_BYTES, Link
from penstock.cluster.messages import (
    FORMAT,
    FRONT,
    NONCE_BYTES,
    REPLICA,
    Abort,
    Beat,
    Explain,
    Explained,
    Fetch,
    Greeting,
    Hello,
    Report,
    Source,
    Submit,
    Welcome,
    Work,
    decode_to_replica,
    prove,
    request_of,
)
from penstock.cluster.recipes import Recipe
from penstock.cluster.tap import Tap
from penstock.cluster.transfer import FETCH_S, BlockServer, Fetcher
from penstock.deploy.off_loop import lane_of
from penstock.deploy.running import RunningModel
from penstock.engine.core import LATE_DETAILS, next_limit
from penstock.engine.ports import OutputChunk
from penstock.engine.state import EngineState
from penstock.kv.changes import Changes
from penstock.kv.prefix_cache import Recent
from penstock.text.answer_matcher import READ_COST, begin_all
from penstock.types.adapter import AdapterRef
from penstock.types.errors import PenstockError, Rejected, RejectReason
from penstock.types.request import FinishReason, Owner, Request
from penstock.types.sampling import Matcher
from penstock.types.stats import AdapterCounts, EngineLoad

_log = logging.getLogger(__name__)

BEAT_S = 1.0
"""A replica reports at least this often."""
DIAL_S = 5.0
"""Time limit for connecting. It can delay the end of `serve` after `leave`."""
REDIAL_S, MAX_REDIAL_S = 0.5, 30.0
COMPILE_AGAIN_S = 0.02
FRONT_SILENCE_S = 15.0
"""A front that sends nothing for this long is lost. It sends twice a second."""
NUM_FETCHES = 8
"""Most transfers of KV blocks at once."""
MAX_FETCHES = 1_000
"""Most transfers that are remembered for explanations."""
_FRONT_LOST = "the connection to the front was lost"


class Replica:
    """Serves one front at a time with a running model. For one event loop. A `ChunkReader` of the model's bridge."""

    def __init__(self, running: RunningModel, tap: Tap, *, name: str, secret: bytes) -> None:
        """`tap`: an observer of the model's engine."""
        self._running, self._tap, self._name, self._secret = running, tap, name, secret
        self._link: Link | None = None
        """The connection, once the front has accepted this replica."""
        self._heard_s = 0.0
        """Time of the front's last message, by the event loop's clock."""
        self._is_lost = asyncio.Event()
        self._pause_s = REDIAL_S
        """Wait before the next attempt to dial."""
        self._requests: dict[str, Request] = {}
        """Requests from the front that have not ended."""
        self._ended = asyncio.Event()
        """Set when a request ends."""
        self._preparing: dict[str, asyncio.Task[bool]] = {}
        """Id of a request that waits for its grammar, or for KV of its prompt -> the task that compiles the grammar."""
        self._aborted: dict[str, str] = {}
        """Id of a request in `_preparing` that was aborted -> why."""
        self._chunks: list[OutputChunk] = []
        self._nonce = b""
        """Nonce with which the front must prove that it knows the secret. Empty unless an answer is expected."""
        self._leaving = asyncio.Event()
        self._block_server: BlockServer | None = None
        """Serves KV blocks to other replicas. None until a front is reached, or if this replica can't share blocks."""
        self._fetcher = Fetcher(secret)
        self._fetching = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="penstock-fetch")
        self._fetches: Recent[str, Fetch] = Recent(MAX_FETCHES)
        """Id of a request -> the transfer that it waited for."""
        self._num_copied_tokens = 0

    async def serve(self, host: str, port: int) -> None:
        """Serve the front at this address until `leave` is called. Redials when the connection is lost."""
        loop = asyncio.get_running_loop()
        is_logged = False
        while not self._leaving.is_set():
            self._is_lost.clear()
            self._fetcher.forget_closed()
            try:
                async with asyncio.timeout(DIAL_S):
                    _, link = await loop.create_connection(lambda: Link(self._on_message, self._on_lost), host, port)
            except OSError as error:
                if not is_logged:
                    why = error if str(error) else f"no connection within {DIAL_S:g} s"  # a TimeoutError has no text
                    _log.warning("the front at %s:%d can't be reached yet: %s", host, port, why)
                is_logged = True
                await self._pause(REDIAL_S)
                continue
            is_logged = False
            try:
                await self._beat_until_lost(link)
            finally:
                link.close("it ends")
            await self._end_all()
            await self._pause(self._pause_s)
        while self._requests or self._preparing:
            await self._wait_for_end()
        if self._block_server is not None:
            self._block_server.close()
        self._fetching.shutdown(wait=False)

    def leave(self) -> None:
        """Make `serve` end after the requests in flight. Later requests are refused, and the front sends them elsewhere."""
        self._leaving.set()
        self._running.engine.drain()
        self._report()

    async def _pause(self, seconds: float) -> None:
        """Wait before dialling again, unless the replica leaves."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), seconds)

    async def _beat_until_lost(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        self._heard_s = now_s = loop.time()
        while not self._is_lost.is_set():
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._is_lost.wait()
            except TimeoutError:
                self._report()
            self._fetcher.forget_closed()
            looked_s, now_s = now_s, loop.time()
            if now_s - looked_s > FRONT_SILENCE_S / 2:  # this process was stalled, and has not read the front's messages
                self._heard_s = now_s
            elif now_s - self._heard_s > FRONT_SILENCE_S:
                link.close(f"it has sent nothing for {FRONT_SILENCE_S:g} s")
            if self._leaving.is_set() and not self._requests and not self._preparing:
                link.finish("it leaves")

    async def _end_all(self) -> None:
        """Abort all requests after the front was lost. It may send them again."""
        for request_id in [*self._requests, *self._preparing]:
            self._abort(request_id, _FRONT_LOST)
        while self._requests or self._preparing:
            await self._wait_for_end()

    async def _wait_for_end(self) -> None:
        self._ended.clear()
        await self._ended.wait()

    # Messages of the front.

    def _on_lost(self, link: Link, cause: str) -> None:
        if self._link is not None:
            told, self._pause_s = "was lost", REDIAL_S
        else:  # it will probably refuse again
            told, self._pause_s = "did not take this replica (its log says why)", min(2 * self._pause_s, MAX_REDIAL_S)
        if not self._leaving.is_set():
            _log.warning("the front at %s %s: %s", link.peer, told, cause)
        self._link = None
        self._is_lost.set()

    def _on_message(self, link: Link, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        match decode_to_replica(data):
            case Greeting(version, nonce):
                self._on_greeting(link, version, nonce)
            case Welcome(proof):
                self._on_welcome(link, proof)
            case message if self._link is not link:
                link.close(f"an unexpected {type(message).__name__}")
            case Submit() as submit:
                self._take(submit)
            case Abort(request_id, detail):
                self._abort(request_id, detail)
            case Explain(number, request_ids):
                history, clock = self._running.journal, self._running.clock
                found = [] if history is None else history.explain_all(request_ids, clock.now_ns)
                fetches = {name: fetch for name in request_ids if (fetch := self._fetches.get(name)) is not None}
                link.send(Explained(number, clock.now_ns(), found, fetches))
            case Beat():
                pass

    def _on_greeting(self, link: Link, version: int, nonce: bytes) -> None:
        if version != FORMAT:
            link.close(f"it speaks version {version} of the messages, this replica {FORMAT}: install one version everywhere")
            return
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        proof, model = prove(self._secret, REPLICA, nonce), self._running.model
        link.send(Hello(proof, self._nonce, self._name, model, self._blocks_port(link.own_host)))

    def _blocks_port(self, host: str) -> int:
        """Return the port for KV blocks at the address `host`, or 0 if this replica can't share blocks. Listens if needed."""
        blocks = self._tap.blocks
        if self._block_server is None and blocks is not None and blocks.memory is not None:
            try:
                self._block_server = BlockServer(lambda: self._tap.blocks, host, self._secret)
            except OSError as error:
                _log.warning("this replica can't give KV blocks to others at %s: %s", host, error)
        return 0 if self._block_server is None else self._block_server.port

    def _on_welcome(self, link: Link, proof: bytes) -> None:
        nonce, self._nonce = self._nonce, b""
        if not nonce or not secrets.compare_digest(proof, prove(self._secret, FRONT, nonce)):
            link.close("it does not know the cluster's secret")
            return
        link.max_bytes = MAX_BYTES
        self._tap.take()  # drop earlier changes: the first report lists all cached blocks
        self._chunks.clear()
        held = Changes(list(self._tap.held), [])
        now_ns = self._running.clock.now_ns()
        link.send(Report(now_ns, self._is_ready, self._load(), held, [], [], [], {}, self._num_copied_tokens))
        self._link = link
        _log.info("replica %s serves the front at %s", self._name, link.peer)

    def _take(self, submit: Submit) -> None:
        shift_ns = self._running.clock.now_ns() - submit.sent_ns
        requests = [request_of(work, submit.prompt_token_ids, shift_ns) for work in submit.works]
        try:
            for request, work in zip(requests, submit.works, strict=True):
                request.call, request.adapter = requests, self._adapter(work)
        except PenstockError as error:
            for request in requests:
                self._refuse(request, FinishReason.REJECTED, str(error), str(RejectReason.UNAVAILABLE))
            return
        if submit.source is None and all(work.recipe is None for work in submit.works):
            self._begin(requests)
            return
        loop = asyncio.get_running_loop()
        for request, work in zip(requests, submit.works, strict=True):
            self._preparing[request.request_id] = loop.create_task(self._compile(request, work))
        tasks = [self._preparing[request.request_id] for request in requests]
        prepared = asyncio.gather(self._fetch(requests[0], submit.source), *tasks, return_exceptions=True)
        prepared.add_done_callback(lambda done: self._begin_prepared(requests, done.result()))

    def _abort(self, request_id: str, detail: str) -> None:
        if (task := self._preparing.get(request_id)) is None:
            self._running.bridge.abort(request_id, detail)
        else:
            self._aborted[request_id] = detail
            task.cancel()

    def _adapter(self, work: Work) -> AdapterRef | None:
        if not work.adapter:
            return None
        adapters = self._running.adapters
        assert adapters is not None, "the front has the same settings"
        return adapters.with_content(work.adapter, Path(work.adapter_path))

    async def _compile(self, request: Request, work: Work) -> bool:
        """Make the request's matcher, if its answer follows a grammar. Return False if the request was refused."""
        if work.recipe is None:
            return True
        limit = next_limit(request)
        try:
            async with asyncio.timeout(None if limit is None else (limit[0] - self._running.clock.now_ns()) / 1e9):
                request.matcher = await self._matcher(work.recipe, request)
                if (plan := work.recipe.plan) is not None and plan.begun:
                    own = request.tenant if request.background else f"{request.tenant}\0"  # behind no batch of the tenant
                    lane = lane_of(Owner(tenant=own), is_background=True)  # never refused: the front has admitted the request
                    begin = partial(begin_all, [request.matcher])
                    [request.matcher] = await self._running.off_loop.run(READ_COST * len(plan.begun), begin, lane)
            request.matcher.accept(work.generated)
            return True
        except TimeoutError:
            if limit is None:  # not the timeout above
                raise
            self._refuse(request, FinishReason.ABORT, LATE_DETAILS[limit[1]], str(limit[1]))
        except Rejected as rejected:
            self._refuse(request, FinishReason.ERROR, rejected.detail, str(rejected.reason))
        return False

    def _begin_prepared(self, requests: Sequence[Request], results: Sequence[bool | BaseException | None]) -> None:
        """Begin the requests that were neither refused nor aborted. `results`: of `_fetch`, then of each `_compile`."""
        fetched, *are_ready = results
        if fetched is not None:
            _log.error("KV of another replica was not copied, and is computed", exc_info=fetched)
        ready: list[Request] = []
        for request, is_ready in zip(requests, are_ready, strict=True):
            del self._preparing[request.request_id]
            detail = self._aborted.pop(request.request_id, None)
            if is_ready is False:
                continue
            if detail is not None:
                self._refuse(request, FinishReason.ABORT, detail)
            elif is_ready is True:
                ready.append(request)
            else:
                _log.error("request %s can't be begun", request.request_id, exc_info=is_ready)
                self._refuse(request, FinishReason.ERROR, f"its grammar can't be followed: {is_ready!r}")
        self._begin(ready)
        self._ended.set()

    async def _fetch(self, request: Request, source: Source | None) -> None:
        if source is None or (blocks := self._tap.blocks) is None:
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        end_s = time.monotonic() + FETCH_S  # the wait for a thread counts
        num_tokens = await loop.run_in_executor(self._fetching, self._fetcher.fetch, blocks, request, source, end_s)
        if num_tokens:
            self._num_copied_tokens += num_tokens
            self._fetches.put(request.request_id, Fetch(num_tokens, round((loop.time() - began_s) * 1e9)))

    async def _matcher(self, recipe: Recipe, request: Request) -> Matcher:
        grammars, grammar, plan = self._running.grammars, recipe.grammar, recipe.plan
        if grammar is None:
            assert plan is not None, "a matcher needs a grammar or a plan"
            return grammars.free_matcher(plan)
        if matchers := grammars.known(grammar, plan):
            return matchers[0]
        lane = lane_of(Owner(tenant=request.tenant), is_background=request.background)
        while True:  # retry if the queue is full: the front has already admitted the request
            prepare = partial(grammars.prepare, grammar, plan)
            try:
                await self._running.off_loop.compile(lane, len(grammar.source), prepare, key=grammar)
            except Rejected as rejected:
                if rejected.reason is not RejectReason.QUEUE_FULL:  # this replica ends
                    raise
            if matchers := grammars.known(grammar, plan):
                return matchers[0]
            await asyncio.sleep(COMPILE_AGAIN_S)

    def _begin(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        try:
            self._running.bridge.submit(requests, self)
            self._requests |= {request.request_id: request for request in requests}
        except Rejected as rejected:
            for request in requests:
                self._refuse(request, FinishReason.REJECTED, rejected.detail, str(rejected.reason))

    def _refuse(self, request: Request, finish_reason: FinishReason, detail: str, reject_reason: str = "") -> None:
        chunk = OutputChunk(request.request_id, "", (), (), self._running.clock.now_ns())
        chunk.finish_reason, chunk.detail, chunk.reject_reason = finish_reason, detail, reject_reason
        self._chunks.append(chunk)
        self._report()

    # Chunks of the engine.

    def put(self, chunk: OutputChunk) -> None:
        self._chunks.append(chunk)

    def flush(self) -> None:
        self._report()

    @property
    def _is_ready(self) -> bool:
        return self._running.engine.state is EngineState.READY

    def _load(self) -> EngineLoad:
        return self._running.engine.load()._replace(adapters=AdapterCounts())  # adapter numbers are valid in this process only

    def _report(self) -> None:
        """Send the front all news since the last report."""
        running, requests = self._running, self._requests
        steps, ended, changes = self._tap.take()
        chunks, self._chunks = self._chunks, []
        scores = {
            chunk.request_id: request.prompt_logprobs
            for chunk in chunks
            if (request := requests.get(chunk.request_id)) is not None
            and request.sampling.prompt_logprobs is not None
            and chunk.token_ids
            and chunk.num_generated_tokens == len(chunk.token_ids)
        }
        if self._link is not None:
            now_ns = running.clock.now_ns()
            news = Report(now_ns, self._is_ready, self._load(), changes, steps, ended, chunks, scores, self._num_copied_tokens)
            self._link.send(news)
        for chunk in chunks:
            if chunk.finish_reason is not None and requests.pop(chunk.request_id, None) is not None:
                running.bridge.forget(chunk.request_id)
                self._ended.set()
