"""Presets: named bundles of policies, and the way from names to values. Called by the composition root; knows every seam's
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from penstock.sched.policies.base import Budget, Gate, Order, Policies, Predictor, Reserve, Victim
from penstock.sched.policies.budgets import BUDGETS
from penstock.sched.policies.gates import GATES
from penstock.sched.policies.orders import ORDERS
from penstock.sched.policies.predictors import PREDICTORS
from penstock.sched.policies.reserves import RESERVES
from penstock.sched.policies.victims import VICTIMS
from penstock.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One name per seam."""

    gate: str
    order: str
    budget: str
    reserve: str
    victim: str
    predictor: str = "online"


PRESETS: Mapping[str, Preset] = {
    "penstock": Preset(gate="continuous", order="fcfs", budget="decode-first", reserve="watermark", victim="latest"),
}

TABLES: Mapping[str, Mapping[str, str]] = {
    "gate": GATES,
    "order": ORDERS,
    "budget": BUDGETS,
    "reserve": RESERVES,
    "victim": VICTIMS,
    "predictor": PREDICTORS,
}


def make_policies(
    preset: str = "penstock",
    *,
    gate: str | Gate | None = None,
    order: str | Order | None = None,
    budget: str | Budget | None = None,
    reserve: str | Reserve | None = None,
    victim: str | Victim | None = None,
    predictor: str | Predictor | None = None,
) -> Policies:
    """A preset's policies; each may be replaced by another name of its seam's table, or by a value.

    Raises ConfigError, listing the valid names, for a name that is in no table.
    """
    if preset not in PRESETS:
        raise _unknown("preset", preset, PRESETS)
    overrides = {"gate": gate, "order": order, "budget": budget, "reserve": reserve, "victim": victim, "predictor": predictor}
    chosen: dict[str, Any] = {}
    for seam in fields(Preset):
        choice = overrides[seam.name]
        chosen[seam.name] = _resolve(seam.name, getattr(PRESETS[preset], seam.name) if choice is None else choice)
    return Policies(**chosen)


def _resolve(seam: str, choice: object) -> object:
    if not isinstance(choice, str):
        return choice
    if choice not in TABLES[seam]:
        raise _unknown(seam, choice, TABLES[seam])
    module, _, attribute = TABLES[seam][choice].partition(":")
    return getattr(import_module(module), attribute)()


def _unknown(kind: str, name: str, table: Mapping[str, object]) -> ConfigError:
    return ConfigError(f"There is no {kind} called {name!r}.", remedy=f"Valid: {', '.join(sorted(table))}.")
