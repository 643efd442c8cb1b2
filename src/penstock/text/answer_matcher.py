"""Follows an answer through reasoning and free text to a grammar: implements `types.sampling.Matcher`.

While an answer is free, tokens are not restricted. From a call's trigger, or from the end of the reasoning, the grammar
decides:

    <think> ... </think>  some words  <tool_call> {"name": ...} </tool_call>
    `--- free, counted    `--- free   `--- the grammar

A mark is a text such as `</think>` or a trigger. One token can complete a mark and contain text after it. So while a mark is
incomplete, a mask excludes tokens that would complete it and add text that the grammar forbids. Once the mark is complete,
a new grammar matcher reads it as the tokenizer spells it: a model can spell the name of a special token in ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.text.answers import MAX_BLANK_CHARS, match_unmarked
from penstock.text.dialects import ReasoningFormat, ToolFormat
from penstock.text.parameters import held_back
from penstock.types.errors import GrammarFailure

if TYPE_CHECKING:
    from penstock.text.grammar_matcher import CompiledGrammar, GrammarMatcher, GrammarTokens
    from penstock.types.sampling import Matcher

READ_COST = 8
"""A matcher reads a text in about so many times the time that a tokenizer needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """The place in an answer where the grammar begins, and what may precede it."""

    reasoning: ReasoningFormat | None = None
    """The marks around reasoning, or None if the answer has none."""
    is_reasoning: bool = False
    """The prompt ends inside a reasoning block, so the answer begins with reasoning."""
    max_reasoning_tokens: int | None = None
    """The end of the reasoning is forced after this many tokens. None means unlimited."""
    trigger_of: ToolFormat | None = None
    """The grammar begins at a trigger of this format. None: it begins with the answer, or after the reasoning."""
    tool_names: frozenset[str] = frozenset()
    """Tools of the request. A call without a mark counts only if it names one."""
    begun: str = ""
    """Beginning of the answer that the prompt ends with, for `begin_all`."""

    @property
    def begins_free(self) -> bool:
        """Whether the first token is unrestricted: free text precedes a trigger, or the prompt opened the reasoning block."""
        return self.trigger_of is not None or (self.reasoning is not None and self.is_reasoning)


class _State(Enum):
    OPENING = auto()
    """The answer may begin with a reasoning block."""
    REASONING = auto()
    WAITING = auto()
    """Free text before a trigger."""
    FOLLOWING = auto()
    """The grammar restricts every token."""
    FREE = auto()


