"""Writes messages and errors of Anthropic's API.

Events: https://platform.claude.com/docs/en/build-with-claude/streaming. Errors:
https://platform.claude.com/docs/en/api/errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError
from penstock.serve.shapes import Count, Object, arguments_object
from penstock.serve.streams import ChoiceReader, ChoiceRecord, Writer
from penstock.text.answers import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from penstock.types.request import FinishReason

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""HTTP status -> type. Other statuses are `invalid_request_error`."""
NO_THREADS = "thread_unsupported_request"
"""Error code on which Anthropic's client sends the whole conversation each time."""
_ID_PREFIX = "toolu_"
_SIGNATURE = "penstock"
"""The signature of each thinking block. Clients require one and send it back."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class AnthropicUsage(TypedDict):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


TextBlock = TypedDict("TextBlock", {"type": Literal["text"], "text": str})
ThinkingBlock = TypedDict("ThinkingBlock", {"type": Literal["thinking"], "thinking": str, "signature": str})
ToolUseBlock = TypedDict("ToolUseBlock", {"type": Literal["tool_use"], "id": str, "name": str, "input": Object})


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageHead(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


MessageEnd = TypedDict("MessageEnd", {"stop_reason": StopReason, "stop_sequence": str | None})


class AnthropicMessage(MessageHead, MessageEnd):
    content: list[Block]
    usage: AnthropicUsage


class AnthropicEvent(TypedDict):
    """An event of a stream. Further fields depend on `type`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str


AnthropicCount = TypedDict("AnthropicCount", {"input_tokens": Count})


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: Count | None
    max_tokens: Count | None


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[Object]


AnthropicError = TypedDict("AnthropicError", {"type": Literal["error"], "error": AnthropicErrorDetail})


def anthropic_words(error: ApiError) -> AnthropicError:
    """Return an error as JSON data in Anthropic's shape, which has no field for the parameter's name."""
    kind = _ERROR_TYPES.get(error.status_code, "invalid_request_error")
    lead = "Prompt is too long: " if error.code == "context_length_exceeded" else ""  # Claude Code looks for these words
    told: AnthropicErrorDetail = {"type": kind, "message": lead + error.message}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": told}


class MessageWriter(Writer):
    """Writes Anthropic's messages. A stream has `message_start`, one content block after the other, and the message's end."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__(call)
        self._choice = ChoiceReader(call, 0, id_prefix=_ID_PREFIX)
        self._kind = ""
        """Type of the open block, or empty."""
        self._index = 0
        """Index of the open block, or of the next block."""
        self._text_head = b""
        """First bytes of an event with text."""

    def open(self) -> bytes:
        """Return `message_start`. Its usage counts the whole prompt; only the last event knows the cached tokens."""
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return _event({"type": "message_start", "message": message}) + _PING

    def keepalive(self) -> bytes:
        return _PING

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        del index  # there is one choice
        events = b"".join([self._part(part) for part in self._choice.read(chunk)])
        if chunk.finish_reason is None:
            return events
        delta = {"type": "message_delta", "delta": self._end_fields(chunk), "usage": self._usage(self.usage.num_cached)}
        return events + self._close() + _event(delta) + _event({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        return _event(anthropic_words(error))

    def whole(self, records: Sequence[ChoiceRecord]) -> AnthropicMessage:
        [record] = records
        parts = self._choice.parts(record)
        ended = self._end_fields(record.last)
        content = _blocks(parts, is_cut=ended["stop_reason"] not in ("end_turn", "tool_use"))
        if ended["stop_reason"] == "tool_use" and all(block["type"] != "tool_use" for block in content):
            ended = {**ended, "stop_reason": "end_turn"}  # the only calls had wrong arguments, and are text
        return {**self._head(), "content": content, **ended, "usage": self._usage(self.usage.num_cached)}

    def _head(self) -> MessageHead:
        return {"id": self._options.answer_id, "type": "message", "role": "assistant", "model": self._options.model_name}

    def _usage(self, num_cached: int) -> AnthropicUsage:
        """Return the usage. Anthropic's `input_tokens` exclude cached tokens."""
        num_prompt, _, num_generated = self.usage.counts()
        return {
            "input_tokens": num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_generated,
        }

    def _end_fields(self, chunk: OutputChunk) -> MessageEnd:
        reason: StopReason = "end_turn"
        sequence = None
        if chunk.finish_reason is FinishReason.LENGTH:
            asked = self._call.max_tokens
            is_cut_short = asked is not None and chunk.num_generated_tokens < asked
            reason = "model_context_window_exceeded" if is_cut_short else "max_tokens"
        elif isinstance(chunk.stop_reason, str):
            reason, sequence = "stop_sequence", chunk.stop_reason
        elif self._choice.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    # Blocks of a stream

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._say(text)
            case Reasoning(text):
                opened = self._open({"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegin(_, call_id, name):
                return self._close() + self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                return self._close() if self._kind == "tool_use" else b""

    def _say(self, text: str) -> bytes:
        opened = b""
        if self._kind != "text":
            opened = self._open({"type": "text", "text": ""})
            head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % self._index
            self._text_head = head + b'"delta":{"type":"text_delta","text":'
        return opened + self._text_head + fast_json.dumps(text) + b"}}\n\n"

    def _open(self, block: dict[str, Any]) -> bytes:
        """Return the events that open a content block and close the previous one. Empty if a block of this type is open."""
        if self._kind == block["type"]:
            return b""
        closed = self._close()
        self._kind = block["type"]
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        closed = signed + _event({"type": "content_block_stop", "index": self._index})
        self._kind, self._index = "", self._index + 1
        return closed


def _event(data: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), fast_json.dumps(data))


def _blocks(parts: Sequence[Part], *, is_cut: bool) -> list[Block]:
    """Return the content blocks of a whole answer, in the order of its stream. The input of a cut call is empty.

    A call whose arguments the model wrote wrongly is text, so that no client makes it without arguments.
    """
    blocks: list[Any] = []
    for kind, run in groupby(parts, type):
        same: list[Any] = [*run]
        if kind is CallBegin:
            blocks.append({"type": "tool_use", "id": same[0].call_id, "name": same[0].name, "input": None})
            continue
        text = "".join([part.text for part in same])
        if kind is Reasoning:
            blocks.append({"type": "thinking", "thinking": text, "signature": _SIGNATURE})
        elif kind is Content:
            blocks.append({"type": "text", "text": text})
        elif kind is CallArguments:
            blocks[-1]["input"] = arguments_object(text)
        elif blocks[-1].get("input", {}) is None:
            is_last = is_cut and same[-1] is parts[-1]
            blocks[-1] = blocks[-1] | {"input": {}} if is_last else {"type": "text", "text": text}
    return blocks
