"""A machine shared by several simulated models, on which their steps take turns.

The server's own code, `native/turns.cpp`, chooses the turns; time is passed in. docs/decisions/turns.md has its rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from penstock.clock import Clock
from penstock.lab.agenda import Agenda
from penstock.sched.policies.base import CONTESTED_STEP_NS, CONTESTED_WINDOW_NS

Begin = Callable[[int], None]
"""Callback for a step that begins, with the instant."""


class Account(Protocol):
    @property
    def used_ns(self) -> int: ...


class Turns(Protocol):
    """Accounts must come from the same implementation."""

    def ask(self, account: Any, now_ns: int) -> int: ...
    def call(self, now_ns: int) -> bool: ...
    def leave(self, now_ns: int) -> None: ...
    def is_contested(self, account: Any, since_ns: int) -> bool: ...
    @property
    def holder(self) -> int: ...
    @property
    def kept_until_ns(self) -> int: ...


class SharedMachine:
    def __init__(self, turns: Turns, agenda: Agenda, clock: Clock) -> None:
        self._turns, self._agenda, self._clock = turns, agenda, clock
        self._claims: dict[int, tuple[int, Begin]] = {}
        """Number from `Turns.ask` -> duration of the waiting step, and its callback."""

    def seat(self, account: Account) -> Seat:
        return Seat(
            run=partial(self._run, account),
            most_step_ns=partial(self._most_step_ns, account),
            used_ns=lambda: account.used_ns,
        )

    def _run(self, account: Account, at_ns: int, duration_ns: int, begin: Begin) -> None:
        def ask() -> None:
            number = self._turns.ask(account, self._clock.now_ns())
            self._claims[number] = duration_ns, begin
            self._call()

        self._agenda.note(max(at_ns, self._clock.now_ns()), ask)

    def _call(self) -> None:
        turns, now_ns = self._turns, self._clock.now_ns()
        if turns.call(now_ns):
            duration_ns, begin = self._claims.pop(turns.holder)
            self._agenda.note(now_ns + duration_ns, self._leave)
            begin(now_ns)
        elif self._claims and not turns.holder:
            self._agenda.note(turns.kept_until_ns, self._call)

    def _leave(self) -> None:
        self._turns.leave(self._clock.now_ns())
        self._call()

    def _most_step_ns(self, account: Account) -> int:
        since_ns = self._clock.now_ns() - CONTESTED_WINDOW_NS
        return CONTESTED_STEP_NS if self._turns.is_contested(account, since_ns) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One model's access to a shared machine."""

    run: Callable[[int, int, Begin], None]
    """Asks for a turn: (earliest instant, duration, callback when the turn begins)."""
    most_step_ns: Callable[[], int]
    """See `Scheduler`."""
    used_ns: Callable[[], int]
    """Returns for how long the model has used the machine."""
    others_serve: Callable[[int], bool] = lambda _: False
    """See `Scheduler`. These simulations have no background requests."""
