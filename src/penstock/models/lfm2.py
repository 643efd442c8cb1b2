"""LFM2: most layers have a short convolution; the others attend. LFM2 MoE has experts in most layers.

The convolution's state is in the KV blocks: docs/decisions/recurrent-state.md.
Sources: modeling_lfm2.py and modeling_lfm2_moe.py of transformers; src/models/lfm2.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.models import checks, llama
from penstock.models.architectures import GGUF_LAYER, GGUF_TOP, HF_TOP, Architecture, with_biases
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.layers import GGUF_EXPERTS, experts_of_hf, read_gguf_experts, with_experts
from penstock.models.moe import EXPERTS
from penstock.types.model_spec import GatedMlp, LayerSpec, ModelSpec, ShortConvSpec

_MAX_KERNEL = 17
"""Largest kernel whose state (one column fewer) fits the native backend's smallest block, 16 positions."""


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    old = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    renamed = {new: values[key] for key, new in old.items() if key in values}
    defaults = {"rope_theta": 1e6, "tie_word_embeddings": True, "norm_eps": 1e-5, "intermediate_size": 12288}
    defaults |= {"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    merged = {**defaults, **values, **renamed}
    return {"rms_norm_eps": merged["norm_eps"], **merged}


def _moe_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    values = {key: value for key, value in values.items() if key != "block_ff_dim"}
    defaults = {"intermediate_size": 7168, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4}
    return _values({**defaults, "moe_intermediate_size": 1792, **values, "block_auto_adjust_ff_dim": False})


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.values.get("layer_types") is not None:
        kinds = read_layer_types(config, spec.num_layers, "full_attention", "conv")
        has_conv = [kind == "conv" for kind in kinds]
    else:
        attending = config.get("full_attn_idxs", list)
        has_conv = [attending is not None and layer not in attending for layer in range(spec.num_layers)]
    width = _adjusted_width(config, spec)
    kernel, has_bias = config.get("conv_L_cache", int), config.get("conv_bias", bool) or False
    conv = ShortConvSpec(kernel=3 if kernel is None else kernel, has_bias=has_bias)
    spec = spec.with_layers(lambda _, layer: replace(layer, mlp=GatedMlp(intermediate_size=width)))
    return _with_convs(spec, conv, has_conv, config.path)


def _of_moe_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    factor = config.get("routed_scaling_factor", float)
    return experts_of_hf(
        config,
        _of_hf(config, spec),
        width="moe_intermediate_size",
        dense=range(config.require("num_dense_layers", int)),
        scoring="sigmoid",
        is_renormalised=config.get("norm_topk_prob", bool) is not False,
        share_factor=1.0 if factor is None else factor,
        has_selection_bias=config.get("use_expert_bias", bool) is not False,
    )


def _adjusted_width(config: JsonFile, spec: ModelSpec) -> int:
    """Return the MLP's intermediate size: as given or, unless switched off, 2/3 of that, times a factor, rounded up."""
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, GatedMlp)
    width = mlp.intermediate_size
    if config.get("block_auto_adjust_ff_dim", bool) is False:
        return width
    width = int(2 * width / 3)
    if config.values["block_ffn_dim_multiplier"] is None:
        return width
    factor, multiple = config.require("block_ffn_dim_multiplier", float), config.require("block_multiple_of", int)
    if not 0.0 < factor <= 64.0 or not 1 <= multiple <= 1 << 16:
        sizes = f"block_ffn_dim_multiplier {factor} and block_multiple_of {multiple}"
        raise config.error(f"{sizes} do not give a valid width of the MLP")
    return -(-int(factor * width) // multiple) * multiple


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = file.architecture
    if file.get(f"{key}.attention.sliding_window", int):
        raise checks.unsupported(file.path, f"{key}.attention.sliding_window is set", "LFM2 without windows is")
    counts = file.numbers_by_layer(f"{key}.attention.head_count_kv", spec.num_layers)
    conv = ShortConvSpec(kernel=file.require(f"{key}.shortconv.l_cache", int))
    return _with_convs(spec, conv, [count == 0 for count in counts], file.path)


def _of_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the experts' keys. The chosen experts' weights are always divided by their sum, as in llama.cpp."""
    mlp = read_gguf_experts(file, scoring="sigmoid", has_selection_bias=True)
    num_dense = file.get("lfm2moe.leading_dense_block_count", int) or 0
    return with_experts(_of_gguf(file, spec), mlp, file.path, dense=range(num_dense))


def _with_convs(spec: ModelSpec, conv: ShortConvSpec, has_conv: Sequence[bool], path: Path) -> ModelSpec:
    if not 2 <= conv.kernel <= _MAX_KERNEL:
        raise checks.unsupported(path, f"the convolution's kernel has {conv.kernel} positions", f"2 to {_MAX_KERNEL} are")

    def changed(layer: int, found: LayerSpec) -> LayerSpec:
        attention = replace(found.attention, has_o_bias=False)  # layer 0's bias may belong to a convolution
        return replace(found, mixer=conv if has_conv[layer] else attention)

    return spec.with_layers(changed)


_HF_LAYER = with_biases(
    {
        "operator_norm": "attn_norm",
        **{f"self_attn.{name}_proj": name for name in "qkv"},
        "self_attn.out_proj": "o",
        "self_attn.q_layernorm": "q_norm",
        "self_attn.k_layernorm": "k_norm",
        "conv.in_proj": "conv_in",
        "conv.conv": "conv",
        "conv.out_proj": "o",
        "ffn_norm": "mlp_norm",
        "feed_forward.w1": "gate",
        "feed_forward.w3": "up",
        "feed_forward.w2": "down",
    }
)
_GGUF_LAYER = {
    **GGUF_LAYER,
    "shortconv.in_proj.weight": "conv_in",
    "shortconv.conv.weight": "conv",
    "shortconv.out_proj.weight": "o",
}
LFM2 = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_top={**HF_TOP, "model.embedding_norm.weight": "norm"},
    hf_layer=_HF_LAYER,
    gguf_top={**GGUF_TOP, "token_embd_norm.weight": "norm"},
    gguf_layer=_GGUF_LAYER,
)
LFM2_MOE = replace(
    LFM2,
    of_hf=_of_moe_hf,
    of_gguf=_of_moe_gguf,
    hf_values=_moe_values,
    hf_layer={
        **_HF_LAYER,
        "feed_forward.gate.weight": "router",
        "feed_forward.expert_bias": "selection_bias",
        "feed_forward.experts.*.w1.weight": "expert_gate",
        "feed_forward.experts.*.w3.weight": "expert_up",
        "feed_forward.experts.*.w2.weight": "expert_down",
        **{f"feed_forward.{name}": ours for name, ours in EXPERTS.items()},
    },
    gguf_layer={**_GGUF_LAYER, **GGUF_EXPERTS},
)
