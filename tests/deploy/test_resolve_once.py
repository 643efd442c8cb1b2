"""Settings are resolved once for each load: a restart is made of the same values, and the parts below read no `Config`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock.deploy
from penstock.config import Backend, BackendConfig, Config, KvConfig, LoraConfig, ModelConfig, SchedulerConfig
from penstock.deploy import policies
from penstock.deploy.factory import start_model
from penstock.engine.state import EngineState
from penstock.models.catalog import resolve
from penstock.testing.builders import make_request
from penstock.types.errors import ExecutorFailure
from support.executors import executor_class, noted_executors
from support.recorded import recorded
from support.tiny_models import TinyLlama, write_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama())


def config_of(backend: Backend, folder: Path) -> Config:
    """Settings that differ from the defaults where a restart could forget them."""
    return Config(
        backend=BackendConfig(backend=backend, threads=2 if backend is Backend.NATIVE else None),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20, prefix_caching=False, kv_cache_dtype="bf16"),
        lora=LoraConfig(lora_dir=str(folder), max_loras=3, max_lora_rank=8, max_cpu_loras=1),
        model=ModelConfig(generation_config="none", max_model_len=100, task="generate"),
        scheduler=SchedulerConfig(policy="priority", budget="decode-first", max_num_seqs=4, max_num_batched_tokens=48),
    )


@pytest.mark.parametrize("backend", [Backend.NATIVE, Backend.REFERENCE])
def test_a_restart_has_the_settings_of_the_start(gguf: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = recorded(monkeypatch, "penstock.models.load.load_model")
    schedulers = recorded(monkeypatch, "penstock.sched.scheduler.Scheduler")
    executors = noted_executors(monkeypatch, backend)
    running = start_model(config_of(backend, gguf.parent), resolve(str(gguf), gguf.parent))
    block_bytes = [executors[0].block_bytes]
    try:
        with monkeypatch.context() as broken:
            broken.setattr(executor_class(backend), "collect", fail)
            running.engine.submit(make_request("r", [5, 6, 7]))
            wait_until(lambda: running.metrics.num_restarts == 1)
        wait_until(lambda: running.engine.state is EngineState.READY)
        block_bytes.append(executors[1].block_bytes)
    finally:
        running.close(30.0)

    assert len(executors) == 2
    assert executors[0].capacity == executors[1].capacity
    assert block_bytes[0] == block_bytes[1]
    assert len(loads) == 2
    for _, named in loads:
        named.pop("max_weight_bytes")  # as much memory as is free then
    assert loads[0] == loads[1]
    assert {"generation", "check_vocab"} <= set(loads[1][1])

    (of_start, start), (of_restart, restart) = schedulers
    assert of_start[0] == of_restart[0] == executors[0].capacity
    assert of_start[1].words == of_restart[1].words
    assert of_start[1].words["order"].startswith("priority")
    assert of_start[1].order is not of_restart[1].order, "the requests of the engine that failed are gone"
    for key in ("enable_prefix_caching", "max_adapters", "adapters"):
        assert start[key] == restart[key]
    assert (start["enable_prefix_caching"], start["max_adapters"]) == (False, 3)


def fail(*_: Any) -> None:
    raise ExecutorFailure("the device failed, as it was told to")


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_policies_are_resolved_once_for_a_load(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, "penstock.deploy.policies.choose_policies")
    for module in Path(policies.__file__).parent.glob("*.py"):
        if re.search(r"^from penstock.deploy.policies import .*choose_policies", module.read_text(), re.MULTILINE):
            monkeypatch.setattr(f"penstock.deploy.{module.stem}.choose_policies", policies.choose_policies)
    start_model(config_of(Backend.REFERENCE, gguf.parent), resolve(str(gguf), gguf.parent)).close(30.0)
    assert len(calls) == 1


def test_few_files_read_the_config() -> None:
    """The others are made of a blueprint's values."""
    folder = Path(penstock.deploy.__file__).parent
    readers = [path.name for path in sorted(folder.glob("*.py")) if re.search(r"\bConfig\b", path.read_text())]
    assert len(readers) <= 4, readers
