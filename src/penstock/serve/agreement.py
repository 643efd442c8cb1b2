"""A cascade by agreement: the small model answers several times at once, and one of them is kept if enough say the same.

All are held back until they have ended, so a stream begins with its whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.calls.call import Call, Conversation
from penstock.calls.in_flight import RunningCall
from penstock.config.routes import AgreementConfig
from penstock.routes.agreement import majority, normalised
from penstock.serve.cascade import Unsure
from penstock.serve.streams import error_of

_ALL = 1 << 62
"""More tokens than an answer has."""


@dataclass(frozen=True, slots=True)
class Agreement:
    config: AgreementConfig

    def prepared(self, call: Call) -> Call:
        """Return the call with as many answers as are compared. Raises `Unsure`."""
        request, sampling = call.request, call.sampling
        num_prompts = 1 if isinstance(call.prompts, Conversation) else len(call.prompts)
        if request.n * num_prompts > 1 or sampling.beams is not None or sampling.prompt_logprobs is not None:
            raise Unsure("not one answer alone")
        # The client's other limits do not count either: with a `top_k` of 1, all answers would be the same.
        sampling = replace(sampling, temperature=self.config.temperature, top_k=0, top_p=1.0, top_n_sigma=0.0, min_p=0.0)
        return replace(call, request=replace(request, n=self.config.samples), sampling=sampling)

    async def judge(self, call: RunningCall) -> str:
        """Return why the answer is kept, and drop the others. Raises `Unsure`, and `ApiError` if the call fails meanwhile."""
        chunks = await call.begin(_ALL)
        for chunk in chunks:
            if (error := error_of(call.terms, chunk)) is not None:
                raise error
        if call.stream.is_cancelled:
            return "cancelled"
        chunks.sort(key=lambda chunk: call.index_of[chunk.request_id])
        index, share = majority([normalised(chunk.text, self.config.part) for chunk in chunks])
        why = f"agreement={share:.2f}; least={self.config.least:.2f}"
        if share < self.config.least:
            raise Unsure(why)
        call.keep(index)
        return why
