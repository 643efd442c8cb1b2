"""From a `TextsCall` to its numbers: the door, the tokens, and the engine, to which a long list comes by and by.

A list is many small requests. At most `WINDOW_STEPS` steps' worth of them is with the engine; each that ends lets the next one
in. So others find the engine's queue short whatever somebody sends, and a client that leaves has cost no more than that.
Knows neither JSON nor HTTP, and refuses by `Rejected`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from penstock.admission.checks import Ask
from penstock.admission.door import Place
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError, cancelled
from penstock.serve.openai.call import Terms
from penstock.serve.openai.in_flight import InFlight
from penstock.serve.openai.run import at_the_door, check_encoded, check_text_size
from penstock.serve.openai.write import error_of, server_timing, times_ms
from penstock.serve.texts.call import TextInput, TextResult, TextResults, TextsCall, TokenIds, Truncation
from penstock.serve.texts.desk import SAMPLING, Desk
from penstock.types.encoder import TextTokens
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import Request

WINDOW_STEPS = 2
"""One step's worth is computed while another one waits, so the engine never waits for a call that has more."""
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
    with at_the_door(running, ask) as place:
        size = sum([_size(text) for text in call.texts])
        tokens = await running.off_loop.run(size, partial(tokenise, call))
        if not ask.num_token_ids:
            running.admission.lengths.on_prompt(size, sum([len(text.token_ids) for text in tokens]))
        texts = _RunningTexts(call, desk, tokens, place)
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
    """The texts of one call on their way through the desk. It is an `Asker` of the desk and a `Flight` of `InFlight`."""

    def __init__(self, call: TextsCall, desk: Desk, tokens: Sequence[TextTokens], place: Place) -> None:
        self.running: RunningModel = call.running
        self.terms: Terms = call.terms
        self._desk = desk
        self._texts = tokens
        self._place = place
        self._engine_id = desk.new_engine_id(call.terms.request_id)
        self._waiting = deque(dict.fromkeys(tokens))
        """Texts that the desk has not got, each once."""
        self._found: dict[TextTokens, bytes] = {}
        self._asked: dict[TextTokens, Request | None] = {}
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
            self._num_asked_tokens += len(text.token_ids)
        if texts:
            self._desk.ask(texts, self, self.terms.owner.tenant)

    async def finish(self) -> TextResults:
        """Wait for all texts, and let the rest of them in meanwhile. Raises `ApiError` if the call ends early."""
        while self._error is None and (self._waiting or self._asked):
            self.fill()
            if self._asked:
                self._waker = asyncio.get_running_loop().create_future()
                try:
                    await self._waker
                finally:
                    self._waker = None
        if self._error is not None:
            raise self._error
        found = self._found
        timing = "" if self._last is None else server_timing(times_ms(self.terms.arrival_ns, self._last)[:2])
        return TextResults([TextResult(found[text], len(text.token_ids)) for text in self._texts], timing)

    def close(self, in_flight: InFlight | None) -> None:
        """Give up what is not there yet."""
        if self._asked:
            self._desk.leave(self, _LEFT)
        if in_flight is not None:
            in_flight.land(self)

    # For the desk.

    def request_for(self, text: TextTokens) -> Request:
        terms = self.terms
        self._num_requests += 1
        request = self._asked[text] = Request(
            request_id=f"{self._engine_id}.{self._num_requests - 1}",
            prompt_token_ids=text.token_ids,
            sampling=SAMPLING,
            arrival_ns=terms.arrival_ns,
            parent_id=self._engine_id,
            arm=terms.arm,
            priority=terms.priority,
            deadline_ns=terms.deadline_ns,
            queue_deadline_ns=terms.queue_deadline_ns,
            first_token_deadline_ns=terms.first_token_deadline_ns,
            slo_ttft_ns=terms.slo_ttft_ns or self.running.admission.limits_of(terms.arm).slo_ttft_ns,
            tenant=terms.owner.tenant,
            second_at=text.second_at,
        )
        return request

    def enter(self, requests: Sequence[Request]) -> None:
        self.running.admission.enter_more(self._place, requests, self.running.clock.now_ns())

    def take(self, text: TextTokens, states: bytes, chunk: OutputChunk | None) -> None:
        self._found[text] = states
        self._num_asked_tokens -= len(text.token_ids)
        del self._asked[text]
        if chunk is not None:
            self._last = chunk

    def fail(self, chunk: OutputChunk) -> None:
        self._error = self._error or error_of(self.terms, chunk)

    def ask_again(self, text: TextTokens) -> None:
        del self._asked[text]
        self._num_asked_tokens -= len(text.token_ids)
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


