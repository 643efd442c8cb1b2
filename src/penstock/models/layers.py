"""Settings of layers that several architectures share: experts, windows, and layers without rotation."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.models import checks
from penstock.models.architectures import Parts
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.rope import inverse_frequencies
from penstock.types.errors import damaged
from penstock.types.model_spec import Activation, AttentionSpec, ExpertsMlp, GatedMlp, LayerSpec, ModelSpec, Rotation

GGUF_EXPERTS: Mapping[str, str | Parts] = {
    "ffn_gate_inp.weight": "router",
    **{f"ffn_{name}_exps.weight": Parts((f"expert_{name}",)) for name in ("gate", "up", "down")},
    "ffn_gate_up_exps.weight": Parts(("expert_gate", "expert_up"), is_by_expert=True),
    "exp_probs_b.bias": "selection_bias",
    "ffn_gate_inp_shexp.weight": "shared_router",
    **{f"ffn_{name}_shexp.weight": f"shared_{name}" for name in ("gate", "up", "down")},
}
MOST_GROUPS = 64
"""Maximum expert groups per layer: `kMostGroups` of native/experts.h."""
_PERIODS = {
    **{"afmoe": 4, "cohere2": 4, "exaone4": 4, "exaone_moe": 4, "gemma2": 2, "gemma3": 6},
    **{"embedding_gemma": 6, "gpt_oss": 2, "modernbert": 3, "olmo2": 4, "olmo3": 4, "smollm3": 4, "vaultgemma": 2},
}
"""The default n of an architecture: every n-th layer sees all positions (in SmolLM3: has no rotation)."""


def experts_of_hf(config: JsonFile, spec: ModelSpec, *, width: str, dense: Container[int] = (), **others: Any) -> ModelSpec:
    """Return the spec with config.json's experts in every layer that is not `dense`. `others`: fields of `ExpertsMlp`.

    `width` is the key with an expert's intermediate size.
    """
    one, other = config.get("num_experts", int), config.get("num_local_experts", int)
    if one is not None and other is not None and one != other:
        raise config.error(f"num_experts is {one}, and num_local_experts is {other}")
    mlp = ExpertsMlp(
        num_experts=config.require("num_experts", int) if other is None else other,
        num_experts_per_token=config.require("num_experts_per_tok", int),
        intermediate_size=config.require(width, int),
        **others,
    )
    return with_experts(spec, mlp, config.path, dense=dense)


def sigmoid_experts_of_hf(
    config: JsonFile, spec: ModelSpec, dense: Container[int], *, num_shared: str = "n_shared_experts"
) -> ModelSpec:
    """Return the spec with experts chosen as in DeepSeek V3, in every layer that is not `dense`.

    `num_shared` is the key with the number of shared experts.
    """
    groups = groups_of_hf(config)
    return experts_of_hf(
        config,
        spec,
        width="moe_intermediate_size",
        dense=dense,
        scoring="sigmoid",
        is_renormalised=config.require("norm_topk_prob", bool),
        share_factor=config.require("routed_scaling_factor", float),
        has_selection_bias=True,
        num_group_scores=2 if groups else 1,
        shared_size=config.require("moe_intermediate_size", int) * config.require(num_shared, int),
        **groups,
    )


def groups_of_hf(config: JsonFile) -> Mapping[str, int]:
    """Return the fields of `ExpertsMlp` for the groups of experts; none if there is one group."""
    number, chosen = config.require("n_group", int), config.require("topk_group", int)
    if number < 1:
        raise config.error(f"n_group is {number}")
    return {} if number == chosen == 1 else {"num_groups": number, "num_chosen_groups": chosen}


def dense_layers_of_hf(config: JsonFile, spec: ModelSpec) -> list[int]:
    """Return the layers that `mlp_layer_types` calls dense; without that key, the first `first_k_dense_replace`."""
    kinds = config.get("mlp_layer_types", list)
    if kinds is None:
        return list(range(min(config.require("first_k_dense_replace", int), spec.num_layers)))
    if len(kinds) != spec.num_layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise config.error(f"mlp_layer_types does not say for {spec.num_layers} layers whether they are dense or sparse")
    return [number for number, kind in enumerate(kinds) if kind == "dense"]


def experts_of_gguf(file: GgufFile, spec: ModelSpec, **others: Any) -> ModelSpec:
    """Return the spec with a GGUF file's experts in every layer. Raises ModelError for shared experts or dense layers.

    `others`: fields of `ExpertsMlp`.
    """
    key = file.architecture
    for name in ("expert_shared_count", "leading_dense_block_count", "expert_group_count"):
        if number := file.get(f"{key}.{name}", int):
            raise checks.unsupported(file.path, f"{key}.{name} is {number}", "routed experts in every layer are")
    return with_experts(spec, read_gguf_experts(file, **others), file.path)


def read_gguf_experts(file: GgufFile, *, num_shared: int = 0, **others: Any) -> ExpertsMlp:
    """Return a GGUF file's experts. `num_shared` experts of the same width are shared; `others`: fields of `ExpertsMlp`."""
    key, known = file.architecture, {"softmax": 1, "sigmoid": 2}[others.get("scoring", "softmax")]
    if (function := file.get(f"{key}.expert_gating_func", int) or known) != known:
        raise checks.unsupported(file.path, f"{key}.expert_gating_func is {function}", f"{known} is")
    width = file.get(f"{key}.expert_feed_forward_length", int) or file.require(f"{key}.feed_forward_length", int)
    others.setdefault("shared_size", width * num_shared)
    return ExpertsMlp(
        num_experts=file.require(f"{key}.expert_count", int),
        num_experts_per_token=file.require(f"{key}.expert_used_count", int),
        intermediate_size=width,
        share_factor=file.get(f"{key}.expert_weights_scale", float) or 1.0,
        **others,
    )


