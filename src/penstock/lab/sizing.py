"""Arithmetic of serving a model: bytes of weights and KV, requests that fit, step times, batch sizes.

`plan`, `penstock show` and `penstock profile` call it. Its inputs are the model's description and the machine's peaks; no
weight is read. A multiply-add is two operations.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from penstock.config.units import figure
from penstock.lab.cost_model import CostModel
from penstock.lab.hardware import Hardware
from penstock.lab.step_counts import counts_of
from penstock.lab.workload import NS_PER_S, Job
from penstock.models.checks import weight_shapes
from penstock.models.program import (
    Attention,
    Experts,
    HeadLinear,
    KvShape,
    LatentAttention,
    Linear,
    Logits,
    Program,
    TextAttention,
)
from penstock.types.kv_dtype import KvDtype, state_bytes
from penstock.types.plan import Capacity, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    name: str
    num_parameters: int
    num_weight_bytes: int
    num_read_bytes: int
    """Bytes of weights that a large step reads. An embedding that is only looked up does not count."""
    num_token_products: int
    """Multiply-adds of one token with weights, without logits. Only experts chosen for the token count."""
    num_logit_products: int
    num_attention_products: int
    """Multiply-adds of one token with the key and value of one position, over all layers."""
    kv_shapes: tuple[KvShape, ...]
    kv_dtype: KvDtype
    kv_bytes_per_token: int
    """Bytes of one position's keys and values, with scales, over all layers."""
    kv_read_bytes: int
    """Bytes of one position that a later token's attention reads. Shared keys and values count once for each layer."""
    is_quantised: bool
    state_bytes_per_block: int = 0
    state_bytes: int = 0
    """Bytes of a request's recurrent state that has blocks of its own."""
    expert_share: float = 0.0
    """Share of experts' weights in `num_read_bytes`."""
    routed_share: float = 1.0
    """Share of a layer's experts that each token uses."""
    kv_bytes_of: Callable[[KvShape, KvDtype], int] = KvShape.num_bytes
    """Returns the bytes of one position in a layer of the backend."""


def size_of(
    program: Program,
    *,
    name: str,
    kv_dtype: KvDtype,
    num_weight_bytes: int,
    num_read_bytes: int,
    is_quantised: bool,
    kv_bytes_of: Callable[[KvShape, KvDtype], int] = KvShape.num_bytes,
) -> ModelSize:
    """Return the size of a model. The caller passes the bytes of weights, because they depend on the file's formats."""
    sizes = {weight: rows * cols for weight, (rows, cols) in weight_shapes(program).items()}
    num_logits = sizes[program.ending.weight] if isinstance(program.ending, Logits) else 0
    token_products = sum(sizes[op.weight] for op in program.ops if isinstance(op, Linear | HeadLinear))
    attentions = [(op, program.kv_shapes[op.layer]) for op in program.ops if isinstance(op, Attention | LatentAttention)]
    num_read, state, own_state = token_products + num_logits, program.state, program.paged_state
    num_state_values = own_state.num_floats if own_state else 0
    num_expert_weights, share = 0, 1.0
    for op in program.ops:
        if isinstance(op, Experts):
            share = op.num_experts_per_token / op.num_experts
            num_experts = sum(sizes[name] for name in (op.gate, op.up, op.down) if name is not None)
            num_expert_weights += num_experts
            num_read += sizes[op.router] + num_experts
            token_products += sizes[op.router] + round(share * num_experts)
    return ModelSize(
        name=name,
        num_parameters=sum(sizes.values()),
        num_weight_bytes=num_weight_bytes,
        num_read_bytes=num_read_bytes,
        num_token_products=token_products + 2 * num_state_values,  # each is changed, and multiplied with a query
        num_logit_products=num_logits,
        num_attention_products=sum(
            op.num_heads * (shape.head_dim + (shape.num_latent or shape.head_dim)) for op, shape in attentions
        ),
        kv_shapes=program.kv_shapes,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=sum(kv_bytes_of(shape, kv_dtype) for shape in program.kv_shapes),
        kv_read_bytes=sum(kv_bytes_of(shape, kv_dtype) for _, shape in attentions)
        + sum(op.num_kv_heads * kv_dtype.head_bytes(op.head_dim) for op in program.ops if isinstance(op, TextAttention)),
        is_quantised=is_quantised,
        state_bytes_per_block=state_bytes(state.num_layers * state.num_columns, state.width) if state else 0,
        state_bytes=4 * num_state_values,
        expert_share=num_expert_weights / num_read if num_expert_weights else 0.0,
        routed_share=share,
        kv_bytes_of=kv_bytes_of,
    )


