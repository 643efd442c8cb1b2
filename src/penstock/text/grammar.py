"""Compiles the grammars that answers must follow, and caches them. One `Grammars` per model, used by `calls`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.text import gbnf, grammar_source, json_schema, tool_grammar
from penstock.types.errors import Rejected, wrong
from penstock.types.sampling import Matcher

if TYPE_CHECKING:
    from penstock.text.answer_matcher import AnswerPlan
    from penstock.text.grammar_matcher import CompiledGrammar
    from penstock.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 1 << 16
MAX_REGEX_CHARS = 1 << 13
"""The time to compile some regexes grows with the square of their length."""
MAX_LARK_CHARS = 1 << 14
"""Time and memory grow with the square of the nested terminals: 0.3 s and 20 MB at this limit, 5 s and 310 MB at 64 KiB."""
STACK_BYTES = 1 << 27
"""Stack of the compiling thread. llguidance recurses for each nested rule, and the longest chain needs 8 to 16 MiB, more than a
thread usually has."""
MAX_KEPT = 16
"""Compiled grammars that are kept, each 1 to 45 MB. The least recently used one is dropped first."""
MAX_KEPT_CHARS = 1 << 20
"""Total length of the sources of all kept grammars."""
MAX_KEPT_STATES = 1_000_000
"""Most lexer states for long strings of all kept grammars together, each 200 to 500 bytes."""
ANSWERS_PER_COMPILATION = 64
"""Answers of one compiled grammar share an automaton of limited size. After this many, it is compiled again for new requests.

