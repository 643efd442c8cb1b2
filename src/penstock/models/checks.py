"""Checks that every model passes before a backend sees it. The loaders call them."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.models.program import (
    Attention,
    Embed,
    EmbedPositions,
    EmbedTypes,
    Experts,
    LayerNorm,
    Linear,
    Logits,
    Program,
    RMSNorm,
    ShortConv,
    TextAttention,
)
from penstock.models.rope import RopeParameters, choice_words, frequencies
from penstock.models.weights import is_of_experts
from penstock.types.errors import ModelError, NotEnoughMemory
from penstock.types.model_spec import GatedMlp, LayerSpec, ModelSpec, Rotation

_log = logging.getLogger(__name__)
REFETCH = "Fetch the model again; if it stays so, its converter is at fault."
_UNSUPPORTED = "The file is in order, but Penstock cannot do this yet: choose another model, or ask for it in an issue."

MAX_MODEL_LEN = 1 << 26
_LIMITS: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 4096,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "intermediate_size": 1 << 22,
    "max_model_len": MAX_MODEL_LEN,
}
"""Far above every published model. Larger numbers come from a corrupt file and would exhaust memory."""
_MAX_FACTOR = 2.0**64
_MAX_ROTARY = 2.0**20
"""Far above every published model, too. Beyond them float32 overflows or underflows, and angles lose all digits."""


def json_object(text: bytes) -> dict[str, Any]:
    """Parse the JSON object of a model's file. Raises ValueError for anything else, and for text that is not valid UTF-8."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair would fail later, where its text is printed
    return values


def unsupported(path: Path, setting: str, supported: str) -> ModelError:
    """Return the error for a valid setting that Penstock lacks. `setting` is key and value, `supported` says what would do."""
    return ModelError(f"{path}: {setting}, which is not supported ({supported}).", remedy=_UNSUPPORTED)


def check_sizes(sizes: Mapping[str, int], path: Path) -> None:
    """Raise ModelError unless each size is in [1, limit]. Call this before building anything from the sizes."""
    for name, value in sizes.items():
        if not 1 <= value <= _LIMITS[name]:
            raise ModelError(f"{path}: {name} is {value}, outside of 1 to {_LIMITS[name]}.", remedy=REFETCH)
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        cause = f"{sizes['num_heads']} heads can't share {sizes['num_kv_heads']} key-value heads evenly"
        raise ModelError(f"{path}: {cause}.", remedy=REFETCH)
    if sizes["head_dim"] % 2:
        raise ModelError(f"{path}: rotary positions need an even head_dim, not {sizes['head_dim']}.", remedy=REFETCH)


def check_spec(spec: ModelSpec, path: Path) -> None:
    """Raise ModelError unless the spec's windows and real numbers are usable."""
    if not 0.0 <= spec.norm_eps < 1.0:
        raise ModelError(f"{path}: the epsilon of the norms is {spec.norm_eps}, outside of [0, 1).", remedy=REFETCH)
    for window in {attention.window for attention in spec.attentions}:
        if not 0 <= window <= MAX_MODEL_LEN:
            raise ModelError(f"{path}: a window of attention is {window}, outside of 0 to {MAX_MODEL_LEN}.", remedy=REFETCH)
    attentions = set(spec.attentions)
    factors = [spec.embed_scale, spec.residual_scale, spec.logit_scale, spec.logit_softcap]
    factors += [factor for attention in attentions for factor in (attention.scale or 0.0, attention.softcap)]
    if not all(factor == 0.0 or 1 / _MAX_FACTOR <= factor <= _MAX_FACTOR for factor in factors):
        cause = "a factor or cap of embeddings, scores, layers or logits is negative, too large or not a number"
        raise ModelError(f"{path}: {cause}.", remedy=REFETCH)
    rotations = {turn for attention in attentions if (turn := attention.rotation) is not None}
    numbers = [number for turn in rotations for number in (*turn.inv_freq, turn.attention_factor, turn.query_growth)]
    if not all(0.0 <= number <= _MAX_ROTARY for number in numbers):
        raise ModelError(f"{path}: a rotary frequency or factor is negative, too large or not a number.", remedy=REFETCH)


def rotation(parameters: RopeParameters, head_dim: int, served_len: int, path: Path) -> Rotation:
    """Return the rotation of a layer's heads. Raises ModelError if the numbers overflow."""
    if (words := choice_words(parameters, served_len)) is not None:
        _log.info("%s: %s", path, words)
    try:
        return frequencies(parameters, head_dim, served_len)
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"{path}: the rotary parameters have impossible numbers: {error}.", remedy=REFETCH) from error


def with_facts(layer: LayerSpec, names: Container[str], turn: Rotation | None) -> LayerSpec:
    """Return a layer with this rotation, and with biases and sinks if `names`, of the weights, has them."""
    attention = replace(
        layer.attention,
        rotation=turn,
        has_o_bias="layers.0.o_bias" in names,
        has_sinks="layers.0.sinks" in names,
    )
    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        mlp = replace(mlp, has_bias="layers.0.down_bias" in names)
    return replace(layer, mixer=attention, mlp=mlp)


