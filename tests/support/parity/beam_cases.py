"""Owns the golden beam searches: which prompts with which settings, and what transformers answered. No torch.

`make_beam_golden.py` writes them, `test_beams.py` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.sched.choosing.beam_search import Beam, BeamSearch
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import BeamParams, EarlyStopping
from support.parity.golden import GOLDEN_DIR

TINY = "mha_tied_f32"
"""The case of `tiny.py` whose model is searched."""
NUM_CASES = 20
WIDTHS, LENGTH_PENALTIES, EARLY_STOPPINGS = (2, 3, 4, 5), (1.0, 0.0, 2.0, 0.6, -0.5), (False, True, "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamCase:
    prompt_ids: list[int]
    width: int
    length_penalty: float
    early_stopping: bool | str
    max_tokens: int
    stop_ids: list[int]
    hypotheses: list[list[int]]
    """The best first; a stop token that ended one included."""
    scores: list[float]
    margin: float
    """The least gap of two sums of log-probabilities that decided anything: arithmetic that errs by less finds the same."""

    @property
    def params(self) -> BeamParams:
        return BeamParams(
            width=self.width, length_penalty=self.length_penalty, early_stopping=EarlyStopping.of(self.early_stopping)
        )


class WatchedSearch(BeamSearch):
    """A search that notes how close its decisions were."""

    margin = float("inf")

    def _candidates(self, tops: Sequence[TokenLogprobs]) -> list[Beam]:
        candidates = super()._candidates(tops)
        width = self.params.width
        going_on = [beam.score for beam in candidates if not beam.is_stopped]
        self._note(going_on[width - 1 : width + 1])
        if any(beam.is_stopped for beam in candidates):
            self._note([beam.score for beam in candidates[width - 1 : width + 1]])
        if len(candidates[0].token_ids) == self.max_tokens:
            self._note([beam.score for beam in candidates[width - 1 : width + 1]])
        return candidates

    def note_end(self) -> None:
        for better, worse in zip(self.finished, self.finished[1:], strict=False):
            self._note([better.score, worse.score])

    def _note(self, scores: Sequence[float]) -> None:
        if len(scores) == 2:
            self.margin = min(self.margin, scores[0] - scores[1])


def settings(number: int) -> tuple[int, float, bool | str]:
    """(width, length penalty, early stopping) of a case: each value beside each other's in turn."""
    return (
        WIDTHS[number % len(WIDTHS)],
        LENGTH_PENALTIES[number % len(LENGTH_PENALTIES)],
        EARLY_STOPPINGS[number % len(EARLY_STOPPINGS)],
    )


def save(name: str, cases: Sequence[BeamCase], directory: Path = GOLDEN_DIR) -> None:
    lines = ",\n".join(json.dumps(asdict(case)) for case in cases)
    (directory / f"beams_{name}.json").write_text(f"[\n{lines}\n]\n")


def load(name: str) -> list[BeamCase]:
    return [BeamCase(**fields) for fields in json.loads((GOLDEN_DIR / f"beams_{name}.json").read_text())]
