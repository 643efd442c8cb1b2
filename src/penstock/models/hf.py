"""Loads a Hugging Face directory as a `LoadedModel`. Called by `models.load`; q and k rows are in our rope layout already."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from penstock.models import architectures, checks
from penstock.models.formats import Floats, WeightFormat, held_bytes, held_table_bytes, stored_bytes
from penstock.models.hf_config import JsonFile, read_bos_id, read_eos_ids, read_json, read_spec, read_special_tokens
from penstock.models.hf_quantised import conversion_notes, put_together, read_quantisation
from penstock.models.hf_text import find_tokenizer, read_chat_templates
from penstock.models.packed_integers import PackedIntegers
from penstock.models.safetensors_file import FLOAT8, StoredTensor, open_safetensors
from penstock.models.weights import BlockScales, Generation, LoadedModel, WeightTensor, held_floats
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec

_log = logging.getLogger(__name__)
_TOP: Mapping[str, str] = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "output"}
_BLOCK = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_DERIVED = "rotary_emb.inv_freq"
"""Old checkpoints carry what config.json already says."""


def load_hf_directory(
    path: Path,
    *,
    name: str = "",
    max_weight_bytes: int | None = None,
    floats: Floats = Floats.BF16,
    served_len: int | None = None,
) -> LoadedModel:
    """The model of a directory with config.json, safetensors and tokenizer.json; weights in bf16 and fp8 stay memory-mapped.

    `name` defaults to the directory's, and `served_len`, the tokens of the longest text, to the model's.

    Raises ModelError if a file is missing, corrupt or unsupported, or if the weights
    would take more than `max_weight_bytes` in a backend that holds `floats`, all before any weight is read.
    """
    _refuse_adapter(path)
    config = read_json(path / "config.json")
    architecture_name = _architecture_name(config)
    architecture = architectures.find(architecture_name)
    canonical = partial(architectures.canonical_name, top=_TOP, block=_BLOCK, layer=architecture.hf_layer)
    quantisation = read_quantisation(config, read_json(path / "quantize_config.json", is_optional=True))
    opened = put_together(quantisation, open_weights(path))
    stored = {canonical(name): tensor for name, tensor in opened.tensors.items() if not name.endswith(_DERIVED)}
    scales = {canonical(name): scale for name, scale in opened.scales.items()}
    facts = {"has_qkv_bias": "layers.0.q_bias" in stored, "has_output": "output" in stored}
    spec = architecture.of_hf(config, read_spec(config, architecture_name, **facts, served_len=served_len))
    checks.check_spec(spec, path / "config.json")
    if spec.tie_word_embeddings:
        stored.pop("output", None)
    checks.check_weights(architecture.describe(spec), {name: _matrix_shape(tensor) for name, tensor in stored.items()}, path)
    held = sum(
        _held_bytes(tensor, scales.get(key), held_floats(key, floats))
        for key, tensor in stored.items()
        if key != "embed" or spec.tie_word_embeddings
    )
    if not spec.tie_word_embeddings:
        held += _looked_up_bytes(stored["embed"], floats)
    checks.check_memory(held, max_weight_bytes, path)
    tokenizer = find_tokenizer(path)
    bos_token_id = read_bos_id(config, spec.vocab_size)
    generation = read_json(path / "generation_config.json", is_optional=True)
    eos_token_ids = read_eos_ids(config, generation, spec.vocab_size)
    special_tokens, chat_templates = read_special_tokens(path), read_chat_templates(path)
    notes = conversion_notes(stored.values())
    for note in notes:
        _log.info("%s: %s", path.name, note)
    return LoadedModel(
        name=name or path.resolve().name,
        spec=spec,
        weights={key: _weight(key, tensor, scales.get(key), architecture.hf_norm_offset) for key, tensor in stored.items()},
        tokenizer_source=tokenizer,
        chat_templates=chat_templates,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        path=path,
        special_tokens=special_tokens,
        generation=Generation(generation.path, generation.values) if generation.values else None,
        notes=notes,
    )


def read_hf_spec(path: Path) -> ModelSpec:
    """The description of a directory with a config.json; weights need not be there. Raises ModelError.

    Biases of queries, keys and values are told by weights alone: here they are those that `attention_bias` or Qwen 2 implies.
    """
    config = read_json(path / "config.json")
    architecture_name = _architecture_name(config)
    has_bias = config.get("attention_bias", bool)
    has_bias = architecture_name == "qwen2" if has_bias is None else has_bias
    spec = read_spec(config, architecture_name, has_qkv_bias=has_bias, has_output=True)
    spec = architectures.find(architecture_name).of_hf(config, spec)
    checks.check_spec(spec, path / "config.json")
    return spec


def _refuse_adapter(path: Path) -> None:
    """A folder of PEFT has the difference to another model, and seldom that model's config.json."""
    file = path / "adapter_config.json"
    if not file.is_file() or any(path.glob("model*.safetensors")):
        return
    base = read_json(file).get("base_model_name_or_path", str) or "another model"
    raise ModelError(
        f"{path}: this is an adapter (LoRA, PEFT) of {base}, not a model.",
        remedy="Penstock does not serve adapters yet: merge it into that model (peft's merge_and_unload) and serve the result.",
    )