# Steps


def token_ops(size: ModelSize, context_tokens: float = 0.0) -> float:
    return 2 * (size.num_token_products + size.num_attention_products * context_tokens)


def read_bytes(size: ModelSize, num_tokens: float) -> float:
    """Return the bytes of weights that a step of `num_tokens` reads from memory.

    A mixture of experts reads only the experts chosen for its tokens. If n tokens choose k of E equally likely experts each, it
    reads E (1 - (1 - k/E)^n) experts on average.
    """
    return size.num_read_bytes * (1 - size.expert_share * math.pow(1 - size.routed_share, num_tokens))


def work_of(size: ModelSize, shape: StepShape) -> tuple[float, float]:
    """Return the minimum (operations, bytes moved) of a step of this shape.

    It reads the weights once and the KV of each row, and reads and writes each row's state.
    """
    counts = counts_of(shape)
    products = (
        counts.num_tokens * size.num_token_products
        + (counts.num_decode_reads + counts.num_prefill_reads) * size.num_attention_products
        + counts.num_samples * size.num_logit_products
    )
    num_positions = sum(query_len + context_len for query_len, context_len in shape.rows)
    num_bytes = num_positions * size.kv_read_bytes + counts.num_rows * 2 * size.state_bytes
    return 2 * products, read_bytes(size, counts.num_tokens) + num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Operations and bytes per second that steps of one model reach on a machine: a share of its peaks."""

    ops_per_s: float
    read_bytes_per_s: float
    fixed_ns: int
    """Fixed time added to each step."""


def speeds(size: ModelSize, hardware: Hardware) -> Speeds:
    return Speeds(
        ops_per_s=hardware.ops_per_s(is_quantised=size.is_quantised) * hardware.compute_share,
        read_bytes_per_s=hardware.read_bytes_per_s * hardware.read_share,
        fixed_ns=hardware.step_ns,
    )


def roofline(size: ModelSize, rates: Speeds) -> CostModel:
    """Estimate a model's step times on a machine, by the roofline of each operation (Williams et al., CACM 52(4), 2009).

    Products with weights take the longer of the times to read and to multiply. So does attention in decodes, which reads KV.
    Attention in prompts, and logits, take the time to multiply. All times are added, as if nothing overlapped.
    """
    ns_per_op, ns_per_byte = NS_PER_S / rates.ops_per_s, NS_PER_S / rates.read_bytes_per_s
    token_ns = 2 * size.num_token_products * ns_per_op

    def products_ns(num_tokens: float) -> float:
        return max(read_bytes(size, num_tokens) * ns_per_byte, num_tokens * token_ns)

    # Brackets of constant cost per token. Up to the knee, each further token of a mixture reads more experts.
    knee = int(_knee(size, token_ns / ns_per_byte))
    counts = [0, *sorted({many for i in range(knee.bit_length()) for many in (1 << i, 3 << i) if many < knee})]
    counts = [*(counts if size.expert_share else counts[:1]), knee, knee + 1, knee + 2]
    brackets = [
        (to, (products_ns(to) - products_ns(begin)) / (to - begin)) for begin, to in itertools.pairwise(counts) if to > begin
    ]
    return CostModel(
        step_ns=products_ns(0) + rates.fixed_ns,
        decode_row_ns=2 * size.state_bytes * ns_per_byte,
        prefill_token_ns=0.0,
        decode_read_ns=max(size.kv_read_bytes * ns_per_byte, 2 * size.num_attention_products * ns_per_op),
        prefill_read_ns=2 * size.num_attention_products * ns_per_op,
        sample_ns=2 * size.num_logit_products * ns_per_op,
        token_brackets=tuple(brackets),
    )


def _knee(size: ModelSize, bytes_per_token: float) -> float:
    """Return the number of tokens at which multiplying takes as long as reading the weights.

    `bytes_per_token`: bytes read in the time of multiplying for one token.
    """
    low, high = 0.0, size.num_read_bytes / bytes_per_token
    for _ in range(60 if size.expert_share else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * bytes_per_token <= read_bytes(size, middle) else (low, middle)
    return high


def with_more_compute(cost: CostModel, factor: float) -> CostModel:
    """Return a fitted cost model, changed as if the machine multiplied `factor` times as fast.

    A fit does not say what limits each cost. We assume that costs of reading weights and KV are limited by bandwidth, and the
    costs changed here by multiply-adds.
    """
    return replace(
        cost,
        decode_row_ns=cost.decode_row_ns / factor,
        prefill_token_ns=cost.prefill_token_ns / factor,
        prefill_read_ns=cost.prefill_read_ns / factor,
        sample_ns=cost.sample_ns / factor,
        token_brackets=tuple((up_to, token_ns / factor) for up_to, token_ns in cost.token_brackets),
        kernels=cost.kernels and replace(cost.kernels, compute_factor=factor * cost.kernels.compute_factor),
    )


def with_more_bandwidth(cost: CostModel, factor: float) -> CostModel:
    """Return a fitted cost model, changed as if the machine read memory `factor` times as fast; see `with_more_compute`."""
    return replace(
        cost,
        step_ns=cost.step_ns / factor,
        decode_read_ns=cost.decode_read_ns / factor,
        narrow_read_ns=cost.narrow_read_ns / factor,
        prefill_context_ns=cost.prefill_context_ns / factor,
        repeated_ns=cost.repeated_ns / factor,
        sample_step_ns=cost.sample_step_ns / factor,
        cold_ns=cost.cold_ns / factor,
        kernels=cost.kernels and replace(cost.kernels, read_factor=factor * cost.kernels.read_factor),
    )


class Bounds(NamedTuple):
    """Upper bounds of a model's tokens per second on a machine, with short contexts, by the machine's peaks."""

    prompt_tokens_per_s: float
    one_row_tokens_per_s: float
    many_rows_tokens_per_s: float


BOUND_ROWS = 32


def bounds(size: ModelSize, hardware: Hardware) -> Bounds:
    ops_per_s = hardware.ops_per_s(is_quantised=size.is_quantised)

    def decoded(num_rows: int) -> float:
        num_ops, num_bytes = work_of(size, decode_shape(num_rows, 0))
        return num_rows / max(num_bytes / hardware.read_bytes_per_s, num_ops / ops_per_s)

    return Bounds(ops_per_s / token_ops(size), decoded(1), decoded(BOUND_ROWS))


def knee_rows(size: ModelSize, rates: Speeds) -> float:
    row_ops = 2 * (size.num_token_products + size.num_logit_products)
    return _knee(size, row_ops / rates.ops_per_s * rates.read_bytes_per_s)


def decode_shape(num_rows: int, context_tokens: float) -> StepShape:
    return StepShape(((1, round(context_tokens)),) * num_rows, num_rows)


def prompt_alone_ns(cost: CostModel, num_prompt_tokens: int, max_step_tokens: int) -> int:
    total_ns = 0
    for begin in range(0, num_prompt_tokens, max_step_tokens):
        end = min(num_prompt_tokens, begin + max_step_tokens)
        total_ns += cost.duration_ns(StepShape(((end - begin, begin),), int(end == num_prompt_tokens)))
    return total_ns


# Lengths of requests, and their memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    num_jobs: int
    mean_prompt: float
    mean_output: float
    p50_prompt: int
    p99_prompt: int
    mean_context: float
    """Mean number of positions before a generated token."""
    totals: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.totals)


def lengths_of(jobs: Sequence[Job]) -> LengthSummary:
    outputs = [job.num_output_tokens for job in jobs]
    prompts = sorted(job.num_prompt_tokens for job in jobs)
    context = sum(job.num_output_tokens * (job.num_prompt_tokens + job.num_output_tokens / 2) for job in jobs)
    return LengthSummary(
        num_jobs=len(jobs),
        mean_prompt=fmean(prompts),
        mean_output=fmean(outputs),
        p50_prompt=prompts[(len(prompts) - 1) // 2],
        p99_prompt=prompts[math.ceil(0.99 * len(prompts)) - 1],
        mean_context=context / sum(outputs),
        totals=tuple(job.num_prompt_tokens + job.num_output_tokens for job in jobs),
    )


class Room(NamedTuple):
    num_requests: int
    tokens_of_one: float
    waste: float


def fit_in(capacity: Capacity, lengths: LengthSummary) -> Room:
    block = capacity.block_size
    num_tokens = (capacity.num_blocks - 1) * block
    held = [min(total, capacity.max_model_len, capacity.window or total) for total in lengths.totals]
    tokens_of_one = fmean((-(-num // block) + capacity.num_state_blocks) * block for num in held)
    return Room(
        num_requests=int(num_tokens / tokens_of_one),
        tokens_of_one=tokens_of_one,
        waste=1 - fmean(held) / tokens_of_one,
    )


# Batches in a steady flow of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    num_rows: int
    decode_ns: int
    tpot_ns: float
    """Time per output token, including steps that compute other requests' prompts."""
    rate: float
    output_tokens_per_s: float
    kv_share: float


