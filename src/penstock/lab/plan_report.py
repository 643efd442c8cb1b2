"""A plan in words and tables for a terminal, and as one JSON object. Called by `cli.plan`; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.lab.hardware import Hardware
from penstock.lab.plan import ADVICE, LEAST_SHARE, MOST_REPLICAS, Sized, Trial, times_words
from penstock.lab.plots import Axis, Panel, Plot, Series, draw
from penstock.lab.sizing import NS_PER_S, Line, format_number, format_time
from penstock.types.errors import counted

JSON_VERSION = 2


def report(sized: Sized) -> str:
    """Everything about one machine."""
    hardware, lengths = sized.hardware, sized.lengths
    peak = format_number(hardware.ops_per_s(is_quantised=sized.candidate.size.is_quantised), "op/s")
    memory, reads = format_number(hardware.memory_bytes, "B"), format_number(hardware.read_bytes_per_s, "B/s")
    parts = [
        f"{sized.candidate.size.name} on {hardware.name}: {hardware.description}; {memory} of memory, peaks {reads} and {peak}",
        f"Workload {sized.workload}: {counted(lengths.num_jobs, 'request')}, prompts of {lengths.mean_prompt:.0f} tokens on "
        f"average (p99 {lengths.p99_prompt}), answers of {lengths.mean_output:.0f}",
    ]
    if sized.search is not None:
        parts.append("\n" + "\n".join(_answer(sized)))
    if sized.warnings:
        parts.append("\nWhat is not certain\n" + "\n".join(f"- {warning}" for warning in sized.warnings))
    parts += [
        "\nArithmetic\n" + "\n".join(_lines(sized.lines)),
        "\nBatch size against latency and throughput, with such requests in a steady flow\n" + _batches(sized),
        "\nWaits by formulas (M/G/k for a row of the batch, M/G/1 behind other prompts; Poisson arrivals)\n" + _waits(sized),
    ]
    return "\n".join(parts)


def _lines(lines: Sequence[Line]) -> Iterator[str]:
    """`weights   parameters x bytes of one`, and below it `= 134.5 M x 0.63 B = 85 MB`."""
    width = max(len(line.name) for line in lines)
    for line in lines:
        yield f"  {line.name:{width}}  {line.formula}"
        yield f"  {'':{width}}  = " + " = ".join(filter(None, (line.numbers, line.value)))


def _batches(sized: Sized) -> str:
    rows = [["rows", "decode step", "time per token", "requests/s", "output tokens/s", "KV held"]]
    for point in sized.batches:
        shown = f"{point.kv_share:.1%}" + (" does not fit" if point.kv_share > 1 else "")
        rate, output = f"{point.rate:.3g}", format_number(point.output_tokens_per_s)
        rows.append([f"{point.num_rows}", format_time(point.decode_ns), format_time(point.tpot_ns), rate, output, shown])
    return table(rows)


def _waits(sized: Sized) -> str:
    rows = [["utilisation", "requests/s", "in the server", "time per token", "for a row", "p99", "behind prompts"]]
    for wait in sized.waits:
        behind = "no bound" if math.isinf(wait.prompt_s) else format_time(wait.prompt_s * NS_PER_S)
        row, late = (format_time(seconds * NS_PER_S) if seconds >= 1e-6 else "0" for seconds in (wait.row_s, wait.p99_row_s))
        rows.append(
            [f"{wait.utilisation:.0%}", f"{wait.rate:.3g}", f"{wait.num_rows}", format_time(wait.tpot_ns), row, late, behind]
        )
    return table(rows)


def _answer(sized: Sized) -> Iterator[str]:
    found, binding = sized.search, sized.binding
    assert found is not None
    if found.best is None:
        assert found.failed is not None
        yield f"No rate holds these SLOs, not even {LEAST_SHARE:.0%} of what one server keeps up with: " + (
            trial_words(found.failed) + "."
        )
        yield "Loosen that SLO, or take a faster machine or a smaller model."
        if binding is not None:
            yield binding.reason
        yield from _fleet(sized)
        return
    runs = counted(len(found.trials), "run")
    bound = "" if sized.candidate.is_fitted else "at most "
    yield f"Highest rate: {bound}{found.rate:.3g} requests/s, at which {100 * sized.goal:.4g} % hold the SLOs ({runs})"
    yield f"  holds   {trial_words(found.best)}"
    if found.failed is not None:
        yield f"  fails   {trial_words(found.failed)}"
    else:
        yield "  The SLOs hold up to the rate that the server can keep up with at all; beyond, its queue grows without bound."
    option = f"--rate {found.rate:.3g}" if sized.own_rate is None else f"--speed {found.rate / sized.own_rate:.3g}"
    yield f"  To measure it: `penstock bench` with the options of this workload and {option}"
    yield f"  A server that always has enough of such requests ends {found.saturated_rate:.3g} of them a second."
    if binding is not None:
        yield f"What binds: {binding.words}. {binding.reason}"
        for resource in binding.resources:
            yield f"  What helps{'' if binding.is_clear else f', if it is {resource}'}: {ADVICE[resource]}."
    yield from _fleet(sized)


def _fleet(sized: Sized) -> Iterator[str]:
    fleet = sized.fleet
    if fleet is None:
        if sized.search is not None and sized.search.best is not None:
            yield f"Not even {MOST_REPLICAS} replicas behind a {sized.router} router hold the SLOs at the rate that is wanted."
        return
    room = f" with {fleet.headroom:.0%} of headroom" if fleet.headroom else ""
    yield (
        f"For {fleet.rate:.3g} requests/s{room}: {counted(fleet.num_replicas, 'replica')}"
        f"{f' behind a {sized.router} router' if fleet.num_replicas > 1 else ''}, "
        f"at a load of {fleet.load:.0%} of what they keep up with"
    )
    replicas = counted(fleet.num_in_group, "replica")
    if fleet.held is not None:
        yield f"  holds   {replicas} at {trial_words(fleet.held)}"
        if fleet.failed is not None:
            yield f"  fails   {counted(fleet.num_in_group - 1, 'replica')} at {trial_words(fleet.failed)}"
        elif fleet.load * fleet.num_in_group > (fleet.num_in_group - 1) * (1 - fleet.headroom):
            yield "  With fewer their queues would grow without bound."
    if fleet.num_groups > 1:
        yield f"  One of {fleet.num_groups} groups of {replicas} was simulated, to which requests go in turn."
    yield from _bill(sized)


def _bill(sized: Sized) -> Iterator[str]:
    bill, hardware = sized.bill, sized.hardware
    if bill is None or sized.fleet is None:
        yield "  No price is known: give --price-per-hour."
        return
    output, every = _price(bill.price_per_million_output_tokens), _price(bill.price_per_million_tokens)
    yield (
        f"  {bill.price_per_hour:.2f} USD an hour: {output} USD per million output tokens, "
        f"{every} per million tokens of prompts and answers"
    )
    if hardware.price_per_hour is not None and bill.price_per_hour == hardware.price_per_hour * sized.fleet.num_replicas:
        yield f"  ({hardware.price_source}, {hardware.price_date}; yours will differ: --price-per-hour)"


def comparison(some: Sequence[Sized]) -> str:
    """Several machines, a line for each: the cheapest first, those without a price next, then those on which no rate holds."""
    rows = [["hardware", "requests/s", "binds", "replicas", "load", "USD an hour", "USD per 1M output tokens", "step times"]]
    for sized in sorted(some, key=_order):
        fleet, bill, binding = sized.fleet, sized.bill, sized.binding
        rows.append(
            [
                sized.hardware.name,
                "-" if sized.search is None else f"{sized.search.rate:.3g}",
                "-" if binding is None else binding.words,
                "none" if fleet is None else f"{fleet.num_replicas}",
                "" if fleet is None else f"{fleet.load:.0%}",
                "" if bill is None else f"{bill.price_per_hour:.2f}",
                "" if bill is None else _price(bill.price_per_million_output_tokens),
                "fitted" if sized.candidate.is_fitted else "estimated",
            ]
        )
    sources = dict.fromkeys(
        f"{sized.hardware.price_source}, {sized.hardware.price_date}" for sized in some if sized.hardware.price_date
    )
    note = f"\nPrices are of {'; '.join(sources)}. Yours will differ." if sources else ""
    return table(rows) + note


def _order(sized: Sized) -> tuple[bool, float, float]:
    """A key by which machines are sorted: the cheapest fleet, else the highest rate."""
    price = math.inf if sized.bill is None else sized.bill.price_per_million_output_tokens
    return sized.fleet is None, price, -sized.search.rate if sized.search else 0.0


def hardware_table(machines: Sequence[Hardware]) -> str:
    """The machines that can be named, with where their figures come from."""
    rows = [["name", "memory", "reads", "operations", "USD an hour", "of", "description"]]
    for one in machines:
        price = "" if one.price_per_hour is None else f"{one.price_per_hour:.2f}"
        peak = format_number(one.ops_per_s(is_quantised=True), "op/s")
        memory, reads = format_number(one.memory_bytes, "B"), format_number(one.read_bytes_per_s, "B/s")
        rows.append([one.name, memory, reads, peak, price, one.price_date, one.description])
    return table(rows)


def trial_words(trial: Trial) -> str:
    """One line: attainment with its interval, latency against the limit, occupancy."""
    share = trial.attainment
    interval = "" if share.low is None or share.high is None else f" [{share.low:.1%}, {share.high:.1%}]"
    return (
        f"{trial.rate:.3g} requests/s: {share.value:.2%}{interval} of {trial.num_requests} hold the SLOs, latency "
        f"{times_words(trial.stress)} the limit ({trial.worst_slo}); {trial.mean_running:.1f} running, "
        f"KV {trial.kv_share:.0%} full, end to end {format_time(trial.mean_e2e_s * NS_PER_S)}"
    )


def plots(sized: Sized) -> Iterator[tuple[str, Plot]]:
    """Drawings with names for their files. Raises ConfigError without matplotlib."""
    rows = Axis("requests in a batch", is_log=True)
    rates = [(point.num_rows, point.output_tokens_per_s) for point in sized.batches]
    times = [(point.num_rows, point.tpot_ns / 1e6) for point in sized.batches]
    limits = {str(slo): slo.limit_ns / 1e6 for slo in sized.slos if slo.metric in ("tpot", "itl")}
    panels = [
        Panel("Throughput", rows, Axis("output tokens/s", low=0.0), [Series("steady flow", rates)]),
        Panel("Latency", rows, Axis("time per token (ms)", low=0.0), [Series("steady flow", times)], limits=limits),
    ]
    name = f"{sized.candidate.size.name} on {sized.hardware.name}"
    yield "batches", draw(f"Batch size against throughput and latency, {name}", panels)
    if sized.search is not None:
        trials = sorted(trial for trial in sized.search.trials if math.isfinite(trial.stress))
        held = [(trial.rate, trial.num_good / trial.num_requests) for trial in trials]
        stress = [(trial.rate, trial.stress) for trial in trials]
        rate = Axis("requests/s")
        panels = [
            Panel(
                "SLOs held", rate, Axis("share of the requests", low=0.0), [Series("runs", held)], limits={"goal": sized.goal}
            ),
            Panel("Latency", rate, Axis("over its limit", low=0.0), [Series("runs", stress)], limits={"limit": 1.0}),
        ]
        yield "rates", draw(f"SLOs by rate, {name}", panels)


def as_json(some: Sequence[Sized]) -> dict[str, object]:
    """Numbers of the plan, in seconds, bytes and tokens; infinities are null."""
    return {"penstock_plan": JSON_VERSION, "machines": [_machine(sized) for sized in some]}


def _machine(sized: Sized) -> dict[str, object]:
    size, capacity = sized.candidate.size, sized.candidate.simulation.capacity
    binding, fleet, bill, found = sized.binding, sized.fleet, sized.bill, sized.search
    return {
        "hardware": sized.hardware.name,
        "model": size.name,
        "workload": sized.workload,
        "is_fitted": sized.candidate.is_fitted,
        "num_weight_bytes": size.num_weight_bytes,
        "kv_bytes_per_token": size.kv_bytes_per_token,
        "num_kv_tokens": (capacity.num_blocks - 1) * capacity.block_size,
        "max_model_len": capacity.max_model_len,
        "batches": [
            {
                "num_rows": point.num_rows,
                "decode_step_s": point.decode_ns / NS_PER_S,
                "tpot_s": point.tpot_ns / NS_PER_S,
                "requests_per_s": point.rate,
                "output_tokens_per_s": point.output_tokens_per_s,
                "kv_share": point.kv_share,
            }
            for point in sized.batches
        ],
        "goal": sized.goal,
        "highest_rate": None if found is None else found.rate,
        "saturated_rate": None if found is None else found.saturated_rate,
        "trials": [] if found is None else [_trial(trial) for trial in sorted(found.trials)],
        "binds": [] if binding is None else [str(resource) for resource in binding.resources],
        "binds_clearly": None if binding is None else binding.is_clear,
        "times_as_high_with_twice": None if binding is None else {str(key): [*gain] for key, gain in binding.gains.items()},
        "router": sized.router,
        "num_replicas": None if fleet is None else fleet.num_replicas,
        "rate": None if fleet is None else fleet.rate,
        "headroom": None if fleet is None else fleet.headroom,
        "load": None if fleet is None else fleet.load,
        "price_per_hour": None if bill is None else bill.price_per_hour,
        "price_per_million_output_tokens": None if bill is None else bill.price_per_million_output_tokens,
        "warnings": list(sized.warnings),
    }


def _trial(trial: Trial) -> dict[str, object]:
    return {
        "rate": trial.rate,
        "attainment": trial.num_good / trial.num_requests,
        "num_requests": trial.num_requests,
        "stress": _finite(trial.stress),
        "kv_share": trial.kv_share,
        "mean_running": trial.mean_running,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _price(dollars: float) -> str:
    return f"{dollars:.2f}" if dollars >= 1 else f"{dollars:.3g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; all but the first are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)
