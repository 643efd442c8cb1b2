"""Weights as they lie in a file: raw rows and the format that gives them a meaning. Owns no arithmetic but `dequantize`.

The quantised formats are those of GGML (https://github.com/ggml-org/ggml, `ggml-common.h`): groups of 32
consecutive columns share a scale. Memory-mapped arrays stay memory-mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.types.model_spec import ModelSpec
from penstock.types.vocab import GgufVocab

GROUP_SIZE = 32
"""Columns that share one scale in every quantised format kept at run time."""


class WeightFormat(StrEnum):
    """Formats that every backend must compute with; loaders convert all others to one of these."""

    F32 = "f32"
    """float32; norms and biases."""
    BF16 = "bf16"
    """bfloat16, as uint16 bit patterns."""
    Q4_0 = "q4_0"
    """w = d * (q - 8); a group is f16 d, then 16 bytes: low nibbles are columns 0-15, high nibbles 16-31."""
    Q4_1 = "q4_1"
    """w = d * q + m; a group is f16 d, f16 m, then 16 bytes as in Q4_0."""
    Q8_0 = "q8_0"
    """w = d * q; a group is f16 d, then 32 int8."""


GROUP_BYTES: Mapping[WeightFormat, int] = {WeightFormat.Q4_0: 18, WeightFormat.Q4_1: 20, WeightFormat.Q8_0: 34}


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """A matrix [num_rows, num_cols] (a vector is [1, n]), row-major; a row is one output channel."""

    name: str
    num_rows: int
    num_cols: int
    format: WeightFormat
    data: NDArray[np.generic]
    """F32: float32 [num_rows, num_cols]; BF16: uint16 likewise; quantised: uint8 [num_rows, num_cols / 32 * group bytes]."""

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)

    def dequantize(self) -> NDArray[np.float32]:
        """The values, float32 [num_rows, num_cols]; exact for every format here."""
        return dequantize(self.data, self.format, self.num_cols)


def dequantize(data: NDArray[np.generic], fmt: WeightFormat, num_cols: int) -> NDArray[np.float32]:
    """Values of raw rows, float32 [num_rows, num_cols]. `data` is as in `WeightTensor.data`."""
    if fmt is WeightFormat.F32:
        return np.ascontiguousarray(data, dtype=np.float32)
    if fmt is WeightFormat.BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    num_rows = data.shape[0]
    groups = np.ascontiguousarray(data, dtype=np.uint8).reshape(num_rows, num_cols // GROUP_SIZE, GROUP_BYTES[fmt])
    d = np.ascontiguousarray(groups[..., :2]).view(np.float16).astype(np.float32)
    if fmt is WeightFormat.Q8_0:
        values = d * np.ascontiguousarray(groups[..., 2:]).view(np.int8).astype(np.float32)
        return values.reshape(num_rows, num_cols)
    packed = groups[..., GROUP_BYTES[fmt] - 16 :]
    q = np.concatenate([packed & 0x0F, packed >> 4], axis=-1).astype(np.float32)
    if fmt is WeightFormat.Q4_0:
        values = d * (q - 8.0)
    else:
        m = np.ascontiguousarray(groups[..., 2:4]).view(np.float16).astype(np.float32)
        values = d * q + m
    return values.reshape(num_rows, num_cols)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """Everything that a model's files say. Made by a loader, read by backends and by `text`."""

    name: str
    spec: ModelSpec
    weights: Mapping[str, WeightTensor]
    """By canonical name: `embed`, `norm`, `output` (unless tied), `layers.{i}.{attn_norm,q,k,v,o,mlp_norm,gate,up,down}`,
    biases `layers.{i}.{q,k,v}_bias`. q and k rows are in the half-split rope layout."""
    tokenizer_source: Path | GgufVocab
    """What `text.tokenizer.load_tokenizer` needs: the Path of a tokenizer.json, or a vocabulary from a GGUF file."""
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    path: Path
    notes: tuple[str, ...] = ()
    """What the loader converted, in words; it has logged them already, before the work."""

    @property
    def num_weight_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.weights.values())
