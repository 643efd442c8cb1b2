"""The check that bounds the queue: so many may wait, and no more. Called by `door`; counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.admission.check import DoorView, Refusal
from penstock.types.counted import counted
from penstock.types.errors import RejectReason


@dataclass(frozen=True, slots=True)
class QueueLength:
    max_queue: int
    """Requests that may wait at the same time, >= 1."""

    def refusal(self, view: DoorView) -> Refusal | None:
        num_excess = view.num_waiting + 1 - self.max_queue
        if num_excess <= 0 or view.is_idle:  # places may be kept, but nobody is there
            return None
        wait_ns = None if view.ns_per_request is None else num_excess * view.ns_per_request
        waiting = counted(view.num_waiting, "request is", "requests are")
        detail = f"the queue is full: {waiting} waiting or expected back, at most {self.max_queue} may"
        return Refusal(RejectReason.QUEUE_FULL, detail, wait_ns)