def with_experts(spec: ModelSpec, mlp: ExpertsMlp, path: Path, *, dense: Container[int] = ()) -> ModelSpec:
    """Return the spec with these experts in every layer that is not `dense`. Raises ModelError for impossible numbers."""
    if not 1 <= mlp.num_experts_per_token <= mlp.num_experts <= 1 << 14 or mlp.intermediate_size < 1:
        chosen = f"{mlp.num_experts_per_token} of {mlp.num_experts} experts"
        raise damaged(path, f"{chosen} of {mlp.intermediate_size} columns are not a possible mixture")
    if mlp.num_groups:
        _check_groups(mlp, path)
    if not 0 <= mlp.shared_size <= checks.LIMITS["intermediate_size"]:
        raise damaged(path, f"a shared expert of {mlp.shared_size} columns is not possible")
    if not 0.0 <= mlp.share_factor <= 1e6:
        raise damaged(path, f"the factor of the experts' shares is {mlp.share_factor}")
    return spec.with_layers(lambda i, layer: layer if i in dense else replace(layer, mlp=mlp))


def _check_groups(mlp: ExpertsMlp, path: Path) -> None:
    if not 1 <= mlp.num_groups <= MOST_GROUPS or mlp.num_experts % mlp.num_groups:
        raise damaged(path, f"{mlp.num_experts} experts are not in {mlp.num_groups} groups; at most {MOST_GROUPS} are possible")
    size = mlp.num_experts // mlp.num_groups
    is_enough = mlp.num_experts_per_token <= size * mlp.num_chosen_groups and mlp.num_group_scores <= size
    if not 1 <= mlp.num_chosen_groups <= mlp.num_groups or not is_enough:
        chosen = f"{mlp.num_experts_per_token} experts of {mlp.num_chosen_groups} of {mlp.num_groups} groups of {size}"
        raise damaged(path, f"{chosen} can't be chosen")


def with_gpt_layers(spec: ModelSpec, activation: Activation) -> ModelSpec:
    """Return the spec with GPT's layers: layer norms with biases, and ungated MLPs."""
    return replace(spec, norm="layer", has_norm_bias=True).with_plain_mlps(activation)


