"""Tiny random models in GPTQ, AWQ and compressed-tensors, for tests: rounds and packs as the formats say. Loads nothing.

A matrix is [rows, columns] everywhere here, and so are integers. Sources: https://github.com/ModelCloud/GPTQModel,
https://github.com/casper-hansen/AutoAWQ, https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from support.tiny_models import Encoded, FloatArray, TinyLlama, encode, write_encoded, write_hf

Ints = NDArray[np.int64]
Layout = Literal["gptq", "gptq_v2", "awq", "pack-quantized", "int-quantized"]
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight consecutive rows each nibble of a word has, from the lowest on."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model is quantised."""

    layout: Layout = "gptq"
    bits: int = 4
    group: int = 32
    """Columns that share a scale; 0: all."""
    is_symmetric: bool = True
    scale_dtype: str = "f16"
    order: Literal["", "input", "matrix"] = ""
    """Act-order: groups have scattered columns, the same ones in all matrices of one width, or in each its own."""
    settings: dict[str, Any] = field(default_factory=dict)
    """More of quantization_config."""

    @property
    def config(self) -> dict[str, Any]:
        if self.layout == "awq":
            found = {"quant_method": "awq", "bits": self.bits, "group_size": self.group or -1, "version": "gemm"}
        elif self.layout in ("gptq", "gptq_v2"):
            found = {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group or -1,
                "checkpoint_format": self.layout,
            }
        else:
            scheme = {"type": "int", "num_bits": self.bits, "symmetric": self.is_symmetric, "dynamic": False}
            scheme |= {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
            found = {
                "quant_method": "compressed-tensors",
                "format": self.layout,
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
                "ignore": ["lm_head"],
            }
        return found | self.settings


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix as integers: scales * (integers - zeros)."""

    integers: Ints
    """[rows, columns], from 0 on"""
    scales: FloatArray
    """[rows, groups], numbers of the type in which they are stored"""
    zeros: Ints
    """[rows, groups]"""
    groups: Ints
    """The group of each column."""

    @property
    def values(self) -> FloatArray:
        return np.asarray((self.integers - self.zeros[:, self.groups]) * self.scales[:, self.groups], np.float32)


def as_stored(values: FloatArray, dtype: str) -> FloatArray:
    """Floats after a way through a file."""
    data = encode(np.asarray(values, np.float32), dtype)
    if dtype == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    return np.frombuffer(data, {"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float32).reshape(values.shape)


def round_matrix(name: str, values: FloatArray, packing: Packing) -> Rounded:
    """To the nearest. Zero points are at least 1, which GPTQ can store."""
    rows, cols = values.shape
    groups = np.arange(cols) // (packing.group or cols)
    if packing.order:
        np.random.default_rng(cols if packing.order == "input" else zlib.crc32(name.encode())).shuffle(groups)
    parts = values[:, np.argsort(groups)].reshape(rows, cols // (packing.group or cols), -1)
    top = (1 << packing.bits) - 1
    middle = 1 << packing.bits - 1
    if packing.is_symmetric:
        scales = as_stored(np.abs(parts).max(axis=2) / (middle - 1), packing.scale_dtype)
        zeros = np.full(scales.shape, middle)
    else:
        low, high = np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)
        scales = as_stored((high - low) / top, packing.scale_dtype)
        zeros = np.clip(np.round(-low / scales), 1, top).astype(np.int64)
    integers = np.clip(np.round(values / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.int64)
    return Rounded(integers, scales, zeros, groups)


def words(integers: Ints, bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Integers [n, m] -> [n, m / (32 / bits)], the first of each word in its lowest bits, or the one that `order` names."""
    each = 32 // bits
    padded = np.pad(integers, ((0, 0), (0, -integers.shape[1] % each)))
    parts = padded.reshape(len(integers), -1, each)[:, :, list(order) if order else slice(None)]
    return np.asarray((parts << np.arange(0, 32, bits)).sum(axis=2)).astype(np.uint32).view(np.int32)


def integer_tensor(values: NDArray[np.generic]) -> Encoded:
    dtype = {"int32": "I32", "int64": "I64", "int8": "I8"}[values.dtype.name]
    return dtype, values.shape, np.ascontiguousarray(values).tobytes()


def packed_tensors(stem: str, rounded: Rounded, packing: Packing) -> dict[str, Encoded]:
    """The tensors of one matrix, by name."""
    bits, zeros = packing.bits, rounded.zeros
    groups = integer_tensor(rounded.groups.astype(np.int32))
    scales = rounded.scales if packing.layout not in ("gptq", "gptq_v2", "awq") else np.ascontiguousarray(rounded.scales.T)
    stored = (packing.scale_dtype.upper(), scales.shape, encode(scales, packing.scale_dtype))
    if packing.layout in ("gptq", "gptq_v2"):
        less = 1 if packing.layout == "gptq" else 0
        return {
            f"{stem}.qweight": integer_tensor(words(rounded.integers, bits).T),
            f"{stem}.qzeros": integer_tensor(words(zeros.T - less, bits)),
            f"{stem}.scales": stored,
            f"{stem}.g_idx": groups,
        }
    if packing.layout == "awq":
        return {
            f"{stem}.qweight": integer_tensor(words(rounded.integers.T, bits, AWQ_ROWS)),
            f"{stem}.qzeros": integer_tensor(words(zeros.T, bits, AWQ_ROWS)),
            f"{stem}.scales": stored,
        }
    middle = 1 << bits - 1
    tensors = {f"{stem}.weight_scale": stored}
    if packing.layout == "int-quantized":
        tensors[f"{stem}.weight"] = integer_tensor((rounded.integers - middle).astype(np.int8))
    else:
        tensors[f"{stem}.weight_packed"] = integer_tensor(words(rounded.integers, bits))
        tensors[f"{stem}.weight_shape"] = integer_tensor(np.array(rounded.integers.shape, np.int64))
        if packing.order:
            tensors[f"{stem}.weight_g_idx"] = groups
    if not packing.is_symmetric:
        tensors[f"{stem}.weight_zero_point"] = (
            integer_tensor((zeros - middle).astype(np.int8))
            if packing.layout == "int-quantized"
            else integer_tensor(words(zeros.T, bits).T)
        )
    return tensors


def write_packed_hf(directory: Path, model: TinyLlama, packing: Packing) -> dict[str, FloatArray]:
    """Write the model with the matrices of its layers packed, the others in f32. Returns all weights as rounded, by name."""
    write_hf(directory, model, extra={"quantization_config": packing.config})
    tensors: dict[str, Encoded] = {}
    weights = model.weights()
    for name, values in weights.items():
        if ".layers." not in name or values.ndim == 1:
            tensors[name] = ("F32", values.shape, encode(values, "f32"))
            continue
        rounded = round_matrix(name, values, packing)
        weights[name] = rounded.values
        tensors |= packed_tensors(name.removesuffix(".weight"), rounded, packing)
    write_encoded(directory / "model.safetensors", tensors)
    return weights


def write_dequantised_hf(directory: Path, model: TinyLlama, weights: dict[str, FloatArray]) -> Path:
    """Write the model with these weights in f32. Returns `directory`."""
    write_hf(directory, model, dtype="f32")
    write_encoded(
        directory / "model.safetensors",
        {name: ("F32", values.shape, encode(np.asarray(values, np.float32), "f32")) for name, values in weights.items()},
    )
    return directory


def change_settings(directory: Path, **settings: object) -> None:
    """Change quantization_config; None removes a key."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    changed = config.get("quantization_config", {}) | settings
    config["quantization_config"] = {key: value for key, value in changed.items() if value is not None}
    file.write_text(json.dumps(config))
