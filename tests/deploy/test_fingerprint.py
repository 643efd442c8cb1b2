"""Fingerprints: another server of the same model has the same, and one whose numbers differ has another."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import BackendConfig, Config, KvConfig
from penstock.deploy.fingerprint import kv_fingerprint, system_fingerprint
from penstock.deploy.resolve import decide
from penstock.models import architectures
from penstock.models.architectures import describe
from penstock.types.model_spec import ModelSpec, Pooling, Rotation, TextEnding, spec_of_equal_layers
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingDefaults
from support.fake_machine import fake_gpu

POOLINGS: tuple[Pooling, ...] = ("mean", "first")
SPEC = spec_of_equal_layers(
    architecture="qwen2",
    vocab_size=100,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=40,
    norm_eps=1e-6,
    rope_inv_freq=tuple(10_000.0 ** -(i / 8) for i in range(8)),
    max_model_len=1000,
    tie_word_embeddings=True,
    has_qkv_bias=True,
)

AUTO = ("auto", "auto")


def fingerprint(
    path: Path, kv: KvConfig | None = None, *, spec: ModelSpec = SPEC, num_positions: int = 900, **backend: Any
) -> bytes:
    compute = decide(Config(backend=BackendConfig(**backend), kv=kv or KvConfig()), is_gpu=True)
    executor = SimpleNamespace(block_bytes=64, capacity=Capacity(2, 16, 1, 1, 50), num_positions=num_positions)
    return kv_fingerprint(compute, SimpleNamespace(path=path, spec=spec), executor, ())  # type: ignore[arg-type]


def test_weights_of_a_module_are_part_of_a_fingerprint(tmp_path: Path) -> None:
    for name in ("config.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"weights")
    own = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == own
    (tmp_path / "2_Dense/model.safetensors").write_bytes(b"others!")
    assert fingerprint(tmp_path) != own


def test_vectors_of_other_settings_have_another_fingerprint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"weights")
    executor = SimpleNamespace(capacity=Capacity(2, 16, 1, 1, 50), variant="avx2")
    found = set()
    for pooling in POOLINGS:
        for weight_dtype in ("int8", "bf16"):
            loaded = SimpleNamespace(
                path=model,
                spec=replace(SPEC, ending=TextEnding(pooling=pooling)),
                sampling=SamplingDefaults(),
                eos_token_ids=(),
            )
            compute = decide(Config(backend=BackendConfig(backend="native", weight_dtype=weight_dtype)))
            found.add(system_fingerprint(compute, loaded, executor, None, merged=(), parsers=AUTO))  # type: ignore[arg-type]
    assert len(found) == 4


def test_a_server_finds_the_kv_that_it_would_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    model = tmp_path / "model"
    model.write_bytes(b"weights")
    own = fingerprint(model)
    assert fingerprint(model, steps_in_flight=1) == own
    assert fingerprint(model, weight_dtype="fp8") != own
    assert fingerprint(model, deterministic=True) != own
    assert fingerprint(model, attention="triton") != own
    assert fingerprint(model, KvConfig(kv_cache_dtype="int8")) != own
    assert fingerprint(model, num_positions=800) == own
    assert fingerprint(model, num_positions=300) != own
    layers = tuple(replace(layer, mixer=replace(layer.attention, has_qkv_bias=False)) for layer in SPEC.layers)
    without = replace(SPEC, layers=layers)
    assert fingerprint(model, num_positions=300, spec=without) == fingerprint(model, spec=without)
    turned = replace(SPEC.layers[0].attention, rotation=Rotation(inv_freq=(1.0,) * 8))
    assert fingerprint(model, spec=SPEC.with_attention(lambda layer, attention: turned)) != own
    with monkeypatch.context() as patched:
        patched.setattr(architectures, "describe", lambda spec: replace(describe(spec), ops=describe(spec).ops[:-1]))
        assert fingerprint(model) != own
    model.write_bytes(b"others!")
    assert fingerprint(model) != own


def system(
    path: Path,
    *,
    variant: str = "avx2",
    template: str | None = "{{ messages }}",
    temperature: float | None = None,
    ends: tuple[int, ...] = (2,),
    **kv: Any,
) -> str:
    compute = decide(Config(backend=BackendConfig(device="cpu", backend="native"), kv=KvConfig(**kv)))
    executor: Any = SimpleNamespace(block_bytes=64, capacity=Capacity(2, 16, 1, 1, 50), variant=variant)
    model: Any = SimpleNamespace(path=path, spec=SPEC, sampling=SamplingDefaults(temperature=temperature), eos_token_ids=ends)
    return system_fingerprint(compute, model, executor, template, merged=(), parsers=AUTO)


def test_answers_of_equal_servers_have_one_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, copy = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for path in (model, copy):
        path.parent.mkdir()
        path.write_bytes(b"weights")
    os.utime(copy, ns=(1, 1))
    own = system(model)
    assert re.fullmatch("fp_[0-9a-f]{16}", own)
    assert system(model) == system(copy) == own
    assert system(model, variant="avx512") != own
    assert system(model, template=None) != own
    assert system(model, temperature=0.5) != own
    assert system(model, ends=(2, 3)) != own
    assert system(model, kv_cache_dtype="bf16") != own
    with monkeypatch.context() as newer:
        newer.setattr("penstock.__version__", "999")
        assert system(model) != own
    model.write_bytes(b"others!")
    assert system(model) != own
