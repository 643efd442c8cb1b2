"""--merge-lora: the model that is served has the adapter in its weights, and is told from the model without."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.config import BackendConfig, Config, KvConfig, LoraConfig, ModelConfig
from penstock.deploy.factory import open_executor
from penstock.deploy.fingerprint import kv_fingerprint, system_fingerprint
from penstock.models.architectures import describe
from penstock.models.catalog import resolve
from penstock.models.load import load_adapter
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ConfigError, ModelError
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf

TINY = TinyLlama()
IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    write_gguf(folder / "tiny.gguf", TINY, matrix_type="Q4_1")
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / name, factors_of_llama(TINY, seed=seed))
    return folder


def config_of(folder: Path, **lora: object) -> Config:
    return Config(
        model=ModelConfig(model=str(folder / "tiny.gguf")),
        backend=BackendConfig(backend="native", threads=2),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        lora=LoraConfig(**lora),  # type: ignore[arg-type]
    )


def opened(folder: Path, **lora: object) -> tuple[np.ndarray, bytes, str]:
    """Logits of a text, and the fingerprints of its keys and of its answers."""
    blueprint, model, executor = open_executor(config_of(folder, **lora), resolve(str(folder / "tiny.gguf"), folder))
    with closing(executor):
        compute, merged = blueprint.compute, blueprint.loading.merged
        prints = (
            kv_fingerprint(compute, model, executor, merged),
            system_fingerprint(compute, model, executor, None, merged=merged, parsers=("auto", "auto")),
        )
        return executor.forward_logits(IDS), *prints  # type: ignore[attr-defined]


def test_answers_are_the_adapter_s_and_fingerprints_its_own(folder: Path) -> None:
    base, one, two = (opened(folder, merge_lora=paths) for paths in ((), (str(folder / "one"),), (str(folder / "two"),)))
    for index in (1, 2):
        assert len({base[index], one[index], two[index]}) == 3
    blueprint, model, executor = open_executor(
        config_of(folder, lora_dir=str(folder), max_lora_rank=16), resolve(str(folder / "tiny.gguf"), folder)
    )
    with closing(executor):
        factors = load_adapter(folder / "one", model.spec, describe(model.spec), tables=model.weights, max_rank=16)
        packed = executor.adapter_packer(factors)  # type: ignore[attr-defined]
        last = executor.capacity.num_blocks
        executor.place_adapter(1, packed, range(last - packed.num_pages, last))
        beside = executor.forward_logits(IDS, adapter=1)  # type: ignore[attr-defined]
    assert float(np.sqrt(((one[0] - beside) ** 2).mean())) < 0.05 * beside.std()
    assert float(np.sqrt(((one[0] - base[0]) ** 2).mean())) > 0.3 * beside.std()
    assert not blueprint.loading.merged


def test_weights_and_order_are_part_of_the_fingerprints(folder: Path) -> None:
    one, two = str(folder / "one"), str(folder / "two")
    found = [opened(folder, merge_lora=paths) for paths in ((one, two), (two, one), (f"{one}:0.5", two), (one,), (f"{one}:1",))]
    for index in (1, 2):
        assert len({prints[index] for prints in found}) == 4
    assert np.array_equal(found[3][0], found[4][0])
    assert not np.array_equal(found[0][0], found[2][0])


def test_a_merged_weight_is_a_number_that_changes_something() -> None:
    found = LoraConfig(merge_lora=("C:/a:-1e-1", "b:c", "d:2")).merged
    assert found == (MergedAdapter("C:/a", -0.1), MergedAdapter("b:c"), MergedAdapter("d", 2.0))
    for text, words in (("a:0", "is 0"), ("a:1e999", "is inf")):
        with pytest.raises(ConfigError, match=f"the weight of {text} {words}"):
            _ = LoraConfig(merge_lora=(text,)).merged


def test_what_can_t_be_merged_is_refused_with_its_cause(folder: Path, tmp_path: Path) -> None:
    source = resolve(str(folder / "tiny.gguf"), folder)
    with pytest.raises(ConfigError, match="merge_lora is set, and so is lora_modules"):
        open_executor(config_of(folder, merge_lora=(str(folder / "one"),), lora_dir=str(folder)), source)
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        open_executor(config_of(folder, merge_lora=(str(tmp_path),)), source)
    config = config_of(folder, merge_lora=(str(folder / "one"),))
    with pytest.raises(ModelError, match="models that write text"):
        open_executor(replace(config, model=replace(config.model, task="embed")), source)
