"""The unfinished calls of a server: lists, explains and cancels them for their owners.

`run` opens calls. The routes under `/v1/requests` and `/kv` read them. Only the event loop uses this file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol, Self, TypeVar

from penstock.admission.door import Entering
from penstock.calls.call import Call, Terms
from penstock.clock import Clock
from penstock.config import ServerConfig
from penstock.config.keys import isolates_tenants
from penstock.deploy.running import RunningModel
from penstock.engine.bridge import MERGE_ABOVE_CHUNKS, Stream, merge_chunks
from penstock.engine.ports import OutputChunk
from penstock.engine.state import EngineState
from penstock.obs.explain.explanation import (
    GRAMMAR,
    MODEL,
    PROMPT,
    Explanation,
    explain_arrival,
    explain_intake,
    summary,
)
from penstock.obs.explain.journal import History
from penstock.obs.explain.lives import Life
from penstock.routes.prices import Cost
from penstock.text.answers import AnswerForm
from penstock.types.request import NO_WAITS, FinishReason, Owner, Request, RequestStatus, WaitTimes

_One = TypeVar("_One")
_CANCELLED = "the request was cancelled"
_MAX_LOOKED_AT = 1000
"""Most ended calls searched for those of one owner."""


class Chosen(NamedTuple):
    """How a route or a pipeline chose an answer, as values of the response's headers. An empty one is not sent."""

    route: str
    sources: str
    check: str
    held_ns: int
    """Time for which the finished answer was held back while other models answered or judged it."""


@dataclass(frozen=True, slots=True)
class _Landed:
    """An ended call, reduced to the parts that explain it later. The model is left out, since it may be unloaded."""

    terms: Terms
    engine_ids: tuple[str, ...]
    journal: History
    clock: Clock
    unix_time_s: Callable[[], int]
    model: str
    chosen: Chosen | None
    cost: Cost | None


