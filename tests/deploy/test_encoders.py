"""Encoders from a directory to answers: their settings, their capacity, and what means nothing to them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.cli.main import cli
from penstock.config import Backend, BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.deploy import executor, forecast, sizing
from penstock.deploy.blueprint import Blueprint
from penstock.deploy.factory import start_model
from penstock.deploy.resolve import resolve as resolve_model
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.deploy.start_log import log_model
from penstock.models.catalog import resolve
from penstock.serve.app import create_app
from penstock.types.encoder import Task
from penstock.types.errors import ConfigError, ModelError, NotEnoughMemory
from support.deployments import deployment_of
from support.executors import noted_executors
from support.parity.encoder_cases import ENCODERS, write_encoder

REFERENCE = Config(backend=BackendConfig(backend=Backend.REFERENCE))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(ENCODERS["bert"], tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(ENCODERS["bert_classes"], tmp_path_factory.mktemp("models") / "classifier")


def start(path: Path, config: Config = REFERENCE) -> Any:
    return start_model(config, resolve(str(path), path.parent))


def ask(path: Path, *bodies: tuple[str, dict[str, object]], config: Config = REFERENCE) -> list[Any]:
    async def all_of_them() -> list[Any]:
        deployment = deployment_of(start(path, config))
        app = create_app(deployment, ServerConfig())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answers = [await client.post(route, json=body) for route, body in bodies]
        deployment.close()
        return [answer.json() for answer in answers]

    return asyncio.run(all_of_them())


def test_a_capacity_has_room_for_the_longest_text_and_no_memory_for_keys(
    embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = noted_executors(monkeypatch, Backend.REFERENCE)
    running = start(embedder)
    capacity = executors[-1].capacity
    longest = ENCODERS["bert"].config["max_position_embeddings"]
    assert capacity.is_one_pass
    assert (capacity.max_rows, capacity.num_blocks) == (256, 513)
    assert capacity.max_step_tokens == max(512, longest)
    assert capacity.max_model_len == running.model.capacity.max_model_len == running.model.encoder.max_tokens == longest
    assert capacity.block_size >= longest
    assert running.model.encoder.task is Task.EMBED
    assert running.chat_template is None
    running.close()


def test_texts_are_shorter_by_default_where_memory_is_too_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ENCODERS["qwen3_embedding"]
    path = write_encoder(replace(case, config={**case.config, "max_position_embeddings": 8192}), tmp_path / "long")
    monkeypatch.setattr(sizing, "STEP_RESERVE_BYTES", 0)

    def blueprint_of(free_bytes: int, **settings: Any) -> Blueprint:
        resources = Resources(MemoryBudget(lambda: RESERVE_BYTES + free_bytes))
        found, model = resolve_model(replace(REFERENCE, **settings), resolve(str(path), path.parent), resources.machine(""))
        log_model(found, model)
        resources.memory.take("", found.share)  # does not raise
        return found

    whole = blueprint_of(1 << 30)
    assert (whole.measured_plan.capacity.max_model_len, whole.compute.max_step_tokens) == (8192, 8192)
    assert not whole.measured_plan.is_shortened
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    weight_bytes, of_token = whole.share.num_weight_bytes, whole.share.num_step_bytes / 8192
    assert of_token > 4 * case.config["intermediate_size"]
    short = blueprint_of(weight_bytes + int(3000 * of_token))
    assert (short.measured_plan.capacity.max_model_len, short.compute.max_step_tokens) == (2048, 2048)
    assert short.measured_plan.is_shortened
    assert "up to 8192 tokens, but the memory is enough for 2048" in caplog.text
    monkeypatch.setattr(forecast, "available_memory_bytes", lambda: RESERVE_BYTES + weight_bytes + int(3000 * of_token))
    assert forecast.appraise(REFERENCE, resolve(str(path), path.parent)).longest_text == 2048, "as `penstock show` says"

    model, scheduler = ModelConfig(max_model_len=2500), SchedulerConfig(max_num_batched_tokens=8192)
    assert blueprint_of(weight_bytes + int(3000 * of_token), model=model).measured_plan.capacity.max_model_len == 2500
    for settings in ({"model": replace(model, max_model_len=8192)}, {"scheduler": scheduler}):
        with pytest.raises(NotEnoughMemory, match=r"what a step of 8192 tokens takes, .* leave nothing") as refused:
            blueprint_of(weight_bytes + int(3000 * of_token), **settings)
        assert "--max-model-len" in refused.value.remedy


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.NATIVE])
def test_a_text_may_be_longer_than_any_block_of_a_kv_cache(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = noted_executors(monkeypatch, backend)
    short = ENCODERS["bert"]
    shapes = {name: (520, shape[1]) if "position" in name else shape for name, shape in short.shapes.items()}
    case = replace(short, config={**short.config, "max_position_embeddings": 520}, shapes=shapes)
    path = write_encoder(case, tmp_path / "long")
    running = start(path, Config(backend=BackendConfig(backend=backend)))
    capacity = executors[-1].capacity
    assert (capacity.max_model_len, capacity.block_size, capacity.max_step_tokens) == (520, 528, 520)
    running.close()


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.NATIVE])
def test_a_vector_is_the_same_alone_and_in_a_list(embedder: Path, backend: Backend) -> None:
    texts = ["one two", "three", "a longer text of some words"]
    single = [("/v1/embeddings", {"input": text}) for text in texts]
    config = Config(backend=BackendConfig(backend=backend, threads=2 if backend is Backend.NATIVE else None))
    answers = ask(embedder, ("/v1/embeddings", {"input": texts}), *single, config=config)
    together = [one["embedding"] for one in answers[0]["data"]]
    assert together == [answer["data"][0]["embedding"] for answer in answers[1:]]
    assert np.linalg.norm(together[0]) == pytest.approx(1, abs=1e-5)


def test_a_classifier_has_probabilities(classifier: Path) -> None:
    [found, refused] = ask(classifier, ("/classify", {"input": "one two"}), ("/v1/embeddings", {"input": "one"}))
    assert sum(found["data"][0]["probs"]) == pytest.approx(1)
    assert "is a classifier" in refused["error"]["message"]


def test_the_longest_text_may_be_set(embedder: Path) -> None:
    config = replace(REFERENCE, model=ModelConfig(max_model_len=6))
    [short, long] = ask(embedder, ("/v1/embeddings", {"input": "a"}), ("/v1/embeddings", {"input": "a " * 20}), config=config)
    assert "data" in short
    assert "is 6 tokens" in long["error"]["message"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(kv=KvConfig(kv_cache_memory_bytes=1 << 20)), "kv_cache_memory is a setting of the KV cache"),
        (Config(kv=KvConfig(block_size=32)), "block_size is a setting"),
        (Config(kv=KvConfig(kv_cache_dtype="bf16")), "kv_cache_dtype is a setting"),
        (Config(kv=KvConfig(prefix_caching=False)), "prefix_caching is a setting"),
        (Config(model=ModelConfig(chat_template="x")), "chat_template is set"),
        (Config(model=ModelConfig(experts_on_disk=True)), "backend can't keep experts in a file"),
        (Config(model=ModelConfig(max_model_len=9999)), "longer than the model's own"),
        (Config(scheduler=SchedulerConfig(max_num_batched_tokens=16)), "max_num_batched_tokens is 16"),
        (Config(scheduler=SchedulerConfig(victim="latest")), "--victim would change nothing"),
    ],
)
def test_settings_that_mean_nothing_to_texts_are_refused_by_name(embedder: Path, config: Config, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        start(embedder, replace(config, backend=REFERENCE.backend))
    assert words in str(raised.value)
    assert raised.value.remedy


def test_experts_of_an_encoder_may_lie_on_the_disk(embedder: Path, tmp_path: Path) -> None:
    path = write_encoder(ENCODERS["nomic_bert_experts"], tmp_path / "mixture")
    question = ("/v1/embeddings", {"input": "a b"})
    in_memory = ask(path, question, config=Config())
    on_disk = Config(model=ModelConfig(experts_on_disk=True, cache_dir=str(tmp_path)))
    assert ask(path, question, config=on_disk) == in_memory
    assert (tmp_path / "experts").is_dir()
    with pytest.raises(ConfigError, match="is not a mixture of experts"):
        start(embedder, on_disk)


def test_a_task_that_the_files_do_not_have_is_refused(embedder: Path) -> None:
    with pytest.raises(ModelError, match="this model can't generate text"):
        start(embedder, replace(REFERENCE, model=ModelConfig(task="generate")))
    with pytest.raises(ModelError, match="no head"):
        start(embedder, replace(REFERENCE, model=ModelConfig(task="rerank")))


def test_floats_are_int8_on_the_cpu_or_bf16_if_wanted(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool | None] = []
    make = executor._make

    def recorded(*args: Any, **extras: Any) -> Any:
        wanted.append(extras["rounds_floats"])
        return make(*args, **extras)

    monkeypatch.setattr(executor, "_make", recorded)
    for weight_dtype in (None, "int8", "bf16"):
        config = Config(backend=BackendConfig(backend=Backend.NATIVE, weight_dtype=weight_dtype))
        ask(embedder, ("/v1/embeddings", {"input": [5, 6]}), config=config)
    assert wanted == [None, True, False]
    with pytest.raises(
        ConfigError, match="weight_dtype is bf16: on the CPU it is for models that read texts, which the native"
    ):
        start(embedder, replace(REFERENCE, backend=replace(REFERENCE.backend, weight_dtype="bf16")))


def test_another_pooling_makes_other_vectors(embedder: Path) -> None:
    body = ("/v1/embeddings", {"input": "one two"})
    [mean] = ask(embedder, body)
    [first] = ask(embedder, body, config=replace(REFERENCE, model=ModelConfig(pooling="first")))
    assert mean["data"][0]["embedding"] != first["data"][0]["embedding"]
    [tokens] = ask(embedder, ("/pooling", {"input": "one two"}), config=replace(REFERENCE, model=ModelConfig(pooling="each")))
    rows = np.array(tokens["data"][0]["data"])
    assert rows.shape == (tokens["usage"]["prompt_tokens"], mean and len(mean["data"][0]["embedding"]))


def test_forecasts_of_answers_are_refused_for_encoders(embedder: Path) -> None:
    for command in (
        ["plan", str(embedder), "--slo", "ttft=2s"],
        ["simulate", str(embedder)],
        ["profile", str(embedder), "--backend", "reference"],
    ):
        with pytest.raises(ConfigError, match="writes none"):
            cli.main(command, standalone_mode=False)


def test_show_tells_the_task(embedder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["show", str(embedder)], standalone_mode=False)
    told = capsys.readouterr().out
    assert "embed: " in told
    assert "nothing" in told.split("refused")[1]
    assert "chat-template" not in told
