"""Nomic-BERT: BERT with rotary positions, gated MLPs and no biases but those of norms.

Sources: arXiv 2402.01613; modeling_nomic_bert.py of transformers, whose names the files of the first releases do not have yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import bert
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.program import Program
from penstock.types.model_spec import Activation, GatedMlp, LayerSpec, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec) -> Program:
    """The program of one step."""
    build = Decoder(spec)
    return bert.finish_layers(build, spec, build.norm(build.add_types(build.embed()), "embed_norm", "x"))


_OLD_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
_OLD_SWITCHES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm", "parallel_block", "causal")


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 1000.0}
    found |= {_OLD_KEYS.get(key, key): value for key, value in values.items() if value is not None}
    return bert.values_with_defaults(found)


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    for switch in (*_OLD_SWITCHES, "rotary_emb_interleaved", "num_experts", "rotary_emb_scale_base", "rotary_scaling_factor"):
        config.only(switch, False)
    config.only("activation_function", "swiglu")
    return _with(spec, read_activation(config, "hidden_act", "silu"), bert.read_num_types(config))


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    return _with(spec, "silu", bert.num_types_of_gguf(file))


def _with(spec: ModelSpec, activation: Activation, num_types: int) -> ModelSpec:
    def layer(_: int, one: LayerSpec) -> LayerSpec:
        assert isinstance(one.mlp, GatedMlp)
        return replace(one, mlp=replace(one.mlp, activation=activation))

    spec = replace(spec, norm="layer", has_norm_bias=True, num_types=num_types).with_layers(layer)
    return spec.with_attention(lambda _, attention: replace(attention, mask="all"))


_OLD_NAME = re.compile(r"encoder\.layers\.")


def _name(name: str) -> str:
    bare = _OLD_NAME.sub("layers.", name.removeprefix("nomic_bert.").removeprefix("bert."), count=1)
    return bert.bare_name(bare.replace("emb_ln.", "embeddings.LayerNorm.", 1) if bare.startswith("emb_ln.") else bare)


_NORMS = {
    f"{theirs}.{end}": f"{ours}{bias}"
    for theirs, ours in (
        ("post_attention_layernorm", "post_attn_norm"),
        ("post_mlp_layernorm", "post_mlp_norm"),
        ("norm1", "post_attn_norm"),
        ("norm2", "post_mlp_norm"),
    )
    for end, bias in bert.ENDS
}
NOMIC_BERT = Architecture(
    describe=describe,
    is_encoder=True,
    of_hf=_of_hf,
    hf_values=_values,
    hf_name=_name,
    hf_top=bert.BERT.hf_top,
    hf_layers="layers.",
    hf_layer={
        **HF_LAYER,
        **_NORMS,
        "attn.Wqkv.weight": Parts(("q", "k", "v")),
        "attn.out_proj.weight": "o",
        "mlp.fc11.weight": "up",
        "mlp.fc12.weight": "gate",
        "mlp.fc2.weight": "down",
    },
    hf_head=bert.bert_head,
    hf_unread=bert.BERT.hf_unread,
    of_gguf=_of_gguf,
    gguf_top=bert.GGUF_TOP,
    gguf_layer={**GGUF_LAYER, **bert.GGUF_NORMS, "attn_qkv.weight": Parts(("q", "k", "v"))},
)
