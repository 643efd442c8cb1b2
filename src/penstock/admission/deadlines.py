"""The check that refuses what would come too late: work on it would be lost, for its client and for all others.

Called by `door`. The expected times are means, and an answer may be shorter than predicted, so only what has no chance is
refused: three quarters of the expected time to first token, and the tokens that the answer has at least. On an idle server
nothing is, before its deadline: the times are those of steps that ran, and would stay what they are if nobody came in any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.admission.check import DoorView, Refusal
from penstock.types.errors import RejectReason

LEAST_SHARE = 0.75
"""A first token that comes sooner than this share of the expected time is luck."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    def refusal(self, view: DoorView) -> Refusal | None:
        ask = view.ask
        ttft_ns = int(LEAST_SHARE * view.ttft_ns)
        wait_ns = max(0, ttft_ns - view.own_prefill_ns)
        total_ns = ttft_ns + (ask.min_new_tokens - 1) * view.step_ns
        for reason, what, deadline_ns, least_ns in (
            (RejectReason.QUEUE_TIMEOUT, "it would wait for its turn", ask.queue_deadline_ns, wait_ns),
            (RejectReason.FIRST_TOKEN_TIMEOUT, "its first token would take", ask.first_token_deadline_ns, ttft_ns),
            (RejectReason.DEADLINE, "its answer would take", ask.deadline_ns, total_ns),
        ):
            if deadline_ns is None:
                continue
            if view.now_ns >= deadline_ns or (not view.is_idle and view.now_ns + least_ns > deadline_ns):
                left_ms = max(0.0, (deadline_ns - view.now_ns) / 1e6)
                detail = f"The deadline can't be met: {what} {least_ns / 1e6:.0f} ms at least, and {left_ms:.0f} ms are left."
                return Refusal(reason, detail)
        return None
