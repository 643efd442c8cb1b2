"""Computes the input texts of requests to encoders. Each model has a `Desk`. Equal texts of a call are computed once.

Each text is one small request to the engine. A call submits a few at a time, and the next when one ends, so the engine's queue
stays short even for long lists. With `--embedding-cache`, calls use the results of earlier calls. Tenants share these only if
they may share prefixes: a fast answer reveals that the text was computed before.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from penstock.admission.ask import Ask
from penstock.admission.door import Entering
from penstock.calls.call import Terms
from penstock.calls.in_flight import InFlight
from penstock.calls.run import ask_of, at_the_door, in_time
from penstock.deploy.running import RunningModel
from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.obs.metrics import Metrics
from penstock.serve.errors import ApiError, cancelled
from penstock.serve.streams import error_of, server_timing, times_ms
from penstock.serve.texts.call import Text, TextInput, TextResult, TextResults, TextsCall, TokenIds
from penstock.serve.texts.tokens import parts_of, tokenise, work_size
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

ENTRY_BYTES = 256
"""Memory of an entry in the cache besides its numbers."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""The parameters of every text. Encoders sample nothing."""
WINDOW_STEPS = 2
"""A call submits texts for this many full steps, by tokens and by rows: one runs while the next is filled."""

_Key = tuple[str, Text]
"""The tenant (empty if tenants share texts), and the text."""


async def run(
    call: TextsCall,
    desk: Desk,
    in_flight: InFlight | None = None,
    on_open: Callable[[RunningTexts], object] = lambda _: None,
) -> TextResults:
    """Return the encoder's outputs for all texts of a call. Cancelling this coroutine cancels the texts.

    `in_flight` lists the call until it ends. `on_open` gets it when it is admitted. Raises `Rejected` if the call is not
    admitted or a text does not fit, and `ApiError` if the call ends early.
    """
    running = call.running
    ask = _ask(call)
    with running.engine.held():  # a draining server still takes the call's later texts
        with at_the_door(running, ask) as entering:
            reading = running.off_loop.run(work_size(call), partial(tokenise, call), call.terms.lane)
            found = await in_time(reading, "texts were not read", running, call.terms)
            if not ask.num_token_ids:
                cut, pairs = call.truncation, zip(call.texts, found, strict=True)
                whole = [(text, one) for text, one in pairs if cut is None or one.num_tokens < cut.max_tokens]
                num_chars = sum([_size(text) for text, _ in whole])
                running.admission.lengths.on_prompt(num_chars, sum([one.num_tokens for _, one in whole]))
            texts = RunningTexts(call, desk, found, entering)
            on_open(texts)
            if in_flight is not None:
                in_flight.add(texts)
            try:
                texts.fill()
            except BaseException:
                texts.close(in_flight)
                raise
        try:
            return await texts.finish()
        finally:
            texts.close(in_flight)


