"""Translates GBNF, llama.cpp's grammar notation, and xgrammar's EBNF to llguidance's Lark.

    root ::= item ("," item)*         # the first rule to apply is `root`
    item ::= [a-z]+ | "(" root ")"    # texts, classes, groups; * + ? {2} {2,} {2,5}

GBNF rules are ambiguous on purpose, while a Lark terminal takes the longest text and gives nothing back:

    rest ::= " " rest | "."       word ::= [a-z]+ " "?

As a terminal, `word` would take the space that `rest` needs. So a rule becomes a terminal only where that loses no answer.
Other rules are followed character by character, with slower masks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.types.errors import wrong

MAX_DEPTH = 60
"""Most nested groups."""
MAX_REPEATS = 100_000
"""Largest number in a repetition. llguidance's limits bound the cost."""
MAX_CHECKS = 12
"""Most calls of llguidance to find terminals."""
CHECK_FUEL = 100_000
"""Limit of each such call in llguidance's units: up to 20 ms."""
MAX_PASSES = 32
"""Most passes over the rules to find what can follow each. One takes up to 20 ms. Grammars of large JSON schemas need 11."""
MAX_TERMINAL_DEPTH = 150
"""Most rules nested in a terminal: llguidance recurses for each."""

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_NOTATION = re.compile(rf"(?m)^[ \t]*{_NAME}[ \t]*::=")
_TOKEN = re.compile(
    rf"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<rule>{_NAME}\s*::=)
      | (?P<name>{_NAME})
      | (?P<text>"(?:\\.|[^"\\\n])*")
      | (?P<class>\[(?:\\.|[^\]\\\n])*\])
      | (?P<repeat>\{{\s*[0-9]{{1,9}}\s*(?:,\s*(?:[0-9]{{1,9}}\s*)?)?\}}|[*+?])
      | (?P<sign>[()|.]|::=)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "e": "\x1b"}
_NAMED |= {character: character for character in "\\\"'[]^-?*+.(){}|/$&~# "}


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A node in the syntax tree of a GBNF rule."""

    kind: str
    """char, text (characters written as one string), name, all, any or repeat."""
    text: str = ""
    """A character or a class as a regex, a text, the name of a rule, or the sign of a repetition."""
    parts: tuple[_Node, ...] = ()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def is_gbnf(source: str) -> bool:
    """Return whether a grammar's rules are written with `::=` (GBNF) rather than `:` (Lark)."""
    return _NOTATION.search(source) is not None


