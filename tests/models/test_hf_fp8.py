"""Checkpoints in fp8: the scales of every layout and writer, what is left aside, and every fault a ModelError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from penstock.models.formats import E4M3_VALUES, Floats, WeightFormat
from penstock.models.hf import load_hf_directory
from penstock.models.weights import BlockScales, WeightTensor
from penstock.types.errors import ModelError
from support.fp8_models import BLOCK, Scales, change_tensors, to_e4m3, write_fp8_hf
from support.tiny_models import TinyLlama, write_hf

TINY = TinyLlama(num_layers=1, head_dim=10, is_tied=False)
"""q has 40 rows, k 20: blocks of 32 rows are cut."""
UP = "model.layers.0.mlp.up_proj.weight"
CHANNELS: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "channel"}


def compressed(weights: object, **more: object) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}, **more}


def with_settings(directory: Path, settings: object) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


def test_codes_are_the_numbers_of_the_type() -> None:
    known = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}
    assert {code: E4M3_VALUES[code] for code in known} == known
    assert [code for code, value in enumerate(E4M3_VALUES) if np.isnan(value)] == [0x7F, 0xFF]


def test_the_nearest_code_is_found() -> None:
    numbers = np.array([E4M3_VALUES[code] for code in range(256) if code & 127 != 127], np.float32)
    assert np.array_equal(np.array(E4M3_VALUES, np.float32)[to_e4m3(numbers)], numbers)
    assert to_e4m3(np.array([1.0625, 1.1875, 464, 1e9, -1e9, 2**-10, 0.75 * 2**-9], np.float32)).tolist() == [
        0x38, 0x3A, 0x7E, 0x7E, 0xFE, 0x00, 0x01,
    ]  # fmt: skip


@pytest.mark.parametrize("scales", get_args(Scales))
def test_matrices_are_numbers_times_their_scale(tmp_path: Path, scales: Scales) -> None:
    directory = write_fp8_hf(tmp_path, TINY, scales)
    model = load_hf_directory(directory)
    wanted = TINY.weights()
    for name, key in (("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj")):
        tensor, values = model.weights[f"layers.0.{name}"], wanted[f"model.layers.0.{key}.weight"]
        assert tensor.format is WeightFormat.F8_E4M3
        assert tensor.is_mapped
        found = tensor.dequantize()
        least = 2.0**-10 * np.abs(values).max() / 448  # half a step of the smallest numbers
        assert (np.abs(found - values) <= np.abs(values) * 2.0**-4 + least).all()
        assert np.abs(found - values).max() > 0
    assert model.weights["embed"].format is WeightFormat.BF16
    assert model.weights["norm"].format is WeightFormat.F32


def test_blocks_at_the_edges_are_cut(tmp_path: Path) -> None:
    model = load_hf_directory(write_fp8_hf(tmp_path, TINY, "block"))
    tensor = model.weights["layers.0.q"]
    assert tensor.scales is not None
    assert tensor.scales.values.shape == (2, 2)
    numbers = np.array(E4M3_VALUES, np.float32)[tensor.data]
    assert np.array_equal(tensor.dequantize()[32:, 32:], numbers[32:, 32:] * tensor.scales.values[1, 1])
    assert np.array_equal(tensor.scales.of_rows(31, 33), tensor.scales.values)


def test_a_scale_in_bf16_and_without_a_column_is_read(tmp_path: Path) -> None:
    directory = write_fp8_hf(tmp_path, TINY, "row")
    scale = np.full(TINY.intermediate_size, 0x3F00, np.uint16)  # 0.5
    change_tensors(directory, {f"{UP}_scale": ("BF16", scale.shape, scale.tobytes())})
    tensor = load_hf_directory(directory).weights["layers.0.up"]
    assert np.array_equal(tensor.dequantize(), np.array(E4M3_VALUES, np.float32)[tensor.data] * np.float32(0.5))


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
def test_blocks_of_modelopt_have_128_rows_and_columns(tmp_path: Path, algorithm: str) -> None:
    tiny = TinyLlama(num_layers=1, hidden_size=160, intermediate_size=300)
    directory = with_settings(write_fp8_hf(tmp_path, tiny, "row"), {"quant_method": "modelopt", "quant_algo": algorithm})
    scale = np.arange(1, 7, dtype=np.float32).reshape(3, 1, 2, 1)
    change_tensors(directory, {f"{UP}_scale": ("F32", scale.shape, scale.tobytes())})
    tensor = load_hf_directory(directory).weights["layers.0.up"]
    wide = np.repeat(np.repeat(scale[:, 0, :, 0], 128, axis=0), 128, axis=1)[:300, :160]
    assert np.array_equal(tensor.dequantize(), np.array(E4M3_VALUES, np.float32)[tensor.data] * wide)


def test_memory_is_that_of_who_computes(tmp_path: Path) -> None:
    fp8, bf16 = write_fp8_hf(tmp_path / "fp8", TINY, "row"), write_hf(tmp_path / "bf16", TINY)
    matrices = [t for name, t in load_hf_directory(bf16).weights.items() if t.num_rows > 1 and name.startswith("layers.")]
    wide = load_hf_directory(fp8).num_weight_bytes
    rows = [(-(-t.num_rows // 16) * 16, t.num_cols) for t in matrices]
    narrow = wide - sum(r * c for r, c in rows) + 4 * sum(r for r, _ in rows)
    cases = (
        (fp8, Floats.BF16, wide), (fp8, Floats.AS_STORED, narrow), (fp8, Floats.FP8, narrow),
        (bf16, Floats.BF16, wide), (bf16, Floats.AS_STORED, wide), (bf16, Floats.FP8, narrow),
    )  # fmt: skip
    for directory, floats, wanted in cases:
        load_hf_directory(directory, max_weight_bytes=wanted, floats=floats)
        with pytest.raises(ModelError, match="MiB are available"):
            load_hf_directory(directory, max_weight_bytes=wanted - 1, floats=floats)


def test_scales_of_blocks_take_memory_for_each_group(tmp_path: Path) -> None:
    by_rows, by_blocks = write_fp8_hf(tmp_path / "row", TINY, "row"), write_fp8_hf(tmp_path / "block", TINY, "block")
    weights = load_hf_directory(by_blocks).weights
    wide = {name: t for name, t in weights.items() if t.scales is not None and t.scales.values.shape[1] > 1}
    groups = sum(-(-t.num_rows // 16) * 16 * -(-t.num_cols // 32) for t in wide.values())
    assert groups
    assert least_memory(by_blocks, Floats.AS_STORED) == least_memory(by_rows, Floats.AS_STORED) + 2 * groups
    assert least_memory(by_blocks, Floats.BF16) == least_memory(by_rows, Floats.BF16)


def test_an_embedding_of_its_own_is_counted_where_it_is_widened(tmp_path: Path) -> None:
    """Rows of one in floats are read in the file; of one in fp8 the native backend keeps float32."""
    before, after = write_fp8_hf(tmp_path / "before", TINY, "row"), write_fp8_hf(tmp_path / "after", TINY, "row")
    name = "model.embed_tokens.weight"
    shape = TINY.weights()[name].shape
    change_tensors(
        after,
        {
            name: ("F8_E4M3", shape, bytes(shape[0] * shape[1])),
            f"{name}_scale": ("F32", (shape[0], 1), np.ones(shape[0], np.float32).tobytes()),
        },
    )
    more = 4 * shape[0] * shape[1]
    assert load_hf_directory(after).num_weight_bytes == load_hf_directory(before).num_weight_bytes + more
    assert least_memory(after, Floats.BF16) == least_memory(before, Floats.BF16) + more


def least_memory(directory: Path, floats: Floats) -> int:
    """The least that the loader takes for enough."""
    too_little, enough = 0, 1 << 30
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        try:
            load_hf_directory(directory, max_weight_bytes=middle, floats=floats)
            enough = middle
        except ModelError:
            too_little = middle
    return enough


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        compressed(CHANNELS, format="naive-quantized"),
        compressed(CHANNELS | {"block_structure": "128x128"}),
        None,  # ModelOpt of old wrote a file of its own
    ],
)
def test_every_writer_of_fp8_is_known(tmp_path: Path, settings: object) -> None:
    with_settings(write_fp8_hf(tmp_path, TINY, "row"), settings)
    assert load_hf_directory(tmp_path).weights["layers.0.up"].format is WeightFormat.F8_E4M3


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"quant_method": "eetq"}, "the quantisation eetq is not"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4 is not"),
        (compressed({"type": "int", "num_bits": 8}), "format None with 8 bits of type int"),
        (compressed(None), "no scheme"),
        ({"quant_method": "compressed-tensors"}, "no scheme"),
        (compressed(CHANNELS, format="pack-quantized"), "format pack-quantized with 8 bits of type float"),
        (compressed(CHANNELS, transform_config={"config_groups": {"R1": {}}}), "with a transform"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not two numbers"),
        ({"quant_method": "fp8", "weight_block_size": "128xwide"}, "not two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 20]}, "multiples of 32"),
        ({"quant_method": "fp8", "weight_block_size": [0, 32]}, "not supported"),
    ],
)
def test_settings_that_would_change_the_result_are_refused(tmp_path: Path, settings: object, cause: str) -> None:
    with_settings(write_fp8_hf(tmp_path, TINY, "row"), settings)
    with pytest.raises(ModelError, match=cause):
        load_hf_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "cause"),
    [
        (f"{UP}_scale", None, f"{UP} is in fp8, and there is no {UP}_scale"),
        (f"{UP}_scale", ("F32", (1,), np.float32(np.inf).tobytes()), "not a finite number"),
        (f"{UP}_scale", ("F32", (1,), np.float32(np.nan).tobytes()), "not a finite number"),
        (f"{UP}_scale", ("F32", (3, 1), np.ones(3, np.float32).tobytes()), r"shape \(3, 1\)"),
        (f"{UP}_scale", ("F32", (1, 2, 1, 1), np.ones(2, np.float32).tobytes()), r"shape \(1, 2, 1, 1\)"),
        (f"{UP}_scale", ("F8_E4M3", (1,), b"\x38"), "_scale is in fp8, and there is no"),
        (f"{UP}_scale", ("I8", (1,), b"\x38"), "I8 are not supported"),
        ("model.layers.0.input_layernorm.weight", ("F8_E4M3", (64,), b"\x38" * 64), "in fp8, and there is no"),
    ],
)
def test_damaged_scales_are_refused(tmp_path: Path, name: str, tensor: Any, cause: str) -> None:
    change_tensors(write_fp8_hf(tmp_path, TINY, "row"), {name: tensor})
    with pytest.raises(ModelError, match=cause):
        load_hf_directory(tmp_path)


def test_a_vector_in_fp8_is_refused(tmp_path: Path) -> None:
    norm = "model.norm.weight"
    one = ("F32", (1,), np.float32(1).tobytes())
    change_tensors(write_fp8_hf(tmp_path, TINY, "row"), {norm: ("F8_E4M3", (64,), b"\x38" * 64), f"{norm}_scale": one})
    with pytest.raises(ModelError, match="not a matrix"):
        load_hf_directory(tmp_path)


def test_a_matrix_is_scaled_by_blocks_of_any_size() -> None:
    codes = np.full((3, 5), 0x38, np.uint8)
    scales = BlockScales(np.array([[1, 2], [3, 4]], np.float32), 2, 3)
    found = WeightTensor("w", 3, 5, WeightFormat.F8_E4M3, codes, scales).dequantize()
    assert found.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    assert BLOCK == 32
