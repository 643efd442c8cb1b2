"""An unloaded model leaves nothing behind, though the garbage collector never looks at what the server began with."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from pathlib import Path

import httpx
import pytest

from penstock.config import Backend, BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.factory import start_deployment
from penstock.machine import is_free_threaded
from penstock.serve.app import create_app
from support.tiny_models import TinyLlama, write_gguf

NUM_LOADS = 60


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama())
    config = Config(
        model=ModelConfig(model=str(path)),
        backend=BackendConfig(backend=Backend.NATIVE, threads=2),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    return start_deployment([config])


async def ask(client: httpx.AsyncClient) -> None:
    """Answers of several kinds."""
    for fields in ({}, {"stream": True}, {"n": 2, "temperature": 1}, {"structured_outputs": {"choice": ["in", "the"]}}):
        body = {"prompt": "in the", "max_tokens": 4, "temperature": 0, **fields}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
    assert (await client.post("/tokenize", json={"prompt": "in the"})).status_code == 200
    assert (await client.get("/kv")).status_code == 200


async def until_dead(alive: dict[str, weakref.ref[object]]) -> None:
    """Threads that end, and the event loop, let go of what they have just done. A second of CPU time is enough for that."""
    end_s = time.process_time() + 1.0
    while living := [name for name, part in alive.items() if part() is not None]:
        assert time.process_time() < end_s, f"these live on: {living}"
        if is_free_threaded():  # counts of references wait for the thread that made the object, or for the collector
            gc.collect()
        await asyncio.sleep(0.001)


def resident_kb() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_nothing_is_left_of_an_unloaded_model(deployment: Deployment) -> None:
    async def run() -> None:
        (served,) = deployment.served
        transport = httpx.ASGITransport(create_app(deployment, ServerConfig()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
            await ask(client)
            gc.collect()  # of httpx and pytest
            gc.disable()
            gc.freeze()  # as a server does. The collections below look only at what comes later, and take no time.
            sizes_kb = []
            for _ in range(NUM_LOADS):
                await ask(client)
                running = served.running
                assert running is not None
                parts = {
                    "model": running,
                    "engine": running.engine,
                    "tokenizer": running.tokenizer,
                    "bridge": running.bridge,
                    "grammars": running.grammars,
                    "admission": running.admission,
                }
                alive = {name: weakref.ref(part) for name, part in parts.items()}
                del running, parts
                await asyncio.wrap_future(deployment.unload(served))
                await until_dead(alive)
                gc.collect()  # of httpx
                sizes_kb.append(resident_kb())
                await asyncio.wrap_future(deployment.want(served))
            third = NUM_LOADS // 3  # sizes vary by some 2 MB, and grow in the first dozen of loads
            growth_kb = (min(sizes_kb[-third:]) - min(sizes_kb[third:-third])) / third
            assert growth_kb < 100, sizes_kb

    try:
        asyncio.run(run())
    finally:
        gc.unfreeze()
        gc.enable()
        deployment.close()
