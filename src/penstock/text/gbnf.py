"""Grammars in GBNF, llama.cpp's notation, and in the EBNF of xgrammar, which differs little: read, and written as the Lark of
llguidance. Called by `text.grammar_source`.

    root ::= item ("," item)*         # rules by `::=`; the first is `root`
    item ::= [a-z]+ | "(" root ")"    # texts, classes, groups; * + ? {2} {2,} {2,5}

Here an answer may be read in any way that the rules allow. In Lark a terminal takes the longest text it can, and there is
no way back. So a rule becomes a terminal only where that makes no difference, which `text.lexemes` finds out; a grammar that
never comes back to itself is one terminal as a whole. Others are followed character by character: the same answers, and masks
that take longer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.text.lexemes import Node, safe
from penstock.types.errors import Rejected, RejectReason

MAX_DEPTH = 60
"""Groups inside each other."""
MAX_REPEATS = 100_000
"""llama.cpp and xgrammar have bounds of their own; what such numbers cost is bounded when the grammar is followed."""

_MAX_CODE = 0x10FFFF
_RULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*(?=\s*::=)")
_NOTATION = re.compile(r"""(?m)^[ \t]*[A-Za-z_][A-Za-z0-9_.-]*[ \t]*::=""")
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
      | (?P<is>::=)
      | (?P<text>"(?:\\.|[^"\\\n])*")
      | (?P<class>\[(?:\\.|[^\]\\\n])*\])
      | (?P<repeat>\{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9}\s*)?)?\})
      | (?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "e": "\x1b"}
_LITERAL = frozenset("\\\"'[]^-?*+.(){}|/$&~# ")


def is_gbnf(source: str) -> bool:
    """Whether a grammar's rules are written with `::=`, and not with `:` as in Lark."""
    return _NOTATION.search(source) is not None


def to_lark(source: str) -> str:
    """In which `start` is the rule `root`. Raises `Rejected`, with the line and the column."""
    rules = _Parser(source).rules()
    return _Writer(rules).lark()


@dataclass(slots=True)
class _Group:
    """A group that is being read."""

    at: int
    """Where it began."""
    ways: list[list[Node]]


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def rules(self) -> dict[str, Node]:
        """By their names. Raises `Rejected`."""
        found: dict[str, Node] = {}
        used: dict[str, int] = {}
        self._skip()
        while self._at < len(self._source):
            at = self._at
            kind, name = self._next()
            if kind != "name" or self._next()[0] != "is":
                raise self._error(at, "A rule begins with its name and ::=", "Write: name ::= ...")
            if name in found:
                raise self._error(at, f"The rule {name} is there twice", "Put both together with |.")
            found[name] = self._body(at, used)
        if "root" not in found:
            raise self._error(0, "There is no rule root, with which an answer begins", "Write: root ::= ...")
        for name, at in used.items():
            if name not in found:
                raise self._error(at, f"There is no rule {name}", f"Write: {name} ::= ...")
        return found

    def _body(self, at: int, used: dict[str, int]) -> Node:
        groups = [_Group(at, [[]])]
        while self._at < len(self._source) and not _RULE.match(self._source, self._at):
            at = self._at
            kind, text = self._next()
            parts = groups[-1].ways[-1]
            if kind == "name":
                used.setdefault(text, at)
                parts.append(Node("name", text))
            elif kind == "text":
                parts.append(self._text(at, text))
            elif kind == "class":
                parts.append(self._class(at, text))
            elif kind == "repeat" or text in ("*", "+", "?"):
                if not parts:
                    raise self._error(at, f"Nothing stands before {text}", "Say what is repeated.")
                if parts[-1].kind == "repeat":
                    raise self._error(at, f"{text} repeats a repetition", "Put that in brackets.")
                parts[-1] = Node("repeat", self._sign(at, text), (parts[-1],))
            elif text == ".":
                parts.append(Node("char", "(?s:.)", ranges=((0, _MAX_CODE),)))
            elif text == "|":
                groups[-1].ways.append([])
            elif text == "(":
                if len(groups) > MAX_DEPTH:
                    raise self._error(at, f"More than {MAX_DEPTH} groups are inside each other", "Give some a rule.")
                groups.append(_Group(at, [[]]))
            elif text == ")" and len(groups) > 1:
                node = _choice(groups.pop().ways)
                groups[-1].ways[-1].append(Node("all", parts=(node,)) if node.kind == "repeat" else node)
            else:
                raise self._error(at, f"{text} is not expected here", "Check the brackets and the ::= before it.")
        if len(groups) > 1:
            raise self._error(groups[-1].at, "A group has no end", "Write ) where it ends.")
        return _choice(groups[0].ways)

    def _next(self) -> tuple[str, str]:
        """The kind and the text of the next token; moves behind it and the white space that follows."""
        at = self._at
        found = _TOKEN.match(self._source, at)
        if found is None or found.lastgroup is None:
            if at >= len(self._source):
                raise self._error(at, "The grammar ends within a rule", "Write what it is made of.")
            raise self._error(at, _unknown(self._source[at : at + 2]), "Leave it out, or say the same otherwise.")
        self._at = found.end()
        self._skip()
        return found.lastgroup, found[0]

    def _skip(self) -> None:
        found = _TOKEN.match(self._source, self._at)
        if found is not None and found.lastgroup == "space":
            self._at = found.end()

    def _sign(self, at: int, text: str) -> str:
        sign = re.sub(r"\s", "", text)
        if not sign.startswith("{"):
            return sign
        numbers = [int(number) for number in sign[1:-1].split(",") if number]
        if max(numbers) > MAX_REPEATS:
            raise self._error(at, f"{sign} repeats more than {MAX_REPEATS} times", "Ask for less.")
        if numbers[0] > numbers[-1]:
            raise self._error(at, f"{sign} has a minimum above its maximum", "Exchange them.")
        return sign

    def _text(self, at: int, quoted: str) -> Node:
        text = "".join(self._characters(at + 1, quoted[1:-1]))
        parts = tuple(Node("char", _in_regex(one), ranges=((ord(one), ord(one)),)) for one in text)
        return parts[0] if len(parts) == 1 else Node("text", text, parts)

    def _class(self, at: int, bracketed: str) -> Node:
        inner = bracketed[1:-1]
        is_not = inner.startswith("^")
        inner = inner[is_not:]
        if not inner:
            raise self._error(at, f"The class {bracketed} is empty", "Say which characters it has; . is any.")
        characters = list(self._characters(at + 1 + is_not, inner, is_class=True))
        ranges: list[tuple[int, int]] = []
        nth = 0
        while nth < len(characters):
            is_range = characters[nth + 1 : nth + 2] == ["-"] and nth + 2 < len(characters)
            first, last = ord(characters[nth][-1]), ord(characters[nth + 2 if is_range else nth][-1])
            if first > last:
                raise self._error(at, f"The class {bracketed[:40]} has a range that goes backwards", "Exchange its ends.")
            ranges.append((first, last))
            nth += 3 if is_range else 1
        ends = [(_in_regex(chr(first)), _in_regex(chr(last))) for first, last in ranges]
        written = "".join(first if first == last else f"{first}-{last}" for first, last in ends)
        return Node("char", f"[{'^' if is_not else ''}{written}]", ranges=_others(ranges) if is_not else tuple(ranges))

    def _characters(self, at: int, text: str, *, is_class: bool = False) -> Iterator[str]:
        """With `is_class`, one that was escaped comes behind a backslash, so that it begins no range."""
        nth = 0
        while nth < len(text):
            if text[nth] != "\\":
                yield text[nth]
                nth += 1
                continue
            found = _ESCAPE.match(text, nth)
            assert found is not None, "a text does not end in a backslash"
            number = found[1] or found[2] or found[3]
            character = _NAMED.get(found[4]) or (found[4] if found[4] in _LITERAL else None) if number is None else None
            if number is not None:
                code = int(number, 16)
                character = chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else None
            if character is None:
                remedy = r"Use \n, \t, \r, \x41, \u0041 or \U00000041."
                raise self._error(at + nth, f"The escape {found[0]} is not known", remedy)
            yield f"\\{character}" if is_class else character
            nth = found.end()

    def _error(self, at: int, what: str, remedy: str) -> Rejected:
        before = self._source[:at]
        line, column = before.count("\n") + 1, at - before.rfind("\n")
        return Rejected(
            RejectReason.INVALID,
            f"The grammar, read as GBNF, can't be followed: {what} (line {line}, column {column}). {remedy}",
        )


