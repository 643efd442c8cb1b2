"""Do clients that read slowly harm those that read at once? Gaps between tokens, the texts, and the server's memory.

A closed loop of `--streams` clients is run twice for `--seconds`. In the first run all read at once; in the second, `--slow` of
them read `--bytes-per-s` through a receive buffer of 4 kB, so that their answers wait in the server. In both runs these clients
ask for the next answer when a slow one would have read the last, so the engine has the same to do. Every text is compared with
the answer to the same prompt alone.

    python benchmarks/slow_readers.py --seconds 300
    python benchmarks/slow_readers.py --seconds 300 --model smollm2:135m --tokens 400 --bytes-per-s 1000

The executor sleeps for `--step-ms` and has each row recite a poem, so what is left is the server's own work and the gaps are
those of its HTTP thread. The kernel's send buffer is 32 kB and not 4 MB, so that the rest waits in the
server. With `--model` it is plain `penstock serve MODEL`, and gaps are mostly its steps. In the second run, `--stuck`
more clients never read: the server must drop them. Needs the default model (`penstock pull`). Linux only (/proc). The last line
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from printed import origin, table
from processes import Contender
from sessions import SERVED_NAME, ServerSession, running
from streaming import Sleeper, serve
from usage import MB, OtherLoad, resident_bytes

from penstock import machine
from penstock.serve import server as server_file
from penstock.types.plan import StepPlan, Ticket

NUM_PROMPTS = 8
PROMPT = "Tell me story number {}, please: once upon a time, in a land far away,"
RECEIVE_BYTES, SEND_BYTES = 2048, 1 << 14
"""Sizes of buffers as they are asked for; Linux doubles them."""
READ_EVERY_S = 0.25
WARM_UP_SHARE = 0.1
"""Initial share of a run, left out since all prompts come at once."""
END_TIMEOUT_S = 120.0
_TEXT = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')
DONE = b"data: [DONE]\n\n"


class Reciter(Sleeper):
    """An executor whose rows recite the poem, each from its beginning: what a stream lacks, or has twice, is seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._said: dict[str, int] = {}

    def submit(self, plan: StepPlan) -> Ticket:
        for request_id in plan.releases:
            self._said.pop(request_id, None)
        return super().submit(plan)

    def next_words(self, names: Sequence[str]) -> list[int]:
        words, said = self.words, self._said
        tokens = []
        for name in names:
            place = said[name] = said.get(name, -1) + 1
            tokens.append(words[place % len(words)])
        return tokens


