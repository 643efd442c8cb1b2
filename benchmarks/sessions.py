"""A server of a comparison while it runs: started, loaded, measured and stopped, for `peers.py`.

One at a time, in a group of processes of its own. Knows no contender by name, and installs nothing.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from load import Job, LoadError, Reply, Run, replay

READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 900.0
"""For all jobs of one run of a worker, which answers only at its end."""
STOP_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 5.0
SERVED_NAME = "model"
_POLL_S = 0.01
_PIPE_BYTES = 1 << 16
_MB = 1e6


class ContenderError(RuntimeError):
    """A contender that did not start, ended early or answered wrongly."""


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

    def replay(self, jobs: Sequence[Job], concurrency: int) -> Run:
        return replay(self.url, self.model, jobs, concurrency)


class WorkerSession(ProcessGroup):
    """Loaded in process: one line of JSON with the jobs in, one line with the times out, as `drive_openvino.py` describes."""

    def replay(self, jobs: Sequence[Job], concurrency: int) -> Run:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"jobs": [[job.prompt, job.max_tokens] for job in jobs], "concurrency": concurrency}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        line = _read_line(self.process.stdout, ANSWER_TIMEOUT_S)
        if not line:
            raise ContenderError("the worker ended")
        answer = json.loads(line)
        replies = [Reply(**reply | {"token_times_s": tuple(reply["token_times_s"])}) for reply in answer["replies"]]
        for reply, job in zip(replies, jobs, strict=True):
            if reply.num_tokens != job.max_tokens:
                raise LoadError(f"{reply.num_tokens} tokens instead of {job.max_tokens}")
        return Run(replies, answer["seconds"], 0.0)


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
