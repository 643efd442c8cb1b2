"""The disk tier as the composition root makes it: what is kept for the next start, and what is not."""

from __future__ import annotations

import asyncio
import errno
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native.executor import NativeExecutor
from penstock.config import Backend, BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import start_model
from penstock.deploy.running import RunningModel
from penstock.engine import transfers
from penstock.engine.state import EngineState
from penstock.models.catalog import resolve
from penstock.obs.prometheus import expose
from penstock.storage.block_file import FILE_NAME, PAGE_BYTES, BlockFile
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, ExecutorFailure
from penstock.types.request import FinishReason
from support.reading import chunks_of
from support.tiny_models import TinyLlama, write_gguf

CPU_BACKENDS = (Backend.NATIVE, Backend.REFERENCE)
PROMPT = [token % 200 for token in range(1, 100)]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama())


def config(folder: Path, *, backend: str = Backend.NATIVE, dtype: str = "int8", **kv: Any) -> Config:
    return Config(
        backend=BackendConfig(backend=backend),
        kv=KvConfig(
            kv_cache_memory_bytes=1 << 20,
            kv_cache_dtype=dtype,
            **({"kv_disk_path": str(folder), "kv_disk_size_bytes": 10 << 20} | kv),
        ),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


def build(gguf: Path, settings: Config) -> RunningModel:
    return start_model(settings, resolve(str(gguf), gguf.parent))


def ask(runtime: RunningModel, name: str = "r") -> tuple[list[int], int]:
    """Its answer, and how many tokens of its prompt were found."""

    async def answer() -> tuple[list[int], int]:
        chunks = [chunk async for chunk in chunks_of(runtime.bridge, make_request(name, PROMPT, max_tokens=5))]
        if chunks[-1].finish_reason is FinishReason.ERROR:
            return [], 0
        return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].num_cached_tokens

    return asyncio.run(answer())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_session_goes_on_in_the_next_process(gguf: Path, tmp_path: Path, backend: str, dtype: str) -> None:
    settings = config(tmp_path, backend=backend, dtype=dtype)
    answers = []
    for expected_cached in (0, 96):
        runtime = build(gguf, settings)
        try:
            tokens, num_cached = ask(runtime)
            answers.append(tokens)
            assert num_cached == expected_cached
            assert b"penstock_kv_disk_up{" in expose(runtime.metrics)
        finally:
            runtime.close(30.0)
        assert "penstock-tier" not in {thread.name for thread in threading.enumerate()}, "its thread has ended"
    assert answers[0] == answers[1]


def test_what_depends_on_another_kv_type_is_discarded(gguf: Path, tmp_path: Path) -> None:
    for dtype in ("int8", "bf16"):
        runtime = build(gguf, config(tmp_path, dtype=dtype))
        try:
            assert ask(runtime)[1] == 0
        finally:
            runtime.close(30.0)


def test_another_model_finds_nothing(gguf: Path, tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "tiny.gguf", TinyLlama(seed=1))
    for path in (gguf, other):
        runtime = build(path, config(tmp_path))
        try:
            assert ask(runtime)[1] == 0
        finally:
            runtime.close(30.0)


class BiasedLlama(TinyLlama):
    """Like Qwen2.5: a bias of keys that is much larger than they are, and a pair of columns that turns by 0.64 radians over 128
    positions and by 1.28 over 256."""

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: value * (500 if name.endswith("k_proj.bias") else 1) for name, value in super().weights().items()}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_keys_that_are_stored_without_another_part_of_their_bias_are_discarded(
    tmp_path: Path, backend: str, has_bias: bool
) -> None:
    """Which part that is depends on the longest request. Keys without a bias are the same for all."""
    path = write_gguf(tmp_path / "tiny.gguf", BiasedLlama(has_qkv_bias=has_bias, rope_theta=4800.0))
    answers = []
    for folder, max_model_len, num_expected in (
        ("kept", 256, 0),
        ("kept", 128, 0 if has_bias else 96),
        ("other", 128, 0),
        ("kept", 120, 96),
    ):
        settings = replace(config(tmp_path / folder, backend=backend), model=ModelConfig(max_model_len=max_model_len))
        runtime = build(path, settings)
        try:
            tokens, num_cached = ask(runtime)
        finally:
            runtime.close(30.0)
        answers.append(tokens)
        assert num_cached == num_expected, f"{folder}, {max_model_len}"
    assert answers[1] == answers[2]


