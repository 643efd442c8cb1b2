"""Beam search: the scores of one search's beams, and the finished hypotheses. Independent of requests and KV blocks.

The rules are those of transformers 5 (`GenerationMixin._beam_search`), so both find the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from penstock.types.result import TokenLogprobs
from penstock.types.sampling import BeamParams, EarlyStopping


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    """Sum of the log-probabilities; for a hypothesis, after the length penalty."""
    entries: tuple[TokenLogprobs, ...] = ()
    parent_idx: int = 0
    is_stopped: bool = False


@dataclass(slots=True)
class BeamSearch:
    params: BeamParams
    stop_token_ids: Collection[int]
    max_tokens: int
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)
    """Hypotheses, best first."""
    is_done: bool = False

    def advance(self, tops: Sequence[TokenLogprobs]) -> None:
        """Extend the beams by a token, given the most likely next tokens of each beam."""
        num_tokens = len(self.beams[0].token_ids) + 1
        candidates = self._candidates(tops)
        is_last = num_tokens >= self.max_tokens
        going_on = [] if is_last else [beam for beam in candidates if not beam.is_stopped]
        self._finish([beam for beam in candidates[: self.params.width] if is_last or beam.is_stopped], num_tokens)
        if not going_on:
            self.is_done = True
            return
        self.beams = going_on[: self.params.width]
        self.is_done = len(self.finished) == self.params.width and self._is_enough(num_tokens)

    def _candidates(self, tops: Sequence[TokenLogprobs]) -> list[Beam]:
        """Return the best continuations of all beams, best first."""
        width, num_stops = self.params.width, len(self.stop_token_ids)
        found = [
            (beam.score + logprob, idx, rank, token_id)
            for idx, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for rank, (token_id, logprob) in enumerate(top.top[: width + num_stops])  # no more of one beam can matter
        ]
        found.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        return [
            self._continue(idx, token_id, score, tops[idx], rank)
            for score, idx, rank, token_id in found[: max(2, 1 + num_stops) * width]
        ]

    def _continue(self, idx: int, token_id: int, score: float, top: TokenLogprobs, rank: int) -> Beam:
        beam, num_logprobs = self.beams[idx], self.params.num_logprobs
        entries = beam.entries
        if num_logprobs is not None:
            entries += (TokenLogprobs(token_id, top.top[rank][1], rank + 1, top.top[:num_logprobs]),)
        return Beam((*beam.token_ids, token_id), score, entries, idx, token_id in self.stop_token_ids)

    def _finish(self, ended: Sequence[Beam], num_tokens: int) -> None:
        penalty = num_tokens**self.params.length_penalty
        ended = [Beam(beam.token_ids, beam.score / penalty, beam.entries, beam.parent_idx, beam.is_stopped) for beam in ended]
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.score)[: self.params.width]

    def _is_enough(self, num_tokens: int) -> bool:
        params = self.params
        if params.early_stopping is EarlyStopping.ALWAYS:
            return True
        is_generous = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        length = self.max_tokens if is_generous else num_tokens
        return bool(self.beams[0].score / length**params.length_penalty <= self.finished[-1].score)
