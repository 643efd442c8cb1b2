"""`--kv-events` on a running model: who reads them knows the tokens of each block in its prefix cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.front import check
from penstock.config import BackendConfig, Config, KvConfig, ServerConfig
from penstock.config.several import configs_of
from penstock.deploy.factory import start_model
from penstock.deploy.kv_events import KvEvents, plan_kv_events
from penstock.models.catalog import resolve
from penstock.obs.kv_events import Publisher
from penstock.testing import HashExecutor, make_core, make_request
from penstock.testing.driver import run_to_completion
from penstock.types.errors import ConfigError
from penstock.types.events import Add
from penstock.types.plan import Capacity
from support.kv_events import asked, free_ports
from support.tiny_models import TinyLlama, write_gguf

CAPACITY = Capacity(num_blocks=30, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=64)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama())


def config_of(address: str, *, prefix_caching: bool = True) -> Config:
    return Config(
        backend=BackendConfig(backend="native", threads=1),
        kv=KvConfig(kv_cache_memory_bytes=1 << 18, prefix_caching=prefix_caching),
        server=ServerConfig(kv_events=address),
    )


def test_events_tell_what_a_model_has_cached(gguf: Path) -> None:
    port = free_ports()
    running = start_model(config_of(f"tcp://127.0.0.1:{port}"), resolve(str(gguf), gguf.parent))
    prompt = [20 + pos % 7 for pos in range(60)]

    async def serve() -> None:
        for name, more in (("a", [9]), ("b", [9]), ("c", [8] * 20)):
            request = make_request(name, prompt + more, max_tokens=4, temperature=0.0)
            request.arrival_ns = running.clock.now_ns()
            with running.bridge.open([request]) as stream:
                while not stream.is_ended:
                    await stream.next_chunks()

    try:
        asyncio.run(serve())
        _, batches = asked(port, 0)
    finally:
        running.close(10)
    cleared, *events = [event for _, events, _ in batches for event in events]
    assert cleared == ["AllBlocksCleared"]
    known: dict[int | None, list[int]] = {None: []}
    for kind, names, parent, tokens, size, *_ in events:
        assert kind == "BlockStored"
        for idx, name in enumerate(names):
            known[name] = known[parent if idx == 0 else names[idx - 1]] + tokens[idx * size : (idx + 1) * size]
    texts = [bytes(tokens) for tokens in known.values()]
    size = events[0][4]
    assert bytes(prompt[: 60 // size * size]) in texts
    assert bytes([*prompt, *[8] * 20][: 80 // size * size]) in texts
    assert len(texts) == len(set(texts)), "a block that two requests share is published once"


def test_another_engine_begins_with_an_empty_cache() -> None:
    told: list[tuple[Any, ...]] = []

    class Told(Publisher):
        def __init__(self) -> None:
            pass

        def clear(self, block_size: int) -> None:
            told.append(("clear", block_size))

        def change(self, stored: Any, removed: Any) -> None:
            told.append(("change", [run.token_ids for run in stored], removed))

    events = KvEvents(Told())
    for _ in range(2):  # the second one after a failure of the first
        core = make_core(CAPACITY, observer=events)
        events.watch(core.scheduler, blocks=None)
        run_to_completion(core, HashExecutor(CAPACITY), Add(make_request("a", range(9), max_tokens=1)))
    first = told[: len(told) // 2]
    assert first == told[len(told) // 2 :]
    assert first[0] == ("clear", 4)
    assert ("change", [[*range(8)]], []) in first


@pytest.mark.parametrize(
    "address", ["5557", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65535", "127.0.0.1:x", "tcp://127.0.0.1:5557/"]
)
def test_a_wrong_address_is_an_error(gguf: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form HOST:PORT\. Write it as 127"):
        start_model(config_of(address), resolve(str(gguf), gguf.parent))


def test_a_taken_port_is_an_error(gguf: Path) -> None:
    port = free_ports()
    running = start_model(config_of(f"127.0.0.1:{port}"), resolve(str(gguf), gguf.parent))
    try:
        with pytest.raises(ConfigError, match=f"ports {port} and {port + 1}: Address already in use"):
            start_model(config_of(f"127.0.0.1:{port}"), resolve(str(gguf), gguf.parent))
    finally:
        running.close(10)


def test_tenants_that_share_no_blocks_are_an_error(gguf: Path, tmp_path: Path) -> None:
    """No block would be published."""
    (tmp_path / "keys").write_text("a-key-of-someone\nanother-key-of-someone\n")
    one = config_of("127.0.0.1:5557")
    several = replace(one, server=replace(one.server, api_key_file=str(tmp_path / "keys")))
    for config in (several, replace(one, kv=replace(one.kv, prefix_sharing="tenant"))):
        with pytest.raises(ConfigError, match="Set --prefix-sharing all"):
            start_model(config, resolve(str(gguf), gguf.parent))
    assert plan_kv_events(several.server, "all", has_prefix_caching=True) is not None


def test_what_has_no_events_is_an_error(gguf: Path) -> None:
    with pytest.raises(ConfigError, match="no prefix cache"):
        start_model(config_of("127.0.0.1:5557", prefix_caching=False), resolve(str(gguf), gguf.parent))
    topic_alone = Config(backend=BackendConfig(backend="native", threads=1), server=ServerConfig(kv_events_topic="kv"))
    with pytest.raises(ConfigError, match="--kv-events-topic is set, and --kv-events is not"):
        start_model(topic_alone, resolve(str(gguf), gguf.parent))
    with pytest.raises(ConfigError, match="--kv-events is for a server of one model"):
        configs_of({"kv_events": "127.0.0.1:5557"}, words=["one", "two"])
    with pytest.raises(ConfigError, match="--kv-events"):
        check(config_of("127.0.0.1:5557"))
