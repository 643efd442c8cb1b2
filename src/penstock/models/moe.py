"""Mixtures of experts: decoders in which a layer's MLP is many small ones, of which a router chooses a few for each token.

Mixtral is Llama with experts. Qwen 3 MoE and OLMoE have norms of queries and keys besides, and Granite MoE has factors.
Sources: Mixtral of Experts, arXiv 2401.04088; OLMoE, arXiv 2409.02060; Qwen 3, arXiv 2505.09388; and transformers' models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.models import granite, llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
from penstock.models.experts import GGUF_EXPERTS, experts_of_gguf, read_num_experts, with_experts
from penstock.types.model_spec import ExpertsMlp, ModelSpec

if TYPE_CHECKING:
    from penstock.models.hf_config import JsonFile

_CUBES: Mapping[str, Parts] = {
    "experts.gate_up_proj": Parts(("expert_gate", "expert_up")),
    "experts.down_proj": Parts(("expert_down",)),
}
"""The experts' matrices as release 5 of transformers puts them together, by the end of their names."""
_GATE_UP_DOWN: Mapping[str, str | Parts] = {
    "mlp.gate.weight": "router",
    "mlp.experts.*.gate_proj.weight": "expert_gate",
    "mlp.experts.*.up_proj.weight": "expert_up",
    "mlp.experts.*.down_proj.weight": "expert_down",
    **{f"mlp.{name}": parts for name, parts in _CUBES.items()},
}
_GGUF_LAYER: Mapping[str, str | Parts] = {**GGUF_LAYER, **GGUF_EXPERTS}


def _of_mixtral_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    window = config.get("sliding_window", int) or 0
    spec = spec.with_attention(lambda _, attention: replace(attention, window=window))
    return _experts_of_hf(config, spec, width="intermediate_size")


def _of_qwen3_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Layers that config.json names, and those that are no multiple of a number, keep their dense MLP. Windows are in all."""
    config.only("hidden_act", "silu")
    window = config.require("sliding_window", int) if config.get("use_sliding_window", bool) else 0
    dense = spec.with_windows(window, [True] * spec.num_layers)
    step, only = config.get("decoder_sparse_step", int) or 1, config.get("mlp_only_layers", list) or []
    is_renormalised = config.get("norm_topk_prob", bool) or False
    mixed = _experts_of_hf(config, dense, width="moe_intermediate_size", is_renormalised=is_renormalised)
    return mixed.with_layers(lambda i, layer: dense.layers[i] if i in only or (i + 1) % step else layer)


def _of_olmoe_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    config.only("clip_qkv", None)
    is_renormalised = config.get("norm_topk_prob", bool) or False
    return _experts_of_hf(config, spec, width="intermediate_size", is_renormalised=is_renormalised)


def _of_granite_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return _experts_of_hf(config, granite.of_hf(config, spec), width="intermediate_size")


def _experts_of_hf(config: JsonFile, spec: ModelSpec, *, width: str, is_renormalised: bool = True) -> ModelSpec:
    """Return the spec with the experts of config.json; `width` is its key for the columns of one expert."""
    mlp = ExpertsMlp(
        num_experts=read_num_experts(config),
        num_experts_per_token=config.require("num_experts_per_tok", int),
        intermediate_size=config.require(width, int),
        is_renormalised=is_renormalised,
    )
    return with_experts(spec, mlp, config.path)


MIXTRAL = Architecture(
    describe=llama.describe,
    of_hf=_of_mixtral_hf,
    hf_values=lambda values: {"rope_theta": 1e6, **values},
    hf_layer={
        **HF_LAYER,
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.*.w1.weight": "expert_gate",
        "block_sparse_moe.experts.*.w3.weight": "expert_up",
        "block_sparse_moe.experts.*.w2.weight": "expert_down",
        "mlp.gate.weight": "router",
        **{f"mlp.{name}": parts for name, parts in _CUBES.items()},
    },
)
"""Its GGUF files are called llama."""
QWEN3_MOE = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_qwen3_hf,
    of_gguf=llama.of_gguf,
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
OLMOE = Architecture(
    describe=partial(llama.describe, qk_norms="rows"),
    of_hf=_of_olmoe_hf,
    of_gguf=partial(experts_of_gguf, is_renormalised=False),
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
GRANITE_MOE = Architecture(
    describe=llama.describe,
    of_hf=_of_granite_hf,
    of_gguf=granite.of_gguf,
    hf_values=granite.GRANITE.hf_values,
    hf_layer={
        **HF_LAYER,
        "block_sparse_moe.router.layer.weight": "router",
        "block_sparse_moe.input_linear.weight": Parts(("expert_gate", "expert_up")),
        "block_sparse_moe.output_linear.weight": Parts(("expert_down",)),
        "block_sparse_moe.router.weight": "router",
        **{f"block_sparse_moe.{name}": parts for name, parts in _CUBES.items()},
    },
    gguf_layer=_GGUF_LAYER,
    is_interleaved_in_gguf=True,
)
