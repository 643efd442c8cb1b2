"""Idle connections beyond the limit of open files: monitors and clients are answered, and the log stays short."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.e2e.process import COMPLETIONS, TIMEOUT_S, RealServer, serving

pytestmark = pytest.mark.model

NUM_IDLE = 400
MAX_WAIT_S = 10.0
"""For /health; two or three times half a second are due, until the idle ones may be closed."""


@contextlib.contextmanager
def crowd(server: RealServer, size: int = NUM_IDLE) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        yield [stack.enter_context(socket.create_connection(address, timeout=TIMEOUT_S)) for _ in range(size)]


def check_served(server: RealServer) -> None:
    start_s = time.monotonic()
    assert server.get("/health")
    assert time.monotonic() - start_s < MAX_WAIT_S
    assert server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2})["usage"]["completion_tokens"] == 2


def num_warnings(server: RealServer) -> int:
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log
    return log.count("WARNING")


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_under_a_low_hard_limit_idle_connections_leave_for_requests(weights: None, tmp_path: Path) -> None:
    with serving(tmp_path, prefix=("bash", "-c", 'ulimit -n 256; exec "$@"', "limited")) as server:
        start_s = time.monotonic()
        with crowd(server) as connections:
            check_served(server)
            assert sum(map(is_closed, connections)) >= NUM_IDLE - 256
        check_served(server)
        assert 1 <= num_warnings(server) <= 2 + (time.monotonic() - start_s)
        assert server.end()[0] == 0


def test_a_low_soft_limit_is_raised_to_the_hard_one(weights: None, tmp_path: Path) -> None:
    with serving(tmp_path, prefix=("bash", "-c", 'ulimit -Sn 256; exec "$@"', "limited")) as server:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        if hard < 2 * NUM_IDLE:
            pytest.skip(f"the hard limit of open files is {hard} here")
        assert soft == hard
        with crowd(server) as connections:
            check_served(server)
            assert not any(map(is_closed, connections))
        assert num_warnings(server) == 0


def test_descriptors_that_are_gone_unforeseen_do_not_fill_the_log(weights: None, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, hard))
        start_s = time.monotonic()
        # Each takes the place of one that has been idle for half a second, so that a larger crowd takes longer.
        with crowd(server, 120):
            check_served(server)
        check_served(server)
        assert 1 <= num_warnings(server) <= 2 + (time.monotonic() - start_s)
        assert "Too many open files" in server.log.read_text()
        assert server.end()[0] == 0
