"""A server of a comparison while it runs: started, loaded, measured and stopped, for `peers.py` and others.
The load is the lab's HTTP client in a closed loop, whose answers must have the tokens that were asked for.

One at a time, in a group of processes of its own. Knows no contender by name, and installs nothing.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from penstock.lab.client import SendOptions, send
from penstock.lab.pacing import Pace
from penstock.lab.records import End, Record, Sent
from penstock.lab.target import Target
from penstock.lab.workload import Job, Workload

READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 900.0
"""For all jobs of one run of a worker, which answers only at its end."""
STOP_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 5.0
SERVED_NAME = "model"
_POLL_S = 0.01
_PIPE_BYTES = 1 << 16
_MB = 1e6
WARM_UP_TOKENS = 8


class ContenderError(RuntimeError):
    """A contender that did not start, ended early or answered wrongly."""


class LoadError(RuntimeError):
    """A server that refused, broke off, or answered with other than the tokens asked for."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: Sequence[str | Path]
    """`{port}` stands for the port to listen on. A contender without it is a worker: see `WorkerSession`."""
    health: str = "/health"
    """Answers 200 once requests can be served."""
    environ: Mapping[str, str] = field(default_factory=dict)
    installed: Sequence[Path] = ()
    """Files and folders whose size is the contender's."""

    @property
    def is_server(self) -> bool:
        return any("{port}" in str(word) for word in self.command)

    def installed_mb(self) -> float:
        return sum(map(size_bytes, self.installed)) / _MB


class ProcessGroup:
    """A contender that runs, and what its processes use."""

    def __init__(self, process: subprocess.Popen[bytes], start_s: float) -> None:
        self.process = process
        self.ready_s = time.perf_counter() - start_s

    def resident_mb(self) -> float:
        """Resident memory of all its processes now; a page that n of them share counts 1/n for each."""
        return sum(_pss_bytes(pid) for pid in family(self.process.pid)) / _MB

    def cpu_s(self) -> float:
        """CPU time that its processes have used so far."""
        return sum(_cpu_s(pid) for pid in family(self.process.pid))


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
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"jobs": [[job.prompt, job.num_output_tokens] for job in jobs], "concurrency": concurrency}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        line = _read_line(self.process.stdout, ANSWER_TIMEOUT_S)
        if not line:
            raise ContenderError("the worker ended")
        answer = json.loads(line)
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
    sent = send(
        Workload(name="replay", jobs=jobs),
        Target(url=url, model=model),
        pace=Pace(concurrency=concurrency),
        options=SendOptions(keeps_text=True),
    )
    for record in sent.records:
        if record.end is not End.OK:
            raise LoadError(f"{record.http_status or ''} {record.error}".strip())
    return sent


def warm_up(session: Session, jobs: Sequence[Job], concurrency: int) -> None:
    """The beginning of the first replies, so that no run pays for what a server does only once."""
    session.replay([replace(job, num_output_tokens=WARM_UP_TOKENS) for job in jobs[:concurrency]], concurrency)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(sent: Sent) -> dict[str, float]:
    """Throughput over the whole run, and latencies in milliseconds, from the sending."""
    records, seconds = sent.records, sent.duration_ns / 1e9
    num_tokens = sum(record.num_output_tokens for record in records)
    firsts = [record.sent_ns if record.first_ns is None else record.first_ns for record in records]
    samples_ns = {
        "ttft": [first_ns - record.sent_ns for first_ns, record in zip(firsts, records, strict=True)],
        "tpot": [sum(record.gaps_ns) / max(1, record.num_output_tokens - 1) for record in records],
        "itl": [gap for record in records for gap in record.gaps_ns] or [0.0],
        "e2e": [record.ended_ns - record.sent_ns for record in records],
    }
    figures = {
        "output_tokens_per_s": num_tokens / seconds,
        "prompt_tokens": sum(record.num_prompt_tokens for record in records),
        "output_tokens": num_tokens,
        "seconds": seconds,
        "client_cpu_s": sent.client_cpu_s,
    }
    for name, values in samples_ns.items():
        figures |= {f"{name}_p{percent}_ms": quantile(values, percent / 100) / 1e6 for percent in (50, 90, 99)}
    return figures


Session = ServerSession | WorkerSession
"""Either can `replay` jobs; that is all a measurement needs to know."""


def _read_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """The next line, or what there is before the end of the stream. Raises ContenderError after the timeout.

    The worker writes a line only when asked to, so nothing of a next line is ever read.
    """
    give_up_s = time.perf_counter() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([stream], [], [], max(0.0, give_up_s - time.perf_counter()))[0]:
            raise ContenderError(f"no answer from the worker in {timeout_s:.0f} s")
        if not (piece := os.read(stream.fileno(), _PIPE_BYTES)):
            break
        line += piece
    return line


@contextmanager
def running(contender: Contender, log: Path) -> Iterator[Session]:
    """The contender from its start, ready to serve, until the end of the block. Raises ContenderError with the log's end."""
    port = str(_free_port())
    command = [str(word).replace("{port}", port) for word in contender.command]
    pipe = None if contender.is_server else subprocess.PIPE
    with log.open("wb") as file:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or file,
            stderr=file,
            env={**os.environ, **contender.environ},
            cwd=log.parent,  # nothing in the caller's folder is imported by chance
            start_new_session=True,
        )
        try:
            yield _wait_until_ready(contender, process, start_s, int(port))
        except ContenderError as error:
            raise ContenderError(f"{error}; {log}: {log.read_text(errors='replace')[-1000:]}") from error
        finally:
            _stop(process)


def _wait_until_ready(contender: Contender, process: subprocess.Popen[bytes], start_s: float, port: int) -> Session:
    if not contender.is_server:
        assert process.stdout is not None
        if _read_line(process.stdout, READY_TIMEOUT_S).strip() != b"ready":
            raise ContenderError("the worker did not start")
        return WorkerSession(process, start_s)
    while time.perf_counter() < start_s + READY_TIMEOUT_S:
        if process.poll() is not None:
            raise ContenderError(f"the server ended with {process.returncode} before it was ready")
        if _status(port, contender.health) == 200:
            return ServerSession(process, start_s, f"http://127.0.0.1:{port}", SERVED_NAME)
        time.sleep(_POLL_S)
    raise ContenderError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")


def _status(port: int, path: str) -> int:
    """HTTP status of a GET, 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group of processes, first politely."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if process.poll() is None:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(
            int(GONE_TIMEOUT_S / _POLL_S)
        ):  # the next contender must not share the machine with what is being torn down
            os.killpg(process.pid, 0)
            time.sleep(_POLL_S)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _cpu_s(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def size_bytes(path: Path) -> int:
    """Size of a file, or of the files below a folder, byte code left out."""
    if path.is_file():
        return 0 if path.is_symlink() else path.stat().st_size
    return sum(size_bytes(child) for child in path.iterdir() if child.name != "__pycache__") if path.is_dir() else 0