def test_without_prefix_caching_nothing_is_kept(gguf: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, prefix_caching=False)
    for _ in range(2):
        runtime = build(gguf, settings)
        try:
            assert ask(runtime)[1] == 0
        finally:
            runtime.close(30.0)
    assert (tmp_path / FILE_NAME).stat().st_size < PAGE_BYTES


def test_by_default_there_is_no_tier(gguf: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, kv_disk_path=None, kv_disk_size_bytes=0)
    runtime = build(gguf, settings)
    try:
        ask(runtime)
        assert b"kv_disk" not in expose(runtime.metrics)
    finally:
        runtime.close(30.0)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_size_below_one_block_is_an_error(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_disk_size is too small.* Raise --kv-disk-size"):
        build(gguf, config(tmp_path, kv_disk_size_bytes=100))


def test_an_engine_that_failed_leaves_nothing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are not trusted, and the next one has a tier again."""
    runtime = build(gguf, config(tmp_path))
    try:
        ask(runtime)
        runtime.close(30.0)
        runtime = build(gguf, config(tmp_path))
        with monkeypatch.context() as broken:
            broken.setattr(NativeExecutor, "collect", _fail)
            assert ask(runtime, "broken") == ([], 0)
        end = time.monotonic() + 30.0
        while runtime.engine.state is not EngineState.READY:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (tmp_path / FILE_NAME).stat().st_size <= PAGE_BYTES
        assert ask(runtime, "after")[1] == 0
        assert ask(runtime, "again")[1] > 0
    finally:
        runtime.close(30.0)
    runtime = build(gguf, config(tmp_path))
    try:
        assert ask(runtime)[1] == 96
    finally:
        runtime.close(30.0)


def test_a_file_that_cannot_be_read_is_begun_anew(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = build(gguf, config(tmp_path))
    ask(runtime)
    runtime.close(30.0)

    def fail(_: BlockFile) -> Any:
        raise OSError(errno.EIO, "the device failed, as it was told to")

    with monkeypatch.context() as broken:
        broken.setattr(BlockFile, "entries", fail)
        runtime = build(gguf, config(tmp_path))
    try:
        assert "can't be read" in caplog.text
        assert ask(runtime)[1] == 0
    finally:
        runtime.close(30.0)


def test_an_engine_that_comes_back_without_its_file_says_that_it_has_none(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(_: BlockFile) -> Any:
        raise OSError(errno.EBUSY, "the device does not answer, as it was told to")

    runtime = build(gguf, config(tmp_path))
    try:
        monkeypatch.setattr(BlockFile, "emptied", hang)
        with monkeypatch.context() as broken:
            broken.setattr(NativeExecutor, "collect", _fail)
            assert ask(runtime, "broken") == ([], 0)
        end = time.monotonic() + 30.0
        while runtime.engine.state is not EngineState.READY:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert re.search(rb"penstock_kv_disk_up\S* 0", expose(runtime.metrics))
        assert ask(runtime, "after")[0]
    finally:
        runtime.close(30.0)


def test_an_engine_that_can_not_be_made_anew_leaves_no_executor_behind(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for its staging, twice; what its weights took is there for the next attempt."""
    make, close, staging = NativeExecutor.__init__, NativeExecutor.close, transfers._staging
    is_open: dict[int, bool] = {}
    made: list[Any] = []
    num_calls = 0

    def note_made(executor: Any, *args: Any, **kwargs: Any) -> None:
        make(executor, *args, **kwargs)
        is_open[id(executor)] = True
        made.append(executor)

    def note_closed(executor: Any) -> None:
        is_open[id(executor)] = False
        close(executor)

    def fail_twice(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise MemoryError
        return staging(*args)

    monkeypatch.setattr(NativeExecutor, "__init__", note_made)
    monkeypatch.setattr(NativeExecutor, "close", note_closed)
    runtime = build(gguf, config(tmp_path / "kv"))
    monkeypatch.setattr(transfers, "_staging", fail_twice)
    runtime.engine._first_delay_s = 0.01
    try:
        with monkeypatch.context() as broken:
            broken.setattr(NativeExecutor, "collect", _fail)
            ask(runtime, "broken")
        end = time.monotonic() + 30.0
        while runtime.engine.state is not EngineState.READY:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (num_calls, len(made)) == (3, 1 + 3), "one for the start, and one for each attempt"
        assert sum(is_open.values()) == 1
    finally:
        runtime.close(30.0)


def _fail(*_: Any) -> None:
    raise ExecutorFailure("the device failed, as it was told to")
