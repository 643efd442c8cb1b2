"""Writes answers and errors of Cohere's chat. Events: https://docs.cohere.com/v2/docs/streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError
from penstock.serve.shapes import Count, ToolCall, tool_calls_of
from penstock.serve.streams import ChoiceReader, ChoiceRecord, Writer
from penstock.text.answers import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from penstock.types.request import FinishReason

TextContent = TypedDict("TextContent", {"type": Literal["text"], "text": str})
ThinkingContent = TypedDict("ThinkingContent", {"type": Literal["thinking"], "thinking": str})


class CohereAnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: list[TextContent | ThinkingContent]
    tool_calls: NotRequired[list[ToolCall]]
    tool_plan: NotRequired[str]


class CohereUsage(TypedDict):
    billed_units: dict[str, Count]
    tokens: dict[str, Count]
    cached_tokens: Count


FinishWord = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"]


class CohereAnswer(TypedDict):
    id: str
    finish_reason: FinishWord
    message: CohereAnswerMessage
    usage: CohereUsage


class CohereEvent(TypedDict):
    """An event of a stream. Further fields depend on `type`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str


CohereError = TypedDict("CohereError", {"message": str})


def cohere_words(error: ApiError) -> CohereError:
    """Return an error in the shape of Cohere's API."""
    return {"message": error.message}


class CohereWriter(Writer):
    """Writes answers of Cohere's chat. A stream has a start, blocks of content and tool calls, one by one, and an end."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__(call)
        self._choice = ChoiceReader(call, 0)
        self._kind = ""
        """Type of the open block of content, or empty."""
        self._index = 0
        """Index of the open block of content, or of the next block."""

    def open(self) -> bytes:
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return _event("message-start", id=self._options.answer_id, delta={"message": message})

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        del index  # there is one choice
        events = b"".join([self._part(part) for part in self._choice.read(chunk)])
        if chunk.finish_reason is None:
            return events
        delta = {"finish_reason": self._finish_word(chunk), "usage": self._usage()}
        return events + self._close() + _event("message-end", id=self._options.answer_id, delta=delta)

    def fail(self, error: ApiError) -> bytes:
        delta = {"finish_reason": "ERROR", "error": error.message, "usage": self._usage()}
        return self._close() + _event("message-end", id=self._options.answer_id, delta=delta)

    def whole(self, records: Sequence[ChoiceRecord]) -> CohereAnswer:
        [record] = records
        answer = self._choice.whole(record)
        content: list[TextContent | ThinkingContent] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning})
        message: CohereAnswerMessage = {"role": "assistant", "content": content}
        if answer.calls:
            message["tool_calls"] = tool_calls_of(answer)
        if answer.content and self._choice.has_calls:
            message["tool_plan"] = answer.content
        elif answer.content:
            content.append({"type": "text", "text": answer.content})
        return {
            "id": self._options.answer_id,
            "finish_reason": self._finish_word(record.last),
            "message": message,
            "usage": self._usage(),
        }

    def _usage(self) -> CohereUsage:
        num_prompt, num_cached, num_generated = self.usage.counts()
        counts = {"input_tokens": num_prompt, "output_tokens": num_generated}
        return {"billed_units": counts, "tokens": counts, "cached_tokens": num_cached}

    def _finish_word(self, chunk: OutputChunk) -> FinishWord:
        if chunk.finish_reason is FinishReason.LENGTH:
            return "MAX_TOKENS"
        if isinstance(chunk.stop_reason, str):
            return "STOP_SEQUENCE"
        return "TOOL_CALL" if self._choice.has_calls else "COMPLETE"

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._say("text", text)
            case Reasoning(text):
                return self._say("thinking", text)
            case CallBegin(index, call_id, name):
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                return self._close() + _event("tool-call-start", index=index, delta={"message": {"tool_calls": call}})
            case CallArguments(index, text):
                call = {"function": {"arguments": text}}
                return _event("tool-call-delta", index=index, delta={"message": {"tool_calls": call}})
            case CallEnd(index):
                # A call that was cut before its arguments is text.
                return b"" if self._kind else _event("tool-call-end", index=index)

    def _say(self, kind: str, text: str) -> bytes:
        """Return the events for a piece of text or reasoning. A change between these begins a new content block."""
        opened = b""
        if self._kind != kind:
            opened = self._close() + self._content_event("content-start", {"type": kind, kind: ""})
            self._kind = kind
        return opened + self._content_event("content-delta", {kind: text})

    def _content_event(self, name: str, content: dict[str, Any]) -> bytes:
        return _event(name, index=self._index, delta={"message": {"content": content}})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        closed = _event("content-end", index=self._index)
        self._kind, self._index = "", self._index + 1
        return closed


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), fast_json.dumps({"type": name, **fields}))
