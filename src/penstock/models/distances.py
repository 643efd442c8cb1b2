"""MPNet and Jina BERT 2: BERTs whose scores depend on the distance of two tokens.

- MPNet has no token types. All layers share a learned bias for each range of distances.
  Sources: arXiv 2004.09297; modeling_mpnet.py of transformers.
- Jina BERT 2 has gated MLPs and no positions; scores fall with the distance (ALiBi). The variant for code, which norms queries
  and keys, is refused. transformers has no class of it. Sources: arXiv 2310.19923; ALiBi, arXiv 2108.12409;
  src/models/jina-bert-v2.cpp of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models import bert, checks
from penstock.models.architectures import Architecture, Made, Parts, with_biases
from penstock.models.hf_config import JsonFile
from penstock.models.layers import with_gated_mlps
from penstock.types.model_spec import Activation, ModelSpec

NUM_BUCKETS = 32
FARTHEST = 128
"""Tokens at this distance and beyond share one bias for each direction."""
_PADDING = 1
"""Fixed in the class, whatever config.json says."""


def bucket(distance: int) -> int:
    """Return the bucket of keys so many tokens after the query, or before it if below 0. Source: arXiv 1910.10683 (T5)."""
    half = NUM_BUCKETS // 2
    near, first = half // 2, half * (distance > 0)
    far = abs(distance)
    if far < near:
        return first + far
    # In float32, as transformers has it: at powers of two the last bit decides.
    share = np.log(np.float32(far) / np.float32(near)) / np.float32(math.log(FARTHEST / near))
    return first + min(half - 1, near + int(np.float32(share) * np.float32(half - near)))


def _by_bucket(_: ModelSpec, buckets: NDArray[np.float32]) -> NDArray[np.float32]:
    """[num_buckets, num_heads] -> the biases of each head by distance. [num_heads, 2 * FARTHEST + 1]"""
    return np.ascontiguousarray(buckets[[bucket(distance) for distance in range(-FARTHEST, FARTHEST + 1)]].T)


def _mpnet_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"vocab_size": 30527, "relative_attention_num_buckets": NUM_BUCKETS, **values}
    return bert.values_after_padding({**found, "pad_token_id": _PADDING, "type_vocab_size": None})


def _of_mpnet(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("relative_attention_num_buckets", NUM_BUCKETS)
    spec = replace(bert.of_hf(config, spec), num_types=0, first_position=_PADDING + 1)
    return spec.with_attention(lambda _, attention: replace(attention, num_distances=FARTHEST))


MPNET = Architecture(
    describe=bert.describe,
    is_encoder=True,
    of_hf=_of_mpnet,
    hf_values=_mpnet_values,
    hf_name=lambda name: bert.bare_name(name.removeprefix("mpnet.")),
    hf_top={**bert.BERT.hf_top, "encoder.relative_attention_bias.weight": "buckets"},
    hf_layers="encoder.layer.",
    hf_layer={
        **bert.BERT.hf_layer,
        **with_biases({f"attention.attn.{name}": name for name in "qkvo"}),
        **with_biases({"attention.LayerNorm": "post_attn_norm"}),
    },
    hf_head=bert.roberta_head,
    hf_unread=(*bert.BERT.hf_unread, "lm_head."),
    made={"distances": Made("buckets", lambda spec: (NUM_BUCKETS, spec.attentions[0].num_heads), _by_bucket)},
)


_MAX_BIASES = 1 << 23
"""Size of the table of biases: that of the published models has 200,000."""
_JINA_ACTIVATIONS: Mapping[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def slopes(num_heads: int) -> list[float]:
    """Return how much the scores of each head fall per token of distance: 2^(-8/n), 2^(-16/n), ... for n heads.

    If n is not a power of two: those of the next lower power, then every other one of the next higher power.
    """
    below = 1 << (num_heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (head + 1) / below) for head in range(below)]
    return found + [2.0 ** (-8.0 * (2 * head + 1) / (2 * below)) for head in range(num_heads - below)]


def _by_slope(spec: ModelSpec, _: NDArray[np.float32]) -> NDArray[np.float32]:
    attention = spec.attentions[0]
    away = np.abs(np.arange(-attention.num_distances, attention.num_distances + 1))
    return -np.outer(slopes(attention.num_heads), away).astype(np.float32)


def _of_jina(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.require("position_embedding_type", str) != "alibi":
        raise config.error("position_embedding_type is not 'alibi'")
    kind = config.get("feed_forward_type", str) or "original"
    if kind not in _JINA_ACTIVATIONS:
        raise checks.unsupported(config.path, f"feed_forward_type is {kind[:80]!r}", f"{', '.join(_JINA_ACTIVATIONS)} are")
    farthest = max(1, spec.max_model_len - 1)
    if spec.attentions[0].num_heads * (2 * farthest + 1) > _MAX_BIASES:
        raise config.error(f"max_position_embeddings is {spec.max_model_len}, and ALiBi needs a table of that size")
    spec = with_gated_mlps(spec, _JINA_ACTIVATIONS[kind], has_bias=False)
    spec = replace(spec, norm="layer", has_norm_bias=True, num_types=bert.read_num_types(config))
    return bert.with_biased_attention(spec).with_attention(lambda _, attention: replace(attention, num_distances=farthest))


def _jina_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return bert.values_with_defaults({"vocab_size": 30528, "max_position_embeddings": 8192, **values})


JINA_BERT = Architecture(
    describe=partial(bert.describe, has_positions=False, has_down_bias=True),
    is_encoder=True,
    of_hf=_of_jina,
    hf_values=_jina_values,
    hf_name=bert.bare_name,
    hf_top=bert.BERT.hf_top,
    hf_layers="encoder.layer.",
    hf_layer={
        **bert.BERT.hf_layer,
        **with_biases({"mlp.wo": "down", "mlp.layernorm": "post_mlp_norm"}),
        "mlp.gated_layers.weight": Parts(("gate", "up")),
    },
    hf_unread=bert.BERT.hf_unread,
    made={"distances": Made("", None, _by_slope)},
)
