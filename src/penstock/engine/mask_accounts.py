"""The accounts of the time that masks take: owns which answers that follow a grammar sit out the next steps. The core tells
after each step what every mask took. Reads no clock, and knows neither grammars nor plans.

All rows of a step wait for the masks of some of them. So each row has an own part of the step for its masks: what they take
beyond it is a debt, and what they leave of it pays the debt off. A request that owes more than its own parts of some steps sits
out: it keeps its place and its blocks, and has no row until a tenth of the steps has paid for it.

    own part of a row     a quarter of its equal part of the step (1 / rows), and a tenth of the step at most
    for all debts         a tenth of the step less the own parts that were used, but a quarter of that tenth at least

A debt that all running requests have is none: nobody would gain if some sat out whose masks cost as much as those of others.
Requests that sit out do not count as rows, else own parts would shrink with the steps, and more and more would sit out. The
limit of debts counts them as rows, else it would grow as others sit out.

So masks that take longer than the own parts of their rows take a tenth of the steps in all, however many there are, but for
what each request may owe, and one mask more. Tenants share equally what pays debts, and so do the requests of each; what one
does not need is the others'. A request that sits out makes no more masks, so every request goes on.

The debt of a request that ends passes to the next one of its tenant, so that short requests one after another owe what a long
one would: else a client could leave before it pays, and come again. The next one that owes too much sits out from its first
token, without a mask, so a debt that passes on is not larger than what a request may owe and its last mask. The time that
nobody needs pays debts of requests that ended, too.

A mask is charged the time that it took on the wall, as the others waited for it, but at most twice its CPU time: the thread may
wait for others in the process meanwhile, and no grammar is the cause.
Masks that are made while a device computes cost others only the time by which they take longer than the step. Where the
executor's threads share the cores with the host, masks take one of these threads from the step, and are charged in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

_Key = TypeVar("_Key", bound=Hashable)

STEP_SHARE = 10
"""One in so many parts of a step pays debts."""
ROW_SHARE = 4
"""One in so many parts of a row's equal part of the step is its own. Usual masks take less on average."""
LENT_STEPS = 32
"""A row may owe its own parts of so many steps, as the masks of one schema take 10 us in some places and 300 in others."""
LEAST_SHARE = 4
"""One in so many parts of the tenth pays debts also if usual masks have used it up."""
MAX_WALL = 2
"""So many times its CPU time a mask is charged at most."""
MAX_LEFT = 256
"""Debts of requests that ended which are remembered; the oldest is forgotten first."""


class MadeMask(NamedTuple):
    """The mask that was made for a request."""

    request_id: str
    tenant: str
    wall_ns: int
    busy_ns: int
    """CPU time."""

    @property
    def charge_ns(self) -> int:
        return min(self.wall_ns, MAX_WALL * self.busy_ns)


