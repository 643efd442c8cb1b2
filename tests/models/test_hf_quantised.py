"""GPTQ, AWQ and compressed-tensors: every layout against its own definition, and all that is refused, by name."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.backends.native._native import Engine
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.native.lowering import lower
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.formats import Floats, WeightFormat, held_bytes
from penstock.models.hf import load_hf_directory
from penstock.models.hf_config import JsonFile
from penstock.models.hf_quantised import put_together, read_quantisation
from penstock.models.packed import PackedIntegers
from penstock.models.safetensors_file import open_safetensors
from penstock.models.weights import Cut, LoadedModel, WeightTensor, stacked
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from support.fp8_models import change_tensors
from support.packed_models import (
    Packing,
    Rounded,
    change_settings,
    integer_tensor,
    words,
    write_dequantised_hf,
    write_packed_hf,
)
from support.tiny_models import TinyLlama, write_encoded

TINY = TinyLlama(num_layers=1, hidden_size=128, intermediate_size=192, head_dim=24, is_tied=False)
"""q has 96 rows, k and v 48; the columns of `down` make three groups of 64, and of `o` three of 32."""
UP, STEM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"
NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip

PACKINGS = {
    "gptq": (Packing("gptq"), WeightFormat.Q4_0),
    "gptq of whole columns": (Packing("gptq", group=0), WeightFormat.Q4_0),
    "gptq with zero points": (Packing("gptq", is_symmetric=False), WeightFormat.Q4_1),
    "gptq_v2 with zero points": (Packing("gptq_v2", is_symmetric=False), WeightFormat.Q4_1),
    "gptq of 8 bits": (Packing("gptq", bits=8), WeightFormat.Q8_0),
    "gptq in bf16": (Packing("gptq", scale_dtype="bf16"), WeightFormat.Q4_0),
    "gptq in act-order": (Packing("gptq", order="input"), WeightFormat.Q4_0),
    "gptq in act-orders with zero points": (Packing("gptq", order="matrix", is_symmetric=False), WeightFormat.Q4_1),
    "gptq of 8 bits in act-orders": (Packing("gptq", bits=8, order="matrix"), WeightFormat.Q8_0),
    "awq": (Packing("awq", is_symmetric=False), WeightFormat.Q4_1),
    "awq of whole columns": (Packing("awq", group=0, is_symmetric=False), WeightFormat.Q4_1),
    "awq, symmetric": (Packing("awq"), WeightFormat.Q4_0),
    "pack-quantized": (Packing("pack-quantized", scale_dtype="bf16"), WeightFormat.Q4_0),
    "pack-quantized with zero points": (Packing("pack-quantized", is_symmetric=False), WeightFormat.Q4_1),
    "pack-quantized by rows": (Packing("pack-quantized", group=0), WeightFormat.Q4_0),
    "pack-quantized in act-order": (Packing("pack-quantized", order="input"), WeightFormat.Q4_0),
    "pack-quantized of 8 bits": (Packing("pack-quantized", bits=8), WeightFormat.Q8_0),
    "int-quantized": (Packing("int-quantized", bits=8, group=0, scale_dtype="f32"), WeightFormat.Q8_0),
    "int-quantized in groups": (Packing("int-quantized", bits=8), WeightFormat.Q8_0),
}


@pytest.mark.parametrize("name", PACKINGS)
def test_matrices_are_scales_times_integers(tmp_path: Path, name: str) -> None:
    packing, fmt = PACKINGS[name]
    wanted = write_packed_hf(tmp_path, TINY, packing)
    model = load_hf_directory(tmp_path)
    for key, module in NAMES.items():
        tensor, values = model.weights[f"layers.0.{key}"], wanted[f"model.layers.0.{module}.weight"]
        assert tensor.format is fmt
        found = tensor.dequantize()
        if fmt is WeightFormat.Q4_1:  # the offset is rounded
            assert np.abs(found - values).max() <= 2.0**-11 * np.abs(values).max() * 16 / 15
        elif packing.scale_dtype == "f32":
            assert np.abs(found - values).max() <= 2.0**-11 * np.abs(values).max()
        else:
            assert np.array_equal(found, values)
        order = np.random.default_rng(0).permutation(tensor.num_rows)
        assert np.array_equal(replace(tensor, order=order).dequantize(3, 20), found[order[3:20]])
        assert np.array_equal(tensor.dequantize(5, 14), found[5:14])
    assert model.weights["embed"].format is WeightFormat.F32


GOLDEN = Path(__file__).parents[1] / "golden" / "compressed.npz"


@pytest.mark.parametrize("name", ["int4", "int4-zeros", "int4-rows", "int8-packed", "int8"])
def test_what_compressed_tensors_has_packed_is_what_it_unpacks(tmp_path: Path, name: str) -> None:
    """The package itself packed these matrices: `tests/parity/make_compressed_golden.py`."""
    with np.load(GOLDEN) as golden:
        found = {key.removeprefix(f"{name}/"): golden[key] for key in golden if key.startswith(f"{name}/")}
    config, values = json.loads(str(found.pop("config"))), found.pop("values")
    scale = found.pop("weight_scale")
    tensors = {f"m.{key}": integer_tensor(array) for key, array in found.items()}
    write_encoded(tmp_path / "m.safetensors", {**tensors, "m.weight_scale": ("BF16", scale.shape, scale.tobytes())})
    settings = {"quant_method": "compressed-tensors", "format": config["format"], "config_groups": {"a": config}}
    quantisation = read_quantisation(JsonFile(tmp_path, {"quantization_config": settings}), JsonFile(tmp_path, {}))
    matrix = put_together(quantisation, open_safetensors(tmp_path / "m.safetensors")).tensors["m.weight"]
    assert isinstance(matrix, PackedIntegers)
    ours = WeightTensor("m", *matrix.shape, matrix.format, matrix).dequantize()
    step = float((scale.astype(np.uint32) << 16).view(np.float32).max())
    assert np.abs(ours - values).max() <= (step / 128 if name == "int4-zeros" else 0)


def logits(model: LoadedModel, backend: type[ReferenceExecutor | NativeExecutor]) -> np.ndarray:
    executor = backend(
        model,
        architectures.describe(model.spec),
        num_blocks=4,
        block_size=16,
        max_rows=1,
        max_step_tokens=32,
        max_model_len=48,
        kv_dtype=KvDtype.BF16,
    )
    return np.asarray(executor.forward_logits([7 * i % 260 for i in range(24)]))


@pytest.mark.parametrize("name", PACKINGS)
def test_a_model_computes_what_it_computes_dequantised(tmp_path: Path, name: str) -> None:
    weights = write_packed_hf(tmp_path / "packed", TINY, PACKINGS[name][0])
    packed = load_hf_directory(tmp_path / "packed")
    wanted = logits(load_hf_directory(write_dequantised_hf(tmp_path / "floats", TINY, weights)), ReferenceExecutor)
    for backend, most in ((ReferenceExecutor, 5e-3), (NativeExecutor, 0.05)):  # measured: 0.0023 and 0.024
        difference = logits(packed, backend) - wanted
        assert np.sqrt((difference**2).mean()) < most * wanted.std()


def test_an_order_of_columns_is_obeyed_or_refused(tmp_path: Path) -> None:
    """A reader of raw rows that knows no order would multiply other columns: another backend, for one."""
    write_packed_hf(tmp_path, TINY, Packing("gptq", order="matrix"))
    model = load_hf_directory(tmp_path)
    with pytest.raises(ModelError, match="act-order"):
        model.weights["layers.0.up"].rows(0, 1)
    with pytest.raises(ModelError, match="act-order"):
        model.weights["layers.0.up"].data  # noqa: B018
    embed = replace(model.weights["layers.0.q"], name="embed", num_rows=96)
    for is_tied in (False, True):
        spec = replace(model.spec, vocab_size=96, tie_word_embeddings=is_tied)
        weights = {**model.weights, "embed": embed, "output": replace(model.weights["output"], num_rows=96)}
        with pytest.raises(ModelError, match="act-order"):
            logits(replace(model, spec=spec, weights=weights), NativeExecutor)


def test_matrices_of_one_order_of_columns_may_be_put_together(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("gptq", order="matrix"))
    weights = load_hf_directory(tmp_path).weights
    up, gate = weights["layers.0.up"], weights["layers.0.gate"]
    whole = stacked("both", [Cut(up, 3, 20), Cut(up, 60, 8, 2)])
    assert np.array_equal(whole.dequantize(), up.dequantize()[[*range(3, 23), *range(60, 76, 2)]])
    with pytest.raises(ModelError, match="different ways"):
        stacked("both", [Cut(up, 0, 20), Cut(gate, 0, 20)])


class CountingEngine:
    """An engine that only counts its buffers and activations."""

    has_tiles = False

    def __init__(self) -> None:
        self.num_buffers = 0

    def __getattr__(self, name: str) -> Any:
        self.num_buffers += name in ("add_buffer", "add_activation")
        return lambda *args, **kwargs: 0


def test_orders_of_columns_take_no_memory_in_every_layer(tmp_path: Path) -> None:
    """Their buffers are those of the layer before."""
    counts = []
    for num_layers in (2, 4):
        model = TinyLlama(num_layers=num_layers)
        write_packed_hf(tmp_path / f"{num_layers}", model, Packing("gptq", order="matrix"))
        engine = CountingEngine()
        loaded = load_hf_directory(tmp_path / f"{num_layers}")
        lower(architectures.describe(loaded.spec), loaded.weights, cast(Engine, engine), num_positions=8)
        counts.append(engine.num_buffers)
    assert counts[0] == counts[1]


def test_memory_is_that_of_the_bits(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("gptq"))
    weights = load_hf_directory(tmp_path).weights
    total = sum(held_bytes(t.format, t.num_rows, t.num_cols) for name, t in weights.items() if name != "embed")
    assert load_hf_directory(tmp_path, max_weight_bytes=total).num_weight_bytes == total
    with pytest.raises(ModelError, match="MiB are available"):
        load_hf_directory(tmp_path, max_weight_bytes=total - 1)
    assert held_bytes(weights["layers.0.up"].format, 192, 128, Floats.FP8) == 192 * 128 * 9 // 16


@pytest.mark.parametrize("size", [1e-7, 3e5])
def test_scales_beyond_half_precision_make_floats(tmp_path: Path, size: float, caplog: pytest.LogCaptureFixture) -> None:
    """As f16, a scale of 1e-7 would be 1.2e-7, and one of 3e5 infinite."""
    write_packed_hf(tmp_path, TINY, Packing("pack-quantized", scale_dtype="bf16"))
    scales = np.full((192, 4), size, np.float32)
    change_tensors(tmp_path, {f"{STEM}.weight_scale": ("F32", scales.shape, scales.tobytes())})
    caplog.set_level(logging.INFO)
    model = load_hf_directory(tmp_path)
    up, gate = model.weights["layers.0.up"], model.weights["layers.0.gate"]
    assert (up.format, gate.format) == (WeightFormat.F32, WeightFormat.Q4_0)
    integers = np.round(up.dequantize() / size)
    assert np.array_equal(up.dequantize(), (integers * np.float32(size)).astype(np.float32))
    assert set(integers.reshape(-1).tolist()) == set(range(-7, 8))
    assert "1 matrix of packed integers is held as floats, since the scales do not fit into half precision" in caplog.text


def test_a_small_scale_beside_larger_ones_is_rounded_with_them(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("pack-quantized"))
    scales = np.full((192, 4), 2.0**-6, np.float32)
    scales[5, 2] = 1e-7
    change_tensors(tmp_path, {f"{STEM}.weight_scale": ("F32", scales.shape, scales.tobytes())})
    assert load_hf_directory(tmp_path).weights["layers.0.up"].format is WeightFormat.Q4_0


def test_biases_that_are_zero_in_every_layer_are_left_out(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("gptq"))
    zeros = {f"model.layers.0.{name}.bias": ("F16", (96,), bytes(192)) for name in ("self_attn.q_proj", "mlp.down_proj")}
    change_tensors(tmp_path, zeros)
    assert not load_hf_directory(tmp_path).spec.layers[0].attention.has_qkv_bias
    change_tensors(tmp_path, {"model.layers.0.mlp.down_proj.bias": ("F16", (128,), np.ones(128, np.float16).tobytes())})
    with pytest.raises(ModelError, match=r"gate_bias"):
        load_hf_directory(tmp_path)


def test_the_settings_that_autogptq_wrote_beside_are_read(tmp_path: Path) -> None:
    wanted = write_packed_hf(tmp_path, TINY, Packing("gptq"))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False, "sym": True}))
    assert np.array_equal(load_hf_directory(tmp_path).weights["layers.0.up"].dequantize(), wanted[UP])


def test_an_int8_model_with_scales_of_activations_is_served(tmp_path: Path) -> None:
    wanted = write_packed_hf(tmp_path, TINY, Packing("int-quantized", bits=8, group=0))
    change_tensors(
        tmp_path,
        {
            f"{STEM}.input_scale": ("F32", (1,), np.float32(3).tobytes()),
            f"{STEM}.input_zero_point": ("I8", (1,), b"\x05"),
            f"{STEM}.weight_zero_point": ("I8", (192, 1), bytes(192)),
        },
    )
    assert np.array_equal(load_hf_directory(tmp_path).weights["layers.0.up"].dequantize(), wanted[UP])


def test_one_scale_of_a_whole_matrix_is_read(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("int-quantized", bits=8, group=0))
    change_tensors(tmp_path, {f"{STEM}.weight_scale": ("F32", (), np.float32(0.5).tobytes())})
    tensor = load_hf_directory(tmp_path).weights["layers.0.up"]
    assert np.abs(tensor.dequantize()).max() == 0.5 * 127


COMPRESSED: dict[str, Any] = {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}}


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"bits": 3}, "GPTQ with 3 bits"),
        ({"bits": None}, "bits is missing"),
        ({"bits": "4"}, "not of type int"),
        ({"checkpoint_format": "marlin"}, "format marlin"),
        ({"is_marlin_format": True}, "format marlin"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "several numbers of bits"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ's format gemv"),
        ({"quant_method": "awq", "bits": 8}, "with 8 bits"),
        ({"quant_method": "bitsandbytes"}, "the quantisation bitsandbytes is not"),
        ({"quant_method": "quark"}, "the quantisation quark is not"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "the quantisation modelopt NVFP4 is not"),
        ({"quant_method": None}, "no quant_method"),
        ({"quant_method": 4}, "not of type str"),
        ({"quant_method": "compressed-tensors"}, "no scheme"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": COMPRESSED}}, "marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"type": "int", "num_bits": 3}}},
            },
            "with 3 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": COMPRESSED},
                "transform_config": {"config_groups": {"R1": {}}},
            },
            "transform",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": COMPRESSED},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparsity",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": COMPRESSED, "b": {"weights": {"type": "int", "num_bits": 8}}},
            },
            "several",
        ),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], cause: str) -> None:
    write_packed_hf(tmp_path, TINY, Packing("gptq"))
    change_settings(tmp_path, **settings)
    with pytest.raises(ModelError, match=cause) as refused:
        load_hf_directory(tmp_path)
    assert refused.value.remedy


def halves(*shape: int, value: float = 1.0) -> Any:
    return "F16", shape, np.full(shape, value, np.float16).tobytes()


@pytest.mark.parametrize(
    ("packing", "name", "tensor", "cause"),
    [
        (Packing("gptq"), "scales", None, f"{STEM}.qweight has no {STEM}.scales"),
        (Packing("gptq"), "qzeros", None, r"has no .*qzeros"),
        (Packing("gptq"), "scales", halves(4, 192, value=np.inf), "not a finite number"),
        (Packing("gptq"), "scales", halves(4, 192, value=np.nan), "not a finite number"),
        (Packing("gptq"), "scales", halves(0, 192), "not one of 0"),
        (Packing("gptq"), "scales", halves(5, 192), "different numbers of columns"),
        (Packing("gptq"), "scales", halves(4, 96), "96 x 4 scales"),
        (Packing("gptq"), "scales", halves(4, 192, 1), "the shape"),
        (Packing("gptq"), "scales", integer_tensor(np.ones((4, 192), np.int32)), "I32 are not supported"),
        (Packing("gptq"), "qweight", halves(16, 192), "packed integers is of type F16"),
        (Packing("gptq"), "qweight", integer_tensor(np.ones((16, 192, 1), np.int32)), "not that of a matrix"),
        (Packing("gptq"), "qweight", integer_tensor(np.ones((8, 192), np.int32)), "groups of .* have the shape"),
        (Packing("gptq"), "qzeros", integer_tensor(np.ones((4, 12), np.int32)), "zero points"),
        (Packing("gptq"), "qzeros", integer_tensor(np.ones((3, 24), np.int32)), "zero points"),
        (Packing("gptq"), "qzeros", integer_tensor(np.full((4, 24), -1, np.int32)), "overflowed"),
        (Packing("gptq"), "g_idx", integer_tensor(np.full(128, 4, np.int32)), "not one of 4"),
        (Packing("gptq"), "g_idx", integer_tensor(np.full(128, -1, np.int32)), "not one of 4"),
        (Packing("gptq"), "g_idx", integer_tensor(np.zeros(64, np.int32)), "have the shape"),
        (Packing("gptq"), "g_idx", integer_tensor(np.zeros(128, np.int32)), "different numbers of columns"),
        (Packing("gptq", bits=8), "qzeros", integer_tensor(np.full((4, 48), 3, np.int32)), "8 bits and zero points"),
        (Packing("awq", is_symmetric=False), "scales", halves(16, 192), "16 groups"),
        (Packing("awq", is_symmetric=False), "scales", halves(2, 192), "zero points"),
        (Packing("pack-quantized"), "weight_shape", None, "has no"),
        (Packing("pack-quantized"), "weight_shape", integer_tensor(np.array([128], np.int64)), "weight_shape is"),
        (Packing("pack-quantized"), "weight_shape", integer_tensor(np.array([2**62, 128], np.int64)), "weight_shape is"),
        (Packing("pack-quantized"), "weight_shape", integer_tensor(np.array([192, -128], np.int64)), "-128 columns"),
        (Packing("pack-quantized"), "weight_shape", integer_tensor(np.array([192, 2**62], np.int64)), "columns"),
        (Packing("pack-quantized"), "weight_g_idx", integer_tensor(np.zeros(128, np.int32)), "different numbers of columns"),
        (Packing("pack-quantized"), "weight_scale", halves(192, 2), "unlike the settings"),
        (Packing("pack-quantized"), "weight", halves(192, 128), "stored twice"),
        (Packing("int-quantized", bits=8), "weight_scale", None, "has no"),
        (Packing("int-quantized", bits=8), "weight_zero_point", ("I8", (192, 4), b"\x01" * 768), "8 bits and zero points"),
    ],
)
def test_damaged_matrices_are_refused(tmp_path: Path, packing: Packing, name: str, tensor: Any, cause: str) -> None:
    write_packed_hf(tmp_path, TINY, packing)
    change_tensors(tmp_path, {f"{STEM}.{name}": tensor})
    with pytest.raises(ModelError, match=cause) as refused:
        load_hf_directory(tmp_path)
    assert refused.value.remedy


def test_e5m2_is_refused_by_name(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("gptq"))
    change_tensors(tmp_path, {"lm_head.weight": ("F8_E5M2", (264, 128), bytes(264 * 128))})
    with pytest.raises(ModelError, match="F8_E5M2 are not supported"):
        load_hf_directory(tmp_path)


def test_integers_without_settings_are_refused(tmp_path: Path) -> None:
    write_packed_hf(tmp_path, TINY, Packing("gptq"))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="missing"):
        load_hf_directory(tmp_path)


def test_words_are_the_papers() -> None:
    """The test's own packing, by hand: columns 0 to 7 in nibbles from the lowest; AWQ's rows 0, 2, 4, 6, 1, 3, 5, 7."""
    first = np.arange(1, 9)[None]
    assert [f"{word:08x}" for word in words(first, 4).view(np.uint32)[0]] == ["87654321"]
    assert [f"{word:08x}" for word in words(first, 4, (0, 2, 4, 6, 1, 3, 5, 7)).view(np.uint32)[0]] == ["86427531"]
    assert [f"{word:08x}" for word in words(first, 8).view(np.uint32)[0]] == ["04030201", "08070605"]
    rounded = Rounded(np.array([[0, 15]]), np.array([[0.5]], np.float32), np.array([[3]]), np.array([0, 0]))
    assert rounded.values.tolist() == [[-1.5, 6.0]]
