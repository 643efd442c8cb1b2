"""OLMo 2: what a layer's halves compute is normed, and not what they read; so are queries and keys, over all heads together.

Sources: 2 OLMo 2 Furious, arXiv 2501.00656; modeling_olmo2.py of transformers; src/models/olmo2.cpp of llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.models import checks, llama
from penstock.models.architectures import HF_LAYER, Architecture
from penstock.models.decoder import Decoder
from penstock.models.program import Program
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec, *, qk_norms: Literal["rows", "heads"] = "rows") -> Program:
    """The program of one step."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, x, qk_norms=qk_norms)
        x, attended = build.gather_after_last(layer, x, attended)
        projected = build.linear(attended, f"{at}.o", "projected", spec.hidden_size)
        build.add(x, build.norm(projected, f"{at}.post_attn_norm", projected))
        down = build.linear(build.activated(layer, x), f"{at}.down", "projected", spec.hidden_size)
        build.add(x, build.norm(down, f"{at}.post_mlp_norm", down))
    return build.finish(build.norm(x, "norm"))


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """OLMo 3 goes by the same name, and has windows."""
    window = file.get("olmo2.attention.sliding_window", int)
    if window:
        raise checks.unsupported(file.path, f"olmo2.attention.sliding_window is {window}", "OLMo 2, which has none, is")
    return spec


OLMO2 = Architecture(
    describe=describe,
    of_hf=llama.of_hf,
    of_gguf=_of_gguf,
    hf_layer={
        **HF_LAYER,
        "post_attention_layernorm.weight": "post_attn_norm",
        "post_feedforward_layernorm.weight": "post_mlp_norm",
    },
)
