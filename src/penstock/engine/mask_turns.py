"""Chooses which requests with slow grammar masks sit out the next step. Used by `Matchers`.

Slow masks get a tenth of the time, split equally between tenants, and are made in turn. A request that sits out keeps its
blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

SHARE = 10
"""Slow masks get one part in this many of the time."""
_QUICK_SHARE = 2
"""A row's masks are slow if their average exceeds one part in this many of its equal part of the step."""


@dataclass(slots=True)
class _Row:
    """A request with a grammar that has sampled. Times are in nanoseconds."""

    request_id: str
    tenant: str
    due_ns: int
    """When a tenth of the time would have paid for its last mask. A tenant's rows take turns in this order."""
    is_slow: bool = True
    """True until a mask was quick."""
    took_ns: int = 0
    """The last mask's time."""
    average_ns: int = 0
    """Over about 8 masks: those of one schema take 10 to 300 us."""
    accept_ns: int = 0
    """Time to take in the tokens since the last mask."""


class MaskTurns:
    def __init__(self) -> None:
        self.sitting_out: set[str] = set()
        """Ids of requests that get no row in the next step if others have one."""
        self.sitting_out_alone: set[str] = set()
        """Ids of requests that get no row even if no others do. Such a step makes masks for as long as its layers take."""
        self._rows: dict[str, _Row] = {}
        self.made: list[tuple[_Row, int]] = []
        """Masks of the step, with their times."""
        self._left_ns: dict[str, int] = {}
        """Tenant -> time left of its share; negative after a mask that took longer."""
        self._owed_ns = 0
        """Time of masks beyond the tenth, at most that of the longest one. It spaces out the masks of different tenants."""
        self._layers_ns = 0
        """Time of the last step without its masks."""
        self._settled_ns = 0

    def join(self, request_id: str, tenant: str) -> None:
        self._rows[request_id] = _Row(request_id, tenant, due_ns=self._settled_ns)
        if self._left_ns.get(tenant, 0) < 0:
            self.sitting_out.add(request_id)
            self.sitting_out_alone.add(request_id)

    def is_put_off(self, request_id: str) -> bool:
        """Return whether the grammar should take the request's token later, since the request sits out and may be cancelled
        before."""
        return request_id in self.sitting_out and not self._rows[request_id].took_ns

    def note(self, request_id: str, took_ns: int, *, is_mask: bool) -> None:
        """Record the time to make a request's mask, or for its grammar to take tokens. Call `join` first."""
        row = self._rows[request_id]
        row.accept_ns += took_ns
        if is_mask:
            self.made.append((row, row.accept_ns))
            row.accept_ns = 0

    def leave(self, request_id: str) -> None:
        """Forget a request that ended. The time of its masks stays charged to its tenant."""
        if (row := self._rows.pop(request_id, None)) is not None and row.accept_ns:
            self.made.append((row, row.accept_ns))
        self.sitting_out.discard(request_id)
        self.sitting_out_alone.discard(request_id)

    def forgive(self, request_ids: Iterable[str]) -> None:
        """Reduce the mask time that tenants owe by the least that a row's tenant owes, which is 0 if a row has no slow masks.

        If all rows have slow masks, none would get its token sooner if others sat out.
        """
        rows = [self._rows.get(request_id) for request_id in request_ids]
        owed_ns = min([-self._left_ns.get(row.tenant, 0) if row is not None and row.is_slow else 0 for row in rows])
        if owed_ns > 0:
            self._left_ns = {tenant: left_ns + owed_ns for tenant, left_ns in self._left_ns.items()}

    def settle(self, now_ns: int, step_ns: int, num_rows: int, running: Container[str], *, is_beside: bool) -> None:
        """Charge the masks of a step, and choose the requests that sit out the next one.

        `is_beside`: a device computes while masks are made, which hides their time up to a third of a step.
        """
        spent_ns = self._charge(step_ns // (_QUICK_SHARE * num_rows), step_ns // 3 if is_beside else 0)
        passed_ns, self._settled_ns = now_ns - self._settled_ns, now_ns
        slow = sorted([row for row in self._rows.values() if row.is_slow], key=lambda row: row.due_ns)
        slow = [row for row in slow if row.request_id in running]
        places = {tenant: place for place, tenant in enumerate(dict.fromkeys([row.tenant for row in slow]))}
        longest_ns = max([row.took_ns for row in slow], default=0)
        parts = SHARE * max(1, len(places))  # tenants that have left take nothing from the others
        most_ns, paid_ns = max(step_ns // parts, longest_ns), max(1, passed_ns // parts)
        left_ns = {tenant: min(most_ns, self._left_ns.get(tenant, 0) + paid_ns) for tenant in {**self._left_ns, **places}}
        self._left_ns = {tenant: ns for tenant, ns in left_ns.items() if tenant in places or ns < 0}
        turns: list[tuple[int, int, _Row]] = []
        for row in slow:  # (what its tenant owes by then, place of the tenant, row)
            turns.append((-left_ns[row.tenant], places[row.tenant], row))
            left_ns[row.tenant] -= row.took_ns
        turns.sort(key=lambda turn: turn[:2])
        self.sitting_out, self.sitting_out_alone = set(), set()
        layers_ns, planned_ns = max(1, step_ns - spent_ns), 0
        layers_ns, self._layers_ns = min(layers_ns, self._layers_ns), layers_ns
        self._owed_ns = min(max(self._owed_ns - passed_ns // SHARE, -(step_ns // SHARE)), longest_ns)
        for owed_ns, _, row in turns:
            is_over = row.took_ns > 0 and planned_ns + self._owed_ns > 0  # a new row's masks may be quick
            if owed_ns > 0 or is_over:
                self.sitting_out.add(row.request_id)
                if planned_ns >= layers_ns:
                    self.sitting_out_alone.add(row.request_id)
            planned_ns += row.took_ns

    def _charge(self, quick_ns: int, hidden_ns: int) -> int:
        total_ns = max(1, sum([took_ns for _, took_ns in self.made]))
        counted_ns, spent_ns = max(0, total_ns - hidden_ns), 0
        for row, took_ns in self.made:
            cost_ns = took_ns * counted_ns // total_ns
            row.average_ns += (cost_ns - row.average_ns) // (8 if row.took_ns else 1)
            row.took_ns, row.due_ns = took_ns, self._settled_ns + SHARE * took_ns
            row.is_slow = row.average_ns > quick_ns
            if row.is_slow:
                self._left_ns[row.tenant] = self._left_ns.get(row.tenant, 0) - cost_ns
                self._owed_ns += cost_ns
                spent_ns += took_ns
        self.made.clear()
        return spent_ns
