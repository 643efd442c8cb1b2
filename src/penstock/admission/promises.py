"""Whom the door has told when to come back: a queue of those who are not here. Kept by `door`, on the event loop.

Everyone who is sent away gets a time of their own: at the earliest when their check is expected to pass, and one place's time
after whoever was sent away before. So they do not come back as a herd, and who comes at its time finds a place:

    told     |--wait--|a  |b  |c  |d ...        one end of a request apart, and a little more
    due               a came back: let in, though others are sent away
                          b did not: its place is kept for `GRACE_NS` and a tenth of its wait, then free for all

Who comes back is recognised by a claim (the server makes it of the body). How many do is learned, and the times are set
closer by that. The arithmetic of the times is that of GCRA's virtual scheduling (ATM Forum, Traffic Management 4.1, 1999).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

GRACE_NS = 2_500_000_000
"""`Retry-After` is in whole seconds, rounded up, and the way takes time, too."""
SPREAD = 1.2
"""Places are announced so much slower than they become free."""
MAX_PROMISES = 8192
"""Beyond it, and beyond the longest time that is announced, times are told and no places kept."""
UNKNOWN_SPACING_NS = 250_000_000
"""Between two times while it is not known how fast places become free."""
MAX_PER_CLAIM = 8
"""Places ahead for calls that look the same: one impatient client must not put off everyone else."""
SHARE_WEIGHT = 0.05
MIN_SHARE = 0.1
"""At least so many are counted on to come back."""


@dataclass(slots=True, eq=False)
class Promise:
    claim: bytes | None
    due_ns: int
    expires_ns: int
    num_blocks: int = 0
    """KV blocks that are kept with the place: who was sent away for lack of them needs more than a place."""
    has_come: bool = False
    """As it was told, once already: it is counted on in full."""
    is_over: bool = False
    """Kept or given up."""

    def __lt__(self, other: Promise) -> bool:
        """Expires first. Who was told a longer time has a longer grace, so this is not the order of the times."""
        return self.expires_ns < other.expires_ns


class Promises:
    def __init__(self) -> None:
        self._later: deque[Promise] = deque()
        """Not due yet, in the order of their times."""
        self._due: list[Promise] = []
        """A heap: who expires first."""
        self._by_claim: dict[bytes, deque[Promise]] = {}
        self._last_due_ns = 0
        self._return_share = 1.0

    def make(
        self,
        claim: bytes | None,
        now_ns: int,
        wait_ns: int,
        ns_per_request: int | None,
        max_wait_ns: int,
        *,
        num_blocks: int = 0,
    ) -> int:
        """Nanoseconds from now after which to come back; a place is kept for then."""
        ahead = [promise for promise in self._by_claim.get(claim, ()) if promise.due_ns > now_ns] if claim is not None else []
        if len(ahead) >= MAX_PER_CLAIM:
            return ahead[0].due_ns - now_ns
        spacing_ns = UNKNOWN_SPACING_NS if ns_per_request is None else SPREAD * self._return_share * ns_per_request
        due_ns = max(now_ns + wait_ns, self._last_due_ns + int(spacing_ns))
        if due_ns - now_ns > max_wait_ns or len(self._later) >= MAX_PROMISES:
            return min(due_ns - now_ns, max_wait_ns)
        self._last_due_ns = due_ns
        promise = Promise(claim, due_ns, _expires_ns(now_ns, due_ns), num_blocks)
        self._later.append(promise)
        if claim is not None:
            self._by_claim.setdefault(claim, deque()).append(promise)
        return due_ns - now_ns

    def find(self, claim: bytes | None, *, is_retry: bool, now_ns: int) -> Promise | None:
        """The promise that this call may come for. One that is not due yet, only if it says itself that it comes again."""
        self._advance(now_ns)
        promises = self._by_claim.get(claim) if claim is not None else None
        if not promises:
            return None
        return promises[0] if is_retry or promises[0].due_ns <= now_ns else None

    def keep(self, promise: Promise) -> None:
        """Its client came and was let in."""
        self._end(promise, came_back=True)

    def give_up(self, promise: Promise) -> None:
        """Its client came at its time and found no place; it gets another promise."""
        self._end(promise, came_back=True)

    def renew(self, promise: Promise, now_ns: int, wait_ns: int, num_blocks: int) -> None:
        """Its client came at its time, and the blocks are not free yet: they are kept from now until it has come once more."""
        self._end(promise, came_back=True)
        renewed = Promise(promise.claim, now_ns, _expires_ns(now_ns, now_ns + wait_ns), num_blocks, has_come=True)
        heappush(self._due, renewed)
        if promise.claim is not None:
            self._by_claim.setdefault(promise.claim, deque()).appendleft(renewed)

    def num_blocks_due(self, now_ns: int) -> int:
        """KV blocks kept now for those who were sent away for lack of them, as far as they are counted on to come."""
        self._advance(now_ns)
        kept = [promise for promise in self._due if promise.num_blocks and not promise.is_over]
        return round(sum(promise.num_blocks * (1.0 if promise.has_come else self._return_share) for promise in kept))

    def num_due(self, now_ns: int) -> int:
        """Places kept now for those whose time has come, as many as are counted on to come."""
        self._advance(now_ns)
        return round(self._return_share * sum(not promise.is_over for promise in self._due))

    def _advance(self, now_ns: int) -> None:
        while self._later and self._later[0].due_ns <= now_ns:
            promise = self._later.popleft()
            if not promise.is_over:
                heappush(self._due, promise)
        while self._due and (self._due[0].is_over or self._due[0].expires_ns <= now_ns):
            promise = heappop(self._due)
            if not promise.is_over:
                self._end(promise, came_back=False)

    def _end(self, promise: Promise, *, came_back: bool) -> None:
        promise.is_over = True
        self._return_share += SHARE_WEIGHT * (came_back - self._return_share)
        self._return_share = max(MIN_SHARE, self._return_share)
        if promise.claim is not None:
            promises = self._by_claim[promise.claim]
            promises.remove(promise)
            if not promises:
                del self._by_claim[promise.claim]


def _expires_ns(now_ns: int, due_ns: int) -> int:
    return due_ns + GRACE_NS + (due_ns - now_ns) // 10