def batch_point(num_rows: int, cost: CostModel, lengths: LengthSummary, capacity: Capacity) -> BatchPoint:
    """Return times and rates of a server in which `num_rows` requests always run, by Little's law."""
    decodes = decode_shape(num_rows, lengths.mean_context)
    decode_ns, prompt_ns = cost.duration_ns(decodes), 0.0
    room, num_tokens = max(1, capacity.max_step_tokens - num_rows), round(lengths.mean_prompt)
    for begin in range(0, num_tokens, room):
        chunk = (min(room, num_tokens - begin), begin)
        prompt_ns += cost.duration_ns(StepShape((*decodes.rows, chunk), num_rows)) - decode_ns
    tpot_ns = decode_ns + num_rows * prompt_ns / lengths.mean_output
    rate = num_rows / (tpot_ns * lengths.mean_output) * NS_PER_S
    return BatchPoint(
        num_rows=num_rows,
        decode_ns=decode_ns,
        tpot_ns=tpot_ns,
        rate=rate,
        output_tokens_per_s=rate * lengths.mean_output,
        kv_share=num_rows * _mean_blocks(lengths, capacity) / (capacity.num_blocks - 1),
    )


def _mean_blocks(lengths: LengthSummary, capacity: Capacity) -> float:
    held = min(lengths.mean_context, capacity.window or lengths.mean_context)
    return -(-held // capacity.block_size) + capacity.num_state_blocks


def batch_table(cost: CostModel, lengths: LengthSummary, capacity: Capacity) -> Sequence[BatchPoint]:
    numbers = [1 << i for i in range(capacity.max_rows.bit_length()) if 1 << i < capacity.max_rows]
    return [batch_point(rows, cost, lengths, capacity) for rows in (*numbers, capacity.max_rows)]


def largest_batch(cost: CostModel, lengths: LengthSummary, capacity: Capacity, tpot_ns: float) -> BatchPoint | None:
    """Return the largest batch that takes at most `tpot_ns` per output token, or None if one row takes longer."""
    low, high = 0, capacity.max_rows
    while low < high:
        middle = (low + high + 1) // 2
        is_within = batch_point(middle, cost, lengths, capacity).tpot_ns <= tpot_ns
        low, high = (middle, high) if is_within else (low, middle - 1)
    return batch_point(low, cost, lengths, capacity) if low else None


def fullest_batch(cost: CostModel, lengths: LengthSummary, capacity: Capacity) -> BatchPoint:
    """Return the largest batch that the limits of rows and memory allow."""
    fitting = int((capacity.num_blocks - 1) / _mean_blocks(lengths, capacity))
    return batch_point(max(1, min(capacity.max_rows, fitting)), cost, lengths, capacity)


# Words


def format_number(value: float, unit: str = "", *, digits: int = 3) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_rounded(value / factor, digits)} {prefix}{unit}"
    return f"{_rounded(value, digits)} {unit}".rstrip()


