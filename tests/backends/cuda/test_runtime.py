"""The whole of it, as the composition root makes it, on CPU tensors: profile run, engine, answers, the tier in host memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends import cuda
from penstock.backends.cuda import attention_trial, flashinfer_attention, memory
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.graphs import Captured
from penstock.backends.native._native import Team
from penstock.config import BackendConfig, Config, KvConfig, LoraConfig, SchedulerConfig
from penstock.deploy import executor as executor_part
from penstock.deploy import resources
from penstock.deploy.factory import start_model
from penstock.deploy.resolve import resolve as resolve_model
from penstock.deploy.resources import Machine
from penstock.deploy.running import RunningModel
from penstock.engine.transfers import num_staged_blocks
from penstock.machine import find_cores
from penstock.models.catalog import resolve
from penstock.obs.prometheus import expose
from penstock.testing.builders import make_request, make_text
from penstock.types.adapter import AdapterRef
from penstock.types.errors import ConfigError
from support.backends.cuda import fake_flashinfer
from support.backends.cuda.emulated_gpu import GIB, emulate_gpu
from support.fp8_models import write_fp8_hf
from support.interpreted import HAS_DEVICE
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.reading import chunks_of
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf

SMALL = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=40)
SESSION = [token % 200 for token in range(1, 38)]
OTHERS = [[(idx * 37 + token * token) % 190 + 5 for token in range(60)] for idx in range(2)]
"""Kernels take milliseconds a program in the interpreter: everything is small."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama(num_layers=1))


def build(
    gguf: Path,
    *,
    device: str = "cuda",
    deterministic: bool = True,
    weight_dtype: str | None = None,
    attention: str | None = None,
    lora: LoraConfig | None = None,
    **kv: Any,
) -> RunningModel:
    config = Config(
        backend=BackendConfig(
            device=device,
            backend="reference" if device == "cpu" else None,
            deterministic=deterministic,
            weight_dtype=weight_dtype,
            attention=attention,
        ),
        # Other tests use the same device.
        kv=KvConfig(kv_cache_dtype="bf16", gpu_memory_utilization=0.3 if HAS_DEVICE and device == "cuda" else None, **kv),
        scheduler=SMALL,
        lora=lora or LoraConfig(),
    )
    return start_model(config, resolve(str(gguf), gguf.parent))


def ask(
    runtime: RunningModel, name: str, prompt: list[int], max_tokens: int = 2, adapter: AdapterRef | None = None
) -> tuple[list[int], int]:
    """Its answer, and how many tokens of its prompt were found."""

    async def answer() -> tuple[list[int], int]:
        request = make_request(name, prompt, max_tokens=max_tokens, adapter=adapter)
        chunks = [chunk async for chunk in chunks_of(runtime.bridge, request)]
        assert not chunks[-1].detail, chunks[-1].detail
        return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].num_cached_tokens

    return asyncio.run(answer())


def test_it_answers_as_the_reference_does(gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answers = []
    for device in ("cpu", "cuda"):
        runtime = build(gguf, device=device, **({"kv_cache_memory_bytes": 1 << 20} if device == "cpu" else {}))
        try:
            answers.append(ask(runtime, "r", SESSION)[0])
            assert (runtime.metrics.num_weight_bytes > 0) == (device == "cuda")
        finally:
            assert runtime.close(30.0)
    assert answers[0] == answers[1]
    if not HAS_DEVICE:
        assert "backend cuda, Emulated, 10 GiB, compute capability 9.0, deterministic" in caplog.text


def test_adapters_answer_as_the_references(gguf: Path, tmp_path: Path) -> None:
    """By their folder's files, which are read while the request waits."""
    model = TinyLlama(num_layers=1)
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, factors_of_llama(model, rank=5, seed=seed))
    answers = []
    for device in ("cpu", "cuda"):
        lora = LoraConfig(lora_dir=str(tmp_path), max_lora_rank=8, max_cpu_loras=8)
        room = {"kv_cache_memory_bytes": 1 << 20} if device == "cpu" else {}
        runtime = build(gguf, device=device, lora=lora, **room)
        try:
            assert runtime.adapters is not None
            refs = [None, *map(runtime.adapters.find, ("one", "two"))]
            answers.append([ask(runtime, f"r{i}", SESSION, adapter=ref)[0] for i, ref in enumerate(refs)])
        finally:
            assert runtime.close(30.0)
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == 3