class RunningTexts:
    """A running call. The desk computes its texts, a few at a time. Implements `CallInFlight`."""

    def __init__(self, call: TextsCall, desk: Desk, texts: Sequence[Text], entering: Entering) -> None:
        self.running: RunningModel = call.running
        self.terms: Terms = call.terms
        self._desk = desk
        self._texts = texts
        self._entering = entering
        self._engine_id = desk.new_engine_id(call.terms.request_id)
        self._waiting = deque(dict.fromkeys(texts))
        """Different texts that are not at the desk yet."""
        self._found: dict[Text, bytes] = {}
        self._asked: dict[Text, Request] = {}
        """Texts that the engine computes."""
        self._first: list[Request] = []
        """Requests made before the first output, which share the limits of waiting."""
        self._num_asked_tokens = 0
        self._num_requests = 0
        self._error: ApiError | None = None
        self._waker: asyncio.Future[None] | None = None
        self._last: OutputChunk | None = None
        """The last chunk with numbers."""
        self._first_ns = 0

    def fill(self) -> None:
        """Submit texts to the desk until they fill `WINDOW_STEPS` steps of the engine."""
        texts: list[Text] = []
        capacity = self.running.model.capacity
        while self._waiting and _has_room(capacity, len(self._asked) + len(texts), self._num_asked_tokens):
            text = self._waiting.popleft()
            texts.append(text)
            self._num_asked_tokens += text.num_tokens
        if texts:
            self._desk.ask(texts, self, self.terms.owner.tenant)

    async def finish(self) -> TextResults:
        """Submit the remaining texts and wait for all outputs. Raises `ApiError` if the call ends early."""
        while self._error is None and (self._waiting or self._asked):
            if self._asked:
                self._waker = asyncio.get_running_loop().create_future()
                try:
                    await self._waker
                finally:
                    self._waker = None
            else:  # the cache had all of them
                await asyncio.sleep(0)
            if self._error is None:
                self.fill()
        if self._error is not None:
            raise self._error
        found, encoder = self._found, self.running.model.encoder
        assert encoder is not None, "only encoders compute texts"
        timing, terms = "", self.terms
        if self._last is not None:
            timing = server_timing(times_ms(terms.arrival_ns, self._last)[:2], terms.waits)
        results = [TextResult(encoder.kept(found[text]), text.num_tokens) for text in self._texts]
        return TextResults(results, timing, self._first_ns)

    def close(self, in_flight: InFlight | None) -> None:
        """Cancel texts that are not computed yet, and take the call out of `in_flight`."""
        if self._asked:
            self._desk.leave(self, "the client left")
        if in_flight is not None:
            in_flight.land(self)

    # Called by the desk

    def request_for(self, text: Text) -> Request:
        """Return a request for a text. After the first output, limits of waiting no longer apply."""
        terms, has_begun = self.terms, self._last is not None
        self._num_requests += 1
        request = self._asked[text] = Request(
            request_id=f"{self._engine_id}.{self._num_requests - 1}",
            prompt_token_ids=text.tokens.token_ids,
            sampling=SAMPLING,
            arrival_ns=terms.arrival_ns,
            waits=terms.waits,
            parent_id=self._engine_id,
            priority=terms.priority,
            background=terms.background,
            deadline_ns=terms.deadline_ns,
            queue_deadline_ns=None if has_begun else terms.queue_deadline_ns,
            first_token_deadline_ns=None if has_begun else terms.first_token_deadline_ns,
            tenant=terms.owner.tenant,
            key=terms.owner.key,
            second_at=text.tokens.second_at,
        )
        if not has_begun:
            self._first.append(request)
            request.call = self._first
        return request

    def report_requests(self, requests: Sequence[Request]) -> None:
        """Report requests to admission before they are submitted."""
        is_first = self._num_requests == len(requests)
        self.running.admission.add_some_requests(self._entering, requests, self.running.clock.now_ns(), is_first=is_first)

    def take(self, text: Text, states: bytes, chunk: OutputChunk | None) -> None:
        """Store the encoder's output for a text. `chunk` is None if the output was cached."""
        if not self._found:
            self._first_ns = self.running.clock.now_ns()
        self._found[text] = states
        self._num_asked_tokens -= text.num_tokens
        if chunk is not None:
            del self._asked[text]
            self._last = chunk

    def fail(self, chunk: OutputChunk) -> None:
        self._error = self._error or error_of(self.terms, chunk)

    def wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    # Called for the list of requests

    @property
    def requests(self) -> Sequence[Request]:
        return list(self._asked.values())

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """One id for the whole call, since a long list of texts would evict other calls from the journal of requests."""
        return (self._engine_id,)

    def abort(self, detail: str) -> None:
        self._error = self._error or cancelled(detail)
        self.wake()


def _has_room(capacity: Capacity, num_texts: int, num_tokens: int) -> bool:
    """Return whether a call with so many texts at the desk may submit another one."""
    return num_texts < WINDOW_STEPS * capacity.max_rows and num_tokens < WINDOW_STEPS * capacity.max_step_tokens


def _size(text: TextInput) -> int:
    """Return the number of a text's characters, or of its token ids."""
    return len(text.token_ids) if isinstance(text, TokenIds) else sum(map(len, parts_of(text)))


