"""The last pass of a chat or a completion: from the chunks of a running call to one JSON answer, or to server-sent events.

`respond` sends what any API's `Writer` makes; here are OpenAI's.

An event is built as bytes, once per step and client, from parts prepared beforehand. The call's own task sends it as a message
of ASGI, and waits where the client reads slowly. A stream begins as soon as its call was admitted: whatever fails later is an
event. It has an honest end: `[DONE]` after a complete answer, an error object and nothing more after any other.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.deploy.off_loop import OffLoop
from penstock.engine.ports import OutputChunk
from penstock.serve.calls.call import AnswerOptions, Terms
from penstock.serve.calls.in_flight import RunningCall
from penstock.serve.errors import ApiError, cancelled, deadline_exceeded, failed, from_rejected, internal
from penstock.serve.http.checks import entry_of
from penstock.serve.http.connection import CLIENT_LEFT, ClientWatch
from penstock.serve.openai.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from penstock.serve.openai.timings import Timings
from penstock.text.answers import (
    Answer,
    AnswerForm,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    HiddenTokens,
    Part,
    Reasoning,
    gather,
)
from penstock.text.dialects import short_id
from penstock.text.tokenizer import Tokenizer
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import FinishReason
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import MAX_LOGPROBS

_log = logging.getLogger(__name__)

FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's words; every other end is an error."""
_PARTS = ("queue", "prefill", "decode")
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""Characters that end a line in Unicode and that JSON lets stand in a string, with JSON's other way to write them."""
_HEADERS = (
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect events before it passes them on.
    (b"x-accel-buffering", b"no"),
)


async def respond(http: HttpRequest, call: RunningCall, new_writer: NewWriter) -> Response:
    """Return the response to a call, in the words of a writer.

    Raises `ApiError` if an answer that is not streamed fails.
    """
    with call:
        writer = new_writer(call, call.running.tokenizer)
        entry = entry_of(http.scope)
        if entry is not None:
            entry.count_tokens = writer.usage.counts
        if call.answer.is_streamed:
            return EventStream(http, call, writer)
        records = await _collect(http, call, writer)
    if entry is not None:
        entry.ttft_s = _ttft_s(call.terms, records[0].last)
    return await _json(records, call, writer, call.running.off_loop)


class Usage:
    """Token counts of one call, in OpenAI's shape.

    Each prompt counts once, however many choices it has; `cached_tokens` is what its first choice found in the cache.
    """

    def __init__(self, call: RunningCall) -> None:
        self._num_choices = call.num_choices
        self._num_prompt_tokens = sum([request.num_prompt_tokens for request in call.requests[:: call.num_choices]])
        self._num_generated = [0] * len(call.requests)
        self._num_cached = [0] * len(call.requests)

    def add(self, index: int, chunk: OutputChunk) -> None:
        self._num_generated[index] = chunk.num_generated_tokens
        self._num_cached[index] = chunk.num_cached_tokens

    def counts(self) -> tuple[int, int]:
        """Tokens of all prompts, and of all answers so far."""
        return self._num_prompt_tokens, sum(self._num_generated)

    @property
    def num_cached(self) -> int:
        """Tokens of all prompts that were found in the cache."""
        return sum(self._num_cached[:: self._num_choices])

    def body(self) -> dict[str, Any]:
        num_generated = sum(self._num_generated)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self._num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


class ChoiceRecord:
    """All that one choice has said, of an answer that is not streamed."""

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
    """The shape of one answer in some API: all of it (`whole`), or its stream.

    A stream is `open`, a `keepalive` now and then, `begin` and `write` with the first chunk, `write` with each other, and `end`
    or `fail`. All of these return bytes of its body.
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    """The type of a stream."""

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._options = call.answer
        self.usage = Usage(call)

    def open(self) -> bytes:
        """Return the first bytes of a stream, sent when the call was admitted and before anything of it was computed."""
        return self.keepalive()

    def keepalive(self) -> bytes:
        """Return bytes without meaning for the client, which show that the server is at work."""
        return _comment("keepalive")

    def begin(self, timing: str) -> bytes:
        """Return what comes before the first chunk, when an adapter is loaded; may be empty. `timing`: as `Server-Timing`."""
        del timing
        return b""

    @abstractmethod
    def write(self, index: int, chunk: OutputChunk) -> bytes:
        """Events of one chunk of choice `index`; may be empty."""

    @abstractmethod
    def end(self) -> bytes:
        """The end of a complete stream, after the last chunk; may be empty."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that fails after it began."""

    @abstractmethod
    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any] | list[Any]:
        """The answer that is not streamed."""


