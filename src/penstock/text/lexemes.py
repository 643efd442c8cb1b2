"""Which rules of a grammar may be terminals that take the longest text they can, without a change of its answers. Called by
`text.gbnf`.

    rest ::= " " rest | "."       word ::= [a-z]+ " "?

After "a" the terminal `word` would take the space, and then a `rest` that begins with one can't follow. So wherever a text of
one terminal may be the beginning of a longer one, of itself or another, the character that would make it longer must not be one
that may come behind. All terminals are looked at together, in one automaton of their characters, as if each might stand
anywhere: all such places are found, and some that there are not. A terminal that reaches further is taken apart, and the rest
looked at again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Literal

MAX_ROUNDS = 12
MAX_POSITIONS = 2_000
MAX_STATES = 400
MAX_DEPTH = 150
"""Rules and groups inside each other, in one terminal."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a rule: a character, the name of a rule, or a combination of parts."""

    kind: Literal["char", "text", "name", "all", "any", "repeat"]
    """`text` is a row of characters that was written as one."""
    text: str = ""
    """A character or a class as a regex, the name of a rule, the sign of a repetition, the characters of a text."""
    parts: tuple[Node, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    """First and last code points of what a "char" may be."""

    @property
    def is_loop(self) -> bool:
        """Whether it may come several times."""
        return self.text not in ("?", "{1}", "{0,1}", "{1,1}", "{0}", "{0,0}")

    @property
    def may_miss(self) -> bool:
        """Whether a repetition may come no time."""
        return self.text in ("?", "*") or self.text.startswith(("{0,", "{0}"))


class _TooLargeError(Exception):
    """Everything is taken apart then: that is never wrong."""


def safe(rules: Mapping[str, Node], plain: Set[str]) -> tuple[set[str], set[str]]:
    """The rules, of those which do not come back to themselves (`plain`), and the texts that may be terminals."""
    if "root" in plain:  # one terminal, and nothing behind it
        return set(plain), set()
    terminals, texts = set(plain), {node.text for rule in rules.values() for node in _texts_in(rule)}
    try:
        for _ in range(MAX_ROUNDS):
            found = _Automaton(rules, terminals, texts).too_long()
            if not found:
                return terminals, texts
            for kind, name in found:
                (terminals if kind == "name" else texts).discard(name)
    except _TooLargeError:
        pass
    return set(), set()


def _texts_in(node: Node) -> Iterable[Node]:
    if node.kind == "text" and node.parts:
        yield node
    for part in node.parts:
        yield from _texts_in(part)


class _Automaton:
    """Characters of all terminals as positions (Glushkov), in sets of which each is a state."""

    def __init__(self, rules: Mapping[str, Node], terminals: Set[str], texts: Set[str]) -> None:
        self._rules = rules
        self._terminals = terminals
        self._texts = texts
        self._edges = self._all_edges()
        self._masks: list[int] = []
        """Characters of a position, a bit for each interval between edges."""
        self._next: list[set[int]] = []
        self._owner: list[tuple[str, str]] = []
        self._last: set[int] = set()
        self._begins: dict[tuple[str, str], tuple[bool, int, set[int]]] = {}
        """By terminal: whether it may be empty, the characters that it begins with, and their positions."""
        self._behind: dict[tuple[str, str], int] = {}
        """Characters that may come behind a terminal or a rule."""
        self._rule_begins = {name: (False, 0) for name in rules if name not in terminals}

    def too_long(self) -> set[tuple[str, str]]:
        """The terminals that reach further than one behind which their next character may come. Raises `_TooLargeError`."""
        self._find_begins()
        self._find_behind()
        start = frozenset(position for _, _, first in self._begins.values() for position in first)
        found: set[tuple[str, str]] = set()
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            for reached in self._steps(state):
                behind = 0
                for position in reached & self._last:
                    behind |= self._behind.get(self._owner[position], 0)
                following = frozenset(after for position in reached for after in self._next[position])
                found |= {self._owner[after] for after in following if self._masks[after] & behind}
                if following and following not in seen:
                    seen.add(following)
                    waiting.append(following)
                    if len(seen) > MAX_STATES:
                        raise _TooLargeError
        return found

    def _steps(self, state: frozenset[int]) -> set[frozenset[int]]:
        """The positions that one character may be, for each character."""
        steps: set[frozenset[int]] = set()
        left = 0
        for position in state:
            left |= self._masks[position]
        while left:
            bit = left & -left
            reached = frozenset(position for position in state if self._masks[position] & bit)
            steps.add(reached)
            for position in reached:
                bit |= self._masks[position] if len(reached) == 1 else 0
            if len(reached) == 1:  # the characters that others have, too, come by themselves
                for position in state - reached:
                    bit &= ~self._masks[position]
            left &= ~bit
        return steps

    def _all_edges(self) -> list[int]:
        edges: set[int] = set()

        def collect(node: Node) -> None:
            for first, last in node.ranges:
                edges.update((first, last + 1))
            for part in node.parts:
                collect(part)

        for rule in self._rules.values():
            collect(rule)
        return sorted(edges)

    def _mask(self, node: Node) -> int:
        mask = 0
        for first, last in node.ranges:
            mask |= (1 << bisect_left(self._edges, last + 1)) - (1 << bisect_left(self._edges, first))
        return mask

    def _terminal(self, node: Node) -> tuple[str, str] | None:
        """The kind and the text that a part outside terminals is known by, if it is a terminal."""
        if node.kind == "char":
            return "char", node.text
        if node.kind == "text" and node.text in self._texts:
            return "text", node.text
        return ("name", node.text) if node.kind == "name" and node.text in self._terminals else None

    def _begin(self, node: Node) -> tuple[bool, int]:
        """Whether a part may be empty, and the characters that it begins with."""
        if (terminal := self._terminal(node)) is not None:
            if terminal not in self._begins:
                inside = self._rules[node.text] if node.kind == "name" else node
                may_miss, first, last = self._positions(inside, terminal, 0)
                self._last |= last
                mask = 0
                for position in first:
                    mask |= self._masks[position]
                self._begins[terminal] = may_miss, mask, first
            return self._begins[terminal][:2]
        if node.kind == "name":
            return self._rule_begins[node.text]
        begins = [self._begin(part) for part in node.parts]
        mask = 0
        if node.kind == "any":
            for _, first_mask in begins:
                mask |= first_mask
            return any(may_miss for may_miss, _ in begins), mask
        if node.kind == "repeat":
            return begins[0][0] or node.may_miss, begins[0][1]
        for may_miss, first_mask in begins:
            mask |= first_mask
            if not may_miss:
                return False, mask
        return True, mask

    # Rules hang on others before and behind them: in turn from both ends, even a long chain is done in a few passes.

    def _find_begins(self) -> None:
        names, changes = list(self._rule_begins), True
        while changes:
            changes = False
            names.reverse()
            for name in names:
                begin = self._begin(self._rules[name])
                if begin != self._rule_begins[name]:
                    self._rule_begins[name] = begin
                    changes = True

    def _find_behind(self) -> None:
        names, changes = list(self._rule_begins), True
        while changes:
            before = dict(self._behind)
            names.reverse()
            for name in names:
                self._walk(self._rules[name], self._behind.get(("name", name), 0))
            changes = before != self._behind

    def _walk(self, node: Node, behind: int) -> None:
        terminal = self._terminal(node) or (("name", node.text) if node.kind == "name" else None)
        if terminal is not None:
            self._behind[terminal] = self._behind.get(terminal, 0) | behind
        elif node.kind == "any":
            for part in node.parts:
                self._walk(part, behind)
        elif node.kind == "repeat":
            self._walk(node.parts[0], behind | (self._begin(node.parts[0])[1] if node.is_loop else 0))
        else:
            for part in reversed(node.parts):
                self._walk(part, behind)
                may_miss, mask = self._begin(part)
                behind = mask | (behind if may_miss else 0)

    def _positions(self, node: Node, owner: tuple[str, str], depth: int) -> tuple[bool, set[int], set[int]]:
        """Whether a part of a terminal may be empty, and its first and last positions."""
        if depth > MAX_DEPTH or len(self._masks) > MAX_POSITIONS:
            raise _TooLargeError
        if node.kind == "char":
            position = len(self._masks)
            self._masks.append(self._mask(node))
            self._next.append(set())
            self._owner.append(owner)
            return False, {position}, {position}
        if node.kind == "name":
            return self._positions(self._rules[node.text], owner, depth + 1)
        found = [self._positions(part, owner, depth + 1) for part in node.parts]
        if node.kind == "repeat":
            may_miss, first, last = found[0]
            if node.is_loop:  # as if it might come any number of times
                for position in last:
                    self._next[position] |= first
            return may_miss or node.may_miss, first, last
        if node.kind == "any":
            return (
                any(may_miss for may_miss, _, _ in found),
                set().union(*(first for _, first, _ in found)),
                set().union(*(last for _, _, last in found)),
            )
        may_miss, firsts, lasts = True, set[int](), set[int]()
        for part_may_miss, first, last in found:
            for position in lasts:
                self._next[position] |= first
            if may_miss:
                firsts |= first
            lasts = lasts | last if part_may_miss else last
            may_miss &= part_may_miss
        return may_miss, firsts, lasts
