"""Reads facts of a model from its files' headers, even if Penstock can't serve it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.models.catalog import ModelSource, SourceKind
from penstock.models.facts import ModelFacts, StoredFormat

MAX_WORD_CHARS = 80  # longest part of a file's text that is shown


def read_facts(source: ModelSource) -> ModelFacts:
    """Return the facts of a model from its files on disk. Raises ModelError if they are damaged, and OSError."""
    return _directory_facts(source.path) if source.kind is SourceKind.DIRECTORY else _gguf_facts(source.path)


def _gguf_facts(path: Path) -> ModelFacts:
    from penstock.models.gguf import read_chat_templates
    from penstock.models.gguf_file import open_gguf

    file = open_gguf(path)
    values = file.metadata
    architecture = _text(values, "general.architecture")
    tokens = values.get("tokenizer.ggml.tokens")
    kind = ", ".join(filter(None, (_text(values, "tokenizer.ggml.model"), _text(values, "tokenizer.ggml.pre"))))
    return ModelFacts(
        path=path,
        container="GGUF file",
        title=_text(values, "general.name"),
        license=_text(values, "general.license"),
        architecture=architecture,
        num_file_bytes=file.num_bytes,
        modified_unix_s=int(path.stat().st_mtime),
        formats=_formats((entry.format.value.upper(), entry.shape, entry.num_bytes) for entry in file.tensors.values()),
        num_layers=_count(values, f"{architecture}.block_count"),
        max_model_len=_count(values, f"{architecture}.context_length"),
        vocabulary=kind,
        num_tokens=len(tokens) if isinstance(tokens, list) else None,
        chat_templates=read_chat_templates(file),
    )


def _directory_facts(path: Path) -> ModelFacts:
    from penstock.models.hf import open_weights
    from penstock.models.hf_config import TOKENIZERS, read_chat_templates, read_json

    values = read_json(path / "config.json").values
    inner = values.get("text_config")
    values = {**values, **(inner if isinstance(inner, dict) else {}), "architectures": values.get("architectures")}
    has_weights = any(path.glob("*.safetensors"))
    tensors = open_weights(path) if has_weights else {}
    names = values["architectures"]
    return ModelFacts(
        path=path,
        container="Hugging Face directory" if has_weights else "Hugging Face directory without weights",
        title=_text(values, "_name_or_path"),
        architecture=", ".join(str(name)[:MAX_WORD_CHARS] for name in names[:3]) if isinstance(names, list) else "",
        quantisation=_quantisation(values.get("quantization_config")),
        num_file_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        modified_unix_s=int(path.stat().st_mtime),
        formats=_formats((tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in tensors.values()),
        num_layers=_count(values, "num_hidden_layers"),
        max_model_len=_count(values, "max_position_embeddings"),
        vocabulary=next((name for name in TOKENIZERS if (path / name).is_file()), ""),
        num_tokens=_count(values, "vocab_size"),
        chat_templates=read_chat_templates(path),
    )


def _formats(tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> tuple[StoredFormat, ...]:
    sums: dict[str, list[int]] = {}
    for name, shape, num_bytes in tensors:
        one = sums.setdefault(name, [0, 0, 0])
        for idx, number in enumerate((1, math.prod(shape), num_bytes)):
            one[idx] += number
    found = [StoredFormat(name=name, num_tensors=n, num_values=v, num_bytes=b) for name, (n, v, b) in sums.items()]
    return tuple(sorted(found, key=lambda one: -one.num_bytes))


def _quantisation(settings: object) -> str:
    if not isinstance(settings, dict):
        return ""
    bits = settings.get("bits")
    return f"{settings.get('quant_method')}"[:MAX_WORD_CHARS] + (f", {bits} bits" if type(bits) is int else "")


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "".join(char if char.isprintable() else " " for char in value[:MAX_WORD_CHARS]) if isinstance(value, str) else ""


def _count(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if type(value) is int else None
