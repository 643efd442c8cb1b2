"""From a `TextsCall` to its numbers: the door, the tokens, and the engine, to which a long list comes by and by.

A list is many small requests. The engine has some at a time: tokens for `WINDOW_STEPS` steps that are as full as they may be,
so for ten or twenty where a step is kept short (`hold-step`). Each that ends lets the next one in. So others find the engine's
queue short whatever somebody sends, and a client that leaves has cost no more than that.
Knows neither JSON nor HTTP, and refuses by `Rejected`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from penstock.admission.checks import Ask
from penstock.admission.door import Place
from penstock.calls.call import Terms
from penstock.calls.in_flight import InFlight
from penstock.calls.run import ask_of, at_the_door
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError, cancelled
from penstock.serve.streams import error_of, server_timing, times_ms
from penstock.serve.texts.call import Text, TextInput, TextResult, TextResults, TextsCall, TokenIds
from penstock.serve.texts.desk import SAMPLING, Desk, Urgency
from penstock.serve.texts.tokens import parts_of, tokenise, work_size
from penstock.types.request import Request

WINDOW_STEPS = 2
"""Full steps whose tokens a call has with the engine: even these would leave one to compute while the next ones come."""
_CHARS_PER_TOKEN = 4
"""In the mean, of English: how much of a list comes to the door is decided before its tokens are known."""
_LEFT = "the client left"


async def run(call: TextsCall, desk: Desk, in_flight: InFlight | None = None) -> TextResults:
    """The numbers of all texts. If it is cancelled, so are they.

    `in_flight`: there the call can be seen and cancelled until it ends. Raises `Rejected` if the door is closed, or a text does
    not fit, and `ApiError` if the call ends early.
    """
    running = call.running
    ask = _ask(call)
    with running.engine.held():  # a server that drains lets the call end, and its later texts are not there yet
        with at_the_door(running, ask) as place:
            found = await running.off_loop.run(work_size(call), partial(tokenise, call))
            if not ask.num_token_ids:
                num_chars = sum([_size(text) for text in call.texts])
                running.admission.lengths.on_prompt(num_chars, sum([text.num_tokens for text in found]))
            texts = _RunningTexts(call, desk, found, place)
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


class _RunningTexts:
    """The texts of one call on their way through the desk. It is an `Asker` of the desk and a `CallInFlight` of `InFlight`."""

    def __init__(self, call: TextsCall, desk: Desk, texts: Sequence[Text], place: Place) -> None:
        self.running: RunningModel = call.running
        self.terms: Terms = call.terms
        self._desk = desk
        self._texts = texts
        self._place = place
        self._engine_id = desk.new_engine_id(call.terms.request_id)
        self._waiting = deque(dict.fromkeys(texts))
        """Texts that the desk has not got, each once."""
        self._found: dict[Text, bytes] = {}
        self._asked: dict[Text, Request | None] = {}
        """Texts that the desk has, with the request if it is this call's own."""
        self._num_asked_tokens = 0
        self._num_requests = 0
        self._window_tokens = WINDOW_STEPS * self.running.model.max_step_tokens
        self._error: ApiError | None = None
        self._waker: asyncio.Future[None] | None = None
        self._last: OutputChunk | None = None
        """The last chunk that brought numbers."""

    def fill(self) -> None:
        """Let in as many texts as the window has room for."""
        texts = []
        while self._waiting and self._num_asked_tokens < self._window_tokens:
            text = self._waiting.popleft()
            texts.append(text)
            self._asked[text] = None
            self._num_asked_tokens += text.num_tokens
        if texts:
            self._desk.ask(texts, self, self.terms.owner.tenant)

    async def finish(self) -> TextResults:
        """Wait for all texts, and let the rest of them in meanwhile. Raises `ApiError` if the call ends early."""
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
            timing = server_timing(times_ms(terms.arrival_ns, self._last)[:2], terms.model_wait_ns)
        return TextResults([TextResult(found[text], text.num_tokens) for text in self._texts], timing)

    def close(self, in_flight: InFlight | None) -> None:
        """Give up what is not there yet."""
        if self._asked:
            self._desk.leave(self, _LEFT)
        if in_flight is not None:
            in_flight.land(self)

    # For the desk.

    @property
    def urgency(self) -> Urgency:
        """The limits of a wait end with the first numbers: the texts of a long list come one after another."""
        terms, has_begun = self.terms, self._last is not None
        return Urgency(
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
            model_wait_ns=terms.model_wait_ns,
            parent_id=self._engine_id,
            priority=urgency.priority,
            deadline_ns=urgency.deadline_ns,
            queue_deadline_ns=urgency.queue_deadline_ns,
            first_token_deadline_ns=urgency.first_token_deadline_ns,
            slo_ttft_ns=urgency.slo_ttft_ns,
            tenant=terms.owner.tenant,
            second_at=text.tokens.second_at,
        )
        return request

    def enter(self, requests: Sequence[Request]) -> None:
        self.running.admission.enter_more(self._place, requests, self.running.clock.now_ns())

    def take(self, text: Text, states: bytes, chunk: OutputChunk | None) -> None:
        self._found[text] = states
        self._num_asked_tokens -= text.num_tokens
        del self._asked[text]
        if chunk is not None:
            self._last = chunk

    def fail(self, chunk: OutputChunk) -> None:
        self._error = self._error or error_of(self.terms, chunk)

    def ask_again(self, text: Text) -> None:
        del self._asked[text]
        self._num_asked_tokens -= text.num_tokens
        self._waiting.appendleft(text)

    def wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    # For those who ask about it.

    @property
    def requests(self) -> Sequence[Request]:
        return [request for request in self._asked.values() if request is not None]

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The call's own id, under which the journal tells one text at a time: a list would make others forgotten."""
        return (self._engine_id,)

    @property
    def index_of(self) -> dict[str, int]:
        return {request.request_id: int(request.request_id.rpartition(".")[2]) for request in self.requests}

    def abort(self, detail: str) -> None:
        self._error = self._error or cancelled(detail)
        self.wake()


def _size(text: TextInput) -> int:
    """Characters of a text, or its tokens."""
    return len(text.token_ids) if isinstance(text, TokenIds) else sum(map(len, parts_of(text)))


def _ask(call: TextsCall) -> Ask:
    """The size and urgency of a call as far as they are known without its tokens: of the texts that fill its window."""
    model = call.running.model
    texts: list[TextInput] = []
    num_tokens = 0
    for text in call.texts:
        if num_tokens >= WINDOW_STEPS * model.max_step_tokens:
            break
        texts.append(text)
        num_tokens += min(max(1, _size(text) // _CHARS_PER_TOKEN), model.max_model_len)
    num_token_ids = sum([_size(text) for text in texts if isinstance(text, TokenIds)])
    return ask_of(
        call.terms,
        call.claim,
        num_requests=len(texts),
        num_chars=sum([_size(text) for text in texts]) - num_token_ids,
        num_token_ids=num_token_ids,
        max_new_tokens=1,
        min_new_tokens=1,
    )
