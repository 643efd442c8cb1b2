"""The settings of the model: which it is and under what name. Read by `build`; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting

DEFAULT_MODEL = "smollm2:135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Component):
    """Which model, and how it is presented."""

    title: ClassVar[str] = "Model"

    model: str = setting(
        DEFAULT_MODEL,
        "Catalogue name, .gguf file, Hugging Face directory, or hf:org/repo[:file].",
    )
    cache_dir: str | None = setting(
        None,
        "Folder for fetched weights.",
        kind=Kind.PATH,
        key="cache",
        default_doc="$XDG_CACHE_HOME/penstock or ~/.cache/penstock",
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "Name that clients use; may be repeated.",
        key="served_model_name",
        default_doc="the catalogue's name, the file's without .gguf, or the directory's",
        is_multiple=True,
    )
    chat_template: str | None = setting(
        None, "File with a Jinja2 chat template, or the template itself.", default_doc="the model's own"
    )
    max_model_len: int | None = setting(
        None,
        "Longest prompt + output of one request, in tokens.",
        kind=Kind.COUNT,
        minimum=1,
        default_doc="the model's, or less if the KV cache cannot hold it",
    )
