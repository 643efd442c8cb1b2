"""The arithmetic of serving a model: bytes of weights and of KV, requests that fit, work and time of a step, batch sizes.

ModelSize     the numbers of a model, from its description alone; no weight is read
roofline      a machine's published or probed peaks -> the time of any step, as a cost model: an estimate
Lengths       prompts and answers of a workload, in the numbers that matter here
batch_table   batch size -> latency and throughput, in a steady flow of such requests
arithmetic    all of it as lines: name, formula, numbers, value

A multiply-add is two operations. Called by `plan`; reads no file, measures nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from penstock.lab.cost_model import CostModel
from penstock.lab.hardware import Hardware
from penstock.lab.workload import Job
from penstock.models.checks import weight_shapes
from penstock.models.program import Attention, Experts, Linear, Logits, Program
from penstock.types.kv_dtype import KvDtype, state_bytes
from penstock.types.plan import Capacity, StepShape

NS_PER_S = 1_000_000_000
_BISECTIONS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model in numbers. Products are multiply-adds."""

    name: str
    num_parameters: int
    num_weight_bytes: int
    """Memory that the weights take."""
    num_read_bytes: int
    """Bytes of weights that a step of many rows reads: without an embedding of which it looks up rows. See `read_bytes`."""
    num_token_products: int
    """Multiply-adds of each token with weights, without those for logits. A token counts the experts it is sent to."""
    num_logit_products: int
    """Multiply-adds for the logits of one row."""
    num_attention_products: int
    """Multiply-adds of each token with the key and the value of one position, over all layers."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: KvDtype
    kv_bytes_per_token: int
    """Bytes of the keys and values of one position, with scales, over all layers."""
    is_quantised: bool
    """Most products are with weights of 8 bits or less."""
    state_bytes_per_block: int = 0
    """Bytes of recurrent state that a KV block has beside that."""
    expert_share: float = 0.0
    """Share of `num_read_bytes` that are the matrices of experts."""
    routed_share: float = 1.0
    """Share of a layer's experts to which a token is sent."""


def size_of(
    program: Program,
    *,
    name: str,
    kv_dtype: KvDtype,
    num_weight_bytes: int,
    num_read_bytes: int,
    is_quantised: bool,
) -> ModelSize:
    """The numbers of a model whose weights take, and of which a step reads, so many bytes."""
    shapes = weight_shapes(program)
    sizes = {weight: rows * cols for weight, (rows, cols) in shapes.items()}
    ending = program.ending
    num_logits = sizes[ending.weight] if isinstance(ending, Logits) else 0
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    token_products = sum(sizes[op.weight] for op in program.ops if isinstance(op, Linear))
    num_read, state = token_products + num_logits, program.state
    num_expert_weights, share = 0, 1.0
    for op in program.ops:
        if isinstance(op, Experts):
            share = op.num_experts_per_token / op.num_experts
            num_expert_weights += sizes[op.gate] + sizes[op.up] + sizes[op.down]
            num_read += sizes[op.router] + sizes[op.gate] + sizes[op.up] + sizes[op.down]
            token_products += sizes[op.router] + round(share * (sizes[op.gate] + sizes[op.up] + sizes[op.down]))
    return ModelSize(
        name=name,
        num_parameters=sum(sizes.values()),
        num_weight_bytes=num_weight_bytes,
        num_read_bytes=num_read_bytes,
        num_token_products=token_products,
        num_logit_products=num_logits,
        num_attention_products=sum(2 * op.num_heads * op.head_dim for op in attentions),
        num_layers=program.num_layers,
        num_kv_heads=program.num_kv_heads,
        head_dim=program.head_dim,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=program.num_layers * program.num_kv_heads * kv_dtype.head_bytes(program.head_dim),
        is_quantised=is_quantised,
        state_bytes_per_block=state_bytes(state.num_layers * state.num_columns, state.width) if state else 0,
        expert_share=num_expert_weights / num_read if num_expert_weights else 0.0,
        routed_share=share,
    )


# Steps


