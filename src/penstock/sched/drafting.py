"""How many tokens a small model drafts for each row of a step (speculative decoding).

A drafted token takes a part of the small model's step and a position of the large one's. Drafting goes on while the tokens that
it is expected to give in that time are more than the step gives without them. Both times are learned from earlier steps.

The chance of a draft is the probability that the small model gave it. It is corrected by the request's record, as that of a
match is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.sched.policies.base import StepRecord
from penstock.sched.policies.budgets import FIRST_TOKENS, MIN_CHUNK_TOKENS, StepCost
from penstock.types.request import Request

USUAL_CHANCE = 0.5
"""Chance of a new request's drafts, before there are any."""
READING_SHARE = 0.25
"""The small model reads prompts in this part of a step's time, so that they delay others little."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of one step of a small model."""

    guesses: Mapping[str, tuple[int, float]]
    """Request id -> its likeliest next token, and the probability of that. Without requests that are still being read."""
    duration_ns: int


class Drafter(Protocol):
    """A small model that guesses how requests go on. It raises nothing: if it fails, it guesses nothing from then on."""

    def num_behind(self, request: Request) -> int:
        """Return how many of a request's tokens the model has still to read; 0: it can't guess for this request."""
        ...

    def read(self, chunks: Sequence[tuple[Request, int]]) -> Drafted:
        """Read so many more tokens of each request. Guess for those that are then read to their end."""
        ...

    def go_on(self, requests: Sequence[Request]) -> Drafted:
        """Guess one more token for requests that the last step guessed for."""
        ...

    def ended(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Record:
    """A request's drafts. A doubt is 1 minus the probability of a draft."""

    sum_doubts: float
    num_drafts: float = 4.0
    num_misses: float = 1.0
    num_expected: float = 1.0

    @property
    def misses(self) -> float:
        """Wrong drafts for each that was expected to be."""
        return self.num_misses / self.num_expected

    @property
    def chance(self) -> float:
        """Chance of the next draft, not knowing its probability."""
        return 1.0 - self.misses * self.sum_doubts / self.num_drafts


class Drafting:
    """Asks a small model for guesses as far as they pay, and learns what they cost and how often they are right."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._cost = StepCost()
        """Costs of the small model's steps. A row counts as a decode, and what it reads before its last token as a prefill."""
        self._records: dict[str, _Record] = {}
        self._doubts: dict[str, list[float]] = {}
        """Those of the last drafts, by request."""
        self._usual_chance = USUAL_CHANCE
        self.spent_ns = 0
        """Time of the small model for the last step."""

    def chance(self, request: Request) -> float:
        """Return the chance of the request's next draft."""
        record = self._records.get(request.request_id)
        return max(USUAL_CHANCE, self._usual_chance) if record is None else record.chance

    def draft(
        self, rows: Sequence[tuple[Request, int]], num_tokens: float, step_ns: float, guess_ns: float
    ) -> dict[str, Sequence[int]]:
        """Return drafts by request id. `rows`: requests, and how many drafts each can have at most.

        Without drafts the step gives `num_tokens` in `step_ns`. A draft adds `guess_ns` to check it.
        """
        self.spent_ns = 0
        self._doubts.clear()
        most = {request.request_id: num for request, num in rows}
        drafts: dict[str, list[int]] = {}
        chances: dict[str, list[float]] = {}
        chunks = self._to_read([request for request, _ in rows], num_tokens / step_ns, step_ns, guess_ns)
        going = [request for request, _ in chunks]
        while going:
            step = self._drafter.go_on(going) if drafts else self._drafter.read(chunks)
            self._time(step, len(going), 0 if drafts else sum([num - 1 for _, num in chunks]))
            for request_id, (token_id, probability) in step.guesses.items():
                chance = self._note(request_id, 1.0 - probability, (chances.get(request_id) or [1.0])[-1])
                drafts.setdefault(request_id, []).append(token_id)
                chances.setdefault(request_id, []).append(chance)
                num_tokens += chance
                step_ns += guess_ns
            step_ns += step.duration_ns
            rate = num_tokens / step_ns
            hopes = [
                (request, chances[request.request_id][-1] * self._records[request.request_id].chance)
                for request in going
                if request.request_id in step.guesses and len(drafts[request.request_id]) < most[request.request_id]
            ]
            going = self._worthwhile(hopes, rate, guess_ns)
        rate = num_tokens / step_ns
        for request_id, found in chances.items():
            del drafts[request_id][sum([chance > rate * guess_ns for chance in found]) :]
        return {request_id: draft for request_id, draft in drafts.items() if draft}

    def _to_read(
        self, requests: Sequence[Request], rate: float, step_ns: float, guess_ns: float
    ) -> Sequence[tuple[Request, int]]:
        """Return which requests to read in this step, and how many tokens of each."""
        behind = {request.request_id: num for request in requests if (num := self._drafter.num_behind(request))}
        hopes = [(request, self.chance(request)) for request in requests if request.request_id in behind]
        going = self._worthwhile(hopes, rate, guess_ns)
        room = int(READING_SHARE * step_ns / self._cost.prefill_ns) if self._cost.is_known else FIRST_TOKENS
        room = max(room, MIN_CHUNK_TOKENS)
        chunks: list[tuple[Request, int]] = []
        for request in sorted(going, key=lambda request: behind[request.request_id]):
            num = behind[request.request_id]
            gain = self.chance(request) - rate * (guess_ns + self._cost.decode_ns)
            if gain * _num_left(request) > rate * self._cost.prefill_ns * (num - 1) and room > 0:
                chunks.append((request, min(num, room)))
                room -= min(num, room)
        return chunks

    def _worthwhile(self, hopes: Sequence[tuple[Request, float]], rate: float, guess_ns: float) -> list[Request]:
        """Return for which requests one more draft gives more than its time is worth. `hopes`: their chances."""
        price = rate * (guess_ns + self._cost.decode_ns)
        going = [(request, hope - price) for request, hope in hopes if hope > price]
        gain = sum([gain for _, gain in going])
        return [request for request, _ in going] if gain > rate * self._cost.fixed_ns else []

    def _note(self, request_id: str, doubt: float, chance_before: float) -> float:
        """Note a draft. Return the chance that it and those before it are right."""
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record(0.0)
            record.sum_doubts = record.num_drafts * (1.0 - max(USUAL_CHANCE, self._usual_chance))
        record.sum_doubts += doubt
        record.num_drafts += 1
        self._doubts.setdefault(request_id, []).append(doubt)
        return chance_before * max(0.0, 1.0 - record.misses * doubt)

    def _time(self, step: Drafted, num_rows: int, num_read: int) -> None:
        self.spent_ns += step.duration_ns
        self._cost.learn(StepRecord(num_rows, num_read, step.duration_ns))

    def learn(self, request_id: str, num_guesses: int, num_accepted: int) -> None:
        """Note how many of a request's last drafts were accepted."""
        record, num_judged = self._records[request_id], min(num_guesses, num_accepted + 1)
        record.num_misses += num_accepted < num_guesses
        record.num_expected += sum(self._doubts[request_id][:num_judged])

    def ended(self, request_id: str) -> None:
        self._drafter.ended(request_id)
        record = self._records.pop(request_id, None)
        if record is not None:
            self._usual_chance += (record.chance - self._usual_chance) / 8


def _num_left(request: Request) -> int:
    """Return how many more tokens a request will probably give."""
    num_in_all = request.predicted_new_tokens or request.sampling.max_tokens
    return max(1, num_in_all - len(request.output_token_ids))
