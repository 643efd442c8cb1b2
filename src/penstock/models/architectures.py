"""The table of architectures: what each one's files call its tensors, what its settings mean, and what a step of it computes.

The loaders and `deploy` ask here by name; a new architecture is one value in one file and one line here
(docs/how-to/add-a-model.md). Reads no files itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:  # a start reads files of one kind
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "penstock.models.llama:LLAMA",
        "mistral": "penstock.models.llama:MISTRAL",
        "qwen2": "penstock.models.llama:QWEN2",
    }
)
"""Our name of an architecture -> "module:attribute" of its `Architecture`."""
HF_CLASSES: Mapping[str, str] = MappingProxyType(
    {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
)
"""`architectures` in a config.json -> our name."""
GGUF_NAMES: Mapping[str, str] = MappingProxyType({"llama": "llama", "qwen2": "qwen2"})
"""`general.architecture` in a GGUF file -> our name."""

HF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm.weight": "attn_norm",
        "self_attn.q_proj.weight": "q",
        "self_attn.k_proj.weight": "k",
        "self_attn.v_proj.weight": "v",
        "self_attn.o_proj.weight": "o",
        "self_attn.q_proj.bias": "q_bias",
        "self_attn.k_proj.bias": "k_bias",
        "self_attn.v_proj.bias": "v_bias",
        "post_attention_layernorm.weight": "mlp_norm",
        "mlp.gate_proj.weight": "gate",
        "mlp.up_proj.weight": "up",
        "mlp.down_proj.weight": "down",
    }
)
"""End of a tensor's name after "model.layers.{i}.", in most models -> end of our name after "layers.{i}."."""
GGUF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm.weight": "attn_norm",
        "attn_q.weight": "q",
        "attn_k.weight": "k",
        "attn_v.weight": "v",
        "attn_output.weight": "o",
        "attn_q.bias": "q_bias",
        "attn_k.bias": "k_bias",
        "attn_v.bias": "v_bias",
        "ffn_norm.weight": "mlp_norm",
        "ffn_gate.weight": "gate",
        "ffn_up.weight": "up",
        "ffn_down.weight": "down",
    }
)
"""End of a tensor's name after "blk.{i}." -> end of our name after "layers.{i}."."""


def _as_read(_: object, spec: ModelSpec) -> ModelSpec:
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """All that Penstock knows of one architecture."""

    describe: Callable[[ModelSpec], Program]
    """Returns the program of one step."""
    of_hf: Callable[[JsonFile, ModelSpec], ModelSpec] = _as_read
    """Given config.json and the spec that its common keys mean, returns the spec with the architecture's own keys applied.

    Raises ModelError for a setting that would change the result and can't be computed.
    """
    of_gguf: Callable[[GgufFile, ModelSpec], ModelSpec] = _as_read
    """The same of a GGUF file's metadata."""
    hf_layer: Mapping[str, str] = field(default_factory=lambda: HF_LAYER)
    gguf_layer: Mapping[str, str] = field(default_factory=lambda: GGUF_LAYER)
    is_interleaved_in_gguf: bool = False
    """The converter has put the rows of q and k into the interleaved rope layout; else they are half-split, as ours are."""
    has_partial_rope: bool = False
    """Rotations may turn the first columns of a head only."""
    hf_norm_offset: float = 0.0
    """Added to the weights of norms of a Hugging Face directory: Gemma stores them less 1."""


def canonical_name(name: str, *, top: Mapping[str, str], block: re.Pattern[str], layer: Mapping[str, str]) -> str:
    """Our name of a file's tensor; an unknown one keeps its own, for the error message.

    `block` matches the number of a layer and the end of the name, which `layer` has; `top` has the tensors outside of layers.
    """
    found = block.fullmatch(name)
    if found is None:
        return top.get(name, name)
    suffix = layer.get(found[2])
    return f"layers.{int(found[1])}.{suffix}" if suffix else name


def find(name: str) -> Architecture:
    """The architecture of our name. Raises ModelError, which lists the supported ones, for any other."""
    target = ARCHITECTURES.get(name)
    if target is None:
        raise ModelError(
            f"The architecture {name!r} is not supported.", remedy=f"Supported are: {', '.join(sorted(ARCHITECTURES))}."
        )
    module, _, attribute = target.partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Architecture)
    return found


def describe(spec: ModelSpec) -> Program:
    """The program of one step of a model. Raises ModelError for an architecture that is not supported."""
    return find(spec.architecture).describe(spec)