def token_ops(size: ModelSize, context_tokens: float = 0.0) -> float:
    """Operations of one token of a prompt that attends to so many positions."""
    return 2 * (size.num_token_products + size.num_attention_products * context_tokens)


def decode_row_ops(size: ModelSize, context_tokens: float) -> float:
    """Operations of a row that generates one token after so many positions: logits are on top."""
    return token_ops(size, context_tokens + 1) + 2 * size.num_logit_products


def read_bytes(size: ModelSize, num_tokens: float) -> float:
    """Bytes of weights that a step of so many tokens reads.

    A mixture reads the experts to which a token is sent. If each of E is as likely as the others, and n tokens are sent to k
    each, these are E (1 - (1 - k/E)^n) on average.
    """
    return size.num_read_bytes * (1 - size.expert_share * math.pow(1 - size.routed_share, num_tokens))


def decode_bytes(size: ModelSize, num_rows: int, context_tokens: float) -> float:
    """Bytes that a step reads in which each row generates one token: weights once, and the KV of each row."""
    return read_bytes(size, num_rows) + num_rows * (context_tokens + 1) * size.kv_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """A machine's rates for one model, as steps reach them: shares of the peaks."""

    ops_per_s: float
    read_bytes_per_s: float
    fixed_ns: int
    """Time of each step beside its operations and reads."""


def speeds(size: ModelSize, hardware: Hardware) -> Speeds:
    """The peaks that hold for this model's weights, times the shares that `hardware` says are reached."""
    return Speeds(
        ops_per_s=hardware.ops_per_s(is_quantised=size.is_quantised) * hardware.compute_share,
        read_bytes_per_s=hardware.read_bytes_per_s * hardware.read_share,
        fixed_ns=hardware.step_ns,
    )


def roofline(size: ModelSize, rates: Speeds) -> CostModel:
    """The time of a step by the roofline of each of its operations (Williams, Waterman and Patterson, CACM 52(4), 2009).

    Products with weights take as long as reading the weights, or as multiplying if that is longer: from the knee on, each
    further token costs its multiply-adds. With experts, each token up to there has more of them read. Attention of a row that
    generates is bound by reading its keys and values, that of prompts by multiplying. Logits cost their multiply-adds. Nobody
    knows what overlaps, so these times are added.
    """
    ns_per_op, ns_per_byte = NS_PER_S / rates.ops_per_s, NS_PER_S / rates.read_bytes_per_s
    token_ns = 2 * size.num_token_products * ns_per_op

    def products_ns(num_tokens: float) -> float:
        return max(read_bytes(size, num_tokens) * ns_per_byte, num_tokens * token_ns)

    knee = int(_knee(size, token_ns / ns_per_byte))
    counts = [0, *sorted({many for i in range(knee.bit_length()) for many in (1 << i, 3 << i) if many < knee})]
    counts = [*(counts if size.expert_share else counts[:1]), knee, knee + 1, knee + 2]
    brackets = [
        (to, (products_ns(to) - products_ns(begin)) / (to - begin)) for begin, to in itertools.pairwise(counts) if to > begin
    ]
    return CostModel(
        step_ns=products_ns(0) + rates.fixed_ns,
        decode_row_ns=0.0,
        prefill_token_ns=0.0,
        decode_read_ns=max(size.kv_bytes_per_token * ns_per_byte, 2 * size.num_attention_products * ns_per_op),
        prefill_read_ns=2 * size.num_attention_products * ns_per_op,
        sample_ns=2 * size.num_logit_products * ns_per_op,
        token_brackets=tuple(brackets),
    )


