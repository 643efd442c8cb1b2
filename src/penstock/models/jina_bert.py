"""Jina BERT 2: BERT with gated MLPs and without positions, whose scores fall with the distance of two tokens (ALiBi).

Sources: Jina Embeddings 2, arXiv 2310.19923; ALiBi, arXiv 2108.12409; src/models/jina-bert-v2.cpp of llama.cpp. transformers
has no class of it. The variant for code, which norms queries and keys, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models import bert, checks
from penstock.models.architectures import Architecture, Made, Parts
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile
from penstock.models.program import Program
from penstock.types.model_spec import Activation, GatedMlp, LayerSpec, ModelSpec

MAX_DISTANCES = 1 << 23
"""Numbers of the table of biases: that of the published models has 200,000."""
_ACTIVATIONS: Mapping[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def describe(spec: ModelSpec) -> Program:
    """The program of one step. Only the last projection of an MLP has a bias."""
    build = Decoder(spec)
    x = build.norm(build.add_types(build.embed()), "embed_norm", "x")
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, x)
        x, attended = build.gather_after_last(layer, x, attended)
        x = build.norm(build.add_output(layer, x, attended), f"{at}.post_attn_norm", "x")
        build.add_linear(x, build.activated(layer, x), f"{at}.down", bias=f"{at}.down_bias")
        x = build.norm(x, f"{at}.post_mlp_norm", "x")
    return build.finish(x)


def slopes(num_heads: int) -> list[float]:
    """The fall of each head's scores per token of distance: 2^(-8/n), 2^(-16/n), ... for n heads.

    If n is no power of two, they are those of the power below, then every other one of the power above.
    """
    below = 1 << (num_heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (head + 1) / below) for head in range(below)]
    return found + [2.0 ** (-8.0 * (2 * head + 1) / (2 * below)) for head in range(num_heads - below)]


def _distances(spec: ModelSpec, _: NDArray[np.float32]) -> NDArray[np.float32]:
    attention = spec.attentions[0]
    away = np.abs(np.arange(-attention.num_distances, attention.num_distances + 1))
    return -np.outer(slopes(attention.num_heads), away).astype(np.float32)


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.require("position_embedding_type", str) != "alibi":
        raise config.error("position_embedding_type is not 'alibi'")
    kind = config.get("feed_forward_type", str) or "original"
    if kind not in _ACTIVATIONS:
        raise checks.unsupported(config.path, f"feed_forward_type is {kind[:80]!r}", f"{', '.join(_ACTIVATIONS)} are")
    farthest = max(1, spec.max_model_len - 1)
    if spec.attentions[0].num_heads * (2 * farthest + 1) > MAX_DISTANCES:
        raise config.error(f"max_position_embeddings is {spec.max_model_len}, and ALiBi needs a table of that size")

    def layer(_: int, one: LayerSpec) -> LayerSpec:
        assert isinstance(one.mlp, GatedMlp)
        mixer = replace(one.attention, rotation=None, mask="all", num_distances=farthest, has_qkv_bias=True, has_o_bias=True)
        return replace(one, mixer=mixer, mlp=replace(one.mlp, activation=_ACTIVATIONS[kind], has_bias=False))

    return replace(spec, norm="layer", has_norm_bias=True, num_types=bert.read_num_types(config)).with_layers(layer)


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return bert.values_with_defaults({"vocab_size": 30528, "max_position_embeddings": 8192, **values})


JINA_BERT = Architecture(
    describe=describe,
    is_encoder=True,
    of_hf=_of_hf,
    hf_values=_values,
    hf_name=bert.bare_name,
    hf_top=bert.BERT.hf_top,
    hf_layers="encoder.layer.",
    hf_layer={
        **bert.BERT.hf_layer,
        "mlp.gated_layers.weight": Parts(("gate", "up")),
        "mlp.wo.weight": "down",
        "mlp.wo.bias": "down_bias",
        "mlp.layernorm.weight": "post_mlp_norm",
        "mlp.layernorm.bias": "post_mlp_norm_bias",
    },
    hf_unread=bert.BERT.hf_unread,
    made={"distances": Made("", None, _distances)},
)
