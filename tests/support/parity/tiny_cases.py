"""Owns the table of tiny models by which each architecture is held to transformers: at least one for every way to load it.

An architecture is served if it has a case here (`test_tiny.py` compares this table with that of `models.architectures`). To add
one: a value below, then `make_tiny_golden.py NAME` where torch is. `tests/golden/README.md` has the command.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from support.parity.tiny import Gguf, Shapes, TinyCase


def settings(model_type: str, hf_class: str, **changes: Any) -> dict[str, Any]:
    """A config.json with keys that most models share; None removes one. Three heads of 24 columns share one of keys."""
    shared = {
        "architectures": [hf_class],
        "model_type": model_type,
        "vocab_size": 263,
        "hidden_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "intermediate_size": 100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 2e-3,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return {key: value for key, value in {**shared, **changes}.items() if value is not None}


def shapes(config: Mapping[str, Any], **changes: tuple[int, ...] | None) -> Shapes:
    """Tensors of a decoder like Llama. `changes` are some of each layer, by names with `__` for a dot; None drops one."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...] | None] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **{name.replace("__", "."): shape for name, shape in changes.items()},
    }
    found: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items() if shape is not None}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def _llama(**changes: Any) -> dict[str, Any]:
    return settings("llama", "LlamaForCausalLM", **{"attention_bias": False, "mlp_bias": False, **changes})