NewWriter = Callable[[RunningCall, Tokenizer], Writer]


class AnswerWriter(Writer):
    """OpenAI's shapes: here is what chats and completions have alike."""

    kind: ClassVar[str]
    event_kind: ClassVar[str]
    text_key: ClassVar[bytes]
    """Stands between a choice's index and its text."""

    def __init__(self, call: RunningCall, tokenizer: Tokenizer) -> None:
        super().__init__(call)
        self._tokenizer = tokenizer
        options = call.answer
        self._timings = Timings(call) if options.has_timings or options.has_progress else None
        self._has_progress = [False] * len(call.requests)
        self._timed = b""
        """The fields of `timings.Timings` in the events of a chunk."""
        self._is_plain = not (
            options.has_logprobs or options.has_token_ids or options.has_continuous_usage or self._timings is not None
        )
        self._head = b""
        self._prefixes: list[bytes] = []
        self._suffix = b"}]" + (b',"usage":null' if call.answer.includes_usage else b"") + b"}\n\n"

    def begin(self, timing: str) -> bytes:
        """Make the parts of the events, as an adapter's fingerprint is known now, and tell the times that no header could."""
        self._head = b"data: " + orjson.dumps(self._answer_head(self.event_kind))[:-1]
        begin = self._head + b',"choices":[{"index":'
        self._prefixes = [begin + b"%d," % index + self.text_key for index in range(len(self._call.requests))]
        return _comment(f"server-timing {timing}")

    def end(self) -> bytes:
        if not self._options.includes_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + orjson.dumps(self._usage()) + b"}\n\n" + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._choice(index, record) for index, record in enumerate(records)]
        answer = {**self._answer_head(self.kind), "choices": choices, "usage": self._usage()}
        if self._timings is not None and self._options.has_timings:
            answer["timings"] = self._timings.of(0, records[0].last)
        return answer

    @abstractmethod
    def _choice(self, index: int, record: ChoiceRecord) -> dict[str, Any]:
        """One choice of the answer that is not streamed."""

    def _answer_head(self, kind: str) -> dict[str, object]:
        """The fields that every answer and every event of a stream begins with."""
        options = self._options
        return {
            "id": options.answer_id,
            "object": kind,
            "created": options.created_unix_s,
            "model": options.model_name,
            "system_fingerprint": fingerprint(options),
        }

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """The field that tells of a choice's prompt; none if nobody asked for it."""
        num_top = self._options.num_prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, self._call.scores_of(index).prompt_logprobs, num_top)}

    def _usage_suffix(self) -> bytes:
        suffix = self._suffix
        if self._options.has_continuous_usage:
            suffix = b'}],"usage":' + orjson.dumps(self._usage()) + b"}\n\n"
        return b"}]" + self._timed + suffix.removeprefix(b"}]") if self._timed else suffix

    def _count(self, index: int, chunk: OutputChunk) -> None:
        """Take note of a chunk before its events are written."""
        self.usage.add(index, chunk)
        if self._timings is None:
            return
        fields = {"timings": self._timings.of(index, chunk)} if self._options.has_timings else {}
        if self._options.has_progress and not self._has_progress[index]:
            self._has_progress[index] = True
            fields["prompt_progress"] = self._timings.progress(index, chunk)
        self._timed = b"," + orjson.dumps(fields)[1:-1] if fields else b""

    def _usage(self) -> dict[str, Any]:
        return self.usage.body()

    def _stop_reason(self, chunk: OutputChunk) -> int | str | None:
        """The client's stop string or stop token that ended the choice; None for any other end."""
        return None if chunk.stop_reason in self._options.end_token_ids else chunk.stop_reason


