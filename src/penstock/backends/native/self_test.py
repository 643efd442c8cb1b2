"""Checks a kernel variant on this processor: compares small models with the portable kernels.

Runs in a process of its own, because a kernel may crash or hang (`backends/native/choice.py` starts it):
python -m penstock.backends.native.self_test VARIANT
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native._native import Engine, KvFormat, RowOp, RowOpKind, SourceFormat, Team

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# No width is a multiple of all variants' tiles, and the prompt ends within a block of the KV cache.
HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 2, 1, 48, 160, 101
HIDDEN = HEADS * HEAD_DIM
ROTATED_DIM = 32  # of heads in `KvFormat.INT4`
WIDE_INNER = 1056  # more columns than `kMergedCols`: outliers are added row by row
TEXT_INNER = 192  # AMX multiplies integers of whole rows only in multiples of 64 columns
PROMPT, ROWS, BLOCK = 37, 6, 32
STATE_HEADS, VALUE_DIM, STATE_LINE = 4, 96, 64  # of linear attention
SILU = 0  # of `ActivationKind` in native/kernels/kernels.h

MODELS = {
    "q4_0": (SourceFormat.Q4_0, KvFormat.INT8, INNER),
    "q4_1": (SourceFormat.Q4_1, KvFormat.INT16, WIDE_INNER),
    "q5_1": (SourceFormat.Q5_1, KvFormat.INT4, INNER),
    "q8_0": (SourceFormat.Q8_0, KvFormat.INT8, INNER),
    "iq4_nl": (SourceFormat.IQ4_NL, KvFormat.INT8, INNER),
    "bf16": (SourceFormat.BF16, KvFormat.INT16, INNER),
}
"""Format of the weights, format of the KV cache, and inner width: a model for each kind of packed weights."""
TOLERANCES = {"bf16": 1e-2, "texts": 1e-2}
"""Largest difference, relative to the largest result, where results are rounded between layers: a last bit can become 2e-3."""
TOLERANCE = 1e-5
"""The same for other parts. Correct variants differ by 1e-7 here."""
MAX_CPU_S = 10
"""CPU-time limit of the test, which stops a kernel that hangs."""


def run() -> None:
    """Test the variant that the command line names and print a line: `passed`, or `failed` and the first difference."""
    max_cpu_s = int(time.process_time()) + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)  # a signal from here on is the kernels' fault
    fault = first_difference(sys.argv[1])
    print(f"failed {fault}" if fault else "passed")


def first_difference(variant: str) -> str:
    """Return the first part of the test whose results differ, with the difference; empty if none does."""
    for part, found, expected in results(variant):
        difference = np.abs(found - expected).max() / np.abs(expected).max()
        if not difference <= TOLERANCES.get(part, TOLERANCE):
            return f"results of {part} differ by {difference:.1g} of the largest one"
    return ""


def results(variant: str) -> Iterator[tuple[str, F32, F32]]:
    """Yield each part's name, the variant's results, and the expected results."""
    if variant == "amx":
        yield from _compare("amx", "amx-emulated")
        variant = "avx512"  # both use it for everything else
    yield from _compare(variant, "portable")


def _compare(variant: str, reference: str) -> Iterator[tuple[str, F32, F32]]:
    for name, model in MODELS.items():
        yield name, _logits(variant, *model), _logits(reference, *model)
    yield "texts", _texts(variant), _texts(reference)
    yield "states", _states(variant), _states(reference)


def _engine(
    variant: str, num_layers: int, kv_format: KvFormat, num_state_lines: int = 0, *, head_dim: int = HEAD_DIM
) -> Engine:
    return Engine(
        kv_shapes=[(KV_HEADS, head_dim)] * num_layers,
        vocab_size=VOCAB,
        num_blocks=2 * ROWS + 1,
        block_size=BLOCK,
        max_rows=PROMPT + ROWS * ROWS,
        max_step_tokens=PROMPT + ROWS * ROWS,
        team=Team(1),
        variant=variant,
        kv_format=kv_format,
        num_state_lines=num_state_lines,
        state_line=STATE_LINE,
    )


def _logits(variant: str, source: SourceFormat, kv_format: KvFormat, inner_width: int) -> F32:
    """Return the logits of two steps: a prompt beside short ones, then one token of each row. [tokens, VOCAB]"""
    head_dim = ROTATED_DIM if kv_format is KvFormat.INT4 else HEAD_DIM
    rng, engine = np.random.default_rng(1), _engine(variant, 1, kv_format, head_dim=head_dim)
    is_integer = source is not SourceFormat.BF16 and not engine.has_tiles

    def matrix(rows: int, cols: int) -> int:
        return engine.add_matrix(source, rows, cols, _weights(rng, source, rows, cols))

    def activation(cols: int) -> int:
        return engine.add_activation(cols, is_integer, per_sample=False)

    def convert(x: int, out: int) -> RowOp:
        return RowOp(RowOpKind.QUANTIZE if is_integer else RowOpKind.TO_BF16, out=out, x=x)

    hidden, normed, q, k, v, attended, gated, logits = (
        engine.add_buffer(width, per_sample=False)
        for width in (HIDDEN, HIDDEN, HIDDEN, KV_HEADS * head_dim, KV_HEADS * head_dim, HIDDEN, inner_width, VOCAB)
    )
    wide, inner = activation(HIDDEN), activation(inner_width)
    factors = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    factors[7::31] = 40  # columns with outliers
    norm = engine.add_vector(factors)
    rope = engine.add_rope(np.geomspace(1, 1e-3, head_dim // 2).astype(np.float32), 1.0)
    normalise = RowOp(RowOpKind.RMS_NORM, out=normed, x=hidden, weight=norm, n=HIDDEN, value=1e-5)
    embedding = engine.add_matrix(SourceFormat.BF16, VOCAB, HIDDEN, _weights(rng, SourceFormat.BF16, VOCAB, HIDDEN))
    embed = RowOp(RowOpKind.EMBED, out=hidden, weight=embedding, value=8.0)
    engine.add_rows([RowOp(RowOpKind.ANGLES, weight=rope), embed, normalise, convert(normed, wide)], samples=False)
    products = [(matrix(HIDDEN, HIDDEN), q), (matrix(KV_HEADS * head_dim, HIDDEN), k), (matrix(KV_HEADS * head_dim, HIDDEN), v)]
    engine.add_linear([(weight, wide, out, -1, -1) for weight, out in products], samples=False)
    turns = [
        RowOp(RowOpKind.ROPE, x=x, weight=rope, n=heads, head_dim=head_dim)
        for x, heads in ((q, HIDDEN // head_dim), (k, KV_HEADS))
    ]
    engine.add_rows([*turns, RowOp(RowOpKind.KV_WRITE, x=k, y=v, n=0)], samples=False)
    engine.add_attention(q, attended, 0, HIDDEN // head_dim, head_dim**-0.5, 0, 0.0)
    engine.add_rows([convert(attended, wide)], samples=False)
    engine.add_linear([(matrix(HIDDEN, HIDDEN), wide, hidden, -1, hidden)], samples=False)
    engine.add_rows([normalise, convert(normed, wide)], samples=False)
    engine.add_gated(matrix(inner_width, HIDDEN), matrix(inner_width, HIDDEN), wide, gated, SILU, samples=False)
    engine.add_rows([convert(gated, inner)], samples=False)
    engine.add_linear([(matrix(HIDDEN, inner_width), inner, hidden, -1, hidden)], samples=False)
    engine.add_rows([normalise, convert(normed, wide)], samples=False)
    engine.add_linear([(matrix(VOCAB, HIDDEN), wide, logits, -1, -1)], samples=False)
    return _run(engine, logits, VOCAB)


def _texts(variant: str) -> F32:
    """Return a text-encoder layer's output for texts of several lengths. [tokens, HIDDEN]"""
    rng, engine = np.random.default_rng(2), _engine(variant, 0, KvFormat.INT8)

    def matrix(rows: int, cols: int, apart: Sequence[int] = ()) -> int:
        values = rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(cols**-0.5)
        data = values.view(np.uint8).reshape(rows, -1)
        return engine.add_matrix(SourceFormat.F32, rows, cols, data, by_row=True, apart=apart)

    hidden, q, k, v, attended, again, inner, out = (
        engine.add_buffer(width, per_sample=False)
        for width in (HIDDEN, HIDDEN, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HIDDEN, HIDDEN, TEXT_INNER, HIDDEN)
    )
    wide, rounded = (
        engine.add_activation(cols, quantised=True, per_sample=False, by_row=True) for cols in (HIDDEN, TEXT_INNER)
    )
    embedding = engine.add_matrix(SourceFormat.BF16, VOCAB, HIDDEN, _weights(rng, SourceFormat.BF16, VOCAB, HIDDEN))
    engine.add_rows(
        [RowOp(RowOpKind.EMBED, out=hidden, weight=embedding, value=8.0), RowOp(RowOpKind.ROUND, out=wide, x=hidden)],
        samples=False,
    )
    widths = ((HIDDEN, q), (KV_HEADS * HEAD_DIM, k), (KV_HEADS * HEAD_DIM, v))
    engine.add_linear([(matrix(width, HIDDEN), wide, to, -1, -1) for width, to in widths], samples=False)
    attend = partial(
        engine.add_text_attention,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        is_causal=False,
        window=0,
        distances=-1,
        num_distances=0,
    )
    attend(q=q, k=k, v=v, out=attended, num_kv_heads=KV_HEADS)
    num_distances = PROMPT + 2 * BLOCK  # positions are computed in blocks
    keys, queries = (engine.add_integers(rng.integers(-3000, 3000, HIDDEN * num_distances, np.int16)) for _ in range(2))
    scales = engine.add_vector(np.full(2 * HEADS, 3e-4, np.float32))
    relative, sinks = (keys, queries, scales, num_distances, PROMPT), engine.add_vector(np.array([0.3, -1.0], np.float32))
    attend(q=attended, k=q, v=q, out=again, num_kv_heads=HEADS, relative=relative, sinks=sinks)
    engine.add_rows([RowOp(RowOpKind.ROUND, out=wide, x=again)], samples=False)
    engine.add_linear([(matrix(TEXT_INNER, HIDDEN), wide, inner, -1, -1)], samples=False, has_gelu=True)
    last = matrix(HIDDEN, TEXT_INNER, apart=(0, 3, 4, TEXT_INNER - 1))
    engine.add_rows([RowOp(RowOpKind.ROUND, out=rounded, x=inner, weight=last, n=1)], samples=False)
    engine.add_linear([(last, rounded, out, -1, hidden)], samples=False)
    return _run(engine, out, HIDDEN)


