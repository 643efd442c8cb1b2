"""Llama and the architectures that differ from it in a setting: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.models.architectures import Architecture
from penstock.models.decoder import Decoder
from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import GatedMlp, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile


def describe(spec: ModelSpec) -> Program:
    """The program of one step. Both halves of a layer add to the residual stream `x`."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, build.norm(x, f"{at}.attn_norm"))
        x, attended = build.gather_after_last(layer, x, attended)
        build.add_output(layer, x, attended)
        build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"))
    return build.logits(build.norm(x, "norm"))


def _of_hf(config: JsonFile, spec: ModelSpec, *, uses_window: bool = True) -> ModelSpec:
    config.only("hidden_act", "silu")
    mlp = spec.layers[0].mlp
    if config.get("mlp_bias", bool) and isinstance(mlp, GatedMlp) and not mlp.has_bias:
        raise config.error("mlp_bias is True, and the weights have none")
    is_told = config.get("use_sliding_window", bool)
    uses_window = uses_window if is_told is None else is_told
    return _within(spec, config.get("sliding_window", int) if uses_window else None)


def _of_qwen2_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Qwen 2 names a window that it does not use unless told."""
    return _of_hf(config, spec, uses_window=False)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = file.require("general.architecture", str)
    if file.get(f"{key}.expert_count", int):
        raise ModelError(f"{file.path}: mixtures of experts are not supported.", remedy="Use a dense model.")
    return _within(spec, file.get(f"{key}.attention.sliding_window", int))


def _within(spec: ModelSpec, window: int | None) -> ModelSpec:
    """A sliding window limits the context: within it, the window makes no difference."""
    return replace(spec, max_model_len=min(spec.max_model_len, window or spec.max_model_len))


LLAMA = Architecture(describe=describe, of_hf=_of_hf, of_gguf=_of_gguf, is_interleaved_in_gguf=True)
MISTRAL = Architecture(describe=describe, of_hf=_of_hf, of_gguf=_of_gguf)
QWEN2 = Architecture(describe=describe, of_hf=_of_qwen2_hf, of_gguf=_of_gguf)
"""Qwen 2 and 2.5 have biases on q, k and v, which a spec knows from the weights."""
