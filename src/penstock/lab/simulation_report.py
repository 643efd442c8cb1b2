"""Reports on a simulation itself: load of the servers, speed of the simulation, and steps outside the fitted range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.lab import plots
from penstock.lab.plots import Axis, Panel, Series
from penstock.lab.report import Cell, Section, Table
from penstock.lab.route_simulation import RouteOutcome
from penstock.lab.simulation import Outcome
from penstock.lab.workload import NS_PER_S, Workload
from penstock.types.errors import counted

MOST_SERVERS = 16
"""Most servers of a kind that are reported individually."""
MOST_PLOTTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    name: str
    workload: Workload
    outcome: Outcome
    wall_s: float


def section_of(simulated: Sequence[SimulatedRun]) -> Section:
    rows = [_row(one, server, words) for one in simulated for server, words in _shown(one.outcome)]
    head = ("server", "running", "waiting", "KV held", "KV max", "preemptions")
    return Section("Simulation", [*_notes(simulated)], [Table(head, rows)])


def _shown(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield (server, label) of all servers, or of three among many of a kind: by the mean number of requests."""
    by_kind: dict[str, list[str]] = {}
    for server in outcome.timelines:
        by_kind.setdefault(server.partition(" ")[0], []).append(server)
    for servers in by_kind.values():
        if len(servers) <= MOST_SERVERS:
            yield from zip(servers, servers, strict=True)
            continue
        by_load = sorted(servers, key=lambda server: sum(outcome.timelines[server].means(outcome.duration_ns)[:2]))
        for number, words in (0, "least busy"), (len(servers) // 2, "in the middle"), (-1, "busiest"):
            yield by_load[number], f"{by_load[number]}: {words} of {len(servers)}"


def _row(one: SimulatedRun, server: str, words: str) -> tuple[Cell, ...]:
    timeline = one.outcome.timelines[server]
    running, waiting, held = timeline.means(one.outcome.duration_ns)
    preemptions = sum(stats.num_preemptions for stats in one.outcome.ended)
    return (
        Cell(", ".join(filter(None, [one.name, words if len(one.outcome.timelines) > 1 or not one.name else ""]))),
        Cell(f"{running:.2f}"),
        Cell(f"{waiting:.2f}"),
        Cell(f"{held:.1%}"),
        Cell(f"{timeline.max_held / timeline.num_blocks:.1%}"),
        Cell(str(preemptions) if len(one.outcome.timelines) == 1 else ""),
    )


def _notes(simulated: Sequence[SimulatedRun]) -> Iterator[str]:
    simulated_s = sum(one.outcome.duration_ns for one in simulated) / NS_PER_S
    wall_s = sum(one.wall_s for one in simulated)
    num_steps = sum(one.outcome.num_steps for one in simulated)
    yield (
        f"{simulated_s:,.1f} s were simulated in {wall_s:.2f} s of one core, {simulated_s / max(wall_s, 1e-9):,.0f} times real "
        f"time: {num_steps:,} steps, {1e6 * wall_s / max(1, num_steps):.0f} us for each."
    )
    capacities = dict.fromkeys(one.outcome.settings.capacity for one in simulated)
    for capacity in capacities:
        yield (
            f"A server has {counted(capacity.max_rows, 'row')}, {counted(capacity.num_blocks - 1, 'KV block', spec=',')} of "
            f"{counted(capacity.block_size, 'token')}, steps of up to {counted(capacity.max_step_tokens, 'token')}, "
            f"and requests of up to {capacity.max_model_len:,}."
        )
    if any(one.outcome.settings.acceptance is None and one.outcome.settings.may_guess for one in simulated):
        yield "No tokens were guessed, which a server would do: --acceptance says how many guesses hold."
    idle = [one.name for one in simulated if one.outcome.settings.acceptance is not None and not one.outcome.settings.may_guess]
    for name in idle if len(idle) < len(simulated) else [""]:
        yield f"{f'{name}: ' if name else ''}--acceptance has no effect: this server does not guess tokens."
    for one in simulated:
        name = f"{one.name}: " if one.name else ""
        if num_guesses := one.outcome.num_guesses:
            right = one.outcome.num_accepted / num_guesses
            yield f"{name}{counted(num_guesses, 'guess', 'guesses', spec=',')}, {right:.1%} of them right."
        if (scaled := one.outcome.scaled) is not None:
            hours, mean = scaled.replica_ns / NS_PER_S / 3600, one.outcome.mean_replicas
            yield (
                f"{name}{hours:,.2f} replica-hours. Replicas: {mean:.2f} in the mean, "
                f"{max(num for _, num, _ in scaled.wanted)} at most, {counted(len(scaled.wanted) - 1, 'change')}."
            )
    yield "Running and waiting requests, and the share of KV blocks that requests hold: means over time."
    if len(simulated) == 2 and simulated[0].workload == simulated[1].workload:
        before, after = (one.outcome.records for one in simulated)
        num_moved = sum(
            (one.first_ns, one.ended_ns) != (other.first_ns, other.ended_ns) for one, other in zip(before, after, strict=True)
        )
        yield f"{num_moved} of {len(before)} requests get their first or last token at another time in the second simulation."


def warnings_of(outcome: Outcome | RouteOutcome) -> Iterator[str]:
    """Yield the reasons to doubt the figures of a simulation, for its `Run`."""
    if outcome.num_outside:
        limits = ", ".join(f"{limit} in {count:,}" for limit, count in sorted(outcome.outside.items()))
        yield (
            f"OUTSIDE THE FITTED RANGE: {outcome.num_outside / outcome.num_steps:.1%} of the steps ({limits}). Their times are "
            "extrapolated. Fit the cost model to such steps, or do not trust these figures."
        )


def plots_of(simulated: Sequence[SimulatedRun]) -> Iterator[plots.Plot]:
    """Yield a plot of requests and KV blocks over time, for some servers. Raises ConfigError without matplotlib."""
    servers = [
        (nth, ", ".join(filter(None, [one.name, server])), timeline)
        for one in simulated
        for nth, (server, timeline) in enumerate(one.outcome.timelines.items())
    ]
    servers.sort(key=lambda server: server[0])  # of each run the first, then of each the second
    shown = f": {MOST_PLOTTED} of {len(servers)} servers" if len(servers) > MOST_PLOTTED else ""
    at = Axis("time (s)")
    columns = {"running requests": "num_running", "waiting requests": "num_waiting", "KV blocks held": "num_held"}
    panels = [
        Panel(
            title,
            at,
            Axis(title),
            [
                Series(
                    name, [(ns / NS_PER_S, value) for ns, value in zip(line.at_ns, getattr(line, column), strict=True)], "line"
                )
                for _, name, line in servers[:MOST_PLOTTED]
            ],
        )
        for title, column in columns.items()
    ]
    yield plots.draw(f"Requests and KV blocks over time{shown}", panels)