def _knee(size: ModelSize, bytes_per_token: float) -> float:
    """The tokens that cost as much as reading their weights, if each costs as much as reading so many bytes."""
    low, high = 0.0, size.num_read_bytes / bytes_per_token
    for _ in range(_BISECTIONS if size.expert_share else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * bytes_per_token <= read_bytes(size, middle) else (low, middle)
    return high


def with_more_compute(cost: CostModel, factor: float) -> CostModel:
    """A fitted model of a machine that multiplies so many times as fast.

    A fit does not say what a part waits for. Products and attention of prompts are taken for multiply-adds; the fixed part of a
    step, which reads the weights, and the reads of rows that generate for bandwidth.
    """
    return replace(
        cost,
        decode_row_ns=cost.decode_row_ns / factor,
        prefill_token_ns=cost.prefill_token_ns / factor,
        prefill_read_ns=cost.prefill_read_ns / factor,
        sample_ns=cost.sample_ns / factor,
        token_brackets=tuple((up_to, token_ns / factor) for up_to, token_ns in cost.token_brackets),
    )


def with_more_bandwidth(cost: CostModel, factor: float) -> CostModel:
    """A fitted model of a machine that reads memory so many times as fast; see `with_more_compute`."""
    return replace(cost, step_ns=cost.step_ns / factor, decode_read_ns=cost.decode_read_ns / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Tokens per second that no server exceeds with this machine's peaks, whatever it does: short texts, nothing but products
    and reads."""

    prompt_tokens_per_s: float
    one_row_tokens_per_s: float
    """Output of one conversation."""
    many_rows_tokens_per_s: float
    """Output of `BOUND_ROWS` conversations together."""


BOUND_ROWS = 32


def bounds(size: ModelSize, hardware: Hardware) -> Bounds:
    """The longer of reading and multiplying, each at the machine's peak, as if all else were free and both ran at once."""
    ops_per_s = hardware.ops_per_s(is_quantised=size.is_quantised)

    def decoded(num_rows: int) -> float:
        read_s = decode_bytes(size, num_rows, 0) / hardware.read_bytes_per_s
        return num_rows / max(read_s, num_rows * decode_row_ops(size, 0) / ops_per_s)

    return Bounds(
        prompt_tokens_per_s=ops_per_s / token_ops(size),
        one_row_tokens_per_s=decoded(1),
        many_rows_tokens_per_s=decoded(BOUND_ROWS),
    )


def knee_rows(size: ModelSize, rates: Speeds) -> float:
    """Rows at which the products of a decode step take as long as reading the weights. Below, one more is nearly free."""
    row_ops = 2 * (size.num_token_products + size.num_logit_products)
    return _knee(size, row_ops / rates.ops_per_s * rates.read_bytes_per_s)


def decode_shape(num_rows: int, context_tokens: float) -> StepShape:
    """A step in which each row generates one token after so many positions."""
    return StepShape(((1, round(context_tokens)),) * num_rows, num_rows)


def prompt_alone_ns(cost: CostModel, num_prompt_tokens: int, max_step_tokens: int) -> int:
    """Time of a prompt that has the server for itself: the best possible TTFT, but for what HTTP and text take."""
    total_ns = 0
    for begin in range(0, num_prompt_tokens, max_step_tokens):
        end = min(num_prompt_tokens, begin + max_step_tokens)
        total_ns += cost.duration_ns(StepShape(((end - begin, begin),), int(end == num_prompt_tokens)))
    return total_ns


# Lengths, and the memory that they take


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompts and answers in tokens."""

    num_jobs: int
    mean_prompt: float
    prompt_cv: float
    """Standard deviation of prompts over their mean."""
    mean_output: float
    output_cv: float
    """Standard deviation of answers over their mean."""
    p50_prompt: int
    p99_prompt: int
    longest: int
    """Prompt and answer of the longest request."""
    mean_context: float
    """Positions before a token that is generated, on average over all such tokens."""
    totals: tuple[int, ...]
    """Prompt and answer of each request."""


def lengths_of(jobs: Sequence[Job]) -> Lengths:
    """Lengths of some requests, at least one."""
    outputs = [job.num_output_tokens for job in jobs]
    prompts = sorted(job.num_prompt_tokens for job in jobs)
    totals = tuple(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    mean_output = fmean(outputs)
    return Lengths(
        num_jobs=len(jobs),
        mean_prompt=fmean(prompts),
        prompt_cv=pstdev(prompts) / fmean(prompts),
        mean_output=mean_output,
        output_cv=pstdev(outputs) / mean_output,
        p50_prompt=prompts[(len(prompts) - 1) // 2],
        p99_prompt=prompts[min(len(prompts) - 1, math.ceil(0.99 * len(prompts)) - 1)],
        longest=max(totals),
        mean_context=sum(job.num_output_tokens * (job.num_prompt_tokens + job.num_output_tokens / 2) for job in jobs)
        / sum(outputs),
        totals=totals,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Complete requests that the KV cache holds at once, and the share of the memory of each that stays empty."""

    num_paged: int
    paged_tokens: float
    """Positions of the blocks of one request, on average."""
    paged_waste: float
    num_preallocated: int
    """Each has memory for the longest request that is admitted, from the start."""
    preallocated_waste: float


def fit_in(capacity: Capacity, lengths: Lengths) -> Fit:
    """Blocks of `capacity` against one rectangle per request."""
    block = capacity.block_size
    num_tokens = (capacity.num_blocks - 1) * block
    totals = [min(total, capacity.max_model_len) for total in lengths.totals]
    held = [min(total, capacity.window or total) for total in totals]
    mean_paged, mean = fmean(-(-num // block) * block for num in held), fmean(totals)
    return Fit(
        num_paged=int(num_tokens / mean_paged),
        paged_tokens=mean_paged,
        paged_waste=1 - fmean(held) / mean_paged,
        num_preallocated=num_tokens // capacity.max_model_len,
        preallocated_waste=1 - mean / capacity.max_model_len,
    )


# Batches in a steady flow of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """A server that always has `num_rows` requests: when one ends, the next begins. Prompts share steps with decodes."""

    num_rows: int
    decode_ns: int
    """A step without prompts."""
    prompt_ns: float
    """Time by which a prompt of the mean length makes the steps longer that it shares."""
    tpot_ns: float
    """Time per token of a request, the prompts of others included."""
    rate: float
    """Requests per second."""
    output_tokens_per_s: float
    kv_share: float
    """Share of the KV cache that they hold on average."""


def batch_point(num_rows: int, cost: CostModel, lengths: Lengths, capacity: Capacity) -> BatchPoint:
    """Little's law: `num_rows` requests, each of which has one step per token of its answer; and per request, one prompt."""
    context = lengths.mean_context
    decodes = decode_shape(num_rows, context)
    decode_ns = cost.duration_ns(decodes)
    prompt_ns = _prompt_beside_ns(cost, lengths, capacity, decodes, decode_ns)
    tpot_ns = decode_ns + num_rows * prompt_ns / lengths.mean_output
    rate = num_rows / (tpot_ns * lengths.mean_output) * NS_PER_S
    held = num_rows * _mean_blocks(lengths, capacity)
    return BatchPoint(
        num_rows=num_rows,
        decode_ns=decode_ns,
        prompt_ns=prompt_ns,
        tpot_ns=tpot_ns,
        rate=rate,
        output_tokens_per_s=rate * lengths.mean_output,
        kv_share=held / (capacity.num_blocks - 1),
    )


def _mean_blocks(lengths: Lengths, capacity: Capacity) -> float:
    """Blocks that a request of the mean context holds."""
    return -(-min(lengths.mean_context, capacity.window or lengths.mean_context) // capacity.block_size)


def _prompt_beside_ns(cost: CostModel, lengths: Lengths, capacity: Capacity, decodes: StepShape, decode_ns: int) -> float:
    """Time by which a prompt of the mean length makes the steps longer that it shares with decodes."""
    room = max(1, capacity.max_step_tokens - len(decodes.rows))
    total_ns, num_tokens = 0.0, round(lengths.mean_prompt)
    for begin in range(0, num_tokens, room):
        chunk = (min(room, num_tokens - begin), begin)
        total_ns += cost.duration_ns(StepShape((*decodes.rows, chunk), decodes.num_samples)) - decode_ns
    return total_ns


def batch_table(cost: CostModel, lengths: Lengths, capacity: Capacity) -> Sequence[BatchPoint]:
    """Powers of two up to the rows of a step, and that number itself."""
    numbers = [1 << i for i in range(capacity.max_rows.bit_length()) if 1 << i < capacity.max_rows]
    return [batch_point(rows, cost, lengths, capacity) for rows in (*numbers, capacity.max_rows)]


def largest_batch(cost: CostModel, lengths: Lengths, capacity: Capacity, tpot_ns: float) -> BatchPoint | None:
    """The most rows whose time per token, prompts included, is within `tpot_ns`; None if not even one is."""
    low, high = 0, capacity.max_rows
    while low < high:
        middle = (low + high + 1) // 2
        is_within = batch_point(middle, cost, lengths, capacity).tpot_ns <= tpot_ns
        low, high = (middle, high) if is_within else (low, middle - 1)
    return batch_point(low, cost, lengths, capacity) if low else None


def fullest_batch(cost: CostModel, lengths: Lengths, capacity: Capacity) -> BatchPoint:
    """The batch that rows and memory allow: its rate is the most that the server can keep up with, whatever the latency."""
    fitting = int((capacity.num_blocks - 1) / _mean_blocks(lengths, capacity))
    return batch_point(max(1, min(capacity.max_rows, fitting)), cost, lengths, capacity)


# Words


def format_number(value: float, unit: str = "", *, digits: int = 3) -> str:
    """`134.5 M`, `12.1 kB`: decimal prefixes, `digits` digits."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_rounded(value / factor, digits)} {prefix}{unit}"
    return f"{_rounded(value, digits)} {unit}".rstrip()


def format_time(ns: float) -> str:
    """`2.68 ms`"""
    for factor, unit in ((NS_PER_S, "s"), (1_000_000, "ms"), (1_000, "us")):
        if abs(ns) >= factor:
            return f"{_rounded(ns / factor, 3)} {unit}"
    return f"{ns:.0f} ns"


def _rounded(value: float, digits: int) -> str:
    """Without an exponent, and no digit before the point is lost."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}" if whole else f"{value:.{digits}g}"


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity: its name, its formula in words, the same with numbers, and the result."""

    name: str
    formula: str
    numbers: str
    value: str


def arithmetic(
    size: ModelSize,
    capacity: Capacity,
    lengths: Lengths,
    cost: CostModel,
    rates: Speeds,
    *,
    tpot_limit_ns: float | None = None,
) -> Sequence[Line]:
    """All quantities of a deployment in the order in which they follow from each other.

    `cost` may be fitted; `rates` are those of the roofline in any case, whose lines say so.
    """
    lines = [*_memory_lines(size, capacity, lengths), *_step_lines(size, lengths, rates)]
    context = lengths.mean_context
    words = "by the fitted model" if cost.fitted else "reads, + work of the logits, + what is fixed"
    one = format_time(cost.duration_ns(decode_shape(1, context)))
    lines.append(Line("decode step, 1 row", words, f"after {context:.0f} positions", one))
    for name, num_tokens in (("median", lengths.p50_prompt), ("p99", lengths.p99_prompt)):
        lines.append(
            Line(
                f"best TTFT, {name} prompt",
                "the prompt alone on the server, in steps of bounded length",
                f"{num_tokens:,} tokens, at most {capacity.max_step_tokens} a step",
                format_time(prompt_alone_ns(cost, num_tokens, capacity.max_step_tokens)),
            )
        )
    if tpot_limit_ns is not None:
        lines.append(_tpot_line(cost, lengths, capacity, tpot_limit_ns))
    top = fullest_batch(cost, lengths, capacity)
    lines.append(
        Line(
            "rate of a full batch",
            "rows / (time per token x tokens of an answer)",
            f"{top.num_rows} / ({format_time(top.tpot_ns)} x {lengths.mean_output:.0f})",
            f"{top.rate:.3g} requests/s",
        )
    )
    return lines


def _memory_lines(size: ModelSize, capacity: Capacity, lengths: Lengths) -> Sequence[Line]:
    head_bytes = size.kv_dtype.head_bytes(size.head_dim)
    pool_tokens, state = (capacity.num_blocks - 1) * capacity.block_size, size.state_bytes_per_block
    fitting = fit_in(capacity, lengths)
    each = size.num_weight_bytes / size.num_parameters
    return [
        Line(
            "weights",
            "parameters x bytes of one",
            f"{format_number(size.num_parameters, digits=4)} x {each:.3g} B",
            format_number(size.num_weight_bytes, "B"),
        ),
        Line(
            "KV per token",
            f"layers x KV heads x bytes of a head ({size.head_dim} of K, {size.head_dim} of V, {size.kv_dtype}, scales)",
            f"{size.num_layers} x {size.num_kv_heads} x {head_bytes} B",
            f"{size.kv_bytes_per_token:,} B",
        ),
        Line(
            "KV cache",
            f"blocks x tokens of one x KV per token{' + blocks x recurrent state of one' if state else ''}",
            f"{capacity.num_blocks - 1:,} x {capacity.block_size} = {pool_tokens:,} tokens, x {size.kv_bytes_per_token:,} B"
            + (f" + {capacity.num_blocks - 1:,} x {state:,} B" if state else ""),
            format_number(pool_tokens * size.kv_bytes_per_token + (capacity.num_blocks - 1) * state, "B"),
        ),
        Line(
            "requests that fit, paged",
            "tokens of the cache / tokens of a request, in whole blocks",
            f"{pool_tokens:,} / {fitting.paged_tokens:,.1f}",
            f"{fitting.num_paged:,}; {fitting.paged_waste:.1%} of that memory stays empty",
        ),
        Line(
            "preallocated instead",
            "tokens of the cache / longest request that is admitted",
            f"{pool_tokens:,} / {capacity.max_model_len:,}",
            f"{fitting.num_preallocated:,}; {fitting.preallocated_waste:.1%} of that memory stays empty",
        ),
    ]


def _step_lines(size: ModelSize, lengths: Lengths, rates: Speeds) -> Sequence[Line]:
    middle, context = lengths.mean_prompt / 2, lengths.mean_context
    row_ops, num_bytes = decode_row_ops(size, context), decode_bytes(size, 1, context)
    products, pairs, logits = (
        format_number(number) for number in (size.num_token_products, size.num_attention_products, size.num_logit_products)
    )
    return [
        Line(
            "work of a prompt token",
            "2 x (products with weights + with a position x positions)",
            f"2 x ({products} + {pairs} x {middle:.0f})",
            format_number(token_ops(size, middle), "op"),
        ),
        Line(
            "work of a decode row",
            "the same, + 2 x products for logits",
            f"2 x ({products} + {pairs} x {context + 1:.0f} + {logits})",
            f"{format_number(row_ops, 'op')} = {format_time(row_ops / rates.ops_per_s * NS_PER_S)} "
            f"at {format_number(rates.ops_per_s, 'op/s')}",
        ),
        Line(
            "reads of a decode step",
            "weights + rows x positions x KV per token",
            f"{format_number(read_bytes(size, 1), 'B')} + 1 x {context + 1:.0f} x {size.kv_bytes_per_token:,} B",
            f"{format_number(num_bytes, 'B')} = {format_time(num_bytes / rates.read_bytes_per_s * NS_PER_S)} "
            f"at {format_number(rates.read_bytes_per_s, 'B/s')}",
        ),
        Line(
            "rows at the knee",
            "time to read the weights / time of a row's products",
            f"{format_time(read_bytes(size, knee_rows(size, rates)) / rates.read_bytes_per_s * NS_PER_S)} / "
            f"{format_time(2 * (size.num_token_products + size.num_logit_products) / rates.ops_per_s * NS_PER_S)}",
            f"{knee_rows(size, rates):.1f}: below, rows are nearly free",
        ),
    ]


def _tpot_line(cost: CostModel, lengths: Lengths, capacity: Capacity, limit_ns: float) -> Line:
    found = largest_batch(cost, lengths, capacity, limit_ns)
    shown = found or batch_point(1, cost, lengths, capacity)
    return Line(
        "largest batch in the limit",
        "most rows with step + rows x prompt / answer within the TPOT limit",
        f"{format_time(shown.tpot_ns)} with {shown.num_rows}, limit {format_time(limit_ns)}, at most {capacity.max_rows}",
        f"{found.num_rows} rows" if found else "none",
    )
