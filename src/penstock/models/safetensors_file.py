"""The tensors of a Hugging Face directory: the safetensors container, memory-mapped, and the scales of matrices in fp8.

Read here rather than with the `safetensors` package, whose NumPy side has no bf16 and copies what it reads.
Specification: https://github.com/huggingface/safetensors#format.

A matrix in F8_E4M3 has a scale by which its numbers are multiplied, named as the matrix and `_scale` (compressed-tensors,
ModelOpt, AutoFP8) or `_scale_inv` (DeepSeek, which means the same): one for all, one for each row, or one for each block of
rows and columns. Scales of activations and of keys and values are left aside: neither is rounded to fp8 here.
Sources: https://github.com/vllm-project/compressed-tensors, https://github.com/NVIDIA/Model-Optimizer,
https://huggingface.co/docs/transformers/quantization/finegrained_fp8.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.checks import unsupported
from penstock.models.hf_config import JsonFile
from penstock.models.weights import BlockScales
from penstock.types.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000
"""As in the reference implementation."""
_DTYPES: Mapping[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a mapped file."""

    path: Path
    """Its file, for error messages."""
    dtype: str
    """`F32`, `F16`, `BF16`, `F8_E4M3` or another name of the format."""
    shape: tuple[int, ...]
    _raw: NDArray[np.uint8]

    def array(self) -> NDArray[np.generic]:
        """The values [shape], bf16 and e4m3 as bit patterns; not copied if aligned. Raises ModelError for other types."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensors of type {self.dtype} are not supported.",
                remedy="Use a checkpoint in bfloat16, float16, float32 or fp8 (e4m3).",
            )
        values = (
            self._raw.view(dtype) if self._raw.ctypes.data % np.dtype(dtype).itemsize == 0 else self._raw.copy().view(dtype)
        )
        return values.reshape(self.shape)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ModelError if it can't be read or is corrupt."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file.", remedy="Fetch the model again.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be opened: {error}.", remedy="Check the file and its permissions.") from error
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise _corrupt(path, "its header is longer than the file")
    header = _parse_header(data[8 : 8 + header_bytes], path)
    body = np.frombuffer(data, dtype=np.uint8)[8 + header_bytes :]
    return {name: _tensor(name, item, body, path) for name, item in header.items() if name != "__metadata__"}


def _parse_header(text: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is no JSON object")
    return header


def _tensor(name: str, item: Any, body: NDArray[np.uint8], path: Path) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(path, f"its entry of {name!r} is malformed") from error
    numbers = (*shape, begin, end)
    if type(dtype) is not str or not all(type(number) is int and number >= 0 for number in numbers):
        raise _corrupt(path, f"its entry of {name!r} is malformed")
    if not begin <= end <= len(body):
        raise _corrupt(path, f"the tensor {name!r} ends at byte {end} of {len(body)}")
    if dtype in _DTYPES and math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != end - begin:
        raise _corrupt(path, f"the tensor {name!r} has {end - begin} bytes, which does not fit its shape {shape}")
    return StoredTensor(path, dtype, shape, body[begin:end])


def _corrupt(path: Path, cause: str) -> ModelError:
    return ModelError(f"{path}: {cause}.", remedy="The file may be truncated or corrupt: fetch it again.")


FLOAT8 = "F8_E4M3"
_OF_WEIGHTS = ("_scale", "_scale_inv")
"""After the name of the matrix."""
_OF_OTHERS = (".input_scale", ".input_scale_ub", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales that are not of weights."""
_FORMATS = (None, "float-quantized", "naive-quantized")
"""Formats of compressed-tensors in which weights are a tensor of fp8 and one of scales."""
_COLS_AT_LEAST = 32
"""Least columns of a block: backends hold a scale for as many columns, or for a multiple."""

Block = tuple[int, int]
"""Rows and columns."""