class AnswerMatcher:
    def __init__(self, plan: AnswerPlan, tokens: GrammarTokens, grammar: CompiledGrammar | None) -> None:
        """Without `grammar`, the matcher only limits the length of the reasoning."""
        self._plan = plan
        self._tokens = tokens
        self._grammar = grammar
        self._is_bound = grammar is not None and plan.trigger_of is None
        """The answer must not end before the grammar is complete."""
        self._inner: GrammarMatcher | None = None
        self._mask: bytes | None = None
        self._num_reasoning = 0
        self._forced: list[int] = []
        """Tokens of the reasoning block's forced end that are still to come."""
        self._watch = _Watch((), is_at_start=False)
        self._beginning: bytes | None = None
        """The answer so far, while it can still become a call without a mark. After that, None."""
        self._prompt_ids: list[int] = []
        """Tokens of the prompt that may begin a trigger."""
        if plan.reasoning is None:
            self._begin_answer()
        elif plan.is_reasoning:
            self._begin_reasoning()
        else:
            self._state = _State.OPENING
            self._watch = _Watch((plan.reasoning.open,), is_at_start=True)
            if plan.trigger_of is not None and plan.trigger_of.prompt_end:
                self._prompt_ids = tokens.encode(plan.trigger_of.prompt_end)
            if self._is_bound and grammar is not None:
                self._inner = grammar.matcher()
        self._mask = self._next_mask()

    def begin(self) -> None:
        """Read the plan's `begun`, in 3 to 20 ms per 1,000 tokens. If the grammar forbids it, change nothing."""
        if self._inner is not None:
            self._inner.read(self._plan.begun)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._accept(token_id)
        self._mask = self._next_mask()

    def copy(self) -> AnswerMatcher:
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.copy()
        other._watch = self._watch.copy()
        other._forced = [*self._forced]
        return other

    def forced(self) -> Sequence[int]:
        if self._state is _State.FOLLOWING and self._inner is not None:
            return self._inner.forced()
        return self._forced[:1] if self._state is _State.REASONING else ()  # one by one: the first may complete the mark

    def mask(self) -> bytes | None:
        if self._state is _State.FOLLOWING and self._inner is not None:
            return self._inner.mask()
        return self._mask

    def _accept(self, token_id: int) -> None:
        if self._forced and token_id == self._forced[0]:
            del self._forced[0]
        state = self._state
        if state is _State.FREE:
            return
        if self._inner is not None:
            self._inner.accept((token_id,))
            if state is _State.FOLLOWING:
                return
        if self._beginning is not None:
            self._beginning += self._tokens.bytes_of(token_id)
            if self._begins_call():
                return
        if self._watch.push(token_id, self._tokens.bytes_of(token_id)):
            self._on_mark()
        elif state is _State.REASONING:
            self._count_reasoning(self._num_reasoning + 1)
        elif self._watch.is_over and self._beginning is None:
            if state is _State.OPENING:
                self._begin_answer([*self._prompt_ids, *self._watch.ids], self._watch.text)
            else:
                self._state = _State.FREE

    def _on_mark(self) -> None:
        mark, behind = self._watch.found()
        ids = self._watch.ids
        if self._state is _State.OPENING:
            self._inner = None
            self._begin_reasoning()
            self._watch.push(ids[-1], behind)  # it may begin the end of the block, as "><" of "<think></think>" does
        elif self._state is _State.REASONING:
            if self._is_bound:
                assert self._plan.reasoning is not None
                self._follow(self._plan.reasoning.open + mark, behind)
            else:
                self._forced = []
                tools = self._plan.trigger_of  # one of its triggers may begin within the mark
                self._begin_answer(() if tools is None or tools.only_at_start else ids, behind)
        else:
            try:
                self._follow(mark, behind)
            except GrammarFailure:  # the token that completed the mark contains more text, which no call can begin with
                self._state, self._inner = _State.FREE, None

    def _begin_reasoning(self) -> None:
        assert self._plan.reasoning is not None
        self._state = _State.REASONING
        self._watch = _Watch((self._plan.reasoning.close,), is_at_start=False)
        self._count_reasoning(0)

    def _count_reasoning(self, num_tokens: int) -> None:
        """Set the length of the reasoning so far. At the limit, force its end."""
        self._num_reasoning, marks = num_tokens, self._plan.reasoning
        if num_tokens == self._plan.max_reasoning_tokens and marks is not None:
            # Behind the close alone, gpt-oss can begin another block. Beside tools it has to be free to call one instead.
            lead = marks.lead if self._grammar is None else ""
            self._forced = self._tokens.encode(marks.forced + lead)
            self._watch = _Watch((marks.close + lead,), is_at_start=False)

    def _begin_answer(self, read_ids: Sequence[int] = (), text: bytes = b"") -> None:
        """Enter the state after the reasoning. `text`: the answer's beginning, as far as the tokens `read_ids` contain it."""
        if self._grammar is None:
            self._state = _State.FREE
        elif self._plan.trigger_of is not None:
            self._state = _State.WAITING
            tools = self._plan.trigger_of
            self._watch = _Watch(tuple(way.trigger for way in tools.marked), is_at_start=tools.only_at_start)
            self._watch.text = b"" if read_ids else text  # else white space of the token that ended the reasoning
            for token_id in read_ids:
                self._accept(token_id)
            if tools.unmarked and self._inner is None:  # no mark came, but a call without one may begin here
                self._state, self._beginning = _State.WAITING, text
                self._begins_call()
        else:
            self._state = _State.FOLLOWING
            self._inner = self._inner or self._grammar.matcher()  # an existing matcher has read the answer so far

    def _begins_call(self) -> bool:
        """Return whether the answer's text has become a tool call without a mark. If so, follow the grammar.

        The matcher reads the call's text as new tokens, because its first token may also contain text before the call.
        """
        assert self._beginning is not None
        assert self._plan.trigger_of is not None
        text = self._beginning.decode(errors="replace")
        way, may_come = match_unmarked(text, self._plan.trigger_of.unmarked, self._plan.tool_names)
        if way is None and may_come:
            return False
        self._beginning = None
        if way is None:
            return False
        try:
            self._follow(text)
        except GrammarFailure:  # the token that completed the name contains more text, which no call can have there
            self._state, self._inner = _State.FREE, None
        return True

    def _follow(self, text: str, behind: bytes = b"") -> None:
        """Follow the grammar from now on. `behind` is what the last token contains after `text`."""
        assert self._grammar is not None
        inner = self._grammar.matcher()
        ids = [*self._tokens.encode(text), *self._tokens.encode_bytes(behind)]
        if not inner.may_accept(ids):  # a guess, or a call's name with more text; `accept` would blame the grammar
            raise GrammarFailure("The answer's tokens begin no call.", remedy="Ask again.")
        inner.accept(ids)
        inner.mask()
        self._inner, self._state = inner, _State.FOLLOWING

    def _next_mask(self) -> bytes | None:
        if self._state is _State.OPENING:
            return None if self._inner is None else self._inner.mask()
        if self._state is _State.REASONING:
            if self._forced:
                return self._tokens.only(self._forced[0])
            if not self._is_bound:
                return None
            return self._tokens.any_but(self._barred(), may_end=False)
        if self._state is _State.WAITING and (barred := self._barred()):
            return self._tokens.any_but(barred, may_end=True)
        return None

    def _barred(self) -> list[bytes]:
        """Return masks of the tokens that would complete a mark and add text that the grammar forbids."""
        assert self._grammar is not None
        bars = [self._grammar.barred(mark, rest) for mark, rest in self._watch.begun()]
        return [bar for bar in bars if bar is not None]


