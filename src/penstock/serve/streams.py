"""Answers to a call: one JSON value or a stream, in the form of an API's `Writer`.

A stream's events are bytes, built once per step. The call's own task sends them and waits for slow clients. A stream begins
when its call is admitted, so later failures are sent as events.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock import fast_json
from penstock.calls.call import AnswerOptions, Terms
from penstock.calls.in_flight import Chosen, RunningCall, count_ttft
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError, cancelled, deadline_exceeded, failed, from_rejected, internal, status_of
from penstock.serve.http.checks import CLIENT_LEFT, client_watch
from penstock.serve.http.entries import TokenCounts, entry_of
from penstock.serve.shapes import ChatFinishWord, FinishWord
from penstock.serve.shapes import Usage as UsageBody
from penstock.text.answers import Answer, AnswerForm, CallEnd, Content, Part, Reasoning, gather
from penstock.text.dialects import short_id
from penstock.text.tokenizer import Tokenizer
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import FinishReason, WaitTimes
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import MAX_LOGPROBS

_log = logging.getLogger(__name__)

FINISH_WORDS: Mapping[FinishReason, FinishWord] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's words for finish reasons. Other reasons are errors."""
LEAST_WAIT_NS = 10_000_000
"""Shorter sends do not count as waiting for the client: they are the write itself, or other work of the event loop."""
DONE = b"data: [DONE]\n\n"
_PARTS = ("queue", "prefill", "decode")
_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""Characters that end a line in Unicode and may stand in a JSON string, with JSON's escapes."""
STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    # Without it, nginx collects events before it passes them on.
    (b"x-accel-buffering", b"no"),
)


async def respond(http: HttpRequest, call: RunningCall, new_writer: NewWriter) -> Response:
    """Return the response to a call. Raises `ApiError` if the call fails and is not streamed."""
    with call:
        writer = new_writer(call)
        entry = entry_of(http.scope)
        if entry is not None:
            entry.count_tokens = writer.usage.counts
        if call.answer.is_streamed:
            return EventStream(http, call, writer)
        records = await _collect(http, call, writer)
    if entry is not None:
        entry.ttft_s = _ttft_s(call)
    return await _json(records, call, writer)


