"""Mixtures of experts that memory does not hold: refused with the remedy, and with it served from a file, to the same bits."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from penstock.backends.native import footprint
from penstock.cli.candidates import make_candidate
from penstock.config import Backend, BackendConfig, Config, Device, KvConfig, ModelConfig, SchedulerConfig
from penstock.deploy.experts import disk_words
from penstock.deploy.factory import start_model
from penstock.deploy.forecast import appraise, read_outline
from penstock.deploy.resolve import decide, num_memory_bytes
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.lab.hardware import this_machine
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, NotEnoughMemory
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.reading import chunks_of
from support.tiny_models import TinyLlama, write_gguf

KIB = 1 << 10
KV = KvConfig(kv_cache_memory_bytes=64 * KIB)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(CASES["mixtral_gguf"], tmp_path_factory.mktemp("mixtral"))


def config_of(path: Path, cache: Path, *, experts_on_disk: bool = True) -> Config:
    return Config(
        model=ModelConfig(model=str(path), cache_dir=str(cache), experts_on_disk=experts_on_disk),
        backend=BackendConfig(backend=Backend.NATIVE, threads=2),
        kv=KV,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
    )


def tokens_of(config: Config, path: Path, resources: Resources) -> list[int]:
    running = start_model(config, resolve(str(path), path.parent), resources)

    async def answer() -> list[int]:
        stream = chunks_of(running.bridge, make_request("r", [5, 7, 11, 13], max_tokens=12))
        return [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]

    try:
        return asyncio.run(answer())
    finally:
        running.close()


def load(path: Path) -> LoadedModel:
    return load_model(resolve(str(path), path.parent))


def test_a_mixture_that_memory_does_not_hold_is_served_from_a_file(mixture: Path, tmp_path: Path) -> None:
    model = load(mixture)
    assert 0 < model.num_expert_bytes < model.num_weight_bytes
    step_bytes = footprint.expert_bytes(model.spec, 16)
    others = model.num_weight_bytes - model.num_expert_bytes
    small = RESERVE_BYTES + others + step_bytes + 64 * KIB
    assert others + 64 * KIB + step_bytes < model.num_weight_bytes, "or the experts would fit, too"
    with pytest.raises(NotEnoughMemory, match="MiB are available") as refused:
        tokens_of(config_of(mixture, tmp_path, experts_on_disk=False), mixture, Resources(MemoryBudget(lambda: small)))
    assert "--experts-on-disk" in refused.value.remedy
    found = tokens_of(config_of(mixture, tmp_path), mixture, Resources(MemoryBudget(lambda: small)))
    in_memory = config_of(mixture, tmp_path, experts_on_disk=False)
    assert found == tokens_of(in_memory, mixture, Resources(MemoryBudget(lambda: 1 << 30)))
    assert len(found) == 12
    assert list((tmp_path / "experts").iterdir()) == [], "the file has no name"
    with pytest.raises(NotEnoughMemory):
        tokens_of(config_of(mixture, tmp_path), mixture, Resources(MemoryBudget(lambda: small - step_bytes)))


def test_a_disk_without_room_is_refused_before_anything_is_packed(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.deploy.experts.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, KIB))
    monkeypatch.setattr("penstock.deploy.executor.build_executor", lambda *_: pytest.fail("a weight is packed"))
    with pytest.raises(ConfigError, match=r"experts take .* in a file, and 1 KiB are free in") as refused:
        tokens_of(config_of(mixture, tmp_path), mixture, Resources())
    assert "--cache" in refused.value.remedy


def test_a_folder_in_memory_is_refused(mixture: Path) -> None:
    """A file there would take what it is to save."""
    with TemporaryDirectory(dir="/dev/shm") as folder, pytest.raises(ConfigError, match="the file lies in memory"):
        tokens_of(config_of(mixture, Path(folder)), mixture, Resources())


def test_a_folder_that_can_not_be_written_is_refused(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "experts").write_text("a file")
    with pytest.raises(ConfigError, match=r"The experts can't be kept in a file in .*: File exists") as refused:
        tokens_of(config_of(mixture, tmp_path), mixture, Resources())
    assert "--cache" in refused.value.remedy


def test_a_setting_that_would_change_nothing_is_refused(mixture: Path, tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "dense.gguf", TinyLlama())
    with pytest.raises(ConfigError, match="dense is not a mixture of experts"):
        tokens_of(config_of(dense, tmp_path), dense, Resources())
    config = config_of(mixture, tmp_path)
    reference = replace(config, backend=BackendConfig(backend=Backend.REFERENCE))
    with pytest.raises(ConfigError, match="reference backend can't keep experts in a file"):
        tokens_of(reference, mixture, Resources())


def test_a_gpu_has_no_such_setting(mixture: Path, tmp_path: Path) -> None:
    """A config that sets it and names no device computes on the CPU."""
    config = replace(config_of(mixture, tmp_path), backend=BackendConfig())
    assert decide(config).options.device == Device.CPU
    with pytest.raises(ConfigError, match="--experts-on-disk is a setting of the CPU, and a GPU is to be used"):
        decide(config, is_gpu=True)


def test_an_appraisal_tells_what_lies_on_disk(mixture: Path, tmp_path: Path) -> None:
    model, config = load(mixture), config_of(mixture, tmp_path)
    found = appraise(config, resolve(str(mixture), mixture.parent))
    assert found.refusals == ()
    assert found.outline is not None
    assert found.outline.num_disk_bytes == model.num_weight_bytes - num_memory_bytes(config, model) == model.num_expert_bytes
    plain = appraise(replace(config, model=replace(config.model, experts_on_disk=False)), resolve(str(mixture), mixture.parent))
    assert plain.outline is not None
    assert plain.outline.num_disk_bytes == 0


def test_a_simulated_server_says_that_its_steps_read_no_disk(mixture: Path, tmp_path: Path) -> None:
    machine = this_machine(name="a CPU", memory_bytes=8 << 30, read_bytes_per_s=1e10, int8_ops_per_s=1e11, bf16_ops_per_s=1e11)
    source, words = resolve(str(mixture), mixture.parent), "as if memory held all experts"
    for on_disk in (True, False):
        config = config_of(mixture, tmp_path, experts_on_disk=on_disk)
        config = replace(config, backend=BackendConfig())
        candidate = make_candidate(config, read_outline(config, source, decide(config, is_gpu=False)), machine, None)
        assert any(words in doubt for doubt in candidate.doubts) == on_disk


def test_the_words_say_what_a_disk_then_allows(mixture: Path) -> None:
    """3 of 7 experts: 3/7 of their bytes a token, half of them from a disk of 1 GB/s."""
    model = load(mixture)
    rate = 1e9 / (model.num_expert_bytes * 3 / 7 / 2)
    assert f"room for 50%: a disk of 1 GB/s then allows about {rate:.3g} tokens/s" in disk_words(
        model, model.num_expert_bytes // 2
    )
    assert "room for 0%" in disk_words(model, -1)
    assert disk_words(model, 1 << 30).endswith("memory has room for all of them")
