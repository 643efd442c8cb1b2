"""Computes the input texts of requests to encoders. Each model has a `Desk`, which computes equal texts once.

Each text is one small request to the engine. A call submits a few at a time, and the next when one ends, so the engine's queue
stays short even for long lists. Calls share equal texts, and the results of earlier calls with `--embedding-cache`. Tenants
share them only if they may share prefixes: a fast answer reveals that the text was computed before.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from penstock.admission.ask import Ask
from penstock.admission.door import Place
from penstock.calls.call import Terms
from penstock.calls.in_flight import InFlight
from penstock.calls.run import ask_of, at_the_door
from penstock.deploy.running import RunningModel
from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.obs.metrics import Metrics
from penstock.serve.errors import ApiError, cancelled
from penstock.serve.streams import error_of, server_timing, times_ms
from penstock.serve.texts.call import Text, TextInput, TextResult, TextResults, TextsCall, TokenIds
from penstock.serve.texts.tokens import parts_of, tokenise, work_size
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

ENTRY_BYTES = 256
"""Memory of an entry in the cache besides its numbers."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""The parameters of every text. Encoders sample nothing."""
WINDOW_STEPS = 2
"""A call submits texts for this many full steps: one runs while the next is filled."""

_Key = tuple[str, Text]
"""The tenant (empty if tenants share texts), and the text."""


class Urgency(NamedTuple):
    """Class and time limits of a call's input texts. Smaller is stricter, and None means no limit."""

    background: bool = False
    priority: int = 0
    deadline_ns: int | None = None
    queue_deadline_ns: int | None = None
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None

    def is_enough_for(self, other: Urgency) -> bool:
        """Return whether a request with this urgency is strict enough in every field to serve the other urgency, too."""
        limits = [(mine, its) for mine, its in zip(self, other, strict=True) if its is not None]
        return all(mine is not None and mine <= its for mine, its in limits)


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
        with at_the_door(running, ask) as place:
            found = await running.off_loop.run(work_size(call), partial(tokenise, call))
            if not ask.num_token_ids:
                num_chars = sum([_size(text) for text in call.texts])
                running.admission.lengths.on_prompt(num_chars, sum([text.num_tokens for text in found]))
            texts = RunningTexts(call, desk, found, place)
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

    def __init__(self, call: TextsCall, desk: Desk, texts: Sequence[Text], place: Place) -> None:
        self.running: RunningModel = call.running
        self.terms: Terms = call.terms
        self._desk = desk
        self._texts = texts
        self._place = place
        self._engine_id = desk.new_engine_id(call.terms.request_id)
        self._waiting = deque(dict.fromkeys(texts))
        """Different texts that are not at the desk yet."""
        self._found: dict[Text, bytes] = {}
        self._asked: dict[Text, Request | None] = {}
        """Texts at the desk. Each has its request, or None if another call's request computes it."""
        self._num_asked_tokens = 0
        self._num_requests = 0
        self._window_tokens = WINDOW_STEPS * self.running.model.capacity.max_step_tokens
        self._error: ApiError | None = None
        self._waker: asyncio.Future[None] | None = None
        self._last: OutputChunk | None = None
        """The last chunk with numbers."""

    def fill(self) -> None:
        """Submit texts to the desk until they fill `WINDOW_STEPS` steps of the engine."""
        texts = []
        while self._waiting and self._num_asked_tokens < self._window_tokens:
            text = self._waiting.popleft()
            texts.append(text)
            self._asked[text] = None
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
        found = self._found
        timing, terms = "", self.terms
        if self._last is not None:
            timing = server_timing(times_ms(terms.arrival_ns, self._last)[:2], terms.waits)
        return TextResults([TextResult(found[text], text.num_tokens) for text in self._texts], timing)

    def close(self, in_flight: InFlight | None) -> None:
        """Cancel texts that are not computed yet, and take the call out of `in_flight`."""
        if self._asked:
            self._desk.leave(self, "the client left")
        if in_flight is not None:
            in_flight.land(self)

    # Called by the desk

    @property
    def urgency(self) -> Urgency:
        """The urgency of the remaining texts. After the first output, limits of waiting no longer apply."""
        terms, has_begun = self.terms, self._last is not None
        return Urgency(
            background=terms.background,
            priority=terms.priority,
            deadline_ns=terms.deadline_ns,
            queue_deadline_ns=None if has_begun else terms.queue_deadline_ns,
            first_token_deadline_ns=None if has_begun else terms.first_token_deadline_ns,
            slo_ttft_ns=terms.slo_ttft_ns or self.running.admission.limits.slo_ttft_ns,
        )

    def request_for(self, text: Text) -> Request:
        terms, urgency = self.terms, self.urgency
        self._num_requests += 1
        request = self._asked[text] = Request(
            request_id=f"{self._engine_id}.{self._num_requests - 1}",
            prompt_token_ids=text.tokens.token_ids,
            sampling=SAMPLING,
            arrival_ns=terms.arrival_ns,
            waits=terms.waits,
            parent_id=self._engine_id,
            priority=urgency.priority,
            background=urgency.background,
            deadline_ns=urgency.deadline_ns,
            queue_deadline_ns=urgency.queue_deadline_ns,
            first_token_deadline_ns=urgency.first_token_deadline_ns,
            slo_ttft_ns=urgency.slo_ttft_ns,
            tenant=terms.owner.tenant,
            second_at=text.tokens.second_at,
        )
        return request

    def enter(self, requests: Sequence[Request]) -> None:
        """Report requests to admission before they are submitted."""
        self.running.admission.enter_more(self._place, requests, self.running.clock.now_ns())

    def take(self, text: Text, states: bytes, chunk: OutputChunk | None) -> None:
        """Store the encoder's output for a text. `chunk` is None if the output was cached."""
        self._found[text] = states
        self._num_asked_tokens -= text.num_tokens
        del self._asked[text]
        if chunk is not None:
            self._last = chunk

    def fail(self, chunk: OutputChunk) -> None:
        self._error = self._error or error_of(self.terms, chunk)

    def ask_again(self, text: Text) -> None:
        """Queue a text again. Another call's request was computing it, and was aborted together with that call."""
        del self._asked[text]
        self._num_asked_tokens -= text.num_tokens
        self._waiting.appendleft(text)

    def wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    # Called for the list of requests

    @property
    def requests(self) -> Sequence[Request]:
        return [request for request in self._asked.values() if request is not None]

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """One id for the whole call, since a long list of texts would evict other calls from the journal of requests."""
        return (self._engine_id,)

    def abort(self, detail: str) -> None:
        self._error = self._error or cancelled(detail)
        self.wake()


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
        if num_tokens >= WINDOW_STEPS * model.capacity.max_step_tokens:
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
        max_new_tokens=1,
        min_new_tokens=1,
    )


