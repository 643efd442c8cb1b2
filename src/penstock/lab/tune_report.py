"""The outcome of a tuning in words and tables. Called by `cli.tune`; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.lab.intervals import LEVEL, Estimate
from penstock.lab.plan_report import table
from penstock.lab.tune import Comparison, Tuned, words
from penstock.types.errors import counted

NUM_SHOWN = 8


def report(tuned: Tuned) -> str:
    """The search, the best of it, and their comparison with the default."""
    objective, last = tuned.objective, tuned.rounds[-1]
    refused = f"; {tuned.num_refused} contradicted themselves" if tuned.num_refused else ""
    ranking = [[words(settings), _figure(mean)] for settings, mean in last.ranking[:NUM_SHOWN]]
    parts = [
        f"Workload {tuned.workload}; objective {objective} in {objective.unit}",
        f"Searched: {counted(len(tuned.rounds), 'round')} of halving, {counted(tuned.num_runs, 'slice')} simulated{refused}. "
        f"The best on {counted(last.num_slices, 'slice')}:\n",
        table([["settings", str(objective)], *ranking]),
        f"\nSimulated, on slices that the search has not seen, against the default ({LEVEL:.0%} intervals):\n",
        _comparisons(tuned.simulated),
    ]
    if tuned.verified is not None:
        parts += ["\nOn the real engine, on other slices again:\n", _comparisons(tuned.verified)]
    best = tuned.best
    if best is None:
        parts.append("\nNothing is surely better than the default: keep the default.")
    else:
        parts.append(f"\n{words(best.settings)}: {gain_words(best.gain)} over the default.")
    return "\n".join(parts)


def notes(tuned: Tuned) -> Sequence[str]:
    """The lines that stand above the settings in their file."""
    assert tuned.best is not None
    told = [f"workload: {tuned.workload}", f"objective: {tuned.objective} in {tuned.objective.unit}"]
    for where, judged in (("simulated", tuned.simulated), ("on the real engine", tuned.verified or ())):
        told += [f"gain, {where}: {gain_words(one.gain)}" for one in judged if one.settings == tuned.best.settings]
    return told


def gain_words(gain: Estimate) -> str:
    """`+12.3% [+8.1%, +16.5%]`"""
    if math.isnan(gain.value):
        return "unknown"
    return f"{gain.value:+.1%}" + ("" if gain.low is None or gain.high is None else f" [{gain.low:+.1%}, {gain.high:+.1%}]")


def _comparisons(some: Sequence[Comparison]) -> str:
    if not some:
        return "  none: no candidate was better"
    rows = [[words(one.settings), _figure(one.default), _figure(one.tuned), gain_words(one.gain)] for one in some]
    return table([["settings", "default", "tuned", "gain"], *rows])


def _figure(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.4g}"
