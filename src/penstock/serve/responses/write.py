"""Writes responses, whole or as typed events.

Events with text, one per step, begin with bytes that are prepared once per item.
https://developers.openai.com/api/reference/resources/responses/streaming-events
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import REQUEST_CANCELLED, ApiError
from penstock.serve.logprobs import ChatLogprobs, ChatToken
from penstock.serve.responses.answers import IncompleteDetails, Response, ResponseError
from penstock.serve.responses.read import Draft, Item
from penstock.serve.shapes import response_usage
from penstock.serve.streams import ChoiceReader, ChoiceRecord, Writer, fingerprint
from penstock.text.answers import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from penstock.types.request import FinishReason


def response_error(error: ApiError) -> ResponseError:
    """Return the error of a failed response, with one of OpenAI's few codes."""
    if error.status_code == 429:
        code = "rate_limit_exceeded"
    elif error.code == "context_length_exceeded":
        code = error.code  # Codex CLI shortens the conversation then
    elif error.status_code == 400:
        code = "invalid_prompt"
    else:
        code = "server_error"
    return {"code": code, "message": error.message}


class ResponsesWriter(Writer):
    def __init__(self, call: RunningCall, *, draft: Draft, on_end: Callable[[Response], None]) -> None:
        """`on_end` gets the whole response at the end of a stream, on the event loop."""
        super().__init__(call)
        self.ended: Response | None = None
        """The whole response after its end, if not streamed."""
        self._draft = draft
        self._on_end = on_end
        self._choice = ChoiceReader(call, 0)
        self._logprobs = ChatLogprobs.of(call) if call.answer.has_logprobs else None
        self._told_logprobs: list[Any] = []
        """Log-probabilities of tokens with text that was not sent yet."""

        self._items: list[Item] = []
        self._pieces: list[str] = []
        """The text of the open item."""
        self._item_logprobs: list[Any] = []
        self._is_open = False
        self._prefix = b""
        """First bytes of the events with text of the open item."""
        self._is_cut = False
        """The token limit has cut the answer and its last item."""

        self._is_streamed = call.answer.is_streamed
        self._events: list[bytes] = []
        self._num_events = 0

    # A stream

    def open(self) -> bytes:
        self._tell("response.created", {"response": self._in_progress()})
        return self.keepalive()

    def keepalive(self) -> bytes:
        """Return a `response.in_progress` before the first item, since Codex CLI expects events and ignores comments.

        Later return a comment: clients would take the event's empty response for the whole output so far.
        """
        if self._items:
            return super().keepalive()
        self._tell("response.in_progress", {"response": self._in_progress()})
        return self._take()

    def _in_progress(self) -> Response:
        return {**self._draft.response, "system_fingerprint": fingerprint(self._options)}

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        del index  # there is one choice
        self._read(chunk)
        return self._take()

    def end(self) -> bytes:
        response = self.response()
        self._tell(f"response.{response['status']}", {"response": response})
        self._on_end(response)
        return self._take()

    def fail(self, error: ApiError) -> bytes:
        response, kind = self.failure(error), "response.failed"
        if response["status"] == "cancelled":
            # OpenAI's streams have no event for it. After `response.failed` Codex CLI would send the request again. Without a
            # reason, Vercel's AI SDK would take the answer as complete.
            response["incomplete_details"], kind = {"reason": "cancelled"}, "response.incomplete"
        self._tell(kind, {"response": response})
        self._on_end(response)
        return self._take()

    # All at once

    def whole(self, records: Sequence[ChoiceRecord]) -> Response:
        for chunk in records[0].chunks:
            self._read(chunk)
        self.ended = self.response()
        return self.ended

    def response(self) -> Response:
        """Return the response at its end, completed or incomplete."""
        told = self._whole()
        if self._is_cut or self._choice.is_cut:
            details: IncompleteDetails | None = {"reason": "max_output_tokens"} if self._is_cut else None
            return {**told, "status": "incomplete", "incomplete_details": details}
        return {**told, "status": "completed", "completed_at": self._call.running.sources.unix_time_s()}

    def failure(self, error: ApiError) -> Response:
        """Return a failed or cancelled response, with its items so far."""
        self._close(is_whole=False)
        if error.code == REQUEST_CANCELLED:
            return {**self._whole(), "status": "cancelled"}
        return {**self._whole(), "status": "failed", "error": response_error(error)}

    def _whole(self) -> Response:
        """Return the response with its items, its usage and the fingerprint of the loaded adapter."""
        num_prompt, num_cached, num_generated = self.usage.counts()
        return {
            **self._draft.response,
            "output": self._items,
            "usage": response_usage(num_prompt, num_cached, num_generated, self._choice.num_reasoning_tokens),
            "system_fingerprint": fingerprint(self._options),
        }

    # Items

    def _read(self, chunk: OutputChunk) -> None:
        """Add a chunk of the answer to the response's items, and make its events."""
        if self._logprobs is not None:
            is_last = chunk.finish_reason is not None
            written = self._logprobs.write(self._shown_logprobs(chunk), chunk.text, is_last=is_last)
            self._told_logprobs += written["content"]
        for part in self._choice.read(chunk):
            self._add(part)
        if chunk.finish_reason is not None:
            self._is_cut = chunk.finish_reason is FinishReason.LENGTH
            if not self._is_cut and all(item["type"] == "reasoning" for item in self._items):
                self._add(Content(""))  # clients look for a message
            self._close(is_whole=not self._is_cut)

    def _add(self, part: Part) -> None:
        match part:
            case Content(text):
                self._open("message")
                self._grow(text)
            case Reasoning(text):
                self._open("reasoning")
                self._take_logprobs(text)
                self._grow(text)
            case CallBegin(_, call_id, name):
                self._close()
                names = self._draft.tools.namespaced.get(name, {"name": name})
                item = {"type": "function_call", "call_id": call_id, **names, "arguments": ""}
                self._begin_item(item, "function_call_arguments")
            case CallArguments(_, text):
                self._grow(text)
            case CallEnd(_, is_whole, text):
                self._take_logprobs(text)
                self._close(is_whole=is_whole)

    def _take_logprobs(self, text: str) -> list[Any]:
        """Take the log-probabilities up to the end of this text, and return those of the text, or all if they lack it."""
        if not text:
            return []
        first, end = find_tokens(text, self._told_logprobs)
        taken = self._told_logprobs[first:end]
        del self._told_logprobs[:end]
        return taken

    def _open(self, kind: str) -> None:
        """Begin an item of this kind with text, unless such an item is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return
        self._close()
        if kind == "message":
            self._begin_item({"type": kind, "role": "assistant", "content": []}, "output_text")
        else:
            self._begin_item({"type": kind, "summary": [], "content": []}, "reasoning_text")
        self._tell("response.content_part.added", self._place(in_content=True) | {"part": _part(kind, "", [])})

    def _begin_item(self, fields: Item, what: str) -> None:
        item_id = self._draft.new_id(fields["type"], len(self._items))
        item = {"id": item_id, **fields, "status": "in_progress"}
        self._items.append(item)
        self._is_open = True
        if self._is_streamed:
            self._tell("response.output_item.added", {"output_index": len(self._items) - 1, "item": item})
            kind = f"response.{what}.delta"
            place = self._place(in_content=fields["type"] != "function_call")
            self._prefix = _begin_event(kind) + fast_json.dumps({"type": kind} | place)[:-1] + b',"delta":'

    def _grow(self, text: str) -> None:
        self._pieces.append(text)
        logprobs: list[Any] = []
        if is_message := self._items[-1]["type"] == "message":
            logprobs = self._take_logprobs(text)
            self._item_logprobs += logprobs
        if self._is_streamed and text:
            rest = b',"sequence_number":%d' % self._num_events
            if is_message:
                rest += b',"logprobs":' + fast_json.dumps(logprobs)
            self._num_events += 1
            self._events.append(self._prefix + fast_json.dumps(text) + rest + b"}\n\n")

    def _close(self, *, is_whole: bool = True) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self._items[-1], "".join(self._pieces)
        self._pieces = []
        logprobs, self._item_logprobs = self._item_logprobs, []
        item["status"] = "completed" if is_whole else "incomplete"
        if item["type"] == "function_call":
            item["arguments"] = text
            told = {"name": item["name"], "arguments": text}
            self._tell("response.function_call_arguments.done", self._place() | told)
        else:
            part, place = _part(item["type"], text, logprobs), self._place(in_content=True)
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._tell(f"response.{part['type']}.done", place | told)
            item["content"] = [part]
            self._tell("response.content_part.done", place | {"part": part})
        self._tell("response.output_item.done", {"output_index": len(self._items) - 1, "item": item})

    def _place(self, *, in_content: bool = False) -> dict[str, Any]:
        """Return the fields by which an event identifies the open item, or its content."""
        place: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if in_content else {})

    # Events

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        if self._is_streamed:
            event = {"type": kind, "sequence_number": self._num_events} | fields
            self._num_events += 1
            self._events.append(_begin_event(kind) + fast_json.dumps(event) + b"\n\n")

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def _part(kind: str, text: str, logprobs: list[Any]) -> Item:
    """Return the content of a message, or of an item of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def find_tokens(text: str, entries: Sequence[ChatToken]) -> tuple[int, int]:
    """Return the first token of a text and the one after its last, or all tokens if they lack the text.

    `text` can also occur inside an earlier mark: `</think>` contains "hi". Prefer an occurrence that starts and ends at token
    boundaries (white space aside), then one that only starts at one.
    """
    pieces, said = [bytes(entry["bytes"]) for entry in entries], text.encode()
    whole, ends = b"".join(pieces), [*accumulate(map(len, pieces))]
    starts = [0, *ends]
    begin, least, place = -1, 3, whole.find(said)
    while place >= 0 and least:
        within = bool(whole[starts[bisect_right(ends, place)] : place].strip())
        wrong = 2 * within + (place + len(said) not in starts)
        if wrong < least:
            begin, least = place, wrong
        place = whole.find(said, place + 1)
    return (0, len(entries)) if begin < 0 else (bisect_right(ends, begin), bisect_left(ends, begin + len(said)) + 1)


def _begin_event(kind: str) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: "
