"""How many tokens a small model drafts for each row of a step (speculative decoding).

A draft costs time twice: in a step of the small model, and as one more position of the large model's step if it is checked. It
is made if it is expected to yield more tokens than the step yields in that time. Both costs are learned from earlier steps.

The chance of a draft is the small model's probability for it, times the request's record: the number of accepted drafts divided
by the expected number. The next draft's probability is assumed to be distributed like those of recent drafts.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

from penstock.sched.policies.base import StepRecord
from penstock.sched.policies.budgets import FIRST_TOKENS, MIN_CHUNK_TOKENS, MIN_PREFILL_NS, StepCost
from penstock.types.plan import RowPlan
from penstock.types.request import Request

FIRST_PROBABILITIES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Probabilities of drafts, assumed before the first one."""
NUM_REMEMBERED = 64
READING_SHARE = 0.25
"""The small model's prefill may take this share of a step's time, so that it delays other requests little."""
TRIAL_SHARE = 0.01
"""Share of the time in which drafts are tried that are not expected to pay off."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of one step of a small model."""

    guesses: Mapping[str, tuple[int, float]]
    """Request id -> (its likeliest next token, that token's probability), once the prefill of the request is complete."""
    duration_ns: int


Seen: TypeAlias = tuple[str, int, int, int]
"""Request id, position of its first token in a step, that token's index in the step, number of tokens without wrong guesses."""


