"""Reads a LoRA adapter: a PEFT folder with adapter_config.json and adapter_model.safetensors, or a GGUF file.

The names and shapes of all tensors are checked before any is read. Sources: LoRA, arXiv 2106.09685; rank-stabilised LoRA, arXiv
2312.03732; names and settings as in PEFT 0.21.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.models import architectures, checks, hf, rope
from penstock.models.adapter import OUTPUT_SITE, AdapterFactors, expert_sites, merge_sites, sites
from penstock.models.adapter_files import AdapterFiles
from penstock.models.architectures import Architecture, Parts
from penstock.models.assembly import Piece, Sizes, find_pieces, without_shared_keys
from penstock.models.catalog import MAX_CONFIG_BYTES
from penstock.models.formats import WeightFormat, dequantize
from penstock.models.gguf import BLOCK, load_tensor
from penstock.models.gguf_file import GgufFile, parse_gguf
from penstock.models.gguf_file import TensorEntry as GgufEntry
from penstock.models.hf_config import JsonFile, json_file, read_json
from penstock.models.program import Program
from penstock.models.safetensors_file import MAX_HEADER_BYTES, StoredTensor, TensorEntry, read_entries, read_tensor
from penstock.models.weights import WeightTensor, row_slices
from penstock.types.adapter import CONFIG_FILE, WEIGHTS_FILE
from penstock.types.errors import ModelError, damaged
from penstock.types.model_spec import LayerFactors, LinearAttentionSpec, ModelSpec

F32 = NDArray[np.float32]

_MAX_HEADER_BYTES_BESIDE = 1 << 22
"""Enough for 20,000 tensors. An adapter of all matrices of 80 layers has 1,120, and one of experts must be merged."""
_MAX_NAME = 300
_FLOATS = ("F32", "F16", "BF16")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.default)?((?:\.weight)?)")
_MAGNITUDE = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_WHOLE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:(\.base_layer)|\.modules_to_save(?:\.default)?)?\.weight")
_PATTERN = re.compile(r"\^?(?:[\w-]|\\\.|(?:\.|\\d|\[[\w-]+\])[*+]?)+")
"""Accepted patterns for names of modules: matching them is fast."""

_UNTRAINED = 1e-4
"""Rounding may take values of this size to 0. Rows of unused tokens have smaller ones."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` for which PEFT changes the model's matrices before training."""
_REFUSED: Mapping[str, str] = {
    "lora_bias": "biases of factors are not computed",
    "use_qalora": "QA-LoRA pools its inputs, which is not computed",
    "use_bdlora": "block-diagonal factors are not computed",
    "kasa_config": "KaSA changes the model's matrices, which is not computed",
    "monteclora_config": "MonteCLoRA samples its factors, which is not computed",
    "velora_config": "VeLoRA is not supported",
    "arrow_config": "Arrow chooses between adapters for each token, which is not computed",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt, which is not computed",
    "trainable_token_indices": "separately trained rows of the embedding are not computed",
    "layer_replication": "its model has layers twice, and the served model does not",
}
"""Settings of PEFT that change the computation -> why they are refused."""
_MERGED_ALONE: Mapping[str, str] = {
    "use_dora": "DoRA scales the rows of the whole matrix",
    "target_parameters": "adapters of experts are not computed beside their model",
}
"""Settings that only merging computes -> why."""
_MERGE = "Merge it into its model (peft's merge_and_unload) and serve the result."
_MERGE_HERE = "Serve the model with --merge-lora PATH, which makes the adapter part of its weights."
_RETRAIN = "Use an adapter that was trained on the model that is served."
_SAVE = "Save the adapter again with PEFT's save_pretrained, as safetensors."
_TWICE = "Leave one of them out of the file."
_log = logging.getLogger(__name__)


