"""Faults of one model beside others: what a failed start, a hung step or an unload leaves for the next load."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.admission.ask import Ask
from penstock.backends.native.executor import NativeExecutor
from penstock.config import AdmissionConfig, Backend, BackendConfig, Config, KvConfig, LoraConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import make_lasting, serve_model, start_model, start_served
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.deploy.running import RunningModel
from penstock.engine import thread as engine_thread
from penstock.models.catalog import resolve
from penstock.testing.builders import make_request
from penstock.types.errors import ModelChanged, NotEnoughFreeMemory, NotEnoughMemory, Rejected, RejectReason
from support.reading import chunks_of
from support.server.harness import wait_until
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_heads import write_head
from support.tiny_models import TinyLlama, write_gguf, write_hf

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "one.gguf", TinyLlama())


def config_of(path: Path, backend: Backend = Backend.REFERENCE, **parts: Any) -> Config:
    return Config(
        model=ModelConfig(model=str(path)),
        backend=BackendConfig(backend=backend, threads=2 if backend is Backend.NATIVE else None),
        kv=parts.pop("kv", KvConfig(kv_cache_memory_bytes=MIB)),
        scheduler=SchedulerConfig(max_num_seqs=4),
        **parts,
    )


async def answer(running: RunningModel, request_id: str = "r") -> str:
    prompt = running.tokenizer.encode("in the", add_special_tokens=False)
    stream = chunks_of(running.bridge, make_request(request_id, prompt, max_tokens=8))
    return "".join([chunk.text async for chunk in stream])


@pytest.mark.parametrize("step", ["load_text", "EngineMaker", "_assemble", "_model_info", "RunningModel"])
def test_a_start_that_fails_leaves_its_file_threads_and_memory_for_the_next(
    path: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the disk tier is locked while it is open."""
    kv = KvConfig(kv_cache_memory_bytes=MIB, kv_disk_path=str(tmp_path), kv_disk_size_bytes=4 * MIB)
    config, resources = config_of(path, kv=kv), Resources(MemoryBudget(lambda: 2048 * MIB))
    source = resolve(str(path), path.parent)
    lasting = make_lasting(config, source)
    before, free_bytes = set(threading.enumerate()), resources.memory.left_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as broken:
        broken.setattr(
            "penstock.deploy.running.RunningModel" if step == "RunningModel" else f"penstock.deploy.build.{step}", fails
        )
        with pytest.raises(OSError, match="no space") as failure:
            start_served(config, source, resources, lasting)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # it was told to end, and a busy machine may take a while
    assert (set(threading.enumerate()) - before, resources.memory.left_bytes()) == (set(), free_bytes)
    assert lasting.metrics.read_load().num_blocks_total == 0, "its metrics read no engine that is gone"
    running = start_served(config, source, resources, lasting)
    try:
        assert asyncio.run(answer(running)), "also while the failure's traceback holds the parts of the first attempt"
        assert failure.value is not None
    finally:
        running.close()


