"""Turns of slow masks: which answers that follow a grammar sit out the next step. `Following` in the engine's core calls it.

All rows of a step wait for the masks of some. Slow masks are made in turn until a tenth of the time is spent, and rows whose
turn has not come sit out: they keep their place and their blocks. Each tenant with slow masks has an equal part of that
tenth. A mask that takes more than is left of it is made all the same, and its tenant waits until the tenth of later steps has
paid for it.

A row's masks are slow if they take more than half of its equal part of the step on average, in CPU time: while the thread
waits, others are the cause. Where a device computes meanwhile, the first third of a step of masks costs nobody anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

SHARE = 10
"""Slow masks have one in so many parts of the time."""
QUICK_SHARE = 2
"""Masks are quick up to one in so many parts of their row's equal part of the step."""
HIDDEN_SHARE = 3
"""One in so many parts of the step is what a device hides of its masks."""
SMOOTH = 8
"""An average follows the last so many masks: those of one schema take 10 us in some places and 300 in others."""


@dataclass(slots=True)
class _Row:
    """A request that has sampled. Times are in nanoseconds."""

    request_id: str
    tenant: str
    due_ns: int
    """When the tenth of the time would have paid for its last mask alone. In this order the rows of a tenant take turns: a row
    with a mask of 5 ms does not hold up one of 0.1 ms for long, and every row has its turn."""
    is_slow: bool = True
    """Until its first mask was quick: the one with which it sampled first came with the grammar."""
    took_ns: int = 0
    """The last mask, as the next one may take so long."""
    average_ns: int = 0
    accept_ns: int = 0
    """Taking in the token after the last mask took so long."""


class MaskTurns:
    """The rows that sit out, and what each tenant may still spend."""

    def __init__(self) -> None:
        self.sitting_out: set[str] = set()
        """Ids of requests that have no row in the next step beside others."""
        self.sitting_out_alone: set[str] = set()
        """Those of them that have none either if nobody else has one. The masks of such a step take as long as its layers, and
        are one at least, so that somebody who comes waits for few."""
        self._rows: dict[str, _Row] = {}
        self._made: list[tuple[_Row, int]] = []
        """The masks since the last `settle`, and what each took."""
        self._left_ns: dict[str, int] = {}
        """Tenant -> what is left of its part of the tenth; below 0 after a mask that took more."""
        self._settled_ns = 0

    def __bool__(self) -> bool:
        """Whether `settle` has something to charge."""
        return bool(self._made)

    def join(self, request_id: str, tenant: str) -> None:
        """A request samples for the first time."""
        self._rows[request_id] = _Row(request_id, tenant, due_ns=self._settled_ns)
        if self._left_ns.get(tenant, 0) < 0:
            self.sitting_out.add(request_id)
            self.sitting_out_alone.add(request_id)

    def is_put_off(self, request_id: str) -> bool:
        """Whether its token is taken in later: it sits out and has made no mask, and its client may leave before its turn."""
        return request_id in self.sitting_out and not self._rows[request_id].took_ns

    def note(self, request_id: str, took_ns: int, *, is_mask: bool) -> None:
        """A mask was made for a request that has joined, or a token was taken in."""
        row = self._rows[request_id]
        row.accept_ns += took_ns
        if is_mask:
            self._made.append((row, row.accept_ns))
            row.accept_ns = 0

    def leave(self, request_id: str) -> None:
        """A request has ended. Its tenant goes on to owe what its masks took."""
        if (row := self._rows.pop(request_id, None)) is not None and row.accept_ns:
            self._made.append((row, row.accept_ns))
        self.sitting_out.discard(request_id)
        self.sitting_out_alone.discard(request_id)

    def forgive(self, request_ids: Iterable[str]) -> None:
        """Before the masks of a step: if all its rows have slow ones, nobody else waits, and what all their tenants owe is
        forgiven."""
        rows = [self._rows.get(request_id) for request_id in request_ids]
        owed_ns = min([-self._left_ns.get(row.tenant, 0) if row is not None and row.is_slow else 0 for row in rows])
        if owed_ns > 0:
            self._left_ns = {tenant: left_ns + owed_ns for tenant, left_ns in self._left_ns.items()}

    def settle(self, now_ns: int, step_ns: int, num_rows: int, running: Container[str], *, is_beside: bool) -> None:
        """Charge masks after a step of this duration and so many rows, and find out who sits out the next one.

        `is_beside`: a device computes while masks are made.
        """
        spent_ns = self._charge(step_ns // (QUICK_SHARE * num_rows), step_ns // HIDDEN_SHARE if is_beside else 0)
        layers_ns = max(1, step_ns - spent_ns)
        passed_ns, self._settled_ns = now_ns - self._settled_ns, now_ns
        self.sitting_out.clear()
        self.sitting_out_alone.clear()
        queues: dict[str, deque[_Row]] = {}
        for row in sorted([row for row in self._rows.values() if row.is_slow], key=lambda row: row.due_ns):
            if row.request_id in running:
                queues.setdefault(row.tenant, deque()).append(row)
        if not (tenants := self._left_ns.keys() | queues.keys()):
            return
        parts = SHARE * max(1, len(queues))  # those who have left and owe take nothing from the others
        most_ns, paid_ns = step_ns // parts, max(1, passed_ns // parts)
        left_ns = {tenant: min(most_ns, self._left_ns.get(tenant, 0) + paid_ns) for tenant in tenants}
        self._left_ns = {tenant: ns for tenant, ns in left_ns.items() if tenant in queues or ns < 0}
        planned_ns = 0
        most_left = [(-left_ns[tenant], place, tenant) for place, tenant in enumerate(queues)]
        heapify(most_left)
        while most_left:
            owed_ns, place, tenant = most_left[0]  # below 0: what is left
            row = queues[tenant].popleft()
            if owed_ns > 0:
                self.sitting_out.add(row.request_id)
                if planned_ns >= layers_ns:
                    self.sitting_out_alone.add(row.request_id)
            planned_ns += row.took_ns
            if queues[tenant]:
                heapreplace(most_left, (owed_ns + row.took_ns, place, tenant))
            else:
                heappop(most_left)

    def _charge(self, quick_ns: int, hidden_ns: int) -> int:
        """Charge the masks that are slow to their tenants. Returns how long they took."""
        total_ns = max(1, sum([took_ns for _, took_ns in self._made]))
        counted_ns, spent_ns = max(0, total_ns - hidden_ns), 0
        for row, took_ns in self._made:
            cost_ns = took_ns * counted_ns // total_ns
            row.average_ns += (cost_ns - row.average_ns) // (SMOOTH if row.took_ns else 1)
            row.took_ns, row.due_ns = took_ns, self._settled_ns + SHARE * took_ns
            row.is_slow = row.average_ns > quick_ns
            if row.is_slow:
                self._left_ns[row.tenant] = self._left_ns.get(row.tenant, 0) - cost_ns
                spent_ns += took_ns
        self._made.clear()
        return spent_ns