def token_ids(ids: Mapping[str, int | None], vocab_size: int, path: Path) -> dict[str, int]:
    """Return the ids that name a token, by their names in the file. None and -1 (4294967295 if unsigned) mean no token.

    Raises ModelError for an id outside of the vocabulary.
    """
    found: dict[str, int] = {}
    for name, token_id in ids.items():
        if token_id in (-1, 0xFFFFFFFF):
            _log.info("%s: %s is %d, which means no token: ignored", path, name, token_id)
        elif token_id is not None:
            if not 0 <= token_id < vocab_size:
                raise ModelError(f"{path}: {name} is {token_id}, outside of the vocabulary of {vocab_size}.", remedy=REFETCH)
            found[name] = token_id
    return found


def weight_shapes(program: Program) -> dict[str, tuple[int, int]]:
    """Return (num_rows, num_cols) of every weight that a program reads, by our name. Vectors are [1, n]."""
    width = dict(program.buffers)
    shapes: dict[str, tuple[int, int]] = {}
    for op in program.ops:
        match op:
            case Embed():
                shapes[op.weight] = (program.vocab_size, width[op.out])
            case EmbedPositions():
                shapes[op.weight] = (op.first + op.num_positions, width[op.x])
            case EmbedTypes():
                shapes[op.weight] = (op.num_types, width[op.x])
            case TextAttention(distances=str(name)):
                shapes[name] = (op.num_heads, 2 * op.num_distances + 1)
            case RMSNorm():
                shapes[op.weight] = (1, op.group or width[op.x])
            case LayerNorm():
                shapes |= dict.fromkeys(_named(op.weight, op.bias), (1, width[op.x]))
            case Attention():
                shapes |= dict.fromkeys(_named(op.sinks), (1, op.num_heads))
            case Experts():
                shapes[op.router] = (op.num_experts, width[op.x])
                shapes[op.gate] = shapes[op.up] = (op.num_experts * op.intermediate_size, width[op.x])
                shapes[op.down] = (op.num_experts * width[op.out], op.intermediate_size)
                shapes |= dict.fromkeys(_named(op.router_bias, op.selection_bias), (1, op.num_experts))
                shapes |= dict.fromkeys(_named(op.gate_bias, op.up_bias), (op.num_experts, op.intermediate_size))
                shapes |= dict.fromkeys(_named(op.down_bias), (op.num_experts, width[op.out]))
            case ShortConv():
                shapes[op.weight] = (width[op.out], op.kernel)
                shapes |= dict.fromkeys(_named(op.bias), (1, width[op.out]))
            case Linear():
                shapes[op.weight] = (width[op.out], width[op.x])
                shapes |= dict.fromkeys(_named(op.bias), (1, width[op.out]))
            case Logits():
                shapes[op.weight] = (width[op.out], width[op.x])
            case _:
                pass
    return shapes


def _named(*names: str | None) -> list[str]:
    return [name for name in names if name is not None]


def check_weights(program: Program, shapes: Mapping[str, tuple[int, int]], path: Path) -> None:
    """Raise ModelError unless the weights are those that the program reads, with the same shapes.

    A tensor that the program does not read means that the model is a variant that we would compute wrongly.
    """
    wanted = weight_shapes(program)
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ModelError(f"{path}: {_some(missing)} missing.", remedy=REFETCH)
    extra = [name for name in shapes if name not in wanted]
    if extra:
        cause = f"{_some(extra)} not part of this architecture as Penstock knows it"
        raise ModelError(f"{path}: {cause}.", remedy="This variant is not supported: its output would be wrong.")
    for name, (rows, cols) in wanted.items():
        if shapes[name] != (rows, cols):
            found = f"{name} is {shapes[name][0]} x {shapes[name][1]}"
            raise ModelError(f"{path}: {found}, but the model's description asks for {rows} x {cols}.", remedy=REFETCH)


def check_memory(held: Mapping[str, int], max_bytes: int | None, path: Path, *, experts_on_disk: bool) -> None:
    """Raise NotEnoughMemory if the weights would take more than `max_bytes`. `held` has the bytes of each."""
    expert_bytes = sum(size for name, size in held.items() if is_of_experts(name))
    needed = sum(held.values()) - (expert_bytes if experts_on_disk else 0)
    if max_bytes is None or needed <= max_bytes:
        return
    remedy = "Free memory, or use a smaller or more strongly quantised model."
    if not experts_on_disk and needed - expert_bytes <= max_bytes:
        remedy = f"{remedy[:-1]}; or keep the experts, {expert_bytes / 2**20:,.0f} MiB of them, on disk: --experts-on-disk."
    raise NotEnoughMemory(
        f"{path}: the weights take {needed / 2**20:,.0f} MiB, but only {max_bytes / 2**20:,.0f} MiB are available.",
        remedy=remedy,
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"the tensor {shown} is" if len(names) == 1 else f"the tensors {shown} are"