def read_block(config: JsonFile) -> Block | None:
    """Rows and columns that share a scale where a matrix has several of both; None where the settings name none.

    Raises ModelError for a checkpoint that is quantised otherwise than as fp8.
    """
    settings = config.get("quantization_config", dict)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors_block(config, settings)
    if method == "fp8":
        return _as_block(config, settings.get("weight_block_size"))
    if method == "fbgemm_fp8" or (method == "modelopt" and settings.get("quant_algo") == "FP8"):
        return None
    raise _unsupported(config)


def _compressed_tensors_block(config: JsonFile, settings: Mapping[str, Any]) -> Block | None:
    groups = settings.get("config_groups")
    found = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    schemes = [scheme for scheme in found if isinstance(scheme, dict)]
    is_fp8 = len(schemes) == len(found) and all((s.get("type"), s.get("num_bits")) == ("float", 8) for s in schemes)
    # A transform rotates what a matrix multiplies: without it every answer would be wrong.
    if not schemes or not is_fp8 or settings.get("format") not in _FORMATS or settings.get("transform_config"):
        raise _unsupported(config)
    blocks = {_as_block(config, scheme.get("block_structure")) for scheme in schemes}
    if len(blocks) > 1:
        raise unsupported(config.path, "quantization_config has blocks of several sizes", "one size is")
    return blocks.pop()


def _as_block(config: JsonFile, value: object) -> Block | None:
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, cols = map(int, sizes if isinstance(sizes, list) else ())
    except (TypeError, ValueError) as error:
        raise config.error(f"the block {value!r} of quantization_config is no two numbers") from error
    if rows < 1 or cols < 1 or cols % _COLS_AT_LEAST:
        raise unsupported(config.path, f"quantization_config has blocks of {rows} x {cols}", "columns in multiples of 32 are")
    return rows, cols


def _unsupported(config: JsonFile) -> ModelError:
    return ModelError(
        f"{config.path}: quantised checkpoints other than fp8 (e4m3) are not supported.",
        remedy="Use a GGUF file, an fp8 checkpoint, or the bf16 original.",
    )


def split_scales(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Tensors without scales, and the scales of weights by their weight's name. Raises ModelError if a matrix has none.

    Without a tensor in fp8 all are left as they are.
    """
    wanted = {name for name, tensor in tensors.items() if tensor.dtype == FLOAT8}
    if not wanted:
        return dict(tensors), {}
    scales = {name: tensors[name + end] for name in wanted for end in _OF_WEIGHTS if name + end in tensors}
    for name in tensors:  # in the file's order
        if name in wanted and name not in scales:
            raise ModelError(
                f"{tensors[name].path}: {name} is in fp8, and there is no {name}_scale.", remedy="Fetch the model again."
            )
    used = {name + end for name in wanted for end in _OF_WEIGHTS}
    return {name: tensor for name, tensor in tensors.items() if name not in used and not name.endswith(_OF_OTHERS)}, scales


def block_scales(name: str, shape: tuple[int, ...], scale: StoredTensor, block: Block | None) -> BlockScales:
    """The scales of a matrix. Raises ModelError for a scale that is not finite, or whose shape fits neither rows nor blocks."""
    if len(shape) != 2:
        raise ModelError(f"{scale.path}: {name} is in fp8, and no matrix.", remedy="Use the bf16 original.")
    values = scale.array()
    wide = (values.astype(np.uint32) << 16).view(np.float32) if scale.dtype == "BF16" else values.astype(np.float32)
    if scale.dtype == FLOAT8 or not np.isfinite(wide).all():
        raise ModelError(f"{scale.path}: a scale of {name} is no finite number.", remedy="Fetch the model again.")
    num_rows, num_cols = shape
    if wide.size == 1:
        return BlockScales(wide.reshape(1, 1), max(1, num_rows), max(1, num_cols))
    if wide.shape in ((num_rows,), (num_rows, 1)):
        return BlockScales(wide.reshape(-1, 1), 1, num_cols)
    if block is not None and wide.shape == (-(-num_rows // block[0]), -(-num_cols // block[1])):
        return BlockScales(wide, *block)
    raise ModelError(
        f"{scale.path}: the scales of {name} have the shape {wide.shape}, and the matrix {shape}.",
        remedy="This variant is not supported: use the bf16 original.",
    )