An answer that begins with free text counts once it reaches the grammar, so one compilation may serve more of those.
"""
MAX_REFUSED = 256
"""Refused grammars that are remembered by hash, so that refusing one again is free."""

_starting = threading.Lock()
"""Guards the process-wide stack size of new threads: two models may compile at once."""


class GrammarKind(StrEnum):
    """The language of a grammar, such as JSON schema or regex. The value is its name in error messages."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    """GBNF if rules are written with `::=`, else Lark."""
    LARK = "Lark grammar"
    GBNF = "GBNF grammar"
    STRUCTURAL_TAG = "structural_tag"
    TOOLS = "tools"


_TO_LARK: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: grammar_source.of_schema,
    GrammarKind.JSON_OBJECT: lambda _: grammar_source.of_schema('{"type": "object"}'),
    GrammarKind.REGEX: grammar_source.of_regex,
    GrammarKind.CHOICE: grammar_source.of_choices,
    GrammarKind.GRAMMAR: grammar_source.of_grammar,
    GrammarKind.LARK: grammar_source.of_lark,
    GrammarKind.GBNF: gbnf.to_lark,
}


_OF_JSON = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG, GrammarKind.TOOLS})
_LENGTH = re.compile(r'"m(?:in|ax)Length"\s*:\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)')
_WITHOUT_BLANK_START = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.TOOLS})
_BLANK_CHOICE = re.compile(r'"[\s\\]')
"""White space, or an escape that may be white space, at the beginning of a string in JSON."""
_OF_RULES = frozenset({GrammarKind.GRAMMAR, GrammarKind.LARK, GrammarKind.GBNF})
_MAX_CHARS = {GrammarKind.REGEX: MAX_REGEX_CHARS} | dict.fromkeys(_OF_RULES, MAX_LARK_CHARS)


@dataclass(frozen=True, slots=True)
class Lead:
    """The marks of a reasoning block that may precede the answer, and the text after it. Marks may be special tokens."""

    open: str
    close: str
    text: str = ""
    separator: str = ""
    """Text after the block, if the grammar `has_exact_start`. Otherwise up to two line breaks may follow the block."""

    def block(self, spell: Callable[[str], str]) -> str:
        """Return a Lark rule for the reasoning block: any text up to its closing mark."""
        opened, closed = spell(self.open), spell(self.close)
        if closed.startswith("<["):  # a special token, which no text holds
            return f"block: {opened} ANY? {closed}\nANY: /(.|\\n)+/\n"
        return f"block[lazy]: /{tool_grammar.escaped(self.open)}(.|\\n)*{tool_grammar.escaped(self.close)}/\n"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar that an answer must follow, as the client wrote it."""

    kind: GrammarKind
    source: str = ""
    """JSON text of a schema or a structural tag; a regex; rules; a JSON array of strings for CHOICE; empty for JSON_OBJECT;
    `tool_grammar.tool_source` for TOOLS."""
    lead: Lead | None = None
    """The reasoning that may precede the answer, or None."""
    other: Grammar | None = None
    """An alternative to TOOLS, without a lead or an alternative of its own."""
    param: str = field(default="", compare=False)
    """The field of the client's request that has the grammar, for errors."""

    @property
    def has_exact_start(self) -> bool:
        """Whether the answer may begin with white space, which is then part of it. JSON, calls and most choices do not."""
        answer = self.other or self
        if answer.kind is GrammarKind.CHOICE:
            return _BLANK_CHOICE.search(answer.source) is not None
        return answer.kind not in _WITHOUT_BLANK_START

    @property
    def max_extra_states(self) -> int:
        """Most lexer states that strings with length limits can need, beside the usual states."""
        return json_schema.STATES_PER_CHAR * min(json_schema.MAX_LENGTHS, self._sum_of_lengths(are_all=True))

    def check_lengths(self, max_tokens: int) -> None:
        """Raise `Rejected` if answers of up to `max_tokens` could exceed the automaton that counts the lengths of strings."""
        if max_tokens <= json_schema.MAX_SHORT_TOKENS:
            return
        total = self._sum_of_lengths(are_all=False)
        if total > json_schema.MAX_LENGTHS:
            raise wrong(
                f"The different minLength and maxLength of the {self.kind} add up to {total}, and at most "
                f"{json_schema.MAX_LENGTHS} are followed in answers of more than {json_schema.MAX_SHORT_TOKENS} tokens. Lower "
                "them, leave out those of long strings, or limit the tokens of the answer.",
            )

    def _sum_of_lengths(self, *, are_all: bool) -> int:
        """Return the sum of the length limits in the schemas. Unless `are_all`, skip tools that are not strict."""
        of_other = 0 if self.other is None else self.other._sum_of_lengths(are_all=are_all)
        if self.kind not in _OF_JSON or len(self.source) > MAX_SOURCE_CHARS:  # too long: compiling will refuse it
            return of_other
        is_exact = are_all or "\\u" in self.source  # such an escape may be part of a keyword
        if not is_exact and sum(map(float, _LENGTH.findall(self.source))) <= json_schema.MAX_LENGTHS:
            return of_other  # the usual case, cheap enough for an event loop
        try:
            value = json.loads(self.source)
        except (ValueError, RecursionError):  # compiling will refuse it
            return of_other
        if self.kind is GrammarKind.TOOLS:
            value = [parameters for _, parameters, is_strict in value[3] if is_strict or are_all]
        return sum(json_schema.lengths_in(value)) + of_other

    def before(self, spell: Callable[[str], str]) -> str:
        """Return the Lark rules that join the parts of an answer. Empty if the grammar is its only part.

        The parts are the reasoning block, which may be absent, then `@main` (the grammar of `source`) or `@other` (that of the
        alternative). `spell` returns Lark for a mark, such as `<[7]>` for a special token.
        """
        if self.lead is None and self.other is None:
            return ""
        block = text = rules = ""
        if self.lead is not None:
            block = f"(block {spell(self.lead.separator) if self.has_exact_start else 'LINES?'})? "
            text = f"{spell(self.lead.text)} "
            rules = f"{self.lead.block(spell)}LINES: /\\n{{1,2}}/\n"
        rest = f"@main | {block}{text}@other" if self.other is not None else "@main"
        text = text if self.kind is not GrammarKind.TOOLS else ""
        return f"start: {block}{text}{rest}\n{rules}"


