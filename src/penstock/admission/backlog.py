"""Who was let in and has not ended: sums over them, for the door's expectations. Kept by `door`; owns no request.

`enter` belongs to the event loop, `on_first_token` and `on_finish` to the engine thread. So each sum is kept as what was added
and what was taken, two numbers with one writer each, and a reader sees at most the newest change half done.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """One request, as the door saw it."""

    num_prefill_tokens: int
    """Prompt tokens that are expected to be computed."""
    num_blocks: int
    """KV blocks at the predicted length."""
    expected_ttft_ns: int
    """From arrival."""
    priority: int = 0
    has_started: bool = False
    """It has its first token."""


class Backlog:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._prefill_added = self._prefill_taken = 0
        self._blocks_added = self._blocks_taken = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_prefill_tokens(self) -> int:
        """Of all that have no first token yet; a prompt that is half computed counts in full."""
        return max(0, self._prefill_added - self._prefill_taken)

    @property
    def num_blocks(self) -> int:
        """At the predicted lengths of all that have not ended."""
        return max(0, self._blocks_added - self._blocks_taken)

    def ahead_of(self, priority: int) -> tuple[int, int]:
        """(requests, prompt tokens) that have no first token yet and are served before one of this priority. O(requests)."""
        ahead = [entry for entry in list(self._entries.values()) if not entry.has_started and entry.priority <= priority]
        return len(ahead), sum(entry.num_prefill_tokens for entry in ahead)

    def enter(self, request_id: str, entry: Entry) -> None:
        """Before the request is submitted: it may end at once."""
        self._prefill_added += entry.num_prefill_tokens
        self._blocks_added += entry.num_blocks
        self._entries[request_id] = entry

    def on_first_token(self, request_id: str) -> Entry | None:
        """Returns the request's entry, if it came through the door."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._start(entry)
        return entry

    def on_finish(self, request_id: str) -> Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._start(entry)
            self._blocks_taken += entry.num_blocks
        return entry

    def _start(self, entry: Entry) -> None:
        if not entry.has_started:
            entry.has_started = True
            self._prefill_taken += entry.num_prefill_tokens
