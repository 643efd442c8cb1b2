"""The quantised matrices of a Hugging Face directory: which settings are supported, and which tensors make up a matrix.

The scales of a matrix in fp8 (e4m3) are in a tensor of the same name with `_scale` (compressed-tensors, ModelOpt, AutoFP8) or
`_scale_inv` (DeepSeek) added. Scales of activations, keys and values are ignored: backends round activations in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.models.checks import unsupported
from penstock.models.formats import WeightFormat, dequantize
from penstock.models.hf_config import JsonFile
from penstock.models.packed import AWQ_ORDER, GROUP, Integers, Mxfp4Cube, PackedIntegers, mxfp4_cube, packed_integers
from penstock.models.safetensors_file import FLOAT8, StoredTensor
from penstock.models.weights import BlockScales, is_of_experts
from penstock.types.errors import ModelError, counted, damaged

Block = tuple[int, int]  # rows and columns
Tensors = Mapping[str, StoredTensor]  # by their names in the files
Stored = StoredTensor | PackedIntegers | Mxfp4Cube


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation settings of a directory: how its matrices are packed and scaled."""

    method: Literal["floats", "fp8", "gptq", "awq", "compressed", "mxfp4"]
    """`floats`, `fp8`: no matrix is packed. `compressed`: compressed-tensors."""
    bits: int = 0  # of a packed integer
    group_sizes: frozenset[int] = frozenset()  # possible numbers of columns that share a scale, besides whole rows
    zero_shift: int = 0  # added to the stored zero points of GPTQ
    block: Block | None = None  # shares an fp8 scale

    def likely_format(self, name: str, num_rows: int, num_cols: int) -> WeightFormat:
        """Return the format of a missing weight by these settings, as if they were for all matrices of layers."""
        if num_rows == 1:
            return WeightFormat.F32
        has_settings = is_of_experts(name) if self.method == "mxfp4" else name.startswith("layers.")
        if not has_settings or num_cols % GROUP:
            return WeightFormat.BF16
        by_method = {"fp8": WeightFormat.F8_E4M3, "mxfp4": WeightFormat.MXFP4, "awq": WeightFormat.Q4_1}
        by_bits = {4: WeightFormat.Q4_0, 8: WeightFormat.Q8_0}
        return by_method.get(self.method) or by_bits.get(self.bits, WeightFormat.BF16)


_OF_FP8 = ("_scale", "_scale_inv")  # added to the name of a matrix in fp8
_OF_OTHERS = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale", ".output_scale", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
"""Ends of the names of scales of activations, keys and values."""
_FP8_FORMATS = (None, "float-quantized", "naive-quantized")
_MODELOPT_BLOCKS: Mapping[str, Block | None] = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": (128, 128)}
"""`quant_algo` of ModelOpt, which writes some in lower case -> the block that shares a scale."""
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_BITS = (4, 8)


def read_quantisation(config: JsonFile, separate: JsonFile) -> Quantisation:
    """Read the quantisation in config.json, or else in AutoGPTQ's quantize_config.json. Raises ModelError."""
    settings = config.get("quantization_config", dict)
    if settings is None:
        settings = {"quant_method": "gptq", **separate.values} if separate.values else {}
    read = JsonFile(config.path, settings)
    method = read.get("quant_method", str)
    if not settings:
        return Quantisation("floats")
    if method is None:
        raise _unsupported(read, "a quantization_config with no quant_method")
    if (reader := _READERS.get(method)) is not None:
        return reader(read)
    algorithm = read.get("quant_algo", str) or ""
    if method == "modelopt" and algorithm.upper() in _MODELOPT_BLOCKS:
        return Quantisation("fp8", block=_MODELOPT_BLOCKS[algorithm.upper()])
    raise _unsupported(read, f"the quantisation {method} {algorithm}".rstrip())


def _gptq(settings: JsonFile) -> Quantisation:
    name = settings.get("checkpoint_format", str) or settings.get("format", str) or "gptq"
    if name.lower() not in ("gptq", "gptq_v2") or settings.get("is_marlin_format", bool):
        raise _unsupported(settings, f"GPTQ's format {name if not settings.values.get('is_marlin_format') else 'marlin'}")
    bits = settings.require("bits", int)
    if bits not in _BITS:
        raise _unsupported(settings, f"GPTQ with {bits} bits")
    overrides = [value for value in (settings.get("dynamic", dict) or {}).values() if isinstance(value, dict)]
    if any(value.get("bits", bits) != bits for value in overrides):
        raise _unsupported(settings, "GPTQ with several numbers of bits (dynamic)")
    sizes = _group_sizes([settings, *(JsonFile(settings.path, value) for value in overrides)])
    return Quantisation("gptq", bits, sizes, zero_shift=0 if name.lower() == "gptq_v2" else 1)


