"""A guesser that knows the answers of the hash executor, and spoils some of its guesses."""

from __future__ import annotations

from penstock.sched.policies.base import Guess, Guesser
from penstock.testing.hash_executor import HashModel, expected_tokens, mix
from penstock.types.errors import GrammarFailure
from penstock.types.plan import Capacity
from penstock.types.request import Request
from support.hash_matcher import HashMatcher


class HalfRight(Guesser):
    """Guesses of one request are the same whenever it is asked with the same answer so far."""

    def __init__(self, model: HashModel, capacity: Capacity, *, seed: int = 0) -> None:
        self._model, self._capacity, self._seed = model, capacity, seed
        self._answers: dict[str, tuple[int, ...]] = {}

    def guess(self, request: Request, most: int) -> Guess | None:
        answer = self._answers.get(request.request_id)
        if answer is None:
            answer = self._answers[request.request_id] = self._answer(request)
        begin = len(request.output_token_ids)
        state = mix(self._seed, begin)
        # Behind the end of an answer, anything: an end that is met among guesses ends it there.
        token_ids = [*answer[begin : begin + state % 8], state % self._model.vocab_size]
        for idx in range(len(token_ids)):
            state = mix(state, idx)
            if state % 5 == 0:
                token_ids[idx] = (state >> 8) % self._model.vocab_size
        return Guess(token_ids[:most], num_matched=16)

    def _answer(self, request: Request) -> tuple[int, ...]:
        try:
            return expected_tokens(
                request.prompt_token_ids,
                request.sampling,
                model=self._model,
                max_model_len=self._capacity.max_model_len,
                adapter=request.adapter,
                matcher=request.matcher.anew() if isinstance(request.matcher, HashMatcher) else None,
            ).token_ids
        except GrammarFailure:  # as it was told
            return ()

    def ended(self, request: Request) -> None:
        self._answers.pop(request.request_id, None)
