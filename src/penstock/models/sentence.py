"""Reads the files of sentence-transformers beside a model: pooling, dense layers, prompts and the longest text.

Sources: https://www.sbert.net and the modules of sentence-transformers 6.2 (`sentence_transformers/base`); PyLate's
models/colbert.py, arXiv 2112.01488 (ColBERTv2) and 2109.10086 (SPLADE).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock import fast_json
from penstock.models import checks
from penstock.models.hf_config import JsonFile, read_json
from penstock.types.encoder import ScoreFunction
from penstock.types.errors import ModelError, damaged
from penstock.types.model_spec import Activation, Dense, Pooling

MAX_MODULES = 16
_FOLDER = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_SETTINGS = tuple(f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta"))
_POOLINGS: Mapping[str, Pooling] = {"cls": "first", "lasttoken": "last", "mean": "mean"}
_OLD_POOLINGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switches in older files -> values of `pooling_mode` in newer ones."""
_ACTIVATIONS: Mapping[str, Activation | None] = {
    "Tanh": "tanh",
    "Identity": None,
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
_HARMLESS = {"padding", "pad_to_multiple_of", "return_tensors", "truncation"}
"""Arguments of tokenizers that change no vector of a text that is read whole."""
_OUTPUTS = ("forward", "last_hidden_state", "logits", "token_embeddings", "scores", "causal_logits")
"""The method and outputs that the first module has by default, depending on its task."""
_SCORES: Mapping[str, ScoreFunction] = {"Sigmoid": ScoreFunction.SIGMOID, "Identity": ScoreFunction.NONE}
_PROBLEMS: Mapping[str, ScoreFunction] = {
    "regression": ScoreFunction.NONE,
    "multi_label_classification": ScoreFunction.SIGMOID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """The settings of sentence-transformers in a model's directory."""

    pooling: Pooling | None = None  # None without modules.json
    dense: Mapping[str, Dense] = field(default_factory=dict)
    """Folder of weights -> layer after the pooling, in order."""
    is_normalised: bool = False
    max_tokens: int | None = None  # special ones included
    truncate_dim: int | None = None
    """Numbers that are kept of a text's vector, after all modules."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    markers: tuple[str, ...] = ()
    """Prompts that are encoded as one token each, even if tokenizer.json would split them."""


def read_sentence_files(path: Path) -> SentenceFiles:
    """Read sentence-transformers' settings. Raises ModelError for damaged files and unsupported settings."""
    max_tokens = _read_max_tokens(path)
    prompts, default_prompt = _read_prompts(path)
    saved = read_json(path / "config_sentence_transformers.json", is_optional=True)
    found = SentenceFiles(
        max_tokens=max_tokens, truncate_dim=_length(saved, "truncate_dim"), prompts=prompts, default_prompt=default_prompt
    )
    file = path / "modules.json"
    if not file.is_file():
        return found
    modules, has_pylate = _read_modules(file)
    is_late = bool(modules) and modules[0][0] == "Dense"
    pooling: Pooling | None = "each" if is_late else None
    dense: dict[str, Dense] = {}
    is_normalised = has_pylate and is_late  # PyLate has no module for it
    if is_late:
        found = _with_markers(path, found)
    if is_normalised:
        found = replace(found, max_tokens=_read_pylate_tokens(path))
    for kind, folder in modules:
        at = path / folder
        if kind == "Pooling" and pooling is None:
            pooling = _read_pooling(at, has_prompts=any(prompts.values()))
        elif kind == "SpladePooling" and pooling is None:
            config = read_json(at / "config.json")
            config.only_all(pooling_strategy="max", activation_function="relu")
            _refuse(saved, saved.values, "max_active_dims")
            pooling = "sparse"
        elif kind == "Dense" and pooling not in (None, "sparse") and (has_pylate or not is_normalised) and folder not in dense:
            dense[folder] = _read_dense(at, "" if has_pylate else "token_embeddings" if is_late else "sentence_embedding")
        elif kind == "Normalize" and pooling is not None:
            is_normalised = True
        elif kind != "Dropout":  # dropout does nothing after training
            raise _unsupported(file, f"a module of the type {kind} comes at this position")
    return replace(found, pooling=pooling, dense=dense, is_normalised=is_normalised)


def with_colbert(path: Path, config: JsonFile, files: SentenceFiles) -> SentenceFiles:
    """Return the settings of a directory of Stanford's class `HF_ColBERT`, with those in artifact.metadata."""
    config.only("model_type", "bert")
    metadata = read_json(path / "artifact.metadata")
    metadata.only_all(similarity="cosine", attend_to_mask_tokens=False)
    prompts = {name: metadata.require(f"{key}_token_id", str) for name, key in (("query", "query"), ("document", "doc"))}
    dense = {"": Dense(width=_width(metadata, "dim"), has_bias=False)}
    return replace(
        files, pooling="each", dense=dense, is_normalised=True, prompts=prompts, default_prompt="", markers=(*prompts.values(),)
    )


def read_scores(path: Path, config: JsonFile, usual: ScoreFunction) -> ScoreFunction:
    """Return the function from a head's outputs to scores that the files name, or `usual`. `config` is config.json."""
    saved = read_json(path / "config_sentence_transformers.json", is_optional=True)  # since sentence-transformers 5.4
    for file, named in (
        (saved, saved.get("activation_fn", str)),
        (config, (config.get("sentence_transformers", dict) or {}).get("activation_fn")),
        (config, config.get("sbert_ce_default_activation_function", str)),
    ):
        if named is not None:
            name = str(named).rpartition(".")[2]
            if name not in _SCORES or not str(named).startswith("torch."):
                raise checks.unsupported(file.path, f"activation_fn is {named!r}", f"torch's {', '.join(_SCORES)} are")
            return _SCORES[name]
    return _PROBLEMS.get(config.get("problem_type", str) or "", usual)


def _with_markers(path: Path, files: SentenceFiles) -> SentenceFiles:
    """Return the settings with PyLate's marks of queries and documents before their prompts.

    Queries are not expanded with mask tokens. Files in which other tokens attend to these are refused.
    """
    config = read_json(path / "config_sentence_transformers.json", is_optional=True)
    if config.get("do_query_expansion", bool) is not False:
        config.only("attend_to_expansion_tokens", False)
    named = {name: config.get(f"{name}_prefix", str) for name in ("query", "document")}
    found = {name: text for name, text in named.items() if text}
    # PyLate puts the mark before the prompt. As in sentence-transformers 6, a prompt that begins with it is not marked twice.
    marked = {name: mark + files.prompts.get(name, "").removeprefix(mark) for name, mark in found.items()}
    return replace(files, prompts={**files.prompts, **marked}, markers=tuple(found.values()))


def _read_modules(file: Path) -> tuple[list[tuple[str, str]], bool]:
    """Return (type, folder) of all modules but the first, the model in the directory itself, and whether any is PyLate's."""
    try:
        modules = fast_json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(file, f"can't be read as JSON: {error}") from error
    if not isinstance(modules, list) or not 1 <= len(modules) <= MAX_MODULES:
        raise damaged(file, f"it is not a list of 1 to {MAX_MODULES} modules")
    found: list[tuple[str, str]] = []
    has_pylate = False
    for module in modules:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if type(kind) is not str or type(folder) is not str or (folder and not _FOLDER.fullmatch(folder)):
            raise damaged(file, "a module has no type, or its path is not the name of a folder")
        has_pylate |= kind.startswith("pylate.models.")
        if not kind.startswith(("sentence_transformers.", "pylate.models.")):
            raise _unsupported(file, f"a module is of the type {kind[:80]!r}, which is the repository's own code")
        found.append((kind.rpartition(".")[2][:80], folder))
    is_sparse = any(kind == "SpladePooling" for kind, _ in found)
    if found[0] not in (("Transformer", ""), ("MLMTransformer", "") if is_sparse else None):
        raise _unsupported(file, f"the first module is a {found[0][0]} in {found[0][1] or 'the directory itself'!r}")
    return found[1:], has_pylate


def _read_pooling(folder: Path, *, has_prompts: bool) -> Pooling:
    config = read_json(folder / "config.json")
    modes = config.values.get("pooling_mode")
    if modes is None:
        modes = [mode for switch, mode in _OLD_POOLINGS.items() if config.get(switch, bool)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    known = [_POOLINGS.get(mode) for mode in modes] if isinstance(modes, list) and all(type(m) is str for m in modes) else []
    if len(known) != 1 or known[0] is None:
        raise _unsupported(config.path, f"the pooling is {modes!r}, not one of {', '.join(_POOLINGS)}")
    if has_prompts and config.get("include_prompt", bool) is False:
        raise _unsupported(config.path, "include_prompt is false, so prompts are left out of the pooling")
    return known[0]


def _read_dense(folder: Path, changed: str) -> Dense:
    """Read a dense module for the feature `changed`. Empty: any feature, as PyLate ignores names."""
    config = read_json(folder / "config.json")
    config.only("use_residual", False)
    for key in ("module_input_name", "module_output_name") if changed else ():
        name = config.get(key, str) or "sentence_embedding"
        if name != changed:
            raise _unsupported(config.path, f"{key} is {name[:80]!r} at this place")
    name = config.get("activation_function", str) or "torch.nn.modules.activation.Tanh"
    kind = name.rpartition(".")[2]
    if not name.startswith("torch.") or kind not in _ACTIVATIONS:
        raise _unsupported(config.path, f"activation_function is {name[:80]!r}")
    width = _width(config, "out_features")
    return Dense(width=width, activation=_ACTIVATIONS[kind], has_bias=config.get("bias", bool) is not False)


def _width(config: JsonFile, key: str) -> int:
    width = config.require(key, int)
    checks.check_sizes({"hidden_size": width, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2}, config.path)
    return width


def _read_max_tokens(path: Path) -> int | None:
    for name in _SETTINGS:
        config = read_json(path / name, is_optional=True)
        if config.get("do_lower_case", bool) and not _lowers_case(path):
            raise _unsupported(config.path, "do_lower_case is true, and the tokenizer's file does not lower the case")
        _check_transformer(config)
        if (length := _length(config, "max_seq_length")) is not None:
            return length
    length = read_json(path / "tokenizer_config.json", is_optional=True).values.get("model_max_length")
    return length if type(length) is int and 1 <= length <= checks.MAX_MODEL_LEN else None  # 1e30 means no limit


def _check_transformer(config: JsonFile) -> None:
    """Raise ModelError for settings of the first module, since sentence-transformers 6, that change vectors."""
    _refuse(config, config.values, "query_length", "document_length", "query_expansion")
    calls, modalities = _part(config, "processing_kwargs"), _part(config, "modality_config")
    for name in ("common", "text"):
        arguments = _part(calls, name).values
        _refuse(config, arguments, *sorted(arguments.keys() - _HARMLESS), prefix=f"processing_kwargs.{name}.")
    if "message" in modalities.values and config.values.get("transformer_task") != "sequence-classification":
        raise _unsupported(config.path, "modality_config has a message, so texts are put into a chat template")
    outputs = _part(modalities, "text").values
    for key, value in (
        ("module_output_name", config.get("module_output_name", str)),
        ("modality_config.text.method", outputs.get("method")),
        ("modality_config.text.method_output_name", outputs.get("method_output_name")),
    ):
        if value is not None and value not in _OUTPUTS:
            raise _unsupported(config.path, f"{key} is {value!r}")


def _part(config: JsonFile, key: str) -> JsonFile:
    return JsonFile(config.path, config.get(key, dict) or {})


def _refuse(config: JsonFile, values: Mapping[str, object], *keys: str, prefix: str = "") -> None:
    """Raise ModelError if one of the keys has a value."""
    for key in keys:
        if values.get(key) is not None:
            raise _unsupported(config.path, f"{prefix}{key} is {str(values[key])[:80]}")


def _read_pylate_tokens(path: Path) -> int:
    """Return PyLate's longest text, its mark included. `max_seq_length` is of no use: PyLate overwrites it with each text."""
    config = read_json(path / "config_sentence_transformers.json", is_optional=True)
    return max(_length(config, "query_length") or 32, _length(config, "document_length") or 180)


def _length(config: JsonFile, key: str) -> int | None:
    length = config.get(key, int)
    if length is not None and not 1 <= length <= checks.MAX_MODEL_LEN:
        raise config.error(f"{key} is {length}")
    return length


def _lowers_case(path: Path) -> bool:
    normalizer = read_json(path / "tokenizer.json", is_optional=True).get("normalizer", dict) or {}
    steps = normalizer.get("normalizers", [normalizer])
    config = read_json(path / "tokenizer_config.json", is_optional=True).values  # BERT's tokenizer follows it
    return any(
        step.get("type") == "Lowercase" or ("lowercase" in step and config.get("do_lower_case", step["lowercase"]) is True)
        for step in steps
        if isinstance(step, dict)
    )


def _read_prompts(path: Path) -> tuple[dict[str, str], str]:
    config = read_json(path / "config_sentence_transformers.json", is_optional=True)
    prompts = config.get("prompts", dict) or {}
    if not all(type(text) is str for text in prompts.values()):
        raise config.error("prompts has a value that is not a text")
    default = config.get("default_prompt_name", str) or ""
    if default and default not in prompts:
        raise config.error(f"default_prompt_name is {default[:80]!r}, and there is no such prompt")
    transformer = read_json(path / "sentence_bert_config.json", is_optional=True)
    is_head = transformer.get("transformer_task", str) == "sequence-classification"
    if is_head and "message" in (transformer.get("modality_config", dict) or {}):
        default = ""  # it is part of a chat template, which clients write into both texts (docs/encoders.md)
    return prompts, default


def _unsupported(path: Path, cause: str) -> ModelError:
    return ModelError(
        f"{path}: {cause}, which is not supported.",
        remedy="Use another model: the vectors of this one would be wrong. If it also generates text, add --task generate.",
    )