def _states(variant: str) -> F32:
    """Return the output of a convolution and linear attention. [tokens, STATE_HEADS * VALUE_DIM]"""
    rng, inner = np.random.default_rng(3), STATE_HEADS * VALUE_DIM
    width = 2 * HEAD_DIM + inner
    conv_lines, lines = 3 * -(-width // STATE_LINE), STATE_HEADS * HEAD_DIM * -(-VALUE_DIM // STATE_LINE)
    engine = _engine(variant, 1, KvFormat.INT8, conv_lines + lines)

    def vector(*values: float) -> int:
        return engine.add_vector(np.array(values, np.float32))

    def embed(width: int) -> tuple[int, RowOp]:
        matrix = engine.add_matrix(SourceFormat.BF16, VOCAB, width, _weights(rng, SourceFormat.BF16, VOCAB, width))
        buffer = engine.add_buffer(width, per_sample=False)
        return buffer, RowOp(RowOpKind.EMBED, out=buffer, weight=matrix, value=8.0)

    (x, embed_x), (steps, embed_steps) = embed(width), embed(32)
    out, prepared = (engine.add_buffer(columns, per_sample=False) for columns in (inner, 2 * HEAD_DIM + 2 * STATE_HEADS))
    engine.add_rows([embed_x, embed_steps], samples=False)
    taps = engine.add_vector(rng.standard_normal(4 * width).astype(np.float32))
    engine.add_causal_conv(x=x, out=x, weight=taps, bias=-1, taps=4, width=width, first_line=0)
    factor = engine.add_vector(np.full(HEAD_DIM, HEAD_DIM**-0.5, np.float32))
    layer = engine.define_linear_attention(
        x=x,
        steps=steps,
        gates=steps,
        out=out,
        prepared=prepared,
        step_bias=vector(*[0.0] * STATE_HEADS),
        decay=vector(-0.1, -0.5, -1.0, -3.0),
        skip=vector(*[0.5] * STATE_HEADS),
        num_heads=STATE_HEADS,
        num_key_heads=1,
        key_dim=HEAD_DIM,
        value_dim=VALUE_DIM,
        q_at=0,
        k_at=HEAD_DIM,
        v_at=2 * HEAD_DIM,
        scale=1.0,
        q_factor=factor,
        k_factor=factor,
        min_step=0.0,
        max_step=100.0,
        first_line=conv_lines,
        is_tiled=False,
    )
    engine.add_rows([RowOp(RowOpKind.PREPARE_STATE, weight=layer)], samples=False)
    engine.add_linear_attention(layer)
    return _run(engine, out, inner)


def _run(engine: Engine, out: int, width: int) -> F32:
    result = engine.add_buffer(width, per_sample=True)
    engine.add_rows([RowOp(RowOpKind.GATHER, x=out, out=result)], samples=True)
    engine.set_logits(result)
    engine.settle()
    tables = np.arange(1, 2 * ROWS + 1, dtype=np.int32).reshape(ROWS, 2)
    lengths = np.array([PROMPT, *range(1, ROWS)], np.int32)
    first = _step(engine, tables, np.zeros(ROWS, np.int32), lengths, width)
    return np.concatenate([first, _step(engine, tables, lengths, np.ones(ROWS, np.int32), width)])


def _step(
    engine: Engine, tables: NDArray[np.int32], contexts: NDArray[np.int32], queries: NDArray[np.int32], width: int
) -> F32:
    rows, total = np.repeat(np.arange(ROWS), queries), int(queries.sum())
    positions = np.concatenate(
        [context + np.arange(num, dtype=np.int32) for context, num in zip(contexts, queries, strict=True)]
    )
    slots = tables[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    out = np.full((total, width), np.nan, np.float32)
    engine.logits_step(
        np.arange(ROWS, dtype=np.int32),
        np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        contexts,
        ((7 * np.arange(total) + 3 * rows) % VOCAB).astype(np.int32),
        positions,
        slots,
        tables,
        np.arange(total, dtype=np.int32),
        out,
    )
    return out


def _weights(rng: np.random.Generator, source: SourceFormat, rows: int, cols: int) -> Bytes:
    """Return random weights as the bytes of a file's rows. [rows, bytes of a row]"""
    if source is SourceFormat.BF16:
        values = rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(cols**-0.5)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)
    num_scales, num_bytes, largest = {
        SourceFormat.Q4_0: (1, 16, 8),
        SourceFormat.Q4_1: (2, 16, 8),
        SourceFormat.Q5_1: (2, 20, 16),
        SourceFormat.Q8_0: (1, 32, 128),
        SourceFormat.IQ4_NL: (1, 16, 113),
    }[source]
    scales = rng.uniform(0.5, 1.5, (rows, cols // 32, num_scales)) * 2 * cols**-0.5 / largest
    if num_scales == 2:
        scales[:, :, 1] *= -largest
    numbers = rng.integers(0, 256, (rows, cols // 32, num_bytes), np.uint8)
    return np.concatenate([scales.astype(np.float16).view(np.uint8), numbers], axis=-1).reshape(rows, -1)


if __name__ == "__main__":
    run()
