"""The rounds of a comparison of embedders: each contender's figures, kept in a file where there is one, and their table.

Called by `encoder_peers.py`, which starts the contenders and says when a round begins.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from encoder_contenders import IN_PROCESS, LOADS, OURS, Session, Vectors
from encoder_texts import TextSet
from printed import spread, table
from processes import ContenderError
from sessions import LoadError
from usage import OtherLoad

NUM_SINGLE = 200
MOST_OTHERS = 0.05
"""Figures measured while other processes had more of the processors do not count, unless more is allowed."""
ATTEMPTS = 2
ONE_TEXT = "one short text, ms"
Row = Mapping[str, str | float]
"""A figure: of which contender, in which round, what it is of, and its value."""


class Comparison:
    """The contenders that run, and the figures of all rounds."""

    def __init__(
        self, sets: Sequence[TextSet], yardsticks: Mapping[str, Vectors], save: Path | None, most_others: float = MOST_OTHERS
    ) -> None:
        self._most_others = most_others
        self._sets, self._yardsticks, self._save = sets, yardsticks, save
        self.sessions: dict[str, Session] = {}
        self.rows: list[Row] = [json.loads(line) for line in save.read_text().splitlines()] if save and save.exists() else []

    def add(self, name: str, session: Session) -> None:
        """Embeds every set once. Raises ContenderError, LoadError or OSError."""
        for of in self._sets:
            found = session.vectors(of.texts)
            cosines = (found * self._yardsticks[of.name]).sum(1) / np.linalg.norm(found, axis=1)
            self._note(name, "", f"least cosine, {of.name}", float(cosines.min()))
        self._note(name, "", "ready s", session.ready_s)
        self._note(name, "", "resident MB", session.resident_mb())
        self.sessions[name] = session

    def measure(self, name: str, turn: str, of: TextSet) -> None:
        """Run one contender's part of a round. If it fails, print the reason and leave it out afterwards."""
        session = self.sessions[name]
        try:
            for load in session.loads:
                self._measure(name, turn, f"{of.name}, {load}", partial(_texts_per_s, session, of.texts, load))
            if of.name == "short":
                self._measure(name, turn, ONE_TEXT, partial(_one_text_ms, session, of.texts[:NUM_SINGLE]))
        except (ContenderError, LoadError, OSError, ValueError) as error:
            del self.sessions[name]
            print(f"{name} failed in round {turn}: {error}", flush=True)

    def _measure(self, peer: str, turn: str, figure: str, measure: Callable[[], float]) -> None:
        """A figure, measured again if others have disturbed it."""
        for _ in range(ATTEMPTS):
            load = OtherLoad()
            value = measure()
            if (others := load.share()) <= self._most_others:
                self._note(peer, turn, figure, value)
                return
        print(f"{peer}: no {figure}, since others had {others:.0%} of the processors", file=sys.stderr, flush=True)

    def _note(self, peer: str, turn: str, figure: str, value: float) -> None:
        row = {"peer": peer, "round": turn, "figure": figure, "value": value}
        self.rows.append(row)
        print(f"{peer}: {figure} {value:.5g}", file=sys.stderr, flush=True)
        if self._save:
            with self._save.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _texts_per_s(session: Session, texts: Sequence[str], load: str) -> float:
    return len(texts) / session.seconds(texts, load)


def _one_text_ms(session: Session, texts: Sequence[str]) -> float:
    return 1e3 * session.one_text_s(texts)


def printed(rows: Sequence[Row], sets: Sequence[str]) -> str:
    """A table with a line for each contender and load."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((str(row["peer"]), str(row["figure"])), {})[str(row["round"])] = float(row["value"])
    lines = []
    for peer in dict.fromkeys(str(row["peer"]) for row in rows):
        for load in (IN_PROCESS, *LOADS):
            rates = [found.get((peer, f"{of}, {load}"), {}) for of in sets]
            if not any(rates):
                continue
            ours = [found.get((OURS, f"{of}, {load if load in LOADS else next(iter(LOADS))}"), {}) for of in sets]
            cells = [_cell(mine, {} if peer == OURS else other) for mine, other in zip(rates, ours, strict=True)]
            cosines = [value for of in sets for value in found.get((peer, f"least cosine, {of}"), {}).values()]
            of_all = [
                f"{statistics.median(values):.{digits}f}" if (values := found.get((peer, name), {}).values()) else ""
                for name, digits in ((ONE_TEXT, 2), ("ready s", 2), ("resident MB", 0))
            ]
            lines.append([peer, load, *cells, f"{min(cosines):.5f}" if cosines else "", *of_all])
    return table(["texts/s", "", *sets, "least cosine", ONE_TEXT, "ready s", "resident MB"], lines)


def _cell(rates: Mapping[str, float], ours: Mapping[str, float]) -> str:
    """Median and range; Penstock's rate over this one in the rounds that both have."""
    if not rates:
        return ""
    cell = spread(rates.values(), 0)
    both = [ours[turn] / rates[turn] for turn in ours.keys() & rates.keys()]
    return f"{cell} **{statistics.median(both):.2f}**" if both else cell