def _awq(settings: JsonFile) -> Quantisation:
    name = settings.get("version", str) or settings.get("format", str) or "gemm"
    if name.lower() != "gemm" or settings.get("bits", int) not in (None, 4):
        raise _unsupported(settings, f"AWQ's format {name} with {settings.values.get('bits')} bits")
    return Quantisation("awq", 4, _group_sizes([settings]))


def _compressed_tensors(settings: JsonFile) -> Quantisation:
    groups = settings.get("config_groups", dict) or {}
    found = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    schemes = [JsonFile(settings.path, scheme) for scheme in found if isinstance(scheme, dict)]
    kinds = {(scheme.get("type", str) or "int", scheme.get("num_bits", int)) for scheme in schemes}
    name = settings.get("format", str)
    sparsity = settings.get("sparsity_config", dict) or {}
    if not schemes or len(schemes) < len(found) or len(kinds) > 1:
        raise _unsupported(settings, "compressed-tensors with no scheme of weights, or with several,")
    # A transform rotates the inputs of a matrix: without it every answer would be wrong.
    if settings.values.get("transform_config") or sparsity.get("format", "dense") != "dense":
        raise _unsupported(settings, "compressed-tensors with a transform or sparsity")
    kind, bits = kinds.pop()
    if (kind, bits) == ("float", 8) and name in _FP8_FORMATS:
        blocks = {_as_block(settings, scheme.values.get("block_structure")) for scheme in schemes}
        if len(blocks) > 1:
            raise unsupported(settings.path, "quantization_config has blocks of several sizes", "one size is")
        return Quantisation("fp8", block=blocks.pop())
    is_served = name in _INTEGER_FORMATS and all(scheme.values.get("dynamic") in (None, False) for scheme in schemes)
    if kind != "int" or bits not in _BITS or not is_served:
        raise _unsupported(settings, f"compressed-tensors' format {name} with {bits} bits of type {kind}")
    return Quantisation("compressed", bits, _group_sizes(schemes))


def _group_sizes(settings: Iterable[JsonFile]) -> frozenset[int]:
    return frozenset(size for item in settings if (size := item.get("group_size", int)) is not None)


def _as_block(settings: JsonFile, value: object) -> Block | None:
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, cols = map(int, sizes if isinstance(sizes, list) else ())
    except (TypeError, ValueError, OverflowError) as error:
        raise settings.error(f"the block {value!r} of quantization_config is not two numbers") from error
    if rows < 1 or cols < 1 or cols % GROUP:
        raise unsupported(settings.path, f"quantization_config has blocks of {rows} x {cols}", "columns in multiples of 32 are")
    return rows, cols


