"""Whose KV a file of the disk tier holds: what another server of the same model would compute otherwise is not found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backends import cuda
from penstock.config import BackendConfig, Config, KvConfig
from penstock.parts.disk_tier import _kv_fingerprint


def fingerprint(path: Path, kv: KvConfig | None = None, **backend: Any) -> bytes:
    config = Config(backend=BackendConfig(device="cuda", backend="cuda", **backend), kv=kv or KvConfig())
    return _kv_fingerprint(config, SimpleNamespace(path=path), SimpleNamespace(block_bytes=64))  # type: ignore[arg-type]


def test_a_server_finds_the_kv_that_it_would_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_gpu", lambda: cuda.Gpu("Fake", (9, 0), 1 << 30, 1))
    model = tmp_path / "model"
    model.write_bytes(b"weights")
    own = fingerprint(model)
    assert fingerprint(model, steps_in_flight=1) == own
    assert fingerprint(model, weight_dtype="fp8") != own
    assert fingerprint(model, deterministic=True) != own
    assert fingerprint(model, attention="triton") != own
    assert fingerprint(model, KvConfig(kv_cache_dtype="int8")) != own
    model.write_bytes(b"others!")
    assert fingerprint(model) != own
