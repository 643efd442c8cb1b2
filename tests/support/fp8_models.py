"""Tiny random models in fp8, as compressed-tensors, ModelOpt and DeepSeek write them, for tests. Loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import E4M3_VALUES
from support.tiny_models import Encoded, FloatArray, TinyLlama, encode, write_encoded, write_hf

Scales = Literal["tensor", "row", "block"]
BLOCK = 32
"""Rows and columns of a block: DeepSeek's have 128, and more than a tiny matrix has."""
_CONFIGS: dict[Scales, dict[str, Any]] = {
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "row": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
        "ignore": ["lm_head"],
    },
    "block": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
}


def to_e4m3(values: FloatArray) -> NDArray[np.uint8]:
    """Codes of the nearest numbers, of two as near the even one; what is beyond 448 becomes 448. The values in fp8, in the same
    shape."""
    numbers = np.array(E4M3_VALUES[:127])
    between = (numbers[:-1] + numbers[1:]) / 2
    sizes = np.abs(values.astype(np.float64))
    below, above = np.searchsorted(between, sizes, "left"), np.searchsorted(between, sizes, "right")
    codes = np.where(below % 2 == 0, below, above)  # where they differ it is a tie, and one of them is even
    return np.asarray(codes | np.signbit(values) << 7, np.uint8)


def write_fp8_hf(directory: Path, model: TinyLlama, scales: Scales) -> Path:
    """The model with the matrices of its layers in fp8, the others in bf16 (truncated). Returns `directory`."""
    write_hf(directory, model, extra={"quantization_config": _CONFIGS[scales]})
    tensors: dict[str, Encoded] = {}
    for name, values in model.weights().items():
        if ".layers." not in name or values.ndim == 1:
            tensors[name] = ("BF16", values.shape, encode(values, "bf16"))
            continue
        scale = _scale(values, scales)
        codes = to_e4m3(np.asarray(values / _over(scale, values.shape), np.float32))
        tensors[name] = ("F8_E4M3", values.shape, codes.tobytes())
        stored = scale.reshape(()) if scales == "tensor" else scale
        tensors[name + ("_scale_inv" if scales == "block" else "_scale")] = ("F32", stored.shape, stored.tobytes())
        if scales == "tensor":
            for other in ("input_scale", "activation_scale", "k_scale"):
                tensors[f"{name.removesuffix('weight')}{other}"] = ("F32", (), np.float32(3).tobytes())
    write_encoded(directory / "model.safetensors", tensors)
    return directory


def fp8_blocks(name: str, values: FloatArray) -> tuple[dict[str, Encoded], FloatArray]:
    """A matrix as DeepSeek writes it, in blocks that share a scale: its tensors, and the values that they hold."""
    scale = _scale(values, "block")
    codes = to_e4m3(np.asarray(values / _over(scale, values.shape), np.float32))
    tensors: dict[str, Encoded] = {
        name: ("F8_E4M3", values.shape, codes.tobytes()),
        f"{name}_scale_inv": ("F32", scale.shape, scale.tobytes()),
    }
    return tensors, np.asarray(np.array(E4M3_VALUES, np.float32)[codes] * _over(scale, values.shape), np.float32)


def change_tensors(directory: Path, changes: Mapping[str, Encoded | None]) -> None:
    """Replace tensors of `write_fp8_hf`, add some, or leave out those that are None."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    found: dict[str, Encoded] = {
        key: (item["dtype"], tuple(item["shape"]), body[slice(*item["data_offsets"])])
        for key, item in header.items()
        if key != "__metadata__"
    }
    merged = found | dict(changes)
    write_encoded(path, {name: tensor for name, tensor in merged.items() if tensor is not None})


def _scale(values: FloatArray, scales: Scales) -> FloatArray:
    """So that the largest becomes 448."""
    if scales == "tensor":
        return np.asarray(np.abs(values).max(keepdims=True) / 448, np.float32)
    if scales == "row":
        return np.asarray(np.abs(values).max(axis=1, keepdims=True) / 448, np.float32)
    rows, cols = (-(-size // BLOCK) for size in values.shape)
    padded = np.zeros((rows * BLOCK, cols * BLOCK), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    return np.asarray(padded.reshape(rows, BLOCK, cols, BLOCK).max(axis=(1, 3)) / 448, np.float32)


def _over(scale: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """For each value, if there are blocks."""
    if scale.size == 1 or scale.shape[0] == shape[0]:
        return scale
    return np.asarray(np.repeat(np.repeat(scale, BLOCK, axis=0), BLOCK, axis=1)[: shape[0], : shape[1]])