def with_gated_mlps(spec: ModelSpec, activation: Activation, *, has_bias: bool | None = None) -> ModelSpec:
    """Return the spec with this activation in its gated MLPs, and with this `has_bias` unless it is None."""

    def changed(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, GatedMlp)
        mlp = replace(layer.mlp, activation=activation, has_bias=layer.mlp.has_bias if has_bias is None else has_bias)
        return replace(layer, mlp=mlp)

    return spec.with_layers(changed)


def with_windows(config: JsonFile, spec: ModelSpec, window: int | None, usual: Sequence[bool]) -> ModelSpec:
    """Return the spec with an attention window in the layers that config.json's `layer_types` names, or else `usual` marks.

    If `window` is None, no layer has one. Raises ModelError for an impossible window.
    """
    is_local = usual
    if config.values.get("layer_types") is not None:
        kinds = read_layer_types(config, spec.num_layers, "full_attention", "sliding_attention")
        is_local = [kind == "sliding_attention" for kind in kinds]
    return with_local_layers(spec, window, is_local, config.path)


def with_local_layers(spec: ModelSpec, window: int | None, is_local: Sequence[bool], path: Path) -> ModelSpec:
    """Return the spec with a window in its local layers, or in none if it is None. Raises ModelError if it is impossible."""
    if window is None:
        return spec
    check_window(window, is_local, path)
    return spec.with_windows(window, is_local)


def check_window(window: int, is_local: Sequence[bool], path: Path) -> None:
    """Raise ModelError for an impossible window of local layers. A window of 0 would make them global."""
    if any(is_local) and not 1 <= window <= checks.MAX_MODEL_LEN:
        raise damaged(path, f"a window of attention is {window}, outside of 1 to {checks.MAX_MODEL_LEN}")


def with_local_base(spec: ModelSpec, base: float) -> ModelSpec:
    """Return the spec with this base of rotary frequencies in layers with an attention window."""

    def rotation(head_dim: int) -> Rotation:
        return Rotation(inv_freq=inverse_frequencies(head_dim, base))

    return spec.with_attention(lambda _, own: replace(own, rotation=rotation(own.head_dim)) if own.window else own)


def with_both_sides(spec: ModelSpec) -> ModelSpec:
    """Return the spec with bidirectional attention. As in transformers, a window of n then reaches n tokens each way."""

    def changed(_: int, attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, mask="all", window=attention.window + 1 if attention.window else 0)

    return spec.with_attention(changed)


def rope_base(file: GgufFile, key: str, default: float) -> float:
    """Return the base of a GGUF file's rotary frequencies, or `default` if it is missing or 0. Raises ModelError."""
    base = file.get(key, float) or default
    if not 1.0 < base < math.inf:
        raise file.error(f"{key} is {base}, not a number above 1")
    return base


def local_layers_of_gguf(file: GgufFile, spec: ModelSpec, *, first: int = 1) -> list[bool]:
    """Return for each layer whether it has an attention window. The file has a value per layer, a period, or neither.

    Raises ModelError if it has neither, and the architecture has no default period.
    """
    key = f"{file.architecture}.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), list):
        is_local = file.get_list(key, bool)
        if len(is_local) != spec.num_layers:
            raise file.error(f"{key} has {len(is_local)} values for {spec.num_layers} layers")
        return is_local
    period = file.get(key, int)
    if not period and spec.architecture not in _PERIODS:
        raise file.error(f"{key} is {'missing' if period is None else period}, so the layers with a window are unknown")
    return local_layers(spec, period, first=first)


def local_layers(spec: ModelSpec, period: int | None = None, *, first: int = 1) -> list[bool]:
    """Return for each layer whether it has an attention window or a delta net: all but the last of each period have one.

    `first`: number of the first layer within its period. With 0, the first of each period has no window instead.
    """
    period = period or _PERIODS[spec.architecture]
    return [(layer + first) % period != 0 for layer in range(spec.num_layers)]


def without_global_rotations(spec: ModelSpec) -> ModelSpec:
    return spec.with_attention(lambda _, attention: attention if attention.window else replace(attention, rotation=None))
