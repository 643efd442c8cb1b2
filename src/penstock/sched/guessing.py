"""How many guesses each row of a step checks (speculative decoding).

A few more positions cost a step little while it spends most of its time reading the weights. So each guess has a price: the
tokens that the step would yield in the time of one more position. A guess is made if its chance of being accepted exceeds that
price. The times are learned from earlier steps.

The chance: if the last `m` tokens occurred before, the token that followed them then is right in `m - 1` of `m` cases. A right
guess extends the match to `m + 1` tokens. So the next `j` guesses are all right in `(m - 1) / (m - 1 + j)` of the cases. For a
row whose guesses fail twice as often, the 1 becomes a 2.

Rows without such a match may have guesses of a small model (`sched/drafting.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.drafting import Drafter, Drafting
from penstock.sched.policies.base import Guess, Guesser, StepRecord
from penstock.sched.policies.guessers import NoGuesses
from penstock.sched.step_builder import StepBuilder
from penstock.types.errors import PolicyError
from penstock.types.plan import Capacity, RowPlan
from penstock.types.request import Request
from penstock.types.result import StepResult
from penstock.types.stats import StepCounts

MOST_GUESSES = 15
"""Most guesses per row and step. With the row's own token they fill a 16-row tile."""
PLAIN_PERIOD = 32
"""At least one in this many steps has no guesses. Otherwise their cost could not be measured."""
LINE_STEPS = 32
"""The line is fitted to about this many recent steps."""
MOST_POSITIONS_READ = 64
"""Steps with fewer positions are assumed to spend most of their time reading the weights."""
DOUBT = 0.1
"""The assumed slope counts as much as steps with this variance of positions."""
MOST_LATE = 2
"""A step that took longer counts as having taken this many times its expected duration."""


DRAFT = "draft"
"""Source of a small model's guesses."""


@dataclass(slots=True)
class StepLine:
    """Duration of steps without prompts, by number of positions: a line through recent steps, in nanoseconds.

    The line is steep while matrix products take most of the time, and flat while reading the weights does, so only recent steps
    count. If these all had the same number of positions, the slope is unknown. A small slope is then assumed: it leads to
    guesses, which vary the number of positions and so reveal the slope.
    """

    num_steps: int = 0
    mean_positions: float = 0.0
    mean_ns: float = 0.0
    variance: float = 0.0
    """That of the positions."""
    covariance: float = 0.0

    def learn(self, num_positions: int, duration_ns: float) -> None:
        if self.num_steps >= LINE_STEPS:  # the system may have stopped the process for a while
            duration_ns = min(duration_ns, MOST_LATE * (self.fixed_ns + self.position_ns * num_positions))
        self.num_steps += 1
        share = 1 / min(self.num_steps, LINE_STEPS)
        more, longer = num_positions - self.mean_positions, duration_ns - self.mean_ns
        self.mean_positions += share * more
        self.mean_ns += share * longer
        self.variance = (1 - share) * (self.variance + share * more * more)
        self.covariance = (1 - share) * (self.covariance + share * more * longer)

    @property
    def position_ns(self) -> float:
        supposed = self.mean_ns / max(MOST_POSITIONS_READ, self.mean_positions)
        slope = (self.covariance + DOUBT * supposed) / (self.variance + DOUBT)
        return min(max(slope, 0.01 * supposed), self.mean_ns / self.mean_positions)

    @property
    def fixed_ns(self) -> float:
        return self.mean_ns - self.position_ns * self.mean_positions


@dataclass(slots=True)
class Record:
    """How many of a request's guesses were wrong, and how many were expected to be."""

    num_misses: float = 1.0
    num_expected: float = 1.0

    def learn(self, num_matched: int, num_guesses: int, num_accepted: int) -> None:
        num_judged = min(num_guesses, num_accepted + 1)
        self.num_misses += num_accepted < num_guesses
        self.num_expected += sum([1 / (num_matched + idx) for idx in range(num_judged)])

    def weight(self, num_matched: int) -> float:
        """Return `w`: the next `j` guesses are all right in `w / (w + j)` of the cases."""
        return num_matched - self.num_misses / self.num_expected