def to_lark(source: str) -> str:
    """Return a GBNF grammar as Lark that starts at the rule `root`. Raises `Rejected` with a line and a column."""
    return _Writer(_Parser(source).rules()).lark()


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = self._all_tokens()
        self._nth = 0
        self._used: dict[str, int] = {}
        """Where each name is used first."""

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while (token := self._next()).kind != "end":
            if token.kind != "rule":
                self._fail(token.at, "A rule begins with its name and ::=", "Write: name ::= ...")
            name = token.text.removesuffix("::=").rstrip()
            if name in rules:
                self._fail(token.at, f"The rule {name} is defined twice", "Put both together with |.")
            rules[name] = self._choice(0)
        if "root" not in rules:
            self._fail(0, "There is no rule root, with which an answer begins", "Write: root ::= ...")
        for name, at in self._used.items():
            if name not in rules:
                self._fail(at, f"The rule {name} is not defined", f"Write: {name} ::= ...")
        return rules

    def _choice(self, depth: int) -> _Node:
        ways: list[list[_Node]] = [[]]
        while self._tokens[self._nth].kind not in ("rule", "end"):
            token = self._next()
            if token.text == "|":
                ways.append([])
            elif token.text == ")" and depth:
                self._nth -= 1
                break
            elif token.kind == "repeat":
                ways[-1][-1:] = [self._repetition(token, ways[-1][-1:])]
            else:
                ways[-1].append(self._part(token, depth))
        nodes = [way[0] if len(way) == 1 else _Node("all", parts=tuple(way)) for way in ways]
        return nodes[0] if len(nodes) == 1 else _Node("any", parts=tuple(nodes))

    def _part(self, token: _Token, depth: int) -> _Node:
        if token.kind == "name":
            self._used.setdefault(token.text, token.at)
            return _Node("name", token.text)
        if token.kind == "text":
            text = "".join(character for character, _ in self._characters(token))
            parts = tuple(_Node("char", _in_regex(character)) for character in text)
            return parts[0] if len(parts) == 1 else _Node("text", text, parts)
        if token.kind == "class":
            return self._class(token)
        if token.text == ".":
            return _Node("char", "(?s:.)")
        if token.text != "(":
            self._fail(token.at, f"{token.text} is not expected here", "Check the brackets and the ::= before it.")
        if depth == MAX_DEPTH:
            self._fail(token.at, f"More than {MAX_DEPTH} groups are inside each other", "Give some a rule.")
        node = self._choice(depth + 1)
        if self._next().text != ")":
            self._fail(token.at, "A group has no end", "Write ) where it ends.")
        return _Node("all", parts=(node,))

    def _repetition(self, token: _Token, before: Sequence[_Node]) -> _Node:
        sign = re.sub(r"\s", "", token.text)
        if not before:
            self._fail(token.at, f"Nothing stands before {sign}", "Say what is repeated.")
        if before[0].kind == "repeat":
            self._fail(token.at, f"{sign} repeats a repetition", "Put that in brackets.")
        numbers = [int(number) for number in re.findall("[0-9]+", sign)]
        if max(numbers, default=0) > MAX_REPEATS:
            self._fail(token.at, f"{sign} repeats more than {MAX_REPEATS} times", "Lower the number.")
        if numbers != sorted(numbers):
            self._fail(token.at, f"{sign} has a minimum above its maximum", "Swap them.")
        if re.fullmatch(r"\{0+(,0+)?\}", sign):
            return _Node("all")  # nothing: llguidance refuses it
        return _Node("repeat", sign, tuple(before))

    def _class(self, token: _Token) -> _Node:
        characters = list(self._characters(token))
        sign = "^" if characters[:1] == [("^", False)] else ""
        characters = characters[len(sign) :]
        if not characters:
            self._fail(token.at, f"The class {token.text} is empty", "Say which characters it has; . is any.")
        written = ""
        nth = 0
        while nth < len(characters):
            is_range = characters[nth + 1 : nth + 2] == [("-", False)] and nth + 2 < len(characters)
            first, last = characters[nth][0], characters[nth + 2 if is_range else nth][0]
            if first > last:
                what = f"The class {token.text[:40]} has a range that goes backwards"
                self._fail(token.at, what, "Swap its ends.")
            written += _in_regex(first) if first == last else f"{_in_regex(first)}-{_in_regex(last)}"
            nth += 3 if is_range else 1
        return _Node("char", f"[{sign}{written}]")

    def _characters(self, token: _Token) -> Iterator[tuple[str, bool]]:
        text = token.text[:-1]
        nth = 1
        while nth < len(text):
            if text[nth] != "\\":
                yield text[nth], False
                nth += 1
                continue
            found = _ESCAPE.match(text, nth)
            assert found is not None, "a text does not end in a backslash"
            number = found[1] or found[2] or found[3]
            code = int(number, 16) if number else ord(_NAMED.get(found[4], "\ud800"))
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                remedy = r"Use \n, \t, \r, \x41, \u0041 or \U00000041."
                self._fail(token.at + nth, f"The escape {found[0]} is not known", remedy)
            yield chr(code), True
            nth = found.end()

    def _all_tokens(self) -> list[_Token]:
        tokens: list[_Token] = []
        at = 0
        while at < len(self._source):
            found = _TOKEN.match(self._source, at)
            if found is None or found.lastgroup is None:
                self._fail(at, _unknown(self._source[at]), "Leave it out, or rephrase it.")
            if found.lastgroup != "space":
                tokens.append(_Token(found.lastgroup, found[0], at))
            at = found.end()
        return [*tokens, _Token("end", "", at)]

    def _next(self) -> _Token:
        token = self._tokens[self._nth]
        self._nth += token.kind != "end"
        return token

    def _fail(self, at: int, what: str, remedy: str) -> NoReturn:
        before = self._source[:at]
        place = f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}"
        raise wrong(f"The grammar, read as GBNF, can't be followed: {what} ({place}). {remedy}")


def _unknown(character: str) -> str:
    if character in '"[':
        return f"A text or a class, begun by {character}, has no end on its line"
    return "Special tokens can't be named" if character in "<!" else f"{character} is not expected here"


def _in_regex(character: str) -> str:
    if character.isalnum() and character.isascii():
        return character
    return f"\\x{{{ord(character):X}}}"


class _TooLargeError(Exception):
    """Deciding which rules can be terminals takes too long. The grammar is then written without terminals."""


_Part = tuple[str, str]
"""Kind and text of a part outside terminals: a char, a text or a name."""