class ChatWriter(AnswerWriter):
    """The events of a streamed message are its role, pieces of reasoning, content and calls, and the finish reason."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    text_key = b'"delta":{'

    def __init__(self, call: RunningCall, tokenizer: Tokenizer) -> None:
        super().__init__(call, tokenizer)
        self._plain_suffix = b'},"logprobs":null,"finish_reason":null' + self._suffix
        self._logprobs = [self._logprob_writer() for _ in call.requests] if self._options.has_logprobs else []
        self._choices: list[ReadChoice] | None = None
        """None: answers are nothing but content."""
        if not call.is_plain:
            self._choices = [ReadChoice(call, index, tokenizer) for index in range(len(call.requests))]

    def begin(self, timing: str) -> bytes:
        times = super().begin(timing)
        content = b'""' if self._call.form is None or self._call.form.tools is None else b"null"
        role = b'"role":"assistant","content":' + content + b'},"logprobs":null,"finish_reason":null' + self._usage_suffix()
        events = b"".join([prefix + role for prefix in self._prefixes])
        if not self._options.has_token_ids:
            return times + events
        prompt = b',"prompt_token_ids":' + orjson.dumps(self._call.requests[0].prompt_token_ids)
        return times + self._head + prompt + events.removeprefix(self._head)

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._count(index, chunk)
        data = self._content(index, chunk) if self._choices is None else self._parts(index, chunk, self._choices[index])
        if chunk.finish_reason is None:
            return data
        word = FINISH_WORDS[chunk.finish_reason] if self._choices is None else self._choices[index].finish_word(chunk)
        fields = {"finish_reason": word, "stop_reason": self._stop_reason(chunk)}
        return data + self._prefixes[index] + b'},"logprobs":null,' + orjson.dumps(fields)[1:-1] + self._usage_suffix()

    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any]:
        answer = super().whole(records)
        if self._options.has_token_ids:
            answer["prompt_token_ids"] = self._call.requests[0].prompt_token_ids
        return answer | self._prompt_logprobs(0)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._choices is not None:
            num_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def _parts(self, index: int, chunk: OutputChunk, choice: ReadChoice) -> bytes:
        """Events of what a chunk says, taken apart; log-probabilities and tokens, which are of the text as it was sampled, have
        one of their own."""
        parts = choice.read(chunk)
        end = b',"logprobs":null,"finish_reason":null' + self._usage_suffix()
        deltas = [delta for part in parts if (delta := _delta(part)) is not None]
        events = [self._prefixes[index] + orjson.dumps(delta)[1:] + end for delta in deltas]
        if not self._is_plain and (said := self._content(index, chunk, shows_text=False)):
            events.append(said)
        return b"".join(events)

    def _content(self, index: int, chunk: OutputChunk, *, shows_text: bool = True) -> bytes:
        if self._is_plain:
            if not chunk.text:
                return b""
            return self._prefixes[index] + b'"content":' + orjson.dumps(chunk.text) + self._plain_suffix
        logprobs = None
        if self._logprobs:
            entries, is_last = shown_logprobs(self._options, chunk), chunk.finish_reason is not None
            logprobs = self._logprobs[index].write(entries, chunk.text, is_last=is_last)
        if not chunk.text and not chunk.token_ids and not (logprobs and logprobs["content"]):
            return b""
        fields: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if self._options.has_token_ids:
            fields["token_ids"] = chunk.token_ids
        content = b'"content":' + orjson.dumps(chunk.text) if shows_text else b""
        return self._prefixes[index] + content + b"}," + orjson.dumps(fields)[1:-1] + self._usage_suffix()

    def _choice(self, index: int, record: ChoiceRecord) -> dict[str, Any]:
        text, logprobs = record.text, None
        if self._options.has_logprobs:
            entries = [entry for chunk in record.chunks for entry in shown_logprobs(self._options, chunk)]
            logprobs = self._logprob_writer().write(entries, text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        finish_word = _finish_word(record.last)
        if self._choices is not None:
            read = self._choices[index]
            message |= _message(gather([part for chunk in record.chunks for part in read.read(chunk)]))
            finish_word = read.finish_word(record.last)
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_word,
            "stop_reason": self._stop_reason(record.last),
        }
        if self._options.has_token_ids:
            choice["token_ids"] = record.token_ids
        return choice

    def _logprob_writer(self) -> ChatLogprobs:
        return ChatLogprobs(self._tokenizer, skips_special_tokens=self._options.skips_special_tokens)


class ReadChoice:
    """One choice whose text is taken apart. A face with other events makes them of the same parts."""

    def __init__(self, call: RunningCall, index: int, tokenizer: Tokenizer, *, id_prefix: str = "call_") -> None:
        """`id_prefix`: of the ids of calls, where the model's template wants none of its own form."""
        form = call.form or AnswerForm()
        self._has_reasoning = call.has_reasoning
        self._reader = form.reader(partial(_call_id, call.engine_ids[index], call.running.dialect.tools.id_chars, id_prefix))
        skips = call.answer.skips_special_tokens and not call.requests[index].sampling.skip_special_tokens
        self._hidden = HiddenTokens(tokenizer, form.marks) if skips else None
        self._reasoning = None if form.reasoning is None else _ReasoningTokens(form, tokenizer)
        self.num_calls = 0
        self.is_cut = False
        """A call was cut: by the limit of tokens, or a stop string."""

    def read(self, chunk: OutputChunk) -> list[Part]:
        """The parts that became certain with a chunk; all that is left, if it is the last."""
        text = chunk.text if self._hidden is None else self._hidden.show(chunk.text, chunk.token_ids)
        parts = self._reader.push(text)
        if chunk.finish_reason is not None:
            parts += self._reader.finish()
        if self._reasoning is not None:
            self._reasoning.add(chunk.token_ids, parts)
        for part in parts:
            if isinstance(part, CallEnd):
                self.num_calls += part.is_whole
                self.is_cut |= not part.is_whole
        return parts if self._has_reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, marks included, whether or not it is shown."""
        return 0 if self._reasoning is None else self._reasoning.count

    @property
    def has_calls(self) -> bool:
        """The choice ended with calls, all of them whole."""
        return self.num_calls > 0 and not self.is_cut

    def finish_word(self, chunk: OutputChunk) -> str | None:
        """OpenAI's word for the end of a choice whose last chunk this is."""
        if chunk.finish_reason is FinishReason.STOP and self.has_calls:
            return "tool_calls"
        return _finish_word(chunk)