class Grammars:
    """Compiled grammars of one model. Thread-safe. The first grammar takes longer because the vocabulary is read."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        """`vocab_size` is the number of logits, which may exceed the tokenizer's tokens."""
        from penstock.text.grammar_matcher import GrammarTokens  # naming a grammar needs no numpy

        self._tokens = GrammarTokens(tokenizer, vocab_size)
        self._lock = threading.Lock()
        """Guards `_refused` and `_kept`."""
        self._refused: OrderedDict[int, str] = OrderedDict()
        """Hash of a grammar -> why it was refused."""
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def matcher(self, grammar: Grammar, plan: AnswerPlan | None = None) -> Matcher:
        """Return a matcher for a new answer. Compiling can take a second; an already compiled grammar takes microseconds.

        `plan` describes what precedes the grammar. Raises `Rejected` if the grammar is invalid or too large.
        """
        return self._make_matcher(self.ready(grammar), plan)

    def free_matcher(self, plan: AnswerPlan) -> Matcher:
        """Return a matcher for an answer without a grammar, but with limited reasoning."""
        from penstock.text.answer_matcher import AnswerMatcher

        return AnswerMatcher(plan, self._tokens, None)

    def prepare(self, grammar: Grammar, plan: AnswerPlan | None = None, number: int = 1) -> None:
        """Compile a grammar, so that `known` returns matchers for `number` answers, or raises if the grammar is refused."""
        with contextlib.suppress(Rejected):
            self.ready(grammar, num_at_once(plan, number))

    def known(self, grammar: Grammar, plan: AnswerPlan | None = None, number: int = 1) -> list[Matcher] | None:
        """Return `number` matchers if the grammar is already compiled, else None. Fast enough for an event loop.

        A compiled grammar makes a limited number of matchers. Raises `Rejected` for a grammar that was refused before.
        """
        compiled = self.find(grammar, num_at_once(plan, number))
        return None if compiled is None else [self._make_matcher(compiled, plan) for _ in range(number)]

    def _make_matcher(self, compiled: CompiledGrammar, plan: AnswerPlan | None) -> Matcher:
        from penstock.text.answer_matcher import AnswerMatcher

        return compiled.matcher() if plan is None else AnswerMatcher(plan, self._tokens, compiled)

    def ready(self, grammar: Grammar, number: int = 1) -> CompiledGrammar:
        """Return the compiled grammar, which can make `number` matchers. Raises `Rejected` if the grammar is refused."""
        return self.find(grammar, number) or self._compile(grammar)

    def find(self, grammar: Grammar, number: int) -> CompiledGrammar | None:
        """Return the compiled grammar if it is cached and can make `number` matchers, else None. Raises like `ready`."""
        with self._lock:
            if (detail := self._refused.get(hash(grammar))) is not None:
                raise wrong(detail)
            compiled = self._kept.get(grammar)
            if compiled is None or not _has_left(compiled, number):
                return None
            self._kept.move_to_end(grammar)
            return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            compiled = self._compile_uncached(grammar)
        except Rejected as rejected:
            with self._lock:
                self._refused[hash(grammar)] = rejected.detail
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise
        self._keep(grammar, compiled)
        return compiled

    def _compile_uncached(self, grammar: Grammar) -> CompiledGrammar:
        _check_source(grammar)
        if grammar.kind is GrammarKind.TOOLS:
            return self._of_tools(grammar)
        try:
            return self._of_lark(grammar, self._lark_of(grammar))
        except Rejected as rejected:
            if grammar.kind is GrammarKind.GRAMMAR:
                more = grammar_source.how_read(grammar.source)
            elif grammar.kind is GrammarKind.JSON_SCHEMA:
                more = json_schema.place_in(grammar.source, rejected.detail)
            else:
                raise
            raise wrong(f"{rejected.detail}{more}") from rejected

    def _of_tools(self, grammar: Grammar) -> CompiledGrammar:
        @functools.cache
        def check(schema: str) -> None:
            self._of_lark(Grammar(GrammarKind.JSON_SCHEMA), f"{grammar_source.START}%json {schema}\n")

        try:
            return self._of_lark(grammar, tool_grammar.of_tools(grammar.source, self._tokens.spell)[0])
        except Rejected as rejected:
            lark, are_followed = tool_grammar.of_tools(grammar.source, self._tokens.spell, check)
            if are_followed:
                raise
            _log.info("a tool's schema is not enforced: %s", rejected.detail)
            return self._of_lark(grammar, lark)

    def _lark_of(self, grammar: Grammar) -> str:
        if grammar.kind is GrammarKind.STRUCTURAL_TAG:
            from penstock.text.structural_tag import of_structural_tag  # rarely used

            return of_structural_tag(grammar.source, self._tokens.spell, MAX_REGEX_CHARS)
        return _TO_LARK[grammar.kind](grammar.source)

    def _of_lark(self, grammar: Grammar, lark: str) -> CompiledGrammar:
        from penstock.text.grammar_matcher import JSON_LIMITS, LARK_LIMITS, Mark, compile_grammar

        marks = [] if grammar.lead is None else [Mark(grammar.lead.close, grammar.lead.open)]
        triggers = tool_grammar.triggers_of(grammar.source) if grammar.kind is GrammarKind.TOOLS else ()
        marks += [Mark(trigger) for trigger in triggers]
        larks, other = {"main": lark}, grammar.other
        if other is not None:
            _check_source(other)
            larks["other"] = self._lark_of(other)
        before = grammar.before(self._tokens.spell)
        limits = LARK_LIMITS if _OF_RULES.intersection((grammar.kind, other and other.kind)) else JSON_LIMITS
        max_extra_states = grammar.max_extra_states
        limits = replace(limits, max_lexer_states=limits.max_lexer_states + max_extra_states)
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar") as pool:
            with _starting:
                usual_bytes = threading.stack_size(STACK_BYTES)
                try:
                    compiling = pool.submit(
                        compile_grammar, before, larks, grammar.kind, self._tokens, limits, marks, bool(triggers)
                    )
                finally:
                    threading.stack_size(usual_bytes)
            try:
                compiled = compiling.result()
                compiled.max_extra_states = max_extra_states
                return compiled
            finally:
                del compiling  # breaks the cycle of frame, exception and future

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._kept[grammar] = compiled
            # Grammars that can make no more matchers hold tens of megabytes.
            for spent in [other for other, kept in self._kept.items() if not _has_left(kept, 1)]:
                del self._kept[spent]
            while (
                len(self._kept) > MAX_KEPT
                or sum(len(other.source) for other in self._kept) > MAX_KEPT_CHARS
                or sum(kept.max_extra_states for kept in self._kept.values()) > MAX_KEPT_STATES
            ):
                self._kept.popitem(last=False)


def num_at_once(plan: AnswerPlan | None, number: int) -> int:
    """Return how many matchers to have ready for `number` answers. Answers that begin with free text make theirs later."""
    return 1 if plan is not None and plan.begins_free else number


def _has_left(compiled: CompiledGrammar, number: int) -> bool:
    return not compiled.has_failed and compiled.num_answers + number <= ANSWERS_PER_COMPILATION


def _check_source(grammar: Grammar) -> None:
    max_chars = _MAX_CHARS.get(grammar.kind, MAX_SOURCE_CHARS)
    if len(grammar.source) > max_chars:
        raise wrong(
            f"The {grammar.kind} has {len(grammar.source)} characters; at most {max_chars} are allowed. Make it shorter.",
        )
    try:
        grammar.source.encode()
    except UnicodeEncodeError as error:
        raise wrong(f"The {grammar.kind} contains a lone surrogate, which is half of a character. Leave it out.") from error