def test_adapters_that_the_machine_has_no_memory_for_are_refused(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 4 * GIB)
    lora = LoraConfig(lora_dir=str(tmp_path), max_lora_rank=256, max_cpu_loras=100_000)
    with pytest.raises(ConfigError, match=r"100000 adapters .* do not fit the .* memory that are free.*--max-cpu-loras"):
        build(gguf, lora=lora)


def test_an_encoder_answers_as_the_reference_does(tmp_path: Path) -> None:
    path = write_encoder(ENCODERS["bert_dense"], tmp_path / "model")
    pair = make_text("r", [(7 * i) % 250 + 3 for i in range(19)], second_at=9)

    async def answer(runtime: RunningModel) -> bytes:
        chunks = [chunk async for chunk in chunks_of(runtime.bridge, pair)]
        assert not chunks[-1].detail, chunks[-1].detail
        return chunks[-1].states

    answers = []
    for backend in (BackendConfig(device="cpu", backend="reference"), BackendConfig(device="cuda", deterministic=True)):
        runtime = start_model(Config(backend=backend, scheduler=SchedulerConfig(max_num_seqs=2)), resolve(str(path), path))
        try:
            answers.append(np.frombuffer(asyncio.run(answer(runtime)), np.float32))
        finally:
            assert runtime.close(30.0)
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-3, atol=1e-4)


def test_graphs_mean_nothing_to_an_encoder(tmp_path: Path) -> None:
    path = write_encoder(ENCODERS["bert_dense"], tmp_path / "model")
    config = Config(backend=BackendConfig(device="cuda", cuda_graphs=True))
    with pytest.raises(ConfigError, match=r"cuda_graphs is set, and .* only reads texts"):
        start_model(config, resolve(str(path), path))