class _ReasoningTokens:
    """Counts the tokens with which an answer begins, up to the one that ends its reasoning; 0 if it does not reason."""

    def __init__(self, form: AnswerForm, tokenizer: Tokenizer) -> None:
        assert form.reasoning is not None
        self.count = 0
        self._close = form.reasoning.close.encode()
        self._token_bytes = tokenizer.token_bytes
        self._num_tokens = 0
        self._tail = b""
        """The last bytes, fewer than the mark has that ends the reasoning."""
        self._has_reasoned = form.is_reasoning
        self._has_ended = False

    def add(self, token_ids: Sequence[int], parts: Sequence[Part]) -> None:
        """The next tokens, and what the answer was found to say with them."""
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


def shown_logprobs(options: AnswerOptions, chunk: OutputChunk) -> Sequence[TokenLogprobs]:
    """Without those of a stop token that is not shown: its bytes might complete a character that the text leaves incomplete."""
    ends_with_stop_token = chunk.finish_reason is FinishReason.STOP and isinstance(chunk.stop_reason, int)
    return chunk.logprobs[:-1] if ends_with_stop_token and not options.shows_stop else chunk.logprobs


def _call_id(engine_id: str, id_chars: int, prefix: str, index: int) -> str:
    """The id of a call: another one for each that this process has told of."""
    name = short_id(f"{engine_id}.{index}", id_chars or 24)
    return name if id_chars else prefix + name


