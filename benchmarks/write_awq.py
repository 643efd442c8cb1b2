"""A Hugging Face folder's weights in AWQ's 4 bits, for vLLM (`contenders.py`). Needs NumPy and Penstock's own readers alone.

    python write_awq.py FOLDER OUTPUT

Rounds to nearest, without AWQ's calibration: the files serve to compare speeds, and answers are somewhat worse than
a calibrated model's. The layers' matrices are packed, embeddings and head are not, as in AutoAWQ's files.
Layout: https://github.com/casper-hansen/AutoAWQ, version `gemm`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import WeightFormat, dequantize
from penstock.models.safetensors_file import StoredTensor, open_safetensors

GROUP = 64
"""Columns that share a scale. AutoAWQ's 128 does not divide the 576 columns of SmolLM2-135M; 64 fills a tile of int8."""
TOP = 15
ROWS_OF_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight consecutive rows each nibble of a word has, from the lowest on."""
F32 = NDArray[np.float32]
Ints = NDArray[np.uint32]
Tensor = tuple[str, NDArray[np.generic]]
"""safetensors' name of the type, and the array; bf16 as uint16."""


def is_packed(name: str, tensor: StoredTensor) -> bool:
    return ".layers." in name and len(tensor.shape) == 2


def rounded(values: F32) -> tuple[Ints, NDArray[np.uint16], Ints]:
    """Return a matrix as scale * (integer - zero): integers [rows, columns], bits of scales and zeros [rows, groups].

    vLLM computes with scales in bf16, so they are stored in bf16: every reader gets the same weights.
    """
    parts = values.reshape(len(values), -1, GROUP)
    low, high = np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)
    bits = as_bf16(np.maximum((high - low) / TOP, 1e-8))
    scales = dequantize(bits, WeightFormat.BF16, bits.shape[1])
    zeros = np.clip(np.rint(-low / scales), 0, TOP)
    integers = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, TOP)
    return integers.reshape(values.shape).astype(np.uint32), bits, zeros.astype(np.uint32)


def as_bf16(values: F32) -> NDArray[np.uint16]:
    """Return the bits of the nearest bf16, ties away from zero."""
    return np.asarray((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16, np.uint16)


def words(integers: Ints) -> NDArray[np.int32]:
    """Pack integers [rows, n] as int32 [n, rows / 8], eight rows a word in AWQ's order."""
    parts = integers.T.reshape(integers.shape[1], -1, 8)[:, :, ROWS_OF_WORD]
    return np.bitwise_or.reduce(parts << np.arange(0, 32, 4, dtype=np.uint32), axis=2).view(np.int32)


def packed(tensors: Mapping[str, StoredTensor]) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors in AWQ's layout, by name. Raises ValueError for a matrix whose sizes don't fit."""
    for name, tensor in tensors.items():
        if not is_packed(name, tensor):
            yield name, (tensor.dtype, tensor.array())
            continue
        rows, columns = tensor.shape
        if rows % 8 or columns % GROUP:
            raise ValueError(f"{name} has {rows} x {columns} numbers: AWQ needs multiples of 8 and, for its groups, of {GROUP}")
        integers, scales, zeros = rounded(dequantize(tensor.array(), WeightFormat[tensor.dtype], columns))
        stem = name.removesuffix(".weight")
        yield f"{stem}.qweight", ("I32", words(integers))
        yield f"{stem}.qzeros", ("I32", words(zeros))
        yield f"{stem}.scales", ("BF16", np.ascontiguousarray(scales.T))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises OSError."""
    header, end = {}, 0
    for name, (dtype, values) in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def write_awq(folder: Path, output: Path) -> None:
    """Write the folder's model to `output`, packed. Raises ValueError, ModelError or OSError."""
    output.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            shutil.copyfile(path, output / path.name)
    write_tensors(output / "model.safetensors", dict(packed(open_safetensors(folder / "model.safetensors"))))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    (output / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    write_awq(*map(Path, sys.argv[1:3]))