class _Writer:
    """Writes GBNF rules as Lark. A rule becomes a terminal where that loses no answer.

    A terminal is split if it would take characters that the next part needs: if it matches both a text and a prefix of it, and
    the character after the prefix is in the terminal's FOLLOW set. This set is the union over all places where the terminal is
    used, so some are split needlessly.
    """

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._numbers = {name: nth for nth, name in enumerate(rules)}
        depths = _depths({name: set(_all("name", node)) for name, node in rules.items()})
        self._terminals = set(depths)
        """Rules that become terminals: at first all rules that are not recursive."""
        self._texts: set[str] = set()
        """Texts that become terminals. Outside terminals, other texts are written character by character."""
        self._bits: dict[str, int] = {}
        """Characters and classes as regexes, with a bit for each."""
        self._num_passes_left = MAX_PASSES
        """Number of further passes over the rules that are allowed."""
        if "root" not in self._terminals:  # nothing follows a root that is a terminal
            self._texts = {text for node in rules.values() for text in _all("text", node)}
            try:
                if max(depths.values(), default=0) > MAX_TERMINAL_DEPTH:
                    raise _TooLargeError
                self._split_terminals()
            except _TooLargeError:
                self._terminals, self._texts = set(), set()

    def lark(self) -> str:
        return "\n".join([f"start: {self._name('root')}", *map(self._line, self._rules)])

    def _line(self, name: str) -> str:
        return f"{self._name(name)}: {self._written(self._rules[name], is_terminal=name in self._terminals)}"

    def _name(self, name: str) -> str:
        return f"{'T' if name in self._terminals else 'r'}{self._numbers[name]}"

    def _written(self, node: _Node, *, is_terminal: bool, is_inside: bool = False) -> str:
        if node.kind == "char":
            return f"/{node.text}/"
        if node.kind == "text" and node.parts and (is_terminal or node.text in self._texts):
            return f"/{''.join(part.text for part in node.parts)}/"
        if node.kind == "name":
            return self._name(node.text)
        if node.kind == "repeat":
            return f"({self._written(node.parts[0], is_terminal=is_terminal)}){node.text}"
        parts = [self._written(part, is_terminal=is_terminal, is_inside=True) for part in node.parts]
        joined = (" | " if node.kind == "any" else " ").join(parts)
        return f"({joined})" if is_inside and joined else joined or '""'

    def _split_terminals(self) -> None:
        """Turn terminals back into rules until none loses an answer. Raises `_TooLargeError`."""
        checker = _Checker()
        first_sets = self._first_sets()
        first_set = functools.cache(lambda node: self._first_set(node, first_sets))
        while True:
            follow_sets = self._follow_sets(first_set)
            by_mask: dict[int, list[str]] = {}
            for part, mask in follow_sets.items():
                if mask:
                    by_mask.setdefault(mask, []).append(self._of_part(part))
            shorter = [f"(({' | '.join(parts)}) & /(?s:.+)/) {self._of_mask(mask)}" for mask, parts in by_mask.items()]
            if not shorter:
                return
            lines = [f"Z: ({' | '.join(shorter)}) /(?s:.*)/", *map(self._line, sorted(self._terminals))]
            longer = [part for part in follow_sets if part[0] != "char"]
            found = checker.not_empty([f"{self._of_part(part)} & Z" for part in longer], lines)
            if not found:
                return
            for kind, text in [longer[nth] for nth in found]:
                (self._terminals if kind == "name" else self._texts).discard(text)

    def _of_part(self, part: _Part) -> str:
        kind, text = part
        if kind == "name":
            return self._name(text)
        return f"/{text if kind == 'char' else ''.join(map(_in_regex, text))}/"

    def _of_mask(self, mask: int) -> str:
        return f"/({'|'.join(text for text, bit in self._bits.items() if mask & bit)})/"

    def _first_sets(self) -> dict[str, tuple[bool, int]]:
        """Return for each rule whether it is nullable, and its FIRST set: the characters it can begin with, as `_bits`."""
        first_sets = dict.fromkeys(self._rules, (False, 0))

        def visit(name: str) -> None:
            first_sets[name] = self._first_set(self._rules[name], first_sets)

        self._repeat(visit, list(self._rules), first_sets)
        return first_sets

    def _repeat(self, visit: Callable[[str], None], names: list[str], found: Mapping[Any, Any]) -> None:
        """Visit the rules until `found` is a fixed point. Raises `_TooLargeError`."""
        before = None
        while before != found:
            if not self._num_passes_left:
                raise _TooLargeError
            self._num_passes_left -= 1
            before = dict(found)
            names.reverse()  # alternating directions, most long chains of rules need few passes
            for name in names:
                visit(name)

    def _first_set(self, node: _Node, first_sets: dict[str, tuple[bool, int]]) -> tuple[bool, int]:
        if node.kind == "char":
            return False, self._bits.setdefault(node.text, 1 << len(self._bits))
        if node.kind == "name":
            return first_sets[node.text]
        mask, is_nullable = 0, node.kind != "any"
        for part in node.parts:
            part_is_nullable, part_mask = self._first_set(part, first_sets)
            if node.kind == "any":
                mask, is_nullable = mask | part_mask, is_nullable or part_is_nullable
            elif is_nullable:
                mask, is_nullable = mask | part_mask, part_is_nullable
        return is_nullable or (node.kind == "repeat" and re.match(r"[?*]|\{0", node.text) is not None), mask

    def _follow_sets(self, first_set: Callable[[_Node], tuple[bool, int]]) -> dict[_Part, int]:
        """Return the FOLLOW set of each terminal outside of other terminals: the characters that can come next, as `_bits`."""
        follow_sets: dict[_Part, int] = {}

        def walk(node: _Node, mask: int) -> None:
            if node.kind in ("char", "name") or node.text in self._texts:
                follow_sets[node.kind, node.text] = follow_sets.get((node.kind, node.text), 0) | mask
                return
            if node.kind == "repeat" and not re.fullmatch(r"\?|\{([01],)?[01]\}", node.text):
                mask |= first_set(node)[1]
            for part in reversed(node.parts):
                walk(part, mask)
                if node.kind in ("all", "text"):
                    is_nullable, part_mask = first_set(part)
                    mask = part_mask | (mask if is_nullable else 0)

        names = [name for name in self._rules if name not in self._terminals]
        self._repeat(lambda name: walk(self._rules[name], follow_sets.get(("name", name), 0)), names, follow_sets)
        return {part: mask for part, mask in follow_sets.items() if part[0] != "name" or part[1] in self._terminals}