@dataclass(slots=True)
class Arrival:
    """A call that is not in the engine yet: it waits for its model, its prompt or its grammar."""

    request_id: str
    owner: Owner
    arrival_ns: int
    clock: Clock
    unix_time_s: Callable[[], int]
    since_ns: int
    """Start of the current wait."""
    waits_for: str = MODEL
    waits: WaitTimes = NO_WAITS
    """Its waits that are over."""
    model: str = ""

    @classmethod
    def of(cls, call: Call) -> Arrival:
        """Return an `Arrival` for a call with a loaded model. It waits for its prompt."""
        terms, clock = call.terms, call.running.clock
        unix_time_s = call.running.sources.unix_time_s
        arrival = cls(terms.request_id, terms.owner, terms.arrival_ns, clock, unix_time_s, clock.now_ns(), PROMPT)
        arrival.waits, arrival.model = terms.waits, call.running.name
        return arrival

    def explain(self) -> CallExplanation:
        """Return an explanation of the wait so far. Any thread may call this."""
        now_ns = self.clock.now_ns()
        waited_ns = now_ns - self.since_ns
        life = Life(self.request_id, self.arrival_ns, 0)
        life.waits = self.waits
        if self.waits_for in (MODEL, GRAMMAR):
            waited_ns += getattr(self.waits, self.waits_for)
            life.waits = self.waits._replace(**{self.waits_for: waited_ns})
        age_ns = now_ns - self.arrival_ns
        choices = [(0, explain_arrival(life, now_ns, self.waits_for))]
        return CallExplanation(self.request_id, self.model, self.unix_time_s() - age_ns // 1_000_000_000, age_ns, choices)


@dataclass(frozen=True, slots=True)
class CallExplanation:
    """An explanation for the client of where a call's time goes."""

    request_id: str
    model: str
    created_unix_s: int
    age_ns: int
    choices: list[tuple[int, Explanation]]
    """(index of the choice, its explanation), not empty."""
    num_forgotten: int = 0
    """Number of choices that are no longer in the journal."""
    chosen: Chosen | None = None
    cost: Cost | None = None
    """Known at the end of an answer for a route with prices."""

    @property
    def summary(self) -> str:
        """One sentence about the choice that took longest, and one about what held it back."""
        longest = max((choice for _, choice in self.choices), key=lambda choice: choice.total_ns)
        return summary(longest, 0 if self.chosen is None else self.chosen.held_ns)


class CallInFlight(Protocol):
    """A call with requests in the engine: the interface that `InFlight` needs."""

    @property
    def running(self) -> RunningModel: ...

    @property
    def terms(self) -> Terms: ...

    @property
    def requests(self) -> Sequence[Request]:
        """The engine's requests that compute this call. The engine's thread changes them."""
        ...

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The call's request ids in the journal: one for each of `requests`, or one for all."""
        ...

    def abort(self, detail: str) -> None:
        """End the unfinished requests. `detail` is the error that the client gets."""
        ...


def count_ttft(running: RunningModel, terms: Terms, ttft_ns: float) -> None:
    """Count whether a client's call met its targets for the first token. Lines of batches have none."""
    if not terms.background:
        running.metrics.count_ttft(terms.slo_ttft_ns, ttft_ns)


def _is_our_doing(chunk: OutputChunk) -> bool:
    """Return whether a request failed or timed out."""
    has_timed_out = bool(chunk.reject_reason) and chunk.finish_reason is FinishReason.ABORT
    return has_timed_out or chunk.finish_reason is FinishReason.ERROR


class Charge(Protocol):
    def __call__(self, num_prompt_tokens: int, num_tokens: int, *, failed: bool) -> Cost | None: ...


class RunningCall:
    """A call's requests in the engine, and the stream of their output chunks.

    As a context manager it closes the call if the block fails. Otherwise the sender of the answer closes it.
    """

    def __init__(
        self,
        in_flight: InFlight,
        call: Call,
        requests: Sequence[Request],
        echoes: Sequence[str],
        form: AnswerForm | None,
        stream: Stream,
    ) -> None:
        # The call itself is not kept: its prompts may be large.
        self._in_flight = in_flight
        self._is_closed = False
        self.running = call.running
        self.terms = call.terms
        self.answer = call.answer
        self.max_tokens = call.max_tokens
        """The client's limit. The context may have room for fewer tokens."""
        self.num_choices = call.request.n
        """Answers to each prompt."""
        self.requests = requests
        """One for each choice, in the order of the prompts. The engine's thread changes them."""
        self.firsts = requests[:: call.request.n]
        """The first choice of each prompt. It computes the prompt, which the others then find in the prefix cache."""
        self.echoes = echoes
        """The text to put before the answers to each prompt."""
        self.form = form
        """How answers are divided into content, reasoning and calls. None means all is content."""
        self.stream = stream
        self.price: Charge | None = None
        """Charges for the tokens if the call answers for a route with prices. Not called if none was generated."""
        self._has_failed = False
        self.cost: Cost | None = None
        self.chosen: Chosen | None = None
        self._hides_logprobs = requests[0].sampling.logprobs is not None and not call.answer.has_logprobs
        self.engine_ids = tuple([request.request_id for request in requests])
        self.index_of = {engine_id: index for index, engine_id in enumerate(self.engine_ids)}
        self._num_generated = [0] * len(requests)
        """Tokens of each choice so far. Counted only in `begin`, and for a call with a price."""
        self.num_dropped_tokens = 0
        """Generated for choices that `keep` has dropped."""
        self._dropped: list[str] = []
        self._ends_ns: dict[str, int] = {}
        """Engine's id of a choice -> when it ended, after `whole`."""
        self.ttft_ns: float | None = None
        """From the client's request until `next_chunks` first returned a token. Infinite if the call failed before that."""

    async def next_chunks(self) -> list[OutputChunk]:
        """Wait for the next output chunks, without what the client did not ask for."""
        chunks = await self.stream.next_chunks()
        if self.ttft_ns is None:
            self._count_first(chunks)
        if self.price is not None:
            self._count(chunks)
        if self._hides_logprobs:
            for chunk in chunks:
                chunk.logprobs = ()
        if not self.answer.is_empty:
            return chunks
        for chunk in chunks:
            chunk.text, chunk.token_ids, chunk.logprobs, chunk.num_generated_tokens = "", (), (), 0
            if chunk.finish_reason is FinishReason.STOP:
                chunk.finish_reason, chunk.stop_reason = FinishReason.LENGTH, None
        return chunks

    def _count_first(self, chunks: Sequence[OutputChunk]) -> None:
        # Here and not in the engine, since an answer may be held back, or discarded by its route.
        if any(chunk.first_token_ns is not None for chunk in chunks):
            self.ttft_ns = self.running.clock.now_ns() - self.terms.arrival_ns
        elif any(map(_is_our_doing, chunks)):
            self.ttft_ns = math.inf
        if self.ttft_ns is not None:
            count_ttft(self.running, self.terms, self.ttft_ns)

    async def begin(self, num_tokens: int) -> list[OutputChunk]:
        """Wait until each choice has `num_tokens` tokens or has ended. Return the chunks, as `next_chunks` will again."""
        return await self._hold(
            lambda chunk: chunk.finish_reason is not None or chunk.num_generated_tokens >= num_tokens, lambda _: False
        )

    async def whole(self, is_enough: Callable[[Sequence[OutputChunk]], bool] = lambda _: False) -> list[OutputChunk]:
        """Wait until all choices have ended, and return them in order. `next_chunks` returns them again.

        Stops early once `is_enough` is true for the choices that have ended, and returns only these.
        """
        ended = await self._hold(lambda chunk: chunk.finish_reason is not None, is_enough)
        self._ends_ns = {chunk.request_id: chunk.at_ns for chunk in ended}
        return sorted(ended, key=lambda chunk: self.index_of[chunk.request_id])

    async def _hold(
        self, is_done: Callable[[OutputChunk], bool], is_enough: Callable[[Sequence[OutputChunk]], bool]
    ) -> list[OutputChunk]:
        """Wait until all choices are done, or enough of them, and return these."""
        begun: list[OutputChunk] = []
        going = {*self.engine_ids}
        while going and (chunks := await self.stream.next_chunks()):
            self._count(chunks)
            begun += chunks
            if len(begun) > MERGE_ABOVE_CHUNKS * len(self.engine_ids):
                begun = merge_chunks(begun)
            if done := [chunk.request_id for chunk in chunks if is_done(chunk)]:
                going.difference_update(done)
                begun = merge_chunks(begun)
                if is_enough([chunk for chunk in begun if chunk.request_id not in going]):
                    break
        begun = merge_chunks(begun)
        self.stream.put_back(begun)
        return [chunk for chunk in begun if chunk.request_id not in going]

    def keep(self, index: int) -> None:
        """Answer with this choice alone, which has ended, and end the others. Call it after `whole`."""
        engine_id, num_tokens = self.engine_ids[index], self._num_generated[index]
        self.num_dropped_tokens = self.num_counted_tokens - num_tokens
        self._dropped = [one.request_id for one in self.requests if one.request_id != engine_id]
        self.firsts = [self.first_of(index)]
        self.stream.keep(engine_id)
        self.requests, self.engine_ids, self.index_of = [self.requests[index]], (engine_id,), {engine_id: 0}
        self.num_choices, self._num_generated, self._has_failed = 1, [num_tokens], False

    def say(self, chunk: OutputChunk, text: str) -> None:
        """Replace the answer of the only choice with this text. `chunk`: the choice, from `whole`."""
        # A pipeline's prompt may contain the text being withheld.
        self.form, self.echoes = None, [""] * len(self.echoes)
        self.answer = replace(self.answer, has_token_ids=False)
        self.stream.replace([replace(chunk, text=text, token_ids=(), logprobs=(), finish_reason=FinishReason.STOP)])

    @property
    def held_ns(self) -> int:
        """The time for which the answer has been held back after its end, after `whole`."""
        ends_ns = [self._ends_ns[one] for one in self.engine_ids if one in self._ends_ns]
        return max(0, self.running.clock.now_ns() - max(ends_ns)) if ends_ns else 0

    def _count(self, chunks: Sequence[OutputChunk]) -> None:
        for chunk in chunks:
            self._num_generated[self.index_of[chunk.request_id]] = chunk.num_generated_tokens
            self._has_failed |= bool(chunk.reject_reason) or chunk.finish_reason is FinishReason.ERROR

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts. A prompt with several choices counts once."""
        return sum([first.num_prompt_tokens for first in self.firsts])

    @property
    def num_counted_tokens(self) -> int:
        """Generated tokens of all choices, after `begin` or with a `price`."""
        return sum(self._num_generated)

    @property
    def is_plain(self) -> bool:
        """Whether the client gets the engine's text unchanged: no reasoning or tool calls are taken out."""
        return self.form is None

    def first_of(self, index: int) -> Request:
        """Return the first choice of the prompt of choice `index`, which `keep` may have dropped."""
        return self.firsts[index // self.num_choices]

    def scores_of(self, index: int) -> Request:
        """Return the request with the log-probabilities of the prompt of choice `index`, often the prompt's first choice."""
        request = self.requests[index]
        return self.first_of(index) if request.sampling.prompt_logprobs is None else request

    def abort(self, detail: str) -> None:
        for engine_id in self.engine_ids:
            self.running.bridge.abort(engine_id, detail)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_rest: object) -> None:
        if exc_type is not None:
            self.close()

    def close(self) -> None:
        """Abort unfinished requests and remove the call from `InFlight`. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.stream.close()
            if self._dropped and self.running.engine.state is not EngineState.READY:
                self.running.admission.forget(self._dropped)  # as `InFlight.land` does with the others
            if self.price is not None and self.num_counted_tokens:
                self.cost = self.price(self.num_prompt_tokens, self.num_counted_tokens, failed=self._has_failed)
            self._in_flight.land(self)


class InFlight:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._isolates = {sharing: isolates_tenants(config, sharing) for sharing in (None, "all", "tenant")}
        """A model's setting `prefix_sharing` -> whether its tenants are isolated."""
        self._num_opened = 0
        self._calls: dict[str, list[CallInFlight]] = {}
        """The client's id -> its calls. Clients may use an id more than once."""
        self._arriving: dict[str, list[Arrival]] = {}
        """The client's id -> its requests. Admission and the queue for models limit their number."""
        self._landed: deque[_Landed] = deque()
        """The last ended calls, as many as the journal keeps."""
        self._landed_of: dict[str, list[_Landed]] = {}
        """The client's id -> its ended calls, oldest first."""

    def new_engine_id(self, request_id: str) -> str:
        """Return an id that is unique in the engine: clients may use one id for several calls."""
        self._num_opened += 1
        return f"{request_id}/{self._num_opened}"

    def isolates_tenants(self, running: RunningModel) -> bool:
        """Return whether each of the model's tenants has its own cached prefixes."""
        return self._isolates[running.prefix_sharing]

    def open(
        self, call: Call, requests: Sequence[Request], echoes: Sequence[str], form: AnswerForm | None, entering: Entering
    ) -> RunningCall:
        """Submit a call's requests to the engine. The caller must close the result."""
        running = call.running
        running.admission.add_requests(entering, requests, running.clock.now_ns())
        try:
            stream = running.bridge.open(requests)
        except BaseException:
            running.admission.forget([request.request_id for request in requests])
            raise
        opened = RunningCall(self, call, requests, echoes, form, stream)
        self.add(opened)
        return opened

    @contextmanager
    def arriving(self, arrival: Arrival) -> Iterator[Arrival]:
        """List a request as arriving, so that it can be explained, until the block ends."""
        if not self.config.explained_requests:
            yield arrival
            return
        _put(self._arriving, arrival.request_id, arrival)
        try:
            yield arrival
        finally:
            _take(self._arriving, arrival.request_id, arrival)

    def add(self, call: CallInFlight) -> None:
        """List a call and keep its model loaded until `land`. The model must already be in use by the caller."""
        call.running.begin_use(is_user=True, is_background=call.terms.background)
        _put(self._calls, call.terms.request_id, call)

    def land(self, call: CallInFlight) -> None:
        """Remove an ended call from the list, but keep the parts that explain it."""
        if call.running.engine.state is not EngineState.READY:
            # A failed core may not have reported their ends.
            call.running.admission.forget([request.request_id for request in call.requests])
        self._remember(call)
        _take(self._calls, call.terms.request_id, call)
        call.running.end_use(is_background=call.terms.background)

    def cancel(self, request_id: str, owner: Owner) -> bool:
        """Abort the owner's calls with this id, and return whether there were any."""
        calls = [call for call in self._calls.get(request_id, ()) if call.terms.owner == owner]
        for call in calls:
            call.abort(_CANCELLED)
        return bool(calls)

    def explain(self, request_id: str, owner: Owner) -> Callable[[], CallExplanation | None]:
        """Return a function, for any thread, that explains the owner's last call with this id, or returns None."""
        arriving = next((one for one in reversed(self._arriving.get(request_id, ())) if one.owner == owner), None)
        if arriving is not None:
            return arriving.explain
        calls: list[CallInFlight | _Landed] = [*self._landed_of.get(request_id, ()), *self._calls.get(request_id, ())]
        calls = [call for call in reversed(calls) if call.terms.owner == owner]
        return lambda: next(filter(None, map(self._explain, calls)), None)

    def explaining(self, call: CallInFlight) -> Callable[[], Sequence[Explanation]]:
        """Return a function, for any thread, that explains a call's choices, as far as they are remembered."""
        running, ids = call.running, call.engine_ids
        if running.journal is None:
            return tuple
        return partial(running.journal.explain_all, ids, running.clock.now_ns)

    def explain_running(self, owner: Owner) -> Callable[[], list[CallExplanation]]:
        """Return a function, for any thread, that explains the owner's unfinished calls, those not in the engine yet last."""
        calls = self._calls_of(owner)
        arriving = [one for same in self._arriving.values() for one in same if one.owner == owner]
        return lambda: [*(told for call in calls if (told := self._explain(call))), *(one.explain() for one in arriving)]

    def explain_ended(self, owner: Owner, max_calls: int) -> Callable[[], list[CallExplanation]]:
        """Return a function, for any thread, that explains the owner's last ended calls, latest first."""
        latest = islice(reversed(self._landed), _MAX_LOOKED_AT)
        calls = list(islice((call for call in latest if call.terms.owner == owner), max_calls))
        return lambda: [told for call in calls if (told := self._explain(call))]

    def names_of(self, owner: Owner) -> dict[str, tuple[str, int]]:
        """Return the engine's id -> (client's id, index of the choice) for the owner's unfinished requests."""
        return {
            request.request_id: (call.terms.request_id, int(request.request_id.rpartition(".")[2]))
            for call in self._calls_of(owner)
            for request in call.requests
        }

    def requests_of(self, owner: Owner, running: RunningModel) -> list[Request]:
        """Return the owner's unfinished requests to a model, oldest first. The engine's thread still changes them."""
        calls = [call for call in self._calls_of(owner) if call.running is running]
        return [one for call in calls for one in call.requests if one.status is not RequestStatus.FINISHED]

    def _calls_of(self, owner: Owner) -> list[CallInFlight]:
        return [call for calls in self._calls.values() for call in calls if call.terms.owner == owner]

    def _explain(self, call: CallInFlight | _Landed) -> CallExplanation | None:
        landed, requests = (call, ()) if isinstance(call, _Landed) else (_landed(call), call.requests)
        if landed is None:
            return None
        # Before the journal is read, so that a request that ends meanwhile is found there.
        live = [request for request in requests if request.status is not RequestStatus.FINISHED]
        known = {told.request_id: told for told in landed.journal.explain_all(call.engine_ids, landed.clock.now_ns)}
        now_ns = landed.clock.now_ns()
        for request in live:
            if request.request_id not in known:  # still in the engine's inbox
                known[request.request_id] = explain_intake(request, now_ns)
        choices = [(index, known[name]) for index, name in enumerate(call.engine_ids) if name in known]
        if not choices:
            return None
        age_ns = now_ns - choices[0][1].arrival_ns
        num_forgotten = len(call.engine_ids) - len(choices)
        created_s = landed.unix_time_s() - age_ns // 1_000_000_000
        return CallExplanation(
            call.terms.request_id, landed.model, created_s, age_ns, choices, num_forgotten, landed.chosen, landed.cost
        )

    def _remember(self, call: CallInFlight) -> None:
        landed = _landed(call)
        if landed is None or call.terms.background:
            return
        self._landed.append(landed)
        _put(self._landed_of, landed.terms.request_id, landed)
        if len(self._landed) > landed.journal.max_ended:
            oldest = self._landed.popleft()
            _take(self._landed_of, oldest.terms.request_id, oldest)


def _put(by_id: dict[str, list[_One]], request_id: str, one: _One) -> None:
    by_id.setdefault(request_id, []).append(one)


def _take(by_id: dict[str, list[_One]], request_id: str, one: _One) -> None:
    same = by_id[request_id]
    del same[next(idx for idx, other in enumerate(same) if other is one)]
    if not same:
        del by_id[request_id]


def _landed(call: CallInFlight) -> _Landed | None:
    running = call.running
    if running.journal is None:
        return None
    chosen, cost = (call.chosen, call.cost) if isinstance(call, RunningCall) else (None, None)
    unix_time_s = running.sources.unix_time_s
    return _Landed(call.terms, call.engine_ids, running.journal, running.clock, unix_time_s, running.name, chosen, cost)
