"""Arcee (AFM 4.5B): Llama with an MLP that has no gate, and whose activation is the square of ReLU.

Sources: modeling_arcee.py of transformers; relu2, arXiv 2109.08668. llama.cpp's converter permutes q and k as it does Llama's
(`ArceeModel` inherits `LlamaModel` in conversion/llama.py), and its graph turns neighbouring pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.models import llama
from penstock.models.architectures import Architecture
from penstock.models.hf_config import JsonFile, read_activation
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return spec.with_plain_mlps(read_activation(config, "hidden_act", "relu2"))


def _of_gguf(_: GgufFile, spec: ModelSpec) -> ModelSpec:
    return spec.with_plain_mlps("relu2")


ARCEE = Architecture(describe=llama.describe, of_hf=_of_hf, of_gguf=_of_gguf, is_interleaved_in_gguf=True)