def _refused(path: Path, cause: str, remedy: str = _MERGE) -> ModelError:
    return ModelError(f"{path}: {cause}.", remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    kind: str
    rank: int | None
    alpha: float | None
    base: str  # the model that it was trained on, by the settings
    targets: tuple[str, ...]
    refusal: ModelError | None
    """Why a server refuses the adapter beside its model, or None. Shapes and values are checked only together with a model."""


def read_adapter_facts(folder: Path, *, max_rank: int) -> AdapterFacts:
    """Return the settings of an adapter, even of one that servers refuse. Raises ModelError if they can't be read."""
    config = read_json(folder / CONFIG_FILE)
    targets = config.values.get("target_modules")
    rank = config.get("r", int)
    refusal: ModelError | None = None
    path = folder / WEIGHTS_FILE
    try:
        _read_config(folder, AdapterFiles())
        _Settings(config)
        if not path.is_file():
            raise _refused(folder, f"there is no {WEIGHTS_FILE}", _SAVE)
        if rank is not None and not 1 <= rank <= max_rank:
            raise _outside_of_ranks(f"{folder}: the adapter has", rank, max_rank)
        with AdapterFiles().open(path) as file:
            entries = read_entries(file, path, max_header_bytes=_MAX_HEADER_BYTES_BESIDE, remedy=_MERGE_HERE)
        _pairs(entries, path)
        for name in entries:
            if not _FACTOR.fullmatch(name) and not name.endswith(".base_layer.weight"):  # that may be the model's embedding
                raise _not_factor(name, path)
    except OSError as error:
        refusal = _refused(path, f"can't be read: {error}", "Check the file and its permissions.")
    except ModelError as error:
        refusal = error
    return AdapterFacts(
        kind=config.get("peft_type", str) or "",
        rank=rank,
        alpha=config.get("lora_alpha", float),
        base=config.get("base_model_name_or_path", str) or "",
        targets=tuple(map(str, targets)) if isinstance(targets, list) else (str(targets),) if targets else (),
        refusal=refusal,
    )


def _outside_of_ranks(what: str, rank: int, max_rank: int) -> ModelError:
    remedy = "Raise --max-lora-rank, or use an adapter of a smaller rank."
    return ModelError(f"{what} rank {rank}, outside of 1 to {max_rank}.", remedy=remedy)


def read_peft(
    folder: Path,
    spec: ModelSpec,
    program: Program,
    max_rank: int,
    files: AdapterFiles,
    *,
    tables: Mapping[str, WeightTensor],
    is_merged: bool,
) -> AdapterFactors:
    """Return the factors of a PEFT adapter's folder. Raises ModelError for damaged files and unsupported settings.

    Ranks above `max_rank` are refused, and `files` can refuse the memory that is needed. Without `is_merged`, adapters that
    only merging can compute are refused, too: DoRA, changes of experts, and complete embedding or output matrices. `tables` has
    the model's own, and a copy of one of these is ignored.
    """
    files.check(folder)
    config = _read_config(folder, files, is_merged=is_merged)
    settings = _Settings(config)
    if spec.layers[0].factors == LayerFactors():
        cause = f"the matrices of a {spec.architecture}'s GGUF file are multiplied by factors that the adapter's lack"
        raise _refused(folder, cause, "Convert the adapter with llama.cpp's convert_lora_to_gguf.py.")
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        is_pickle = (folder / "adapter_model.bin").is_file()
        cause = "its weights are in adapter_model.bin, which can run any code" if is_pickle else f"there is no {WEIGHTS_FILE}"
        raise _refused(folder, cause, _SAVE)
    try:
        with files.open(path) as file:
            max_bytes, remedy = (MAX_HEADER_BYTES, _SAVE) if is_merged else (_MAX_HEADER_BYTES_BESIDE, _MERGE_HERE)
            entries = read_entries(file, path, max_header_bytes=max_bytes, remedy=remedy)
            is_mixtral = spec.architecture == "llama" and spec.num_experts > 1  # Mixtral's GGUF files say `llama`
            architecture = architectures.find("mixtral" if is_mixtral else spec.architecture)
            read = _pairs(entries, path)
            lengths = _magnitudes(entries, read, path) if is_merged and config.get("use_dora", bool) else {}
            wholes, copies = _wholes(entries, spec, program, path, may_have=is_merged, used=lengths.values())
            pairs = _by_name(read, entries, architecture, program, path, is_merged=is_merged)
            placed = _place(
                {name: pair.shapes for name, pair in pairs.items()},
                hf.pieces_of(architecture, pairs, architecture.hf_top),
                spec,
                program,
                path,
                max_rank=max_rank,
                is_interleaved=architecture.is_interleaved_in_hf,
                is_in_order=True,
                is_merged=is_merged,
                known=_module_names(architecture, program),
            )
            if config.values.get("ensure_weight_tying") and len((placed.keys() | wholes.keys()) & {"embed", OUTPUT_SITE}) == 1:
                cause = "it has ensure_weight_tying, but changes only the embedding or the output"
                raise _refused(folder, f"{cause}, which is not computed")
            files.take(sum(math.prod(entries[half].shape) for halves in read.values() for half in halves))
            scales = {name: settings.scale(pair.parameter, pair.rank) for name, pair in pairs.items()}
            for site, name in copies.items():
                num_changed = _num_changed_rows(file, entries[name], tables.get(site, tables["embed"]), path)
                if not num_changed:
                    _log.info("%s: %s is a copy of the model's tensor and is ignored", path, name)
                elif not is_merged:
                    raise _refused(path, f"{name} differs from the model's matrix in {num_changed} rows", _MERGE_HERE)
                else:  # PEFT changes the model's matrix in place
                    changed = ("embed", OUTPUT_SITE) if spec.tie_word_embeddings else (site,)
                    wholes = {**dict.fromkeys(changed, name), **wholes}
            factors: dict[str, tuple[F32, F32]] = {}
            for name, pair in pairs.items():
                a, b = (_values(read_tensor(file, entries[half], path)) for half in read[pair.module])
                factors[name] = _scaled(*pair.of_experts(a, b), scales[name], path, pair.module)
            magnitudes: dict[str, F32] = {}
            for name, pair in pairs.items() if lengths else ():
                if len(pair.shapes[0]) == 3:
                    raise _refused(path, f"{pair.module} is a matrix for all experts, of which DoRA is not computed")
                magnitudes[name] = _values(read_tensor(file, entries[lengths[pair.module]], path)).reshape(-1)
                if not np.isfinite(magnitudes[name]).all():
                    cause = f"{lengths[pair.module]} has numbers that are not finite"
                    raise _refused(path, cause, "Use another adapter: its training failed.")
            whole = {site: _matrix(site, read_tensor(file, entries[name], path)) for site, name in wholes.items()}
    except OSError as error:
        raise _refused(path, f"can't be read: {error}", "Check the file and its permissions.") from error
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")):
        _log.info("%s: the adapter's tokenizer and chat template are ignored: the model's are used", folder)
    return _put(factors, placed, magnitudes, whole)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two factors in a file, and the matrix, or the stack of all experts' matrices, that they change."""

    module: str
    parameter: str  # PEFT's name of the changed tensor, for patterns
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # A [rank, inputs] and B [outputs, rank]; experts come first
    is_swapped: bool = False  # the file's A is for outputs, its B for inputs

    @property
    def rank(self) -> int:
        return self.shapes[0][-2]

    def of_experts(self, a: F32, b: F32) -> tuple[F32, F32]:
        """Return the file's factors with these shapes. PEFT lays A out by expert and then rank, B by rank and then expert."""
        if len(self.shapes[0]) == 2:
            return a, b
        num = self.shapes[0][0]
        a, b = a.reshape(num, -1, a.shape[1]), b.reshape(len(b), -1, num).transpose(2, 0, 1)
        return (b.swapaxes(1, 2), a.swapaxes(1, 2)) if self.is_swapped else (a, b)


def _by_name(
    read: Mapping[str, tuple[str, str]],
    entries: Mapping[str, TensorEntry],
    architecture: Architecture,
    program: Program,
    path: Path,
    *,
    is_merged: bool,
) -> dict[str, _Pair]:
    """Return the pairs of factors, keyed by the changed tensor's name in the architecture's tables."""
    experts = expert_sites(program) if is_merged else {}
    found: dict[str, _Pair] = {}
    for module, (a, b) in read.items():
        shapes = entries[a].shape, entries[b].shape
        if len(shapes[0]) != 2 or len(shapes[1]) != 2:
            raise _misshapen(path, module, *shapes)
        name, pair = hf.name_in_tables(architecture, f"{module}.weight"), _Pair(module, module, shapes)
        if (stack := _stack_of(module, shapes, architecture, experts, path)) is not None:
            name, pair = stack
        if name in found:
            raise _refused(path, "two of its modules name one matrix", _TWICE)
        found[name] = pair
    return found


def _stack_of(
    module: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    architecture: Architecture,
    experts: Mapping[str, tuple[int, int, int]],
    path: Path,
) -> tuple[str, _Pair] | None:
    """Return the stacked expert tensor that these factors change, with its name in the tables, or None.

    Files name only the module (`mlp.experts`), with a `.base_layer` suffix for each further tensor, so the sizes
    decide which tensor is meant. PEFT before 0.19 always takes a tensor's second dimension for the inputs.
    """
    owner = re.sub(r"(\.base_layer)+$", "", module)
    name = hf.name_in_tables(architecture, f"{owner}.weight").removesuffix(".weight")
    match = re.fullmatch(re.escape(architecture.hf_layers) + r"(\d{1,6})\.(.+)", name)
    if match is None:
        return None
    (rows, a_width), (b_width, cols) = shapes
    stacks: dict[str, tuple[int, int, int]] = {}
    for end, parts in architecture.hf_layer.items():
        of_module, _, parameter = end.rpartition(".")
        weights = [f"layers.{int(match[1])}.{part}" for part in parts.names] if isinstance(parts, Parts) else []
        if of_module == match[2] and not end.endswith("_blocks") and weights and experts.keys() >= set(weights):
            num, _, inputs = experts[weights[0]]
            stacks[f"{owner}.{parameter}"] = num, sum(experts[weight][1] for weight in weights), inputs
    fitting = [
        (parameter, num, outputs, inputs)
        for parameter, (num, outputs, inputs) in stacks.items()
        if rows == cols and rows % num == 0 and sorted((a_width, b_width)) == sorted((inputs, outputs))
    ]
    if not stacks:
        return None
    if not fitting:
        cause = f"the factors of {module} are {list(shapes[0])} and {list(shapes[1])}, which fit none of the model's experts"
        raise _refused(path, cause, _RETRAIN)
    parameter, num, outputs, inputs = fitting[0]
    # gpt-oss has inputs as rows in all releases of transformers.
    if len(fitting) > 1 or (inputs == outputs and architecture is not architectures.find("gpt_oss")):
        told = "which matrix the factors are for" if len(fitting) > 1 else "which factor is for the inputs"
        raise _refused(path, f"the sizes of {module} do not say {told}: releases of PEFT differ")
    shapes = (num, rows // num, inputs), (num, outputs, rows // num)
    return hf.name_in_tables(architecture, parameter), _Pair(module, parameter, shapes, a_width != inputs)


@dataclass(frozen=True, slots=True)
class _Target:
    name: str  # of the pair in the file
    rows: NDArray[np.intp] | None  # rows of B for this matrix; None: all, in order
    columns: NDArray[np.intp] | None = None  # those of A, likewise
    expert: int | None = None  # index among the pair's experts


def _place(
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    pieces: Mapping[str, list[Piece]],
    spec: ModelSpec,
    program: Program,
    path: Path,
    *,
    max_rank: int,
    is_interleaved: bool,
    is_in_order: bool,
    is_merged: bool,
    known: Iterable[str],
) -> dict[str, _Target]:
    """Return the pair of factors for each site. Raises ModelError if one does not fit the model.

    `is_interleaved`: neighbouring rows of q and k rotate as a pair. `is_in_order`: value heads of a delta net have the order of
    directories.
    """
    if spec.ending is not None or program.is_one_pass:
        raise _refused(path, "adapters are for models that write text, and this model only reads text")
    if not shapes:
        raise _refused(path, "it has no LoRA factors", "Check that it is an adapter, and save it again.")
    known_sites = merge_sites(program) if is_merged else sites(program)
    experts = expert_sites(program) if is_merged else {}
    for name, (a, b) in shapes.items():
        if len(a) not in (2, 3) or len(b) != len(a) or a[-2] != b[-1]:
            raise _misshapen(path, name, a, b)
        if not 1 <= a[-2] <= max_rank:
            raise _outside_of_ranks(f"{path}: the factors of {name} have", a[-2], max_rank)
    used = without_shared_keys(pieces, spec)
    for site in pieces.keys() - used.keys():
        _log.info("%s: %s is ignored: its layer reads the keys and values of another", path, pieces[site][0].tensor)
    pieces = used
    stored = {found.tensor: _stored_shape(found, shapes[found.tensor]) for ones in pieces.values() for found in ones}
    sizes = Sizes(stored, checks.weight_shapes(program), spec)
    placed: dict[str, _Target] = {}
    for site, piece in [(site, piece) for site, found in pieces.items() for piece in found]:
        num_experts, *wanted = experts.get(site, (0, *known_sites.get(site, ())))
        if not wanted:
            raise _unknown(site, piece.tensor, spec, program, path, known)
        if piece.layout is not None and piece.layout.place is not None:
            cause = f"it changes {piece.tensor}, which is only a part of a matrix here"
            raise _refused(path, f"{cause}, and changes of parts are not computed")
        (a, b), (outputs, inputs) = shapes[piece.tensor], wanted
        runs = piece.cut(site, sizes)[2]
        of_experts = range(num_experts) if len(a) == 3 else [piece.expert] if num_experts else [None]
        keys = [site if expert is None else f"{site}.{expert}" for expert in of_experts]
        is_there = piece.expert < max(1, num_experts) and all(key not in placed for key in keys)
        is_there = is_there and (len(a) == 2 or a[0] == b[0] == num_experts)
        if (sum(num for _, num, _ in runs), a[-1]) != (outputs, inputs) or not is_there:
            cause = f"the factors of {piece.tensor} are {list(a)} and {list(b)}; the model's matrix needs [rank, {inputs}] and"
            of_it = f", of which {outputs} rows are for {site}" if len(piece.names) > 1 else ""
            raise _refused(path, f"{cause} [{outputs}, rank]{of_it}", _RETRAIN)
        rows: NDArray[np.intp] | None = None
        if len(piece.names) > 1:
            rows = np.concatenate([first + step * np.arange(num, dtype=np.intp) for first, num, step in runs])
        elif is_interleaved and piece.layout is None:
            rows = rope.half_split_rows(site, spec)
        columns: NDArray[np.intp] | None = None
        if is_in_order and (order := _tiled_order(site, spec)) is not None:
            rows, columns = (None, order) if site.endswith(".mix_out") else (order if rows is None else rows[order], None)
        placed |= {key: _Target(piece.tensor, rows, columns, expert) for key, expert in zip(keys, of_experts, strict=True)}
    return placed


def _misshapen(path: Path, name: str, a: tuple[int, ...], b: tuple[int, ...]) -> ModelError:
    cause = f"the factors of {name} are {list(a)} and {list(b)}, not [rank, inputs] and [outputs, rank]"
    return _refused(path, cause, "Save the adapter again. If its training was sharded, gather the parts first.")


def _put(
    factors: Mapping[str, tuple[F32, F32]],
    placed: Mapping[str, _Target],
    magnitudes: Mapping[str, F32] = {},
    whole: Mapping[str, WeightTensor] = {},
) -> AdapterFactors:
    by_site, lengths = {}, {}
    for site, target in placed.items():
        a, b = factors[target.name]
        if a.ndim == 3:
            a, b = a[target.expert], b[target.expert]
        a = a if target.columns is None else np.ascontiguousarray(a[:, target.columns])
        by_site[site] = (a, b if target.rows is None else b[target.rows])
        if target.name in magnitudes:
            lengths[site] = magnitudes[target.name][slice(None) if target.rows is None else target.rows]
    return AdapterFactors(by_site, lengths, whole)


def _tiled_order(site: str, spec: ModelSpec) -> NDArray[np.intp] | None:
    """Return the order of a matrix's rows (columns of `mix_out`) by the value heads of a GGUF file; None: as in directories."""
    at, _, kind = site.rpartition(".")
    if not kind.startswith("mix_"):
        return None
    net = spec.layers[int(at.rpartition(".")[2])].mixer
    if not isinstance(net, LinearAttentionSpec) or not net.has_tiled_heads:
        return None
    heads = np.arange(net.num_heads).reshape(net.num_key_heads, -1).T.reshape(-1)
    if kind in ("mix_rates", "mix_steps"):
        return heads
    columns = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
    first = 2 * net.key_width if kind == "mix_in" else 0
    return np.concatenate([np.arange(first), first + columns])


def _scaled(a: F32, b: F32, scale: float, path: Path, name: str) -> tuple[F32, F32]:
    """Return A and B with the scale multiplied into B.

    Raises ModelError if the square of an output, which the next norm needs, could overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        b = b * np.float32(scale)
        outputs = np.abs(b) @ np.abs(a).sum(axis=-1)[..., None]
        is_usable = np.isfinite(outputs * outputs).all()
    if not is_usable:
        cause = f"the factors of {name} have numbers that are not finite or too large, with a scale of {scale:g}"
        raise _refused(path, cause, "Correct lora_alpha, or use another adapter: its training failed.")
    return np.ascontiguousarray(a), b


def _stored_shape(piece: Piece, pair: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
    (*experts, _, inputs), outputs = pair[0], pair[1][-2]
    is_transposed = isinstance(piece.layout, Parts) and piece.layout.is_transposed
    return (*experts, inputs, outputs) if is_transposed else (*experts, outputs, inputs)


def _unknown(site: str, name: str, spec: ModelSpec, program: Program, path: Path, known: Iterable[str]) -> ModelError:
    if "expert" in name or ".expert" in site or site.endswith(".router"):
        return _refused(path, f"it changes {name}, and adapters of experts are not computed beside their model", _MERGE_HERE)
    if site in merge_sites(program):
        return _refused(path, f"it changes {name}, which is not computed beside the model", _MERGE_HERE)
    if site in checks.weight_shapes(program):
        return _refused(path, f"it changes {name}, which is not a matrix that an adapter can change")
    cause = f"it changes {name}, which the model does not have: a {spec.architecture} of {spec.num_layers} layers"
    return _refused(path, cause, f"{_RETRAIN} It has {', '.join(list(known)[:3])} and the like.")


def _module_names(architecture: Architecture, program: Program) -> list[str]:
    ends = {site.removeprefix("layers.0.") for site in sites(program)}
    return [
        f"{architecture.hf_layers}0.{name.removesuffix('.weight')}"
        for name, ours in architecture.hf_layer.items()
        if ends.intersection(ours.names if isinstance(ours, Parts) else (ours,))
    ]


def _read_config(folder: Path, files: AdapterFiles, *, is_merged: bool = False) -> JsonFile:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise _refused(folder, f"there is no {CONFIG_FILE}", "Name a folder that PEFT's save_pretrained made.")
    config = json_file(path, files.read(path, MAX_CONFIG_BYTES))
    kind = config.require("peft_type", str)
    if kind != "LORA":
        raise _refused(path, f"it is an adapter of the type {kind!r}, and only LORA is supported")
    for key, why in _REFUSED.items():
        if config.values.get(key):
            raise _refused(path, f"it has {key}: {why}")
    for key, why in _MERGED_ALONE.items():
        if config.values.get(key) and not is_merged:
            raise _refused(path, f"it has {key}: {why}", _MERGE_HERE)
    init = config.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        cause = f"init_lora_weights is {init!r}, so it was trained on matrices that differ from the model's"
        remedy = "Save it with PEFT's path_initial_model_for_weight_conversion, which makes it an adapter of the model."
        raise _refused(path, cause, remedy)
    return config


def _pairs(entries: Mapping[str, TensorEntry], path: Path) -> dict[str, tuple[str, str]]:
    halves: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        if len(name) > _MAX_NAME:
            raise _refused(path, f"a tensor is called {name[:_MAX_NAME]}..", "Check that it is PEFT's file.")
        match = _FACTOR.fullmatch(name)
        if match is None:
            continue
        if bool(match[2]) is bool(match[4]):  # in PEFT, factors of embeddings are parameters, all others are modules
            raise _refused(path, f"the tensor {name} is not a factor as PEFT writes it", _SAVE)
        if entry.dtype not in _FLOATS:
            cause = f"the tensor {name} is of type {entry.dtype}, not {', '.join(_FLOATS)}"
            raise _refused(path, cause, "Save the adapter in bfloat16, float16 or float32.")
        module = halves.setdefault(match[1], {})
        if match[3] in module:
            raise _refused(path, f"{module[match[3]]} and {name} are the same factor", _TWICE)
        module[match[3]] = name
    for module_name, half in halves.items():
        if len(half) < 2:
            raise damaged(path, f"{module_name} has no lora_{'B' if 'A' in half else 'A'}")
    return {module_name: (half["A"], half["B"]) for module_name, half in halves.items()}


def _magnitudes(entries: Mapping[str, TensorEntry], pairs: Mapping[str, tuple[str, str]], path: Path) -> dict[str, str]:
    """Return the names of DoRA's magnitude vectors, by module. Raises ModelError unless all modules have one."""
    found: dict[str, str] = {}
    for name in entries:
        match = _MAGNITUDE.fullmatch(name)
        if match is not None and found.setdefault(match[1], name) != name:
            raise _refused(path, f"{found[match[1]]} and {name} are the same vector", _TWICE)
    if odd := sorted(found.keys() ^ pairs.keys()):
        only = "factors" if odd[0] in pairs else "a magnitude vector"
        raise damaged(path, f"{odd[0]} has only {only}, but DoRA needs both")
    for module, (_, b) in pairs.items():
        entry = entries[found[module]]
        if "lora_embedding" in b:
            raise _refused(path, f"{module} is an embedding, of which DoRA is not computed")
        if math.prod(entry.shape) != entries[b].shape[0] or entry.dtype not in _FLOATS:
            cause = f"{found[module]} is {list(entry.shape)} of {entry.dtype}, and the matrix has {entries[b].shape[0]} rows"
            raise _refused(path, cause, _SAVE)
    return found


def _wholes(
    entries: Mapping[str, TensorEntry],
    spec: ModelSpec,
    program: Program,
    path: Path,
    *,
    may_have: bool,
    used: Container[str] = (),
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of complete embedding and output matrices, by site. Without `may_have` they are refused.

    The second result has the names of the matrices that factors change, which PEFT saves beside these: copies of the model's
    own, or changed before the training. `used` tensors are skipped.
    """
    table = program.vocab_size, spec.hidden_size
    architecture = architectures.find(spec.architecture)
    found: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name, entry in entries.items():
        if _FACTOR.fullmatch(name) or name in used:
            continue
        module = _WHOLE.fullmatch(name)
        site = architecture.hf_top.get(hf.name_in_tables(architecture, f"{module[1]}.weight"), "") if module else ""
        is_table = site in ("embed", OUTPUT_SITE)
        if module is None or not is_table or (not module[2] and not may_have):
            raise _not_factor(name, path, f"{_MERGE} --merge-lora does so at the start." if is_table else _MERGE)
        if entry.shape != table or entry.dtype not in _FLOATS:
            cause = f"{name} is {list(entry.shape)} of {entry.dtype}, and the model has {list(table)}"
            raise _refused(path, cause, f"{_RETRAIN} Tokens that were added to the vocabulary need the model that has them.")
        of_kind = copies if module[2] else found
        if of_kind.setdefault(site, name) != name:
            raise _refused(path, f"{of_kind[site]} and {name} are the same matrix", _TWICE)
    return found, copies


def _not_factor(name: str, path: Path, remedy: str = _MERGE) -> ModelError:
    if "lora_" in name:
        return _refused(path, f"{name} belongs to a kind of LoRA that is not computed")
    return _refused(path, f"{name} is a whole tensor, not a low-rank change of one, which is not computed", remedy)


def _num_changed_rows(file: BinaryIO, entry: TensorEntry, table: WeightTensor, path: Path) -> int:
    """Return how many rows of a stored matrix are not the rounded rows of the model's, reading a few at a time."""
    tolerance = 2**-7 if table.format.name in _FLOATS else 0.5  # of a row's length: bf16 twice, or a few bits
    num_changed, row_bytes = 0, (entry.end - entry.begin) // table.num_rows
    for rows in row_slices(table.num_rows, table.num_cols):
        begin, end = (entry.begin + row * row_bytes for row in (rows.start, rows.stop))
        part = TensorEntry(entry.dtype, (rows.stop - rows.start, table.num_cols), begin, end)
        ours, theirs = table.dequantize(rows.start, rows.stop), _values(read_tensor(file, part, path))
        with np.errstate(over="ignore", invalid="ignore"):
            distances, lengths = np.linalg.norm(theirs - ours, axis=1), np.linalg.norm(ours, axis=1)
        is_same = distances <= tolerance * lengths + _UNTRAINED * math.sqrt(table.num_cols)
        num_changed += len(is_same) - int(is_same.sum())
    return num_changed


def _matrix(site: str, tensor: StoredTensor) -> WeightTensor:
    num_rows, num_cols = tensor.shape
    weight = WeightTensor(site, num_rows, num_cols, WeightFormat[tensor.dtype], tensor.array())
    for rows in row_slices(num_rows, num_cols):
        if not np.isfinite(weight.dequantize(rows.start, rows.stop)).all():
            raise _refused(tensor.path, f"{site} has numbers that are not finite", "Its training failed: use another adapter.")
    return weight


class _Settings:
    def __init__(self, config: JsonFile) -> None:
        self._rank, self._ranks = config.require("r", int), _patterns(config, "rank_pattern")
        self._alpha, self._alphas = config.require("lora_alpha", float), _patterns(config, "alpha_pattern")
        self._has_root = config.get("use_rslora", bool) is True
        self._parameters = tuple(f".{name}" for name in config.get("target_parameters", list) or ())
        self._config = config

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module's factors, of rank `rank`. Raises ModelError if the settings have another rank."""
        if f".{module}.weight".endswith(self._parameters):  # patterns are for the parameter's name
            module = f"{module}.weight"
        expected = _of_module(self._ranks, module, self._rank)
        if expected != rank:
            cause = f"the factors of {module} have rank {rank}, and the settings say {expected:g}"
            raise _refused(self._config.path, cause, "The files of the folder do not belong together: fetch both again.")
        alpha = _of_module(self._alphas, module, self._alpha)
        if not math.isfinite(alpha):
            raise self._config.error(f"lora_alpha of {module} is {alpha}")
        return alpha / (math.sqrt(rank) if self._has_root else rank)


def _patterns(config: JsonFile, key: str) -> list[tuple[re.Pattern[str], float]]:
    """Return the (pattern for names of modules, value) pairs of a setting."""
    values = JsonFile(config.path, config.get(key, dict) or {})
    if len(values.values) > 1 << 10:
        raise config.error(f"{key} has {len(values.values)} patterns")
    found = []
    for pattern in values.values:
        is_long = len(pattern) > _MAX_NAME or pattern.count("*") + pattern.count("+") > 2
        if is_long or not _PATTERN.fullmatch(pattern):
            setting = f"{key} has the pattern {pattern[:_MAX_NAME]!r}"
            raise checks.unsupported(config.path, setting, "names with . and [0-9] and at most two repeats are")
        try:
            found.append((re.compile(rf"(.*\.)?({pattern})"), values.require(pattern, float)))
        except re.error as error:
            raise config.error(f"{key} has the pattern {pattern!r}: {error}") from error
    return found


def _of_module(patterns: Iterable[tuple[re.Pattern[str], float]], module: str, usual: float) -> float:
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), usual)


def _values(tensor: StoredTensor) -> F32:
    return dequantize(tensor.array(), WeightFormat[tensor.dtype], tensor.shape[-1])


# GGUF: tensors have the names of the model's tensors, plus `.lora_a` or `.lora_b`.
# Source: convert_lora_to_gguf.py and src/llama-adapter.cpp of llama.cpp.

_LLAMAS = ("llama", "mistral", "mixtral")  # our architectures whose GGUF files call themselves llama


def read_gguf_adapter(
    path: Path, spec: ModelSpec, program: Program, max_rank: int, files: AdapterFiles, *, is_merged: bool
) -> AdapterFactors:
    """Return the factors of a GGUF adapter. Errors and limits are as in `read_peft`."""
    files.check(path)
    widths = [sum(shape) for shape in sites(program).values()]
    if is_merged:
        widths += [num * sum(shape) for num, *shape in expert_sites(program).values()]
    most_bytes = 4 * max_rank * sum(widths) + (1 << 24)  # of metadata
    file = parse_gguf(path, files.read(path, most_bytes))
    if file.get("general.type", str) != "adapter" or file.get("adapter.type", str) != "lora":
        raise _refused(path, "this is not a LoRA adapter", "Convert one with llama.cpp's convert_lora_to_gguf.py.")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise _refused(path, "activated LoRA begins in the middle of a prompt, which is not computed")
    key = file.architecture
    name = architectures.our_name(key, architectures.GGUF_NAMES, path)
    if spec.architecture != name and not (name == "llama" and spec.architecture in _LLAMAS):
        raise _refused(path, f"it is an adapter of a {key}, and the model is a {spec.architecture}", _RETRAIN)
    nets = spec.linear_attentions if key in ("qwen35", "qwen35moe") else ()
    if any(net.num_heads != net.num_key_heads and not net.has_tiled_heads for net in nets):
        cause = f"its value heads have the order of GGUF files of a {key}, and the model is a directory"
        raise _refused(path, cause, "Use PEFT's folder of the adapter, or a GGUF file of the model.")
    if spec.layers[0].factors not in (None, LayerFactors()):
        cause = f"its matrices are multiplied by the factors of a {key}, and the model's directory has these apart"
        raise _refused(path, cause, "Use PEFT's folder of the adapter, or a GGUF file of the model.")
    alpha = file.require("adapter.lora.alpha", float)
    if not math.isfinite(alpha):
        raise file.error(f"adapter.lora.alpha is {alpha}")
    pairs = _gguf_pairs(file)
    is_embedding = {stem: stem == "token_embd.weight" for stem in pairs}
    architecture = architectures.find(name)
    placed = _place(
        {stem: (a.shape[::-1] if is_embedding[stem] else a.shape, b.shape) for stem, (a, b) in pairs.items()},
        find_pieces(pairs, top=architecture.gguf_top, block=BLOCK, layer=architecture.gguf_layer),
        spec,
        program,
        path,
        max_rank=max_rank,
        is_interleaved=architecture.is_interleaved_in_gguf,
        is_in_order=False,
        is_merged=is_merged,
        known=[f"blk.0.{end.removesuffix('.weight')}" for end in architecture.gguf_layer if end.endswith(".weight")],
    )
    files.take(sum(math.prod(half.shape) for halves in pairs.values() for half in halves))
    factors: dict[str, tuple[F32, F32]] = {}
    for stem, (a, b) in pairs.items():
        first, second = (load_tensor(file, half, half.name).dequantize().reshape(half.shape) for half in (a, b))
        if is_embedding[stem]:  # here the file has a row for each token
            first = first.T
        factors[stem] = _scaled(first, second, alpha / b.shape[-1] if alpha else 1.0, path, stem)
    return _put(factors, placed)


def _gguf_pairs(file: GgufFile) -> dict[str, tuple[GgufEntry, GgufEntry]]:
    for name in file.tensors:
        stem, _, half = name.rpartition(".lora_")
        if half not in ("a", "b"):
            raise _refused(file.path, f"{name} is a whole tensor, not a low-rank change of one")
        other = f"{stem}.lora_{'b' if half == 'a' else 'a'}"
        if other not in file.tensors:
            raise file.error(f"there is no {other}")
    stems = [name.removesuffix(".lora_a") for name in file.tensors if name.endswith(".lora_a")]
    return {stem: (file.tensors[f"{stem}.lora_a"], file.tensors[f"{stem}.lora_b"]) for stem in stems}
