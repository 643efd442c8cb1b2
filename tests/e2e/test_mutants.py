"""Mutated requests to every route of a real server: none makes it fail or hang, and nothing of them is left behind.

`make test` sends 250. `make test-mutants` sends 50,000 (MUTANTS=N: as many) and looks at the memory, too. The server
has an encoder beside the default model, where one was fetched (`penstock pull minilm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from support.e2e.mutants import Fate, Mutant, Mutants, Route, fault_of, send
from support.e2e.process import MODEL, TIMEOUT_S, RealServer, serving, until
from support.soak.memory import resident_bytes

NUM_MUTANTS = int(os.environ.get("PENSTOCK_MUTANTS", "250"))
SEED = int(os.environ.get("PENSTOCK_SEED", "1"))
MIN_FOR_MEMORY = 20_000
"""With fewer, memory is still touched for the first time."""
MAX_GROWTH = 0.02
CONCURRENCY = 16
ENCODER = "minilm"
RARE = {"/models/unload": 0.03}
"""It ends the requests of others, and what comes after it waits for a load."""
SETTINGS = f"""
max_num_seqs = 32
response_store = "1MiB"
explained_requests = 100
[[models]]
model = "{MODEL}"
kv_cache_memory = "64MiB"
max_model_len = 256  # where a mutant has lost its limit of tokens, the context is one
"""

pytestmark = [pytest.mark.model, pytest.mark.timeout(0 if NUM_MUTANTS >= MIN_FOR_MEMORY else 300)]


def open_files(server: RealServer) -> Counter[str]:
    """The server's open files, by what they are."""
    links: list[str] = []
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now
            links.append(re.sub(r"\d+", "N", str(link.readlink())))
    return Counter(links)


class Senders:
    """`CONCURRENCY` clients that send the mutants one after the other."""

    def __init__(self, server: RealServer, mutants: Mutants) -> None:
        self.server, self.mutants = server, mutants
        self.numbers = iter(range(NUM_MUTANTS))
        self.faults: list[str] = []
        self.statuses: dict[str, Counter[int | None]] = defaultdict(Counter)
        """By the mutants' kind."""
        self.unanswered: set[str] = set()
        """Routes that no model answers: without the encoder, those of encoders."""
        self.answered: Counter[str] = Counter()
        """Answers of a 200, by route."""
        self.sizes: list[int] = []
        """Resident memory, each time another hundredth of the mutants has been sent."""
        self.longest_s = 0.0

    async def find_models(self, names: list[str]) -> None:
        """Find out which models answer at a route, by asking it. A route that none of them answers is asked for all."""
        for route in self.mutants.routes:
            answered = [name for name in names if route.bodies and await self.is_answered(route, name)]
            self.mutants.models[route.path] = sorted(answered) or names
            if route.bodies and not answered:
                self.unanswered.add(route.path)

    async def is_answered(self, route: Route, model: str) -> bool:
        """Whether one of four good requests is answered."""
        for number in range(4):
            if (await send(self.server.port, self.mutants.plain(route, model, number))).status == 200:
                return True
        return False

    async def loop(self) -> None:
        for index in self.numbers:
            mutant = self.mutants.make(index)
            begin_s = time.monotonic()
            try:
                fate = await send(self.server.port, mutant)
            except TimeoutError:
                self.faults.append(f"{index}: no answer in time: {mutant.shown()}")
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
            self.note(index, mutant, fate)

    def note(self, index: int, mutant: Mutant, fate: Fate) -> None:
        if fault := fault_of(mutant, fate):
            self.faults.append(f"{index}: {fault}: {mutant.shown()}\n  -> {fate.body[:500]!r}")
        is_hopeless = mutant.kind == "valid" and mutant.route.path in self.unanswered
        self.statuses["valid, without a model" if is_hopeless else mutant.kind][fate.status] += 1
        self.answered[mutant.route.path] += fate.status == 200
        if index % max(1, NUM_MUTANTS // 100) == 0:
            self.sizes.append(resident_bytes(self.server.process.pid))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self.loop())


def test_no_mutant_makes_a_server_fail(weights: None, tmp_path: Path) -> None:
    models, settings, config = [MODEL], SETTINGS, tmp_path / "penstock.toml"
    if resolve(ENCODER, default_cache_dir()).is_present:
        models, settings = [MODEL, ENCODER], f'{SETTINGS}[[models]]\nmodel = "{ENCODER}"\n'
    config.write_text(settings)
    with serving(tmp_path, "--config", str(config)) as server:
        senders = Senders(server, Mutants(get(server, "/openapi.json"), SEED, rare=RARE))
        asyncio.run(senders.find_models(models))
        ask_all(server, models)
        files, begin_s = open_files(server), time.monotonic()
        asyncio.run(senders.run())
        seconds = time.monotonic() - begin_s
        print(f"\n{NUM_MUTANTS} mutants of seed {SEED} in {seconds:.0f} s; the longest answer took {senders.longest_s:.1f} s")
        for kind, statuses in sorted(senders.statuses.items()):
            print(f"  {kind}: {dict(sorted(statuses.items(), key=str))}")
        print(f"  answers of a 200 by route: {dict(senders.answered.most_common())}")
        assert senders.faults == []
        assert senders.statuses["valid"][200] > 0.3 * senders.statuses["valid"].total()
        for model in models:
            until(lambda name=model: is_empty(get(server, f"/load?model={name}")), timeout_s=TIMEOUT_S)  # type: ignore[misc]
        assert get(server, "/v1/requests")["data"] == []
        ask_all(server, models)
        until(lambda: not open_files(server) - files)
        third = len(senders.sizes) // 3
        before, after = statistics.fmean(senders.sizes[third : 2 * third]), statistics.fmean(senders.sizes[2 * third :])
        print(f"  resident: {before / 2**20:.1f} MiB in the second third, {after / 2**20:.1f} MiB in the last")
        if NUM_MUTANTS >= MIN_FOR_MEMORY:
            assert after <= (1 + MAX_GROWTH) * before, "memory grows"
        code, _ = server.end()
        log = server.log.read_text()
    assert code == 0
    assert "Traceback" not in log
    assert "ERROR" not in log


def get(server: RealServer, path: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.url + path, timeout=TIMEOUT_S).json()
    return found


def ask_all(server: RealServer, models: list[str]) -> None:
    """Ask each model, which is loaded then and has open what it needs."""
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2
    for model in models[1:]:
        assert server.post("/v1/embeddings", {"model": model, "input": "Hi"})["usage"]["prompt_tokens"] > 0


def is_empty(load: dict[str, Any]) -> bool:
    """Nothing runs or waits, and all blocks are free."""
    return load["requests_running"] + load["requests_waiting"] == 0 and load["kv_blocks_free"] == load["kv_blocks"]
