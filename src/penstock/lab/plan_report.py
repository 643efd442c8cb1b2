"""Reports a plan as text, plots and JSON. Called by `cli.plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.config.units import figure
from penstock.lab.arrivals import mean_rate, rate_unit
from penstock.lab.hardware import Hardware
from penstock.lab.plan import LEAST_SHARE, MOST_REPLICAS, REMEDIES, Fleet, Sized, Trial, p99_ttft_ns
from penstock.lab.plots import Axis, Panel, Plot, Series, draw
from penstock.lab.sizing import arithmetic, format_number, format_time
from penstock.lab.workload import NS_PER_S
from penstock.types.errors import counted


def report(sized: Sized) -> str:
    hardware, lengths = sized.hardware, sized.lengths
    peak = format_number(hardware.ops_per_s(is_quantised=sized.candidate.size.is_quantised), "op/s")
    memory, reads = format_number(hardware.memory_bytes, "B"), format_number(hardware.read_bytes_per_s, "B/s")
    candidate = sized.candidate
    right = f", taken to be right within a factor of {candidate.step_error:.3g}" if candidate.step_error > 1 else ""
    parts = [
        f"{sized.candidate.size.name} on {hardware.name}: {hardware.description}; {memory} of memory, peaks {reads} and {peak}",
        f"Workload {sized.workload.name}: {counted(lengths.num_jobs, 'request')}, prompts of {lengths.mean_prompt:.0f} tokens "
        f"on average (p99 {lengths.p99_prompt}), answers of {lengths.mean_output:.0f}",
        *([f"Step times: {candidate.step_source}{right}"] if candidate.step_source else []),
    ]
    if sized.search is not None:
        parts.append("\n" + "\n".join(_answer(sized)))
    if sized.warnings:
        parts.append("\nWhat is not certain\n" + "\n".join(f"- {warning}" for warning in sized.warnings))
    parts += [
        "\nArithmetic\n" + "\n".join(_lines(sized)),
        "\nBatch size against latency and throughput, with such requests in a steady flow\n" + _batches(sized),
    ]
    return "\n".join(parts)


def _lines(sized: Sized) -> Iterator[str]:
    candidate, simulation = sized.candidate, sized.candidate.simulation
    limit_ns = next((slo.limit_ns for slo in sized.asked.slos if slo.metric in ("tpot", "itl")), None)
    lines = list(
        arithmetic(candidate.size, simulation.capacity, sized.lengths, simulation.cost, candidate.rates, tpot_limit_ns=limit_ns)
    )
    width = max(len(line.name) for line in lines)
    for line in lines:
        yield f"  {line.name:{width}}  {line.formula}"
        yield f"  {'':{width}}  = " + " = ".join(filter(None, (line.numbers, line.value)))


def _batches(sized: Sized) -> str:
    rows = [["rows", "decode step", "time per token", "requests/s", "output tokens/s", "KV held"]]
    for point in sized.batches:
        shown = f"{point.kv_share:.1%}" + (" does not fit" if point.kv_share > 1 else "")
        rate, output = format_number(point.rate), format_number(point.output_tokens_per_s)
        rows.append([f"{point.num_rows}", format_time(point.decode_ns), format_time(point.tpot_ns), rate, output, shown])
    return table(rows)


def _answer(sized: Sized) -> Iterator[str]:
    found, binding, unit = sized.search, sized.binding, rate_unit(sized.workload)
    assert found is not None
    assert binding is not None
    (low, high), error = sized.rates, sized.candidate.step_error
    if found.best is None:
        assert found.failed is not None
        least, trial = f"{LEAST_SHARE:.0%}", trial_words(found.failed, unit)
        yield f"One server meets these SLOs at no rate, not even {least} of what it keeps up with: {trial}."
        if high:
            yield f"With steps {error:.3g} times as fast, its highest rate would be {figure(high)} {unit}."
        if sized.fleet is None:
            yield "Loosen that SLO, or use a faster machine or a smaller model."
        yield binding.reason
    else:
        runs = counted(len(found.trials), "run")
        goal, own_rate = f"{100 * sized.asked.goal:.4g} %", mean_rate(sized.workload)
        range_ = f" ({figure(low)} to {figure(high)} with steps {error:.3g} times as slow or as fast)"
        between = range_ if sized.outlooks else ""
        yield f"Highest rate: {figure(found.rate)} {unit}{between}, at which {goal} of the requests meet the SLOs ({runs})"
        yield f"  meets   {trial_words(found.best, unit)}"
        if found.failed is not None:
            yield f"  fails   {trial_words(found.failed, unit)}"
        else:
            yield "  The SLOs are met up to saturation. Beyond it, the queue grows without bound."
        speed = sized.asked.speed
        option = f"--rate {figure(found.rate)}" if own_rate is None else f"--speed {figure(speed * found.rate / own_rate)}"
        replaced = f" in place of --speed {speed:g}" if speed != 1 else ""
        kept = any(job.after is not None or job.deadline_ns or job.cancelled_ns for job in sized.workload.jobs)
        also = ", which also scales think times and deadlines" if own_rate is not None and kept else ""
        yield f"  To measure it: `penstock bench` with the options of this workload and {option}{replaced}{also}"
        yield f"  At saturation, one server completes about {figure(found.saturated_rate)} {unit}."
        yield f"What binds: {binding.words}. {binding.reason}"
        for resource in binding.resources:
            yield f"  What helps{'' if binding.is_clear else f', if it is {resource}'}: {REMEDIES[resource][1]}."
    if sized.fleet is not None:
        yield from _fleet(sized, sized.fleet)
    elif found.best is not None:
        yield f"Not even {MOST_REPLICAS} replicas behind a {sized.asked.router} router meet the SLOs at the wanted rate."


def _fleet(sized: Sized, fleet: Fleet) -> Iterator[str]:
    headroom, hardware, bill, unit = sized.asked.headroom, sized.hardware, sized.bill, rate_unit(sized.workload)
    room = f" with {headroom:.0%} of headroom" if headroom else ""
    routed = f" behind a {sized.asked.router} router" if fleet.num_replicas > 1 else ""
    range_ = replica_range(sized)
    number = f"{counted(fleet.num_replicas, 'replica')}{routed}"
    if range_ != f"{fleet.num_replicas}":
        number = f"{range_} replicas{routed}; {fleet.num_replicas} with these step times"
    yield f"For {figure(fleet.rate)} {unit}{room}: {number}, at a load of {fleet.load:.0%} of what they keep up with"
    replicas = counted(fleet.num_in_group, "replica")
    if fleet.held is not None:
        yield f"  meets   {replicas} at {trial_words(fleet.held, unit)}"
        if fleet.failed is not None:
            yield f"  fails   {counted(fleet.num_in_group - 1, 'replica')} at {trial_words(fleet.failed, unit)}"
        elif fleet.load * fleet.num_in_group > (fleet.num_in_group - 1) * (1 - headroom):
            yield "  With fewer their queues would grow without bound."
    if fleet.num_groups > 1:
        yield f"  Requests go in turn to {fleet.num_groups} groups of {replicas}; one group was simulated."
    if bill is None:
        yield "  No price is known: give --price-per-hour."
        return
    output, every = (
        _range_of_prices(sized, price) for price in (bill.price_per_million_output_tokens, bill.price_per_million_tokens)
    )
    yield (
        f"  {_range_of_prices(sized, bill.price_per_hour)} USD an hour: {output} USD per million output tokens, "
        f"{every} per million tokens of prompts and answers"
    )
    if hardware.price_per_hour is not None and bill.price_per_hour == hardware.price_per_hour * fleet.num_replicas:
        yield f"  ({hardware.price_source}, {hardware.price_date}; yours will differ: --price-per-hour)"


def comparison(some: Sequence[Sized]) -> str:
    unit = rate_unit(some[0].workload)
    rows = [["hardware", unit, "binds", "replicas", "load", "USD an hour", "USD per 1M output tokens", "step times"]]
    for sized in sorted(some, key=_order):
        fleet, bill = sized.fleet, sized.bill
        rows.append(
            [
                sized.hardware.name,
                rate_range(sized) if sized.search else "-",
                sized.binding.words if sized.binding else "-",
                replica_range(sized) if fleet else "none",
                f"{fleet.load:.0%}" if fleet else "",
                _range_of_prices(sized, bill.price_per_hour) if bill else "",
                _range_of_prices(sized, bill.price_per_million_output_tokens) if bill else "",
                f"{sized.candidate.step_source.partition(':')[0]}",
            ]
        )
    sources = dict.fromkeys(
        f"{sized.hardware.price_source}, {sized.hardware.price_date}" for sized in some if sized.hardware.price_date
    )
    note = f"\nPrices are of {'; '.join(sources)}. Yours will differ." if sources else ""
    return table(rows) + note


def rate_range(sized: Sized) -> str:
    low, high = map(figure, sized.rates)
    return low if low == high else f"{low} to {high}"


def replica_range(sized: Sized) -> str:
    assert sized.replicas is not None
    low, high = sized.replicas
    return f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"


def _range_of_prices(sized: Sized, price: float) -> str:
    """Return a price of the planned replicas, as a range over the replica counts that other step times need."""
    assert sized.fleet is not None
    assert sized.replicas is not None
    low, high = (None if number is None else _price(price * number / sized.fleet.num_replicas) for number in sized.replicas)
    return f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"


def beside(some: Sequence[Sized]) -> str:
    """Compare plans with those of presets on the same hardware."""
    unit = rate_unit(some[0].workload)
    rows = [["hardware", "policies", "router", unit, "gain", "p99 TTFT", "at", "replicas", "USD an hour"]]
    for sized in some:
        rate, common = _rate(sized), _common_rate(sized)
        for name, one in {"these settings": sized, **{f"preset {name}": one for name, one in sized.rivals.items()}}.items():
            gain = "" if one is sized or not _rate(one) else f"{rate / _rate(one):.2f} x"
            late = [format_time(p99_ttft_ns(one, common)), f"{figure(common)}/s"] if _rate(one) else ["", ""]
            number, price = (
                f"{one.fleet.num_replicas}" if one.fleet else "none",
                _price(one.bill.price_per_hour) if one.bill else "",
            )
            rows.append([one.hardware.name, name, one.asked.router, figure(_rate(one)), gain, *late, number, price])
    note = (
        "Gain: the highest rate of these settings divided by the preset's. "
        "TTFT: one replica's, at the lowest of these rates above 0."
    )
    return f"{table(rows)}\n{note}"


def _rate(sized: Sized) -> float:
    return sized.search.rate if sized.search else 0.0


def _common_rate(sized: Sized) -> float:
    """Return the highest rate that a plan and its rivals all hold. Those that hold no rate do not count."""
    return min(filter(None, map(_rate, (sized, *sized.rivals.values()))), default=0.0)


def _order(sized: Sized) -> tuple[bool, float, float]:
    price = math.inf if sized.bill is None else sized.bill.price_per_million_output_tokens
    return sized.fleet is None, price, -_rate(sized)


def hardware_table(machines: Sequence[Hardware]) -> str:
    rows = [["name", "memory", "reads", "operations", "USD an hour", "of", "kernels measured by", "description"]]
    for one in machines:
        price = "" if one.price_per_hour is None else f"{one.price_per_hour:.2f}"
        peak = format_number(one.ops_per_s(is_quantised=True), "op/s")
        memory, reads = format_number(one.memory_bytes, "B"), format_number(one.read_bytes_per_s, "B/s")
        rows.append([one.name, memory, reads, peak, price, one.price_date.partition(" ")[0], one.tables, one.description])
    note = "\n`penstock profile --import` makes step times of measured kernels: docs/profile.md. Without, they are estimates."
    return table(rows) + note


def trial_words(trial: Trial, unit: str) -> str:
    share = trial.attainment
    low, high = share.low, share.high
    interval = "" if low is None or high is None else f" (95% interval: {100 * low:.3g}% to {100 * high:.3g}%)"
    stress = "beyond" if math.isinf(trial.stress) else f"{trial.stress:.2f} x"
    return (
        f"{figure(trial.rate)} {unit}: {100 * share.value:.4g}% of {trial.num_requests} requests meet the SLOs{interval}, "
        f"latency {stress} the limit ({trial.worst_slo}); {trial.mean_running:.1f} running, "
        f"KV {trial.kv_share:.0%} full, end to end {format_time(trial.mean_e2e_s * NS_PER_S)}"
    )


def plots(sized: Sized) -> Iterator[tuple[str, Plot]]:
    rows = Axis("requests in a batch", is_log=True)
    rates = [(point.num_rows, point.output_tokens_per_s) for point in sized.batches]
    times = [(point.num_rows, point.tpot_ns / 1e6) for point in sized.batches]
    limits = {str(slo): slo.limit_ns / 1e6 for slo in sized.asked.slos if slo.metric in ("tpot", "itl")}
    panels = [
        Panel("Throughput", rows, Axis("output tokens/s", low=0.0), [Series("steady flow", rates)]),
        Panel("Latency", rows, Axis("time per token (ms)", low=0.0), [Series("steady flow", times)], limits=limits),
    ]
    name = f"{sized.candidate.size.name} on {sized.hardware.name}"
    yield "batches", draw(f"Batch size against throughput and latency, {name}", panels)
    if sized.search is not None:
        trials = sorted(trial for trial in sized.search.trials if math.isfinite(trial.stress))
        held = Series("runs", [(trial.rate, trial.num_good / trial.num_requests) for trial in trials])
        stress = Series("runs", [(trial.rate, trial.stress) for trial in trials])
        rate, share, over = (
            Axis(rate_unit(sized.workload)),
            Axis("share of the requests", low=0.0),
            Axis("over its limit", low=0.0),
        )
        panels = [
            Panel("SLOs met", rate, share, [held], limits={"goal": sized.asked.goal}),
            Panel("Latency", rate, over, [stress], limits={"limit": 1.0}),
        ]
        yield "rates", draw(f"SLOs by rate, {name}", panels)


def as_json(some: Sequence[Sized]) -> dict[str, object]:
    return {"penstock_plan": 2, "machines": [_machine(sized) for sized in some]}


def _machine(sized: Sized) -> dict[str, object]:
    size, capacity, asked = sized.candidate.size, sized.candidate.simulation.capacity, sized.asked
    binding, fleet, bill, found = sized.binding, sized.fleet, sized.bill, sized.search
    return {
        "hardware": sized.hardware.name,
        "model": size.name,
        "workload": sized.workload.name,
        "is_fitted": sized.candidate.is_fitted,
        "step_times": sized.candidate.step_source,
        "step_error": sized.candidate.step_error,
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
        "goal": asked.goal,
        "highest_rate": found and found.rate,
        "highest_rates": found and [*sized.rates],
        "saturated_rate": found and found.saturated_rate,
        "trials": [_trial(trial) for trial in sorted(found.trials)] if found else [],
        "binds": [str(resource) for resource in binding.resources] if binding else [],
        "binds_clearly": binding and binding.is_clear,
        "times_as_high_with_twice": binding and {str(key): [*gain] for key, gain in binding.gains.items()},
        "router": asked.router,
        "num_replicas": fleet and fleet.num_replicas,
        "replicas": sized.replicas and [*sized.replicas],
        "rate": fleet and fleet.rate,
        "headroom": fleet and asked.headroom,
        "load": fleet and fleet.load,
        "price_per_hour": bill and bill.price_per_hour,
        "price_per_million_output_tokens": bill and bill.price_per_million_output_tokens,
        "beside": {name: _rival(rival, _common_rate(sized)) for name, rival in sized.rivals.items()},
        "warnings": list(sized.warnings),
    }


def _rival(rival: Sized, common_rate: float) -> dict[str, object]:
    fleet, bill = rival.fleet, rival.bill
    return {
        "highest_rate": _rate(rival),
        "common_rate": common_rate,
        "p99_ttft_s": p99_ttft_ns(rival, common_rate) / NS_PER_S if _rate(rival) else None,
        "num_replicas": fleet and fleet.num_replicas,
        "price_per_hour": bill and bill.price_per_hour,
    }


def _trial(trial: Trial) -> dict[str, object]:
    return {
        "rate": trial.rate,
        "attainment": trial.num_good / trial.num_requests,
        "num_requests": trial.num_requests,
        "stress": trial.stress if math.isfinite(trial.stress) else None,
        "kv_share": trial.kv_share,
        "mean_running": trial.mean_running,
    }


def _price(dollars: float) -> str:
    return f"{dollars:.2f}" if dollars >= 1 else f"{dollars:.3g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as aligned text. The first column is flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
