"""Computes the native backend's memory for a model, in bytes, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.models import program as prog
from penstock.models.program import KvShape, PagedState, Program
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KEY_GROUP, KvDtype
from penstock.types.kv_dtype import state_bytes as bytes_of_columns
from penstock.types.model_spec import ExpertsMlp, ModelSpec, ShortConvSpec


def kv_bytes_per_token(spec: ModelSpec, dtype: KvDtype) -> int:
    """Return the bytes of one token's keys, values and scales in all layers."""
    return sum(KvShape.of(attention).num_bytes(dtype) for attention in spec.kv_attentions)


def state_bytes(spec: ModelSpec) -> int:
    num_columns = sum(layer.mixer.kernel - 1 for layer in spec.layers if isinstance(layer.mixer, ShortConvSpec))
    return bytes_of_columns(num_columns, spec.hidden_size)


def block_bytes(spec: ModelSpec, dtype: KvDtype, block_size: int) -> int:
    return block_size * kv_bytes_per_token(spec, dtype) + state_bytes(spec)


def check_format(shapes: Iterable[KvShape], dtype: KvDtype) -> None:
    """Raise ModelError if the native backend can't store keys and values of these shapes in this format."""
    if dtype is not KvDtype.INT4:
        return
    for shape in shapes:
        why = ""
        if shape.num_latent:
            why = "the model's keys are latents (latent attention)"
        elif shape.head_dim % KEY_GROUP:
            why = f"the model's heads have {shape.head_dim} columns, and multiples of {KEY_GROUP} are supported"
        if why:
            raise ModelError(f"the KV cache can't be int4: {why}.", remedy="Set --kv-cache-dtype int8.")


_OF_PRODUCTS = ("silu", "gelu_tanh")  # activations that are fused into a gate-and-up product

LINES = (64, 48, 32, 16)
"""Widths of a line of state in floats, fastest first (`kStateColumns` in native/kernels/kernels.h is the largest)."""


def state_line(state: PagedState) -> int:
    """Return the floats per line of this state that waste the least memory (native/recurrence.h)."""
    return min(LINES, key=lambda line: line * num_state_lines(state, line))


def num_state_lines(state: PagedState, line: int) -> int:
    return sum(count * rows * -(-columns // line) for count, rows, columns in state.matrices)


def first_lines(state: PagedState | None) -> list[int]:
    """Return the first line's index for each stateful operation."""
    if state is None:
        return []
    line = state_line(state)
    return [num_state_lines(PagedState(state.matrices[:index]), line) for index in range(len(state.matrices))]


def num_state_blocks(state: PagedState | None, block_bytes: int) -> int:
    """Return how many blocks a row's state takes. Raises ModelError if a block has no room for a line."""
    if state is None:
        return 0
    line = state_line(state)
    if block_bytes < 4 * line:
        raise ModelError(
            f"a block of {block_bytes} bytes has no room for {4 * line} bytes of a layer's recurrent state.",
            remedy="Set a larger --block-size.",
        )
    return -(-num_state_lines(state, line) // (block_bytes // (4 * line)))


def widths_of_latents(program: Program) -> dict[str, int]:
    """Return the widths of buffers with one latent per head, as the KV cache pads them."""
    widths = {
        name: op.num_heads * program.kv_shapes[op.layer].padded().head_dim
        for op in program.ops
        if isinstance(op, prog.LatentAttention)
        for name in (op.q_latent, op.out)
    }
    gathered = {op.out: widths[op.x] for op in program.ops if isinstance(op, prog.GatherRows) and op.x in widths}
    return widths | gathered


def buffer_bytes(program: Program, num_tokens: int, num_samples: int) -> int:
    """Return the bytes of a step's buffers, in float32. A buffer that is multiplied also has a copy in 16 bits.

    Layers share the buffers. The native backend may need less, because it rounds most copies to 8 bits.
    """
    widths, rows, sizes = dict(program.buffers) | widths_of_latents(program), num_tokens, dict[str, int]()
    fused = _fused(program)
    for op in program.ops:
        if isinstance(op, prog.GatherRows | prog.FirstRows | prog.MeanRows | prog.SparseRows):
            rows = num_samples
        if isinstance(op, prog.Linear | prog.HeadLinear | prog.Logits | prog.Experts):
            sizes.setdefault(f"{op.x}, multiplied", rows * (2 * widths[op.x] + 64))  # with padding
        if (out := getattr(op, "out", "")) and out not in fused:
            sizes.setdefault(out, 4 * rows * widths[out])
    return sum(sizes.values())


def relative_bytes(program: Program, num_tokens: int) -> int:
    """Return the bytes of the keys and queries of distances in texts of this length, which are computed in blocks of 32."""
    return sum(
        2 * 2 * (2 * num_tokens + 30) * op.num_heads * (op.head_dim + op.head_dim % 2)
        for op in program.ops
        if isinstance(op, prog.TextAttention) and op.relative is not None
    )


def _fused(program: Program) -> set[str]:
    """Return the buffers of gates and up projections that need no memory: one product makes both, and their activation."""
    if program.is_one_pass:  # weights are rounded, and their products are not fused
        return set()
    triples = zip(program.ops, program.ops[1:], program.ops[2:], strict=False)
    return {
        name
        for gate, up, act in triples
        if isinstance(gate, prog.Linear) and isinstance(up, prog.Linear) and isinstance(act, prog.GatedActivation)
        if can_fuse(gate, up, act)
        for name in {gate.out, up.out} - {act.out}
    }


def can_fuse(gate: prog.Linear, up: prog.Linear, act: prog.GatedActivation) -> bool:
    """Return whether these operations can be one, as far as their weights allow."""
    is_plain = act.activation in _OF_PRODUCTS and all(op.bias is None and op.residual is None for op in (gate, up))
    return is_plain and gate.x == up.x and (act.gate, act.up) == (gate.out, up.out) and gate.out not in {gate.x, up.out}


def expert_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """Return an upper bound of the scratch bytes for experts in a step (native/experts.h). Layers of equal shape share them."""
    shapes = {
        (mlp.num_experts, mlp.num_experts_per_token, mlp.intermediate_size)
        for layer in spec.layers
        if isinstance(mlp := layer.mlp, ExpertsMlp)
    }
    shapes |= {
        (1, 1, mlp.shared_size) for layer in spec.layers if isinstance(mlp := layer.mlp, ExpertsMlp) and mlp.has_shared_gate
    }
    return num_tokens * sum(
        4 * num_experts + num_chosen * (12 + _pair_bytes(spec.hidden_size, 2, width) + _pair_bytes(width, 1, spec.hidden_size))
        for num_experts, num_chosen, width in shapes
    )


def _pair_bytes(num_cols: int, num_matrices: int, num_rows: int) -> int:
    padding = 64 if num_cols % 512 == 0 else 20
    return 2 * num_cols + padding + 4 * num_matrices * -(-num_rows // 16) * 16
