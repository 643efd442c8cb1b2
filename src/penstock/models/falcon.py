"""Falcon (TII): attention and MLP of a layer read the same residual stream, side by side. Larger ones have a norm for each.

Falcon 3 is a Llama. Sources: The Falcon Series of Open Language Models, arXiv 2311.16867; modeling_falcon.py of transformers;
src/models/falcon.cpp of llama.cpp and its converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import checks
from penstock.models.architectures import GGUF_LAYER, Architecture, Parts
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.program import Program
from penstock.types.model_spec import Activation, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec) -> Program:
    """The program of one step."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        normed = build.norm(x, f"{at}.mlp_norm")
        of_attention = build.norm(x, f"{at}.attn_norm", "attn_normed") if spec.layers[layer].has_attn_norm else normed
        attended = build.attention(layer, of_attention)
        x, attended, normed = build.gather_after_last(layer, x, attended, normed)
        build.add_output(layer, x, attended)
        build.add_mlp(layer, x, normed)
    return build.finish(build.norm(x, "norm"))


_OLD_NAMES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}
"""Keys of files from before Falcon was a part of transformers (RefinedWeb)."""
_DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Old files of the 40B say by `n_head_kv` alone that its architecture is the newer one."""
    found = {**_DEFAULTS, **{_OLD_NAMES.get(key, key): value for key, value in values.items() if value is not None}}
    is_new = found.setdefault("new_decoder_architecture", "n_head_kv" in values)
    found["num_key_value_heads"] = found.get("num_kv_heads", found["num_attention_heads"]) if is_new else 1
    if type(found["hidden_size"]) is int:
        found["intermediate_size"] = found.get("ffn_hidden_size", 4 * found["hidden_size"])
    return {**found, "rms_norm_eps": found["layer_norm_epsilon"]}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.get("alibi", bool):
        raise checks.unsupported(config.path, "alibi is True: positions as in falcon-rw", "rotary positions are")
    config.only("parallel_attn", True)
    config.only("apply_residual_connection_post_layernorm", False)
    has_attn_norm = config.require("new_decoder_architecture", bool)
    if has_attn_norm:
        has_attn_norm = config.get("num_ln_in_parallel_attn", int) in (None, 2)
    else:
        config.only("multi_query", True)
    return _with(spec, read_activation(config, "activation", "gelu"), has_attn_norm)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """llama.cpp's converter writes no base of the rotation, where Falcon 2 11B has another than the usual one."""
    has_attn_norm = "blk.0.attn_norm_2.weight" in file.tensors
    is_falcon2 = spec.layers[0].attention.num_kv_heads > 1 and not has_attn_norm
    if is_falcon2 and file.get("falcon.rope.freq_base", float) is None:
        raise file.error("falcon.rope.freq_base is missing, and that of Falcon 2 is not the usual 10000")
    return _with(spec, "gelu", has_attn_norm)


def _with(spec: ModelSpec, activation: Activation, has_attn_norm: bool) -> ModelSpec:
    spec = replace(spec, norm="layer", has_norm_bias=True).with_plain_mlps(activation)
    return spec.with_layers(lambda _, layer: replace(layer, has_attn_norm=has_attn_norm))


FALCON = Architecture(
    describe=describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_top={
        "transformer.word_embeddings.weight": "embed",
        "transformer.ln_f.weight": "norm",
        "transformer.ln_f.bias": "norm_bias",
        "lm_head.weight": "output",
    },
    hf_layers="transformer.h.",
    hf_layer={
        "input_layernorm.weight": "mlp_norm",
        "input_layernorm.bias": "mlp_norm_bias",
        "ln_mlp.weight": "mlp_norm",
        "ln_mlp.bias": "mlp_norm_bias",
        "ln_attn.weight": "attn_norm",
        "ln_attn.bias": "attn_norm_bias",
        "self_attention.query_key_value.weight": Parts(("q", "k", "v"), is_by_kv_head=True),
        "self_attention.query_key_value.bias": Parts(("q_bias", "k_bias", "v_bias"), is_by_kv_head=True),
        "self_attention.dense.weight": "o",
        "self_attention.dense.bias": "o_bias",
        "mlp.dense_h_to_4h.weight": "up",
        "mlp.dense_h_to_4h.bias": "up_bias",
        "mlp.dense_4h_to_h.weight": "down",
        "mlp.dense_4h_to_h.bias": "down_bias",
    },
    gguf_layer={
        **GGUF_LAYER,
        "attn_norm.weight": "mlp_norm",
        "attn_norm.bias": "mlp_norm_bias",
        "attn_norm_2.weight": "attn_norm",
        "attn_norm_2.bias": "attn_norm_bias",
        "attn_qkv.weight": Parts(("q", "k", "v")),
    },
)
