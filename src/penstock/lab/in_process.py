"""Sends the jobs of a workload to a model in this process, with the same pacing and records as over HTTP.

`penstock bench --in-process` calls `drive` with a `sender` to the Python API. The event loop runs beside the model's own
threads.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.lab.driving import SendJob
from penstock.lab.records import End, Record
from penstock.lab.workload import Job, Workload
from penstock.types.errors import PenstockError, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    new_text: str


class AskModel(Protocol):
    """A function that asks a model for exactly `num_output_tokens` and yields its progress. Closing it early ends the request.

    `prompt`: token ids, or alternating user and assistant messages that end with the user's. Raises PenstockError.
    """

    def __call__(self, prompt: Sequence[str] | Sequence[int], num_output_tokens: int) -> AsyncGenerator[Progress, None]: ...


def sender(ask: AskModel) -> SendJob:
    """Return a function that sends a job to a model in this process, for `drive`."""
    return partial(_ask, ask)


def notes_of(workload: Workload) -> tuple[str, ...]:
    """Return what the model in this process does not know of the jobs."""
    if any(job.tenant or job.priority or job.deadline_ns is not None for job in workload.jobs):
        return ("The engine in this process got all requests without the workload's tenants, priorities and deadlines.",)
    return ()


async def _ask(ask: AskModel, job: Job, texts: Sequence[str], record: Record, now_ns: Callable[[], int]) -> None:
    prompt = texts or job.prompt_token_ids
    if not prompt:
        raise PenstockError("A job has neither a text nor token ids.", remedy="Make texts with `lab.prompts.write_prompts`.")
    record.gaps_ns = gaps_ns = array("q")
    before_ns: int | None = None
    pieces: list[str] = []
    async with aclosing(ask(prompt, job.num_output_tokens)) as answer:
        async for progress in answer:
            at_ns = now_ns()
            record.num_prompt_tokens = progress.num_prompt_tokens
            record.num_cached_tokens = progress.num_cached_tokens
            record.num_output_tokens = progress.num_output_tokens
            if record.first_ns is None:
                record.first_ns = at_ns
            if progress.new_text:
                pieces.append(progress.new_text)
                if before_ns is not None:
                    gaps_ns.append(at_ns - before_ns)
                before_ns = at_ns
            if job.cancelled_after_tokens is not None and progress.num_output_tokens >= job.cancelled_after_tokens:
                record.end = End.CANCELLED
                break
    record.text = "".join(pieces)
    if record.end is End.OK and record.num_output_tokens != job.num_output_tokens:
        record.end = End.FAILED
        record.error = f"{counted(record.num_output_tokens, 'token')} instead of {job.num_output_tokens}."
