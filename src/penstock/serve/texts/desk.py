"""The desk of a model: its texts that are with the engine, each different one once, whoever asks for it.

`run` asks it for texts and is told their numbers. A text that somebody asks for already is computed for both, if that one is in
no less of a hurry; with a cache (`--embedding-cache`) also one whose numbers were asked for a while ago. Texts have the same
numbers for everybody, but the time of an answer tells that somebody else asked, so tenants that may not share prefixes share no
texts either.

All belongs to the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.obs.metrics import Metrics
from penstock.serve.texts.call import Text
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

ENTRY_BYTES = 256
"""Bytes of memory for the books of one entry of the cache: its key, its place in the order, the object of its numbers."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""The parameters of every text: nothing is drawn."""

_Key = tuple[str, Text]
"""The tenant, where tenants share nothing, and the text."""


class Urgency(NamedTuple):
    """Terms of a call that decide when its texts are computed: less is stricter, and None asks for nothing."""

    priority: int = 0
    deadline_ns: int | None = None
    queue_deadline_ns: int | None = None
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None

    def is_enough_for(self, other: Urgency) -> bool:
        """True if a text of this urgency that came before has its turn no later, and is given up no later, than the other."""
        limits = [(mine, its) for mine, its in zip(self, other, strict=True) if its is not None]
        return all(mine is not None and mine <= its for mine, its in limits)


class Asker(Protocol):
    """A call that waits for texts."""

    @property
    def urgency(self) -> Urgency:
        """Its present one."""
        ...

    def request_for(self, text: Text) -> Request:
        """A request with the call's own id, urgency and tenant."""
        ...

    def enter(self, requests: Sequence[Request]) -> None:
        """Called before the call's requests are submitted, for the books of the door."""
        ...

    def take(self, text: Text, states: bytes, chunk: OutputChunk | None) -> None:
        """Called with the numbers of a text; without a chunk they were in the cache. `wake` follows."""
        ...

    def fail(self, chunk: OutputChunk) -> None:
        """Called if the engine has no numbers. `wake` follows."""
        ...

    def ask_again(self, text: Text) -> None:
        """Called if the request of another call was to answer, and was ended for that call's sake. `wake` follows."""
        ...

    def wake(self) -> None: ...


class _Work:
    """One text at the engine."""

    __slots__ = ("askers", "key", "owner", "request_id", "urgency")

    def __init__(self, key: _Key, request_id: str, owner: Asker) -> None:
        self.key = key
        self.request_id = request_id
        self.urgency = owner.urgency
        self.owner = owner
        """The call whose request it is; it may have left."""
        self.askers: dict[Asker, None] = {owner: None}


class Desk:
    """The desk of one model. As a reader of the bridge, it takes the chunks of all requests that it submits."""

    def __init__(self, bridge: Bridge, metrics: Metrics, *, isolates_tenants: bool = False, max_cache_bytes: int = 0) -> None:
        self._bridge = bridge
        self._metrics = metrics
        metrics.num_shared_texts = metrics.num_shared_texts or 0
        self._isolates_tenants = isolates_tenants
        self._cache = _Cache(max_cache_bytes)
        self._at_work: dict[_Key, _Work] = {}
        """The engine has a text twice if a second call is in a greater hurry; then the second is here."""
        self._by_id: dict[str, _Work] = {}
        """The same by the engine's request ids."""
        self._touched: dict[Asker, None] = {}
        self._num_calls = 0

    def new_engine_id(self, request_id: str) -> str:
        """A prefix for the engine's ids of a call's requests: clients may use one id for several calls."""
        self._num_calls += 1
        return f"{request_id}/{self._num_calls}"

    def ask(self, texts: Sequence[Text], asker: Asker, tenant: str) -> None:
        """Have the asker told the numbers of texts, which are all different and which it does not wait for yet.

        Texts of the cache are told at once. Raises what the engine's `submit` raises.
        """
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

    def leave(self, asker: Asker, detail: str) -> None:
        """The asker waits for nothing any more. Texts that nobody else waits for are aborted."""
        self._touched.pop(asker, None)
        for work in [work for work in self._by_id.values() if asker in work.askers]:
            del work.askers[asker]
            if not work.askers:
                self._forget(work)
                self._bridge.abort(work.request_id, detail)

    def put(self, chunk: OutputChunk) -> None:
        """Called by the bridge."""
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
        is_owners_own = chunk.finish_reason is FinishReason.ABORT  # its deadline has passed, or it was cancelled
        for asker in work.askers:
            if is_owners_own and asker is not work.owner:
                asker.ask_again(text)
            else:
                asker.fail(chunk)

    def flush(self) -> None:
        """Called by the bridge."""
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
    """Numbers of the texts that were asked for last, within a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        """Name of the key -> numbers, the one that was asked for last at the end."""

    def find(self, key: _Key) -> bytes | None:
        if not self._entries:
            return None
        name = _entry_name(key)
        states = self._entries.get(name)
        if states is not None:
            self._entries.move_to_end(name)
        return states

    def put(self, key: _Key, states: bytes) -> None:
        """Keep the numbers of a text. They may be there already, as the engine may have had it twice."""
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
