"""Facts of a model (format, size, license, ...) from its files' headers, even if Penstock can't serve it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.models.catalog import ModelSource, SourceKind, num_file_bytes

MAX_WORD_CHARS = 80  # longest part of a file's text that is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The totals of all tensors of one format in a model's files."""

    name: str  # GGML's or safetensors' name, in capitals
    num_tensors: int
    num_values: int
    """Product of each shape, summed. An integer that packs several weights counts once."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that are known without loading it. Clients may see all but the path. Unknown strings are empty."""

    path: Path = Path()
    container: str = ""  # the kind of files
    title: str = ""
    license: str = ""
    architecture: str = ""
    quantisation: str = ""  # method and bits of a Hugging Face directory, or empty
    num_file_bytes: int = 0
    modified_unix_s: int = 0
    formats: tuple[StoredFormat, ...] = ()  # the largest first
    num_layers: int | None = None
    max_model_len: int | None = None
    vocabulary: str = ""  # the kind of tokenizer
    num_tokens: int | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_values(self) -> int:
        return sum(one.num_values for one in self.formats)

    @property
    def num_parameters(self) -> int | None:
        """Number of parameters; None for packed weights, where it is unknown."""
        return self.num_values if self.formats and not self.quantisation else None

    @property
    def weight_format(self) -> str:
        """The method of quantisation, or the format of most weights."""
        return self.quantisation or (self.formats[0].name if self.formats else "")

    @property
    def chat_template(self) -> str:
        return self.chat_templates.get("default", "")


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
    from penstock.models.hf_config import TOKENIZERS, read_chat_templates, read_json, text_part

    values = text_part(read_json(path / "config.json")).values
    has_weights = any(path.glob("*.safetensors"))
    tensors = open_weights(path) if has_weights else {}
    names = values.get("architectures")
    return ModelFacts(
        path=path,
        container="Hugging Face directory" if has_weights else "Hugging Face directory without weights",
        title=_text(values, "_name_or_path"),
        architecture=", ".join(str(name)[:MAX_WORD_CHARS] for name in names[:3]) if isinstance(names, list) else "",
        quantisation=_quantisation(values.get("quantization_config")),
        num_file_bytes=num_file_bytes(path),
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