def format_time(ns: float) -> str:
    """Format a time, such as `2.68 ms`."""
    for factor, unit in ((NS_PER_S, "s"), (1_000_000, "ms"), (1_000, "us")):
        if abs(ns) >= factor:
            return f"{_rounded(ns / factor, 3)} {unit}"
    return f"{ns:.0f} ns"


def _rounded(value: float, digits: int) -> str:
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}" if whole else f"{value:.{digits}g}"


class Line(NamedTuple):
    """A line of the arithmetic: a quantity's name, its formula in words, the formula with numbers, and the result."""

    name: str
    formula: str
    numbers: str
    value: str


def arithmetic(
    size: ModelSize,
    capacity: Capacity,
    lengths: LengthSummary,
    cost: CostModel,
    rates: Speeds,
    *,
    tpot_limit_ns: float | None = None,
) -> Iterator[Line]:
    """Yield lines that derive a deployment's memory, step times and rate, each after the lines that it depends on.

    `cost` may be fitted to measurements; `rates` are always estimates.
    """
    context = lengths.mean_context
    yield from _memory_lines(size, capacity, lengths)
    yield from _step_lines(size, lengths.mean_prompt / 2, context, rates)
    words = "by the fitted model" if cost.fitted else "reads, + work of the logits, + what is fixed"
    one = format_time(cost.duration_ns(decode_shape(1, context)))
    yield Line("decode step, 1 row", words, f"after {context:.0f} positions", one)
    for name, num_tokens in (("median", lengths.p50_prompt), ("p99", lengths.p99_prompt)):
        numbers = f"{num_tokens:,} tokens, at most {capacity.max_step_tokens} a step"
        best = format_time(prompt_alone_ns(cost, num_tokens, capacity.max_step_tokens))
        yield Line(f"best TTFT, {name} prompt", "the prompt alone on the server, in steps of bounded length", numbers, best)
    if tpot_limit_ns is not None:
        found = largest_batch(cost, lengths, capacity, tpot_limit_ns)
        shown, limit = found or batch_point(1, cost, lengths, capacity), format_time(tpot_limit_ns)
        numbers = f"{format_time(shown.tpot_ns)} with {shown.num_rows}, limit {limit}, at most {capacity.max_rows}"
        formula = "most rows with step + rows x prompt / answer within the TPOT limit"
        yield Line("largest batch in the limit", formula, numbers, f"{found.num_rows} rows" if found else "none")
    top = fullest_batch(cost, lengths, capacity)
    numbers = f"{top.num_rows} / ({format_time(top.tpot_ns)} x {lengths.mean_output:.0f})"
    formula = "rows / (time per token x tokens of an answer)"
    yield Line("rate of a full batch", formula, numbers, f"{figure(top.rate)} requests/s")