def _unknown(text: str) -> str:
    if text == "(=":
        return "Look-ahead, (=...), is not supported"
    if text[0] in '"[':
        return f"A text or a class, begun by {text[0]}, has no end on its line"
    if text[0] in "<!":
        return "Special tokens can't be named"
    return f"{text[0]} is not expected here"


def _others(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """All characters but these."""
    left: list[tuple[int, int]] = []
    begin = 0
    for first, last in sorted(ranges):
        if begin < first:
            left.append((begin, first - 1))
        begin = max(begin, last + 1)
    return (*left, (begin, _MAX_CODE)) if begin <= _MAX_CODE else tuple(left)


def _choice(ways: list[list[Node]]) -> Node:
    nodes = tuple(way[0] if len(way) == 1 else Node("all", parts=tuple(way)) for way in ways)
    return nodes[0] if len(nodes) == 1 else Node("any", parts=nodes)


def _in_regex(character: str) -> str:
    """One character, inside a class of a regex or outside."""
    if character.isalnum() and character.isascii():
        return character
    return f"\\x{{{ord(character):X}}}"


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        recurring = _recurring({name: set(names_of(node)) for name, node in rules.items()})
        self._terminals, self._texts = safe(rules, rules.keys() - recurring)
        self._numbers = {name: nth for nth, name in enumerate(rules)}

    def lark(self) -> str:
        lines = [f"start: {self._name('root')}"]
        lines += [
            f"{self._name(name)}: {self._written(node, is_terminal=name in self._terminals)}"
            for name, node in self._rules.items()
        ]
        return "\n".join(lines)

    def _name(self, name: str) -> str:
        return f"{'T' if name in self._terminals else 'r'}{self._numbers[name]}"

    def _written(self, node: Node, *, is_terminal: bool, is_inside: bool = False) -> str:
        """`is_inside`: a choice or a row of parts needs brackets."""
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


def names_of(node: Node) -> Iterator[str]:
    """The rules that it refers to."""
    if node.kind == "name":
        yield node.text
    for part in node.parts:
        yield from names_of(part)


def _recurring(uses: dict[str, set[str]]) -> set[str]:
    """The rules that lead to a rule which comes back to itself."""
    waiting = {name: len(names) for name, names in uses.items()}
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, names in uses.items():
        for used in names:
            users[used].append(name)
    plain = [name for name, number in waiting.items() if not number]
    for name in plain:  # it grows meanwhile
        for user in users[name]:
            waiting[user] -= 1
            if not waiting[user]:
                plain.append(user)
    return uses.keys() - set(plain)
