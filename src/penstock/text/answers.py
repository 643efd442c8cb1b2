"""Splits the text of an answer into reasoning, content and tool calls, for all APIs.

A reader takes the text in pieces and returns parts as soon as they are certain. It holds back text that may begin a mark such
as `</think>`, so the result does not depend on how the text was cut. A call's arguments are returned as the model wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.text.dialects import NAME_CHARS, ReasoningFormat, ToolFormat, Way, marks_of
from penstock.text.parameters import ParameterReader, Types, held_back, match_literal

MAX_UNMARKED_CHARS = 256
"""A call without a mark such as `<tool_call>` must name its tool within this many characters."""
MAX_BLANK_CHARS = 256
"""Most white space that is left out before a mark. More is content, after which nothing counts that must begin an answer.

Without a limit, reading an answer of white space alone would take quadratic time.
"""
_NAME = re.compile(f"[{NAME_CHARS}]*")


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    """Calls of one answer are numbered from 0."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    is_whole: bool
    """False if the answer was cut within the arguments."""
    text: str
    """The whole call, as the model wrote it."""


Part = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(slots=True)
class Answer:
    """An answer (one choice), divided into content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    """Complete calls. The text of an incomplete call is in `content`."""


def gather(parts: Iterable[Part]) -> Answer:
    answer = Answer()
    content: list[str] = []
    reasoning: list[str] = []
    begun: dict[int, CallBegin] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(index):
                begun[index], arguments[index] = part, []
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index, is_whole, text):
                if is_whole:
                    answer.calls.append(ToolCall(begun[index].call_id, begun[index].name, "".join(arguments[index])))
                else:
                    content.append(text)
    answer.content, answer.reasoning = "".join(content), "".join(reasoning)
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The format of tool calls and reasoning in the answers to one `Call`. Makes their readers."""

    tools: ToolFormat | None = None
    """The format of calls, or None if calls count as text."""
    tool_names: frozenset[str] = frozenset()
    """Tools of the request. A call without a mark, or in Harmony, counts only if it names one."""
    is_free: bool = True
    """Text may precede calls. Otherwise the grammar decides from the first token on, and writes calls in the first way."""
    types: Mapping[str, Types] = field(default_factory=dict)
    """A tool's name -> the types of its parameters, for formats that write these in tags."""
    reasoning: ReasoningFormat | None = None
    is_reasoning: bool = False
    """The prompt ends inside a reasoning block, so the answer begins with reasoning."""
    is_continued: bool = False
    """That block has text, so white space at the beginning of the answer counts."""
    has_exact_start: bool = False
    """A grammar decides about white space after the reasoning, and writes `reasoning.separator` before the content."""

    @property
    def marks(self) -> frozenset[str]:
        return marks_of(self.tools, self.reasoning)

    def reader(self, new_call_id: Callable[[int], str]) -> MarkReader | ChannelReader:
        """Return a reader for one choice. `new_call_id` makes a tool call's id from its index in the answer."""
        if self.reasoning is not None and self.reasoning.lead:
            return ChannelReader(self, new_call_id)
        return MarkReader(self, new_call_id)