def _architecture_name(config: JsonFile) -> str:
    names = config.require("architectures", list)
    if len(names) != 1 or type(names[0]) is not str or names[0] not in architectures.HF_CLASSES:
        raise ModelError(
            f"{config.path}: the architecture {', '.join(map(str, names)) or 'none'} is not supported.",
            remedy=f"Hugging Face directories are supported of: {', '.join(architectures.HF_CLASSES)}.",
        )
    return architectures.HF_CLASSES[names[0]]


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory by name, of all its shards. Raises ModelError."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return open_safetensors(_single_file(path))
    files = _shards(read_json(index))
    opened = {file: open_safetensors(path / file) for file in dict.fromkeys(files.values())}
    missing = [name for name, file in files.items() if name not in opened[file]]
    if missing:
        raise ModelError(f"{path / files[missing[0]]}: the tensor {missing[0]!r} is missing.", remedy="Fetch the file again.")
    return {name: opened[file][name] for name, file in files.items()}


def _shards(index: JsonFile) -> dict[str, str]:
    """File by tensor; names that lead out of the directory are refused."""
    files = index.require("weight_map", dict)
    for file in files.values():
        if type(file) is not str or Path(file).name != file:
            raise index.error(f"weight_map names the file {file!r}")
    return files


def _single_file(path: Path) -> Path:
    single = path / "model.safetensors"
    if not single.is_file():
        remedy = "Only safetensors are read: convert other checkpoints with transformers' save_pretrained."
        raise ModelError(f"{path}: there is neither model.safetensors nor model.safetensors.index.json.", remedy=remedy)
    return single


def _matrix_shape(tensor: StoredTensor | PackedIntegers) -> tuple[int, int]:
    """(num_rows, num_cols); a vector is one row, a scalar or a cube fits nothing."""
    return (1, *tensor.shape)[-2:] if len(tensor.shape) in (1, 2) else (0, 0)  # type: ignore[return-value]


def _format(tensor: StoredTensor | PackedIntegers) -> WeightFormat:
    """The format of a matrix, as far as its bytes in memory depend on it."""
    if isinstance(tensor, PackedIntegers):
        return tensor.format
    return WeightFormat.F8_E4M3 if tensor.dtype == FLOAT8 else WeightFormat.BF16


def _held_bytes(tensor: StoredTensor | PackedIntegers, scales: BlockScales | None, floats: Floats) -> int:
    fmt = WeightFormat.F32 if len(tensor.shape) == 1 else _format(tensor)
    has_blocks = scales is not None and scales.values.shape[1] > 1
    return held_bytes(fmt, *_matrix_shape(tensor), floats, has_blocks=has_blocks)


def _looked_up_bytes(table: StoredTensor | PackedIntegers, floats: Floats) -> int:
    """Bytes of a matrix of which only rows are read: in the file, unless they are made of what the file has, or widened."""
    if isinstance(table, PackedIntegers):
        return stored_bytes(table.format, *table.shape)
    return held_table_bytes(_format(table), *_matrix_shape(table)) if floats is Floats.BF16 else 0


def _weight(name: str, tensor: StoredTensor | PackedIntegers, scales: BlockScales | None, norm_offset: float) -> WeightTensor:
    num_rows, num_cols = _matrix_shape(tensor)
    if isinstance(tensor, PackedIntegers):
        return WeightTensor(name, num_rows, num_cols, tensor.format, tensor)
    values = tensor.array().reshape(num_rows, num_cols)
    is_bf16 = tensor.dtype == "BF16"
    if len(tensor.shape) == 1:
        wide = (values.astype(np.uint32) << 16).view(np.float32) if is_bf16 else np.ascontiguousarray(values, dtype=np.float32)
        if norm_offset and name.endswith("norm"):
            wide = wide + np.float32(norm_offset)
        return WeightTensor(name, num_rows, num_cols, WeightFormat.F32, wide)
    return WeightTensor(name, num_rows, num_cols, WeightFormat[tensor.dtype], values, scales)
