"""Mixtures of experts: a layer has many small MLPs, and a router chooses a few of them for each token.

Mixtral is Llama with experts. Qwen 3 MoE and OLMoE also norm queries and keys, and Granite MoE has factors.
Sources: Mixtral of Experts, arXiv 2401.04088; OLMoE, arXiv 2409.02060; Qwen 3, arXiv 2505.09388; and transformers' models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from penstock.models import llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
from penstock.models.layers import GGUF_EXPERTS, experts_of_gguf, experts_of_hf
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from penstock.models.hf_config import JsonFile

_CUBES: Mapping[str, Parts] = {
    "experts.gate_up_proj": Parts(("expert_gate", "expert_up")),
    "experts.down_proj": Parts(("expert_down",)),
}
"""Ends of names. Release 5 of transformers puts the matrices of all experts of a layer into one tensor."""
_GATE_UP_DOWN: Mapping[str, str | Parts] = {
    "mlp.gate.weight": "router",
    "mlp.experts.*.gate_proj.weight": "expert_gate",
    "mlp.experts.*.up_proj.weight": "expert_up",
    "mlp.experts.*.down_proj.weight": "expert_down",
    **{f"mlp.{name}": parts for name, parts in _CUBES.items()},
}
_GGUF_LAYER: Mapping[str, str | Parts] = {**GGUF_LAYER, **GGUF_EXPERTS}


def _of_mixtral(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    spec = spec.with_windows(config.get("sliding_window", int) or 0, [True] * spec.num_layers)
    return experts_of_hf(config, spec, width="intermediate_size")


def _of_qwen3_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Layers in `mlp_only_layers` keep their dense MLP, and so do all but each `decoder_sparse_step`-th. All have the
    window."""
    config.only("hidden_act", "silu")
    window = config.require("sliding_window", int) if config.get("use_sliding_window", bool) else 0
    dense = spec.with_windows(window, [True] * spec.num_layers)
    step, only = config.get("decoder_sparse_step", int) or 1, config.get("mlp_only_layers", list) or []
    is_renormalised = config.get("norm_topk_prob", bool) or False
    mixed = experts_of_hf(config, dense, width="moe_intermediate_size", is_renormalised=is_renormalised)
    return mixed.with_layers(lambda i, layer: dense.layers[i] if i in only or (i + 1) % step else layer)


def _of_olmoe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    config.only("clip_qkv", None)
    is_renormalised = config.get("norm_topk_prob", bool) or False
    return experts_of_hf(config, spec, width="intermediate_size", is_renormalised=is_renormalised)


def _of_granite_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return experts_of_hf(config, llama.of_granite_hf(config, spec), width="intermediate_size")


MIXTRAL = Architecture(
    describe=llama.describe,
    of_hf=_of_mixtral,
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
"""Its GGUF files call themselves llama."""
QWEN3_MOE = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_qwen3_moe,
    of_gguf=llama.of_gguf,
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
OLMOE = Architecture(
    describe=partial(llama.describe, qk_norms="rows"),
    of_hf=_of_olmoe,
    of_gguf=partial(experts_of_gguf, is_renormalised=False),
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
GRANITE_MOE = Architecture(
    describe=llama.describe,
    of_hf=_of_granite_moe,
    of_gguf=llama.of_granite_gguf,
    hf_values=llama.granite_values,
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