class MarkReader:
    """Reads answers with marks such as `<think>` and `<tool_call>` around reasoning and calls."""

    def __init__(self, form: AnswerForm, new_call_id: Callable[[int], str]) -> None:
        self._tools, self._reasoning = form.tools, form.reasoning
        ways = () if form.tools is None else form.tools.ways if form.is_free else form.tools.ways[:1]
        self._unmarked = [way for way in ways if way.has_no_mark]
        self._tool_names = form.tool_names
        self._types = form.types
        self._new_call_id = new_call_id
        self._held = ""
        self._parts: list[Part] = []
        self._has_content = False
        """Whether content was returned. More than `MAX_BLANK_CHARS` of white space count."""
        self._call: _CallReader | None = None
        self._blank = ""
        """White space before `_call`, which is content unless a call begins."""
        if self._reasoning is None:
            self._step = self._read_content
        else:
            self._step = self._read_reasoning if form.is_reasoning else self._read_beginning
        self._skips_space = form.is_reasoning and not form.is_continued
        """Whether to skip white space, until something is returned."""
        self._has_exact_start = form.has_exact_start
        self._separator = ""
        """Text to skip before the content, as far as it is still to come."""

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the answer. Return the parts that no later text can change."""
        self._held += text
        while self._held and self._step():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """Return the parts that are still held back, at the end of the answer."""
        if self._step == self._read_reasoning:
            if not self._skips_space or self._held.strip():
                self._parts.append(Reasoning(_trimmed(self._held)))
        elif self._call is not None:
            self._add_content(self._blank)
            self._parts += self._call.finish()
        else:
            self._add_content(self._held)
        self._held, self._call = "", None
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [part for part in parts if not isinstance(part, Content | Reasoning) or part.text]

    def _add_content(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        text, self._separator = without_start(text, self._separator)
        if text:
            self._skips_space, self._separator = False, ""
            self._parts.append(Content(text))

    def _read_beginning(self) -> bool:
        assert self._reasoning is not None
        text = self._held.lstrip()
        is_late = len(self._held) - len(text) > MAX_BLANK_CHARS
        if not is_late and text.startswith(self._reasoning.open):
            self._held = text[len(self._reasoning.open) :]
            self._step, self._skips_space = self._read_reasoning, True
            return True
        if not is_late and self._reasoning.open.startswith(text):
            return False
        self._step = self._read_content
        return True

    def _read_reasoning(self) -> bool:
        assert self._reasoning is not None
        close = self._reasoning.close
        if self._skips_space:
            self._held = self._held.lstrip()
        before, mark, after = self._held.partition(close)
        if mark:
            self._parts.append(Reasoning(_trimmed(before)))
            self._held, self._step, self._skips_space = after, self._read_content, not self._has_exact_start
            self._separator = self._reasoning.separator if self._has_exact_start else ""
            return True
        shown = _trimmed(self._held[: len(self._held) - held_back(self._held, (close,))])
        if shown:
            self._skips_space = False
            self._parts.append(Reasoning(shown))
            self._held = self._held[len(shown) :]
        return False

    def _read_content(self) -> bool:
        if self._tools is None:
            if self._skips_space:
                self._held = self._held.lstrip()
            self._add_content(self._held)
            self._held = ""
            return False
        if not self._has_content and self._unmarked:
            way, may_come = match_unmarked(self._held, self._unmarked, self._tool_names)
            if way is not None:
                return self._begin_calls(way, len(self._held) - len(self._held.lstrip()))
            if may_come:
                return False
        triggers = [way.trigger for way in self._tools.marked]
        at, nth = self._find(triggers)
        if at >= 0:
            return self._begin_calls(self._tools.marked[nth], at)
        num_held = self._num_held(triggers)
        shown = _trimmed(self._held[: len(self._held) - num_held])
        if shown:
            self._has_content = True
            self._add_content(shown)
            self._held = self._held[len(shown) :]
        return False

    def _begin_calls(self, way: Way, at: int) -> bool:
        before = _trimmed(self._held[:at])
        self._add_content(before)
        self._blank = self._held[len(before) : at]
        self._call = _CallReader(way, self._new_call_id, self._types)
        self._held = self._held[at:]
        self._step = self._read_calls
        return True

    def _find(self, triggers: Sequence[str]) -> tuple[int, int]:
        assert self._tools is not None
        found = [(at, nth) for nth, trigger in enumerate(triggers) if (at := self._held.find(trigger)) >= 0]
        if self._tools.only_at_start:
            num_blank = len(self._held) - len(self._held.lstrip())
            is_late = self._has_content or num_blank > MAX_BLANK_CHARS
            found = [] if is_late else [(at, nth) for at, nth in found if at == num_blank]
        return min(found, default=(-1, 0))

    def _num_held(self, triggers: Sequence[str]) -> int:
        assert self._tools is not None
        if not self._tools.only_at_start:
            return held_back(self._held, triggers)
        text = self._held.lstrip()
        return len(text) if not self._has_content and any(trigger.startswith(text) for trigger in triggers) else 0

    def _read_calls(self) -> bool:
        assert self._call is not None
        parts = self._call.push(self._held)
        if parts:
            self._blank = ""
        self._parts += parts
        self._held = ""
        if self._call.is_over:  # the rest is text, as the model wrote it
            self._skips_space |= not self._blank
            self._held, self._call, self._tools = self._blank + self._call.rest(), None, None
            self._step = self._read_content
            return True
        return False


def without_start(text: str, start: str) -> tuple[str, str]:
    """Return the text without the part of `start` that it begins with, and the rest of `start`."""
    while text and text[0] == start[:1]:
        text, start = text[1:], start[1:]
    return text, start


def _trimmed(text: str) -> str:
    """Return the text without the white space at its end, up to `MAX_BLANK_CHARS`."""
    return text[: max(len(text.rstrip()), len(text) - MAX_BLANK_CHARS)]


class _CallReader:
    """Reads the tool calls of one answer, from the trigger (such as `<tool_call>`) on."""

    def __init__(self, way: Way, new_call_id: Callable[[int], str], types: Mapping[str, Types]) -> None:
        self._way = way
        self._types = types
        self._new_call_id = new_call_id
        self._held = ""
        self._index = 0
        before, self._middle, self._after = way.parts
        self._before = way.begin + before
        self._end = "" if way.parameter is None else self._after.split()[0]
        self._after = self._after.removeprefix(self._end)
        self._name = ""
        self._text = ""
        """The text of the current call so far."""
        self._arguments: _ObjectScanner | ParameterReader | None = None
        self._step: Callable[[list[Part]], bool] = self._read_before
        self.is_over = False
        """No more calls can follow."""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while not self.is_over and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the parts of a tool call that the answer's end cut off. If its name is incomplete, its text is content."""
        if self._arguments is not None:
            return [CallEnd(self._index, False, self._text + self._held)]
        is_behind = self._step in (self._read_after, self._read_between)
        if is_behind and match_literal(self._held, self._way.end if self._step == self._read_between else self._after) is None:
            return []
        rest = self.rest()
        return [Content(rest), CallEnd(self._index, False, "")] if rest else []

    def rest(self) -> str:
        """Return the text after the last complete call. White space alone becomes an empty text."""
        rest = self._text + self._held
        return rest if rest.strip() else ""

    def _match(self, literal: str) -> int | None:
        num = match_literal(self._held, literal)
        if num is not None and num < 0:
            self.is_over = True
            return None
        return num

    def _take(self, num: int) -> None:
        self._text += self._held[:num]
        self._held = self._held[num:]

    def _read_before(self, _parts: list[Part]) -> bool:
        num = self._match(self._before)
        if num is None:
            return False
        self._take(num)
        self._step, self._name = self._read_name, ""
        return True

    def _read_name(self, _parts: list[Part]) -> bool:
        name = _NAME.match(self._held)
        if name is None or name.end() == len(self._held):
            return False
        self._name = name[0]
        self._take(name.end())
        self._step = self._read_middle
        return True

    def _read_middle(self, parts: list[Part]) -> bool:
        num = self._match(self._middle)
        if num is None:
            return False
        blank = len(self._held[num:]) - len(self._held[num:].lstrip())
        if len(self._held) == num + blank:
            return False
        if (tags := self._way.parameter) is not None:
            reader = ParameterReader(tags, self._end, self._types.get(self._name, {}))
            begins, self._arguments = reader.begins(self._held[num:]) if self._name else False, reader
        else:
            begins, self._arguments = self._held[num + blank] == "{", _ObjectScanner()
        if not begins:
            self.is_over, self._arguments = begins is not None, None
            return False
        self._take(num + blank)
        parts.append(CallBegin(self._index, self._new_call_id(self._index), self._name))
        self._step = self._read_arguments
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        assert self._arguments is not None
        if not self._held:
            return False
        num, piece = self._arguments.push(self._held)
        if piece:
            parts.append(CallArguments(self._index, piece))
        self._take(num)
        if not (self._arguments.is_closed or self._arguments.is_wrong):
            return False
        parts.append(CallEnd(self._index, self._arguments.is_closed, self._text))
        self.is_over = self._arguments.is_wrong
        self._index, self._text, self._arguments = self._index + 1, "", None
        self._step = self._read_after
        return True

    def _read_after(self, _parts: list[Part]) -> bool:
        num = self._match(self._after)
        if num is None:
            return False
        self._held = self._held[num:]
        self._step = self._read_between
        return True

    def _read_between(self, _parts: list[Part]) -> bool:
        if not self._held.strip():
            return False
        before, _, _ = self._way.parts
        if self._way.between is not None:
            literal = self._way.between + before
            num = match_literal(self._held, literal)
            if num is None:
                return False
            if num >= 0:
                self._before, self._step = literal, self._read_before
                return True
        if self._way.end:
            num = self._match(self._way.end)
            if num is None:
                return False
            self._held = self._held[num:]
        self.is_over = True
        return False