def _columns_of(shape: KvShape) -> str:
    values = f"{shape.num_latent} of them are V" if shape.num_latent else f"{shape.head_dim} of V"
    return f"{shape.head_dim} of K, {values}"


def _memory_lines(size: ModelSize, capacity: Capacity, lengths: LengthSummary) -> Iterator[Line]:
    num_blocks, state = capacity.num_blocks - 1, size.state_bytes_per_block
    pool_tokens, fitting = num_blocks * capacity.block_size, fit_in(capacity, lengths)
    numbers = f"{format_number(size.num_parameters, digits=4)} x {size.num_weight_bytes / size.num_parameters:.3g} B"
    yield Line("weights", "parameters x bytes of one", numbers, format_number(size.num_weight_bytes, "B"))
    counts = Counter(size.kv_shapes)
    dims = " or ".join(dict.fromkeys(_columns_of(shape) for shape in counts))
    formula = f"layers x KV heads x bytes of a head ({dims}, {size.kv_dtype}, any scales)"
    numbers = " + ".join(
        f"{num_layers} x {shape.num_kv_heads} x {size.kv_bytes_of(shape, size.kv_dtype) // shape.num_kv_heads} B"
        for shape, num_layers in counts.items()
    )
    yield Line("KV per token", formula, numbers, f"{size.kv_bytes_per_token:,} B")
    formula = f"blocks x tokens of one x KV per token{' + blocks x recurrent state of one' if state else ''}"
    numbers = f"{num_blocks:,} x {capacity.block_size} = {pool_tokens:,} tokens, x {size.kv_bytes_per_token:,} B"
    numbers += f" + {num_blocks:,} x {state:,} B" if state else ""
    yield Line("KV cache", formula, numbers, format_number(pool_tokens * size.kv_bytes_per_token + num_blocks * state, "B"))
    if capacity.num_state_blocks:
        numbers = f"{capacity.num_state_blocks:,} blocks x {capacity.block_size} tokens"
        found = f"{capacity.num_state_blocks * capacity.block_size:,} tokens, {format_number(size.state_bytes, 'B')}"
        yield Line("recurrent state", "blocks of one x tokens of a block", numbers, found)
    yield Line(
        "requests that fit",
        f"tokens of the cache / tokens of a request{' and its state' if size.state_bytes else ''}, in whole blocks",
        f"{pool_tokens:,} / {fitting.tokens_of_one:,.1f}",
        f"{fitting.num_requests:,}; {fitting.waste:.1%} of that memory stays empty",
    )


