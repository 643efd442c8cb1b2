"""Simulates the clients of a workload: they send due requests, wait, cancel and retry, and write the records.

`Traffic` sends calls to a `Service`, such as a simulated fleet, which reports events back with `tell` and `end`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from penstock.admission.ask import Ask
from penstock.clock import VirtualClock
from penstock.lab.agenda import NEVER_NS, Agenda
from penstock.lab.pacing import Pace, Pacer, earliest
from penstock.lab.records import End, Record
from penstock.lab.simulated_executor import EOS_TOKEN_ID, TOKEN_ID
from penstock.lab.virtual_server import ServerSettings
from penstock.lab.workload import Job, Workload
from penstock.types.errors import Rejected, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import RequestStats

_FIRST_TOKEN_ID = 2
"""Lowest token id in prompts. Outputs use lower ids."""


class Prompts:
    """Maker of prompts as token ids. Two prompts share exactly the prefix that their jobs do (`Job.prefix`, `Job.after`).

    Blocks of answers (`Job.answer`) have the tokens that the simulated server generates. Different answers to equal prompts
    are equal there.
    """

    def __init__(self, workload: Workload) -> None:
        self._jobs = workload.jobs
        self._block_tokens = workload.prefix_block_tokens
        self._block_numbers: dict[int, int] = {}
        self._known: dict[int, tuple[int, ...]] = {}
        """Id of a block -> its tokens, for blocks of answers and those that begin like another one."""
        self._histories: dict[int, tuple[int, ...]] = {}
        """Index of a job -> tokens of its prompt and answer, for the next turn of its conversation."""
        answer = (TOKEN_ID,) * self._block_tokens
        for job in workload.jobs:
            for block_id, other, num_alike in job.alike:
                self._known.setdefault(block_id, self._block(other)[:num_alike] + self._block(block_id)[num_alike:])
            if job.answer:
                num_full, num_more = divmod(job.num_prompt_tokens, self._block_tokens)
                begin = self._blocks(job.prefix[num_full:])[:num_more]
                for block_id in job.answer:
                    self._known[block_id] = begin + answer[len(begin) :]
                    begin = ()

    def make(self, index: int) -> tuple[int, ...]:
        job = self._jobs[index]
        if job.prompt_token_ids:
            return job.prompt_token_ids
        num_tokens = job.num_prompt_tokens
        shared: tuple[int, ...] = ()
        if job.after is not None:  # the history begins with any shared blocks
            shared = self._histories.pop(job.after, ())
        elif job.prefix:
            shared = self._blocks(job.prefix)
        own = _FIRST_TOKEN_ID + 2 * index  # even; ids in prefixes are odd
        return shared[:num_tokens] + (own,) * max(0, num_tokens - len(shared))

    def keep(self, index: int, prompt_token_ids: tuple[int, ...], num_output_tokens: int) -> None:
        self._histories[index] = prompt_token_ids + (TOKEN_ID,) * num_output_tokens

    def _blocks(self, prefix: Sequence[int]) -> tuple[int, ...]:
        return tuple(chain.from_iterable(map(self._block, prefix)))

    def _block(self, block_id: int) -> tuple[int, ...]:
        if (known := self._known.get(block_id)) is not None:
            return known
        numbers = self._block_numbers
        return (_FIRST_TOKEN_ID + 1 + 2 * numbers.setdefault(block_id, len(numbers)),) * self._block_tokens


class Service(Protocol):
    def submit(self, call: Call) -> None: ...

    def abort(self, call: Call) -> None: ...


@dataclass(slots=True)
class Call:
    job: Job
    request: Request
    ask: Ask
    record: Record
    gaps_ns: array[int]
    last_ns: int = 0
    num_tokens: int = 0
    is_cancelled: bool = False
    waits_to_retry: bool = False
    num_returns: int = 0


class Traffic:
    def __init__(
        self,
        workload: Workload,
        clock: VirtualClock,
        settings: ServerSettings,
        *,
        pace: Pace | None = None,
        max_tokens: int | None = None,
        max_returns: int = 0,
        predictions: Mapping[int, int] | None = None,
    ) -> None:
        """Prepare the clients of a workload.

        `settings`: of the servers.
        `max_tokens`: limit that each request sends. None asks for exactly the output's length, as `penstock bench` does.
        `max_returns`: how often a refused request is sent again, after the time in `Retry-After`.
        `predictions`: index of a job -> predicted output length.
        """
        self.agenda = Agenda()
        self.records: list[Record] = []
        self.calls: dict[str, Call] = {}
        """Request id (the job's index) -> call in flight."""
        self._workload = workload
        self._clock = clock
        self._pacer = Pacer(workload, pace or Pace())
        self._prompts = Prompts(workload)
        self._max_tokens = max_tokens
        self._settings = settings
        self._max_model_len = settings.capacity.max_model_len
        self._predictions = predictions or {}
        self._max_returns = max_returns
        self._service: Service | None = None
        self._begin_ns = NEVER_NS

    @property
    def is_over(self) -> bool:
        return self._pacer.is_over

    def begin(self, service: Service) -> None:
        self._service = service
        self._note_next()

    def tell(self, events: Sequence[TokenEvent]) -> None:
        calls = self.calls
        for event in events:
            if event.token_ids:
                call, at_ns = calls[event.request_id], event.at_ns
                if call.last_ns:
                    call.gaps_ns.append(at_ns - call.last_ns)
                else:
                    call.record.first_ns = at_ns
                call.last_ns = at_ns
                before, call.num_tokens = call.num_tokens, call.num_tokens + len(event.token_ids)
                if before < (call.job.cancelled_after_tokens or 0) <= call.num_tokens:
                    self.agenda.note(at_ns, partial(self._cancel, call))

    def end(self, event: TokenEvent, stats: RequestStats) -> None:
        call = self.calls.pop(event.request_id)
        record = call.record
        record.ended_ns = event.at_ns
        record.gaps_ns = call.gaps_ns
        record.num_prompt_tokens = stats.num_prompt_tokens
        record.num_cached_tokens = stats.num_cached_tokens
        record.num_output_tokens = call.num_tokens
        if stats.first_scheduled_ns is not None:
            record.queue_ns = stats.first_scheduled_ns - call.request.arrival_ns
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            record.http_status = 200
            self._finish_turn(call)
        elif call.is_cancelled:
            record.end = End.CANCELLED
            self._finish_turn(call)
        else:
            self._refuse(record, RejectReason(event.reject_reason or RejectReason.UNAVAILABLE))

    def _note_next(self) -> None:
        next_ns = self._pacer.next_ns()
        if next_ns is not None and next_ns < self._begin_ns:
            self._begin_ns = next_ns
            self.agenda.note(max(next_ns, self._clock.now_ns()), self._begin_due)

    def _begin_due(self) -> None:
        self._begin_ns = NEVER_NS
        now_ns = self._clock.now_ns()
        while (taken := self._pacer.take(now_ns)) is not None:
            self._send(*taken)
        self._note_next()

    def _send(self, index: int, intended_ns: int) -> None:
        job, now_ns = self._workload.jobs[index], self._clock.now_ns()
        record = Record(index=index, intended_ns=intended_ns, sent_ns=now_ns, tenant=job.tenant)
        record.num_prompt_tokens = job.num_prompt_tokens
        request, ask = self._request_of(job, record, self._prompts.make(index))
        call = Call(job, request, ask, record, array("q"))
        if job.cancelled_ns is not None:
            gone_ns = intended_ns + job.cancelled_ns - job.arrival_ns
            self.agenda.note(max(now_ns, gone_ns), lambda: self._cancel(call))
        self.submit(call)

    def _request_of(self, job: Job, record: Record, prompt: tuple[int, ...], *, is_retry: bool = False) -> tuple[Request, Ask]:
        """Return a job's request for the engine, which arrives now, and the same request for admission control."""
        settings, arrival_ns = self._settings, self._clock.now_ns()
        max_tokens, stops = job.num_output_tokens, tuple[int, ...]()
        if self._max_tokens is not None:
            max_tokens, stops = min(self._max_tokens, max(1, self._max_model_len - len(prompt))), (EOS_TOKEN_ID,)
        # A later turn is due when the turn before has ended, and its deadline moves by as much.
        own_ns = None if job.deadline_ns is None else job.deadline_ns + record.intended_ns - job.arrival_ns
        deadline_ns = earliest(own_ns, _after(arrival_ns, settings.request_timeout_ns))
        queue_deadline_ns = _after(arrival_ns, settings.queue_timeout_ns)
        first_token_deadline_ns = _after(arrival_ns, settings.first_token_timeout_ns)
        request = Request(
            request_id=str(record.index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stops),
            arrival_ns=arrival_ns,
            priority=job.priority,
            background=job.background,
            deadline_ns=deadline_ns,
            queue_deadline_ns=queue_deadline_ns,
            first_token_deadline_ns=first_token_deadline_ns,
            slo_itl_ns=settings.slo_itl_ns,
            tenant=job.tenant,
            cache_salt=job.tenant.encode() + b"\0" if settings.isolates_tenants else b"",
            conversation=self._conversation_of(record.index),
            predicted_new_tokens=self._predictions.get(record.index),
        )
        ask = Ask(
            num_token_ids=len(prompt),
            max_new_tokens=max_tokens,
            min_new_tokens=1 if stops else max_tokens,
            tenant=job.tenant,
            priority=job.priority,
            background=job.background,
            deadline_ns=deadline_ns,
            queue_deadline_ns=queue_deadline_ns,
            first_token_deadline_ns=first_token_deadline_ns,
            claim=record.index.to_bytes(8, "big"),
            is_retry=is_retry,
        )
        return request, ask

    def _conversation_of(self, index: int) -> bytes:
        """Return an id of the job's conversation: the index of its first job, or empty for a job without other turns."""
        jobs = self._workload.jobs
        if jobs[index].after is None and not self._pacer.continues(index):
            return b""
        while (before := jobs[index].after) is not None:
            index = before
        return str(index).encode()

    def submit(self, call: Call) -> None:
        """Send a call to the service, or handle its refusal."""
        assert self._service is not None, "the traffic has begun"
        request = call.request
        self.calls[request.request_id] = call
        try:
            if request.num_prompt_tokens + request.sampling.max_tokens > self._max_model_len:
                raise Rejected(RejectReason.CONTEXT_LENGTH, "The prompt and the answer do not fit the context.")
            self._service.submit(call)
        except Rejected as rejected:
            self.reject(call, rejected)

    def reject(self, call: Call, rejected: Rejected) -> None:
        """Handle a refused call: retry it after the requested wait, or record the refusal."""
        del self.calls[call.request.request_id]
        if rejected.retry_after_s is not None and call.num_returns < self._max_returns:
            call.waits_to_retry = True
            wait_ns = math.ceil(1000 * rejected.retry_after_s) * 1_000_000  # the header `Retry-After-Ms` has whole milliseconds
            self.agenda.note(self._clock.now_ns() + wait_ns, lambda: self._retry(call))
        else:
            self._refuse(call.record, rejected.reason)

    def end_cancelled(self, call: Call) -> None:
        """Record a cancelled call that is at no server."""
        self.calls.pop(call.request.request_id, None)
        call.record.end, call.record.ended_ns = End.CANCELLED, self._clock.now_ns()
        self._finish_turn(call)

    def _retry(self, call: Call) -> None:
        if call.is_cancelled:
            return
        call.waits_to_retry = False
        call.num_returns += 1
        call.request, call.ask = self._request_of(call.job, call.record, call.request.prompt_token_ids, is_retry=True)
        self.submit(call)

    def _cancel(self, call: Call) -> None:
        assert self._service is not None, "the traffic has begun"
        call.is_cancelled = True
        if self.calls.get(call.request.request_id) is call:
            self._service.abort(call)
        elif call.waits_to_retry:
            self.end_cancelled(call)

    def _refuse(self, record: Record, reason: RejectReason) -> None:
        record.http_status = status = status_of(reason)
        record.end = End.REFUSED if status in (429, 503) else End.FAILED
        record.error = str(reason)
        record.ended_ns = self._clock.now_ns()
        self._finish(record, is_answered=False)

    def _finish_turn(self, call: Call) -> None:
        record = call.record
        if self._pacer.continues(record.index):
            self._prompts.keep(record.index, call.request.prompt_token_ids, record.num_output_tokens)
        self._finish(record, is_answered=True)

    def _finish(self, record: Record, *, is_answered: bool) -> None:
        self.records.append(record)
        if is_answered:
            self._pacer.end(record.index, record.ended_ns)
        else:
            for turn in self._pacer.fail(record.index, record.ended_ns):
                self.records.append(Record.lost(turn, record.ended_ns, self._workload.jobs[turn].tenant))
        self._note_next()


def _after(arrival_ns: int, timeout_ns: int | None) -> int | None:
    return None if timeout_ns is None else arrival_ns + timeout_ns


def status_of(reason: RejectReason) -> int:
    return _STATUSES.get(reason, 408 if reason.is_deadline else 429)


_STATUSES = {
    RejectReason.INVALID: 400,
    RejectReason.CONTEXT_LENGTH: 400,
    RejectReason.NEVER_FITS: 400,
    RejectReason.DRAINING: 503,
    RejectReason.UNAVAILABLE: 503,
}
"""Reason -> the server's HTTP status. Other reasons get 408 for deadlines, else 429."""