def _delta(part: Part) -> dict[str, Any] | None:
    """The content of an event about a part; None: there is none."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


def _message(answer: Answer) -> dict[str, Any]:
    """The fields of a message that is not streamed which depend on what the answer says."""
    fields: dict[str, Any] = {"content": answer.content or (None if answer.calls else "")}
    if answer.reasoning:
        fields["reasoning_content"] = answer.reasoning
    if answer.calls:
        fields["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return fields


class CompletionWriter(AnswerWriter):
    """The events of a streamed completion are its echo and pieces of text, the last with the finish reason."""

    kind = event_kind = "text_completion"
    text_key = b'"text":'

    def __init__(self, call: RunningCall, tokenizer: Tokenizer) -> None:
        super().__init__(call, tokenizer)
        self._plain_suffix = b',"logprobs":null,"finish_reason":null' + self._suffix
        self._has_begun = [False] * len(call.requests)
        self._logprobs = [self._logprob_writer() for _ in call.requests] if self._options.has_logprobs else []

    def begin(self, timing: str) -> bytes:
        times = super().begin(timing)
        if not self._options.has_prompt or self._options.num_echo_logprobs is not None:
            return times
        end = b',"logprobs":null,"finish_reason":null' + self._usage_suffix()
        echoes = [self._echo(index) for index in range(len(self._prefixes))]
        pairs = zip(self._prefixes, echoes, strict=True)
        return times + b"".join([prefix + orjson.dumps(echo) + end for prefix, echo in pairs if echo])

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._count(index, chunk)
        if chunk.finish_reason is None and self._is_plain:
            return self._prefixes[index] + orjson.dumps(chunk.text) + self._plain_suffix if chunk.text else b""
        echo = b"" if self._options.num_echo_logprobs is None or self._has_begun[index] else self._scored_echo(index)
        fields = self._fields(index, chunk)
        return (
            echo + self._prefixes[index] + orjson.dumps(chunk.text) + b"," + orjson.dumps(fields)[1:-1] + self._usage_suffix()
        )

    def _scored_echo(self, index: int) -> bytes:
        """The event of a prompt with its log-probabilities, which are there with the first token; none if it failed before."""
        if not self._call.scores_of(index).is_scored:
            return b""
        fields = {"logprobs": self._echo_logprobs(index, self._logprobs[index]), "finish_reason": None}
        text = orjson.dumps(self._echo(index))
        return self._prefixes[index] + text + b"," + orjson.dumps(fields)[1:-1] + self._usage_suffix()

    def _echo_logprobs(self, index: int, writer: CompletionLogprobs) -> dict[str, Any]:
        request, num_top = self._call.scores_of(index), self._options.num_echo_logprobs or 0
        return writer.write_prompt(request.prompt_token_ids, request.prompt_logprobs, num_top, self._echo(index))

    def _fields(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "logprobs": self._logprobs[index].write(chunk.logprobs) if self._logprobs else None,
            "finish_reason": _finish_word(chunk),
        }
        if chunk.finish_reason is not None:
            fields["stop_reason"] = self._stop_reason(chunk)
        if self._options.has_token_ids:
            fields["token_ids"] = chunk.token_ids
            if not self._has_begun[index]:
                fields["prompt_token_ids"] = self._call.requests[index].prompt_token_ids
        self._has_begun[index] = True
        return fields

    def _choice(self, index: int, record: ChoiceRecord) -> dict[str, Any]:
        logprobs = None
        if self._options.has_logprobs:
            writer = self._logprob_writer()
            echoed = {} if self._options.num_echo_logprobs is None else self._echo_logprobs(index, writer)
            logprobs = writer.write([entry for chunk in record.chunks for entry in chunk.logprobs])
            logprobs = {name: echoed.get(name, []) + values for name, values in logprobs.items()}
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(index) + record.text,
            "logprobs": logprobs,
            "finish_reason": _finish_word(record.last),
            "stop_reason": self._stop_reason(record.last),
        }
        if self._options.has_token_ids:
            choice["token_ids"] = record.token_ids
            choice["prompt_token_ids"] = self._call.requests[index].prompt_token_ids
        return choice | self._prompt_logprobs(index)

    def _echo(self, index: int) -> str:
        return self._call.echoes[index // self._call.num_choices]

    def _logprob_writer(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._tokenizer, skips_special_tokens=self._options.skips_special_tokens, text_offset=0)


# Answers that come whole


async def _collect(http: HttpRequest, call: RunningCall, writer: Writer) -> list[ChoiceRecord]:
    """All that the choices say, once they have said it."""
    records = [ChoiceRecord() for _ in call.requests]
    with ClientWatch(http, partial(call.stream.cancel, CLIENT_LEFT)):
        while chunks := await call.next_chunks():
            _raise_if_over(call, chunks)
            for chunk in chunks:
                index = call.index_of[chunk.request_id]
                writer.usage.add(index, chunk)
                records[index].chunks.append(chunk)
    _raise_if_over(call, [])
    call.close()
    return records


async def _json(records: Sequence[ChoiceRecord], call: RunningCall, writer: Writer, off_loop: OffLoop) -> Response:
    """The whole answer, with `Server-Timing` of its first choice."""
    num_tokens = sum([record.last.num_generated_tokens for record in records])
    size = num_tokens * (1 + MAX_LOGPROBS if call.answer.has_logprobs else 1)
    size += sum([len(request.prompt_logprobs) for request in call.requests]) * (1 + MAX_LOGPROBS)
    data = await off_loop.finish(size, lambda: orjson.dumps(writer.whole(records)))
    headers = {"Server-Timing": server_timing(times_ms(call.terms.arrival_ns, records[0].last), call.terms.model_wait_ns)}
    return Response(data, media_type="application/json", headers=headers)


# Streams


class EventStream(Response):
    """Streams one call. Owns the call, and closes it."""

    keepalive_s: ClassVar[float] = 10.0
    """A silent stream sends a keepalive after this time at the earliest and twice this time at the latest.

    Impatient clients give up after 30 s.
    """

    def __init__(self, http: HttpRequest, call: RunningCall, writer: Writer) -> None:
        super().__init__()
        self._http = http
        self._call = call
        self._writer = writer
        self._is_silent = False
        """No event was sent since the last look."""
        self._timer: asyncio.TimerHandle | None = None
        """The next look."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive  # The watch has the latter.
        with ClientWatch(self._http, partial(self._call.stream.cancel, CLIENT_LEFT)):
            try:
                headers = [(b"content-type", self._writer.media_type), *_HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._look()
                await self._send_events(send)
            except Exception:
                request_id = self._call.terms.request_id
                _log.exception("request %s failed while it was streamed", request_id)
                await send(_piece(self._writer.fail(internal(request_id)), more=False))
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                self._call.close()

    def _look(self) -> None:
        """Have a keepalive sent if the stream was silent since the last look. One that waits for its client gets none."""
        if self._is_silent:
            self._call.stream.flush()
        self._is_silent = True
        self._timer = asyncio.get_running_loop().call_later(self.keepalive_s, self._look)

    async def _send_events(self, send: Send) -> None:
        stream = self._call.stream
        await send(_piece(self._writer.open(), more=True))
        chunks = await self._next_chunks(send)
        data = self._begin(chunks[0]) if chunks else b""
        while chunks:
            events, error = self._write(chunks)
            data += events
            if error is not None:
                await send(_piece(data + self._writer.fail(error), more=False))
                return
            if stream.is_ended:
                await send(_piece(data + self._writer.end(), more=False))
                return
            if data:
                self._is_silent = False
                await send(_piece(data, more=True))
                data = b""
            chunks = await self._next_chunks(send)
        # Only a client that left gets here; the server ignores what is sent to it, but wants to see an end.
        await send(_piece(b"", more=False))

    async def _next_chunks(self, send: Send) -> list[OutputChunk]:
        """Return the next chunks, after as many keepalives as the wait for them needs; empty if the client left."""
        while not (chunks := await self._call.next_chunks()) and not self._call.stream.is_ended:
            await send(_piece(self._writer.keepalive(), more=True))
        return chunks

    def _begin(self, first: OutputChunk) -> bytes:
        terms = self._call.terms
        if (entry := entry_of(self._http.scope)) is not None:
            entry.ttft_s = _ttft_s(terms, first)
        # The times of the choice that spoke first.
        return self._writer.begin(server_timing(times_ms(terms.arrival_ns, first)[:2], terms.model_wait_ns))

    def _write(self, chunks: list[OutputChunk]) -> tuple[bytes, ApiError | None]:
        write, index_of = self._writer.write, self._call.index_of
        if len(chunks) == 1 and chunks[0].finish_reason is None:
            return write(index_of[chunks[0].request_id], chunks[0]), None
        parts: list[bytes] = []
        for chunk in chunks:
            error = error_of(self._call.terms, chunk)
            if error is not None:
                # The chunk may be merged with ones before the failure: what they said is still shown.
                chunk.finish_reason = None
            parts.append(write(index_of[chunk.request_id], chunk))
            if error is not None:
                return b"".join(parts), error
        return b"".join(parts), None


def _comment(text: str) -> bytes:
    """Return an event that clients skip."""
    return b": %s\n\n" % text.encode()


def _piece(events: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": whole_lines(events), "more_body": more}


def whole_lines(events: bytes) -> bytes:
    """The same JSON for clients that divide lines as Unicode does (Python's `str.splitlines`, httpx's `iter_lines`), and not at
    LF and CR alone as server-sent events do: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    if not events.isascii():
        for char, escaped in _LINE_ENDS:
            events = events.replace(char, escaped)
    return events


# How a call ended


def _raise_if_over(call: RunningCall, chunks: Sequence[OutputChunk]) -> None:
    if call.stream.is_cancelled:
        raise cancelled(CLIENT_LEFT)
    for chunk in chunks:
        error = error_of(call.terms, chunk)
        if error is not None:
            raise error


def error_of(terms: Terms, chunk: OutputChunk) -> ApiError | None:
    """The error that a finish chunk of a call tells about; None if the request ended by itself, or has not ended.

    A request that ended with all others (the engine failed, the server stops), or by the client's own grammar, has a
    `reject_reason`.
    """
    if chunk.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return None
    detail = chunk.detail or "the request ended early"
    if not chunk.reject_reason:
        return cancelled(detail) if chunk.finish_reason is FinishReason.ABORT else failed(detail, terms.request_id)
    reason = RejectReason(chunk.reject_reason)
    limit_ns = next((at_ns for at_ns, why in terms.time_limits if why is reason), None)
    if limit_ns is None:
        return from_rejected(Rejected(reason, detail))
    queue_ms, prefill_ms, decode_ms = times_ms(terms.arrival_ns, chunk)
    allowed_ms = (limit_ns - terms.arrival_ns) / 1e6
    return deadline_exceeded(reason, allowed_ms, queue_ms, prefill_ms + decode_ms, chunk.num_generated_tokens)


def times_ms(arrival_ns: int, chunk: OutputChunk) -> tuple[float, float, float]:
    """How long the request of a first or a finish chunk queued, prefilled and decoded until then, without gaps.

    Before its first step all its time was queueing; from then to its first token, prefill.
    """
    scheduled_ns = chunk.at_ns if chunk.first_scheduled_ns is None else chunk.first_scheduled_ns
    decode_ns = chunk.at_ns if chunk.first_token_ns is None else chunk.first_token_ns
    return (scheduled_ns - arrival_ns) / 1e6, (decode_ns - scheduled_ns) / 1e6, (chunk.at_ns - decode_ns) / 1e6


def _ttft_s(terms: Terms, chunk: OutputChunk) -> float | None:
    return None if chunk.first_token_ns is None else (chunk.first_token_ns - terms.arrival_ns) / 1e9


def server_timing(parts_ms: Sequence[float], model_wait_ns: int = 0) -> str:
    """The value of a `Server-Timing` header (https://www.w3.org/TR/server-timing/): the parts whose end is known, and `model`,
    the part of `queue` in which its model was loaded, where it waited for that.
    """
    parts = [f"{name};dur={part_ms:.3f}" for name, part_ms in zip(_PARTS, parts_ms, strict=False)]
    if model_wait_ns:
        parts.append(f"model;dur={model_wait_ns / 1e6:.3f}")
    return ", ".join(parts)


def fingerprint(options: AnswerOptions) -> str:
    """The model's, and of its adapter, which has one when it is there."""
    adapter = options.adapter
    return options.system_fingerprint + (f"_{adapter.fingerprint.hex()[:8]}" if adapter and adapter.fingerprint else "")


def _finish_word(chunk: OutputChunk) -> str | None:
    return None if chunk.finish_reason is None else FINISH_WORDS[chunk.finish_reason]