def tokenise(call: TextsCall) -> list[TextTokens]:
    """The tokens of all texts. Raises `Rejected` if one is too long and nobody asked to have it cut, or if the tokenizer fails.

    Runs on any thread.
    """
    running, cut = call.running, call.truncation
    found: dict[int, TextTokens] = {}
    to_encode: dict[int, str | tuple[str, str]] = {}
    for index, text in enumerate(call.texts):
        if isinstance(text, str):
            check_text_size(text, running, call.name_of(index))
            to_encode[index] = text
        elif isinstance(text, TokenIds):
            found[index] = TextTokens(_kept(text.token_ids, cut), 0)
        else:
            for part in text:
                check_text_size(part, running, call.name_of(index))
            to_encode[index] = text
    encoded = running.tokenizer.encode_texts(
        list(to_encode.values()),
        max_tokens=None if cut is None else cut.max_tokens,
        truncation_side="right" if cut is None else cut.side,
    )
    found.update(zip(to_encode, encoded, strict=True))
    all_tokens = [found[index] for index in range(len(call.texts))]
    for index, tokens in enumerate(all_tokens):
        _check(tokens.token_ids, running, call.name_of(index))
    return all_tokens


def _check(token_ids: Sequence[int], running: RunningModel, name: str) -> None:
    limit = running.model.max_model_len
    if not token_ids:
        raise Rejected(RejectReason.INVALID, f"'{name}' has no tokens.", param=name)
    if len(token_ids) > limit:
        raise Rejected(
            RejectReason.CONTEXT_LENGTH,
            f"'{name}' has {len(token_ids)} tokens, and {running.name} takes {limit}, special tokens included. Shorten it, "
            "divide it, or ask for truncation.",
            param=name,
        )
    check_encoded(token_ids, running, name)


def _kept(token_ids: tuple[int, ...], cut: Truncation | None) -> tuple[int, ...]:
    if cut is None:
        return token_ids
    return token_ids[: cut.max_tokens] if cut.side == "right" else token_ids[-cut.max_tokens :]


def _size(text: TextInput) -> int:
    """Characters of a text, or its tokens."""
    if isinstance(text, tuple):
        return len(text[0]) + len(text[1])
    return len(text) if isinstance(text, str) else len(text.token_ids)


def _ask(call: TextsCall) -> Ask:
    """The size and urgency of a call as far as they are known without its tokens: of the texts that fill its window."""
    terms, model = call.terms, call.running.model
    texts: list[TextInput] = []
    num_tokens = 0
    for text in call.texts:
        if num_tokens >= WINDOW_STEPS * model.max_step_tokens:
            break
        texts.append(text)
        num_tokens += min(max(1, _size(text) // _CHARS_PER_TOKEN), model.max_model_len)
    num_token_ids = sum([_size(text) for text in texts if isinstance(text, TokenIds)])
    return Ask(
        num_requests=len(texts),
        num_chars=sum([_size(text) for text in texts]) - num_token_ids,
        num_token_ids=num_token_ids,
        max_new_tokens=1,
        min_new_tokens=1,
        tenant=terms.owner.tenant,
        priority=terms.priority,
        deadline_ns=terms.deadline_ns,
        queue_deadline_ns=terms.queue_deadline_ns,
        first_token_deadline_ns=terms.first_token_deadline_ns,
        slo_ttft_ns=terms.slo_ttft_ns,
        claim=call.claim,
        is_retry=terms.is_retry,
        arm=terms.arm,
    )
