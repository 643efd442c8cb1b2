"""Turns the core's token events into chunks of text. Called by the engine's thread; never schedules and never does I/O."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from penstock.engine.lines import Lines
from penstock.engine.ports import Detokenizer, DetokenizerFactory, NullObserver, OutputChunk, TokenObserver
from penstock.engine.stop_strings import StopStrings, StopTree
from penstock.types.events import Command, Stop, TokenEvent
from penstock.types.request import FinishReason, Request

_logger = logging.getLogger(__name__)

_End = str | FinishReason | None
"""The stop string that ended a request, or LENGTH for a limit of its lines."""
TEXT_FAILED = "the generated tokens could not be turned into text"


@dataclass(slots=True)
class Output:
    chunks: list[OutputChunk]
    commands: list[Command]


class OutputStage:
    def __init__(self, detokenizer_factory: DetokenizerFactory, *, observer: TokenObserver | None = None) -> None:
        self._make_detokenizer = detokenizer_factory
        self._observer: TokenObserver = observer or NullObserver()
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, _Stream] = {}
        """Request id -> its stream, from its first event on."""
        self._trees: WeakValueDictionary[tuple[str, ...], StopTree] = WeakValueDictionary()
        """Stop strings -> their automaton, shared by the choices of a call."""

    def add(self, request: Request) -> None:
        """Expect events of a request, new or begun by another engine. Raises ValueError if one with its id is in flight."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is already in flight")
        self._requests[request.request_id] = request
        if request.output_token_ids:
            stream = self._streams[request.request_id] = self._open(request)
            stream.before = tuple(request.output_token_ids)

    def push(self, events: Sequence[TokenEvent]) -> Output:
        """Return the chunks of one step's events, and commands for the core.

        A stop string, a line limit or undecodable tokens end a request here. The core then gets a `Stop`.
        """
        output = Output([], [])
        first: list[Request] = []
        gaps_ns: list[int] = []
        streams, add_chunk = self._streams, output.chunks.append
        for event in events:
            stream = streams.get(event.request_id)
            if stream is None:
                request = self._requests.get(event.request_id)
                if request is None:
                    continue
                if event.states:
                    del self._requests[event.request_id]
                    first.append(request)
                    add_chunk(_answer(request, event))
                    continue
                stream = streams[event.request_id] = self._open(request)
            try:
                if stream.is_under_way and event.finish_reason is None:  # nearly all events: few calls on this path
                    add_chunk(stream.go_on(event, gaps_ns if stream.is_timed else []))
                    continue
                if event.token_ids:
                    stream.note_time(event.at_ns, first, gaps_ns if stream.is_timed else [])
                chunk, stream.read = stream.read or stream.push(event), None
            except Exception:
                chunk = stream.fail(event)
            add_chunk(chunk)
            if chunk.finish_reason is not None:
                self._end(stream, event, chunk, output.commands)
        if first or gaps_ns:
            self._observer.on_tokens(first, gaps_ns)
        return output

    def read(self, event: TokenEvent) -> OutputChunk | None:
        """Return the chunk of an event before `push` gets the event, or None if its text can't end the answer."""
        request = self._requests.get(event.request_id)
        if request is None:
            return None
        if event.finish_reason is None and not request.sampling.stop and request.sampling.lines is None:
            return None
        stream = self._streams.get(event.request_id)
        if stream is None:
            stream = self._streams[event.request_id] = self._open(request)
        try:
            stream.read = stream.push(event)
        except Exception:
            stream.read = stream.fail(event)
        return stream.read

    def fail_all(self, detail: str, at_ns: int) -> list[OutputChunk]:
        """End every request in flight with ERROR, when the core has failed."""
        requests, self._requests = self._requests, {}
        streams, self._streams = self._streams, {}
        return [(streams.get(name) or self._open(request)).error(detail, at_ns) for name, request in requests.items()]

    def _open(self, request: Request) -> _Stream:
        slo_itl_ns = None if request.background else request.slo_itl_ns
        return _Stream(request, self._make_detokenizer, self._trees, slo_itl_ns, is_timed=not request.background)

    def _end(self, stream: _Stream, event: TokenEvent, chunk: OutputChunk, commands: list[Command]) -> None:
        del self._requests[event.request_id], self._streams[event.request_id]
        stream.tell_itl(self._observer)
        if event.finish_reason is None:
            reason, stop = chunk.finish_reason, chunk.stop_reason
            assert reason is not None, "it has ended"
            assert not isinstance(stop, int), "the core knows of its stop tokens"
            commands.append(Stop(chunk.request_id, stop, reason))


