"""A server under comparison as a process: starts it, awaits readiness, ends it. For `sessions.py`; sends no load."""

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
from typing import IO, Any

from usage import MB, size_bytes

READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 5.0
_POLL_S = 0.01
_PIPE_BYTES = 1 << 16


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
        return sum(map(size_bytes, self.installed)) / MB


@contextmanager
def started(contender: Contender, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """(process, port) of a contender that is ready, until the end of the block. Raises ContenderError with the log's end."""
    port = _free_port()
    pipe = None if contender.is_server else subprocess.PIPE
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(word).replace("{port}", str(port)) for word in contender.command],
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or file,
            stderr=file,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **contender.environ},  # pip leaves byte code, too
            cwd=log.parent,  # nothing in the caller's folder is imported by chance
            start_new_session=True,
        )
        try:
            _wait_until_ready(contender, process, port)
            yield process, port
        except ContenderError as error:
            raise ContenderError(f"{error}; {log}: {log.read_text(errors='replace')[-1000:]}") from error
        finally:
            _stop(process)


def _wait_until_ready(contender: Contender, process: subprocess.Popen[bytes], port: int) -> None:
    if not contender.is_server:
        assert process.stdout is not None
        if read_line(process.stdout, READY_TIMEOUT_S).strip() != b"ready":
            raise ContenderError("the worker did not start")
        return
    give_up_s = time.perf_counter() + READY_TIMEOUT_S
    while time.perf_counter() < give_up_s:
        if process.poll() is not None:
            raise ContenderError(f"the server ended with {process.returncode} before it was ready")
        if _status(port, contender.health) == 200:
            return
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


def read_line(stream: IO[bytes], timeout_s: float) -> bytes:
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


def ask_worker(process: subprocess.Popen[bytes], order: object, timeout_s: float) -> Any:
    """Send a line of JSON to a worker, and return its answer. Raises ContenderError if it ended, or after the timeout."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    if not (line := read_line(process.stdout, timeout_s)):
        raise ContenderError("the worker ended")
    return json.loads(line)


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
