"""The pages that a server would have shown at the end of a recording: explanations of all requests, and metrics.

The recording's events go to a journal and to metrics as the engine reported them. A recording does not say why prefix hits
ended, which guesser was used, or what an idle server waited for, which is assumed to be its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.lab.recording import Arrival, Departure, Lost, Recording, Restart, StepDone
from penstock.obs.explain.explanation import Explanation
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.obs.prometheus import expose
from penstock.obs.recording import NOBODY
from penstock.types.plan import RowPlan
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import (
    Admission,
    PlanNews,
    Preemption,
    PreemptReason,
    RequestStats,
    StepCounts,
    StepStats,
    WaitReason,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Pages of a server at the end of a recording."""

    explanations: Sequence[Explanation]
    before: str
    """`/metrics` at the beginning."""
    after: str
    begin_ns: int
    end_ns: int


def show(recording: Recording) -> Shown:
    """Read a recording. Raises RecordingError."""
    return _Replay(recording).run()


class _Replay:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        requests = recording.requests()
        self._departures = {one.arrival.id: one.departure for one in requests if one.departure is not None}
        self._journal = Journal(max(1, len(self._departures)))
        self._metrics = Metrics(recording.header.model)
        self._metrics.tenants = frozenset(one.arrival.tenant for one in requests)
        self._arrivals: dict[int, Arrival] = {}
        """Id -> arrival of a request that has not ended."""
        self._background: set[int] = set()
        self._running: dict[int, int] = {}
        """Id of a request that has begun -> its context length after its last row."""
        self._paused: set[int] = set()
        self._last_ns = 0
        self._ids: list[str] = []
        settings = recording.header.settings
        self._has_gate = bool({"batching", "preset"} & settings.keys()) and settings.get("batching") != "continuous"

    def run(self) -> Shown:
        model, begin_ns, end_ns = self._metrics.model, None, 0
        before = expose(Metrics(model)).decode()
        for event in self._recording.events():
            match event:
                case Arrival():
                    begin_ns = event.arrival_ns if begin_ns is None else begin_ns
                    self._arrive(event)
                case StepDone():
                    begin_ns = event.planned_ns if begin_ns is None else begin_ns
                    end_ns = event.ended_ns
                    self._step(event)
                case Departure():
                    end_ns = max(end_ns, event.at_ns)
                    self._depart(event)
                case Lost() | Restart():
                    self._forget_unended()
        explanations = self._journal.explain_all(self._ids, lambda: end_ns)
        after = expose(self._metrics).decode()
        return Shown(explanations=explanations, before=before, after=after, begin_ns=begin_ns or 0, end_ns=end_ns)

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.queued_ns is None or arrival.id in self._arrivals:
            return
        request = Request(
            request_id=str(arrival.id),
            prompt_token_ids=(0,) * arrival.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max(1, arrival.max_tokens)),
            arrival_ns=arrival.arrival_ns,
            tenant=arrival.tenant,
            background=arrival.background,
            waits=arrival.waits,
        )
        self._arrivals[arrival.id] = arrival
        self._journal.on_queued(request, arrival.queued_ns)
        if arrival.background:
            self._background.add(arrival.id)
        else:
            self._ids.append(request.request_id)
        if self._has_gate and not self._running:
            self._journal.on_news(PlanNews(arrival.queued_ns, WaitReason.GATE, (), ()))

    def _step(self, step: StepDone) -> None:
        here = {row.id for row in step.rows}
        absent = [number for number in self._running if number not in here and number not in self._paused]
        preempted = [number for number in absent if self._is_preempted(number)]
        self._paused.update(preempted)
        pauses = [Preemption(str(number), PreemptReason.MEMORY, self._running[number]) for number in preempted]
        self._journal.on_news(PlanNews(step.planned_ns, step.waits_for, list(self._admissions(step)), pauses))
        stats = self._stats(step, [number for number in absent if number not in self._paused])
        self._journal.on_step(stats)
        self._metrics.on_step(stats)
        self._last_ns = step.ended_ns

    def _admissions(self, step: StepDone) -> Iterator[Admission]:
        for row in step.rows:
            if row.id not in self._arrivals:
                continue
            if row.id not in self._running or row.id in self._paused:
                num_tokens = max(self._arrivals[row.id].num_prompt_tokens, self._running.get(row.id, 0))
                self._paused.discard(row.id)
                yield Admission(str(row.id), num_tokens, row.context_len)
            self._running[row.id] = row.context_len + row.query_len

    def _forget_unended(self) -> None:
        """Forget the requests whose ends the recording may lack."""
        ends = self._departures
        self._arrivals = {number: arrival for number, arrival in self._arrivals.items() if number in ends}
        self._running = {number: length for number, length in self._running.items() if number in ends}
        self._ids = [request_id for request_id in self._ids if int(request_id) in ends]

    def _is_preempted(self, number: int) -> bool:
        """Return whether a running request without a row was preempted, rather than left out of one step."""
        departure = self._departures.get(number)
        return departure is not None and departure.num_preemptions > 0

    def _stats(self, step: StepDone, resting: Sequence[int]) -> StepStats:
        rows = [RowPlan(str(row.id), row.context_len, row.query_len, (), row.samples) for row in step.rows if row.id != NOBODY]
        background = {row.id for row in step.rows if row.id in self._background}
        is_apart = all(row.id in background or row.query_len > max(1, row.samples) for row in step.rows)
        rested = {number for number in resting if is_apart or number in self._background}
        counts = StepCounts(
            num_rows=len(rows),
            num_tokens=sum(row.query_len for row in step.rows),
            num_sampled_tokens=sum(min(row.samples, 1) + row.num_accepted for row in step.rows if row.id != NOBODY),
            num_background_tokens=sum(row.query_len for row in step.rows if row.id in background),
            num_padding_tokens=sum(row.query_len for row in step.rows if row.id == NOBODY),
            waits_for=step.waits_for,
            guesses={str(row.id): (row.samples - 1, row.num_accepted) for row in step.rows if row.samples > 1},
            guess_sources={str(row.id): "unknown" for row in step.rows if row.samples > 1},
            rested=[str(number) for number in resting if number in rested],
            sat_out=[str(number) for number in resting if number not in rested],
            prefills=[row for row in rows if row.query_len > max(1, row.samples)],
        )
        num_blocks = self._recording.header.capacity.num_blocks - 1
        return StepStats(
            step_id=step.step_id,
            started_ns=max(step.planned_ns, self._last_ns),
            ended_ns=step.ended_ns,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            num_blocks_total=num_blocks,
            num_blocks_free=step.num_blocks_free,
            num_blocks_cached=step.num_blocks_cached,
            counts=counts,
            parts_ns=step.parts_ns,
            planned_ns=step.planned_ns,
            rows=rows,
            waited_ns=step.waited_ns,
        )

    def _depart(self, departure: Departure) -> None:
        arrival = self._arrivals.pop(departure.id, None)
        self._running.pop(departure.id, None)
        self._paused.discard(departure.id)
        if arrival is None:
            self._metrics.count_rejected(departure.reject_reason)
            return
        stats = RequestStats(
            request_id=str(departure.id),
            tenant=arrival.tenant,
            arrival_ns=arrival.arrival_ns,
            first_scheduled_ns=None,
            first_token_ns=departure.first_token_ns,
            ended_ns=departure.at_ns,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_cached_tokens=departure.num_cached_tokens,
            num_generated_tokens=departure.num_output_tokens,
            num_preemptions=departure.num_preemptions,
            finish_reason=departure.reason,
            reject_reason=departure.reject_reason,
            waits=arrival.waits,
            background=arrival.background,
            key=arrival.tenant,
        )
        self._journal.on_finish(stats)
        self._metrics.on_finish(stats)
