"""The work in flight that a router has sent to each replica, in tokens that are still to be computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    replica: int
    num_prefill_tokens: int
    num_new_tokens: int
    has_started: bool = False


class Ledger:
    def __init__(self) -> None:
        self.work: list[int] = []
        """Tokens of prompts that have no first token yet and were not cached, and those expected of answers that have not
        ended, by the number of the replica."""
        self.num_sent_tokens = self.num_done_tokens = 0
        """Totals since the start: tokens sent to replicas, and tokens computed."""
        self.num_waiting_tokens = 0
        """Tokens of requests without a first token."""
        self._entries: dict[str, _Entry] = {}

    def join(self, replica: int) -> None:
        self.work += [0] * (replica + 1 - len(self.work))

    def send(self, request_id: str, replica: int, num_prefill_tokens: int, num_new_tokens: int) -> None:
        self._entries[request_id] = _Entry(replica, num_prefill_tokens, num_new_tokens)
        num_tokens = num_prefill_tokens + num_new_tokens
        self.work[replica] += num_tokens
        self.num_sent_tokens += num_tokens
        self.num_waiting_tokens += num_tokens

    def on_tokens(self, request_id: str, num_tokens: int) -> bool:
        """Count tokens of an answer. Return whether they are its first. Requests that have ended are ignored."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        is_first, entry.has_started = not entry.has_started, True
        num_prefill_tokens = entry.num_prefill_tokens if is_first else 0
        if is_first:
            self.num_waiting_tokens -= num_prefill_tokens + entry.num_new_tokens
        self.num_done_tokens += num_prefill_tokens + num_tokens
        num_new_tokens = min(num_tokens, entry.num_new_tokens)
        entry.num_new_tokens -= num_new_tokens
        self.work[entry.replica] -= num_prefill_tokens + num_new_tokens
        return is_first

    def on_end(self, request_id: str) -> None:
        """Count a request as ended. Idempotent."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        num_prefill_tokens = 0 if entry.has_started else entry.num_prefill_tokens
        self.work[entry.replica] -= num_prefill_tokens + entry.num_new_tokens
        if not entry.has_started:
            self.num_waiting_tokens -= num_prefill_tokens + entry.num_new_tokens
