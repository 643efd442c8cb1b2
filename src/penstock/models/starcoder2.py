"""StarCoder 2 (BigCode): Llama with layer norms, biases everywhere, and an MLP without a gate.

Sources: arXiv 2402.19173; modeling_starcoder2.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import llama
from penstock.models.architectures import HF_LAYER, Architecture
from penstock.models.hf_config import JsonFile, read_activation
from penstock.types.model_spec import Activation, ModelSpec

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile

_WINDOW = 4096
"""All published models have this one, and GGUF files do not name it."""


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"tie_word_embeddings": True, **values, "rms_norm_eps": values.get("norm_epsilon", 1e-5)}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return _with(spec, read_activation(config, "hidden_act", "gelu_pytorch_tanh"), config.get("sliding_window", int) or 0)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    return _with(spec, "gelu_tanh", file.get("starcoder2.attention.sliding_window", int, _WINDOW) or 0)


def _with(spec: ModelSpec, activation: Activation, window: int) -> ModelSpec:
    spec = replace(spec, norm="layer", has_norm_bias=True).with_plain_mlps(activation)
    return spec.with_attention(lambda _, attention: replace(attention, window=window))


STARCODER2 = Architecture(
    describe=llama.describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_layer={
        **HF_LAYER,
        "mlp.c_fc.weight": "up",
        "mlp.c_fc.bias": "up_bias",
        "mlp.c_proj.weight": "down",
        "mlp.c_proj.bias": "down_bias",
    },
)
