"""Writes completions and chats in OpenAI's shapes: one JSON answer, or server-sent events.

An event is bytes, joined once per step from prepared parts. A complete stream ends with `[DONE]`, a failed one with an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired

from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError
from penstock.serve.logprobs import (
    ChatLogprobs,
    ChatTokens,
    CompletionLogprobs,
    CompletionTokens,
    PromptTokens,
    joined,
    prompt_logprobs,
)
from penstock.serve.shapes import ChatFinishWord, Count, FinishWord, ToolCall, Usage, tool_calls_of
from penstock.serve.streams import DONE, FINISH_WORDS, ChoiceReader, ChoiceRecord, Writer, comment, fingerprint, finish_word_of
from penstock.serve.timings import timings
from penstock.text.answers import Answer, CallArguments, CallBegin, CallEnd, Content, Part, Reasoning


class AnswerHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    timings: NotRequired[dict[str, float]]


class CompletionText(TypedDict):
    index: Count
    text: str
    logprobs: CompletionTokens | None
    token_ids: NotRequired[list[Count]]
    prompt_token_ids: NotRequired[list[Count]]


class CompletionChoice(CompletionText):
    finish_reason: FinishWord | None
    stop_reason: str | int | None
    prompt_logprobs: NotRequired[PromptTokens]


class CompletionPiece(CompletionText):
    finish_reason: FinishWord | None
    stop_reason: NotRequired[str | int | None]


class Completion(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionPiece]
    usage: NotRequired[Usage | None]


class ChatAnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: Count
    message: ChatAnswerMessage
    logprobs: ChatTokens | None
    finish_reason: ChatFinishWord | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[Count]]


class ChatCompletion(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[Count]]
    prompt_logprobs: NotRequired[PromptTokens]


FunctionDelta = TypedDict("FunctionDelta", {"name": NotRequired[str], "arguments": str})


class ToolCallDelta(TypedDict):
    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatPiece(TypedDict):
    index: Count
    delta: ChatDelta
    logprobs: ChatTokens | None
    finish_reason: ChatFinishWord | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[Count]]


class ChatChunk(AnswerHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[Count]]


class AnswerWriter(Writer):
    """Base of the writers of chats and completions."""

    kind: ClassVar[str]
    event_kind: ClassVar[str]
    text_key: ClassVar[bytes]
    """The bytes between a choice's index and its text."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__(call)
        options = call.answer
        self._timed = b""
        """The field `timings` of the current chunk's events, as JSON."""
        self._is_plain = not (
            options.has_logprobs or options.has_token_ids or options.has_continuous_usage or options.has_timings
        )
        self._head = b""
        self._prefixes: list[bytes] = []
        self._plain_end = b""
        """The bytes of an event after its text, if it has no further fields."""

    def begin(self, timing: str) -> bytes:
        """Prepare parts of the events and return `Server-Timing` as a comment. An adapter's fingerprint is known only now."""
        self._head = b"data: " + fast_json.dumps(self._answer_head(self.event_kind))[:-1]
        begin = self._head + b',"choices":[{"index":'
        self._prefixes = [begin + b"%d," % index + self.text_key for index in range(len(self._call.requests))]
        return comment(f"server-timing {timing}")

    def end(self) -> bytes:
        if not self._options.includes_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + fast_json.dumps(self._usage()) + b"}\n\n" + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any]:
        answer = {
            **self._answer_head(self.kind),
            # One by one: log-probabilities take many times the memory of their JSON.
            "choices": [fast_json.Raw(fast_json.dumps(self._choice(*one))) for one in enumerate(records)],
            "usage": self._usage(),
        }
        if self._options.has_timings:
            answer["timings"] = timings(self._call, 0, records[0].last)
        return answer

    @abstractmethod
    def _choice(self, index: int, record: ChoiceRecord) -> CompletionChoice | ChatChoice:
        """Return one choice of a whole answer."""

    def _answer_head(self, kind: str) -> dict[str, object]:
        options = self._options
        return {
            "id": options.answer_id,
            "object": kind,
            "created": options.created_unix_s,
            "model": options.model_name,
            "system_fingerprint": fingerprint(options),
        }

    def _prompt_logprobs(self, index: int) -> PromptTokens | None:
        num_top = self._options.prompt_logprobs
        if num_top is None:
            return None
        return prompt_logprobs(self._tokenizer, self._call.scores_of(index).prompt_logprobs, num_top)

    def _event(self, index: int, content: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return an event with a piece of choice `index`, as JSON, and further fields of the choice."""
        return self._prefixes[index] + content + b"," + fast_json.dumps(fields)[1:-1] + self._end_of_event()

    def _end_of_event(self) -> bytes:
        """Return the bytes after a choice's fields."""
        usage = b""
        if self._options.includes_usage:
            usage = b',"usage":' + (fast_json.dumps(self._usage()) if self._options.has_continuous_usage else b"null")
        return b"}]" + self._timed + usage + b"}\n\n"

    def _note_times(self, index: int, chunk: OutputChunk) -> None:
        """Note a chunk's times, before its events are written."""
        if self._options.has_timings:
            self._timed = b',"timings":' + fast_json.dumps(timings(self._call, index, chunk))

    def _usage(self) -> Usage:
        return self.usage.body()

    def _stop_reason(self, chunk: OutputChunk) -> int | str | None:
        return None if chunk.stop_reason in self._options.end_token_ids else chunk.stop_reason


class ChatWriter(AnswerWriter):
    """Writes chats. A stream has the role, pieces of reasoning, content and calls, and the finish reason."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    text_key = b'"delta":{'

    def __init__(self, call: RunningCall) -> None:
        super().__init__(call)
        self._logprobs = [ChatLogprobs.of(call) for _ in call.requests] if self._options.has_logprobs else []
        self._choices: list[ChoiceReader] | None = None
        """None if all text is content."""
        if not call.is_plain:
            self._choices = [ChoiceReader(call, index) for index in range(len(call.requests))]

    def begin(self, timing: str) -> bytes:
        times = super().begin(timing)
        content = b'""' if self._call.form is None or self._call.form.tools is None else b"null"
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._end_of_event()
        role = b'"role":"assistant","content":' + content + self._plain_end
        events = b"".join([prefix + role for prefix in self._prefixes])
        if not self._options.has_token_ids:
            return times + events
        prompt = b',"prompt_token_ids":' + fast_json.dumps(self._call.requests[0].prompt_token_ids)
        return times + self._head + prompt + events.removeprefix(self._head)

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._note_times(index, chunk)
        data = self._content(index, chunk) if self._choices is None else self._parts(index, chunk, self._choices[index])
        if chunk.finish_reason is None:
            return data
        word = FINISH_WORDS[chunk.finish_reason] if self._choices is None else self._choices[index].finish_word(chunk)
        fields = {"logprobs": None, "finish_reason": word, "stop_reason": self._stop_reason(chunk)}
        return data + self._event(index, b"}", fields)

    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any]:
        answer = super().whole(records)
        if self._options.has_token_ids:
            answer["prompt_token_ids"] = self._call.requests[0].prompt_token_ids
        if (scored := self._prompt_logprobs(0)) is not None:
            answer["prompt_logprobs"] = scored
        return answer

    def _usage(self) -> Usage:
        usage = super()._usage()
        if self._choices is not None:
            num_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def _parts(self, index: int, chunk: OutputChunk, choice: ChoiceReader) -> bytes:
        """Return an event for each part of a chunk: reasoning, content, or a piece of a tool call.

        An event without text follows for log-probabilities and token ids, and for usage or timings that no other event has.
        """
        parts = choice.read(chunk)
        end = b',"logprobs":null,"finish_reason":null' + self._end_of_event()
        deltas = [delta for part in parts if (delta := _delta(part)) is not None]
        events = [self._prefixes[index] + fast_json.dumps(delta)[1:] + end for delta in deltas]
        has_tokens = self._options.has_logprobs or self._options.has_token_ids
        is_silent = not events and chunk.finish_reason is None
        if has_tokens or (is_silent and not self._is_plain):
            events.append(self._content(index, chunk, shows_text=False))
        return b"".join(events)

    def _content(self, index: int, chunk: OutputChunk, *, shows_text: bool = True) -> bytes:
        if self._is_plain:
            if not chunk.text:
                return b""
            return self._prefixes[index] + b'"content":' + fast_json.dumps(chunk.text) + self._plain_end
        logprobs = None
        if self._logprobs:
            entries, is_last = self._shown_logprobs(chunk), chunk.finish_reason is not None
            logprobs = self._logprobs[index].write(entries, chunk.text, is_last=is_last)
        if not chunk.text and not chunk.token_ids and not (logprobs and logprobs["content"]):
            return b""
        fields: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if self._options.has_token_ids:
            fields["token_ids"] = chunk.token_ids
        content = b'"content":' + fast_json.dumps(chunk.text) if shows_text else b""
        return self._event(index, content + b"}", fields)

    def _choice(self, index: int, record: ChoiceRecord) -> ChatChoice:
        text, logprobs = record.text, None
        if self._logprobs:
            entries = [entry for chunk in record.chunks for entry in self._shown_logprobs(chunk)]
            logprobs = self._logprobs[index].write(entries, text, is_last=True)
        message: ChatAnswerMessage = {"role": "assistant", "content": text, "refusal": None}
        finish_word: ChatFinishWord | None = finish_word_of(record.last)
        if self._choices is not None:
            read = self._choices[index]
            message = _message(read.whole(record))
            finish_word = read.finish_word(record.last)
        choice: ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_word,
            "stop_reason": self._stop_reason(record.last),
        }
        if self._options.has_token_ids:
            choice["token_ids"] = record.token_ids
        return choice


def _delta(part: Part) -> ChatDelta | None:
    """Return the `delta` of an event for a part, or None if the part needs no event."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            function: FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


def _message(answer: Answer) -> ChatAnswerMessage:
    content = answer.content or (None if answer.calls else "")
    message: ChatAnswerMessage = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = tool_calls_of(answer)
    return message


class CompletionWriter(AnswerWriter):
    """Writes completions. A stream has the echo and pieces of text, the last with the finish reason."""

    kind = event_kind = "text_completion"
    text_key = b'"text":'

    def __init__(self, call: RunningCall) -> None:
        super().__init__(call)
        self._has_begun = [False] * len(call.requests)
        self._logprobs = [self._logprob_writer() for _ in call.requests] if self._options.has_logprobs else []

    def begin(self, timing: str) -> bytes:
        times = super().begin(timing)
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._end_of_event()
        if not self._options.echo or self._options.echo_logprobs is not None:
            return times
        echoes = [self._echo(index) for index in range(len(self._prefixes))]
        pairs = zip(self._prefixes, echoes, strict=True)
        return times + b"".join([prefix + fast_json.dumps(echo) + self._plain_end for prefix, echo in pairs if echo])

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._note_times(index, chunk)
        if chunk.finish_reason is None and self._is_plain:
            return self._prefixes[index] + fast_json.dumps(chunk.text) + self._plain_end if chunk.text else b""
        echo = b"" if self._options.echo_logprobs is None or self._has_begun[index] else self._scored_echo(index)
        return echo + self._event(index, fast_json.dumps(chunk.text), self._fields(index, chunk))

    def _scored_echo(self, index: int) -> bytes:
        """Return the event with a prompt and its log-probabilities. Empty if the request failed before they were computed."""
        if self._call.scores_of(index).lacks_prompt_logprobs:
            return b""
        fields = {"logprobs": self._echo_logprobs(index, self._logprobs[index]), "finish_reason": None}
        return self._event(index, fast_json.dumps(self._echo(index)), fields)

    def _echo_logprobs(self, index: int, writer: CompletionLogprobs) -> CompletionTokens:
        request, num_top = self._call.scores_of(index), self._options.echo_logprobs or 0
        return writer.write_prompt(request.prompt_token_ids, request.prompt_logprobs, num_top, self._echo(index))

    def _fields(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "logprobs": self._logprobs[index].write(chunk.logprobs) if self._logprobs else None,
            "finish_reason": finish_word_of(chunk),
        }
        if chunk.finish_reason is not None:
            fields["stop_reason"] = self._stop_reason(chunk)
        if self._options.has_token_ids:
            fields["token_ids"] = chunk.token_ids
            if not self._has_begun[index]:
                fields["prompt_token_ids"] = self._call.requests[index].prompt_token_ids
        self._has_begun[index] = True
        return fields

    def _choice(self, index: int, record: ChoiceRecord) -> CompletionChoice:
        logprobs = None
        if self._options.has_logprobs:
            writer = self._logprob_writer()
            echoed = None if self._options.echo_logprobs is None else self._echo_logprobs(index, writer)
            logprobs = writer.write([entry for chunk in record.chunks for entry in chunk.logprobs])
            if echoed is not None:
                logprobs = joined(echoed, logprobs)
        choice: CompletionChoice = {
            "index": index,
            "text": self._echo(index) + record.text,
            "logprobs": logprobs,
            "finish_reason": finish_word_of(record.last),
            "stop_reason": self._stop_reason(record.last),
        }
        if self._options.has_token_ids:
            choice["token_ids"] = record.token_ids
            choice["prompt_token_ids"] = list(self._call.requests[index].prompt_token_ids)
        if (scored := self._prompt_logprobs(index)) is not None:
            choice["prompt_logprobs"] = scored
        return choice

    def _echo(self, index: int) -> str:
        return self._call.echoes[index // self._call.num_choices]

    def _logprob_writer(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._tokenizer, self._tokenizer.bytes_showing(self._options.shown_special_ids))
