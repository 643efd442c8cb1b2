"""Checks that every model passes before a backend sees it. The loaders call them."""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.models import program as prog
from penstock.models.rope import RopeParameters, frequencies, length_note, stretched_len
from penstock.models.weights import is_of_experts
from penstock.types.errors import ModelError, NotEnoughFreeMemory, damaged
from penstock.types.model_spec import AttentionSpec, GatedMlp, LayerSpec, LinearAttentionSpec, ModelSpec, Rotation

_log = logging.getLogger(__name__)

MAX_MODEL_LEN = 1 << 26
MAX_KERNEL = 64
"""Largest kernel of a convolution before linear attention. Published models have 4."""
LIMITS: Mapping[str, int] = {
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


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else, and for text that is not valid UTF-8."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair would fail later, where its text is printed
    return values


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory. Raises ModelError if it can't be opened."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        remedy = "Check the path, or fetch the whole model again; a split model needs all its files."
        raise ModelError(f"{path}: there is no such file.", remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be opened: {error}.", remedy="Check the file and its permissions.") from error


def unsupported(path: Path, setting: str, supported: str) -> ModelError:
    """Return the error for a valid setting that Penstock does not support. `supported` says which values are."""
    remedy = "The file is valid, but Penstock does not support this setting yet. Use another model, or open an issue."
    return ModelError(f"{path}: {setting}, which is not supported ({supported}).", remedy=remedy)


def check_sizes(sizes: Mapping[str, int], path: Path) -> None:
    """Raise ModelError unless each size, such as `num_heads`, is in [1, its limit]. Call this before using the sizes."""
    for name, value in sizes.items():
        if not 1 <= value <= LIMITS[name]:
            raise damaged(path, f"{name} is {value}, outside of 1 to {LIMITS[name]}")
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise damaged(path, f"{sizes['num_heads']} heads can't share {sizes['num_kv_heads']} key-value heads evenly")
    if sizes["head_dim"] % 2:
        raise damaged(path, f"rotary positions need an even head_dim, not {sizes['head_dim']}")


def check_spec(spec: ModelSpec, path: Path) -> None:
    """Raise ModelError for an impossible window, or for factors so large or small that float32 would overflow or underflow."""
    if not 0.0 <= spec.norm_eps < 1.0:
        raise damaged(path, f"the epsilon of the norms is {spec.norm_eps}, outside of [0, 1)")
    if not spec.attentions and not spec.linear_attentions:
        raise unsupported(path, "no layer attends", "the KV cache needs a layer with attention or a large state")
    if spec.ending is not None:
        _check_ending(spec, path)
    attentions = set(spec.attentions)
    for attention in attentions:
        if not 0 <= attention.window <= MAX_MODEL_LEN:
            raise damaged(path, f"a window of attention is {attention.window}, outside of 0 to {MAX_MODEL_LEN}")
    for linear in set(spec.linear_attentions):
        _check_linear_attention(linear, path)
    factors = [spec.embed_scale, spec.residual_scale, spec.logit_scale, spec.logit_softcap]
    factors += [factor for attention in attentions for factor in (attention.scale or 0.0, attention.softcap)]
    for told in {layer.factors for layer in spec.layers if layer.factors is not None}:
        factors += [told.gate, *told.conv, told.steps, told.mixed, told.attended, told.mlp_in, told.mlp_out]
    if not all(factor == 0.0 or 2.0**-64 <= factor <= 2.0**64 for factor in factors):
        raise damaged(path, "a factor or cap of embeddings, scores, layers or logits is negative, too large or not a number")
    rotations = {turn for attention in attentions if (turn := attention.rotation) is not None}
    numbers = [number for turn in rotations for number in (*map(abs, turn.inv_freq), turn.attention_factor, turn.query_growth)]
    if not all(0.0 <= number <= 2.0**20 for number in numbers):
        raise damaged(path, "a rotary frequency or factor is negative, too large or not a number")


def _check_ending(spec: ModelSpec, path: Path) -> None:
    """Raise ModelError if a model for embeddings or scores has a layer that only generation supports."""
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    found = {
        "a recurrent state": any(not isinstance(mixer, AttentionSpec) for mixer in mixers),
        "latent attention": any(attention.latent for attention in spec.attentions),
        "a cap of attention scores": any(attention.softcap for attention in spec.attentions),
        "gated attention": any(attention.has_gate for attention in spec.attentions),
        "layers that read the keys and values of another layer": len(spec.kv_attentions) < len(spec.attentions),
    }
    if what := next((words for words, is_found in found.items() if is_found), None):
        cause = f"models with {what} are not supported for embeddings and scores"
        raise ModelError(f"{path}: {cause}.", remedy="Serve this model with --task generate.")


def _check_linear_attention(spec: LinearAttentionSpec, path: Path) -> None:
    sizes = (spec.num_heads, spec.num_key_heads, spec.key_dim, spec.value_dim)
    if not all(1 <= size <= LIMITS["num_heads"] for size in sizes) or spec.num_heads % spec.num_key_heads:
        heads = f"{spec.num_heads} value heads of {spec.value_dim} columns, {spec.num_key_heads} key heads of {spec.key_dim}"
        raise damaged(path, f"linear attention is not possible with {heads}")
    if not 2 <= spec.kernel <= MAX_KERNEL:
        raise unsupported(path, f"the convolution's kernel has {spec.kernel} positions", f"2 to {MAX_KERNEL} are")


def rotation(parameters: RopeParameters, head_dim: int, served_len: int, path: Path) -> Rotation:
    """Return the frequencies of a layer's rotary embedding. Raises ModelError if the parameters overflow."""
    try:
        turn, longest = frequencies(parameters, head_dim, served_len), stretched_len(parameters)
        words = length_note(parameters, served_len)
    except (ArithmeticError, ValueError) as error:
        raise damaged(path, f"the rotary parameters have impossible numbers: {error}") from error
    if words:
        _log.info("%s: %s", path, words)
    return replace(turn, length_note=words, stretched_len=longest)


def longest_text(trained_len: int, served_len: int, stretched_len: int) -> int:
    """Return the limit of a text's tokens: the model's own, or the requested length as far as its rotations stretch."""
    return max(trained_len, min(served_len, stretched_len, MAX_MODEL_LEN))


def with_facts(layer: LayerSpec, names: Container[str], turn: Rotation | None) -> LayerSpec:
    """Return a layer with the rotation `turn`, and with biases and attention sinks if layer 0 has any in `names`."""
    has_o_bias, has_sinks = "layers.0.o_bias" in names, "layers.0.sinks" in names
    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        mlp = replace(mlp, has_bias="layers.0.down_bias" in names)
    mixer = replace(layer.attention, rotation=turn, has_o_bias=has_o_bias, has_sinks=has_sinks)
    return replace(layer, mixer=mixer, mlp=mlp)


def token_ids(ids: Mapping[str, int | None], vocab_size: int, path: Path) -> dict[str, int]:
    """Return the special-token ids that are set, by name. None and -1 (4294967295 if unsigned) mean unset."""
    found: dict[str, int] = {}
    for name, token_id in ids.items():
        if token_id in (-1, 0xFFFFFFFF):
            _log.info("%s: %s is %d, which means no token: ignored", path, name, token_id)
        elif token_id is not None:
            if not 0 <= token_id < vocab_size:
                raise damaged(path, f"{name} is {token_id}, outside of the vocabulary of {vocab_size}")
            found[name] = token_id
    return found


def weight_shapes(program: prog.Program) -> dict[str, tuple[int, int]]:
    """Return (num_rows, num_cols) of every weight that a program reads. Vectors are [1, n]."""
    width = dict(program.buffers)
    shapes: dict[str, tuple[int, int]] = {}

    def add(num_rows: int, num_cols: int, *names: str | None) -> None:
        shapes.update({name: (num_rows, num_cols) for name in names if name is not None})

    for op in program.ops:
        match op:
            case prog.Embed():
                add(program.vocab_size, width[op.out], op.weight)
            case prog.EmbedPositions():
                add(op.first + op.num_positions, width[op.x], op.weight)
            case prog.EmbedTypes():
                add(op.num_types, width[op.x], op.weight)
            case prog.TextAttention():
                add(op.num_heads, 2 * op.num_distances + 1, op.distances)
                add(1, op.num_heads, op.sinks)
                if op.relative is not None:
                    add(1, width[op.q], op.relative.norm, op.relative.norm_bias)
                    add(2 * op.relative.spec.span, width[op.q], op.relative.table)
            case prog.RMSNorm():
                add(1, width[op.x] if op.is_by_column else op.group or width[op.x], op.weight)
            case prog.LayerNorm():
                add(1, width[op.x], op.weight, op.bias)
            case prog.Attention():
                add(1, op.num_heads, op.sinks)
            case prog.Experts():
                num, inner, outer = op.num_experts, op.intermediate_size, width[op.out]
                add(num, width[op.x], op.router)
                add(num * inner, width[op.x], op.gate, op.up)
                add(num * outer, inner, op.down)
                add(1, num, op.router_bias, op.selection_bias, op.share_scale)
                add(num, inner, op.gate_bias, op.up_bias)
                add(num, outer, op.down_bias)
                add(1, outer, op.sum_bias)
            case prog.HeadLinear():
                rows, cols = (op.x, op.out) if op.is_transposed else (op.out, op.x)
                add(width[rows], width[cols] // op.num_heads, op.weight)
            case prog.Scale():
                add(1, 1, op.weight)
            case prog.ShortConv() | prog.CausalConv():
                add(width[op.out], op.kernel, op.weight)
                add(1, width[op.out], op.bias)
            case prog.LinearAttention():
                add(1, op.num_heads, op.step_bias, op.decay, op.skip)
            case prog.Linear():
                add(width[op.out], width[op.x], op.weight)
                add(1, width[op.out], op.bias)
            case prog.Logits():
                add(width[op.out], width[op.x], op.weight)
                add(1, width[op.out], op.bias, op.tokens)
    return shapes


def check_weights(program: prog.Program, shapes: Mapping[str, tuple[int, int]], path: Path) -> None:
    """Raise ModelError unless `shapes` has exactly the weights that the program reads.

    A tensor that the program does not read is an error too: the model needs a computation that the program lacks.
    """
    wanted = weight_shapes(program)
    if missing := [name for name in wanted if name not in shapes]:
        raise damaged(path, f"{_some(missing)} missing")
    if extra := [name for name in shapes if name not in wanted]:
        cause = f"{_some(extra)} not part of this architecture as Penstock knows it"
        raise ModelError(f"{path}: {cause}.", remedy="This variant is not supported: its output would be wrong.")
    for name, (rows, cols) in wanted.items():
        if shapes[name] != (rows, cols):
            found = f"{name} is {shapes[name][0]} x {shapes[name][1]}"
            raise damaged(path, f"{found}, but the model's settings require {rows} x {cols}")


def check_memory(held: Mapping[str, int], max_bytes: int | None, path: Path, *, experts_on_disk: bool) -> None:
    """Raise NotEnoughMemory if the weights need more than `max_bytes`. `held`: bytes in memory of each weight, by name."""
    expert_bytes = sum(size for name, size in held.items() if is_of_experts(name))
    needed = sum(held.values()) - (expert_bytes if experts_on_disk else 0)
    if max_bytes is None or needed <= max_bytes:
        return
    instead = "Use a smaller or more strongly quantised model"
    if not experts_on_disk and needed - expert_bytes <= max_bytes:
        instead += f", keep the experts, {expert_bytes / 2**20:,.0f} MiB of them, on disk (--experts-on-disk)"
    raise NotEnoughFreeMemory(
        f"{path}: the weights take {needed / 2**20:,.0f} MiB, but only {max_bytes / 2**20:,.0f} MiB are available.",
        instead=instead,
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"the tensor {shown} is" if len(names) == 1 else f"the tensors {shown} are"
