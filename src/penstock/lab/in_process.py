"""A workload for a model in this process: the same paces and the same records as the HTTP client's, without HTTP.

`drive` takes anything that can `Ask`, since the lab knows no way to load a model; `penstock bench --in-process` gives it the
Python API. Runs on an event loop, beside the model's own threads. Computes no figures.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from penstock.lab.pacing import Pace, Pacer, Tally, WarmUp
from penstock.lab.records import End, Record, Sent
from penstock.lab.workload import Job, Workload
from penstock.types.errors import PenstockError, counted

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An answer as far as it has come."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    new_text: str
    """The part that came since the progress before."""


class Ask(Protocol):
    """Asks a model for exactly so many tokens, and yields whenever there is more. Closing it early ends the request.

    `prompt`: token ids, or the texts of the user and of the model in turn; the last is the user's. Raises PenstockError.
    """

    def __call__(self, prompt: Sequence[str] | Sequence[int], num_output_tokens: int) -> AsyncGenerator[Progress, None]: ...


async def drive(
    workload: Workload,
    ask: Ask,
    *,
    pace: Pace | None = None,
    warm_up: WarmUp | None = None,
    on_end: Callable[[], object] | None = None,
    keeps_text: bool = False,
) -> Sent:
    """Ask for every job, and wait until the last has ended. A request that fails is a record, and the run goes on.

    If the task is cancelled, as Ctrl-C does to `asyncio.run`, it returns what there is.
    """
    driving = _Driving(workload, ask, pace or Pace(), warm_up or WarmUp(), on_end or (lambda: None), keeps_text)
    return await driving.run()


class _Driving:
    """A run while it goes on. Instants are nanoseconds from its begin."""

    def __init__(
        self, workload: Workload, ask: Ask, pace: Pace, warm_up: WarmUp, on_end: Callable[[], object], keeps_text: bool
    ) -> None:
        self._jobs = workload.jobs
        self._ask = ask
        self._keeps_text = keeps_text
        self._pacer = Pacer(workload, pace)
        self._tally = Tally(workload, warm_up, on_end)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._error: BaseException | None = None
        """A fault of ours, or of `ask`, which ends the run."""
        self._has_changed = asyncio.Event()
        self._said: dict[int, list[str]] = {}
        """By a job that others continue: the texts up to its answer."""
        self._unfinished: list[Record] = []
        self._begin_ns = time.perf_counter_ns()

    def _now_ns(self) -> int:
        return time.perf_counter_ns() - self._begin_ns

    async def run(self) -> Sent:
        try:
            while not self._pacer.is_over:
                while (taken := self._pacer.take(self._now_ns())) is not None:
                    self._tasks[taken[0]] = task = asyncio.create_task(self._run_job(*taken))
                    task.add_done_callback(self._look_at)
                await self._until_due()
                if self._error is not None:
                    raise self._error
        except asyncio.CancelledError:
            pass  # The records say what there is.
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        return self._tally.sent(self._unfinished)

    async def _until_due(self) -> None:
        """Until a job is due, or one has ended."""
        next_ns = self._pacer.next_ns()
        loop = asyncio.get_running_loop()
        timer = (
            None if next_ns is None else loop.call_later(max(0, next_ns - self._now_ns()) / _NS_PER_S, self._has_changed.set)
        )
        await self._has_changed.wait()
        self._has_changed.clear()
        if timer is not None:
            timer.cancel()

    def _look_at(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._has_changed.set()

    async def _run_job(self, index: int, intended_ns: int) -> None:
        job = self._jobs[index]
        record = Record(index=index, intended_ns=intended_ns, sent_ns=self._now_ns(), tenant=job.tenant)
        texts: list[str] = []
        try:
            left_s = None
            if job.cancelled_ns is not None:
                left_s = max(0, intended_ns + job.cancelled_ns - job.arrival_ns - self._now_ns()) / _NS_PER_S
            async with asyncio.timeout(left_s):
                await self._read(job, record, texts)
        except TimeoutError:
            record.end = End.CANCELLED
        except asyncio.CancelledError:
            record.ended_ns, record.end, record.error = self._now_ns(), End.CANCELLED, "The run was over."
            self._unfinished.append(record)
            raise
        except PenstockError as error:
            record.end, record.error = End.FAILED, str(error)
        record.ended_ns = self._now_ns()
        if record.end is End.OK and record.num_output_tokens != job.num_output_tokens:
            record.end = End.FAILED
            record.error = f"{counted(record.num_output_tokens, 'token')} instead of {job.num_output_tokens}."
        self._end(record, "".join(texts))

    async def _read(self, job: Job, record: Record, texts: list[str]) -> None:
        """Fill the record while the answer comes."""
        gaps_ns = array("q")
        record.gaps_ns = gaps_ns
        before_ns: int | None = None
        async with aclosing(self._ask(self._prompt(job), job.num_output_tokens)) as answer:
            async for progress in answer:
                now_ns = self._now_ns()
                record.num_prompt_tokens = progress.num_prompt_tokens
                record.num_cached_tokens = progress.num_cached_tokens
                record.num_output_tokens = progress.num_output_tokens
                if record.first_ns is None:
                    record.first_ns = now_ns
                if progress.new_text:
                    texts.append(progress.new_text)
                    if before_ns is not None:
                        gaps_ns.append(now_ns - before_ns)
                    before_ns = now_ns
                if job.cancelled_after_tokens is not None and progress.num_output_tokens >= job.cancelled_after_tokens:
                    record.end = End.CANCELLED
                    return

    def _prompt(self, job: Job) -> Sequence[str] | Sequence[int]:
        if job.prompt is None:
            if not job.prompt_token_ids:
                raise PenstockError(
                    "A job has neither a text nor token ids.", remedy="Make texts with `lab.prompts.write_prompts`."
                )
            return job.prompt_token_ids
        return [*(self._said.get(job.after, ()) if job.after is not None else ()), job.prompt]

    def _end(self, record: Record, text: str) -> None:
        index, now_ns = record.index, record.ended_ns
        job = self._jobs[index]
        lost: list[int] = []
        if record.end in (End.OK, End.CANCELLED):
            if self._pacer.continues(index) and job.prompt is not None:
                self._said[index] = [*(self._said.get(job.after, ()) if job.after is not None else ()), job.prompt, text]
            self._pacer.end(index, now_ns)
        else:
            lost = self._pacer.fail(index, now_ns)
        if self._keeps_text:
            record.text = text
        self._tally.add(record)
        for turn in lost:
            self._tally.add_lost_turn(turn, now_ns)
        del self._tasks[index]
        self._has_changed.set()
