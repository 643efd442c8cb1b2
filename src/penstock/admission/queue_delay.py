"""The check that keeps the time to first token: who would wait longer than the target is sent away at once.

Called by `door`. The expected time is a mean; what is compared is the time that all but 1 % stay below, by the margin that
`margin` has learned. A prompt that alone takes most of the target is judged by its wait: coming back would not help it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.admission.check import DoorView, Refusal
from penstock.admission.margin import Margin
from penstock.types.errors import RejectReason

ROOM_FOR_EXPECTED = 1.5
"""Others must find so many times the room that one needs who comes back as told: such calls come in bunches."""


@dataclass(frozen=True, slots=True)
class QueueDelay:
    margin: Margin

    def refusal(self, view: DoorView) -> Refusal | None:
        target_ns = view.target_ttft_ns
        if target_ns is None or view.is_idle or view.starts_at_once:
            return None
        allowed_ns = target_ns / (self.margin.factor * (1.0 if view.is_expected else ROOM_FOR_EXPECTED))
        excess_ns = view.ttft_ns - view.own_prefill_ns - max(allowed_ns - view.own_prefill_ns, allowed_ns / 2)
        if excess_ns <= 0:
            return None
        detail = (
            f"the queue's delay is over its target: the first token is expected after {view.ttft_ns / 1e9:.2f} s, with the "
            f"usual variation {view.ttft_ns * self.margin.factor / 1e9:.2f} s; the target is {target_ns / 1e9:g} s"
        )
        return Refusal(RejectReason.QUEUE_DELAY, detail, int(excess_ns))
