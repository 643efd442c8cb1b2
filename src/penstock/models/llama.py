"""Llama and the architectures that differ from it in a setting: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.models.architectures import GGUF_LAYER, Architecture
from penstock.models.decoder import Decoder
from penstock.models.experts import GGUF_EXPERTS, experts_of_gguf
from penstock.models.hf_config import JsonFile, with_windows
from penstock.models.program import Program
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec, *, qk_norms: Literal["rows", "heads"] | None = None) -> Program:
    """The program of one step. Both halves of a layer add to the residual stream `x`."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, build.norm(x, f"{at}.attn_norm"), qk_norms=qk_norms)
        x, attended = build.gather_after_last(layer, x, attended)
        build.add_output(layer, x, attended)
        build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"))
    return build.finish(build.norm(x, "norm"))


def of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """The spec as it is: the activation is that of Llama."""
    config.only("hidden_act", "silu")
    return spec


def of_qwen_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Layers of Qwen 2 and 3 have windows only if config.json tells them to: the last ones, unless it names each one's type."""
    config.only("hidden_act", "silu")
    if not config.get("use_sliding_window", bool):
        return spec
    window, first = config.require("sliding_window", int), config.get("max_window_layers", int)
    return with_windows(config, spec, window, [layer >= (28 if first is None else first) for layer in range(spec.num_layers)])


def of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """A window is that of all layers."""
    key = file.require("general.architecture", str)
    if file.get(f"{key}.expert_count", int):  # Mixtral
        spec = experts_of_gguf(file, spec)
    return spec.with_windows(file.get(f"{key}.attention.sliding_window", int) or 0, [True] * spec.num_layers)


LLAMA = Architecture(
    describe=describe, of_hf=of_hf, of_gguf=of_gguf, gguf_layer={**GGUF_LAYER, **GGUF_EXPERTS}, is_interleaved_in_gguf=True
)
"""GGUF files call Mixtral by this name, too."""
QWEN2 = Architecture(describe=describe, of_hf=of_qwen_hf, of_gguf=of_gguf)
"""Qwen 2 and 2.5 have biases on q, k and v, which a spec knows from the weights."""
