"""The work in flight that a router has sent to each replica, in tokens that are still to be computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    replica: int
    num_prefill_tokens: int
    num_new_tokens: int
    has_started: bool = False


class Ledger:
    def __init__(self, num_replicas: int) -> None:
        self.work = [0] * num_replicas
        """Tokens of prompts that have no first token yet and were not cached, and those expected of answers that have not
        ended."""
        self._entries: dict[str, _Entry] = {}

    def send(self, request_id: str, replica: int, num_prefill_tokens: int, num_new_tokens: int) -> None:
        self._entries[request_id] = _Entry(replica, num_prefill_tokens, num_new_tokens)
        self.work[replica] += num_prefill_tokens + num_new_tokens

    def on_tokens(self, request_ids: Iterable[str]) -> list[str]:
        """Count a token for each request. Return those whose token was the first."""
        started: list[str] = []
        for request_id in request_ids:
            entry = self._entries[request_id]
            num_done = 0
            if entry.num_new_tokens:
                entry.num_new_tokens -= 1
                num_done = 1
            if not entry.has_started:
                entry.has_started = True
                num_done += entry.num_prefill_tokens
                started.append(request_id)
            self.work[entry.replica] -= num_done
        return started

    def on_end(self, request_id: str) -> None:
        """Count a request as ended. Idempotent."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.work[entry.replica] -= entry.num_new_tokens + (0 if entry.has_started else entry.num_prefill_tokens)
