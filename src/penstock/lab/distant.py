"""A remote model in a simulation: a fixed time to first token, and a fixed time per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from penstock.admission.ask import Ask
from penstock.clock import Clock
from penstock.engine.core import request_stats
from penstock.lab.agenda import Agenda
from penstock.lab.simulated_executor import TOKEN_ID
from penstock.types.errors import Rejected, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.request import FinishReason, Request
from penstock.types.stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Distant:
    latency_ns: int
    """Time from a request to its first token, for any prompt."""
    token_ns: int
    """Time between two tokens of an answer, under any load."""
    max_concurrent: int


class DistantModel:
    def __init__(
        self, distant: Distant, clock: Clock, agenda: Agenda, *, report: Callable[[list[TokenEvent], int], None]
    ) -> None:
        self.ended: dict[str, RequestStats] = {}
        self._distant, self._clock, self._agenda, self._report = distant, clock, agenda, report
        self._in_flight: dict[str, tuple[Request, int]] = {}
        """Id -> request in flight, and its number of remaining tokens."""

    def submit(self, request: Request, num_output_tokens: int, ask: Ask) -> None:
        """Begin a request. Raises `Rejected` if there are too many."""
        del ask
        if len(self._in_flight) >= self._distant.max_concurrent:
            raise Rejected(RejectReason.QUEUE_FULL, "The upstream is at its request limit.", retry_after_s=1.0)
        self._in_flight[request.request_id] = request, num_output_tokens
        self._agenda.note(self._clock.now_ns() + self._distant.latency_ns, partial(self._next_token, request.request_id))
        if (deadline_ns := request.deadline_ns) is not None:
            self._agenda.note(deadline_ns, partial(self._end, request.request_id, FinishReason.REJECTED, RejectReason.DEADLINE))

    def abort(self, request_id: str) -> None:
        self._end(request_id, FinishReason.ABORT)

    def _next_token(self, request_id: str) -> None:
        if request_id not in self._in_flight:
            return
        request, num_left = self._in_flight[request_id]
        if num_left == 1:
            self._end(request_id, FinishReason.LENGTH, token_ids=(TOKEN_ID,))
            return
        self._in_flight[request_id] = request, num_left - 1
        now_ns = self._clock.now_ns()
        self._agenda.note(now_ns + self._distant.token_ns, partial(self._next_token, request_id))
        self._report([TokenEvent(request_id, (TOKEN_ID,), now_ns)], now_ns)

    def _end(self, request_id: str, reason: FinishReason, rejected: str = "", token_ids: tuple[int, ...] = ()) -> None:
        if request_id not in self._in_flight:
            return
        request, now_ns = replace(self._in_flight.pop(request_id)[0], finish_reason=reason), self._clock.now_ns()
        self.ended[request_id] = request_stats(request, now_ns, rejected)
        self._report([TokenEvent(request_id, token_ids, now_ns, finish_reason=reason, reject_reason=rejected)], now_ns)
