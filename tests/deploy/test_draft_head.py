"""A draft head (EAGLE-3) that guesses for its model: the same answers, its guesses, and what is refused at the start."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Backend, BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import open_executor, start_model
from penstock.deploy.resolve import packed_weights
from penstock.deploy.resolve import resolve as resolve_blueprint
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.models.catalog import resolve
from penstock.models.packed_file import write_packed
from penstock.sched.guessing import Guessing
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, ModelError, NotEnoughMemory
from penstock.types.request import FinishReason
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.reading import chunks_of
from support.tiny_heads import write_head
from support.tiny_models import TinyLlama, write_hf

TARGET = TinyLlama(num_layers=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_hf(folder / "large", TARGET)
    write_head(folder / "head", TARGET)
    return folder


def config_of(folder: Path, backend: str, **scheduler: Any) -> Config:
    return Config(
        model=ModelConfig(model=str(folder / "large")),
        backend=BackendConfig(backend=backend),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, speculation="off", **scheduler),
    )


def start(folder: Path, backend: str, resources: Resources | None = None, **scheduler: Any) -> Any:
    return start_model(config_of(folder, backend, **scheduler), resolve(str(folder / "large"), folder), resources)


def answers(running: Any) -> list[Any]:
    requests = [
        make_request(f"r{idx}", [1 + idx, 60, 70], max_tokens=60, temperature=0.7 * (idx % 2), seed=idx) for idx in range(6)
    ]

    async def answer(request: Any) -> Any:
        chunks = [chunk async for chunk in chunks_of(running.bridge, request)]
        return chunks[-1].finish_reason, [token_id for chunk in chunks for token_id in chunk.token_ids]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(answer, requests))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("backend", [Backend.NATIVE, Backend.REFERENCE])
def test_answers_are_the_same(folder: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guessing, "_step_ns", lambda *_: 1e12)  # whatever the machine does, guesses cost nothing
    found: list[list[Any]] = []
    guesses: list[Counter[tuple[str, int, int]]] = []
    for options in ({}, {"speculation_model": str(folder / "head")}):
        running = start(folder, backend, **options)
        found.append(answers(running))
        guesses.append(running.metrics.guesses)
        assert running.close(30.0)
    assert found[0] == found[1]
    assert all(reason is FinishReason.LENGTH for reason, _ in found[0])
    assert not guesses[0]
    assert {source for source, *_ in guesses[1]} == {"draft"}
    assert guesses[1].total() > 100


def test_it_counts_as_the_model_s_memory(folder: Path) -> None:
    resources = Resources()
    running = start(folder, Backend.NATIVE, resources, speculation_model=str(folder / "head"))
    share = resources.memory.share("large")
    running.close()
    assert share is not None
    assert share.num_draft_bytes > share.num_kv_bytes / TARGET.num_layers
    assert share.num_draft_bytes < share.num_weight_bytes + share.num_kv_bytes


def test_the_model_s_packed_weights_serve_beside_a_head(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = config_of(folder, Backend.NATIVE)
    config = replace(config, model=replace(config.model, cache_dir=str(tmp_path)))
    source = resolve(str(folder / "large"), folder)
    packed = packed_weights(config, source.path)
    _, _, executor = open_executor(config, source)
    write_packed(packed.path, packed.identity(), executor.packed)  # type: ignore[attr-defined]
    executor.close()
    found = []
    for head in (None, str(folder / "head")):
        wanted = replace(config, scheduler=replace(config.scheduler, speculation_model=head))
        running = start_model(wanted, source)
        found.append(answers(running))
        assert running.close(30.0)
    assert found[0] == found[1]
    assert len([record for record in caplog.records if "weights are mapped from" in record.message]) == 2


class TestRefused:
    def test_a_head_of_another_model(self, folder: Path, tmp_path: Path) -> None:
        other = write_head(tmp_path / "other", TARGET, extra={"vocab_size": 1000})
        with pytest.raises(ModelError, match="guesses for a model with 1000 tokens, and large has 264"):
            start(folder, Backend.NATIVE, speculation_model=str(other))

    def test_a_model_with_a_recurrent_state(self, folder: Path, tmp_path: Path) -> None:
        path = write_case(CASES["lfm2"], tmp_path)
        config = config_of(folder, Backend.NATIVE, speculation_model=str(folder / "head"))
        with pytest.raises(ConfigError, match="recurrent state"):
            start_model(config, resolve(str(path), tmp_path))

    def test_too_little_memory_for_both(self, folder: Path) -> None:
        source = resolve(str(folder / "large"), folder)
        blueprint, _ = resolve_blueprint(config_of(folder, Backend.NATIVE), source, Resources().machine("large"))
        resources = Resources(MemoryBudget(lambda: blueprint.share.num_bytes + 10_000))
        with pytest.raises(NotEnoughMemory, match="Beside large, the draft head head has no room: it takes"):
            start(folder, Backend.NATIVE, resources, speculation_model=str(folder / "head"))
