"""Architectures whose norms have no weights: OLMo 1 (arXiv 2402.00838) and NanoChat.

Sources: modeling_olmo.py and modeling_nanochat.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.models import llama
from penstock.models.architectures import HF_LAYER, Architecture, Made, with_biases
from penstock.models.decoder import ONES
from penstock.models.hf_config import JsonFile, read_activation
from penstock.types.model_spec import AttentionSpec, ModelSpec


def _of_olmo(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("clip_qkv", None)
    return replace(llama.of_hf(config, spec), norm="layer", has_norm_weights=False)


OLMO = Architecture(
    describe=llama.describe,
    of_hf=_of_olmo,
    hf_values=lambda values: {**values, "rms_norm_eps": 1e-5},
    made={ONES: Made("", None, lambda spec, _: np.ones((1, spec.hidden_size), np.float32))},
)
"""Directories only: GGUF files were not compared with llama.cpp."""


# NanoChat (Andrej Karpathy): norms of the embeddings, and of q and k after RoPE, which rotates in reverse.


def _nanochat_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0, **values}


def _of_nanochat(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    cap = config.get("final_logit_softcapping", float) or 0.0
    plain = spec.with_plain_mlps(read_activation(config, "hidden_act", "relu2"))
    return replace(plain, logit_softcap=cap, has_norm_weights=False).with_attention(_with_reversed_rotation)


def _with_reversed_rotation(_: int, attention: AttentionSpec) -> AttentionSpec:
    assert attention.rotation is not None
    frequencies = tuple(-frequency for frequency in attention.rotation.inv_freq)
    return replace(attention, rotation=replace(attention.rotation, inv_freq=frequencies))


NANOCHAT = Architecture(
    describe=partial(llama.describe, qk_norms="rotated", has_embed_norm=True),
    of_hf=_of_nanochat,
    hf_values=_nanochat_values,
    hf_layer={**HF_LAYER, **with_biases({"mlp.fc1": "up", "mlp.fc2": "down"})},
)
"""llama.cpp has no NanoChat."""