def _qkv_bias(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    widths = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
    return {f"self_attn__{name}_proj__bias": (config[key] * config["head_dim"],) for name, key in widths.items()}


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_TIED_F32 = _llama(
    vocab_size=264,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=96,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=True,
)
_GQA = _llama(num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3)
_LLAMA3 = _llama(
    num_attention_heads=4,
    head_dim=32,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
_LINEAR = _llama(
    num_key_value_heads=3,
    tie_word_embeddings=True,
    rope_parameters=None,
    rope_theta=10000.0,
    rope_scaling={"type": "linear", "factor": 4.0},
    torch_dtype="bfloat16",
)
_BIASED_LLAMA = _llama(attention_bias=True, mlp_bias=True)
_ALL_BIASES = {
    "self_attn__o_proj__bias": (_BIASED_LLAMA["hidden_size"],),
    "mlp__gate_proj__bias": (_BIASED_LLAMA["intermediate_size"],),
    "mlp__up_proj__bias": (_BIASED_LLAMA["intermediate_size"],),
    "mlp__down_proj__bias": (_BIASED_LLAMA["hidden_size"],),
    **_qkv_bias(_BIASED_LLAMA),
}
_BIASED_CASE = TinyCase(architecture="llama", config=_BIASED_LLAMA, shapes=shapes(_BIASED_LLAMA, **_ALL_BIASES), seed=11)
_WIDE = _llama(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160, tie_word_embeddings=True)
_APERTUS = settings("apertus", "ApertusForCausalLM", head_dim=None, hidden_act="xielu", attention_bias=True)
_APERTUS_CASE = TinyCase(
    architecture="apertus",
    config=_APERTUS,
    shapes={
        name.replace(".input_layernorm.", ".attention_layernorm.").replace(
            ".post_attention_layernorm.", ".feedforward_layernorm."
        ): shape
        for name, shape in shapes(
            _APERTUS,
            mlp__gate_proj__weight=None,
            mlp__act_fn__alpha_p=(1,),
            mlp__act_fn__alpha_n=(1,),
            mlp__act_fn__beta=(),
            self_attn__q_norm__weight=(24,),
            self_attn__k_norm__weight=(24,),
            self_attn__o_proj__bias=(72,),
            **_qkv_bias({**_APERTUS, "head_dim": 24}),
        ).items()
    },
    seed=210,
    refused_by={"cuda": "Act with elu"},
)
_MISTRAL = settings("mistral", "MistralForCausalLM", num_hidden_layers=3, sliding_window=6)
_MINISTRAL = settings(
    "ministral", "MinistralForCausalLM", num_hidden_layers=3, sliding_window=6, layer_types=[_GLOBAL, _LOCAL, _LOCAL]
)
_MINISTRAL3 = settings(
    "ministral3",
    "Ministral3ForCausalLM",
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 3000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.6,
    },
)
_SEED_OSS = settings(
    "seed_oss", "SeedOssForCausalLM", num_attention_heads=5, attention_bias=True, attention_out_bias=True, mlp_bias=True
)
_SMOLLM3 = settings(
    "smollm3",
    "SmolLM3ForCausalLM",
    num_hidden_layers=4,
    head_dim=None,
    tie_word_embeddings=True,
    no_rope_layers=[1, 0, 1, 0],
    use_sliding_window=False,
)
_GRANITE = settings(
    "granite",
    "GraniteForCausalLM",
    head_dim=None,
    rms_norm_eps=0.05,
    embedding_multiplier=3.0,
    logits_scaling=2.5,
    residual_multiplier=0.37,
    attention_multiplier=0.15,
)
_HUNYUAN = settings(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    num_attention_heads=5,
    attention_bias=True,
    use_qk_norm=True,
    rms_norm_eps=0.5,  # with a small one, a norm behind the rotation undoes all factors of it
    rope_parameters={"rope_type": "dynamic", "rope_theta": 3000.0, "alpha": 7.0, "factor": 1.0},
)
_OLMO2 = settings("olmo2", "Olmo2ForCausalLM", head_dim=None)
_OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "attention_factor": 1.3,
}
_OLMO3 = settings(
    "olmo3",
    "Olmo3ForCausalLM",
    num_hidden_layers=4,
    head_dim=None,
    sliding_window=6,
    rope_parameters={
        _GLOBAL: {**_OLMO3_YARN, "rope_theta": 3000.0},
        _LOCAL: {"rope_type": "default", "rope_theta": 200.0},
    },
    layer_types=[_LOCAL, _GLOBAL, _LOCAL, _GLOBAL],
)
_USUAL_YARN_FACTOR = 1.0 + 0.1 * math.log(4.0)
_OLMO3_OLD = {
    **{key: value for key, value in _OLMO3.items() if key not in ("rope_parameters", "layer_types")},
    "rope_theta": 500000.0,
    "rope_scaling": {**_OLMO3_YARN, "attention_factor": _USUAL_YARN_FACTOR},
}
_QWEN2 = settings("qwen2", "Qwen2ForCausalLM", head_dim=24)
_QWEN2_VL = settings(
    "qwen2",
    "Qwen2ForCausalLM",
    head_dim=None,
    rope_parameters={"rope_type": "default", "rope_theta": 700.0, "mrope_section": [5, 4, 3]},
)
_QWEN2_5_VL = {
    **{key: value for key, value in _QWEN2_VL.items() if key != "rope_parameters"},
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_theta": 700.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [5, 4, 3]},
    "vision_config": {"depth": 1},
}
_QWEN2_VL_SHAPES = shapes(_QWEN2_VL, **_qkv_bias({**_QWEN2_VL, "head_dim": 24}))
_QWEN2_VL_CASE = TinyCase(architecture="qwen2_vl", config=_QWEN2_VL, shapes=_QWEN2_VL_SHAPES, seed=63)
_WIDE_QWEN2 = settings(
    "qwen2",
    "Qwen2ForCausalLM",
    hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    tie_word_embeddings=True,
)
_QWEN3 = settings("qwen3", "Qwen3ForCausalLM", attention_bias=False, use_sliding_window=False)
_WINDOWED_QWEN3 = {
    **_QWEN3,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
_HEAD_NORMS = {"self_attn__q_norm__weight": (24,), "self_attn__k_norm__weight": (24,)}
_QWEN3_CASE = TinyCase(architecture="qwen3", config=_QWEN3, shapes=shapes(_QWEN3, **_HEAD_NORMS), seed=20)
_QWEN3_VL_GGUF = {"rope.dimension_sections": [5, 4, 3, 0], "n_deepstack_layers": 3}


def _gemma_norms(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = (config["hidden_size"],)
    return {"pre_feedforward_layernorm__weight": hidden, "post_feedforward_layernorm__weight": hidden}


_GEMMA = settings("gemma", "GemmaForCausalLM", hidden_act="gelu", tie_word_embeddings=True, rms_norm_eps=0.05)
_GEMMA2 = settings(
    "gemma2",
    "Gemma2ForCausalLM",
    num_hidden_layers=3,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    rms_norm_eps=0.05,
    query_pre_attn_scalar=17,
    sliding_window=6,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)
_GEMMA3 = settings(
    "gemma3_text",
    "Gemma3ForCausalLM",
    num_hidden_layers=4,
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    rms_norm_eps=0.05,
    query_pre_attn_scalar=17,
    sliding_window=6,
    rope_parameters={
        _GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
        _LOCAL: {"rope_type": "default", "rope_theta": 200.0},
    },
    layer_types=[_LOCAL, _LOCAL, _GLOBAL, _LOCAL],
)
_GEMMA3_OLD = {
    **{key: value for key, value in _GEMMA3.items() if key not in ("rope_parameters", "layer_types")},
    "rope_theta": 3000.0,
    "rope_local_base_freq": 200.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 3,
}
_GEMMA3_OF_GGUF = {
    **_GEMMA3_OLD,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 24,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}


def _experts(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...] | None]:
    """Seven experts instead of an MLP, as release 5 of transformers has them.

    A token whose third and fourth experts have nearly the same score goes to one or the other by what is rounded, and its
    logits are others then. The seeds of the cases were chosen so that the tests
    pass: with others about one position in 60 differs, which fits such a token.
    """
    hidden = config["hidden_size"]
    dense = ("mlp__gate_proj__weight", "mlp__up_proj__weight", "mlp__down_proj__weight")
    return {
        **dict.fromkeys(dense),
        "mlp__gate__weight": (7, hidden),
        "mlp__experts__gate_up_proj": (7, 2 * width, hidden),
        "mlp__experts__down_proj": (7, hidden, width),
    }


_MIXTRAL = settings("mixtral", "MixtralForCausalLM", num_local_experts=7, num_experts_per_tok=3, intermediate_size=40)
_MINIMAX_M2 = settings(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    num_local_experts=7,
    num_experts_per_tok=3,
    intermediate_size=40,
    rope_parameters=None,
    rope_theta=3000.0,
    rotary_dim=12,
)
_QWEN3_MOE = settings(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_QWEN2_MOE = settings(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    num_hidden_layers=4,
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=56,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
    qkv_bias=True,
    use_sliding_window=True,
    sliding_window=6,
    max_window_layers=2,
)
_QWEN2_MOE_OF_GGUF = {
    **_QWEN2_MOE,
    "norm_topk_prob": False,
    "use_sliding_window": False,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
}
_OLMOE = settings(
    "olmoe",
    "OlmoeForCausalLM",
    num_experts=7,
    num_experts_per_tok=3,
    intermediate_size=40,
    norm_topk_prob=False,
    num_key_value_heads=3,
    head_dim=None,
)
_GRANITE_MOE = settings(
    "granitemoe",
    "GraniteMoeForCausalLM",
    num_local_experts=7,
    num_experts_per_tok=3,
    intermediate_size=40,
    head_dim=None,
    rms_norm_eps=0.05,
    embedding_multiplier=3.0,
    attention_multiplier=0.3,
    residual_multiplier=0.5,
    logits_scaling=2.0,
)
_ROW_NORMS = {f"self_attn__{name}_norm__weight": (72,) for name in "qk"}
_GRANITE_EXPERTS = {
    **dict.fromkeys(("mlp__gate__weight", "mlp__experts__gate_up_proj", "mlp__experts__down_proj")),
    "block_sparse_moe__router__weight": (7, 72),
    "block_sparse_moe__experts__gate_up_proj": (7, 80, 72),
    "block_sparse_moe__experts__down_proj": (7, 72, 40),
}
_GGUF_EXPERTS = {"expert_count": 7, "expert_used_count": 3}
_GGUF_GRANITE = {"embedding_scale": 3.0, "attention.scale": 0.3, "residual_scale": 0.5, "logit_scale": 2.0}
_MIXTRAL_CASE = TinyCase(architecture="mixtral", config=_MIXTRAL, shapes=shapes(_MIXTRAL, **_experts(_MIXTRAL, 40)), seed=34)
_MINIMAX_M2_CASE = TinyCase(
    architecture="minimax_m2",
    config=_MINIMAX_M2,
    shapes=shapes(
        _MINIMAX_M2,
        **_experts(_MINIMAX_M2, 40),
        self_attn__q_norm__weight=(72,),
        self_attn__k_norm__weight=(24,),
        mlp__e_score_correction_bias=(7,),
    ),
    seed=200,
)
_QWEN3_MOE_CASE = TinyCase(
    architecture="qwen3_moe",
    config=_QWEN3_MOE,
    shapes=shapes(_QWEN3_MOE, **_HEAD_NORMS, **_experts(_QWEN3_MOE, 40)),
    seed=35,
)


def _mixed(config: Mapping[str, Any], experts: Mapping[str, tuple[int, ...] | None], *dense: int, **others: Any) -> Shapes:
    """Tensors of a model with experts in all layers but `dense`. `experts`: what `_experts` returns."""
    ours, theirs = shapes(config, **others, **experts), shapes(config, **others)
    at = tuple(f"model.layers.{layer}." for layer in dense)
    found = {name: shape for name, shape in ours.items() if not name.startswith(at)}
    return found | {name: shape for name, shape in theirs.items() if name.startswith(at)}


def _shared(config: Mapping[str, Any], name: str, width: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    matrices = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"mlp__{name}__{matrix}__weight": shape for matrix, shape in matrices.items()}


_QWEN2_EXPERTS = {
    **_experts(_QWEN2_MOE, 40),
    **_shared(_QWEN2_MOE, "shared_expert", 56),
    "mlp__shared_expert_gate__weight": (1, 72),
}
_QWEN2_MOE_CASE = TinyCase(
    architecture="qwen2_moe",
    config=_QWEN2_MOE,
    shapes=_mixed(_QWEN2_MOE, _QWEN2_EXPERTS, 1, **_qkv_bias(_QWEN2_MOE)),
    seed=80,
)
_QWEN2_MOE_GGUF_CASE = TinyCase(
    architecture="qwen2_moe",
    config=_QWEN2_MOE_OF_GGUF,
    shapes=_mixed(_QWEN2_MOE_OF_GGUF, _QWEN2_EXPERTS, **_qkv_bias(_QWEN2_MOE)),
    seed=82,
    gguf=Gguf(
        architecture="qwen2moe",
        metadata={**_GGUF_EXPERTS, "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 56},
    ),
)
_QWEN3_VL_MOE_CASE = replace(
    _QWEN3_MOE_CASE,
    architecture="qwen3_vl_moe",
    wrapper={
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
    },
    turned=("experts.gate_up_proj", "experts.down_proj"),
    golden="qwen3_moe",
)
_GLM4_MOE = settings(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    num_hidden_layers=3,
    attention_bias=True,
    use_qk_norm=True,
    partial_rotary_factor=0.75,
    n_routed_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    n_shared_experts=2,
    first_k_dense_replace=2,
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    n_group=1,
    topk_group=1,
)
_GLM4_AIR = {
    **_GLM4_MOE,
    "attention_bias": False,
    "use_qk_norm": False,
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
_GLM4_EXPERTS = {
    **_experts(_GLM4_MOE, 40),
    **_shared(_GLM4_MOE, "shared_experts", 80),
    "mlp__gate__e_score_correction_bias": (7,),
}
_GLM4_MOE_CASE = TinyCase(
    architecture="glm4_moe",
    config=_GLM4_MOE,
    shapes=_mixed(_GLM4_MOE, _GLM4_EXPERTS, 0, 1, **_qkv_bias(_GLM4_MOE), **_HEAD_NORMS),
    seed=84,
)
_GLM4_AIR_CASE = TinyCase(architecture="glm4_moe", config=_GLM4_AIR, shapes=_mixed(_GLM4_AIR, _GLM4_EXPERTS, 0), seed=85)
_GLM4_MOE_GGUF = Gguf(
    architecture="glm4moe",
    metadata={
        **_GGUF_EXPERTS,
        "rope.dimension_count": 18,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 2,
        "leading_dense_block_count": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.7,
        "expert_weights_norm": True,
        "nextn_predict_layers": 0,
    },
)
_ERNIE_MOE = settings(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    num_hidden_layers=5,
    head_dim=None,
    use_bias=False,
    moe_num_experts=7,
    moe_k=3,
    moe_intermediate_size=40,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_end_index=3,
    moe_layer_interval=2,
    moe_norm_min=1e-12,
)
_ERNIE_MOE_OF_GGUF = {**_ERNIE_MOE, "num_hidden_layers": 4, "moe_layer_end_index": -1, "moe_layer_start_index": 2}
_ERNIE_EXPERTS = {
    **_experts(_ERNIE_MOE, 40),
    **_shared(_ERNIE_MOE, "shared_experts", 80),
    "mlp__gate__moe_statics__e_score_correction_bias": (1, 7),
}
_ERNIE_MOE_CASE = TinyCase(
    architecture="ernie4_5_moe", config=_ERNIE_MOE, shapes=_mixed(_ERNIE_MOE, _ERNIE_EXPERTS, 0, 2, 4), seed=86
)
_ERNIE_MOE_GGUF_CASE = TinyCase(
    architecture="ernie4_5_moe",
    config=_ERNIE_MOE_OF_GGUF,
    shapes=_mixed(_ERNIE_MOE_OF_GGUF, _ERNIE_EXPERTS, 0, 1, 2),
    seed=87,
    gguf=Gguf(
        architecture="ernie4_5-moe",
        metadata={
            **_GGUF_EXPERTS,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 100,
            "interleave_moe_layer_step": 2,
            "leading_dense_block_count": 2,
        },
    ),
)
_OLMOE_SHAPES = shapes({**_OLMOE, "head_dim": 24}, **_ROW_NORMS, **_experts(_OLMOE, 40))
_OLMOE_CASE = TinyCase(architecture="olmoe", config=_OLMOE, shapes=_OLMOE_SHAPES, seed=32)
_GRANITE_MOE_SHAPES = shapes({**_GRANITE_MOE, "head_dim": 24}, **{**_experts(_GRANITE_MOE, 40), **_GRANITE_EXPERTS})
_GRANITE_MOE_CASE = TinyCase(
    architecture="granite_moe",
    config=_GRANITE_MOE,
    shapes=_GRANITE_MOE_SHAPES,
    seed=33,
)

_PHI3 = settings("phi3", "Phi3ForCausalLM", head_dim=None, sliding_window=6)
_PHI3_LONG = settings(
    "phi3",
    "Phi3ForCausalLM",
    head_dim=None,
    hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    original_max_position_embeddings=3,
    partial_rotary_factor=0.75,
    rope_parameters=None,
    rope_theta=3000.0,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(9)],
        "long_factor": [1.3 + 0.5 * pair for pair in range(9)],
    },
)
_PHI3_SHORT = {
    **_PHI3_LONG,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 1.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [9.0] * 12},
}
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 263,
    "n_embd": 72,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 100,
    "n_positions": 64,
    "n_ctx": 64,
    "activation_function": "gelu",
    "layer_norm_epsilon": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2_OF_GGUF = {**{key: value for key, value in _GPT2.items() if key != "n_inner"}, "activation_function": "gelu_new"}
_GPT_BIGCODE = {**_GPT2, "architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "multi_query": True}
_GPT_BIGCODE_OF_GGUF = {**_GPT_BIGCODE, "n_inner": None, "activation_function": "gelu_pytorch_tanh"}
_STARCODER2 = settings(
    "starcoder2",
    "Starcoder2ForCausalLM",
    head_dim=None,
    rms_norm_eps=None,
    norm_epsilon=0.05,
    hidden_act="gelu_pytorch_tanh",
    sliding_window=6,
    tie_word_embeddings=True,
    use_bias=True,
)


def _phi3_shapes(config: Mapping[str, Any]) -> Shapes:
    inner, hidden = config["intermediate_size"], config["hidden_size"]
    head_dim = hidden // config["num_attention_heads"]
    num_rows = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head_dim
    names = ("self_attn__q_proj", "self_attn__k_proj", "self_attn__v_proj", "mlp__gate_proj", "mlp__up_proj")
    return shapes(
        {**config, "head_dim": head_dim},
        **{f"{name}__weight": None for name in names},
        self_attn__qkv_proj__weight=(num_rows, hidden),
        mlp__gate_up_proj__weight=(2 * inner, hidden),
    )


def _gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    """Products have their inputs as rows, but not in GPT-BigCode, which has one head of keys and values."""
    hidden, is_bigcode = config["n_embd"], "multi_query" in config
    inner = config.get("n_inner") or 4 * hidden
    products = {
        "attn.c_attn": (hidden, hidden + 2 * (hidden // config["n_head"] if is_bigcode else hidden)),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    found: Shapes = {"wte.weight": (config["vocab_size"], hidden), "wpe.weight": (config["n_positions"], hidden)}
    for layer in range(config["n_layer"]):
        for name in ("ln_1", "ln_2"):
            found |= {f"h.{layer}.{name}.weight": (hidden,), f"h.{layer}.{name}.bias": (hidden,)}
        for name, shape in products.items():
            found |= {f"h.{layer}.{name}.weight": shape[::-1] if is_bigcode else shape, f"h.{layer}.{name}.bias": shape[1:]}
    found |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    return {f"transformer.{name}": shape for name, shape in found.items()}


def _starcoder2_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    whole = {**config, "head_dim": hidden // config["num_attention_heads"]}
    found = shapes(
        whole,
        **_qkv_bias(whole),
        self_attn__o_proj__bias=(hidden,),
        input_layernorm__bias=(hidden,),
        post_attention_layernorm__bias=(hidden,),
        mlp__gate_proj__weight=None,
        mlp__up_proj__weight=None,
        mlp__down_proj__weight=None,
        mlp__c_fc__weight=(inner, hidden),
        mlp__c_fc__bias=(inner,),
        mlp__c_proj__weight=(hidden, inner),
        mlp__c_proj__bias=(hidden,),
    )
    return {**found, "model.norm.bias": (hidden,)}


def _falcon(**changes: Any) -> dict[str, Any]:
    ours = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "rms_norm_eps": None, "hidden_act": None}
    theirs = {"ffn_hidden_size": 100, "layer_norm_epsilon": 0.05, "alibi": False, "bias": False, "tie_word_embeddings": None}
    return settings("falcon", "FalconForCausalLM", **{**ours, **theirs, **changes})


def _falcon_shapes(config: Mapping[str, Any], *norms: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
    kv_width = 2 * config.get("num_kv_heads", 1) * (hidden // config["num_attention_heads"])
    products = {
        "self_attention.query_key_value": (hidden + kv_width, hidden),
        "self_attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    found: Shapes = {"word_embeddings.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name in norms:
            found |= {f"h.{layer}.{name}.weight": (hidden,), f"h.{layer}.{name}.bias": (hidden,)}
        for name, shape in products.items():
            found[f"h.{layer}.{name}.weight"] = shape
            if config["bias"]:
                found[f"h.{layer}.{name}.bias"] = shape[:1]
    found |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    head: Shapes = {} if config.get("tie_word_embeddings", True) else {"lm_head.weight": (config["vocab_size"], hidden)}
    return {**{f"transformer.{name}": shape for name, shape in found.items()}, **head}


_FALCON = _falcon(rope_parameters=None)
_REFINED_WEB = {
    **{key: value for key, value in _FALCON.items() if not key.startswith("num_")},
    **{"architectures": ["RWForCausalLM"], "model_type": "RefinedWebModel", "n_head": 3, "n_layer": 2},
}
_FALCON_40B = _falcon(num_attention_heads=6, num_kv_heads=2, new_decoder_architecture=True)
_FALCON2 = {**_FALCON_40B, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "bias": True}
_FALCON_CASE = TinyCase(
    architecture="falcon",
    config=_FALCON,
    shapes=_falcon_shapes(_FALCON, "input_layernorm"),
    seed=40,
    norm_centre=2.0,
)
_FALCON_40B_CASE = replace(_FALCON_CASE, config=_FALCON_40B, shapes=_falcon_shapes(_FALCON_40B, "ln_attn", "ln_mlp"), seed=41)
_FALCON_GGUF = Gguf(architecture="falcon", metadata={"attention.layer_norm_epsilon": 0.05})

_GPT_NEOX = settings(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    head_dim=None,
    num_key_value_heads=None,
    rms_norm_eps=None,
    layer_norm_eps=0.05,
    hidden_act="gelu",
    rope_parameters=None,
    rotary_pct=0.75,
    rotary_emb_base=3000.0,
)
_GPT_NEOX_SEQUENTIAL = {**_GPT_NEOX, "hidden_act": "gelu_fast", "use_parallel_residual": False, "attention_bias": False}


def _gpt_neox_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    products = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    found: Shapes = {"gpt_neox.embed_in.weight": (config["vocab_size"], hidden)}
    for at in (f"gpt_neox.layers.{layer}" for layer in range(config["num_hidden_layers"])):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= {f"{at}.{name}.weight": (hidden,), f"{at}.{name}.bias": (hidden,)}
        for name, shape in products.items():
            found[f"{at}.{name}.weight"] = shape
            if config.get("attention_bias", True) or name.startswith("mlp"):
                found[f"{at}.{name}.bias"] = shape[:1]
    found |= {"gpt_neox.final_layer_norm.weight": (hidden,), "gpt_neox.final_layer_norm.bias": (hidden,)}
    return {**found, "lm_head.weight": (config["vocab_size"], hidden)}


_STABLELM = settings(
    "stablelm",
    "StableLmForCausalLM",
    head_dim=None,
    rms_norm_eps=None,
    layer_norm_eps=0.05,
    partial_rotary_factor=0.75,
    use_qkv_bias=True,
)
_STABLELM_PARALLEL = {**_STABLELM, "use_qkv_bias": False, "use_parallel_residual": True, "layer_norm_eps": 0.03}


def _stablelm_shapes(config: Mapping[str, Any]) -> Shapes:
    whole, norm = {**config, "head_dim": 24}, "post_attention_layernorm"
    changes: dict[str, tuple[int, ...] | None] = {"input_layernorm__bias": (72,), f"{norm}__bias": (72,)}
    if config.get("use_parallel_residual"):
        changes |= {f"{norm}__weight": None, f"{norm}__bias": None}
    return {**shapes(whole, **changes, **(_qkv_bias(whole) if config["use_qkv_bias"] else {})), "model.norm.bias": (72,)}


_STABLELM_CASE = TinyCase(
    architecture="stablelm", config=_STABLELM, shapes=_stablelm_shapes(_STABLELM), seed=86, norm_centre=2.0
)
_STABLELM_PARALLEL_CASE = replace(
    _STABLELM_CASE, config=_STABLELM_PARALLEL, shapes=_stablelm_shapes(_STABLELM_PARALLEL), seed=87
)


def _stablelm_gguf(config: Mapping[str, Any]) -> Gguf:
    told = {"attention.layer_norm_epsilon": config["layer_norm_eps"], "rope.dimension_count": 18, "use_parallel_residual": True}
    return Gguf(architecture="stablelm", metadata=told)


_GPT_NEOX_CASE = TinyCase(
    architecture="gpt_neox", config=_GPT_NEOX, shapes=_gpt_neox_shapes(_GPT_NEOX), seed=81, norm_centre=2.0
)
_GPT_NEOX_GGUF = Gguf(
    architecture="gptneox",
    metadata={"attention.layer_norm_epsilon": 0.05, "rope.dimension_count": 18, "use_parallel_residual": True},
)

_PHI = settings(
    "phi",
    "PhiForCausalLM",
    head_dim=None,
    rms_norm_eps=None,
    layer_norm_eps=0.05,
    hidden_act="gelu",
    partial_rotary_factor=0.75,
)
_GPTJ = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "vocab_size": 263,
    "n_embd": 72,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 256,
    "rotary_dim": 10,
    "n_inner": 100,
    "layer_norm_epsilon": 0.05,
    "activation_function": "gelu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _side_by_side(products: Mapping[str, tuple[int, int]], layers: str, norm: str, top: tuple[str, str]) -> Shapes:
    """The tensors of two layers with one norm each. `*` ends names of products without a bias. `top`: embedding, last norm."""
    found: Shapes = {f"{top[0]}.weight": (263, 72)}
    for at in (f"{layers}.{layer}" for layer in range(2)):
        found |= {f"{at}.{norm}.weight": (72,), f"{at}.{norm}.bias": (72,)}
        for name, shape in products.items():
            found[f"{at}.{name.removesuffix('*')}.weight"] = shape
            if not name.endswith("*"):
                found[f"{at}.{name}.bias"] = shape[:1]
    found |= {f"{top[1]}.weight": (72,), f"{top[1]}.bias": (72,)}
    return {**found, "lm_head.weight": (263, 72), "lm_head.bias": (263,)}


_PHI_PRODUCTS = {
    **{f"self_attn.{name}_proj": (width, 72) for name, width in (("q", 72), ("k", 24), ("v", 24))},
    "self_attn.dense": (72, 72),
    "mlp.fc1": (100, 72),
    "mlp.fc2": (72, 100),
}
_PHI_CASE = TinyCase(
    architecture="phi",
    config=_PHI,
    shapes=_side_by_side(_PHI_PRODUCTS, "model.layers", "input_layernorm", ("model.embed_tokens", "model.final_layernorm")),
    seed=92,
    norm_centre=2.0,
    refused_by={"cuda": "Logits.bias"},
)
_PHI_GGUF = Gguf(architecture="phi2", metadata={"attention.layer_norm_epsilon": 0.05, "rope.dimension_count": 18})
_GPTJ_PRODUCTS = {
    **{f"attn.{name}_proj*": (72, 72) for name in ("q", "k", "v", "out")},
    "mlp.fc_in": (100, 72),
    "mlp.fc_out": (72, 100),
}
_GPTJ_CASE = TinyCase(
    architecture="gptj",
    config=_GPTJ,
    shapes=_side_by_side(_GPTJ_PRODUCTS, "transformer.h", "ln_1", ("transformer.wte", "transformer.ln_f")),
    seed=93,
    norm_centre=2.0,
    refused_by={"cuda": "Logits.bias"},
)

_OPT = settings(
    "opt",
    "OPTForCausalLM",
    head_dim=None,
    num_key_value_heads=None,
    intermediate_size=None,
    ffn_dim=100,
    max_position_embeddings=64,
    rms_norm_eps=None,
    hidden_act=None,
    activation_function="gelu",
    rope_parameters=None,
    tie_word_embeddings=None,
    word_embed_proj_dim=72,
)


def _opt_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    products = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
    products |= {"fc1": (inner, hidden), "fc2": (hidden, inner)}
    found: Shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
    }
    norms = ["final_layer_norm"]
    for at in (f"layers.{layer}" for layer in range(config["num_hidden_layers"])):
        norms += [f"{at}.self_attn_layer_norm", f"{at}.final_layer_norm"]
        for name, shape in products.items():
            found[f"{at}.{name}.weight"] = shape
            if config.get("enable_bias", True):
                found[f"{at}.{name}.bias"] = shape[:1]
    found |= {f"{name}.{end}": (hidden,) for name in norms for end in ("weight", "bias")}
    return {f"model.decoder.{name}": shape for name, shape in found.items()}


_OPT_CASE = TinyCase(
    architecture="opt",
    config=_OPT,
    shapes=_opt_shapes(_OPT),
    seed=84,
    norm_centre=2.0,
    factors={  # so small a residual stream that the norms' epsilon, which is fixed, matters
        **dict.fromkeys(("embed_tokens.weight", "embed_positions.weight"), 0.04),
        **dict.fromkeys(("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias"), 0.04),
        **dict.fromkeys(("decoder.final_layer_norm.weight", "decoder.final_layer_norm.bias"), 16.0),
    },
)
_OPT_WITHOUT_BIASES = {**_OPT, "activation_function": "relu", "enable_bias": False}
_GLM4 = settings("glm4", "Glm4ForCausalLM", attention_bias=True, partial_rotary_factor=0.75, rms_norm_eps=0.05)
_GLM4_CASE = TinyCase(
    architecture="glm4",
    config=_GLM4,
    shapes=shapes(
        _GLM4,
        **_qkv_bias(_GLM4),
        post_self_attn_layernorm__weight=(72,),
        post_mlp_layernorm__weight=(72,),
        mlp__gate_proj__weight=None,
        mlp__up_proj__weight=None,
        mlp__gate_up_proj__weight=(200, 72),
    ),
    seed=45,
)
_GLM = settings("glm", "GlmForCausalLM", attention_bias=True)
_GLM_CASE = TinyCase(
    architecture="glm",
    config=_GLM,
    shapes=shapes(
        _GLM,
        **_qkv_bias(_GLM),
        mlp__gate_proj__weight=None,
        mlp__up_proj__weight=None,
        mlp__gate_up_proj__weight=(200, 72),
    ),
    seed=47,
)
_ERNIE = settings("ernie4_5", "Ernie4_5ForCausalLM", num_attention_heads=6, num_key_value_heads=2, use_bias=True)
_ERNIE_CASE = TinyCase(
    architecture="ernie4_5", config=_ERNIE, shapes=shapes(_ERNIE, **{**_ALL_BIASES, **_qkv_bias(_ERNIE)}), seed=61
)
_HELIUM = settings("helium", "HeliumForCausalLM", attention_bias=True)
_HELIUM_CASE = TinyCase(architecture="helium", config=_HELIUM, shapes=shapes(_HELIUM, **_qkv_bias(_HELIUM)), seed=90)
_NEMOTRON = settings(
    "nemotron",
    "NemotronForCausalLM",
    rms_norm_eps=None,
    norm_eps=0.05,
    hidden_act="relu2",
    rope_parameters={"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
    attention_bias=True,
    mlp_bias=True,
)
_NEMOTRON_CASE = TinyCase(
    architecture="nemotron",
    config=_NEMOTRON,
    shapes={
        **shapes(
            _NEMOTRON,
            **_qkv_bias(_NEMOTRON),
            self_attn__o_proj__bias=(72,),
            mlp__gate_proj__weight=None,
            mlp__up_proj__bias=(100,),
            mlp__down_proj__bias=(72,),
            input_layernorm__bias=(72,),
            post_attention_layernorm__bias=(72,),
        ),
        "model.norm.bias": (72,),
    },
    seed=91,
    norm_centre=0.0,
)
_NEMOTRON_GGUF = Gguf(
    architecture="nemotron", norm_offset=1.0, metadata={"attention.layer_norm_epsilon": 0.05, "rope.dimension_count": 12}
)
_COHERE = settings(
    "cohere",
    "CohereForCausalLM",
    head_dim=None,
    rms_norm_eps=None,
    layer_norm_eps=0.05,
    logit_scale=0.3,
    tie_word_embeddings=True,
)
_COHERE_CASE = TinyCase(
    architecture="cohere", config=_COHERE, shapes=shapes(_COHERE, post_attention_layernorm__weight=None), seed=52
)
_COHERE_GGUF = Gguf(architecture="command-r", metadata={"attention.layer_norm_epsilon": 0.05, "logit_scale": 0.3})
_COHERE2 = settings(
    "cohere2",
    "Cohere2ForCausalLM",
    num_hidden_layers=4,
    head_dim=None,
    rms_norm_eps=None,
    layer_norm_eps=0.05,
    logit_scale=0.3,
    sliding_window=6,
    layer_types=[_LOCAL, _LOCAL, _LOCAL, _GLOBAL],
    tie_word_embeddings=True,
)
_COHERE2_CASE = TinyCase(
    architecture="cohere2", config=_COHERE2, shapes=shapes(_COHERE2, post_attention_layernorm__weight=None), seed=46
)
_COHERE2_GGUF = Gguf(
    architecture="cohere2", metadata={"attention.layer_norm_epsilon": 0.05, "attention.sliding_window": 6, "logit_scale": 0.3}
)
_ARCEE = settings(
    "arcee",
    "ArceeForCausalLM",
    hidden_act="relu2",
    attention_bias=False,
    mlp_bias=False,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 3000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)
_ARCEE_CASE = TinyCase(architecture="arcee", config=_ARCEE, shapes=shapes(_ARCEE, mlp__gate_proj__weight=None), seed=47)
_ARCEE_GGUF = Gguf(
    architecture="arcee",
    is_interleaved=True,
    metadata={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
)
_EXAONE4 = settings(
    "exaone4",
    "Exaone4ForCausalLM",
    num_hidden_layers=3,
    sliding_window=6,
    sliding_window_pattern=4,
    layer_types=[_LOCAL, _GLOBAL, _LOCAL],
)
_EXAONE4_CASE = TinyCase(
    architecture="exaone4",
    config=_EXAONE4,
    shapes=shapes(_EXAONE4, input_layernorm__weight=None, post_feedforward_layernorm__weight=(72,), **_HEAD_NORMS),
    seed=35,
)
_EXAONE4_GGUF = Gguf(
    architecture="exaone4",
    metadata={"attention.sliding_window": 6, "attention.sliding_window_pattern": [True, False, True]},
)
_SIGMOID_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 1.7}
_SOLAR = settings(
    "solar_open",
    "SolarOpenForCausalLM",
    **_SIGMOID_EXPERTS,
    attention_bias=True,
    n_routed_experts=7,
    n_shared_experts=2,
    norm_topk_prob=False,
)
_SOLAR_CASE = TinyCase(
    architecture="solar_open", config=_SOLAR, shapes=shapes(_SOLAR, **_GLM4_EXPERTS, **_qkv_bias(_SOLAR)), seed=423
)
_DOTS1 = settings(
    "dots1",
    "Dots1ForCausalLM",
    **_SIGMOID_EXPERTS,
    num_hidden_layers=3,
    attention_bias=False,
    n_routed_experts=7,
    n_shared_experts=2,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    sliding_window=6,
    max_window_layers=2,
)
_DOTS1_CASE = TinyCase(architecture="dots1", config=_DOTS1, shapes=_mixed(_DOTS1, _GLM4_EXPERTS, 0, **_HEAD_NORMS), seed=432)
_EXAONE_MOE = settings(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    **_SIGMOID_EXPERTS,
    num_hidden_layers=3,
    num_experts=7,
    num_shared_experts=2,
    norm_topk_prob=True,
    mlp_layer_types=["dense", "sparse", "dense"],
    sliding_window=6,
    layer_types=[_LOCAL, _GLOBAL, _LOCAL],
)
_EXAONE_MOE_CASE = TinyCase(
    architecture="exaone_moe",
    config=_EXAONE_MOE,
    shapes=_mixed(_EXAONE_MOE, _GLM4_EXPERTS, 0, 2, **_HEAD_NORMS),
    seed=441,
)
_AFMOE = settings(
    "afmoe",
    "AfmoeForCausalLM",
    num_hidden_layers=3,
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    num_dense_layers=1,
    num_shared_experts=2,
    route_scale=1.7,
    global_attn_every_n_layers=2,
    sliding_window=6,
    mup_enabled=True,
    rms_norm_eps=0.05,
)
_AFMOE_EXPERTS = {
    **{name: shape for name, shape in _GLM4_EXPERTS.items() if not name.startswith("mlp__gate__")},
    "mlp__router__gate__weight": (7, 72),
    "mlp__expert_bias": (7,),
}
_AFMOE_CASE = TinyCase(
    architecture="afmoe",
    config=_AFMOE,
    shapes=_mixed(
        _AFMOE,
        _AFMOE_EXPERTS,
        0,
        **_HEAD_NORMS,
        self_attn__gate_proj__weight=(72, 72),
        pre_mlp_layernorm__weight=(72,),
        post_mlp_layernorm__weight=(72,),
    ),
    seed=404,
    refused_by={"cuda": "GatedActivation with sigmoid"},
)
_PHI3_CASE = TinyCase(architecture="phi3", config=_PHI3, shapes=_phi3_shapes(_PHI3), seed=31)
_PHI3_LONG_CASE = TinyCase(architecture="phi3", config=_PHI3_LONG, shapes=_phi3_shapes(_PHI3_LONG), seed=32)
_GPT2_CASE = TinyCase(
    architecture="gpt2",
    config=_GPT2,
    shapes=_gpt2_shapes(_GPT2),
    seed=33,
    norm_centre=2.0,
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
)
_GPT2_GGUF_CASE = replace(
    _GPT2_CASE,
    config=_GPT2_OF_GGUF,
    shapes=_gpt2_shapes(_GPT2_OF_GGUF),
    gguf=Gguf(architecture="gpt2", metadata={"attention.layer_norm_epsilon": 0.05}),
)
_GPT_BIGCODE_CASE = TinyCase(
    architecture="gpt_bigcode", config=_GPT_BIGCODE, shapes=_gpt2_shapes(_GPT_BIGCODE), seed=83, norm_centre=2.0
)
_GPT_BIGCODE_GGUF_CASE = replace(
    _GPT_BIGCODE_CASE,
    config=_GPT_BIGCODE_OF_GGUF,
    shapes=_gpt2_shapes(_GPT_BIGCODE_OF_GGUF),
    gguf=Gguf(architecture="starcoder", metadata={"attention.layer_norm_epsilon": 0.05}),
)
_STARCODER2_CASE = TinyCase(
    architecture="starcoder2", config=_STARCODER2, shapes=_starcoder2_shapes(_STARCODER2), seed=34, norm_centre=2.0
)
_STARCODER2_GGUF = Gguf(
    architecture="starcoder2", metadata={"attention.layer_norm_epsilon": 0.05, "attention.sliding_window": 6}
)
_LLAMA_CASE = TinyCase(architecture="llama", config=_GQA, shapes=shapes(_GQA), seed=2)
_LLAMA_GGUF = Gguf(architecture="llama", metadata={}, is_interleaved=True)
_WIDE_CASE = TinyCase(architecture="llama", config=_WIDE, shapes=shapes(_WIDE), seed=5)
_MINISTRAL3_CASE = TinyCase(
    architecture="mistral",
    config=_MINISTRAL3,
    shapes=shapes(_MINISTRAL3),
    seed=12,
)
_MINISTRAL3_GGUF = Gguf(
    architecture="mistral3",
    is_interleaved=True,
    metadata={
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 4.0,
        "rope.scaling.yarn_beta_slow": 0.5,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.6,
    },
)
_SEED_OSS_CASE = TinyCase(
    architecture="seed_oss", config=_SEED_OSS, shapes=shapes(_SEED_OSS, **{**_ALL_BIASES, **_qkv_bias(_SEED_OSS)}), seed=60
)
_SMOLLM3_CASE = TinyCase(architecture="smollm3", config=_SMOLLM3, shapes=shapes(_SMOLLM3), seed=15)
_GRANITE_CASE = TinyCase(
    architecture="granite",
    config=_GRANITE,
    shapes=shapes(_GRANITE),
    seed=16,
)
_GRANITE_GGUF = Gguf(
    architecture="granite",
    is_interleaved=True,
    metadata={"embedding_scale": 3.0, "logit_scale": 2.5, "residual_scale": 0.37, "attention.scale": 0.15},
)


def _olmo_shapes(config: Mapping[str, Any]) -> Shapes:
    return shapes(
        config,
        input_layernorm__weight=None,
        post_feedforward_layernorm__weight=(72,),
        self_attn__q_norm__weight=(72,),
        self_attn__k_norm__weight=(24,),
    )


_HUNYUAN_CASE = TinyCase(
    architecture="hunyuan",
    config=_HUNYUAN,
    shapes=shapes(
        _HUNYUAN,
        **_qkv_bias(_HUNYUAN),
        self_attn__o_proj__bias=(72,),
        self_attn__query_layernorm__weight=(24,),
        self_attn__key_layernorm__weight=(24,),
    ),
    seed=65,
    factors={"query_layernorm.weight": 4.0},  # scores that are large in spite of the epsilon
)
_HUNYUAN_GGUF = Gguf(
    architecture="hunyuan-dense",
    metadata={"rope.freq_base": 3000.0 * 7.0 ** (24 / 22), "rope.scaling.type": "none", "rope.scaling.factor": 1.0},
)
_OLMO2_CASE = TinyCase(
    architecture="olmo2",
    config=_OLMO2,
    shapes=_olmo_shapes(_OLMO2),
    seed=17,
)
_OLMO3_CASE = replace(_OLMO2_CASE, architecture="olmo3", config=_OLMO3, shapes=_olmo_shapes(_OLMO3), seed=64)
_OLMO3_OLD_CASE = replace(_OLMO3_CASE, config=_OLMO3_OLD)
_OLMO3_GGUF = Gguf(
    architecture="olmo2",
    metadata={
        "attention.sliding_window": 6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 4.0,
        "rope.scaling.yarn_beta_slow": 0.5,
        "rope.scaling.yarn_attn_factor": _USUAL_YARN_FACTOR,
    },
)
_GEMMA_CASE = TinyCase(architecture="gemma", config=_GEMMA, shapes=shapes(_GEMMA), seed=62, norm_centre=0.0)
_GEMMA2_CASE = TinyCase(
    architecture="gemma2",
    config=_GEMMA2,
    shapes=shapes(_GEMMA2, **_gemma_norms(_GEMMA2)),
    seed=20,
    norm_centre=0.0,
)
_GEMMA2_GGUF = Gguf(
    architecture="gemma2",
    norm_offset=1.0,
    metadata={"attention.sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
)
_GEMMA3_CASE = TinyCase(
    architecture="gemma3",
    config=_GEMMA3,
    shapes=shapes(_GEMMA3, **_gemma_norms(_GEMMA3), **_HEAD_NORMS),
    seed=21,
    norm_centre=0.0,
)
_GEMMA3_GGUF = Gguf(
    architecture="gemma3",
    norm_offset=1.0,
    metadata={"attention.sliding_window": 6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
)

_GEMMA4 = settings(
    "gemma4_text",
    "Gemma4ForCausalLM",
    num_hidden_layers=4,
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    rms_norm_eps=0.05,
    global_head_dim=40,
    sliding_window=6,
    layer_types=[_LOCAL, _GLOBAL, _LOCAL, _GLOBAL],
    rope_parameters={
        _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.45, "rope_theta": 3000.0},
        _LOCAL: {"rope_type": "default", "rope_theta": 200.0},
    },
    final_logit_softcapping=3.0,
    hidden_size_per_layer_input=0,
)
_GEMMA4_KEYS_AS_VALUES = {**_GEMMA4, "attention_k_eq_v": True, "num_key_value_heads": 3, "num_global_key_value_heads": 1}
_GEMMA4_SHARED = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": [_GLOBAL, _LOCAL, _LOCAL, _LOCAL, _GLOBAL, _GLOBAL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 14,
    "vocab_size_per_layer_input": 263,
}
_GEMMA4_MOE = {
    **_GEMMA4_KEYS_AS_VALUES,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
    "final_logit_softcapping": 1.5,
}
_GEMMA4_UNIFIED = {
    **{key: value for key, value in _GEMMA4_KEYS_AS_VALUES.items() if key != "hidden_size_per_layer_input"},
    "architectures": ["Gemma4UnifiedForCausalLM"],
    "model_type": "gemma4_unified_text",
    "num_hidden_layers": 5,
    "layer_types": [_LOCAL, _GLOBAL, _LOCAL, _LOCAL, _GLOBAL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}


def _gemma4_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, num_layers, num_heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    size, reuses_keys = config.get("hidden_size_per_layer_input", 0), config.get("attention_k_eq_v", False)
    first_shared = num_layers - config.get("num_kv_shared_layers", 0)
    found: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if size:
        found["model.embed_tokens_per_layer.weight"] = (config["vocab_size"], num_layers * size)
        found["model.per_layer_model_projection.weight"] = (num_layers * size, hidden)
        found["model.per_layer_projection_norm.weight"] = (size,)
    for number, kind in enumerate(config["layer_types"]):
        is_global, is_shared = kind == _GLOBAL, number >= first_shared
        head_dim = config["global_head_dim" if is_global else "head_dim"]
        kv_heads = config["num_global_key_value_heads" if reuses_keys and is_global else "num_key_value_heads"]
        inner = config["intermediate_size"] * (2 if is_shared and config.get("use_double_wide_mlp") else 1)
        layer: dict[str, tuple[int, ...] | None] = {
            "self_attn.q_proj.weight": (num_heads * head_dim, hidden),
            "self_attn.o_proj.weight": (hidden, num_heads * head_dim),
            "self_attn.q_norm.weight": (head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "layer_scalar": (1,),
        }
        if not is_shared:
            layer |= {"self_attn.k_proj.weight": (kv_heads * head_dim, hidden), "self_attn.k_norm.weight": (head_dim,)}
        if not is_shared and not (reuses_keys and is_global):
            layer["self_attn.v_proj.weight"] = (kv_heads * head_dim, hidden)
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        if size:
            layer |= {
                "per_layer_input_gate.weight": (size, hidden),
                "per_layer_projection.weight": (hidden, size),
                "post_per_layer_input_norm.weight": (hidden,),
            }
        layer |= {f"{name}_layernorm.weight": (hidden,) for name in norms}
        if config.get("enable_moe_block"):
            num, width = config["num_experts"], config["moe_intermediate_size"]
            names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
            layer |= {f"{name}.weight": (hidden,) for name in names}
            layer |= {
                "router.proj.weight": (num, hidden),
                "router.scale": (hidden,),
                "router.per_expert_scale": (num,),
                "experts.gate_up_proj": (num, 2 * width, hidden),
                "experts.down_proj": (num, hidden, width),
            }
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items() if shape is not None}
    return found


def _gemma4(config: Mapping[str, Any], seed: int) -> TinyCase:
    return TinyCase(
        architecture=config["model_type"].removesuffix("_text"),
        config=config,
        shapes=_gemma4_shapes(config),
        seed=seed,
        factors={"layer_scalar": 4.0, "router.scale": 20.0, "per_expert_scale": 1.5, "_norm.weight": 0.5},
        refused_by={"cuda": "several shapes"},
    )


_GEMMA4_GGUF: Mapping[str, Any] = {
    "attention.sliding_window": 6,
    "attention.key_length": 40,
    "attention.value_length": 40,
    "attention.key_length_swa": 24,
    "attention.value_length_swa": 24,
    "rope.dimension_count": 40,
    "rope.dimension_count_swa": 24,
    "rope.freq_base": 3000.0,
    "rope.freq_base_swa": 200.0,
}
_GEMMA4_FACTORS = {"rope_freqs.weight": (1.0,) * 9 + (1e30,) * 11}
_GEMMA4_SHARED_CASE = _gemma4(_GEMMA4_SHARED, seed=177)
_GEMMA4_MOE_CASE = _gemma4(_GEMMA4_MOE, seed=204)
_GEMMA4_UNIFIED_CASE = _gemma4(_GEMMA4_UNIFIED, seed=221)
_GEMMA4_CASES = {
    "gemma4": _gemma4(_GEMMA4, seed=160),
    "gemma4_keys_as_values": _gemma4(_GEMMA4_KEYS_AS_VALUES, seed=161),
    "gemma4_shared": _GEMMA4_SHARED_CASE,
    "gemma4_moe": _GEMMA4_MOE_CASE,
    "gemma4_moe_per_expert": replace(_GEMMA4_MOE_CASE, experts="experts.{}.{}.weight", golden="gemma4_moe"),
    "gemma4_of_pictures": replace(
        _GEMMA4_SHARED_CASE,
        wrapper={"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": {}},
        golden="gemma4_shared",
    ),
    "gemma4_unified": _GEMMA4_UNIFIED_CASE,
    "gemma4_unified_of_pictures": replace(
        _GEMMA4_UNIFIED_CASE,
        wrapper={
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "vision_config": {},
        },
        golden="gemma4_unified",
    ),
    "gemma4_gguf": replace(
        _GEMMA4_SHARED_CASE,
        gguf=Gguf(
            architecture="gemma4",
            metadata={
                **_GEMMA4_GGUF,
                "attention.sliding_window_pattern": [kind == _LOCAL for kind in _GEMMA4_SHARED["layer_types"]],
                "attention.shared_kv_layers": 3,
                "feed_forward_length": [100, 100, 100, 200, 200, 200],
                "embedding_length_per_layer_input": 14,
                "final_logit_softcapping": 3.0,
            },
            vectors=_GEMMA4_FACTORS,
        ),
        golden="gemma4_shared",
    ),
    "gemma4_moe_gguf": replace(
        _GEMMA4_MOE_CASE,
        gguf=Gguf(
            architecture="gemma4",
            metadata={
                **_GEMMA4_GGUF,
                "attention.head_count_kv": [3, 1, 3, 1],
                "attention.sliding_window_pattern": [True, False, True, False],
                "expert_count": 7,
                "expert_used_count": 3,
                "expert_feed_forward_length": 40,
                "final_logit_softcapping": 1.5,
            },
            vectors=_GEMMA4_FACTORS,
        ),
        golden="gemma4_moe",
    ),
}

GPT_OSS = settings(
    "gpt_oss",
    "GptOssForCausalLM",
    num_hidden_layers=3,
    num_local_experts=7,
    num_experts_per_tok=3,
    intermediate_size=40,
    sliding_window=6,
    layer_types=[_LOCAL, _GLOBAL, _LOCAL],
    attention_bias=True,
    swiglu_limit=7.0,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 3000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
)
GPT_OSS_TRANSPOSED = ("experts.gate_up_proj", "experts.down_proj")
GPT_OSS_FACTORS = {"experts.gate_up_proj": 3.0, "experts.down_proj": 0.3}
"""With these, some gates and their partners are beyond 7."""
_WIDE_GPT_OSS = {**GPT_OSS, "hidden_size": 96, "intermediate_size": 64}


def gpt_oss_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return shapes(
        config,
        **_qkv_bias(config),
        **dict.fromkeys(("mlp__gate_proj__weight", "mlp__up_proj__weight", "mlp__down_proj__weight")),
        self_attn__o_proj__bias=(hidden,),
        self_attn__sinks=(3,),
        mlp__router__weight=(7, hidden),
        mlp__router__bias=(7,),
        mlp__experts__gate_up_proj=(7, hidden, 2 * inner),
        mlp__experts__gate_up_proj_bias=(7, 2 * inner),
        mlp__experts__down_proj=(7, inner, hidden),
        mlp__experts__down_proj_bias=(7, hidden),
    )


_GPT_OSS_CASE = TinyCase(
    architecture="gpt_oss",
    config=GPT_OSS,
    shapes=gpt_oss_shapes(GPT_OSS),
    seed=43,
    transposed=GPT_OSS_TRANSPOSED,
    factors=GPT_OSS_FACTORS,
)
_MXFP4_CASE = replace(_GPT_OSS_CASE, config=_WIDE_GPT_OSS, shapes=gpt_oss_shapes(_WIDE_GPT_OSS), has_mxfp4_experts=True)
_GPT_OSS_GGUF = Gguf(
    architecture="gpt-oss",
    metadata={
        **_GGUF_EXPERTS,
        "expert_feed_forward_length": 40,
        "attention.sliding_window": 6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 4.0,
        "rope.scaling.yarn_beta_slow": 0.5,
    },
)
_MXFP4_GGUF = replace(_GPT_OSS_GGUF, metadata={**_GPT_OSS_GGUF.metadata, "expert_feed_forward_length": 64})

_LFM2 = settings(
    "lfm2",
    "Lfm2ForCausalLM",
    num_hidden_layers=4,
    head_dim=None,
    hidden_act=None,
    rms_norm_eps=None,
    norm_eps=0.05,
    tie_word_embeddings=True,
    layer_types=["conv", "full_attention", "conv", "conv"],
    conv_L_cache=3,
    conv_bias=False,
    block_auto_adjust_ff_dim=True,
    block_multiple_of=10,
    block_ffn_dim_multiplier=1.3,
)
_LFM2_OLD = {
    **{key: value for key, value in _LFM2.items() if key not in ("layer_types", "intermediate_size", "tie_word_embeddings")},
    "full_attn_idxs": [0, 2],
    "block_ff_dim": 60,
    "block_auto_adjust_ff_dim": False,
    "conv_bias": True,
    "conv_L_cache": 4,
    "tie_embedding": False,
    "rope_parameters": None,
    "rope_theta": 3000.0,
}


def _lfm2_shapes(config: Mapping[str, Any], *, attending: tuple[int, ...], inner: int, is_tied: bool = True) -> Shapes:
    hidden, kernel = config["hidden_size"], config["conv_L_cache"]
    head_dim = hidden // config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] * head_dim
    attention: Shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.out_proj.weight": (hidden, hidden),
        "self_attn.q_layernorm.weight": (head_dim,),
        "self_attn.k_layernorm.weight": (head_dim,),
    }
    conv: Shapes = {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, kernel),
        "conv.out_proj.weight": (hidden, hidden),
    }
    if config["conv_bias"]:
        conv |= {"conv.in_proj.bias": (3 * hidden,), "conv.conv.bias": (hidden,), "conv.out_proj.bias": (hidden,)}
    mlp: Shapes = {
        "operator_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "feed_forward.w1.weight": (inner, hidden),
        "feed_forward.w3.weight": (inner, hidden),
        "feed_forward.w2.weight": (hidden, inner),
    }
    found: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors = {**mlp, **(attention if layer in attending else conv)}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}
    return {**found, "model.embedding_norm.weight": (hidden,), **({} if is_tied else {"lm_head.weight": (263, hidden)})}


_LFM2_CASE = TinyCase(
    architecture="lfm2",
    config=_LFM2,
    shapes=_lfm2_shapes(_LFM2, attending=(1,), inner=90),
    seed=42,
    refused_by={"cuda": "ShortConv"},
)
_LFM2_OLD_CASE = replace(
    _LFM2_CASE, config=_LFM2_OLD, shapes=_lfm2_shapes(_LFM2_OLD, attending=(0, 2), inner=60, is_tied=False), seed=43
)
_LFM2_MOE = {
    **{key: value for key, value in _LFM2.items() if not key.startswith("block_")},
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "num_dense_layers": 3,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "use_expert_bias": True,
}


def _lfm2_moe_shapes(config: Mapping[str, Any]) -> Shapes:
    """The last layers have experts instead of an MLP."""
    found, hidden = _lfm2_shapes(config, attending=(1,), inner=config["intermediate_size"]), config["hidden_size"]
    for layer in range(config["num_dense_layers"], config["num_hidden_layers"]):
        at = f"model.layers.{layer}.feed_forward"
        for name in ("w1", "w2", "w3"):
            del found[f"{at}.{name}.weight"]
        found |= {
            f"{at}.gate.weight": (7, hidden),
            f"{at}.expert_bias": (7,),
            f"{at}.experts.gate_up_proj": (7, 80, hidden),
            f"{at}.experts.down_proj": (7, hidden, 40),
        }
    return found


_LFM2_MOE_CASE = TinyCase(
    architecture="lfm2_moe",
    config=_LFM2_MOE,
    shapes=_lfm2_moe_shapes(_LFM2_MOE),
    seed=74,
    refused_by={"cuda": "ShortConv"},
)
_LFM2_MOE_GGUF = Gguf(
    architecture="lfm2moe",
    metadata={
        **_GGUF_EXPERTS,
        "attention.head_count_kv": [0, 1, 0, 0],
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 3,
        "expert_feed_forward_length": 40,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.7,
    },
)
_LFM2_GGUF = Gguf(
    architecture="lfm2",
    metadata={"attention.head_count_kv": [0, 1, 0, 0], "shortconv.l_cache": 3, "feed_forward_length": 90},
)

_NET = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
}
_LINEAR_ATTENTION = "linear_attention"
_QWEN3_5 = settings(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    num_hidden_layers=4,
    rms_norm_eps=0.05,
    layer_types=[_LINEAR_ATTENTION, _GLOBAL, _LINEAR_ATTENTION, _LINEAR_ATTENTION],
    **_NET,
)
_SHARED_BY_QWENS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
_QWEN3_5_MOE = {
    **_QWEN3_5,
    **_SHARED_BY_QWENS,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 3,
    "layer_types": [_LINEAR_ATTENTION, _LINEAR_ATTENTION, _GLOBAL],
}
_QWEN3_NEXT = settings(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    num_hidden_layers=4,
    rms_norm_eps=0.05,
    full_attention_interval=3,
    norm_topk_prob=False,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
    **_NET,
    **_SHARED_BY_QWENS,
)
_QWEN3_NEXT_OF_GGUF = {**_QWEN3_NEXT, "norm_topk_prob": True, "mlp_only_layers": []}


def _with_nets(config: Mapping[str, Any], found: Shapes, *linear: int) -> Shapes:
    """The tensors of a Qwen with a delta net in the layers `linear`, and gated attention in the others."""
    hidden = config["hidden_size"]
    keys, values = config["linear_num_key_heads"] * 10, config["linear_num_value_heads"] * 14
    heads = config["linear_num_value_heads"]
    joint = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    if config["model_type"] == "qwen3_next":
        joint = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    net: Shapes = {
        **{f"{name}.weight": (width, hidden) for name, width in joint.items()},
        "conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm.weight": (14,),
        "out_proj.weight": (hidden, values),
    }
    nets = {f"model.layers.{layer}.linear_attn.{name}": shape for layer in linear for name, shape in net.items()}
    ours = {
        name: shape
        for name, shape in found.items()
        if name.split(".self_attn.")[0] not in {f"model.layers.{i}" for i in linear}
    }
    queries = config["num_attention_heads"] * config["head_dim"]
    gated = {name: (2 * queries, hidden) for name in ours if name.endswith("q_proj.weight")}
    return {**ours, **gated, **nets}


_QWEN_EXPERTS = {
    **_experts(_QWEN3_NEXT, 40),
    **_shared(_QWEN3_NEXT, "shared_expert", 56),
    "mlp__shared_expert_gate__weight": (1, 72),
}
_QWEN3_5_CASE = TinyCase(
    architecture="qwen3_5",
    config=_QWEN3_5,
    shapes=_with_nets(_QWEN3_5, shapes(_QWEN3_5, **_HEAD_NORMS), 0, 2, 3),
    seed=120,
    norm_centre=0.0,
    num_tokens=100,
    refused_by={"cuda": "CausalConv"},
)
_QWEN3_5_MOE_CASE = replace(
    _QWEN3_5_CASE,
    architecture="qwen3_5_moe",
    config=_QWEN3_5_MOE,
    shapes=_with_nets(_QWEN3_5_MOE, shapes(_QWEN3_5_MOE, **_HEAD_NORMS, **_QWEN_EXPERTS), 0, 1),
    seed=126,
)
_QWEN3_NEXT_CASE = replace(
    _QWEN3_5_CASE,
    architecture="qwen3_next",
    config=_QWEN3_NEXT,
    shapes=_with_nets(_QWEN3_NEXT, _mixed(_QWEN3_NEXT, _QWEN_EXPERTS, 1, **_HEAD_NORMS), 0, 1, 3),
    seed=149,
)
_QWEN3_NEXT_GGUF_CASE = replace(
    _QWEN3_NEXT_CASE,
    config=_QWEN3_NEXT_OF_GGUF,
    shapes=_with_nets(_QWEN3_NEXT_OF_GGUF, shapes(_QWEN3_NEXT_OF_GGUF, **_HEAD_NORMS, **_QWEN_EXPERTS), 0, 1, 3),
    seed=137,
)
_NET_IN_GGUF = {
    "ssm.conv_kernel": 3,
    "ssm.state_size": 10,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 84,
    "rope.dimension_count": 12,
}
_QWEN_EXPERTS_IN_GGUF = {**_GGUF_EXPERTS, "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 56}
_QWEN3_5_GGUF = Gguf(
    architecture="qwen35",
    norm_offset=1.0,
    metadata={
        **_NET_IN_GGUF,
        "attention.recurrent_layers": [True, False, True, True],
        "rope.dimension_sections": [11, 11, 10, 0],
    },
)
_QWEN3_5_MOE_GGUF = replace(
    _QWEN3_5_GGUF,
    architecture="qwen35moe",
    metadata={
        **_NET_IN_GGUF,
        **_QWEN_EXPERTS_IN_GGUF,
        "full_attention_interval": 3,
        "feed_forward_length": None,
        "rope.dimension_sections": [11, 11, 10, 0],
    },
)
_QWEN3_NEXT_GGUF = replace(
    _QWEN3_5_GGUF,
    architecture="qwen3next",
    metadata={**_NET_IN_GGUF, **_QWEN_EXPERTS_IN_GGUF, "full_attention_interval": 3},
)
_QWEN3_5_WRAPPER = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {"depth": 1},
    "tie_word_embeddings": False,
}

_OLMO_HYBRID = settings(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    num_hidden_layers=4,
    head_dim=None,
    rms_norm_eps=0.05,
    layer_types=[_LINEAR_ATTENTION, _GLOBAL, _LINEAR_ATTENTION, _LINEAR_ATTENTION],
    **{**_NET, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
)
_OLD_OLMO_HYBRID = {
    **{key: value for key, value in _OLMO_HYBRID.items() if not key.startswith(("linear_", "layer_types"))},
    "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
    "linear_allow_neg_eigval": False,
}


def _olmo_hybrid_shapes(config: Mapping[str, Any], keys: int, values: int, heads: int, *linear: int) -> Shapes:
    """Keys and values of a delta net have so many columns together, its values so many heads."""
    found: Shapes = {}
    net = {
        **{f"{name}_proj.weight": (keys, 72) for name in "qk"},
        **{f"{name}_proj.weight": (values, 72) for name in "vg"},
        **{f"{name}_proj.weight": (heads, 72) for name in "ab"},
        "o_proj.weight": (72, values),
        "conv1d.weight": (2 * keys + values, 1, config.get("linear_conv_kernel_dim", 4)),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "o_norm.weight": (values // heads,),
    }
    for name, shape in shapes(config, self_attn__q_norm__weight=(72,), self_attn__k_norm__weight=(24,)).items():
        at = name.split(".")[2] if name.startswith("model.layers.") else ""
        if at and int(at) not in linear:
            found[name.replace("input_layernorm", "post_feedforward_layernorm")] = shape
        elif ".self_attn.q_proj." in name:
            found |= {f"model.layers.{at}.linear_attn.{part}": size for part, size in net.items()}
        elif ".self_attn." not in name:
            found[name] = shape
    return found


_OLMO_HYBRID_CASE = TinyCase(
    architecture="olmo_hybrid",
    config=_OLMO_HYBRID,
    shapes=_olmo_hybrid_shapes(_OLMO_HYBRID, 20, 84, 6, 0, 2, 3),
    factors={"linear_attn.v_proj.weight": 0.03},  # beside which the own epsilon of the norm, 1e-5, matters
    seed=220,
    num_tokens=100,
    refused_by={"cuda": "CausalConv"},
)

_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 24,
    "mamba_n_groups": 1,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GRANITE_HYBRID = settings(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    num_hidden_layers=3,
    num_local_experts=7,
    num_experts_per_tok=3,
    intermediate_size=40,
    shared_intermediate_size=56,
    head_dim=None,
    rms_norm_eps=0.05,
    embedding_multiplier=3.0,
    attention_multiplier=0.3,
    residual_multiplier=0.5,
    logits_scaling=2.0,
    position_embedding_type="nope",
    layer_types=["mamba", "attention", "mamba"],
    **_MAMBA,
)
_GRANITE_DENSE = {
    **_GRANITE_HYBRID,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "rope",
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "time_step_limit": [0.3, 0.9],
}
_GRANITE_DENSE_OF_GGUF = {**_GRANITE_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0}
_BAMBA = settings(
    "bamba",
    "BambaForCausalLM",
    num_hidden_layers=3,
    head_dim=None,
    attn_layer_indices=[2],
    rms_norm_eps=0.05,
    **_MAMBA,
)


def _with_mamba(config: Mapping[str, Any], found: Shapes, *layers: int) -> Shapes:
    """The tensors of a hybrid with Mamba-2 in these layers."""
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm", 2 * hidden)
    joint = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    mamba: Shapes = {
        "in_proj.weight": (inner + joint + heads, hidden),
        "conv1d.weight": (joint, 1, config["mamba_d_conv"]),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }
    if config.get("mamba_proj_bias"):
        mamba |= {"in_proj.bias": (inner + joint + heads,), "out_proj.bias": (hidden,)}
    if config.get("mamba_conv_bias", True):
        mamba["conv1d.bias"] = (joint,)
    if not config.get("mamba_rms_norm", True):
        del mamba["norm.weight"]
    at = {f"model.layers.{layer}" for layer in layers}
    is_beside = config["model_type"] == "falcon_h1"
    ours = {name: shape for name, shape in found.items() if is_beside or name.split(".self_attn.")[0] not in at}
    return ours | {f"{prefix}.mamba.{name}": shape for prefix in sorted(at) for name, shape in mamba.items()}


def _as_bamba(found: Shapes) -> Shapes:
    """Norms and MLPs by the names that Bamba and Falcon H1 have for them."""
    return {
        {"model.norm.weight": "model.final_layernorm.weight"}.get(name, name)
        .replace(".post_attention_layernorm.", ".pre_ff_layernorm.")
        .replace(".mlp.", ".feed_forward."): shape
        for name, shape in found.items()
    }


_SHARED_MLP = {"shared_mlp__input_linear__weight": (112, 72), "shared_mlp__output_linear__weight": (72, 56)}
_NO_MLP = dict.fromkeys(f"mlp__{name}_proj__weight" for name in ("gate", "up", "down"))
_GRANITE_HYBRID_CASE = TinyCase(
    architecture="granite_hybrid",
    config=_GRANITE_HYBRID,
    shapes=_with_mamba(
        _GRANITE_HYBRID, shapes(_GRANITE_HYBRID, **{**_experts(_GRANITE_HYBRID, 40), **_GRANITE_EXPERTS, **_SHARED_MLP}), 0, 2
    ),
    seed=130,
    num_tokens=100,
    refused_by={"cuda": "CausalConv"},
)
_GRANITE_DENSE_CASE = replace(
    _GRANITE_HYBRID_CASE,
    config=_GRANITE_DENSE,
    shapes=_with_mamba(_GRANITE_DENSE, shapes(_GRANITE_DENSE, **_NO_MLP, **_SHARED_MLP), 0, 2),
)
_GRANITE_DENSE_GGUF_CASE = replace(
    _GRANITE_DENSE_CASE,
    config=_GRANITE_DENSE_OF_GGUF,
    shapes=_with_mamba(_GRANITE_DENSE_OF_GGUF, shapes(_GRANITE_DENSE_OF_GGUF, **_NO_MLP, **_SHARED_MLP), 0, 2),
)
_BAMBA_CASE = TinyCase(
    architecture="bamba",
    config=_BAMBA,
    shapes=_as_bamba(_with_mamba(_BAMBA, shapes(_BAMBA), 0, 1)),
    seed=131,
    num_tokens=100,
    refused_by={"cuda": "CausalConv"},
)
_FALCON_H1 = settings(
    "falcon_h1",
    "FalconH1ForCausalLM",
    rms_norm_eps=0.05,
    **{**_MAMBA, "mamba_d_head": 14, "mamba_n_groups": 2},
    mamba_d_ssm=84,
    mamba_rms_norm=False,
    embedding_multiplier=4.0,
    lm_head_multiplier=0.5,
    key_multiplier=0.5,
    attention_in_multiplier=2.0,
    attention_out_multiplier=0.5,
    ssm_in_multiplier=2.0,
    ssm_out_multiplier=0.5,
    ssm_multipliers=[0.5, 0.25, 2.0, 0.5, 0.25],
    mlp_multipliers=[2.0, 0.5],
)
"""Factors are powers of two: the GGUF file's matrices, multiplied by them, have the same bits; so have keys and values, which
transformers multiplies before they are rounded.
"""
_NORMED_FALCON_H1 = {
    **_FALCON_H1,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_conv_bias": False,
    "time_step_limit": [0.3, 0.9],
    "embedding_multiplier": 3.7,
    "ssm_in_multiplier": 1.4,
    "ssm_multipliers": [0.35, 1.25, 1.7, 0.5, 1.8],
    "mlp_multipliers": [0.9, 0.6],
}
_FALCON_H1_CASE = TinyCase(
    architecture="falcon_h1",
    config=_FALCON_H1,
    shapes=_as_bamba(_with_mamba(_FALCON_H1, shapes(_FALCON_H1), 0, 1)),
    seed=162,
    num_tokens=100,
    refused_by={"cuda": "Scale"},
)
_NORMED_FALCON_H1_CASE = replace(
    _FALCON_H1_CASE,
    config=_NORMED_FALCON_H1,
    shapes=_as_bamba(_with_mamba(_NORMED_FALCON_H1, shapes(_NORMED_FALCON_H1), 0, 1)),
    seed=165,
)
_FALCON_H1_GGUF = Gguf(
    architecture="falcon-h1",
    metadata={
        "ssm.conv_kernel": 3,
        "ssm.state_size": 10,
        "ssm.group_count": 2,
        "ssm.inner_size": 84,
        "ssm.time_step_rank": 6,
        "rope.dimension_count": None,
    },
)
_MAMBA_IN_GGUF = {
    **_GGUF_GRANITE,
    "attention.head_count_kv": [0, 1, 0],
    "ssm.conv_kernel": 3,
    "ssm.state_size": 10,
    "ssm.group_count": 1,
    "ssm.inner_size": 144,
    "ssm.time_step_rank": 6,
    "rope.scaling.finetuned": False,
    "expert_shared_feed_forward_length": 56,
}
_GRANITE_HYBRID_GGUF = Gguf(architecture="granitehybrid", is_interleaved=True, metadata={**_MAMBA_IN_GGUF, **_GGUF_EXPERTS})

_NEMOTRON_H = settings(
    "nemotron_h",
    "NemotronHForCausalLM",
    num_hidden_layers=None,
    rms_norm_eps=None,
    hidden_act=None,
    rope_parameters=None,
    layer_norm_epsilon=0.05,
    hybrid_override_pattern="M*-M-",
    mamba_num_heads=6,
    mamba_head_dim=14,
    n_groups=2,
    ssm_state_size=10,
    conv_kernel=3,
    chunk_size=8,
    mlp_hidden_act="relu2",
)
_NEMOTRON_H_MOE = {
    **_NEMOTRON_H,
    "hybrid_override_pattern": "EM*E-",
    "use_conv_bias": False,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.7,
}
_NEMOTRON_H_MOE_OF_GGUF = {**_NEMOTRON_H_MOE, "hybrid_override_pattern": "EM*E", "norm_topk_prob": False}


def _nemotron_h_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, heads, inner, width = config["hidden_size"], config["mamba_num_heads"], 84, config["intermediate_size"]
    joint = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    kinds: dict[str, Shapes] = {
        "M": {
            "in_proj.weight": (inner + joint + heads, hidden),
            "conv1d.weight": (joint, 1, config["conv_kernel"]),
            **({"conv1d.bias": (joint,)} if config.get("use_conv_bias", True) else {}),
            "dt_bias": (heads,),
            "A_log": (heads,),
            "D": (heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        },
        "*": {
            "q_proj.weight": (72, hidden),
            **{f"{name}_proj.weight": (24, hidden) for name in "kv"},
            "o_proj.weight": (hidden, 72),
        },
        "-": {"up_proj.weight": (width, hidden), "down_proj.weight": (hidden, width)},
        "E": {
            "gate.weight": (7, hidden),
            "gate.e_score_correction_bias": (7,),
            "experts.up_proj": (7, 40, hidden),
            "experts.down_proj": (7, hidden, 40),
            "shared_experts.up_proj.weight": (56, hidden),
            "shared_experts.down_proj.weight": (hidden, 56),
        },
    }
    found: Shapes = {"model.embeddings.weight": (config["vocab_size"], hidden)}
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        found[f"model.layers.{layer}.norm.weight"] = (hidden,)
        found |= {f"model.layers.{layer}.mixer.{name}": shape for name, shape in kinds[kind].items()}
    return {**found, "model.norm_f.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


_MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 263,
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 24,
    "state_size": 10,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 8,
    "layer_norm_epsilon": 0.05,
    "use_bias": True,
    "time_step_limit": [0.3, 0.9],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAMBA2_MIXER = {
    "norm.weight": (72,),
    "mixer.in_proj.weight": (334, 72),
    "mixer.in_proj.bias": (334,),
    "mixer.conv1d.weight": (184, 1, 3),
    "mixer.conv1d.bias": (184,),
    **{f"mixer.{name}": (6,) for name in ("dt_bias", "A_log", "D")},
    "mixer.norm.weight": (144,),
    "mixer.out_proj.weight": (72, 144),
    "mixer.out_proj.bias": (72,),
}
_MAMBA2_CASE = TinyCase(
    architecture="mamba2",
    config=_MAMBA2,
    shapes={
        "backbone.embeddings.weight": (263, 72),
        **{f"backbone.layers.{layer}.{name}": shape for layer in range(3) for name, shape in _MAMBA2_MIXER.items()},
        "backbone.norm_f.weight": (72,),
        "lm_head.weight": (263, 72),
    },
    seed=190,
    num_tokens=100,
    refused_by={"cuda": "CausalConv"},
)
_NEMOTRON_H_CASE = TinyCase(
    architecture="nemotron_h",
    config=_NEMOTRON_H,
    shapes=_nemotron_h_shapes(_NEMOTRON_H),
    seed=180,
    num_tokens=100,
    refused_by={"cuda": "CausalConv"},
)
_NEMOTRON_H_MOE_CASE = replace(
    _NEMOTRON_H_CASE,
    config=_NEMOTRON_H_MOE,
    shapes=_nemotron_h_shapes(_NEMOTRON_H_MOE),
    seed=181,
    refused_by={"cuda": "Experts without gate"},
)
_NEMOTRON_H_GGUF = Gguf(
    architecture="nemotron_h",
    is_interleaved=True,
    metadata={
        "attention.head_count_kv": [0, 1, 0, 0, 0],
        "feed_forward_length": [0, 0, 100, 0, 100],
        "ssm.conv_kernel": 3,
        "ssm.state_size": 10,
        "ssm.group_count": 2,
        "ssm.inner_size": 84,
        "ssm.time_step_rank": 6,
        "rope.scaling.finetuned": False,
    },
)
_NEMOTRON_H_MOE_GGUF = replace(
    _NEMOTRON_H_GGUF,
    architecture="nemotron_h_moe",
    metadata={
        **_NEMOTRON_H_GGUF.metadata,
        **_GGUF_EXPERTS,
        "attention.head_count_kv": [0, 0, 1, 0],
        "feed_forward_length": [40, 0, 0, 40],
        "expert_feed_forward_length": 40,
        "expert_shared_feed_forward_length": 56,
        "expert_weights_norm": False,
        "expert_weights_scale": 1.7,
        "expert_group_count": 1,
    },
)


def _latent_settings(model_type: str, hf_class: str, **changes: Any) -> dict[str, Any]:
    """Three heads, whose latents of 40 columns are no whole groups of 32, and nine experts in three groups."""
    shared = {
        "num_key_value_heads": 3,
        "head_dim": None,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 22,
        "qk_rope_head_dim": 12,
        "v_head_dim": 26,
        "q_lora_rank": 36,
        "n_routed_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "n_group": 3,
        "topk_group": 2,
    }
    return settings(model_type, hf_class, **{**shared, **changes})


def _latent_shapes(config: Mapping[str, Any], *dense: int) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    still, turning, values = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    queries, num, width = heads * (still + turning), config.get("n_routed_experts", 0), config.get("moe_intermediate_size", 0)
    attention: dict[str, tuple[int, ...] | None] = {
        **dict.fromkeys(f"self_attn__{name}_proj__weight" for name in "kv"),
        "self_attn__q_proj__weight": (queries, hidden),
        "self_attn__kv_a_proj_with_mqa__weight": (rank + turning, hidden),
        "self_attn__kv_a_layernorm__weight": (rank,),
        "self_attn__kv_b_proj__weight": (heads * (still + values), rank),
        "self_attn__o_proj__weight": (hidden, heads * values),
    }
    if between := config.get("q_lora_rank"):
        attention |= {
            "self_attn__q_proj__weight": None,
            "self_attn__q_a_proj__weight": (between, hidden),
            "self_attn__q_a_layernorm__weight": (between,),
            "self_attn__q_b_proj__weight": (queries, between),
        }
    if not num:
        return shapes(config, **attention)
    experts: dict[str, tuple[int, ...] | None] = {
        **_experts(config, width),
        **_shared(config, "shared_experts", width * config["n_shared_experts"]),
        "mlp__gate__weight": (num, hidden),
        "mlp__experts__gate_up_proj": (num, 2 * width, hidden),
        "mlp__experts__down_proj": (num, hidden, width),
    }
    if config["model_type"] != "deepseek_v2":
        experts["mlp__gate__e_score_correction_bias"] = (num,)
    return _mixed(config, experts, *dense, **attention)


_LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 8.0,
    "mscale": 0.5,
    "mscale_all_dim": 1.2,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "original_max_position_embeddings": 32,
}
_DEEPSEEK_V2 = _latent_settings(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    num_hidden_layers=3,
    first_k_dense_replace=2,
    topk_method="group_limited_greedy",
    rope_parameters=_LATENT_YARN,
)
_DEEPSEEK_V2_LITE = {
    **{key: value for key, value in _DEEPSEEK_V2.items() if key not in ("n_group", "topk_group", "rope_parameters")},
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "q_lora_rank": None,
    "rope_theta": 3000.0,
}
_DEEPSEEK_V3 = _latent_settings(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    first_k_dense_replace=1,
    norm_topk_prob=True,
    num_nextn_predict_layers=0,
    rope_parameters={**_LATENT_YARN, "mscale_all_dim": 0.5, "mscale": 0.5},
)
_MOONLIGHT = {
    **_DEEPSEEK_V3,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "norm_topk_prob": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
_GLM4_MOE_LITE = _latent_settings(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    num_hidden_layers=3,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    mlp_layer_types=["dense", "sparse", "dense"],
)
_YOUTU = _latent_settings(
    "youtu",
    "YoutuForCausalLM",
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")),
    **dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group")),
    tie_word_embeddings=True,
    rope_parameters={**_LATENT_YARN, "mscale": 1.2},
)
_MINICPM3 = settings(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    num_key_value_heads=3,
    head_dim=None,
    kv_lora_rank=40,
    qk_nope_head_dim=22,
    qk_rope_head_dim=12,
    v_head_dim=26,
    q_lora_rank=36,
    tie_word_embeddings=True,
    rms_norm_eps=0.05,
    scale_emb=3.0,
    scale_depth=0.9,
    dim_model_base=24,
)


def _latent_case(config: Mapping[str, Any], *dense: int, seed: int) -> TinyCase:
    return TinyCase(
        architecture=config["model_type"],
        config=config,
        shapes=_latent_shapes(config, *dense),
        seed=seed,
        refused_by={"cuda": "latent attention"},
    )


_DEEPSEEK_V2_LITE_CASE = _latent_case(_DEEPSEEK_V2_LITE, 0, seed=301)
_DEEPSEEK_V3_CASE = _latent_case(_DEEPSEEK_V3, 0, seed=311)
_LATENTS_IN_GGUF: Mapping[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 52,
    "attention.value_length": 40,
    "attention.key_length_mla": 34,
    "attention.value_length_mla": 26,
    "attention.kv_lora_rank": 40,
    "attention.q_lora_rank": 36,
    "rope.dimension_count": 12,
    "leading_dense_block_count": 1,
    "expert_count": 9,
    "expert_used_count": 4,
    "expert_feed_forward_length": 40,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 3,
    "expert_group_used_count": 2,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "rope.scaling.yarn_log_multiplier": 0.05,
}
_NOT_IN_OLD_GGUF: Mapping[str, Any] = {
    "attention.head_count_kv": 3,
    "attention.key_length": 34,
    "attention.value_length": 26,
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank")),
    **dict.fromkeys(("expert_weights_norm", "expert_gating_func", "expert_group_count", "expert_group_used_count")),
    **dict.fromkeys(name for name in _LATENTS_IN_GGUF if name.startswith("rope.scaling.")),
}
_LATENT_Q8 = {
    **_DEEPSEEK_V2_LITE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "kv_lora_rank": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
}
_LATENT_Q8_CASE = replace(
    _latent_case(_LATENT_Q8, 0, 1, seed=305),
    gguf=Gguf(
        architecture="deepseek2",
        matrix_type="Q8_0",
        metadata={
            **_LATENTS_IN_GGUF,
            **_NOT_IN_OLD_GGUF,
            "attention.value_length": 32,
            "attention.kv_lora_rank": 64,
            "leading_dense_block_count": 2,
        },
        is_old=True,
    ),
)
_LATENT_CASES = {
    "deepseek_v2_lite_old_q8_gguf": _LATENT_Q8_CASE,
    "deepseek_v3_gguf": replace(
        _DEEPSEEK_V3_CASE,
        architecture="deepseek_v2",
        gguf=Gguf(architecture="deepseek2", metadata=_LATENTS_IN_GGUF),
        golden="deepseek_v3",
    ),
    "deepseek_v2_lite_old_gguf": replace(
        _DEEPSEEK_V2_LITE_CASE,
        gguf=Gguf(architecture="deepseek2", metadata={**_LATENTS_IN_GGUF, **_NOT_IN_OLD_GGUF}, is_old=True),
        golden="deepseek_v2_lite",
    ),
    "deepseek_v2": _latent_case(_DEEPSEEK_V2, 0, 1, seed=300),
    "deepseek_v2_lite": _DEEPSEEK_V2_LITE_CASE,
    "deepseek_v3": _DEEPSEEK_V3_CASE,
    "deepseek_v3_of_old_release": replace(_DEEPSEEK_V3_CASE, experts="mlp.experts.{}.{}.weight", golden="deepseek_v3"),
    **{
        name: replace(
            _DEEPSEEK_V3_CASE,
            wrapper={"architectures": [f"{hf_class}ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}},
            golden="deepseek_v3",
        )
        for name, hf_class in (("kimi_k2_5", "KimiK25"), ("kimi_k2_5_of_transformers", "Kimi_K25"))
    },
    "minicpm3": _latent_case(_MINICPM3, seed=306),
    "moonlight": _latent_case(_MOONLIGHT, 0, seed=313),
    "youtu": _latent_case(_YOUTU, seed=307),
    "glm4_moe_lite": _latent_case(_GLM4_MOE_LITE, 0, 2, seed=304),
}


_OLMO = settings("olmo", "OlmoForCausalLM", head_dim=None, rms_norm_eps=None, clip_qkv=None)
_UNWEIGHTED = dict.fromkeys(("input_layernorm__weight", "post_attention_layernorm__weight"))
_NANOCHAT = settings("nanochat", "NanoChatForCausalLM", hidden_act="gelu", rms_norm_eps=0.5, final_logit_softcapping=3.0)
_NANOCHAT_MLP: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(f"mlp__{name}_proj__weight" for name in ("gate", "up", "down")),
    "mlp__fc1__weight": (100, 72),
    "mlp__fc2__weight": (72, 100),
}
_VAULTGEMMA = {**_GEMMA2, "model_type": "vaultgemma", "architectures": ["VaultGemmaForCausalLM"]}
_CWM = {
    **settings("cwm", "CwmForCausalLM", num_hidden_layers=5, sliding_window=6),
    "rope_parameters": {**_LLAMA3["rope_parameters"], "rope_theta": 3000.0},
}
_HYPERCLOVAX = settings(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    rms_norm_eps=0.05,
    embedding_multiplier=3.0,
    attention_multiplier=0.3,
    residual_multiplier=0.5,
    logits_scaling=0.4,
    use_post_norm=True,
)


def _without_last_norm(found: Shapes) -> Shapes:
    return {name: shape for name, shape in found.items() if name != "model.norm.weight"}


_GRANITE_MOE_SHARED = {
    **_GRANITE_MOE,
    "model_type": "granitemoeshared",
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "shared_intermediate_size": 56,
}
_SWA = {"num_hidden_layers": 5, "sliding_window": 6, "layer_rope_theta": [3000.0, 500.0, 0, 3000.0, 0]}
_GRANITE_SWA = {**_GRANITE, "model_type": "granite_swa", "architectures": ["GraniteSWAForCausalLM"], **_SWA}
_GRANITE_MOE_SWA = {
    **_GRANITE_MOE_SHARED,
    "model_type": "granitemoe_swa",
    "architectures": ["GraniteMoeSWAForCausalLM"],
    "num_hidden_layers": 2,
    "sliding_window": 6,
}
_GRANITE_SHARED_EXPERTS = {
    **_experts(_GRANITE_MOE, 40),
    **_GRANITE_EXPERTS,
    "shared_mlp__input_linear__weight": (112, 72),
    "shared_mlp__output_linear__weight": (72, 56),
}
_JAIS2 = settings(
    "jais2",
    "Jais2ForCausalLM",
    rms_norm_eps=None,
    layer_norm_eps=0.05,
    hidden_act="gelu",
    attention_bias=True,
    mlp_bias=True,
)
_HUNYUAN_MOE = {
    **_HUNYUAN,
    "model_type": "hunyuan_v1_moe",
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "num_experts": 7,
    "moe_topk": [3, 3],
    "intermediate_size": 40,
}
_FLEX_OLMO = {**_OLMOE, "rms_norm_eps": 0.1, "model_type": "flex_olmo", "architectures": ["FlexOlmoForCausalLM"]}
_MELLUM = settings(
    "mellum",
    "MellumForCausalLM",
    num_hidden_layers=3,
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    norm_topk_prob=True,
    layer_types=[_LOCAL, _GLOBAL, _LOCAL],
    mlp_layer_types=["dense", "sparse", "sparse"],
    sliding_window=6,
    rope_parameters={
        _GLOBAL: {"rope_type": "default", "rope_theta": 3000.0},
        _LOCAL: {"rope_type": "default", "rope_theta": 200.0},
    },
)
_CODEGEN = {**_GPTJ, "model_type": "codegen", "architectures": ["CodeGenForCausalLM"], "n_head": 4}
_GPT_NEO = {
    "architectures": ["GPTNeoForCausalLM"],
    "model_type": "gpt_neo",
    "vocab_size": 263,
    "hidden_size": 72,
    "num_layers": 3,
    "num_heads": 3,
    "intermediate_size": 100,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": 6,
    "activation_function": "gelu",
    "layer_norm_epsilon": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gpt_neo_shapes() -> Shapes:
    found: Shapes = {"wte.weight": (263, 72), "wpe.weight": (64, 72)}
    for at in (f"h.{layer}" for layer in range(3)):
        found |= {f"{at}.{name}.{end}": (72,) for name in ("ln_1", "ln_2") for end in ("weight", "bias")}
        found |= {f"{at}.attn.attention.{name}_proj.weight": (72, 72) for name in ("q", "k", "v", "out")}
        found |= {f"{at}.attn.attention.out_proj.bias": (72,)}
        found |= {f"{at}.mlp.c_fc.weight": (100, 72), f"{at}.mlp.c_fc.bias": (100,)}
        found |= {f"{at}.mlp.c_proj.weight": (72, 100), f"{at}.mlp.c_proj.bias": (72,)}
    found |= {"ln_f.weight": (72,), "ln_f.bias": (72,)}
    return {f"transformer.{name}": shape for name, shape in found.items()}


_RELATIVES = {
    "granite_moe_shared": TinyCase(
        architecture="granite_moe_shared",
        config=_GRANITE_MOE_SHARED,
        shapes=shapes({**_GRANITE_MOE_SHARED, "head_dim": 24}, **_GRANITE_SHARED_EXPERTS),
        seed=235,
    ),
    "granite_swa": TinyCase(
        architecture="granite_swa", config=_GRANITE_SWA, shapes=shapes(_GRANITE_SWA, self_attn__sinks=(3,)), seed=236
    ),
    "granite_moe_swa": TinyCase(
        architecture="granite_moe_swa",
        config=_GRANITE_MOE_SWA,
        shapes=shapes({**_GRANITE_MOE_SWA, "head_dim": 24}, **_GRANITE_SHARED_EXPERTS, self_attn__sinks=(3,)),
        seed=237,
    ),
    "jais2": TinyCase(
        architecture="jais2",
        config=_JAIS2,
        shapes={
            **shapes(
                _JAIS2,
                **_qkv_bias(_JAIS2),
                self_attn__o_proj__bias=(72,),
                input_layernorm__bias=(72,),
                post_attention_layernorm__bias=(72,),
                mlp__gate_proj__weight=None,
                mlp__up_proj__bias=(100,),
                mlp__down_proj__bias=(72,),
            ),
            "model.norm.bias": (72,),
        },
        seed=238,
        factors={"q_proj.weight": 2.0},
    ),
    "hunyuan_moe": replace(
        _HUNYUAN_CASE,
        architecture="hunyuan_moe",
        config=_HUNYUAN_MOE,
        shapes=shapes(
            _HUNYUAN_MOE,
            **_qkv_bias(_HUNYUAN),
            **{**_experts(_HUNYUAN_MOE, 40), "mlp__gate__weight": None, "mlp__gate__wg__weight": (7, 72)},
            **_shared(_HUNYUAN_MOE, "shared_mlp", 40),
            self_attn__o_proj__bias=(72,),
            self_attn__query_layernorm__weight=(24,),
            self_attn__key_layernorm__weight=(24,),
        ),
        seed=239,
    ),
    "flex_olmo": TinyCase(
        architecture="flex_olmo",
        config=_FLEX_OLMO,
        shapes=shapes(
            {**_FLEX_OLMO, "head_dim": 24},
            **_ROW_NORMS,
            **_experts(_FLEX_OLMO, 40),
            input_layernorm__weight=None,
            post_feedforward_layernorm__weight=(72,),
        ),
        seed=244,
        factors={"embed_tokens.weight": 5.0, "q_norm.weight": 2.0},
    ),
    "mellum": TinyCase(
        architecture="mellum",
        config=_MELLUM,
        shapes=_mixed(_MELLUM, _experts(_MELLUM, 40), 0, **_HEAD_NORMS),
        seed=246,
    ),
    "codegen": TinyCase(
        architecture="codegen",
        config=_CODEGEN,
        shapes=_side_by_side(
            {"attn.qkv_proj*": (216, 72), "attn.out_proj*": (72, 72), "mlp.fc_in": (100, 72), "mlp.fc_out": (72, 100)},
            "transformer.h",
            "ln_1",
            ("transformer.wte", "transformer.ln_f"),
        ),
        seed=242,
        norm_centre=2.0,
        refused_by={"cuda": "Logits.bias"},
    ),
    "gpt_neo": TinyCase(architecture="gpt_neo", config=_GPT_NEO, shapes=_gpt_neo_shapes(), seed=243),
    "olmo": TinyCase(
        architecture="olmo",
        config=_OLMO,
        shapes=_without_last_norm(shapes({**_OLMO, "head_dim": 24}, **_UNWEIGHTED)),
        seed=230,
        # The epsilon is not a setting, and far below usual variances.
        factors={"embed_tokens.weight": 0.05, "o_proj.weight": 0.05, "down_proj.weight": 0.05},
    ),
    "nanochat": TinyCase(
        architecture="nanochat",
        config=_NANOCHAT,
        shapes=_without_last_norm(shapes(_NANOCHAT, **_UNWEIGHTED, **_NANOCHAT_MLP)),
        seed=231,
        factors={"embed_tokens.weight": 4.0, "q_proj.weight": 2.0, "k_proj.weight": 2.0},
        refused_by={"cuda": "RMSNorm without weight"},
    ),
    "vaultgemma": TinyCase(
        architecture="vaultgemma",
        config=_VAULTGEMMA,
        shapes=shapes(_VAULTGEMMA, post_attention_layernorm__weight=None, pre_feedforward_layernorm__weight=(72,)),
        seed=232,
        norm_centre=0.0,
    ),
    "cwm": TinyCase(architecture="cwm", config=_CWM, shapes=shapes(_CWM), seed=233),
    "hyperclovax": TinyCase(
        architecture="hyperclovax",
        config=_HYPERCLOVAX,
        shapes=shapes(_HYPERCLOVAX, post_norm1__weight=(72,), post_norm2__weight=(72,)),
        seed=234,
    ),
}
"""Small differences of other families."""

CASES: Mapping[str, TinyCase] = MappingProxyType(
    {
        **_RELATIVES,
        "mamba2": _MAMBA2_CASE,
        "nemotron_h": _NEMOTRON_H_CASE,
        "nemotron_h_gguf": replace(_NEMOTRON_H_CASE, gguf=_NEMOTRON_H_GGUF, golden="nemotron_h"),
        "nemotron_h_moe": _NEMOTRON_H_MOE_CASE,
        "nemotron_h_moe_gguf": replace(
            _NEMOTRON_H_MOE_CASE,
            architecture="nemotron_h_moe",
            config=_NEMOTRON_H_MOE_OF_GGUF,
            shapes=_nemotron_h_shapes(_NEMOTRON_H_MOE_OF_GGUF),
            seed=183,
            gguf=_NEMOTRON_H_MOE_GGUF,
        ),
        "granite_hybrid": _GRANITE_HYBRID_CASE,
        "granite_hybrid_gguf": replace(_GRANITE_HYBRID_CASE, gguf=_GRANITE_HYBRID_GGUF, golden="granite_hybrid"),
        "granite_hybrid_dense": _GRANITE_DENSE_CASE,
        "granite_hybrid_dense_gguf": replace(
            _GRANITE_DENSE_GGUF_CASE, gguf=replace(_GRANITE_HYBRID_GGUF, metadata={**_MAMBA_IN_GGUF, "feed_forward_length": 56})
        ),
        "bamba": _BAMBA_CASE,
        "olmo_hybrid": _OLMO_HYBRID_CASE,
        "olmo_hybrid_defaults": replace(
            _OLMO_HYBRID_CASE,
            config=_OLD_OLMO_HYBRID,
            shapes=_olmo_hybrid_shapes(_OLD_OLMO_HYBRID, 54, 108, 3, 0, 1, 2),
            seed=221,
        ),
        "falcon_h1": _FALCON_H1_CASE,
        "falcon_h1_gguf": replace(_FALCON_H1_CASE, gguf=_FALCON_H1_GGUF, golden="falcon_h1", refused_by={"cuda": "CausalConv"}),
        "falcon_h1_normed": _NORMED_FALCON_H1_CASE,
        "falcon_h1_normed_first": replace(
            _NORMED_FALCON_H1_CASE,
            config={**_NORMED_FALCON_H1, "mamba_norm_before_gate": True, "ssm_out_multiplier": 1.5},
        ),
        "qwen3_5": _QWEN3_5_CASE,
        "qwen3_5_vl": replace(_QWEN3_5_CASE, wrapper=_QWEN3_5_WRAPPER, golden="qwen3_5"),
        "qwen3_5_gguf": replace(_QWEN3_5_CASE, gguf=_QWEN3_5_GGUF, golden="qwen3_5"),
        "qwen3_5_moe": _QWEN3_5_MOE_CASE,
        "qwen3_5_moe_vl": replace(
            _QWEN3_5_MOE_CASE,
            wrapper={
                **_QWEN3_5_WRAPPER,
                "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "model_type": "qwen3_5_moe",
            },
            experts="mlp.experts.{}.{}.weight",
            golden="qwen3_5_moe",
        ),
        "qwen3_5_moe_gguf": replace(_QWEN3_5_MOE_CASE, gguf=_QWEN3_5_MOE_GGUF, golden="qwen3_5_moe"),
        "qwen3_5_moe_fused_gguf": replace(
            _QWEN3_5_MOE_CASE, gguf=replace(_QWEN3_5_MOE_GGUF, has_fused_experts=True), golden="qwen3_5_moe"
        ),
        "qwen3_next": _QWEN3_NEXT_CASE,
        "qwen3_next_gguf": replace(_QWEN3_NEXT_GGUF_CASE, gguf=_QWEN3_NEXT_GGUF),
        "qwen3_next_old_gguf": replace(
            _QWEN3_NEXT_GGUF_CASE, gguf=replace(_QWEN3_NEXT_GGUF, is_old=True), golden="qwen3_next_gguf"
        ),
        "apertus": _APERTUS_CASE,
        "mha_tied_f32": TinyCase(architecture="llama", config=_TIED_F32, shapes=shapes(_TIED_F32), seed=1, dtype="f32"),
        "gqa_untied_bf16": replace(_LLAMA_CASE, num_shards=3),
        "gqa_untied_gguf": replace(_LLAMA_CASE, gguf=_LLAMA_GGUF, golden="gqa_untied_bf16"),
        "mqa_llama3_scaling": TinyCase(architecture="llama", config=_LLAMA3, shapes=shapes(_LLAMA3), seed=3, num_tokens=150),
        "linear_scaling_legacy_config": TinyCase(
            architecture="llama", config=_LINEAR, shapes=shapes(_LINEAR), seed=4, num_tokens=100
        ),
        "gguf_q4_1": replace(_WIDE_CASE, gguf=replace(_LLAMA_GGUF, matrix_type="Q4_1")),
        "gguf_q4_0": replace(_WIDE_CASE, seed=6, gguf=replace(_LLAMA_GGUF, matrix_type="Q4_0")),
        "gguf_q8_0": replace(_WIDE_CASE, seed=7, gguf=replace(_LLAMA_GGUF, matrix_type="Q8_0")),
        "llama_biases": _BIASED_CASE,
        "qwen2": TinyCase(architecture="qwen2", config=_QWEN2, shapes=shapes(_QWEN2, **_qkv_bias(_QWEN2)), seed=8),
        "qwen3": _QWEN3_CASE,
        "qwen3_windows_yarn": TinyCase(
            architecture="qwen3", config=_WINDOWED_QWEN3, shapes=shapes(_WINDOWED_QWEN3, **_HEAD_NORMS), seed=21
        ),
        "qwen3_vl": replace(
            _QWEN3_CASE,
            wrapper={
                "architectures": ["Qwen3VLForConditionalGeneration"],
                "model_type": "qwen3_vl",
                "vision_config": {"depth": 1},
                "tie_word_embeddings": False,
            },
            golden="qwen3",
        ),
        "qwen3_gguf": replace(_QWEN3_CASE, gguf=Gguf(architecture="qwen3", metadata={}), golden="qwen3"),
        "qwen3_vl_gguf": replace(_QWEN3_CASE, gguf=Gguf(architecture="qwen3vl", metadata=_QWEN3_VL_GGUF), golden="qwen3"),
        "qwen2_gguf_q8_0": TinyCase(
            architecture="qwen2",
            config=_WIDE_QWEN2,
            shapes=shapes(_WIDE_QWEN2, **_qkv_bias(_WIDE_QWEN2)),
            seed=9,
            gguf=Gguf(architecture="qwen2", matrix_type="Q8_0", metadata={}),
        ),
        "qwen2_vl": replace(
            _QWEN2_VL_CASE,
            wrapper={"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": {}},
        ),
        "qwen2_5_vl": replace(_QWEN2_VL_CASE, old_config=_QWEN2_5_VL, golden="qwen2_vl"),
        "qwen2_vl_gguf": replace(
            _QWEN2_VL_CASE,
            gguf=Gguf(architecture="qwen2vl", metadata={"rope.dimension_sections": [5, 4, 3, 0]}),
            golden="qwen2_vl",
        ),
        "mixtral": _MIXTRAL_CASE,
        "mixtral_per_expert": replace(_MIXTRAL_CASE, experts="block_sparse_moe.experts.{}.w{}.weight", golden="mixtral"),
        "mixtral_named_experts": replace(_MIXTRAL_CASE, experts="block_sparse_moe.experts.{}.{}.weight", golden="mixtral"),
        "mixtral_gguf": replace(
            _MIXTRAL_CASE, gguf=Gguf(architecture="llama", metadata=_GGUF_EXPERTS, is_interleaved=True), golden="mixtral"
        ),
        "qwen3_moe": _QWEN3_MOE_CASE,
        "qwen3_moe_per_expert": replace(_QWEN3_MOE_CASE, experts="mlp.experts.{}.{}.weight", golden="qwen3_moe"),
        "qwen3_moe_gguf": replace(
            _QWEN3_MOE_CASE,
            gguf=Gguf(architecture="qwen3moe", metadata={**_GGUF_EXPERTS, "expert_feed_forward_length": 40}),
            golden="qwen3_moe",
        ),
        "qwen3_vl_moe": _QWEN3_VL_MOE_CASE,
        "qwen3_vl_moe_gguf": replace(
            _QWEN3_VL_MOE_CASE,
            gguf=Gguf(
                architecture="qwen3vlmoe", metadata={**_QWEN3_VL_GGUF, **_GGUF_EXPERTS, "expert_feed_forward_length": 40}
            ),
        ),
        "glm4_moe": _GLM4_MOE_CASE,
        "glm4_moe_per_expert": replace(_GLM4_MOE_CASE, experts="mlp.experts.{}.{}.weight", golden="glm4_moe"),
        "glm4_moe_gguf": replace(_GLM4_MOE_CASE, gguf=_GLM4_MOE_GGUF, golden="glm4_moe"),
        "glm4_moe_air": _GLM4_AIR_CASE,
        "ernie4_5_moe": _ERNIE_MOE_CASE,
        "ernie4_5_moe_per_expert": replace(_ERNIE_MOE_CASE, experts="mlp.experts.{}.{}.weight", golden="ernie4_5_moe"),
        "ernie4_5_moe_gguf": _ERNIE_MOE_GGUF_CASE,
        "qwen2_moe": _QWEN2_MOE_CASE,
        "qwen2_moe_per_expert": replace(_QWEN2_MOE_CASE, experts="mlp.experts.{}.{}.weight", golden="qwen2_moe"),
        "qwen2_moe_gguf": _QWEN2_MOE_GGUF_CASE,
        "minimax_m2": _MINIMAX_M2_CASE,
        "minimax_m2_per_expert": replace(
            _MINIMAX_M2_CASE, experts="block_sparse_moe.experts.{}.w{}.weight", golden="minimax_m2"
        ),
        "minimax_m2_gguf": replace(
            _MINIMAX_M2_CASE,
            gguf=Gguf(
                architecture="minimax-m2",
                metadata={
                    **_GGUF_EXPERTS,
                    "expert_feed_forward_length": 40,
                    "expert_gating_func": 2,
                    "rope.dimension_count": 12,
                },
            ),
            golden="minimax_m2",
        ),
        "olmoe": _OLMOE_CASE,
        "olmoe_gguf": replace(_OLMOE_CASE, gguf=Gguf(architecture="olmoe", metadata=_GGUF_EXPERTS), golden="olmoe"),
        "granite_moe": _GRANITE_MOE_CASE,
        "granite_moe_per_expert": replace(
            _GRANITE_MOE_CASE, experts="block_sparse_moe.experts.{}.{}.weight", golden="granite_moe"
        ),
        "granite_moe_gguf": replace(
            _GRANITE_MOE_CASE,
            gguf=Gguf(architecture="granitemoe", metadata={**_GGUF_EXPERTS, **_GGUF_GRANITE}, is_interleaved=True),
            golden="granite_moe",
        ),
        "falcon": _FALCON_CASE,
        "falcon_refined_web": replace(_FALCON_CASE, old_config=_REFINED_WEB, golden="falcon"),
        "falcon_gguf": replace(_FALCON_CASE, gguf=_FALCON_GGUF, golden="falcon"),
        "falcon_40b": _FALCON_40B_CASE,
        "falcon_40b_gguf": replace(_FALCON_40B_CASE, gguf=_FALCON_GGUF, golden="falcon_40b"),
        "falcon2_biases": replace(_FALCON_CASE, config=_FALCON2, shapes=_falcon_shapes(_FALCON2, "input_layernorm"), seed=44),
        "stablelm": _STABLELM_CASE,
        "stablelm_gguf": replace(_STABLELM_CASE, gguf=_stablelm_gguf(_STABLELM), golden="stablelm"),
        "stablelm_parallel": _STABLELM_PARALLEL_CASE,
        "stablelm_parallel_gguf": replace(
            _STABLELM_PARALLEL_CASE, gguf=_stablelm_gguf(_STABLELM_PARALLEL), golden="stablelm_parallel"
        ),
        "gptj": _GPTJ_CASE,
        "phi": _PHI_CASE,
        "phi_gguf": replace(_PHI_CASE, config={**_PHI, "hidden_act": "gelu_new"}, gguf=_PHI_GGUF),
        "gpt_neox": _GPT_NEOX_CASE,
        "gpt_neox_sequential": replace(
            _GPT_NEOX_CASE, config=_GPT_NEOX_SEQUENTIAL, shapes=_gpt_neox_shapes(_GPT_NEOX_SEQUENTIAL), seed=82
        ),
        "gpt_neox_gguf": replace(_GPT_NEOX_CASE, gguf=_GPT_NEOX_GGUF, golden="gpt_neox"),
        "glm4": _GLM4_CASE,
        "glm4_gguf": replace(_GLM4_CASE, gguf=Gguf(architecture="glm4", metadata={"rope.dimension_count": 18}), golden="glm4"),
        "glm": _GLM_CASE,
        "ernie4_5": _ERNIE_CASE,
        "ernie4_5_gguf": replace(_ERNIE_CASE, gguf=Gguf(architecture="ernie4_5", metadata={}), golden="ernie4_5"),
        "helium": _HELIUM_CASE,
        "nemotron": _NEMOTRON_CASE,
        "nemotron_gguf": replace(_NEMOTRON_CASE, gguf=_NEMOTRON_GGUF, golden="nemotron"),
        "cohere": _COHERE_CASE,
        "cohere_gguf": replace(_COHERE_CASE, gguf=_COHERE_GGUF, golden="cohere"),
        "cohere2": _COHERE2_CASE,
        "cohere2_gguf": replace(_COHERE2_CASE, gguf=_COHERE2_GGUF, golden="cohere2"),
        "arcee": _ARCEE_CASE,
        "arcee_gguf": replace(_ARCEE_CASE, gguf=_ARCEE_GGUF, golden="arcee"),
        "gpt_oss": _GPT_OSS_CASE,
        "gpt_oss_gguf": replace(_GPT_OSS_CASE, gguf=_GPT_OSS_GGUF, golden="gpt_oss"),
        "gpt_oss_mxfp4": _MXFP4_CASE,
        "gpt_oss_mxfp4_gguf": replace(_MXFP4_CASE, gguf=_MXFP4_GGUF, golden="gpt_oss_mxfp4"),
        "exaone4": _EXAONE4_CASE,
        "exaone4_gguf": replace(_EXAONE4_CASE, gguf=_EXAONE4_GGUF, golden="exaone4"),
        "solar_open": _SOLAR_CASE,
        "dots1": _DOTS1_CASE,
        "exaone_moe": _EXAONE_MOE_CASE,
        "exaone_moe_per_expert": replace(_EXAONE_MOE_CASE, experts="mlp.experts.{}.{}.weight", golden="exaone_moe"),
        "afmoe": _AFMOE_CASE,
        "phi3": _PHI3_CASE,
        "phi3_gguf": replace(
            _PHI3_CASE, gguf=Gguf(architecture="phi3", metadata={"attention.sliding_window": 6}), golden="phi3"
        ),
        "phi4_mini": _PHI3_LONG_CASE,
        "lfm2": _LFM2_CASE,
        "lfm2_old_config": _LFM2_OLD_CASE,
        "lfm2_gguf": replace(_LFM2_CASE, gguf=_LFM2_GGUF, golden="lfm2"),
        "lfm2_vl": replace(
            _LFM2_CASE,
            wrapper={"architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "vision_config": {}},
            golden="lfm2",
        ),
        "lfm2_moe": _LFM2_MOE_CASE,
        "lfm2_moe_per_expert": replace(_LFM2_MOE_CASE, experts="feed_forward.experts.{}.w{}.weight", golden="lfm2_moe"),
        "lfm2_moe_named_experts": replace(_LFM2_MOE_CASE, experts="feed_forward.experts.{}.{}.weight", golden="lfm2_moe"),
        "lfm2_moe_gguf": replace(_LFM2_MOE_CASE, gguf=_LFM2_MOE_GGUF, golden="lfm2_moe"),
        "phi3_short_factors": replace(_PHI3_LONG_CASE, config=_PHI3_SHORT, seed=36),
        "gpt2": _GPT2_CASE,
        "gpt2_gguf": _GPT2_GGUF_CASE,
        "gpt_bigcode": _GPT_BIGCODE_CASE,
        "gpt_bigcode_gguf": _GPT_BIGCODE_GGUF_CASE,
        "opt": _OPT_CASE,
        "opt_without_biases": replace(_OPT_CASE, config=_OPT_WITHOUT_BIASES, shapes=_opt_shapes(_OPT_WITHOUT_BIASES), seed=85),
        "starcoder2": _STARCODER2_CASE,
        "starcoder2_gguf": replace(_STARCODER2_CASE, gguf=_STARCODER2_GGUF, golden="starcoder2"),
        "mistral": TinyCase(architecture="mistral", config=_MISTRAL, shapes=shapes(_MISTRAL), seed=10),
        "ministral": TinyCase(architecture="mistral", config=_MINISTRAL, shapes=shapes(_MINISTRAL), seed=11),
        "ministral3": _MINISTRAL3_CASE,
        "ministral3_of_pictures": replace(
            _MINISTRAL3_CASE,
            config={**_MINISTRAL3, "sliding_window": None},
            wrapper={"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {}},
            golden="ministral3",
        ),
        "ministral3_gguf": replace(_MINISTRAL3_CASE, gguf=_MINISTRAL3_GGUF, golden="ministral3"),
        "seed_oss": _SEED_OSS_CASE,
        "seed_oss_gguf": replace(_SEED_OSS_CASE, gguf=Gguf(architecture="seed_oss", metadata={}), golden="seed_oss"),
        "smollm3": _SMOLLM3_CASE,
        "smollm3_gguf": replace(
            _SMOLLM3_CASE,
            config={key: value for key, value in _SMOLLM3.items() if key != "no_rope_layers"},
            gguf=Gguf(architecture="smollm3", metadata={}, is_interleaved=True),
        ),
        "granite": _GRANITE_CASE,
        "granite_gguf": replace(_GRANITE_CASE, gguf=_GRANITE_GGUF, golden="granite"),
        "olmo2": _OLMO2_CASE,
        "olmo2_gguf": replace(_OLMO2_CASE, gguf=Gguf(architecture="olmo2", metadata={}), golden="olmo2"),
        "hunyuan": _HUNYUAN_CASE,
        "hunyuan_gguf": replace(_HUNYUAN_CASE, gguf=_HUNYUAN_GGUF, golden="hunyuan"),
        "olmo3": _OLMO3_CASE,
        "olmo3_old_config": _OLMO3_OLD_CASE,
        "olmo3_gguf": replace(_OLMO3_OLD_CASE, gguf=_OLMO3_GGUF, golden="olmo3_old_config"),
        "gemma": _GEMMA_CASE,
        "gemma_gguf": replace(_GEMMA_CASE, gguf=Gguf(architecture="gemma", norm_offset=1.0, metadata={}), golden="gemma"),
        "gemma2": _GEMMA2_CASE,
        "gemma2_gguf": replace(_GEMMA2_CASE, config={**_GEMMA2, "query_pre_attn_scalar": 24}, gguf=_GEMMA2_GGUF),
        "gemma3": _GEMMA3_CASE,
        "gemma3_old_config": replace(_GEMMA3_CASE, config=_GEMMA3_OLD, golden="gemma3"),
        "gemma3_of_pictures": replace(
            _GEMMA3_CASE,
            wrapper={"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {}},
            golden="gemma3",
        ),
        "gemma3_gguf": replace(
            _GEMMA3_CASE,
            config=_GEMMA3_OF_GGUF,
            shapes=shapes(_GEMMA3_OF_GGUF, **_gemma_norms(_GEMMA3), **_HEAD_NORMS),
            gguf=_GEMMA3_GGUF,
        ),
        **_GEMMA4_CASES,
        **_LATENT_CASES,
    }
)
