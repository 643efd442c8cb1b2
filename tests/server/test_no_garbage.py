"""All that a request took is free as soon as it has ended: nothing of it waits for the garbage collector.

Objects in a circle stay until the collector looks through the oldest ones, which it does when a quarter as many have come as
live already. Where tens of thousands live that is megabytes, after minutes or hours.
"""

import asyncio
import contextlib
import gc
import itertools
import socket
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from penstock import fast_json
from penstock.calls.call import Call
from penstock.machine import is_free_threaded
from support.server.harness import GatedExecutor, LiveServer, wait_until
from support.work_time import others_are_no_garbage

COMPLETION = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
NUM_REQUESTS = 60
CLOSE = "Connection: close\r\n"


def ask(connection: socket.socket, path: str, body: bytes, headers: str = "") -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def served(path: str, question: dict[str, object], status: int = 200) -> Callable[[LiveServer], None]:
    """A request on a connection of its own, answered whole."""

    def once(server: LiveServer) -> None:
        with connect(server) as connection:
            ask(connection, path, fast_json.dumps(question), CLOSE)
            assert read_all(connection).startswith(f"HTTP/1.1 {status} ".encode())

    return once


def kept_alive(server: LiveServer) -> None:
    """Two streams on one connection."""
    with connect(server) as connection:
        for headers in ("", CLOSE):
            ask(connection, "/v1/completions", fast_json.dumps(COMPLETION | {"stream": True}), headers)
            data = b""
            while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                data += connection.recv(1 << 16)


def abandoned(server: LiveServer) -> None:
    """The client leaves after the first bytes of a long answer."""
    with connect(server) as connection:
        ask(connection, "/v1/completions", fast_json.dumps(COMPLETION | {"stream": True, "max_tokens": 1500}))
        assert connection.recv(100)


def leaves_with_requests_behind(server: LiveServer) -> None:
    with connect(server) as connection:
        for _ in range(3):
            ask(connection, "/v1/completions", fast_json.dumps(COMPLETION | {"stream": True, "max_tokens": 1500}))
        assert connection.recv(100)


def overdue(server: LiveServer) -> None:
    with connect(server) as connection:
        ask(connection, "/v1/completions", fast_json.dumps(COMPLETION | {"max_tokens": 1500}), CLOSE + "X-Deadline-Ms: 1\r\n")
        read_all(connection)


def new_grammar() -> Callable[[LiveServer], None]:
    """Each request has another grammar, so that each is compiled."""
    numbers = itertools.count(1)

    def once(server: LiveServer) -> None:
        served("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": f"a{{{next(numbers)}}}"}})(server)

    return once


KINDS = {
    "known grammar": served("/v1/chat/completions", CHAT | {"structured_outputs": {"choice": ["yes"]}, "stream": True, "n": 2}),
    "new grammar": new_grammar(),
    "refused grammar": served("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "("}}, 400),
    "stream": served("/v1/completions", COMPLETION | {"stream": True}),
    "whole": served("/v1/completions", COMPLETION),
    "choices": served("/v1/completions", COMPLETION | {"n": 3, "stream": True, "temperature": 1}),
    "chat stream": served("/v1/chat/completions", CHAT | {"stream": True}),
    "chat": served("/v1/chat/completions", CHAT),
    "refused": served("/v1/completions", COMPLETION | {"max_tokens": -1}, 400),
    "no such path": served("/v1/nowhere", {}, 404),
    "kept alive": kept_alive,
    "client leaves": abandoned,
    "client leaves with requests behind": leaves_with_requests_behind,
    "overdue": overdue,
}


@pytest.fixture(scope="module", autouse=True)
def others_are_frozen() -> Iterator[None]:
    """Keep the collector from what is there already, so that it looks through what requests leave alone.

    Modules and other tests have hundreds of thousands of objects, and it looks through all of them several times in each test.
    """
    gc.collect()
    with others_are_no_garbage():
        yield


@contextmanager
def collected() -> Iterator[list[object]]:
    """The objects of the block that the collector has to free. The list is filled at the end."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def without_transports(found: list[object]) -> list[object]:
    """All but asyncio's transports of lost connections, which refer to methods of their own, and what these alone hold.

    That is 1 to 2 kB in 7 to 11 objects for each connection, by the version of Python.
    """
    of_transports: set[int] = set()
    ids, todo = set(map(id, found)), [thing for thing in found if isinstance(thing, asyncio.Transport)]
    while todo:
        thing = todo.pop()
        if id(thing) in ids and id(thing) not in of_transports:
            of_transports.add(id(thing))
            todo += gc.get_referents(thing)
    kept = [thing for thing in found if id(thing) in of_transports]
    assert not any(type(thing).__module__.startswith("penstock") for thing in kept), "a transport keeps something of ours"
    assert sum(map(sys.getsizeof, kept)) <= 2048 * NUM_REQUESTS, "a transport keeps something large"
    return [thing for thing in found if id(thing) not in of_transports]


@pytest.mark.skipif(is_free_threaded(), reason="without a GIL, objects also wait for the thread that made them")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_request_waits_for_the_garbage_collector(live: LiveServer, kind: str) -> None:
    once, bridge, state = KINDS[kind], live.runtime.bridge, live.server.acceptor
    once(live)  # what is made once
    with collected() as found:
        for _ in range(NUM_REQUESTS):
            once(live)
        wait_until(lambda: bridge.num_open_requests == 0 and not state.connections and not state.tasks)
    ours = without_transports(found)
    kinds = Counter(type(thing).__qualname__ for thing in ours)
    assert len(ours) < NUM_REQUESTS, f"in circles: {kinds.most_common(20)}"


def test_a_body_is_let_go_of_before_its_answer_is_streamed(gated: LiveServer, gate: GatedExecutor) -> None:
    question = COMPLETION | {"stream": True, "user": "x" * 3_500_000}

    def large() -> list[str]:
        if is_free_threaded():  # where the thread that read the body would free it when it runs again
            gc.collect()
        traces = tracemalloc.take_snapshot().traces
        return [f"{trace.size} bytes of {trace.traceback}" for trace in traces if trace.size >= 3_000_000]

    tracemalloc.start()
    try:
        with connect(gated) as connection:
            ask(connection, "/v1/completions", fast_json.dumps(question))
            gate.allow(2)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not large())
            assert not large()
            gate.open()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "model": "toy", "max_tokens": 9}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "model": "toy"}),
    ],
)
def test_a_stream_does_not_keep_the_call(gate, gated, path, body):
    """Which has the prompts, and all that was said before."""
    gate.allow(2)
    with httpx.stream("POST", gated.url + path, json=body | {"stream": True}, timeout=20) as response:
        pieces = response.iter_text()
        next(pieces)
        gc.collect()
        assert [one for one in gc.get_objects() if isinstance(one, Call)] == []
        gate.open()
