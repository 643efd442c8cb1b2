"""Granite 3 (IBM): Llama with four factors, of the embeddings, the scores, both halves of a layer, and the logits.

Sources: modeling_granite.py of transformers; src/models/granite.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import llama
from penstock.models.architectures import Architecture
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile


_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**dict.fromkeys(_FACTORS, 1.0), **values}


def of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    embed, scores, residual, logits = (config.positive(key) for key in _FACTORS)
    return _with(llama.of_hf(config, spec), embed=embed, scores=scores, residual=residual, logits=logits)


def of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Factors that a file lacks are 1, but for that of the scores, which is then as usual."""
    name = file.require("general.architecture", str)
    if file.get(f"{name}.rope.scaling.finetuned", bool) is False:
        spec = spec.with_attention(lambda _, attention: replace(attention, rotation=None))
    embed, residual, logits = (
        file.get(f"{name}.{key}", float) or 1.0 for key in ("embedding_scale", "residual_scale", "logit_scale")
    )
    scores = file.get(f"{name}.attention.scale", float) or None
    return _with(llama.of_gguf(file, spec), embed=embed, scores=scores, residual=residual, logits=logits)


def _with(spec: ModelSpec, *, embed: float, scores: float | None, residual: float, logits: float) -> ModelSpec:
    """Logits are divided by theirs."""
    spec = replace(spec, embed_scale=embed, residual_scale=residual, logit_scale=1.0 / logits)
    return spec.with_attention(lambda _, attention: replace(attention, scale=scores))


GRANITE = Architecture(
    describe=llama.describe,
    of_hf=of_hf,
    of_gguf=of_gguf,
    hf_values=_values,
    is_interleaved_in_gguf=True,
)
