"""Loads a Hugging Face directory as a `LoadedModel`."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models import architectures, checks, endings, hf_quantised, rope
from penstock.models.architectures import Architecture, Head
from penstock.models.assembly import (
    Piece,
    Sizes,
    find_pieces,
    put_together,
    shape_of,
    with_layouts,
    without_layers,
    without_middle,
    without_shared_keys,
)
from penstock.models.formats import Floats, WeightFormat, dequantize, held_table_bytes, stored_bytes
from penstock.models.hf_config import (
    ALWAYS_BIASED,
    JsonFile,
    configured_biases,
    find_tokenizer,
    is_draft_head,
    read_bos_id,
    read_chat_templates,
    read_eos_ids,
    read_json,
    read_spec,
    read_special_tokens,
    read_weight_map,
    text_part,
)
from penstock.models.hf_quantised import Quantisation, Stored, read_quantisation
from penstock.models.layers import with_both_sides
from penstock.models.packed import Mxfp4Cube, PackedIntegers
from penstock.models.safetensors_file import FLOAT8, StoredTensor, open_safetensors
from penstock.models.sentence import SentenceFiles, read_scores, read_sentence_files, with_colbert
from penstock.models.weights import BlockScales, Generation, LoadedModel, WeightTensor, held_weight_bytes, row_slices
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec, Pooling, TextEnding
from penstock.types.vocab import MARKERS

_log = logging.getLogger(__name__)
_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
_LEFT_OUT = re.compile(r".*rotary_emb\.inv_freq|(model\.)?mtp[._].*")
"""Tensors of frequencies in old checkpoints, which follow from config.json, and of multi-token prediction."""


@dataclass(frozen=True, slots=True)
class _Described:
    config: JsonFile  # the text model's part, with the keys that its architecture adds
    is_wrapped: bool  # the text model is part of a multimodal one
    name: str
    architecture: Architecture
    head: Head | None
    files: SentenceFiles
    ending: TextEnding | None

    def spec(self, names: Container[str], served_len: int | None) -> ModelSpec:
        partial, head_dims = self.architecture.has_partial_rope, self.architecture.hf_head_dims(self.config)
        spec = read_spec(self.config, self.name, names, has_partial_rope=partial, head_dims=head_dims, served_len=served_len)
        spec = endings.with_ending(self.architecture.of_hf(self.config, spec), self.ending)
        if spec.ending is None:
            self.config.only("is_causal", True)
        elif self.config.get("is_causal", bool) is False and not self.architecture.is_encoder:
            spec = with_both_sides(spec)
        checks.check_spec(spec, self.config.path)
        return spec


def _describe(path: Path, task: str, pooling: Pooling | None) -> _Described:
    whole = read_json(path / "config.json")
    config = text_part(whole)
    hf_class = ", ".join(map(str, config.require("architectures", list))) or "none"
    name = architectures.our_name(hf_class, architectures.HF_CLASSES, config.path)
    architecture = architectures.find(name)
    config = JsonFile(config.path, architecture.hf_values(config.values))
    files = SentenceFiles() if task == "generate" else read_sentence_files(path)
    head = architecture.hf_head(hf_class, config)
    if hf_class == "HF_ColBERT":
        files = with_colbert(path, config, files)
    if files.pooling == "sparse":
        if architecture.hf_mlm_head is None or not hf_class.endswith("ForMaskedLM"):
            raise checks.unsupported(
                config.path, f"a SpladePooling follows {hf_class}", "BERT's, DistilBERT's, RoBERTa's and MPNet's are"
            )
        whole.only("tie_word_embeddings", True)
        head = architecture.hf_mlm_head(config)
    ending = endings.choose_ending(
        config.path,
        architecture,
        files=files,
        cannot_generate=architecture.is_encoder or head is not None or _lacks_output(hf_class),
        head=head,
        labels=endings.read_labels(config) if head else (),
        hidden_size=config.require("hidden_size", int),
        task=task,
        pooling=pooling,
    )
    is_wrapped = "text_config" in whole.values or "vision_config" in whole.values
    return _Described(config, is_wrapped, name, architecture, head, files, ending)


def _lacks_output(hf_class: str) -> bool:
    """Return whether a class such as `Qwen3Model` is a decoder without an output, as `AutoModel` saves it."""
    return hf_class.endswith("Model") and not hf_class.endswith("LMHeadModel")


def load_hf_directory(
    path: Path,
    *,
    name: str = "",
    max_weight_bytes: int | None = None,
    floats: Floats = Floats.BF16,
    served_len: int | None = None,
    experts_on_disk: bool = False,
    task: str = "auto",
    pooling: Pooling | None = None,
) -> LoadedModel:
    """Load the model of a directory with config.json, safetensors and a tokenizer. `name` defaults to the directory's.

    `load.LoadOptions` describes the other options. Raises ModelError before any weight is read.
    """
    _refuse_other(path)
    described = _describe(path, task, pooling)
    config, architecture, head = described.config, described.architecture, described.head
    files, ending = described.files, described.ending
    quantisation = read_quantisation(config, _quantize_config(path))
    opened = hf_quantised.put_together(quantisation, open_weights(path))
    top = endings.top_names(architecture.hf_top, head, ending)
    stored_names = {name: None for name in opened.tensors if not _LEFT_OUT.fullmatch(name)}
    tensors = _renamed(endings.hf_names(architecture, stored_names, top, ending), opened.tensors, path)
    if described.is_wrapped:
        tensors = _text_tensors(tensors, path)
    if ending is not None and not head:
        for number, folder in enumerate(files.dense):
            top |= architectures.with_biases({f"{folder}/linear" if folder else "linear": f"dense.{number}"})
            opened_dense = open_safetensors(path / folder / "model.safetensors") if folder else {}
            tensors |= {f"{folder}/{key}": tensor for key, tensor in opened_dense.items()}
    scales = {name_in_tables(architecture, name): scale for name, scale in opened.scales.items()}
    pieces = pieces_of(architecture, tensors, top)
    spec = described.spec(pieces, served_len)
    pieces = without_shared_keys(pieces, spec)
    if architecture.has_further_layers:
        num_more = config.get("num_nextn_predict_layers", int) or 0
        pieces = without_layers(pieces, architecture.hf_layers, range(spec.num_layers, spec.num_layers + num_more))
    if spec.tie_word_embeddings and {"output", "embed"} <= pieces.keys():
        spec = replace(spec, tie_word_embeddings=_is_copy(*(tensors[pieces[key][0].tensor] for key in ("output", "embed"))))
        if spec.tie_word_embeddings:
            del pieces["output"]
        else:
            _log.warning("%s: tie_word_embeddings is true, but the output has weights of its own, which are used", path.name)
    program = architecture.describe(spec)
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    sizes = Sizes(stored, checks.weight_shapes(program), spec)
    pieces = with_layouts(pieces, sizes)
    found_shapes = {name: shape_of(name, found, sizes) for name, found in pieces.items()}
    checks.check_weights(program, endings.shapes_with_made(architecture, spec, sizes.wanted, found_shapes, path), path)
    first = {name: tensors[found[0].tensor] for name, found in pieces.items()}
    held = {
        key: held_weight_bytes(
            key,
            WeightFormat.F32 if len(first[key].shape) <= 1 else _format(first[key]),
            shape,
            floats,
            scales.get(pieces[key][0].tensor),
        )
        for key, shape in found_shapes.items()
    }
    held |= {name: _looked_up_bytes(first[name], floats) for name in spec.looked_up}
    checks.check_memory(held, max_weight_bytes, path, experts_on_disk=experts_on_disk)
    generation = read_json(path / "generation_config.json", is_optional=True)
    for note in hf_quantised.conversion_notes(tensors.values()):
        _log.info("%s: %s", path.name, note)

    def weight(key: str, found: list[Piece]) -> WeightTensor:
        if found[0].layout is not None:
            return put_together(
                key, found, sizes, lambda piece: _matrices(piece, tensors[piece.tensor], scales.get(piece.tensor), sizes)
            )
        order = rope.half_split_rows(key, spec) if architecture.is_interleaved_in_hf else None
        read = _weight(key, first[key], scales.get(found[0].tensor), architecture.hf_norm_offset, order)
        change = architecture.hf_changed.get(key.rpartition(".")[2])
        if change is None:
            return read
        with np.errstate(over="ignore"):  # large values of a corrupt file
            return WeightTensor(key, read.num_rows, read.num_cols, WeightFormat.F32, change(spec, read.dequantize()))

    usual_scores = endings.usual_scores(spec)
    return LoadedModel(
        name=name or path.resolve().name,
        spec=spec,
        tokenizer_source=find_tokenizer(path),
        chat_templates=read_chat_templates(path),
        bos_token_id=read_bos_id(config, spec.vocab_size),
        eos_token_ids=read_eos_ids(config, generation, spec.vocab_size),
        path=path,
        special_tokens={**read_special_tokens(path), **({MARKERS: files.markers} if files.markers else {})},
        generation=Generation(str(generation.path), generation.values) if generation.values else None,
        encoder=endings.encoder_info(spec, read_scores(path, config, usual_scores) if head else usual_scores, files),
        weights=endings.weights_with_made(architecture, spec, {key: weight(key, found) for key, found in pieces.items()}),
    )


def read_hf_spec(path: Path, *, served_len: int | None = None) -> ModelSpec:
    """Return the spec of a directory with a config.json, without its weights. Raises ModelError.

    Without weights, biases are known only from the settings and `ALWAYS_BIASED`.
    """
    described = _describe(path, "auto", None)
    names = {"output", *configured_biases(described.config, described.name)}
    if described.name in ALWAYS_BIASED:
        names.add("layers.0.q_bias")
    return described.spec(names, served_len)


def read_hf_quantisation(path: Path) -> Quantisation:
    """Return the quantisation settings of a directory. Raises ModelError."""
    return read_quantisation(text_part(read_json(path / "config.json")), _quantize_config(path))


def _quantize_config(path: Path) -> JsonFile:
    return read_json(path / "quantize_config.json", is_optional=True)


def _is_copy(output: Stored, embed: Stored) -> bool:
    """Return whether the output matrix equals the embedding. Packed matrices are assumed to be equal."""
    if not (isinstance(output, StoredTensor) and isinstance(embed, StoredTensor)):
        return True
    if len(embed.shape) != 2 or (output.dtype, output.shape) != (embed.dtype, embed.shape):
        return False
    ours, theirs = output.array(), embed.array()
    return all(np.array_equal(ours[rows], theirs[rows]) for rows in row_slices(*embed.shape))


def _refuse_other(path: Path) -> None:
    if is_draft_head(path):
        raise ModelError(
            f"{path}: this is a draft head (EAGLE), not a model.",
            remedy="Serve the model that it was trained for with --speculation-model PATH.",
        )
    file = path / "adapter_config.json"
    if not file.is_file() or any(path.glob("model*.safetensors")):
        return
    base = read_json(file).get("base_model_name_or_path", str) or "another model"
    raise ModelError(
        f"{path}: this is an adapter (LoRA, PEFT) of {base}, not a model.",
        remedy="Serve that model with --lora-modules NAME=PATH, or merge the adapter with --merge-lora PATH.",
    )


def name_in_tables(architecture: Architecture, name: str) -> str:
    """Return a tensor's name in the architecture's tables: without a prefix such as `language_model.`."""
    return _text_name(architecture.hf_name(name) or name)


def pieces_of(architecture: Architecture, names: Iterable[str], top: Mapping[str, str]) -> dict[str, list[Piece]]:
    """Return our weights' names, each with the pieces of tensors that make it. `names` come from `name_in_tables`."""
    block = re.compile(re.escape(architecture.hf_layers) + r"(\d{1,6})\.(.+)")
    return find_pieces(names, top=top, block=block, layer=architecture.hf_layer)


