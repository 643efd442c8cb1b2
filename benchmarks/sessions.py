"""A server of a comparison while it runs: started, loaded, measured and stopped, for `peers.py` and others.
The load is the lab's HTTP client in a closed loop, whose answers must have the tokens that were asked for.

One at a time, in a group of processes of its own. Knows no contender by name, and installs nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from processes import Contender, ask_worker, started
from usage import ProcessGroup

from penstock.lab.client import SendOptions, send
from penstock.lab.pacing import Pace
from penstock.lab.records import End, Record, Sent
from penstock.lab.target import Target
from penstock.lab.workload import Job, Workload

ANSWER_TIMEOUT_S = 900.0
"""For all jobs of one run of a worker, which answers only at its end."""
SERVED_NAME = "model"
WARM_UP_TOKENS = 8


class LoadError(RuntimeError):
    """A server that refused, broke off, or answered with other than the tokens asked for."""


class ServerSession(ProcessGroup):
    """Loaded over HTTP."""

    def __init__(self, process: subprocess.Popen[bytes], start_s: float, url: str, model: str) -> None:
        super().__init__(process, start_s)
        self.url, self.model = url, model

    def replay(self, jobs: Sequence[Job], concurrency: int) -> Sent:
        return replay(self.url, self.model, jobs, concurrency)


class WorkerSession(ProcessGroup):
    """Loaded in process: one line of JSON with the jobs in, one line with the times out, as `drive_openvino.py` describes."""

    def replay(self, jobs: Sequence[Job], concurrency: int) -> Sent:
        order = {
            "jobs": [[job.prompt_token_ids or job.prompt, job.num_output_tokens] for job in jobs],
            "concurrency": concurrency,
        }
        answer = ask_worker(self.process, order, ANSWER_TIMEOUT_S)
        records = [_record(index, reply) for index, reply in enumerate(answer["replies"])]
        for record, job in zip(records, jobs, strict=True):
            if record.num_output_tokens != job.num_output_tokens:
                raise LoadError(f"{record.num_output_tokens} tokens instead of {job.num_output_tokens}")
        return Sent(records=records, duration_ns=round(answer["seconds"] * 1e9))


def _record(index: int, reply: Mapping[str, Any]) -> Record:
    start_ns, *times_ns = (round(at_s * 1e9) for at_s in (reply["start_s"], *reply["token_times_s"]))
    return Record(
        index=index,
        intended_ns=start_ns,
        sent_ns=start_ns,
        first_ns=times_ns[0],
        ended_ns=times_ns[-1],
        gaps_ns=[after - before for before, after in pairwise(times_ns)],
        num_prompt_tokens=reply["num_prompt_tokens"],
        num_output_tokens=reply["num_tokens"],
        text=reply["text"],
    )


def replay(url: str, model: str, jobs: Sequence[Job], concurrency: int) -> Sent:
    """All jobs in order, `concurrency` at a time, with the answers' texts. Raises LoadError if one fails."""
    workload, target = Workload(name="replay", jobs=jobs), Target(url=url, model=model)
    return answered(workload, target, pace=Pace(concurrency=concurrency), options=SendOptions(keeps_text=True))


def answered(workload: Workload, target: Target, *, pace: Pace | None = None, options: SendOptions | None = None) -> Sent:
    """Send the workload. Raises LoadError if a request fails."""
    sent = send(workload, target, pace=pace, options=options)
    for record in sent.records:
        if record.end is not End.OK:
            raise LoadError(f"{record.http_status or ''} {record.error}".strip())
    return sent


def warm_up(session: Session, jobs: Sequence[Job], concurrency: int) -> None:
    """Replay the beginning of the first replies, so that no run pays for one-time work."""
    session.replay([replace(job, num_output_tokens=WARM_UP_TOKENS) for job in jobs[:concurrency]], concurrency)


@contextmanager
def running(contender: Contender, log: Path) -> Iterator[Session]:
    """The contender from its start, ready to serve, until the end of the block. Raises ContenderError with the log's end."""
    start_s = time.perf_counter()
    with started(contender, log) as (process, port):
        if contender.is_server:
            yield ServerSession(process, start_s, f"http://127.0.0.1:{port}", SERVED_NAME)
        else:
            yield WorkerSession(process, start_s)


@contextmanager
def serving(
    *words: str | Path,
    penstock: Sequence[str | Path] = (sys.executable, "-m", "penstock"),
    environ: Mapping[str, str] | None = None,
) -> Iterator[ServerSession]:
    """`penstock serve` with these words, ready, until the end of the block. Its model is called `SERVED_NAME`."""
    command = [*penstock, "serve", *words, "--port", "{port}", "--served-model-name", SERVED_NAME]
    contender = Contender("penstock", command, health="/ready", environ=environ or {})
    with tempfile.TemporaryDirectory() as folder, running(contender, Path(folder) / "log") as session:
        assert isinstance(session, ServerSession)
        yield session


Session = ServerSession | WorkerSession
"""Either can `replay` jobs; that is all a measurement needs to know."""
