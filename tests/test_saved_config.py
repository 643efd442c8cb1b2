"""Settings that were written are read back, and their hash names those of scheduling wherever they come from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.config.components import config_from
from penstock.config.saved import settings_hash, write_config_file
from penstock.config.sources import all_settings, parse_settings, read_config_file

SET = Config(
    model=ModelConfig(model='a "model"\n\x7f\\é', served_model_names=("one", "two"), cache_dir="/here"),
    kv=KvConfig(kv_cache_memory_bytes=1 << 30, kv_watermark=0.05, prefix_caching=False),
    scheduler=SchedulerConfig(
        policy="fair",
        policy_args={"shares": {"team-a": 3, "b": 0.5}, "is_it": True, "names": ["x"]},
        slo_itl_s=0.075,
        length_buckets=(128, 512),
        max_num_seqs=16,
    ),
    backend=BackendConfig(device="cpu", threads=2),
    server=ServerConfig(api_keys=("secret",)),
)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(write_config_file(SET, ["a note\n policy = 'sjf'"]), "utf-8")
    read = config_from(read_config_file(path).values)
    assert read == replace(SET, model=replace(SET.model, cache_dir=None), server=ServerConfig())
    assert "secret" not in path.read_text("utf-8")
    found = re.match(r"# penstock settings, format 1, hash ([0-9a-f]{12})\n# a note policy = 'sjf'\n", path.read_text("utf-8"))
    assert found is not None
    assert found[1] == settings_hash(SET) == settings_hash(read)


def test_the_default_is_an_empty_file() -> None:
    assert write_config_file(Config(), []).count("\n") == 1


@pytest.mark.parametrize("written", [{"slo_itl": "75ms", "max_num_seqs": "16"}, {"max_num_seqs": 16, "slo_itl": 0.075}])
def test_the_hash_does_not_depend_on_notation_or_order(written: dict[str, object]) -> None:
    config = config_from(parse_settings(written, all_settings()))
    assert settings_hash(config) == settings_hash(Config(scheduler=SchedulerConfig(slo_itl_s=0.075, max_num_seqs=16)))


def test_the_hash_changes_with_each_setting_of_scheduling_and_with_no_other() -> None:
    base = settings_hash(Config())
    changed = {
        settings_hash(Config(scheduler=SchedulerConfig(policy="sjf"))),
        settings_hash(Config(scheduler=SchedulerConfig(policy="srpf"))),
        settings_hash(Config(scheduler=SchedulerConfig(policy_args={"a": 1}))),
        settings_hash(Config(scheduler=SchedulerConfig(length_buckets=(128, 512)))),
        settings_hash(Config(kv=KvConfig(kv_watermark=0.05))),
    }
    assert len(changed | {base}) == 6
    assert settings_hash(Config(server=ServerConfig(port=1), kv=KvConfig(block_size=32))) == base