def _text_name(name: str) -> str:
    found = _TEXT.fullmatch(name)
    if found is None:
        return name
    return found[1] if found[1].startswith("lm_head.") else f"model.{found[1]}"


def _text_tensors(tensors: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    has_prefix = any(_TEXT.fullmatch(name) for name in tensors)
    of_text = {name for name in tensors if _TEXT.fullmatch(name) or name.startswith("lm_head.")}
    if not has_prefix:
        of_text |= {name for name in tensors if name.startswith("model.")}
    others = {".".join(name.split(".")[:2]) for name in tensors.keys() - of_text}
    if others:
        _log.info("%s: only the text model is loaded; left out: %s", path.name, ", ".join(sorted(others)[:8]))
    return _renamed([(_text_name(name), name) for name in tensors if name in of_text], tensors, path)


def _renamed(names: Sequence[tuple[str, str]], tensors: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    old_names: dict[str, str] = {}
    for new, old in names:
        if new in old_names:
            raise ModelError(
                f"{path}: {old_names[new]!r} and {old!r} stand for the same tensor, {new!r}.",
                remedy="Leave one of them out of the file.",
            )
        old_names[new] = old
    return {new: tensors[old] for new, old in old_names.items()}


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all shards of a directory by name. Raises ModelError."""
    files = read_weight_map(path)
    if files is None:
        single = path / "model.safetensors"
        if not single.is_file():
            remedy = "Only safetensors are read: convert other checkpoints with transformers' save_pretrained."
            raise ModelError(f"{path}: there is neither {single.name} nor {single.name}.index.json.", remedy=remedy)
        return open_safetensors(single)
    opened = {file: open_safetensors(path / file) for file in dict.fromkeys(files.values())}
    missing = [name for name, file in files.items() if name not in opened[file]]
    if missing:
        raise ModelError(f"{path / files[missing[0]]}: the tensor {missing[0]!r} is missing.", remedy="Fetch the file again.")
    return {name: opened[file][name] for name, file in files.items()}


def _format(tensor: Stored) -> WeightFormat:
    if isinstance(tensor, PackedIntegers):
        return tensor.format
    if isinstance(tensor, Mxfp4Cube):
        return WeightFormat.MXFP4
    return WeightFormat.F8_E4M3 if tensor.dtype == FLOAT8 else WeightFormat.BF16


def _looked_up_bytes(table: Stored, floats: Floats) -> int:
    """Return the bytes in memory of an embedding that is only looked up: 0 unless its rows are unpacked or widened."""
    if isinstance(table, PackedIntegers):
        return stored_bytes(table.format, *table.shape)
    num_rows, num_cols = table.shape
    return held_table_bytes(_format(table), num_rows, num_cols) if floats is Floats.BF16 else 0


def _matrices(piece: Piece, tensor: Stored, scales: BlockScales | None, sizes: Sizes) -> Sequence[WeightTensor]:
    """Return a tensor's matrix, or one for each expert, with outputs as rows."""
    if isinstance(tensor, Mxfp4Cube):
        return tensor.matrices()
    is_transposed = piece.layout is not None and piece.layout.is_transposed
    if (isinstance(tensor, PackedIntegers) or scales is not None) and (is_transposed or len(tensor.shape) > 2):
        raise ModelError(
            f"{tensor.path}: {piece.tensor} is quantised and not a matrix with outputs as rows, which is not supported.",
            remedy="Use the bf16 original.",
        )
    if isinstance(tensor, PackedIntegers) or len(tensor.shape) == 1:
        return [_weight(piece.tensor, tensor, scales)]
    values = tensor.array().reshape(-1, *piece.stored_shape(sizes)[-2:])
    turned = values.swapaxes(1, 2) if is_transposed else values
    return [
        WeightTensor(piece.tensor, matrix.shape[0], matrix.shape[1], WeightFormat[tensor.dtype], matrix, scales)
        for matrix in turned
    ]


def _weight(
    name: str, tensor: Stored, scales: BlockScales | None, norm_offset: float = 0.0, order: NDArray[np.intp] | None = None
) -> WeightTensor:
    assert not isinstance(tensor, Mxfp4Cube)  # its names are always in `Parts`
    num_rows, num_cols = (1, 1, *without_middle(tensor.shape))[-2:]
    if isinstance(tensor, PackedIntegers):
        return WeightTensor(name, num_rows, num_cols, tensor.format, tensor, order=order, column_order=tensor.column_order)
    values = tensor.array().reshape(num_rows, num_cols)
    if len(tensor.shape) <= 1:
        wide = dequantize(values, WeightFormat[tensor.dtype], num_cols)
        if norm_offset and name.endswith("norm"):
            wide = wide + np.float32(norm_offset)
        return WeightTensor(name, num_rows, num_cols, WeightFormat.F32, wide if order is None else wide[:, order])
    if scales is not None and order is not None:
        scales = BlockScales(scales.of_rows(0, num_rows)[order], 1, scales.block_cols)
    return WeightTensor(name, num_rows, num_cols, WeightFormat[tensor.dtype], values, scales, order)