def _step_lines(size: ModelSize, middle: float, context: float, rates: Speeds) -> Iterator[Line]:
    def worked(ops: float) -> str:
        return format_time(ops / rates.ops_per_s * NS_PER_S)

    def read(num_bytes: float) -> str:
        return format_time(num_bytes / rates.read_bytes_per_s * NS_PER_S)

    products, pairs = format_number(size.num_token_products), format_number(size.num_attention_products)
    (row_ops, num_bytes), knee = work_of(size, decode_shape(1, context)), knee_rows(size, rates)
    yield Line(
        "work of a prompt token",
        "2 x (products with weights + with a position x positions)",
        f"2 x ({products} + {pairs} x {middle:.0f})",
        format_number(token_ops(size, middle), "op"),
    )
    yield Line(
        "work of a decode row",
        "the same, + 2 x products for logits",
        f"2 x ({products} + {pairs} x {context + 1:.0f} + {format_number(size.num_logit_products)})",
        f"{format_number(row_ops, 'op')} = {worked(row_ops)} at {format_number(rates.ops_per_s, 'op/s')}",
    )
    yield Line(
        "reads of a decode step",
        "weights + rows x positions x KV that attention reads per position",
        f"{format_number(read_bytes(size, 1), 'B')} + 1 x {context + 1:.0f} x {size.kv_read_bytes:,} B"
        + (f" + 2 x {format_number(size.state_bytes, 'B')} of state" if size.state_bytes else ""),
        f"{format_number(num_bytes, 'B')} = {read(num_bytes)} at {format_number(rates.read_bytes_per_s, 'B/s')}",
    )
    yield Line(
        "rows at the knee",
        "time to read the weights / time of a row's products",
        f"{read(read_bytes(size, knee))} / {worked(2 * (size.num_token_products + size.num_logit_products))}",
        f"{knee:.1f}: below, rows are nearly free",
    )
