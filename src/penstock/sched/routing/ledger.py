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
        """Replica number -> uncached prompt tokens of requests without a first token, plus tokens still expected of answers."""
        self.num_sent_tokens = self.num_done_tokens = 0
        """Totals since the start: tokens sent to replicas, and tokens computed."""
        self.num_waiting_tokens = 0
        """Tokens of requests without a first token."""
        self.answers: list[int] = []
        """Answers that have begun and not ended, by the number of the replica."""
        self._entries: dict[str, _Entry] = {}

    def join(self, replica: int) -> None:
        for counts in (self.work, self.answers):
            counts += [0] * (replica + 1 - len(counts))

    def answers_at(self, request_id: str) -> int | None:
        """Return the replica of an answer that has begun and not ended, else None."""
        entry = self._entries.get(request_id)
        return None if entry is None or not entry.has_started else entry.replica

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
            self.answers[entry.replica] += 1
            self.num_waiting_tokens -= num_prefill_tokens + entry.num_new_tokens
        self.num_done_tokens += num_prefill_tokens + num_tokens
        num_new_tokens = min(num_tokens, entry.num_new_tokens)
        entry.num_new_tokens -= num_new_tokens
        self.work[entry.replica] -= num_prefill_tokens + num_new_tokens
        return is_first

    def move(self, request_id: str, replica: int) -> None:
        """Count an answer that has begun as another replica's from now on."""
        entry = self._entries[request_id]
        for number, sign in ((entry.replica, -1), (replica, 1)):
            self.work[number] += sign * entry.num_new_tokens
            self.answers[number] += sign
        entry.replica = replica

    def on_end(self, request_id: str) -> None:
        """Count a request as ended. Idempotent."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self.answers[entry.replica] -= entry.has_started
        num_prefill_tokens = 0 if entry.has_started else entry.num_prefill_tokens
        self.work[entry.replica] -= num_prefill_tokens + entry.num_new_tokens
        if not entry.has_started:
            self.num_waiting_tokens -= num_prefill_tokens + entry.num_new_tokens