@dataclass
class Run:
    """The clients of one run, and what they saw."""

    port: int
    num_tokens: int
    bytes_per_s: float
    are_slow: bool
    end_s: float
    begin_s: float
    texts: dict[int, str]
    """By prompt: what the server says when it is asked for it alone."""
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    """Between events of those that read at once and always did."""
    num_answers: dict[str, int] = field(default_factory=lambda: {"fast": 0, "paced": 0})
    num_events: dict[str, int] = field(default_factory=lambda: {"fast": 0, "paced": 0})
    """Events of the answers; fewer than tokens where those of several steps were put together for a slow reader."""
    faults: list[str] = field(default_factory=list)
    is_over: bool = False

    def head(self, prompt: int) -> bytes:
        body = {
            "model": SERVED_NAME,
            "prompt": PROMPT.format(prompt),
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        words = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        return words.encode() + data

    def check(self, kind: str, prompt: int, data: bytes) -> None:
        body = _without_chunks(data)
        text = b"".join(_TEXT.findall(body))
        self.num_answers[kind] += 1
        self.num_events[kind] += body.count(b"\n\n") - 1
        if not body.endswith(DONE):
            self.faults.append(f"{kind}: an answer ends with {body[-200:]!r}")
        elif json.loads(b'"' + text + b'"') != self.texts[prompt]:
            self.faults.append(f"{kind}: another text than that of the prompt alone: {text[:200]!r}")

    async def fast(self, number: int) -> None:
        """Read at once, and ask again."""
        while not self._is_late():
            prompt = number % NUM_PROMPTS
            await self._read_at_once("fast", prompt, self.gaps_s)

    async def paced(self, number: int) -> None:
        """Read slowly; or at once, and wait as long as reading slowly takes."""
        await asyncio.sleep(number % 51 / 51)  # not all of them read in the same instant
        while not self._is_late():
            begin_s, prompt = time.monotonic(), number % NUM_PROMPTS
            if self.are_slow:
                await self._read_slowly(prompt)
                continue
            num_bytes = await self._read_at_once("paced", prompt, None)
            rest_s = num_bytes / self.bytes_per_s - (time.monotonic() - begin_s)
            await asyncio.sleep(max(0.0, min(rest_s, self.end_s - time.monotonic())))

    async def stuck(self, number: int) -> socket.socket:
        """Ask, and never read."""
        connection = await self._connect()
        await asyncio.get_running_loop().sock_sendall(connection, self.head(number % NUM_PROMPTS))
        return connection

    async def _read_at_once(self, kind: str, prompt: int, gaps_s: array[float] | None) -> int:
        loop = asyncio.get_running_loop()
        _, reader = await loop.create_connection(lambda: _Reader(self, gaps_s), "127.0.0.1", self.port)
        reader.transport.write(self.head(prompt))
        await reader.ended
        data = b"".join(reader.pieces)
        self.check(kind, prompt, data)
        return len(data)

    async def _read_slowly(self, prompt: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await self._connect()
        pieces: list[bytes] = []
        with connection:
            await loop.sock_sendall(connection, self.head(prompt))
            while piece := await loop.sock_recv(
                connection, int(self.bytes_per_s * READ_EVERY_S) if not self.is_over else 1 << 16
            ):
                pieces.append(piece)
                if not self.is_over:
                    await asyncio.sleep(READ_EVERY_S)
        self.check("paced", prompt, b"".join(pieces))

    async def _connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return connection

    def _is_late(self) -> bool:
        return time.monotonic() >= self.end_s


class _Reader(asyncio.Protocol):
    """Takes an answer to its end, and notes when its events came."""

    transport: asyncio.Transport

    def __init__(self, run: Run, gaps_s: array[float] | None) -> None:
        self._run, self._gaps_s = run, gaps_s
        self._last_s = 0.0
        self.pieces: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        self.pieces.append(data)
        if self._last_s > self._run.begin_s and now_s < self._run.end_s and self._gaps_s is not None:
            self._gaps_s.append(now_s - self._last_s)
            for _ in range(data.count(b"\n\n") - 1):  # they came together, the first of them late
                self._gaps_s.append(0.0)
        self._last_s = now_s

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.ended.done():
            self.ended.set_result(None)


def _without_chunks(data: bytes) -> bytes:
    """The body of an answer that came in chunks."""
    place = data.index(b"\r\n\r\n") + 4
    pieces: list[bytes] = []
    while place < len(data):
        line_end = data.index(b"\r\n", place)
        size = int(data[place:line_end], 16)
        pieces.append(data[line_end + 2 : line_end + 2 + size])
        place = line_end + size + 4
    return b"".join(pieces)


def serve_with_small_buffers(port: int, step_s: float) -> None:
    """Be the server. Its connections have the send buffer of the socket that listens (socket(7))."""
    bind = server_file.bind_socket

    def bind_small(host: str, port: int) -> socket.socket:
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        return listener

    server_file.bind_socket = bind_small
    serve(port, step_s, Reciter)


def num_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def files_left(pid: int, num_files: int) -> int:
    """Files that the server has open beyond `num_files`, once they are none or `END_TIMEOUT_S` have passed."""
    give_up_s = time.monotonic() + END_TIMEOUT_S
    while (num_left := num_open_files(pid) - num_files) > 0 and time.monotonic() < give_up_s:
        time.sleep(0.5)
    return num_left


async def alone(port: int, num_tokens: int) -> dict[int, str]:
    """The text of each prompt when nobody else asks."""
    now_s = time.monotonic()
    texts: dict[int, str] = {}
    for prompt in range(NUM_PROMPTS):
        run = Run(port, num_tokens, 1, are_slow=False, end_s=now_s, begin_s=now_s, texts={})
        _, reader = await asyncio.get_running_loop().create_connection(lambda run=run: _Reader(run, None), "127.0.0.1", port)
        reader.transport.write(run.head(prompt))
        await reader.ended
        body = _without_chunks(b"".join(reader.pieces))
        assert body.endswith(DONE), body[-300:]
        texts[prompt] = json.loads(b'"' + b"".join(_TEXT.findall(body)) + b'"')
    return texts


async def measure(session: ServerSession, args: argparse.Namespace, texts: dict[int, str], *, are_slow: bool) -> dict[str, Any]:
    pid, port = session.process.pid, int(session.url.rpartition(":")[2])
    now_s, others = time.monotonic(), OtherLoad()
    begin_s, end_s = now_s + WARM_UP_SHARE * args.seconds, now_s + args.seconds
    run = Run(port, args.tokens, args.bytes_per_s, are_slow=are_slow, end_s=end_s, begin_s=begin_s, texts=texts)
    num_files = num_open_files(pid)
    sizes_mb: list[float] = []
    async with asyncio.TaskGroup() as group:
        for number in range(args.streams - args.slow):
            group.create_task(run.fast(number))
        for number in range(args.slow):
            group.create_task(run.paced(number))
        stuck = [await run.stuck(number) for number in range(args.stuck if are_slow else 0)]
        while time.monotonic() < end_s:
            await asyncio.sleep(1.0)
            sizes_mb.append(resident_bytes(pid) / MB)
        run.is_over = True
    num_left = await asyncio.to_thread(files_left, pid, num_files)  # those who never read have theirs open still
    for connection in stuck:
        connection.close()
    third = len(sizes_mb) // 3
    gaps_ms = sorted(1e3 * gap_s for gap_s in run.gaps_s)
    return {
        "answers read at once": run.num_answers["fast"] + (0 if are_slow else run.num_answers["paced"]),
        "answers read slowly": run.num_answers["paced"] if are_slow else 0,
        "tokens an event of the paced": round(args.tokens * run.num_answers["paced"] / max(1, run.num_events["paced"]), 1),
        "wrong answers": len(run.faults),
        "gap p50, ms": round(gaps_ms[len(gaps_ms) // 2], 2),
        "gap p99, ms": round(gaps_ms[len(gaps_ms) * 99 // 100], 2),
        "gap max, ms": round(gaps_ms[-1], 1),
        "resident in the second third, MB": round(statistics.fmean(sizes_mb[third : 2 * third]), 1),
        "resident in the last third, MB": round(statistics.fmean(sizes_mb[2 * third :]), 1),
        "connections left open": num_left,
        "share of the machine that others had": round(others.share(), 3),
        "faults": run.faults[:3],
    }


async def compare(session: ServerSession, args: argparse.Namespace) -> list[dict[str, Any]]:
    texts = await alone(int(session.url.rpartition(":")[2]), args.tokens)
    return [await measure(session, args, texts, are_slow=are_slow) for are_slow in (False, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--slow", type=int, default=51, help="of the streams")
    parser.add_argument("--stuck", type=int, default=4, help="clients that never read, beside the streams")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--bytes-per-s", type=float, default=4000.0, help="that a slow client reads")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--model", help="a model to serve, in place of the executor that sleeps")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server (for the benchmark's own use)")
    args = parser.parse_args()
    if args.serve is not None:
        serve_with_small_buffers(args.serve, args.step_ms / 1e3)
        return
    command: list[str | Path] = [sys.executable, __file__, "--step-ms", str(args.step_ms), "--serve", "{port}"]
    if args.model:
        command = [Path(sys.executable).with_name("penstock"), "serve", args.model, "--port", "{port}"]
        command += ["--max-num-seqs", "256", "--served-model-name", SERVED_NAME]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Contender("penstock", command, "/ready"), Path(folder) / "log") as session,
    ):
        assert isinstance(session, ServerSession)
        plain, slow = asyncio.run(compare(session, args))
    about = f"{args.model}" if args.model else f"a step takes {args.step_ms:g} ms"
    print(origin(about))
    names = [name for name in plain if name != "faults"]
    print(table(["", "all read at once", f"{args.slow} read slowly"], [[name, plain[name], slow[name]] for name in names]))
    ratio = round(slow["gap p99, ms"] / plain["gap p99, ms"], 3)
    report = {"benchmark": "slow_readers", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "p99_ratio": ratio}
    print(json.dumps(report | {"arguments": vars(args), "all_fast": plain, "with_slow": slow}))


if __name__ == "__main__":
    main()
