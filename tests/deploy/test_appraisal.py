"""An appraisal lists all that a start would refuse, not the first of it, and reads no weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config import BackendConfig, Config, KvConfig, ModelConfig
from penstock.deploy.forecast import Appraisal, appraise
from penstock.models.catalog import resolve
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf, write_hf


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.weights.WeightTensor.rows", lambda *_: pytest.fail("a weight is read"))


def appraisal_of(path: Path, config: Config | None = None) -> Appraisal:
    return appraise(config or Config(), resolve(str(path), path.parent))


def test_a_model_that_is_served_has_no_refusals(tmp_path: Path) -> None:
    found = appraisal_of(write_gguf(tmp_path / "tiny.gguf", TinyLlama(), matrix_type="Q8_0"))
    assert found.refusals == ()
    assert found.model is not None
    assert found.outline is not None
    assert found.forecast is not None
    assert found.forecast.kv.capacity.max_model_len == 256
    facts = found.facts
    assert (facts.architecture, facts.num_layers, facts.max_model_len, facts.num_tokens) == ("llama", 2, 256, 264)
    assert (facts.vocabulary, list(facts.chat_templates)) == ("gpt2, gpt-2", ["default"])
    formats = {one.name: one for one in facts.formats}
    matrices = [values for values in TinyLlama().weights().values() if values.ndim == 2]
    assert formats["Q8_0"].num_values == sum(values.size for values in matrices)
    assert formats["Q8_0"].num_bytes == formats["Q8_0"].num_values * 34 // 32
    assert formats["F32"].num_tensors == 5


def test_the_task_and_the_pooling_are_those_of_the_settings(tmp_path: Path) -> None:
    tiny = write_gguf(tmp_path / "tiny.gguf", TinyLlama())
    found = appraisal_of(tiny, Config(model=ModelConfig(task="embed", pooling="mean")))
    assert found.refusals == ()
    assert found.model is not None
    assert found.model.spec.ending is not None
    assert found.model.spec.ending.pooling == "mean"
    shared = write_case(CASES["gemma4_shared"], tmp_path / "shared")
    (refusal,) = appraisal_of(shared, Config(model=ModelConfig(task="embed"))).refusals
    assert "the keys and values of another layer" in refusal.cause


def test_a_directory_is_read_as_well(tmp_path: Path) -> None:
    found = appraisal_of(write_hf(tmp_path / "tiny", TinyLlama(), num_shards=2))
    assert found.refusals == ()
    facts = found.facts
    assert (facts.container, facts.architecture, facts.vocabulary) == (
        "Hugging Face directory",
        "LlamaForCausalLM",
        "tokenizer.json",
    )
    assert facts.num_values == sum(values.size for values in TinyLlama().weights().values())
    assert [one.name for one in facts.formats] == ["BF16"]


def test_everything_that_is_wrong_is_listed(tmp_path: Path) -> None:
    extra = {
        "general.architecture": "mamba9",
        "tokenizer.ggml.pre": "klingon",
        "tokenizer.chat_template": "{% if %}",
    }
    found = appraisal_of(write_gguf(tmp_path / "bad.gguf", TinyLlama(), extra=extra))
    assert [refusal.check for refusal in found.refusals] == ["weights", "tokenizer", "chat template"]
    assert "mamba9 is not supported" in found.refusals[0].cause
    assert "'klingon'" in found.refusals[1].cause
    assert "not valid Jinja2" in found.refusals[2].cause
    assert all(refusal.remedy for refusal in found.refusals)
    assert found.model is None
    assert found.facts.architecture == "mamba9"


def test_sampling_backend_and_memory_are_checked_of_a_model_that_loads(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "tiny", TinyLlama(head_dim=592, num_heads=1, num_kv_heads=1))
    (directory / "generation_config.json").write_text(json.dumps({"top_p": 7}))
    config = Config(kv=KvConfig(kv_cache_memory_bytes=1 << 60))
    found = appraisal_of(directory, config)
    assert [refusal.check for refusal in found.refusals] == ["sampling", "backend", "memory"]
    assert "top_p is 7" in found.refusals[0].cause
    assert "head_dim of tiny is 592" in found.refusals[1].cause
    assert found.outline is not None
    assert found.forecast is None


def test_a_block_size_is_refused_once(tmp_path: Path) -> None:
    tiny = write_gguf(tmp_path / "tiny.gguf", TinyLlama())
    [refusal] = appraisal_of(tiny, Config(kv=KvConfig(block_size=8))).refusals
    assert "block_size 8 is not a multiple of 16" in refusal.cause


def test_a_setting_that_changes_no_weight_is_refused(tmp_path: Path) -> None:
    tiny = write_gguf(tmp_path / "tiny.gguf", TinyLlama())
    [refusal] = appraisal_of(tiny, Config(backend=BackendConfig(weight_dtype="int8"))).refusals
    assert refusal.check == "backend"
    assert "weight_dtype is int8: on the CPU it is for models that read texts" in refusal.cause


def test_what_the_native_kernels_lack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.native.lowering.COMPUTED", frozenset({"Embed", "RMSNorm", "Linear"}))
    [refusal] = appraisal_of(write_gguf(tmp_path / "tiny.gguf", TinyLlama())).refusals
    assert refusal.check == "backend"
    assert "Rope" in refusal.cause
    assert "KvWrite" in refusal.cause


def test_a_refused_directory_has_its_tokenizer_checked_too(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "tiny", TinyLlama(), extra={"architectures": ["MambaForCausalLM"]})
    assert [refusal.check for refusal in appraisal_of(directory).refusals] == ["weights"]
    (directory / "tokenizer.json").write_text("{}")
    assert [refusal.check for refusal in appraisal_of(directory).refusals] == ["weights", "tokenizer"]


def test_a_template_may_be_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama(), extra={"tokenizer.chat_template.rag": "{% if %}"})
    assert appraisal_of(path).refusals == ()
    [refusal] = appraisal_of(path, Config(model=ModelConfig(chat_template="rag"))).refusals
    assert refusal.check == "chat template"
