"""A workload: requests as values, with the length of each output. Benchmarks send them, the simulator runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.lab.simulated_executor import EOS_TOKEN_ID, TOKEN_ID
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arrival_ns: int
    num_prompt_tokens: int
    """All tokens of the prompt, those of earlier turns included."""
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    deadline_ns: int | None = None
    """An instant, not a span."""
    cancelled_ns: int | None = None
    cancelled_after_tokens: int | None = None
    after: int | None = None
    """Index of the job before it in the same conversation, smaller than its own. None if it is due by itself."""
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `Workload.prefix_block_tokens` each. Equal ids are equal tokens."""
    prompt: str | None = None
    """The text to send, or the user's new message of a conversation. None: any text of that length."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt's tokens where they matter, else empty."""
    texts: tuple[str, ...] = ()
    """The texts of one request for embeddings, else empty."""

    def request(self, request_id: str, *, max_tokens: int, predicted_new_tokens: int | None = None) -> Request:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    """Its origin, with how it was changed: `azure_conv_2023.csv, lengths / 4`."""
    jobs: Sequence[Job]
    prefix_block_tokens: int = 0
