"""A cascade: the small model begins to answer, and its first tokens decide whether it goes on or the large model answers.

The tokens are held back until then, so that no client sees an answer that is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.calls.call import Call
from penstock.calls.in_flight import RunningCall
from penstock.serve.streams import error_of

_LEFT = "its route asked another model"


class Unsure(Exception):
    """The route asks the large model. The message says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    num_tokens: int
    gain: Callable[[Sequence[float]], float]
    """Returns the expected gain of asking the large model, from the log-probabilities of the first tokens."""
    threshold: float
    """Least gain for which the large model is asked."""
    note: Callable[[float], None]
    """Remembers the gain that has decided."""

    def prepared(self, call: Call) -> Call:
        """Return the call with log-probabilities, which its client is not shown. Raises `Unsure`."""
        sampling = call.sampling
        if sampling.beams is not None:
            raise Unsure("beam search")
        return call if sampling.logprobs is not None else replace(call, sampling=replace(sampling, logprobs=0))

    async def judge(self, call: RunningCall) -> str:
        """Return why the answer goes on. Raises `Unsure`, and `ApiError` if the call fails meanwhile."""
        chunks = await call.begin(self.num_tokens)
        for chunk in chunks:
            if (error := error_of(call.terms, chunk)) is not None:
                raise error
        # Of several choices, the least sure one counts.
        starts = [[token.logprob for token in chunk.logprobs[: self.num_tokens]] for chunk in chunks]
        gain = max(map(self.gain, starts), default=0.0)
        self.note(gain)
        why = f"gain={gain:.3f}; threshold={self.threshold:.3f}"
        if gain >= self.threshold:
            call.stream.cancel(_LEFT)
            raise Unsure(why)
        return why
