"""The forecast of a server is what the server then does, and machines that are not here are planned by their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import BackendConfig, Config, KvConfig, ModelConfig
from penstock.deploy.forecast import ASSUMED_GPU_STEP_BYTES, Forecast, Outline, forecast, read_outline, simulation_of
from penstock.deploy.resolve import decide
from penstock.deploy.resolve import resolve as resolve_model
from penstock.deploy.resources import Machine
from penstock.lab.cost_model import CostModel
from penstock.machine import find_cores
from penstock.models.catalog import ModelSource, resolve
from penstock.models.load import load_model
from penstock.types.errors import ConfigError, ModelError, NotEnoughMemory
from penstock.types.kv_dtype import KvDtype
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf, write_hf

GIB = 1 << 30
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def foresee(config: Config, source: ModelSource, *, is_gpu: bool, memory_bytes: int) -> tuple[Outline, Forecast]:
    outline = read_outline(config, source, decide(config, is_gpu=is_gpu))
    return outline, forecast(config, outline, is_gpu=is_gpu, memory_bytes=memory_bytes)


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return folder


@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_it_is_the_plan_of_a_server_that_starts(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama()) if kind == "gguf" else write_hf(tmp_path / "tiny", TinyLlama())
    source = resolve(str(path), tmp_path)
    config = Config(kv=KvConfig(kv_cache_memory_bytes=1 << 20))
    model = load_model(source)
    machine = Machine(available_bytes=4 * GIB, total_bytes=4 * GIB, num_models=1, cores=find_cores())
    blueprint, _ = resolve_model(replace(config, backend=BackendConfig(device="cpu")), source, machine)
    expected = blueprint.measured_plan
    outline, found = foresee(config, source, is_gpu=False, memory_bytes=4 * GIB)
    assert found.kv == expected
    assert outline.num_weight_bytes == model.num_weight_bytes
    assert found.kv.capacity.num_blocks == expected.capacity.num_blocks
    assert (found.kv.capacity.max_rows, found.kv.capacity.max_step_tokens, found.compute.kv_dtype) == (64, 512, KvDtype.INT8)


def test_a_model_of_which_only_config_json_is_here(config_alone: Path) -> None:
    source = resolve(str(config_alone), config_alone)
    outline, found = foresee(Config(), source, is_gpu=True, memory_bytes=80_000_000_000)
    assert outline.assumed_formats == "bf16"
    assert outline.num_weight_bytes == 2 * 8_030_261_248 + 2 * 65 * 4096, "norms are float32"
    assert outline.num_weight_bytes - outline.num_read_bytes == 2 * 128256 * 4096
    assert found.compute.kv_dtype is KvDtype.BF16
    left = int(0.9 * 80_000_000_000) - outline.num_weight_bytes - ASSUMED_GPU_STEP_BYTES
    assert found.kv.num_bytes == pytest.approx(left, rel=0.001)
    assert found.kv.num_tokens == pytest.approx(left / 131_072, rel=0.001)
    assert (found.kv.capacity.max_rows, found.kv.capacity.max_step_tokens) == (256, 2048)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_missing_weights_take_as_much_as_those_that_are_here(tmp_path: Path, is_gpu: bool) -> None:
    path = write_case(CASES["gpt_oss_mxfp4"], tmp_path)
    source, compute = resolve(str(path), tmp_path), decide(Config(), is_gpu=is_gpu)
    here = read_outline(Config(), source, compute)
    (path / "model.safetensors").unlink()
    missing = read_outline(Config(), source, compute)
    assert (missing.num_read_bytes, missing.is_quantised) == (here.num_read_bytes, here.is_quantised)
    assert missing.assumed_formats == "bf16 and mxfp4"


@pytest.mark.parametrize(
    ("settings", "is_gpu", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, False, 5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, True, 4.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, False, 8.5),
        ({"quant_method": "fp8"}, True, 8),
        ({"quant_method": "fp8"}, False, 16),
    ],
)
def test_missing_weights_are_as_quantised_as_the_settings_say(
    config_alone: Path, settings: dict[str, object], is_gpu: bool, bits: float
) -> None:
    (config_alone / "config.json").write_text(json.dumps(LLAMA_3_8B | {"quantization_config": settings}))
    source = resolve(str(config_alone), config_alone)
    outline = read_outline(Config(), source, decide(Config(), is_gpu=is_gpu))
    num_tables = 2 * 128256 * 4096
    assert outline.num_weight_bytes == pytest.approx((8_030_261_248 - num_tables) * bits / 8 + 2 * num_tables, rel=0.002)


def test_what_does_not_fit_is_refused_as_by_a_server(config_alone: Path) -> None:
    source = resolve(str(config_alone), config_alone)
    with pytest.raises(NotEnoughMemory):
        foresee(Config(), source, is_gpu=False, memory_bytes=8 * GIB)
    with pytest.raises(ConfigError, match="less than two blocks"):
        foresee(Config(), source, is_gpu=True, memory_bytes=8 * GIB)


def test_a_gpu_has_blocks_and_refusals_of_its_own(config_alone: Path) -> None:
    source, config = resolve(str(config_alone), config_alone), Config(kv=KvConfig(kv_cache_dtype="int8"))
    outline, found = foresee(config, source, is_gpu=True, memory_bytes=80 * GIB)
    assert found.kv.num_bytes == found.kv.capacity.num_blocks * 16 * 32 * 8 * (2 * 128 + 4 * 2 + 4)
    spec = outline.spec.with_attention(lambda i, attention: replace(attention, head_dim=64 if i else 128))
    with pytest.raises(ModelError, match="several shapes"):
        forecast(config, replace(outline, spec=spec), is_gpu=True, memory_bytes=80 * GIB)


def test_a_stretched_context_is_planned_and_simulated(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    path = write_hf(tmp_path / "tiny", TinyLlama(max_model_len=1024), extra={"rope_scaling": rope})
    config = Config(model=ModelConfig(model=str(path), max_model_len=4000), kv=KvConfig(kv_cache_memory_bytes=64 << 20))
    assert simulation_of(config, CostModel()).capacity.max_model_len == 4000
    for is_missing in (False, True):
        if is_missing:
            (path / "model.safetensors").unlink()
        _, found = foresee(config, resolve(str(path), tmp_path), is_gpu=False, memory_bytes=4 * GIB)
        assert found.kv.capacity.max_model_len == 4000


def test_experts_on_disk_are_refused_where_that_changes_nothing(tmp_path: Path, config_alone: Path) -> None:
    config = Config(model=ModelConfig(experts_on_disk=True))
    dense = resolve(str(write_gguf(tmp_path / "tiny.gguf", TinyLlama())), tmp_path)
    with pytest.raises(ConfigError, match="tiny is not a mixture of experts"):
        foresee(config, dense, is_gpu=False, memory_bytes=GIB)
    with pytest.raises(ConfigError, match="there are no weights of llama-3-8b"):
        foresee(config, resolve(str(config_alone), config_alone), is_gpu=False, memory_bytes=80 * GIB)


def test_settings_of_a_gpu_are_refused_for_a_cpu(tmp_path: Path) -> None:
    source = resolve(str(write_gguf(tmp_path / "tiny.gguf", TinyLlama())), tmp_path)
    config = Config(kv=KvConfig(gpu_memory_utilization=0.5))
    with pytest.raises(ConfigError, match="the machine is a CPU"):
        foresee(config, source, is_gpu=False, memory_bytes=GIB)
    foresee(config, source, is_gpu=True, memory_bytes=16 * GIB)


def test_an_untied_embedding_is_no_read_of_a_step(tmp_path: Path) -> None:
    tied, untied = (
        read_outline(
            Config(),
            resolve(str(write_gguf(tmp_path / f"{is_tied}.gguf", TinyLlama(is_tied=is_tied))), tmp_path),
            decide(Config(), is_gpu=False),
        )
        for is_tied in (True, False)
    )
    assert tied.num_read_bytes == untied.num_read_bytes == tied.num_weight_bytes
    assert untied.num_weight_bytes >= untied.num_read_bytes


def test_matrices_of_heads_are_read_as_the_floats_that_a_backend_makes_of_them(tmp_path: Path) -> None:
    path = write_case(CASES["deepseek_v2_lite_old_q8_gguf"], tmp_path)
    outline = read_outline(Config(), resolve(str(path), tmp_path), decide(Config(), is_gpu=False))
    assert outline.num_read_bytes == outline.num_weight_bytes, "its embedding stays in the file"


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["XGLMForCausalLM"]}')
    with pytest.raises(ModelError, match="XGLMForCausalLM"):
        foresee(Config(model=ModelConfig()), resolve(str(tmp_path), tmp_path), is_gpu=False, memory_bytes=GIB)