class _Checker:
    """Uses llguidance, with single bytes as the vocabulary, to find terminals that match no text at all."""

    bos_token_id = None
    special_token_ids = ()
    eos_token_id = 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"")

    def __init__(self) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self._bytes = LLTokenizer(TokenizerWrapper(self), slices=[])
        self._num_left = MAX_CHECKS

    def __call__(self, data: bytes) -> list[int]:
        return list(data)

    def not_empty(self, terminals: Sequence[str], lines: Sequence[str]) -> list[int]:
        """Return the indices of terminals that match any text. `lines` define the rules they use. Raises `_TooLargeError`.

        Each terminal is prefixed with a byte of its own. The first mask allows the bytes of those that match a text.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=CHECK_FUEL, step_lexer_fuel=CHECK_FUEL)
        found: list[int] = []
        for first in range(0, len(terminals), 127):
            if not self._num_left:
                raise _TooLargeError
            self._num_left -= 1
            ways = [f"/\\x{byte:02x}/ ({one})" for byte, one in enumerate(terminals[first : first + 127], 1)]
            lark = "\n".join(["start: Y", f"Y: {' | '.join(ways)}", *lines])
            matcher = LLMatcher(self._bytes, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0, limits=limits)
            mask = b"" if matcher.is_error() else matcher.compute_bitmask()
            if not matcher.is_error():
                found += [first + byte - 1 for byte in range(1, 128) if mask[byte // 8] >> byte % 8 & 1]
            elif not matcher.get_error().startswith("NoExtension"):
                raise _TooLargeError
        return found


def _all(kind: str, node: _Node) -> Iterator[str]:
    """Yield the `text` of each node of this kind, in the tree below `node` and including it. Empty texts are skipped.

    For the kind "name" these are the rules that are used, for "text" the quoted strings.
    """
    if node.kind == kind and node.text:
        yield node.text
    for part in node.parts:
        yield from _all(kind, part)


def _depths(uses: dict[str, set[str]]) -> dict[str, int]:
    """Return the nesting depth of each rule that uses no recursive rule. `uses`: rule -> the rules that it names."""
    waiting = {name: len(names) for name, names in uses.items()}
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, names in uses.items():
        for used in names:
            users[used].append(name)
    depths = {name: 0 for name, number in waiting.items() if not number}
    ready = list(depths)
    for name in ready:  # `ready` grows in the loop
        for user in users[name]:
            waiting[user] -= 1
            if not waiting[user]:
                depths[user] = 1 + max(depths[used] for used in uses[user])
                ready.append(user)
    return depths