class Guessing:
    """Adds guesses to steps, and learns what they cost and how often they are right."""

    def __init__(self, guesser: Guesser, kv: KVManager, capacity: Capacity, drafter: Drafter | None = None) -> None:
        self._guesser = guesser
        self._drafting = None if drafter is None else Drafting(drafter, capacity.max_step_tokens)
        self._kv = kv
        self._capacity = capacity
        self._line = StepLine()
        self._steps_since_plain = 0
        """Steps since the last without guesses."""
        self._records: dict[str, Record] = {}
        self._made: dict[str, tuple[int, int]] = {}
        """Request id -> (matched tokens, or 0 for a draft; guesses) in the step that is planned or in flight."""
        self.drafting_ns = 0
        """Time of the small model for that step."""
        self.failure: PolicyError | None = None
        """The error for which the guesser was turned off, or None."""

    def widen(self, step: StepBuilder, running: Mapping[str, Request]) -> dict[str, tuple[int, ...]]:
        """Add guesses to a step's decodes while the step and the pool have room. Return them by request id."""
        self._made.clear()
        self.drafting_ns = 0
        is_plain = self._steps_since_plain >= PLAIN_PERIOD - 1
        is_possible = step.num_decode_rows and self._line.num_steps and self._num_left(step) > 0
        if not is_possible or is_plain or self._price(step.counts) >= 1.0:
            self._steps_since_plain = 0
            return {}
        found: list[tuple[int, Guess, float]] = []
        could_have: list[tuple[int, int]] = []
        has_others = step.counts.num_background_tokens < step.counts.num_tokens
        for idx, row in enumerate(step.rows[: step.num_decode_rows]):
            request = running[row.request_id]
            if has_others and request.background:  # their guesses would take others' time
                continue
            most = min(MOST_GUESSES, request.max_total_tokens - request.num_tokens - 1)
            if most <= 0 or (row.query_len, row.samples) != (1, 1) or request.sampling.beams is not None:
                continue
            could_have.append((idx, most))
            guess = self._ask(request, most)
            if guess is not None:
                record = self._records.get(row.request_id) or Record()
                weight = record.weight(guess.num_matched)
                if weight > 0:
                    found.append((idx, guess, weight))
        nums = self._nums(step.counts, found)
        if self._drafting is not None:
            found, nums = self._draft(self._drafting, step, running, could_have, found, nums)
        guesses = self._plan(step, running, found, nums, self._num_left(step))
        self._steps_since_plain = self._steps_since_plain + 1 if guesses else 0
        return guesses

    def _num_left(self, step: StepBuilder) -> int:
        """Return how many guesses the step has room for, within its token budget and its time limit."""
        limits, counts = step.limits, step.counts
        num_left = min(self._capacity.max_step_tokens, limits.max_tokens) - counts.num_tokens
        most_ns = limits.most_ns - self.drafting_ns - self._step_ns(counts, 0)
        return max(0, int(min(num_left, step.num_scored_left, most_ns / self._line.position_ns)))

    def _ask(self, request: Request, most: int) -> Guess | None:
        """Return the guesser's answer. A guesser that fails is not called again: requests continue without guesses."""
        try:
            guess = self._guesser.guess(request, most)
            if guess is not None and guess.token_ids:
                lowest, highest = min(guess.token_ids), max(guess.token_ids)
                if lowest < 0 or highest >= self._capacity.vocab_size:
                    what = f"returned the token {lowest if lowest < 0 else highest} from guess, but must return tokens"
                    raise PolicyError("guesser", self._guesser, f"{what} from 0 to {self._capacity.vocab_size - 1}")
        except PolicyError as error:
            self._give_up(error)
            return None
        return guess

    def _give_up(self, error: PolicyError) -> None:
        self._guesser, self.failure = NoGuesses(), error

    def _draft(
        self,
        drafting: Drafting,
        step: StepBuilder,
        running: Mapping[str, Request],
        could_have: Sequence[tuple[int, int]],
        found: Sequence[tuple[int, Guess, float]],
        nums: Sequence[int],
    ) -> tuple[list[tuple[int, Guess, float]], list[int]]:
        """Have the small model draft for rows without a better match. Return `found` and `nums` with these drafts.

        `could_have`: (index of a row, guesses that it can have).
        """
        requests = {idx: running[step.rows[idx].request_id] for idx, _ in could_have}
        matches = {
            idx: (guess, weight, num)
            for (idx, guess, weight), num in zip(found, nums, strict=True)
            if num and weight / (weight + 1) >= drafting.chance(requests[idx])
        }
        num_guesses = sum([num for _, _, num in matches.values()])
        num_right = sum([_num_right(weight, num) for _, weight, num in matches.values()])
        rows = [(requests[idx], most) for idx, most in could_have if idx not in matches]
        num_tokens, step_ns = step.counts.num_tokens + num_right, self._step_ns(step.counts, num_guesses)
        drafts = drafting.draft(rows, num_tokens, step_ns, self._line.position_ns, step.limits.most_ns)
        self.drafting_ns = drafting.spent_ns
        chosen = {idx: (guess, weight, num) for (idx, guess, weight), num in zip(found, nums, strict=True)}
        for idx, request in requests.items():
            if request.request_id in drafts:
                token_ids = drafts[request.request_id]
                chosen[idx] = Guess(token_ids, 0), 0.0, len(token_ids)
        return [(idx, guess, weight) for idx, (guess, weight, _) in chosen.items()], [num for _, _, num in chosen.values()]

    def _step_ns(self, counts: StepCounts, num_guesses: int) -> float:
        return self._line.fixed_ns + self._line.position_ns * (counts.num_tokens + num_guesses)

    def _price(self, counts: StepCounts, num_guesses: int = 0, num_right: float = 0.0) -> float:
        """Return the tokens that a step gives in the time of one more position. Prompts' tokens count, too."""
        return self._line.position_ns * (counts.num_tokens + num_right) / self._step_ns(counts, num_guesses)

    def _nums(self, counts: StepCounts, found: Sequence[tuple[int, Guess, float]]) -> list[int]:
        """Return how many guesses to make for each row, so that the step yields the most tokens per time."""
        nums, price = [0] * len(found), self._price(counts)
        for _ in range(2):  # the price rises with what the guesses give (Dinkelbach, 1967)
            nums = [min(len(guess.token_ids), max(0, int(weight * (1 / price - 1)))) for _, guess, weight in found]
            num_right = sum([_num_right(weight, num) for num, (_, _, weight) in zip(nums, found, strict=True)])
            price = self._price(counts, sum(nums), num_right)
        return nums

    def _plan(
        self,
        step: StepBuilder,
        running: Mapping[str, Request],
        found: Sequence[tuple[int, Guess, float]],
        nums: Sequence[int],
        num_left: int,
    ) -> dict[str, tuple[int, ...]]:
        kv, counts, guesses, num_wanted = self._kv, step.counts, dict[str, tuple[int, ...]](), sum(nums)
        # Each running row may need a block for its next token.
        num_spare = kv.pool.num_available - step.num_promised_blocks - len(running)
        num_asked = num_given = 0
        for (idx, guess, _), wanted in zip(found, nums, strict=True):
            row, request = step.rows[idx], running[step.rows[idx].request_id]
            if num_wanted > num_left:
                num_asked += wanted
                wanted = num_asked * num_left // num_wanted - num_given
                num_given += wanted
            num_slots = kv.num_slots[row.request_id] + max(0, num_spare) * kv.block_size
            end = min(row.context_len + 1 + wanted, num_slots)
            blocks, num = kv.extend(row.request_id, row.context_len, end), end - row.context_len - 1
            if blocks is None or num <= 0:
                continue
            num_spare -= len(blocks)
            step.rows[idx] = RowPlan(row.request_id, row.context_len, 1 + num, (*row.new_block_ids, *blocks), 1 + num)
            progress.plan(request, 1 + num)
            guesses[row.request_id] = tuple(guess.token_ids[:num])
            self._made[row.request_id] = guess.num_matched, num
            counts.guess_sources[row.request_id] = self._guesser.source if guess.num_matched else DRAFT
            counts.num_decodes += num
            counts.num_tokens += num
            counts.num_background_tokens += num * request.background
        return guesses

    def learn(self, guessed: Sequence[str], result: StepResult) -> None:
        """Note how many guesses were accepted. `guessed`: ids of the requests that had some."""
        for request_id in guessed:
            token_ids = result.token_ids.get(request_id)
            if token_ids is None:  # the row failed
                continue
            num_matched, num_guesses = self._made[request_id]
            if not num_matched:
                assert self._drafting is not None, "it made the draft"
                self._drafting.learn(request_id, num_guesses, len(token_ids) - 1)
                continue
            record = self._records.get(request_id)
            if record is None:
                record = self._records[request_id] = Record()
            record.learn(num_matched, num_guesses, len(token_ids) - 1)

    def see(self, rows: Sequence[RowPlan], running: Mapping[str, Request], features: bytes | memoryview) -> None:
        """Note the features that a committed step kept of its tokens, for a small model that reads them."""
        if self._drafting is not None:
            self._drafting.see(rows, running, features)

    def time(self, step: StepRecord) -> None:
        """Note how long a step took."""
        if step.num_decodes and not step.num_prefill_tokens and step.duration_ns:
            self._line.learn(step.num_decodes, step.duration_ns)

    def ended(self, request: Request) -> None:
        try:
            self._guesser.ended(request)
        except PolicyError as error:
            self._give_up(error)
        self._records.pop(request.request_id, None)
        if self._drafting is not None:
            self._drafting.ended(request.request_id)


def _num_right(weight: float, num: int) -> float:
    """Return about the sum of the chances of `num` guesses: w / (w + j) from j = 1 to `num`."""
    return weight * log((weight + num + 0.5) / (weight + 0.5))