class Drafter(Protocol):
    """A small model that drafts tokens. Its methods never raise: after a failure they return no guesses."""

    def see(self, seen: Sequence[Seen], features: bytes | memoryview) -> None:
        """Take over the features that the large model kept of a step's tokens (`StepResult.features`)."""
        ...

    def num_behind(self, request: Request) -> int:
        """Return how many of a request's tokens have no KV in the small model. 0: it can't guess for this request."""
        ...

    def read(self, chunks: Sequence[tuple[Request, int]]) -> Drafted:
        """Prefill the given number of tokens of each request. Guess for requests whose prefill is then complete."""
        ...

    def go_on(self, requests: Sequence[Request]) -> Drafted:
        """Guess one more token for requests that the last step guessed for."""
        ...

    def ended(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Record:
    """A request's drafts: how many were right, and how many were expected to be."""

    num_right: float = 1.0
    num_expected: float = 1.0

    @property
    def ratio(self) -> float:
        return self.num_right / self.num_expected

    def learn(self, num_right: int, num_expected: float) -> None:
        self.num_right += num_right
        self.num_expected += num_expected


class Drafting:
    """Requests drafts from a small model while they pay off. Learns their cost, and how often they are accepted."""

    def __init__(self, drafter: Drafter, max_step_tokens: int) -> None:
        """`max_step_tokens`: most tokens in a step of the small model, as of the large one."""
        self._drafter, self._max_step_tokens = drafter, max_step_tokens
        self._cost = StepCost()
        """Costs of the small model's steps. A row's last token counts as a decode, the tokens before it as prefill."""
        self._records: dict[str, _Record] = {}
        self._recent = _Record()
        """All requests' recent drafts: a request begins with their ratio."""
        self._made: dict[str, list[float]] = {}
        """Probabilities of the last drafts, by request."""
        self._seen = deque(FIRST_PROBABILITIES, NUM_REMEMBERED)
        self._sorted: list[float] = []
        self._sums: list[float] = []
        """Prefix sums of `_sorted`."""
        self._idle_ns = 0.0
        """Time of the steps since the small model last read something."""
        self._tried_id = ""
        """Request that a trial has read in part, or an empty string."""
        self._num_trial_steps = 0
        """Steps that this trial may still take. Without a limit, a row that fails would be read again and again."""
        self.spent_ns = 0
        """Time of the small model for the last step."""
        self._sort()

    def see(self, rows: Sequence[RowPlan], running: Mapping[str, Request], features: bytes | memoryview) -> None:
        """Hand a committed step's features to the small model, but not those of guesses that were wrong."""
        seen: list[Seen] = []
        at = 0
        for row in rows:
            request = running.get(row.request_id)
            if request is not None and request.sampling.beams is None:
                end = min(row.context_len + row.query_len, request.num_tokens - 1)
                if end > row.context_len:
                    seen.append((row.request_id, row.context_len, at, end - row.context_len))
            at += row.query_len
        self._drafter.see(seen, features)

    def chance(self, request: Request) -> float:
        """Return the chance of the request's next draft."""
        return self._record(request.request_id).ratio * self._sums[-1] / len(self._sorted)

    def draft(
        self, rows: Sequence[tuple[Request, int]], num_tokens: float, step_ns: float, guess_ns: float, most_ns: float
    ) -> dict[str, Sequence[int]]:
        """Return drafts by request id. `rows`: requests, and how many drafts each can have at most.

        Without drafts the step yields `num_tokens` tokens in `step_ns`. Checking a draft adds `guess_ns`. The whole step,
        drafting included, stays within `most_ns`.
        """
        self.spent_ns = 0
        self._made.clear()
        self._sort()
        most = {request.request_id: num for request, num in rows}
        drafts: dict[str, list[int]] = {}
        chances: dict[str, list[float]] = {}
        chunks = self._to_read([request for request, _ in rows], num_tokens / step_ns, step_ns, guess_ns, most_ns)
        self._idle_ns = 0.0 if chunks else self._idle_ns + step_ns
        going = [request for request, _ in chunks]
        while going:
            step = self._drafter.go_on(going) if drafts else self._drafter.read(chunks)
            self._time(step, len(going), 0 if drafts else sum([num - 1 for _, num in chunks]))
            step_ns += step.duration_ns
            for request_id, (token_id, probability) in step.guesses.items():
                self._seen.append(probability)
                self._made.setdefault(request_id, []).append(probability)
                before = chances.setdefault(request_id, [])
                drafts.setdefault(request_id, []).append(token_id)
                before.append((before or [1.0])[-1] * min(1.0, self._record(request_id).ratio * probability))
                if before[-1] > num_tokens / step_ns * guess_ns:
                    num_tokens += before[-1]
                    step_ns += guess_ns
            if step_ns + self._cost.estimate_ns(StepRecord(len(going), 0, 0)) + guess_ns > most_ns:
                break
            hopes = [
                (request, chances[request.request_id][-1])
                for request in going
                if request.request_id in step.guesses and len(drafts[request.request_id]) < most[request.request_id]
            ]
            going = self._worthwhile(hopes, num_tokens / step_ns, guess_ns)
        price = num_tokens / step_ns * guess_ns
        for request_id, found in chances.items():
            del drafts[request_id][sum([chance > price for chance in found]) :]
        return {request_id: draft for request_id, draft in drafts.items() if draft}

    def _to_read(
        self, requests: Sequence[Request], rate: float, step_ns: float, guess_ns: float, most_ns: float
    ) -> Sequence[tuple[Request, int]]:
        """Return which requests to read in this step, and how many tokens of each."""
        cost = self._cost
        behind = {request.request_id: num for request in requests if (num := self._drafter.num_behind(request))}
        hopes = [(request, 1.0) for request in requests if request.request_id in behind]
        going = [
            request
            for request in self._worthwhile(hopes, rate, guess_ns)
            if self._gain(request, 1.0, rate, guess_ns) * _num_left(request)
            > rate * cost.prefill_ns * (behind[request.request_id] - 1)
        ]
        room = max(MIN_CHUNK_TOKENS, int(READING_SHARE * step_ns / cost.prefill_ns) if cost.is_known else FIRST_TOKENS)
        rest_ns = most_ns - step_ns - guess_ns - cost.least_ns(max(1, len(going)))
        room = int(min(room, self._max_step_tokens, rest_ns / max(cost.prefill_ns, MIN_PREFILL_NS)))
        chunks: list[tuple[Request, int]] = []
        for request in sorted(going, key=lambda request: behind[request.request_id]):
            if room > 0:
                chunks.append((request, min(behind[request.request_id], room)))
                room -= chunks[-1][1]
        if chunks or not hopes:
            return chunks
        return self._to_try([request for request, _ in hopes], behind, room)

    def _to_try(self, requests: Sequence[Request], behind: Mapping[str, int], room: int) -> Sequence[tuple[Request, int]]:
        """Return what to read of a request whose drafts are not expected to pay off.

        Its text is read in consecutive steps. They begin once all of them will take less than `TRIAL_SHARE` of `_idle_ns`.
        """
        tried_id = self._tried_id
        request = min(requests, key=lambda one: (one.request_id != tried_id, behind[one.request_id]))
        num_behind = behind[request.request_id]
        num = min(num_behind, room)
        if num < min(num_behind, MIN_CHUNK_TOKENS):  # the request could grow faster than it is read
            return []
        if request.request_id != tried_id:
            num_steps = 1 if num == num_behind else -(-(num_behind - 1) // (num - 1))  # it grows by a token in each
            if num_steps * self._cost.estimate_ns(StepRecord(1, num - 1, 0)) >= TRIAL_SHARE * self._idle_ns:
                return []
            self._num_trial_steps = num_steps
        self._num_trial_steps -= 1
        self._tried_id = request.request_id if num < num_behind and self._num_trial_steps else ""
        return [(request, num)]

    def _worthwhile(self, hopes: Sequence[tuple[Request, float]], rate: float, guess_ns: float) -> list[Request]:
        """Return the requests for which another draft is worth its time. `hopes`: (request, chance of its earlier drafts)."""
        price = rate * self._cost.decode_ns
        gains = [(request, self._gain(request, chance, rate, guess_ns) - price) for request, chance in hopes]
        going = [(request, gain) for request, gain in gains if gain > 0]
        return [request for request, _ in going] if sum([gain for _, gain in going]) > rate * self._cost.fixed_ns else []

    def _gain(self, request: Request, chance_before: float, rate: float, guess_ns: float) -> float:
        """Return the expected tokens from another draft, less the price of checking it. Unlikely drafts are not checked."""
        ratio, price = self._record(request.request_id).ratio * chance_before, rate * guess_ns
        num_below = bisect(self._sorted, price / max(ratio, 1e-9))
        num_above = len(self._sorted) - num_below
        return (ratio * (self._sums[-1] - self._sums[num_below]) - price * num_above) / len(self._sorted)

    def _record(self, request_id: str) -> _Record:
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record(self._recent.ratio)
        return record

    def _sort(self) -> None:
        self._sorted = sorted(self._seen)
        self._sums = [0.0, *accumulate(self._sorted)]

    def _time(self, step: Drafted, num_rows: int, num_read: int) -> None:
        self.spent_ns += step.duration_ns
        self._cost.learn(StepRecord(num_rows, num_read, step.duration_ns))

    def learn(self, request_id: str, num_guesses: int, num_accepted: int) -> None:
        """Note how many of a request's last drafts were accepted."""
        num_expected, recent = sum(self._made[request_id][: min(num_guesses, num_accepted + 1)]), self._recent
        self._record(request_id).learn(num_accepted, num_expected)
        recent.learn(num_accepted, num_expected)
        if recent.num_expected > NUM_REMEMBERED:
            recent.num_right, recent.num_expected = 0.5 * recent.num_right, 0.5 * recent.num_expected

    def ended(self, request_id: str) -> None:
        self._drafter.ended(request_id)
        self._records.pop(request_id, None)


def _num_left(request: Request) -> int:
    """Return how many more tokens a request will probably give."""
    num_in_all = request.predicted_new_tokens or request.sampling.max_tokens
    return max(1, num_in_all - len(request.output_token_ids))
