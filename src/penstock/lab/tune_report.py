"""Reports the result of a tuning as text and tables. Called by `cli.tune`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.config.units import figure
from penstock.lab.intervals import LEVEL
from penstock.lab.plan_report import table
from penstock.lab.tune import Comparison, Objective, Tuned, words
from penstock.types.errors import counted


def search_lines(tuned: Tuned) -> str:
    objective, last = tuned.objective, tuned.rounds[-1]
    refused = f"; {tuned.num_refused} were contradictory" if tuned.num_refused else ""
    ranking = [[words(settings), _figure(mean)] for settings, mean in last.ranking[:8]]
    parts = [
        f"Workload {tuned.workload}; objective {objective} in {objective.unit}",
        f"Searched: {counted(len(tuned.rounds), 'round')} of halving, {counted(tuned.num_runs, 'slice')} simulated{refused}. "
        f"The best on {counted(last.num_slices, 'slice')}:\n",
        table([["settings", str(objective)], *ranking]),
        f"\nSimulated, on slices that the search has not seen, against the default ({LEVEL:.0%} intervals):\n",
        _comparisons(tuned.simulated, objective),
    ]
    return "\n".join(parts)


def verdict_lines(tuned: Tuned) -> str:
    parts = []
    if tuned.verified is not None:
        parts += ["\nOn the real engine, on other slices again:\n", _comparisons(tuned.verified, tuned.objective)]
    best = tuned.best
    if best is None:
        parts.append("\nNothing is surely better than the default: keep the default.")
    else:
        parts.append(f"\n{words(best.settings)}: {gain_words(best, tuned.objective)} over the default.")
    return "\n".join(parts)


def notes(tuned: Tuned) -> Sequence[str]:
    assert tuned.best is not None
    told = [f"workload: {tuned.workload}", f"objective: {tuned.objective} in {tuned.objective.unit}"]
    for where, judged in (("simulated", tuned.simulated), ("on the real engine", tuned.verified or ())):
        told += [f"gain, {where}: {gain_words(one, tuned.objective)}" for one in judged if one.settings == tuned.best.settings]
    return told


def gain_words(one: Comparison, objective: Objective) -> str:
    """Format a gain as `+12.3% [+8.1%, +16.5%]`, or as `+1.2 [+0.9, +1.5] requests/s` if the default's score is 0."""
    if math.isnan(one.difference.value):
        return "unknown"
    gain, form, unit = (one.gain, "+.1%", "") if one.default > 0 else (one.difference, "+.4g", f" {objective.unit}")
    interval = "" if gain.low is None or gain.high is None else f" [{gain.low:{form}}, {gain.high:{form}}]"
    return f"{gain.value:{form}}{interval}{unit}"


def _comparisons(some: Sequence[Comparison], objective: Objective) -> str:
    if not some:
        return "  none: no candidate was better"
    rows = [
        [
            words(one.settings),
            _figure(one.default),
            _figure(one.tuned),
            "refused" if one.refusal else gain_words(one, objective),
        ]
        for one in some
    ]
    lines = [table([["settings", "default", "tuned", "gain"], *rows])]
    lines += [f"{words(one.settings)} was refused: {one.refusal}" for one in some if one.refusal]
    if num_dropped := some[0].num_dropped:
        lines.append(f"{counted(num_dropped, 'slice')} left out: the default gave a request no answer.")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return "never" if math.isinf(value) else "" if math.isnan(value) else figure(value, digits=4)