class Usage:
    """Token counts of one call. A prompt with several choices counts once, with the cached tokens of its first choice."""

    def __init__(self, call: RunningCall) -> None:
        self._firsts = call.firsts
        self._num_prompt_tokens = call.num_prompt_tokens
        self._num_generated = [0] * len(call.requests)

    def add(self, index: int, chunk: OutputChunk) -> None:
        self._num_generated[index] = chunk.num_generated_tokens

    def counts(self) -> TokenCounts:
        """Return the number of tokens in all prompts, of those found in the cache, and in all answers so far."""
        return TokenCounts(self._num_prompt_tokens, self.num_cached, sum(self._num_generated))

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens found in the cache."""
        return sum([first.num_cached_tokens for first in self._firsts])

    def body(self) -> UsageBody:
        num_generated = sum(self._num_generated)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self._num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


class ChoiceRecord:
    """One choice of an answer that is not streamed."""

    def __init__(self) -> None:
        self.chunks: list[OutputChunk] = []

    @property
    def text(self) -> str:
        return "".join([chunk.text for chunk in self.chunks])

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def last(self) -> OutputChunk:
        return self.chunks[-1]


class Writer(ABC):
    """Writes one answer in the form of an API: `whole`, or as the bytes of a stream.

    A stream calls `open`, `begin` before the first chunk, `write` for each chunk, and `end` or `fail`. While it is silent, it
    calls `keepalive`.
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._options = call.answer
        self._tokenizer = call.running.tokenizer
        self.usage = Usage(call)

    def open(self) -> bytes:
        """Return the first bytes, sent when the call is admitted."""
        return self.keepalive()

    def keepalive(self) -> bytes:
        """Return bytes that clients ignore, sent to show that the server is at work."""
        return comment("keepalive")

    def begin(self, timing: str) -> bytes:
        """Return the bytes before the first chunk, if any. The adapter is loaded by now. `timing`: value of `Server-Timing`."""
        del timing
        return b""

    @abstractmethod
    def write(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk of choice `index`; may be empty. `usage` has the chunk's tokens already."""

    def end(self) -> bytes:
        """Return the end of a complete stream, if the events of its last chunk are not the end."""
        return b""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails."""

    @abstractmethod
    def whole(self, records: Sequence[ChoiceRecord]) -> object:
        """Return the answer that is not streamed, as JSON data."""

    def _shown_logprobs(self, chunk: OutputChunk) -> Sequence[TokenLogprobs]:
        """Return the chunk's log-probabilities, without that of a hidden stop token."""
        ends_with_stop_token = chunk.finish_reason is FinishReason.STOP and isinstance(chunk.stop_reason, int)
        is_hidden = ends_with_stop_token and not self._options.include_stop_str_in_output
        return chunk.logprobs[:-1] if is_hidden else chunk.logprobs


NewWriter = Callable[[RunningCall], Writer]


class ChoiceReader:
    """Splits the text of one choice into parts: reasoning, content, tool calls."""

    def __init__(self, call: RunningCall, index: int, *, id_prefix: str = "call_") -> None:
        """`id_prefix`: prefix of the tool calls' ids, unless the model's template requires another form."""
        form = call.form or AnswerForm()
        self._is_plain = call.is_plain
        self._has_reasoning = call.answer.has_reasoning
        self._reader = form.reader(partial(_call_id, call.engine_ids[index], call.running.dialect.tools.id_chars, id_prefix))
        self._reasoning = None if form.reasoning is None else _ReasoningTokens(form, call.running.tokenizer)
        self.num_calls = 0
        self.is_cut = False
        """Whether the token limit or a stop string cut a tool call off."""

    def read(self, chunk: OutputChunk) -> list[Part]:
        """Return the parts that are certain after this chunk. The last chunk returns everything left."""
        if self._is_plain:
            return [Content(chunk.text)] if chunk.text else []
        parts = self._reader.push(chunk.text)
        if chunk.finish_reason is not None:
            parts += self._reader.finish()
        if self._reasoning is not None:
            self._reasoning.add(chunk.token_ids, parts)
        for part in parts:
            if isinstance(part, CallEnd):
                self.num_calls += part.is_whole
                self.is_cut |= not part.is_whole
        return parts if self._has_reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    def parts(self, record: ChoiceRecord) -> list[Part]:
        return [part for chunk in record.chunks for part in self.read(chunk)]

    def whole(self, record: ChoiceRecord) -> Answer:
        return gather(self.parts(record))

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including marks, shown or not."""
        return 0 if self._reasoning is None else self._reasoning.count

    @property
    def has_calls(self) -> bool:
        """Whether the choice has tool calls, all complete."""
        return self.num_calls > 0 and not self.is_cut

    def finish_word(self, chunk: OutputChunk) -> ChatFinishWord | None:
        """Return OpenAI's word for how the choice ended, or None before its last chunk."""
        if chunk.finish_reason is FinishReason.STOP and self.has_calls:
            return "tool_calls"
        return finish_word_of(chunk)


class _ReasoningTokens:
    """Counts the tokens of an answer up to the end of its reasoning; 0 if it does not reason."""

    def __init__(self, form: AnswerForm, tokenizer: Tokenizer) -> None:
        assert form.reasoning is not None
        self.count = 0
        self._close = form.reasoning.close.encode()
        self._token_bytes = tokenizer.token_bytes
        self._num_tokens = 0
        self._tail = b""
        """The last bytes, fewer than the closing mark's."""
        self._has_reasoned = form.is_reasoning
        self._has_ended = False

    def add(self, token_ids: Sequence[int], parts: Sequence[Part]) -> None:
        """Count the next tokens. `parts`: the parts of the answer in them."""
        if self._has_ended:
            return
        self._has_reasoned |= any(isinstance(part, Reasoning) for part in parts)
        self._has_ended = any(not isinstance(part, Reasoning) for part in parts)
        for token_id in token_ids:
            self._num_tokens += 1
            self._tail += self._token_bytes(token_id)
            if self._close in self._tail:
                self._has_ended = True
                break
            self._tail = self._tail[1 - len(self._close) :]
        self.count = self._num_tokens if self._has_reasoned else 0


def _call_id(engine_id: str, id_chars: int, prefix: str, index: int) -> str:
    """Return the id of a tool call, unique in this process."""
    name = short_id(f"{engine_id}.{index}", id_chars or 24)
    return name if id_chars else prefix + name


# Answers that come whole


async def _collect(http: HttpRequest, call: RunningCall, writer: Writer) -> list[ChoiceRecord]:
    """Wait for the end of all choices, and return them."""
    records = [ChoiceRecord() for _ in call.requests]
    with client_watch(http, partial(call.stream.cancel, CLIENT_LEFT)):
        while chunks := await call.next_chunks():
            _raise_if_over(call, chunks)
            for chunk in chunks:
                index = call.index_of[chunk.request_id]
                writer.usage.add(index, chunk)
                records[index].chunks.append(chunk)
    _raise_if_over(call, [])
    call.close()
    return records


async def _json(records: Sequence[ChoiceRecord], call: RunningCall, writer: Writer) -> Response:
    """Return the whole answer, with the `Server-Timing` of its first choice."""
    num_tokens = sum([record.last.num_generated_tokens for record in records])
    size = num_tokens * (1 + MAX_LOGPROBS if call.answer.has_logprobs else 1)
    size += sum([len(request.prompt_logprobs) for request in call.requests]) * (1 + MAX_LOGPROBS)
    data = await call.running.off_loop.finish(size, lambda: fast_json.dumps(writer.whole(records)))
    parts_ms = times_ms(call.terms.arrival_ns, records[0].last)
    headers = {"Server-Timing": server_timing(parts_ms, call.terms.waits, call.chosen)}
    return Response(data, media_type="application/json", headers=headers)


# Streams


class EventStream(Response):
    """Streams one call, and closes the call at the end."""

    keepalive_s: ClassVar[float] = 10.0
    """A silent stream sends a keepalive after once to twice this time. Some clients give up after 30 s."""

    def __init__(self, http: HttpRequest, call: RunningCall, writer: Writer) -> None:
        super().__init__()
        self._http = http
        self._call = call
        self._writer = writer
        self._is_silent = False
        """Whether no event was sent since the last `_look`."""
        self._sends_since_ns: int | None = None
        """While an event is sent: the instant up to which its wait was counted."""
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive  # `client_watch` calls `receive`.
        with client_watch(self._http, partial(self._call.stream.cancel, CLIENT_LEFT)):
            try:
                headers = [(b"content-type", self._writer.media_type), *STREAM_HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._look()
                await self._send_events(send)
            except Exception:
                request_id = self._call.terms.request_id
                _log.exception("request %s failed while it was streamed", request_id)
                await send(_piece(self._fail(internal(request_id)), more=False))
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                self._count_wait()
                self._call.close()

    def _look(self) -> None:
        """Send a keepalive if the stream was silent since the last call, unless it waits for its client."""
        if self._is_silent:
            self._call.stream.flush()
        self._is_silent = True
        self._count_wait()
        self._timer = asyncio.get_running_loop().call_later(self.keepalive_s, self._look)

    def _count_wait(self) -> None:
        """Add to the metrics how long the current send has waited for the client."""
        if self._sends_since_ns is not None:
            running, since_ns = self._call.running, self._sends_since_ns
            self._sends_since_ns = running.clock.now_ns()
            if (wait_ns := self._sends_since_ns - since_ns) >= LEAST_WAIT_NS:
                running.metrics.count_client_wait(wait_ns)

    async def _send_events(self, send: Send) -> None:
        stream, now_ns = self._call.stream, self._call.running.clock.now_ns
        await send(_piece(self._writer.open(), more=True))
        chunks = await self._next_chunks(send)
        data = self._begin(chunks[0]) if chunks else b""
        while chunks:
            events, error = write_chunks(self._call, self._writer, chunks)
            data += events
            if error is not None:
                await send(_piece(data + self._fail(error), more=False))
                return
            if stream.is_ended:
                await send(_piece(data + self._writer.end(), more=False))
                return
            if data:
                self._is_silent = False
                self._sends_since_ns = now_ns()
                await send(_piece(data, more=True))
                self._count_wait()
                self._sends_since_ns = None
                data = b""
            chunks = await self._next_chunks(send)
        # The client has left. Nothing is sent, but ASGI requires an end.
        await send(_piece(b"", more=False))

    def _fail(self, error: ApiError) -> bytes:
        if (entry := entry_of(self._http.scope)) is not None:
            entry.error = error.code
        return self._writer.fail(error)

    async def _next_chunks(self, send: Send) -> list[OutputChunk]:
        """Return the next chunks, with keepalives meanwhile. Empty if the client left."""
        while not (chunks := await self._call.next_chunks()) and not self._call.stream.is_ended:
            await send(_piece(self._writer.keepalive(), more=True))
        return chunks

    def _begin(self, first: OutputChunk) -> bytes:
        terms = self._call.terms
        if (entry := entry_of(self._http.scope)) is not None:
            entry.ttft_s = _ttft_s(self._call)
        return self._writer.begin(server_timing(times_ms(terms.arrival_ns, first)[:2], terms.waits, self._call.chosen))


def write_chunks(call: RunningCall, writer: Writer, chunks: Sequence[OutputChunk]) -> tuple[bytes, ApiError | None]:
    """Return the events of these chunks up to the first error, and that error or None."""
    write, count, index_of = writer.write, writer.usage.add, call.index_of
    if len(chunks) == 1 and chunks[0].finish_reason is None:
        index = index_of[chunks[0].request_id]
        count(index, chunks[0])
        return write(index, chunks[0]), None
    parts: list[bytes] = []
    for chunk in chunks:
        error = error_of(call.terms, chunk)
        if error is not None:
            # The chunk may be merged with earlier ones, which are still shown.
            chunk.finish_reason = None
        index = index_of[chunk.request_id]
        count(index, chunk)
        parts.append(write(index, chunk))
        if error is not None:
            return b"".join(parts), error
    return b"".join(parts), None


def comment(text: str) -> bytes:
    """Return an event that clients skip."""
    return b": %s\n\n" % text.encode()


def _piece(events: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": whole_lines(events), "more_body": more}


def whole_lines(events: bytes) -> bytes:
    """Escape Unicode's other line ends in JSON, for clients that split lines there (`str.splitlines`, httpx's `iter_lines`).

    https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    if not events.isascii():
        for char, escaped in _LINE_ENDS:
            events = events.replace(char, escaped)
    return events


# How a call ended


@contextmanager
def counting_misses(running: RunningModel, terms: Terms, *, is_last: bool = False) -> Iterator[None]:
    """Count a missed first token if a client's call fails or times out in the block, before its answer is sent.

    `is_last`: no other model is asked after the block.
    """
    try:
        yield
    except (ApiError, Rejected) as error:
        if status_of(error) in (408, 500) or (is_last and status_of(error) == 503):  # a route asks the next model after 503
            count_ttft(running, terms, math.inf)
        raise


def _raise_if_over(call: RunningCall, chunks: Sequence[OutputChunk]) -> None:
    if call.stream.is_cancelled:
        raise cancelled(CLIENT_LEFT)
    for chunk in chunks:
        error = error_of(call.terms, chunk)
        if error is not None:
            raise error


def error_of(terms: Terms, chunk: OutputChunk) -> ApiError | None:
    """Return the error that ended a request, or None if the request goes on or ended normally."""
    if chunk.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return None
    detail = chunk.detail or "the request ended early"
    if not chunk.reject_reason:
        return cancelled(detail) if chunk.finish_reason is FinishReason.ABORT else failed(detail, terms.request_id)
    reason = RejectReason(chunk.reject_reason)
    limit = next((limit for limit in terms.time_limits if limit[1] is reason), None)
    if limit is None:
        return from_rejected(Rejected(reason, detail))
    limit_ns, _, since_ns = limit
    queue_ms, prefill_ms, decode_ms = times_ms(since_ns, chunk)
    allowed_ms = (limit_ns - since_ns) / 1e6
    return deadline_exceeded(reason, allowed_ms, queue_ms, prefill_ms + decode_ms, chunk.num_generated_tokens)


def times_ms(arrival_ns: int, chunk: OutputChunk) -> tuple[float, float, float]:
    """Return the milliseconds of queueing, prefill and decoding up to this chunk.

    Queueing ends with the first step, prefill with the first token.
    """
    scheduled_ns = chunk.at_ns if chunk.first_scheduled_ns is None else chunk.first_scheduled_ns
    decode_ns = chunk.at_ns if chunk.first_token_ns is None else chunk.first_token_ns
    return (scheduled_ns - arrival_ns) / 1e6, (decode_ns - scheduled_ns) / 1e6, (chunk.at_ns - decode_ns) / 1e6


def _ttft_s(call: RunningCall) -> float | None:
    return None if call.ttft_ns is None or call.ttft_ns == math.inf else call.ttft_ns / 1e9


def server_timing(parts_ms: Sequence[float], waits: WaitTimes, chosen: Chosen | None = None) -> str:
    """Return the value of `Server-Timing`: `parts_ms`, the parts of `queue` spent on a route, a pipeline and the model, and
    the time for which the whole answer was held back.

    https://www.w3.org/TR/server-timing/
    """
    parts = [f"{name};dur={part_ms:.3f}" for name, part_ms in zip(_PARTS, parts_ms, strict=False)]
    held_ns = 0 if chosen is None else chosen.held_ns
    more = (("route", waits.route), ("pipeline", waits.pipeline), ("model", waits.model), ("held", held_ns))
    parts += [f"{name};dur={spent_ns / 1e6:.3f}" for name, spent_ns in more if spent_ns]
    return ", ".join(parts)


def fingerprint(options: AnswerOptions) -> str:
    """Return the model's fingerprint, followed by that of a loaded adapter."""
    adapter = options.adapter
    return options.system_fingerprint + (f"_{adapter.fingerprint.hex()[:8]}" if adapter and adapter.fingerprint else "")


def finish_word_of(chunk: OutputChunk) -> FinishWord | None:
    return None if chunk.finish_reason is None else FINISH_WORDS[chunk.finish_reason]
