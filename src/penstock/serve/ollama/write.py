"""Writes answers of Ollama's API: lines of JSON, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NotRequired

from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError
from penstock.serve.logprobs import ChatLogprobs, ChatToken
from penstock.serve.shapes import Count, Object, arguments_object, utc
from penstock.serve.streams import FINISH_WORDS, ChoiceReader, ChoiceRecord, Writer, times_ms
from penstock.text.answers import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning

FOREVER = "2300-01-01T00:00:00Z"
"""`expires_at` of a model that stays loaded. Ollama's clients take an empty time as past."""


OllamaCalledFunction = TypedDict("OllamaCalledFunction", {"index": Count, "name": str, "arguments": Object})
OllamaToolCall = TypedDict("OllamaToolCall", {"id": str, "function": OllamaCalledFunction})


class OllamaAnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaLine(TypedDict):
    """A line of an answer. Optional fields are in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[Count]
    load_duration: NotRequired[Count]
    prompt_eval_count: NotRequired[Count]
    prompt_eval_duration: NotRequired[Count]
    eval_count: NotRequired[Count]
    eval_duration: NotRequired[Count]
    logprobs: NotRequired[list[ChatToken]]


class OllamaChat(OllamaLine):
    message: OllamaAnswerMessage


class OllamaGenerate(OllamaLine):
    response: str
    thinking: NotRequired[str]


OllamaError = TypedDict("OllamaError", {"error": str})


def error_words(error: ApiError) -> OllamaError:
    return {"error": error.message}


class OllamaWriter(Writer):
    """Writes chats and completions. Lines of a stream are pieces of text or reasoning, and whole calls."""

    media_type: ClassVar[bytes] = b"application/x-ndjson"

    def __init__(self, call: RunningCall, *, model_name: str, is_chat: bool) -> None:
        """`model_name` is the client's name of the model. `is_chat`: the answer is a message, for `/api/chat`."""
        super().__init__(call)
        self._is_chat = is_chat
        self._head = {"model": model_name, "created_at": utc(call.answer.created_unix_s)}
        self._choice = ChoiceReader(call, 0)
        self._begun: dict[int, CallBegin] = {}
        self._arguments: dict[int, list[str]] = {}
        self._logprobs = ChatLogprobs.of(call) if call.answer.has_logprobs else None

    def keepalive(self) -> bytes:
        """Return an empty message, since every line must be JSON."""
        return fast_json.dumps(self._line({"content": ""})) + b"\n"

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        del index  # there is one choice
        lines = [self._line(said) for part in self._choice.read(chunk) if (said := self._said(part)) is not None]
        if self._logprobs is not None:
            is_last = chunk.finish_reason is not None
            entries = self._logprobs.write(self._shown_logprobs(chunk), chunk.text, is_last=is_last)
            if entries["content"]:
                if not lines:
                    lines.append(self._line({"content": ""}))
                lines[-1]["logprobs"] = entries["content"]
        if chunk.finish_reason is not None:
            lines.append(self._line({"content": ""}) | self._end(chunk))
        return b"".join([fast_json.dumps(line) + b"\n" for line in lines])

    def fail(self, error: ApiError) -> bytes:
        return fast_json.dumps(error_words(error)) + b"\n"

    def whole(self, records: Sequence[ChoiceRecord]) -> dict[str, Any]:
        [record] = records
        pieces = [piece for part in self._choice.parts(record) if (piece := self._said(part)) is not None]
        said: dict[str, Any] = {"content": "".join([piece["content"] for piece in pieces])}
        if thinking := "".join([piece.get("thinking", "") for piece in pieces]):
            said["thinking"] = thinking
        if calls := [call for piece in pieces for call in piece.get("tool_calls", ())]:
            said["tool_calls"] = calls
        told = self._line(said) | self._end(record.last)
        if self._logprobs is not None:
            entries = [entry for chunk in record.chunks for entry in self._shown_logprobs(chunk)]
            told["logprobs"] = self._logprobs.write(entries, record.text, is_last=True)["content"]
        return told

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {**self._head, "message": {"role": "assistant", **said}, "done": False}
        thinking = {"thinking": said["thinking"]} if "thinking" in said else {}
        return {**self._head, "response": said["content"], **thinking, "done": False}

    def _said(self, part: Part) -> dict[str, Any] | None:
        """Return a part of the answer as fields of a message, or None within a tool call."""
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"content": "", "thinking": text}
            case CallBegin(index):
                self._begun[index], self._arguments[index] = part, []
            case CallArguments(index, text):
                self._arguments[index].append(text)
            case CallEnd(index, is_whole, text):
                if is_whole and (arguments := arguments_object("".join(self._arguments[index]))) is not None:
                    function = {"index": index, "name": self._begun[index].name, "arguments": arguments}
                    return {"content": "", "tool_calls": [{"id": self._begun[index].call_id, "function": function}]}
                return {"content": text} if text else None
        return None

    def _end(self, chunk: OutputChunk) -> dict[str, Any]:
        """Return the further fields of the last line. `total_duration` includes the time to load the model."""
        assert chunk.finish_reason is not None
        terms = self._call.terms
        num_prompt_tokens, _, num_generated = self.usage.counts()
        _, prefill_ms, decode_ms = times_ms(terms.arrival_ns, chunk)
        return {
            "done": True,
            "done_reason": FINISH_WORDS[chunk.finish_reason],
            "total_duration": chunk.at_ns - terms.arrival_ns,
            "load_duration": terms.waits.model,
            "prompt_eval_count": num_prompt_tokens,
            "prompt_eval_duration": int(prefill_ms * 1e6),
            "eval_count": num_generated,
            "eval_duration": int(decode_ms * 1e6),
        }