def _ask(call: TextsCall) -> Ask:
    """Return the `Ask` for admission of a call, before its texts are tokenised.

    It counts only the call's first texts: about as many as fill `WINDOW_STEPS` full steps of the engine. The others are
    submitted when earlier ones end.
    """
    model = call.running.model
    texts: list[TextInput] = []
    num_tokens = 0
    for text in call.texts:
        if not _has_room(model.capacity, len(texts), num_tokens):
            break
        texts.append(text)
        size = _size(text) if isinstance(text, TokenIds) else _size(text) // 4  # English has four characters for a token
        num_tokens += min(max(1, size), model.capacity.max_model_len)
    num_token_ids = sum([_size(text) for text in texts if isinstance(text, TokenIds)])
    return replace(
        ask_of(call.terms, call.claim),
        num_requests=len(texts),
        num_chars=sum([_size(text) for text in texts]) - num_token_ids,
        num_token_ids=num_token_ids,
        max_prompt_tokens=None if call.truncation is None else len(texts) * call.truncation.max_tokens,
        max_new_tokens=1,
        min_new_tokens=1,
    )


class Desk:
    """The input texts that one model's engine is computing, and the cache. Receives the engine's chunks for them."""

    def __init__(self, bridge: Bridge, metrics: Metrics, *, isolates_tenants: bool, max_cache_bytes: int = 0) -> None:
        self._bridge = bridge
        self._metrics = metrics
        metrics.num_shared_texts = metrics.num_shared_texts or 0
        self._isolates_tenants = isolates_tenants
        self._cache = _Cache(max_cache_bytes)
        self._by_id: dict[str, tuple[RunningTexts, _Key]] = {}
        """Engine's request id -> its call and text."""
        self._touched: dict[RunningTexts, None] = {}
        self._num_calls = 0

    def new_engine_id(self, request_id: str) -> str:
        """Return a unique prefix for the ids of a call's engine requests, since clients may use an id more than once."""
        self._num_calls += 1
        return f"{request_id}/{self._num_calls}"

    def ask(self, texts: Sequence[Text], asker: RunningTexts, tenant: str) -> None:
        """Compute a call's texts, all different, or take cached outputs. Raises like `Bridge.submit`."""
        requests = []
        for text in texts:
            key = (tenant if self._isolates_tenants else "", text)
            states = self._cache.find(key)
            if states is not None:
                self._metrics.num_shared_texts = (self._metrics.num_shared_texts or 0) + 1
                asker.take(text, states, None)
            else:
                request = asker.request_for(text)
                self._by_id[request.request_id] = asker, key
                requests.append(request)
        if requests:
            asker.report_requests(requests)
            self._bridge.submit(requests, self)

    def leave(self, asker: RunningTexts, detail: str) -> None:
        """Remove a call, and abort its unfinished texts."""
        self._touched.pop(asker, None)
        for request in asker.requests:
            if self._by_id.pop(request.request_id, None) is not None:
                self._bridge.forget(request.request_id)
                self._bridge.abort(request.request_id, detail)

    def put(self, chunk: OutputChunk) -> None:
        """Give a text's output from the engine to its call. The bridge calls this."""
        if chunk.finish_reason is None or chunk.request_id not in self._by_id:
            return
        asker, key = self._by_id.pop(chunk.request_id)
        self._bridge.forget(chunk.request_id)
        self._touched[asker] = None
        if chunk.finish_reason is FinishReason.STOP:
            self._cache.put(key, chunk.states)
            asker.take(key[1], chunk.states, chunk)
        else:
            asker.fail(chunk)

    def flush(self) -> None:
        """Wake the calls that got chunks. The bridge calls this after each step."""
        touched, self._touched = self._touched, {}
        for asker in touched:
            asker.wake()


class _Cache:
    """The encoder's outputs for recently used texts, within a limit of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        """Name of the key -> numbers, most recently used last."""

    def find(self, key: _Key) -> bytes | None:
        if not self._entries:
            return None
        name = _entry_name(key)
        states = self._entries.get(name)
        if states is not None:
            self._entries.move_to_end(name)
        return states

    def put(self, key: _Key, states: bytes) -> None:
        """Cache the output for a text, unless it is cached already."""
        size = len(states) + ENTRY_BYTES
        if size > self._max_bytes or self.find(key) is not None:
            return
        self._entries[_entry_name(key)] = states
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= len(oldest) + ENTRY_BYTES


def _entry_name(key: _Key) -> bytes:
    tenant, text = key
    return blake2b(tenant.encode() + b"\0" + text.name, digest_size=len(text.name)).digest() if tenant else text.name
