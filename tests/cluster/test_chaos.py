"""A cluster of processes while replicas are killed, stopped, delayed and made to hang, and while its front is killed.

`make test-slow` runs it for some seconds, `make test-cluster` for CHAOS_S=25, or for ten minutes: CHAOS_S=600. In a run of
less than a minute, more happens in less time. One line of JSON says what happened. `test_cluster.py` has replicas in threads
that are lost in the same ways, one at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.chaos.clients import Clients, Site
from support.chaos.processes import Member
from support.chaos.proxy import Proxy
from support.chaos.requests import Asks
from support.server.harness import until

IS_SMALL = "PENSTOCK_CHAOS_S" not in os.environ
CHAOS_S = float(os.environ.get("PENSTOCK_CHAOS_S", "3"))
SEED = 1
NUM_REPLICAS = 3 if IS_SMALL else 4
NUM_CLIENTS = 24
PACE = min(1.0, CHAOS_S / 60)
"""Times of a run shorter than a minute are shortened by this."""
KILL_EVERY_S = max(4.0, 20.0 * PACE)
STOP_EVERY_S = 30.0 * PACE
HANG_EVERY_S = 40.0 * PACE
FRONT_EVERY_S = max(10.0, 45.0 * PACE)
SILENCE_S = 5.0 if IS_SMALL else max(2.5, 5.0 * PACE)
"""A replica that tells nothing for this long is lost."""
BEAT_S = SILENCE_S / 5
STOP_S = 2 * SILENCE_S
HANG_S = 4.0
DELAY_S = 0.5
MIN_SHARE = 0.995
MAX_NEW_FILES = 10
MAX_GROWTH = 0.25
MIN_AGE_S = 30.0
"""Memory of a process is not compared before it has run for so long."""

pytestmark = pytest.mark.timeout(CHAOS_S + 300)


class Chaos:
    """The processes, and all that happens to them."""

    def __init__(self, folder: Path) -> None:
        self._random = random.Random(SEED)
        http_port, self._port = free_port(), free_port()
        ports = (str(http_port), str(self._port))
        self.front = Member("front", folder, "support.chaos.front", *ports, str(SILENCE_S))
        self.proxy = Proxy(self._port)
        self.site = Site(f"http://127.0.0.1:{http_port}")
        self.replicas: list[Member] = []
        self._folder = folder
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        proxy_port = await self.proxy.start()
        for number in range(NUM_REPLICAS):
            port = proxy_port if number == NUM_REPLICAS - 1 else self._port
            command = ("support.chaos.replica", str(port), f"r{number}", str(BEAT_S))
            self.replicas.append(Member(f"r{number}", self._folder, *command))
        for member in (self.front, *self.replicas):
            await member.start()
        for member in (*self.replicas, self.front):
            await member.wait_until_ready()
        await self.wait_until_idle()

    async def end(self) -> None:
        for member in (self.front, *self.replicas):
            await member.end()
        await self.proxy.close()
        await self.site.close()

    async def wait_until_idle(self) -> None:
        """Wait until all replicas are there and no process has anything left of a request."""
        end_s = time.monotonic() + 60
        while True:
            front = await self.front.ask("status")
            busy = {"front": front["busy"]} | {member.name: await member.ask("status") for member in self.replicas}
            if front["replicas"] == NUM_REPLICAS and not any(sum(facts.values()) for facts in busy.values()):
                return
            assert time.monotonic() < end_s, f"{front['replicas']} replicas are there, and this is left: {busy}"
            await asyncio.sleep(0.1)

    async def rage(self, clients: Clients) -> None:
        """Run the clients while everything goes wrong."""
        self._half_s = time.monotonic() + CHAOS_S / 2
        ways = [
            asyncio.create_task(self._repeat(every_s, do))
            for every_s, do in (
                (KILL_EVERY_S, self._kill),
                (FRONT_EVERY_S, self._kill_front),
                (KILL_EVERY_S, self._delay),
                (0.5, self._sample),
                *(() if IS_SMALL else self._slow_ways()),
            )
        ]
        try:
            await clients.run(NUM_CLIENTS, CHAOS_S)
        finally:
            for way in ways:
                way.cancel()
            found = await asyncio.gather(*ways, return_exceptions=True)
        assert not [error for error in found if not isinstance(error, asyncio.CancelledError)]
        self.proxy.delay_s = 0.0
        await self.count_moves()

    def _slow_ways(self) -> tuple[tuple[float, Callable[[], Awaitable[None]]], ...]:
        return (STOP_EVERY_S, self._stop), (HANG_EVERY_S, self._hang), (2 * FRONT_EVERY_S, self._stop_front)

    async def _repeat(self, every_s: float, do: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again. The end of the load does not interrupt it half-way."""
        await asyncio.sleep(self._random.random() * min(every_s, CHAOS_S) / 2)
        while True:
            doing = asyncio.ensure_future(do())
            try:
                await asyncio.shield(doing)
            except asyncio.CancelledError:
                await doing
                raise
            await asyncio.sleep(every_s)

    def _choose(self) -> Member:
        free = [member for member in self.replicas if not member.busy.locked()]
        return self._random.choice(free or self.replicas)

    async def _kill(self) -> None:
        member = self._choose()
        async with member.busy:
            await member.kill()
            await asyncio.sleep(5 * PACE)
            await member.start()
            await member.wait_until_ready()
        self.counts["killed"] += 1

    async def _stop(self) -> None:
        member = self._choose()
        async with member.busy:
            member.signal(signal.SIGSTOP)
            await asyncio.sleep(STOP_S)
            member.signal(signal.SIGCONT)
        self.counts["stopped"] += 1

    async def _hang(self) -> None:
        member = self._choose()
        async with member.busy:
            await member.ask("hang", HANG_S)
        self.counts["hung"] += 1

    async def _delay(self) -> None:
        self.proxy.delay_s = 0.0 if self.proxy.delay_s else DELAY_S
        self.counts["delays"] += self.proxy.delay_s > 0

    async def _kill_front(self) -> None:
        """Do so only in the first half, so that the last front is old enough to show a leak."""
        if time.monotonic() > self._half_s:
            return
        async with self.front.busy:
            await self.count_moves()
            self.site.lose()
            await self.front.kill()
            await self.front.start()
            await self.front.wait_until_ready()
            self.site.open()
        self.counts["fronts killed"] += 1

    async def _stop_front(self) -> None:
        async with self.front.busy:
            self.site.num_stops += 1
            self.front.signal(signal.SIGSTOP)
            await asyncio.sleep(STOP_S)
            self.front.signal(signal.SIGCONT)
            self.site.num_stops += 1
        self.counts["fronts stopped"] += 1

    async def _sample(self) -> None:
        for member in (self.front, *self.replicas):
            member.sample()

    async def count_moves(self) -> None:
        status = await self.front.ask("status")
        for count in ("moved", "resumed", "handed_over", "sources"):
            self.counts[count] += status[count]

    def errors(self) -> list[str]:
        """Return the names of logs with an error that nobody expects."""
        return [path.name for path in self._folder.glob("*.log") if "Traceback" in path.read_text()]

    def num_files(self) -> dict[str, int]:
        for member in (self.front, *self.replicas):
            member.sample()
        return {member.name: member.samples[-1].num_files for member in (self.front, *self.replicas)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
async def test_answers_are_right_whatever_dies(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        chaos = Chaos(tmp_path)
        stack.push_async_callback(chaos.end)
        asks, _ = await asyncio.gather(asyncio.to_thread(Asks, SEED), chaos.start())
        clients = Clients(chaos.site, asks, SEED)
        await asyncio.gather(*(clients.ask_next() for _ in range(NUM_CLIENTS)))
        await chaos.site.close()
        await chaos.wait_until_idle()
        files_before = chaos.num_files()
        chaos.site.open()
        began_s = time.monotonic()
        await chaos.rage(clients)
        await chaos.site.close()
        await chaos.wait_until_idle()
        await until(lambda: all(num <= files_before[name] + MAX_NEW_FILES for name, num in chaos.num_files().items()))
        files_after = chaos.num_files()
        members = [chaos.front, *chaos.replicas]
        old = [member for member in members if member.samples[-1].at_s - member.samples[0].at_s >= MIN_AGE_S]

        fates = clients.fates
        num_apart = fates["left"] + fates["cancelled"] + fates["router restart"]
        share = fates["succeeded"] / (clients.num_asked - num_apart)
        figures = {
            "seconds": round(time.monotonic() - began_s, 1),
            "requests": clients.num_asked,
            **fates,
            "succeeded_share": round(share, 5),
            "router_restarts": clients.num_router_restarts,
            **chaos.counts,
            "worst_pause_s": round(clients.worst_pause_s, 2),
            "worst_first_s": round(clients.worst_start_s, 2),
            "files": [files_before, files_after],
            "growth": {member.name: round(member.growth, 3) for member in old},
            "resident_mib": {member.name: member.samples[-1].num_bytes >> 20 for member in members},
        }
        print("\n" + json.dumps(figures), *clients.told, sep="\n")
        assert fates.total() == clients.num_asked
        assert not fates["wrong"], clients.told
        assert share >= MIN_SHARE, clients.told
        assert chaos.counts["handed_over"] > 0, "no answer moved to where answers are computed"
        assert IS_SMALL or chaos.counts["moved"] > 0, "no replica was lost with a request"
        assert not chaos.errors()
        assert all(member.growth <= MAX_GROWTH for member in old)


async def test_a_proxy_delays_both_directions() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4))
        await reader.read()
        has_ended.set()
        writer.close()

    has_ended = asyncio.Event()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        proxy = Proxy(server.sockets[0].getsockname()[1])
        proxy.delay_s = 0.05
        reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
        began_s = time.monotonic()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        assert time.monotonic() - began_s >= 0.1
        writer.close()
        await until(has_ended.is_set)
        await proxy.close()
