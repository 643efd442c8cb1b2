"""Facts of a model (format, size, license, ...) from its files' headers. This module imports no file reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
    """Facts of a model that need no loading. Clients may know all but the path. Unknown strings are empty."""

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
