"""The AWQ folder that vLLM gets, through Penstock's own reader of AWQ: the weights it was made of, rounded to 4 bits."""

import json

import numpy as np
import pytest
from write_awq import GROUP, write_awq

from penstock.models.formats import WeightFormat
from penstock.models.hf import load_hf_directory
from support.tiny_models import TinyLlama, write_hf

TINY = TinyLlama(hidden_size=128, intermediate_size=192, num_heads=8, num_kv_heads=4, is_tied=False)
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture
def models(tmp_path):
    """The model in bf16 and in AWQ."""
    write_awq(write_hf(tmp_path / "bf16", TINY), tmp_path / "awq")
    return load_hf_directory(tmp_path / "bf16"), load_hf_directory(tmp_path / "awq")


def test_weights_are_off_by_half_a_step_and_at_the_ends_of_a_range_by_one(models):
    """The zero point is rounded, too, so that a group's least or largest weight may be one step out of reach."""
    floats, packed = models
    for name in (f"layers.{layer}.{kind}" for layer in range(TINY.num_layers) for kind in MATRICES):
        assert packed.weights[name].format is WeightFormat.Q4_1
        wanted = floats.weights[name].dequantize()
        groups = wanted.reshape(len(wanted), -1, GROUP)
        steps = (groups.max(axis=2, keepdims=True) - groups.min(axis=2, keepdims=True)) / 15
        errors = np.abs(packed.weights[name].dequantize().reshape(groups.shape) - groups) / steps
        assert errors.max() < 1.02
        assert (errors < 0.51).mean() > 0.98


def test_what_is_not_packed_stays_as_it_is(models):
    floats, packed = models
    others = {name for name in floats.weights if name.split(".")[-1] not in MATRICES}
    assert {"embed", "output"} <= others
    for name in others:
        assert np.array_equal(packed.weights[name].dequantize(), floats.weights[name].dequantize()), name


def test_columns_that_make_no_whole_groups_are_refused(tmp_path):
    write_hf(tmp_path / "bf16", TinyLlama(hidden_size=96, num_heads=4, head_dim=32))
    with pytest.raises(ValueError, match=r"q_proj.weight has 128 x 96 numbers.* of 64"):
        write_awq(tmp_path / "bf16", tmp_path / "awq")
    assert not (tmp_path / "awq" / "config.json").exists()


def test_settings_are_those_of_autoawq(tmp_path):
    write_awq(write_hf(tmp_path / "bf16", TINY), tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    assert config == json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert (tmp_path / "awq" / "tokenizer.json").is_file()
