"""Who is in flight: owns the ids of all requests from `submit` to their finish chunk. Called by `loop`, by any thread; never
touches a request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import Request


class InFlight:
    """Of one engine."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        """Of all of them together."""
        self._lock = threading.Lock()
        self._prompt_lens: dict[str, int] = {}
        """By request id."""

    def __len__(self) -> int:
        return len(self._prompt_lens)

    def ids(self) -> list[str]:
        """At one moment."""
        with self._lock:
            return list(self._prompt_lens)

    def add(self, request: Request) -> None:
        """Raises `Rejected` (INVALID) if there is one with this id."""
        request_id, num_tokens = request.request_id, request.num_prompt_tokens
        with self._lock:
            if request_id in self._prompt_lens:
                detail = f"a request with the id {request_id!r} is still running"
                raise Rejected(RejectReason.INVALID, detail, param="request_id")
            self._prompt_lens[request_id] = num_tokens
            self.num_prompt_tokens += num_tokens

    def remove(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        with self._lock:
            for request_id in request_ids:
                self.num_prompt_tokens -= self._prompt_lens.pop(request_id)