class _Work:
    """An input text that the engine computes, with the calls that need it."""

    __slots__ = ("askers", "key", "owner", "request_id", "urgency")

    def __init__(self, key: _Key, request_id: str, owner: RunningTexts) -> None:
        self.key = key
        self.request_id = request_id
        self.urgency = owner.urgency
        self.owner = owner
        """The call that made the request. It may have ended."""
        self.askers: dict[RunningTexts, None] = {owner: None}


class Desk:
    """The input texts that one model's engine is computing, shared between calls. Receives the engine's chunks for them."""

    def __init__(self, bridge: Bridge, metrics: Metrics, *, isolates_tenants: bool, max_cache_bytes: int = 0) -> None:
        self._bridge = bridge
        self._metrics = metrics
        metrics.num_shared_texts = metrics.num_shared_texts or 0
        self._isolates_tenants = isolates_tenants
        self._cache = _Cache(max_cache_bytes)
        self._at_work: dict[_Key, _Work] = {}
        """Key -> its latest request. A text is computed twice if a second call is more urgent than the first."""
        self._by_id: dict[str, _Work] = {}
        """Engine's request id -> text."""
        self._touched: dict[RunningTexts, None] = {}
        self._num_calls = 0

    def new_engine_id(self, request_id: str) -> str:
        """Return a unique prefix for the ids of a call's engine requests, since clients may use an id more than once."""
        self._num_calls += 1
        return f"{request_id}/{self._num_calls}"

    def ask(self, texts: Sequence[Text], asker: RunningTexts, tenant: str) -> None:
        """Compute a call's texts, all different, or take cached outputs. Raises like `Bridge.submit`."""
        requests = []
        urgency = asker.urgency
        for text in texts:
            key = (tenant if self._isolates_tenants else "", text)
            states = self._cache.find(key)
            work = self._at_work.get(key)
            if states is not None:
                self._count_shared()
                asker.take(text, states, None)
            elif work is not None and work.urgency.is_enough_for(urgency):
                self._count_shared()
                work.askers[asker] = None
            else:
                request = asker.request_for(text)
                self._at_work[key] = self._by_id[request.request_id] = _Work(key, request.request_id, asker)
                requests.append(request)
        if requests:
            asker.enter(requests)
            self._bridge.submit(requests, self)

    def leave(self, asker: RunningTexts, detail: str) -> None:
        """Remove a call, and abort texts that no other call needs."""
        self._touched.pop(asker, None)
        for work in [work for work in self._by_id.values() if asker in work.askers]:
            del work.askers[asker]
            if not work.askers:
                self._forget(work)
                self._bridge.abort(work.request_id, detail)

    def put(self, chunk: OutputChunk) -> None:
        """Give a text's output from the engine to the calls that need it. The bridge calls this."""
        work = self._by_id.get(chunk.request_id)
        if work is None or chunk.finish_reason is None:
            return
        self._forget(work)
        self._touched.update(work.askers)
        _, text = work.key
        if chunk.finish_reason is FinishReason.STOP:
            self._cache.put(work.key, chunk.states)
            for asker in work.askers:
                asker.take(text, chunk.states, chunk)
            return
        is_owners_own = chunk.finish_reason is FinishReason.ABORT  # the owner's deadline passed, or it was cancelled
        for asker in work.askers:
            if is_owners_own and asker is not work.owner:
                asker.ask_again(text)
            else:
                asker.fail(chunk)

    def flush(self) -> None:
        """Wake the calls that got chunks. The bridge calls this after each step."""
        touched, self._touched = self._touched, {}
        for asker in touched:
            asker.wake()

    def _forget(self, work: _Work) -> None:
        del self._by_id[work.request_id]
        if self._at_work.get(work.key) is work:
            del self._at_work[work.key]
        self._bridge.forget(work.request_id)

    def _count_shared(self) -> None:
        self._metrics.num_shared_texts = (self._metrics.num_shared_texts or 0) + 1


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