@pytest.fixture
def hung_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Steps that do not come back until the event is set; `collect` waits as the native code would, without the lock."""
    may_end, collect = threading.Event(), NativeExecutor.collect

    def collects(self: NativeExecutor, ticket: Any) -> Any:
        may_end.wait(60)
        return collect(self, ticket)

    monkeypatch.setattr(NativeExecutor, "collect", collects)
    monkeypatch.setattr(engine_thread, "ABORT_GRACE_S", 0.05)
    yield may_end
    may_end.set()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-engine"]


def test_the_memory_and_the_threads_of_a_hung_step_are_not_free_when_its_model_leaves(
    path: Path, hung_step: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    resources = Resources(MemoryBudget(lambda: 2048 * MIB), num_models=2)
    config, source = config_of(path, Backend.NATIVE), resolve(str(path), path.parent)
    running = start_model(config, source, resources)
    share, left_bytes = resources.memory.share("one"), resources.memory.left_bytes()
    team, _ = resources.team("one", 2)
    assert share is not None
    running.engine.submit(make_request("r", [5, 6, 7]))
    while not running.engine._engine.executor_call():  # type: ignore[union-attr]
        pass
    with caplog.at_level(logging.WARNING):
        assert not running.close()
    assert (resources.memory.left_bytes(), resources.memory.stuck_bytes()) == (left_bytes, share.num_bytes)
    assert resources.memory.share("one") is None
    assert "a step or load of one has not come back; until it does, it holds" in caplog.text
    assert resources.team("two", 2)[0] is not team, "others do not wait for the threads that it holds"
    with pytest.raises(NotEnoughMemory, match=r"a step or load of one that has not come back holds"):
        raise resources.memory.explained("two", NotEnoughFreeMemory("It does not fit.", instead="Take another"))
    hung_step.set()
    for thread in engine_threads():
        thread.join(20)
    running = start_model(config, source, resources)  # the same model, which does not fit beside itself
    assert resources.memory.stuck_bytes() == 0
    assert asyncio.run(answer(running))
    running.close()
    assert resources.memory.left_bytes() == left_bytes + share.num_bytes
    assert "a step or load of one has come back" in caplog.text


def test_an_engine_that_is_made_anew_is_counted_beside_the_one_whose_step_hangs(path: Path, hung_step: threading.Event) -> None:
    resources = Resources(MemoryBudget(lambda: 2048 * MIB), num_models=2)
    running = start_model(config_of(path, Backend.NATIVE), resolve(str(path), path.parent), resources)
    share, left_bytes = resources.memory.share("one"), resources.memory.left_bytes()
    assert share is not None
    running.engine.submit(make_request("r", [5, 6, 7]))
    while not running.engine._engine.executor_call():  # type: ignore[union-attr]
        pass
    for _ in range(2):  # two attempts: its step is counted once
        running.engine._make_engine(lambda: None).close(0.0)  # type: ignore[union-attr]
    assert resources.memory.left_bytes() == left_bytes - share.num_bytes
    assert resources.memory.available_bytes("one", is_restart=True) == 2048 * MIB
    hung_step.set()
    running.close()
    wait_until(lambda: resources.memory.left_bytes() == left_bytes + share.num_bytes)  # the hung thread gives its share back


@pytest.mark.parametrize("changed", ["large", "adapter", "head", "small"])
def test_an_engine_is_not_made_anew_of_files_that_replaced_the_models(tmp_path: Path, changed: str) -> None:
    """The tokenizer, the fingerprint and the blocks on disk would be another model's."""
    tiny = TinyLlama(num_layers=7)
    write_hf(tmp_path / "large", tiny)
    write_adapter(tmp_path / "adapter", factors_of_llama(tiny))
    write_head(tmp_path / "head", tiny)
    write_gguf(tmp_path / "small.gguf", tiny)
    guesser = tmp_path / ("small.gguf" if changed == "small" else "head")
    config = config_of(tmp_path / "large", Backend.NATIVE, lora=LoraConfig(merge_lora=(str(tmp_path / "adapter"),)))
    config = replace(config, scheduler=replace(config.scheduler, speculation_model=str(guesser)))
    running = start_model(config, resolve(config.model.model, tmp_path))
    make = running.engine._make_engine  # type: ignore[union-attr]
    try:
        for folder, name in itertools.product(("large", "adapter", "head"), ("README.md", ".penstock-complete", "other.gguf")):
            (tmp_path / folder / name).write_text("not read by the load")
        make(lambda: None).close(0.0)
        file = guesser if changed == "small" else next((tmp_path / changed).glob("*.safetensors"))
        new = tmp_path / "new"
        new.write_bytes(file.read_bytes()[:-1] + b"\x01")
        new.replace(file)
        with pytest.raises(ModelChanged, match=rf"{changed}\S* has changed since the model was loaded"):
            make(lambda: None)
    finally:
        running.close()


def test_what_a_tenant_has_used_is_remembered_when_its_model_is_loaded_again(path: Path) -> None:
    limits = AdmissionConfig(tenant_tokens_per_minute=100)
    served = serve_model(config_of(path, admission=limits), resolve(str(path), path.parent), Resources())
    ask = Ask(tenant="a", num_chars=0, num_token_ids=60, num_requests=1, min_new_tokens=1, max_new_tokens=1)
    for refused_with in (None, RejectReason.TENANT_TOKENS):
        running = served.load()
        try:
            door, now_ns = running.admission, running.clock.now_ns()
            if refused_with is None:
                entering = door.decide(ask, running.engine.load(), now_ns)
                door.add_requests(entering, [make_request("r", list(range(60)), max_tokens=1, tenant="a")], now_ns)
                door.end_entering(entering)
                door.forget(["r"])
                continue
            with pytest.raises(Rejected) as refused:
                door.decide(ask, running.engine.load(), now_ns)
            assert refused.value.reason is refused_with
        finally:
            running.close()
