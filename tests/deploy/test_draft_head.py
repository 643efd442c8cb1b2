"""A draft head (EAGLE-3) that guesses for its model: the same answers, its guesses, and what is refused at the start."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.reference.executor import ReferenceExecutor
from penstock.config import Backend, BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import open_executor, start_model
from penstock.deploy.resolve import packed_weights
from penstock.deploy.resolve import resolve as resolve_blueprint
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.engine.draft_model import MOST_UNREAD, HeadDrafter
from penstock.models.catalog import resolve
from penstock.models.eagle import load_head
from penstock.models.load import load_model
from penstock.models.packed_file import write_packed
from penstock.sched.drafting import Seen
from penstock.sched.guessing import Guessing
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, ModelError, NotEnoughMemory
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.request import FinishReason
from penstock.types.sampling import SamplingParams
from support.drafts import answers
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.reading import chunks_of
from support.tiny_heads import NUM_LOGITS, guessable, head_weights, write_head
from support.tiny_models import TinyLlama, encode, write_encoded, write_hf

TARGET = TinyLlama(num_layers=7)
SIZES: dict[str, Any] = {"num_blocks": 10, "block_size": 16, "max_rows": 4, "max_step_tokens": 128, "max_model_len": 128}


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


def test_each_token_comes_with_its_own_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in parts beside answers, cached prefixes, and guesses that were wrong."""
    monkeypatch.setattr(Guessing, "_step_ns", lambda *_: 1e12)
    seen: dict[str, dict[int, NDArray[np.float32]]] = {}

    def note(self: HeadDrafter, rows: Sequence[Seen], features: bytes) -> None:
        found = np.frombuffer(features, np.float32).reshape(-1, TARGET.hidden_size)
        for request_id, position, at, num in rows:
            seen.setdefault(request_id, {}).update({position + idx: found[at + idx] for idx in range(num)})
        see(self, rows, features)

    see = HeadDrafter.see
    monkeypatch.setattr(HeadDrafter, "see", note)
    shared = [idx * 7 % 260 for idx in range(40)]
    requests = [make_request(f"r{idx}", [*shared, *range(idx, 20 + idx)], max_tokens=20) for idx in range(6)]
    found = {}

    async def ask(running: Any, some: Sequence[Any]) -> None:
        async def answer(request: Any) -> None:
            chunks = [chunk async for chunk in chunks_of(running.bridge, request)]
            found[request.request_id] = [token_id for chunk in chunks for token_id in chunk.token_ids]

        await asyncio.gather(*map(answer, some))

    running = start(folder, Backend.REFERENCE, speculation_model=str(folder / "head"), max_num_batched_tokens=48)
    asyncio.run(ask(running, requests[:2]))
    asyncio.run(ask(running, requests[2:]))
    assert running.close(30.0)
    model = load_model(resolve(str(folder / "large"), folder))
    with_features = load_head(folder / "head", model).attached(model)
    for request in requests:
        tokens = (*request.prompt_token_ids, *found[request.request_id])
        assert with_features.program is not None
        executor = ReferenceExecutor(with_features, with_features.program, **SIZES)
        admit = AdmitRow("r", tokens, len(tokens), tuple(range(1, 9)), 0, SamplingParams(temperature=0.0))
        plan = StepPlan(0, 0, (admit,), (RowPlan("r", 0, len(tokens), (), 1),), ())
        wanted = np.frombuffer(executor.collect(executor.submit(plan)).features, np.float32).reshape(len(tokens), -1)
        told = seen[request.request_id]
        assert sorted(told) == list(range(min(told), len(tokens) - 1)), "each from the first on, but for the last token"
        for position, features in told.items():
            error = np.linalg.norm(features - wanted[position]) / np.linalg.norm(wanted[position])
            assert error < 0.05, f"{request.request_id} at {position}"
    assert min(seen["r5"]) > 0, "its prefix was cached"


def test_it_counts_as_the_model_s_memory(folder: Path) -> None:
    resources = Resources()
    running = start(folder, Backend.NATIVE, resources, speculation_model=str(folder / "head"))
    share = resources.memory.share("large")
    running.close()
    assert share is not None
    head = load_head(folder / "head", load_model(resolve(str(folder / "large"), folder)))
    num_steps_bytes = head.num_step_bytes(512) + 4 * MOST_UNREAD * TARGET.hidden_size * 4
    assert share.num_draft_bytes == head.num_bytes + num_steps_bytes + share.num_kv_bytes // TARGET.num_layers


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
    def test_a_head_that_guesses_nothing(self, folder: Path, tmp_path: Path) -> None:
        broken = write_head(tmp_path / "broken", TARGET)
        file = broken / "model.safetensors"
        tensors = {name: ("BF16", one.shape, encode(one, "bf16")) for name, one in head_weights(TARGET).items()}
        ids = guessable(TARGET) - np.arange(NUM_LOGITS)
        nan = np.full(TARGET.hidden_size, np.nan, np.float32)
        tensors |= {"d2t": ("I64", ids.shape, ids.tobytes()), "norm.weight": ("BF16", nan.shape, encode(nan, "bf16"))}
        write_encoded(file, tensors)
        with pytest.raises(ModelError, match="broken guesses no token"):
            start(folder, Backend.NATIVE, speculation_model=str(broken))

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
