"""The explanation that a journal gives of one request."""

from __future__ import annotations

from collections.abc import Callable

from penstock.obs.explain.explanation import Explanation
from penstock.obs.explain.journal import Journal


def explained(journal: Journal, name: str, read_clock: Callable[[], int]) -> Explanation | None:
    """Return the explanation of a request or a call, or None if it is not remembered."""
    return next(iter(journal.explain_all((name,), read_clock)), None)