def _answer(request: Request, event: TokenEvent) -> OutputChunk:
    chunk = OutputChunk(event.request_id, "", (), (), event.at_ns, finish_reason=event.finish_reason, states=event.states)
    chunk.first_scheduled_ns, chunk.first_token_ns = request.first_scheduled_ns, request.first_token_ns
    return chunk


@dataclass(slots=True, eq=False)
class _Stream:
    _request: Request
    _make_detokenizer: DetokenizerFactory
    _trees: MutableMapping[tuple[str, ...], StopTree]
    _slo_itl_ns: int | None
    is_timed: bool
    """False for a background request: nobody waits for its tokens."""
    before: tuple[int, ...] = ()
    """Tokens from another engine. The client has their text already, except an end held back for a possible stop string."""
    is_under_way: bool = False
    """The first tokens have come, and the text is not searched for stop strings or lines."""
    read: OutputChunk | None = None
    """The chunk of an event that was read before its `push`."""
    _detokenizer: Detokenizer | None = None
    _stops: StopStrings | None = None
    _lines: Lines | None = None
    _num_generated: int = 0
    _first_token_ns: int = 0
    _last_token_ns: int | None = None
    _num_gaps: int = 0
    """Gaps between tokens. This and the next are counted only with a target."""
    _num_late: int = 0

    def note_time(self, at_ns: int, first: list[Request], gaps_ns: list[int]) -> None:
        if self._last_token_ns is None:
            first.append(self._request)
        else:
            self._note_gap(at_ns - self._last_token_ns, gaps_ns)
        self._last_token_ns = at_ns

    def _note_gap(self, gap_ns: int, gaps_ns: list[int]) -> None:
        gaps_ns.append(gap_ns)
        if self._slo_itl_ns is not None:
            self._num_gaps += 1
            self._num_late += gap_ns > self._slo_itl_ns

    def tell_itl(self, observer: TokenObserver) -> None:
        if self._num_gaps:
            observer.on_itl(self._num_gaps, self._num_late)

    def go_on(self, event: TokenEvent, gaps_ns: list[int]) -> OutputChunk:
        """Return the chunk of an event that neither begins nor ends an answer (`is_under_way`)."""
        assert self._last_token_ns is not None, "under way"
        assert self._detokenizer is not None, "under way"
        token_ids, at_ns = event.token_ids, event.at_ns
        gap_ns, self._last_token_ns = at_ns - self._last_token_ns, at_ns
        if self._slo_itl_ns is None:
            gaps_ns.append(gap_ns)
        else:
            self._note_gap(gap_ns, gaps_ns)
        text = self._detokenizer.push(token_ids)
        self._num_generated += len(token_ids)
        return OutputChunk(
            event.request_id, text, token_ids, event.logprobs, at_ns, event.num_cached_tokens, self._num_generated
        )

    def push(self, event: TokenEvent) -> OutputChunk:
        """Return the chunk of one event. It has a finish reason if the event or its text ends the request."""
        is_first = self._detokenizer is None
        if is_first:
            self._begin(event.at_ns)
        text, num_shown, end = self._read(event)
        chunk = OutputChunk(
            event.request_id,
            text,
            event.token_ids[:num_shown],
            event.logprobs[:num_shown],
            event.at_ns,
            event.num_cached_tokens,
            self._num_generated,
            event.finish_reason,
            event.stop_reason,
            event.detail,
            event.reject_reason,
        )
        if isinstance(end, str):
            chunk.finish_reason, chunk.stop_reason = FinishReason.STOP, end
        elif end is not None:
            chunk.finish_reason, chunk.stop_reason = end, None
        if is_first or chunk.finish_reason is not None:
            self._add_facts(chunk)
        return chunk

    def fail(self, event: TokenEvent) -> OutputChunk:
        _logger.exception("request %s: %s", event.request_id, TEXT_FAILED)
        return self.error(TEXT_FAILED, event.at_ns)

    def error(self, detail: str, at_ns: int) -> OutputChunk:
        chunk = OutputChunk(self._request.request_id, "", (), (), at_ns, num_generated_tokens=self._num_generated)
        chunk.finish_reason, chunk.detail = FinishReason.ERROR, detail
        self._add_facts(chunk)
        return chunk

    def _begin(self, at_ns: int) -> None:
        # Not in __init__: a failure here must end this request only.
        self._first_token_ns = at_ns
        sampling = self._request.sampling
        self._detokenizer = self._make_detokenizer(sampling.shown_special_ids)
        if sampling.stop:
            tree = self._trees.get(sampling.stop)
            if tree is None:
                tree = self._trees[sampling.stop] = StopTree(sampling.stop)
            self._stops = StopStrings(tree)
        if sampling.lines is not None:
            self._lines = Lines(sampling.lines)
        self.is_under_way = self._stops is None and self._lines is None and self._last_token_ns is not None
        if self.before:
            self._read(TokenEvent(self._request.request_id, self.before, 0))

    def _add_facts(self, chunk: OutputChunk) -> None:
        """Add what only first and last chunks have."""
        request = self._request
        chunk.num_cached_tokens = request.num_cached_tokens
        chunk.first_scheduled_ns, chunk.first_token_ns = request.first_scheduled_ns, request.first_token_ns

    def _read(self, event: TokenEvent) -> tuple[str, int, _End]:
        """Return (new text, number of the event's tokens that count, how the text ended the request)."""
        if self._stops is not None or self._lines is not None:
            return self._read_watched(event)
        assert self._detokenizer is not None
        text = self._detokenizer.push(self._visible(event))
        self._num_generated += len(event.token_ids)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        return text, len(event.token_ids), None

    def _read_watched(self, event: TokenEvent) -> tuple[str, int, _End]:
        """Read token by token, since tokens after a stop string or the last line must not count."""
        assert self._detokenizer is not None
        before = self._num_generated
        text = ""
        for token_id in self._visible(event):
            self._num_generated += 1
            shown, end = self._search(self._detokenizer.push((token_id,)))
            text += shown
            if end is not None:
                return text, self._num_generated - before, end
        self._num_generated = before + len(event.token_ids)
        if event.finish_reason is not None:
            shown, end = self._search(self._detokenizer.flush())
            return text + shown + (self._flush() if end is None else ""), len(event.token_ids), end
        if self._lines is not None and self._lines.is_late(event.at_ns - self._first_token_ns):
            return text + self._flush(), len(event.token_ids), FinishReason.LENGTH
        return text, len(event.token_ids), None

    def _search(self, text: str) -> tuple[str, _End]:
        """Look for a stop string or a last line. Return (text that is safe to show, how the answer ended)."""
        sampling, stop, is_cut = self._request.sampling, None, False
        if self._stops is not None:
            # As in vLLM: a stop string counts if a token after the first `min_tokens` completes it.
            text, stop = self._stops.push(text, is_armed=self._num_generated > sampling.min_tokens)
        if self._lines is not None:
            text, is_cut = self._lines.push(text)
            if stop is not None and not is_cut:
                text += self._lines.flush()
        if is_cut:
            return text, FinishReason.LENGTH
        return text + (stop if stop is not None and sampling.include_stop_str_in_output else ""), stop

    def _flush(self) -> str:
        text = "" if self._stops is None else self._stops.flush()
        if self._lines is None:
            return text
        shown, _ = self._lines.push(text)
        return shown + self._lines.flush()

    def _visible(self, event: TokenEvent) -> tuple[int, ...]:
        """Return the event's tokens without its stop token, unless the user wants to see it."""
        is_stop_token = event.finish_reason is FinishReason.STOP and isinstance(event.stop_reason, int)
        if is_stop_token and not self._request.sampling.include_stop_str_in_output:
            return event.token_ids[:-1]
        return event.token_ids
