"""ALBERT: BERT whose layers share their weights, with embeddings of a width of their own.

Sources: transformers' modeling_albert.py; arXiv 1909.11942.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import partial

from penstock.models import bert
from penstock.models.architectures import HeadLayer, with_biases
from penstock.models.hf_config import JsonFile
from penstock.models.program import Op, Program
from penstock.types.model_spec import ModelSpec

_LAYER = re.compile(r"layers\.\d+\.")


def _describe(spec: ModelSpec) -> Program:
    program = bert.describe(spec)
    return replace(program, ops=tuple(map(_with_first_layers_weights, program.ops)))


def _with_first_layers_weights(op: Op) -> Op:
    names = {field.name: getattr(op, field.name) for field in fields(op)}
    return replace(op, **{key: _LAYER.sub("layers.0.", name) for key, name in names.items() if isinstance(name, str)})


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(num_hidden_groups=1, inner_group_num=1)
    embed_size = config.require("embedding_size", int)
    if not 0 < embed_size <= 1 << 16:
        raise config.error(f"embedding_size is {embed_size}")
    return replace(bert.of_bert(config, spec), embed_size=embed_size)


ALBERT = replace(
    bert.BERT,
    describe=_describe,
    of_hf=_of_hf,
    hf_values=partial(
        bert.bert_values,
        vocab_size=30000,
        embedding_size=128,
        hidden_size=4096,
        num_attention_heads=64,
        intermediate_size=16384,
        hidden_act="gelu_new",
    ),
    hf_name=lambda name: name.removeprefix("albert."),
    hf_top={**bert.BERT.hf_top, **with_biases({"encoder.embedding_hidden_mapping_in": "embed_project"})},
    hf_layers="encoder.albert_layer_groups.0.albert_layers.",
    hf_layer=with_biases(
        {
            **{f"attention.{name}": name[0] for name in ("query", "key", "value")},
            "attention.dense": "o",
            "attention.LayerNorm": "post_attn_norm",
            "ffn": "up",
            "ffn_output": "down",
            "full_layer_layer_norm": "post_mlp_norm",
        }
    ),
    hf_head=partial(bert.head_of_hf, (HeadLayer("pooler", activation="tanh"), HeadLayer("classifier", is_last=True))),
    hf_mlm_head=None,
    hf_unread=("predictions.", "pooler."),
)
