"""Finds stop strings in text that arrives in pieces. Called by the output stage.

The first stop string to be complete wins; if several end at once, the longest. The search is an Aho-Corasick automaton (CACM
18(6), 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    """The node of the longest proper suffix that is in the tree; None at the root."""
    stop: str | None = None
    num_held: int = 0
    """Characters that may still become part of a match: the depth, or less at a leaf."""


class StopTree:
    """The search automaton of a set of stop strings, shared by requests with the same set.

    Building takes time and memory linear in the total length of the strings. Callers must limit that length.
    """

    __slots__ = ("__weakref__", "root")

    def __init__(self, stops: Iterable[str]) -> None:
        self.root = _build(stops)


class StopStrings:
    def __init__(self, tree: StopTree) -> None:
        self._tree = tree
        self._node = tree.root
        self._held = ""

    def push(self, text: str, *, is_armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece of an answer's text. Return (text that is safe to show, the stop string that matched or None)."""
        node, root = self._node, self._tree.root
        for idx, char in enumerate(text):
            while (child := node.children.get(char)) is None and node.fail is not None:
                node = node.fail
            node = child or root
            if node.stop is not None and is_armed:
                return self._cut(text[: idx + 1], node.stop)
        self._node = node
        seen = self._held + text
        num_shown = len(seen) - node.num_held
        self._held = seen[num_shown:]
        return seen[:num_shown], None

    def flush(self) -> str:
        held, self._held, self._node = self._held, "", self._tree.root
        return held

    def _cut(self, text: str, stop: str) -> tuple[str, str]:
        shown = (self._held + text)[: -len(stop)]
        self.flush()
        return shown, stop


def _build(stops: Iterable[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        if not stop:
            raise ValueError("a stop string must not be empty")
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(depth=node.depth + 1))
        node.stop = stop
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Set `fail`, `stop` and `num_held` of the automaton's nodes. Nodes of shorter strings come first."""
    queue: deque[_Node] = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            child.fail = _longest_suffix(node.fail, char) or root
            child.stop = child.stop or child.fail.stop
            child.num_held = child.depth if child.children else child.fail.num_held
            queue.append(child)


def _longest_suffix(node: _Node | None, char: str) -> _Node | None:
    while node is not None and char not in node.children:
        node = node.fail
    return None if node is None else node.children[char]
