"""Resident memory of a real server under load that never lets up: it stays what it was once everything was touched.

Not part of `make test`; `make test-soak` runs it for ten minutes (SOAK_S=120: for two), after some minutes of small requests;
once without a tier below the KV cache, and once with one on disk.

The KV cache is a fraction of what the clients want, so that it is full all the time: requests are preempted, prefixes are
evicted. Prompts are random pieces behind one of a few beginnings; answers are of any length; some requests want three, some
are cancelled, some lose their client, some have a deadline that they miss; tenants are ever new ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import httpx
import pytest

from support.e2e.process import RealServer, serving, until
from support.soak.memory import resident_bytes

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("PENSTOCK_SOAK_S" not in os.environ, reason="PENSTOCK_SOAK_S says how long; make test-soak sets it"),
    pytest.mark.timeout(0),
]
SOAK_S = float(os.environ.get("PENSTOCK_SOAK_S", "0"))
NUM_SMALL = 12_000
"""Small requests before the time begins: what remembers the last thousands of steps, blocks and tenants is full then."""
WARM_UP_SHARE = 0.2
"""Share of the time in which all memory is touched for the first time."""
MAX_GROWTH = 0.02
NUM_CLIENTS = 40
NUM_PREFIXES = 12
VOCAB_SIZE = 49_000
SETTINGS = (
    "--kv-cache-memory=40MiB",  # 3,400 tokens; the clients want four times as many
    "--max-num-seqs=32",
    "--max-model-len=1024",
    "--reserve=chunk",  # admits most, and so preempts
    "--kv-headroom=0",
    "--policy=fair",
    "--explained-requests=100",  # as many as have ended before the warm-up is over
    "--log-level=error",
)


class Clients:
    """A closed loop of `NUM_CLIENTS`, each of which asks again as soon as it has its answer."""

    def __init__(self, server: RealServer, seed: int, on_filled: Callable[[], None] = lambda: None) -> None:
        """`on_filled` is called when the small requests have ended and the time begins."""
        self.server, self.rng, self.on_filled = server, random.Random(seed), on_filled
        self.numbers = count()
        self.is_filling = True
        self.prefixes = [self.tokens(self.rng.randint(20, 300)) for _ in range(NUM_PREFIXES)]
        self.fates: Counter[str] = Counter()

    def tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(10, VOCAB_SIZE) for _ in range(num_tokens)]

    def body(self) -> dict[str, object]:
        rng = self.rng
        if rng.random() < 0.03:
            self.prefixes[rng.randrange(NUM_PREFIXES)] = self.tokens(rng.randint(20, 300))
        if self.is_filling:
            return {"prompt": self.tokens(rng.randint(1, 40)), "max_tokens": rng.randint(1, 4), "stream": True}
        prefix = rng.choice(self.prefixes)
        prompt = [*prefix[: rng.randint(0, len(prefix))], *self.tokens(rng.randint(1, 60))]
        return {
            "prompt": prompt,
            "max_tokens": min(600, 1 + int(rng.expovariate(1 / 80))),
            "n": 3 if rng.random() < 0.05 else 1,
            "temperature": rng.choice([0, 1]),
            "ignore_eos": True,
            "stream": True,
        }

    async def ask(self, http: httpx.AsyncClient) -> str:
        """One request. Returns what became of it."""
        rng, name = self.rng, f"soak-{next(self.numbers)}"
        kind = rng.choices(["served", "cancelled", "leaves", "hopeless"], [0.8, 0.08, 0.08, 0.04])[0]
        headers = {"X-Request-Id": name, "X-Tenant": f"tenant-{rng.randrange(10_000)}"}
        if kind == "hopeless":
            headers["X-Deadline-Ms"] = str(rng.randint(1, 2000))
        num_events = rng.randint(1, 40)
        async with http.stream("POST", "/v1/completions", json=self.body(), headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                return str(response.json()["error"]["code"])
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "done"
                if line.startswith('data: {"error"'):
                    return "ended"
                num_events -= line.startswith("data: ")
                if num_events == 0 and kind == "cancelled":
                    await http.delete(f"/v1/requests/{name}", headers=headers)
                if num_events == 0 and kind == "leaves":
                    return "left"
        return "broke off"

    async def fill(self, http: httpx.AsyncClient) -> None:
        while self.fates.total() < NUM_SMALL:
            self.fates[await self.ask(http)] += 1

    async def loop(self, http: httpx.AsyncClient, end_s: float) -> None:
        while time.monotonic() < end_s:
            self.fates[await self.ask(http)] += 1

    async def run(self, seconds: float) -> list[int]:
        """The server's resident memory, in bytes, each second."""
        limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
        sizes: list[int] = []
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            await asyncio.gather(*(self.fill(http) for _ in range(NUM_CLIENTS)))
            self.is_filling = False
            self.on_filled()
            end_s = time.monotonic() + seconds
            for _ in range(NUM_CLIENTS):
                group.create_task(self.loop(http, end_s))
            while time.monotonic() < end_s:
                await asyncio.sleep(1.0)
                sizes.append(resident_bytes(self.server.process.pid))
        return sizes


@pytest.mark.parametrize("disk_size", [None, "200MiB"], ids=["without a tier", "with a disk tier"])
async def test_resident_memory_is_flat_at_full_memory(tmp_path: Path, disk_size: str | None) -> None:
    tier = () if disk_size is None else (f"--kv-disk-size={disk_size}", f"--kv-disk-path={tmp_path / 'kv'}")
    with serving(tmp_path, *SETTINGS, *tier) as server:

        def check_slots() -> None:
            num_present = server.metric("kv_disk_slots", state="present")
            assert num_present > 0.98 * server.metric("kv_disk_slots") > 500, "the index of the tier is not full yet"

        clients = Clients(server, seed=3, on_filled=check_slots if tier else lambda: None)
        sizes = await clients.run(SOAK_S)
        preemptions = server.metric("preemptions_total")
        print(f"\n{clients.fates.total()} requests {dict(clients.fates)}, {preemptions:.0f} preemptions")
        warm = sizes[int(WARM_UP_SHARE * len(sizes)) :]
        tenth = max(1, len(warm) // 10)
        means = [statistics.fmean(warm[k : k + tenth]) / 2**20 for k in range(0, len(warm) - tenth + 1, tenth)]
        print(f"resident: {sizes[0] / 2**20:.1f} MiB at first; by tenths after the warm-up", [round(mean, 1) for mean in means])
        assert clients.fates["broke off"] == 0
        assert clients.fates["ended"] > 0, "nobody was cancelled"
        assert clients.fates["done"] > 0.5 * clients.fates.total()
        assert preemptions > 0, "memory was never full"
        if tier:
            assert server.metric("preemptions_total", method="swap") > 0, "what is preempted could come back from the tier"
            assert server.metric("kv_disk_blocks_total", direction="loaded") > 0
            assert server.metric("kv_disk_up") == 1
        until(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0)
        assert server.metric("prefix_cache_hits_total") > 0
        assert max(means) <= (1 + MAX_GROWTH) * means[0], "memory grows"
