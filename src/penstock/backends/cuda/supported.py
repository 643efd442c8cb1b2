"""The models that this backend computes, and the bytes of their KV blocks. Needs no PyTorch, so plans can ask it anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.models.program import KvShape, Program, States, features
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KEY_GROUP, KvDtype
from penstock.types.model_spec import Activation

REMEDY = "Use --device cpu for this model."
ACTIVATIONS: Mapping[Activation, int] = MappingProxyType(
    {"silu": 0, "gelu_tanh": 1, "gelu": 2, "gelu_quick": 3, "relu": 4, "relu2": 5, "tanh": 6, "swiglu_clamped": 7}
)
"""Activations and their numbers in kernels. `swiglu_clamped` always has a gate."""
COMPUTED = frozenset(
    {
        *("Embed", "Embed.scale", "EmbedPositions", "EmbedPositions.first", "EmbedTypes", "EmbedTypes.num_types"),
        *("RMSNorm", "RMSNorm.group", "LayerNorm", "LayerNorm without bias"),
        *("Linear", "Linear.bias", "Linear.residual", "Rope", "Rope.attention_factor", "Rope.growth", "Rope.growth_len"),
        *("KvWrite", "KvWrite.bias", "KvWrite.inv_freq", "KvWrite.attention_factor"),
        *("Attention", "Attention.window", "Attention.softcap", "Attention.sinks"),
        *("Add", "Add.factor", "GatherRows", "Softcap"),
        *("GatedActivation", *(f"GatedActivation with {kind}" for kind in ACTIVATIONS)),
        *("Act", *(f"Act with {kind}" for kind in ACTIVATIONS if kind != "swiglu_clamped")),
        *("Experts", *(f"Experts with {kind}" for kind in ACTIVATIONS), "Experts.scoring", "Experts.is_renormalised"),
        *("Experts.share_factor", "Experts.router_bias", "Experts.selection_bias"),
        *("Experts.gate_bias", "Experts.up_bias", "Experts.down_bias"),
        *("TextAttention", "TextAttention.mask", "TextAttention.window"),
        *("TextAttention.distances", "TextAttention.num_distances", "FirstRows", "MeanRows"),
        *("Logits", "Logits.scale", "States", "States.is_normalised"),
    }
)
"""The `features` that this backend computes."""


def check_program(program: Program) -> None:
    """Raise ModelError if this backend can't compute the program."""
    only_kv_shape(program)
    for feature in (feature for op in program.ops for feature in features(op)):
        if feature not in COMPUTED:
            raise ModelError(f"the cuda backend can't compute {feature}.", remedy=REMEDY)
    ending = program.ending
    if program.is_one_pass != isinstance(ending, States):
        reads = "texts" if program.is_one_pass else "a KV cache"
        raise ModelError(
            f"the cuda backend can't compute {type(ending).__name__} of a program that reads {reads}.", remedy=REMEDY
        )


def only_kv_shape(program: Program) -> KvShape:
    """Return the shape of all layers' keys and values. Raises ModelError if layers differ or have latents."""
    if any(shape.num_latent for shape in program.kv_shapes):
        raise ModelError("the cuda backend can't compute latent attention yet.", remedy=REMEDY)
    if len(set(program.kv_shapes)) > 1:
        words = " and ".join(f"{shape.num_kv_heads} x {shape.head_dim}" for shape in dict.fromkeys(program.kv_shapes))
        raise ModelError(
            f"the cuda backend can't store keys and values of several shapes yet: the model's layers have {words} columns.",
            remedy=REMEDY,
        )
    return program.kv_shapes[0]


def block_bytes(program: Program, kv_dtype: KvDtype, block_size: int) -> int:
    """Return the bytes of a block's keys, values and scales in all layers, with unquantised ones in bf16 (`PagedKvCache`)."""
    return len(program.kv_shapes) * block_size * position_bytes(only_kv_shape(program), kv_dtype)


def position_bytes(shape: KvShape, kv_dtype: KvDtype) -> int:
    """Return the bytes of one position in one layer."""
    scale_bytes = 2 * key_groups(shape.head_dim) + 4  # a bf16 number for each group of a key, a float32 for the value
    head_bytes = 2 * shape.head_dim + scale_bytes if kv_dtype is KvDtype.INT8 else 4 * shape.head_dim
    return shape.num_kv_heads * head_bytes


def key_groups(head_dim: int) -> int:
    """Return how many scales a key has in int8."""
    return -(-head_dim // KEY_GROUP)