class MaskAccounts:
    """Debts, and what pays them. Times are in nanoseconds."""

    def __init__(self) -> None:
        self.debts_ns: dict[str, int] = {}
        """Requests -> what they owe, which is never 0."""
        self.sitting_out: set[str] = set()
        """Those that owe too much. Changes with every `settle`."""
        self._tenants: dict[str, str] = {}
        """Those of requests with debts."""
        self._lent_ns = 0
        """The largest debt with which a request does not sit out, after the last step."""
        self._left: deque[tuple[str, int]] = deque(maxlen=MAX_LEFT)
        """Tenants and debts of requests that ended."""
        self._saved_ns = 0
        """Time for debts that is not spent: that of one step at most."""
        self._step_ns = 0
        """The last step, without the time for which it waited for masks."""
        self._last_ns = 0
        """All masks that were made beside it."""

    def begin(self, request_id: str, tenant: str) -> None:
        """A request samples its first token, and takes over a debt of its tenant, if one was left."""
        left = next((entry for entry in self._left if entry[0] == tenant), None)
        if left is not None:
            self._left.remove(left)
            self.debts_ns[request_id], self._tenants[request_id] = left[1], tenant
            if left[1] > self._lent_ns:
                self.sitting_out.add(request_id)

    def end(self, request_id: str) -> None:
        """A request ends, and all its masks were charged."""
        if request_id in self.debts_ns:
            self._left.append((self._tenants[request_id], self.debts_ns[request_id]))
            self._drop(request_id)

    def settle(
        self, made: Sequence[MadeMask], live: Container[str], running: Collection[str], step_ns: int, *, is_beside: bool
    ) -> None:
        """After a step, charge masks, pay debts, and find out who sits out.

        `made`: for this step, or, if the device computes the next one meanwhile (`is_beside`), for that. `live`: ids of
        requests that go on; others end here. `running`: of all that wait for these masks if they do not sit out. `step_ns`:
        duration of the step.
        """
        charges_ns = [mask.charge_ns for mask in made]
        total_ns = sum(charges_ns)
        hidden_ns = 0
        if is_beside:  # the step was as long as its layers, or as the masks that were made beside it
            hidden_ns = step_ns = max(min(step_ns, self._step_ns), step_ns - max(0, self._last_ns - self._step_ns))
        self._step_ns, self._last_ns = step_ns, total_ns
        cost_ns = max(0, total_ns - hidden_ns)
        num_rows = sum([name not in self.sitting_out for name in running])
        own_ns = _own_ns(step_ns, num_rows)
        self._lent_ns = LENT_STEPS * _own_ns(step_ns, len(running))
        used_ns = 0
        for mask, charge_ns in zip(made, charges_ns, strict=True) if cost_ns else ():
            name = mask.request_id
            owed_ns = self.debts_ns.get(name, 0) + charge_ns * cost_ns // total_ns
            used_ns += min(owed_ns, own_ns)
            if owed_ns > own_ns:
                self.debts_ns[name], self._tenants[name] = owed_ns - own_ns, mask.tenant
            elif name in self.debts_ns:
                self._drop(name)
        for mask in made:
            if mask.request_id not in live:
                self.end(mask.request_id)
        tenth_ns = step_ns // STEP_SHARE
        self._saved_ns = min(step_ns, self._saved_ns + max(tenth_ns - used_ns, tenth_ns // LEAST_SHARE, 1))
        if self.debts_ns:
            self._settle_debts(running)
        while self._left and self._saved_ns:
            tenant, debt_ns = self._left.popleft()
            paid_ns = min(debt_ns, self._saved_ns)
            self._saved_ns -= paid_ns
            if debt_ns > paid_ns:
                self._left.appendleft((tenant, debt_ns - paid_ns))

    def forgive(self) -> None:
        """Nobody was there who waited for the masks of others."""
        self.debts_ns.clear()
        self.sitting_out.clear()
        self._tenants.clear()

    def _settle_debts(self, running: Collection[str]) -> None:
        all_owe_ns = min([self.debts_ns.get(name, 0) for name in running], default=0)
        for request_id in running if all_owe_ns else ():
            self._reduce(request_id, all_owe_ns)
        self._pay()
        self.sitting_out.clear()
        self.sitting_out.update([request_id for request_id, debt_ns in self.debts_ns.items() if debt_ns > self._lent_ns])

    def _pay(self) -> None:
        """Pay the parts of debts for which requests sit out."""
        by_tenant: dict[str, dict[str, int]] = {}
        for request_id, debt_ns in self.debts_ns.items():
            if debt_ns > self._lent_ns:
                by_tenant.setdefault(self._tenants[request_id], {})[request_id] = debt_ns - self._lent_ns
        parts_ns = equal_parts(self._saved_ns, {tenant: sum(debts.values()) for tenant, debts in by_tenant.items()})
        for tenant, debts in by_tenant.items():
            for request_id, paid_ns in equal_parts(parts_ns[tenant], debts).items():
                self._saved_ns -= paid_ns
                self._reduce(request_id, paid_ns)

    def _reduce(self, request_id: str, paid_ns: int) -> None:
        self.debts_ns[request_id] -= paid_ns
        if not self.debts_ns[request_id]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self.debts_ns[request_id], self._tenants[request_id]
        self.sitting_out.discard(request_id)


def _own_ns(step_ns: int, num_rows: int) -> int:
    """The part of a step that each of its rows has for its own masks."""
    return step_ns // max(STEP_SHARE, ROW_SHARE * num_rows)


def equal_parts(amount: int, wanted: Mapping[_Key, int]) -> dict[_Key, int]:
    """An amount, shared: to each what it wants, or an equal part of what those leave that want less."""
    parts: dict[_Key, int] = {}
    for key, most in sorted(wanted.items(), key=lambda entry: entry[1]):
        parts[key] = min(most, amount // (len(wanted) - len(parts)))
        amount -= parts[key]
    return parts
