"""MPNet: BERT without token types, whose scores have a bias by the distance of two tokens that all layers share.

Sources: arXiv 2004.09297; modeling_mpnet.py of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models import bert
from penstock.models.architectures import Architecture, Made
from penstock.models.hf_config import JsonFile
from penstock.types.model_spec import ModelSpec

NUM_BUCKETS = 32
FARTHEST = 128
"""Tokens that are so far apart, or farther, have one bias for each direction."""
_PADDING = 1
"""The class has this one built in, whatever config.json says."""


def bucket(distance: int) -> int:
    """The bucket of keys so many tokens behind the query; below 0, before it. Source: arXiv 1910.10683 (T5)."""
    half = NUM_BUCKETS // 2
    near, first = half // 2, half * (distance > 0)
    far = abs(distance)
    if far < near:
        return first + far
    # In float32, as transformers has it: at powers of two the last bit decides.
    share = np.log(np.float32(far) / np.float32(near)) / np.float32(math.log(FARTHEST / near))
    return first + min(half - 1, near + int(np.float32(share) * np.float32(half - near)))


def _distances(_: ModelSpec, buckets: NDArray[np.float32]) -> NDArray[np.float32]:
    """[num_buckets, num_heads] -> the biases of each head by distance. [num_heads, 2 * FARTHEST + 1]"""
    return np.ascontiguousarray(buckets[[bucket(distance) for distance in range(-FARTHEST, FARTHEST + 1)]].T)


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"vocab_size": 30527, "relative_attention_num_buckets": NUM_BUCKETS, **values}
    return bert.values_with_positions_behind({**found, "pad_token_id": _PADDING, "type_vocab_size": None})


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("relative_attention_num_buckets", NUM_BUCKETS)
    spec = replace(bert.of_hf(config, spec), num_types=0, first_position=_PADDING + 1)
    return spec.with_attention(lambda _, attention: replace(attention, num_distances=FARTHEST))


_ATTENTION = {f"attention.attn.{name}.{end}": f"{name}{bias}" for name in "qkvo" for end, bias in bert.ENDS}
MPNET = Architecture(
    describe=bert.describe,
    is_encoder=True,
    of_hf=_of_hf,
    hf_values=_values,
    hf_name=lambda name: bert.bare_name(name.removeprefix("mpnet.")),
    hf_top={**bert.BERT.hf_top, "encoder.relative_attention_bias.weight": "buckets"},
    hf_layers="encoder.layer.",
    hf_layer={
        **bert.BERT.hf_layer,
        **_ATTENTION,
        "attention.LayerNorm.weight": "post_attn_norm",
        "attention.LayerNorm.bias": "post_attn_norm_bias",
    },
    hf_head=bert.roberta_head,
    hf_unread=(*bert.BERT.hf_unread, "lm_head."),
    made={"distances": Made("buckets", lambda spec: (NUM_BUCKETS, spec.attentions[0].num_heads), _distances)},
)