def begin_all(matchers: Sequence[Matcher]) -> list[Matcher]:
    """Read the plan's `begun` once and return a matcher for each choice. Recipes of a front are returned as they are."""
    first = matchers[0]
    if not isinstance(first, AnswerMatcher):
        return [*matchers]
    first.begin()
    return [first, *[first.copy() for _ in matchers[1:]]]


class _Watch:
    """Searches the text of sampled tokens for marks such as `</think>`."""

    def __init__(self, marks: Sequence[str], *, is_at_start: bool) -> None:
        self._texts = tuple(marks)
        self._marks = tuple(mark.encode() for mark in marks)
        self._firsts = tuple(mark[:1] for mark in self._marks)
        self._is_at_start = is_at_start
        self._sizes: list[int] = []
        self.ids: list[int] = []
        """The last tokens, from the first one that may be part of a mark."""
        self.text = b""
        """Text of `ids`, after the beginning that `_begin_answer` put."""
        self.is_over = False
        """No mark can follow any more."""

    def found(self) -> tuple[str, bytes]:
        """Return the complete mark, and the text after it in the same token."""
        mark = next(text for text in self._texts if text.encode() in self.text)
        return mark, self.text.partition(mark.encode())[2]

    def copy(self) -> _Watch:
        other = copy(self)
        other.ids, other._sizes = [*self.ids], [*self._sizes]
        return other

    def push(self, token_id: int, data: bytes) -> bool:
        """Add a token and return whether a mark is complete."""
        self.text += data
        self.ids.append(token_id)
        self._sizes.append(len(data))
        if self._is_at_start:
            text = self.text.lstrip()
            is_late = len(self.text) - len(text) > MAX_BLANK_CHARS
            if not is_late and text.startswith(self._marks):
                return True
            self.is_over = is_late or not any(mark.startswith(text) for mark in self._marks)
            return False
        if not any(first in self.text for first in self._firsts):
            self._forget(0)
            return False
        found = [at for mark in self._marks if (at := self.text.find(mark)) >= 0]
        self._forget(len(self.text) - min(found) if found else held_back(self.text, self._marks))
        return bool(found)

    def begun(self) -> list[tuple[str, str]]:
        """Return (mark, missing part) for each mark whose beginning ends the text: ("<think>", "nk>") after "<thi"."""
        if not self.ids:
            return []
        if self._is_at_start:
            num = len(self.text.lstrip())
            return [(text, text[num:]) for text in self._texts if num and text.encode().startswith(self.text.lstrip())]
        pairs = [(text, at) for text in self._texts for at in range(1, len(text)) if self.text.endswith(text[:at].encode())]
        return [(text, text[at:]) for text, at in pairs]

    def _forget(self, num_held: int) -> None:
        while self._sizes and (not num_held or len(self.text) - self._sizes[0] >= num_held):
            self.text = self.text[self._sizes[0] :]
            del self._sizes[0], self.ids[0]
