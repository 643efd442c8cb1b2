"""Ends a code completion at a line: before one that is indented too little, or when time is over. Called by the output
stage."""

from __future__ import annotations

from penstock.types.sampling import LineLimits

_SPACES = " \t"


class Lines:
    def __init__(self, limits: LineLimits) -> None:
        self._min_indent = limits.min_indent
        self._max_ns = limits.max_ns
        self._has_line = False
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of an answer's text. Return (text that is safe to show, whether the answer ends here)."""
        self._has_line |= "\n" in text
        if not self._min_indent:
            return text, False
        text, self._held = self._held + text, ""
        end = text.find("\n")
        while end >= 0:
            begin = text[end + 1 : end + 1 + self._min_indent]
            if begin.lstrip(_SPACES):
                return text[:end], True
            if len(begin) < self._min_indent:
                self._held = text[end:]
                return text[:end], False
            end = text.find("\n", end + 1)
        return text, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def is_late(self, elapsed_ns: int) -> bool:
        """Return whether the answer has a whole line, and its time limit is over `elapsed_ns` after the first token."""
        return self._has_line and self._max_ns is not None and elapsed_ns > self._max_ns
