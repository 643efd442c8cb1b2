"""The loop that sends a workload: starts each job when it is due and collects the records.

`client.send` calls it to send over HTTP; `penstock bench --in-process` and `tune --verify`, with the `sender` of `in_process`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.lab.pacing import Pace, Pacer, WarmUp
from penstock.lab.records import End, Record, Sent
from penstock.lab.workload import NS_PER_S, Job, Workload
from penstock.types.errors import PenstockError


class SendJob(Protocol):
    """A function that sends one job and fills in its record while the answer arrives. Cancelling the call ends the request.

    `texts`: alternating user and assistant messages, with the job's own prompt last; empty for a prompt of token ids. `now_ns`:
    clock for the record. If the call raises PenstockError, the job failed with that message.
    """

    async def __call__(self, job: Job, texts: Sequence[str], record: Record, now_ns: Callable[[], int]) -> None: ...


async def drive(
    workload: Workload,
    send: SendJob,
    *,
    pace: Pace | None = None,
    warm_up: WarmUp | None = None,
    on_end: Callable[[], object] | None = None,
    keeps_text: bool = False,
    max_s: float | None = None,
) -> Sent:
    """Send every job with `send` and wait until the last has ended. A failed request becomes a record, and the run goes on.

    The run ends early, with the records so far, after `max_s` seconds or if its task is cancelled (Ctrl-C in `asyncio.run`).
    """
    driving = _Driving(workload, send, pace or Pace(), warm_up or WarmUp(), on_end or (lambda: None), keeps_text)
    try:
        async with asyncio.timeout(max_s):
            await driving.run()
    except (TimeoutError, asyncio.CancelledError):
        pass  # The outcome has the unfinished records.
    finally:
        await driving.stop()
    return driving.outcome()


class _Driving:
    def __init__(
        self, workload: Workload, send: SendJob, pace: Pace, warm_up: WarmUp, on_end: Callable[[], object], keeps_text: bool
    ) -> None:
        self._jobs = workload.jobs
        self._send = send
        self._warm_up = warm_up
        self._on_end = on_end
        self._keeps_text = keeps_text
        self._pacer = Pacer(workload, pace)
        self._records: list[Record] = []
        self._unfinished: list[Record] = []
        self._num_warm_up = 0
        self._last_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        """An unexpected exception, here or in `send`, which ends the run."""
        self._has_changed = asyncio.Event()
        self._histories: dict[int, tuple[list[str], int]] = {}
        """Index of a job -> the conversation including its answer, and how many next turns have not begun."""
        self._begin_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._begin_ns

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._pacer.is_over:
            while (taken := self._pacer.take(self.now_ns())) is not None:
                task = asyncio.create_task(self._run_job(*taken))
                self._tasks.add(task)
                task.add_done_callback(self._on_task_done)
            next_ns = self._pacer.next_ns()
            timer = None
            if next_ns is not None:
                timer = loop.call_later(max(0, next_ns - self.now_ns()) / NS_PER_S, self._has_changed.set)
            await self._has_changed.wait()
            self._has_changed.clear()
            if timer is not None:
                timer.cancel()
            if self._error is not None:
                raise self._error

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
        self._has_changed.set()

    async def _run_job(self, index: int, intended_ns: int) -> None:
        job = self._jobs[index]
        record = Record(index=index, intended_ns=intended_ns, sent_ns=self.now_ns(), tenant=job.tenant)
        texts = [] if job.prompt is None else [*self._history_of(job), job.prompt]
        try:
            if job.cancelled_ns is None:
                await self._send(job, texts, record, self.now_ns)
            else:
                left_ns = intended_ns + job.cancelled_ns - job.arrival_ns - self.now_ns()
                if left_ns <= 0:
                    raise TimeoutError
                async with asyncio.timeout(left_ns / NS_PER_S):
                    await self._send(job, texts, record, self.now_ns)
        except TimeoutError:
            record.ended_ns, record.end = 0, End.CANCELLED
        except asyncio.CancelledError:
            record.ended_ns, record.end, record.error = self.now_ns(), End.CANCELLED, "The run was over."
            self._unfinished.append(record)
            raise
        except PenstockError as error:
            record.end, record.error = End.FAILED, str(error)
        record.ended_ns = record.ended_ns or self.now_ns()
        self._end(record, texts)

    def _history_of(self, job: Job) -> Sequence[str]:
        if job.after is None or job.after not in self._histories:
            return ()
        texts, num_turns = self._histories.pop(job.after)
        if num_turns > 1:
            self._histories[job.after] = texts, num_turns - 1
        return texts

    def _end(self, record: Record, texts: list[str]) -> None:
        index, now_ns = record.index, record.ended_ns
        lost: list[int] = []
        if record.end in (End.OK, End.CANCELLED):
            num_turns = self._pacer.end(index, now_ns)
            if num_turns and texts:
                self._histories[index] = [*texts, record.text], num_turns
        else:
            lost = self._pacer.fail(index, now_ns)
        if not self._keeps_text:
            record.text = ""
        self._add(record)
        for turn in lost:
            self._add(Record.lost(turn, now_ns, self._jobs[turn].tenant))

    def _add(self, record: Record) -> None:
        self._last_ns = max(self._last_ns, record.ended_ns)
        if self._warm_up.covers(record.index, record.intended_ns):
            self._num_warm_up += 1
        else:
            self._records.append(record)
        self._on_end()

    def outcome(self) -> Sent:
        return Sent(
            records=sorted(self._records, key=lambda record: record.index),
            duration_ns=self._last_ns,
            num_warm_up=self._num_warm_up,
            unfinished=self._unfinished,
            num_unsent=len(self._jobs) - len(self._records) - self._num_warm_up - len(self._unfinished),
        )
