"""A draft head (EAGLE-3) that guesses for its model: the same answers, its guesses, and what is refused at the start."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Backend, BackendConfig, Config, KvConfig, SchedulerConfig
from penstock.deploy.factory import start_model
from penstock.models.catalog import resolve
from penstock.sched.guessing import Guessing
from penstock.testing.builders import make_request
from penstock.types.request import FinishReason
from support.reading import chunks_of
from support.tiny_heads import write_head
from support.tiny_models import TinyLlama, write_hf

TARGET = TinyLlama(num_layers=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_hf(folder / "model", TARGET)
    write_head(folder / "head", TARGET)
    return folder


def start(folder: Path, backend: str, **scheduler: Any) -> Any:
    config = Config(
        backend=BackendConfig(backend=backend),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, speculation="off", **scheduler),
    )
    return start_model(config, resolve(str(folder / "model"), folder))


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
    print(guesses[1])
