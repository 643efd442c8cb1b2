"""Helpers that `server/test_admission.py` shares with other tests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx

from penstock.admission.door import AdmissionLimits
from penstock.config import ServerConfig
from support.server.harness import CAPACITY, GatedExecutor, running, until

ONE_ROW = replace(CAPACITY, max_rows=1)


class Held:
    """A live server whose one row is taken by a request that does not go on."""

    def __init__(self, config: ServerConfig | None = None, **limits) -> None:
        self.executor = GatedExecutor(ONE_ROW)
        self._running = running(self.executor, limits=AdmissionLimits(**limits), config=config)

    async def __aenter__(self):
        self.server = self._running.__enter__()
        self.client = httpx.AsyncClient(base_url=self.server.url, timeout=20)
        self.first = asyncio.create_task(self.client.post("/v1/completions", json={"prompt": "first", "max_tokens": 400}))
        await until(lambda: self.server.runtime.engine.load().num_running == 1)
        return self

    async def __aexit__(self, *exc_info) -> None:
        self.executor.open()
        assert (await self.first).status_code == 200
        await self.client.aclose()
        self._running.__exit__(*exc_info)