class ChannelReader:
    """Reads Harmony, the format of gpt-oss: messages with a header that names a channel and perhaps a recipient."""

    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self, form: AnswerForm, new_call_id: Callable[[int], str]) -> None:
        self._tool_names = frozenset() if form.tools is None else form.tool_names
        self._new_call_id = new_call_id
        self._held = ""
        self._is_in_text = False
        self._channel = ""
        self._num_calls = 0
        self._arguments: _ObjectScanner | None = None
        self._text = ""
        self._is_first = False
        """The next text begins a message."""
        self._shown: set[type[Reasoning | Content]] = set()
        if form.is_reasoning:
            self._is_in_text, self._channel = True, "analysis"

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held and (self._read_text(parts) if self._is_in_text else self._read_header(parts)):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._is_in_text:
            self._show(self._held, parts)
            self._end_message(parts)
        elif self._tool_names and "to=functions." in self._held:
            parts += [Content(self._held), CallEnd(self._num_calls, False, "")]
        elif self._held and not self._held.startswith(("<|start|>", "<|channel|>")):  # else a cut header
            parts.append(Content(self._held))
        self._held = ""
        return parts

    def _read_header(self, parts: list[Part]) -> bool:
        header, mark, rest = self._held.partition("<|message|>")
        if not mark:
            return False
        self._held, self._is_in_text, self._is_first = rest, True, True
        self._text = header + mark
        self._channel = _first_word(header.partition("<|channel|>")[2])
        name = _first_word(header.partition("to=functions.")[2])
        if name in self._tool_names:
            parts.append(CallBegin(self._num_calls, self._new_call_id(self._num_calls), name))
            self._arguments = _ObjectScanner()
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        found = [(at, mark) for mark in self._ENDS if (at := self._held.find(mark)) >= 0]
        if not found:
            shown = self._held[: len(self._held) - held_back(self._held, self._ENDS)]
            self._held = self._held[len(shown) :]
            self._show(shown, parts)
            return False
        at, mark = min(found)
        self._show(self._held[:at], parts)
        self._held = self._held[at if mark == "<|start|>" else at + len(mark) :]
        self._end_message(parts)
        return True

    def _show(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._arguments is not None:
            self._text += text
            if not self._arguments.is_closed:
                parts.append(CallArguments(self._num_calls, self._arguments.push(text)[1]))
        else:
            kind = Reasoning if self._channel == "analysis" else Content
            if self._is_first and kind in self._shown:
                text = "\n" + text
            self._shown.add(kind)
            self._is_first = False
            parts.append(kind(text))

    def _end_message(self, parts: list[Part]) -> None:
        if self._arguments is not None:
            parts.append(CallEnd(self._num_calls, self._arguments.is_closed, self._text))
            self._num_calls += 1
        self._arguments, self._is_in_text = None, False


def _first_word(header: str) -> str:
    return "".join(header.partition("<|")[0].split()[:1])


class _ObjectScanner:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self.is_closed = self.is_wrong = False

    def push(self, text: str) -> tuple[int, str]:
        """Return how many characters belong to the object, and these characters."""
        for at, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_in_string = char != '"'
                self._is_escaped = char == "\\"
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_closed = True
                    return at + 1, text[: at + 1]
        return len(text), text


def match_unmarked(text: str, ways: Sequence[Way], tool_names: frozenset[str]) -> tuple[Way | None, bool]:
    """Return the way of `ways` in which the text calls a tool, or None, and whether more text could make it a call."""
    num_chars, text = len(text), text.lstrip()
    if num_chars - len(text) > MAX_BLANK_CHARS:
        return None, False
    is_short, text = len(text) < MAX_UNMARKED_CHARS, text[:MAX_UNMARKED_CHARS]
    may_come = False
    for way in ways:
        num = match_literal(text, way.trigger)
        if num is not None and num >= 0:
            name, end, _ = text[num:].partition(way.parts[1][0])
            if end and name in tool_names:
                return way, True
            may_come |= not end and any(one.startswith(name) for one in tool_names)
        may_come |= num is None
    return None, may_come and is_short
