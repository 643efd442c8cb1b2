"""The check that keeps KV blocks free for growth: what runs must fit at the length that it is expected to reach.

Called by `door`. Only calls with a target of the time to first token are refused: who may wait, waits in the queue, and the
scheduler's reserve holds back who runs. Predicted outputs count, not `max_tokens`: nearly all answers end long before it.
What becomes free is kept for who was told to come back for it: a large call would never find its blocks while small ones
take each that becomes free.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.admission.check import DoorView, Refusal
from penstock.types.errors import RejectReason


@dataclass(frozen=True, slots=True)
class KvHeadroom:
    headroom: float
    """Share of the blocks that stays free at the predicted lengths; (0, 1)."""

    def refusal(self, view: DoorView) -> Refusal | None:
        headroom = self.headroom / 2 if view.is_expected else self.headroom
        num_excess = view.num_blocks_demanded - (1 - headroom) * view.num_blocks_total
        if view.target_ttft_ns is None or view.is_idle or num_excess <= 0:
            return None
        num_ends = -(-num_excess // view.num_blocks_freed)
        wait_ns = None if view.ns_per_request is None else int(num_ends * view.ns_per_request)
        detail = (
            f"the KV cache's headroom is gone: what runs or is expected back needs {view.num_blocks_demanded} of "
            f"{view.num_blocks_total} blocks with this request, and {self.headroom:.0%} are kept free"
        )
        return Refusal(RejectReason.KV_HEADROOM, detail, wait_ns)