@pytest.mark.skipif(HAS_DEVICE, reason="counts captures by those that just run")
def test_decodes_are_captured_before_the_server_is_ready(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    captures: list[Captured] = []
    capture = Captured.without_device

    def count(run: Callable[[], torch.Tensor]) -> Captured:
        captures.append(capture(run))
        return captures[-1]

    monkeypatch.setattr(Captured, "without_device", count)
    runtime = build(gguf)
    try:
        assert "CUDA graphs of decodes: 2 captured in " in caplog.text
        num_before = len(captures)
        ask(runtime, "r", SESSION)
        assert len(captures) == num_before, "no request waits for a capture"
    finally:
        assert runtime.close(30.0)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A stand-in of it, that tiny heads suit."""
    if HAS_DEVICE:
        pytest.skip("the stand-in for FlashInfer computes on the CPU")
    monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (16,))
    monkeypatch.setattr(flashinfer_attention, "DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_trial, "REPEATS", 1)
    monkeypatch.setattr(cuda, "flashinfer_version", lambda: "0.7.2")
    return partial(fake_flashinfer.install, monkeypatch)


def test_it_answers_so_with_flashinfer_and_says_who_computes(
    gguf: Path, flashinfer: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    flashinfer()
    answers = []
    for settings in ({"device": "cpu", "kv_cache_memory_bytes": 1 << 20}, {"attention": "flashinfer", "deterministic": False}):
        runtime = build(gguf, **settings)  # type: ignore[arg-type]
        try:
            answers.append(ask(runtime, "r", SESSION, max_tokens=4)[0])
        finally:
            assert runtime.close(30.0)
    assert answers[0] == answers[1]
    for kind in ("decode", "prefill"):
        assert f"attention of {kind} steps: FlashInfer (FlashInfer 0.7.2 is " in caplog.text


def test_a_start_that_wants_flashinfer_ends_where_its_answers_are_wrong(gguf: Path, flashinfer: Callable[..., None]) -> None:
    flashinfer(error=0.5)
    with pytest.raises(ConfigError, match=r"FlashInfer can't compute the attention: its answers .* Leave out --attention, or"):
        build(gguf, attention="flashinfer", deterministic=False)


def test_weights_are_rounded_where_that_is_set_and_counted_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama(num_layers=1), matrix_type="F16")
    sizes = []
    for weight_dtype in (None, "fp8"):
        runtime = build(path, weight_dtype=weight_dtype)
        try:
            assert len(ask(runtime, "r", SESSION)[0]) == 2
            sizes.append(runtime.metrics.num_weight_bytes)
        finally:
            assert runtime.close(30.0)
    assert sizes[1] < sizes[0]


def test_weights_that_are_quantised_already_cannot_be_rounded(gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_dtype is fp8, and the weights of tiny are quantised already\. Leave out"):
        build(gguf, weight_dtype="fp8")


def test_a_checkpoint_in_fp8_cannot_be_rounded_to_it(tmp_path: Path) -> None:
    path = write_fp8_hf(tmp_path / "tiny", TinyLlama(num_layers=1), "row")
    with pytest.raises(ConfigError, match=r"weight_dtype is fp8, and the weights of tiny are quantised already\. Leave out"):
        build(path, weight_dtype="fp8")


def test_what_the_pool_loses_comes_back_from_the_machines_memory(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 2 * 2 * 16 * 16 * 4  # keys and values of two heads
    moved: list[int] = []
    move_blocks = memory.move_blocks

    def noted(executor: CudaExecutor, count: int) -> None:
        moved.append(count)
        move_blocks(executor, count)

    monkeypatch.setattr(memory, "move_blocks", noted)
    runtime = build(gguf, kv_cache_memory_bytes=6 * block_bytes, kv_host_size_bytes=200 * block_bytes)
    assert moved == [num_staged_blocks(block_bytes)], "what that takes of the device is measured"
    try:
        first, _ = ask(runtime, "first", SESSION)
        for idx, prompt in enumerate(OTHERS):
            ask(runtime, f"other-{idx}", prompt)
        again, num_cached = ask(runtime, "again", SESSION)
        assert again == first
        assert num_cached >= 32, "two full blocks were found"
        series = expose(runtime.metrics).decode()
        assert "penstock_kv_host_up" in series
        assert "penstock_kv_disk" not in series
        assert runtime.metrics.tier.num_loaded_blocks > 0
    finally:
        assert runtime.close(30.0)


def test_a_share_of_the_machines_memory_has_the_tier_and_the_adapters(gguf: Path) -> None:
    machine = resources.Resources(resources.MemoryBudget(lambda: 4 * GIB))
    config = Config(
        backend=BackendConfig(device="cuda", deterministic=True),
        kv=KvConfig(kv_cache_dtype="bf16", kv_cache_memory_bytes=1 << 20, kv_host_size_bytes=1 << 20),
        lora=LoraConfig(lora_dir=str(gguf.parent), max_lora_rank=4),
        scheduler=SMALL,
    )
    runtime = start_model(config, resolve(str(gguf), gguf.parent), machine)
    share = machine.memory.share("tiny")
    assert runtime.close(30.0)
    assert share is not None
    assert share.num_tier_bytes == 1 << 20
    assert share.num_adapter_bytes > 0


def test_an_executor_that_is_made_anew_stores_the_keys_of_the_one_before(tmp_path: Path) -> None:
    """A file of the disk tier outlives both, and what keys are stored without depends on the longest request."""
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama(num_layers=1, has_qkv_bias=True))
    block_bytes = 2 * 2 * 16 * 16 * 4  # as above
    kv = KvConfig(kv_cache_dtype="bf16", kv_cache_memory_bytes=6 * block_bytes)
    config = Config(backend=BackendConfig(device="cuda", deterministic=True), kv=kv, scheduler=SMALL)
    machine = Machine(available_bytes=GIB, total_bytes=GIB, num_models=1, cores=find_cores())
    blueprint, model = resolve_model(config, resolve(str(path), tmp_path), machine)
    blueprint, measured = executor_part.first_executor(blueprint, model, Team)
    assert isinstance(measured, CudaExecutor)
    assert blueprint.measured_plan.is_shortened
    anew = executor_part.build_executor(blueprint, model, Team)
    assert isinstance(anew, CudaExecutor)
    try:
        assert anew.num_positions == measured.num_positions == model.spec.max_model_len
        assert anew.capacity == measured.capacity
    finally:
        anew.close()
        measured.close()


def test_more_than_the_device_has_is_refused_with_the_numbers(gguf: Path) -> None:
    if HAS_DEVICE:
        pytest.skip("with an emulated memory only")
    with pytest.raises(ConfigError, match=r"take 2 GiB .* and kv_cache_memory is 9 GiB"):
        build(gguf, kv_cache_memory_bytes=9 * GIB)


def test_a_cache_that_the_device_does_not_give_is_an_error_of_the_settings(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("fragments")

    monkeypatch.setattr("penstock.backends.cuda.executor.CudaExecutor.resize", refuse)
    with pytest.raises(
        ConfigError, match=r"does not give the .* KV cache that were free: fragments.* --gpu-memory-utilization"
    ):
        build(gguf)
