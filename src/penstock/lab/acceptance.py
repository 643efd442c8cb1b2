"""Decides which guessed tokens of simulated answers are right: as in a recording, or with a fixed probability.

Each token of an answer has a mark: guessed right, guessed wrong, or not guessed. A simulated answer takes the marks of a random
recorded answer, repeated as needed. So marks depend on the seed and the request alone, not on the steps, and right guesses come
in runs as they did in the recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random

from penstock.lab.recording import Recording, StepDone, open_recording
from penstock.lab.simulated_executor import TOKEN_ID, WRONG_TOKEN_ID
from penstock.sched.policies.base import Guess, Guesser
from penstock.sched.policies.guessers import LONGEST_MATCH
from penstock.types.errors import ConfigError
from penstock.types.request import Request

RIGHT, WRONG, NONE = b"rw-"
LEAST_MATCH = 2
"""Matched tokens before the first of a run of right guesses; `Suffix` guesses nothing after fewer."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    answers: Sequence[bytes] = ()
    chance: float = 0.0
    """Probability that a guess is right, if there are no `answers`."""
    seed: int = 0

    def marks(self, request_id: str, num_tokens: int) -> bytes:
        rng = Random(f"{self.seed} {request_id}")  # noqa: S311  # repeatable on purpose
        if self.answers:
            return bytes(islice(cycle(rng.choice(self.answers)), num_tokens))
        return bytes([RIGHT if rng.random() < self.chance else WRONG for _ in range(num_tokens)])


def acceptance_of(words: str, *, seed: int = 0) -> Acceptance:
    """Parse `--acceptance`: a probability, or the path of a recording. Raises PenstockError."""
    try:
        chance = float(words)
    except ValueError:
        return Acceptance(_recorded_answers(words), seed=seed)
    if not 0 <= chance <= 1:
        raise ConfigError(f"--acceptance is {words}.", remedy="Set it from 0 to 1, or name a recording.")
    return Acceptance(chance=chance, seed=seed)


def _recorded_answers(path: str) -> list[bytes]:
    answers = marked_answers(open_recording(Path(path)))
    if not any(RIGHT in answer or WRONG in answer for answer in answers):
        raise ConfigError(f"{path} has no guesses.", remedy="Record a server with --speculation suffix.")
    return answers


def marked_answers(recording: Recording) -> list[bytes]:
    """Return the marks of each answer that ended. The token after guesses that were all right counts as guessed right."""
    marked = {
        one.arrival.id: (one.arrival.num_prompt_tokens, bytearray([NONE]) * one.departure.num_output_tokens)
        for one in recording.requests()
        if one.departure is not None and one.departure.num_output_tokens
    }
    for event in recording.events():
        if not isinstance(event, StepDone):
            continue
        for row in event.rows:
            if row.samples > 1 and row.id in marked:
                num_prompt_tokens, marks = marked[row.id]
                begin = row.context_len + 1 - num_prompt_tokens
                row_marks = bytes([RIGHT]) * row.num_accepted + bytes([RIGHT if row.num_accepted == row.samples - 1 else WRONG])
                marks[begin : begin + len(row_marks)] = row_marks[: max(0, len(marks) - begin)]
    return [bytes(marks) for _, marks in marked.values()]


@dataclass(slots=True)
class MarkedGuesser(Guesser):
    """A guesser that guesses as an answer's marks say: a run of right tokens, then wrong ones."""

    acceptance: Acceptance
    _marks: dict[str, bytes] = field(default_factory=dict)

    def guess(self, request: Request, most: int) -> Guess | None:
        marks = self._marks.get(request.request_id)
        if marks is None:
            marks = self._marks[request.request_id] = self.acceptance.marks(request.request_id, request.sampling.max_tokens)
        begin = len(request.output_token_ids)
        if marks[begin] == NONE:
            return None
        ahead, before = marks[begin : begin + most], marks[max(0, begin - LONGEST_MATCH + LEAST_MATCH) : begin]
        num_right = len(ahead) - len(ahead.lstrip(bytes([RIGHT])))
        num_before = len(before) - len(before.rstrip(bytes([RIGHT])))
        return Guess((TOKEN_ID,) * num_right + (WRONG_TOKEN_ID,) * (most - num_right), LEAST_MATCH + num_before)

    def ended(self, request: Request) -> None:
        self._marks.pop(request.request_id, None)
