"""A job: one request of a workload as a value, with the length of its output, which only the simulated model knows."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.lab.simulated_executor import EOS_TOKEN_ID, TOKEN_ID
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    """Known to the executor alone, >= 1."""
    tenant: str = ""
    priority: int = 0
    deadline_ns: int | None = None
    """An instant, not a span."""
    cancelled_ns: int | None = None
    """When the client goes away; None: it stays."""
    prompt_token_ids: tuple[int, ...] = ()
    """Where it matters what is asked: `num_prompt_tokens` of them; else they are all the same token."""

    def request(self, request_id: str, *, max_tokens: int, predicted_new_tokens: int | None = None) -> Request:
        """`max_tokens`: the limit that clients send, which is the same for all and says nothing about the output."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(EOS_TOKEN_ID,))
        return Request(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids or (TOKEN_ID,) * self.num_prompt_tokens,
            sampling=sampling,
            arrival_ns=self.arrival_ns,
            priority=self.priority,
            deadline_ns=self.deadline_ns,
            tenant=self.tenant,
            predicted_new_tokens=predicted_new_tokens,
        )
