"""Helpers that `parity/test_tiny_settings.py` shares with other tests."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from penstock.models.formats import WeightFormat
from penstock.models.weights import LoadedModel
from penstock.types import model_spec
from penstock.types.model_spec import ModelSpec, PlainMlp, Rotation
from support.parity.tiny_runs import MAX_RELATIVE_RMS

MIN_RELATIVE_RMS = 10 * MAX_RELATIVE_RMS["reference"]

KEPT = frozenset({"architecture", "length_note", "max_model_len", "tie_word_embeddings", "layers", "ending", "kv_layer"})
KEPT |= {"stretched_len", "conv"}
"""Fields that say nothing of a number, or which the weights that are there decide; layers are changed one by one, and endings
in `test_encoders.py`."""

SIZES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "embed_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "num_experts",
        "kernel",
        "num_key_heads",
        "key_dim",
        "value_dim",
        "layer_input_size",
        "rotary_dim",
        "query_rank",
        "num_groups",
    }
    | {"shared_size"}
    | {"num_types", "first_position", "num_distances", "span"}
)

MEANT_FOR: Mapping[bool, frozenset[str]] = {
    True: frozenset({"mask"}),
    False: frozenset({"softcap", "logit_softcap", "logit_scale"}),
}
"""Fields that matter to encoders alone, and to others alone."""

IF_THERE = frozenset({"mixer", "beside", "mlp", "factors", "latent", "relative", "norm_eps"})
"""Parts and settings that some layers lack."""

IF_ABSENT: Mapping[str, Any] = {
    "scale": 0.3,
    "window": 5,
    "softcap": 1.0,
    "logit_softcap": 2.0,
    "rotation": Rotation(inv_freq=(1.0, 0.3, 0.1, 0.03)),
    "query_growth": 0.5,
    "min_step": 2.0,
    "max_step": 0.3,
}
"""Values that matter where a model does without: their default is None, 0 or infinite."""

NOTHING_WITHOUT = {"growth_len": "query_growth", "num_chosen_groups": "num_groups", "num_group_scores": "num_groups"}
"""Settings that mean nothing while another one is 0."""


NOT_OF_LATENTS = ("mixer.window", "mixer.softcap", "mixer.rotation.query_growth")
"""Settings that latent attention lacks."""


def settings(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, a copy in which it is another one) for each setting of a dataclass, or of those inside."""
    kinds = typing.get_type_hints(type(value), vars(model_spec))
    for field in fields(value):
        found = getattr(value, field.name)
        if field.name in KEPT | SIZES or field.name.startswith("has_"):
            continue
        if field.name in IF_THERE and found is None:
            continue
        if field.name == "norm" and not value.has_norm_weights:  # of layer norms they are in the model
            continue
        if field.name in NOTHING_WITHOUT and not getattr(value, NOTHING_WITHOUT[field.name]):
            continue
        if is_dataclass(found) and not isinstance(found, type):
            for name, changed in settings(found):
                yield f"{field.name}.{name}", replace(value, **{field.name: changed})
        else:
            for changed in other_values(field.name, found, kinds[field.name]):
                has_gate = not isinstance(value, PlainMlp) and getattr(value, "has_gate", True)
                if has_gate or changed != "swiglu_clamped":  # which is of a gate
                    yield field.name, replace(value, **{field.name: changed})


def other_values(name: str, value: Any, kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is typing.Literal:
        yield from (choice for choice in typing.get_args(kind) if choice != value)
    elif isinstance(value, bool):
        yield not value
    elif value and value != math.inf:
        match value:
            case tuple():
                yield tuple(1.3 * item for item in value)
            case int():
                yield value + 1
            case float():
                yield 1.3 * value
            case _:
                raise AssertionError(f"say here how {name} may be changed")
    else:
        yield IF_ABSENT[name]


def with_float_weights(model: LoadedModel) -> LoadedModel:
    """The model with its weights as the reference backend computes with them, so that not every variant converts them."""
    weights = {
        name: replace(tensor, format=WeightFormat.F32, stored=tensor.dequantize(), scales=None, order=None, column_order=None)
        for name, tensor in model.weights.items()
    }
    return replace(model, weights=weights)


def variants(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """Yield the spec with one setting of the model or of a layer changed. Where mixers or MLPs are equal, only the first is."""
    found = list(settings(spec))
    seen: list[tuple[str, Any, Any]] = []
    for number, layer in enumerate(spec.layers):
        for name, changed in settings(layer):
            if getattr(layer.mixer, "latent", None) and name in NOT_OF_LATENTS:
                continue
            part = name.partition(".")[0]
            change = (name, getattr(layer, part), getattr(changed, part))
            if change in seen:
                continue
            seen.append(change)
            layers = (*spec.layers[:number], changed, *spec.layers[number + 1 :])
            found.append((f"layers.{number}.{name}", replace(spec, layers=layers)))
    meaningless = MEANT_FOR[spec.ending is None]
    yield from ((name, changed) for name, changed in found if name.rpartition(".")[2] not in meaningless)
