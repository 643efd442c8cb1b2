"""Formats the reports of `penstock profile`: a fit's errors, and where the time of a recorded server went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from penstock.lab.cost_model import CostModel
from penstock.lab.fitting import HOST, TOTAL, Errors, Fit
from penstock.lab.kernel_tables import KernelTables
from penstock.lab.recording import Arrival, Departure, Lost, Recording, StepDone
from penstock.lab.step_counts import counts_of
from penstock.lab.steps import ENGINE_PARTS
from penstock.types.plan import StepShape
from penstock.types.stats import HOST_PARTS, PLANNING_PARTS

_PART_ORDER = (TOTAL, "linear", "attention", "sampling", "rows", "other", HOST)


def fit_lines(fitted: Fit) -> Iterator[str]:
    yield f"{fitted.num_steps} steps. Errors of steps that the fit had not seen:"
    yield f"  {'part':12}{'median':>9}{'p90':>9}{'largest':>9}{'mean':>9}   kinds of steps"
    for part in sorted(fitted.left_out, key=_order):
        errors: Errors = fitted.left_out[part]
        yield (
            f"  {part:12}{errors.median:9.1%}{errors.p90:9.1%}{errors.largest:9.1%}{errors.signed_mean:+9.1%}   {errors.num}"
        )
    yield from cost_lines(fitted.cost)


def cost_lines(cost: CostModel) -> Iterator[str]:
    yield f"  each step                     {cost.step_ns / 1e6:10.3f} ms"
    begin = 0
    for up_to, token_ns in cost.token_brackets:
        yield f"  token {begin + 1:4} to {up_to:5}            {token_ns / 1e3:10.2f} us"
        begin = up_to
    for name, words, factor, unit in (
        ("decode_row_ns", "extra per decode row", 1e3, "us"),
        ("prefill_token_ns", "extra per prompt token", 1e3, "us"),
        ("sample_ns", "token that is sampled", 1e3, "us"),
        ("sample_step_ns", "step that samples", 1e3, "us"),
        ("decode_read_ns", "KV position read by a decode", 1, "ns"),
        ("narrow_read_ns", "extra in a step of < 16 tokens", 1, "ns"),
        ("prefill_read_ns", "KV position read by a prompt", 1, "ns"),
        ("prefill_context_ns", "KV position before a prompt's", 1, "ns"),
        ("repeated_ns", "saved if an earlier row read it", 1, "ns"),
        ("host_step_ns", "host, each step", 1e3, "us"),
        ("host_row_ns", "host, each row", 1e3, "us"),
        ("host_prefill_ns", "host, step with prompts", 1e3, "us"),
        ("text_ns", "text, each request", 1e3, "us"),
        ("text_token_ns", "text, each token of the prompt", 1e3, "us"),
        ("cold_ns", "short step after a long one", 1e3, "us"),
    ):
        if value := getattr(cost, name):
            yield f"  {words:30}{value / factor:10.2f} {unit}"
    for up_to_ns, ratios in cost.residuals:
        middle, p99 = (ratios[int(share * len(ratios))] for share in (0.5, 0.99))
        yield f"  noise, steps up to {up_to_ns / 1e6:7.1f} ms: {middle:.3f} times the model in the median, {p99:.3f} at p99"
    if (fitted := cost.fitted) is not None:
        yield (
            f"  fitted to steps of up to {fitted.max_rows} rows, {fitted.max_prefill_tokens} prompt tokens, "
            f"{fitted.max_context_len} tokens of context; others are extrapolated, with a warning"
        )


def kernel_lines(kernels: KernelTables) -> Iterator[str]:
    """Yield the kernel tables' range, and a few step times."""
    yield (
        f"{kernels.num_layers} layers; up to {kernels.max_tokens} tokens of prompts, {kernels.max_decodes} decodes and "
        f"{kernels.max_context_len} tokens of context in a step; beyond, times grow with the work, and simulations say so"
    )
    for words, rows in (
        ("a decode after 1,024 tokens", ((1, 1024),)),
        ("64 decodes after 1,024 tokens", ((1, 1024),) * 64),
        ("a prompt of 1,024 tokens", ((1024, 0),)),
        ("both", ((1, 1024),) * 64 + ((1024, 0),)),
    ):
        ns = kernels.step_ns(counts_of(StepShape(rows, len(rows))))
        yield f"  {words:30}{ns / 1e6:10.3f} ms"


def recording_lines(recording: Recording) -> Iterator[str]:
    header = recording.header
    parts_ns: defaultdict[str, int] = defaultdict(int)
    num_steps = num_rows = num_tokens = num_padding = num_guesses = num_accepted = num_lost = num_ended = 0
    seen: set[int] = set()
    idle_ns = host_ns = 0
    first_ns = last_ns = None
    for event in recording.events():
        match event:
            case StepDone():
                num_steps += 1
                num_rows += len(event.rows)
                num_tokens += sum(row.query_len for row in event.rows)
                num_padding += sum(row.query_len for row in event.rows if row.id < 0)
                num_guesses += sum(row.samples - 1 for row in event.rows if row.samples)
                num_accepted += sum(row.num_accepted for row in event.rows)
                if first_ns is None or last_ns is None:
                    first_ns = last_ns = event.planned_ns
                idle_ns += max(0, event.planned_ns - last_ns - host_ns)
                host_ns = sum(event.parts_ns.get(part, 0) for part in HOST_PARTS if part not in PLANNING_PARTS)
                last_ns = event.ended_ns
                for part, part_ns in event.parts_ns.items():
                    parts_ns[part] += part_ns
            case Arrival():
                seen.add(event.id)
            case Departure():
                seen.add(event.id)
                num_ended += 1
            case Lost():
                num_lost += event.count
    yield f"{header.model}, {header.machine.get('cpu', '')}, begun {header.began}, configuration {header.config}"
    yield f"{len(seen)} requests, {num_ended} of them ended; {num_steps} steps; {num_lost} reports were lost"
    if first_ns is None or last_ns is None or last_ns <= first_ns:
        return
    span_ns = last_ns - first_ns
    yield f"{num_rows / num_steps:.1f} rows and {num_tokens / num_steps:.1f} tokens a step"
    if num_padding:
        yield f"{num_padding / num_tokens:.1%} of the computed tokens are padding"
    if num_guesses:
        right = num_accepted / num_guesses
        yield f"{num_guesses / num_tokens:.1%} of the computed tokens are guesses, {right:.1%} of them right"
    yield f"{span_ns / 1e9:.1f} s from the first step to the last:"
    yield from _shares(parts_ns, span_ns, idle_ns, header.depth)


def _shares(parts_ns: Mapping[str, int], span_ns: int, idle_ns: int, depth: int) -> Iterator[str]:
    own = {part: ns for part, ns in parts_ns.items() if part not in ENGINE_PARTS}
    engine = [part for part in (TOTAL, *HOST_PARTS) if part in parts_ns]
    beside = HOST_PARTS if depth > 1 else ("grammar", "output") if "grammar" in parts_ns else ()
    for part in engine:
        yield f"  {part:12}{parts_ns[part] / span_ns:8.1%}{'   may overlap execute' if part in beside else ''}"
        if part == TOTAL:
            for name, part_ns in own.items():
                yield f"    {name:10}{part_ns / span_ns:8.1%}"
    rest_ns = span_ns - sum(parts_ns[part] for part in engine)
    yield f"  {'other':12}{max(idle_ns, rest_ns) / span_ns:8.1%}   idle, or between parts"


def _order(part: str) -> int:
    return _PART_ORDER.index(part) if part in _PART_ORDER else len(_PART_ORDER)
