"""GPT-2 (OpenAI): learned positions, layer norms, biases everywhere, and an MLP without a gate.

Source: Language Models are Unsupervised Multitask Learners (2019); modeling_gpt2.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.models import llama
from penstock.models.architectures import GGUF_LAYER, GGUF_TOP, Architecture, Parts, with_biases
from penstock.models.hf_config import JsonFile, read_activation
from penstock.types.model_spec import Activation, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


_SIZES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
_DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {**_DEFAULTS, **{_SIZES.get(key, key): value for key, value in values.items() if value is not None}}
    if type(found["hidden_size"]) is int:
        found.setdefault("intermediate_size", 4 * found["hidden_size"])
    return found


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    return _with(spec, read_activation(config, "activation_function", "gelu_new"))


def _of_gguf(_: GgufFile, spec: ModelSpec) -> ModelSpec:
    return _with(spec, "gelu_tanh")


def _with(spec: ModelSpec, activation: Activation) -> ModelSpec:
    spec = replace(spec, norm="layer", has_norm_bias=True).with_plain_mlps(activation)
    return spec.with_attention(lambda _, attention: replace(attention, rotation=None))


def _name(name: str) -> str | None:
    """Old files lack `transformer.` before their names, and have the causal mask of each layer, which is not a weight."""
    bare = name.removeprefix("transformer.")
    return None if bare.endswith((".attn.bias", ".attn.masked_bias")) else bare


_QKV, _QKV_BIAS = ("q", "k", "v"), ("q_bias", "k_bias", "v_bias")
GPT2 = Architecture(
    describe=partial(llama.describe, has_positions=True),
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_name=_name,
    hf_top={"wte.weight": "embed", "wpe.weight": "positions", **with_biases({"ln_f": "norm"}), "lm_head.weight": "output"},
    hf_layers="h.",
    hf_layer={
        **with_biases({"ln_1": "attn_norm", "ln_2": "mlp_norm"}),
        "attn.c_attn.weight": Parts(_QKV, is_transposed=True),
        "attn.c_attn.bias": Parts(_QKV_BIAS),
        "attn.c_proj.weight": Parts(("o",), is_transposed=True),
        "attn.c_proj.bias": "o_bias",
        "mlp.c_fc.weight": Parts(("up",), is_transposed=True),
        "mlp.c_fc.bias": "up_bias",
        "mlp.c_proj.weight": Parts(("down",), is_transposed=True),
        "mlp.c_proj.bias": "down_bias",
    },
    gguf_top={**GGUF_TOP, "position_embd.weight": "positions"},
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": Parts(_QKV), "attn_qkv.bias": Parts(_QKV_BIAS)},
)