_READERS: Mapping[str, Callable[[JsonFile], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fbgemm_fp8": lambda _: Quantisation("fp8"),
    "mxfp4": lambda _: Quantisation("mxfp4"),  # unquantised matrices have no `_blocks` tensor
    "fp8": lambda read: Quantisation("fp8", block=_as_block(read, read.values.get("weight_block_size"))),
}


def _unsupported(settings: JsonFile, what: str) -> ModelError:
    return ModelError(
        f"{settings.path}: {what} is not supported.",
        remedy="Use a GGUF file, the bf16 original, or one in fp8 (e4m3), MXFP4, GPTQ, AWQ or compressed-tensors (4, 8 bits).",
    )


@dataclass(frozen=True, slots=True)
class Matrices:
    tensors: Mapping[str, Stored]
    """By the unpacked matrix's name. MXFP4 matrices keep their blocks' name, because float files transpose the matrix."""
    scales: Mapping[str, BlockScales]  # of matrices in fp8


def put_together(quantisation: Quantisation, tensors: Tensors) -> Matrices:
    """Combine the tensors of each quantised matrix: integers (not read yet), scales, zero points. Raises ModelError."""
    packed, used = (_cubes if quantisation.method == "mxfp4" else _packed)(quantisation, tensors)
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    rest, scales = _split_scales(rest, quantisation.block)
    if packed:
        rest = _without_idle_biases(rest, packed)
        rest = {name: tensor for name, tensor in rest.items() if not name.endswith(_OF_OTHERS)}
    if doubled := packed.keys() & rest.keys():
        raise damaged(packed[min(doubled)].path, f"{min(doubled)} is stored twice, packed and unpacked")
    return Matrices({**rest, **packed}, scales)


def conversion_notes(tensors: Iterable[Stored]) -> tuple[str, ...]:
    number = sum(isinstance(tensor, PackedIntegers) and tensor.format is WeightFormat.F32 for tensor in tensors)
    matrices = counted(number, "matrix of packed integers is", "matrices of packed integers are")
    return (f"{matrices} held as floats, since the scales do not fit into half precision",) if number else ()


def _cubes(_: Quantisation, tensors: Tensors) -> tuple[Mapping[str, PackedIntegers | Mxfp4Cube], set[str]]:
    found: dict[str, Mxfp4Cube] = {}
    used: set[str] = set()
    for name in tensors:
        if name.endswith("_blocks"):
            parts = _Parts(name, "_blocks", tensors, used)
            blocks, scales = (parts.require(end).integers("U8") for end in ("_blocks", "_scales"))
            found[name] = mxfp4_cube(tensors[name].path, name, blocks, scales)
    return found, used


def _packed(quantisation: Quantisation, tensors: Tensors) -> tuple[Mapping[str, PackedIntegers | Mxfp4Cube], set[str]]:
    found: dict[str, PackedIntegers] = {}
    used: set[str] = set()
    ends, make = _MAKERS.get(quantisation.method, ((), _gptq_matrix))
    for name, tensor in tensors.items():
        for end in ends:
            if name.endswith(end) and (end != ".weight" or tensor.dtype == "I8"):
                parts = _Parts(name, end, tensors, set())
                found[f"{parts.stem}.weight"] = made = make(quantisation, parts)
                if made.num_groups > 1 and made.shape[1] // made.num_groups not in quantisation.group_sizes:
                    cause = f"{name} divides {made.shape[1]} columns into {made.num_groups} groups, unlike the settings"
                    raise parts.error(cause)
                used |= parts.used | {name}
    return found, used


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of one matrix. `name` is its tensor of integers; its others replace the ending `end`."""

    name: str
    end: str
    tensors: Tensors
    used: set[str]

    @property
    def path(self) -> Path:
        return self.tensors[self.name].path

    @property
    def stem(self) -> str:
        return self.name.removesuffix(self.end)

    def find(self, end: str) -> StoredTensor | None:
        self.used.add(f"{self.stem}{end}")
        return self.tensors.get(f"{self.stem}{end}")

    def require(self, end: str) -> StoredTensor:
        tensor = self.find(end)
        if tensor is None:
            raise self.error(f"{self.name} has no {self.stem}{end}")
        return tensor

    def matrix(self, end: str, *dtypes: str) -> NDArray[np.generic]:
        tensor = self.require(end)
        values = tensor.integers(*dtypes)
        if values.ndim != 2:
            raise self.error(f"{self.stem}{end} has the shape {tensor.shape}, not that of a matrix")
        return values

    def error(self, cause: str) -> ModelError:
        return damaged(self.path, cause)


def _gptq_matrix(quantisation: Quantisation, parts: _Parts) -> PackedIntegers:
    """Combine qweight [columns / 8, rows], qzeros [groups, rows / 8], scales [groups, rows], and g_idx: each column's group."""
    integers = Integers(parts.matrix(".qweight", "I32").T, quantisation.bits)
    num_cols = integers.shape[1]
    scales, scale_format = _scales(parts, ".scales")
    zeros = Integers(parts.matrix(".qzeros", "I32").T, quantisation.bits, is_of_columns=True)
    order = _column_order(parts, ".g_idx", num_cols, len(scales))
    shift = quantisation.zero_shift
    transposed = (scales.T, scale_format)
    return packed_integers(parts.name, parts.path, num_cols, integers, transposed, zeros, zero_shift=shift, order=order)


def _column_order(parts: _Parts, end: str, num_cols: int, num_groups: int) -> NDArray[np.intp] | None:
    """Return the columns in the order of their groups (act-order), or None if they are in that order."""
    if (stored := parts.find(end)) is None:
        return None
    groups = stored.integers("I32", "I64").astype(np.int64)
    if groups.shape != (num_cols,):
        raise parts.error(f"the groups of {parts.stem} have the shape {groups.shape}, and the matrix {num_cols} columns")
    if ((groups < 0) | (groups >= num_groups)).any():
        raise parts.error(f"a column of {parts.stem} is in a group that is not one of {num_groups}")
    if not num_cols or (np.bincount(groups, minlength=num_groups) * num_groups != num_cols).any():
        raise parts.error(f"the {num_groups} groups of {parts.stem} have different numbers of columns")
    order = np.argsort(groups, kind="stable")
    return None if np.array_equal(order, np.arange(num_cols)) else order


def _awq_matrix(quantisation: Quantisation, parts: _Parts) -> PackedIntegers:
    """Combine qweight [columns, rows / 8], qzeros [groups, rows / 8], scales [groups, rows]. Words have AWQ's order of rows."""
    words, zeros = (
        Integers(parts.matrix(end, "I32").T, quantisation.bits, is_of_columns=True, nibbles=AWQ_ORDER)
        for end in (".qweight", ".qzeros")
    )
    scales, scale_format = _scales(parts, ".scales")
    return packed_integers(parts.name, parts.path, words.shape[1], words, (scales.T, scale_format), zeros)


def _compressed_matrix(quantisation: Quantisation, parts: _Parts) -> PackedIntegers:
    """Combine the tensors of one matrix:

    - weight [rows, columns], or weight_packed [rows, columns / 8] and weight_shape [2]
    - weight_scale [rows, groups]
    - weight_zero_point [rows / 8, groups], or [rows, groups] if not packed
    """
    if parts.end == ".weight":
        integers = Integers(parts.matrix(parts.end, "I8"), 8)
        num_rows, num_cols = integers.shape
    else:
        integers = Integers(parts.matrix(parts.end, "I32"), quantisation.bits)
        shape = parts.require(".weight_shape").integers("I32", "I64").reshape(-1).tolist()
        if len(shape) != 2 or shape[0] != len(integers.words):
            raise parts.error(f"{parts.stem}.weight_shape is {shape}, and there are {len(integers.words)} rows")
        num_rows, num_cols = shape
    scales, scale_format = _scales(parts, ".weight_scale")
    if scales.size == 1:
        scales = np.broadcast_to(scales.reshape(1, 1), (num_rows, 1))
    zeros = None
    if (stored := parts.find(".weight_zero_point")) is not None:
        points = stored.integers("I8", "I32")
        if points.dtype == np.int8 and points.size == 1:
            points = np.broadcast_to(points.reshape(1, 1), scales.shape)
        if points.ndim != 2:
            raise parts.error(f"{parts.stem}.weight_zero_point has the shape {points.shape}, not that of a matrix")
        zeros = Integers(points, integers.bits, is_of_columns=True)
    order = _column_order(parts, ".weight_g_idx", num_cols, scales.shape[1])
    return packed_integers(parts.name, parts.path, num_cols, integers, (scales, scale_format), zeros, order=order)


def _scales(parts: _Parts, end: str) -> tuple[NDArray[np.generic], WeightFormat]:
    tensor = parts.require(end)
    values = tensor.array()
    if values.ndim > 2 or tensor.dtype == FLOAT8:
        raise parts.error(f"{parts.stem}{end} has the shape {values.shape} and the type {tensor.dtype}")
    return values if values.ndim == 2 else values.reshape(-1, 1), WeightFormat[tensor.dtype]


_MAKERS: Mapping[str, tuple[tuple[str, ...], Callable[[Quantisation, _Parts], PackedIntegers]]] = {
    "gptq": ((".qweight",), _gptq_matrix),
    "awq": ((".qweight",), _awq_matrix),
    "compressed": ((".weight_packed", ".weight"), _compressed_matrix),
}
"""Method -> ends of the names of integers, and the function that makes a matrix of them."""


def _without_idle_biases(tensors: dict[str, StoredTensor], packed: Iterable[str]) -> dict[str, StoredTensor]:
    """Drop biases of packed matrices that are zero in every layer: AutoGPTQ writes them for models without biases."""
    by_kind: dict[str, list[str]] = {}
    for name in packed:
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in tensors:
            by_kind.setdefault(".".join(bias.split(".")[-2:]), []).append(bias)
    for names in by_kind.values():
        if all(tensors[name].dtype != FLOAT8 and not tensors[name].array().any() for name in names):
            tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
    return tensors


def _split_scales(tensors: Tensors, block: Block | None) -> tuple[dict[str, StoredTensor], dict[str, BlockScales]]:
    wanted = [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]
    if not wanted:
        return dict(tensors), {}
    scales = {name: tensors[name + end] for name in wanted for end in _OF_FP8 if name + end in tensors}
    if missing := [name for name in wanted if name not in scales]:
        raise damaged(tensors[missing[0]].path, f"{missing[0]} is in fp8, and there is no {missing[0]}_scale")
    used = {name + end for name in wanted for end in _OF_FP8}
    left = {name: tensor for name, tensor in tensors.items() if name not in used and not name.endswith(_OF_OTHERS)}
    return left, {name: _block_scales(name, tensors[name].shape, scale, block) for name, scale in scales.items()}


def _block_scales(name: str, shape: tuple[int, ...], scale: StoredTensor, block: Block | None) -> BlockScales:
    if len(shape) != 2:
        raise ModelError(f"{scale.path}: {name} is in fp8, but not a matrix.", remedy="Use the bf16 original.")
    values = scale.array()
    wide = dequantize(values, WeightFormat[scale.dtype], 1)
    if wide.shape[1::2] == (1, 1):
        wide = wide[:, 0, :, 0]  # ModelOpt writes [blocks of rows, 1, blocks of columns, 1]
    if scale.dtype == FLOAT8 or not np.isfinite(wide).all():
        raise damaged(scale.path, f"a scale of {name} is not a finite number")
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
